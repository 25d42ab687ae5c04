//! The rows of a table for lookups alone, where a running export is served.
//!
//! A version of it never changes. The next one shares the rows that did not change with it: rows
//! lie in chunks that are only added to by new ones, and what a slot has in place of an old row is
//! a new row at the end. A slot is laid out anew when a part of its rows is not in use any more. So
//! lookups need no lock, and a version goes when nobody looks up in it.

use std::sync::Arc;

use crate::error::Refusal;
use crate::hash::{mix64, SlotSpace};
use crate::prefetch::prefetch;
use crate::row_index::{RowIndex, MAX_ROWS};
use crate::row_map::KEY_WORDS;

/// Bytes of a chunk, unless a single row is larger.
const CHUNK_BYTES: usize = 16 * 1024;
/// Keys that are looked up together, so that their misses overlap.
const BLOCK: usize = 32;
/// A slot is laid out anew when the rows that are not in use are more than this part of the others, and
/// more than a few.
const UNUSED_DIVISOR: usize = 4;
const UNUSED_ROWS_MIN: usize = 64;

/// See the module's documentation.
#[derive(Debug, Clone)]
pub struct ReadTable {
    space: SlotSpace,
    shape: Shape,
    slots: Vec<Arc<ReadSlot>>,
}

/// What comes into a slot of a table.
#[derive(Debug, Clone, Copy)]
pub struct SlotChange<'a> {
    /// Which slot.
    pub slot: u32,
    /// Whether these are all its rows; else the rows of other keys stay.
    pub whole: bool,
    /// Keys that have no row any more.
    pub deleted: &'a [u64],
    /// Keys of rows.
    pub keys: &'a [u64],
    /// \[keys, elements].
    pub weights: &'a [f32],
}

#[derive(Debug, Clone, Copy)]
struct Shape {
    elements: usize,
    /// Words of a row: its key and its weights.
    stride: usize,
    /// A chunk has `1 << chunk_shift` rows, but for the last one.
    chunk_shift: u32,
}

/// The rows of one slot.
#[derive(Debug, Clone, Default)]
struct ReadSlot {
    index: RowIndex,
    chunks: Vec<Arc<[u32]>>,
    /// Rows in the chunks, in use or not.
    end: usize,
    /// Rows in use.
    rows: usize,
}

impl ReadTable {
    /// An empty table.
    pub fn new(space: SlotSpace, elements: usize) -> Self {
        let stride = KEY_WORDS + elements;
        let fit = (CHUNK_BYTES / (stride * 4)).max(1);
        Self {
            space,
            shape: Shape {
                elements,
                stride,
                chunk_shift: usize::BITS - 1 - fit.leading_zeros(),
            },
            slots: vec![Arc::default(); space.count() as usize],
        }
    }

    /// Elements of a row.
    pub fn elements(&self) -> usize {
        self.shape.elements
    }

    /// The number of rows.
    pub fn rows(&self) -> usize {
        self.slots.iter().map(|slot| slot.rows).sum()
    }

    /// Bytes allocated for this version; what it shares with others counts in each.
    pub fn allocated_bytes(&self) -> usize {
        let bytes = |slot: &Arc<ReadSlot>| {
            let chunks = slot.chunks.iter().map(|chunk| chunk.len() * 4 + 16);
            slot.index.length() * 4 + chunks.sum::<usize>()
        };
        self.slots.iter().map(bytes).sum()
    }

