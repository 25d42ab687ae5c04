//! What a checkpoint gets of a slot: whole, or what has changed, against a second engine that is
//! brought up to date with it.

// What fails in a helper is a failed test.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use backstay_core::engine::{Engine, ServingState, SlotSnapshot};
use backstay_core::hash::{table_id, SlotSpace};
use backstay_core::stream::{StreamId, TransactionId};
use backstay_core::transaction::{Batch, Change, Transaction};
use proptest::prelude::*;
use std::sync::Arc;

const SLOTS: u32 = 4;

fn engine(storage: &str) -> Engine {
    let space = SlotSpace::new(SLOTS).unwrap();
    let mut engine = Engine::new(space, 0..SLOTS);
    for name in ["a", "b"] {
        let spec = format!(
            r#"{{"name":"{name}","kind":{{"sparse":{{"dim":3}}}},"storage":"{storage}","initializer":{{"uniform":{{"low":-1.0,"high":1.0}}}},"optimizer":{{"adagrad":{{"learning_rate":0.1}}}}}}"#
        );
        let spec = backstay_core::spec::TableSpec::from_json(&spec).unwrap();
        engine.create_table(&Arc::new(spec)).unwrap();
    }
    for slot in 0..SLOTS {
        engine.set_serving_state(slot, ServingState::Serving);
    }
    engine
}

fn push(engine: &mut Engine, sequence: u64, table: &str, keys: &[u64]) {
    let change = Change::update(1.0);
    apply(engine, sequence, table, keys, change);
}

fn delete(engine: &mut Engine, sequence: u64, table: &str, keys: &[u64]) {
    apply(engine, sequence, table, keys, Change::Delete);
}

fn apply(engine: &mut Engine, sequence: u64, table: &str, keys: &[u64], change: Change) {
    let space = SlotSpace::new(SLOTS).unwrap();
    let mut keys = keys.to_vec();
    keys.sort_by_key(|&key| (space.slot_of(key), key));
    keys.dedup();
    let stream = StreamId {
        job: 9,
        pass: 0,
        task: 0,
    };
    let id = TransactionId { stream, sequence };
    let values: Vec<f32> = keys
        .iter()
        .map(|&key| key as f32 + sequence as f32)
        .collect();
    let mut values: Vec<f32> = values.iter().flat_map(|&v| [v, -v, 0.5]).collect();
    if change == Change::Delete {
        values.clear();
    }
    let batch = Batch::new(&keys, &values);
    let floor = sequence.saturating_sub(50);
    let push = Transaction::new(space, id, floor, table_id(table), change, batch).unwrap();
    let runs = push.runs().to_vec();
    engine.apply(&push, &runs).unwrap();
}

/// Copy a slot at once.
fn snapshot(engine: &mut Engine, slot: u32, base: Option<u64>) -> SlotSnapshot {
    let mut snapshot = engine.begin_snapshot(slot, base);
    assert!(engine.finish_snapshot(&mut snapshot));
    snapshot
}

/// Bring a slot of another engine to the state of a snapshot.
fn load(engine: &mut Engine, snapshot: &SlotSnapshot) {
    if snapshot.whole {
        engine.clear_slot(snapshot.slot);
    }
    for table in &snapshot.tables {
        let mut rows = (Vec::new(), Vec::new(), Vec::new());
        table.layout.take_apart(&table.words, &mut rows);
        engine
            .remove_rows(table.table, snapshot.slot, &table.deleted)
            .unwrap();
        let rows = (&rows.0[..], &rows.1[..], &rows.2[..]);
        engine.put_rows(table.table, snapshot.slot, rows).unwrap();
    }
    engine.set_memory(snapshot.slot, &snapshot.memory);
}

#[derive(Debug, Clone)]
enum Step {
    Push(bool, Vec<u64>),
    Delete(bool, Vec<u64>),
    /// Write all slots; whether the checkpoint is completed, and whether it is a full one.
    Save {
        completed: bool,
        full: bool,
    },
    /// The same of one slot, whole, with pushes between the pieces.
    Slowly(u32, Vec<Vec<u64>>),
}

fn step() -> impl Strategy<Value = Step> {
    let keys = prop::collection::vec(0u64..60, 1..12);
    prop_oneof![
        5 => (prop::bool::ANY, keys.clone()).prop_map(|(table, keys)| Step::Push(table, keys)),
        2 => (prop::bool::ANY, keys).prop_map(|(table, keys)| Step::Delete(table, keys)),
        2 => (prop::bool::weighted(0.7), prop::bool::weighted(0.2))
            .prop_map(|(completed, full)| Step::Save { completed, full }),
        1 => (0..SLOTS, prop::collection::vec(prop::collection::vec(0u64..90, 1..12), 0..12))
            .prop_map(|(slot, pushes)| Step::Slowly(slot, pushes)),
    ]
}

