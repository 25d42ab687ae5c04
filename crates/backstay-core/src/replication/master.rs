//! The master's side: prepare, commit, rollback; recovery of what a predecessor left.
//!
//! A master has one order for all transactions of all its slots, numbered by lsn. They are
//! decided in that order; a rollback takes along everything behind it.

use std::sync::Arc;

use super::message::{Message, Refuse, SlotOrder};
use super::peer::{Awaited, Part, Peer};
use super::replica::Replica;
use super::rows::Rows;
use super::state::{Entry, Recovering, Token, Work};
use super::{Micros, NodeId};
use crate::engine::StageReport;
use crate::error::Refusal;
use crate::transaction::{StagedRun, Transaction};

impl Replica {
    /// Take a push on. Its outcome comes as [`Work::Answer`], or at once if every slot has applied
    /// it before.
    pub fn push(
        &mut self,
        now: Micros,
        rows: &impl Rows,
        token: Token,
        transaction: &Arc<Transaction>,
    ) -> Result<Option<StageReport>, Refusal> {
        let mut places = Vec::with_capacity(transaction.runs().len());
        let report = rows.admit(transaction, &mut places)?;
        if places.is_empty() {
            // Every slot has it. Without backups this counts only while the lease is alive.
            let mut slots = transaction.runs().iter().map(|run| run.slot);
            if slots.any(|slot| self.is_alone(slot)) {
                self.check_lease(now)?;
            }
            return Ok(Some(report));
        }
        self.check_ready(now, &places)?;
        let lsn = self.last_lsn + 1;
        for place in &mut places {
            place.term = self.slots[place.run.slot as usize].term;
        }
        if let Some(taken) = rows.stage(transaction, &places, lsn) {
            // The same lock protects admit and stage, so only a fault of the code comes here.
            let reason = format!("slot {} moved on while a push came", taken.run.slot);
            return Err(Refusal::NotReady(reason));
        }
        self.last_lsn = lsn;
        self.counters.prepared += 1;
        let part = (Arc::clone(transaction), places);
        let mut waiting = Vec::new();
        for (node, required) in self.audience(&part.1) {
            self.send_prepare(node, lsn, &part);
            if required {
                waiting.push((node, 1));
            }
        }
        self.pending.push_back(Entry {
            lsn,
            parts: vec![part],
            recovers: Vec::new(),
            waiting,
            token: Some(token),
            report,
            since: now,
            sent_again: false,
        });
        self.decide();
        Ok(None)
    }

    /// Refuse a push that could not be committed now.
    fn check_ready(&self, now: Micros, places: &[StagedRun]) -> Result<(), Refusal> {
        let not_ready = |reason: String| Err(Refusal::NotReady(reason));
        if self.pending.len() >= self.options.max_pending {
            return not_ready(format!("{} pushes wait for backups", self.pending.len()));
        }
        let most = 4 * self.options.max_pending;
        if self.peers.values().any(|peer| peer.in_flight.len() >= most) {
            return not_ready("a backup is far behind".into());
        }
        for place in places {
            let slot = &self.slots[place.run.slot as usize];
            if slot.required().is_empty() {
                self.check_lease(now)?;
            }
            for node in slot.required() {
                let healthy = |peer: &Peer| peer.up && !peer.fallen_behind;
                if !self.peers.get(node).is_some_and(healthy) {
                    return not_ready(format!(
                        "backup {} of slot {} is not connected; the controller is asked to take it out",
                        self.routing.name(*node), place.run.slot
                    ));
                }
            }
            let slot = place.run.slot;
            let copied = self.slots[slot as usize].extra().iter();
            if let Some(node) = copied.into_iter().find(|&&node| self.is_outrun(node, slot)) {
                return not_ready(format!(
                    "slot {slot} is copied to {}, and more is pushed than the link takes",
                    self.routing.name(*node)
                ));
            }
        }
        Ok(())
    }

    /// Whether this node alone has to have what is committed in a slot.
    fn is_alone(&self, slot: u32) -> bool {
        self.slots[slot as usize].required().is_empty()
    }

    /// Refuse if a slot without backups may be another's by now.
    fn check_lease(&self, now: Micros) -> Result<(), Refusal> {
        if self.lease_until > now {
            return Ok(());
        }
        let reason = "this node's lease in the coordination store is over";
        Err(Refusal::NotReady(reason.into()))
    }

