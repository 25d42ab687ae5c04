//! Adagrad: a step size per weight that shrinks with the gradients seen.

use serde::{Deserialize, Serialize};

use super::{scaled_rate, Range, RowOptimizer, Settings, NOT_NEGATIVE, POSITIVE};

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
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Adagrad {
    /// Step size.
    pub learning_rate: f64,
    /// Keeps the first step of a weight finite.
    #[serde(default = "default_epsilon")]
    pub epsilon: f64,
    /// The state of a new row.
    #[serde(default)]
    pub initial_accumulator: f64,
}

fn default_epsilon() -> f64 {
    1e-10
}

impl Settings for Adagrad {
    const NUMBERS: &'static [(&'static str, Range)] = &[
        ("learning_rate", NOT_NEGATIVE),
        ("epsilon", POSITIVE),
        ("initial_accumulator", NOT_NEGATIVE),
    ];

    fn numbers(&self) -> [f64; 5] {
        [
            self.learning_rate,
            self.epsilon,
            self.initial_accumulator,
            0.0,
            0.0,
        ]
    }

    fn of([learning_rate, epsilon, initial_accumulator, ..]: [f64; 5], _: [bool; 2]) -> Self {
        Self {
            learning_rate,
            epsilon,
            initial_accumulator,
        }
    }
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
