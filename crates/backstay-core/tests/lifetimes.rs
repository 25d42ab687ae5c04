//! Rows that come and go, against a model that is too simple to be wrong: two replicas that differ
//! in where their rows lie, one restored from checkpoints, and policies of every kind.
//! docs/adr/0013 has the invariants L1 to L6.

// What fails in a helper is a failed test; exact numbers are the point.
#![allow(clippy::unwrap_used, clippy::float_cmp)]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use backstay_core::engine::{CopyPiece, Engine, ServingState, SlotMemory, SlotSnapshot};
use backstay_core::error::Refusal;
use backstay_core::expression::Statistic;
use backstay_core::hash::{table_id, SlotSpace};
use backstay_core::life::{Gone, SlotPart, Thresholds};
use backstay_core::read_table::{ReadTable, SlotChange};
use backstay_core::spec::lifetime::{Admission, Evict, Lifetime, ScoreRule, FILTER_BLOCK_BYTES};
use backstay_core::spec::TableSpec;
use backstay_core::stream::{StreamId, TransactionId};
use backstay_core::table::PlainRows;
use backstay_core::transaction::{Batch, Change, Transaction};
use proptest::prelude::*;

const SLOTS: u32 = 4;
const DIM: usize = 2;
const KEYS: u64 = 300;

/// `(show + 2 click) / (time - last_seen + 1) + frequency / 8`
const WORTH: &str = r#"{"name":"worth","settings":{"of_click":2.0},"expression":{"nodes":[
    {"input":"show"},{"input":"click"},{"setting":"of_click"},{"mul":[2,1]},{"add":[0,3]},{"input":"time"},
    {"input":"last_seen"},{"sub":[5,6]},{"constant":1.0},{"add":[7,8]},{"div":[4,9]},{"input":"frequency"},
    {"constant":0.125},{"mul":[11,12]},{"add":[10,13]}],"results":[14]}}"#;
/// sqrt(show - 3): of few shows a NaN.
const ROOTED: &str = r#"{"name":"rooted","expression":{"nodes":[
    {"input":"show"},{"constant":3.0},{"sub":[0,1]},{"sqrt":2}],"results":[3]}}"#;
/// `frequency >= 3 or show >= 2 and time - last_seen < 3`
const OFTEN: &str = r#"{"name":"often","expression":{"nodes":[
    {"input":"frequency"},{"constant":3.0},{"greater_equal":[0,1]},{"input":"show"},{"constant":2.0},
    {"greater_equal":[3,4]},{"input":"time"},{"input":"last_seen"},{"sub":[6,7]},{"less":[8,1]},{"and":[5,9]},
    {"or":[2,10]}],"results":[11]}}"#;
/// The built-in score.
const PADDLE: &str = r#"{"name":"paddle","settings":{"nonclick":0.1,"clicked":1.0},"expression":{"nodes":[
    {"setting":"nonclick"},{"input":"show"},{"input":"click"},{"sub":[1,2]},{"mul":[0,3]},{"setting":"clicked"},
    {"mul":[5,2]},{"add":[4,6]}],"results":[7]}}"#;

/// Names of functions stand for them.
const POLICIES: &[&str] = &[
    r#"{"expiry":{"unseen_seconds":5}}"#,
    r#"{"admission":{"after":{"occurrences":3}},"unadmitted":"zeros","expiry":{"unseen_seconds":4}}"#,
    r#"{"admission":{"score":{"at_least":1.5}},"expiry":{"score_below":0.7,"unseen_seconds":9},
        "score":{"nonclick_coefficient":0.5,"click_coefficient":2.0,"decay":0.5}}"#,
    r#"{"capacity":{"rows":80,"evict":"least_recent"}}"#,
    r#"{"admission":{"after":{"occurrences":2}},"capacity":{"rows":96,"evict":"least_frequent"}}"#,
    r#"{"capacity":{"rows":70,"evict":"lowest_score"},"expiry":{"norm_below":1.5}}"#,
    r#"{"admission":{"probability":{"probability":0.4}},"capacity":{"bytes":3000}}"#,
    r#"{"capacity":{"rows":90,"evict":"lowest_score"},"expiry":{"score_below":0.9},
        "score":{"function":WORTH,"decay":0.5}}"#,
    r#"{"admission":{"score":{"at_least":1.0}},"capacity":{"rows":80,"evict":"lowest_score"},
        "expiry":{"score_below":0.5},"score":{"function":ROOTED,"decay":0.75}}"#,
    r#"{"admission":{"function":OFTEN},"expiry":{"score_below":0.3,"unseen_seconds":8},
        "capacity":{"rows":100,"evict":"least_frequent"}}"#,
];

/// A policy with its functions.
fn with_functions(policy: &str) -> String {
    [
        ("WORTH", WORTH),
        ("ROOTED", ROOTED),
        ("OFTEN", OFTEN),
        ("PADDLE", PADDLE),
    ]
    .into_iter()
    .fold(policy.to_owned(), |text, (name, function)| {
        text.replace(name, function)
    })
}

fn space() -> SlotSpace {
    SlotSpace::new(SLOTS).unwrap()
}

fn spec_in(lifetime: &str, storage: &str) -> Arc<TableSpec> {
    let json = format!(
        r#"{{"name":"t","kind":{{"sparse":{{"dim":{DIM}}}}},"storage":"{storage}",
            "initializer":{{"constant":{{"value":0.25}}}},
            "optimizer":{{"momentum":{{"learning_rate":1.0,"momentum":0.0}}}},"lifetime":{}}}"#,
        with_functions(lifetime)
    );
    Arc::new(TableSpec::from_json(&json).unwrap())
}

fn spec(lifetime: &str) -> Arc<TableSpec> {
    spec_in(lifetime, "float32")
}

fn engine(spec: &Arc<TableSpec>) -> Engine {
    let mut engine = Engine::new(space(), 0..SLOTS);
    for slot in 0..SLOTS {
        engine.set_serving_state(slot, ServingState::Serving);
    }
    engine.create_table(spec).unwrap();
    engine
}

/// With an account of what changes, for an export.
fn exported(mut engine: Engine) -> Engine {
    engine.track_exports(&BTreeSet::from([table_id("t")]));
    engine
}

fn by_slot(keys: &[u64]) -> Vec<u64> {
    let mut keys = keys.to_vec();
    keys.sort_by_key(|&key| (space().slot_of(key), key));
    keys.dedup();
    keys
}

/// A transaction of the sequence, as a master stamps it at this time. Each key stands once.
fn change(
    spec: &TableSpec,
    sequence: u64,
    time: u32,
    change: Change,
    keys: &[u64],
    values: &[f32],
) -> Arc<Transaction> {
    let stream = StreamId {
        job: 1,
        pass: 0,
        task: 0,
    };
    let id = TransactionId { stream, sequence };
    let batch = Batch::new(keys, values);
    let floor = sequence.saturating_sub(100);
    let mut made = Transaction::new(space(), id, floor, table_id("t"), change, batch).unwrap();
    made.stamp_by(spec, space(), time);
    Arc::new(made)
}

/// The keys that stand for slots.
fn slots_as_keys(slots: impl IntoIterator<Item = u32>) -> Vec<u64> {
    slots
        .into_iter()
        .map(|slot| space().key_in(slot, 0))
        .collect()
}

fn apply(engine: &mut Engine, transaction: &Transaction) -> Gone {
    engine.apply(transaction, transaction.runs()).unwrap().gone
}

