//! What a running export gets of slots, against read tables that follow it: rows change, go and move
//! to other nodes, increments are given up, and bases and checkpoints are made beside them.

// What fails in a helper is a failed test.
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use backstay_core::engine::{CopyPiece, Engine, ServingState, SlotSnapshot};
use backstay_core::hash::{table_id, SlotSpace};
use backstay_core::read_table::{ReadTable, SlotChange};
use backstay_core::stream::{StreamId, TransactionId};
use backstay_core::transaction::{Batch, Change, Transaction};
use proptest::prelude::*;

const SLOTS: u32 = 2;
const DIM: usize = 3;
const TABLES: [&str; 2] = ["a", "b"];

type Rows = BTreeMap<u64, Vec<u32>>;

fn engine() -> Engine {
    let mut engine = Engine::new(SlotSpace::new(SLOTS).unwrap(), 0..SLOTS);
    for name in TABLES {
        let spec = format!(
            r#"{{"name":"{name}","kind":{{"sparse":{{"dim":{DIM}}}}},"initializer":{{"uniform":{{"low":-1.0,"high":1.0}}}},"optimizer":{{"adagrad":{{"learning_rate":0.1}}}}}}"#
        );
        let spec = backstay_core::spec::TableSpec::from_json(&spec).unwrap();
        engine.create_table(&Arc::new(spec)).unwrap();
    }
    for slot in 0..SLOTS {
        engine.set_serving_state(slot, ServingState::Serving);
    }
    engine
}

fn ids() -> Vec<u64> {
    TABLES.iter().map(|name| table_id(name)).collect()
}

fn rows_of(engine: &Engine, table: &str, slot: u32) -> Rows {
    let (keys, weights, _) = engine.export_slot(table_id(table), slot).unwrap();
    let bits = weights
        .chunks(DIM)
        .map(|row| row.iter().map(|value| value.to_bits()).collect());
    keys.into_iter().zip(bits).collect()
}

/// What an element says of a slot.
struct Told {
    /// Where its changes begin; None: it has all rows.
    since: Option<u64>,
    snapshot: SlotSnapshot,
    /// The master's rows at its position, by table.
    rows: Vec<Rows>,
}

/// A follower, which knows nothing but what elements tell.
struct Follower {
    tables: Vec<ReadTable>,
    have: BTreeMap<u32, u64>,
}

impl Follower {
    fn new() -> Self {
        let table = || ReadTable::new(SlotSpace::new(SLOTS).unwrap(), DIM);
        Self {
            tables: TABLES.iter().map(|_| table()).collect(),
            have: BTreeMap::new(),
        }
    }

    /// Take a slot if it fits; whether it did.
    fn take(&mut self, told: &Told) -> bool {
        let (slot, position) = (told.snapshot.slot, told.snapshot.memory.position);
        match (self.have.get(&slot), told.since) {
            (Some(&have), _) if have > position => return true,
            (_, None) => {}
            (Some(&have), Some(since)) if since <= have => {}
            _ => return false,
        }
        for (name, table) in TABLES.iter().zip(&mut self.tables) {
            let copies = &told.snapshot.tables;
            let mut rows = (Vec::new(), Vec::new(), Vec::new());
            let mut deleted = &[][..];
            if let Some(copy) = copies.iter().find(|one| one.table == table_id(name)) {
                copy.layout.take_apart(&copy.words, &mut rows);
                deleted = &copy.deleted;
            }
            let change = SlotChange {
                slot,
                whole: told.snapshot.whole,
                deleted,
                keys: &rows.0,
                weights: &rows.1,
            };
            table.change(std::iter::once(change)).unwrap();
        }
        self.have.insert(slot, position);
        for (table, rows) in self.tables.iter().zip(&told.rows) {
            let space = SlotSpace::new(SLOTS).unwrap();
            let (keys, weights) = table.all_rows();
            let found: Rows = keys
                .into_iter()
                .zip(
                    weights
                        .chunks(DIM)
                        .map(|row| row.iter().map(|value| value.to_bits()).collect()),
                )
                .filter(|(key, _)| space.slot_of(*key) == slot)
                .collect();
            assert_eq!(&found, rows);
        }
        true
    }
}