    /// The outcome to tell of a push that was decided and is applied. With backups, all of them
    /// have it; without, the node's lease must still be alive: else the slot may have begun anew
    /// elsewhere, without this push.
    pub fn acknowledge(
        &self,
        now: Micros,
        outcome: Result<StageReport, Refusal>,
        alone: bool,
    ) -> Result<StageReport, Refusal> {
        let report = outcome?;
        if alone {
            let lease = self.check_lease(now);
            lease.map_err(|refusal| Refusal::Incomplete(refusal.to_string()))?;
        }
        Ok(report)
    }

    /// The nodes that get a transaction, and whether it waits for them.
    fn audience(&self, places: &[StagedRun]) -> Vec<(NodeId, bool)> {
        let mut audience: Vec<(NodeId, bool)> = Vec::new();
        let mut add = |node: NodeId, required: bool| match audience
            .iter_mut()
            .find(|(known, _)| *known == node)
        {
            Some((_, waits)) => *waits |= required,
            None => audience.push((node, required)),
        };
        for place in places {
            let slot = &self.slots[place.run.slot as usize];
            slot.required().iter().for_each(|&node| add(node, true));
            slot.extra().iter().for_each(|&node| add(node, false));
        }
        audience
    }

    /// The places of a part that a node holds.
    fn share(&self, node: NodeId, places: &[StagedRun]) -> Vec<StagedRun> {
        let held = |place: &&StagedRun| {
            let slot = &self.slots[place.run.slot as usize];
            slot.required().contains(&node) || slot.extra().contains(&node)
        };
        places.iter().filter(held).copied().collect()
    }

    pub(super) fn send_prepare(&mut self, node: NodeId, lsn: u64, part: &Part) {
        let (places, decided) = (self.share(node, &part.1), self.decided);
        let version = self.routing.version;
        let peer = self.peers.entry(node).or_default();
        Self::count_behind(peer, &places, &part.0);
        peer.told = decided;
        peer.ask(Awaited::Entry { lsn, version }, |number| Message::Prepare {
            number,
            lsn,
            decided,
            places,
            transaction: Arc::clone(&part.0),
        });
    }

    /// A backup has staged an entry, or one of its messages.
    pub(super) fn staged_by(&mut self, node: NodeId, lsn: u64) {
        let Ok(at) = self.pending.binary_search_by_key(&lsn, |entry| entry.lsn) else {
            return;
        };
        let waiting = &mut self.pending[at].waiting;
        for (waited, missing) in waiting.iter_mut() {
            if *waited == node {
                *missing = missing.saturating_sub(1);
            }
        }
        waiting.retain(|(_, missing)| *missing > 0);
    }

    /// Decide every entry that waits for no node, in order, and tell the backups.
    pub(super) fn decide(&mut self) {
        let queue = self.me;
        while let Some(entry) = self.next_decided() {
            self.decided = entry.lsn;
            self.counters.committed += 1;
            let mut places = entry.parts.iter().flat_map(|(_, places)| places);
            let alone = places.any(|place| self.is_alone(place.run.slot));
            let work = self.work.entry(queue).or_default();
            for (transaction, places) in entry.parts {
                work.push_back(Work::Commit {
                    transaction,
                    places,
                    token: entry.token,
                });
            }
            if !entry.recovers.is_empty() {
                work.push_back(Work::Recovered { lsn: entry.lsn });
            }
            if let Some(token) = entry.token {
                work.push_back(Work::Answer {
                    token,
                    outcome: Ok(entry.report),
                    alone,
                });
            }
        }
        // The next prepare carries the decision. If none is under way, it goes in a Commit.
        let decided = self.decided;
        for peer in self.peers.values_mut() {
            if peer.up && peer.told < decided && peer.in_flight.is_empty() {
                peer.told = decided;
                peer.to_backup.push_back(Message::Commit { decided });
            }
        }
    }

    fn next_decided(&mut self) -> Option<Entry> {
        if self.pending.front()?.waiting.is_empty() {
            return self.pending.pop_front();
        }
        None
    }

