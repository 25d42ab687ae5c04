//! Bringing a replica in: a copy of each slot, then everything staged since, then in sync.
//!
//! A copy is of one instant. `CopyBegin` stands in the order of messages at that instant. What was
//! staged by then comes in the copy or right behind `CopyBegin`; what is staged later comes later.
//! Rows and `CopyEnd` follow between other messages, when there is room for them
//! ([`super::credit`]). The receiver keeps prepares of that slot aside until `CopyEnd`. When the
//! copy is there, nothing commits without that node. When the node has answered everything that
//! was sent before that moment, it lacks nothing, and the master asks the controller to add it.

use super::message::{Message, Refuse, SlotOrder};
use super::peer::{Awaited, Copy, CopyOut, Peer};
use super::replica::Replica;
use super::rows::Rows;
use super::state::{CopyIn, Role, Work};
use super::{Micros, NodeId};
use crate::engine::{CopyPiece, ServingState, SlotMemory};
use crate::error::Refusal;
use crate::table::PlainRows;
use crate::transaction::{StagedRun, Transaction};

/// Rows of a copy that take longer than this part of the time a push may take are slow.
const SLOW_DIVISOR: Micros = 8;
/// A copy's receiver keeps what is pushed meanwhile: as many bytes as came of the copy, and this
/// many more. Further pushes have to wait for the copy.
const BEHIND_BYTES: u64 = 64 << 20;

impl Replica {
    /// Drop copies of slots that are not this node's any longer, and copies to nodes that left.
    ///
    /// `skipped`: this node has not seen every routing table. In one in between, a
    /// node may have left a slot and dropped its copy: all copies begin anew.
    pub(super) fn drop_unknown_copies(&mut self, skipped: bool) {
        let (me, routing) = (self.me, std::sync::Arc::clone(&self.routing));
        for (&node, peer) in &mut self.peers {
            peer.copies.retain(|&slot, copy| {
                let set = routing.replicas(slot);
                // With a new table, a request by an older one does not count: the node
                // of a whole copy is asked for again, a copy in doubt begins anew.
                let over = match copy {
                    Copy::CaughtUp { term } => {
                        *term = routing.term(slot);
                        false
                    }
                    Copy::InDoubt { .. } => true,
                    _ => false,
                };
                set.master == me && set.catching_up.contains(&node) && !over && !skipped
            });
            // Each keeps old rows, so drop it when its copy is not under way any longer.
            let copies = &peer.copies;
            let sending = &mut peer.sending;
            sending.retain(|one| matches!(copies.get(&one.slot()), Some(Copy::UnderWay { .. })));
        }
    }

    /// A node refused message `number` of a push that no commit waited for. Copies that were under
    /// way by then and are not complete yet may lack it, so they begin anew. If the node had no
    /// room for the rows, they wait, because it would refuse them again.
    pub(super) fn copy_again(&mut self, now: Micros, node: NodeId, number: u64, reason: &Refuse) {
        let peer = self.peers.entry(node).or_default();
        if matches!(reason, Refuse::Rows(_)) {
            peer.rest(now + self.options.prepare_timeout, now, reason);
        }
        for copy in peer.copies.values_mut() {
            // A copy that began later has what the message brought.
            if let Copy::UnderWay { begun } | Copy::Installed { begun, .. } = *copy {
                if begun < number {
                    *copy = Copy::Wanted;
                }
            }
        }
        self.recount();
        self.release_waiting();
    }

