//! Smaller shares for tables with a capacity while memory is short: they give up rows before any
//! table is refused new ones.
//!
//! A share travels with each transaction ([`backstay_core::transaction::Stamp`]), so all replicas
//! of a slot remove the same rows, whatever memory each of them has.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

use backstay_core::engine::ServingState;
use backstay_core::error::Refusal;
use backstay_core::hash::table_id;
use backstay_core::life::{SlotPart, Thresholds};
use backstay_core::spec::lifetime::MIN_SHARE;
use backstay_core::spec::TableSpec;
use backstay_core::stream::TransactionId;
use backstay_core::table::Table;
use backstay_core::transaction::{Batch, Change, Stamp, Transaction};
use parking_lot::RwLock;

use super::Store;

/// For whom shares become smaller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ShortOf {
    /// This node, which looks often.
    Here,
    /// A backup, of which this node hears only when it refuses a push.
    ABackup,
}

/// While this node is short, only this part of its slots, the fullest, are above the smaller share. Each
/// gives up rows at its next push; more at once would stall that push.
const SLOTS_DIVISOR: usize = 64;
/// While a backup is full, the smaller share is by this part below the mean of all slots.
const ROWS_DIVISOR: u64 = 16;

/// Whose rows can go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum GivingSlots {
    /// Those of the slots that are served here: this node evicts them for its own pushes.
    Served,
    /// Those of all slots here: the masters of the others hear that this node is full.
    All,
}

/// The smaller shares of now.
#[derive(Debug, Default)]
pub(super) struct Relief {
    /// By table.
    shares: RwLock<BTreeMap<u64, u32>>,
    any: AtomicBool,
}

/// The share of a table with so many rows in the slots here, so that some go; None if it has none to
/// give. `share`: by its capacity.
fn smaller_share(rows: &mut [u64], share: u64, short: ShortOf) -> Option<u32> {
    let smaller = match short {
        ShortOf::Here => {
            let largest = rows.len() / SLOTS_DIVISOR;
            let (_, &mut above, _) = (rows.len() > largest)
                .then(|| rows.select_nth_unstable_by_key(largest, |&one| Reverse(one)))?;
            above.saturating_sub(1)
        }
        ShortOf::ABackup => {
            let average = rows.iter().sum::<u64>().checked_div(rows.len() as u64)?;
            average - average / ROWS_DIVISOR
        }
    };
    let smaller = smaller.max(MIN_SHARE);
    let gives = rows.iter().any(|&one| one > smaller);
    u32::try_from(smaller.min(share)).ok().filter(|_| gives)
}

/// What is told of a push without room while tables have rows to give up: it may come again soon.
pub(crate) fn retry_later(why: &str) -> Refusal {
    Refusal::NotReady(format!("tables with a capacity give up rows: {why}"))
}

impl Store {
    /// Give each table with a capacity a share that is smaller than what some of its slots have here. The
    /// tables that have rows to give, with their shares.
    pub(crate) fn shrink_shares(&self, short: ShortOf) -> Vec<(Arc<TableSpec>, u32)> {
        let specs: Vec<Arc<TableSpec>> = {
            let specs = self.specs.read();
            specs.values().map(|one| Arc::clone(&one.spec)).collect()
        };
        let smaller = |spec: Arc<TableSpec>| {
            let share = spec.share(self.space.count())?;
            let mut rows = self.served_rows(table_id(&spec.name));
            Some((smaller_share(&mut rows, share, short)?, spec))
        };
        let shares: Vec<_> = specs.into_iter().filter_map(smaller).collect();
        let by_id = shares
            .iter()
            .map(|(share, spec)| (table_id(&spec.name), *share));
        *self.relief.shares.write() = by_id.collect();
        self.relief.any.store(!shares.is_empty(), Ordering::Release);
        shares
            .into_iter()
            .map(|(share, spec)| (spec, share))
            .collect()
    }

    /// Let the tables have the shares of their capacities again.
    pub(crate) fn restore_shares(&self) {
        if self.relief.any.swap(false, Ordering::AcqRel) {
            self.relief.shares.write().clear();
        }
    }

    /// Let a push bring smaller shares into its slots, if its table has one for now.
    pub(super) fn stamp_smaller_share(&self, transaction: &mut Transaction) {
        if !self.relief.any.load(Ordering::Acquire) || transaction.stamp.share == 0 {
            return;
        }
        if let Some(&share) = self.relief.shares.read().get(&transaction.table) {
            transaction.stamp.share = transaction.stamp.share.min(share);
        }
    }

