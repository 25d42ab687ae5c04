//! The rows of one table in one slot: an open-addressing index over a slab of rows.
//!
//! A row is a run of 32-bit words: the key (two words), the weights, the optimizer's state.
//! Key and values lie together, so a lookup costs one miss in the index and one in the slab.
//! The slab is a list of chunks of bounded size: it grows without moving rows and without
//! the half-empty tail of a doubling vector. The last row takes the place of one that is removed,
//! so rows have no gaps, and their memory serves the next ones.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use crate::error::Refusal;
use crate::hash::mix64;
use crate::marks::{Marks, Purpose, Since, Spans};
use crate::prefetch::prefetch;
use crate::removed::Removed;
use crate::row_index::{RowIndex, MIN_INDEX};

pub use crate::row_index::MAX_ROWS;

/// Words of a row that hold its key.
pub const KEY_WORDS: usize = 2;
/// Bytes of a slab chunk, unless a single row is larger.
const CHUNK_BYTES: usize = 16 * 1024;
/// Rows are fetched into the cache so many rows before a walk over all of them comes to them.
const ROWS_AHEAD: usize = 16;

/// See the module's documentation.
#[derive(Debug, Clone)]
pub struct RowMap {
    index: RowIndex,
    /// Every chunk but the last holds `1 << chunk_shift` rows.
    chunks: Vec<Vec<u32>>,
    /// What has changed since the last checkpoints.
    saved: Changes,
    /// What has changed since the last increments of an export; None: the table is in none.
    exported: Option<Box<Exported>>,
    /// Copies under way that read the rows of an earlier instant.
    readings: Vec<Reading>,
    rows: usize,
    stride: usize,
    chunk_shift: u32,
}

/// What has changed in a map.
#[derive(Debug, Clone, Default)]
struct Changes {
    /// Which rows.
    marks: Marks,
    /// The keys whose rows were removed.
    removed: Removed,
}

/// What has changed for the export that the table is in, and since when that is known.
#[derive(Debug, Clone)]
struct Exported {
    changes: Changes,
    spans: Spans,
}

impl Changes {
    fn remove(&mut self, key: u64, row: usize, last: usize) {
        self.marks.remove(row, last);
        self.removed.push(key, last);
    }

    fn clear(&mut self) {
        self.marks.clear();
        self.removed = Removed::default();
    }

    fn allocated_bytes(&self) -> usize {
        self.marks.allocated_bytes() + self.removed.allocated_bytes()
    }
}

/// Names readings of one instant, of one or more maps: they are over when it has been dropped. It
/// counts the memory of the rows that are kept for them.
#[derive(Default)]
pub struct ReadingToken {
    kept_bytes: AtomicU64,
}

impl ReadingToken {
    /// Bytes of rows that changed or went and are kept as they were.
    pub fn kept_bytes(&self) -> u64 {
        self.kept_bytes.load(Ordering::Relaxed)
    }
}

impl std::fmt::Debug for ReadingToken {
    // What is kept decides nothing, so it is no part of a state that searches compare.
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("ReadingToken")
    }
}

/// The rows of one instant, read piece by piece while rows change.
#[derive(Debug, Clone)]
struct Reading {
    /// It is over when its token has been dropped.
    token: Weak<ReadingToken>,
    /// The next row to be read. Rows from `end` on were added since the instant.
    next: usize,
    end: usize,
    /// Rows that changed or went since the instant and were not read yet, as they were.
    kept: BTreeMap<usize, Vec<u32>>,
}

impl RowMap {
    /// An empty map of rows with `value_words` words behind the key. Allocates nothing.
    pub fn new(value_words: usize) -> Self {
        let stride = KEY_WORDS + value_words;
        let fit = (CHUNK_BYTES / (stride * 4)).max(1);
        Self {
            index: RowIndex::default(),
            chunks: Vec::new(),
            saved: Changes::default(),
            exported: None,
            readings: Vec::new(),
            rows: 0,
            stride,
            chunk_shift: usize::BITS - 1 - fit.leading_zeros(),
        }
    }

    /// The number of rows.
    pub fn len(&self) -> usize {
        self.rows
    }

