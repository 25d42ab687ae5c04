//! What checkpoints need of the replication state: who is master, and what waits to be loaded.

use backstay_core::engine::{SlotMemory, SlotSnapshot};
use backstay_core::error::Refusal;
use backstay_core::replication::Rows;

use super::Replicator;
use crate::checkpoint::LoadedSlot;
use crate::store::Store;

impl Replicator {
    /// Copy a slot, with its epoch, at an instant at which this node surely was its master; None
    /// if it is not. `base`: position and epoch of what is known of it already. `exported`: the
    /// tables of an export; None: all, for a checkpoint.
    pub fn snapshot_slot(
        &self,
        slot: u32,
        base: Option<(u64, u64)>,
        exported: Option<&[u64]>,
    ) -> Option<(u64, SlotSnapshot)> {
        if slot >= self.store.space().count() {
            return None;
        }
        let epoch = self.state.lock().replica.epoch(slot);
        let base = base.filter(|&(_, known)| known == epoch);
        let base = base.map(|(position, _)| position);
        let snapshot = self.store.snapshot(slot, base, exported)?;
        // As with a read: what was copied counts only if no other node could be master by now.
        self.check_alive().ok()?;
        let unchanged = self.state.lock().replica.epoch(slot) == epoch;
        unchanged.then_some((epoch, snapshot))
    }

    /// The slots that wait to be loaded here, each with its epoch.
    pub fn to_load(&self) -> Vec<(u32, u64)> {
        self.state.lock().replica.to_load().collect()
    }

    /// Change a slot that waits to be loaded, if it still does.
    pub fn load_step(
        &self,
        asked: &LoadedSlot,
        change: impl FnOnce(&Store) -> Result<(), Refusal>,
    ) -> Result<(), Refusal> {
        self.with(|replica, _, store| {
            replica.check_load(asked.slot, asked.epoch)?;
            change(store)
        })
    }

    /// All rows of these slots, of one file, are here: slots that still wait are loaded now. The
    /// first refusal is returned.
    pub fn finish_loads(&self, slots: &[(LoadedSlot, SlotMemory)]) -> Result<(), Refusal> {
        self.with(|replica, now, store| {
            let mut outcome = Ok(());
            let mut loaded = Vec::with_capacity(slots.len());
            for (asked, memory) in slots {
                match replica.check_load(asked.slot, asked.epoch) {
                    Ok(()) => {
                        store.set_memory(asked.slot, memory);
                        loaded.push(asked.slot);
                    }
                    refused => outcome = outcome.and(refused),
                }
            }
            replica.loaded(now, &loaded);
            outcome
        })
    }
}
