//! A range of slots with all their tables: stage, commit, discard, read.
//!
//! A server runs several engines, one lock each; a test or a simulator runs one. The engine
//! decides everything about a slot's order: which transaction takes which position, what has
//! been applied already, what a rollback takes along.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use crate::error::Refusal;
use crate::hash::{mix64, SlotSpace};
use crate::spec::TableSpec;
use crate::stream::{StreamId, StreamMemory, StreamWindow, TransactionId};
use crate::table::Table;
use crate::transaction::Transaction;

/// What the engine keeps of one slot besides its rows.
#[derive(Debug, Default)]
struct Slot {
    /// Whether this node is its master now.
    served: bool,
    /// How many transactions have been applied.
    position: u64,
    /// Prepared and not applied, in order; the front would take position + 1.
    staged: VecDeque<Arc<Transaction>>,
}

/// The keys of one slot in a transaction: the slot's number within the engine, and where.
type Run = (usize, Range<usize>);

/// How a transaction met the slots of this engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StageReport {
    /// Slots in which it was staged now.
    pub staged: u32,
    /// Slots that had applied it before.
    pub skipped: u32,
}

impl std::ops::AddAssign for StageReport {
    fn add_assign(&mut self, other: Self) {
        self.staged += other.staged;
        self.skipped += other.skipped;
    }
}