    /// Whether there is no row.
    pub fn is_empty(&self) -> bool {
        self.rows == 0
    }

    /// Bytes that `more` rows would add to [`Self::allocated_bytes`], at most.
    pub fn growth_bytes(&self, more: usize) -> usize {
        if more == 0 {
            return 0;
        }
        // Removed rows leave memory behind, of which each kind serves only its own.
        let rows = self.rows + more;
        let index = RowIndex::length_for(rows);
        let chunk_rows = 1usize << self.chunk_shift;
        let slab = if rows <= chunk_rows {
            rows.next_power_of_two().min(chunk_rows)
        } else {
            rows.next_multiple_of(chunk_rows)
        };
        // The list of chunks doubles, from four.
        let chunks = rows.div_ceil(chunk_rows).next_power_of_two().max(4);
        let words = index.saturating_sub(self.index.length())
            + (slab * self.stride).saturating_sub(self.slab_words());
        words * 4
            + chunks.saturating_sub(self.chunks.capacity()) * std::mem::size_of::<Vec<u32>>()
            + self.all_changes().fold(0, |sum, one| {
                sum + Marks::bytes_for(rows).saturating_sub(one.marks.recent_bytes())
            })
    }

    /// An upper bound of [`Self::growth_bytes`], summed over maps of rows with `value_words` words.
    /// The maps have `allocated` bytes in all, and at most `maps` of them get `more` rows together.
    pub fn growth_bound(value_words: usize, allocated: usize, more: usize, maps: usize) -> usize {
        // Index, rows and lists at most double, and then have room for twice the new rows.
        let row_bytes = (KEY_WORDS + value_words) * 4;
        allocated + more * (2 * row_bytes + 64) + maps * 256
    }

    /// Bytes allocated for rows and index.
    pub fn allocated_bytes(&self) -> usize {
        (self.index.length() + self.slab_words()) * 4
            + self.chunks.capacity() * std::mem::size_of::<Vec<u32>>()
            + self
                .all_changes()
                .fold(0, |sum, one| sum + one.allocated_bytes())
            + self
                .exported
                .as_ref()
                .map_or(0, |_| std::mem::size_of::<Exported>())
    }

    /// Bytes that go, at most, if all rows but so many are removed and the index [shrinks](Self::shrink).
    pub fn bytes_above(&self, rows: usize) -> usize {
        if self.rows <= rows {
            return 0;
        }
        // A chunk goes when its last row does; the first ones keep the room that they have.
        let chunks = self
            .chunks
            .iter()
            .skip(rows.div_ceil(1 << self.chunk_shift));
        let slab: usize = chunks.map(Vec::capacity).sum();
        (slab + self.index.length()).saturating_sub(MIN_INDEX) * 4
    }

    /// Words allocated for rows.
    fn slab_words(&self) -> usize {
        let full = self.chunks.len().saturating_sub(1) << self.chunk_shift;
        full * self.stride + self.chunks.last().map_or(0, Vec::capacity)
    }

    /// Ask for the part of the index where `hash` would be found.
    #[inline]
    pub fn prefetch_index(&self, hash: u64) {
        self.index.prefetch(hash);
        // The list of chunks is needed next, to find the row.
        prefetch(&self.chunks);
    }

    /// The first row that the index suggests for `hash`; asks for its memory, but compares no
    /// key, for that would wait for it.
    #[inline]
    pub fn suggest(&self, hash: u64) -> Option<usize> {
        let row = self.index.suggestions(hash).next()?;
        let words = self.row_words(row);
        prefetch(words);
        // A row of 16 floats straddles two lines.
        prefetch(&words[words.len().min(16) - 1..]);
        Some(row)
    }

    /// The number of the row of `key`, whose [`mix64`] is `hash`.
    #[inline]
    pub fn find(&self, key: u64, hash: u64) -> Option<usize> {
        self.index
            .suggestions(hash)
            .find(|&row| self.key(row) == key)
    }

    /// The number of the row of `key`, which is nearly always the one suggested.
    #[inline]
    pub fn confirm(&self, suggested: Option<usize>, key: u64, hash: u64) -> Option<usize> {
        match suggested {
            Some(row) if self.key(row) == key => Some(row),
            // Another key with the same tag, or a row made since.
            _ => self.find(key, hash),
        }
    }

