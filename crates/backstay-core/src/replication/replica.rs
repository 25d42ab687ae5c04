//! One node's part in replication: its state, and what happens when the routing, the time or a
//! connection changes.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use super::message::{Message, Refuse};
use super::pace::Pace;
use super::peer::{Awaited, Copy, Peer};
use super::routing::RoutingTable;
use super::rows::Rows;
use super::state::{
    Entry, Load, Master, Recovering, ReplicaCounters, ReplicaOptions, Report, Role, Slot, Way, Work,
};
use super::{Micros, NodeId};
use crate::engine::ServingState;
use crate::error::Refusal;

/// One node's part in the replication of all slots; the other types call a slot's content on one
/// node a replica.
#[derive(Debug, Clone)]
pub struct Replica {
    pub(super) me: NodeId,
    pub(super) options: ReplicaOptions,
    pub(super) routing: Arc<RoutingTable>,
    pub(super) slots: Vec<Slot>,
    pub(super) peers: BTreeMap<NodeId, Peer>,
    pub(super) pending: VecDeque<Entry>,
    pub(super) recovering: Vec<Recovering>,
    pub(super) last_lsn: u64,
    /// Every entry up to this lsn is decided.
    pub(super) decided: u64,
    /// The node's own lease in the coordination store.
    pub(super) lease_until: Micros,
    /// Nodes that commits of some slot wait for.
    pub(super) required: BTreeSet<NodeId>,
    /// The required nodes, and the nodes that catch up.
    pub(super) backups: BTreeSet<NodeId>,
    /// Whether any slot has no backup to wait for.
    pub(super) solo: bool,
    /// Whether any slot is to be copied to another node.
    pub(super) copying: bool,
    /// Slots that were loaded from a checkpoint, each with its epoch.
    pub(super) loaded: BTreeSet<(u32, u64)>,
    /// The slots of the last report, and when to report anew.
    pub(super) told_loaded: (BTreeSet<(u32, u64)>, Micros),
    /// How much may be copied now.
    pub(super) pace: Pace,
    pub(super) work: BTreeMap<NodeId, VecDeque<Work>>,
    pub(super) next_heartbeat: Micros,
    /// When [`Replica::tick`] was last called.
    pub(super) ticked_at: Micros,
    report: (u64, Report),
    /// What has been done so far.
    pub counters: ReplicaCounters,
}

impl Replica {
    /// A node that holds nothing yet.
    pub fn new(me: NodeId, slots: u32, options: ReplicaOptions) -> Self {
        Self {
            me,
            options,
            routing: Arc::new(RoutingTable::alone(0, slots, 0)),
            slots: vec![Slot::default(); slots as usize],
            peers: BTreeMap::new(),
            pending: VecDeque::new(),
            recovering: Vec::new(),
            last_lsn: 0,
            decided: 0,
            lease_until: 0,
            required: BTreeSet::new(),
            backups: BTreeSet::new(),
            solo: false,
            copying: false,
            loaded: BTreeSet::new(),
            told_loaded: (BTreeSet::new(), 0),
            pace: Pace::new(options.copy_bytes_per_s),
            work: BTreeMap::new(),
            next_heartbeat: 0,
            ticked_at: 0,
            report: (0, Report::default()),
            counters: ReplicaCounters::default(),
        }
    }

    /// This node's process.
    pub fn me(&self) -> NodeId {
        self.me
    }

    /// The routing it goes by.
    pub fn routing(&self) -> &Arc<RoutingTable> {
        &self.routing
    }

