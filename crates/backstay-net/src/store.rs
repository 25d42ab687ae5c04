//! The engines of one node behind locks: what sessions call.
//!
//! Slots are cut into stripes, one engine and one lock each. A request takes the locks one
//! after the other, in ascending order, and never holds two. So a slot has one writer at a
//! time, and two requests work side by side on different stripes. [`crate::replicator`] decides
//! before which changes a slot takes, and when.

mod checkpoint;
mod push_check;
mod relief;
mod room;
mod rows;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::Duration;

use backstay_core::compensation::Reference;
use backstay_core::engine::{Engine, ServingState, StageReport};
use backstay_core::error::Refusal;
use backstay_core::gradient;
use backstay_core::hash::{table_id, SlotSpace};
use backstay_core::life::{Gone, Thresholds};
use backstay_core::replication::Rows;
use backstay_core::spec::{NonFinitePolicy, TableSpec};
use backstay_core::staleness::StalenessCounts;
use backstay_core::stream::{StreamId, TransactionId};
use backstay_core::table::{PlainRows, Table};
use backstay_core::transaction::{Change, Run, StagedRun, Transaction};
use parking_lot::RwLock;

use crate::clock::WallClock;
use crate::memory::{Memory, Part};
pub(crate) use relief::{retry_later, Shares, ShortOf};
use relief::{GivingSlots, Relief};
use room::NoRoom;

/// Engines a node is cut into, if it has that many slots.
const STRIPES: u32 = 64;
/// The most tables of a cluster.
pub const MAX_TABLES: usize = 10_000;

/// What a pull asks for besides rows: what its client's next push will tell.
#[derive(Debug, Default)]
pub struct Asked<'a> {
    /// The origin of each slot of the keys, to be appended.
    pub origins: Option<&'a mut Vec<u64>>,
    /// What [`Engine::read_sums`] gives of each key, to be filled in.
    pub sums: Option<&'a mut [f32]>,
}

/// How many rows a table has and what they take.
#[derive(Debug, Clone)]
pub struct TableUsage {
    /// The table's description.
    pub spec: Arc<TableSpec>,
    /// Its id.
    pub id: u64,
    /// Rows on this node.
    pub rows: u64,
    /// Of these, rows in slots that this node is master of: over all nodes, each row once.
    pub master_rows: u64,
    /// Bytes allocated for them on this node.
    pub bytes: u64,
    /// Entries on this node that count keys without a row, and bytes allocated for them.
    pub counters: (u64, u64),
    /// How stale pushes were, in slots that this node was master of.
    pub stale: StalenessCounts,
}

/// See the module's documentation.
#[derive(Debug)]
pub struct Store {
    space: SlotSpace,
    stripes: Vec<RwLock<Engine>>,
    stripe_slots: u32,
    specs: RwLock<BTreeMap<u64, Described>>,
    routing_version: AtomicU64,
    memory: Arc<Memory>,
    /// Of each stripe, the bytes of rows kept for copies that are counted.
    kept_bytes: Vec<AtomicU64>,
    relief: Relief,
    clock: WallClock,
}

/// A table's description, and the revision of its settings.
#[derive(Debug, Clone)]
struct Described {
    spec: Arc<TableSpec>,
    revision: u64,
}

impl Store {
    /// An empty store that serves no slot yet. `memory_limit_bytes` 0 means no limit.
    pub fn new(space: SlotSpace, memory_limit_bytes: u64) -> Self {
        Self::with_clock(space, memory_limit_bytes, WallClock::default())
    }

    /// The same, by this clock: it stamps what tables with a lifetime are to do.
    pub fn with_clock(space: SlotSpace, memory_limit_bytes: u64, clock: WallClock) -> Self {
        let stripe_slots = space.count().div_ceil(STRIPES);
        let stripes: Vec<_> = (0..space.count() / stripe_slots)
            .map(|n| RwLock::new(Engine::new(space, n * stripe_slots..(n + 1) * stripe_slots)))
            .collect();
        Self {
            kept_bytes: stripes.iter().map(|_| AtomicU64::new(0)).collect(),
            space,
            stripes,
            stripe_slots,
            specs: RwLock::default(),
            routing_version: AtomicU64::new(0),
            memory: Arc::new(Memory::new(memory_limit_bytes)),
            relief: Relief::default(),
            clock,
        }
    }

