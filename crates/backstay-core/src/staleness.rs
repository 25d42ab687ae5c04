//! How stale the gradients of a push are: pure functions over numbers of its slots.
//!
//! A slot counts the update transactions of each table. An **origin** is one word: that count when
//! weights were read (40 bits), with the epoch of the slot's content (24 bits) above it. What a slot
//! has counted when it applies the push, less its origin, is the push's **staleness** there. See
//! docs/adr/0016-staleness-is-counted-in-the-slot.md.

use std::ops::AddAssign;

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

/// How stale a push was in the slots that applied it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PushStaleness {
    /// Slots in which it is known.
    pub known: u64,
    /// Of these, all together.
    pub sum: u64,
    /// The highest.
    pub max: u32,
    /// Slots to which an origin was told that is of no use.
    pub unknown: u64,
}

impl PushStaleness {
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

impl AddAssign for PushStaleness {
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
        let mut all = PushStaleness::default();
        all.count(Some(3));
        all.count(None);
        let mut other = PushStaleness::default();
        other.count(Some(5));
        all += other;
        let wanted = PushStaleness {
            known: 2,
            sum: 8,
            max: 5,
            unknown: 1,
        };
        assert_eq!(all, wanted);
    }
}