    /// Go by a newer routing table. An older one changes nothing.
    pub fn set_routing(&mut self, now: Micros, rows: &impl Rows, table: Arc<RoutingTable>) {
        if table.version <= self.routing.version || table.slots() != self.routing.slots() {
            return;
        }
        let lost = |slot: &u32| {
            let (slot, known) = (*slot, &self.slots[*slot as usize]);
            let goes_on = table.replicas(slot).master == self.me
                && table.epoch(slot) == known.epoch
                && known.is_next_term(table.term(slot));
            known.role.is_master() && !goes_on
        };
        let lost: Vec<u32> = (0..table.slots()).filter(lost).collect();
        for &slot in &lost {
            rows.set_serving_state(slot, ServingState::Elsewhere);
        }
        self.give_up(rows, &lost);
        let skipped = table.version > self.routing.version + 1;
        self.routing = table;
        rows.set_version(self.routing.version);
        let mut gained = Vec::new();
        for slot in 0..self.routing.slots() {
            if self.follow(rows, slot) {
                gained.push(slot);
            }
        }
        let current = |&(slot, epoch): &(u32, u64)| self.slots[slot as usize].epoch == epoch;
        self.loaded.retain(current);
        self.drop_unknown_copies(skipped);
        self.forget_departed(now);
        self.recount();
        self.release_waiting();
        if !gained.is_empty() {
            self.recover(now, rows, gained);
        }
        self.recover_refused(now, rows);
        // The new master of a slot that was this node's waits to hear that this node knows it.
        for node in self.wanted_links() {
            self.heartbeat(now, node);
        }
        self.copy_next(now, rows);
        self.decide();
        self.serve_recovered(now, rows);
        self.refresh_report(now);
    }

    /// Take over what the routing says of one slot. Returns whether this node is its new master.
    fn follow(&mut self, rows: &impl Rows, number: u32) -> bool {
        let (term, epoch) = (self.routing.term(number), self.routing.epoch(number));
        let set = self.routing.replicas(number);
        let (me, slot) = (self.me, &mut self.slots[number as usize]);
        if self.routing.version < slot.seen_version {
            // The slot's master goes by a newer table already.
            return false;
        }
        let was_master = slot.role.is_master() && slot.is_next_term(term);
        let is_master = set.master == me;
        let holds = is_master || set.in_sync.contains(&me) || set.catching_up.contains(&me);
        let fresh = holds && slot.epoch != epoch;
        if fresh || (!holds && slot.epoch != 0) {
            // Copies of what it held are copies of nothing now.
            forget_copies(&mut self.peers, number);
            rows.clear_slot(number);
            *slot = Slot {
                epoch: if holds { epoch } else { 0 },
                fence: slot.fence,
                seen_version: slot.seen_version,
                ..Slot::default()
            };
        }
        if fresh {
            // Also where it is no master: origins are compared on every replica.
            rows.set_epoch(number, epoch);
            // The slot begins empty here, as at its master. If it has no master, it got one and
            // lost it in tables that this node has not seen.
            slot.role = match set.master {
                _ if !set.in_sync.contains(&me) => Role::Outside,
                0 => Role::Former,
                master => Role::Backup {
                    master,
                    recovered: false,
                },
            };
        }
        slot.term = term;
        slot.fence = slot.fence.max(term);
        if is_master {
            rows.set_epoch(number, epoch);
            return self.lead(rows, number, fresh, was_master);
        }
        match slot.role {
            Role::Master(_) => slot.role = Role::Former,
            Role::Unfit => slot.role = Role::Outside,
            Role::Outside | Role::Former | Role::Backup { .. } | Role::Copied { .. } => {}
        }
        false
    }

    /// The routing makes this node master of a slot, or leaves it master. Returns whether to
    /// recover the slot. `fresh`: the slot's content begins now.
    fn lead(&mut self, rows: &impl Rows, number: u32, fresh: bool, was_master: bool) -> bool {
        let slot = &mut self.slots[number as usize];
        let load = slot.load();
        if self.routing.is_restoring(number) {
            let load = match load {
                Load::NotAsked => Load::Awaited,
                known => known,
            };
            slot.role = Role::Master(Master {
                load,
                ..Master::default()
            });
            rows.set_serving_state(number, ServingState::Waiting);
            return false;
        }
        if was_master && !fresh && load == Load::NotAsked {
            return false;
        }
        rows.set_serving_state(number, ServingState::Waiting);
        let lacks_rows = matches!(slot.role, Role::Outside | Role::Unfit | Role::Copied { .. });
        if load == Load::Awaited || !fresh && lacks_rows {
            // The controller must never do this, because the rows here may lack acknowledged
            // pushes. Rows of half a copy, or half loaded, are of no use.
            self.counters.unfit_promotions += 1;
            rows.clear_slot(number);
            slot.role = Role::Unfit;
            return false;
        }
        slot.role = Role::Master(Master::default());
        // Copies that it began when it was master before belong to another order.
        forget_copies(&mut self.peers, number);
        true
    }

