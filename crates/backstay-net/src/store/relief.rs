//! Smaller shares for tables with a capacity while memory is short: they give up rows before any
//! table is refused new ones.
//!
//! A share travels with each transaction ([`backstay_core::transaction::Stamp`]), so all replicas
//! of a slot remove the same rows, whatever memory each of them has.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

use backstay_core::engine::{Engine, ServingState};
use backstay_core::error::Refusal;
use backstay_core::hash::table_id;
use backstay_core::life::SlotPart;
use backstay_core::spec::lifetime::MIN_SHARE;
use backstay_core::spec::TableSpec;
use backstay_core::stream::TransactionId;
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

/// What a table may have in a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shares {
    rows: u32,
    /// Of keys without a row.
    counters: u32,
}

/// The smaller shares of now.
#[derive(Debug, Default)]
pub(super) struct Relief {
    /// By table.
    shares: RwLock<BTreeMap<u64, Shares>>,
    any: AtomicBool,
}

/// What a table with a capacity has in the slots that are served here: rows, or counters.
#[derive(Debug, Default)]
struct Content {
    bytes: usize,
    in_slots: Vec<u64>,
}

impl Content {
    fn has_to_give(&self) -> bool {
        self.in_slots.iter().any(|&count| count > MIN_SHARE)
    }
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

/// The slots of a range that this node is the serving master of.
fn served(engine: &Engine) -> impl Iterator<Item = u32> + '_ {
    let serves = |&slot: &u32| engine.serving_state(slot) == ServingState::Serving;
    engine.slots().filter(serves)
}

/// What is told of a push without room while tables have rows to give up: it may come again soon.
pub(crate) fn retry_later(why: &str) -> Refusal {
    Refusal::NotReady(format!("tables with a capacity give up rows: {why}"))
}

