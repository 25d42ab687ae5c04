//! The store as the replication state machine reaches it: stripe by stripe.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use std::sync::Arc;

use backstay_core::engine::{
    CopyPiece, CopyReader, ServingState, SlotCopy, SlotMemory, StageReport, Staged,
};
use backstay_core::error::Refusal;
use backstay_core::life::Gone;
use backstay_core::replication::Rows;
use backstay_core::table::PlainRows;
use backstay_core::transaction::{StagedRun, Transaction};

use super::room::{Coming, NoRoom};
use super::Store;

impl Rows for Store {
    fn admit(
        &self,
        transaction: &Transaction,
        places: &mut Vec<StagedRun>,
    ) -> Result<StageReport, Refusal> {
        let mut report = StageReport::default();
        for (stripe, runs) in self.stripes_of(transaction.runs()) {
            report += self.stripes[stripe]
                .read()
                .admit(transaction, runs, places)?;
        }
        Ok(report)
    }

    fn stage(
        &self,
        transaction: &Arc<Transaction>,
        places: &[StagedRun],
        tag: u64,
    ) -> Option<StagedRun> {
        // Only commits run beside this, and they open no gap.
        for (stripe, part) in self.stripes_of_places(places) {
            let gap = self.stripes[stripe].read().gap(part);
            if gap.is_some() {
                return gap;
            }
        }
        for (stripe, part) in self.stripes_of_places(places) {
            self.stripes[stripe].write().stage(transaction, part, tag);
        }
        None
    }

    fn check(&self, transaction: &Transaction) -> Result<(), Refusal> {
        for (stripe, _) in self.stripes_of(transaction.runs()) {
            self.stripes[stripe].read().check(transaction)?;
        }
        if let Some(NoRoom(refusal)) = transaction.attachment() {
            return Err(refusal.clone());
        }
        if self.has_memory_limit() && !transaction.has_attachment() {
            return Err(self.no_room(self.growth_bytes(transaction, transaction.runs())?));
        }
        Ok(())
    }

    fn commit(
        &self,
        transaction: &Arc<Transaction>,
        places: &[StagedRun],
    ) -> Result<Gone, Refusal> {
        let mut gone = Gone::default();
        for (stripe, part) in self.stripes_of_places(places) {
            gone += self.write(stripe, None, |engine| engine.commit(transaction, part))?;
        }
        Ok(gone)
    }

    fn commit_through(&self, slot: u32, position: u64) -> Result<(), Refusal> {
        if self.position(slot).0 >= position {
            return Ok(());
        }
        self.write(self.stripe(slot), None, |engine| {
            engine.commit_through(slot, position)
        })
    }

    fn discard_from(&self, slot: u32, position: u64) {
        self.stripes[self.stripe(slot)]
            .write()
            .discard_from(slot, position);
    }

    fn position(&self, slot: u32) -> (u64, u64) {
        self.stripes[self.stripe(slot)].read().place(slot)
    }

    fn staged(&self, slot: u32) -> Vec<Staged> {
        let engine = self.stripes[self.stripe(slot)].read();
        engine.staged(slot).cloned().collect()
    }

    fn retag(&self, slot: u32, tag: u64) {
        self.stripes[self.stripe(slot)].write().retag(slot, tag);
    }

    fn set_version(&self, version: u64) {
        for stripe in &self.stripes {
            stripe.write().set_version(version);
        }
        self.routing_version.store(version, Ordering::Release);
    }

    fn serving_state(&self, slot: u32) -> ServingState {
        self.stripes[self.stripe(slot)].read().serving_state(slot)
    }

    fn set_serving_state(&self, slot: u32, state: ServingState) {
        self.stripes[self.stripe(slot)]
            .write()
            .set_serving_state(slot, state);
    }

    fn set_epoch(&self, slot: u32, epoch: u64) {
        self.stripes[self.stripe(slot)]
            .write()
            .set_epoch(slot, epoch);
    }

    fn begin_copy(&self, slot: u32) -> SlotCopy {
        self.stripes[self.stripe(slot)].write().begin_copy(slot)
    }

    fn read_copy(&self, slot: u32, reader: &mut CopyReader, most: u64) -> CopyPiece {
        let stripe = self.stripe(slot);
        let mut engine = self.stripes[stripe].write();
        let piece = engine.read_copy(slot, reader, most);
        self.count_kept(stripe, &mut engine);
        piece
    }

    fn clear_slot(&self, slot: u32) {
        self.write(self.stripe(slot), None, |engine| engine.clear_slot(slot));
    }

    fn check_memory(&self, slot: u32, memory: &SlotMemory) -> Result<(), Refusal> {
        self.stripes[self.stripe(slot)].read().check_memory(memory)
    }

    fn set_memory(&self, slot: u32, memory: &SlotMemory) {
        self.write(self.stripe(slot), None, |engine| {
            engine.set_memory(slot, memory);
        });
    }

    fn check_behind<'a>(
        &self,
        slot: u32,
        behind: impl Iterator<Item = (u64, &'a [u64])>,
    ) -> Result<(), Refusal> {
        if !self.has_memory_limit() {
            return Ok(());
        }
        // A row that many of them touch is created once.
        let mut tables: BTreeMap<u64, BTreeSet<u64>> = BTreeMap::new();
        for (table, keys) in behind.filter(|(_, keys)| !keys.is_empty()) {
            tables.entry(table).or_default().extend(keys);
        }
        let mut rooms = Vec::with_capacity(tables.len());
        for (table, keys) in tables {
            let keys: Vec<u64> = keys.into_iter().collect();
            rooms.push(self.room_for(slot, table, &keys, Coming::Pushed)?);
        }
        Ok(())
    }

    fn add_rows(&self, slot: u32, table: u64, rows: &PlainRows) -> Result<(), Refusal> {
        let _room = self.room_for(slot, table, &rows.0, Coming::Copied)?;
        let rows = (&rows.0[..], &rows.1[..], &rows.2[..]);
        self.write(self.stripe(slot), Some(table), |engine| {
            engine.add_rows(table, slot, rows)
        })
    }
}