    /// Begin copies of slots that are wanted, a few at a time.
    pub(super) fn copy_next(&mut self, now: Micros, rows: &impl Rows) {
        if !self.copying {
            return;
        }
        self.send_copies(now, rows);
        let mut wanted: Vec<(NodeId, u32)> = Vec::new();
        for slot in 0..self.routing.slots() {
            let set = self.routing.replicas(slot);
            if set.master == self.me && !set.catching_up.is_empty() {
                wanted.extend(set.catching_up.iter().map(|&node| (node, slot)));
            }
        }
        for (node, slot) in wanted {
            let peer = self.peers.entry(node).or_default();
            let under_way = peer.copies.values();
            let under_way = under_way.filter(|copy| matches!(copy, Copy::UnderWay { .. }));
            let wanted = matches!(peer.copies.get(&slot), None | Some(Copy::Wanted));
            if self.pace.is_spent() {
                return;
            }
            // A row that changes before it is sent is in memory twice. So a large copy goes alone.
            let left = |out: &CopyOut| out.copy.rows.bytes_left();
            let waiting: u64 = peer.sending.iter().map(left).sum();
            let ready = peer.up && peer.rests_until.is_none();
            let ready = ready && waiting < self.options.copy_window_bytes;
            if ready && wanted && under_way.count() < self.options.copies_at_once {
                self.copy(now, rows, node, slot);
            }
        }
    }

    fn copy(&mut self, now: Micros, rows: &impl Rows, node: NodeId, number: u32) {
        if rows.serving_state(number) != ServingState::Serving {
            return;
        }
        let copy = rows.begin_copy(number);
        let slot = &mut self.slots[number as usize];
        let Role::Master(master) = &mut slot.role else {
            return;
        };
        master.extra.push(node);
        let head = SlotOrder {
            slot: number,
            term: slot.term,
            version: self.routing.version,
            epoch: slot.epoch,
            decided: copy.memory.position,
            end: copy.memory.position + copy.staged.len() as u64,
        };
        let mut copy = copy;
        let staged = std::mem::take(&mut copy.staged);
        let peer = self.peers.entry(node).or_default();
        let begun = peer.last_number;
        peer.copies.insert(number, Copy::UnderWay { begun });
        peer.forget_copy(number);
        peer.to_backup.push_back(Message::CopyBegin { slot: head });
        peer.sending.push_back(CopyOut {
            head,
            number: self.counters.slots_copied,
            copy,
            bytes_sent: 0,
            bytes_behind: 0,
        });
        for (position, staged) in (head.decided + 1..).zip(staged) {
            let place = StagedRun {
                term: head.term,
                position,
                run: staged.run,
            };
            self.send_prepare(node, staged.tag, &(staged.transaction, vec![place]));
        }
        self.send_copies(now, rows);
        self.counters.slots_copied += 1;
    }

    /// Send as much of the copies under way as there is room for.
    pub(super) fn send_copies(&mut self, now: Micros, rows: &impl Rows) {
        let (piece, window) = (
            self.options.copy_piece_bytes,
            self.options.copy_window_bytes,
        );
        let mut gone = false;
        for peer in self.peers.values_mut().filter(|peer| peer.up) {
            while let Some(mut out) = peer.sending.pop_front() {
                let slot = out.head.slot;
                if !matches!(peer.copies.get(&slot), Some(Copy::UnderWay { .. })) {
                    continue; // Given up, or to begin anew.
                }
                if !peer.credit.has_room(window) || self.pace.is_spent() {
                    peer.sending.push_front(out);
                    break;
                }
                match rows.read_copy(slot, &mut out.copy.rows, piece) {
                    CopyPiece::Rows(table, rows) => {
                        let bytes = bytes_of(&rows);
                        out.bytes_sent += bytes;
                        peer.credit.spend(now, bytes, out.number);
                        self.pace.spend(bytes);
                        peer.to_backup
                            .push_back(Message::CopyRows { slot, table, rows });
                        peer.sending.push_front(out);
                    }
                    CopyPiece::End => {
                        let (slot, memory) = (out.head, out.copy.memory);
                        peer.ask(Awaited::Copy(slot.slot), |number| Message::CopyEnd {
                            number,
                            slot,
                            memory,
                        });
                    }
                    CopyPiece::Gone => {
                        peer.copies.insert(slot, Copy::Wanted);
                        gone = true;
                    }
                }
            }
        }
        if gone {
            self.recount();
        }
    }

