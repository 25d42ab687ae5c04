//! Stochastic gradient descent.

use super::{scaled_rate, RowOptimizer};

/// `w -= learning_rate * g`. No state.
#[derive(Debug, Clone)]
pub struct Sgd {
    /// Step size.
    pub learning_rate: f64,
}

impl RowOptimizer for Sgd {
    fn state_elements(&self, _row_elements: usize) -> usize {
        0
    }

    fn init_state(&self, _state: &mut [f32]) {}

    #[inline]
    fn update(
        &self,
        weights: &mut [f32],
        _state: &mut [f32],
        gradient: &[f32],
        learning_rate_scale: f32,
    ) {
        let rate = scaled_rate(self.learning_rate, learning_rate_scale);
        for (weight, g) in weights.iter_mut().zip(gradient) {
            *weight -= rate * g;
        }
    }
}
