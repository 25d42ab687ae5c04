//! How a replica reaches the rows: one engine in a simulator, many under locks in a server.

use std::cell::RefCell;
use std::sync::Arc;

use crate::engine::{
    CopyPiece, CopyReader, Engine, ServingState, SlotCopy, SlotMemory, StageReport, Staged,
};
use crate::error::Refusal;
use crate::life::Gone;
use crate::table::PlainRows;
use crate::transaction::{StagedRun, Transaction};

/// The rows of a node. Each call is one step: what it reads or changes in a slot is of one
/// instant. [`Self::commit`] may run beside all others; the rest is called one at a time.
pub trait Rows {
    /// See [`crate::engine::Engine::admit`]; over all slots of the transaction.
    fn admit(
        &self,
        transaction: &Transaction,
        places: &mut Vec<StagedRun>,
    ) -> Result<StageReport, Refusal>;
    /// See [`crate::engine::Engine::stage`]; all places or none.
    fn stage(
        &self,
        transaction: &Arc<Transaction>,
        places: &[StagedRun],
        tag: u64,
    ) -> Option<StagedRun>;
    /// Refuse a transaction of another node that this one could not apply: an unknown table,
    /// no room for its rows.
    fn check(&self, transaction: &Transaction) -> Result<(), Refusal>;
    /// See [`crate::engine::Engine::commit`].
    fn commit(&self, transaction: &Arc<Transaction>, places: &[StagedRun])
        -> Result<Gone, Refusal>;
    /// See [`crate::engine::Engine::commit_through`].
    fn commit_through(&self, slot: u32, position: u64) -> Result<(), Refusal>;
    /// See [`crate::engine::Engine::discard_from`].
    fn discard_from(&self, slot: u32, position: u64);
    /// Position, and position with what is staged.
    fn position(&self, slot: u32) -> (u64, u64);
    /// What is staged in a slot.
    fn staged(&self, slot: u32) -> Vec<Staged>;
    /// See [`crate::engine::Engine::retag`].
    fn retag(&self, slot: u32, tag: u64);
    /// The routing version that refusals name.
    fn set_version(&self, version: u64);
    /// What this node is to a slot.
    fn serving_state(&self, slot: u32) -> ServingState;
    /// Change it.
    fn set_serving_state(&self, slot: u32, state: ServingState);
    /// See [`crate::engine::Engine::set_epoch`].
    fn set_epoch(&self, slot: u32, epoch: u64);
    /// See [`crate::engine::Engine::begin_copy`].
    fn begin_copy(&self, slot: u32) -> SlotCopy;
    /// See [`crate::engine::Engine::read_copy`].
    fn read_copy(&self, slot: u32, reader: &mut CopyReader, most: u64) -> CopyPiece;
    /// See [`crate::engine::Engine::clear_slot`].
    fn clear_slot(&self, slot: u32);
    /// See [`crate::engine::Engine::check_memory`].
    fn check_memory(&self, slot: u32, memory: &SlotMemory) -> Result<(), Refusal>;
    /// See [`crate::engine::Engine::set_memory`].
    fn set_memory(&self, slot: u32, memory: &SlotMemory);
    /// Refuse a copy of a slot that is whole if the rows that came with it leave no room for the
    /// new rows of the pushes `behind` it: of each, its table and its keys.
    fn check_behind<'a>(
        &self,
        slot: u32,
        behind: impl Iterator<Item = (u64, &'a [u64])>,
    ) -> Result<(), Refusal>;
    /// See [`crate::engine::Engine::add_rows`].
    fn add_rows(&self, slot: u32, table: u64, rows: &PlainRows) -> Result<(), Refusal>;
}

/// The rows of one engine over all slots: for simulators and tests.
#[derive(Debug, Clone)]
pub struct LocalRows(pub RefCell<Engine>);

impl Rows for LocalRows {
    fn admit(
        &self,
        transaction: &Transaction,
        places: &mut Vec<StagedRun>,
    ) -> Result<StageReport, Refusal> {
        self.0
            .borrow()
            .admit(transaction, transaction.runs(), places)
    }

    fn stage(
        &self,
        transaction: &Arc<Transaction>,
        places: &[StagedRun],
        tag: u64,
    ) -> Option<StagedRun> {
        self.0.borrow_mut().stage(transaction, places, tag)
    }

    fn check(&self, transaction: &Transaction) -> Result<(), Refusal> {
        self.0.borrow().check(transaction)
    }

    fn commit(
        &self,
        transaction: &Arc<Transaction>,
        places: &[StagedRun],
    ) -> Result<Gone, Refusal> {
        self.0.borrow_mut().commit(transaction, places)
    }

    fn commit_through(&self, slot: u32, position: u64) -> Result<(), Refusal> {
        self.0.borrow_mut().commit_through(slot, position)
    }

    fn discard_from(&self, slot: u32, position: u64) {
        self.0.borrow_mut().discard_from(slot, position);
    }

    fn position(&self, slot: u32) -> (u64, u64) {
        self.0.borrow().place(slot)
    }

    fn staged(&self, slot: u32) -> Vec<Staged> {
        self.0.borrow().staged(slot).cloned().collect()
    }

    fn retag(&self, slot: u32, tag: u64) {
        self.0.borrow_mut().retag(slot, tag);
    }

    fn set_version(&self, version: u64) {
        self.0.borrow_mut().set_version(version);
    }

    fn serving_state(&self, slot: u32) -> ServingState {
        self.0.borrow().serving_state(slot)
    }

    fn set_serving_state(&self, slot: u32, state: ServingState) {
        self.0.borrow_mut().set_serving_state(slot, state);
    }

    fn set_epoch(&self, slot: u32, epoch: u64) {
        self.0.borrow_mut().set_epoch(slot, epoch);
    }

    fn begin_copy(&self, slot: u32) -> SlotCopy {
        self.0.borrow_mut().begin_copy(slot)
    }

    fn read_copy(&self, slot: u32, reader: &mut CopyReader, most: u64) -> CopyPiece {
        self.0.borrow_mut().read_copy(slot, reader, most)
    }

    fn clear_slot(&self, slot: u32) {
        self.0.borrow_mut().clear_slot(slot);
    }

    fn check_memory(&self, _: u32, memory: &SlotMemory) -> Result<(), Refusal> {
        self.0.borrow().check_memory(memory)
    }

    fn set_memory(&self, slot: u32, memory: &SlotMemory) {
        self.0.borrow_mut().set_memory(slot, memory);
    }

    fn check_behind<'a>(
        &self,
        _: u32,
        _: impl Iterator<Item = (u64, &'a [u64])>,
    ) -> Result<(), Refusal> {
        Ok(())
    }

    fn add_rows(&self, slot: u32, table: u64, rows: &PlainRows) -> Result<(), Refusal> {
        let rows = (&rows.0[..], &rows.1[..], &rows.2[..]);
        self.0.borrow_mut().add_rows(table, slot, rows)
    }
}