    /// Add a row for a key that is not there; its words start as zero.
    ///
    /// The caller has made sure, by [`Self::check_room`], that it does not exceed [`MAX_ROWS`].
    pub fn insert(&mut self, key: u64, hash: u64) -> usize {
        assert!(self.rows < MAX_ROWS, "check_room comes before insert");
        if (self.rows + 1) * 4 > self.index.length() * 3 {
            self.grow_index();
        }
        let row = self.rows;
        self.push_row(key);
        self.index.enter(hash, row);
        row
    }

    /// Remove the row of a key; whether there was one. The last row takes its number.
    pub fn remove(&mut self, key: u64, hash: u64) -> bool {
        let Some(row) = self.find(key, hash) else {
            return false;
        };
        let last = self.rows - 1;
        if !self.readings.is_empty() {
            self.keep_for_readings(row);
            self.keep_for_readings(last);
        }
        let mut index = std::mem::take(&mut self.index);
        index.leave(hash, row, |row| self.key(row));
        if row != last {
            index.renumber(mix64(self.key(last)), last, row);
            self.overwrite(row, last);
        }
        self.index = index;
        self.saved.remove(key, row, last);
        if let Some(exported) = &mut self.exported {
            exported.changes.remove(key, row, last);
        }
        self.pop_row();
        true
    }

    /// Make the index large enough for `more` rows in one go.
    pub fn reserve(&mut self, more: usize) {
        let mut length = self.index.length().max(MIN_INDEX);
        while (self.rows + more) * 4 > length * 3 {
            length *= 2;
        }
        if more > 0 && length > self.index.length() {
            self.rebuild_index(length);
        }
    }

    /// Give back memory of the index, if most of it is free since rows went.
    pub fn shrink(&mut self) {
        if self.index.length() > MIN_INDEX && self.rows * 8 < self.index.length() {
            let length = (self.rows * 4).next_power_of_two().max(MIN_INDEX);
            self.rebuild_index(length);
        }
    }

    /// Refuse to hold `more` rows if they might exceed [`MAX_ROWS`].
    pub fn check_room(&self, more: usize) -> Result<(), Refusal> {
        if self.rows + more <= MAX_ROWS {
            return Ok(());
        }
        Err(Refusal::LimitExceeded(format!(
            "{MAX_ROWS} rows of one table in one slot is the limit: create the cluster with more slots"
        )))
    }

    /// The key of a row.
    #[inline]
    pub fn key(&self, row: usize) -> u64 {
        let words = self.row_words(row);
        u64::from(words[0]) | u64::from(words[1]) << 32
    }

    /// The words of a row behind its key.
    #[inline]
    pub fn values(&self, row: usize) -> &[u32] {
        &self.row_words(row)[KEY_WORDS..]
    }

    /// The words of a row behind its key, to be changed: it counts as changed from now on.
    #[inline]
    pub fn values_mut(&mut self, row: usize) -> &mut [u32] {
        self.saved.marks.mark(row);
        if let Some(exported) = &mut self.exported {
            exported.changes.marks.mark(row);
        }
        if !self.readings.is_empty() {
            self.keep_for_readings(row);
        }
        let start = (row & ((1 << self.chunk_shift) - 1)) * self.stride;
        &mut self.chunks[row >> self.chunk_shift][start + KEY_WORDS..start + self.stride]
    }

    /// The keys and words of some rows, as they lie in memory, appended to `out`.
    pub fn copy_rows(&self, rows: Range<usize>, out: &mut Vec<u32>) {
        let in_chunk = 1usize << self.chunk_shift;
        let mut row = rows.start;
        while row < rows.end {
            let first = row & (in_chunk - 1);
            let count = (in_chunk - first).min(rows.end - row);
            let words = first * self.stride..(first + count) * self.stride;
            out.extend_from_slice(&self.chunks[row >> self.chunk_shift][words]);
            row += count;
        }
    }

