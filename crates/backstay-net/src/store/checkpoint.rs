//! The store as checkpoints and running exports reach it.

use std::collections::BTreeSet;

use backstay_core::engine::{Engine, ServingState, SlotSnapshot};
use backstay_core::error::Refusal;
use backstay_core::table::SlotRows;

use super::room::{Coming, Room};
use super::Store;

/// Rows of a slot that are copied while pushes wait: some hundred KB.
const ROWS_AT_ONCE: usize = 2048;

/// All rows of a slot in one table, on their way into it.
#[derive(Debug)]
pub struct PreparedRows {
    slot: u32,
    table: u64,
    rows: SlotRows,
    /// Promised until they count as allocated.
    _room: Option<Room>,
}

impl Store {
    /// Keep account of what changes in these tables for exports, and in no others.
    pub fn track_exports(&self, tables: &BTreeSet<u64>) {
        for stripe in 0..self.stripes.len() {
            self.write(stripe, None, |engine| engine.track_exports(tables));
        }
    }

    /// A complete element of an export of these tables has slots up to these positions. For slots
    /// that are not served here; see `Engine::export_completed`.
    pub fn export_completed(&self, positions: &[u64], tables: &[u64]) {
        for (slot, &position) in (0..self.space.count()).zip(positions) {
            if self.stripe_of(slot).is_ok() {
                self.write(self.stripe(slot), None, |engine| {
                    if engine.serving_state(slot) != ServingState::Serving {
                        engine.export_completed(slot, position, tables);
                    }
                });
            }
        }
    }

    /// Copy a slot that is served here; None if it is not. All of it for a checkpoint, or these
    /// tables for an export. See `Engine::begin_snapshot` and `Engine::begin_export`.
    pub fn snapshot(
        &self,
        slot: u32,
        base: Option<u64>,
        exported: Option<&[u64]>,
    ) -> Option<SlotSnapshot> {
        self.stripe_of(slot).ok()?;
        let engine = &self.stripes[self.stripe(slot)];
        let serves = |engine: &Engine| engine.serving_state(slot) == ServingState::Serving;
        let mut snapshot = self.write(self.stripe(slot), None, |engine| {
            if !serves(engine) {
                return None;
            }
            match exported {
                None => Some(engine.begin_snapshot(slot, base)),
                Some(tables) => engine.begin_export(slot, base, tables),
            }
        })?;
        // Pushes go on between two pieces; a fair lock lets waiting pushes go first.
        while engine.read().copy_more(&mut snapshot, ROWS_AT_ONCE) {}
        let engine = engine.read();
        (serves(&engine) && engine.finish_snapshot(&mut snapshot)).then_some(snapshot)
    }

    /// For each slot, the bytes that its rows take in a checkpoint; 0 for those not held here.
    pub fn slot_bytes(&self) -> Vec<u64> {
        let mut bytes = Vec::with_capacity(self.space.count() as usize);
        for stripe in &self.stripes {
            let engine = stripe.read();
            bytes.extend(engine.slots().map(|slot| engine.slot_bytes(slot)));
        }
        bytes
    }

    /// Weights and words of optimizer state in a row of a table.
    pub fn row_shape(&self, table: u64) -> Result<(usize, usize), Refusal> {
        let engine = self.stripes[0].read();
        let layout = engine.table(table)?.layout();
        Ok((layout.elements, layout.state_words))
    }

    /// Put all rows of a slot together, within the memory limit and with nothing locked;
    /// [`Self::take_rows`] is to follow.
    pub fn prepare_rows(
        &self,
        slot: u32,
        table: u64,
        rows: (&[u64], &[f32], &[f32]),
    ) -> Result<PreparedRows, Refusal> {
        let room = self.room_for(slot, table, rows.0, Coming::Copied)?;
        let layout = self.stripe_of(slot)?.read().table(table)?.layout();
        let rows = layout.slot_rows(self.space, slot, rows)?;
        Ok(PreparedRows {
            slot,
            table,
            rows,
            _room: room,
        })
    }

    /// Make them the rows of their slot.
    pub fn take_rows(&self, prepared: PreparedRows) -> Result<(), Refusal> {
        let PreparedRows {
            slot, table, rows, ..
        } = prepared;
        self.write(self.stripe(slot), Some(table), |engine| {
            engine.replace_rows(table, rows)
        })
    }

    /// Put rows into a slot, within the memory limit; see `Engine::put_rows`.
    pub fn put_rows(
        &self,
        slot: u32,
        table: u64,
        rows: (&[u64], &[f32], &[f32]),
    ) -> Result<(), Refusal> {
        let _room = self.room_for(slot, table, rows.0, Coming::Copied)?;
        self.write(self.stripe(slot), Some(table), |engine| {
            engine.put_rows(table, slot, rows)
        })
    }

    /// See `Engine::remove_rows`.
    pub fn remove_rows(&self, slot: u32, table: u64, keys: &[u64]) -> Result<(), Refusal> {
        self.write(self.stripe(slot), Some(table), |engine| {
            engine.remove_rows(table, slot, keys)
        })
    }
}
