//! The backup's side: stage, apply, discard; and the fence.
//!
//! A backup follows one master per slot: the one with the newest term it has heard of. It
//! stages nothing for an older term, and nothing that leaves a gap in the slot's order.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::message::{Message, Refuse, SlotOrder};
use super::replica::Replica;
use super::routing::RoutingTable;
use super::rows::Rows;
use super::state::{Role, Work};
use super::NodeId;
use crate::engine::ServingState;
use crate::transaction::{StagedRun, Transaction};

impl Replica {
    pub(super) fn answer(&mut self, to: NodeId, number: u64, outcome: Result<(), Refuse>) {
        let message = match outcome {
            Ok(()) => Message::Accepted { number },
            Err(reason) => {
                self.counters.refused_to_others += 1;
                Message::Refused { number, reason }
            }
        };
        self.peers
            .entry(to)
            .or_default()
            .to_master
            .push_back(message);
    }

    /// A master asks to stage.
    pub(super) fn prepare(
        &mut self,
        rows: &impl Rows,
        from: NodeId,
        number: u64,
        lsn: u64,
        mut places: Vec<StagedRun>,
        transaction: Arc<Transaction>,
    ) {
        let outcome = self.stage(rows, from, &places, &transaction);
        let outcome = outcome.map(|()| {
            self.counters.staged_for_others += 1;
            places.retain(|place| !self.slots[place.run.slot as usize].role.is_failed_copy());
            let peer = self.peers.entry(from).or_default();
            let prepared = peer.prepared.entry(lsn).or_default();
            prepared.push((transaction, places));
        });
        self.answer(from, number, outcome);
    }

    fn stage(
        &mut self,
        rows: &impl Rows,
        from: NodeId,
        places: &[StagedRun],
        transaction: &Arc<Transaction>,
    ) -> Result<(), Refuse> {
        let (mut missing, mut behind) = (Vec::with_capacity(places.len()), Vec::new());
        let is_behind =
            self.peers.get(&from).map_or(0, |peer| peer.its_version) < self.routing.version;
        for place in places {
            let Some(slot) = self.slots.get_mut(place.run.slot as usize) else {
                return Err(Refuse::Gap);
            };
            if place.term < slot.fence {
                return Err(Refuse::OldTerm);
            }
            match &mut slot.role {
                // This node has left the slot, or the slot has begun anew, by a table that its
                // master does not have yet. The master need not doubt this node in other slots.
                _ if slot.epoch == 0 => return Err(Refuse::OldTerm),
                Role::Outside if is_behind => return Err(Refuse::OldTerm),
                Role::Backup { master, recovered } if *master == from => {
                    // This node refused the master's Recover, and the master will send it again.
                    if !*recovered {
                        return Err(Refuse::OldTerm);
                    }
                    missing.push(*place);
                }
                Role::Copied { master, copy } if *master == from => {
                    if copy.leaves_gap(place.position) {
                        return Err(Refuse::NoCopy);
                    }
                    // CopyEnd will be refused, so the master does not count on this slot.
                    if copy.failed.is_none() {
                        behind.push(*place);
                    }
                }
                // A copy that began under an old term was not taken in here.
                _ => return Err(gap_in(&self.routing, self.me, place.run.slot)),
            }
            slot.fence = place.term;
        }
        rows.check(transaction).map_err(Refuse::Rows)?;
        if let Some(place) = rows.stage(transaction, &missing, 0) {
            return Err(gap_in(&self.routing, self.me, place.run.slot));
        }
        for place in behind {
            if let Some(copy) = self.slots[place.run.slot as usize].role.copy_from(from) {
                copy.stage(transaction, place);
            }
        }
        Ok(())
    }

    /// A master says that everything it has prepared up to `lsn` is decided.
    pub(super) fn apply_decided(&mut self, from: NodeId, lsn: u64) {
        let Some(peer) = self.peers.get_mut(&from) else {
            return;
        };
        let rest = peer.prepared.split_off(&(lsn + 1));
        let decided = std::mem::replace(&mut peer.prepared, rest);
        for (transaction, mut places) in decided.into_values().flatten() {
            // A slot that follows another master by now ignores this decision.
            places.retain(|place| {
                let role = &mut self.slots[place.run.slot as usize].role;
                if let Some(copy) = role.copy_from(from) {
                    copy.decided = copy.decided.max(place.position);
                    return false;
                }
                role.follows(from)
            });
            if !places.is_empty() {
                let work = self.work.entry(from).or_default();
                work.push_back(Work::Commit {
                    transaction,
                    places,
                    token: None,
                });
            }
        }
    }

