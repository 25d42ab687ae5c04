//! Adaptive revision: Adagrad for gradients that come late. Pure functions over one row.
//!
//! A row keeps the sum of its gradients. A pull brings that sum along, a push sends it back, and so
//! the server knows what was applied in between.

use crate::hash::mix64;
use crate::optimizer::{scaled_rate, Adagrad, RowOptimizer};
use crate::stream::TransactionId;

/// Words behind the optimizer's state of a row of so many weights: `lack`, `sum`, birth.
pub(crate) fn state_elements(row_elements: usize) -> usize {
    2 * row_elements + 1
}

/// Words of these that a pull brings along, and a push sends back: the last ones, `sum` and birth.
pub(crate) fn told_elements(row_elements: usize) -> usize {
    row_elements + 1
}

/// The mark of a row's state that begins with a transaction: equal on every replica, different for
/// another transaction, and never 0, which means no row. A whole number, so that it travels as
/// any weight does.
pub(crate) fn birth(id: TransactionId) -> f32 {
    let stream = id.stream;
    let task = u64::from(stream.pass) << 32 | u64::from(stream.task);
    let mix = |hash: u64, word: u64| mix64(hash.rotate_left(5) ^ word);
    let hash = [task, id.sequence].into_iter().fold(mix64(stream.job), mix);
    // Up to 2^23 float32 has each whole number.
    (1 + (hash >> 41)) as f32
}

/// Adagrad of which each gradient comes with the sum of gradients that its weights had seen:
/// `gradient` of [`RowOptimizer::update`] has that, and the row's birth, behind it. With `g` the
/// gradient and `r` that sum,
///
/// ```text
/// b = sum - r                 # what was applied since the weights were read
/// old = learning_rate / (sqrt(a) + epsilon)
/// z += g * g + 2 * g * b
/// a = max(a, z)
/// new = learning_rate / (sqrt(a) + epsilon)
/// w = w - new * g + (old - new) * b
/// sum += g
/// ```
///
/// `a` is Adagrad's own state. Behind it stand `lack`, which is `a - z`, and `sum`, from 0, then the
/// birth of the state. If the birth that comes along is of another state of the row, or of none, all
/// of its `sum` came since: `r` is 0. Without delay it does what Adagrad does, bit for bit.
///
/// Source: B. McMahan and M. Streeter, "Delay-tolerant algorithms for asynchronous distributed online
/// learning", NIPS 2014, algorithm `AdaptiveRevision`; their `gbar` is `sum`, `z'` is `a`. Epsilon
/// stands where Adagrad has it.
pub struct RevisedAdagrad<'a> {
    adagrad: &'a Adagrad,
}

impl<'a> RevisedAdagrad<'a> {
    /// Of an optimizer.
    pub fn new(adagrad: &'a Adagrad) -> Self {
        Self { adagrad }
    }
}

