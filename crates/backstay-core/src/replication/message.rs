//! What nodes say to each other. How it is laid out as bytes: [`crate::wire::peer`].

use std::sync::Arc;

use super::Micros;
use crate::engine::SlotMemory;
use crate::error::Refusal;
use crate::table::PlainRows;
use crate::transaction::{StagedRun, Transaction};

/// How far the order of a slot goes, as its master says to a backup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotOrder {
    /// The slot.
    pub slot: u32,
    /// Its term.
    pub term: u64,
    /// The routing version that the master goes by.
    pub version: u64,
    /// When its content began; another one at the backup is forgotten.
    pub epoch: u64,
    /// Everything up to here is decided: apply it.
    pub decided: u64,
    /// The order goes up to here, the undecided end of it follows: drop what is staged behind.
    /// What is staged in between must stay until it is sent again, or a backup that is in sync
    /// would lack what was acknowledged.
    pub end: u64,
}

/// Messages that ask for an answer carry a number, per connection and from 1; answers name it.
#[derive(Debug, Clone)]
pub enum Message {
    /// Master: I am here; give me a read lease. It and its answer have a connection of their own:
    /// they must not wait behind pushes and copies.
    Heartbeat {
        /// On the master's clock; comes back in the answer.
        sent_at: Micros,
        /// The routing version the master goes by.
        version: u64,
    },
    /// Master: stage this. Answered.
    Prepare {
        /// Number on this connection.
        number: u64,
        /// Number in the master's order.
        lsn: u64,
        /// Everything prepared up to here is decided.
        decided: u64,
        /// The slots the receiver holds, with their places.
        places: Vec<StagedRun>,
        /// The push.
        transaction: Arc<Transaction>,
    },
    /// Master: everything prepared up to here is decided, apply it.
    Commit {
        /// Number in the master's order.
        decided: u64,
    },
    /// Master: drop these.
    Rollback {
        /// Numbers in the master's order.
        lsns: Vec<u64>,
    },
    /// Master: these slots are not mine any more. What I have prepared in them and not undone is
    /// decided by their new master.
    Forget {
        /// The slots.
        slots: Vec<u32>,
    },
    /// Master, after a promotion or a new connection: this is how far your slots are. Answered.
    Recover {
        /// Number on this connection.
        number: u64,
        /// Number in the master's order.
        lsn: u64,
        /// The slots.
        slots: Vec<SlotOrder>,
    },
    /// Master: a copy of a slot begins; forget what you have of it.
    CopyBegin {
        /// Which, and its term and epoch.
        slot: SlotOrder,
    },
    /// Master: rows of the copy. Other messages may come between two of these. Answered by
    /// [`Self::CopyTaken`].
    CopyRows {
        /// The slot.
        slot: u32,
        /// The table.
        table: u64,
        /// Some of its rows.
        rows: PlainRows,
    },
    /// Master: the copy is whole. Answered.
    CopyEnd {
        /// Number on this connection.
        number: u64,
        /// The slot, as in the beginning.
        slot: SlotOrder,
        /// Its order and its streams.
        memory: SlotMemory,
    },
    /// Backup: the oldest rows of a copy that were not answered are taken in, more may come.
    CopyTaken {
        /// The slot.
        slot: u32,
        /// Whether rows of this copy could not be taken in: its end will be refused.
        failed: bool,
    },
    /// Backup: for some time from now I will not be a master of anything you hold by the
    /// routing version that I name.
    ReadLease {
        /// From the heartbeat.
        sent_at: Micros,
        /// The routing version the backup goes by.
        version: u64,
    },
    /// Backup: done.
    Accepted {
        /// Of the message.
        number: u64,
    },
    /// Backup: not done.
    Refused {
        /// Of the message.
        number: u64,
        /// Why.
        reason: Refuse,
    },
}

/// Why a backup does not stage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refuse {
    /// It has seen a newer term of the slot: the sender is not master any longer.
    OldTerm,
    /// It lacks what comes before: it must be copied anew.
    Gap,
    /// The same in a slot that is only being copied to it: nothing else of the node is in doubt.
    NoCopy,
    /// It cannot take the rows.
    Rows(Refusal),
}
