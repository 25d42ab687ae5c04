//! Expires and decays tables in their periods, without being asked.
//!
//! The master of a slot does it once in each period of the day's clock (`every_seconds`,
//! `decay_every_seconds`), by transactions in the slot's order. The number of the period gives the
//! sequences, in a stream that all masters of the table share: so a slot does each period once,
//! whatever masters it has meanwhile, and a period that no server was there for is left out.

use std::sync::Arc;
use std::time::{Duration, Instant};

use backstay_core::error::Refusal;
use backstay_core::hash::table_id;
use backstay_core::life::{Gone, SlotPart, Thresholds};
use backstay_core::spec::TableSpec;
use backstay_core::stream::{StreamId, TransactionId, TABLE_PASS};
use backstay_core::transaction::{Batch, Change, Transaction};
use tracing::{debug, info};

use super::{Answer, Replicator};

/// Time between two looks at the tables.
pub(crate) const LOOK_EVERY: Duration = Duration::from_secs(1);
/// After each part of an expiry comes a rest of so many times as long: pushes go first.
pub(crate) const REST: u32 = 2;
/// Slots with more rows expire in parts: a push may have to wait for one.
const WHOLE_ROWS: usize = 2048;
/// The tasks of such a stream.
const DECAYS: u32 = 0;
const EXPIRIES: u32 = 1;
pub(super) const EVICTIONS: u32 = 2;

/// The number of the period that a time is in, both in Unix time: its begin, in milliseconds. So
/// numbers go on to grow when `every_seconds` changes, and beside those of jobs, which are of the
/// same kind.
fn number_of(now_s: u64, every_s: u32) -> u64 {
    (now_s - now_s % u64::from(every_s)) * 1000
}

/// The stream in which a table decays: its sequences are the periods.
pub fn decay_stream(table: u64) -> StreamId {
    StreamId {
        job: table,
        pass: TABLE_PASS,
        task: DECAYS,
    }
}

impl Replicator {
    /// Do what is to be done in the periods of now, in the slots that are served here, one slot after
    /// the other: pushes go on in between. What went.
    pub fn keep_periods(self: &Arc<Self>) -> Gone {
        let mut gone = Gone::default();
        for table in self.store.tables_with_periods() {
            let (id, now) = (table_id(&table.name), u64::from(self.store.seconds()));
            let lifetime = table.lifetime.as_ref();
            let expiry = lifetime.and_then(|one| one.expiry?.every_seconds);
            let decay = lifetime.and_then(|one| one.score.as_ref()?.decay_every_seconds);
            // Expire by the scores of the period that ends.
            if let Some(every) = expiry {
                let stream = StreamId {
                    task: EXPIRIES,
                    ..decay_stream(id)
                };
                let change = Change::Expire(Thresholds::default());
                gone += self.keep_period(&table, stream, number_of(now, every), change);
            }
            if let Some(every) = decay {
                let change = Change::Decay { rate: 0.0 };
                gone += self.keep_period(&table, decay_stream(id), number_of(now, every), change);
            }
        }
        gone
    }

    fn keep_period(
        self: &Arc<Self>,
        table: &TableSpec,
        stream: StreamId,
        period: u64,
        change: Change,
    ) -> Gone {
        let mut gone = Gone::default();
        // An expiry has a sequence for each part; the last one tells that it is done.
        let of_period = match change {
            Change::Expire(_) => SlotPart::PARTS,
            _ => 1,
        };
        let first = period * of_period;
        let last = first + of_period - 1;
        let slots = self.store.served_slots_without(stream, last);
        for &slot in &slots {
            let is_large = self.store.rows_in(&table.name, slot) > WHOLE_ROWS;
            let parts = if is_large && of_period > 1 {
                (0..SlotPart::PARTS)
                    .map(|n| (first + n, SlotPart::of(n)))
                    .collect()
            } else {
                vec![(last, SlotPart::WHOLE)]
            };
            for (sequence, part) in parts {
                let id = TransactionId { stream, sequence };
                let begun = Instant::now();
                match self.in_slot(table, id, first, change, part.key(self.store.space(), slot)) {
                    Ok(went) => {
                        gone += went;
                        std::thread::sleep(begun.elapsed() * REST);
                    }
                    // It is tried again at the next look.
                    Err(refusal) => {
                        debug!(slot, %refusal, "a table could not be kept in its period");
                        break;
                    }
                }
            }
        }
        if !slots.is_empty() {
            let (name, slots) = (&table.name, slots.len());
            info!(
                table = name,
                period,
                slots,
                expired = gone.expired(),
                ?change,
                "kept a period"
            );
        }
        gone
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

    /// Take on a transaction of this server's own, and wait for the backups; what went.
    pub(super) fn push_and_wait(self: &Arc<Self>, made: Transaction) -> Result<Gone, Refusal> {
        match self.push(made)?.0 {
            Answer::Now(report) => Ok(report.gone),
            Answer::Later(outcome) => {
                let report = outcome.blocking_recv();
                Ok(report.unwrap_or(Err(Refusal::Stopping))?.gone)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::number_of;

    #[test]
    fn a_period_is_numbered_by_its_begin_however_long_it_is() {
        assert_eq!(number_of(1_059, 10), 1_050_000);
        assert_eq!(number_of(1_060, 10), 1_060_000);
        // Longer from now on: the next one has a higher number than all before.
        assert!(number_of(1_080, 60) > number_of(1_059, 10));
    }
}
