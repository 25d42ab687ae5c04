//! Log lines by which one push can be followed through all nodes that touch it.
//!
//! They carry the push's (job, pass, task, sequence), which is the same on every node and in
//! every retry, and the place in its master's order (lsn) where there is one. They are written
//! at level debug under a target of their own, so that they can be had without the rest.

use backstay_core::replication::{Message, NodeId};
use backstay_core::stream::TransactionId;

/// Log a step of a push; its fields are looked at only where the line is written.
macro_rules! push_event {
    ($id:expr, $message:literal $(, $($fields:tt)+)?) => {
        tracing::debug!(
            target: "backstay_net::push",
            job = $id.stream.job,
            pass = $id.stream.pass,
            task = $id.stream.task,
            sequence = $id.sequence,
            $($($fields)+,)?
            $message
        )
    };
}

pub(crate) use push_event;

/// Log what this node, as a backup, answers to its master about a push.
pub(crate) fn backup_answers(
    id: TransactionId,
    lsn: u64,
    master: NodeId,
    answer: Option<&Message>,
) {
    if let Some(Message::Refused { reason, .. }) = answer {
        push_event!(id, "push not staged for its master", lsn, master, ?reason);
    } else {
        push_event!(id, "push staged for its master", lsn, master);
    }
}