    /// A node has taken in rows of a copy, or refused them.
    pub(super) fn copy_taken(&mut self, now: Micros, rows: &impl Rows, from: NodeId, failed: bool) {
        let smallest = self.options.copy_window_bytes;
        let slow = self.options.prepare_timeout / SLOW_DIVISOR;
        let peer = self.peers.entry(from).or_default();
        let Some(number) = peer.credit.confirm(now, slow, smallest) else {
            return;
        };
        peer.answered_at = now;
        if failed {
            // The rest would be of no use. CopyEnd goes out at once, and the node refuses it.
            let outs = peer.sending.iter_mut();
            for out in outs.filter(|out| out.number == number) {
                out.copy.rows.stop();
            }
        }
        let few = peer.sending.len() < 2;
        self.send_copies(now, rows);
        if few {
            self.copy_next(now, rows);
        }
    }

    /// A push goes to a node: count its bytes behind the copies of the same slots.
    pub(super) fn count_behind(peer: &mut Peer, places: &[StagedRun], transaction: &Transaction) {
        if peer.sending.is_empty() {
            return;
        }
        let (batch, runs) = (&transaction.batch, places.iter().map(|place| place.run));
        let elements = batch.values().len().checked_div(batch.keys().len());
        let row_bytes = 8 + 4 * elements.unwrap_or(0) as u64;
        let keys: u64 = runs.clone().map(|run| u64::from(run.end - run.start)).sum();
        // The node keeps the whole push as long as one of its slots needs it.
        let bytes = keys * row_bytes;
        for out in &mut peer.sending {
            if runs.clone().any(|run| run.slot == out.head.slot) {
                out.bytes_behind += bytes;
            }
        }
    }

    /// Whether a slot gets more pushes than its copy to a node can follow.
    pub(super) fn is_outrun(&self, node: NodeId, slot: u32) -> bool {
        let sending = self.peers.get(&node).map(|peer| peer.sending.iter());
        let mut outs = sending.into_iter().flatten();
        outs.any(|out| {
            out.head.slot == slot && out.bytes_behind > out.bytes_sent.saturating_add(BEHIND_BYTES)
        })
    }

    /// A node has accepted `CopyEnd`.
    pub(super) fn installed(&mut self, node: NodeId, slot: u32) {
        let peer = self.peers.entry(node).or_default();
        let after = peer.last_number;
        if let Some(&Copy::UnderWay { begun }) = peer.copies.get(&slot) {
            let there = Copy::Installed { begun, after };
            peer.copies.insert(slot, there);
            self.recount();
        }
    }

    /// Report copies that lack nothing any longer, so that the controller adds their nodes.
    pub(super) fn check_caught_up(&mut self, now: Micros, node: NodeId) {
        let peer = self.peers.entry(node).or_default();
        let oldest = peer.oldest_unanswered();
        let mut changed = false;
        for (&slot, copy) in &mut peer.copies {
            if let Copy::Installed { after, .. } = *copy {
                if oldest > after {
                    let term = self.slots[slot as usize].term;
                    *copy = Copy::CaughtUp { term };
                    changed = true;
                }
            }
        }
        if changed {
            self.refresh_report(now);
        }
    }

    /// A master begins to copy a slot here.
    pub(super) fn begin_copy(&mut self, rows: &impl Rows, from: NodeId, head: SlotOrder) {
        let number = head.slot as usize;
        if number >= self.slots.len() {
            return;
        }
        if self.check_term(&head).is_err() {
            // Rows of this copy must not be added to rows of the copy before.
            if let Some(copy) = self.slots[number].role.copy_from(from) {
                let why = "the copy began under an old term";
                copy.failed = Some(Refusal::NotReady(why.into()));
            }
            return;
        }
        // This node has left the slot by a table that its master does not have yet.
        if self.slots[number].epoch == 0 && self.routing.version > head.version {
            return;
        }
        self.follow_master(rows, from, head);
        rows.clear_slot(head.slot);
        // Its master may have undone some of it meanwhile, and tells only the nodes that it counts
        // on; what is still under way comes again behind the copy.
        self.forget_prepared(head.slot);
        self.slots[number].role = Role::Copied {
            master: from,
            copy: CopyIn {
                position: head.decided,
                ..CopyIn::default()
            },
        };
    }

