//! The clock by which leases are counted.
//!
//! It goes on while the machine sleeps or is suspended, where the system has such a clock
//! (`CLOCK_BOOTTIME` on Linux): what ran out meanwhile must be over when the machine resumes, for
//! the rest of the cluster has gone on. Elsewhere it is `CLOCK_MONOTONIC`. Other processes of the
//! machine read the same clock, so a moment of it means the same to all of them
//! (`backstay.consensus.clock` in Python).

use std::fmt;
use std::sync::Arc;

use backstay_core::replication::Micros;
use rustix::time::{clock_gettime, ClockId};

#[cfg(any(target_os = "linux", target_os = "android"))]
const ID: ClockId = ClockId::Boottime;
#[cfg(not(any(target_os = "linux", target_os = "android")))]
const ID: ClockId = ClockId::Monotonic;

/// Microseconds on this machine's clock now.
pub fn now() -> Micros {
    let now = clock_gettime(ID);
    now.tv_sec as Micros * 1_000_000 + now.tv_nsec as Micros / 1_000
}

/// A moment of the clock that was given in seconds; one before its beginning, or not a number, is
/// long ago.
pub fn moment(seconds: f64) -> Micros {
    // A cast ends at the limits of the type.
    (seconds * 1e6) as Micros
}

/// The machine's clock, or one that a test sets.
#[derive(Clone)]
pub struct Clock(Arc<dyn Fn() -> Micros + Send + Sync>);

impl Clock {
    /// A clock that a test sets.
    pub fn of(now: impl Fn() -> Micros + Send + Sync + 'static) -> Self {
        Self(Arc::new(now))
    }

    /// What it shows.
    pub fn now(&self) -> Micros {
        (self.0)()
    }
}

impl Default for Clock {
    fn default() -> Self {
        Self::of(now)
    }
}

impl fmt::Debug for Clock {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("Clock")
    }
}

/// Seconds since 1970 by the machine's clock of the day, or by one that a test sets. Rows are seen
/// by it, and periods begin by it. It must be right within a fraction of `unseen_seconds` and of the
/// periods: a slot never goes back in time, so a master's clock that was ahead leaves the slots of
/// that master there. Their rows expire as if so much time had passed, and their periods up to that
/// time are done. A clock that is behind delays both, and a later master sees its rows as older than
/// they are. Nothing else relies on it: leases are counted by the clock above, and copies of a slot
/// are equal whatever it shows.
#[derive(Clone)]
pub struct WallClock(Arc<dyn Fn() -> u32 + Send + Sync>);

impl WallClock {
    /// A clock that a test sets.
    pub fn of(seconds: impl Fn() -> u32 + Send + Sync + 'static) -> Self {
        Self(Arc::new(seconds))
    }

    /// What it shows.
    pub fn seconds(&self) -> u32 {
        (self.0)()
    }
}

impl Default for WallClock {
    fn default() -> Self {
        Self::of(|| {
            let seconds = clock_gettime(ClockId::Realtime).tv_sec;
            u32::try_from(seconds.max(0)).unwrap_or(u32::MAX)
        })
    }
}

impl fmt::Debug for WallClock {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("WallClock")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_that_cannot_be_are_long_ago_or_never() {
        assert_eq!(moment(f64::NAN), 0);
        assert_eq!(moment(-3.0), 0);
        assert_eq!(moment(1.5), 1_500_000);
        assert_eq!(moment(f64::INFINITY), Micros::MAX);
    }

    #[test]
    fn it_goes_forward() {
        let before = now();
        assert!(before > 0);
        assert!(now() >= before);
    }
}