    /// Find out anew which nodes commits wait for, and which get copies.
    pub(super) fn recount(&mut self) {
        self.required.clear();
        self.backups.clear();
        self.solo = false;
        self.copying = false;
        for (number, slot) in (0..).zip(&mut self.slots) {
            let Role::Master(master) = &mut slot.role else {
                continue;
            };
            let set = self.routing.replicas(number);
            master.required.clone_from(&set.in_sync);
            master.extra.clear();
            for &node in &set.catching_up {
                let copies = self.peers.get(&node).map(|peer| &peer.copies);
                match copies.and_then(|copies| copies.get(&number)) {
                    Some(copy) if copy.is_required() => master.required.push(node),
                    Some(Copy::UnderWay { .. }) => master.extra.push(node),
                    _ => {}
                }
            }
            self.required.extend(&master.required);
            self.backups.extend(&master.required);
            self.backups.extend(&set.catching_up);
            self.solo |= master.required.is_empty();
            self.copying |= !set.catching_up.is_empty();
        }
        for node in &self.required {
            self.peers.entry(*node).or_default();
        }
        let required = &self.required;
        for (node, peer) in &mut self.peers {
            peer.fallen_behind &= required.contains(node);
        }
    }

    /// Time passes.
    pub fn tick(&mut self, now: Micros, rows: &impl Rows) {
        if now >= self.next_heartbeat {
            self.next_heartbeat = now + self.options.heartbeat;
            for node in self.wanted_links() {
                self.heartbeat(now, node);
            }
        }
        self.look_for_silence(now, rows);
        for node in &self.backups {
            let peer = self.peers.entry(*node).or_default();
            if peer.heard_at + self.options.read_lease_counted() <= now {
                peer.trouble_since.get_or_insert(now);
            }
        }
        self.pace.fill(now);
        for peer in self.peers.values_mut() {
            peer.rests_until = peer.rests_until.filter(|&until| until > now);
            peer.full_until = peer.full_until.filter(|&until| until > now);
        }
        self.decide();
        self.serve_recovered(now, rows);
        self.copy_next(now, rows);
        self.refresh_report(now);
    }

    /// Report silent nodes, and roll back what waits for them. A slow node, or a node behind a slow
    /// link, still answers something: what waits for it goes on waiting.
    fn look_for_silence(&mut self, now: Micros, rows: &impl Rows) {
        let limit = self.options.prepare_timeout;
        let stood_still = now.saturating_sub(self.ticked_at) > limit / 2;
        self.ticked_at = now;
        for peer in self.peers.values_mut() {
            if stood_still {
                // What came meanwhile is not read yet.
                peer.heard_at = now;
            }
            if stood_still || !peer.owes_answers() {
                peer.answered_at = now;
            }
        }
        let is_silent = |node: &NodeId, since: Micros| {
            let silent =
                |peer: &Peer| since.max(peer.heard_at) + limit <= now || peer.is_stuck(limit, now);
            self.peers.get(node).is_none_or(silent)
        };
        let late = |entry: &Entry, node: &NodeId| {
            entry.since + limit <= now && is_silent(node, entry.since)
        };
        let mut silent = BTreeSet::new();
        let mut stuck = None;
        for entry in &self.pending {
            for (node, _) in &entry.waiting {
                if late(entry, node) {
                    silent.insert(*node);
                    if entry.recovers.is_empty() && stuck.is_none() {
                        stuck = Some((entry.lsn, *node));
                    }
                }
            }
        }
        for (node, peer) in &self.peers {
            if peer.is_stuck(limit, now) {
                silent.insert(*node);
            }
        }
        for node in silent {
            let peer = self.peers.entry(node).or_default();
            peer.trouble_since.get_or_insert(now.saturating_sub(limit));
        }
        if let Some((lsn, node)) = stuck {
            let name = self.routing.name(node);
            let reason = format!("backup {name} did not answer in time");
            self.roll_back(rows, lsn, &Refusal::RolledBack(reason));
        }
    }

