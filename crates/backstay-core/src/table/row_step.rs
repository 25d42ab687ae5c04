//! One row under an optimizer: begun if it is new, decoded if it is stored in another form, updated,
//! put back. Tables with and without a lifetime have it in common.

use super::{Moment, Table};
use crate::compensation::Compensation;
use crate::initializer::RowInitializer;
use crate::optimizer::RowOptimizer;
use crate::spec::Storage;
use crate::storage;
use crate::stream::TransactionId;

/// The state of rows that begin with a transaction.
#[derive(Clone, Copy)]
pub(super) struct FreshState {
    optimizer_words: usize,
    compensation: Compensation,
    id: TransactionId,
}

impl FreshState {
    pub(super) fn new(table: &Table, id: TransactionId) -> Self {
        Self {
            optimizer_words: table.optimizer_words,
            compensation: table.spec.compensation,
            id,
        }
    }

    /// Write it over the words of the optimizer and of the compensation.
    #[inline]
    pub(super) fn write<O: RowOptimizer>(self, optimizer: &O, state: &mut [u32]) {
        let (own, rest) = state.split_at_mut(self.optimizer_words);
        optimizer.init_state(bytemuck::cast_slice_mut(own));
        self.compensation
            .init_state(bytemuck::cast_slice_mut(rest), self.id);
    }
}

/// What all rows of a push have in common.
pub(super) struct RowStep<'a, O> {
    optimizer: &'a O,
    fresh: FreshState,
    storage: Storage,
    /// Whether each gradient has the weights behind it that it was computed with.
    compares: bool,
    learning_rate_scale: f32,
}

/// Room for one row: its weights, if they are stored in another form, and a gradient.
pub(super) struct Scratch {
    weights: Vec<f32>,
    gradient: Vec<f32>,
}

impl<'a, O: RowOptimizer> RowStep<'a, O> {
    pub(super) fn new(
        table: &Table,
        optimizer: &'a O,
        moment: Moment,
        learning_rate_scale: f32,
    ) -> Self {
        Self {
            optimizer,
            fresh: FreshState::new(table, moment.id),
            storage: table.spec.storage,
            compares: moment.compensation.delay().is_some(),
            learning_rate_scale,
        }
    }

    /// Apart from the step, so that this stays in registers.
    pub(super) fn scratch(&self, elements: usize) -> Scratch {
        let is_plain = storage::is_plain(self.storage);
        Scratch {
            weights: vec![0.0; if is_plain { 0 } else { elements }],
            gradient: Vec::new(),
        }
    }

    /// Apply a gradient to the weights and the state of a row. `begins`: the row is new, and what it
    /// begins with; the key is its own.
    #[allow(clippy::inline_always)] // The loop of every push.
    #[inline(always)]
    pub(super) fn apply(
        &self,
        (weights, state): (&mut [u32], &mut [u32]),
        begins: Option<(&RowInitializer, u64)>,
        gradient: &[f32],
        scratch: &mut Scratch,
    ) {
        if begins.is_some() {
            self.fresh.write(self.optimizer, state);
        }
        let state: &mut [f32] = bytemuck::cast_slice_mut(state);
        if storage::is_plain(self.storage) {
            let weights: &mut [f32] = bytemuck::cast_slice_mut(weights);
            if let Some((initializer, key)) = begins {
                initializer.fill(key, weights);
            }
            self.update(
                weights,
                state,
                begins.is_some(),
                gradient,
                &mut scratch.gradient,
            );
            return;
        }
        let decoded = &mut scratch.weights[..];
        if let Some((initializer, key)) = begins {
            initializer.fill(key, decoded);
            storage::encode(self.storage, decoded, weights);
        }
        storage::decode(self.storage, weights, decoded);
        self.update(
            decoded,
            state,
            begins.is_some(),
            gradient,
            &mut scratch.gradient,
        );
        storage::encode(self.storage, decoded, weights);
    }

    #[allow(clippy::inline_always)]
    #[inline(always)]
    fn update(
        &self,
        weights: &mut [f32],
        state: &mut [f32],
        is_new: bool,
        gradient: &[f32],
        moved: &mut Vec<f32>,
    ) {
        let gradient = if is_new && self.compares {
            unmoved(gradient, weights, moved)
        } else {
            gradient
        };
        self.optimizer
            .update(weights, state, gradient, self.learning_rate_scale);
    }
}

/// A gradient as if it had been computed with these weights: of a row that its push creates, nothing
/// has moved, whatever its client read.
#[cold]
fn unmoved<'a>(gradient: &[f32], weights: &[f32], moved: &'a mut Vec<f32>) -> &'a [f32] {
    moved.clear();
    moved.extend_from_slice(&gradient[..weights.len()]);
    moved.extend_from_slice(weights);
    moved
}
