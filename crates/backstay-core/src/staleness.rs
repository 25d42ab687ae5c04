//! How stale the gradients of a push are: pure functions over numbers of its slots.
//!
//! A slot counts the update transactions of each table. An **origin** is one word: that count when
//! weights were read (40 bits), with the epoch of the slot's content (24 bits) above it. What a slot
//! has counted when it applies the push, less its origin, is the push's **staleness** there. See
//! docs/adr/0016-staleness-is-counted-in-the-slot.md.

use std::cell::RefCell;
use std::ops::AddAssign;

use crate::optimizer::{Range, RowOptimizer, FRACTION, NOT_NEGATIVE, POSITIVE};
use crate::revision;
use crate::stream::TransactionId;
use serde::{Deserialize, Serialize};

/// The origin of a push that does not tell it, or of a slot that its client never read.
pub const UNTOLD: u64 = u64::MAX;

/// Bits of an origin that hold the count.
const COUNT_BITS: u32 = 40;
const COUNT_MASK: u64 = (1 << COUNT_BITS) - 1;

/// Buckets of [`StalenessCounts`]: 0, 1, 2 and 3, 4 to 7, and so on; the last has all above.
pub const BUCKETS: usize = 17;

/// The origin of weights that are read now, in a slot of this epoch with so many updates.
pub fn origin(epoch: u64, updates: u64) -> u64 {
    epoch << COUNT_BITS | updates & COUNT_MASK
}

/// How many updates came between an origin and now; `None`: not told, or of other content of the
/// slot.
pub fn staleness(origin: u64, epoch: u64, updates: u64) -> Option<u32> {
    let now = self::origin(epoch, updates);
    if origin >> COUNT_BITS != now >> COUNT_BITS {
        return None;
    }
    let behind = now.checked_sub(origin)?;
    Some(u32::try_from(behind).unwrap_or(u32::MAX))
}

/// What a table does about stale gradients. It travels with each push, so that every replica does
/// the same, whatever it knows of the table.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Compensation {
    /// Nothing.
    #[default]
    Ignore,
    /// The learning rate of a push is divided by its staleness in each slot, where that is above 1.
    ///
    /// Source: W. Zhang, S. Gupta, X. Lian and J. Liu, "Staleness-aware Async-SGD for distributed deep
    /// learning", IJCAI 2016, equation 5.
    Scale,
    /// Each push brings the weights that its gradients were computed with, and the gradients are
    /// moved to where the weights are now.
    DelayCompensated(Delay),
    /// Adagrad that revises its steps by gradients that come late: [`crate::revision`].
    AdaptiveRevision,
}

/// What stands behind each gradient of a push for the compensation of its delay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reference {
    /// The weights that it was computed with.
    Weights,
    /// The sum of gradients that these weights had seen, and the birth of that sum.
    Sum,
}

