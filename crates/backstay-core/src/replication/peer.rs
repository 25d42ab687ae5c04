//! What a node knows of another one, and what is under way between them.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use super::credit::Credit;
use super::message::{Message, Refuse, SlotOrder};
use super::Micros;
use crate::engine::SlotCopy;
use crate::transaction::{StagedRun, Transaction};

/// How long a node that had no room for a copy counts as full.
const FULL_FOR: Micros = 60_000_000;

/// A node that gives read leases but owes answers on the ordered connection counts as silent, too,
/// after so many times `prepare_timeout`.
const STUCK_FACTOR: Micros = 10;

/// A copy that goes to a node.
#[derive(Debug, Clone)]
pub(super) struct CopyOut {
    pub(super) head: SlotOrder,
    /// The number of this copy: an answer about an earlier copy of the slot is not about this one.
    pub(super) number: u64,
    pub(super) copy: SlotCopy,
    pub(super) bytes_sent: u64,
    /// Bytes of pushes that have gone out since the copy began, and touch its slot.
    pub(super) bytes_behind: u64,
}

impl CopyOut {
    /// Which slot's.
    pub(super) fn slot(&self) -> u32 {
        self.head.slot
    }
}

/// A transaction, or a part of it, in its places.
pub(super) type Part = (Arc<Transaction>, Vec<StagedRun>);

/// What an answer of a backup is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Awaited {
    /// An entry of the master's order; lsn 0: the Recover that begins a connection.
    Entry {
        /// Its number.
        lsn: u64,
        /// The routing version by which it was sent.
        version: u64,
    },
    /// A message that will be sent anew, so its answer does not matter.
    Nothing,
    /// The copy of a slot.
    Copy(u32),
}

/// How far the copy of a slot to a node has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Copy {
    /// Not begun.
    Wanted,
    /// Begun; what is staged from now on goes there, too.
    UnderWay {
        /// Number of the last message sent before.
        begun: u64,
    },
    /// The node has accepted `CopyEnd`, and nothing commits without it. When it has answered every
    /// message up to `after`, it has all that was committed.
    Installed {
        /// Number of the last message sent before the copy began.
        begun: u64,
        /// Number of the last message sent before the node accepted `CopyEnd`.
        after: u64,
    },
    /// The report asks the controller to add it to the in-sync set. Nothing commits without it
    /// until a newer routing table has decided.
    CaughtUp {
        /// The slot's term when it was asked.
        term: u64,
    },
    /// The same, but the connection broke. The report is withdrawn, but the controller may have
    /// read it.
    InDoubt {
        /// The slot's term when it was asked.
        term: u64,
    },
}

impl Copy {
    /// Whether commits wait for the node.
    pub(super) fn is_required(self) -> bool {
        !matches!(self, Self::Wanted | Self::UnderWay { .. })
    }
}

#[derive(Debug, Clone, Default)]
pub(super) struct Peer {
    // This node as the master.
    /// Whether there is a connection to it.
    pub(super) up: bool,
    /// Its port refused a connection: the process is probably gone.
    pub(super) refused: bool,
    /// Number of the last message that asked for an answer.
    pub(super) last_number: u64,
    /// The messages without an answer, in order.
    pub(super) in_flight: VecDeque<(u64, Awaited)>,
    /// To be sent on the connection to it.
    pub(super) to_backup: VecDeque<Message>,
    /// To be sent on the connection for heartbeats.
    pub(super) heartbeats: VecDeque<Message>,
    /// When something was last heard of it.
    pub(super) heard_at: Micros,
    /// When it last answered a message of the ordered connection, or had none to answer.
    pub(super) answered_at: Micros,
    /// The copies that go to it, one after the other.
    pub(super) sending: VecDeque<CopyOut>,
    /// How many bytes of copies may be on the way.
    pub(super) credit: Credit,
    /// The newest decision it was told of.
    pub(super) told: u64,
    /// Until when its read lease counts, on this node's clock.
    pub(super) read_lease_until: Micros,
    /// Since when it has not answered as it should.
    pub(super) trouble_since: Option<Micros>,
    /// It has a gap, so only a copy helps.
    pub(super) fallen_behind: bool,
    /// It refused a copy, or rows behind one. It gets no new copy until then, so that it is not
    /// offered the same one again and again.
    pub(super) rests_until: Option<Micros>,
    /// It refused them because it had no room. Until then it counts as full.
    pub(super) full_until: Option<Micros>,
    /// Slots that are being copied to it.
    pub(super) copies: BTreeMap<u32, Copy>,

