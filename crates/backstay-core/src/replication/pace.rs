//! How fast copies of slots go out: a bucket of bytes that fills with time.

use super::Micros;

/// A bucket holds what comes in this part of a second.
const BURSTS_PER_S: u64 = 50;

/// A piece goes out whole, so a bucket may be overdrawn; the next piece waits until that is paid.
#[derive(Debug, Clone)]
pub(super) struct Pace {
    bytes_per_s: u64,
    left: i64,
    filled_at: Micros,
}

impl Pace {
    /// A full bucket.
    pub(super) fn new(bytes_per_s: u64) -> Self {
        Self {
            bytes_per_s,
            left: Self::capacity(bytes_per_s),
            filled_at: 0,
        }
    }

    fn capacity(bytes_per_s: u64) -> i64 {
        i64::try_from((bytes_per_s / BURSTS_PER_S).max(1)).unwrap_or(i64::MAX)
    }

    /// Time has passed.
    pub(super) fn fill(&mut self, now: Micros) {
        let elapsed = u128::from(now.saturating_sub(self.filled_at));
        let added = elapsed * u128::from(self.bytes_per_s) / 1_000_000;
        // What is too little to count stays time that has not been counted.
        if added > 0 {
            self.filled_at = now;
            let added = i64::try_from(added).unwrap_or(i64::MAX);
            self.left = self
                .left
                .saturating_add(added)
                .min(Self::capacity(self.bytes_per_s));
        }
    }

    /// Something was sent.
    pub(super) fn spend(&mut self, bytes: u64) {
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        self.left = self.left.saturating_sub(bytes);
    }

    /// Whether nothing more may be sent now.
    pub(super) fn is_spent(&self) -> bool {
        self.left <= 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_overdrawn_bucket_waits_until_it_is_paid() {
        let mut pace = Pace::new(1_000);
        pace.fill(5_000_000);
        pace.spend(Pace::capacity(1_000) as u64 + 200);
        assert!(pace.is_spent());
        pace.fill(5_200_000);
        assert!(
            pace.is_spent(),
            "200 of 200 overdrawn bytes are paid, nothing is left"
        );
        pace.fill(5_201_000);
        assert!(!pace.is_spent());
    }

    #[test]
    fn rest_does_not_add_up_beyond_a_burst() {
        let mut pace = Pace::new(1_000);
        pace.fill(3_600_000_000);
        pace.spend(Pace::capacity(1_000) as u64);
        assert!(pace.is_spent());
    }

    #[test]
    fn short_times_are_not_forgotten() {
        let mut pace = Pace::new(1_000);
        pace.spend(Pace::capacity(1_000) as u64);
        for step in 1..=20 {
            pace.fill(step * 100);
        }
        assert!(!pace.is_spent(), "two milliseconds are two bytes");
    }

    #[test]
    fn without_a_limit_nothing_is_ever_spent() {
        let mut pace = Pace::new(u64::MAX);
        for step in 0..100 {
            pace.spend(1 << 40);
            pace.fill(step);
        }
        assert!(!pace.is_spent());
    }
}
