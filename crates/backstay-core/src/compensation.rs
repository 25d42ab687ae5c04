//! What tables do about stale gradients, and what pushes bring for it.

mod adaptive_revision;
mod delay;

use serde::{Deserialize, Serialize};

use crate::stream::TransactionId;

pub use adaptive_revision::RevisedAdagrad;
pub use delay::{Compensated, DelayCompensation};

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
    DelayCompensated(DelayCompensation),
    /// Adagrad that revises its steps by gradients that come late: [`RevisedAdagrad`].
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
            Self::Sum => adaptive_revision::told_elements(row_elements),
        }
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
    pub fn delay(self) -> Option<DelayCompensation> {
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
            Self::AdaptiveRevision => adaptive_revision::state_elements(row_elements),
        }
    }

    /// Write these words of a row that begins with a transaction.
    #[inline]
    pub(crate) fn init_state(self, state: &mut [f32], id: TransactionId) {
        state.fill(0.0);
        if let (Self::AdaptiveRevision, Some(birth)) = (self, state.last_mut()) {
            *birth = adaptive_revision::birth(id);
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

    /// From [`Self::code`]; `numbers` are those of a [`DelayCompensation`]. None: there is none like that.
    pub(crate) fn from_code(code: u8, numbers: [f64; 3]) -> Option<Self> {
        let [strength, decay, epsilon] = numbers;
        let mut ranges = DelayCompensation::NUMBERS
            .iter()
            .map(|(_, range)| range)
            .zip(numbers);
        match code {
            0 => Some(Self::Ignore),
            1 => Some(Self::Scale),
            2 | 3 if ranges.all(|((low, high), one)| (*low..=*high).contains(&one)) => {
                Some(Self::DelayCompensated(DelayCompensation {
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

#[cfg(test)]
mod tests {
    #![allow(clippy::float_cmp)] // Exact results are the point.

    use super::*;

    const DELAY: DelayCompensation = DelayCompensation {
        strength: 0.5,
        adaptive: true,
        decay: 0.25,
        epsilon: 0.125,
    };

    fn all() -> [Compensation; 5] {
        let constant = DelayCompensation {
            adaptive: false,
            ..DELAY
        };
        [
            Compensation::Ignore,
            Compensation::Scale,
            Compensation::DelayCompensated(DELAY),
            Compensation::DelayCompensated(constant),
            Compensation::AdaptiveRevision,
        ]
    }

    /// What brings a reference is moved or revised, and not slowed besides.
    #[test]
    fn only_what_is_staler_than_1_is_slowed() {
        for (staleness, divisor) in [(None, 1.0), (Some(0), 1.0), (Some(1), 1.0), (Some(7), 7.0)] {
            for one in all() {
                let wanted = if one == Compensation::Scale {
                    divisor
                } else {
                    1.0
                };
                assert_eq!(one.divisor(staleness), wanted, "{one:?}");
            }
        }
    }

    #[test]
    fn what_travels_between_servers_comes_back() {
        for one in all() {
            assert_eq!(
                Compensation::from_code(one.code(), DELAY.numbers()),
                Some(one)
            );
        }
        assert_eq!(Compensation::from_code(5, [0.0; 3]), None);
        for numbers in [[f64::NAN, 0.5, 1.0], [-1.0, 0.5, 1.0], [1.0, 1.5, 1.0]] {
            assert_eq!(Compensation::from_code(2, numbers), None);
        }
    }
}