    /// Undo the pushes from `lsn` on: no replica has applied them.
    pub(super) fn roll_back(&mut self, rows: &impl Rows, lsn: u64, why: &Refusal) {
        let (kept, undone): (Vec<Entry>, Vec<Entry>) = std::mem::take(&mut self.pending)
            .into_iter()
            .partition(|entry| entry.lsn < lsn || !entry.recovers.is_empty());
        self.pending = kept.into();
        let lsns: Vec<u64> = undone.iter().map(|entry| entry.lsn).collect();
        for entry in undone.into_iter().rev() {
            self.counters.rolled_back += 1;
            for (_, places) in &entry.parts {
                for place in places {
                    // If a slot has another master now, that one undoes the push there.
                    if self.slots[place.run.slot as usize].role.is_own_order() {
                        rows.discard_from(place.run.slot, place.position);
                    }
                }
            }
            if let Some(token) = entry.token {
                let first = lsns.first() == Some(&entry.lsn);
                let outcome = Err(match why {
                    why @ Refusal::RolledBack(_) => why.clone(),
                    why if first => why.clone(),
                    _ => Refusal::RolledBack("one before it was refused by a backup".into()),
                });
                let work = self.work.entry(self.me).or_default();
                work.push_back(Work::Answer {
                    token,
                    outcome,
                    alone: false,
                });
            }
        }
        // Also to nodes that are not counted on any longer: with the next decision, what they
        // hold would seem decided to them.
        for peer in self.peers.values_mut().filter(|peer| peer.up) {
            let lsns = lsns.clone();
            peer.to_backup.push_back(Message::Rollback { lsns });
        }
    }

    /// A backup refused an entry.
    pub(super) fn refused_entry(
        &mut self,
        now: Micros,
        rows: &impl Rows,
        node: NodeId,
        (number, lsn, version): (u64, u64, u64),
        reason: &Refuse,
    ) {
        let Ok(at) = self.pending.binary_search_by_key(&lsn, |entry| entry.lsn) else {
            match lsn {
                // It refused the Recover that began a connection.
                0 if *reason == Refuse::Gap => self.distrust(node),
                0 => {
                    self.peers
                        .entry(node)
                        .or_default()
                        .recovery_refused(lsn, version);
                    self.recover_refused(now, rows);
                }
                // The push was undone here, hence the gap there.
                lsn if lsn > self.decided => {}
                // The entry was decided without that node, which lacks it now.
                _ => self.copy_again(now, node, number, reason),
            }
            return;
        };
        let waited = self.pending[at].waiting.iter().any(|(one, _)| *one == node);
        let is_push = self.pending[at].recovers.is_empty();
        if waited && matches!(reason, Refuse::Rows(Refusal::MemoryLimit(_))) {
            self.counters.refused_for_room += 1;
        }
        if waited && !is_push && *reason == Refuse::OldTerm {
            // Its table is newer than the one by which this was sent.
            self.peers
                .entry(node)
                .or_default()
                .recovery_refused(lsn, version);
            self.recover_refused(now, rows);
            return;
        }
        // What recovery found cannot be rolled back, so a node that refuses it has to go.
        if waited && (*reason == Refuse::Gap || !is_push) {
            self.distrust(node);
        }
        let why = match reason {
            Refuse::OldTerm => Refusal::RolledBack("this node is no longer the master".into()),
            Refuse::Gap | Refuse::NoCopy => Refusal::RolledBack(format!(
                "backup {} has fallen behind",
                self.routing.name(node)
            )),
            Refuse::Rows(refusal) if refusal.is_for_room() && !self.may_be_kept(at, node) => {
                refusal.clone()
            }
            Refuse::Rows(refusal) => Refusal::RolledBack(format!(
                "backup {} refused: {refusal}",
                self.routing.name(node)
            )),
        };
        if waited && is_push {
            self.roll_back(rows, lsn, &why);
        }
        if !waited || *reason == Refuse::NoCopy {
            self.copy_again(now, node, number, reason);
        }
    }

    /// Whether a backup may keep the push of an entry that `refusing` has refused, if it becomes
    /// master before the Rollback arrives: another one has to stage it too, or `refusing` has
    /// staged it on an earlier connection. A client may be told that nothing was applied only if not.
    fn may_be_kept(&self, at: usize, refusing: NodeId) -> bool {
        let entry = &self.pending[at];
        let others = |place: &StagedRun| {
            let required = self.slots[place.run.slot as usize].required();
            required.iter().any(|&node| node != refusing)
        };
        let mut places = entry.parts.iter().flat_map(|(_, places)| places);
        entry.sent_again || places.any(others)
    }

    /// Doubt a backup in all slots: the controller is to take it out, and copies to it begin anew.
    fn distrust(&mut self, node: NodeId) {
        let peer = self.peers.entry(node).or_default();
        peer.fallen_behind = true;
        for copy in peer.copies.values_mut() {
            if !copy.is_required() {
                *copy = super::peer::Copy::Wanted;
            }
        }
        self.recount();
    }