    /// Begin to read the rows of this instant; it is over with the token. How many there are.
    pub fn begin_reading(&mut self, token: &Arc<ReadingToken>) -> usize {
        self.end_readings();
        if self.rows > 0 {
            self.readings.push(Reading {
                token: Arc::downgrade(token),
                next: 0,
                end: self.rows,
                kept: BTreeMap::new(),
            });
        }
        self.rows
    }

    /// Drop what is kept for readings that are over.
    pub fn end_readings(&mut self) {
        self.readings.retain(|one| one.token.strong_count() > 0);
    }

    /// The next rows of a reading's instant, as they lie in memory, appended to `out`; how many.
    /// None if the map is not the one that the reading began in.
    pub fn read_on(
        &mut self,
        token: &Arc<ReadingToken>,
        most: usize,
        out: &mut Vec<u32>,
    ) -> Option<usize> {
        let is_it = |one: &Reading| std::ptr::eq(one.token.as_ptr(), Arc::as_ptr(token));
        let at = self.readings.iter().position(is_it)?;
        let rows = {
            let one = &mut self.readings[at];
            let to = one.end.min(one.next.saturating_add(most));
            std::mem::replace(&mut one.next, to)..to
        };
        let first = out.len();
        // Rows that are no more were kept.
        self.copy_rows(rows.start..rows.end.min(self.rows), out);
        out.resize(first + rows.len() * self.stride, 0);
        let rest = self.readings[at].kept.split_off(&rows.end);
        let kept = std::mem::replace(&mut self.readings[at].kept, rest);
        let freed = kept.len() as u64 * self.kept_row_bytes();
        token.kept_bytes.fetch_sub(freed, Ordering::Relaxed);
        for (row, words) in kept {
            let start = first + (row - rows.start) * self.stride;
            out[start..start + self.stride].copy_from_slice(&words);
        }
        Some(rows.len())
    }

    #[cold]
    fn keep_for_readings(&mut self, row: usize) {
        let mut readings = std::mem::take(&mut self.readings);
        readings.retain(|one| one.token.strong_count() > 0);
        for one in &mut readings {
            if (one.next..one.end).contains(&row) && !one.kept.contains_key(&row) {
                one.kept.insert(row, self.row_words(row).to_vec());
                if let Some(token) = one.token.upgrade() {
                    token
                        .kept_bytes
                        .fetch_add(self.kept_row_bytes(), Ordering::Relaxed);
                }
            }
        }
        self.readings = readings;
    }

    /// Bytes that a row takes which is kept for a reading, with its place in the list, about.
    fn kept_row_bytes(&self) -> u64 {
        (self.stride * 4 + 48) as u64
    }

    /// Copy the rows that have changed or moved since the last generation began over older copies,
    /// where `copies` holds the first rows of the map; copies of rows that are no more go.
    pub fn patch(&self, purpose: Purpose, copies: &mut Vec<u32>) {
        copies.truncate(self.rows * self.stride);
        let copied = copies.len() / self.stride;
        let touched = self
            .changes(purpose)
            .into_iter()
            .flat_map(|one| one.marks.touched());
        for row in touched.take_while(|&row| row < copied) {
            copies[row * self.stride..][..self.stride].copy_from_slice(self.row_words(row));
        }
    }

    /// The rows that have changed, appended to `out`.
    pub fn copy_changed(&self, purpose: Purpose, since: Since, out: &mut Vec<u32>) {
        let changes = self.changes(purpose).into_iter();
        for row in changes.flat_map(|one| one.marks.rows(since)) {
            out.extend_from_slice(self.row_words(row));
        }
    }

    /// How many rows have changed or gone; None: that is not known, or too many have gone.
    pub fn changed(&self, purpose: Purpose, since: Since) -> Option<usize> {
        let changes = self.changes(purpose)?;
        let removed = changes.removed.keys(since)?;
        Some(changes.marks.rows(since).count() + removed.count())
    }

    /// The keys without a row that had one before, as far as they are known, ascending.
    pub fn removed(&self, purpose: Purpose, since: Since) -> Vec<u64> {
        let changes = self.changes(purpose).into_iter();
        let keys = changes.filter_map(|one| one.removed.keys(since)).flatten();
        let mut keys: Vec<u64> = keys
            .filter(|&key| self.find(key, mix64(key)).is_none())
            .collect();
        keys.sort_unstable();
        keys.dedup();
        keys
    }

