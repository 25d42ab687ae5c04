//! The engine against a model that is too simple to be wrong: stage, commit and discard in
//! random order on few slots, with retries, gaps and conflicting transactions.

// What fails in a helper is a failed test; exact numbers are the point.
#![allow(clippy::unwrap_used, clippy::float_cmp)]

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use backstay_core::engine::{Engine, StageReport, Standing};
use backstay_core::error::Refusal;
use backstay_core::hash::{table_id, SlotSpace};
use backstay_core::spec::TableSpec;
use backstay_core::stream::{StreamId, TransactionId};
use backstay_core::transaction::{Batch, Change, StagedRun, Transaction};
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

fn space() -> SlotSpace {
    SlotSpace::new(SLOTS).unwrap()
}

/// The master of all slots.
fn engine(spec: &Arc<TableSpec>) -> Engine {
    let mut engine = Engine::new(space(), 0..SLOTS);
    engine.set_version(1);
    for slot in 0..SLOTS {
        engine.set_standing(slot, Standing::Serving);
    }
    engine.create_table(spec).unwrap();
    engine
}

fn by_slot(mut keys: Vec<u64>) -> Vec<u64> {
    keys.sort_by_key(|&key| (space().slot_of(key), key));
    keys.dedup();
    keys
}

fn push(stream: u64, sequence: u64, floor: u64, keys: &[u64], value: f32) -> Arc<Transaction> {
    let values = vec![value; keys.len() * DIM];
    let id = TransactionId {
        stream: StreamId {
            job: stream,
            pass: 0,
            task: 0,
        },
        sequence,
    };
    let change = Change::Update {
        learning_rate_scale: 1.0,
    };
    let batch = Batch::new(keys, &values);
    Arc::new(Transaction::new(space(), id, floor, table_id("t"), change, batch).unwrap())
}

/// Give a transaction its places and take them, as a master does.
fn stage(
    engine: &mut Engine,
    transaction: &Arc<Transaction>,
    tag: u64,
) -> Result<(StageReport, Vec<StagedRun>), Refusal> {
    let mut places = Vec::new();
    let report = engine.admit(transaction, transaction.runs(), &mut places)?;
    assert_eq!(engine.stage(transaction, &places, tag), None);
    Ok((report, places))
}

fn apply(engine: &mut Engine, transaction: &Arc<Transaction>) -> Result<StageReport, Refusal> {
    let (report, places) = stage(engine, transaction, 1)?;
    engine.commit(transaction, &places)?;
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
    staged: BTreeMap<u32, VecDeque<Arc<Transaction>>>,
    applied: BTreeSet<(u32, TransactionId)>,
    counts: BTreeMap<u64, u32>,
    positions: BTreeMap<u32, u64>,
}

impl Model {
    fn slots(transaction: &Transaction) -> BTreeSet<u32> {
        let keys = transaction.batch.keys().iter();
        keys.map(|&key| space().slot_of(key)).collect()
    }

    fn position(&self, slot: u32) -> u64 {
        self.positions.get(&slot).copied().unwrap_or(0)
    }

    fn end(&self, slot: u32) -> u64 {
        self.position(slot) + self.staged.get(&slot).map_or(0, VecDeque::len) as u64
    }

    /// The places it takes by slot, or nothing if it is under way already.
    fn stage(&mut self, transaction: &Arc<Transaction>) -> Option<BTreeMap<u32, u64>> {
        let slots = Self::slots(transaction);
        let waiting = |slot| self.staged.get(slot).into_iter().flatten();
        if slots
            .iter()
            .any(|slot| waiting(slot).any(|t| t.id == transaction.id))
        {
            return None;
        }
        let mut places = BTreeMap::new();
        for slot in slots {
            if !self.applied.contains(&(slot, transaction.id)) {
                let queue = self.staged.entry(slot).or_default();
                queue.push_back(Arc::clone(transaction));
                places.insert(slot, self.end(slot));
            }
        }
        Some(places)
    }

    /// Apply a slot up to a position, as far as it is staged.
    fn apply(&mut self, slot: u32, position: u64) {
        while self.position(slot) < position {
            let queue = self.staged.entry(slot).or_default();
            let Some(transaction) = queue.pop_front() else {
                return;
            };
            self.applied.insert((slot, transaction.id));
            *self.positions.entry(slot).or_default() += 1;
            for &key in transaction.batch.keys() {
                if space().slot_of(key) == slot {
                    *self.counts.entry(key).or_default() += 1;
                }
            }
        }
    }