    /// These slots have another master now: what was not decided is undone here, and the new
    /// master finds out by itself what it holds of it.
    pub(super) fn give_up(&mut self, rows: &impl Rows, lost: &[u32]) {
        if lost.is_empty() {
            return;
        }
        let is_lost = |slot: &u32| lost.binary_search(slot).is_ok();
        let touches = |entry: &&Entry| {
            let mut places = entry.parts.iter().flat_map(|(_, places)| places);
            entry.recovers.is_empty() && places.any(|place| is_lost(&place.run.slot))
        };
        if let Some(entry) = self.pending.iter().find(touches) {
            let why = Refusal::RolledBack("a slot of it was given to another master".into());
            self.roll_back(rows, entry.lsn, &why);
        }
        for entry in &mut self.pending {
            entry.recovers.retain(|slot| !is_lost(slot));
            for (_, places) in &mut entry.parts {
                places.retain(|place| !is_lost(&place.run.slot));
            }
            entry.parts.retain(|(_, places)| !places.is_empty());
        }
        self.pending
            .retain(|entry| !entry.parts.is_empty() || !entry.recovers.is_empty());
        for recovering in &mut self.recovering {
            recovering.slots.retain(|slot| !is_lost(slot));
        }
        self.recovering
            .retain(|recovering| !recovering.slots.is_empty());
        // Later decisions of this node must not apply what backups have staged in these slots.
        for peer in self.peers.values_mut().filter(|peer| peer.up) {
            let slots = lost.to_vec();
            peer.to_backup.push_back(Message::Forget { slots });
        }
    }

    /// Stop waiting for nodes that the routing has taken out.
    pub(super) fn release_waiting(&mut self) {
        let mut pending = std::mem::take(&mut self.pending);
        for entry in &mut pending {
            let slots = &self.slots;
            let needs = |node: NodeId, slot: u32| slots[slot as usize].required().contains(&node);
            let places = entry.parts.iter().flat_map(|(_, places)| places);
            let touched: Vec<u32> = places.map(|place| place.run.slot).collect();
            entry.waiting.retain(|(node, _)| {
                let mut all = touched.iter().chain(&entry.recovers);
                all.any(|&slot| needs(*node, slot))
            });
        }
        self.pending = pending;
    }

    /// Gained slots: keep everything that is staged (it may have been acknowledged), bring the
    /// in-sync backups to the same order, then commit it (invariant I6).
    pub(super) fn recover(&mut self, now: Micros, rows: &impl Rows, slots: Vec<u32>) {
        self.counters.promotions += 1;
        self.last_lsn += 1;
        let lsn = self.last_lsn;
        let mut parts: Vec<Part> = Vec::new();
        let mut round = 0;
        // Round by round, so that each slot's order is kept and slots with the same push in the
        // same place share a message.
        let staged: Vec<_> = slots.iter().map(|&slot| rows.staged(slot)).collect();
        loop {
            let first = parts.len();
            for (&slot, staged) in slots.iter().zip(&staged) {
                let Some(one) = staged.get(round) else {
                    continue;
                };
                let place = StagedRun {
                    term: self.slots[slot as usize].term,
                    position: rows.position(slot).0 + 1 + round as u64,
                    run: one.run,
                };
                let known = parts[first..]
                    .iter_mut()
                    .find(|(known, _)| Arc::ptr_eq(known, &one.transaction));
                match known {
                    Some((_, places)) => places.push(place),
                    None => parts.push((Arc::clone(&one.transaction), vec![place])),
                }
            }
            if parts.len() == first {
                break;
            }
            round += 1;
        }
        for &slot in &slots {
            rows.retag(slot, lsn);
        }
        self.recovering.push(Recovering {
            lsn,
            slots: slots.clone(),
            version: self.routing.version,
            done: false,
        });
        let mut backups: Vec<NodeId> = Vec::new();
        for &slot in &slots {
            backups.extend(self.slots[slot as usize].required());
        }
        backups.sort_unstable();
        backups.dedup();
        self.pending.push_back(Entry {
            lsn,
            parts,
            recovers: slots,
            // `send_entry` sets the number of answers; until then one is missing.
            waiting: backups.iter().map(|&node| (node, 1)).collect(),
            token: None,
            report: StageReport::default(),
            since: now,
            sent_again: false,
        });
        for node in backups {
            if self.peers.get(&node).is_some_and(|peer| peer.up) {
                self.send_entry(rows, node, self.pending.len() - 1);
            }
        }
    }

