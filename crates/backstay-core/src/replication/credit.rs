//! How many bytes of copies may be on their way to a node.
//!
//! Pushes share the connection with copies, and stand behind what is on its way there. So that
//! they do not stand for long, the receiver confirms each message of a copy, and the sender has
//! only so many bytes unconfirmed that the link takes them in a fraction of the time that a push
//! may take. How many that are follows from how long the confirmations take.

use std::collections::VecDeque;

use super::Micros;

/// The largest window is so many times the smallest.
pub const GROWTH: u64 = 16;

/// The window of one connection.
#[derive(Debug, Clone, Default)]
pub(super) struct Credit {
    /// Bytes that may be unconfirmed; 0 before anything was sent.
    window: u64,
    /// Messages that are not confirmed: bytes, when they were sent, of which copy.
    sent: VecDeque<(u64, Micros, u64)>,
    /// Their bytes.
    on_the_way: u64,
    /// What was sent before says nothing of the window that there is now.
    changed_at: Micros,
}

impl Credit {
    /// Whether a message may be sent; `smallest` is the smallest window.
    pub(super) fn has_room(&self, smallest: u64) -> bool {
        self.on_the_way < self.window.max(smallest)
    }

    /// Bytes that are not confirmed.
    pub(super) fn on_the_way(&self) -> u64 {
        self.on_the_way
    }

    /// Whether something is not confirmed.
    pub(super) fn is_awaited(&self) -> bool {
        !self.sent.is_empty()
    }

    /// A message of a copy is on its way.
    pub(super) fn spend(&mut self, now: Micros, bytes: u64, copy: u64) {
        // One of no bytes would never fill the window.
        let bytes = bytes.max(1);
        self.on_the_way += bytes;
        self.sent.push_back((bytes, now, copy));
    }

    /// The oldest message is confirmed. One that took longer than `slow` halves the window,
    /// others widen it. Returns its copy; none if no message was awaited.
    pub(super) fn confirm(&mut self, now: Micros, slow: Micros, smallest: u64) -> Option<u64> {
        let (bytes, sent_at, copy) = self.sent.pop_front()?;
        let is_slow = now.saturating_sub(sent_at) > slow;
        let was_full = self.on_the_way >= self.window;
        self.on_the_way -= bytes;
        if is_slow && sent_at >= self.changed_at {
            self.window /= 2;
            self.changed_at = now;
        } else if !is_slow && was_full {
            // One message more for each window that went through.
            self.window += (bytes * bytes / self.window.max(1)).max(1);
        }
        self.window = self.window.clamp(smallest, smallest.saturating_mul(GROWTH));
        Some(copy)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes unconfirmed at most, over a link that takes `rate` bytes in a millisecond, once the
    /// window has come to rest.
    fn most_on_the_way(rate: u64) -> u64 {
        let (mut credit, smallest, slow) = (Credit::default(), 1_000, 50);
        let (mut most, mut free_at) = (0, 0);
        let mut arrivals: VecDeque<Micros> = VecDeque::new();
        for now in 0..20_000 {
            while arrivals.front().is_some_and(|&at| at <= now) {
                arrivals.pop_front();
                assert_eq!(credit.confirm(now, slow, smallest), Some(1));
            }
            while credit.has_room(smallest) {
                credit.spend(now, 100, 1);
                free_at = free_at.max(now * rate) + 100;
                arrivals.push_back(free_at.div_ceil(rate) + 1);
            }
            if now > 10_000 {
                most = most.max(credit.on_the_way);
            }
        }
        most
    }

    #[test]
    fn a_fast_link_gets_the_largest_window_and_a_slow_one_the_smallest() {
        assert_eq!(most_on_the_way(1_000), 16_000);
        assert!(most_on_the_way(10) <= 1_200);
        // 100 bytes in a millisecond: 50 ms are 5,000.
        assert!((2_500..=6_000).contains(&most_on_the_way(100)));
    }

    #[test]
    fn what_nobody_awaits_confirms_nothing() {
        let mut credit = Credit::default();
        assert_eq!(credit.confirm(1, 1, 1), None);
        assert!(!credit.is_awaited());
    }
}
