//! Expires and decays tables in their periods, without being asked.
//!
//! The master of a slot does it once in each period of the day's clock (`every_seconds`,
//! `decay_every_seconds`), by transactions in the slot's order. The number of the period gives the
//! sequences, in a stream that all masters of the table share: so a slot does each period once,
//! whatever masters it has meanwhile, and a period that no server was there for is left out.
//!
//! Tables take turns, a part of a slot at a time, and a look at what is due comes in between: a table
//! with much to do delays the periods of no other.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::{Duration, Instant};

use backstay_core::error::Refusal;
use backstay_core::hash::table_id;
use backstay_core::life::{Gone, SlotPart, Thresholds};
use backstay_core::replication::Micros;
use backstay_core::spec::TableSpec;
use backstay_core::stream::{StreamId, TableTask, TransactionId};
use backstay_core::transaction::{Batch, Change, Transaction};
use tracing::{debug, info};

use super::Replicator;

/// Time between two looks at the tables.
pub(crate) const LOOK_EVERY: Duration = Duration::from_secs(1);
/// What is due is looked up again after so long, also while there is something left to do.
pub(crate) const TURNS: Micros = 1_000_000;
/// Slots with more rows expire in parts: a push may have to wait for one.
const WHOLE_ROWS: usize = 2048;

/// The number of the period that a time is in, both in Unix time: its begin, in milliseconds. So
/// numbers go on to grow when `every_seconds` changes, and beside those of jobs, which are of the
/// same kind.
fn number_of(now_s: u64, every_s: u32) -> u64 {
    (now_s - now_s % u64::from(every_s)) * 1000
}

/// What is due, table by table.
#[derive(Debug, Default)]
pub(super) struct Periods {
    tables: Vec<TableDue>,
}

/// What is due in one table: first its expiry, then its decay.
#[derive(Debug)]
struct TableDue {
    table: Arc<TableSpec>,
    due: VecDeque<Due>,
    /// The time that it has taken.
    taken: Micros,
}

/// What is due in one period.
#[derive(Debug)]
struct Due {
    stream: StreamId,
    period: u64,
    change: Change,
    /// The slots that are left.
    slots: VecDeque<u32>,
    /// The parts that are left of the first one, each with its sequence.
    parts: VecDeque<(u64, SlotPart)>,
    kept_slots: usize,
    gone: Gone,
}

impl Periods {
    fn knows(&self, table: &str) -> bool {
        self.tables.iter().any(|one| one.table.name == table)
    }

    fn add(&mut self, table: Arc<TableSpec>, due: VecDeque<Due>) {
        if !due.is_empty() {
            // It has its turn at once, and no arrears.
            let taken = self.tables.iter().map(|one| one.taken).min().unwrap_or(0);
            self.tables.push(TableDue { table, due, taken });
        }
    }

    /// Whose turn it is: of the tables with something left to do, that which has taken the least time.
    fn next(&mut self) -> Option<&mut TableDue> {
        self.tables.retain(|one| !one.due.is_empty());
        self.tables.iter_mut().min_by_key(|one| one.taken)
    }
}

impl Due {
    /// Sequences of a period: an expiry has one for each part, of which the last one tells that a slot is
    /// done.
    fn sequences(change: Change) -> u64 {
        match change {
            Change::Expire(_) => SlotPart::PARTS,
            _ => 1,
        }
    }

    fn first(&self) -> u64 {
        self.period * Self::sequences(self.change)
    }

    /// Log what was done, if anything was.
    fn tell(&self, table: &str) {
        if self.kept_slots > 0 {
            info!(
                table,
                period = self.period,
                slots = self.kept_slots,
                expired = self.gone.expired(),
                change = ?self.change,
                "kept a period"
            );
        }
    }
}

impl Replicator {
    /// Do what is to be done in the periods of now, in the slots that are served here. What went.
    pub fn keep_periods(self: &Arc<Self>) -> Gone {
        let mut gone = Gone::default();
        loop {
            let (some, is_left) = self.keep_periods_for(TURNS);
            gone += some;
            if !is_left {
                return gone;
            }
        }
    }

    /// The same for about so long; also whether something may be left to do.
    pub fn keep_periods_for(self: &Arc<Self>, most: Micros) -> (Gone, bool) {
        let mut periods = self.periods.lock();
        self.find_due(&mut periods);
        let (begun, mut gone) = (self.now(), Gone::default());
        while !self.stopped.load(Ordering::Acquire) {
            let Some(one) = periods.next() else {
                break;
            };
            let before = self.now();
            gone += self.keep_a_part(one);
            let now = self.now();
            // At least 1, so that a fast table cannot keep its turn.
            one.taken += now.saturating_sub(before).max(1);
            if now.saturating_sub(begun) >= most {
                return (gone, true);
            }
        }
        (gone, false)
    }