    /// The cluster's slots.
    pub fn space(&self) -> SlotSpace {
        self.space
    }

    /// The routing version this node goes by.
    pub fn routing_version(&self) -> u64 {
        self.routing_version.load(Ordering::Acquire)
    }

    /// Serve exactly the slots marked in `owned`, one entry per slot, without replicas.
    pub fn set_routing(&self, version: u64, owned: &[bool]) {
        for stripe in &self.stripes {
            let mut engine = stripe.write();
            for slot in engine.slots() {
                let owned = owned.get(slot as usize).is_some_and(|&owned| owned);
                let state = if owned {
                    ServingState::Serving
                } else {
                    ServingState::Elsewhere
                };
                engine.set_serving_state(slot, state);
            }
        }
        Rows::set_version(self, version);
    }

    /// Create a table, or give it the settings of a newer `revision`: pushes that are taken on
    /// from now on are applied under them. An older revision changes nothing.
    pub fn create_table(&self, spec: &Arc<TableSpec>, revision: u64) -> Result<(), Refusal> {
        let mut specs = self.specs.write();
        let id = table_id(&spec.name);
        let known = specs.get(&id).map(|known| known.revision);
        if specs.len() >= MAX_TABLES && known.is_none() {
            return Err(Refusal::LimitExceeded(format!(
                "the cluster has {MAX_TABLES} tables, the limit"
            )));
        }
        if known.is_some_and(|known| revision < known) {
            return Ok(());
        }
        let is_newer = known.is_some_and(|known| revision > known);
        for stripe in &self.stripes {
            let mut engine = stripe.write();
            if is_newer {
                engine.change_settings(spec)?;
            } else {
                engine.create_table(spec)?;
            }
        }
        let spec = Arc::clone(spec);
        specs.insert(id, Described { spec, revision });
        Ok(())
    }

    /// A table's description by its id.
    pub fn spec(&self, table: u64) -> Result<Arc<TableSpec>, Refusal> {
        let specs = self.specs.read();
        let found = specs.get(&table).map(|known| Arc::clone(&known.spec));
        found.ok_or_else(|| Refusal::UnknownTable(format!("with id {table:#018x}")))
    }

    /// Every table with its use of memory.
    pub fn tables(&self) -> Vec<TableUsage> {
        let specs: Vec<_> = self
            .specs
            .read()
            .iter()
            .map(|(&id, known)| (id, Arc::clone(&known.spec)))
            .collect();
        specs
            .into_iter()
            .map(|(id, spec)| self.usage_of(id, spec))
            .collect()
    }

    /// Bytes allocated for rows, for counters of keys without one, and for what is remembered of
    /// streams.
    pub fn allocated_bytes(&self) -> u64 {
        let parts = [Part::Rows, Part::Counters, Part::Streams];
        parts.into_iter().map(|part| self.memory.of(part)).sum()
    }

    /// The account of this node's memory.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Bytes of that for what is remembered of streams.
    pub fn stream_bytes(&self) -> u64 {
        let bytes = self.stripes.iter().map(|one| one.read().stream_bytes());
        bytes.sum::<usize>() as u64
    }

    /// Copy the weights of `keys` (sorted by slot) to `out`, \[n, `row_elements`].
    pub fn pull(&self, table: u64, keys: &[u64], out: &mut [f32]) -> Result<(), Refusal> {
        self.pull_and_tell(table, keys, out, Asked::default())
    }

    /// The same with what else is asked for, of the same moment.
    pub fn pull_and_tell(
        &self,
        table: u64,
        keys: &[u64],
        out: &mut [f32],
        mut asked: Asked<'_>,
    ) -> Result<(), Refusal> {
        let elements = self.spec(table)?.row_elements();
        let told = Reference::Sum.values(elements);
        for (stripe, part) in self.parts(keys)? {
            let out = &mut out[part.start * elements..part.end * elements];
            let engine = self.stripes[stripe].read();
            engine.read(table, &keys[part.clone()], out)?;
            if let Some(sums) = asked.sums.as_deref_mut() {
                let sums = &mut sums[part.start * told..part.end * told];
                engine.read_sums(table, &keys[part.clone()], sums)?;
            }
            if let Some(origins) = asked.origins.as_deref_mut() {
                engine.origins(table, &keys[part], origins)?;
            }
        }
        Ok(())
    }

