//! The engine against a model that is too simple to be wrong: stage, commit and discard in
//! random order on few slots, with retries, gaps and conflicting transactions.

// What fails in a helper is a failed test; exact numbers are the point.
#![allow(clippy::unwrap_used, clippy::float_cmp)]

mod engine_support;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use backstay_core::compensation::{Compensation, Reference};
use backstay_core::error::Refusal;
use backstay_core::hash::table_id;
use backstay_core::optimizer::Optimizer;
use backstay_core::spec::TableSpec;
use backstay_core::staleness::{StalenessCounts, UNTOLD};
use backstay_core::stream::TransactionId;
use backstay_core::transaction::{Batch, Change, StagedRun, Transaction};
use engine_support::*;
use proptest::prelude::*;

/// What should have happened, slot by slot.
#[derive(Default)]
struct Model {
    staged: BTreeMap<u32, VecDeque<Arc<Transaction>>>,
    applied: BTreeSet<(u32, TransactionId)>,
    /// What gradients of -1 have made of a row.
    weights: BTreeMap<u64, f32>,
    positions: BTreeMap<u32, u64>,
    updates: BTreeMap<u32, u64>,
    stale: StalenessCounts,
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
            let mut step = 1.0;
            if transaction.change != Change::Delete {
                step /= self.count_update(&transaction, slot);
            }
            for &key in transaction.batch.keys() {
                if space().slot_of(key) != slot {
                    continue;
                }
                if transaction.change == Change::Delete {
                    self.weights.remove(&key);
                    continue;
                }
                let weight = self.weights.get(&key).copied();
                let moved = match (transaction.compensation.reference(), weight) {
                    // All gradients are -1, so their square is 1.
                    (Some(_), Some(weight)) => 0.5 * (weight - read_weight(&transaction)),
                    _ => 0.0,
                };
                self.weights
                    .insert(key, weight.unwrap_or(0.0) - (moved - step));
            }
        }
    }

    /// By what the learning rate is divided.
    fn count_update(&mut self, transaction: &Transaction, slot: u32) -> f32 {
        let mut runs = transaction.runs().iter();
        let origin = runs.find(|run| run.slot == slot).unwrap().origin;
        let updates = self.updates.entry(slot).or_default();
        let behind = updates.checked_sub(origin).map(|behind| behind as u32);
        *updates += 1;
        let scales = transaction.compensation == Compensation::Scale;
        if !transaction.compensation.is_ignore() || origin != UNTOLD {
            self.stale.count(behind);
        }
        match behind {
            Some(behind) if scales && behind > 1 => behind as f32,
            _ => 1.0,
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

/// The weight that a push's gradients were computed with.
fn read_weight(transaction: &Transaction) -> f32 {
    transaction.batch.values()[DIM]
}

/// As the counter, and the delay of gradients is compensated.
fn delayed() -> Arc<TableSpec> {
    let staleness = r#","compensation":{"delay_compensated":{"strength":0.5}}}"#;
    let counter = counter().canonical_json();
    let json = format!("{}{staleness}", &counter[..counter.len() - 1]);
    Arc::new(TableSpec::from_json(&json).unwrap())
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

/// The n-th, to a table of this description: every fourth is a delete; some tell from where their
/// gradients come, and all if the delay of gradients is compensated.
fn transaction(spec: &TableSpec, (n, keys): (usize, Vec<u64>)) -> Arc<Transaction> {
    let (stream, sequence, keys) = (n as u64 % 3, n as u64 / 3, by_slot(keys));
    if n % 4 == 3 {
        return delete(stream, sequence, &keys);
    }
    let push = push(stream, sequence, 0, &keys, -1.0);
    let origin = [UNTOLD, 0, 1][n % 3];
    let push = told(&push, &vec![origin; push.runs().len()]);
    if spec.compensation.reference().is_some() {
        let row = [[-1.0; DIM], [n as f32; DIM]].concat();
        let batch = Batch::new(&keys, &row.repeat(keys.len()));
        let change = push.change.compared(Reference::Weights);
        let mut late = Transaction::new(space(), push.id, 0, push.table, change, batch).unwrap();
        late.compensation = spec.compensation;
        told(&late, &vec![origin; late.runs().len()])
    } else if n.is_multiple_of(2) {
        scaled(&push)
    } else {
        push
    }
}

proptest! {
    /// I2 and the order within a slot, whatever is retried, rolled back or left half done.
    #[test]
    fn agrees_with_the_model(
        batches in prop::collection::vec(prop::collection::vec(0u64..24, 1..10), 12),
        steps in steps(),
        compensates in any::<bool>(),
    ) {
        let spec = if compensates { delayed() } else { counter() };
        let mut engine = engine(&spec);
        let mut model = Model::default();
        let pushes: Vec<_> = batches
            .into_iter()
            .enumerate()
            .map(|one| transaction(&spec, one))
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
        for slot in 0..SLOTS {
            let updates = model.updates.get(&slot).map(|&count| (table_id("t"), count));
            prop_assert_eq!(engine.memory(slot).updates, Vec::from_iter(updates));
        }
        prop_assert_eq!(engine.table(table_id("t")).unwrap().staleness(), &model.stale);
        for key in 0..24 {
            let weight = model.weights.get(&key).copied().unwrap_or(0.0);
            prop_assert_eq!(read(&engine, key), weight);
        }
        prop_assert_eq!(engine.table(table_id("t")).unwrap().rows(), model.weights.len());
    }

    /// Replicas that meet the rows of a table in different order hold the same bytes, for
    /// every optimizer.
    #[test]
    fn bytes_do_not_depend_on_insertion_order(
        keys in prop::collection::btree_set(0u64..500, 2..120),
        turn in 0usize..100,
        optimizer in prop::sample::select(Optimizer::NAMES),
    ) {
        let spec = spec(&format!(r#"{{"{optimizer}":{{"learning_rate":0.1}}}}"#));
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
            let some: Vec<u64> = all.iter().copied().step_by(3).collect();
            apply(engine, &delete(2, 0, &some)).unwrap();
            end(engine, 2);
            apply(engine, &push(1, sequence, sequence, &all, 0.5)).unwrap();
            // Stream memory differs in where it was raised; only rows are compared here.
            end(engine, 1);
        }
        for slot in 0..SLOTS {
            prop_assert_eq!(one.digest(slot), other.digest(slot));
            let table = table_id("t");
            prop_assert_eq!(one.export_slot(table, slot), other.export_slot(table, slot));
        }
    }
}
