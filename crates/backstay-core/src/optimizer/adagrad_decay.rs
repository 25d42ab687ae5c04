//! Adagrad that forgets: its accumulator decays.

use serde::{Deserialize, Serialize};

use super::{scaled_rate, Range, RowOptimizer, Settings, FRACTION, NOT_NEGATIVE, POSITIVE};

/// ```text
/// a  = max(decay * a, initial_accumulator) + g * g
/// w -= learning_rate * g / (sqrt(a) + epsilon)
/// ```
///
/// State: `a`, one word per weight, from `initial_accumulator`.
///
/// Adagrad's steps vanish in time; these do not fall below some `learning_rate * sqrt(1 - decay)`
/// times the gradient over its root mean square, so that a table learns for months.
///
/// Source: `DeepRec`'s `AdagradDecay`, whose accumulator is multiplied by a decay rate each so many
/// global steps, and not below its first value. Here it is at each update of the row, which needs
/// no count and forgets rare rows no sooner than frequent ones. Paddle's `decayed_adagrad` has
/// `(1 - decay) * g * g` and no lower bound: the same as this with `initial_accumulator` 0 and
/// learning rate and epsilon divided by `sqrt(1 - decay)`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdagradDecay {
    /// Step size.
    pub learning_rate: f64,
    /// Share of the accumulator that stays at an update.
    #[serde(default = "default_decay")]
    pub decay: f64,
    /// Keeps the first step of a weight finite.
    #[serde(default = "default_epsilon")]
    pub epsilon: f64,
    /// The state of a new row, below which it does not decay.
    #[serde(default = "default_initial_accumulator")]
    pub initial_accumulator: f64,
}

fn default_decay() -> f64 {
    0.9999
}
fn default_epsilon() -> f64 {
    1e-10
}
fn default_initial_accumulator() -> f64 {
    0.1
}

impl Settings for AdagradDecay {
    const NUMBERS: &'static [(&'static str, Range)] = &[
        ("learning_rate", NOT_NEGATIVE),
        ("decay", FRACTION),
        ("epsilon", POSITIVE),
        ("initial_accumulator", NOT_NEGATIVE),
    ];

    fn numbers(&self) -> [f64; 5] {
        [
            self.learning_rate,
            self.decay,
            self.epsilon,
            self.initial_accumulator,
            0.0,
        ]
    }

    fn of([learning_rate, decay, epsilon, initial_accumulator, _]: [f64; 5], _: [bool; 2]) -> Self {
        Self {
            learning_rate,
            decay,
            epsilon,
            initial_accumulator,
        }
    }
}

impl RowOptimizer for AdagradDecay {
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
        let (decay, epsilon) = (self.decay as f32, self.epsilon as f32);
        let floor = self.initial_accumulator as f32;
        for ((weight, accumulator), g) in weights.iter_mut().zip(state).zip(gradient) {
            *accumulator = (decay * *accumulator).max(floor) + g * g;
            *weight -= rate * g / (accumulator.sqrt() + epsilon);
        }
    }
}
