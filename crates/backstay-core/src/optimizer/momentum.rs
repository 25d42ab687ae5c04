//! Gradient descent with momentum, plain or Nesterov's.

use super::{scaled_rate, RowOptimizer};

/// ```text
/// v  = momentum * v + g
/// w -= learning_rate * v                      (plain)
/// w -= learning_rate * (g + momentum * v)     (nesterov)
/// ```
///
/// State: `v`, one word per weight, from 0.
///
/// Source: I. Sutskever et al., "On the importance of initialization and momentum in deep
/// learning", ICML 2013, section 2, in the form that Paddle and PyTorch share: the learning
/// rate multiplies `v` and is not accumulated in it. A row's `v` decays only when the row is
/// pushed.
#[derive(Debug, Clone)]
pub struct Momentum {
    /// Step size.
    pub learning_rate: f64,
    /// Share of the velocity that stays.
    pub momentum: f64,
    /// Look ahead by one step.
    pub nesterov: bool,
}

impl RowOptimizer for Momentum {
    fn state_elements(&self, row_elements: usize) -> usize {
        row_elements
    }

    fn init_state(&self, state: &mut [f32]) {
        state.fill(0.0);
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
        let momentum = self.momentum as f32;
        let rows = weights.iter_mut().zip(state).zip(gradient);
        if self.nesterov {
            for ((weight, velocity), g) in rows {
                *velocity = momentum * *velocity + g;
                *weight -= rate * (g + momentum * *velocity);
            }
        } else {
            for ((weight, velocity), g) in rows {
                *velocity = momentum * *velocity + g;
                *weight -= rate * *velocity;
            }
        }
    }
}
