//! From where the rows came that a client has: the origin of each slot of some tables, as the last
//! pull that was waited for told it. A push to these tables tells it on.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

use backstay_core::staleness::UNTOLD;
use parking_lot::Mutex;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct Origins {
    /// Whether there is a table at all; who asks for none pays nothing more.
    any: AtomicBool,
    /// By table, then by slot; empty until the first answer.
    tables: Mutex<BTreeMap<u64, Vec<u64>>>,
}

impl Origins {
    /// Ask for the origins of a table from now on.
    pub(super) fn ask(&self, table: u64) {
        self.tables.lock().entry(table).or_default();
        self.any.store(true, Ordering::Release);
    }

    /// Whether a table's are asked for.
    pub(super) fn asks(&self, table: u64) -> bool {
        self.any.load(Ordering::Acquire) && self.tables.lock().contains_key(&table)
    }

    /// Rows of these slots came, of a cluster of so many.
    pub(super) fn came(&self, table: u64, slots: u32, told: impl Iterator<Item = (u32, u64)>) {
        let mut tables = self.tables.lock();
        let known = tables.entry(table).or_default();
        known.resize(slots as usize, UNTOLD);
        for (slot, origin) in told {
            if let Some(known) = known.get_mut(slot as usize) {
                *known = origin;
            }
        }
    }

    /// What a push to these slots tells; `None`: nothing is known of any of them.
    pub(super) fn of(&self, table: u64, slots: impl Iterator<Item = u32>) -> Option<Vec<u64>> {
        if !self.any.load(Ordering::Acquire) {
            return None;
        }
        let tables = self.tables.lock();
        let known = tables.get(&table).filter(|known| !known.is_empty())?;
        let origin = |slot: u32| known.get(slot as usize).copied().unwrap_or(UNTOLD);
        let told: Vec<u64> = slots.map(origin).collect();
        told.iter().any(|&one| one != UNTOLD).then_some(told)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_push_tells_what_the_last_pull_of_each_slot_told() {
        let origins = Origins::default();
        assert!(!origins.asks(1));
        origins.ask(1);
        assert!(origins.asks(1) && !origins.asks(2));
        assert_eq!(origins.of(1, [0].into_iter()), None);
        origins.came(1, 4, [(0, 10), (2, 12)].into_iter());
        origins.came(1, 4, [(2, 13)].into_iter());
        let told = origins.of(1, [0, 1, 2].into_iter());
        assert_eq!(told, Some(vec![10, UNTOLD, 13]));
        assert_eq!(origins.of(1, [1, 3].into_iter()), None);
        assert_eq!(origins.of(2, [0].into_iter()), None);
    }
}
