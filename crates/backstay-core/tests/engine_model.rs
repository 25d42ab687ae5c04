//! The engine against a model that is too simple to be wrong: stage, commit and discard in
//! random order on few slots, with retries, gaps and conflicting transactions.

// What fails in a helper is a failed test; exact numbers are the point.
#![allow(clippy::unwrap_used, clippy::float_cmp)]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use backstay_core::engine::{Engine, StageReport};
use backstay_core::error::Refusal;
use backstay_core::hash::{table_id, SlotSpace};
use backstay_core::spec::TableSpec;
use backstay_core::stream::{StreamId, TransactionId};
use backstay_core::transaction::{Batch, Change, Transaction};
use proptest::prelude::*;

const SLOTS: u32 = 4;
const DIM: usize = 3;

fn spec(optimizer: &str) -> Arc<TableSpec> {
    let json = format!(
        r#"{{"name":"t","kind":{{"sparse":{{"dim":{DIM}}}}},"initializer":{{"constant":{{"value":0.0}}}},"optimizer":{optimizer}}}"#
    );
    Arc::new(TableSpec::from_json(&json).unwrap())
}

/// Counts gradients exactly: rate 1, integer gradients of -1.
fn counter() -> Arc<TableSpec> {
    spec(r#"{"sgd":{"learning_rate":1.0}}"#)
}

fn engine(spec: &Arc<TableSpec>) -> Engine {
    let mut engine = Engine::new(SlotSpace::new(SLOTS).unwrap(), 0..SLOTS);
    engine.set_routing(1, |_| true);
    engine.create_table(spec).unwrap();
    engine
}

fn by_slot(mut keys: Vec<u64>) -> Vec<u64> {
    let space = SlotSpace::new(SLOTS).unwrap();
    keys.sort_by_key(|&key| (space.slot_of(key), key));
    keys.dedup();
    keys
}

fn push(stream: u64, sequence: u64, floor: u64, keys: &[u64], value: f32) -> Arc<Transaction> {
    let values = vec![value; keys.len() * DIM];
    Arc::new(Transaction {
        id: TransactionId {
            stream: StreamId {
                job: stream,
                pass: 0,
                task: 0,
            },
            sequence,
        },
        floor,
        table: table_id("t"),
        change: Change::Update {
            learning_rate_scale: 1.0,
        },
        batch: Batch::new(keys, &values),
    })
}

fn apply(engine: &mut Engine, transaction: &Arc<Transaction>) -> Result<StageReport, Refusal> {
    let keys = 0..transaction.batch.keys().len();
    let report = engine.stage(transaction, keys.clone())?;
    engine.commit(transaction, keys)?;
    Ok(report)
}

fn read(engine: &Engine, key: u64) -> f32 {
    let mut row = [0.0; DIM];
    engine.read(table_id("t"), &[key], &mut row).unwrap();
    assert!(row.iter().all(|&value| value == row[0]));
    row[0]
}

/// What should have happened, slot by slot.
#[derive(Default)]
struct Model {
    staged: BTreeMap<u32, Vec<Arc<Transaction>>>,
    applied: BTreeSet<(u32, TransactionId)>,
    counts: BTreeMap<u64, u32>,
    positions: BTreeMap<u32, u64>,
}

impl Model {
    fn slots(transaction: &Transaction) -> BTreeSet<u32> {
        let space = SlotSpace::new(SLOTS).unwrap();
        let keys = transaction.batch.keys().iter();
        keys.map(|&key| space.slot_of(key)).collect()
    }

    fn stage(&mut self, transaction: &Arc<Transaction>) -> bool {
        let slots = Self::slots(transaction);
        let waiting = |slot| self.staged.get(slot).into_iter().flatten();
        if slots
            .iter()
            .any(|slot| waiting(slot).any(|t| t.id == transaction.id))
        {
            return false;
        }
        for slot in slots {
            if !self.applied.contains(&(slot, transaction.id)) {
                let queue = self.staged.entry(slot).or_default();
                queue.push(Arc::clone(transaction));
            }
        }
        true
    }

    fn commit(&mut self, transaction: &Arc<Transaction>) -> bool {
        let at = |model: &Self, slot| {
            let queue = model.staged.get(&slot).into_iter().flatten();
            queue
                .enumerate()
                .find(|(_, t)| t.id == transaction.id)
                .map(|(at, _)| at)
        };
        let slots = Self::slots(transaction);
        if slots
            .iter()
            .any(|&slot| at(self, slot).is_some_and(|at| at > 0))
        {
            return false;
        }
        let space = SlotSpace::new(SLOTS).unwrap();
        for slot in slots {
            if at(self, slot) == Some(0) {
                self.staged.get_mut(&slot).unwrap().remove(0);
                self.applied.insert((slot, transaction.id));
                *self.positions.entry(slot).or_default() += 1;
                for &key in transaction.batch.keys() {
                    if space.slot_of(key) == slot {
                        *self.counts.entry(key).or_default() += 1;
                    }
                }
            }
        }
        true
    }

    fn discard(&mut self, slot: u32, id: TransactionId) -> usize {
        let queue = self.staged.entry(slot).or_default();
        let at = queue.iter().position(|t| t.id == id).unwrap_or(queue.len());
        queue.drain(at..).count()
    }
}

#[derive(Debug, Clone)]
enum Step {
    Stage(usize),
    Commit(usize),
    Discard(usize, u32),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        3 => (0..12usize).prop_map(Step::Stage),
        3 => (0..12usize).prop_map(Step::Commit),
        1 => ((0..12usize), (0..SLOTS)).prop_map(|(push, slot)| Step::Discard(push, slot)),
    ];
    prop::collection::vec(step, 0..200)
}