impl Reference {
    /// Values of a row of so many weights.
    pub fn values(self, row_elements: usize) -> usize {
        match self {
            Self::Weights => row_elements,
            Self::Sum => revision::told_elements(row_elements),
        }
    }
}

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
pub struct Delay {
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

impl Delay {
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
    delay: Delay,
    scratch: RefCell<Vec<f32>>,
}

impl<'a, O: RowOptimizer> Compensated<'a, O> {
    /// Of an optimizer.
    pub fn new(optimizer: &'a O, delay: Delay) -> Self {
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

impl Compensation {
    /// Whether it does nothing.
    pub fn is_ignore(&self) -> bool {
        *self == Self::Ignore
    }

    /// By what the learning rate is divided in a slot. What is not known counts as fresh.
    #[inline]
    pub fn divisor(self, staleness: Option<u32>) -> f32 {
        match self {
            Self::Ignore | Self::DelayCompensated(_) | Self::AdaptiveRevision => 1.0,
            Self::Scale => staleness.unwrap_or(0).max(1) as f32,
        }
    }

    /// What moves the gradients, if pushes bring weights.
    pub fn delay(self) -> Option<Delay> {
        match self {
            Self::DelayCompensated(delay) => Some(delay),
            Self::Ignore | Self::Scale | Self::AdaptiveRevision => None,
        }
    }

    /// What pushes have to bring behind their gradients.
    pub fn reference(self) -> Option<Reference> {
        match self {
            Self::Ignore | Self::Scale => None,
            Self::DelayCompensated(_) => Some(Reference::Weights),
            Self::AdaptiveRevision => Some(Reference::Sum),
        }
    }

    /// Words behind the optimizer's state of a row of so many weights.
    pub fn state_elements(self, row_elements: usize) -> usize {
        match self {
            Self::Ignore | Self::Scale => 0,
            Self::DelayCompensated(delay) => delay.state_elements(row_elements),
            Self::AdaptiveRevision => revision::state_elements(row_elements),
        }
    }

    /// Write these words of a row that begins with a transaction.
    #[inline]
    pub(crate) fn init_state(self, state: &mut [f32], id: TransactionId) {
        state.fill(0.0);
        if let (Self::AdaptiveRevision, Some(birth)) = (self, state.last_mut()) {
            *birth = revision::birth(id);
        }
    }

    /// Whether a table of this one can go on under the other: rows and pushes are laid out alike.
    pub fn fits(self, other: Self) -> bool {
        let kept = |one: Self| (one.reference(), one.delay().map(|delay| delay.adaptive));
        kept(self) == kept(other)
    }

    /// Its number between servers.
    pub(crate) fn code(self) -> u8 {
        match self {
            Self::Ignore => 0,
            Self::Scale => 1,
            Self::DelayCompensated(delay) if !delay.adaptive => 2,
            Self::DelayCompensated(_) => 3,
            Self::AdaptiveRevision => 4,
        }
    }

    /// Whether numbers come with a [`Self::code`].
    pub(crate) fn has_numbers(code: u8) -> bool {
        matches!(code, 2 | 3)
    }

    /// From [`Self::code`]; `numbers` are those of a [`Delay`]. None: there is none like that.
    pub(crate) fn from_code(code: u8, numbers: [f64; 3]) -> Option<Self> {
        let [strength, decay, epsilon] = numbers;
        let mut ranges = Delay::NUMBERS.iter().map(|(_, range)| range).zip(numbers);
        match code {
            0 => Some(Self::Ignore),
            1 => Some(Self::Scale),
            2 | 3 if ranges.all(|((low, high), one)| (*low..=*high).contains(&one)) => {
                Some(Self::DelayCompensated(Delay {
                    strength,
                    adaptive: code == 3,
                    decay,
                    epsilon,
                }))
            }
            4 => Some(Self::AdaptiveRevision),
            _ => None,
        }
    }
}

/// How stale a push was in the slots that applied it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Staleness {
    /// Slots in which it is known.
    pub known: u64,
    /// Of these, all together.
    pub sum: u64,
    /// The highest.
    pub max: u32,
    /// Slots to which an origin was told that is of no use.
    pub unknown: u64,
}

impl Staleness {
    /// Count a slot.
    pub fn count(&mut self, staleness: Option<u32>) {
        let Some(one) = staleness else {
            self.unknown += 1;
            return;
        };
        self.known += 1;
        self.sum += u64::from(one);
        self.max = self.max.max(one);
    }
}

impl AddAssign for Staleness {
    fn add_assign(&mut self, other: Self) {
        self.known += other.known;
        self.sum += other.sum;
        self.max = self.max.max(other.max);
        self.unknown += other.unknown;
    }
}

/// The bucket of a histogram that a staleness belongs to: bucket `n` above 0 has what is at least
/// 2^(n - 1) and less than twice that; the last one also has what is more.
pub fn bucket_of(staleness: u32) -> usize {
    ((32 - staleness.leading_zeros()) as usize).min(BUCKETS - 1)
}

/// How often pushes were how stale: one count for each slot of each push.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StalenessCounts {
    /// By [`bucket_of`].
    pub buckets: [u64; BUCKETS],
    /// All known together.
    pub sum: u64,
    /// Told, and of no use.
    pub unknown: u64,
}

impl StalenessCounts {
    /// Count a slot.
    pub fn count(&mut self, staleness: Option<u32>) {
        let Some(one) = staleness else {
            self.unknown += 1;
            return;
        };
        self.buckets[bucket_of(one)] += 1;
        self.sum += u64::from(one);
    }
}

impl AddAssign for StalenessCounts {
    fn add_assign(&mut self, other: Self) {
        for (bucket, more) in self.buckets.iter_mut().zip(other.buckets) {
            *bucket += more;
        }
        self.sum += other.sum;
        self.unknown += other.unknown;
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::float_cmp)] // Exact results are the point.

