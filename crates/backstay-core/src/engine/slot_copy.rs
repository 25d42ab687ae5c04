//! Slots as a whole: compared, copied, taken in, forgotten.
//!
//! A copy for another node is of one instant, and is read piece by piece: a slot may be larger
//! than what pushes can wait for. A push that changes a row before it is read keeps the old row
//! ([`crate::row_map`]).

use std::sync::Arc;

use super::{Engine, Staged};
use crate::error::Refusal;
use crate::hash::mix64;
use crate::row_map::ReadingToken;
use crate::stream::{StreamId, StreamWindow};
use crate::table::{PlainRows, SlotRows};

/// Everything of one slot but its rows: they are too many to travel in one piece.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SlotMemory {
    /// How many transactions have been applied.
    pub position: u64,
    /// What streams have applied; one that was closed may be among them.
    pub streams: Vec<(StreamId, StreamWindow)>,
    /// The streams that were closed, in the order of closing: the oldest are forgotten first.
    pub closed: Vec<StreamId>,
    /// The highest time of its transactions, of tables with a lifetime.
    pub time: u32,
    /// Update transactions that have been applied, by table; those of none are left out.
    pub updates: Vec<(u64, u64)>,
}

/// Reads the rows of a copy. The copy is over when it is dropped.
#[derive(Debug, Clone, Default)]
pub struct CopyReader {
    /// Each table with rows that are left to be read, and the bytes of a row.
    tables: Vec<(u64, usize, u64)>,
    token: Arc<ReadingToken>,
}

impl CopyReader {
    /// What is left to be read.
    pub fn bytes_left(&self) -> u64 {
        let tables = self.tables.iter();
        tables.map(|(_, rows, bytes)| *rows as u64 * bytes).sum()
    }

    /// Stop reading.
    pub fn stop(&mut self) {
        *self = Self::default();
    }
}

/// A slot as it is copied to another node.
#[derive(Debug, Clone, Default)]
pub struct SlotCopy {
    /// Its order and its streams.
    pub memory: SlotMemory,
    /// Its rows, yet to be read.
    pub rows: CopyReader,
    /// What is staged behind it.
    pub staged: Vec<Staged>,
}

/// What comes next of a copy.
#[derive(Debug)]
pub enum CopyPiece {
    /// Rows of a table.
    Rows(u64, PlainRows),
    /// Nothing.
    End,
    /// The slot's content was replaced meanwhile: the copy is of no use.
    Gone,
}

impl Engine {
    /// A hash of a slot's rows and memory; equal replicas have equal digests, whatever the order in
    /// which their rows were created. Its counts of updates are among that, because what a push does may
    /// go by them; after a restore they begin anew.
    pub fn digest(&self, slot: u32) -> u64 {
        let rows = self.tables.values().fold(0u64, |sum, table| {
            sum.wrapping_add(mix64(table.id() ^ table.digest_slot(slot)))
        });
        let streams = self.streams.of_slot(self.index(slot));
        let mix = |hash: u64, words: &[u64]| {
            let next = |hash: u64, &word: &u64| mix64(hash.rotate_left(5) ^ word);
            words.iter().fold(hash, next)
        };
        let task = |stream: StreamId| u64::from(stream.pass) << 32 | u64::from(stream.task);
        let open = streams.fold(rows, |hash, (stream, window)| {
            let applied = (window.applied as u64, (window.applied >> 64) as u64);
            let words = [stream.job, task(stream), window.floor, applied.0, applied.1];
            mix(hash, &words)
        });
        let closed = self.streams.closed_in(self.index(slot));
        let closed = closed.fold(open, |hash, stream| mix(hash, &[stream.job, task(stream)]));
        let timed = mix(closed, &[u64::from(self.slots[self.index(slot)].time)]);
        let updates = self.updates(slot).into_iter();
        updates.fold(timed, |hash, (table, count)| mix(hash, &[table, count]))
    }

    /// Everything of a slot but its rows.
    pub fn memory(&self, slot: u32) -> SlotMemory {
        let index = self.index(slot);
        SlotMemory {
            position: self.slots[index].position,
            streams: self.streams.of_slot(index).collect(),
            closed: self.streams.closed_in(index).collect(),
            time: self.slots[index].time,
            updates: self.updates(slot),
        }
    }

    /// The tables that updates have been applied to in a slot, each with how many.
    fn updates(&self, slot: u32) -> Vec<(u64, u64)> {
        let index = self.index(slot);
        let counts = self
            .tables
            .iter()
            .map(|(&id, one)| (id, one.updates(index)));
        counts.filter(|&(_, updates)| updates > 0).collect()
    }