/// See the module's documentation.
#[derive(Debug)]
pub struct Engine {
    space: SlotSpace,
    first_slot: u32,
    slots: Vec<Slot>,
    tables: BTreeMap<u64, Table>,
    streams: StreamMemory,
    routing_version: u64,
    /// Kept between calls for its memory.
    scratch: Vec<Run>,
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
            scratch: Vec::new(),
        }
    }

    /// The slots of this engine.
    pub fn slots(&self) -> Range<u32> {
        self.first_slot..self.first_slot + self.slots.len() as u32
    }

    /// Serve exactly the slots for which `is_served` says so.
    pub fn set_routing(&mut self, version: u64, is_served: impl Fn(u32) -> bool) {
        self.routing_version = version;
        for (slot, number) in self.slots.iter_mut().zip(self.first_slot..) {
            slot.served = is_served(number);
        }
    }

    /// Create a table; the same settings again change nothing.
    pub fn create_table(&mut self, spec: &Arc<TableSpec>) -> Result<(), Refusal> {
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

    /// A table by its id.
    pub fn table(&self, id: u64) -> Result<&Table, Refusal> {
        self.tables.get(&id).ok_or_else(|| unknown(id))
    }

    /// Every table, ordered by id.
    pub fn tables(&self) -> impl Iterator<Item = &Table> {
        self.tables.values()
    }

    /// Bytes allocated for rows.
    pub fn allocated_bytes(&self) -> usize {
        self.tables.values().map(Table::allocated_bytes).sum()
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
        for (slot, _) in self.runs(keys, 0..keys.len()) {
            self.check_served(slot?)?;
        }
        table.read(keys, out);
        Ok(())
    }

    /// Stage the part `keys` of a transaction: all of its keys that lie in this engine's slots.
    ///
    /// Refuses the whole part and changes nothing if any slot refuses it.
    pub fn stage(
        &mut self,
        transaction: &Arc<Transaction>,
        keys: Range<usize>,
    ) -> Result<StageReport, Refusal> {
        let mut runs = std::mem::take(&mut self.scratch);
        let report = self.admit(transaction, keys, &mut runs);
        if report.is_ok() {
            for (slot, _) in &runs {
                let staged = &mut self.slots[*slot].staged;
                staged.push_back(Arc::clone(transaction));
            }
        }
        self.scratch = runs;
        report
    }

    /// Apply the part `keys` of a staged transaction. Slots in which it is not staged (skipped
    /// as applied before) are passed over. Refuses, and changes nothing, if in any slot
    /// something older is still staged.
    pub fn commit(
        &mut self,
        transaction: &Arc<Transaction>,
        keys: Range<usize>,
    ) -> Result<(), Refusal> {
        let mut runs = Vec::new();
        for (slot, keys) in self.runs(transaction.batch.keys(), keys) {
            let slot = slot?;
            let mut waiting = self.slots[slot].staged.iter();
            match waiting.position(|staged| staged.id == transaction.id) {
                Some(0) => runs.push((slot, keys)),
                Some(_) => return Err(Refusal::InFlight),
                None => {}
            }
        }
        for (slot, _) in &runs {
            self.slots[*slot].staged.pop_front();
        }
        self.apply_runs(transaction, &runs)
    }

    /// Stage and commit in one step, for a slot without backups to wait for. Refuses, and
    /// changes nothing, if in any slot something is staged.
    pub fn apply(
        &mut self,
        transaction: &Transaction,
        keys: Range<usize>,
    ) -> Result<StageReport, Refusal> {
        let mut runs = std::mem::take(&mut self.scratch);
        let report = self.admit(transaction, keys, &mut runs);
        let busy = runs
            .iter()
            .any(|(slot, _)| !self.slots[*slot].staged.is_empty());
        let outcome = report.and_then(|report| {
            if busy {
                return Err(Refusal::InFlight);
            }
            self.apply_runs(transaction, &runs).map(|()| report)
        });
        self.scratch = runs;
        outcome
    }

    /// Find the slots that still need a transaction; an error if any of its slots refuses it.
    fn admit(
        &self,
        transaction: &Transaction,
        keys: Range<usize>,
        runs: &mut Vec<Run>,
    ) -> Result<StageReport, Refusal> {
        runs.clear();
        let table = self.table(transaction.table)?;
        table.check_shape(&transaction.batch)?;
        self.streams.check(transaction.id, transaction.floor)?;
        let windows = self.streams.windows(transaction.id.stream);
        let closed = self.streams.is_closed(transaction.id.stream);
        let mut report = StageReport::default();
        for (slot, keys) in self.runs(transaction.batch.keys(), keys) {
            let slot = slot?;
            self.check_served(slot)?;
            let mut staged = self.slots[slot].staged.iter();
            if staged.any(|staged| staged.id == transaction.id) {
                return Err(Refusal::InFlight);
            }
            let settled =
                |windows: &[StreamWindow]| windows[slot].is_settled(transaction.id.sequence);
            if closed || windows.is_some_and(settled) {
                report.skipped += 1;
            } else {
                table.check_room(slot, keys.len())?;
                report.staged += 1;
                runs.push((slot, keys));
            }
        }
        Ok(report)
    }

    /// Apply a transaction to slots that were found to need it.
    fn apply_runs(&mut self, transaction: &Transaction, runs: &[Run]) -> Result<(), Refusal> {
        let unknown_table = || unknown(transaction.table);
        let table = self
            .tables
            .get_mut(&transaction.table)
            .ok_or_else(unknown_table)?;
        if runs.is_empty() {
            return Ok(());
        }
        let windows = self.streams.windows_mut(transaction.id.stream);
        let elements = table.spec().row_elements();
        let mut write = |keys: Range<usize>| {
            let values = &transaction.batch.values()[keys.start * elements..keys.end * elements];
            table.write(&transaction.batch.keys()[keys], values, transaction.change);
        };
        // Neighbouring slots' runs join into one, so that the kernel sees long batches.
        let mut joined = runs[0].1.start..runs[0].1.start;
        for (slot, keys) in runs {
            self.slots[*slot].position += 1;
            windows[*slot].record(transaction.id.sequence, transaction.floor);
            if joined.end != keys.start {
                write(std::mem::replace(&mut joined, keys.clone()));
            }
            joined.end = keys.end;
        }
        write(joined);
        Ok(())
    }

    /// Drop a staged transaction from a slot, with everything staged behind it.
    /// Returns what was dropped, oldest first; empty if it is not staged there.
    pub fn discard(&mut self, slot: u32, id: TransactionId) -> Vec<TransactionId> {
        let staged = &mut self.slots[(slot - self.first_slot) as usize].staged;
        match staged.iter().position(|staged| staged.id == id) {
            Some(at) => staged.drain(at..).map(|staged| staged.id).collect(),
            None => Vec::new(),
        }
    }

    /// How many transactions a slot has applied.
    pub fn position(&self, slot: u32) -> u64 {
        self.slots[(slot - self.first_slot) as usize].position
    }

    /// Close a stream: late copies of its pushes count as settled from now on.
    pub fn close_stream(&mut self, stream: StreamId) {
        self.streams.close(stream);
    }

    /// Forget a stream in every slot; returns in how many it was known.
    pub fn forget_stream(&mut self, stream: StreamId) -> u32 {
        self.streams.forget(stream)
    }

    /// A hash of a slot's rows and stream memory; equal replicas have equal digests,
    /// whatever the order in which their rows were created.
    pub fn digest(&self, slot: u32) -> u64 {
        let rows = self.tables.values().fold(0u64, |sum, table| {
            sum.wrapping_add(mix64(table.id() ^ table.digest_slot(slot)))
        });
        let streams = self.streams.of_slot((slot - self.first_slot) as usize);
        streams.fold(rows, |hash, (stream, window)| {
            let words = [
                stream.job,
                u64::from(stream.pass) << 32 | u64::from(stream.task),
                window.floor,
                window.applied as u64,
                (window.applied >> 64) as u64,
            ];
            words
                .iter()
                .fold(hash, |hash, &word| mix64(hash.rotate_left(5) ^ word))
        })
    }

    /// The rows of one slot of a table as plain arrays, ordered by key.
    pub fn export_slot(&self, table: u64, slot: u32) -> Result<crate::table::PlainRows, Refusal> {
        Ok(self.table(table)?.export_slot(slot))
    }

    /// Replace the rows of one slot of a table.
    pub fn import_slot(
        &mut self,
        table: u64,
        slot: u32,
        keys: &[u64],
        weights: &[f32],
        state: &[f32],
    ) -> Result<(), Refusal> {
        let table = self.tables.get_mut(&table).ok_or_else(|| unknown(table))?;
        table.import_slot(slot, keys, weights, state)
    }

    fn check_served(&self, slot: usize) -> Result<(), Refusal> {
        if self.slots[slot].served {
            return Ok(());
        }
        Err(Refusal::NotMaster {
            slot: self.first_slot + slot as u32,
            version: self.routing_version,
        })
    }

    /// Cut keys into runs of one slot each (its number within the engine); an error for a key out of order or out of range.
    fn runs<'a>(
        &self,
        keys: &'a [u64],
        part: Range<usize>,
    ) -> impl Iterator<Item = (Result<usize, Refusal>, Range<usize>)> + 'a {
        let (space, range) = (self.space, self.slots());
        let (mut at, end) = (part.start, part.end.min(keys.len()));
        let mut previous = None;
        std::iter::from_fn(move || {
            let first = *keys.get(at..end)?.first()?;
            let slot = space.slot_of(first);
            let start = at;
            while at < end && space.slot_of(keys[at]) == slot {
                at += 1;
            }
            let ordered = range.contains(&slot) && previous.is_none_or(|previous| previous < slot);
            previous = Some(slot);
            let slot = if ordered {
                Ok((slot - range.start) as usize)
            } else {
                Err(Refusal::InvalidRequest(format!(
                    "key {first} of slot {slot} is out of order: keys must be sorted by slot"
                )))
            };
            Some((slot, start..at))
        })
    }
}

fn unknown(table: u64) -> Refusal {
    Refusal::UnknownTable(format!("with id {table:#018x}"))
}
