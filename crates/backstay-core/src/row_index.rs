//! An open-addressing index from the hash of a key to the number of its row.
//!
//! An entry is 0, or 8 bits of the hash as a tag over 24 bits of row number + 1. The length is a
//! power of two, and it is at most 3/4 full. Whoever keeps the rows compares their keys.

use crate::hash::mix64;
use crate::prefetch::prefetch;

/// The most rows that it can number.
pub const MAX_ROWS: usize = (1 << TAG_SHIFT) - 1;
/// The least number of entries, but for none.
pub const MIN_INDEX: usize = 8;
const TAG_SHIFT: u32 = 24;
const ROW_MASK: u32 = (1 << TAG_SHIFT) - 1;

/// See the module's documentation.
#[derive(Debug, Clone, Default)]
pub struct RowIndex {
    entries: Vec<u32>,
}

impl RowIndex {
    /// The number of its entries.
    pub fn length(&self) -> usize {
        self.entries.len()
    }

    /// The entries that so many rows need.
    pub fn length_for(rows: usize) -> usize {
        (rows * 4).div_ceil(3).next_power_of_two().max(MIN_INDEX)
    }

    /// Ask for the part of it where `hash` would be found.
    #[inline]
    pub fn prefetch(&self, hash: u64) {
        if !self.entries.is_empty() {
            prefetch(&self.entries[hash as usize & (self.entries.len() - 1)..]);
        }
    }

    /// The rows whose tag fits, in the order of probing.
    #[inline]
    pub fn suggestions(&self, hash: u64) -> impl Iterator<Item = usize> + '_ {
        let mask = self.entries.len().wrapping_sub(1);
        let tag = tag(hash);
        let mut at = hash as usize & mask;
        std::iter::from_fn(move || loop {
            // An empty index is a run of its own: nothing is found there.
            let entry = *self.entries.get(at & mask)?;
            at = at.wrapping_add(1);
            if entry == 0 {
                return None;
            }
            if entry & !ROW_MASK == tag {
                return Some((entry & ROW_MASK) as usize - 1);
            }
        })
    }

    /// Add a row; there is room for it, see [`Self::rebuild`].
    pub fn enter(&mut self, hash: u64, row: usize) {
        enter(&mut self.entries, hash, row);
    }

    /// Give the row of a key, whose hash this is, another number.
    pub fn renumber(&mut self, hash: u64, row: usize, to: usize) {
        let at = self.entry_of(row, hash);
        self.entries[at] = tag(hash) | (to as u32 + 1);
    }

    /// Take out a row, and close the gap before the entries that were pushed behind it.
    pub fn leave(&mut self, hash: u64, row: usize, key_of: impl Fn(usize) -> u64) {
        let mask = self.entries.len() - 1;
        let mut gap = self.entry_of(row, hash);
        let mut at = gap;
        loop {
            at = (at + 1) & mask;
            let next = self.entries[at];
            if next == 0 {
                break;
            }
            let home = mix64(key_of((next & ROW_MASK) as usize - 1)) as usize;
            // It may move to the gap if that is not before the place where it is looked for first.
            if at.wrapping_sub(home) & mask >= at.wrapping_sub(gap) & mask {
                self.entries[gap] = next;
                gap = at;
            }
        }
        self.entries[gap] = 0;
    }

    /// Give it so many entries, with these rows in them.
    pub fn rebuild(&mut self, length: usize, rows: impl Iterator<Item = (u64, usize)>) {
        // Written from end to end before it is searched. Memory that the kernel gives as zeros is
        // one page for all until it is written: to look for a free entry first would be a second
        // fault for each page, and interrupt this process on its other cores. `vec![0; n]` asks for
        // such memory, and so might the compiler, but for the black box.
        let mut grown: Vec<u32> = Vec::with_capacity(length);
        std::hint::black_box(&mut grown).resize(length, 0);
        for (key, row) in rows {
            enter(&mut grown, mix64(key), row);
        }
        self.entries = grown;
    }

    /// The entry of a row; `hash` is its key's.
    fn entry_of(&self, row: usize, hash: u64) -> usize {
        let (mask, wanted) = (self.entries.len() - 1, tag(hash) | (row as u32 + 1));
        let mut at = hash as usize & mask;
        while self.entries[at] != wanted {
            at = (at + 1) & mask;
        }
        at
    }
}

#[inline]
fn tag(hash: u64) -> u32 {
    // Bits 32..40: the slot takes the top bits, the position in the index the low ones.
    ((hash >> 32) as u32) << TAG_SHIFT
}

fn enter(entries: &mut [u32], hash: u64, row: usize) {
    let mask = entries.len() - 1;
    let mut at = hash as usize & mask;
    while entries[at] != 0 {
        at = (at + 1) & mask;
    }
    entries[at] = tag(hash) | (row as u32 + 1);
}