proptest! {
    /// Whatever checkpoints are begun and given up between, a chain of completed ones restores
    /// the state that the last one saw, bit for bit.
    #[test]
    fn a_chain_of_checkpoints_restores_the_state(
        steps in prop::collection::vec(step(), 1..60),
        half in prop::bool::ANY,
    ) {
        let storage = if half { "bfloat16" } else { "float32" };
        let mut live = engine(storage);
        let mut restored = engine(storage);
        let mut bases: BTreeMap<u32, u64> = BTreeMap::new();
        let mut sequence = 0;
        for step in steps {
            match step {
                Step::Push(first, keys) => {
                    sequence += 1;
                    push(&mut live, sequence, if first { "a" } else { "b" }, &keys);
                }
                Step::Delete(first, keys) => {
                    sequence += 1;
                    delete(&mut live, sequence, if first { "a" } else { "b" }, &keys);
                }
                Step::Slowly(slot, pushes) => {
                    let mut copy = live.begin_snapshot(slot, None);
                    for keys in pushes {
                        sequence += 1;
                        let table = if sequence % 2 == 0 { "a" } else { "b" };
                        if sequence % 3 == 0 {
                            delete(&mut live, sequence, table, &keys);
                        } else {
                            push(&mut live, sequence, table, &keys);
                        }
                        live.copy_more(&mut copy, 3);
                    }
                    prop_assert!(live.finish_snapshot(&mut copy));
                    bases.insert(slot, copy.memory.position);
                    load(&mut restored, &copy);
                    prop_assert_eq!(live.digest(slot), restored.digest(slot));
                    prop_assert_eq!(live.memory(slot), restored.memory(slot));
                }
                Step::Save { completed, full } => for slot in 0..SLOTS {
                    let base = if full { None } else { bases.get(&slot).copied() };
                    let snapshot = snapshot(&mut live, slot, base);
                    prop_assert!(base.is_some() || snapshot.whole);
                    if completed {
                        bases.insert(slot, snapshot.memory.position);
                        load(&mut restored, &snapshot);
                        prop_assert_eq!(live.digest(slot), restored.digest(slot));
                        prop_assert_eq!(live.memory(slot), restored.memory(slot));
                    }
                },
            }
        }
    }
}

#[test]
fn only_what_has_changed_is_copied() {
    let mut live = engine("float32");
    let all: Vec<u64> = (0..1000).collect();
    push(&mut live, 1, "a", &all);
    let rows = |snapshot: &SlotSnapshot| -> usize {
        let sizes = snapshot
            .tables
            .iter()
            .map(|t| t.words.len() / t.layout.stride());
        sizes.sum()
    };
    let first = snapshot(&mut live, 0, None);
    assert!(first.whole);
    assert_eq!(rows(&first), live.table(table_id("a")).unwrap().rows_in(0));
    push(&mut live, 2, "a", &[3, 4, 5]);
    let second = snapshot(&mut live, 0, Some(first.memory.position));
    assert!(!second.whole);
    assert!(rows(&second) <= 3);
    // The second was never completed: the third says again what changed since the first.
    push(&mut live, 3, "b", &[6]);
    let third = snapshot(&mut live, 0, Some(first.memory.position));
    assert!(!third.whole && rows(&third) >= rows(&second));
}

#[test]
fn keys_that_were_deleted_are_told_until_a_whole_copy_is_smaller() {
    let mut live = engine("float32");
    push(&mut live, 1, "a", &(0..1000).collect::<Vec<_>>());
    let first = snapshot(&mut live, 0, None);
    let (keys, ..) = live.export_slot(table_id("a"), 0).unwrap();
    delete(&mut live, 2, "a", &keys[..5]);
    push(&mut live, 3, "a", &keys[..2]);
    let second = snapshot(&mut live, 0, Some(first.memory.position));
    assert!(!second.whole);
    // The other two have a row again.
    assert_eq!(second.tables[0].deleted.len(), 3);
    assert!(second.tables[0]
        .deleted
        .iter()
        .all(|key| keys[2..5].contains(key)));
    delete(&mut live, 4, "a", &keys[..keys.len() - 10]);
    assert!(snapshot(&mut live, 0, Some(second.memory.position)).whole);
}

#[test]
fn a_slot_that_came_from_another_node_is_whole_once() {
    let mut live = engine("float32");
    push(&mut live, 1, "a", &(0..100).collect::<Vec<_>>());
    let base = snapshot(&mut live, 1, None);
    push(&mut live, 2, "a", &(0..100).collect::<Vec<_>>());
    let mut other = engine("float32");
    load(&mut other, &snapshot(&mut live, 1, None));
    // What changed between the base and the copy is known to the former master only.
    assert!(snapshot(&mut other, 1, Some(base.memory.position)).whole);
    let base = other.position(1);
    let (keys, ..) = other.export_slot(table_id("a"), 1).unwrap();
    push(&mut other, 3, "a", &keys[..2]);
    assert!(!snapshot(&mut other, 1, Some(base)).whole);
}

#[test]
fn removed_rows_are_gone_and_the_rest_is_not() {
    let mut live = engine("float32");
    push(&mut live, 1, "a", &(0..100).collect::<Vec<_>>());
    let (keys, ..) = live.export_slot(table_id("a"), 2).unwrap();
    live.remove_rows(table_id("a"), 2, &keys[1..4]).unwrap();
    let (left, ..) = live.export_slot(table_id("a"), 2).unwrap();
    assert_eq!(left.len(), keys.len() - 3);
    assert!(!left.contains(&keys[2]) && left.contains(&keys[0]));
}

#[test]
fn a_copy_of_a_content_that_was_replaced_or_that_another_copy_overtook_is_of_no_use() {
    let mut live = engine("float32");
    push(&mut live, 1, "a", &(0..100).collect::<Vec<_>>());
    let mut first = live.begin_snapshot(0, None);
    let mut second = live.begin_snapshot(0, None);
    assert!(!live.finish_snapshot(&mut first));
    live.clear_slot(0);
    assert!(!live.finish_snapshot(&mut second));
}