    /// Change some slots. Refuses keys of other slots, and weights that do not fit.
    pub fn change<'a>(
        &mut self,
        changes: impl Iterator<Item = SlotChange<'a>>,
    ) -> Result<(), Refusal> {
        for change in changes {
            self.check(&change)?;
            let slot = &mut self.slots[change.slot as usize];
            let mut making = if change.whole {
                Making::of(&ReadSlot::default(), self.shape)
            } else {
                Making::of(slot, self.shape)
            };
            making.change(&change)?;
            *slot = Arc::new(making.finish());
        }
        Ok(())
    }

    fn check(&self, change: &SlotChange<'_>) -> Result<(), Refusal> {
        let SlotChange {
            slot,
            keys,
            weights,
            deleted,
            ..
        } = *change;
        if slot >= self.space.count() || weights.len() != keys.len() * self.shape.elements {
            return Err(Refusal::InvalidRequest(format!(
                "{} keys and {} weights for slot {slot} of {}",
                keys.len(),
                weights.len(),
                self.space.count()
            )));
        }
        let foreign = keys
            .iter()
            .chain(deleted)
            .find(|&&key| self.space.slot_of(key) != slot);
        match foreign {
            Some(key) => Err(Refusal::InvalidRequest(format!(
                "key {key} does not belong to slot {slot}"
            ))),
            None => Ok(()),
        }
    }

    /// Copy the weights of `keys` to `out`, \[keys, elements], and say for each whether it has a
    /// row: zeros if not. How many have one.
    pub fn lookup(&self, keys: &[u64], out: &mut [f32], known: &mut [bool]) -> usize {
        let elements = self.shape.elements;
        let mut hashes = [0; BLOCK];
        let mut suggested = [None; BLOCK];
        let mut found = 0;
        let rows = out
            .chunks_mut(BLOCK * elements)
            .zip(known.chunks_mut(BLOCK));
        for (block, (out, known)) in keys.chunks(BLOCK).zip(rows) {
            for (&key, hash) in block.iter().zip(&mut hashes) {
                *hash = mix64(key);
                let slot = self.slot(*hash);
                slot.index.prefetch(*hash);
                prefetch(&slot.chunks);
            }
            for (hash, row) in hashes[..block.len()].iter().zip(&mut suggested) {
                let slot = self.slot(*hash);
                *row = slot.index.suggestions(*hash).next();
                if let Some(row) = *row {
                    let words = slot.words(self.shape, row);
                    prefetch(words);
                    // A row of 16 floats straddles two lines.
                    prefetch(&words[words.len().min(16) - 1..]);
                }
            }
            let asked = block.iter().zip(&hashes).zip(&suggested);
            let rows = out.chunks_exact_mut(elements).zip(known);
            for (((&key, &hash), &suggested), (out, known)) in asked.zip(rows) {
                let words = self.slot(hash).find(self.shape, key, hash, suggested);
                *known = words.is_some();
                match words {
                    Some(words) => {
                        found += 1;
                        out.copy_from_slice(bytemuck::cast_slice(&words[KEY_WORDS..]));
                    }
                    None => out.fill(0.0),
                }
            }
        }
        found
    }

    /// All keys and weights, in no order.
    pub fn all_rows(&self) -> (Vec<u64>, Vec<f32>) {
        let rows = self.rows();
        let mut keys = Vec::with_capacity(rows);
        let mut weights = Vec::with_capacity(rows * self.shape.elements);
        for slot in &self.slots {
            slot.each(self.shape, |key, words| {
                keys.push(key);
                weights.extend_from_slice(bytemuck::cast_slice(&words[KEY_WORDS..]));
            });
        }
        (keys, weights)
    }

    #[inline]
    fn slot(&self, hash: u64) -> &ReadSlot {
        &self.slots[self.space.slot_of_hash(hash) as usize]
    }
}

impl ReadSlot {
    #[inline]
    fn words(&self, shape: Shape, row: usize) -> &[u32] {
        let start = (row & ((1 << shape.chunk_shift) - 1)) * shape.stride;
        &self.chunks[row >> shape.chunk_shift][start..start + shape.stride]
    }

    /// The words of the row of `key`, which is nearly always the one suggested.
    #[inline]
    fn find(&self, shape: Shape, key: u64, hash: u64, suggested: Option<usize>) -> Option<&[u32]> {
        let words = self.words(shape, suggested?);
        if key_in(words) == key {
            return Some(words);
        }
        // Another key with the same tag.
        let mut rows = self.index.suggestions(hash);
        rows.find_map(|row| {
            let words = self.words(shape, row);
            (key_in(words) == key).then_some(words)
        })
    }

    /// Whether a row of this number is in use; else a newer one of its key is, or none.
    fn uses(&self, row: usize, key: u64) -> bool {
        self.index.suggestions(mix64(key)).any(|one| one == row)
    }

    /// Every row that is in use.
    fn each(&self, shape: Shape, mut take: impl FnMut(u64, &[u32])) {
        for row in 0..self.end {
            let words = self.words(shape, row);
            let key = key_in(words);
            if self.uses(row, key) {
                take(key, words);
            }
        }
    }
}

