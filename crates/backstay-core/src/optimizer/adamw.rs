//! Adam with decoupled weight decay, lazy.

use super::{Adam, RowOptimizer};

/// `w *= 1 - learning_rate * weight_decay`, then a step of [`Adam`].
///
/// State: as Adam's.
///
/// Source: I. Loshchilov and F. Hutter, "Decoupled weight decay regularization", ICLR 2019,
/// algorithm 2, with the decay multiplied by the learning rate, as Paddle and PyTorch do.
/// Rows that are not pushed do not decay.
#[derive(Debug, Clone)]
pub struct AdamW {
    /// The step after the decay.
    pub adam: Adam,
    /// Decay per unit of learning rate.
    pub weight_decay: f64,
}

impl RowOptimizer for AdamW {
    fn state_elements(&self, row_elements: usize) -> usize {
        self.adam.state_elements(row_elements)
    }

    fn init_state(&self, state: &mut [f32]) {
        self.adam.init_state(state);
    }

    #[inline]
    fn update(
        &self,
        weights: &mut [f32],
        state: &mut [f32],
        gradient: &[f32],
        learning_rate_scale: f32,
    ) {
        let rate = self.adam.learning_rate * f64::from(learning_rate_scale);
        let keep = (1.0 - rate * self.weight_decay) as f32;
        for weight in weights.iter_mut() {
            *weight *= keep;
        }
        self.adam
            .update(weights, state, gradient, learning_rate_scale);
    }
}