    /// Begin to copy a slot as it is now, with what is staged in it.
    pub fn begin_copy(&mut self, slot: u32) -> SlotCopy {
        let token = Arc::new(ReadingToken::default());
        self.end_copies();
        self.copies.push((slot, Arc::downgrade(&token)));
        let mut rows = CopyReader::default();
        for (&id, table) in &mut self.tables {
            let left = table.begin_reading(slot, &token);
            let layout = table.layout();
            let row_bytes = 8 + 4 * (layout.elements + layout.state_words) as u64;
            rows.tables.push((id, left, row_bytes));
        }
        rows.token = token;
        SlotCopy {
            memory: self.memory(slot),
            rows,
            staged: self.staged(slot).cloned().collect(),
        }
    }

    /// Bytes of rows that are kept for copies under way because they have changed or gone since.
    pub fn kept_bytes(&self) -> u64 {
        let copies = self.copies.iter().filter_map(|(_, copy)| copy.upgrade());
        copies.map(|copy| copy.kept_bytes()).sum()
    }

    /// Whether a copy is over, whole or given up, whose rows may still be kept.
    pub fn has_ended_copies(&self) -> bool {
        let mut copies = self.copies.iter();
        copies.any(|(_, copy)| copy.strong_count() == 0)
    }

    /// Drop the rows that are kept for copies that are over.
    pub fn end_copies(&mut self) {
        let tables = &mut self.tables;
        self.copies.retain(|(slot, copy)| {
            let goes_on = copy.strong_count() > 0;
            if !goes_on {
                for table in tables.values_mut() {
                    table.end_readings(*slot);
                }
            }
            goes_on
        });
    }

    /// The next rows of a copy, of about `most` bytes, one at least.
    pub fn read_copy(&mut self, slot: u32, reader: &mut CopyReader, most: u64) -> CopyPiece {
        while let Some((id, left, row_bytes)) = reader.tables.last_mut() {
            if *left == 0 {
                reader.tables.pop();
                continue;
            }
            let (id, most) = (*id, (most / *row_bytes).max(1));
            let table = self.tables.get_mut(&id);
            let most = usize::try_from(most).unwrap_or(usize::MAX);
            let rows = table.and_then(|table| table.read_on(slot, &reader.token, most));
            let Some(rows) = rows.filter(|(keys, ..)| !keys.is_empty()) else {
                return CopyPiece::Gone;
            };
            *left -= rows.0.len();
            return CopyPiece::Rows(id, rows);
        }
        CopyPiece::End
    }

    /// Refuse another replica's memory of a slot if it counts updates of a table that is not known here
    /// yet: the count would be lost, and this replica would differ from then on.
    pub fn check_memory(&self, memory: &SlotMemory) -> Result<(), Refusal> {
        let mut tables = memory.updates.iter();
        tables.try_for_each(|&(table, _)| self.table(table).map(drop))
    }

    /// Take over another replica's memory of a slot; its rows have been taken in before, and
    /// count as unchanged since.
    pub fn set_memory(&mut self, slot: u32, memory: &SlotMemory) {
        let index = self.index(slot);
        self.streams.replace(index, &memory.closed, &memory.streams);
        self.slots[index].staged.clear();
        self.slots[index].position = memory.position;
        self.slots[index].time = memory.time;
        self.slots[index].spans = self.slots[index].spans.replaced(memory.position);
        for (id, table) in &mut self.tables {
            table.clear_marks(slot, memory.position);
            let known = memory.updates.iter().find(|(of, _)| of == id);
            table.set_updates(index, known.map_or(0, |&(_, updates)| updates));
        }
    }

    /// Forget everything about a slot: its rows, its streams, its order.
    pub fn clear_slot(&mut self, slot: u32) {
        self.set_memory(slot, &SlotMemory::default());
        for table in self.tables.values_mut() {
            table.clear_slot(slot);
        }
    }

    /// The rows of one slot of a table as plain arrays, ordered by key.
    pub fn export_slot(&self, table: u64, slot: u32) -> Result<PlainRows, Refusal> {
        Ok(self.table(table)?.export_slot(slot))
    }

    /// Replace the rows of one slot of a table.
    pub fn import_slot(
        &mut self,
        table: u64,
        slot: u32,
        rows: (&[u64], &[f32], &[f32]),
    ) -> Result<(), Refusal> {
        self.table_mut(table)?
            .import_slot(slot, rows.0, rows.1, rows.2)
    }

    /// Replace the rows of one slot of a table by rows that were put together beside it.
    pub fn replace_rows(&mut self, table: u64, rows: SlotRows) -> Result<(), Refusal> {
        self.table_mut(table)?.replace_rows(rows);
        Ok(())
    }

    /// Add rows to one slot of a table; none of them may be there.
    pub fn add_rows(
        &mut self,
        table: u64,
        slot: u32,
        rows: (&[u64], &[f32], &[f32]),
    ) -> Result<(), Refusal> {
        self.table_mut(table)?
            .add_rows(slot, rows.0, rows.1, rows.2)
    }
}