proptest! {
    /// I2 and the order within a slot, whatever is retried, rolled back or left half done.
    #[test]
    fn agrees_with_the_model(
        batches in prop::collection::vec(prop::collection::vec(0u64..24, 1..10), 12),
        steps in steps(),
    ) {
        let spec = counter();
        let mut engine = engine(&spec);
        let mut model = Model::default();
        let pushes: Vec<_> = batches
            .into_iter()
            .enumerate()
            .map(|(n, keys)| push(n as u64 % 3, n as u64 / 3, 0, &by_slot(keys), -1.0))
            .collect();
        for step in steps {
            match step {
                Step::Stage(n) => {
                    let all = 0..pushes[n].batch.keys().len();
                    let staged = engine.stage(&pushes[n], all);
                    prop_assert_eq!(staged.is_ok(), model.stage(&pushes[n]));
                }
                Step::Commit(n) => {
                    let all = 0..pushes[n].batch.keys().len();
                    let committed = engine.commit(&pushes[n], all);
                    prop_assert_eq!(committed.is_ok(), model.commit(&pushes[n]));
                }
                Step::Discard(n, slot) => {
                    let dropped = engine.discard(slot, pushes[n].id).len();
                    prop_assert_eq!(dropped, model.discard(slot, pushes[n].id));
                }
            }
        }
        for key in 0..24 {
            let count = model.counts.get(&key).copied().unwrap_or(0);
            prop_assert_eq!(read(&engine, key), count as f32);
        }
        for slot in 0..SLOTS {
            prop_assert_eq!(engine.position(slot), model.positions.get(&slot).copied().unwrap_or(0));
        }
    }

    /// Replicas that meet the rows of a table in different order hold the same bytes, for
    /// every optimizer.
    #[test]
    fn bytes_do_not_depend_on_insertion_order(
        keys in prop::collection::btree_set(0u64..500, 2..120),
        turn in 0usize..100,
        optimizer in prop::sample::select(vec![
            r#"{"sgd":{"learning_rate":0.1}}"#,
            r#"{"momentum":{"learning_rate":0.1}}"#,
            r#"{"adagrad":{"learning_rate":0.1}}"#,
            r#"{"adam":{"learning_rate":0.1}}"#,
            r#"{"adamw":{"learning_rate":0.1}}"#,
            r#"{"rmsprop":{"learning_rate":0.1}}"#,
            r#"{"ftrl":{"learning_rate":0.1}}"#,
        ]),
    ) {
        let spec = spec(optimizer);
        let (mut one, mut other) = (engine(&spec), engine(&spec));
        let keys: Vec<u64> = keys.into_iter().collect();
        let mut turned = keys.clone();
        turned.rotate_left(turn % keys.len());
        for (sequence, (&a, &b)) in keys.iter().zip(&turned).enumerate() {
            apply(&mut one, &push(1, sequence as u64, sequence as u64, &[a], a as f32)).unwrap();
            apply(&mut other, &push(1, sequence as u64, sequence as u64, &[b], b as f32)).unwrap();
        }
        let all = by_slot(keys);
        let sequence = all.len() as u64;
        for engine in [&mut one, &mut other] {
            apply(engine, &push(1, sequence, sequence, &all, 0.5)).unwrap();
            // Stream memory differs in where it was raised; only rows are compared here.
            engine.forget_stream(StreamId { job: 1, pass: 0, task: 0 });
        }
        for slot in 0..SLOTS {
            prop_assert_eq!(one.digest(slot), other.digest(slot));
            let table = table_id("t");
            prop_assert_eq!(one.export_slot(table, slot), other.export_slot(table, slot));
        }
    }
}