    /// The routing version of a Recover that it refused because it goes by a newer one.
    pub(super) recovery_refused_by: Option<u64>,

    // This node as the backup.
    /// To be sent on the connection from it.
    pub(super) to_master: VecDeque<Message>,
    /// What it has prepared here, by its numbers.
    pub(super) prepared: BTreeMap<u64, Vec<Part>>,
    /// Until when it has read leases of this node, by the routing version that this node went by
    /// when it gave them.
    pub(super) read_leases_given: BTreeMap<u64, Micros>,
    /// The newest routing version it is known to go by.
    pub(super) its_version: u64,
}

impl Peer {
    /// Send a message that asks for an answer.
    pub(super) fn ask(&mut self, awaited: Awaited, message: impl FnOnce(u64) -> Message) {
        self.last_number += 1;
        self.in_flight.push_back((self.last_number, awaited));
        self.to_backup.push_back(message(self.last_number));
    }

    /// The connection to it is new, and nothing is under way on it.
    pub(super) fn reset_way_there(&mut self) {
        self.last_number = 0;
        self.in_flight.clear();
        self.to_backup.clear();
        self.heartbeats.clear();
        self.sending.clear();
        self.credit = Credit::default();
        self.told = 0;
        self.recovery_refused_by = None;
    }

    /// A slot's copy begins, or begins anew: what was sent of an earlier one does not count.
    pub(super) fn forget_copy(&mut self, slot: u32) {
        self.sending.retain(|one| one.slot() != slot);
        for (_, awaited) in &mut self.in_flight {
            if *awaited == Awaited::Copy(slot) {
                *awaited = Awaited::Nothing;
            }
        }
    }

    /// It refused a copy, or rows behind one: it gets no new one before `until`.
    pub(super) fn rest(&mut self, until: Micros, now: Micros, reason: &Refuse) {
        self.rests_until = Some(until);
        if matches!(reason, Refuse::Rows(refusal) if refusal.is_for_room()) {
            self.full_until = Some(now + FULL_FOR);
        }
    }

    /// Whether it has to answer something on the ordered connection.
    pub(super) fn owes_answers(&self) -> bool {
        !self.in_flight.is_empty() || self.credit.is_awaited()
    }

    /// Whether it answers nothing on the ordered connection, even if it gives read leases.
    pub(super) fn is_stuck(&self, silent_after: Micros, now: Micros) -> bool {
        self.owes_answers() && self.answered_at + STUCK_FACTOR * silent_after <= now
    }

    /// It refused something of an entry that recovers slots, sent by this routing version: what
    /// was sent of it does not count.
    pub(super) fn recovery_refused(&mut self, lsn: u64, version: u64) {
        for (_, awaited) in &mut self.in_flight {
            if matches!(awaited, Awaited::Entry { lsn: asked, .. } if *asked == lsn) {
                *awaited = Awaited::Nothing;
            }
        }
        self.recovery_refused_by = self.recovery_refused_by.max(Some(version));
    }

    /// Whether something of an entry is under way to it.
    pub(super) fn is_asked(&self, lsn: u64) -> bool {
        let mut asked = self.in_flight.iter();
        asked.any(|(_, awaited)| matches!(awaited, Awaited::Entry { lsn: one, .. } if *one == lsn))
    }

    /// The answer to a message: what it was about, if it is the next one that is awaited.
    pub(super) fn answered(&mut self, number: u64) -> Option<Awaited> {
        let &(next, awaited) = self.in_flight.front()?;
        if next != number {
            return None;
        }
        self.in_flight.pop_front();
        Some(awaited)
    }

    /// The number of the oldest message without an answer, or the next one's.
    pub(super) fn oldest_unanswered(&self) -> u64 {
        let oldest = self.in_flight.front().map(|&(number, _)| number);
        oldest.unwrap_or(self.last_number + 1)
    }
}
