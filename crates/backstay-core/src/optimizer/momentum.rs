//! Gradient descent with momentum, plain or Nesterov's.

use serde::{Deserialize, Serialize};

use super::{scaled_rate, Range, RowOptimizer, Settings, FRACTION, NOT_NEGATIVE};

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
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Momentum {
    /// Step size.
    pub learning_rate: f64,
    /// Share of the velocity that stays.
    #[serde(default = "default_momentum")]
    pub momentum: f64,
    /// Look ahead by one step.
    #[serde(default)]
    pub nesterov: bool,
}

fn default_momentum() -> f64 {
    0.9
}

impl Settings for Momentum {
    const NUMBERS: &'static [(&'static str, Range)] =
        &[("learning_rate", NOT_NEGATIVE), ("momentum", FRACTION)];

    fn numbers(&self) -> [f64; 5] {
        [self.learning_rate, self.momentum, 0.0, 0.0, 0.0]
    }

    fn flags(&self) -> [bool; 2] {
        [self.nesterov, false]
    }

    fn of([learning_rate, momentum, ..]: [f64; 5], [nesterov, _]: [bool; 2]) -> Self {
        Self {
            learning_rate,
            momentum,
            nesterov,
        }
    }
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