#[test]
fn a_retry_is_skipped_where_it_is_applied_and_completes_the_rest() {
    let mut engine = engine(&counter());
    let keys = by_slot((0..20).collect());
    let space = SlotSpace::new(SLOTS).unwrap();
    let first_slots = keys.partition_point(|&key| space.slot_of(key) < 2);
    let transaction = push(1, 0, 0, &keys, -1.0);
    engine.stage(&transaction, 0..first_slots).unwrap();
    engine.commit(&transaction, 0..first_slots).unwrap();
    let report = apply(&mut engine, &transaction).unwrap();
    assert_eq!((report.staged, report.skipped), (2, 2));
    assert!((0..20).all(|key| read(&engine, key) == 1.0));
}

#[test]
fn a_commit_out_of_order_is_refused_and_changes_nothing() {
    let mut engine = engine(&counter());
    let (first, second) = (push(1, 0, 0, &[5], -1.0), push(1, 1, 0, &[5], -1.0));
    engine.stage(&first, 0..1).unwrap();
    engine.stage(&second, 0..1).unwrap();
    assert_eq!(engine.commit(&second, 0..1), Err(Refusal::InFlight));
    assert_eq!(read(&engine, 5), 0.0);
    engine.commit(&first, 0..1).unwrap();
    engine.commit(&second, 0..1).unwrap();
    assert_eq!(read(&engine, 5), 2.0);
}

#[test]
fn a_rollback_takes_along_what_was_staged_behind_it() {
    let mut engine = engine(&counter());
    let pushes: Vec<_> = (0..3).map(|n| push(1, n, 0, &[5], -1.0)).collect();
    for push in &pushes {
        engine.stage(push, 0..1).unwrap();
    }
    let slot = SlotSpace::new(SLOTS).unwrap().slot_of(5);
    let dropped = engine.discard(slot, pushes[1].id);
    assert_eq!(dropped, [pushes[1].id, pushes[2].id]);
    engine.commit(&pushes[0], 0..1).unwrap();
    assert_eq!((read(&engine, 5), engine.position(slot)), (1.0, 1));
    // Rolled back is not applied: the retry goes through.
    apply(&mut engine, &pushes[2]).unwrap();
    assert_eq!(read(&engine, 5), 2.0);
}

