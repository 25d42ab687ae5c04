//! Adagrad: a step size per weight that shrinks with the gradients seen.

use super::{scaled_rate, RowOptimizer};

/// ```text
/// a += g * g
/// w -= learning_rate * g / (sqrt(a) + epsilon)
/// ```
///
/// State: `a`, one word per weight, from `initial_accumulator`.
///
/// Source: J. Duchi, E. Hazan and Y. Singer, "Adaptive subgradient methods for online learning
/// and stochastic optimization", JMLR 12 (2011), figure 1 (the diagonal form). Paddle and
/// PyTorch add epsilon outside the root, as here; their defaults are 1e-6 and 1e-10.
#[derive(Debug, Clone)]
pub struct Adagrad {
    /// Step size.
    pub learning_rate: f64,
    /// Keeps the first step of a weight finite.
    pub epsilon: f64,
    /// The state of a new row.
    pub initial_accumulator: f64,
}

impl RowOptimizer for Adagrad {
    fn state_elements(&self, row_elements: usize) -> usize {
        row_elements
    }

    fn init_state(&self, state: &mut [f32]) {
        state.fill(self.initial_accumulator as f32);
    }

    #[inline]
    fn update(
        &self,
        weights: &mut [f32],
        state: &mut [f32],
        gradient: &[f32],
        learning_rate_scale: f32,
    ) {
        let rate = scaled_rate(self.learning_rate, learning_rate_scale);
        let epsilon = self.epsilon as f32;
        for ((weight, accumulator), g) in weights.iter_mut().zip(state).zip(gradient) {
            *accumulator += g * g;
            *weight -= rate * g / (accumulator.sqrt() + epsilon);
        }
    }
}