    /// What changed up to now is of an earlier generation; see [`Marks::begin`].
    pub fn begin_generation(&mut self, since: Since) {
        self.saved.marks.begin(since);
        self.saved.removed.begin(since, self.rows);
    }

    /// No row counts as changed any more, and none as removed: its rows are those of this position.
    pub fn clear_marks(&mut self, position: u64) {
        self.saved.clear();
        if let Some(exported) = &mut self.exported {
            exported.changes.clear();
            exported.spans = exported.spans.replaced(position);
        }
    }

    /// Keep account of what changes from now on for an export. `number` tells this account from
    /// those before it.
    pub fn begin_export(&mut self, position: u64, number: u64) {
        self.exported = Some(Box::new(Exported {
            changes: Changes {
                marks: Marks::covering(self.rows),
                removed: Removed::default(),
            },
            spans: Spans {
                recent: position,
                earlier: None,
                number,
            },
        }));
    }

    /// The table is in no export any more.
    pub fn end_export(&mut self) {
        self.exported = None;
    }

    /// Since when the changes for an export are known; None: it is in none.
    pub(crate) fn export_spans(&self) -> Option<Spans> {
        self.exported.as_ref().map(|exported| exported.spans)
    }

    /// An increment has what changed up to this position.
    pub(crate) fn begin_increment(&mut self, position: u64, since: Since) {
        if let Some(exported) = &mut self.exported {
            exported.changes.marks.begin(since);
            exported.changes.removed.begin(since, self.rows);
            exported.spans = exported.spans.begun(position, since);
        }
    }

    fn changes(&self, purpose: Purpose) -> Option<&Changes> {
        match purpose {
            Purpose::Checkpoint => Some(&self.saved),
            Purpose::Export => self.exported.as_ref().map(|exported| &exported.changes),
        }
    }

    fn all_changes(&self) -> impl Iterator<Item = &Changes> {
        let exported = self.exported.iter().map(|exported| &exported.changes);
        std::iter::once(&self.saved).chain(exported)
    }