/// A push of one key, which is shown and clicked so often.
fn observe(
    spec: &TableSpec,
    sequence: u64,
    time: u32,
    key: u64,
    show: f32,
    click: f32,
) -> Arc<Transaction> {
    let values = [-1.0, -1.0, show, click];
    let observed = Change::update(1.0).counted();
    change(spec, sequence, time, observed, &[key], &values)
}

fn push(spec: &TableSpec, sequence: u64, time: u32, keys: &[u64]) -> Arc<Transaction> {
    let keys = by_slot(keys);
    let values = vec![-1.0; keys.len() * DIM];
    let update = Change::update(1.0);
    change(spec, sequence, time, update, &keys, &values)
}

fn expire(spec: &TableSpec, sequence: u64, time: u32) -> Arc<Transaction> {
    let keys = slots_as_keys(0..SLOTS);
    change(
        spec,
        sequence,
        time,
        Change::Expire(Thresholds::default()),
        &keys,
        &[],
    )
}

fn read(engine: &Engine, key: u64) -> f32 {
    let mut row = [f32::NAN; DIM];
    engine.read(table_id("t"), &[key], &mut row).unwrap();
    row[0]
}

/// The statistics of a key's row.
fn statistics(engine: &Engine, spec: &TableSpec, key: u64) -> Vec<u32> {
    let slot = space().slot_of(key);
    let (keys, _, state) = engine.export_slot(table_id("t"), slot).unwrap();
    let at = keys.iter().position(|&one| one == key).unwrap();
    let words = &state[at * spec.state_words()..][DIM..spec.state_words()];
    words.iter().map(|word| word.to_bits()).collect()
}

// ---- the model ----

#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Row {
    value: f32,
    seen: u32,
    frequency: u32,
    show: f32,
    click: f32,
}

#[derive(Default)]
struct Model {
    rows: BTreeMap<u64, Row>,
    /// Of keys without a row.
    counted: BTreeMap<u64, Row>,
    times: [u32; SLOTS as usize],
}

impl Model {
    fn score(lifetime: &Lifetime, row: &Row, time: u32) -> f64 {
        let (show, click) = (f64::from(row.show), f64::from(row.click));
        let score = match lifetime.score_rule().unwrap() {
            ScoreRule::ShowClick(rule) => {
                rule.nonclick_coefficient * (show - click) + rule.click_coefficient * click
            }
            ScoreRule::Function(function) if function.name() == "worth" => {
                let away = f64::from(time) - f64::from(row.seen);
                (show + 2.0 * click) / (away + 1.0) + f64::from(row.frequency) * 0.125
            }
            ScoreRule::Function(_) => (show - 3.0).sqrt(),
        };
        if score.is_nan() {
            f64::NEG_INFINITY
        } else {
            score
        }
    }

    /// Whether a key gets a row by the push that brought it from `before` to `now`.
    fn admits(lifetime: &Lifetime, key: u64, id: TransactionId, before: &Row, now: &Row) -> bool {
        match &lifetime.admission {
            Admission::Always => true,
            Admission::After { occurrences, .. } => now.frequency >= *occurrences,
            Admission::Probability { probability } => {
                backstay_core::life::is_drawn(key, id, 0, *probability)
            }
            Admission::Score { at_least } => Self::score(lifetime, now, now.seen) >= *at_least,
            Admission::Function(_) => {
                now.frequency >= 3 || now.show >= 2.0 && now.seen - before.seen < 3
            }
        }
    }

    /// What is counted of keys without a row.
    fn counts(lifetime: &Lifetime, statistic: Statistic) -> bool {
        match &lifetime.admission {
            Admission::Always | Admission::Probability { .. } => false,
            Admission::After { .. } => statistic == Statistic::Frequency,
            Admission::Score { .. } => lifetime.score_rule().unwrap().uses(statistic),
            Admission::Function(function) => function.uses(statistic),
        }
    }

    fn at(&mut self, key: u64, time: u32) -> u32 {
        let own = &mut self.times[space().slot_of(key) as usize];
        *own = time.max(*own);
        *own
    }

    fn push(
        &mut self,
        lifetime: &Lifetime,
        id: TransactionId,
        time: u32,
        tells: &[(u64, f32, f32)],
    ) {
        for &(key, show, click) in tells {
            let time = self.at(key, time);
            if !self.rows.contains_key(&key) {
                let mut before = self.counted.remove(&key).unwrap_or_default();
                let mut now = before;
                now.frequency += 1;
                now.show += show;
                now.click += click;
                now.seen = time;
                if !Self::admits(lifetime, key, id, &before, &now) {
                    if !matches!(lifetime.admission, Admission::Probability { .. }) {
                        self.counted.insert(key, now);
                    }
                    continue;
                }
                let counts = |one| Self::counts(lifetime, one);
                before = Row {
                    value: 0.25,
                    seen: 0,
                    frequency: before.frequency * u32::from(counts(Statistic::Frequency)),
                    show: before.show * f32::from(u8::from(counts(Statistic::Show))),
                    click: before.click * f32::from(u8::from(counts(Statistic::Click))),
                };
                self.rows.insert(key, before);
            }
            let row = self.rows.get_mut(&key).unwrap();
            row.value += 1.0;
            row.seen = time;
            row.frequency += 1;
            row.show += show;
            row.click += click;
        }
    }

    /// What goes for want of room.
    fn evict(&mut self, spec: &TableSpec, keys: &[u64]) -> Gone {
        let lifetime = spec.lifetime.as_ref().unwrap();
        let Some(capacity) = lifetime.capacity else {
            return Gone::default();
        };
        let share = spec.share(SLOTS).unwrap() as usize;
        let slots: BTreeSet<u32> = keys.iter().map(|&key| space().slot_of(key)).collect();
        let mut evicted = Gone::default();
        for slot in slots {
            for is_row in [false, true] {
                let held = if is_row {
                    &mut self.rows
                } else {
                    &mut self.counted
                };
                let mut ranked: Vec<(f64, u64)> = Vec::new();
                for (&key, row) in held.iter().filter(|(&key, _)| space().slot_of(key) == slot) {
                    let rank = match (is_row, capacity.evict) {
                        (false, _) | (true, Evict::LeastRecent) => f64::from(row.seen),
                        (true, Evict::LeastFrequent) => f64::from(row.frequency),
                        (true, Evict::LowestScore) => {
                            Self::score(lifetime, row, self.times[slot as usize])
                        }
                    };
                    ranked.push((rank, key));
                }
                ranked.sort_by(|a, b| a.partial_cmp(b).unwrap());
                if ranked.len() > share {
                    let gone = ranked.len() - (share - share / 16);
                    for (_, key) in &ranked[..gone] {
                        held.remove(key);
                    }
                    *if is_row {
                        &mut evicted.evicted
                    } else {
                        &mut evicted.evicted_counters
                    } += gone as u64;
                }
            }
        }
        evicted
    }

    fn expire(&mut self, lifetime: &Lifetime, time: u32) -> Gone {
        let mut gone = Gone::default();
        for key in slots_as_keys(0..SLOTS) {
            self.at(key, time);
        }
        let times = self.times;
        let now = |key: u64| times[space().slot_of(key) as usize];
        let Some(expiry) = lifetime.expiry else {
            return gone;
        };
        let old = |key: u64, row: &Row| {
            expiry
                .unseen_seconds
                .is_some_and(|most| now(key) - row.seen > most)
        };
        self.rows.retain(|&key, row| {
            let norm = f64::from(row.value) * 2f64.sqrt();
            let reason = if old(key, row) {
                &mut gone.unseen
            } else if expiry
                .score_below
                .is_some_and(|below| Self::score(lifetime, row, now(key)) < below)
            {
                &mut gone.score
            } else if expiry.norm_below.is_some_and(|below| norm < below) {
                &mut gone.norm
            } else {
                return true;
            };
            *reason += 1;
            false
        });
        let before = self.counted.len();
        self.counted.retain(|&key, row| !old(key, row));
        gone.counters = (before - self.counted.len()) as u64;
        gone
    }
}