    /// Apply a transaction where it has still the place it was given, with what is before it.
    fn commit(&mut self, transaction: &Transaction, places: &[StagedRun]) {
        for place in places {
            let slot = place.run.slot;
            let at = place.position.checked_sub(self.position(slot) + 1);
            let queue = self.staged.get(&slot);
            let held = at.and_then(|at| queue?.get(at as usize));
            if held.is_some_and(|held| held.id == transaction.id) {
                self.apply(slot, place.position);
            }
        }
    }

    fn discard_from(&mut self, slot: u32, position: u64) {
        while self.end(slot) >= position.max(self.position(slot) + 1) {
            self.staged.entry(slot).or_default().pop_back();
        }
    }
}

#[derive(Debug, Clone)]
enum Step {
    /// A push is taken on.
    Stage(usize),
    /// A push is applied in the places that it was given last, be they still its own or not.
    Commit(usize),
    /// A slot is applied up to so many behind its position.
    Through(u32, u64),
    /// A slot is undone from so many behind its position on.
    Discard(u32, u64),
    /// A new master takes over what is staged in a slot.
    Retag(u32, u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => (0..12usize).prop_map(Step::Stage),
        6 => (0..12usize).prop_map(Step::Commit),
        1 => ((0..SLOTS), (0..4u64)).prop_map(|(slot, ahead)| Step::Through(slot, ahead)),
        2 => ((0..SLOTS), (0..4u64)).prop_map(|(slot, ahead)| Step::Discard(slot, ahead)),
        1 => ((0..SLOTS), (0..9u64)).prop_map(|(slot, tag)| Step::Retag(slot, tag)),
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
        let mut given: Vec<Vec<StagedRun>> = vec![Vec::new(); pushes.len()];
        for step in steps {
            match step {
                Step::Stage(n) => match stage(&mut engine, &pushes[n], n as u64) {
                    Ok((report, places)) => {
                        let wanted = model.stage(&pushes[n]);
                        let taken = places.iter().map(|place| (place.run.slot, place.position));
                        prop_assert_eq!(Some(taken.collect()), wanted);
                        let all = Model::slots(&pushes[n]).len();
                        prop_assert_eq!((report.staged + report.skipped) as usize, all);
                        prop_assert_eq!(report.staged as usize, places.len());
                        given[n] = places;
                    }
                    Err(refusal) => {
                        prop_assert_eq!(refusal, Refusal::InFlight);
                        prop_assert_eq!(model.stage(&pushes[n]), None);
                    }
                },
                Step::Commit(n) => {
                    engine.commit(&pushes[n], &given[n]).unwrap();
                    model.commit(&pushes[n], &given[n]);
                }
                Step::Through(slot, ahead) => {
                    let position = engine.position(slot) + ahead;
                    engine.commit_through(slot, position).unwrap();
                    model.apply(slot, position);
                }
                Step::Discard(slot, ahead) => {
                    let position = engine.position(slot) + ahead;
                    engine.discard_from(slot, position);
                    model.discard_from(slot, position);
                }
                Step::Retag(slot, tag) => {
                    engine.retag(slot, tag);
                    prop_assert!(engine.staged(slot).all(|staged| staged.tag == tag));
                }
            }
            for slot in 0..SLOTS {
                prop_assert_eq!(engine.place(slot), (model.position(slot), model.end(slot)));
                let known = engine.staged(slot).map(|staged| staged.transaction.id);
                let wanted = model.staged.get(&slot).into_iter().flatten().map(|t| t.id);
                prop_assert!(known.eq(wanted));
            }
        }
        for key in 0..24 {
            let count = model.counts.get(&key).copied().unwrap_or(0);
            prop_assert_eq!(read(&engine, key), count as f32);
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
    let transaction = push(1, 0, 0, &by_slot((0..20).collect()), -1.0);
    let mut places = Vec::new();
    let first = &transaction.runs()[..2];
    engine.admit(&transaction, first, &mut places).unwrap();
    assert_eq!(engine.stage(&transaction, &places, 1), None);
    engine.commit(&transaction, &places).unwrap();
    let report = apply(&mut engine, &transaction).unwrap();
    assert_eq!((report.staged, report.skipped), (2, 2));
    assert!((0..20).all(|key| read(&engine, key) == 1.0));
}

#[test]
fn a_commit_applies_what_stands_before_it() {
    let mut engine = engine(&counter());
    let pushes: Vec<_> = (0..3).map(|n| push(1, n, 0, &[5], -1.0)).collect();
    let mut places = Vec::new();
    for (tag, push) in pushes.iter().enumerate() {
        places.push(stage(&mut engine, push, tag as u64).unwrap().1);
    }
    engine.commit(&pushes[1], &places[1]).unwrap();
    assert_eq!(read(&engine, 5), 2.0);
    // Late: it has been applied.
    engine.commit(&pushes[0], &places[0]).unwrap();
    assert_eq!(read(&engine, 5), 2.0);
    engine.commit(&pushes[2], &places[2]).unwrap();
    assert_eq!(read(&engine, 5), 3.0);
}

#[test]
fn a_rollback_takes_along_what_was_staged_behind_it() {
    let mut engine = engine(&counter());
    let pushes: Vec<_> = (0..3).map(|n| push(1, n, 0, &[5], -1.0)).collect();
    let mut places = Vec::new();
    for push in &pushes {
        places.push(stage(&mut engine, push, 1).unwrap().1);
    }
    let slot = space().slot_of(5);
    engine.discard_from(slot, places[1][0].position);
    assert_eq!(engine.place(slot), (0, 1));
    // What was undone is not applied, nor is it in the way.
    for (push, places) in pushes.iter().zip(&places) {
        engine.commit(push, places).unwrap();
    }
    assert_eq!((read(&engine, 5), engine.position(slot)), (1.0, 1));
    // Rolled back is not applied: the retry goes through.
    apply(&mut engine, &pushes[2]).unwrap();
    assert_eq!(read(&engine, 5), 2.0);
}

#[test]
fn a_place_that_is_not_the_next_one_is_refused_and_changes_nothing() {
    let mut engine = engine(&counter());
    let transaction = push(1, 0, 0, &by_slot((0..20).collect()), -1.0);
    let (_, mut places) = stage(&mut engine, &transaction, 1).unwrap();
    let other = push(1, 1, 0, &by_slot((0..20).collect()), -1.0);
    for place in &mut places {
        place.position = 2;
    }
    places[3].position = 3;
    assert_eq!(engine.stage(&other, &places, 2), Some(places[3]));
    assert!((0..SLOTS).all(|slot| engine.place(slot) == (0, 1)));
    places[3].position = 2;
    assert_eq!(engine.stage(&other, &places, 2), None);
}

/// What a new master sends again must never be missing in between: it may be acknowledged.
#[test]
fn what_is_staged_again_stays_and_what_is_ordered_differently_gives_way() {
    let mut engine = engine(&counter());
    let pushes: Vec<_> = (0..4).map(|n| push(1, n, 0, &[5], -1.0)).collect();
    let mut places = Vec::new();
    for push in &pushes[..3] {
        places.push(stage(&mut engine, push, 1).unwrap().1);
    }
    let slot = space().slot_of(5);
    let ids = |engine: &Engine| -> Vec<u64> {
        let staged = engine.staged(slot);
        staged.map(|one| one.transaction.id.sequence).collect()
    };
    engine.commit(&pushes[0], &places[0]).unwrap();
    // Again, from the beginning: applied, here, here.
    for (push, places) in pushes.iter().zip(&places) {
        assert_eq!(engine.stage(push, places, 2), None);
        assert_eq!(ids(&engine), [1, 2]);
    }
    assert!(engine.staged(slot).all(|one| one.tag == 2));
    // Another order from the second place on.
    assert_eq!(engine.stage(&pushes[3], &places[1], 3), None);
    assert_eq!(ids(&engine), [3]);
    // The commit of what gave way takes nothing along.
    engine.commit(&pushes[2], &places[2]).unwrap();
    engine.commit(&pushes[1], &places[1]).unwrap();
    assert_eq!(engine.place(slot), (1, 2));
    engine.commit(&pushes[3], &places[1]).unwrap();
    assert_eq!((read(&engine, 5), engine.place(slot)), (2.0, (2, 2)));
}

#[test]
fn a_close_takes_its_place_in_the_order() {
    let mut engine = engine(&counter());
    let first = push(1, 0, 0, &by_slot((0..20).collect()), -1.0);
    let (_, places) = stage(&mut engine, &first, 1).unwrap();
    let id = TransactionId {
        stream: first.id.stream,
        sequence: u64::MAX,
    };
    let close = Arc::new(Transaction::close(id, 0..SLOTS));
    let (report, closing) = stage(&mut engine, &close, 2).unwrap();
    assert_eq!(report.staged, SLOTS);
    engine.commit(&close, &closing).unwrap();
    assert!((0..20).all(|key| read(&engine, key) == 1.0));
    engine.commit(&first, &places).unwrap();
    assert!((0..20).all(|key| read(&engine, key) == 1.0));
    // Late copies, of the push and of the close.
    for late in [&first, &close] {
        let report = apply(&mut engine, late).unwrap();
        assert_eq!((report.staged, report.skipped), (0, SLOTS));
    }
    assert!((0..SLOTS).all(|slot| engine.place(slot) == (2, 2)));
}

#[test]
fn a_copied_slot_goes_on_as_the_original() {
    let spec = spec(r#"{"adam":{"learning_rate":0.1}}"#);
    let mut engine = engine(&spec);
    let mut copy = self::engine(&spec);
    apply(&mut copy, &push(9, 0, 0, &by_slot((0..60).collect()), 5.0)).unwrap();
    for sequence in 0..5 {
        let keys = by_slot((0..100).map(|key| key * (sequence + 1)).collect());
        apply(&mut engine, &push(1, sequence, 0, &keys, sequence as f32)).unwrap();
    }
    let close = TransactionId {
        stream: StreamId {
            job: 2,
            pass: 0,
            task: 0,
        },
        sequence: u64::MAX,
    };
    apply(&mut engine, &Arc::new(Transaction::close(close, 0..SLOTS))).unwrap();
    for slot in 0..SLOTS {
        copy.clear_slot(slot);
        assert_eq!(copy.place(slot), (0, 0));
        let original = engine.copy_slot(slot);
        for (table, rows) in &original.tables {
            let rows = (&rows.0[..], &rows.1[..], &rows.2[..]);
            copy.add_rows(*table, slot, rows).unwrap();
        }
        copy.set_memory(slot, &original.memory);
        assert_eq!(copy.memory(slot), engine.memory(slot));
        assert_eq!(copy.digest(slot), engine.digest(slot));
    }
    let next = push(1, 4, 0, &by_slot((0..100).collect()), 1.0);
    let late = push(2, 7, 0, &by_slot((0..100).collect()), 1.0);
    for engine in [&mut engine, &mut copy] {
        assert_eq!(apply(engine, &next).unwrap().staged, 0);
        assert_eq!(apply(engine, &late).unwrap().staged, 0);
        apply(engine, &push(1, 5, 0, &by_slot((0..100).collect()), 1.0)).unwrap();
    }
    assert!((0..SLOTS).all(|slot| copy.digest(slot) == engine.digest(slot)));
}

#[test]
fn a_slot_served_elsewhere_refuses_the_whole_part() {
    let mut engine = engine(&counter());
    engine.set_version(7);
    engine.set_standing(2, Standing::Elsewhere);
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
    engine.set_standing(2, Standing::Waiting);
    let refused = apply(&mut engine, &push(1, 0, 0, &keys, -1.0));
    assert!(matches!(refused, Err(Refusal::NotReady(_))));
    let read = engine.read(table_id("t"), &keys, &mut out);
    assert!(matches!(read, Err(Refusal::NotReady(_))));
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
        copy.import_slot(table_id("t"), slot, (&keys, &weights, &state))
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
    let hostile = copy.import_slot(table_id("t"), 0, (&[1, 1, 1], &[0.0; 9], &[0.0]));
    assert!(hostile.is_err());
}

#[test]
fn the_digest_sees_every_word_and_the_stream_memory() {
    let spec = counter();
    let slot = space().slot_of(5);
    let digest = |value: f32, sequence: u64| {
        let mut engine = engine(&spec);
        apply(&mut engine, &push(1, sequence, 0, &[5], value)).unwrap();
        engine.digest(slot)
    };
    assert_eq!(digest(1.0, 0), digest(1.0, 0));
    assert_ne!(digest(1.0, 0), digest(1.000_000_1, 0));
    assert_ne!(digest(1.0, 0), digest(1.0, 1));
}