    /// Every key with its row number.
    pub fn keys(&self) -> impl Iterator<Item = (u64, usize)> + '_ {
        (0..self.rows).map(|row| {
            let ahead = row + ROWS_AHEAD;
            if ahead < self.rows {
                // The key, and the statistics behind weights and state.
                let words = self.row_words(ahead);
                prefetch(words);
                prefetch(&words[words.len() - 1..]);
            }
            (self.key(row), row)
        })
    }

    #[inline]
    fn row_words(&self, row: usize) -> &[u32] {
        let start = (row & ((1 << self.chunk_shift) - 1)) * self.stride;
        &self.chunks[row >> self.chunk_shift][start..start + self.stride]
    }

    fn push_row(&mut self, key: u64) {
        let chunk_rows = 1 << self.chunk_shift;
        if self.rows.is_multiple_of(chunk_rows) {
            // The first chunk starts small: most tables are tiny in most slots.
            let rows = if self.rows == 0 { 1 } else { chunk_rows };
            self.chunks.push(Vec::with_capacity(rows * self.stride));
        }
        if let Some(chunk) = self.chunks.last_mut() {
            if chunk.capacity() - chunk.len() < self.stride {
                let more = chunk.len().min(chunk_rows * self.stride - chunk.len());
                chunk.reserve_exact(more.max(self.stride));
            }
            chunk.extend_from_slice(&[key as u32, (key >> 32) as u32]);
            chunk.resize(chunk.len() + self.stride - KEY_WORDS, 0);
        }
        self.rows += 1;
        self.saved.marks.cover(self.rows);
        if let Some(exported) = &mut self.exported {
            exported.changes.marks.cover(self.rows);
        }
    }

    /// Copy a row over an earlier one.
    fn overwrite(&mut self, row: usize, by: usize) {
        let (chunk, chunk_by) = (row >> self.chunk_shift, by >> self.chunk_shift);
        let start = |row: usize| (row & ((1 << self.chunk_shift) - 1)) * self.stride;
        let (to, from) = (start(row), start(by)..start(by) + self.stride);
        let (before, behind) = self.chunks.split_at_mut(chunk_by);
        if chunk == chunk_by {
            behind[0].copy_within(from, to);
        } else {
            before[chunk][to..to + self.stride].copy_from_slice(&behind[0][from]);
        }
    }

    fn pop_row(&mut self) {
        self.rows -= 1;
        if let Some(chunk) = self.chunks.last_mut() {
            chunk.truncate(chunk.len() - self.stride);
            if chunk.is_empty() {
                self.chunks.pop();
            }
        }
    }

    fn grow_index(&mut self) {
        self.rebuild_index((self.index.length() * 2).max(MIN_INDEX));
    }

    fn rebuild_index(&mut self, length: usize) {
        let mut index = std::mem::take(&mut self.index);
        index.rebuild(length, self.keys());
        self.index = index;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    proptest! {
        /// The map against a dumb one: same membership, same values, whatever the order.
        #[test]
        fn behaves_like_a_btreemap(
            keys in prop::collection::vec((0u64..300, prop::bool::weighted(0.4)), 0..900),
            width in 1usize..40,
        ) {
            let mut map = RowMap::new(width);
            let mut model: BTreeMap<u64, u32> = BTreeMap::new();
            for (step, (key, removes)) in keys.into_iter().enumerate() {
                let hash = mix64(key);
                let found = map.find(key, hash);
                prop_assert_eq!(found.is_some(), model.contains_key(&key));
                if removes {
                    prop_assert_eq!(map.remove(key, hash), model.remove(&key).is_some());
                    prop_assert_eq!(map.find(key, hash), None);
                    continue;
                }
                let row = found.unwrap_or_else(|| map.insert(key, hash));
                map.values_mut(row)[width - 1] = step as u32;
                model.insert(key, step as u32);
            }
            prop_assert_eq!(map.len(), model.len());
            prop_assert_eq!(map.keys().count(), model.len());
            for (key, row) in map.keys() {
                prop_assert_eq!(map.find(key, mix64(key)), Some(row));
                prop_assert_eq!(map.values(row)[width - 1], model[&key]);
                prop_assert_eq!(map.values(row).len(), width);
            }
        }
    }

    #[test]
    fn rows_larger_than_a_chunk_work() {
        let mut map = RowMap::new(10_000);
        for key in 0..5 {
            let row = map.insert(key, mix64(key));
            map.values_mut(row)[9_999] = key as u32;
        }
        for key in 0..5 {
            let row = map.find(key, mix64(key)).unwrap();
            assert_eq!(map.values(row)[9_999], key as u32);
        }
    }

    proptest! {
        /// What is announced is enough.
        #[test]
        fn grows_by_no_more_than_announced(
            first in 0usize..3000,
            removed in 0usize..3000,
            more in 0usize..3000,
            width in 1usize..200,
        ) {
            let mut map = RowMap::new(width);
            for key in 0..first as u64 {
                map.insert(key, mix64(key));
            }
            for key in 0..removed.min(first) as u64 {
                prop_assert!(map.remove(key, mix64(key)));
            }
            let (before, announced) = (map.allocated_bytes(), map.growth_bytes(more));
            prop_assert!(announced <= RowMap::growth_bound(width, before, more, 1));
            for key in first as u64..(first + more) as u64 {
                map.insert(key, mix64(key));
            }
            prop_assert!(map.allocated_bytes() - before <= announced);
        }
    }

    #[test]
    fn little_is_wasted() {
        let mut map = RowMap::new(32);
        for key in 0..10_000u64 {
            map.insert(key, mix64(key));
        }
        let payload = 10_000 * 34 * 4;
        assert!(map.allocated_bytes() < payload * 115 / 100);
        assert_eq!(RowMap::new(32).allocated_bytes(), 0);
    }

    #[test]
    fn an_index_that_is_nearly_empty_shrinks() {
        let mut map = RowMap::new(2);
        for key in 0..10_000u64 {
            map.insert(key, mix64(key));
        }
        map.shrink();
        let full = map.allocated_bytes();
        for key in 100..10_000u64 {
            assert!(map.remove(key, mix64(key)));
        }
        map.begin_generation(Since::Recent);
        map.begin_generation(Since::Recent);
        map.shrink();
        assert!(map.allocated_bytes() < full / 8);
        for key in 0..200u64 {
            let found = map.find(key, mix64(key));
            assert_eq!(found.is_some(), key < 100);
            if found.is_none() {
                map.insert(key, mix64(key));
            }
        }
        assert_eq!(map.len(), 200);
    }

    proptest! {
        /// What is announced is not exceeded, and little is announced that stays.
        #[test]
        fn removing_rows_gives_back_no_more_than_announced(
            first in 1usize..3000,
            left in 0usize..100,
            width in 1usize..200,
        ) {
            let mut map = RowMap::new(width);
            for key in 0..first as u64 {
                map.insert(key, mix64(key));
            }
            let allocated = |map: &RowMap| (map.slab_words() + map.index.length()) * 4;
            let (before, announced) = (allocated(&map), map.bytes_above(left));
            for key in left as u64..first as u64 {
                prop_assert!(map.remove(key, mix64(key)));
            }
            map.shrink();
            let gone = before - allocated(&map);
            prop_assert!(gone <= announced, "{} of {}", gone, announced);
            let index = (left * 32).next_power_of_two().max(MIN_INDEX) * 4;
            prop_assert!(announced <= gone + index, "{} of {}", gone, announced);
        }
    }

    #[test]
    fn what_was_kept_for_a_reading_goes_with_it() {
        let mut map = RowMap::new(1);
        map.insert(7, mix64(7));
        let token = Arc::new(ReadingToken::default());
        map.begin_reading(&token);
        map.values_mut(0)[0] = 1;
        assert_eq!(map.readings[0].kept.len(), 1);
        map.end_readings();
        assert_eq!(map.readings.len(), 1);
        drop(token);
        map.end_readings();
        assert!(map.readings.is_empty());
    }

    #[test]
    fn the_memory_of_removed_rows_serves_the_next_ones() {
        let mut map = RowMap::new(32);
        for key in 0..10_000u64 {
            map.insert(key, mix64(key));
        }
        let before = map.allocated_bytes();
        for key in 0..50_000u64 {
            assert!(map.remove(key, mix64(key)));
            map.insert(key + 10_000, mix64(key + 10_000));
        }
        // Also what is known of the keys that went has its limit.
        assert!(map.allocated_bytes() <= before + 2 * 8 * 10_000);
        assert_eq!(map.changed(Purpose::Checkpoint, Since::Recent), None);
        map.begin_generation(Since::Recent);
        map.begin_generation(Since::Recent);
        assert_eq!(map.changed(Purpose::Checkpoint, Since::Earlier), Some(0));
        assert!(map.allocated_bytes() <= before + 10_000);
    }

    /// As while no checkpoint can be written.
    #[test]
    fn what_is_known_of_removed_rows_has_a_limit_over_many_generations() {
        let mut map = RowMap::new(32);
        for key in 0..1_000u64 {
            map.insert(key, mix64(key));
        }
        let before = map.allocated_bytes();
        for first in (0..50_000u64).step_by(900) {
            for key in first..first + 900 {
                assert!(map.remove(key, mix64(key)));
                map.insert(key + 1_000, mix64(key + 1_000));
            }
            map.begin_generation(Since::Earlier);
        }
        assert!(map.allocated_bytes() <= before + 3 * 8 * 1_000);
        assert_eq!(map.changed(Purpose::Checkpoint, Since::Earlier), None);
    }

    proptest! {
        /// Who has the rows of an instant, takes the removed keys out and the changed rows in, has
        /// the rows of now.
        #[test]
        fn removed_keys_and_changed_rows_make_up_the_difference(
            before in prop::collection::vec((0u64..200, prop::bool::weighted(0.3)), 0..200),
            between in prop::collection::vec((0u64..200, prop::bool::weighted(0.3)), 0..100),
            after in prop::collection::vec((0u64..200, prop::bool::weighted(0.5)), 0..100),
        ) {
            let mut map = RowMap::new(1);
            let mut step = 0;
            let mut play = |map: &mut RowMap, steps: &[(u64, bool)]| {
                for &(key, removes) in steps {
                    let hash = mix64(key);
                    step += 1;
                    if removes {
                        map.remove(key, hash);
                    } else {
                        let row = map.find(key, hash).unwrap_or_else(|| map.insert(key, hash));
                        map.values_mut(row)[0] = step;
                    }
                }
            };
            let rows = |map: &RowMap| -> BTreeMap<u64, u32> {
                map.keys().map(|(key, row)| (key, map.values(row)[0])).collect()
            };
            let add_up = |mut known: BTreeMap<u64, u32>, map: &RowMap, since: Since| {
                map.changed(Purpose::Checkpoint, since)?;
                for key in map.removed(Purpose::Checkpoint, since) {
                    known.remove(&key);
                }
                let mut words = Vec::new();
                map.copy_changed(Purpose::Checkpoint, since, &mut words);
                known.extend(words.chunks(3).map(|row| (u64::from(row[0]), row[2])));
                Some(known)
            };
            play(&mut map, &before);
            map.begin_generation(Since::Recent);
            let first = rows(&map);
            play(&mut map, &between);
            map.begin_generation(Since::Recent);
            let second = rows(&map);
            play(&mut map, &after);
            let now = rows(&map);
            prop_assert!(add_up(second, &map, Since::Recent).is_none_or(|sum| sum == now));
            prop_assert!(add_up(first, &map, Since::Earlier).is_none_or(|sum| sum == now));
        }
    }

    #[derive(Debug, Clone)]
    enum Step {
        Insert(u64),
        Remove(usize),
        Change(usize, u32),
        Begin,
        Read(usize, usize),
        Drop(usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (0u64..500).prop_map(Step::Insert),
            any::<usize>().prop_map(Step::Remove),
            (any::<usize>(), any::<u32>()).prop_map(|(row, value)| Step::Change(row, value)),
            Just(Step::Begin),
            (any::<usize>(), 1usize..9).prop_map(|(which, rows)| Step::Read(which, rows)),
            any::<usize>().prop_map(Step::Drop),
        ]
    }

    fn all(map: &RowMap) -> Vec<u32> {
        let mut words = Vec::new();
        map.copy_rows(0..map.len(), &mut words);
        words
    }

    proptest! {
        /// Readers see the rows of their instant, whatever is changed and added meanwhile.
        #[test]
        fn a_reading_is_of_one_instant(steps in prop::collection::vec(step(), 1..200)) {
            let mut map = RowMap::new(3);
            // Token, the rows of its instant, what was read of them.
            let mut readings: Vec<(Arc<ReadingToken>, Vec<u32>, Vec<u32>)> = Vec::new();
            for step in steps {
                match step {
                    Step::Insert(key) if map.find(key, mix64(key)).is_none() => {
                        map.insert(key, mix64(key));
                    }
                    Step::Remove(row) if !map.is_empty() => {
                        let key = map.key(row % map.len());
                        prop_assert!(map.remove(key, mix64(key)));
                    }
                    Step::Change(row, value) if !map.is_empty() => {
                        let row = row % map.len();
                        map.values_mut(row)[1] = value;
                    }
                    Step::Begin => {
                        let token = Arc::new(ReadingToken::default());
                        prop_assert_eq!(map.begin_reading(&token), map.len());
                        readings.push((token, all(&map), Vec::new()));
                    }
                    Step::Read(which, rows) if !readings.is_empty() => {
                        let which = which % readings.len();
                        let (token, _, read) = &mut readings[which];
                        map.read_on(token, rows, read);
                    }
                    Step::Drop(which) if !readings.is_empty() => {
                        readings.swap_remove(which % readings.len());
                    }
                    _ => {}
                }
            }
            for (token, expected, mut read) in readings {
                while map.read_on(&token, 7, &mut read).is_some_and(|rows| rows > 0) {}
                prop_assert_eq!(read, expected);
                prop_assert_eq!(token.kept_bytes(), 0, "what was read is kept no longer");
            }
            map.begin_reading(&Arc::default());
            prop_assert!(map.readings.len() <= 1, "readings end with their tokens");
        }
    }
}
