//! A range of slots with all their tables: stage, commit, discard, read.
//!
//! A server runs several engines, one lock each; a test or a simulator runs one. The engine
//! keeps each slot's order: which position a transaction takes, what has been applied already,
//! what a rollback takes along. [`crate::replication`] decides which node may give positions.

mod slot_copy;
mod snapshot;

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Weak};

use crate::error::Refusal;
use crate::hash::{table_id, SlotSpace};
use crate::life::{Gone, Thresholds};
use crate::marks::Spans;
use crate::row_map::ReadingToken;
use crate::spec::TableSpec;
use crate::staleness::{self, PushStaleness, StalenessCounts, UNTOLD};
use crate::stream::StreamId;
use crate::stream_memory::StreamMemory;
use crate::table::{Moment, Table};
use crate::transaction::{Change, Run, StagedRun, Transaction};

pub use slot_copy::{CopyPiece, CopyReader, SlotCopy, SlotMemory};
pub use snapshot::{SlotSnapshot, TableSnapshot};

/// Whether this node answers requests for a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ServingState {
    /// Not its master.
    #[default]
    Elsewhere,
    /// Its master, and not ready to serve yet.
    Waiting,
    /// Its master.
    Serving,
}

/// A transaction that was given its place in a slot's order and waits there.
#[derive(Debug, Clone)]
pub struct Staged {
    /// The number that the giver of the place knows it by.
    pub tag: u64,
    /// Which keys.
    pub run: Run,
    /// The transaction.
    pub transaction: Arc<Transaction>,
}

/// What the engine keeps of one slot besides its rows.
#[derive(Debug, Clone, Default)]
struct Slot {
    serving_state: ServingState,
    /// The routing version with which it began anew last; 1 or less: it never did.
    epoch: u64,
    /// How many transactions have been applied.
    position: u64,
    /// Prepared and not applied, in order; the front would take position + 1.
    staged: VecDeque<Staged>,
    /// Since when the changes of its rows are known.
    spans: Spans,
    /// The highest time of a transaction that was applied, of tables with a lifetime.
    time: u32,
}

impl Slot {
    fn end(&self) -> u64 {
        self.position + self.staged.len() as u64
    }
}

/// How a transaction met the slots of this engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StageReport {
    /// Slots in which it was staged now.
    pub staged: u32,
    /// Slots that had applied it before.
    pub skipped: u32,
    /// What went, where it was applied at once or is applied by now.
    pub gone: Gone,
}

impl std::ops::AddAssign for StageReport {
    fn add_assign(&mut self, other: Self) {
        self.staged += other.staged;
        self.skipped += other.skipped;
        self.gone += other.gone;
    }
}

/// How stale an update is, slot by slot, while it is applied.
struct Ages {
    /// Whether the table needs origins, so that each one that is missing counts.
    wanted: bool,
    /// Of the table, by slot; empty for what is no update.
    updates: Vec<u64>,
    push: PushStaleness,
    /// Of the slots that this node is master of.
    counts: StalenessCounts,
}

impl Ages {
    fn of(table: &mut Table, transaction: &Transaction) -> Self {
        Self {
            wanted: !transaction.compensation.is_ignore(),
            updates: if transaction.change.updates() {
                table.take_updates()
            } else {
                Vec::new()
            },
            push: PushStaleness::default(),
            counts: StalenessCounts::default(),
        }
    }

    /// Count the update in a slot (its number in the range); how stale it is there.
    #[inline]
    fn count(&mut self, at: usize, slot: &Slot, origin: u64) -> Option<u32> {
        let updates = self.updates.get_mut(at)?;
        *updates += 1;
        if origin == UNTOLD && !self.wanted {
            return None;
        }
        let staleness = staleness::staleness(origin, slot.epoch, *updates - 1);
        self.push.count(staleness);
        if slot.serving_state != ServingState::Elsewhere {
            self.counts.count(staleness);
        }
        staleness
    }

    fn finish(self, table: &mut Table) -> PushStaleness {
        if !self.updates.is_empty() {
            table.put_updates(self.updates, &self.counts);
        }
        self.push
    }
}

