//! How stale the gradients of a push are: pure functions over numbers of its slots.
//!
//! A slot counts the update transactions of each table. An **origin** is one word: that count when
//! weights were read (40 bits), with the epoch of the slot's content (24 bits) above it. What a slot
//! has counted when it applies the push, less its origin, is the push's **staleness** there. See
//! docs/adr/0016-staleness-is-counted-in-the-slot.md.

use std::ops::AddAssign;

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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
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
            Self::Ignore => 1.0,
            Self::Scale => staleness.unwrap_or(0).max(1) as f32,
        }
    }

    /// Its number between servers.
    pub(crate) fn code(self) -> u8 {
        match self {
            Self::Ignore => 0,
            Self::Scale => 1,
        }
    }

    /// From [`Self::code`].
    pub(crate) fn from_code(code: u8) -> Option<Self> {
        [Self::Ignore, Self::Scale]
            .into_iter()
            .find(|one| one.code() == code)
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

/// How often pushes were how stale: one count for each slot of each push.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StalenessCounts {
    /// Bucket `n` above 0 has what was at least 2^(n - 1) and less than twice that.
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
        let bucket = (32 - one.leading_zeros()) as usize;
        self.buckets[bucket.min(BUCKETS - 1)] += 1;
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
    use super::*;

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
        for one in [Compensation::Ignore, Compensation::Scale] {
            assert_eq!(Compensation::from_code(one.code()), Some(one));
        }
        assert_eq!(Compensation::from_code(2), None);
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