    /// A table of which something is left goes on with that, also in a newer period: so all its slots
    /// have their turn, however long that takes.
    fn find_due(&self, periods: &mut Periods) {
        let now = u64::from(self.store.seconds());
        for table in self.store.tables_with_periods() {
            if periods.knows(&table.name) {
                continue;
            }
            let lifetime = table.lifetime.as_ref();
            let expiry = lifetime.and_then(|one| one.expiry?.every_seconds);
            let decay = lifetime.and_then(|one| one.score.as_ref()?.decay_every_seconds);
            // Expire by the scores of the period that ends.
            let changes = [
                (
                    expiry,
                    TableTask::Expire,
                    Change::Expire(Thresholds::default()),
                ),
                (decay, TableTask::Decay, Change::Decay { rate: 0.0 }),
            ];
            let due = changes.into_iter().filter_map(|(every, task, change)| {
                let stream = StreamId::of_table(table_id(&table.name), task);
                let period = number_of(now, every?);
                let last = (period + 1) * Due::sequences(change) - 1;
                let slots = self.store.served_slots_without(stream, last);
                (!slots.is_empty()).then(|| Due {
                    stream,
                    period,
                    change,
                    slots: slots.into(),
                    parts: VecDeque::new(),
                    kept_slots: 0,
                    gone: Gone::default(),
                })
            });
            let due = due.collect();
            periods.add(table, due);
        }
    }

    /// Do a part of a slot; what went.
    fn keep_a_part(self: &Arc<Self>, one: &mut TableDue) -> Gone {
        let Some(due) = one.due.front_mut() else {
            return Gone::default();
        };
        let gone = self.do_a_part(&one.table, due);
        due.gone += gone;
        if due.parts.is_empty() {
            due.slots.pop_front();
        }
        if due.slots.is_empty() {
            due.tell(&one.table.name);
            one.due.pop_front();
        }
        gone
    }

    /// Do the next part of the first slot that is left, if there is one; what went.
    fn do_a_part(self: &Arc<Self>, table: &TableSpec, due: &mut Due) -> Gone {
        let Some(&slot) = due.slots.front() else {
            return Gone::default();
        };
        if due.parts.is_empty() {
            due.parts = self.parts_of(table, due, slot);
        }
        let Some((sequence, part)) = due.parts.pop_front() else {
            return Gone::default();
        };
        let stream = due.stream;
        let id = TransactionId { stream, sequence };
        let key = part.key(self.store.space(), slot);
        let begun = Instant::now();
        match self.in_slot(table, id, due.first(), due.change, key) {
            Ok(gone) => {
                due.kept_slots += usize::from(due.parts.is_empty());
                std::thread::sleep(begun.elapsed() * SlotPart::REST_FACTOR);
                gone
            }
            // It is tried again at a later look.
            Err(refusal) => {
                debug!(slot, %refusal, "a table could not be kept in its period");
                due.parts.clear();
                Gone::default()
            }
        }
    }

    /// In which parts a slot is done.
    fn parts_of(&self, table: &TableSpec, due: &Due, slot: u32) -> VecDeque<(u64, SlotPart)> {
        let (first, sequences) = (due.first(), Due::sequences(due.change));
        if sequences > 1 && self.store.rows_in(&table.name, slot) > WHOLE_ROWS {
            let part = |n| (first + n, SlotPart::of(n));
            return (0..sequences).map(part).collect();
        }
        [(first + sequences - 1, SlotPart::WHOLE)].into()
    }

    fn in_slot(
        self: &Arc<Self>,
        table: &TableSpec,
        id: TransactionId,
        floor: u64,
        change: Change,
        key: u64,
    ) -> Result<Gone, Refusal> {
        let space = self.store.space();
        let batch = Batch::new(&[key], &[]);
        let mut made = Transaction::new(space, id, floor, table_id(&table.name), change, batch)?;
        self.store.prepare(&mut made)?;
        self.push_and_wait(made)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // What fails in a helper is a failed test.
mod tests {
    use super::*;

    #[test]
    fn a_period_is_numbered_by_its_begin_however_long_it_is() {
        assert_eq!(number_of(1_059, 10), 1_050_000);
        assert_eq!(number_of(1_060, 10), 1_060_000);
        // Longer from now on: the next one has a higher number than all before.
        assert!(number_of(1_080, 60) > number_of(1_059, 10));
    }

    fn table(name: &str) -> Arc<TableSpec> {
        let spec = format!(
            r#"{{"name":"{name}","kind":{{"sparse":{{"dim":1}}}},"optimizer":{{"sgd":{{"learning_rate":1.0}}}}}}"#
        );
        Arc::new(TableSpec::from_json(&spec).unwrap())
    }

    /// A period of so many slots.
    fn due(slots: u32) -> VecDeque<Due> {
        let one = Due {
            stream: StreamId::of_table(1, TableTask::Decay),
            period: 1,
            change: Change::Decay { rate: 0.0 },
            slots: (0..slots).collect(),
            parts: VecDeque::new(),
            kept_slots: 0,
            gone: Gone::default(),
        };
        [one].into()
    }

    #[test]
    fn who_has_taken_the_least_time_has_the_next_turn() {
        let mut periods = Periods::default();
        periods.add(table("slow"), due(1000));
        let mut turns = String::new();
        let mut step = |periods: &mut Periods| {
            let one = periods.next().unwrap();
            let is_slow = one.table.name == "slow";
            one.taken += if is_slow { 100 } else { 30 };
            turns.push(if is_slow { 's' } else { 'f' });
            let slots = &mut one.due[0].slots;
            slots.pop_front();
            if slots.is_empty() {
                one.due.clear();
            }
        };
        for _ in 0..3 {
            step(&mut periods);
        }
        // What comes later need not make up for the time before, nor has it all turns.
        periods.add(table("fast"), due(8));
        for _ in 0..14 {
            step(&mut periods);
        }
        assert_eq!(turns, "ssssffffsfffsfsss");
        assert!(!periods.knows("fast") && periods.knows("slow"));
    }
}
