//! A slot as a checkpoint keeps it: whole or only what has changed, and of one instant.
//!
//! A whole slot may be large, and pushes wait while it is read. So it is copied piece by
//! piece, with pushes in between, and in the end what has changed meanwhile is copied once more:
//! the copy is of the instant of that last, short step. What has changed is known by marks, of
//! which a new generation begins with the copy.

use super::slot_copy::SlotMemory;
use super::Engine;
use crate::error::Refusal;
use crate::marks::{Since, Spans};
use crate::table::{RowLayout, Table};

/// The rows of one table in a slot.
#[derive(Debug, Clone)]
pub struct TableSnapshot {
    /// The table's id.
    pub table: u64,
    /// How to take the rows apart.
    pub layout: RowLayout,
    /// As they lie in memory, one after the other.
    pub words: Vec<u32>,
    /// Keys whose rows went, of a copy of what has changed; ascending.
    pub deleted: Vec<u64>,
}

/// See the module's documentation.
#[derive(Debug, Clone)]
pub struct SlotSnapshot {
    /// Which slot.
    pub slot: u32,
    /// Its position and its streams, of the same instant as the rows.
    pub memory: SlotMemory,
    /// Whether these are all rows; else only what changed or went since the position asked for.
    pub whole: bool,
    /// Tables with rows to tell of.
    pub tables: Vec<TableSnapshot>,
    /// Which of the slot's snapshots it is: an earlier one cannot be finished.
    number: u64,
}

impl Engine {
    /// Begin to copy a slot: what has changed since position `base`, or all of it if that is not
    /// asked for, is not known, or would be no less.
    ///
    /// What has changed up to now stays known until the next snapshot: this one may never become
    /// part of a checkpoint.
    pub fn begin_snapshot(&mut self, slot: u32, base: Option<u64>) -> SlotSnapshot {
        let index = self.index(slot);
        let (spans, position) = (self.slots[index].spans, self.slots[index].position);
        let since = base.and_then(|base| spans.since(base));
        let changed = since.filter(|&since| {
            let mut tables = self.tables.values();
            let counts = tables.try_fold((0, 0), |sum, table| {
                let (rows, changed) = table.changed_in(slot, since)?;
                Some((sum.0 + rows, sum.1 + changed))
            });
            counts.is_some_and(|(rows, changed)| changed < rows)
        });
        let table = |(&table, content): (&u64, &Table)| TableSnapshot {
            table,
            layout: content.layout(),
            words: changed.map_or_else(Vec::new, |since| content.copy_changed(slot, since)),
            deleted: changed.map_or_else(Vec::new, |since| content.removed_in(slot, since)),
        };
        let tables = self.tables.iter().map(table).collect();
        let kept = since.unwrap_or(Since::Recent);
        for table in self.tables.values_mut() {
            table.begin_generation(slot, kept);
        }
        let earlier = match kept {
            Since::Recent => Some(spans.recent),
            Since::Earlier => spans.earlier,
        };
        self.slots[index].spans = Spans {
            recent: position,
            earlier,
            number: spans.number + 1,
        };
        SlotSnapshot {
            slot,
            memory: self.memory(slot),
            whole: changed.is_none(),
            tables,
            number: spans.number + 1,
        }
    }

    /// Copy some more rows of a slot that is copied whole; whether there are more.
    pub fn copy_more(&self, snapshot: &mut SlotSnapshot, rows: usize) -> bool {
        if !snapshot.whole || !self.is_newest(snapshot) {
            return false;
        }
        let slot = snapshot.slot;
        let more = |table: &mut TableSnapshot| {
            let content = self.tables.get(&table.table);
            content.is_some_and(|content| content.copy_more(slot, &mut table.words, rows))
        };
        snapshot.tables.iter_mut().any(more)
    }

    /// Bring a copy to the state of now. False if it is of no use: the slot's content was replaced
    /// meanwhile, or another snapshot of it has begun.
    pub fn finish_snapshot(&self, snapshot: &mut SlotSnapshot) -> bool {
        if !self.is_newest(snapshot) {
            return false;
        }
        if snapshot.whole {
            let known: Vec<u64> = snapshot.tables.iter().map(|table| table.table).collect();
            for (&table, content) in self.tables.iter().filter(|(id, _)| !known.contains(id)) {
                // Created since.
                snapshot.tables.push(TableSnapshot {
                    table,
                    layout: content.layout(),
                    words: Vec::new(),
                    deleted: Vec::new(),
                });
            }
            for table in &mut snapshot.tables {
                if let Some(content) = self.tables.get(&table.table) {
                    content.patch(snapshot.slot, &mut table.words);
                }
            }
            snapshot.memory = self.memory(snapshot.slot);
        }
        let tells = |table: &TableSnapshot| !table.words.is_empty() || !table.deleted.is_empty();
        snapshot.tables.retain(tells);
        true
    }

    fn is_newest(&self, snapshot: &SlotSnapshot) -> bool {
        self.slots[self.index(snapshot.slot)].spans.number == snapshot.number
    }

    /// Put rows into one slot of a table: each is new, or replaces the one of its key.
    pub fn put_rows(
        &mut self,
        table: u64,
        slot: u32,
        rows: (&[u64], &[f32], &[f32]),
    ) -> Result<(), Refusal> {
        self.table_mut(table)?
            .put_rows(slot, rows.0, rows.1, rows.2)
    }

    /// Remove rows from one slot of a table.
    pub fn remove_rows(&mut self, table: u64, slot: u32, keys: &[u64]) -> Result<(), Refusal> {
        self.table_mut(table)?.remove_rows(slot, keys)
    }

    /// Bytes that one slot's rows take in a checkpoint.
    pub fn slot_bytes(&self, slot: u32) -> u64 {
        let bytes = |table: &Table| (table.rows_in(slot) * table.layout().stride() * 4) as u64;
        self.tables.values().map(bytes).sum()
    }
}