    /// Check a push, clip its values as its table says, note under which of the table's settings
    /// every replica applies it, and reserve room for the rows it may create, or refuse it before
    /// anything changes. For how long its sender is to wait before the next one: memory is short.
    pub fn prepare(&self, transaction: &mut Transaction) -> Result<Duration, Refusal> {
        let spec = self.spec(transaction.table)?;
        let policy = match transaction.change {
            change if change.updates() => &spec.non_finite,
            _ => &NonFinitePolicy::Refuse,
        };
        let checked = match transaction.change {
            Change::Update(update) if !update.is_plain() => {
                push_check::check(policy, &spec, update, &mut transaction.batch)?
            }
            _ => gradient::apply_policy(policy, transaction.batch.values_mut()),
        };
        checked.map_err(|error| Refusal::NonFinite(format!("table {}: {error}", spec.name)))?;
        transaction.stamp_by(&spec, self.space, self.clock.seconds());
        push_check::check_change(&spec, transaction.change)?;
        self.check_under_way(transaction)?;
        self.stamp_smaller_share(transaction);
        let room = self.reserve(transaction, transaction.runs(), GivingSlots::Served);
        let room = room.map_err(|refusal| match refusal {
            Refusal::MemoryLimit(why) if self.begin_relief(ShortOf::Here) => retry_later(&why),
            refusal => refusal,
        })?;
        let pause = room.pause();
        transaction.attach(room);
        Ok(pause)
    }

    /// Whether it may refuse rows for lack of memory.
    pub(crate) fn has_memory_limit(&self) -> bool {
        self.memory.limit_bytes() > 0
    }

    /// Reserve room for these runs of another node's push, if there is any. Otherwise
    /// [`Rows::check`] refuses the push. `waits`: other runs of it wait for a copy.
    pub(crate) fn make_room(&self, transaction: &mut Transaction, runs: &[Run], waits: bool) {
        match self.reserve(transaction, runs, GivingSlots::All) {
            Ok(mut room) => {
                if waits {
                    room.wait_for_a_copy();
                }
                transaction.attach(room);
            }
            Err(refusal) => transaction.attach(NoRoom(refusal)),
        }
    }

    /// Apply a prepared push at once: stage and commit it in every slot it touches, skipping
    /// slots that have it already. For slots without backups.
    ///
    /// Everything that a malformed push could be refused for is checked before the first slot
    /// changes. A slot that moves away, or that is full, may still refuse when other slots have the
    /// push. That is [`Refusal::Incomplete`], and safe to retry, because these slots skip it.
    pub fn apply(&self, transaction: &Transaction) -> Result<StageReport, Refusal> {
        let mut report = StageReport::default();
        for (stripe, runs) in self.stripes_of(transaction.runs()) {
            let outcome = self.write(stripe, Some(transaction.table), |engine| {
                engine.apply(transaction, runs)
            });
            match outcome {
                Ok(applied) => report += applied,
                // The sender must not think that nothing of the push was applied.
                Err(refusal) if report != StageReport::default() => {
                    return Err(Refusal::Incomplete(refusal.to_string()));
                }
                Err(refusal) => return Err(refusal),
            }
        }
        Ok(report)
    }

    /// The end of a stream, as a transaction of every slot that is served here. Refused while
    /// this node is master of slots that it does not serve yet, because they would miss it.
    pub fn close_of(&self, stream: StreamId) -> Result<Transaction, Refusal> {
        let mut slots = Vec::with_capacity(self.space.count() as usize);
        for slot in 0..self.space.count() {
            match Rows::serving_state(self, slot) {
                ServingState::Serving => slots.push(slot),
                ServingState::Elsewhere => {}
                ServingState::Waiting => {
                    let reason = format!("slot {slot} is not served yet");
                    return Err(Refusal::NotReady(reason));
                }
            }
        }
        let id = TransactionId {
            stream,
            sequence: u64::MAX,
        };
        Ok(Transaction::close(id, slots))
    }

    /// The open streams of clients' own and of tasks that some slot here knows.
    pub fn open_streams(&self) -> BTreeSet<StreamId> {
        let mut streams = BTreeSet::new();
        for stripe in &self.stripes {
            streams.extend(stripe.read().open_streams());
        }
        streams
    }

