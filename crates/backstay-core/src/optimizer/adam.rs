//! Adam, lazy: only rows that are pushed change.

use serde::{Deserialize, Serialize};

use super::steps::{count_update, Steps};
use super::{Range, RowOptimizer, Settings, FRACTION, NOT_NEGATIVE, POSITIVE};

/// ```text
/// t += 1
/// m  = beta1 * m + (1 - beta1) * g
/// v  = beta2 * v + (1 - beta2) * g * g
/// w -= learning_rate * m' / (sqrt(v') + epsilon),   m' = m / (1 - beta1^t),  v' = v / (1 - beta2^t)
/// ```
///
/// State: `m`, then `v`, one word per weight each, then `t` as the bits of an unsigned
/// integer in one word; all from 0.
///
/// Source: D. Kingma and J. Ba, "Adam: a method for stochastic optimization", ICLR 2015,
/// algorithm 1. It is computed in the efficient order of the end of the paper's section 2:
/// `w -= rate_t * m / (sqrt(v) + epsilon_t)`, with `rate_t = learning_rate * sqrt(1 - beta2^t) /
/// (1 - beta1^t)` and `epsilon_t = epsilon * sqrt(1 - beta2^t)`. The last factor keeps it equal
/// to algorithm 1, as in Paddle and PyTorch; TensorFlow and PyTorch's `SparseAdam` leave it out
/// (the paper's "epsilon hat"): smaller steps while t is small and gradients are near epsilon.
///
/// **Lazy.** Only rows that are pushed change. With [`Steps::Row`] `t` counts the pushes of the
/// row. With [`Steps::Global`] it is the trainer's step, as in PyTorch's `SparseAdam` and Paddle's
/// `lazy_mode=True`: nothing is corrected here, because the trainer's learning rate scale has the
/// factor `sqrt(1 - beta2^t) / (1 - beta1^t)`, and epsilon is added to the uncorrected root, as in
/// `SparseAdam`. A row first seen late then begins with a step of `learning_rate * (1 - beta1) /
/// sqrt(1 - beta2)`, some 3.2 times `learning_rate` with the default betas. The state is the same
/// under both. The results are equal where every row is pushed at every step, as those of dense
/// tables are, but for epsilon.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Adam {
    /// Step size.
    #[serde(default = "default_learning_rate")]
    pub learning_rate: f64,
    /// Share of the mean gradient that stays.
    #[serde(default = "default_beta1")]
    pub beta1: f64,
    /// Share of the mean squared gradient that stays.
    #[serde(default = "default_beta2")]
    pub beta2: f64,
    /// Keeps steps finite where gradients are 0.
    #[serde(default = "default_epsilon")]
    pub epsilon: f64,
    /// Whose steps `t` counts.
    #[serde(default)]
    pub steps: Steps,
}

pub(super) fn default_learning_rate() -> f64 {
    0.001
}
pub(super) fn default_beta1() -> f64 {
    0.9
}
pub(super) fn default_beta2() -> f64 {
    0.999
}
pub(super) fn default_epsilon() -> f64 {
    1e-8
}

impl Settings for Adam {
    const NUMBERS: &'static [(&'static str, Range)] = &[
        ("learning_rate", NOT_NEGATIVE),
        ("beta1", FRACTION),
        ("beta2", FRACTION),
        ("epsilon", POSITIVE),
    ];

    fn numbers(&self) -> [f64; 5] {
        [
            self.learning_rate,
            self.beta1,
            self.beta2,
            self.epsilon,
            0.0,
        ]
    }

    fn flags(&self) -> [bool; 2] {
        [self.steps.flag(), false]
    }

    fn of([learning_rate, beta1, beta2, epsilon, _]: [f64; 5], [is_global, _]: [bool; 2]) -> Self {
        Self {
            learning_rate,
            beta1,
            beta2,
            epsilon,
            steps: Steps::of_flag(is_global),
        }
    }
}

impl RowOptimizer for Adam {
    fn state_elements(&self, row_elements: usize) -> usize {
        2 * row_elements + 1
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
        let elements = weights.len();
        let (means, rest) = state.split_at_mut(elements);
        let (squares, count) = rest.split_at_mut(elements);
        let step = count_update(&mut count[0]);
        let root = self.steps.correction(self.beta2, step).sqrt();
        let rate = self.learning_rate * f64::from(learning_rate_scale) * root
            / self.steps.correction(self.beta1, step);
        let (rate, epsilon) = (rate as f32, (self.epsilon * root) as f32);
        let (beta1, rest1) = (self.beta1 as f32, (1.0 - self.beta1) as f32);
        let (beta2, rest2) = (self.beta2 as f32, (1.0 - self.beta2) as f32);
        for (((weight, mean), square), g) in
            weights.iter_mut().zip(means).zip(squares).zip(gradient)
        {
            *mean = beta1 * *mean + rest1 * g;
            *square = beta2 * *square + rest2 * (g * g);
            *weight -= rate * (*mean / (square.sqrt() + epsilon));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn adam(steps: Steps) -> Adam {
        Adam {
            learning_rate: 0.001,
            beta1: 0.9,
            beta2: 0.999,
            epsilon: 1e-8,
            steps,
        }
    }

    fn first_step(steps: Steps) -> [f32; 2] {
        let (mut weights, mut state) = ([0.0; 2], [0.0; 5]);
        adam(steps).update(&mut weights, &mut state, &[3.0, -0.02], 1.0);
        weights
    }

    #[test]
    fn a_first_step_has_the_size_of_the_learning_rate() {
        let [down, up] = first_step(Steps::Row);
        assert!((down + 0.001).abs() < 1e-8 && (up - 0.001).abs() < 1e-8);
    }

    #[test]
    fn a_late_rows_first_step_is_longer_under_global_steps() {
        let [down, up] = first_step(Steps::Global);
        let late = 0.001 * 0.1 / 0.001f32.sqrt();
        assert!((down + late).abs() < 1e-6 && (up - late).abs() < 1e-6);
    }

    /// A rule that changes on a table with rows finds the count of each row as it should be.
    #[test]
    fn the_state_is_the_same_under_both_rules() {
        let mut states = [[0.0; 5]; 2];
        for (state, steps) in states.iter_mut().zip([Steps::Row, Steps::Global]) {
            for _ in 0..3 {
                adam(steps).update(&mut [0.0; 2], state, &[3.0, -0.02], 1.0);
            }
        }
        assert_eq!(states[0].map(f32::to_bits), states[1].map(f32::to_bits));
    }
}
