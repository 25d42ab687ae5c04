//! Bringing a replica in: a copy of each slot, then everything staged since, then in sync.
//!
//! The copy of a slot and what follows it travel in order on one connection. Once the copy is
//! there, nothing commits without that node; once it has answered everything that was sent
//! before that moment, it lacks nothing, and the controller is asked to take it in.

use super::message::{Message, Refuse, SettledSlot};
use super::peer::{Awaited, Copy};
use super::replica::Replica;
use super::rows::Rows;
use super::{Micros, NodeId};
use crate::engine::{SlotMemory, Standing};
use crate::table::PlainRows;

/// Bytes of rows in one message of a copy.
const COPY_BYTES: usize = 4 << 20;

impl Replica {
    /// Copies of slots that are not this node's any more, or to nodes that left.
    ///
    /// `skipped`: this node has not seen every routing table. In one of those in between, a
    /// node may have left a slot and dropped its copy: all copies begin anew.
    pub(super) fn drop_unknown_copies(&mut self, skipped: bool) {
        let (me, routing) = (self.me, std::sync::Arc::clone(&self.routing));
        for (&node, peer) in &mut self.peers {
            peer.copies.retain(|&slot, copy| {
                let set = routing.replicas(slot);
                // With a new table, a request by an older one counts no more: one that holds
                // is asked again, one in doubt begins anew.
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
        }
    }

    /// A node refused something that came behind a copy and that nobody waited for: its copies
    /// that are not complete yet may lack it. They begin anew.
    pub(super) fn copy_again(&mut self, node: NodeId) {
        let peer = self.peers.entry(node).or_default();
        for copy in peer.copies.values_mut() {
            if matches!(copy, Copy::Sent | Copy::Installed { .. }) {
                *copy = Copy::Wanted;
            }
        }
        self.recount();
    }

    /// Begin copies of slots that are wanted, a few at a time.
    pub(super) fn copy_next(&mut self, rows: &impl Rows) {
        if !self.copying {
            return;
        }
        let mut wanted: Vec<(NodeId, u32)> = Vec::new();
        for slot in 0..self.routing.slots() {
            let set = self.routing.replicas(slot);
            if set.master == self.me && !set.catching_up.is_empty() {
                wanted.extend(set.catching_up.iter().map(|&node| (node, slot)));
            }
        }
        for (node, slot) in wanted {
            let peer = self.peers.entry(node).or_default();
            let under_way = peer.copies.values().filter(|copy| **copy == Copy::Sent);
            let wanted = matches!(peer.copies.get(&slot), None | Some(Copy::Wanted));
            if self.pace.is_spent() {
                return;
            }
            let ready = peer.up && peer.rests_until.is_none();
            if ready && wanted && under_way.count() < self.options.copies_at_once {
                self.copy(rows, node, slot);
            }
        }
    }

    fn copy(&mut self, rows: &impl Rows, node: NodeId, number: u32) {
        if rows.standing(number) != Standing::Serving {
            return;
        }
        let copy = rows.copy_slot(number);
        let slot = &mut self.slots[number as usize];
        let head = SettledSlot {
            slot: number,
            term: slot.term,
            version: self.routing.version,
            birth: slot.birth,
            decided: copy.memory.position,
            end: copy.memory.position + copy.staged.len() as u64,
        };
        slot.extra.push(node);
        let peer = self.peers.entry(node).or_default();
        peer.copies.insert(number, Copy::Sent);
        peer.to_backup.push_back(Message::CopyBegin { slot: head });
        for (table, rows) in copy.tables {
            self.pace.spend(bytes_of(&rows));
            for rows in pieces(rows) {
                peer.to_backup.push_back(Message::CopyRows {
                    slot: number,
                    table,
                    rows,
                });
            }
        }
        let first = copy.memory.position + 1;
        peer.ask(Awaited::Copy(number), |asked| Message::CopyEnd {
            number: asked,
            slot: head,
            memory: copy.memory,
        });
        for (position, staged) in (first..).zip(copy.staged) {
            let place = crate::transaction::StagedRun {
                term: head.term,
                position,
                run: staged.run,
            };
            self.send_prepare(node, staged.tag, &(staged.transaction, vec![place]));
        }
        self.counters.slots_copied += 1;
    }

    /// A copy is there.
    pub(super) fn installed(&mut self, node: NodeId, slot: u32) {
        let peer = self.peers.entry(node).or_default();
        let after = peer.last_number;
        if peer.copies.get(&slot) == Some(&Copy::Sent) {
            peer.copies.insert(slot, Copy::Installed { after });
            self.recount();
        }
    }

    /// Ask the controller for what lacks nothing any more.
    pub(super) fn check_caught_up(&mut self, now: Micros, node: NodeId) {
        let peer = self.peers.entry(node).or_default();
        let oldest = peer.oldest_unanswered();
        let mut changed = false;
        for (&slot, copy) in &mut peer.copies {
            if let Copy::Installed { after } = *copy {
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
    pub(super) fn begin_copy(&mut self, rows: &impl Rows, from: NodeId, head: SettledSlot) {
        let number = head.slot as usize;
        if number >= self.slots.len() || self.check_term(&head).is_err() {
            return;
        }
        self.follow_master(rows, from, head);
        rows.clear_slot(head.slot);
        // Its master may have undone some of it meanwhile and tells only those that it counts on;
        // what is still under way comes again behind the copy.
        self.forget_prepared(head.slot);
        self.slots[number].torn = true;
        self.slots[number].copy_failed = None;
    }

    pub(super) fn add_copied(
        &mut self,
        rows: &impl Rows,
        from: NodeId,
        slot: u32,
        table: u64,
        some: &PlainRows,
    ) {
        let Some(known) = self.slots.get_mut(slot as usize) else {
            return;
        };
        if known.source == from && known.torn && known.copy_failed.is_none() {
            // The end of the copy finds out, and is refused.
            known.copy_failed = rows.add_rows(slot, table, some).err();
        }
    }

    pub(super) fn end_copy(
        &mut self,
        rows: &impl Rows,
        from: NodeId,
        number: u64,
        head: SettledSlot,
        memory: &SlotMemory,
    ) {
        let slot = self.slots.get_mut(head.slot as usize);
        let outcome = match slot {
            Some(slot) if slot.source == from && slot.torn => match slot.copy_failed.take() {
                None => {
                    rows.set_memory(head.slot, memory);
                    slot.torn = false;
                    slot.settled = true;
                    self.counters.slots_installed += 1;
                    Ok(())
                }
                Some(refusal) => {
                    // What came of it is of no use, and takes room.
                    rows.clear_slot(head.slot);
                    Err(Refuse::Rows(refusal))
                }
            },
            _ => Err(Refuse::Gap),
        };
        self.answer(from, number, outcome);
    }
}

fn bytes_of((keys, weights, state): &PlainRows) -> u64 {
    (8 * keys.len() + 4 * (weights.len() + state.len())) as u64
}

/// Cut rows into messages of bounded size.
fn pieces((keys, weights, state): PlainRows) -> Vec<PlainRows> {
    if keys.is_empty() {
        return Vec::new();
    }
    let (wide, deep) = (weights.len() / keys.len(), state.len() / keys.len());
    let most = (COPY_BYTES / (8 + 4 * (wide + deep))).max(1);
    let piece = |(n, keys): (usize, &[u64])| {
        let (from, to) = (n * most, n * most + keys.len());
        (
            keys.to_vec(),
            weights[from * wide..to * wide].to_vec(),
            state[from * deep..to * deep].to_vec(),
        )
    };
    keys.chunks(most).enumerate().map(piece).collect()
}
