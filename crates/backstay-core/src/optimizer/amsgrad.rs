//! `AMSGrad`: Adam with the largest mean square so far, lazy; with or without weight decay.

use serde::{Deserialize, Serialize};

use super::adam::{default_beta1, default_beta2, default_epsilon, default_learning_rate};
use super::steps::{count_update, Steps};
use super::{Range, RowOptimizer, Settings, FRACTION, NOT_NEGATIVE, POSITIVE};

/// ```text
/// t += 1
/// w *= 1 - learning_rate * weight_decay
/// m  = beta1 * m + (1 - beta1) * g
/// v  = beta2 * v + (1 - beta2) * g * g
/// x  = max(x, v)
/// w -= learning_rate * m' / (sqrt(x') + epsilon),   m' = m / (1 - beta1^t),  x' = x / (1 - beta2^t)
/// ```
///
/// State: `m`, `v`, then `x`, one word per weight each, then `t` as the bits of an unsigned
/// integer in one word; all from 0. Lazy, and `t` counted, as [`super::Adam`]'s.
///
/// Source: S. Reddi, S. Kale and S. Kumar, "On the convergence of Adam and beyond", ICLR 2018,
/// algorithm 2, with the bias correction that Paddle and PyTorch have in `Adam(amsgrad=True)` and,
/// with a weight decay, in `AdamW(amsgrad=True)`. They correct the maximum by the step of now.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AmsGrad {
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
    /// Decay per unit of learning rate, as `AdamW`'s.
    #[serde(default)]
    pub weight_decay: f64,
    /// Whose steps `t` counts; see [`super::Adam`].
    #[serde(default)]
    pub steps: Steps,
}

impl Settings for AmsGrad {
    const NUMBERS: &'static [(&'static str, Range)] = &[
        ("learning_rate", NOT_NEGATIVE),
        ("beta1", FRACTION),
        ("beta2", FRACTION),
        ("epsilon", POSITIVE),
        ("weight_decay", NOT_NEGATIVE),
    ];

    fn numbers(&self) -> [f64; 5] {
        [
            self.learning_rate,
            self.beta1,
            self.beta2,
            self.epsilon,
            self.weight_decay,
        ]
    }

    fn flags(&self) -> [bool; 2] {
        [self.steps.flag(), false]
    }

    fn of(
        [learning_rate, beta1, beta2, epsilon, weight_decay]: [f64; 5],
        [is_global, _]: [bool; 2],
    ) -> Self {
        Self {
            learning_rate,
            beta1,
            beta2,
            epsilon,
            weight_decay,
            steps: Steps::of_flag(is_global),
        }
    }
}

impl RowOptimizer for AmsGrad {
    fn state_elements(&self, row_elements: usize) -> usize {
        3 * row_elements + 1
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
        let (squares, rest) = rest.split_at_mut(elements);
        let (maxima, count) = rest.split_at_mut(elements);
        let step = count_update(&mut count[0]);
        let scaled = self.learning_rate * f64::from(learning_rate_scale);
        let root = self.steps.correction(self.beta2, step).sqrt();
        let rate = (scaled * root / self.steps.correction(self.beta1, step)) as f32;
        let epsilon = (self.epsilon * root) as f32;
        let keep = (1.0 - scaled * self.weight_decay) as f32;
        let (beta1, rest1) = (self.beta1 as f32, (1.0 - self.beta1) as f32);
        let (beta2, rest2) = (self.beta2 as f32, (1.0 - self.beta2) as f32);
        let moments = means.iter_mut().zip(squares).zip(maxima);
        for ((weight, ((mean, square), max)), g) in weights.iter_mut().zip(moments).zip(gradient) {
            *mean = beta1 * *mean + rest1 * g;
            *square = beta2 * *square + rest2 * (g * g);
            *max = max.max(*square);
            *weight = keep * *weight - rate * (*mean / (max.sqrt() + epsilon));
        }
    }
}
