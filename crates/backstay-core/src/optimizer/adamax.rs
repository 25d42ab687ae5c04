//! Adamax: Adam with the largest gradient in place of the mean square, lazy.

use serde::{Deserialize, Serialize};

use super::steps::{count_update, Steps};
use super::{Range, RowOptimizer, Settings, FRACTION, NOT_NEGATIVE, POSITIVE};

/// ```text
/// t += 1
/// m  = beta1 * m + (1 - beta1) * g
/// u  = max(beta2 * u, |g| + epsilon)                (epsilon_on_maximum: max(beta2 * u + epsilon, |g|))
/// w -= learning_rate / (1 - beta1^t) * m / u
/// ```
///
/// State: `m`, then `u`, one word per weight each, then `t` as the bits of an unsigned integer in
/// one word; all from 0. Lazy, and `t` counted, as [`super::Adam`]'s; with [`Steps::Global`] the
/// trainer's learning rate scale has the factor `1 / (1 - beta1^t)`.
///
/// Source: D. Kingma and J. Ba, "Adam: a method for stochastic optimization", ICLR 2015,
/// algorithm 2, which has no epsilon. PyTorch adds it to the gradient (the default here), Paddle to
/// the decayed maximum.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Adamax {
    /// Step size.
    #[serde(default = "default_learning_rate")]
    pub learning_rate: f64,
    /// Share of the mean gradient that stays.
    #[serde(default = "default_beta1")]
    pub beta1: f64,
    /// Share of the largest gradient that stays.
    #[serde(default = "default_beta2")]
    pub beta2: f64,
    /// Keeps steps finite where gradients are 0.
    #[serde(default = "default_epsilon")]
    pub epsilon: f64,
    /// Whose steps `t` counts.
    #[serde(default)]
    pub steps: Steps,
    /// Add epsilon to the decayed maximum instead of to the gradient.
    #[serde(default)]
    pub epsilon_on_maximum: bool,
}

fn default_learning_rate() -> f64 {
    0.002
}
fn default_beta1() -> f64 {
    0.9
}
fn default_beta2() -> f64 {
    0.999
}
fn default_epsilon() -> f64 {
    1e-8
}

impl Settings for Adamax {
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
        [self.steps.flag(), self.epsilon_on_maximum]
    }

    fn of(
        [learning_rate, beta1, beta2, epsilon, _]: [f64; 5],
        [is_global, epsilon_on_maximum]: [bool; 2],
    ) -> Self {
        Self {
            learning_rate,
            beta1,
            beta2,
            epsilon,
            steps: Steps::of_flag(is_global),
            epsilon_on_maximum,
        }
    }
}

impl RowOptimizer for Adamax {
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
        let (maxima, count) = rest.split_at_mut(elements);
        let step = count_update(&mut count[0]);
        let rate = self.learning_rate * f64::from(learning_rate_scale)
            / self.steps.correction(self.beta1, step);
        let rate = rate as f32;
        let (beta1, rest1) = (self.beta1 as f32, (1.0 - self.beta1) as f32);
        let (beta2, epsilon) = (self.beta2 as f32, self.epsilon as f32);
        let (on_gradient, on_maximum) = if self.epsilon_on_maximum {
            (0.0, epsilon)
        } else {
            (epsilon, 0.0)
        };
        for (((weight, mean), max), g) in weights.iter_mut().zip(means).zip(maxima).zip(gradient) {
            *mean = beta1 * *mean + rest1 * g;
            *max = (beta2 * *max + on_maximum).max(g.abs() + on_gradient);
            *weight -= rate * (*mean / *max);
        }
    }
}
