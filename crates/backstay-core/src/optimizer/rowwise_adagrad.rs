//! Row-wise Adagrad: one step size for a row.

use serde::{Deserialize, Serialize};

use super::row_sum::row_sum;
use super::{scaled_rate, Range, RowOptimizer, Settings, NOT_NEGATIVE, POSITIVE};

/// ```text
/// a += mean(g * g)                                      over the row
/// w -= learning_rate * g / (sqrt(a) + epsilon)
/// ```
///
/// State: `a`, one word per row, from `initial_accumulator`. The mean is taken in float64.
///
/// Source: `FBGEMM`'s exact row-wise Adagrad, which `TorchRec` uses (D. Mudigere et al.,
/// "Software-hardware co-design for fast and scalable training of deep learning recommendation
/// models", ISCA 2022, section 4.1.4). A row of a dense table is one of its blocks.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RowWiseAdagrad {
    /// Step size.
    pub learning_rate: f64,
    /// Keeps the first step of a row finite.
    #[serde(default = "default_epsilon")]
    pub epsilon: f64,
    /// The state of a new row.
    #[serde(default)]
    pub initial_accumulator: f64,
}

fn default_epsilon() -> f64 {
    1e-8
}

impl Settings for RowWiseAdagrad {
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

impl RowOptimizer for RowWiseAdagrad {
    fn state_elements(&self, _row_elements: usize) -> usize {
        1
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
        let elements = weights.len();
        let gradient = &gradient[..elements];
        let squares = row_sum(elements, |i| {
            f64::from(gradient[i]) * f64::from(gradient[i])
        });
        state[0] += (squares / elements as f64) as f32;
        let rate = scaled_rate(self.learning_rate, learning_rate_scale)
            / (state[0].sqrt() + self.epsilon as f32);
        for (weight, g) in weights.iter_mut().zip(gradient) {
            *weight -= rate * g;
        }
    }
}