    /// A master rolls back.
    pub(super) fn discard(&mut self, rows: &impl Rows, from: NodeId, lsns: &[u64]) {
        let Some(peer) = self.peers.get_mut(&from) else {
            return;
        };
        let undone = lsns.iter().filter_map(|lsn| peer.prepared.remove(lsn));
        for (_, places) in undone.flatten() {
            for place in places {
                let role = &mut self.slots[place.run.slot as usize].role;
                if let Some(copy) = role.copy_from(from) {
                    copy.discard_from(place.position);
                } else if role.follows(from) {
                    rows.discard_from(place.run.slot, place.position);
                }
            }
        }
    }

    /// A master, new or on a new connection, fixes the order of slots.
    pub(super) fn obey(
        &mut self,
        rows: &impl Rows,
        from: NodeId,
        number: u64,
        orders: &[SlotOrder],
    ) {
        let outcome = self.check_orders(rows, orders).map(|()| {
            self.cede(rows, orders.iter().map(|one| one.slot).collect());
            for one in orders {
                self.follow_master(rows, from, *one);
                self.slots[one.slot as usize].role = Role::Backup {
                    master: from,
                    recovered: true,
                };
                // Errors would mean that a table is gone: tables are never dropped.
                let applied = rows.commit_through(one.slot, one.decided);
                debug_assert!(applied.is_ok());
                rows.discard_from(one.slot, one.end + 1);
            }
        });
        self.answer(from, number, outcome);
    }

    fn check_orders(&self, rows: &impl Rows, orders: &[SlotOrder]) -> Result<(), Refuse> {
        for one in orders {
            let Some(slot) = self.slots.get(one.slot as usize) else {
                return Err(Refuse::Gap);
            };
            self.check_term(one)?;
            if slot.epoch == 0 && self.routing.version > one.version {
                return Err(Refuse::OldTerm);
            }
            let (applied, end) = if slot.epoch == one.epoch {
                rows.position(one.slot)
            } else {
                (0, 0)
            };
            // A transaction applied beyond the order cannot be undone, so only a copy helps.
            if applied > one.end || end < one.decided || slot.role.is_copied() {
                return Err(Refuse::Gap);
            }
        }
        Ok(())
    }

    /// The fence. A term has one master, so a sender with the newest term seen, or a newer one,
    /// is the slot's master.
    pub(super) fn check_term(&self, one: &SlotOrder) -> Result<(), Refuse> {
        if one.term < self.slots[one.slot as usize].fence {
            return Err(Refuse::OldTerm);
        }
        Ok(())
    }

    /// A master has lost slots. What it has prepared in them stays staged until their new master
    /// decides, and decisions of the old one do not apply it.
    pub(super) fn forget(&mut self, from: NodeId, slots: &[u32]) {
        let Some(peer) = self.peers.get_mut(&from) else {
            return;
        };
        let slots: BTreeSet<u32> = slots.iter().copied().collect();
        for (_, places) in peer.prepared.values_mut().flatten() {
            places.retain(|place| !slots.contains(&place.run.slot));
        }
    }

    /// What was staged in a slot is gone: no decision about it may be carried out any more.
    pub(super) fn forget_prepared(&mut self, slot: u32) {
        for peer in self.peers.values_mut() {
            for (_, places) in peer.prepared.values_mut().flatten() {
                places.retain(|place| place.run.slot != slot);
            }
        }
    }

    /// Another node is master of these slots, and the routing that says so has not come here yet.
    fn cede(&mut self, rows: &impl Rows, mut slots: Vec<u32>) {
        slots.retain(|&slot| self.slots[slot as usize].role.is_master());
        slots.sort_unstable();
        for &slot in &slots {
            rows.set_serving_state(slot, ServingState::Elsewhere);
        }
        self.give_up(rows, &slots);
        for &slot in &slots {
            self.slots[slot as usize].role = Role::Former;
        }
    }

    /// From now on the slot follows this master. The caller gives this node its new role.
    pub(super) fn follow_master(&mut self, rows: &impl Rows, from: NodeId, one: SlotOrder) {
        self.cede(rows, vec![one.slot]);
        if !self.slots[one.slot as usize].role.follows(from) {
            // The new master orders anew what is under way from the former one.
            self.forget_prepared(one.slot);
        }
        let slot = &mut self.slots[one.slot as usize];
        if slot.epoch != one.epoch {
            rows.clear_slot(one.slot);
            rows.set_epoch(one.slot, one.epoch);
            slot.epoch = one.epoch;
        }
        slot.fence = one.term;
        slot.seen_version = slot.seen_version.max(one.version);
    }
}

/// The refusal of a node that lacks a predecessor of a push in a slot.
fn gap_in(routing: &RoutingTable, me: NodeId, slot: u32) -> Refuse {
    if routing.replicas(slot).catching_up.contains(&me) {
        Refuse::NoCopy
    } else {
        Refuse::Gap
    }
}