#[inline]
fn key_in(words: &[u32]) -> u64 {
    u64::from(words[0]) | u64::from(words[1]) << 32
}

/// The next version of a slot.
struct Making {
    shape: Shape,
    slot: ReadSlot,
    /// The rows behind the last whole chunk.
    tail: Vec<u32>,
}

impl Making {
    fn of(slot: &ReadSlot, shape: Shape) -> Self {
        let mut slot = slot.clone();
        let is_part = slot.end & ((1 << shape.chunk_shift) - 1) != 0;
        let last = if is_part { slot.chunks.pop() } else { None };
        Self {
            shape,
            slot,
            tail: last.map_or_else(Vec::new, |chunk| chunk.to_vec()),
        }
    }

    fn change(&mut self, change: &SlotChange<'_>) -> Result<(), Refusal> {
        for &key in change.deleted {
            let hash = mix64(key);
            if let Some(row) = self.find(key, hash) {
                let mut index = std::mem::take(&mut self.slot.index);
                index.leave(hash, row, |row| key_in(self.words(row)));
                self.slot.index = index;
                self.slot.rows -= 1;
            }
        }
        let rows = change.weights.chunks_exact(self.shape.elements);
        if self.slot.end + change.keys.len() > MAX_ROWS {
            // Those that are not in use may make room; else the rows themselves are too many.
            *self = self.laid_out();
        }
        if self.slot.end + change.keys.len() > MAX_ROWS {
            return Err(Refusal::LimitExceeded(format!(
                "{MAX_ROWS} rows of one table in one slot is the limit"
            )));
        }
        for (&key, weights) in change.keys.iter().zip(rows) {
            self.put(key, bytemuck::cast_slice(weights));
        }
        if self.slot.end > self.slot.rows + self.slot.rows / UNUSED_DIVISOR + UNUSED_ROWS_MIN {
            *self = self.laid_out();
        }
        Ok(())
    }

    fn put(&mut self, key: u64, weights: &[u32]) {
        let (hash, row) = (mix64(key), self.slot.end);
        if let Some(old) = self.find(key, hash) {
            self.slot.index.renumber(hash, old, row);
        } else {
            if (self.slot.rows + 1) * 4 > self.slot.index.length() * 3 {
                let length = RowIndex::length_for((self.slot.rows + 1) * 5 / 4);
                self.rebuild_index(length);
            }
            self.slot.index.enter(hash, row);
            self.slot.rows += 1;
        }
        self.tail
            .extend_from_slice(&[key as u32, (key >> 32) as u32]);
        self.tail.extend_from_slice(weights);
        self.slot.end += 1;
        if self.tail.len() == self.shape.stride << self.shape.chunk_shift {
            let whole = std::mem::take(&mut self.tail);
            self.slot.chunks.push(Arc::from(whole));
        }
    }

    fn rebuild_index(&mut self, length: usize) {
        let mut rows = Vec::with_capacity(self.slot.rows);
        self.each(|key, row, _| rows.push((key, row)));
        self.slot.index.rebuild(length, rows.into_iter());
    }

    /// The same rows without those that are not in use.
    fn laid_out(&self) -> Self {
        let mut next = Self::of(&ReadSlot::default(), self.shape);
        let length = RowIndex::length_for(self.slot.rows);
        next.slot.index.rebuild(length, std::iter::empty());
        self.each(|key, _, words| next.put(key, &words[KEY_WORDS..]));
        next
    }

    fn finish(mut self) -> ReadSlot {
        if !self.tail.is_empty() {
            self.slot.chunks.push(Arc::from(self.tail));
        }
        self.slot
    }

    fn each(&self, mut take: impl FnMut(u64, usize, &[u32])) {
        for row in 0..self.slot.end {
            let words = self.words(row);
            let key = key_in(words);
            if self.slot.uses(row, key) {
                take(key, row, words);
            }
        }
    }

    fn find(&self, key: u64, hash: u64) -> Option<usize> {
        let mut rows = self.slot.index.suggestions(hash);
        rows.find(|&row| key_in(self.words(row)) == key)
    }

