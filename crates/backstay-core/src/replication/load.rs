//! Slots that this node is to load from a checkpoint before it serves them.
//!
//! The routing asks for it, by a new epoch. The loader of a slot asks here before each step, and
//! says when it is done. The report tells the controller, whose next table lets it be served.

use std::collections::BTreeSet;

use super::replica::Replica;
use super::state::{Load, Role};
use super::Micros;
use crate::error::Refusal;

/// Between two reports of slots that were loaded.
const TELL_EVERY: Micros = 500_000;

impl Replica {
    /// The slots that wait to be loaded, each with its epoch.
    pub fn to_load(&self) -> impl Iterator<Item = (u32, u64)> + '_ {
        let waits = self.slots.iter().enumerate();
        let waits = waits.filter(|(_, slot)| slot.load() == Load::Awaited);
        waits.map(|(number, slot)| (number as u32, slot.epoch))
    }

    /// What the controller is to hear of loaded slots. It makes a routing table of each news, so
    /// there is some only every now and then, and when all are loaded.
    pub(super) fn loaded_to_tell(&mut self, now: Micros) -> BTreeSet<(u32, u64)> {
        if now >= self.told_loaded.1 || self.to_load().next().is_none() {
            self.told_loaded = (self.loaded.clone(), now + TELL_EVERY);
        }
        let restoring = |&&(slot, epoch): &&(u32, u64)| {
            let slot = &self.slots[slot as usize];
            slot.load() == Load::Done && slot.epoch == epoch
        };
        let told = self.told_loaded.0.iter();
        told.filter(restoring).copied().collect()
    }

    /// Refuse to load a slot from a checkpoint if that is not asked of this node (any more):
    /// the slot is another's, or began anew since.
    pub fn check_load(&self, slot: u32, epoch: u64) -> Result<(), Refusal> {
        let known = self.slots.get(slot as usize);
        if known.is_some_and(|known| known.load() == Load::Awaited && known.epoch == epoch) {
            return Ok(());
        }
        Err(Refusal::NotReady(format!(
            "slot {slot} is not to be loaded here (any more)"
        )))
    }

    /// The content of slots has come from a checkpoint. The report is made anew once for all of
    /// them: it may name some ten thousand slots.
    pub fn loaded(&mut self, now: Micros, slots: &[u32]) {
        for &slot in slots {
            let known = &mut self.slots[slot as usize];
            if let Role::Master(master) = &mut known.role {
                master.load = Load::Done;
                self.loaded.insert((slot, known.epoch));
            }
        }
        self.refresh_report(now);
    }
}
