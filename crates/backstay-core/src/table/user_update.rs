//! A push under a user's optimizer: rows are gathered in blocks, because an expression runs over
//! many rows at once, and put back.

use crate::expression::Program;
use crate::optimizer::{RowOptimizer, User, UserBatch};
use crate::storage;

use super::{Place, Table, BLOCK};

/// The keys of a block so far, by a few bits of their hashes: never misses one that comes again.
struct Seen([u64; 64]);

impl Seen {
    fn nothing() -> Self {
        Self([0; 64])
    }

    /// Whether the key may be among them; it is from now on.
    fn meets(&mut self, hash: u64) -> bool {
        // The slot is in the top bits, so keys of a block share them.
        let (word, bit) = (&mut self.0[(hash >> 6 & 63) as usize], 1 << (hash & 63));
        let met = *word & bit != 0;
        *word |= bit;
        met
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
            let (mut seen, mut count) = (Seen::nothing(), 0);
            let mut gradients = gradients;
            for (&key, &Place { hash, suggested }) in block.iter().zip(&places) {
                if seen.meets(hash) {
                    let (before, rest) = gradients.split_at(count * elements);
                    self.finish_rows(&mut batch, &rows[..count], before, &mut scratch);
                    (seen, count, gradients) = (Seen::nothing(), 0, rest);
                    seen.meets(hash);
                }
                let (slot, row, created) = self.find_or_create(key, hash, suggested);
                if created {
                    self.fill_new_row(user, key, (slot, row), &mut scratch);
                }
                let words = self.maps[slot].values(row);
                let (weights, state) = words.split_at(self.weight_words);
                let state: &[f32] = bytemuck::cast_slice(state);
                if storage::is_plain(self.spec.storage) {
                    batch.put(count, bytemuck::cast_slice(weights), state);
                } else {
                    storage::decode(self.spec.storage, weights, &mut scratch);
                    batch.put(count, &scratch, state);
                }
                rows[count] = (slot, row);
                count += 1;
            }
            self.finish_rows(&mut batch, &rows[..count], gradients, &mut scratch);
        }
    }

    #[cold]
    fn fill_new_row(
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
        user.init_state(bytemuck::cast_slice_mut(state));
    }

    /// Run the function over the rows that were gathered, and put them back.
    fn finish_rows(
        &mut self,
        batch: &mut UserBatch<'_>,
        rows: &[(usize, usize)],
        gradients: &[f32],
        scratch: &mut [f32],
    ) {
        batch.run(rows.len(), gradients);
        let storage = self.spec.storage;
        for (at, &(slot, row)) in rows.iter().enumerate() {
            let words = self.maps[slot].values_mut(row);
            let (weights, state) = words.split_at_mut(self.weight_words);
            let state = bytemuck::cast_slice_mut(state);
            if storage::is_plain(storage) {
                batch.take(at, bytemuck::cast_slice_mut(weights), state);
            } else {
                batch.take(at, scratch, state);
                storage::encode(storage, scratch, weights);
            }
        }
    }
}
