//! Connections between servers that were replaced.

use super::*;
use backstay_core::hash::SlotSpace;

fn replicator() -> Arc<Replicator> {
    let store = Arc::new(Store::new(SlotSpace::new(4).unwrap(), 0));
    Replicator::new(1, store, ReplicaOptions::default())
}

fn order() -> Message {
    Message::Settle {
        number: 1,
        lsn: 0,
        slots: Vec::new(),
    }
}

/// What lies in the buffers of a connection that was replaced is of the past: a prepare
/// that was rolled back, say, which the next decision would apply.
#[test]
fn a_connection_that_was_replaced_is_not_heard() {
    let replicator = replicator();
    let mut answers = Vec::new();
    let (old, new) = (1, 2);
    assert!(replicator.master_connected(7, old));
    assert!(replicator.obey(7, old, order(), &mut answers));
    assert!(replicator.master_connected(7, new));
    assert!(!replicator.obey(7, old, order(), &mut answers));
    assert!(replicator.obey(7, new, order(), &mut answers));
    assert_eq!(answers.len(), 2);
}

/// Two connections of a master may be read in another order than it opened them in: the older
/// one must not undo what was confirmed on the newer.
#[test]
fn a_connection_that_is_read_after_its_successor_is_not_heard() {
    let replicator = replicator();
    let mut answers = Vec::new();
    assert!(replicator.master_connected(7, 2));
    assert!(!replicator.master_connected(7, 1));
    assert!(!replicator.obey(7, 1, order(), &mut answers));
    assert!(replicator.obey(7, 2, order(), &mut answers));
    assert!(
        replicator.master_connected(8, 1),
        "others count for themselves"
    );
}

/// The task of an old connection to a backup may notice its end after the next has begun.
#[test]
fn the_end_of_a_connection_that_was_replaced_changes_nothing() {
    let replicator = replicator();
    let (old, new) = (replicator.next_connection(), replicator.next_connection());
    replicator.link_up(7, old);
    replicator.link_up(7, new);
    replicator.link_down(7, old);
    assert!(replicator.take_outgoing(7, Way::ToBackup, old).is_none());
    let greeting = replicator.take_outgoing(7, Way::Heartbeats, new).unwrap();
    assert_eq!(greeting.len(), 1);
    let third = replicator.next_connection();
    replicator.link_up(7, third);
    replicator.link_down(7, third);
    assert_eq!(
        replicator
            .take_outgoing(7, Way::ToBackup, third)
            .unwrap()
            .len(),
        0
    );
}