impl Store {
    /// Give tables with a capacity shares that are smaller than what some of their slots have here. The
    /// tables that have something to give, with their shares.
    ///
    /// Those give whose rows, or counters, take most of the memory, and others of more than half as
    /// much: else a table whose keys come again and again would shrink for another one that always gets
    /// new keys, until nothing is left of it.
    pub(crate) fn shrink_shares(&self, short: ShortOf) -> Vec<(Arc<TableSpec>, Shares)> {
        let specs: Vec<Arc<TableSpec>> = {
            let specs = self.specs.read();
            specs.values().map(|one| Arc::clone(&one.spec)).collect()
        };
        let slots = self.space.count();
        let bounded = specs.into_iter().filter_map(|spec| {
            let held = self.rows_and_counters_of(table_id(&spec.name));
            Some((spec.share(slots)?, held, spec))
        });
        let mut bounded: Vec<_> = bounded.collect();
        let giving = bounded.iter().flat_map(|(_, held, _)| held);
        let giving = giving.filter(|one| one.has_to_give());
        let most = giving.map(|held| held.bytes).max().unwrap_or(0);
        let mut shares = Vec::new();
        for (share, held, spec) in &mut bounded {
            let whole = u32::try_from(*share).unwrap_or(u32::MAX);
            let [rows, counters] = held.each_mut().map(|held| {
                let gives = held.bytes >= most / 2;
                gives.then(|| smaller_share(&mut held.in_slots, *share, short))?
            });
            if rows.is_some() || counters.is_some() {
                let smaller = Shares {
                    rows: rows.unwrap_or(whole),
                    counters: counters.unwrap_or(whole),
                };
                shares.push((Arc::clone(spec), smaller));
            }
        }
        let by_id = shares
            .iter()
            .map(|(spec, shares)| (table_id(&spec.name), *shares));
        *self.relief.shares.write() = by_id.collect();
        self.relief.any.store(!shares.is_empty(), Ordering::Release);
        shares
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
        if let Some(shares) = self.relief.shares.read().get(&transaction.table) {
            let stamp = &mut transaction.stamp;
            stamp.share = stamp.share.min(shares.rows);
            stamp.counters = stamp.counters.min(shares.counters);
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

    /// The rows of a table in the slots that are served here, and its counters.
    fn rows_and_counters_of(&self, table: u64) -> [Content; 2] {
        let [mut rows, mut counters] = [Content::default(), Content::default()];
        for stripe in &self.stripes {
            let engine = stripe.read();
            let (row_bytes, counter_bytes) = engine.table_bytes(table);
            rows.bytes += row_bytes;
            counters.bytes += counter_bytes;
            for slot in served(&engine) {
                let (some, others) = engine.rows_and_counters(table, slot);
                rows.in_slots.push(some as u64);
                counters.in_slots.push(others as u64);
            }
        }
        [rows, counters]
    }

    /// The slots that are served here and have more of a table than its shares.
    pub(crate) fn slots_above(&self, table: &TableSpec, shares: Shares) -> Vec<u32> {
        let id = table_id(&table.name);
        let mut above = Vec::new();
        for stripe in &self.stripes {
            let engine = stripe.read();
            above.extend(served(&engine).filter(|&slot| {
                let (rows, counters) = engine.rows_and_counters(id, slot);
                rows > shares.rows as usize || counters > shares.counters as usize
            }));
        }
        above
    }

    /// A transaction by which a slot gives up what is above its shares.
    pub(crate) fn eviction(
        &self,
        table: &TableSpec,
        id: TransactionId,
        (slot, shares): (u32, Shares),
    ) -> Result<Transaction, Refusal> {
        let batch = Batch::new(&[SlotPart::WHOLE.key(self.space, slot)], &[]);
        let name = table_id(&table.name);
        let mut made = Transaction::new(self.space, id, id.sequence, name, Change::Evict, batch)?;
        made.optimizer = Some(table.optimizer.stamp());
        made.stamp = Stamp {
            time: self.seconds(),
            share: shares.rows,
            counters: shares.counters,
        };
        let room = self.reserve(&made, made.runs(), GivingSlots::Served)?;
        made.attach(room);
        Ok(made)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use backstay_core::hash::SlotSpace;
    use backstay_core::stream::StreamId;

    fn node(tables: &[&str]) -> Store {
        let store = Store::new(SlotSpace::new(SLOTS).unwrap(), 1 << 30);
        store.set_routing(1, &[true; SLOTS as usize]);
        for (version, spec) in tables.iter().enumerate() {
            let spec = Arc::new(TableSpec::from_json(spec).unwrap());
            store.create_table(&spec, version as u64 + 1).unwrap();
        }
        store
    }

    fn push(store: &Store, table: &str, keys: std::ops::Range<u64>, sequence: u64) -> Transaction {
        let stream = StreamId {
            job: 1,
            pass: 0,
            task: table_id(table) as u32,
        };
        let id = TransactionId { stream, sequence };
        let mut keys: Vec<u64> = keys.collect();
        keys.sort_by_key(|&key| store.space().slot_of(key));
        let change = Change::update(1.0);
        let batch = Batch::new(&keys, &vec![1.0; keys.len()]);
        let made = Transaction::new(store.space(), id, 0, table_id(table), change, batch);
        let mut made = made.unwrap();
        store.prepare(&mut made).unwrap();
        made
    }

    fn spec(name: &str, admission: &str) -> String {
        format!(
            r#"{{"name":"{name}","kind":{{"sparse":{{"dim":1}}}},"initializer":{{"zeros":{{}}}},"optimizer":{{"sgd":{{"learning_rate":1.0}}}},"lifetime":{{{admission}"capacity":{{"rows":1000000}}}}}}"#
        )
    }

    const SLOTS: u32 = 4;
    const AFTER_TWO: &str = r#""admission":{"after":{"occurrences":2}},"#;

    /// A table whose keys come again and again must not shrink for one with ever new keys.
    #[test]
    fn the_largest_table_gives_up_rows() {
        let store = node(&[&spec("hot", ""), &spec("churning", "")]);
        for (table, keys) in [("hot", 0..1_000), ("churning", 0..4_000)] {
            let made = push(&store, table, keys, 0);
            store.apply(&made).unwrap();
        }
        let shares = store.shrink_shares(ShortOf::Here);
        let named: Vec<&str> = shares.iter().map(|(spec, _)| spec.name.as_str()).collect();
        assert_eq!(named, ["churning"]);
        assert_eq!(push(&store, "hot", 0..9, 1).stamp.share, 250_000);
        assert!(push(&store, "churning", 0..9, 1).stamp.share < 4_000);
        // Once both are of a size, both give.
        let made = push(&store, "hot", 1_000..4_000, 2);
        store.apply(&made).unwrap();
        assert_eq!(store.shrink_shares(ShortOf::Here).len(), 2);
    }

    /// Counters of keys without a row are cut by their own number, and go where there is no row yet.
    #[test]
    fn counters_have_a_share_of_their_own() {
        let store = node(&[&spec("t", AFTER_TWO)]);
        for sequence in 0..2 {
            let made = push(&store, "t", 0..400, sequence);
            store.apply(&made).unwrap();
        }
        let made = push(&store, "t", 1_000..41_000, 2);
        store.apply(&made).unwrap();
        let of = |store: &Store| {
            let usage = store.usage("t").unwrap();
            (usage.rows, usage.counters.0)
        };
        assert_eq!(of(&store), (400, 40_000));
        let (spec, shares) = store.shrink_shares(ShortOf::Here).remove(0);
        let made = push(&store, "t", 50_000..50_400, 3);
        let gone = store.apply(&made).unwrap().gone;
        assert!(gone.evicted_counters > 0 && gone.evicted == 0, "{gone:?}");
        let (rows, counters) = of(&store);
        assert!(rows == 400 && counters > 36_000, "{rows} {counters}");
        assert!(store.slots_above(&spec, shares).is_empty());
    }

    #[test]
    fn a_smaller_share_is_below_what_the_largest_slots_have() {
        let of = |rows: &[u64], share, short| smaller_share(&mut rows.to_vec(), share, short);
        let here = |rows: &[u64], share| of(rows, share, ShortOf::Here);
        let many: Vec<u64> = (1000..1064).collect();
        let share = here(&many, 10_000).unwrap();
        let above = many.iter().filter(|&&rows| rows > u64::from(share)).count();
        assert_eq!((share, above), (1061, 2), "a 64th, and the slot next to it");
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