    fn words(&self, row: usize) -> &[u32] {
        let first = self.slot.chunks.len() << self.shape.chunk_shift;
        match row.checked_sub(first) {
            Some(row) => &self.tail[row * self.shape.stride..][..self.shape.stride],
            None => self.slot.words(self.shape, row),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    const ELEMENTS: usize = 3;

    fn row(value: u32) -> [f32; ELEMENTS] {
        [value as f32, 0.5, -(value as f32)]
    }

    /// Every version against a map, also after the next ones were made.
    fn check(table: &ReadTable, model: &BTreeMap<u64, u32>) {
        let keys: Vec<u64> = (0..200).collect();
        let (mut out, mut known) = (vec![9.0; keys.len() * ELEMENTS], vec![false; keys.len()]);
        assert_eq!(table.lookup(&keys, &mut out, &mut known), model.len());
        assert_eq!(table.rows(), model.len());
        for ((key, out), known) in keys.iter().zip(out.chunks(ELEMENTS)).zip(known) {
            let value = model.get(key);
            assert_eq!(known, value.is_some());
            assert_eq!(out, value.map_or([0.0; ELEMENTS], |&value| row(value)));
        }
        let (keys, weights) = table.all_rows();
        let all: BTreeMap<u64, u32> = keys
            .into_iter()
            .zip(weights.chunks(ELEMENTS).map(|row| row[0] as u32))
            .collect();
        assert_eq!(&all, model);
    }

    proptest! {
        #[test]
        fn every_version_stays_as_it_is(
            steps in prop::collection::vec(
                (prop::bool::weighted(0.1), prop::collection::vec(0u64..200, 0..40),
                 prop::collection::vec(0u64..200, 0..20)),
                1..40,
            ),
        ) {
            let space = SlotSpace::new(2).unwrap();
            let mut table = ReadTable::new(space, ELEMENTS);
            let mut model = BTreeMap::new();
            let mut versions = Vec::new();
            for (number, (whole, keys, deleted)) in steps.into_iter().enumerate() {
                for slot in 0..2 {
                    let of_slot = |keys: &[u64]| -> Vec<u64> {
                        keys.iter().copied().filter(|&key| space.slot_of(key) == slot).collect()
                    };
                    let (keys, deleted) = (of_slot(&keys), of_slot(&deleted));
                    let weights: Vec<f32> = keys.iter().flat_map(|_| row(number as u32)).collect();
                    if whole {
                        model.retain(|&key, _| space.slot_of(key) != slot);
                    }
                    for key in &deleted {
                        model.remove(key);
                    }
                    model.extend(keys.iter().map(|&key| (key, number as u32)));
                    let change = SlotChange {
                        slot, whole, deleted: &deleted, keys: &keys, weights: &weights,
                    };
                    table.change(std::iter::once(change)).unwrap();
                }
                versions.push((table.clone(), model.clone()));
            }
            for (table, model) in &versions {
                check(table, model);
            }
        }
    }

    #[test]
    fn rows_that_change_again_and_again_take_no_more_memory() {
        let mut table = ReadTable::new(SlotSpace::new(1).unwrap(), ELEMENTS);
        let keys: Vec<u64> = (0..5000).collect();
        let weights = vec![1.0; keys.len() * ELEMENTS];
        let put = |table: &mut ReadTable, keys: &[u64]| {
            let weights = &weights[..keys.len() * ELEMENTS];
            let change = SlotChange {
                slot: 0,
                whole: false,
                deleted: &[],
                keys,
                weights,
            };
            table.change(std::iter::once(change)).unwrap();
        };
        put(&mut table, &keys);
        let most = table.allocated_bytes() * 3 / 2;
        for _ in 0..50 {
            for some in keys.chunks(500) {
                put(&mut table, some);
            }
            assert!(table.allocated_bytes() < most);
        }
        assert_eq!(table.rows(), keys.len());
    }

    #[test]
    fn what_is_of_another_slot_is_refused() {
        let space = SlotSpace::new(2).unwrap();
        let mut table = ReadTable::new(space, 1);
        let wrong = SlotChange {
            slot: 1 - space.slot_of(7),
            whole: false,
            deleted: &[],
            keys: &[7],
            weights: &[1.0],
        };
        assert!(table.change(std::iter::once(wrong)).is_err());
        assert_eq!(table.rows(), 0);
    }
}
