//! Smaller shares for tables with a capacity while memory is short: they give up rows before any
//! table is refused new ones.
//!
//! A share travels with each transaction ([`backstay_core::transaction::Stamp`]), so all replicas
//! of a slot remove the same rows, whatever memory each of them has.

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

impl ShortOf {
    /// A smaller share is smaller by this part of the rows that a slot has on average.
    fn part(self) -> u64 {
        match self {
            Self::Here => 64,
            Self::ABackup => 16,
        }
    }
}

/// Whose rows can go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Giving {
    /// Those of the slots that are served here: this node evicts them for its own pushes.
    Served,
    /// Those of all slots that are held here: the masters of the others hear that this node is full.
    Held,
}

/// The smaller shares of now.
#[derive(Debug, Default)]
pub(super) struct Relief {
    /// By table.
    shares: RwLock<BTreeMap<u64, u32>>,
    any: AtomicBool,
}

/// The share of a table of which so many slots here have so many rows together, so that some go; None
/// if it has none to give. `share`: by its capacity.
fn smaller_share(rows: u64, slots: u64, share: u64, short: ShortOf) -> Option<u32> {
    let average = rows.checked_div(slots)?;
    if average <= MIN_SHARE {
        return None;
    }
    let smaller = average - (average / short.part()).max(1);
    u32::try_from(smaller.max(MIN_SHARE).min(share)).ok()
}

impl Store {
    /// Give each table with a capacity a share that is smaller than what its slots have here on
    /// average. The tables that have rows to give, with their shares.
    pub(crate) fn shrink_shares(&self, short: ShortOf) -> Vec<(Arc<TableSpec>, u32)> {
        let specs: Vec<Arc<TableSpec>> = {
            let specs = self.specs.read();
            specs.values().map(|one| Arc::clone(&one.spec)).collect()
        };
        let smaller = |spec: Arc<TableSpec>| {
            let share = spec.share(self.space.count())?;
            let (rows, slots) = self.served_rows(table_id(&spec.name));
            Some((smaller_share(rows, slots, share, short)?, spec))
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
    pub(super) fn shrink_share(&self, transaction: &mut Transaction) {
        if !self.relief.any.load(Ordering::Acquire) || transaction.stamp.share == 0 {
            return;
        }
        if let Some(&share) = self.relief.shares.read().get(&transaction.table) {
            transaction.stamp.share = transaction.stamp.share.min(share);
        }
    }

    /// Whether tables with a capacity have so many bytes to give up here.
    pub(super) fn can_give_up(&self, bytes: u64, giving: Giving) -> bool {
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
                if serves || giving == Giving::Held {
                    let of = |&table: &u64| engine.evictable_bytes(table, slot) as u64;
                    lacking = lacking.saturating_sub(tables.iter().map(of).sum());
                }
            }
        }
        lacking == 0
    }

    /// What is told of a push without room while tables have rows to give up: it may come again soon.
    pub(crate) fn after_relief(&self, refusal: Refusal, short: ShortOf) -> Refusal {
        let Refusal::MemoryLimit(why) = refusal else {
            return refusal;
        };
        // At the first one nobody has looked yet.
        if !self.relief.any.load(Ordering::Acquire) && self.shrink_shares(short).is_empty() {
            return Refusal::MemoryLimit(why);
        }
        Refusal::NotReady(format!("tables with a capacity give up rows: {why}"))
    }

    /// Nobody reads or changes a slot until this is dropped.
    #[cfg(test)]
    pub(crate) fn hold_slot(&self, slot: u32) -> impl Sized + '_ {
        self.stripes[self.stripe(slot)].write()
    }

    /// Rows of a table in the slots that are served here, and how many these slots are.
    fn served_rows(&self, table: u64) -> (u64, u64) {
        let (mut rows, mut slots) = (0, 0);
        for stripe in &self.stripes {
            let engine = stripe.read();
            let Ok(table) = engine.table(table) else {
                continue;
            };
            for slot in engine.slots() {
                if engine.serving_state(slot) == ServingState::Serving {
                    rows += table.rows_in(slot) as u64;
                    slots += 1;
                }
            }
        }
        (rows, slots)
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
        let room = self.reserve(&made, made.runs(), Giving::Served)?;
        made.attach(room);
        Ok(made)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_smaller_share_is_below_what_slots_have_on_average() {
        let here = |rows, slots, share| smaller_share(rows, slots, share, ShortOf::Here);
        assert_eq!(here(64_000, 10, 10_000), Some(6_300));
        assert_eq!(here(64_000, 10, 500), Some(500));
        assert_eq!(here(200, 10, 10_000), Some(19));
        assert_eq!(here(160, 10, 10_000), None, "these are too few");
        assert_eq!(here(0, 0, 10_000), None);
        let backup = smaller_share(64_000, 10, 10_000, ShortOf::ABackup);
        assert_eq!(backup, Some(6_000));
    }
}