    /// A message came: from a backup on the connection that this node opened, or from a master
    /// on its own.
    pub fn receive(&mut self, now: Micros, rows: &impl Rows, from: NodeId, message: Message) {
        let answers = matches!(
            message,
            Message::ReadLease { .. }
                | Message::Accepted { .. }
                | Message::Refused { .. }
                | Message::CopyTaken { .. }
        );
        if answers {
            self.peers.entry(from).or_default().heard_at = now;
        }
        match message {
            Message::Heartbeat { sent_at, version } => {
                self.grant_read_lease(now, from, sent_at, version);
                self.serve_recovered(now, rows);
            }
            Message::Prepare {
                number,
                lsn,
                decided,
                places,
                transaction,
            } => {
                self.prepare(rows, from, number, lsn, places, transaction);
                self.apply_decided(from, decided);
            }
            Message::Commit { decided } => self.apply_decided(from, decided),
            Message::Rollback { lsns } => self.discard(rows, from, &lsns),
            Message::Forget { slots } => self.forget(from, &slots),
            Message::Recover { number, slots, .. } => self.obey(rows, from, number, &slots),
            Message::CopyBegin { slot } => self.begin_copy(rows, from, slot),
            Message::CopyRows {
                slot,
                table,
                rows: some,
            } => {
                self.add_copied(rows, from, slot, table, &some);
            }
            Message::CopyEnd {
                number,
                slot,
                memory,
            } => self.end_copy(rows, from, number, slot, &memory),
            Message::CopyTaken { failed, .. } => self.copy_taken(now, rows, from, failed),
            Message::ReadLease { sent_at, version } => {
                self.read_lease_granted(now, from, sent_at, version);
            }
            Message::Accepted { number } => self.accepted(now, rows, from, number),
            Message::Refused { number, reason } => self.refused(now, rows, from, number, &reason),
        }
    }

    /// A backup has done what it was asked.
    fn accepted(&mut self, now: Micros, rows: &impl Rows, from: NodeId, number: u64) {
        let peer = self.peers.entry(from).or_default();
        peer.answered_at = now;
        match peer.answered(number) {
            Some(Awaited::Entry { lsn, .. }) => self.staged_by(from, lsn),
            Some(Awaited::Copy(slot)) => self.installed(from, slot),
            Some(Awaited::Nothing) => {}
            None => return,
        }
        self.check_caught_up(now, from);
        self.copy_next(now, rows);
        self.decide();
    }

    fn refused(
        &mut self,
        now: Micros,
        rows: &impl Rows,
        from: NodeId,
        number: u64,
        reason: &Refuse,
    ) {
        let peer = self.peers.entry(from).or_default();
        peer.answered_at = now;
        match peer.answered(number) {
            Some(Awaited::Entry { lsn, version }) => {
                self.refused_entry(now, rows, from, (number, lsn, version), reason);
            }
            Some(Awaited::Nothing) => {}
            Some(Awaited::Copy(slot)) => {
                peer.copies.insert(slot, Copy::Wanted);
                peer.rest(now + self.options.prepare_timeout, now, reason);
                self.recount();
            }
            None => return,
        }
        // It may have been the last answer that a copy waited for.
        self.check_caught_up(now, from);
        self.decide();
        self.refresh_report(now);
    }

    /// Messages to send, in order.
    pub fn take_messages(&mut self, node: NodeId, way: Way) -> VecDeque<Message> {
        let Some(peer) = self.peers.get_mut(&node) else {
            return VecDeque::new();
        };
        match way {
            Way::ToBackup => std::mem::take(&mut peer.to_backup),
            Way::Heartbeats => std::mem::take(&mut peer.heartbeats),
            Way::ToMaster => std::mem::take(&mut peer.to_master),
        }
    }