struct Run {
    master: Engine,
    backup: Engine,
    sequence: u64,
    /// What completed increments have of each slot.
    written: BTreeMap<u32, u64>,
    /// Elements since the newest base was begun.
    since_base: Vec<Told>,
    base: Vec<Told>,
    follower: Follower,
}

impl Run {
    fn new() -> Self {
        let mut run = Self {
            master: engine(),
            backup: engine(),
            sequence: 0,
            written: BTreeMap::new(),
            since_base: Vec::new(),
            base: Vec::new(),
            follower: Follower::new(),
        };
        run.track(&ids());
        run.base(&[]);
        run
    }

    fn track(&mut self, tables: &[u64]) {
        let tables: BTreeSet<u64> = tables.iter().copied().collect();
        self.master.track_exports(&tables);
        self.backup.track_exports(&tables);
    }

    fn apply(&mut self, table: usize, keys: &[u64], deletes: bool) {
        self.sequence += 1;
        let space = SlotSpace::new(SLOTS).unwrap();
        let mut keys = keys.to_vec();
        keys.sort_by_key(|&key| (space.slot_of(key), key));
        keys.dedup();
        let stream = StreamId {
            job: 9,
            pass: 0,
            task: 0,
        };
        let id = TransactionId {
            stream,
            sequence: self.sequence,
        };
        let value = |&key: &u64| [key as f32, self.sequence as f32, 0.5];
        let (change, values): (_, Vec<f32>) = if deletes {
            (Change::Delete, Vec::new())
        } else {
            let change = Change::update(1.0);
            (change, keys.iter().flat_map(value).collect())
        };
        let floor = self.sequence.saturating_sub(50);
        let batch = Batch::new(&keys, &values);
        let made =
            Transaction::new(space, id, floor, table_id(TABLES[table]), change, batch).unwrap();
        let runs = made.runs().to_vec();
        self.master.apply(&made, &runs).unwrap();
        self.backup.apply(&made, &runs).unwrap();
    }

    /// Copy a slot, with changes between the pieces.
    fn tell(&mut self, slot: u32, base: Option<u64>, between: &[Vec<u64>]) -> Told {
        let mut snapshot = self.master.begin_export(slot, base, &ids()).unwrap();
        for (number, keys) in between.iter().enumerate() {
            self.master.copy_more(&mut snapshot, 2);
            self.apply(number % 2, keys, number % 3 == 0);
        }
        assert!(self.master.finish_snapshot(&mut snapshot));
        let rows = TABLES
            .iter()
            .map(|table| rows_of(&self.master, table, slot))
            .collect();
        Told {
            since: base.filter(|_| !snapshot.whole),
            snapshot,
            rows,
        }
    }

    /// An increment, of those slots that are not left out.
    fn increment(&mut self, completed: bool, left_out: Option<u32>) {
        for slot in (0..SLOTS).filter(|&slot| Some(slot) != left_out) {
            let told = self.tell(slot, Some(self.written[&slot]), &[]);
            if completed {
                self.written.insert(slot, told.snapshot.memory.position);
                assert!(self.follower.take(&told));
                self.since_base.push(told);
            }
        }
    }

    /// The backup hears what completed increments have.
    fn completed(&mut self) {
        for (&slot, &position) in &self.written {
            self.backup.export_completed(slot, position, &ids());
        }
    }

    /// A base, with increments between its slots.
    fn base(&mut self, between: &[Vec<u64>]) {
        self.since_base.clear();
        let first = self.written.is_empty();
        let mut base = Vec::new();
        for slot in 0..SLOTS {
            let told = self.tell(slot, None, between);
            if first {
                self.written.insert(slot, told.snapshot.memory.position);
                assert!(self.follower.take(&told));
            } else {
                self.increment(true, None);
            }
            base.push(told);
        }
        self.base = base;
    }

