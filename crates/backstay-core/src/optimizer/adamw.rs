//! Adam with decoupled weight decay, lazy.

use serde::{Deserialize, Serialize};

use super::adam::{default_beta1, default_beta2, default_epsilon, default_learning_rate};
use super::steps::Steps;
use super::{Adam, Range, RowOptimizer, Settings, FRACTION, NOT_NEGATIVE, POSITIVE};

/// `w *= 1 - learning_rate * weight_decay`, then a step of [`Adam`].
///
/// State: as Adam's.
///
/// Source: I. Loshchilov and F. Hutter, "Decoupled weight decay regularization", ICLR 2019,
/// algorithm 2, with the decay multiplied by the learning rate, as Paddle and PyTorch do.
/// Rows that are not pushed do not decay. With [`Steps::Global`] the decay follows the learning rate
/// scale too, and with it the trainer's correction.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdamW {
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
    /// Decay per unit of learning rate.
    #[serde(default = "default_weight_decay")]
    pub weight_decay: f64,
    /// Whose steps count; see [`Adam`].
    #[serde(default)]
    pub steps: Steps,
}

fn default_weight_decay() -> f64 {
    0.01
}

impl AdamW {
    /// The step after the decay.
    #[inline]
    fn adam(&self) -> Adam {
        let Self {
            learning_rate,
            beta1,
            beta2,
            epsilon,
            steps,
            ..
        } = *self;
        Adam {
            learning_rate,
            beta1,
            beta2,
            epsilon,
            steps,
        }
    }
}

impl Settings for AdamW {
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

impl RowOptimizer for AdamW {
    fn state_elements(&self, row_elements: usize) -> usize {
        self.adam().state_elements(row_elements)
    }

    fn init_state(&self, state: &mut [f32]) {
        self.adam().init_state(state);
    }

    #[inline]
    fn update(
        &self,
        weights: &mut [f32],
        state: &mut [f32],
        gradient: &[f32],
        learning_rate_scale: f32,
    ) {
        let rate = self.learning_rate * f64::from(learning_rate_scale);
        let keep = (1.0 - rate * self.weight_decay) as f32;
        for weight in weights.iter_mut() {
            *weight *= keep;
        }
        self.adam()
            .update(weights, state, gradient, learning_rate_scale);
    }
}
