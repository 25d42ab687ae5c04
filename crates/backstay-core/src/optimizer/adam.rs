//! Adam, lazy: each row counts its own updates.

use serde::{Deserialize, Serialize};

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
/// **Lazy.** Only rows that are pushed change, and `t` counts the pushes of this row. PyTorch's
/// `SparseAdam` and Paddle's `lazy_mode=True` touch the same rows, but take `t` from the whole
/// parameter: a row first seen at step 10,000 gets almost no bias correction there, so its
/// first step is `learning_rate * (1 - beta1) / sqrt(1 - beta2)`, some 3.2 times larger with
/// the default betas; here it is `learning_rate`, as for any first step. The results are equal
/// where every row is pushed at every step, as those of dense tables are.
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

    fn of([learning_rate, beta1, beta2, epsilon, _]: [f64; 5], _: [bool; 2]) -> Self {
        Self {
            learning_rate,
            beta1,
            beta2,
            epsilon,
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
        let root = (1.0 - power(self.beta2, step)).sqrt();
        let rate = self.learning_rate * f64::from(learning_rate_scale) * root
            / (1.0 - power(self.beta1, step));
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

/// Add one to the count that a state word holds. It stays at 2^31 - 2^23, below the bits of
/// infinity, where every power of beta below 1 has long been 0.
#[inline]
fn count_update(word: &mut f32) -> u32 {
    const LAST: u32 = 0x7f7f_ffff;
    let step = (word.to_bits() + 1).min(LAST);
    *word = f32::from_bits(step);
    step
}

/// `base` to the power `exponent` by squaring: products only, so the same on every machine,
/// which is not promised of `f64::powi`.
#[inline]
fn power(base: f64, exponent: u32) -> f64 {
    let (mut result, mut square, mut left) = (1.0, base, exponent);
    while left > 0 {
        if left & 1 == 1 {
            result *= square;
        }
        square *= square;
        left >>= 1;
    }
    result
}

#[cfg(test)]
mod tests {
    #![allow(clippy::float_cmp)] // Exact results are the point.

    use super::*;

    #[test]
    fn powers() {
        assert_eq!(power(0.5, 10), 2f64.powi(-10));
        assert_eq!(power(0.0, 1), 0.0);
        assert!((power(0.999, 12_345) / 0.999f64.powf(12_345.0) - 1.0).abs() < 1e-12);
        assert_eq!(power(0.999, u32::MAX), 0.0);
    }

    #[test]
    fn the_count_saturates_below_infinity() {
        let mut word = 0.0;
        assert_eq!(count_update(&mut word), 1);
        assert_eq!(word.to_bits(), 1);
        word = f32::MAX;
        assert_eq!(count_update(&mut word), f32::MAX.to_bits());
        assert_eq!(word, f32::MAX);
    }

    #[test]
    fn a_first_step_has_the_size_of_the_learning_rate() {
        let adam = Adam {
            learning_rate: 0.001,
            beta1: 0.9,
            beta2: 0.999,
            epsilon: 1e-8,
        };
        let (mut weights, mut state) = ([0.0; 2], [0.0; 5]);
        adam.update(&mut weights, &mut state, &[3.0, -0.02], 1.0);
        assert!(
            (weights[0] + 0.001).abs() < 1e-8 && (weights[1] - 0.001).abs() < 1e-8,
            "{weights:?}"
        );
    }
}