#[derive(Debug, Clone)]
enum Step {
    Push {
        keys: Vec<(u64, u8, u8)>,
        observed: bool,
    },
    Assign {
        keys: Vec<u64>,
    },
    Delete {
        keys: Vec<u64>,
    },
    Expire,
    Decay,
    /// Time passes, or a new master's clock is behind.
    Time(i32),
    /// The backup is copied anew.
    Copy,
    /// The last transaction comes once more.
    Again,
    /// A checkpoint, whole or of what changed, which the third replica is restored from.
    Save {
        whole: bool,
    },
    /// An increment of an export, which is followed.
    Export,
    /// The backup becomes the master, and another one is copied.
    FailOver,
}

fn step() -> impl Strategy<Value = Step> {
    let key = 0..KEYS;
    let keys = prop::collection::vec(key.clone(), 1..30);
    let told = prop::collection::vec((key, 0u8..4, 0u8..3), 1..60);
    prop_oneof![
        8 => (told, any::<bool>()).prop_map(|(keys, observed)| Step::Push { keys, observed }),
        1 => keys.clone().prop_map(|keys| Step::Assign { keys }),
        1 => keys.prop_map(|keys| Step::Delete { keys }),
        2 => Just(Step::Expire),
        1 => Just(Step::Decay),
        3 => (-2i32..5).prop_map(Step::Time),
        1 => Just(Step::Copy),
        1 => Just(Step::Again),
        2 => any::<bool>().prop_map(|whole| Step::Save { whole }),
        3 => Just(Step::Export),
        1 => Just(Step::FailOver),
    ]
}

struct World {
    spec: Arc<TableSpec>,
    lifetime: Lifetime,
    model: Model,
    master: Engine,
    backup: Engine,
    restored: Engine,
    bases: BTreeMap<u32, u64>,
    /// What follows the export, and where each slot was in the last increment.
    served: ReadTable,
    exported: BTreeMap<u32, u64>,
    sequence: u64,
    time: i32,
    last: Option<Arc<Transaction>>,
}

impl World {
    fn new(policy: &str) -> Self {
        let spec = spec(policy);
        Self {
            lifetime: spec.lifetime.clone().unwrap(),
            model: Model::default(),
            master: exported(engine(&spec)),
            backup: exported(engine(&spec)),
            restored: engine(&spec),
            bases: BTreeMap::new(),
            served: ReadTable::new(space(), DIM),
            exported: BTreeMap::new(),
            sequence: 0,
            time: 10,
            last: None,
            spec,
        }
    }

    fn transaction(&mut self, what: Change, keys: &[u64], values: &[f32]) -> Arc<Transaction> {
        self.sequence += 1;
        let made = change(
            &self.spec,
            self.sequence,
            self.time as u32,
            what,
            keys,
            values,
        );
        self.last = Some(Arc::clone(&made));
        made
    }

    /// Apply on both replicas, and compare what went with what the model says.
    fn apply(&mut self, transaction: &Transaction, wanted: Gone) {
        let gone = apply(&mut self.master, transaction);
        assert_eq!(apply(&mut self.backup, transaction), gone);
        let counted = Gone {
            not_admitted: 0,
            ..gone
        };
        assert_eq!(counted, wanted);
    }

    fn do_step(&mut self, step: &Step) {
        match step {
            Step::Push { keys, observed } => self.push(keys, *observed),
            Step::Assign { keys } => self.assign(&by_slot(keys)),
            Step::Delete { keys } => self.delete(&by_slot(keys)),
            Step::Expire if self.lifetime.expiry.is_some() => self.expire(),
            Step::Decay if self.lifetime.takes_counts() => self.decay(),
            Step::Expire | Step::Decay => {}
            Step::Time(by) => self.time = (self.time + by).max(0),
            Step::Copy => self.copy(),
            Step::Again => {
                if let Some(last) = self.last.clone() {
                    let report = self.master.apply(&last, last.runs()).unwrap();
                    assert_eq!((report.staged, report.gone), (0, Gone::default()));
                }
            }
            Step::Save { whole } => self.save(*whole),
            Step::Export => self.export(),
            Step::FailOver => {
                std::mem::swap(&mut self.master, &mut self.backup);
                self.copy();
            }
        }
    }

    fn assign(&mut self, keys: &[u64]) {
        let assign = Change::Assign {
            only_if_absent: false,
        };
        let made = self.transaction(assign, keys, &vec![7.0; keys.len() * DIM]);
        for &key in keys {
            let row = Row {
                value: 7.0,
                seen: self.model.at(key, self.time as u32),
                frequency: 1,
                ..Row::default()
            };
            self.model.counted.remove(&key);
            self.model.rows.insert(key, row);
        }
        let wanted = self.model.evict(&self.spec, keys);
        self.apply(&made, wanted);
    }

    fn delete(&mut self, keys: &[u64]) {
        let made = self.transaction(Change::Delete, keys, &[]);
        let mut wanted = Gone::default();
        for key in keys {
            self.model.at(*key, self.time as u32);
            self.model.counted.remove(key);
            wanted.deleted += u64::from(self.model.rows.remove(key).is_some());
        }
        self.apply(&made, wanted);
    }

    fn expire(&mut self) {
        let change = Change::Expire(Thresholds::default());
        let made = self.transaction(change, &slots_as_keys(0..SLOTS), &[]);
        let Change::Expire(thresholds) = made.change else {
            unreachable!()
        };
        let (mut counted, now) = (Gone::default(), self.time as u32);
        for slot in 0..SLOTS {
            let master = &self.master;
            counted += master
                .count_expired(table_id("t"), slot, &thresholds, now)
                .unwrap();
        }
        let wanted = self.model.expire(&self.lifetime, now);
        // A dry run says the same.
        assert_eq!(counted, wanted);
        self.apply(&made, wanted);
    }

    fn decay(&mut self) {
        let slots = slots_as_keys(0..SLOTS);
        let made = self.transaction(Change::Decay { rate: 0.5 }, &slots, &[]);
        for key in slots {
            self.model.at(key, self.time as u32);
        }
        let counted = self.model.counted.values_mut();
        for row in self.model.rows.values_mut().chain(counted) {
            row.show *= 0.5;
            row.click *= 0.5;
        }
        self.apply(&made, Gone::default());
    }

    fn push(&mut self, told: &[(u64, u8, u8)], observed: bool) {
        let observed = observed && self.lifetime.takes_counts();
        let keys: BTreeMap<u64, (f32, f32)> = told
            .iter()
            .map(|&(key, show, click)| (key, (f32::from(show), f32::from(click))))
            .collect();
        let sorted = by_slot(&keys.keys().copied().collect::<Vec<_>>());
        let (mut values, mut tells) = (Vec::new(), Vec::new());
        for &key in &sorted {
            values.extend([-1.0; DIM]);
            let (show, click) = if observed { keys[&key] } else { (1.0, 0.0) };
            if observed {
                values.extend([show, click]);
            }
            tells.push((key, show, click));
        }
        let what = if observed {
            Change::update(1.0).counted()
        } else {
            Change::update(1.0)
        };
        let made = self.transaction(what, &sorted, &values);
        self.model
            .push(&self.lifetime, made.id, self.time as u32, &tells);
        let evicted = self.model.evict(&self.spec, &sorted);
        self.apply(&made, evicted);
    }

