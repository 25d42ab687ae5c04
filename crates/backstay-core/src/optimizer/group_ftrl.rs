//! FTRL-Proximal with a group lasso: whole rows become 0.

use serde::{Deserialize, Serialize};

use super::ftrl::MIN_RATE;
use super::row_sum::row_sum;
use super::{scaled_rate, Range, RowOptimizer, Settings, NOT_NEGATIVE, POSITIVE};

/// For a row of `d` weights:
///
/// ```text
/// n' = n + g * g
/// z += g - (sqrt(n') - sqrt(n)) / learning_rate * w
/// s  = 0 if |z| <= l1, else sign(z) * l1 - z                      for each weight
/// w  = 0                                                          if norm(s) <= l21 * sqrt(d)
/// w  = (1 - l21 * sqrt(d) / norm(s)) * s / (sqrt(n') / learning_rate + l2)        otherwise
/// n  = n'
/// ```
///
/// State: `z` from 0, then `n` from `initial_accumulator`, one word per weight each. The norm is
/// the Euclidean one, taken in float64.
///
/// Source: the closed form of the sparse group lasso of H. Yang et al., "Online learning for group
/// lasso", ICML 2010, with the step sizes of FTRL-Proximal (see [`super::Ftrl`]), as X. Ni et al.,
/// "Feature selection for Facebook feed ranking system via a group-sparsity-regularized training
/// algorithm", CIKM 2019, and Y. Yue et al., "Adaptive optimizers with sparse group lasso for neural
/// networks in CTR prediction", arXiv:2107.14432, use it. `TFPlus` (`SparseGroupFtrl`)
/// multiplies `l2` by 2; this code does not.
///
/// As with FTRL, initial weights other than 0 are forgotten at a row's first push, and a push
/// whose learning rate is 0 (or below 1e-30) changes nothing.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GroupFtrl {
    /// Step size.
    pub learning_rate: f64,
    /// Strength of L1 regularization: weights of little use become exactly 0.
    #[serde(default)]
    pub l1: f64,
    /// Strength of L2 regularization.
    #[serde(default)]
    pub l2: f64,
    /// Strength of the group lasso: rows of little use become exactly 0.
    #[serde(default)]
    pub l21: f64,
    /// The sum of squared gradients that a new row starts with; above 0.
    #[serde(default = "default_initial_accumulator")]
    pub initial_accumulator: f64,
}

fn default_initial_accumulator() -> f64 {
    0.1
}

impl Settings for GroupFtrl {
    const NUMBERS: &'static [(&'static str, Range)] = &[
        // The formula divides by it.
        ("learning_rate", POSITIVE),
        ("l1", NOT_NEGATIVE),
        ("l2", NOT_NEGATIVE),
        ("l21", NOT_NEGATIVE),
        // With 0, a tiny first gradient would divide by 0.
        ("initial_accumulator", POSITIVE),
    ];

    fn numbers(&self) -> [f64; 5] {
        [
            self.learning_rate,
            self.l1,
            self.l2,
            self.l21,
            self.initial_accumulator,
        ]
    }

    fn of([learning_rate, l1, l2, l21, initial_accumulator]: [f64; 5], _: [bool; 2]) -> Self {
        Self {
            learning_rate,
            l1,
            l2,
            l21,
            initial_accumulator,
        }
    }
}

/// What `l1` leaves of a weight's sum: `s` of the formula.
#[inline]
fn shrunk(linear: f32, l1: f32) -> f32 {
    if linear.abs() > l1 {
        l1.copysign(linear) - linear
    } else {
        0.0
    }
}

impl RowOptimizer for GroupFtrl {
    fn state_elements(&self, row_elements: usize) -> usize {
        2 * row_elements
    }

    fn init_state(&self, state: &mut [f32]) {
        let (linears, accumulators) = state.split_at_mut(state.len() / 2);
        linears.fill(0.0);
        accumulators.fill(self.initial_accumulator as f32);
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
        if rate < MIN_RATE {
            return;
        }
        let elements = weights.len();
        let (l1, l2) = (self.l1 as f32, self.l2 as f32);
        let (linears, accumulators) = state.split_at_mut(elements);
        for (((weight, linear), accumulator), g) in weights
            .iter()
            .zip(linears.iter_mut())
            .zip(accumulators.iter_mut())
            .zip(gradient)
        {
            let before = accumulator.sqrt();
            *accumulator += g * g;
            *linear += g - (accumulator.sqrt() - before) / rate * weight;
        }
        let square = |i: usize| f64::from(shrunk(linears[i], l1)).powi(2);
        let norm = row_sum(elements, square).sqrt();
        let threshold = self.l21 * (elements as f64).sqrt();
        if norm <= threshold {
            weights.fill(0.0);
            return;
        }
        let kept = (1.0 - threshold / norm) as f32;
        for ((weight, &linear), accumulator) in weights.iter_mut().zip(&*linears).zip(accumulators)
        {
            *weight = kept * shrunk(linear, l1) / (accumulator.sqrt() / rate + l2);
        }
    }
}