impl RowOptimizer for RevisedAdagrad<'_> {
    fn state_elements(&self, row_elements: usize) -> usize {
        self.adagrad.state_elements(row_elements) + state_elements(row_elements)
    }

    fn init_state(&self, state: &mut [f32]) {
        self.adagrad.init_state(state);
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
        let rate = scaled_rate(self.adagrad.learning_rate, learning_rate_scale);
        let epsilon = self.adagrad.epsilon as f32;
        let (gradient, told) = gradient.split_at(elements);
        let (read, told_birth) = told.split_at(elements);
        let (highest, state) = state.split_at_mut(elements);
        let (lacks, state) = state.split_at_mut(elements);
        let (sums, birth) = state.split_at_mut(elements);
        let same = if told_birth[0].to_bits() == birth[0].to_bits() {
            1.0
        } else {
            0.0
        };
        let states = highest.iter_mut().zip(lacks).zip(sums);
        let told = gradient.iter().zip(read);
        for ((weight, ((a, lack), sum)), (&g, &r)) in weights.iter_mut().zip(states).zip(told) {
            let since = (*sum - same * r).clamp(-f32::MAX, f32::MAX);
            let old = rate / (a.sqrt() + epsilon);
            let z = (*a - *lack) + (g * g + 2.0 * g * since);
            // All that is kept stays finite.
            let z = if z.is_finite() { z } else { f32::MAX };
            *a = a.max(z);
            *lack = (*a - z).min(f32::MAX);
            *sum = (*sum + g).clamp(-f32::MAX, f32::MAX);
            let root = a.sqrt() + epsilon;
            let revision = (old - rate / root) * since;
            *weight -= rate * g / root;
            if revision.is_finite() && revision != 0.0 {
                *weight += revision;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::float_cmp)] // Exact results are the point.

    use super::*;
    use crate::stream::StreamId;

    const ADAGRAD: Adagrad = Adagrad {
        learning_rate: 0.5,
        epsilon: 1e-10,
        initial_accumulator: 0.25,
    };

    fn id(sequence: u64) -> TransactionId {
        let stream = StreamId {
            job: 1,
            pass: 2,
            task: 3,
        };
        TransactionId { stream, sequence }
    }

    /// The paper's state of a weight.
    struct Paper {
        weight: f64,
        sum: f64,
        z: f64,
        highest: f64,
    }

    impl Paper {
        fn update(&mut self, gradient: f64, read: f64) {
            let since = self.sum - read;
            let old = 0.5 / self.highest.sqrt();
            self.z += gradient * gradient + 2.0 * gradient * since;
            self.highest = self.highest.max(self.z);
            let new = 0.5 / self.highest.sqrt();
            self.weight += -new * gradient + (old - new) * since;
            self.sum += gradient;
        }
    }

    /// Three workers by turns, each of which pulls when it has pushed: 2 updates of delay. Some
    /// gradients turn, so that z falls below its highest value.
    #[test]
    fn a_late_gradient_revises_as_in_the_paper() {
        const ELEMENTS: usize = 3;
        let revised = RevisedAdagrad::new(&ADAGRAD);
        let mut state = vec![0.0f32; revised.state_elements(ELEMENTS)];
        let (own, rest) = state.split_at_mut(ELEMENTS);
        revised.init_state(own);
        rest[2 * ELEMENTS] = birth(id(0));
        let mut weights = [1.0f32, -2.0, 0.5];
        let mut paper = weights.map(|weight| Paper {
            weight: f64::from(weight),
            sum: 0.0,
            z: 0.25,
            highest: 0.25,
        });
        let told = |state: &[f32]| state[2 * ELEMENTS..].to_vec();
        let mut pulled = vec![told(&state); 3];
        let mut read = [[0.0f64; ELEMENTS]; 3];
        let mut lacked = false;
        for step in 0..60usize {
            let worker = step % 3;
            let gradient: Vec<f32> = (0..ELEMENTS)
                .map(|at| ((step * 7 + at * 3) % 11) as f32 / 4.0 - 1.0)
                .collect();
            let values = [&gradient[..], &pulled[worker]].concat();
            revised.update(&mut weights, &mut state, &values, 1.0);
            for at in 0..ELEMENTS {
                paper[at].update(f64::from(gradient[at]), read[worker][at]);
            }
            lacked |= state[ELEMENTS] > 0.0;
            for (weight, paper) in weights.iter().zip(&paper) {
                let error = (f64::from(*weight) - paper.weight).abs();
                assert!(error < 1e-5 * (1.0 + paper.weight.abs()), "step {step}");
            }
            pulled[worker] = told(&state);
            read[worker] = [0, 1, 2].map(|at| paper[at].sum);
        }
        assert!(lacked, "z was at its highest all the time");
    }

    #[test]
    fn without_delay_it_is_adagrad() {
        let revised = RevisedAdagrad::new(&ADAGRAD);
        let mut state = vec![0.25f32, 0.0, 0.0, birth(id(0))];
        let (mut weights, mut plain) = ([1.0f32], ([1.0f32], [0.25f32]));
        for step in 0..50 {
            let g = (step % 7) as f32 - 2.7;
            let values = [g, state[2], state[3]];
            revised.update(&mut weights, &mut state, &values, 0.5);
            ADAGRAD.update(&mut plain.0, &mut plain.1, &[g], 0.5);
            assert_eq!((weights, state[0]), (plain.0, plain.1[0]), "step {step}");
        }
    }

    /// A sum of a state that is no more says nothing of this one.
    #[test]
    fn a_sum_of_another_birth_counts_as_none() {
        let revised = RevisedAdagrad::new(&ADAGRAD);
        let after = |told: [f32; 2]| {
            let (mut weights, mut state) = ([0.0f32], vec![1.25f32, 0.0, 1.0, birth(id(0))]);
            let values = [0.5, told[0], told[1]];
            revised.update(&mut weights, &mut state, &values, 1.0);
            (weights, state)
        };
        assert_ne!(birth(id(0)), birth(id(1)));
        let of_no_row = after([0.0, 0.0]);
        assert_eq!(after([1e30, birth(id(1))]), of_no_row);
        assert_eq!(after([0.0, birth(id(0))]), of_no_row);
        assert_ne!(after([1.0, birth(id(0))]), of_no_row);
    }

    #[test]
    fn what_would_not_be_finite_is_left_out() {
        let adagrad = Adagrad {
            initial_accumulator: 0.0,
            ..ADAGRAD
        };
        let revised = RevisedAdagrad::new(&adagrad);
        let (mut weights, mut state) = ([0.0f32], vec![0.0f32, 0.0, 0.0, 7.0]);
        for (g, r) in [
            (f32::MAX, 0.0),
            (f32::MAX, 0.0),
            (f32::MAX, -f32::MAX),
            (-f32::MAX, -f32::MAX),
            (1.0, f32::MAX),
        ] {
            revised.update(&mut weights, &mut state, &[g, r, 7.0], 1.0);
            let all = weights.iter().chain(&state);
            assert!(all.copied().all(f32::is_finite), "{weights:?} {state:?}");
        }
    }
}