    /// The rows come in another order than they lie in at the master.
    fn copy(&mut self) {
        self.backup = exported(engine(&self.spec));
        for slot in 0..SLOTS {
            let mut copy = self.master.begin_copy(slot);
            let mut pieces: Vec<(u64, PlainRows)> = Vec::new();
            while let CopyPiece::Rows(table, rows) =
                self.master.read_copy(slot, &mut copy.rows, 200)
            {
                pieces.push((table, rows));
            }
            for (table, (keys, weights, state)) in pieces.iter().rev() {
                self.backup
                    .add_rows(*table, slot, (keys, weights, state))
                    .unwrap();
            }
            self.backup.set_memory(slot, &copy.memory);
        }
    }

    fn save(&mut self, whole: bool) {
        for slot in 0..SLOTS {
            let base = self.bases.get(&slot).copied().filter(|_| !whole);
            let mut snapshot = self.master.begin_snapshot(slot, base);
            while self.master.copy_more(&mut snapshot, 3) {}
            assert!(self.master.finish_snapshot(&mut snapshot));
            self.bases.insert(slot, snapshot.memory.position);
            load(&mut self.restored, &snapshot);
            assert_eq!(self.restored.digest(slot), self.master.digest(slot));
            assert_eq!(self.restored.memory(slot), self.master.memory(slot));
        }
    }

    /// Followed, an export has the rows of the master, whatever made them come and go.
    fn export(&mut self) {
        for slot in 0..SLOTS {
            let base = self.exported.get(&slot).copied();
            let mut snapshot = self
                .master
                .begin_export(slot, base, &[table_id("t")])
                .unwrap();
            while self.master.copy_more(&mut snapshot, 3) {}
            assert!(self.master.finish_snapshot(&mut snapshot));
            self.exported.insert(slot, snapshot.memory.position);
            let (mut rows, mut deleted) = (PlainRows::default(), &[][..]);
            for table in &snapshot.tables {
                table.layout.take_apart(&table.words, &mut rows);
                deleted = &table.deleted;
            }
            let change = SlotChange {
                slot,
                whole: snapshot.whole,
                deleted,
                keys: &rows.0,
                weights: &rows.1,
            };
            self.served.change(std::iter::once(change)).unwrap();
        }
        let (keys, weights) = self.served.all_rows();
        let served = keys
            .into_iter()
            .zip(weights.chunks(DIM).map(<[f32]>::to_vec));
        let mut wanted = BTreeMap::new();
        for slot in 0..SLOTS {
            let (keys, weights, _) = self.master.export_slot(table_id("t"), slot).unwrap();
            wanted.extend(
                keys.into_iter()
                    .zip(weights.chunks(DIM).map(<[f32]>::to_vec)),
            );
        }
        assert_eq!(served.collect::<BTreeMap<_, _>>(), wanted);
    }

    fn check(&self) {
        let statistics = self.spec.state_words() - DIM;
        let mut found = BTreeMap::new();
        for slot in 0..SLOTS {
            // L1.
            assert_eq!(self.master.digest(slot), self.backup.digest(slot));
            assert_eq!(self.master.memory(slot), self.backup.memory(slot));
            let (keys, weights, state) = self.master.export_slot(table_id("t"), slot).unwrap();
            for (n, key) in keys.into_iter().enumerate() {
                let words = &state[n * (DIM + statistics)..][DIM..DIM + statistics];
                found.insert(
                    key,
                    (
                        weights[n * DIM],
                        words.iter().map(|one| one.to_bits()).collect::<Vec<_>>(),
                    ),
                );
            }
        }
        let wanted = self.model.rows.iter().map(|(&key, row)| {
            let mut words = Vec::new();
            let (show, click) = (row.show.to_bits(), row.click.to_bits());
            for (statistic, word) in
                Statistic::ALL
                    .into_iter()
                    .zip([row.seen, row.frequency, show, click])
            {
                words.extend(self.lifetime.keeps(statistic).then_some(word));
            }
            (key, (row.value, words))
        });
        assert_eq!(found, wanted.collect());
        for key in 0..KEYS {
            // L3.
            let zeros =
                self.lifetime.unadmitted == backstay_core::spec::lifetime::Unadmitted::Zeros;
            let absent = if zeros { 0.0 } else { 0.25 };
            let value = self.model.rows.get(&key).map_or(absent, |row| row.value);
            assert_eq!(read(&self.master, key), value);
        }
        if let Some(companion) = self.spec.companion() {
            let rows = self.master.table(table_id(&companion.name)).unwrap().rows();
            assert_eq!(rows, self.model.counted.len());
        }
    }
}

fn load(engine: &mut Engine, snapshot: &SlotSnapshot) {
    if snapshot.whole {
        engine.clear_slot(snapshot.slot);
    }
    for table in &snapshot.tables {
        engine
            .remove_rows(table.table, snapshot.slot, &table.deleted)
            .unwrap();
        let mut rows = PlainRows::default();
        table.layout.take_apart(&table.words, &mut rows);
        engine
            .put_rows(table.table, snapshot.slot, (&rows.0, &rows.1, &rows.2))
            .unwrap();
    }
    engine.set_memory(snapshot.slot, &snapshot.memory);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// L1 to L6 with every kind of policy.
    #[test]
    fn agrees_with_the_model(policy in 0..POLICIES.len(), steps in prop::collection::vec(step(), 1..60)) {
        let mut world = World::new(POLICIES[policy]);
        for step in &steps {
            world.do_step(step);
            world.check();
        }
    }
}