/// See the module's documentation.
#[derive(Debug, Clone)]
pub struct Engine {
    space: SlotSpace,
    first_slot: u32,
    slots: Vec<Slot>,
    tables: BTreeMap<u64, Table>,
    streams: StreamMemory,
    routing_version: u64,
    /// Copies under way, with their slots.
    copies: Vec<(u32, Weak<ReadingToken>)>,
    /// How often the tables of exports were told.
    exports_tracked: u64,
    /// Kept between calls for its memory.
    scratch: Vec<StagedRun>,
}

impl Engine {
    /// An engine without tables over `slots`, serving none of them yet.
    pub fn new(space: SlotSpace, slots: Range<u32>) -> Self {
        Self {
            space,
            first_slot: slots.start,
            streams: StreamMemory::new(slots.len()),
            slots: slots.map(|_| Slot::default()).collect(),
            tables: BTreeMap::new(),
            routing_version: 0,
            copies: Vec::new(),
            exports_tracked: 0,
            scratch: Vec::new(),
        }
    }

    /// The slots of this engine.
    pub fn slots(&self) -> Range<u32> {
        self.first_slot..self.first_slot + self.slots.len() as u32
    }

    /// The routing version that refusals name.
    pub fn set_version(&mut self, version: u64) {
        self.routing_version = version;
    }

    /// Whether this node answers requests for a slot.
    pub fn serving_state(&self, slot: u32) -> ServingState {
        self.slots[self.index(slot)].serving_state
    }

    /// A slot begins anew with a routing version, unknown to clients that go by earlier ones.
    pub fn set_epoch(&mut self, slot: u32, epoch: u64) {
        let slot = self.index(slot);
        self.slots[slot].epoch = epoch;
    }

    /// A slot becomes ready to serve, or not.
    pub fn set_serving_state(&mut self, slot: u32, state: ServingState) {
        let slot = self.index(slot);
        self.slots[slot].serving_state = state;
    }

    /// Create a table, with its companion if it has one; the same settings again change nothing.
    pub fn create_table(&mut self, spec: &Arc<TableSpec>) -> Result<(), Refusal> {
        let fits = spec.check_slots(self.space.count());
        fits.map_err(|error| Refusal::InvalidRequest(error.to_string()))?;
        self.add_table(spec)?;
        match spec.companion() {
            Some(companion) => self.add_table(&Arc::new(companion)),
            None => Ok(()),
        }
    }

    fn add_table(&mut self, spec: &Arc<TableSpec>) -> Result<(), Refusal> {
        let table = Table::new(
            Arc::clone(spec),
            self.space,
            self.first_slot,
            self.slots.len() as u32,
        );
        if let Some(known) = self.tables.get(&table.id()) {
            return match known.spec().difference(spec) {
                None => Ok(()),
                Some(difference) => Err(Refusal::TableConflict(format!(
                    "table {} exists with other settings: {difference}",
                    spec.name
                ))),
            };
        }
        self.tables.insert(table.id(), table);
        Ok(())
    }

    /// Give a table other settings, for the transactions that are stamped from now on. Refuses
    /// settings that the existing rows do not fit.
    pub fn change_settings(&mut self, spec: &Arc<TableSpec>) -> Result<(), Refusal> {
        let fits = spec.check_slots(self.space.count());
        fits.map_err(|error| Refusal::InvalidRequest(error.to_string()))?;
        let table = self.table_mut(table_id(&spec.name))?;
        if let Some(difference) = table.spec().fixed_difference(spec) {
            return Err(Refusal::TableConflict(format!(
                "table {} has rows of another kind: {difference}",
                spec.name
            )));
        }
        table.change_settings(spec);
        Ok(())
    }

    /// Fix under which settings a transaction is applied, here and by every replica; `time` is the
    /// master's, in seconds.
    pub fn stamp(&self, transaction: &mut Transaction, time: u32) -> Result<(), Refusal> {
        let spec = self.table(transaction.table)?.spec();
        transaction.stamp_by(spec, self.space, time);
        Ok(())
    }

    /// A table by its id.
    pub fn table(&self, id: u64) -> Result<&Table, Refusal> {
        self.tables.get(&id).ok_or_else(|| unknown(id))
    }

    /// Every table, ordered by id.
    pub fn tables(&self) -> impl Iterator<Item = &Table> {
        self.tables.values()
    }