    /// The slots that are served here and know a stream.
    pub fn served_slots_with(&self, stream: StreamId) -> Vec<u32> {
        let mut slots = Vec::new();
        for stripe in &self.stripes {
            slots.extend(stripe.read().served_slots_with(stream));
        }
        slots
    }

    /// The slots that are served here and have not taken a sequence of a stream.
    pub fn served_slots_without(&self, stream: StreamId, sequence: u64) -> Vec<u32> {
        let mut slots = Vec::new();
        for stripe in &self.stripes {
            slots.extend(stripe.read().served_slots_without(stream, sequence));
        }
        slots
    }

    /// Rows of a table in one slot here, and counters of keys without a row.
    pub fn rows_in(&self, table: &str, slot: u32) -> usize {
        let engine = self.stripes[self.stripe(slot)].read();
        let rows = |id: u64| engine.table(id).map_or(0, |table| table.rows_in(slot));
        let id = table_id(table);
        let companion = engine.table(id).ok().and_then(Table::companion);
        rows(id) + companion.map_or(0, rows)
    }

    /// The tables that servers expire or decay without being asked.
    pub fn tables_with_periods(&self) -> Vec<Arc<TableSpec>> {
        let has_period = |spec: &Arc<TableSpec>| {
            let lifetime = spec.lifetime.as_ref();
            lifetime.is_some_and(|one| {
                let expires = one.expiry.is_some_and(|one| one.every_seconds.is_some());
                expires
                    || one
                        .score
                        .as_ref()
                        .is_some_and(|one| one.decay_every_seconds.is_some())
            })
        };
        let specs = self.specs.read();
        let specs = specs.values().map(|known| &known.spec);
        specs.filter(|spec| has_period(spec)).cloned().collect()
    }

    /// One table with its use of memory.
    pub fn usage(&self, table: &str) -> Result<TableUsage, Refusal> {
        let id = self.named(table)?;
        Ok(self.usage_of(id, self.spec(id)?))
    }

    fn usage_of(&self, id: u64, spec: Arc<TableSpec>) -> TableUsage {
        let (mut rows, mut master_rows, mut bytes) = (0, 0, 0);
        let mut stale = StalenessCounts::default();
        for stripe in &self.stripes {
            let engine = stripe.read();
            if let Ok(table) = engine.table(id) {
                rows += table.rows() as u64;
                stale += *table.staleness();
                bytes += table.allocated_bytes() as u64;
                master_rows += engine
                    .slots()
                    .filter(|&slot| engine.serving_state(slot) != ServingState::Elsewhere)
                    .map(|slot| table.rows_in(slot) as u64)
                    .sum::<u64>();
            }
        }
        let counters = spec.companion().map_or((0, 0), |companion| {
            let id = table_id(&companion.name);
            let one = |stripe: &RwLock<Engine>| {
                let engine = stripe.read();
                let table = engine.table(id);
                table.map_or((0, 0), |one| {
                    (one.rows() as u64, one.allocated_bytes() as u64)
                })
            };
            let sum = |all: (u64, u64), one: (u64, u64)| (all.0 + one.0, all.1 + one.1);
            self.stripes.iter().map(one).fold((0, 0), sum)
        });
        TableUsage {
            spec,
            id,
            rows,
            master_rows,
            bytes,
            counters,
            stale,
        }
    }

    /// The name of a table or of a companion by its id.
    pub fn content_name(&self, id: u64) -> Result<String, Refusal> {
        let engine = self.stripes[0].read();
        Ok(engine.table(id)?.spec().name.clone())
    }

    /// The time, in seconds, that the next transaction is stamped with.
    pub fn seconds(&self) -> u32 {
        self.clock.seconds()
    }

    /// A time, in seconds, that is later than all that a slot has seen, also by the clock of an
    /// earlier master that went ahead of this one.
    pub fn seconds_in(&self, slot: u32) -> u32 {
        let seen = self.stripes[self.stripe(slot)].read().time(slot);
        self.seconds().max(seen.saturating_add(1))
    }