    /// The backup becomes the master, and a new one is copied.
    fn fail_over(&mut self) {
        self.master = std::mem::replace(&mut self.backup, engine());
        self.track(&ids());
        for slot in 0..SLOTS {
            let mut copy = self.master.begin_copy(slot);
            while let CopyPiece::Rows(table, (keys, weights, state)) =
                self.master.read_copy(slot, &mut copy.rows, 300)
            {
                self.backup
                    .add_rows(table, slot, (&keys, &weights, &state))
                    .unwrap();
            }
            self.backup.set_memory(slot, &copy.memory);
        }
    }

    /// Who begins with the base now comes to the same.
    fn check_late_follower(&self) {
        let mut late = Follower::new();
        for told in self.base.iter().chain(&self.since_base) {
            assert!(late.take(told));
        }
        assert_eq!(late.have, self.follower.have);
    }
}

#[derive(Debug, Clone)]
enum Step {
    Push(usize, Vec<u64>),
    Delete(usize, Vec<u64>),
    Increment(bool, Option<u32>),
    Base(Vec<Vec<u64>>),
    Checkpoint,
    Completed,
    FailOver,
    Tracked,
}

fn step() -> impl Strategy<Value = Step> {
    let keys = prop::collection::vec(0u64..80, 1..12);
    prop_oneof![
        8 => (0usize..2, keys.clone()).prop_map(|(table, keys)| Step::Push(table, keys)),
        3 => (0usize..2, keys.clone()).prop_map(|(table, keys)| Step::Delete(table, keys)),
        6 => (prop::bool::weighted(0.7), prop::option::weighted(0.2, 0..SLOTS))
            .prop_map(|(completed, left_out)| Step::Increment(completed, left_out)),
        1 => prop::collection::vec(keys, 0..6).prop_map(Step::Base),
        1 => Just(Step::Checkpoint),
        2 => Just(Step::Completed),
        1 => Just(Step::FailOver),
        1 => Just(Step::Tracked),
    ]
}

proptest! {
    /// X1 and X2, row by row and bit by bit.
    #[test]
    fn followers_have_the_rows_of_their_positions(steps in prop::collection::vec(step(), 1..80)) {
        let mut run = Run::new();
        for step in steps {
            match step {
                Step::Push(table, keys) => run.apply(table, &keys, false),
                Step::Delete(table, keys) => run.apply(table, &keys, true),
                Step::Increment(completed, left_out) => run.increment(completed, left_out),
                Step::Base(between) => run.base(&between),
                Step::Checkpoint => for slot in 0..SLOTS {
                    let mut copy = run.master.begin_snapshot(slot, None);
                    prop_assert!(run.master.finish_snapshot(&mut copy));
                },
                Step::Completed => run.completed(),
                Step::FailOver => run.fail_over(),
                // The tables are told again whenever a record changes.
                Step::Tracked => run.track(&ids()),
            }
            run.check_late_follower();
        }
        run.increment(true, None);
        run.check_late_follower();
    }
}

fn rows(told: &Told) -> usize {
    let copies = told.snapshot.tables.iter();
    copies
        .map(|copy| copy.words.len() / copy.layout.stride() + copy.deleted.len())
        .sum()
}

#[test]
fn an_increment_has_what_changed_since_the_last_completed_one() {
    let mut run = Run::new();
    run.apply(0, &(0..500).collect::<Vec<_>>(), false);
    run.increment(true, None);
    run.apply(0, &[1, 2, 3], false);
    run.apply(0, &[3, 4], true);
    run.increment(false, None);
    run.apply(1, &[5], false);
    run.increment(true, None);
    // Two rows and two keys of the one that was given up, one row since.
    assert_eq!(
        run.since_base.iter().rev().take(2).map(rows).sum::<usize>(),
        5
    );
    run.increment(true, None);
    assert_eq!(
        run.since_base.iter().rev().take(2).map(rows).sum::<usize>(),
        0
    );
}