#[test]
fn a_slot_served_elsewhere_refuses_the_whole_part() {
    let mut engine = engine(&counter());
    engine.set_routing(7, |slot| slot != 2);
    let keys = by_slot((0..20).collect());
    let refused = apply(&mut engine, &push(1, 0, 0, &keys, -1.0));
    assert_eq!(
        refused,
        Err(Refusal::NotMaster {
            slot: 2,
            version: 7
        })
    );
    assert_eq!(engine.tables().next().unwrap().rows(), 0);
    let mut out = vec![0.0; keys.len() * DIM];
    assert!(engine.read(table_id("t"), &keys, &mut out).is_err());
}

#[test]
fn a_pull_creates_no_row() {
    let json = r#"{"name":"t","kind":{"sparse":{"dim":3}},"initializer":{"uniform":{"low":-1.0,"high":1.0}},"optimizer":{"sgd":{"learning_rate":1.0}}}"#;
    let spec = Arc::new(TableSpec::from_json(json).unwrap());
    let mut engine = engine(&spec);
    let mut before = [0.0; DIM];
    engine.read(table_id("t"), &[9], &mut before).unwrap();
    assert!(before.iter().all(|value| *value != 0.0));
    assert_eq!(engine.tables().next().unwrap().rows(), 0);
    // The row made by the push starts from the very values that were read.
    apply(&mut engine, &push(1, 0, 0, &[9], 0.0)).unwrap();
    let mut after = [0.0; DIM];
    engine.read(table_id("t"), &[9], &mut after).unwrap();
    assert_eq!(before, after);
    assert_eq!(engine.tables().next().unwrap().rows(), 1);
}

#[test]
fn an_exported_slot_comes_back_the_same() {
    let spec = spec(r#"{"adam":{"learning_rate":0.1}}"#);
    let mut engine = engine(&spec);
    for sequence in 0..5 {
        let keys = by_slot((0..100).map(|key| key * (sequence + 1)).collect());
        apply(&mut engine, &push(1, sequence, 0, &keys, sequence as f32)).unwrap();
    }
    let mut copy = self::engine(&spec);
    for slot in 0..SLOTS {
        let (keys, weights, state) = engine.export_slot(table_id("t"), slot).unwrap();
        assert!(keys.is_sorted());
        copy.import_slot(table_id("t"), slot, &keys, &weights, &state)
            .unwrap();
        assert_eq!(copy.export_slot(table_id("t"), slot).unwrap().0, keys);
    }
    engine.forget_stream(StreamId {
        job: 1,
        pass: 0,
        task: 0,
    });
    for slot in 0..SLOTS {
        assert_eq!(engine.digest(slot), copy.digest(slot));
    }
    let hostile = copy.import_slot(table_id("t"), 0, &[1, 1, 1], &[0.0; 9], &[0.0]);
    assert!(hostile.is_err());
}

#[test]
fn the_digest_sees_every_word_and_the_stream_memory() {
    let spec = counter();
    let slot = SlotSpace::new(SLOTS).unwrap().slot_of(5);
    let digest = |value: f32, sequence: u64| {
        let mut engine = engine(&spec);
        apply(&mut engine, &push(1, sequence, 0, &[5], value)).unwrap();
        engine.digest(slot)
    };
    assert_eq!(digest(1.0, 0), digest(1.0, 0));
    assert_ne!(digest(1.0, 0), digest(1.000_000_1, 0));
    assert_ne!(digest(1.0, 0), digest(1.0, 1));
}

#[test]
fn a_late_copy_after_its_stream_was_closed_is_skipped() {
    let mut engine = engine(&counter());
    let transaction = push(1, 0, 0, &[5], -1.0);
    apply(&mut engine, &transaction).unwrap();
    engine.close_stream(transaction.id.stream);
    let report = apply(&mut engine, &transaction).unwrap();
    assert_eq!((report.staged, report.skipped), (0, 1));
    assert_eq!(read(&engine, 5), 1.0);
}