    /// Count the rows that an expiry would remove from the slots of these keys; None: by the
    /// thresholds of the table.
    pub fn count_expired(
        &self,
        table: u64,
        keys: &[u64],
        thresholds: Thresholds,
    ) -> Result<Gone, Refusal> {
        let spec = self.spec(table)?;
        let own = spec.lifetime.as_ref().and_then(|one| one.expiry);
        let thresholds = match (thresholds.is_empty(), own) {
            (true, Some(own)) => own.into(),
            _ => thresholds,
        };
        push_check::check_change(&spec, Change::Expire(thresholds))?;
        let mut gone = Gone::default();
        let mut slots: Vec<u32> = keys.iter().map(|&key| self.space.slot_of(key)).collect();
        slots.sort_unstable();
        slots.dedup();
        for slot in slots {
            let engine = self.stripe_of(slot)?.read();
            gone += engine.count_expired(table, slot, &thresholds, self.seconds())?;
        }
        Ok(gone)
    }

    /// The rows of one slot of a table, ordered by key.
    pub fn export_slot(&self, table: &str, slot: u32) -> Result<PlainRows, Refusal> {
        let id = self.named(table)?;
        self.stripe_of(slot)?.read().export_slot(id, slot)
    }

    /// Replace the rows of one slot of a table.
    pub fn import_slot(
        &self,
        table: &str,
        slot: u32,
        rows: (&[u64], &[f32], &[f32]),
    ) -> Result<(), Refusal> {
        let id = self.named(table)?;
        self.stripe_of(slot)?;
        self.write(self.stripe(slot), Some(id), |engine| {
            engine.import_slot(id, slot, rows)
        })
    }

    /// How many transactions a slot has applied, and its digest.
    pub fn slot_digest(&self, slot: u32) -> Result<(u64, u64), Refusal> {
        let engine = self.stripe_of(slot)?.read();
        Ok((engine.position(slot), engine.digest(slot)))
    }

    fn stripe(&self, slot: u32) -> usize {
        (slot / self.stripe_slots) as usize
    }

    /// Change an engine, and keep account of its memory: of one table's, if only that one
    /// changes.
    fn write<T>(
        &self,
        stripe: usize,
        table: Option<u64>,
        change: impl FnOnce(&mut Engine) -> T,
    ) -> T {
        let bytes = |engine: &Engine| {
            let (rows, counters) = match table {
                Some(id) => engine.table_bytes(id),
                None => engine.content_bytes(),
            };
            [rows, counters, engine.stream_bytes()]
        };
        let mut engine = self.stripes[stripe].write();
        let before = bytes(&engine);
        let outcome = change(&mut engine);
        let after = bytes(&engine);
        for (at, part) in [Part::Rows, Part::Counters, Part::Streams]
            .into_iter()
            .enumerate()
        {
            self.memory
                .change(part, before[at] as u64, after[at] as u64);
        }
        self.count_kept(stripe, &mut engine);
        outcome
    }

    /// Give back what is kept for copies to other nodes that are over, also in slots where nothing
    /// else happens.
    pub(crate) fn end_copies(&self) {
        for (stripe, kept) in self.kept_bytes.iter().enumerate() {
            let has_kept = kept.load(Ordering::Relaxed) > 0;
            if has_kept && self.stripes[stripe].read().has_ended_copies() {
                self.count_kept(stripe, &mut self.stripes[stripe].write());
            }
        }
    }

    /// Count the rows that an engine keeps for copies; it is locked.
    fn count_kept(&self, stripe: usize, engine: &mut Engine) {
        engine.end_copies();
        let kept = engine.kept_bytes();
        let before = self.kept_bytes[stripe].swap(kept, Ordering::Relaxed);
        self.memory.change(Part::Copies, before, kept);
    }

