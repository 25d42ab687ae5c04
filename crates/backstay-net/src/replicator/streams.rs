//! Ends the streams of clients and tasks that are gone.
//!
//! The master of a slot ends a stream of which nothing was applied for its time, by a transaction
//! in the slot's order. So all replicas forget it at the same place, and the state machine needs no
//! clock. A new master counts from when it first heard of the stream, as a backup or with a copy,
//! which can only lengthen the time.
//!
//! A client's own stream ends after [`OWN_LEASE_US`]; clients use one for less than that
//! (`client/own_stream.rs`). Workers close the streams of tasks. Those of a job that never came to
//! its end, and is not run again, expire after a grace time: what still comes of them is refused,
//! because nobody knows any longer what was applied.

use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::Duration;

use backstay_core::replication::Micros;
use backstay_core::stream::{StreamId, TransactionId, OWN_LEASE_US};
use backstay_core::transaction::Transaction;
use tracing::{debug, info};

use super::Replicator;

/// Time between two looks at the streams.
pub(crate) const LOOK_EVERY: Duration = Duration::from_secs(30);
/// The grace time of tasks' streams, if nothing else is set: a week.
pub const GRACE: Micros = 7 * 24 * 3600 * 1_000_000;
/// Streams that are ended in one look: each end is a transaction of every slot.
pub(crate) const ENDED_AT_ONCE: usize = 128;

impl Replicator {
    /// The streams of tasks expire when nothing was heard of them for so long.
    pub fn set_stream_grace(&self, grace: Micros) {
        self.stream_grace.store(grace, Ordering::Release);
    }

    pub(super) fn hear(&self, stream: StreamId) {
        if stream.is_own() || stream.is_of_task() {
            self.heard.lock().insert(stream, self.now());
        }
    }

    /// End streams of which nothing was heard for their time, so many at most; how many.
    pub fn end_silent_streams(self: &Arc<Self>, most: usize) -> usize {
        let (now, known) = (self.now(), self.store.open_streams());
        let grace = self.stream_grace.load(Ordering::Acquire);
        let silent: Vec<StreamId> = {
            let mut heard = self.heard.lock();
            heard.retain(|stream, _| known.contains(stream));
            let mut is_silent = |stream: &StreamId| {
                let most = if stream.is_own() { OWN_LEASE_US } else { grace };
                heard.entry(*stream).or_insert(now).saturating_add(most) <= now
            };
            known.into_iter().filter(&mut is_silent).collect()
        };
        let mut ended = 0;
        for stream in silent {
            let known = self.store.served_slots_with(stream);
            if known.is_empty() {
                // Their masters end it.
                continue;
            }
            let sequence = u64::MAX;
            let (stream, slots) = if stream.is_own() {
                (stream, known)
            } else {
                // In all slots of this node, so that none of them applies a part of a late push.
                let mark = stream.expiry();
                (mark, self.store.served_slots_without(mark, sequence))
            };
            let id = TransactionId { stream, sequence };
            // The answer is not used: what is refused now is tried at the next look.
            match self.push(Transaction::close(id, slots)) {
                Ok(_) => ended += 1,
                Err(refusal) => debug!(?stream, %refusal, "a silent stream could not be ended"),
            }
            if ended == most {
                break;
            }
        }
        if ended > 0 {
            info!(
                ended,
                "closed streams of clients and tasks from which no push came for too long"
            );
        }
        ended
    }
}
