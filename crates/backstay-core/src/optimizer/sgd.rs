//! Stochastic gradient descent.

use serde::{Deserialize, Serialize};

use super::{scaled_rate, Range, RowOptimizer, Settings, NOT_NEGATIVE};

/// `w -= learning_rate * g`. No state.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sgd {
    /// Step size.
    #[serde(default = "default_learning_rate")]
    pub learning_rate: f64,
}

fn default_learning_rate() -> f64 {
    0.01
}

impl Settings for Sgd {
    const NUMBERS: &'static [(&'static str, Range)] = &[("learning_rate", NOT_NEGATIVE)];

    fn numbers(&self) -> [f64; 5] {
        [self.learning_rate, 0.0, 0.0, 0.0, 0.0]
    }

    fn of([learning_rate, ..]: [f64; 5], _: [bool; 2]) -> Self {
        Self { learning_rate }
    }
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
