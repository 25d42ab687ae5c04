//! RMSProp, plain or centred, with or without momentum.

use serde::{Deserialize, Serialize};

use super::{scaled_rate, Range, RowOptimizer, Settings, FRACTION, NOT_NEGATIVE, POSITIVE};

/// ```text
/// s  = rho * s + (1 - rho) * g * g
/// a  = rho * a + (1 - rho) * g                           (centered; else a = 0)
/// d  = sqrt(s - a * a) + epsilon                         (epsilon_inside_sqrt: sqrt(s - a * a + epsilon))
/// b  = momentum * b + g / d;   w -= learning_rate * b    (momentum > 0)
/// w -= learning_rate * g / d                             (momentum = 0)
/// ```
///
/// State: `s`; then `a` if centred; then `b` if momentum is above 0; one word per weight each,
/// from 0.
///
/// Source: T. Tieleman and G. Hinton, "Lecture 6.5: RMSProp", COURSERA Neural Networks for
/// Machine Learning, 2012; centred form: A. Graves, arXiv:1308.0850, equations 38 to 45, which
/// has epsilon inside the root.
/// PyTorch adds epsilon outside the root (the default here), Paddle and TensorFlow 1 inside.
/// They also accumulate `learning_rate * g / d` in `b`, PyTorch and this code `g / d`: the same
/// as long as the learning rate is.
/// Rounding can bring `s - a * a` below 0, where both frameworks give NaN; here it counts as 0.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RmsProp {
    /// Step size.
    #[serde(default = "default_learning_rate")]
    pub learning_rate: f64,
    /// Share of the mean squared gradient that stays.
    #[serde(default = "default_rho")]
    pub rho: f64,
    /// Keeps steps finite where gradients are 0.
    #[serde(default = "default_epsilon")]
    pub epsilon: f64,
    /// Share of the last step that stays.
    #[serde(default)]
    pub momentum: f64,
    /// Divide by the deviation of gradients instead of their root mean square.
    #[serde(default)]
    pub centered: bool,
    /// `sqrt(x + epsilon)` instead of `sqrt(x) + epsilon`.
    #[serde(default)]
    pub epsilon_inside_sqrt: bool,
}

fn default_learning_rate() -> f64 {
    0.01
}
fn default_rho() -> f64 {
    0.99
}
fn default_epsilon() -> f64 {
    1e-8
}

impl Settings for RmsProp {
    const NUMBERS: &'static [(&'static str, Range)] = &[
        ("learning_rate", NOT_NEGATIVE),
        ("rho", FRACTION),
        ("epsilon", POSITIVE),
        ("momentum", FRACTION),
    ];

    fn numbers(&self) -> [f64; 5] {
        [
            self.learning_rate,
            self.rho,
            self.epsilon,
            self.momentum,
            0.0,
        ]
    }

    fn flags(&self) -> [bool; 2] {
        [self.centered, self.epsilon_inside_sqrt]
    }

    fn of(
        [learning_rate, rho, epsilon, momentum, _]: [f64; 5],
        [centered, epsilon_inside_sqrt]: [bool; 2],
    ) -> Self {
        Self {
            learning_rate,
            rho,
            epsilon,
            momentum,
            centered,
            epsilon_inside_sqrt,
        }
    }

    fn with_state_of(self, held: &Self) -> Self {
        // Steps are kept only with momentum.
        let keeps_steps = (held.momentum > 0.0) == (self.momentum > 0.0);
        Self {
            centered: held.centered,
            momentum: if keeps_steps {
                self.momentum
            } else {
                held.momentum
            },
            ..self
        }
    }
}

impl RmsProp {
    fn words_per_weight(&self) -> usize {
        1 + usize::from(self.centered) + usize::from(self.momentum > 0.0)
    }

    #[inline]
    fn run<const CENTERED: bool, const MOMENTUM: bool>(
        &self,
        weights: &mut [f32],
        state: &mut [f32],
        gradient: &[f32],
        rate: f32,
    ) {
        let (rho, rest, momentum) = (
            self.rho as f32,
            (1.0 - self.rho) as f32,
            self.momentum as f32,
        );
        let epsilon = self.epsilon as f32;
        let (inside, outside) = if self.epsilon_inside_sqrt {
            (epsilon, 0.0)
        } else {
            (0.0, epsilon)
        };
        let elements = weights.len();
        let gradient = &gradient[..elements];
        let (squares, more) = state.split_at_mut(elements);
        let (means, more) = more.split_at_mut(if CENTERED { elements } else { 0 });
        let steps = &mut more[..if MOMENTUM { elements } else { 0 }];
        // An index, because two of the slices may be empty.
        for i in 0..elements {
            let g = gradient[i];
            squares[i] = rho * squares[i] + rest * (g * g);
            let mut variance = squares[i];
            if CENTERED {
                means[i] = rho * means[i] + rest * g;
                variance = (variance - means[i] * means[i]).max(0.0);
            }
            let deviation = (variance + inside).sqrt() + outside;
            if MOMENTUM {
                steps[i] = momentum * steps[i] + g / deviation;
                weights[i] -= rate * steps[i];
            } else {
                weights[i] -= rate * g / deviation;
            }
        }
    }
}

impl RowOptimizer for RmsProp {
    fn state_elements(&self, row_elements: usize) -> usize {
        self.words_per_weight() * row_elements
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
        match (self.centered, self.momentum > 0.0) {
            (false, false) => self.run::<false, false>(weights, state, gradient, rate),
            (false, true) => self.run::<false, true>(weights, state, gradient, rate),
            (true, false) => self.run::<true, false>(weights, state, gradient, rate),
            (true, true) => self.run::<true, true>(weights, state, gradient, rate),
        }
    }
}
