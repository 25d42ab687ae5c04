//! FTRL-Proximal: sparse models by L1 regularization.

use serde::{Deserialize, Serialize};

use super::{scaled_rate, Range, RowOptimizer, Settings, NOT_NEGATIVE, POSITIVE};

/// Below this learning rate a push is ignored: the formula divides by it.
pub(super) const MIN_RATE: f32 = 1e-30;

/// With `p = -learning_rate_power`:
///
/// ```text
/// n' = n + g * g
/// z += g - (n'^p - n^p) / learning_rate * w
/// w  = 0                                                        if |z| <= l1
/// w  = (sign(z) * l1 - z) / (n'^p / learning_rate + l2)         otherwise
/// n  = n'
/// ```
///
/// State: `z` from 0, then `n` from `initial_accumulator`, one word per weight each.
///
/// Source: H. B. McMahan et al., "Ad click prediction: a view from the trenches", KDD 2013,
/// algorithm 1, with `learning_rate` for alpha and `initial_accumulator` in the place of beta
/// (it starts the root above 0; the paper adds beta to the root instead). `learning_rate_power`
/// generalises the root, as in TensorFlow and Paddle; -0.5 is the paper's. **Both frameworks
/// multiply l2 by 2; the paper and this code do not**: pass twice theirs.
///
/// The weights follow from `z` and `n` alone, so initial weights other than 0 are forgotten at
/// a row's first push. A push whose learning rate is 0 (or below 1e-30) changes nothing.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ftrl {
    /// Step size.
    pub learning_rate: f64,
    /// Strength of L1 regularization: weights of little use become exactly 0.
    #[serde(default)]
    pub l1: f64,
    /// Strength of L2 regularization.
    #[serde(default)]
    pub l2: f64,
    /// How the step size shrinks with the gradients seen; -1 to 0.
    #[serde(default = "default_learning_rate_power")]
    pub learning_rate_power: f64,
    /// The sum of squared gradients that a new row starts with; above 0.
    #[serde(default = "default_initial_accumulator")]
    pub initial_accumulator: f64,
}

fn default_learning_rate_power() -> f64 {
    -0.5
}
fn default_initial_accumulator() -> f64 {
    0.1
}

impl Settings for Ftrl {
    const NUMBERS: &'static [(&'static str, Range)] = &[
        // The formula divides by it.
        ("learning_rate", POSITIVE),
        ("l1", NOT_NEGATIVE),
        ("l2", NOT_NEGATIVE),
        ("learning_rate_power", (-1.0, 0.0)),
        // With 0, a tiny first gradient would divide by 0.
        ("initial_accumulator", POSITIVE),
    ];

    fn numbers(&self) -> [f64; 5] {
        [
            self.learning_rate,
            self.l1,
            self.l2,
            self.learning_rate_power,
            self.initial_accumulator,
        ]
    }

    fn of(
        [learning_rate, l1, l2, learning_rate_power, initial_accumulator]: [f64; 5],
        _: [bool; 2],
    ) -> Self {
        Self {
            learning_rate,
            l1,
            l2,
            learning_rate_power,
            initial_accumulator,
        }
    }
}

impl Ftrl {
    #[inline]
    fn run(
        &self,
        weights: &mut [f32],
        state: &mut [f32],
        gradient: &[f32],
        rate: f32,
        power: impl Fn(f32) -> f32,
    ) {
        let (l1, l2) = (self.l1 as f32, self.l2 as f32);
        let (linears, accumulators) = state.split_at_mut(weights.len());
        for (((weight, linear), accumulator), g) in weights
            .iter_mut()
            .zip(linears)
            .zip(accumulators)
            .zip(gradient)
        {
            let before = power(*accumulator);
            *accumulator += g * g;
            let after = power(*accumulator);
            *linear += g - (after - before) / rate * *weight;
            let shrunk = (l1.copysign(*linear) - *linear) / (after / rate + l2);
            *weight = if linear.abs() > l1 { shrunk } else { 0.0 };
        }
    }
}

impl RowOptimizer for Ftrl {
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
        let power = -self.learning_rate_power as f32;
        if power.to_bits() == 0.5f32.to_bits() {
            self.run(weights, state, gradient, rate, f32::sqrt);
        } else {
            // Not std's: its results differ between platforms.
            self.run(weights, state, gradient, rate, |base| {
                libm::powf(base, power)
            });
        }
    }
}