    use super::*;
    use crate::optimizer::Sgd;

    #[test]
    fn an_origin_of_the_same_content_tells_how_much_came_since() {
        assert_eq!(staleness(origin(7, 5), 7, 5), Some(0));
        assert_eq!(staleness(origin(7, 5), 7, 9), Some(4));
        assert_eq!(staleness(origin(1 << 24 | 7, 5), 7, 6), Some(1), "24 bits");
        assert_eq!(
            staleness(origin(0, 0), 0, u64::from(u32::MAX) + 9),
            Some(u32::MAX)
        );
    }

    #[test]
    fn an_origin_of_other_content_is_unknown_and_never_negative() {
        assert_eq!(staleness(origin(7, 5), 7, 4), None);
        assert_eq!(staleness(origin(6, 5), 7, 9), None);
        assert_eq!(staleness(origin(8, 5), 7, 9), None);
        assert_eq!(staleness(UNTOLD, 7, 9), None);
        assert_eq!(staleness(UNTOLD, (1 << 24) - 1, 9), None);
    }

    #[test]
    fn only_what_is_staler_than_1_is_slowed() {
        for (staleness, divisor) in [(None, 1.0), (Some(0), 1.0), (Some(1), 1.0), (Some(7), 7.0)] {
            assert_eq!(
                Compensation::Scale.divisor(staleness).to_bits(),
                f32::to_bits(divisor)
            );
            assert_eq!(
                Compensation::Ignore.divisor(staleness).to_bits(),
                1f32.to_bits()
            );
        }
        let delay = Delay {
            strength: 0.5,
            adaptive: true,
            decay: 0.25,
            epsilon: 0.125,
        };
        let constant = Delay {
            adaptive: false,
            ..delay
        };
        for one in [
            Compensation::Ignore,
            Compensation::Scale,
            Compensation::DelayCompensated(delay),
            Compensation::DelayCompensated(constant),
            Compensation::AdaptiveRevision,
        ] {
            assert_eq!(
                Compensation::from_code(one.code(), delay.numbers()),
                Some(one)
            );
        }
        assert_eq!(Compensation::from_code(5, [0.0; 3]), None);
        for numbers in [[f64::NAN, 0.5, 1.0], [-1.0, 0.5, 1.0], [1.0, 1.5, 1.0]] {
            assert_eq!(Compensation::from_code(2, numbers), None);
        }
    }

    /// Equations 10 and 11 of the paper in float64, under plain SGD of rate 1.
    #[test]
    fn a_gradient_is_moved_to_where_the_weights_are() {
        for adaptive in [false, true] {
            let delay = Delay {
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
            let delay = Delay {
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

    #[test]
    fn counts_are_doubling_buckets() {
        let mut counts = StalenessCounts::default();
        for one in [0, 1, 2, 3, 4, 7, 8, 1 << 14, 1 << 15, u32::MAX] {
            counts.count(Some(one));
        }
        counts.count(None);
        let mut wanted = [0; BUCKETS];
        for (bucket, count) in [(0, 1), (1, 1), (2, 2), (3, 2), (4, 1), (15, 1), (16, 2)] {
            wanted[bucket] = count;
        }
        assert_eq!((counts.buckets, counts.unknown), (wanted, 1));
    }

    #[test]
    fn slots_of_a_push_add_up() {
        let mut all = Staleness::default();
        all.count(Some(3));
        all.count(None);
        let mut other = Staleness::default();
        other.count(Some(5));
        all += other;
        let wanted = Staleness {
            known: 2,
            sum: 8,
            max: 5,
            unknown: 1,
        };
        assert_eq!(all, wanted);
    }
}