#[test]
fn a_table_without_a_lifetime_has_no_word_more() {
    let plain = spec(r#"{"expiry":{"norm_below":1.0}}"#);
    assert_eq!(plain.state_words(), DIM);
    assert_eq!(
        spec(r#"{"expiry":{"unseen_seconds":1}}"#).state_words(),
        DIM + 1
    );
    let all = r#"{"expiry":{"unseen_seconds":1,"score_below":1.0},"capacity":{"rows":64,"evict":"least_frequent"}}"#;
    assert_eq!(spec(all).state_words(), DIM + 4);
}

/// A row keeps what its policy and the function use, 4 bytes each.
#[test]
fn a_row_keeps_the_inputs_of_its_score() {
    let words = |policy: &str| spec(policy).state_words() - DIM;
    let expiry = r#""expiry":{"score_below":0.5}"#;
    assert_eq!(words(&format!("{{{expiry}}}")), 2);
    assert_eq!(
        words(&format!(r#"{{{expiry},"score":{{"function":ROOTED}}}}"#)),
        1
    );
    assert_eq!(
        words(&format!(r#"{{{expiry},"score":{{"function":WORTH}}}}"#)),
        4
    );
    // A counter keeps what admits; a row of nothing but that keeps nothing.
    let admitted = spec(r#"{"admission":{"function":OFTEN}}"#);
    assert_eq!(admitted.state_words(), DIM);
    assert_eq!(admitted.companion().unwrap().row_elements(), 2);
}

/// Paddle's formula, written by a user, is the built-in score to the bit.
#[test]
fn a_function_that_is_the_built_in_score_keeps_the_same_rows() {
    let policy = |score: &str| {
        let policy = r#"{"admission":{"score":{"at_least":0.7}},"expiry":{"score_below":0.7},
            "capacity":{"rows":2000,"evict":"lowest_score"},"score":{SCORE"decay":0.5}}"#;
        spec(&policy.replace("SCORE", score))
    };
    let (built_in, written) = (policy(""), policy(r#""function":PADDLE,"#));
    let mut engines = [engine(&built_in), engine(&written)];
    let mut random = 1u64;
    let mut draw = move |below: u64| {
        random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        (random >> 33) % below
    };
    let (mut expired, mut evicted) = (0, 0);
    for sequence in 1..200 {
        let change_by_both = |engines: &mut [Engine; 2], what, keys: &[u64], values: &[f32]| {
            let [one, other] = [(0, &built_in), (1, &written)].map(|(at, spec)| {
                let made = change(spec, sequence, 10 + sequence as u32, what, keys, values);
                apply(&mut engines[at], &made)
            });
            assert_eq!(one, other);
            one
        };
        let slots = slots_as_keys(0..SLOTS);
        let gone = match sequence % 10 {
            9 => {
                let expire = Change::Expire(Thresholds::default());
                change_by_both(&mut engines, expire, &slots, &[])
            }
            8 => change_by_both(&mut engines, Change::Decay { rate: 0.5 }, &slots, &[]),
            _ => {
                let drawn: Vec<u64> = (0..500).map(|_| draw(4000)).collect();
                let keys = by_slot(&drawn);
                let told = keys.iter().flat_map(|_| {
                    let show = draw(9) as f32 / 3.0;
                    [-1.0, -1.0, show, show * draw(2) as f32]
                });
                let values: Vec<f32> = told.collect();
                let observed = Change::update(1.0).counted();
                change_by_both(&mut engines, observed, &keys, &values)
            }
        };
        expired += gone.score;
        evicted += gone.evicted;
        for slot in 0..SLOTS {
            assert_eq!(engines[0].digest(slot), engines[1].digest(slot));
        }
    }
    assert!(expired > 500 && evicted > 500, "{expired}, {evicted}");
}

/// A score that is no number is the lowest there is: its row is not admitted, and goes first.
#[test]
fn a_score_that_is_nan_is_the_lowest() {
    let admission = r#""admission":{"score":{"at_least":1e-30}},"#;
    for admission in ["", admission] {
        let policy = format!(
            r#"{{{admission}"expiry":{{"score_below":1e-30}},"score":{{"function":ROOTED}}}}"#
        );
        let spec = spec(&policy);
        let mut engine = engine(&spec);
        apply(&mut engine, &observe(&spec, 1, 10, 7, 2.0, 0.0));
        let before = engine.table(table_id("t")).unwrap().rows();
        assert_eq!(before, usize::from(admission.is_empty()));
        apply(&mut engine, &expire(&spec, 2, 11));
        assert_eq!(engine.table(table_id("t")).unwrap().rows(), 0);
    }
    let spec =
        spec(r#"{"capacity":{"rows":64,"evict":"lowest_score"},"score":{"function":ROOTED}}"#);
    let mut engine = engine(&spec);
    let slot = space().slot_of(0);
    let mut keys = (0..).filter(|&key| space().slot_of(key) == slot);
    let nan = keys.nth(3).unwrap();
    apply(&mut engine, &observe(&spec, 1, 10, nan, 2.0, 0.0));
    for (sequence, key) in (2..18).zip(keys) {
        apply(&mut engine, &observe(&spec, sequence, 10, key, 3.0, 0.0));
        let evicted = read(&engine, nan) == 0.25;
        assert_eq!(evicted, sequence == 17);
    }
}

/// What was counted of a key is what its row begins with.
#[test]
fn a_row_begins_with_what_its_function_counted() {
    let policy = r#"{"admission":{"function":OFTEN},"expiry":{"score_below":0.5,"unseen_seconds":90},
        "capacity":{"rows":640,"evict":"least_frequent"}}"#;
    let spec = spec(policy);
    let mut engine = engine(&spec);
    let bits = |show: f32, click: f32| [show.to_bits(), click.to_bits()];
    // Two shows, but the first push is the first there is.
    apply(&mut engine, &observe(&spec, 1, 100, 7, 2.0, 1.0));
    assert_eq!(engine.table(table_id("t")).unwrap().rows(), 0);
    apply(&mut engine, &observe(&spec, 2, 102, 7, 0.5, 0.5));
    // The clicks before it were not counted: the function does not use them.
    assert_eq!(
        statistics(&engine, &spec, 7),
        [&[102, 2], &bits(2.5, 0.5)[..]].concat()
    );
    for (sequence, time) in [(3, 110), (4, 120), (5, 130)] {
        apply(&mut engine, &observe(&spec, sequence, time, 8, 0.0, 0.0));
    }
    assert_eq!(
        statistics(&engine, &spec, 8),
        [&[130, 3], &bits(0.0, 0.0)[..]].concat()
    );
}

/// A decay changes all rows, so what has changed is all of a slot.
#[test]
fn the_checkpoint_after_a_decay_is_whole() {
    let spec = spec(r#"{"expiry":{"score_below":0.1},"score":{"decay":0.5}}"#);
    let mut engine = engine(&spec);
    apply(
        &mut engine,
        &push(&spec, 1, 10, &(0..100).collect::<Vec<_>>()),
    );
    let base = engine.begin_snapshot(0, None).memory.position;
    apply(
        &mut engine,
        &push(&spec, 2, 10, &(0..10).collect::<Vec<_>>()),
    );
    let some = engine.begin_snapshot(0, Some(base));
    assert!(!some.whole);
    let decay = Change::Decay { rate: 0.5 };
    let slots = slots_as_keys(0..SLOTS);
    apply(&mut engine, &change(&spec, 3, 10, decay, &slots, &[]));
    let next = engine.begin_snapshot(0, Some(some.memory.position));
    assert!(next.whole);
}

/// L4: a master whose clock is behind does not take a slot back in time.
#[test]
fn the_time_of_a_slot_does_not_fall() {
    let spec = spec(r#"{"expiry":{"unseen_seconds":5}}"#);
    let mut engine = engine(&spec);
    apply(&mut engine, &push(&spec, 1, 1000, &[7]));
    apply(&mut engine, &push(&spec, 2, 900, &[7]));
    assert_eq!(statistics(&engine, &spec, 7), [1000]);
    assert_eq!(apply(&mut engine, &expire(&spec, 3, 1005)).unseen, 0);
    assert_eq!(apply(&mut engine, &expire(&spec, 4, 1006)).unseen, 1);
    assert_eq!(read(&engine, 7), 0.25);
}

/// L2: a retry of a push whose row has gone makes no row, and a retry of an expiry removes none.
#[test]
fn a_retry_counts_nowhere_when_its_row_has_gone() {
    let spec = spec(r#"{"expiry":{"unseen_seconds":5}}"#);
    let mut engine = engine(&spec);
    let first = push(&spec, 1, 10, &[7]);
    apply(&mut engine, &first);
    let going = expire(&spec, 2, 20);
    assert_eq!(apply(&mut engine, &going).unseen, 1);
    let again = engine.apply(&first, first.runs()).unwrap();
    assert_eq!((again.staged, again.skipped), (0, 1));
    assert_eq!(engine.table(table_id("t")).unwrap().rows(), 0);
    apply(&mut engine, &push(&spec, 3, 20, &[7]));
    let again = engine.apply(&going, going.runs()).unwrap();
    assert_eq!((again.staged, again.gone), (0, Gone::default()));
    assert_eq!(engine.table(table_id("t")).unwrap().rows(), 1);
}

/// The parts of a slot are together the slot, and none has a row of another.
#[test]
fn a_slot_expires_in_parts() {
    let spec = spec(r#"{"admission":{"after":{"occurrences":2}},"expiry":{"unseen_seconds":5}}"#);
    let mut engine = engine(&spec);
    let keys: Vec<u64> = (0..4000).collect();
    apply(&mut engine, &push(&spec, 1, 10, &keys));
    apply(&mut engine, &push(&spec, 2, 10, &keys[..2000]));
    let (mut sequence, mut gone) = (3, Gone::default());
    for slot in 0..SLOTS {
        for part in 0..SlotPart::PARTS {
            let key = SlotPart::of(part).key(space(), slot);
            assert_eq!(space().slot_of(key), slot);
            let expire = Change::Expire(Thresholds::default());
            let some = apply(
                &mut engine,
                &change(&spec, sequence, 20, expire, &[key], &[]),
            );
            let all = 2000 / u64::from(SLOTS) / SlotPart::PARTS;
            assert!((all / 2..all * 2).contains(&some.unseen), "{some:?}");
            gone += some;
            sequence += 1;
        }
    }
    assert_eq!((gone.unseen, gone.counters), (2000, 2000));
    // Any key may stand for a whole slot.
    apply(&mut engine, &push(&spec, sequence, 20, &keys));
    let slots = by_slot(&(0..100).collect::<Vec<_>>());
    let expire = Change::Expire(Thresholds::default());
    let whole = change(&spec, sequence + 1, 30, expire, &slots, &[]);
    assert_eq!(apply(&mut engine, &whole).counters, 4000);
}

/// L6: a push that alone brings more new rows than the share is taken, and the table keeps its size.
#[test]
fn a_table_with_a_capacity_refuses_no_row() {
    let spec = spec(r#"{"capacity":{"rows":80}}"#);
    let mut engine = engine(&spec);
    let keys: Vec<u64> = (0..2000).collect();
    let gone = apply(&mut engine, &push(&spec, 1, 10, &keys));
    let rows = engine.table(table_id("t")).unwrap().rows() as u64;
    assert_eq!(gone.evicted + rows, 2000);
    assert!((60..=80).contains(&rows), "{rows}");
}

/// What stays is what was seen last.
#[test]
fn least_recent_rows_go_first() {
    let spec = spec(r#"{"capacity":{"rows":400}}"#);
    let mut engine = engine(&spec);
    let kept: Vec<u64> = (0..100).collect();
    apply(&mut engine, &push(&spec, 1, 10, &kept));
    for round in 0..20u64 {
        let time = 11 + round as u32;
        let flood: Vec<u64> = (1000 + round * 100..1100 + round * 100).collect();
        apply(&mut engine, &push(&spec, 2 + 2 * round, time, &flood));
        apply(&mut engine, &push(&spec, 3 + 2 * round, time, &kept));
    }
    for &key in &kept {
        assert!(read(&engine, key) > 20.0, "{key}");
    }
}

#[test]
fn a_filter_admits_no_key_late_and_few_early() {
    let policy = r#"{"admission":{"after":{"occurrences":3,"filter_bytes":262144}},"expiry":{"unseen_seconds":50}}"#;
    let spec = spec(policy);
    let mut engine = engine(&spec);
    let keys: Vec<u64> = (0..20_000).collect();
    let rows = |engine: &Engine| engine.table(table_id("t")).unwrap().rows();
    apply(&mut engine, &push(&spec, 1, 10, &keys));
    apply(&mut engine, &push(&spec, 2, 11, &keys));
    // 3 of 262144 counters a key.
    let early = rows(&engine);
    assert!(early < 600, "{early} of 20000 keys came early");
    apply(&mut engine, &push(&spec, 3, 12, &keys));
    assert_eq!(rows(&engine), 20_000);
    let companion = engine.table(table_id("t@admission")).unwrap();
    assert!(
        companion.allocated_bytes() < 300_000,
        "{}",
        companion.allocated_bytes()
    );
    // In time the filter forgets: once halved, two occurrences more are needed again.
    let mut fresh = self::engine(&spec);
    apply(&mut fresh, &push(&spec, 1, 10, &[5]));
    apply(&mut fresh, &push(&spec, 2, 11, &[5]));
    apply(&mut fresh, &expire(&spec, 3, 61));
    apply(&mut fresh, &expire(&spec, 4, 61));
    apply(&mut fresh, &push(&spec, 5, 62, &[5]));
    assert_eq!(rows(&fresh), 0);
    apply(&mut fresh, &push(&spec, 6, 62, &[5]));
    assert_eq!(rows(&fresh), 1);
}

/// The chance that a key comes early while others wait, so many bytes of filter for each: as the guide
/// has it.
fn early(bytes: f64) -> f64 {
    let load = 68.0 / bytes;
    let s = |i: i32| (-load * (1.0 - (1.0 - f64::from(i) / 64.0).powi(3))).exp();
    0.954 * (1.0 - 3.0 * s(1) + 3.0 * s(2) - s(3)) + 0.046 * (1.0 - 2.0 * s(1) + s(2))
}

/// The guide's formula gives the guide's figures, and both are what a filter does.
#[test]
fn as_many_keys_come_early_as_the_guide_says() {
    let guide = include_str!("../../../docs/guide/features.md");
    let row = |title: &str| -> Vec<f64> {
        let line = guide.lines().find(|line| line.starts_with(title)).unwrap();
        let cells = line[title.len()..].split('|').map(str::trim);
        let cells = cells.filter(|cell| !cell.is_empty());
        let number = |cell: &str| cell.trim_end_matches(" %").parse().unwrap();
        cells.map(number).collect()
    };
    let (sizes, figures) = (
        row("| bytes of filter for each id |"),
        row("| come early |"),
    );
    assert_eq!(sizes.len(), figures.len());
    assert!(sizes.contains(&12.0), "{sizes:?}");
    for (&bytes, &figure) in sizes.iter().zip(&figures) {
        let percent = 100.0 * early(bytes);
        assert!((percent - figure).abs() < 0.05, "{bytes}: {percent} %");
    }
    let (waiting, probes) = (20_000u64, 1_000u64);
    for bytes in [6, 12, 24] {
        let filter = format!(r#"{{"occurrences":2,"filter_bytes":{}}}"#, bytes * waiting);
        let spec = spec(&format!(r#"{{"admission":{{"after":{filter}}}}}"#));
        let mut engine = engine(&spec);
        let keys: Vec<u64> = (0..waiting).collect();
        apply(&mut engine, &push(&spec, 1, 10, &keys));
        let (mut came, mut tried) = (0, 0);
        for first in (waiting..).step_by(probes as usize).take(20) {
            let new: Vec<u64> = (first..first + probes).collect();
            // Those before are forgotten.
            let gone = apply(&mut engine.clone(), &push(&spec, 2, 11, &new));
            came += probes - gone.not_admitted;
            tried += probes;
        }
        // On average half of the new ones wait, too.
        let waited = (waiting + probes / 2) as f64;
        let wanted = early((bytes * waiting) as f64 / waited);
        let found = came as f64 / tried as f64;
        assert!(
            (found / wanted - 1.0).abs() < 0.25,
            "{bytes}: {found} of {wanted}"
        );
    }
}

/// What was counted in one pass counts in the next, exactly or by a filter.
#[test]
fn occurrences_count_over_all_passes() {
    for filter in ["", r#","filter_bytes":65536"#] {
        let policy = format!(r#"{{"admission":{{"after":{{"occurrences":2{filter}}}}}}}"#);
        let spec = spec(&policy);
        let mut engine = engine(&spec);
        for pass in 0..2 {
            let mut push = Transaction::clone(&push(&spec, 0, 10 + 1000 * pass, &[7]));
            push.id.stream.pass = pass;
            apply(&mut engine, &push);
        }
        assert_eq!(read(&engine, 7), 1.25);
    }
}

/// A part as large as the probability says, and another one by another push.
#[test]
fn a_probability_draws_by_key_and_push() {
    let spec = spec(r#"{"admission":{"probability":{"probability":0.25}}}"#);
    let mut engine = engine(&spec);
    let keys: Vec<u64> = (0..10_000).collect();
    let rows = |engine: &Engine| engine.table(table_id("t")).unwrap().rows() as f64;
    let gone = apply(&mut engine, &push(&spec, 1, 10, &keys));
    assert!((rows(&engine) - 2500.0).abs() < 150.0, "{}", rows(&engine));
    assert_eq!(gone.not_admitted as f64 + rows(&engine), 10_000.0);
    apply(&mut engine, &push(&spec, 2, 10, &keys));
    let expected = 10_000.0 * (1.0 - 0.75 * 0.75);
    assert!(
        (rows(&engine) - expected).abs() < 150.0,
        "{}",
        rows(&engine)
    );
}

#[test]
fn sixteen_bit_weights_have_their_norm_and_their_statistics() {
    let policy = r#"{"expiry":{"norm_below":2.0,"unseen_seconds":100}}"#;
    let spec = spec_in(policy, "bfloat16");
    let mut engine = engine(&spec);
    apply(&mut engine, &push(&spec, 1, 10, &[1, 2]));
    apply(&mut engine, &push(&spec, 2, 10, &[2]));
    assert_eq!(apply(&mut engine, &expire(&spec, 3, 20)).norm, 1);
    assert_eq!((read(&engine, 1), read(&engine, 2)), (0.25, 2.25));
    assert_eq!(statistics(&engine, &spec, 2), [10]);
}

#[test]
fn shows_and_clicks_come_from_the_push() {
    let spec = spec(r#"{"expiry":{"score_below":2.0}}"#);
    let mut engine = engine(&spec);
    apply(&mut engine, &observe(&spec, 1, 10, 7, 3.0, 2.0));
    apply(&mut engine, &observe(&spec, 2, 10, 8, 9.0, 0.0));
    apply(&mut engine, &push(&spec, 3, 10, &[7]));
    assert_eq!(
        statistics(&engine, &spec, 7),
        [4f32.to_bits(), 2f32.to_bits()]
    );
    // 0.1 * 2 + 2 stays, 0.1 * 9 goes.
    assert_eq!(apply(&mut engine, &expire(&spec, 4, 10)).score, 1);
    assert_eq!((read(&engine, 7), read(&engine, 8)), (2.25, 0.25));
}

/// A request may name a slot as often as it likes: it is looked at once.
#[test]
fn a_slot_that_is_named_often_decays_and_expires_once() {
    let spec = spec(r#"{"expiry":{"score_below":0.1},"score":{"decay":0.5}}"#);
    let mut engine = engine(&spec);
    apply(&mut engine, &observe(&spec, 1, 10, 7, 8.0, 0.0));
    let slot = space().slot_of(7);
    let often = vec![slots_as_keys([slot])[0]; 5];
    let decay = Change::Decay { rate: 0.5 };
    apply(&mut engine, &change(&spec, 2, 10, decay, &often, &[]));
    assert_eq!(statistics(&engine, &spec, 7), [4f32.to_bits(), 0]);
    // The key of a row, and those of parts, beside the whole slot.
    let parts = (0..SlotPart::PARTS).map(|part| SlotPart::of(part).key(space(), slot));
    let mixed: Vec<u64> = [7].into_iter().chain(parts).chain(often).collect();
    let unseen = Thresholds {
        score_below: Some(100.0),
        ..Thresholds::default()
    };
    let expire = change(&spec, 3, 10, Change::Expire(unseen), &mixed, &[]);
    assert_eq!(apply(&mut engine, &expire).score, 1);
}

/// Counts that are too large for a float stay finite, so that the order of scores is one order.
#[test]
fn shows_and_clicks_stay_finite() {
    for admission in ["", r#""admission":{"score":{"at_least":1e30}},"#] {
        let spec = spec(&format!(
            "{{{admission}\"expiry\":{{\"score_below\":2.0}}}}"
        ));
        let mut engine = engine(&spec);
        for sequence in 1..4 {
            apply(&mut engine, &observe(&spec, sequence, 10, 7, 3e38, 3e38));
        }
        assert_eq!(statistics(&engine, &spec, 7), [f32::MAX.to_bits(); 2]);
    }
}

/// Keys with a row are counted no more, so they need no room for counters.
#[test]
fn rows_that_are_there_need_no_memory_for_counters() {
    let spec = spec(POLICIES[1]);
    let mut engine = engine(&spec);
    let made = Change::Assign {
        only_if_absent: false,
    };
    apply(&mut engine, &change(&spec, 1, 10, made, &[5], &[1.0; DIM]));
    assert_eq!(engine.growth_bytes(table_id("t"), &[5]).unwrap(), 0);
    let other = (6..KEYS).find(|&key| space().slot_of(key) == space().slot_of(5));
    assert!(
        engine
            .growth_bytes(table_id("t"), &[other.unwrap()])
            .unwrap()
            > 0
    );
}

/// A filter that has all its blocks needs no room for more keys.
#[test]
fn a_full_filter_needs_no_memory_for_counters() {
    let spec = spec(r#"{"admission":{"after":{"occurrences":100,"filter_bytes":65536}}}"#);
    let mut engine = engine(&spec);
    let in_a_slot = 65_536 / u64::from(SLOTS) / FILTER_BLOCK_BYTES;
    let blocks = in_a_slot as usize * SLOTS as usize;
    let counters = |engine: &Engine| {
        let id = engine.table(table_id("t")).unwrap().companion().unwrap();
        engine.table(id).unwrap().rows()
    };
    let announced = |engine: &Engine, push: &Transaction| {
        let [all, most] = [
            engine.growth_bytes(table_id("t"), push.batch.keys()),
            engine.most_growth_bytes(table_id("t"), push.runs()),
        ];
        let rows = engine.table(table_id("t")).unwrap();
        let rows = rows.growth_bytes(push.batch.keys());
        (all.unwrap() - rows, most.unwrap() - rows)
    };
    let mut sequence = 0;
    while counters(&engine) < blocks {
        assert!(sequence < 20, "keys fall into few blocks");
        let first = sequence * 1000;
        sequence += 1;
        let some = push(
            &spec,
            sequence,
            10,
            &(first..first + 1000).collect::<Vec<u64>>(),
        );
        let before = engine.content_bytes().1;
        let (all, most) = announced(&engine, &some);
        apply(&mut engine, &some);
        let taken = engine.content_bytes().1 - before;
        assert!(taken <= all && all <= most, "{taken}, {all}, {most}");
    }
    let more = push(
        &spec,
        sequence + 1,
        10,
        &(1_000_000..1_005_000).collect::<Vec<u64>>(),
    );
    assert_eq!(announced(&engine, &more), (0, 0));
    apply(&mut engine, &more);
    assert_eq!(counters(&engine), blocks);
}

/// A table that is refused leaves nothing behind.
#[test]
fn a_refused_table_leaves_no_companion() {
    let plain = spec(r#"{"expiry":{"norm_below":1.0}}"#);
    let mut engine = engine(&plain);
    assert!(engine.create_table(&spec(POLICIES[1])).is_err());
    assert!(engine.table(table_id("t@admission")).is_err());
}

#[test]
fn what_a_policy_does_not_have_is_refused() {
    let spec = spec(r#"{"expiry":{"norm_below":1.0}}"#);
    let engine = engine(&spec);
    let refused = |transaction: &Transaction| match engine.check(transaction) {
        Err(Refusal::InvalidRequest(reason)) => reason,
        other => panic!("{other:?}"),
    };
    assert!(refused(&observe(&spec, 1, 1, 7, 1.0, 0.0)).contains("show and click"));
    let keys = slots_as_keys([0]);
    let decay = change(&spec, 1, 1, Change::Decay { rate: 0.5 }, &keys, &[]);
    assert!(refused(&decay).contains("show and click"));
    let unseen = Thresholds {
        unseen_seconds: Some(1),
        ..Thresholds::default()
    };
    let expire = change(&spec, 1, 1, Change::Expire(unseen), &keys, &[]);
    assert!(refused(&expire).contains("unseen_seconds"));
}

#[test]
fn a_share_that_is_too_small_is_refused_by_name() {
    let mut engine = Engine::new(space(), 0..SLOTS);
    for (policy, name, least) in [
        (
            r#"{"capacity":{"rows":63}}"#,
            "lifetime.capacity.rows is 63",
            "at least 64",
        ),
        (
            r#"{"capacity":{"bytes":1024}}"#,
            "lifetime.capacity.bytes is 1024",
            "at least",
        ),
    ] {
        let refused = engine.create_table(&spec(policy)).unwrap_err().to_string();
        assert!(
            refused.contains(name) && refused.contains(least),
            "{refused}"
        );
    }
    engine
        .create_table(&spec(r#"{"capacity":{"rows":64}}"#))
        .unwrap();
}

/// Replicas look a function up in their own descriptions, so neither it nor its settings change.
#[test]
fn a_function_and_its_settings_stay() {
    let policy = r#"{"admission":{"function":OFTEN},"expiry":{"score_below":0.5},"score":{"function":WORTH,"decay":0.5}}"#;
    let mut engine = engine(&spec(policy));
    engine
        .change_settings(&spec(&policy.replace(r#""decay":0.5"#, r#""decay":0.25"#)))
        .unwrap();
    let settings = WORTH.replace("2.0}", "3.0}");
    let threshold = OFTEN.replace(r#""constant":2.0"#, r#""constant":9.0"#);
    for (other, field) in [
        (
            policy.replace("WORTH", &settings),
            "lifetime.score.function.settings.of_click",
        ),
        (policy.replace("WORTH", PADDLE), "lifetime.score.function"),
        (
            policy.replace("OFTEN", &threshold),
            "lifetime.admission.function.expression",
        ),
    ] {
        let refused = engine.change_settings(&spec(&other)).unwrap_err();
        assert!(refused.to_string().contains(field), "{refused}");
    }
}

/// Thresholds, rates and the size of a capacity may change; what a row keeps may not.
#[test]
fn harmless_settings_may_change() {
    let mut engine = engine(&spec(
        r#"{"expiry":{"unseen_seconds":5},"capacity":{"rows":80}}"#,
    ));
    engine
        .change_settings(&spec(
            r#"{"expiry":{"unseen_seconds":9},"capacity":{"rows":160}}"#,
        ))
        .unwrap();
    for (other, field) in [
        (
            r#"{"expiry":{"unseen_seconds":9,"score_below":1.0},"capacity":{"rows":160}}"#,
            "lifetime.score",
        ),
        (
            r#"{"expiry":{"unseen_seconds":9},"capacity":{"rows":160,"evict":"least_frequent"}}"#,
            "lifetime.capacity.evict",
        ),
        (
            r#"{"admission":{"after":{"occurrences":2}},"expiry":{"unseen_seconds":9},"capacity":{"rows":160}}"#,
            "lifetime.admission",
        ),
    ] {
        let refused = engine
            .change_settings(&spec(other))
            .unwrap_err()
            .to_string();
        assert!(refused.contains(field), "{refused}");
    }
    let memory = SlotMemory::default();
    assert_eq!(memory.time, 0);
}

/// While memory is short, a master removes rows above a smaller share; each replica removes the same.
#[test]
fn an_eviction_goes_down_to_the_share_of_its_stamp() {
    let spec = spec(r#"{"capacity":{"rows":400,"evict":"least_recent"}}"#);
    let (mut one, mut other) = (engine(&spec), engine(&spec));
    let keys: Vec<u64> = (0..KEYS).collect();
    for engine in [&mut one, &mut other] {
        for (sequence, keys) in keys.chunks(50).enumerate() {
            let sequence = sequence as u64;
            apply(engine, &push(&spec, sequence, 10 + sequence as u32, keys));
        }
    }
    let before = rows_of(&one);
    let keys = slots_as_keys(0..SLOTS);
    let mut made = Transaction::clone(&change(&spec, 20, 30, Change::Evict, &keys, &[]));
    made.stamp.share = 32;
    assert!(made.change.evicts() && !made.change.creates());
    let gone = apply(&mut one, &made);
    assert_eq!(gone, apply(&mut other, &made));
    assert_eq!((gone.expired(), gone.counters), (0, 0));
    assert_eq!(before - rows_of(&one), gone.evicted as usize);
    for slot in 0..SLOTS {
        assert!(one.table(table_id("t")).unwrap().rows_in(slot) <= 32);
        assert_eq!(one.digest(slot), other.digest(slot));
    }
}

fn rows_of(engine: &Engine) -> usize {
    engine.table(table_id("t")).unwrap().rows()
}

/// What a push may add is counted with one look at each key, or with none.
#[test]
fn the_memory_that_a_push_needs_is_that_of_rows_and_counters() {
    let spec = spec(POLICIES[1]);
    let mut engine = engine(&spec);
    let made = Change::Assign {
        only_if_absent: false,
    };
    let known = by_slot(&(0..50).collect::<Vec<u64>>());
    let values = vec![1.0; known.len() * DIM];
    apply(&mut engine, &change(&spec, 1, 10, made, &known, &values));
    let table = table_id("t");
    let push = push(&spec, 2, 11, &(0..80).collect::<Vec<u64>>());
    let keys = push.batch.keys();
    let new: Vec<u64> = keys.iter().copied().filter(|&key| key >= 50).collect();
    let wanted = engine.growth_bytes(table, keys).unwrap();
    assert_eq!(wanted, engine.growth_bytes(table, &new).unwrap());
    let counters = engine.table(table).unwrap().companion().unwrap();
    let counters = engine.table(counters).unwrap().growth_bytes(&new);
    assert_eq!(
        wanted,
        engine.table(table).unwrap().growth_bytes(&new) + counters
    );
    assert!(engine.most_growth_bytes(table, push.runs()).unwrap() >= wanted);
    let (rows, counted) = engine.table_bytes(table);
    assert_eq!((rows, counted), engine.content_bytes());
    apply(&mut engine, &push);
    let after = engine.table_bytes(table);
    assert!(after.0 + after.1 - rows - counted <= wanted);
    assert!(after.1 > counted, "the keys without a row are counted");
}
