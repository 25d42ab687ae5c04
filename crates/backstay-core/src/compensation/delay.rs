//! Delay compensation: gradients are moved to where the weights are now.

use std::cell::RefCell;

use serde::{Deserialize, Serialize};

use crate::optimizer::{Range, RowOptimizer, FRACTION, NOT_NEGATIVE, POSITIVE};

/// Delay-compensated gradients: with `g` the gradient and `r` the weights that it was computed with,
///
/// ```text
/// constant:  lambda = strength
/// adaptive:  s = decay * s + (1 - decay) * g * g,   lambda = strength / sqrt(s + epsilon)
/// g' = g + lambda * g * g * (w - r)
/// ```
///
/// and the optimizer takes `g'` in the place of `g`. `s` is state of the row behind the optimizer's,
/// one word for each weight, from 0. Where `g'` would not be finite, it is `g`.
///
/// Source: S. Zheng et al., "Asynchronous stochastic gradient descent with delay compensation", ICML
/// 2017, equations 10 and 11; algorithms DC-ASGD-c and DC-ASGD-a.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DelayCompensation {
    /// The paper's lambda, or lambda 0 if it is adaptive.
    pub strength: f64,
    /// Whether it is divided by the root of the mean square of the gradients of each weight.
    #[serde(default)]
    pub adaptive: bool,
    /// Share of the mean square that stays.
    #[serde(default = "default_decay")]
    pub decay: f64,
    /// Keeps the division finite.
    #[serde(default = "default_epsilon")]
    pub epsilon: f64,
}

fn default_decay() -> f64 {
    0.95
}
fn default_epsilon() -> f64 {
    1e-7
}

impl DelayCompensation {
    /// Name and range of each number.
    pub const NUMBERS: &'static [(&'static str, Range)] = &[
        ("strength", NOT_NEGATIVE),
        ("decay", FRACTION),
        ("epsilon", POSITIVE),
    ];

    /// The numbers that [`Self::NUMBERS`] is about.
    pub fn numbers(&self) -> [f64; 3] {
        [self.strength, self.decay, self.epsilon]
    }

    /// Words behind the optimizer's state of a row of so many weights.
    pub fn state_elements(&self, row_elements: usize) -> usize {
        if self.adaptive {
            row_elements
        } else {
            0
        }
    }

    /// The compensated gradient of a row, into `out`.
    #[inline]
    fn compensate(
        &self,
        weights: &[f32],
        squares: &mut [f32],
        gradient: &[f32],
        reference: &[f32],
        out: &mut Vec<f32>,
    ) {
        out.clear();
        let strength = self.strength as f32;
        let moved = |lambda: f32, (g, (w, r)): (f32, (f32, f32))| {
            let there = g + lambda * (g * g) * (w - r);
            if there.is_finite() {
                there
            } else {
                g
            }
        };
        let places = weights.iter().copied().zip(reference.iter().copied());
        let all = gradient.iter().copied().zip(places);
        if !self.adaptive {
            out.extend(all.map(|one| moved(strength, one)));
            return;
        }
        let (decay, rest) = (self.decay as f32, (1.0 - self.decay) as f32);
        let epsilon = self.epsilon as f32;
        out.extend(all.zip(squares).map(|(one, square)| {
            let g = one.0;
            *square = (decay * *square + rest * (g * g)).min(f32::MAX);
            moved(strength / (*square + epsilon).sqrt(), one)
        }));
    }
}

/// An optimizer of which each gradient comes with the weights it was computed with: `gradient` of
/// [`RowOptimizer::update`] has these behind it.
pub struct Compensated<'a, O> {
    optimizer: &'a O,
    delay: DelayCompensation,
    scratch: RefCell<Vec<f32>>,
}

impl<'a, O: RowOptimizer> Compensated<'a, O> {
    /// Of an optimizer.
    pub fn new(optimizer: &'a O, delay: DelayCompensation) -> Self {
        Self {
            optimizer,
            delay,
            scratch: RefCell::default(),
        }
    }
}

impl<O: RowOptimizer> RowOptimizer for Compensated<'_, O> {
    fn state_elements(&self, row_elements: usize) -> usize {
        self.optimizer.state_elements(row_elements) + self.delay.state_elements(row_elements)
    }

    fn init_state(&self, state: &mut [f32]) {
        self.optimizer.init_state(state);
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
        let (gradient, reference) = gradient.split_at(elements);
        let (own, rest) = state.split_at_mut(self.optimizer.state_elements(elements));
        let squares = &mut rest[..self.delay.state_elements(elements)];
        let mut moved = self.scratch.borrow_mut();
        self.delay
            .compensate(weights, squares, gradient, reference, &mut moved);
        self.optimizer
            .update(weights, own, &moved, learning_rate_scale);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::float_cmp)] // Exact results are the point.

    use super::*;
    use crate::optimizer::Sgd;

    /// Equations 10 and 11 of the paper in float64, under plain SGD of rate 1.
    #[test]
    fn a_gradient_is_moved_to_where_the_weights_are() {
        for adaptive in [false, true] {
            let delay = DelayCompensation {
                strength: 0.5,
                adaptive,
                decay: 0.75,
                epsilon: 1e-7,
            };
            let sgd = Sgd { learning_rate: 1.0 };
            let one = Compensated::new(&sgd, delay);
            assert_eq!(one.state_elements(2), if adaptive { 2 } else { 0 });
            let (mut weights, mut state) = ([1.0f32, -2.0], vec![0.0f32; 2]);
            let (mut wanted, mut squares) = ([1.0f64, -2.0], [0.0f64; 2]);
            for values in [[0.5f32, -3.0, 0.75, -2.0], [1.0, 2.0, 4.0, 9.0]] {
                one.update(&mut weights, &mut state, &values, 1.0);
                for at in 0..2 {
                    let (g, r) = (f64::from(values[at]), f64::from(values[at + 2]));
                    squares[at] = 0.75 * squares[at] + 0.25 * g * g;
                    let lambda = if adaptive {
                        0.5 / (squares[at] + 1e-7).sqrt()
                    } else {
                        0.5
                    };
                    wanted[at] -= g + lambda * g * g * (wanted[at] - r);
                }
                for (weight, wanted) in weights.iter().zip(wanted) {
                    assert!((f64::from(*weight) - wanted).abs() < 1e-5);
                }
            }
        }
    }

    #[test]
    fn a_gradient_that_would_not_be_finite_is_not_moved() {
        for adaptive in [false, true] {
            let delay = DelayCompensation {
                strength: 1e30,
                adaptive,
                decay: 0.95,
                epsilon: 1e-7,
            };
            let sgd = Sgd { learning_rate: 1.0 };
            let one = Compensated::new(&sgd, delay);
            let (mut weights, mut state) = ([0.0f32], [0.0f32]);
            one.update(&mut weights, &mut state, &[1e25, 1e30], 1.0);
            assert_eq!((weights, state[0].is_finite()), ([-1e25], true));
        }
    }
}