    /// Begin anew on a connection: fix the order of every slot the node backs up, then send what
    /// is not decided.
    pub(super) fn resume(&mut self, rows: &impl Rows, node: NodeId) {
        self.recover_backup(rows, node);
        for at in 0..self.pending.len() {
            self.send_entry(rows, node, at);
        }
    }

    fn recover_backup(&mut self, rows: &impl Rows, node: NodeId) {
        let slots: Vec<u32> = (0..self.slots.len() as u32)
            .filter(|&slot| self.slots[slot as usize].required().contains(&node))
            .collect();
        let peer = self.peers.entry(node).or_default();
        peer.recovery_refused_by = None;
        if !slots.is_empty() {
            self.send_recover(rows, node, 0, &slots);
        }
    }

    /// Send Recover again to nodes that refused it because they go by a newer routing table, when
    /// this node has a newer one, too. Otherwise what is decided would stay staged there until the
    /// next push, and slots that were gained would never be served.
    pub(super) fn recover_refused(&mut self, now: Micros, rows: &impl Rows) {
        let version = self.routing.version;
        let due = |peer: &Peer| peer.up && peer.recovery_refused_by.is_some_and(|by| by < version);
        let nodes = self.peers.iter().filter(|(_, peer)| due(peer));
        let nodes: Vec<NodeId> = nodes.map(|(&node, _)| node).collect();
        for node in nodes {
            self.recover_backup(rows, node);
            for at in 0..self.pending.len() {
                let entry = &self.pending[at];
                let waits = entry.waiting.iter().any(|(waited, _)| *waited == node);
                let asked = self
                    .peers
                    .get(&node)
                    .is_some_and(|peer| peer.is_asked(entry.lsn));
                if waits && !asked {
                    // The node gets the entry only now.
                    self.pending[at].since = now;
                    self.send_entry(rows, node, at);
                }
            }
        }
    }

    /// Send an entry of the order to a node, if it holds any of its slots, and wait for it.
    fn send_entry(&mut self, rows: &impl Rows, node: NodeId, at: usize) {
        for place in self.pending[at]
            .parts
            .iter_mut()
            .flat_map(|(_, places)| places)
        {
            place.term = self.slots[place.run.slot as usize].term;
        }
        let entry = &self.pending[at];
        let required = |slot: &&u32| self.slots[**slot as usize].required().contains(&node);
        let recovers: Vec<u32> = entry.recovers.iter().filter(required).copied().collect();
        let (lsn, parts) = (entry.lsn, entry.parts.clone());
        let mut missing = 0;
        if !recovers.is_empty() {
            self.send_recover(rows, node, lsn, &recovers);
            missing += 1;
        }
        let mut waits = missing > 0;
        for part in &parts {
            let share = self.share(node, &part.1);
            if !share.is_empty() {
                self.send_prepare(node, lsn, part);
                missing += 1;
                waits |= share.iter().any(|place| {
                    self.slots[place.run.slot as usize]
                        .required()
                        .contains(&node)
                });
            }
        }
        let entry = &mut self.pending[at];
        entry.sent_again = true;
        entry.waiting.retain(|(waited, _)| *waited != node);
        if waits {
            entry.waiting.push((node, missing));
        }
    }

    fn send_recover(&mut self, rows: &impl Rows, node: NodeId, lsn: u64, slots: &[u32]) {
        let version = self.routing.version;
        let order = |&slot: &u32| SlotOrder {
            slot,
            term: self.slots[slot as usize].term,
            epoch: self.slots[slot as usize].epoch,
            version,
            decided: self.decided_position(rows, slot),
            end: rows.position(slot).1,
        };
        let slots = slots.iter().map(order).collect();
        let peer = self.peers.entry(node).or_default();
        peer.ask(Awaited::Entry { lsn, version }, |number| Message::Recover {
            number,
            lsn,
            slots,
        });
    }

    /// How far a slot's order is decided. It may be further than it is applied, while decided
    /// transactions wait in the apply queue.
    pub(super) fn decided_position(&self, rows: &impl Rows, slot: u32) -> u64 {
        let (position, _) = rows.position(slot);
        let staged = rows.staged(slot);
        let decided = staged.iter().take_while(|one| one.tag <= self.decided);
        position + decided.count() as u64
    }
}
