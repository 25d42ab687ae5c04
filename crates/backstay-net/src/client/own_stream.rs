//! The stream of a client's own pushes: for how long it is used.
//!
//! Servers end a stream when they have applied nothing of it for [`OWN_LEASE_US`]; otherwise the streams
//! of killed clients would never end. So a client begins a new stream after [`USED`], whose numbers
//! go on, and sends nothing of the old one after [`LEAVES`]. However long the client was stopped or
//! suspended, no push reaches a server that has forgotten its stream. A push that cannot leave any
//! longer fails, and its outcome is unknown. Times are of the [clock].

use std::sync::Arc;

use backstay_core::hash::mix64;
use backstay_core::replication::Micros;
use backstay_core::stream::{StreamId, OWN_LEASE_US};

use super::send_lease::SendLease;
use crate::clock;

const MINUTE: Micros = 60_000_000;
/// How long a client gives new pushes to one stream.
const USED: Micros = 15 * MINUTE;
/// How long pushes of the stream may leave, first tries and retries alike.
const LEAVES: Micros = 45 * MINUTE;
const _: () = assert!(USED < LEAVES && LEAVES < OWN_LEASE_US);

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct OwnStream {
    stream: StreamId,
    lease: Arc<SendLease>,
    since: Micros,
}

impl OwnStream {
    /// A stream that begins now.
    pub(super) fn new(stream: StreamId) -> Self {
        Self::at(stream, clock::now())
    }

    fn at(stream: StreamId, now: Micros) -> Self {
        let lease = SendLease::of(
            "the stream of this push was used for too long, and servers may have forgotten it",
        );
        if stream.is_own() {
            lease.set_until(now + LEAVES);
        }
        Self {
            stream,
            lease: Arc::new(lease),
            since: now,
        }
    }

    /// The stream of the newest pushes.
    pub(super) fn newest(&self) -> StreamId {
        self.stream
    }

    /// The stream of a push that is numbered now, and what lets its frames leave.
    pub(super) fn of_next(&mut self, now: Micros) -> (StreamId, Arc<SendLease>) {
        if self.stream.is_own() && self.since + USED <= now {
            // No other client draws the same: the first was drawn at random.
            let job = mix64(self.stream.job);
            *self = Self::at(StreamId { job, ..self.stream }, now);
        }
        (self.stream, Arc::clone(&self.lease))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use backstay_core::stream::OWN_PASS;

    fn stream(pass: u32) -> StreamId {
        StreamId {
            job: 1,
            pass,
            task: 0,
        }
    }

    #[test]
    fn nothing_leaves_when_servers_may_have_forgotten_the_stream() {
        let mut own = OwnStream::at(stream(OWN_PASS), 5);
        let (_, lease) = own.of_next(5 + USED - 1);
        // A server that heard its last push, just before that, has it for longer.
        assert_eq!(lease.ends(), Some(5 + LEAVES));
    }

    #[test]
    fn a_new_stream_begins_after_a_while() {
        let mut own = OwnStream::at(stream(OWN_PASS), 5);
        let (first, lease) = own.of_next(5 + USED - 1);
        assert_eq!(first, stream(OWN_PASS));
        let (second, next) = own.of_next(5 + USED);
        assert_ne!(second, first);
        assert!(second.is_own());
        assert!(
            !Arc::ptr_eq(&lease, &next),
            "the old one's end is not put off"
        );
        assert_eq!(own.of_next(5 + USED + 1).0, second);
        assert_eq!(own.newest(), second);
    }

    #[test]
    fn a_stream_of_another_kind_has_no_end() {
        let mut other = OwnStream::at(stream(1), 0);
        assert_eq!(other.of_next(OWN_LEASE_US).0, stream(1));
        assert!(other.lease.is_alive());
    }
}