#[test]
fn after_a_failover_an_increment_is_small_if_the_backup_heard_of_those_before() {
    let mut run = Run::new();
    run.apply(0, &(0..500).collect::<Vec<_>>(), false);
    for key in 0..4 {
        run.increment(true, None);
        run.completed();
        run.apply(0, &[key], false);
        run.apply(1, &[key], false);
        run.apply(1, &[key], true);
    }
    run.fail_over();
    run.increment(true, None);
    let told: Vec<&Told> = run.since_base.iter().rev().take(2).collect();
    assert!(told.iter().all(|one| !one.snapshot.whole));
    // A row that came and a key that went since the last one.
    assert_eq!(told.into_iter().map(rows).sum::<usize>(), 2);
}

#[test]
fn checkpoints_and_exports_do_not_take_each_others_marks() {
    let mut run = Run::new();
    run.apply(0, &(0..500).collect::<Vec<_>>(), false);
    run.increment(true, None);
    let base: Vec<u64> = (0..SLOTS)
        .map(|slot| run.master.begin_snapshot(slot, None).memory.position)
        .collect();
    for key in 0..20 {
        run.apply(0, &[key], false);
        run.increment(true, None);
    }
    for slot in 0..SLOTS {
        let copy = run.master.begin_snapshot(slot, Some(base[slot as usize]));
        assert!(!copy.whole);
    }
    run.apply(0, &[7], false);
    for slot in 0..SLOTS {
        let written = Some(run.written[&slot]);
        assert!(
            !run.master
                .begin_export(slot, written, &ids())
                .unwrap()
                .whole
        );
    }
}

#[test]
fn a_slot_of_which_all_rows_change_or_go_is_told_by_its_changes() {
    let mut run = Run::new();
    let keys: Vec<u64> = (0..2 * u64::from(SLOTS)).collect();
    run.apply(0, &keys, false);
    run.increment(true, None);
    for deletes in [false, true] {
        let before = run.since_base.len();
        run.apply(0, &keys, deletes);
        run.increment(true, None);
        let told = &run.since_base[before..];
        assert_eq!(told.iter().map(rows).sum::<usize>(), keys.len());
        assert!(told.iter().all(|told| !told.snapshot.whole));
    }
}

#[test]
fn a_table_that_is_in_no_export_keeps_no_account() {
    let mut run = Run::new();
    run.apply(0, &(0..5000).collect::<Vec<_>>(), false);
    let with = run.master.content_bytes().0;
    run.track(&[]);
    assert!(run.master.content_bytes().0 < with);
    assert!(run.master.begin_export(0, None, &ids()).is_none());
    // What changes meanwhile is not known later: all rows are told.
    run.apply(0, &[1], true);
    run.track(&ids());
    run.increment(true, None);
    assert!(run.since_base.iter().all(|told| told.snapshot.whole));
}

#[test]
fn memory_stays_bounded_while_no_increment_is_completed() {
    let mut run = Run::new();
    run.apply(0, &(0..5000).collect::<Vec<_>>(), false);
    run.increment(true, None);
    // At most as many keys as there are rows, in two generations, for checkpoints and for exports.
    let most = run.master.content_bytes().0 + 4 * 8 * 5000 * 5 / 4;
    for round in 0..200u64 {
        run.apply(
            0,
            &(0..5000)
                .filter(|key| key % 40 != round % 40)
                .collect::<Vec<_>>(),
            false,
        );
        run.apply(
            0,
            &(0..5000)
                .filter(|key| key % 40 == round % 40)
                .collect::<Vec<_>>(),
            true,
        );
        run.increment(false, None);
        let bytes = run.master.content_bytes().0;
        assert!(bytes < most, "{bytes} of {most}");
    }
    run.increment(true, None);
}
