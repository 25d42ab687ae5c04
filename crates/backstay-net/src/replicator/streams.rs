//! Ends the streams of killed clients.
//!
//! The master of a slot ends a stream of which nothing was applied for [`LEASE`], by a transaction
//! in the slot's order. So all replicas forget it at the same place, and the state machine needs no
//! clock. A new master counts from when it first heard of the stream, as a backup or with a copy,
//! which can only lengthen the time. Clients use a stream for less than that
//! ([`crate::client::own_stream`]). Workers close the streams of tasks.

use std::sync::Arc;
use std::time::Duration;

use backstay_core::stream::{StreamId, TransactionId};
use backstay_core::transaction::Transaction;
use tracing::{debug, info};

use super::Replicator;
use crate::client::own_stream::LEASE;

/// Time between two looks at the streams.
pub(crate) const LOOK_EVERY: Duration = Duration::from_secs(30);
/// Streams that are ended in one look: each end is a transaction of every slot.
pub(crate) const ENDED_AT_ONCE: usize = 128;

impl Replicator {
    pub(super) fn hear(&self, stream: StreamId) {
        if stream.is_own() {
            self.heard.lock().insert(stream, self.now());
        }
    }

    /// End streams of clients that were not heard of for the lease, so many at most; how many.
    pub fn end_silent_streams(self: &Arc<Self>, most: usize) -> usize {
        let (now, known) = (self.now(), self.store.own_streams());
        let silent: Vec<StreamId> = {
            let mut heard = self.heard.lock();
            heard.retain(|stream, _| known.contains(stream));
            let mut is_silent =
                |stream: &StreamId| *heard.entry(*stream).or_insert(now) + LEASE <= now;
            known.into_iter().filter(&mut is_silent).collect()
        };
        let mut ended = 0;
        for stream in silent {
            let slots = self.store.served_slots_with(stream);
            if slots.is_empty() {
                // Their masters end it.
                continue;
            }
            let id = TransactionId {
                stream,
                sequence: u64::MAX,
            };
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
                "streams of clients that were not heard of have ended"
            );
        }
        ended
    }
}