    pub(super) fn add_copied(
        &mut self,
        rows: &impl Rows,
        from: NodeId,
        slot: u32,
        table: u64,
        some: &PlainRows,
    ) {
        let known = self.slots.get_mut(slot as usize);
        let copy = known.and_then(|known| known.role.copy_from(from));
        let failed = copy.is_none_or(|copy| {
            if copy.failed.is_none() {
                copy.failed = rows.add_rows(slot, table, some).err();
            }
            copy.failed.is_some()
        });
        // Confirm it even if the copy was not taken in: its master counts what is on the way.
        let peer = self.peers.entry(from).or_default();
        peer.to_master
            .push_back(Message::CopyTaken { slot, failed });
    }

    pub(super) fn end_copy(
        &mut self,
        rows: &impl Rows,
        from: NodeId,
        number: u64,
        head: SlotOrder,
        memory: &SlotMemory,
    ) {
        let known = self.slots.get_mut(head.slot as usize);
        let copy = known.and_then(|known| known.role.copy_from(from));
        let whole = copy.ok_or(Refuse::Gap).and_then(|copy| {
            let came = std::mem::take(copy);
            let checked = match &came.failed {
                Some(refusal) => Err(refusal.clone()),
                None => rows
                    .check_memory(head.slot, memory)
                    .and_then(|()| rows.check_behind(head.slot, came.keys())),
            };
            checked.map(|()| came).map_err(|refusal| {
                // The rows that came are of no use, and take room.
                rows.clear_slot(head.slot);
                copy.failed = Some(refusal.clone());
                Refuse::Rows(refusal)
            })
        });
        let outcome = whole.map(|came| {
            rows.set_memory(head.slot, memory);
            self.install(rows, from, head.slot, came);
        });
        self.answer(from, number, outcome);
    }

    /// A copy is whole: what was prepared meanwhile follows, and what was decided is applied.
    fn install(&mut self, rows: &impl Rows, from: NodeId, slot: u32, copy: CopyIn) {
        self.slots[slot as usize].role = Role::Backup {
            master: from,
            recovered: true,
        };
        self.counters.slots_installed += 1;
        let work = self.work.entry(from).or_default();
        for (transaction, place) in copy.parts {
            let missing = rows.stage(&transaction, &[place], 0);
            debug_assert!(missing.is_none(), "the positions follow one another");
            if place.position <= copy.decided {
                work.push_back(Work::Commit {
                    transaction,
                    places: vec![place],
                    token: None,
                });
            }
        }
    }
}

fn bytes_of((keys, weights, state): &PlainRows) -> u64 {
    (8 * keys.len() + 4 * (weights.len() + state.len())) as u64
}

