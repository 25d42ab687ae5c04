//! Connections between servers that were replaced.

use super::*;
use backstay_core::hash::SlotSpace;

fn replicator() -> Arc<Replicator> {
    let store = Arc::new(Store::new(SlotSpace::new(4).unwrap(), 0));
    Replicator::new(1, store, ReplicaOptions::default())
}

/// What lies in the buffers of a connection that was replaced is of the past: a prepare
/// that was rolled back, say, which the next decision would apply.
#[test]
fn a_connection_that_was_replaced_is_not_heard() {
    let replicator = replicator();
    let beat = || Message::Heartbeat {
        sent_at: 1,
        version: 0,
        decided: 0,
    };
    let mut answers = Vec::new();
    let old = replicator.master_connected(7);
    assert!(replicator.obey(7, old, beat(), &mut answers));
    let new = replicator.master_connected(7);
    assert!(!replicator.obey(7, old, beat(), &mut answers));
    assert!(replicator.obey(7, new, beat(), &mut answers));
    assert_eq!(answers.len(), 2);
}

/// The task of an old connection to a backup may notice its end after the next has begun.
#[test]
fn the_end_of_a_connection_that_was_replaced_changes_nothing() {
    let replicator = replicator();
    let old = replicator.link_up(7);
    let new = replicator.link_up(7);
    replicator.link_down(7, old);
    assert_eq!(
        replicator.take_outgoing(7).len(),
        1,
        "the greeting is still to be sent"
    );
    replicator.link_up(7);
    replicator.link_down(7, new + 1);
    assert_eq!(replicator.take_outgoing(7).len(), 0);
}
