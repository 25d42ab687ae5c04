//! A slot as a checkpoint or an export keeps it: whole or only what has changed, and of one instant.
//!
//! A whole slot may be large, and pushes wait while it is read. So it is copied piece by
//! piece, with pushes in between, and in the end what has changed meanwhile is copied once more:
//! the copy is of the instant of that last, short step. What has changed is known by marks, of
//! which a new generation begins with the copy.

use std::collections::BTreeSet;

use super::slot_copy::SlotMemory;
use super::Engine;
use crate::error::Refusal;
use crate::marks::{Purpose, Since};
use crate::table::{RowLayout, Table};

/// So many changes of a slot go into an increment as changes, even if they are all its rows. Who
/// keeps rows by key, such as a topic, would have to look for the rows that a whole slot lacks.
const FEW_CHANGES: usize = 4096;

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
    /// Of an export: which of the snapshots of its rows it is.
    number: u64,
}

impl TableSnapshot {
    /// What changed in a slot; or, if that is not asked for, a copy to be filled with all its rows.
    fn of(id: u64, table: &Table, slot: u32, purpose: Purpose, changed: Option<Since>) -> Self {
        let words = changed.map(|since| table.copy_changed(slot, purpose, since));
        let deleted = changed.map(|since| table.removed_in(slot, purpose, since));
        Self {
            table: id,
            layout: table.layout(),
            words: words.unwrap_or_default(),
            deleted: deleted.unwrap_or_default(),
            number: 0,
        }
    }
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
    purpose: Purpose,
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
                let (rows, changed) = table.changed_in(slot, Purpose::Checkpoint, since)?;
                Some((sum.0 + rows, sum.1 + changed))
            });
            counts.is_some_and(|(rows, changed)| changed < rows)
        });
        let table = |(&id, table): (&u64, &Table)| {
            TableSnapshot::of(id, table, slot, Purpose::Checkpoint, changed)
        };
        let tables = self.tables.iter().map(table).collect();
        let kept = since.unwrap_or(Since::Recent);
        for table in self.tables.values_mut() {
            table.begin_generation(slot, kept);
        }
        self.slots[index].spans = spans.begun(position, kept);
        SlotSnapshot {
            slot,
            memory: self.memory(slot),
            whole: changed.is_none(),
            tables,
            purpose: Purpose::Checkpoint,
            number: spans.number + 1,
        }
    }

    /// Keep account of what changes in these tables for exports, from now on or going on, and in
    /// no others.
    pub fn track_exports(&mut self, tables: &BTreeSet<u64>) {
        self.exports_tracked += 1;
        // A snapshot of an account that ended must not pass for one of the next.
        let number = self.exports_tracked << 32;
        let (slots, first) = (&self.slots, self.first_slot);
        for (id, table) in &mut self.tables {
            table.track_export(tables.contains(id), number, |slot| {
                slots[(slot - first) as usize].position
            });
        }
    }

    /// Begin to copy a slot of some tables for an export, as [`Self::begin_snapshot`], but few
    /// changes always as such. None if no account is kept of them yet. Streams are left out of its
    /// memory.
    pub fn begin_export(
        &mut self,
        slot: u32,
        base: Option<u64>,
        tables: &[u64],
    ) -> Option<SlotSnapshot> {
        let position = self.slots[self.index(slot)].position;
        let mut counted = Some((0, 0));
        let mut spans = Vec::with_capacity(tables.len());
        for id in tables {
            let table = self.tables.get(id)?;
            let known = table.export_spans(slot)?;
            let since = base.and_then(|base| known.since(base));
            let changed = since.and_then(|since| table.changed_in(slot, Purpose::Export, since));
            counted = counted
                .zip(changed)
                .map(|(sum, more)| (sum.0 + more.0, sum.1 + more.1));
            spans.push((*id, known, since));
        }
        let is_same = base == Some(position);
        let is_part = is_same
            || counted.is_some_and(|(rows, changed)| changed < rows || changed <= FEW_CHANGES);
        let mut copied = Vec::with_capacity(tables.len());
        for (id, known, since) in spans.into_iter().filter(|_| !is_same) {
            let table = self.tables.get_mut(&id)?;
            let changed = since.filter(|_| is_part);
            let mut copy = TableSnapshot::of(id, table, slot, Purpose::Export, changed);
            copy.number = known.number + 1;
            copied.push(copy);
            // A base must not cut off what the increments beside it build on.
            let all = known.earlier.map_or(Since::Recent, |_| Since::Earlier);
            table.begin_increment(slot, position, since.unwrap_or(all));
        }
        Some(SlotSnapshot {
            slot,
            memory: self.instant(slot),
            whole: !is_part,
            tables: copied,
            purpose: Purpose::Export,
            number: 0,
        })
    }

    /// A complete element of the export has a slot of some tables up to `position`. A replica that is
    /// no master makes no increments, and without this it would know ever more to be changed.
    pub fn export_completed(&mut self, slot: u32, position: u64, tables: &[u64]) {
        let now = self.slots[self.index(slot)].position;
        for id in tables {
            let Some(table) = self.tables.get_mut(id) else {
                continue;
            };
            let known = table.export_spans(slot).map(|spans| spans.recent);
            // What is built on that element is known from where the recent marks begin.
            if known.is_some_and(|begun| begun <= position && begun < now) {
                table.begin_increment(slot, now, Since::Recent);
            }
        }
    }

    /// Position and time of a slot.
    fn instant(&self, slot: u32) -> SlotMemory {
        let slot = &self.slots[self.index(slot)];
        SlotMemory {
            position: slot.position,
            time: slot.time,
            ..SlotMemory::default()
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
            self.bring_up_to_date(snapshot);
        }
        let tells = |table: &TableSnapshot| !table.words.is_empty() || !table.deleted.is_empty();
        snapshot.tables.retain(tells);
        true
    }

    fn bring_up_to_date(&self, snapshot: &mut SlotSnapshot) {
        let (slot, purpose) = (snapshot.slot, snapshot.purpose);
        if purpose == Purpose::Checkpoint {
            let known: Vec<u64> = snapshot.tables.iter().map(|table| table.table).collect();
            let since = self.tables.iter().filter(|(id, _)| !known.contains(id));
            // Created since.
            let copies =
                since.map(|(&id, table)| TableSnapshot::of(id, table, slot, purpose, None));
            snapshot.tables.extend(copies);
        }
        for table in &mut snapshot.tables {
            if let Some(content) = self.tables.get(&table.table) {
                content.patch(slot, purpose, &mut table.words);
            }
        }
        snapshot.memory = match purpose {
            Purpose::Checkpoint => self.memory(slot),
            Purpose::Export => self.instant(slot),
        };
    }

    fn is_newest(&self, snapshot: &SlotSnapshot) -> bool {
        let slot = snapshot.slot;
        match snapshot.purpose {
            Purpose::Checkpoint => self.slots[self.index(slot)].spans.number == snapshot.number,
            Purpose::Export => snapshot.tables.iter().all(|copy| {
                let table = self.tables.get(&copy.table);
                let spans = table.and_then(|table| table.export_spans(slot));
                spans.is_some_and(|spans| spans.number == copy.number)
            }),
        }
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