#[cfg(test)]
// What fails in a helper is a failed test.
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::{LocalRows, ReplicaOptions, RoutingTable, Way};
    use super::*;
    use crate::engine::Engine;
    use crate::hash::{table_id, SlotSpace};
    use crate::spec::TableSpec;
    use crate::stream::{StreamId, TransactionId};
    use crate::transaction::{Batch, Change};
    use std::sync::Arc;

    const MASTER: NodeId = 1;
    const OTHER: NodeId = 2;

    /// One slot, of which `MASTER` is the master and `OTHER` may hold a replica to come.
    fn table(version: u64, catching_up: bool) -> Arc<RoutingTable> {
        let catching_up = if catching_up { "[1]" } else { "[]" };
        table_of(version, 1, "[]", catching_up)
    }

    fn table_of(version: u64, term: u64, in_sync: &str, catching_up: &str) -> Arc<RoutingTable> {
        let text = format!(
            r#"{{"format":2,"version":{version},"slot_count":1,"gone":[],"nodes":[
               {{"node_id":"n1","instance":1,"data_address":""}},
               {{"node_id":"n2","instance":2,"data_address":""}}],
               "sets":[[0,{in_sync},{catching_up}]],"set_of_slot":[0],"term_of_slot":[{term}],"epoch_of_slot":[1]}}"#
        );
        Arc::new(RoutingTable::from_json(&text, 1).unwrap())
    }

    fn rows() -> LocalRows {
        let json = r#"{"name":"t","kind":{"sparse":{"dim":1}},"initializer":{"zeros":{}},"optimizer":{"sgd":{"learning_rate":1.0}}}"#;
        let mut engine = Engine::new(SlotSpace::new(1).unwrap(), 0..1);
        let spec = Arc::new(TableSpec::from_json(json).unwrap());
        engine.create_table(&spec).unwrap();
        LocalRows(engine.into())
    }

    /// A master that sends a row at a time, in the middle of a copy of its ten rows.
    fn master_in_a_copy() -> (Replica, LocalRows) {
        let options = ReplicaOptions {
            copy_piece_bytes: 1,
            copy_window_bytes: 1,
            ..ReplicaOptions::default()
        };
        let (mut master, rows) = (Replica::new(MASTER, 1, options), rows());
        master.set_lease(u64::MAX);
        master.set_routing(1, &rows, table(1, true));
        while let Some(work) = master.next_work(MASTER) {
            if let Work::Recovered { lsn } = work {
                master.recovered(1, &rows, lsn);
            }
        }
        let ten = ((0..10).collect(), vec![1.0; 10], vec![]);
        rows.add_rows(0, table_id("t"), &ten).unwrap();
        master.link_up(1, &rows, OTHER);
        assert_eq!(master.peers[&OTHER].sending.len(), 1);
        (master, rows)
    }

    #[test]
    fn a_copy_that_is_given_up_leaves_memory_at_once() {
        let (mut master, rows) = master_in_a_copy();
        master.set_routing(2, &rows, table(2, false));
        assert!(master.peers[&OTHER].sending.is_empty());
    }

    #[test]
    fn a_node_that_has_left_a_slot_takes_no_copy_of_it() {
        let (mut master, _) = master_in_a_copy();
        let (mut other, rows) = (Replica::new(OTHER, 1, ReplicaOptions::default()), rows());
        other.set_routing(1, &rows, table(2, false));
        other.master_connected(MASTER);
        let messages = master.take_messages(OTHER, Way::ToBackup);
        assert!(messages
            .iter()
            .any(|one| matches!(one, Message::CopyRows { .. })));
        for message in messages {
            other.receive(2, &rows, MASTER, message);
        }
        assert_eq!((other.epoch(0), other.slot_state(0).2), (0, false));
        let held = rows.0.borrow().export_slot(table_id("t"), 0).unwrap();
        assert!(held.0.is_empty());
    }

    fn push() -> Arc<Transaction> {
        let stream = StreamId {
            job: 1,
            pass: 0,
            task: 0,
        };
        let id = TransactionId {
            stream,
            sequence: 0,
        };
        let change = Change::update(1.0);
        let (space, batch) = (SlotSpace::new(1).unwrap(), Batch::new(&[99], &[1.0]));
        Arc::new(Transaction::new(space, id, 0, table_id("t"), change, batch).unwrap())
    }

    #[test]
    fn a_node_without_room_for_a_push_behind_its_copy_rests_and_counts_as_full() {
        let (mut master, rows) = master_in_a_copy();
        master.push(2, &rows, 1, &push()).unwrap();
        let full = Refuse::Rows(Refusal::MemoryLimit("full".into()));
        let sent = master.take_messages(OTHER, Way::ToBackup);
        let prepare = sent.iter().find_map(|one| match one {
            Message::Prepare { number, .. } => Some(*number),
            _ => None,
        });
        let refused = Message::Refused {
            number: prepare.unwrap(),
            reason: full,
        };
        master.receive(3, &rows, OTHER, refused);
        assert!(master.report().1.full.contains(&OTHER));
        let copies = master.counters.slots_copied;
        let rests = master.options.prepare_timeout;
        master.tick(3 + rests - 1, &rows);
        assert_eq!(master.counters.slots_copied, copies);
        master.tick(3 + rests, &rows);
        assert_eq!(master.counters.slots_copied, copies + 1);
    }

    /// A node that takes messages of `MASTER`, by this table.
    fn receiver(table: Arc<RoutingTable>) -> (Replica, LocalRows) {
        let (mut other, rows) = (Replica::new(OTHER, 1, ReplicaOptions::default()), rows());
        other.set_routing(1, &rows, table);
        other.master_connected(MASTER);
        (other, rows)
    }

    fn head(term: u64, end: u64) -> SlotOrder {
        SlotOrder {
            slot: 0,
            term,
            version: 1,
            epoch: 1,
            decided: end,
            end,
        }
    }

    fn prepare(number: u64, term: u64, position: u64) -> Message {
        let mut stamped = Transaction::clone(&push());
        let sgd = crate::optimizer::Optimizer::Sgd(crate::optimizer::Sgd { learning_rate: 1.0 });
        stamped.optimizer = Some(sgd.stamp());
        let transaction = Arc::new(stamped);
        let run = transaction.runs()[0];
        let place = StagedRun {
            term,
            position,
            run,
        };
        Message::Prepare {
            number,
            lsn: number,
            decided: 0,
            places: vec![place],
            transaction,
        }
    }

    fn one_row(key: u64) -> Message {
        Message::CopyRows {
            slot: 0,
            table: table_id("t"),
            rows: (vec![key], vec![1.0], vec![]),
        }
    }

    /// What is answered to these, in order.
    fn answers(other: &mut Replica, rows: &LocalRows, messages: Vec<Message>) -> Vec<Message> {
        for message in messages {
            other.receive(2, rows, MASTER, message);
        }
        other.take_messages(MASTER, Way::ToMaster).into()
    }

    #[test]
    fn a_gap_behind_a_copy_doubts_that_copy_alone() {
        let (mut other, rows) = receiver(table(1, true));
        let begin = Message::CopyBegin { slot: head(1, 5) };
        // Position 6 was refused.
        let messages = vec![begin, prepare(1, 1, 7), one_row(1)];
        let answers = answers(&mut other, &rows, messages);
        assert!(
            matches!(
                answers[..],
                [
                    Message::Refused {
                        number: 1,
                        reason: Refuse::NoCopy
                    },
                    Message::CopyTaken { failed: false, .. }
                ]
            ),
            "{answers:?}"
        );
    }

    #[test]
    fn a_gap_behind_a_whole_copy_doubts_that_copy_alone() {
        let (mut other, rows) = receiver(table(1, true));
        let slot = head(1, 5);
        let memory = SlotMemory {
            position: 5,
            ..SlotMemory::default()
        };
        let end = Message::CopyEnd {
            number: 1,
            slot,
            memory,
        };
        let messages = vec![Message::CopyBegin { slot }, end, prepare(2, 1, 7)];
        let answers = answers(&mut other, &rows, messages);
        assert!(
            matches!(
                answers[..],
                [
                    Message::Accepted { number: 1 },
                    Message::Refused {
                        number: 2,
                        reason: Refuse::NoCopy
                    }
                ]
            ),
            "{answers:?}"
        );
    }

    /// A table whose rows have all gone comes with no row, but its updates count on.
    #[test]
    fn a_copy_that_counts_updates_of_an_unknown_table_is_refused() {
        let (mut other, rows) = receiver(table(1, true));
        let slot = head(1, 5);
        let end = |number: u64, counted: &str| Message::CopyEnd {
            number,
            slot,
            memory: SlotMemory {
                position: 5,
                updates: vec![(table_id(counted), 3)],
                ..SlotMemory::default()
            },
        };
        let messages = vec![Message::CopyBegin { slot }, end(1, "new")];
        let told = answers(&mut other, &rows, messages);
        let unknown = |reason: &Refuse| matches!(reason, Refuse::Rows(Refusal::UnknownTable(_)));
        assert!(
            matches!(&told[..], [Message::Refused { reason, .. }] if unknown(reason)),
            "{told:?}"
        );
        let told = answers(
            &mut other,
            &rows,
            vec![Message::CopyBegin { slot }, end(2, "t")],
        );
        assert!(matches!(told[..], [Message::Accepted { number: 2 }]));
        let updates = rows.0.borrow().memory(0).updates;
        assert_eq!(updates, [(table_id("t"), 3)]);
    }

    /// The copy is whole at the node, so pushes wait for it, also those that were sent before
    /// the master hears that an earlier one was refused.
    #[test]
    fn a_push_refused_behind_a_whole_copy_rolls_back_and_the_copy_begins_anew() {
        let (mut master, rows) = master_in_a_copy();
        let Some(Copy::UnderWay { begun }) = master.peers[&OTHER].copies.get(&0).copied() else {
            panic!("a copy is under way");
        };
        let peer = master.peers.get_mut(&OTHER).unwrap();
        let after = peer.last_number;
        peer.copies.insert(0, Copy::Installed { begun, after });
        master.recount();
        master.push(2, &rows, 1, &push()).unwrap();
        let number = master.peers[&OTHER].last_number;
        let reason = Refuse::NoCopy;
        master.receive(3, &rows, OTHER, Message::Refused { number, reason });
        let mut outcomes = Vec::new();
        while let Some(work) = master.next_work(MASTER) {
            if let Work::Answer { token, outcome, .. } = work {
                outcomes.push((token, outcome.map(|_| ())));
            }
        }
        assert!(
            matches!(outcomes[..], [(1, Err(Refusal::RolledBack(_)))]),
            "{outcomes:?}"
        );
        assert!(master.report().1.silent.is_empty());
        assert!(matches!(
            master.peers[&OTHER].copies[&0],
            Copy::Wanted | Copy::UnderWay { .. }
        ));
    }

    #[test]
    fn a_node_that_left_is_not_called_silent() {
        let (mut master, rows) = (Replica::new(MASTER, 1, ReplicaOptions::default()), rows());
        master.set_lease(u64::MAX);
        master.set_routing(1, &rows, table_of(1, 1, "[1]", "[]"));
        master.link_up(1, &rows, OTHER);
        master.peers.get_mut(&OTHER).unwrap().trouble_since = Some(1);
        let limit = master.options.prepare_timeout;
        master.refresh_report(1 + limit);
        assert!(master.report().1.silent.contains(&OTHER));
        let text = table_of(2, 2, "[]", "[]");
        let mut alone = RoutingTable::clone(&text);
        alone.members.retain(|member| member.instance != OTHER);
        master.set_routing(2 + limit, &rows, Arc::new(alone));
        assert!(master.peers.contains_key(&OTHER), "its connection is open");
        assert!(master.report().1.silent.is_empty());
    }

    #[test]
    fn a_copy_that_began_under_an_old_term_begins_anew_and_nothing_else_is_doubted() {
        let (mut other, rows) = receiver(table_of(2, 2, "[]", "[1]"));
        let table = Message::Heartbeat {
            sent_at: 1,
            version: 2,
        };
        let begin = Message::CopyBegin { slot: head(1, 5) };
        let messages = vec![table, begin, one_row(1), prepare(1, 2, 6)];
        let answers = answers(&mut other, &rows, messages);
        assert!(
            matches!(
                answers[..],
                [
                    Message::ReadLease { .. },
                    Message::CopyTaken { failed: true, .. },
                    Message::Refused {
                        number: 1,
                        reason: Refuse::NoCopy
                    }
                ]
            ),
            "{answers:?}"
        );
    }

    #[test]
    fn rows_of_a_refused_copy_are_not_added_to_those_of_the_one_before() {
        let (mut other, rows) = receiver(table(1, true));
        let begin = Message::CopyBegin { slot: head(1, 5) };
        answers(&mut other, &rows, vec![begin, one_row(1)]);
        other.set_routing(2, &rows, table_of(2, 2, "[]", "[1]"));
        let begin = Message::CopyBegin { slot: head(1, 6) };
        let answers = answers(&mut other, &rows, vec![begin, one_row(2)]);
        let taken = &answers[..];
        assert!(
            matches!(taken, [Message::CopyTaken { failed: true, .. }]),
            "{taken:?}"
        );
        let held = rows.0.borrow().export_slot(table_id("t"), 0).unwrap();
        assert_eq!(held.0, [1]);
    }

    #[test]
    fn a_copy_that_began_after_a_refused_push_goes_on() {
        let (mut master, rows) = master_in_a_copy();
        let Some(Copy::UnderWay { begun }) = master.peers[&OTHER].copies.get(&0).copied() else {
            panic!("a copy is under way");
        };
        let wanted = |master: &Replica| master.peers[&OTHER].copies[&0] == Copy::Wanted;
        master.copy_again(2, OTHER, begun, &Refuse::OldTerm);
        assert!(!wanted(&master));
        master.copy_again(2, OTHER, begun + 1, &Refuse::OldTerm);
        assert!(wanted(&master));
        drop(rows);
    }

    /// Another node may have been master in tables that this one has not seen: its backups hear
    /// anew how far the order goes.
    #[test]
    fn a_master_whose_term_rose_by_two_recovers_anew() {
        for (term, recovers) in [(2, false), (3, true)] {
            let (mut master, rows) = (Replica::new(MASTER, 1, ReplicaOptions::default()), rows());
            master.set_lease(u64::MAX);
            master.set_routing(1, &rows, table_of(1, 1, "[1]", "[]"));
            master.link_up(1, &rows, OTHER);
            master.take_messages(OTHER, Way::ToBackup);
            master.set_routing(2, &rows, table_of(3, term, "[1]", "[]"));
            let sent = master.take_messages(OTHER, Way::ToBackup);
            let said = sent
                .iter()
                .any(|one| matches!(one, Message::Recover { slots, .. } if slots[0].term == 3));
            assert_eq!(said, recovers, "term {term}: {sent:?}");
        }
    }

    /// What a takeover found cannot be rolled back: the master would never serve.
    #[test]
    fn a_backup_without_room_for_what_a_takeover_found_has_to_go() {
        let (mut master, rows) = (Replica::new(MASTER, 1, ReplicaOptions::default()), rows());
        master.set_lease(u64::MAX);
        master.set_routing(1, &rows, table_of(1, 1, "[1]", "[]"));
        master.link_up(1, &rows, OTHER);
        let sent = master.take_messages(OTHER, Way::ToBackup);
        let numbers = sent.iter().filter_map(|one| match one {
            Message::Recover { number, lsn, .. } => Some((*number, *lsn)),
            _ => None,
        });
        for (number, lsn) in numbers {
            let answer = match lsn {
                0 => Message::Accepted { number },
                _ => Message::Refused {
                    number,
                    reason: Refuse::Rows(Refusal::MemoryLimit("full".into())),
                },
            };
            master.receive(2, &rows, OTHER, answer);
        }
        assert!(master.report().1.silent.contains(&OTHER));
    }
}
