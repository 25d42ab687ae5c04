//! A push under a user's optimizer: rows are gathered in blocks, because an expression runs over
//! many rows at once, and put back.

use crate::expression::Program;
use crate::optimizer::{Field, RowOptimizer, User, UserBatch, MAX_FIELDS};
use crate::storage;

use super::{Place, Table, BLOCK};

/// The keys of a block so far, by a few bits of their hashes: never misses one that comes again.
pub(super) struct Met([u64; 64]);

impl Met {
    pub(super) fn nothing() -> Self {
        Self([0; 64])
    }

    /// Whether the key may be among them; it is from now on.
    pub(super) fn again(&mut self, hash: u64) -> bool {
        // The slot is in the top bits, so keys of a block share them.
        let (word, bit) = (&mut self.0[(hash >> 6 & 63) as usize], 1 << (hash & 63));
        let met = *word & bit != 0;
        *word |= bit;
        met
    }
}

/// Copy a field of a row. A call for each would take longer than the copy.
#[inline(always)]
fn copy(from: &[f32], to: &mut [f32]) {
    fn whole<const N: usize>(from: &[f32], to: &mut [f32]) {
        if let (Some(from), Some(to)) = (from.first_chunk::<N>(), to.first_chunk_mut::<N>()) {
            *to = *from;
        }
    }
    match to.len() {
        1 => whole::<1>(from, to),
        8 => whole::<8>(from, to),
        16 => whole::<16>(from, to),
        32 => whole::<32>(from, to),
        64 => whole::<64>(from, to),
        _ => to.copy_from_slice(from),
    }
}

impl Table {
    /// Apply gradients to rows. Equal keys are applied one after the other, as by any optimizer.
    pub(super) fn update_by_user(
        &mut self,
        user: &User,
        keys: &[u64],
        values: &[f32],
        learning_rate_scale: f32,
    ) {
        self.ensure_maps();
        let elements = self.elements;
        let most = Program::block_rows(elements).min(BLOCK);
        let mut batch = user.begin(elements, most, learning_rate_scale);
        let mut scratch = vec![0f32; elements];
        let mut places = [Place::default(); BLOCK];
        let mut rows = [(0, 0); BLOCK];
        for (block, gradients) in keys.chunks(most).zip(values.chunks(most * elements)) {
            self.look_up(block, &mut places);
            let (mut met, mut count) = (Met::nothing(), 0);
            let mut gradients = gradients;
            for (&key, &Place { hash, suggested }) in block.iter().zip(&places) {
                if met.again(hash) {
                    let (before, rest) = gradients.split_at(count * elements);
                    self.update_rows(&mut batch, &rows[..count], before);
                    (met, count, gradients) = (Met::nothing(), 0, rest);
                    met.again(hash);
                }
                let (slot, row, created) = self.find_or_create(key, hash, suggested);
                if created {
                    self.fill_new_row(user, key, (slot, row), &mut scratch);
                }
                rows[count] = (slot, row);
                count += 1;
            }
            self.update_rows(&mut batch, &rows[..count], gradients);
        }
    }

    #[cold]
    pub(super) fn fill_new_row(
        &mut self,
        user: &User,
        key: u64,
        (slot, row): (usize, usize),
        scratch: &mut [f32],
    ) {
        self.initializer.fill(key, scratch);
        let words = self.maps[slot].values_mut(row);
        let (weights, state) = words.split_at_mut(self.weight_words);
        storage::encode(self.spec.storage, scratch, weights);
        let state = &mut state[..user.state_elements(scratch.len())];
        user.init_state(bytemuck::cast_slice_mut(state));
    }

    /// Gather rows, run the function over them and put them back.
    pub(super) fn update_rows(
        &mut self,
        batch: &mut UserBatch<'_>,
        rows: &[(usize, usize)],
        gradients: &[f32],
    ) {
        self.gather(batch, rows);
        batch.run(rows.len(), gradients);
        let (storage, weight_words) = (self.spec.storage, self.weight_words);
        let mut results = [&[][..]; MAX_FIELDS];
        for (field, result) in results[..batch.fields().len()].iter_mut().enumerate() {
            *result = batch.result(field);
        }
        for (at, &(slot, row)) in rows.iter().enumerate() {
            let words = self.maps[slot].values_mut(row);
            let (weights, state) = words.split_at_mut(weight_words);
            let state: &mut [f32] = bytemuck::cast_slice_mut(state);
            for (field, (result, one)) in results.iter().zip(batch.fields()).enumerate() {
                let new = &result[at * one.values..(at + 1) * one.values];
                if field > 0 {
                    copy(new, &mut state[one.offset..one.offset + one.values]);
                } else if storage::is_plain(storage) {
                    copy(new, bytemuck::cast_slice_mut(weights));
                } else {
                    storage::encode(storage, new, weights);
                }
            }
        }
    }

    fn gather(&self, batch: &mut UserBatch<'_>, rows: &[(usize, usize)]) {
        let (storage, weight_words) = (self.spec.storage, self.weight_words);
        let mut all: [&[u32]; BLOCK] = [&[]; BLOCK];
        for (words, &(slot, row)) in all.iter_mut().zip(rows) {
            *words = self.maps[slot].values(row);
        }
        for field in 0..batch.fields().len() {
            let Field { offset, values } = batch.fields()[field];
            let Some(input) = batch.input(field) else {
                continue;
            };
            let places = input.chunks_exact_mut(values).zip(&all[..rows.len()]);
            if field == 0 && !storage::is_plain(storage) {
                for (to, words) in places {
                    storage::decode(storage, &words[..weight_words], to);
                }
                continue;
            }
            let start = if field == 0 { 0 } else { weight_words + offset };
            for (to, words) in places {
                copy(bytemuck::cast_slice(&words[start..start + values]), to);
            }
        }
    }
}