    /// Nodes with messages to send.
    pub fn with_messages(&self) -> impl Iterator<Item = (NodeId, Way)> + '_ {
        let pairs = self.peers.iter().flat_map(|(&node, peer)| {
            [
                (!peer.to_backup.is_empty()).then_some((node, Way::ToBackup)),
                (!peer.heartbeats.is_empty()).then_some((node, Way::Heartbeats)),
                (!peer.to_master.is_empty()).then_some((node, Way::ToMaster)),
            ]
        });
        pairs.flatten()
    }

    /// The next piece of work of an apply queue. The queues are independent of each other; the
    /// work of one queue is to be done in order, one piece at a time.
    pub fn next_work(&mut self, queue: NodeId) -> Option<Work> {
        self.work.get_mut(&queue)?.pop_front()
    }

    /// The apply queues with work.
    pub fn apply_queues(&self) -> Vec<NodeId> {
        let busy = self.work.iter().filter(|(_, work)| !work.is_empty());
        busy.map(|(&queue, _)| queue).collect()
    }

    /// What this node wants of the controller, with a number that grows when it changes.
    pub fn report(&self) -> (u64, &Report) {
        (self.report.0, &self.report.1)
    }

    pub(super) fn refresh_report(&mut self, now: Micros) {
        let mut report = Report {
            routing_version: self.routing.version,
            ..Report::default()
        };
        let limit = self.options.prepare_timeout;
        for (&node, peer) in &self.peers {
            let silent = peer.trouble_since.is_some_and(|since| since + limit <= now);
            if silent || peer.fallen_behind {
                report.silent.insert(node);
            }
            if peer.full_until.is_some() {
                report.full.insert(node);
            }
            if peer.refused {
                report.refused.insert(node);
            }
            for (&slot, &copy) in &peer.copies {
                if let (Copy::CaughtUp { term }, false) = (copy, peer.fallen_behind) {
                    report.caught_up.insert((slot, term, node));
                }
            }
        }
        if !self.loaded.is_empty() {
            report.loaded = self.loaded_to_tell(now);
        }
        if report != self.report.1 {
            self.report = (self.report.0 + 1, report);
        }
    }

    /// A slot's term, whose order it follows here (0: none yet), and whether a copy of it
    /// is under way to this node.
    pub fn slot_state(&self, slot: u32) -> (u64, NodeId, bool) {
        let state = &self.slots[slot as usize];
        let source = match state.role {
            Role::Outside | Role::Unfit => 0,
            Role::Master(_) | Role::Former => self.me,
            Role::Backup { master, .. } | Role::Copied { master, .. } => master,
        };
        (state.term, source, state.role.is_copied())
    }

    /// Whether a copy of a slot is under way to this node.
    pub fn is_copied_here(&self, slot: u32) -> bool {
        let state = self.slots.get(slot as usize);
        state.is_some_and(|state| state.role.is_copied())
    }

    /// The number of the newest entry of this master's order.
    pub fn last_lsn(&self) -> u64 {
        self.last_lsn
    }

    /// Whether this node recovers slots that it does not serve yet.
    pub fn is_recovering(&self) -> bool {
        !self.recovering.is_empty()
    }

    /// The epoch of the content that this node has of a slot; 0 if it has none.
    pub fn epoch(&self, slot: u32) -> u64 {
        self.slots[slot as usize].epoch
    }

    /// Bytes of copies that are on their way to other nodes.
    pub fn copy_bytes(&self) -> u64 {
        self.peers
            .values()
            .map(|peer| peer.credit.on_the_way())
            .sum()
    }

    /// Transactions that wait for backups.
    pub fn pending(&self) -> usize {
        self.pending.len()
    }
}

fn forget_copies(peers: &mut BTreeMap<NodeId, Peer>, slot: u32) {
    for peer in peers.values_mut() {
        peer.copies.remove(&slot);
    }
}