    /// Bytes allocated for rows of tables, and for counters of keys without a row.
    pub fn content_bytes(&self) -> (usize, usize) {
        let (mut rows, mut counters) = (0, 0);
        for table in self.tables.values() {
            let part = if table.is_companion() {
                &mut counters
            } else {
                &mut rows
            };
            *part += table.allocated_bytes();
        }
        (rows, counters)
    }

    /// Bytes allocated for what is remembered of streams.
    pub fn stream_bytes(&self) -> usize {
        self.streams.allocated_bytes()
    }

    /// The open streams of clients' own and of tasks that some slot here knows.
    pub fn open_streams(&self) -> impl Iterator<Item = StreamId> + '_ {
        self.streams.open()
    }

    /// The slots that this node serves and that know a stream.
    pub fn served_slots_with(&self, stream: StreamId) -> impl Iterator<Item = u32> + '_ {
        let known = self.streams.stream(stream);
        self.slots().filter(move |&slot| {
            self.serving_state(slot) == ServingState::Serving && known.is_open(self.index(slot))
        })
    }

    /// The slots that this node serves and that would apply this sequence of a stream.
    pub fn served_slots_without(
        &self,
        stream: StreamId,
        sequence: u64,
    ) -> impl Iterator<Item = u32> + '_ {
        let known = self.streams.stream(stream);
        self.slots().filter(move |&slot| {
            let serves = self.serving_state(slot) == ServingState::Serving;
            serves && !known.skips(self.index(slot), sequence)
        })
    }

    /// Copy the weights of `keys`, all in slots of this engine, to `out`.
    pub fn read(&self, table: u64, keys: &[u64], out: &mut [f32]) -> Result<(), Refusal> {
        let table = self.table(table)?;
        if out.len() != keys.len() * table.spec().row_elements() {
            return Err(Refusal::InvalidRequest(format!(
                "{} keys of {} elements do not fill {} values",
                keys.len(),
                table.spec().row_elements(),
                out.len()
            )));
        }
        let mut previous = None;
        for &key in keys {
            let slot = self.space.slot_of(key);
            if previous != Some(slot) {
                self.check_slot(slot)?;
                self.check_serving(slot)?;
                previous = Some(slot);
            }
        }
        table.read(keys, out);
        Ok(())
    }

    /// What a push will tell of weights that are read now, if their table revises its steps; see
    /// [`Table::read_sums`]. All keys lie in slots of this engine.
    pub fn read_sums(&self, table: u64, keys: &[u64], out: &mut [f32]) -> Result<(), Refusal> {
        self.table(table)?.read_sums(keys, out)
    }

    /// What a push will tell of weights that are read now: an origin for each slot of `keys`, which
    /// are sorted by slot and lie in slots of this engine.
    pub fn origins(&self, table: u64, keys: &[u64], out: &mut Vec<u64>) -> Result<(), Refusal> {
        let table = self.table(table)?;
        let mut previous = None;
        for &key in keys {
            let slot = self.space.slot_of(key);
            if previous != Some(slot) {
                self.check_slot(slot)?;
                let index = self.index(slot);
                let epoch = self.slots[index].epoch;
                out.push(staleness::origin(epoch, table.updates(index)));
                previous = Some(slot);
            }
        }
        Ok(())
    }

    /// Refuse a transaction of another node that could not be applied here: an unknown table, rows
    /// of another shape, settings that are missing or of another kind, no room.
    pub fn check(&self, transaction: &Transaction) -> Result<(), Refusal> {
        if transaction.change == Change::Close {
            return Ok(());
        }
        let table = self.table(transaction.table)?;
        table.check_shape(&transaction.batch, transaction.change)?;
        table.check_stamp(transaction.optimizer.as_ref(), transaction.compensation)?;
        if !transaction.change.creates() {
            return Ok(());
        }
        let here = transaction
            .runs()
            .iter()
            .filter(|run| self.slots().contains(&run.slot));
        for run in here {
            self.check_room(table, *run)?;
        }
        Ok(())
    }

    /// Give the runs of a transaction that lie here their places, without taking them: `places`
    /// gains the runs that still need one. An error if any slot refuses.
    pub fn admit(
        &self,
        transaction: &Transaction,
        runs: &[Run],
        places: &mut Vec<StagedRun>,
    ) -> Result<StageReport, Refusal> {
        let table = match transaction.change {
            Change::Close => None,
            _ => Some(self.table(transaction.table)?),
        };
        if let Some(table) = table {
            table.check_shape(&transaction.batch, transaction.change)?;
            self.streams.check(transaction.id, transaction.floor)?;
        }
        let stream = self.streams.stream(transaction.id.stream);
        let may_expire = table.is_some() && transaction.id.stream.is_of_task();
        let expiry = may_expire.then(|| self.streams.stream(transaction.id.stream.expiry()));
        let mut report = StageReport::default();
        for &run in runs {
            self.check_slot(run.slot)?;
            self.check_serving(run.slot)?;
            self.check_epoch(run.slot, transaction)?;
            let index = self.index(run.slot);
            let slot = &self.slots[index];
            let mut staged = slot.staged.iter();
            if staged.any(|staged| staged.transaction.holds_back(transaction)) {
                return Err(Refusal::InFlight);
            }
            if table.is_some() && transaction.id.stream.is_own() && stream.is_closed(index) {
                return Err(Refusal::InvalidRequest(
                    "the stream of this push has ended here: its client closed it, or was not heard of for an hour; make a new client".into(),
                ));
            }
            if expiry.is_some_and(|one| one.is_closed(index)) {
                let StreamId { pass, task, .. } = transaction.id.stream;
                return Err(Refusal::InvalidRequest(format!(
                    "the stream of task {task} of pass {pass} has expired here: none of its pushes came for stream_grace_s, so this server knows no longer which it has applied. It refuses the rest, so that nothing counts twice: restore a checkpoint (pserverctl checkpoint restore); without one the job dead-letters the task"
                )));
            }
            let skips = match table {
                Some(_) => stream.skips(index, transaction.id.sequence),
                None => stream.is_closed(index),
            };
            if skips {
                report.skipped += 1;
                continue;
            }
            if let Some(table) = table.filter(|_| transaction.change.creates()) {
                self.check_room(table, run)?;
            }
            report.staged += 1;
            places.push(StagedRun {
                term: 0,
                position: slot.end() + 1,
                run,
            });
        }
        Ok(report)
    }

    /// The first run whose place lies behind the next free one of its slot, if any.
    pub fn gap(&self, places: &[StagedRun]) -> Option<StagedRun> {
        let behind =
            |place: &&StagedRun| self.slots[self.index(place.run.slot)].end() + 1 < place.position;
        places.iter().find(behind).copied()
    }

    /// Take places that were given here or by another node. Changes nothing and returns the
    /// first run whose place leaves a gap, if any.
    ///
    /// A master that begins anew sends again what is here already: what has been applied is
    /// passed over, what stands in the place is replaced. What stands behind stays, unless
    /// another transaction stood there: then the order goes on differently from there.
    pub fn stage(
        &mut self,
        transaction: &Arc<Transaction>,
        places: &[StagedRun],
        tag: u64,
    ) -> Option<StagedRun> {
        let gap = self.gap(places);
        if gap.is_some() {
            return gap;
        }
        for place in places {
            let index = self.index(place.run.slot);
            let slot = &mut self.slots[index];
            let Some(at) = place.position.checked_sub(slot.position + 1) else {
                continue;
            };
            let new = Staged {
                tag,
                run: place.run,
                transaction: Arc::clone(transaction),
            };
            match slot.staged.get_mut(at as usize) {
                Some(known) if known.transaction.id == transaction.id => *known = new,
                _ => {
                    slot.staged.truncate(at as usize);
                    slot.staged.push_back(new);
                }
            }
        }
        None
    }

    /// Apply a transaction in its places, after everything that stands before it there. It passes
    /// over places that were applied, discarded or staged anew, or belong to another one now. What
    /// went by it.
    pub fn commit(
        &mut self,
        transaction: &Arc<Transaction>,
        places: &[StagedRun],
    ) -> Result<Gone, Refusal> {
        let mut runs = std::mem::take(&mut self.scratch);
        runs.clear();
        for place in places {
            let index = self.index(place.run.slot);
            let at = place.position.checked_sub(self.slots[index].position + 1);
            let held = at.and_then(|at| self.slots[index].staged.get(at as usize));
            // The very one: the same push may stand here again, undecided, after a copy of the slot.
            if held.is_none_or(|held| !Arc::ptr_eq(&held.transaction, transaction)) {
                continue;
            }
            if at > Some(0) {
                self.commit_through(place.run.slot, place.position - 1)?;
            }
            self.slots[index].staged.pop_front();
            runs.push(*place);
        }
        let outcome = self.apply_runs(transaction, &runs);
        self.scratch = runs;
        outcome
    }

    /// Apply what is staged in a slot up to a position.
    pub fn commit_through(&mut self, slot: u32, position: u64) -> Result<(), Refusal> {
        let index = self.index(slot);
        while self.slots[index].position < position {
            let Some(staged) = self.slots[index].staged.pop_front() else {
                return Ok(());
            };
            let place = StagedRun {
                term: 0,
                position: self.slots[index].position + 1,
                run: staged.run,
            };
            self.apply_runs(&staged.transaction, &[place])?;
        }
        Ok(())
    }

    /// Admit, stage and commit in one step, for slots without backups to wait for. Refuses,
    /// and changes nothing, if in any slot something is staged.
    pub fn apply(
        &mut self,
        transaction: &Transaction,
        runs: &[Run],
    ) -> Result<StageReport, Refusal> {
        let mut places = std::mem::take(&mut self.scratch);
        places.clear();
        let report = self.admit(transaction, runs, &mut places);
        let busy = places
            .iter()
            .any(|place| !self.slots[self.index(place.run.slot)].staged.is_empty());
        let outcome = report.and_then(|report| {
            if busy {
                return Err(Refusal::InFlight);
            }
            let gone = self.apply_runs(transaction, &places)?;
            Ok(StageReport { gone, ..report })
        });
        self.scratch = places;
        outcome
    }

    /// Apply a transaction to slots in which it is next; what went by it.
    fn apply_runs(
        &mut self,
        transaction: &Transaction,
        places: &[StagedRun],
    ) -> Result<Gone, Refusal> {
        if places.is_empty() {
            return Ok(Gone::default());
        }
        if transaction.change == Change::Close {
            for place in places {
                let slot = self.index(place.run.slot);
                self.slots[slot].position += 1;
                match transaction.id.stream.expired() {
                    Some(stream) => self.streams.expire(stream, slot),
                    None => self.streams.close(transaction.id.stream, slot),
                }
            }
            return Ok(Gone::default());
        }
        let table = self.table(transaction.table)?;
        let (is_live, companion) = (table.has_lifetime(), table.companion());
        // Beside its table, both are changed at once.
        let mut companion = companion.and_then(|id| self.tables.remove(&id));
        let gone = self.write_runs(transaction, places, is_live, companion.as_mut());
        if let Some(companion) = companion {
            self.tables.insert(companion.id(), companion);
        }
        gone
    }

    fn write_runs(
        &mut self,
        transaction: &Transaction,
        places: &[StagedRun],
        is_live: bool,
        mut companion: Option<&mut Table>,
    ) -> Result<Gone, Refusal> {
        let (first_slot, table) = (self.first_slot, self.tables.get_mut(&transaction.table));
        let table = table.ok_or_else(|| unknown(transaction.table))?;
        let windows = self.streams.windows_mut(transaction.id.stream);
        let (change, stamp) = (transaction.change, transaction.stamp);
        let elements = change.values(table.spec().row_elements());
        let optimizer = table.optimizer_under(transaction.optimizer.as_ref())?;
        let (id, compensation) = (transaction.id, transaction.compensation);
        let mut ages = Ages::of(table, transaction);
        let mut gone = Gone::default();
        let mut write = |keys: Range<usize>, (time, divisor): (u32, f32)| {
            let change = change.slowed(divisor);
            let values = &transaction.batch.values()[keys.start * elements..keys.end * elements];
            let keys = &transaction.batch.keys()[keys];
            let moment = Moment {
                time,
                id,
                compensation,
            };
            if is_live {
                let companion = companion.as_deref_mut();
                gone += table.write_live(companion, keys, values, change, &optimizer, moment);
            } else {
                gone.deleted += table.write(keys, values, change, &optimizer, moment);
            }
        };
        // Neighbouring slots' runs join into one, so that the kernel sees long batches.
        let start = places[0].run.start as usize;
        let (mut joined, mut joined_as) = (start..start, (0, 1.0));
        for StagedRun { run, .. } in places {
            let slot = (run.slot - first_slot) as usize;
            self.slots[slot].position += 1;
            windows[slot].record(transaction.id.sequence, transaction.floor);
            let mut time = 0;
            if is_live {
                time = self.slots[slot].time.max(stamp.time);
                self.slots[slot].time = time;
            }
            let staleness = ages.count(slot, &self.slots[slot], run.origin);
            let now_as = (time, transaction.compensation.divisor(staleness));
            let keys = run.start as usize..run.end as usize;
            if joined.end != keys.start || joined_as != now_as {
                write(std::mem::replace(&mut joined, keys.clone()), joined_as);
            }
            (joined.end, joined_as) = (keys.end, now_as);
        }
        write(joined, joined_as);
        gone.stale = ages.finish(table);
        if stamp.share > 0 && change.evicts() {
            for StagedRun { run, .. } in places {
                let companion = companion.as_deref_mut();
                let time = self.slots[(run.slot - first_slot) as usize].time;
                let (rows, counters) = table.evict(run.slot, stamp, time, companion);
                gone.evicted += rows;
                gone.evicted_counters += counters;
            }
        }
        Ok(gone)
    }

    /// Refuse a run of a push if its rows, or their counters, might exceed the limit of a slot.
    fn check_room(&self, table: &Table, run: Run) -> Result<(), Refusal> {
        let (slot, more) = (self.index(run.slot), (run.end - run.start) as usize);
        table.check_room(slot, more)?;
        match table.companion().and_then(|id| self.tables.get(&id)) {
            Some(companion) => companion.check_room(slot, more),
            None => Ok(()),
        }
    }

    /// The rows of a table that an expiry would remove from a slot that is served here, and the counters
    /// that it would forget, at this time or at the slot's own if that is later.
    pub fn count_expired(
        &self,
        table: u64,
        slot: u32,
        thresholds: &Thresholds,
        time: u32,
    ) -> Result<Gone, Refusal> {
        self.check_slot(slot)?;
        self.check_serving(slot)?;
        let now = self.slots[self.index(slot)].time.max(time);
        let table = self.table(table)?;
        table.check_lifetime(Change::Expire(*thresholds))?;
        let mut gone = table.count_expired(slot, thresholds, now);
        if let Some(companion) = table.companion().and_then(|id| self.tables.get(&id)) {
            gone.counters = companion.count_forgotten(slot, thresholds, now);
        }
        Ok(gone)
    }

    /// Bytes allocated for the rows of a table, and for its counters of keys without a row.
    pub fn table_bytes(&self, table: u64) -> (usize, usize) {
        let Some(table) = self.tables.get(&table) else {
            return (0, 0);
        };
        if table.is_companion() {
            return (0, table.allocated_bytes());
        }
        let companion = table.companion().and_then(|id| self.tables.get(&id));
        let counters = companion.map_or(0, Table::allocated_bytes);
        (table.allocated_bytes(), counters)
    }

    /// Rows of a table in a slot, and counters of keys without a row; of a filter no count.
    pub fn rows_and_counters(&self, table: u64, slot: u32) -> (usize, usize) {
        let Some(table) = self.tables.get(&table) else {
            return (0, 0);
        };
        let companion = table.companion().and_then(|id| self.tables.get(&id));
        let counted = companion.filter(|one| !one.is_filter());
        let counters = counted.map_or(0, |one| one.rows_in(slot));
        (table.rows_in(slot), counters)
    }

    /// Bytes that a table with a capacity can give up in a slot at most, while memory is short.
    pub fn evictable_bytes(&self, table: u64, slot: u32) -> usize {
        let Some(table) = self.tables.get(&table) else {
            return 0;
        };
        let companion = table.companion().and_then(|id| self.tables.get(&id));
        table.evictable_bytes(slot, companion)
    }

    /// Bytes that a push of `keys`, sorted by slot, may add at most: rows, and counters of keys
    /// without one.
    pub fn growth_bytes(&self, table: u64, keys: &[u64]) -> Result<usize, Refusal> {
        let table = self.table(table)?;
        let Some(companion) = table.companion().and_then(|id| self.tables.get(&id)) else {
            return Ok(table.growth_bytes(keys));
        };
        let absent = table.absent(keys);
        // Keys with a row are counted no more, so they need no room.
        if absent.is_empty() {
            return Ok(0);
        }
        let counters = companion.growth_of_counters(&absent, table.most_counters());
        Ok(table.growth_of_absent(&absent) + counters)
    }

    /// An upper bound of [`Self::growth_bytes`] for these runs of a push. It looks at no slot.
    pub fn growth_bound(&self, table: u64, runs: &[Run]) -> Result<usize, Refusal> {
        let table = self.table(table)?;
        let keys = |run: &Run| (run.end - run.start) as usize;
        let more = runs.iter().map(keys).sum::<usize>();
        let companion = table.companion().and_then(|id| self.tables.get(&id));
        let counted = more.min(table.most_counters().saturating_mul(runs.len()));
        let counters = companion.map_or(0, |one| one.growth_bound(counted, runs.len()));
        Ok(table.growth_bound(more, runs.len()) + counters)
    }

    /// [`Self::growth_bytes`] of these runs of a push if all their keys were new. It looks for no key.
    pub fn most_growth_bytes(&self, table: u64, runs: &[Run]) -> Result<usize, Refusal> {
        let table = self.table(table)?;
        let counts = runs
            .iter()
            .map(|run| (self.index(run.slot), (run.end - run.start) as usize));
        let companion = table.companion().and_then(|id| self.tables.get(&id));
        let counters = companion.map_or(0, |one| {
            let most = table.most_counters();
            one.growth_of(one.new_counters(counts.clone(), most))
        });
        Ok(table.growth_of(counts) + counters)
    }

    /// Drop what is staged in a slot at `position` and behind it.
    pub fn discard_from(&mut self, slot: u32, position: u64) {
        let slot = self.index(slot);
        let slot = &mut self.slots[slot];
        let kept = position.saturating_sub(slot.position + 1);
        slot.staged.truncate(kept as usize);
    }

    /// How many transactions a slot has applied.
    pub fn position(&self, slot: u32) -> u64 {
        self.slots[self.index(slot)].position
    }

    /// How many transactions a slot has applied, and how many it has applied or staged.
    pub fn place(&self, slot: u32) -> (u64, u64) {
        let slot = &self.slots[self.index(slot)];
        (slot.position, slot.end())
    }

    /// The highest time that a slot has seen, in seconds.
    pub fn time(&self, slot: u32) -> u32 {
        self.slots[self.index(slot)].time
    }

    /// What is staged in a slot, in order: the first would take position + 1.
    pub fn staged(&self, slot: u32) -> impl Iterator<Item = &Staged> {
        self.slots[self.index(slot)].staged.iter()
    }

    /// Give what is staged in a slot the number under which its new master knows it.
    pub fn retag(&mut self, slot: u32, tag: u64) {
        let slot = self.index(slot);
        for staged in &mut self.slots[slot].staged {
            staged.tag = tag;
        }
    }

    fn table_mut(&mut self, id: u64) -> Result<&mut Table, Refusal> {
        self.tables.get_mut(&id).ok_or_else(|| unknown(id))
    }

    fn index(&self, slot: u32) -> usize {
        (slot - self.first_slot) as usize
    }

    fn check_slot(&self, slot: u32) -> Result<(), Refusal> {
        if self.slots().contains(&slot) {
            return Ok(());
        }
        Err(Refusal::InvalidRequest(format!(
            "slot {slot} is out of order: keys must be sorted by slot"
        )))
    }

    /// Refuse what was sent to an earlier epoch: its floor or end would hide what is to be redone.
    fn check_epoch(&self, slot: u32, transaction: &Transaction) -> Result<(), Refusal> {
        let epoch = self.slots[self.index(slot)].epoch;
        if epoch <= 1 || transaction.known_version >= epoch {
            return Ok(());
        }
        let reason = format!("slot {slot} began anew at routing version {epoch}, which is newer");
        Err(Refusal::NotReady(reason))
    }

    fn check_serving(&self, slot: u32) -> Result<(), Refusal> {
        match self.slots[self.index(slot)].serving_state {
            ServingState::Serving => Ok(()),
            ServingState::Waiting => Err(Refusal::NotReady(format!(
                "slot {slot} is being recovered or loaded by its master, and is served after that"
            ))),
            ServingState::Elsewhere => Err(Refusal::NotMaster {
                slot,
                version: self.routing_version,
            }),
        }
    }
}

fn unknown(table: u64) -> Refusal {
    Refusal::UnknownTable(format!("with id {table:#018x}"))
}
