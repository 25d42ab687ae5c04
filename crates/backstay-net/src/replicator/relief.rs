//! Lets tables with a capacity give up rows while memory is short, here or at a backup.
//!
//! A look every now and then gives them smaller shares ([`Store::shrink_shares`]), which pushes
//! bring into their slots; and evicts by transactions of its own, because other tables need the room,
//! too. A backup that has less memory is full before its master is. It refuses pushes then, and
//! the master keeps the smaller shares for a minute, so that it is not refused again and again.
//!
//! [`Store::shrink_shares`]: crate::store::Store

use std::sync::Arc;
use std::time::{Duration, Instant};

use backstay_core::hash::table_id;
use backstay_core::life::{Gone, SlotPart};
use backstay_core::replication::Micros;
use backstay_core::spec::TableSpec;
use backstay_core::stream::{StreamId, TableTask, TransactionId};
use tracing::{debug, info};

use super::Replicator;
use crate::store::{Shares, ShortOf};

/// Time between two looks at the memory.
pub(crate) const LOOK_EVERY: Duration = Duration::from_millis(100);
/// In one look shares become smaller so many times at most. Each time a 64th of the slots, the fullest,
/// give up a sixteenth of their rows.
const PASSES: u32 = 64;
/// Smaller shares stay for so long after memory was short here.
const AFTER_A_SHORTAGE: Micros = 1_000_000;
/// The same after a backup had no room.
const AFTER_A_REFUSAL: Micros = 60_000_000;

/// What one look tells the next.
#[derive(Debug, Default)]
pub(super) struct Relieving {
    /// Pushes that backups had no room for, by then.
    refused: u64,
    /// Until when smaller shares stay.
    until: Micros,
    /// The sequence of the last eviction.
    sequence: u64,
}

impl Replicator {
    /// Look whether memory is short, and let tables with a capacity give up rows if it is. What went.
    pub fn relieve(self: &Arc<Self>) -> Gone {
        let refused = self.state.lock().replica.counters.refused_for_room;
        // What some push lacked goes first, so that it finds room when it comes again.
        let (now, lacked) = (self.now(), self.store.memory().take_lacked());
        let is_short = self.store.memory().is_short_of(lacked);
        let mut relieving = self.relieving.lock();
        let has_full_backup = relieving.refused != refused;
        relieving.refused = refused;
        if !is_short && !has_full_backup {
            if now >= relieving.until {
                self.store.restore_shares();
            }
            return Gone::default();
        }
        let (short, stays) = if has_full_backup {
            (ShortOf::ABackup, AFTER_A_REFUSAL)
        } else {
            (ShortOf::Here, AFTER_A_SHORTAGE)
        };
        relieving.until = relieving.until.max(now + stays);
        let mut gone = Gone::default();
        let wanted = (!has_full_backup).then_some(lacked);
        for _ in 0..PASSES {
            let before = gone;
            for (table, shares) in self.store.shrink_shares(short) {
                gone += self.evict(&table, shares, wanted, &mut relieving);
            }
            let is_short = self.store.memory().is_short_of(lacked);
            if gone == before || has_full_backup || !is_short {
                break;
            }
        }
        // What backups refused meanwhile came before they had this room.
        relieving.refused = self.state.lock().replica.counters.refused_for_room;
        if gone != Gone::default() {
            info!(
                rows = gone.evicted,
                counters = gone.evicted_counters,
                has_full_backup,
                "memory is short: tables with a capacity gave up rows, or counters of keys without one"
            );
        }
        gone
    }

    /// No relief goes on until this is dropped.
    #[cfg(test)]
    pub(crate) fn hold_relief(&self) -> impl Sized + '_ {
        self.relieving.lock()
    }

    /// Remove what lies above the shares, slot by slot, while memory is short of so many bytes. None:
    /// whether it is or not.
    fn evict(
        self: &Arc<Self>,
        table: &TableSpec,
        shares: Shares,
        wanted: Option<u64>,
        relieving: &mut Relieving,
    ) -> Gone {
        let mut gone = Gone::default();
        let stream = StreamId::of_table(table_id(&table.name), TableTask::Evict);
        for slot in self.store.slots_above(table, shares) {
            if wanted.is_some_and(|bytes| !self.store.memory().is_short_of(bytes)) {
                break;
            }
            // Above all numbers of earlier masters: their evictions have stamped the slot.
            let first = u64::from(self.store.seconds_in(slot)) * 1_000_000;
            relieving.sequence = first.max(relieving.sequence + 1);
            let id = TransactionId {
                stream,
                sequence: relieving.sequence,
            };
            let begun = Instant::now();
            let made = self.store.eviction(table, id, (slot, shares));
            match made.and_then(|made| self.push_and_wait(made)) {
                Ok(went) => {
                    gone += went;
                    std::thread::sleep(begun.elapsed() * SlotPart::REST_FACTOR);
                }
                // The next look tries again.
                Err(refusal) => {
                    debug!(slot, %refusal, "a slot could not give up rows");
                    break;
                }
            }
        }
        gone
    }
}
