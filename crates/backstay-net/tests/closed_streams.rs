//! A node that joins remembers the closed streams that the other nodes remember, and forgets
//! them in the same order.

#![allow(clippy::unwrap_used)] // What fails in a helper is a failed test.

use std::sync::Arc;

use backstay_core::engine::{CopyPiece, StageReport};
use backstay_core::hash::{table_id, SlotSpace};
use backstay_core::replication::Rows;
use backstay_core::spec::TableSpec;
use backstay_core::stream::{StreamId, TransactionId};
use backstay_core::transaction::{Batch, Change, Transaction};
use backstay_net::store::Store;

const SLOTS: u32 = 64;
/// As many closed streams of tasks a slot remembers.
const REMEMBERED: u32 = 8_192;

fn store() -> Store {
    let store = Store::new(SlotSpace::new(SLOTS).unwrap(), 0);
    store.set_routing(1, &[true; SLOTS as usize]);
    let spec = r#"{"name":"t","kind":{"sparse":{"dim":1}},"initializer":{"zeros":{}},"optimizer":{"sgd":{"learning_rate":1.0}}}"#;
    let spec = TableSpec::from_json(spec).unwrap();
    store.create_table(&Arc::new(spec), 0).unwrap();
    store
}

fn task(task: u32) -> StreamId {
    StreamId {
        job: 1,
        pass: 1,
        task,
    }
}

/// A client's own, in the way that they have had since these are told from tasks.
fn own(job: u64) -> StreamId {
    StreamId {
        job,
        pass: u32::MAX,
        task: 0,
    }
}

/// A push of one key in each slot.
fn push(store: &Store, stream: StreamId) -> StageReport {
    let space = SlotSpace::new(SLOTS).unwrap();
    let mut keys: Vec<u64> = (0..2000).collect();
    keys.sort_by_key(|&key| space.slot_of(key));
    keys.dedup_by_key(|key| space.slot_of(*key));
    let id = TransactionId {
        stream,
        sequence: 0,
    };
    let change = Change::update(1.0);
    let batch = Batch::new(&keys, &vec![-1.0; keys.len()]);
    let push = Transaction::new(space, id, 0, table_id("t"), change, batch).unwrap();
    store.apply(&push).unwrap()
}

fn close(store: &Store, stream: StreamId) {
    store.apply(&store.close_of(stream).unwrap()).unwrap();
}

/// The calls by which a copy of all slots comes to another node.
fn copy(from: &Store, to: &Store) {
    for slot in 0..SLOTS {
        let mut copy = from.begin_copy(slot);
        while let CopyPiece::Rows(table, rows) = from.read_copy(slot, &mut copy.rows, 1 << 10) {
            to.add_rows(slot, table, &rows).unwrap();
        }
        to.set_memory(slot, &copy.memory);
    }
}

fn assert_equal(one: &Store, other: &Store) {
    for slot in 0..SLOTS {
        assert_eq!(
            one.begin_copy(slot).memory,
            other.begin_copy(slot).memory,
            "slot {slot}"
        );
        assert_eq!(
            one.slot_digest(slot).unwrap(),
            other.slot_digest(slot).unwrap(),
            "slot {slot}"
        );
    }
}

#[test]
fn a_newcomer_forgets_the_closed_streams_that_the_others_forget() {
    let old = store();
    // A pass of many tasks, shuffled: the one with the lowest number is the last that ends.
    for number in (0..REMEMBERED).rev() {
        if number == 0 {
            assert_eq!(push(&old, task(0)).staged, SLOTS);
        }
        close(&old, task(number));
    }
    let new = store();
    copy(&old, &new);
    assert_equal(&old, &new);
    for number in [70_000, 5, 69_999] {
        close(&old, task(number));
        close(&new, task(number));
        assert_eq!(push(&old, task(0)).staged, 0, "closed a moment ago");
        assert_eq!(push(&new, task(0)).staged, 0, "closed a moment ago");
    }
    assert_equal(&old, &new);
    // The oldest is forgotten by both: a push would begin the stream anew.
    assert_eq!(push(&old, task(REMEMBERED - 1)).staged, SLOTS);
    assert_eq!(push(&new, task(REMEMBERED - 1)).staged, SLOTS);
    assert_equal(&old, &new);
}

#[test]
fn clients_that_end_push_no_task_out_of_the_memory() {
    let store = store();
    assert_eq!(push(&store, task(0)).staged, SLOTS);
    close(&store, task(0));
    for client in 0..=u64::from(REMEMBERED) {
        close(&store, own(client));
    }
    assert_eq!(push(&store, task(0)).staged, 0);
}