    /// Whether tables with a capacity have so many bytes to give up here.
    pub(super) fn can_give_up(&self, bytes: u64, giving: GivingSlots) -> bool {
        let slots = self.space.count();
        let tables: Vec<u64> = {
            let specs = self.specs.read();
            let bounded = specs
                .iter()
                .filter(|(_, one)| one.spec.share(slots).is_some());
            bounded.map(|(&id, _)| id).collect()
        };
        let mut lacking = bytes;
        for stripe in &self.stripes {
            if lacking == 0 || tables.is_empty() {
                break;
            }
            let engine = stripe.read();
            for slot in engine.slots() {
                let serves = engine.serving_state(slot) == ServingState::Serving;
                if serves || giving == GivingSlots::All {
                    let of = |&table: &u64| engine.evictable_bytes(table, slot) as u64;
                    lacking = lacking.saturating_sub(tables.iter().map(of).sum());
                }
            }
        }
        lacking == 0
    }

    /// A push has no room: let tables have smaller shares, if nobody has yet. Whether any gives up rows.
    pub(crate) fn begin_relief(&self, short: ShortOf) -> bool {
        self.relief.any.load(Ordering::Acquire) || !self.shrink_shares(short).is_empty()
    }

    /// Nobody reads or changes a slot until this is dropped.
    #[cfg(test)]
    pub(crate) fn hold_slot(&self, slot: u32) -> impl Sized + '_ {
        self.stripes[self.stripe(slot)].write()
    }

    /// Rows of a table in each slot that is served here.
    fn served_rows(&self, table: u64) -> Vec<u64> {
        let mut found = Vec::new();
        for stripe in &self.stripes {
            let engine = stripe.read();
            let Ok(table) = engine.table(table) else {
                continue;
            };
            let served = engine
                .slots()
                .filter(|&slot| engine.serving_state(slot) == ServingState::Serving);
            found.extend(served.map(|slot| table.rows_in(slot) as u64));
        }
        found
    }

    /// The slots that are served here and have more rows of a table than a share.
    pub(crate) fn slots_above(&self, table: &TableSpec, share: u32) -> Vec<u32> {
        let id = table_id(&table.name);
        let mut above = Vec::new();
        for stripe in &self.stripes {
            let engine = stripe.read();
            let rows = |slot| {
                engine
                    .table(id)
                    .map_or(0, |table: &Table| table.rows_in(slot))
            };
            above.extend(engine.slots().filter(|&slot| {
                let serves = engine.serving_state(slot) == ServingState::Serving;
                serves && rows(slot) > share as usize
            }));
        }
        above
    }

    /// A transaction by which a slot gives up the rows above a share.
    pub(crate) fn eviction(
        &self,
        table: &TableSpec,
        id: TransactionId,
        (slot, share): (u32, u32),
    ) -> Result<Transaction, Refusal> {
        let batch = Batch::new(&[SlotPart::WHOLE.key(self.space, slot)], &[]);
        let change = Change::Expire(Thresholds::default());
        let name = table_id(&table.name);
        let mut made = Transaction::new(self.space, id, id.sequence, name, change, batch)?;
        made.optimizer = Some(table.optimizer.stamp());
        made.stamp = Stamp {
            time: self.seconds(),
            share,
        };
        let room = self.reserve(&made, made.runs(), GivingSlots::Served)?;
        made.attach(room);
        Ok(made)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_smaller_share_is_below_what_the_largest_slots_have() {
        let of = |rows: &[u64], share, short| smaller_share(&mut rows.to_vec(), share, short);
        let here = |rows: &[u64], share| of(rows, share, ShortOf::Here);
        let many: Vec<u64> = (1000..1064).collect();
        let share = here(&many, 10_000).unwrap();
        let above = many.iter().filter(|&&rows| rows > u64::from(share)).count();
        assert_eq!(
            (share, above),
            (1058, 5),
            "a sixteenth of 64, and the one next to them"
        );
        assert_eq!(here(&many, 500), Some(500));
        assert_eq!(here(&[20, 18], 10_000), Some(19));
        assert_eq!(here(&[17; 3], 10_000), Some(16));
        assert_eq!(here(&[16; 3], 10_000), None, "these are too few");
        assert_eq!(here(&[], 10_000), None);
        let backup = |rows: &[u64]| of(rows, 10_000, ShortOf::ABackup);
        assert_eq!(backup(&[6_400; 10]), Some(6_000));
        assert_eq!(backup(&[16; 3]), None);
        assert_eq!(backup(&[]), None);
    }
}