    /// Cut the runs of a transaction into stripes.
    fn stripes_of<'a>(&self, runs: &'a [Run]) -> impl Iterator<Item = (usize, &'a [Run])> + 'a {
        let slots = self.stripe_slots;
        runs.chunk_by(move |a, b| a.slot / slots == b.slot / slots)
            .map(move |runs| ((runs[0].slot / slots) as usize, runs))
    }

    fn stripes_of_places<'a>(
        &self,
        places: &'a [StagedRun],
    ) -> impl Iterator<Item = (usize, &'a [StagedRun])> + 'a {
        let slots = self.stripe_slots;
        places
            .chunk_by(move |a, b| a.run.slot / slots == b.run.slot / slots)
            .map(move |places| ((places[0].run.slot / slots) as usize, places))
    }

    /// Cut keys into the stripes they belong to; refuses keys that are not sorted by slot.
    fn parts(&self, keys: &[u64]) -> Result<Vec<(usize, Range<usize>)>, Refusal> {
        let mut parts: Vec<(usize, Range<usize>)> = Vec::with_capacity(self.stripes.len());
        let mut previous = 0;
        for (at, &key) in keys.iter().enumerate() {
            let slot = self.space.slot_of(key);
            if slot < previous {
                return Err(Refusal::InvalidRequest(format!(
                    "key {key} of slot {slot} follows one of slot {previous}: keys must be sorted by slot"
                )));
            }
            previous = slot;
            let stripe = (slot / self.stripe_slots) as usize;
            match parts.last_mut() {
                Some((last, range)) if *last == stripe => range.end = at + 1,
                _ => parts.push((stripe, at..at + 1)),
            }
        }
        Ok(parts)
    }

    fn named(&self, table: &str) -> Result<u64, Refusal> {
        let id = table_id(table);
        match self.spec(id) {
            Ok(spec) if spec.name == table => Ok(id),
            _ => Err(Refusal::UnknownTable(format!("{table:?}"))),
        }
    }

    fn stripe_of(&self, slot: u32) -> Result<&RwLock<Engine>, Refusal> {
        self.stripes
            .get((slot / self.stripe_slots) as usize)
            .ok_or_else(|| {
                Refusal::InvalidRequest(format!(
                    "slot {slot} does not exist: there are {}",
                    self.space.count()
                ))
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use backstay_core::transaction::Batch;

    /// 64 slots in 64 stripes, served but for those in `elsewhere`, and a push of a key in each.
    fn store_and_push(elsewhere: &[usize]) -> (Store, Transaction) {
        let space = SlotSpace::new(64).unwrap();
        let store = Store::new(space, 0);
        let mut owned = [true; 64];
        for &slot in elsewhere {
            owned[slot] = false;
        }
        store.set_routing(1, &owned);
        let spec = r#"{"name":"t","kind":{"sparse":{"dim":1}},"initializer":{"zeros":{}},"optimizer":{"sgd":{"learning_rate":1.0}}}"#;
        store
            .create_table(&Arc::new(TableSpec::from_json(spec).unwrap()), 1)
            .unwrap();
        let mut keys: Vec<u64> = (0..2000).collect();
        keys.sort_by_key(|&key| space.slot_of(key));
        keys.dedup_by_key(|key| space.slot_of(*key));
        let stream = StreamId {
            job: 1,
            pass: 0,
            task: 0,
        };
        let id = TransactionId {
            stream,
            sequence: 0,
        };
        let change = Change::update(1.0);
        let batch = Batch::new(&keys, &vec![-1.0; keys.len()]);
        let transaction = Transaction::new(space, id, 0, table_id("t"), change, batch).unwrap();
        assert_eq!(keys.len(), 64);
        (store, transaction)
    }

    fn values(store: &Store, transaction: &Transaction) -> Vec<f32> {
        store.set_routing(2, &[true; 64]);
        let mut out = vec![f32::NAN; 64];
        store
            .pull(transaction.table, transaction.batch.keys(), &mut out)
            .unwrap();
        out
    }

    #[test]
    fn a_push_refused_by_the_first_slot_is_not_applied_anywhere() {
        let (store, push) = store_and_push(&[0]);
        let refused = store.apply(&push).unwrap_err();
        assert_eq!(
            refused,
            Refusal::NotMaster {
                slot: 0,
                version: 1
            }
        );
        assert_eq!(values(&store, &push), [0.0; 64]);
    }

    #[test]
    fn a_push_refused_by_a_later_slot_is_incomplete_and_its_retry_completes_it() {
        let (store, push) = store_and_push(&[40]);
        let refused = store.apply(&push).unwrap_err();
        assert!(matches!(refused, Refusal::Incomplete(_)), "{refused:?}");
        let half: f32 = values(&store, &push).iter().sum();
        assert!((half - 40.0).abs() < 0.5);
        store.apply(&push).unwrap();
        assert_eq!(values(&store, &push), [1.0; 64]);
    }
}
