//! Adadelta: steps of the size of the steps before.

use serde::{Deserialize, Serialize};

use super::{scaled_rate, Range, RowOptimizer, Settings, FRACTION, NOT_NEGATIVE, POSITIVE};

/// ```text
/// s  = rho * s + (1 - rho) * g * g
/// d  = sqrt(u + epsilon) / sqrt(s + epsilon) * g
/// u  = rho * u + (1 - rho) * d * d
/// w -= learning_rate * d
/// ```
///
/// State: `s`, then `u`, one word per weight each, from 0.
///
/// Source: M. Zeiler, "ADADELTA: an adaptive learning rate method", arXiv:1212.5701, algorithm 1,
/// with a learning rate as in Paddle and PyTorch (the paper's is 1). Their defaults: learning
/// rate 0.001 and 1, rho 0.95 and 0.9.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Adadelta {
    /// Step size.
    #[serde(default = "default_learning_rate")]
    pub learning_rate: f64,
    /// Share of the mean squares that stays.
    #[serde(default = "default_rho")]
    pub rho: f64,
    /// Decides how long the first steps are.
    #[serde(default = "default_epsilon")]
    pub epsilon: f64,
}

fn default_learning_rate() -> f64 {
    1.0
}
fn default_rho() -> f64 {
    0.9
}
fn default_epsilon() -> f64 {
    1e-6
}

impl Settings for Adadelta {
    const NUMBERS: &'static [(&'static str, Range)] = &[
        ("learning_rate", NOT_NEGATIVE),
        ("rho", FRACTION),
        ("epsilon", POSITIVE),
    ];

    fn numbers(&self) -> [f64; 5] {
        [self.learning_rate, self.rho, self.epsilon, 0.0, 0.0]
    }

    fn of([learning_rate, rho, epsilon, ..]: [f64; 5], _: [bool; 2]) -> Self {
        Self {
            learning_rate,
            rho,
            epsilon,
        }
    }
}

impl RowOptimizer for Adadelta {
    fn state_elements(&self, row_elements: usize) -> usize {
        2 * row_elements
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
        let (rho, rest) = (self.rho as f32, (1.0 - self.rho) as f32);
        let epsilon = self.epsilon as f32;
        let (squares, deltas) = state.split_at_mut(weights.len());
        for (((weight, square), delta), g) in
            weights.iter_mut().zip(squares).zip(deltas).zip(gradient)
        {
            *square = rho * *square + rest * (g * g);
            let step = (*delta + epsilon).sqrt() / (*square + epsilon).sqrt() * g;
            *delta = rho * *delta + rest * (step * step);
            *weight -= rate * step;
        }
    }
}
