//! The values that make up a replica's state, and the values that it exchanges with its driver.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use super::peer::Part;
use super::{Micros, NodeId};
use crate::engine::StageReport;
use crate::error::Refusal;
use crate::transaction::{StagedRun, Transaction};

/// Times and limits of a replica.
#[derive(Debug, Clone, Copy)]
pub struct ReplicaOptions {
    /// How long a read lease lasts, in which its giver does not act as master.
    pub read_lease: Micros,
    /// How often a master asks for read leases.
    pub heartbeat: Micros,
    /// A backup that answers nothing for so long is silent: the master reports it, and rolls back
    /// what waits for it.
    pub prepare_timeout: Micros,
    /// Transactions under way at once.
    pub max_pending: usize,
    /// Slots that are copied to one node at once.
    pub copies_at_once: usize,
    /// Bytes of copies that go out in a second; pushes need room, too.
    pub copy_bytes_per_s: u64,
    /// Bytes of rows in one message of a copy.
    pub copy_piece_bytes: u64,
    /// Bytes of copies that may be on their way to a node, however slow the link. The window
    /// grows from there to [`super::credit::GROWTH`] times as much.
    pub copy_window_bytes: u64,
}

/// A read lease counts for this much less than it was given for: clocks drift.
const MARGIN_DIVISOR: Micros = 10;

impl ReplicaOptions {
    /// For how long a read lease counts.
    pub(super) fn read_lease_counted(&self) -> Micros {
        self.read_lease - self.read_lease / MARGIN_DIVISOR
    }
}

impl Default for ReplicaOptions {
    fn default() -> Self {
        Self {
            read_lease: 400_000,
            heartbeat: 100_000,
            prepare_timeout: 1_000_000,
            max_pending: 256,
            copies_at_once: 4,
            copy_bytes_per_s: u64::MAX,
            copy_piece_bytes: 64 << 10,
            copy_window_bytes: 256 << 10,
        }
    }
}

/// Names a push in its [`Work::Answer`]; the caller of [`Replica::push`] chooses it.
pub type Token = u64;

/// The connections between nodes, each opened by a master, and their directions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Way {
    /// On the connection to the node, which is a backup of this one.
    ToBackup,
    /// On the connection to that node which carries nothing but heartbeats and their answers.
    Heartbeats,
    /// On the connection from the node, which is a master to this one.
    ToMaster,
}

/// Work for the driver: in order within an apply queue, at any time.
#[derive(Debug, Clone)]
pub enum Work {
    /// Apply a transaction in its places.
    Commit {
        /// The transaction.
        transaction: Arc<Transaction>,
        /// Its places.
        places: Vec<StagedRun>,
        /// Of the answer that follows, if a client waits for it: it tells how many rows went.
        token: Option<Token>,
    },
    /// Tell a client how its push went.
    Answer {
        /// From [`Replica::push`].
        token: Token,
        /// The outcome, if [`Replica::acknowledge`] agrees.
        outcome: Result<StageReport, Refusal>,
        /// Whether one of its slots has no backup.
        alone: bool,
    },
    /// Call [`Replica::recovered`].
    Recovered {
        /// The lsn of the entry that recovered slots.
        lsn: u64,
    },
}

/// What a master wants of the controller. Level-triggered: it says what holds now.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Report {
    /// The routing version it refers to.
    pub routing_version: u64,
    /// Silent nodes that this one copies to, or should.
    pub silent: BTreeSet<NodeId>,
    /// Nodes that had no room for a copy a short time ago.
    pub full: BTreeSet<NodeId>,
    /// (slot, its term, node): the node has all that was committed, take it in.
    pub caught_up: BTreeSet<(u32, u64, NodeId)>,
    /// Nodes whose port refuses connections.
    pub refused: BTreeSet<NodeId>,
    /// (slot, its epoch): its content has come from a checkpoint, let it be served.
    pub loaded: BTreeSet<(u32, u64)>,
}

/// What has been done so far.
#[derive(Debug, Clone, Copy, Default)]
#[allow(missing_docs)] // The names say it.
pub struct ReplicaCounters {
    pub prepared: u64,
    pub committed: u64,
    pub rolled_back: u64,
    pub staged_for_others: u64,
    pub refused_to_others: u64,
    /// Pushes of this master that a backup had no room for.
    pub refused_for_room: u64,
    pub promotions: u64,
    pub slots_copied: u64,
    pub slots_installed: u64,
    /// Slots this node was made master of without being in sync: must stay 0.
    pub unfit_promotions: u64,
}

/// What a node knows of a slot.
#[derive(Debug, Clone, Default)]
pub(super) struct Slot {
    /// By the routing.
    pub(super) term: u64,
    /// When the content that is held here began; 0 if none is.
    pub(super) epoch: u64,
    /// The newest term seen, from the routing or a master: older ones are refused.
    pub(super) fence: u64,
    /// The newest routing version by which a master gave orders here.
    pub(super) seen_version: u64,
    /// What the node is to the slot.
    pub(super) role: Role,
}

impl Slot {
    /// Whether `term` comes right behind the slot's term, or is the same. Otherwise another node
    /// may have been master in between, by routing tables that this node has not seen.
    pub(super) fn is_next_term(&self, term: u64) -> bool {
        term <= self.term + 1
    }

    /// As master: nothing commits in the slot without these nodes.
    pub(super) fn required(&self) -> &[NodeId] {
        match &self.role {
            Role::Master(master) => &master.required,
            _ => &[],
        }
    }

    /// As master: these nodes get everything, too, but no commit waits for them.
    pub(super) fn extra(&self) -> &[NodeId] {
        match &self.role {
            Role::Master(master) => &master.extra,
            _ => &[],
        }
    }

    /// As master: whether the slot's content is to come from a checkpoint.
    pub(super) fn load(&self) -> Load {
        match &self.role {
            Role::Master(master) => master.load,
            _ => Load::NotAsked,
        }
    }
}

/// What a node is to a slot. The routing makes a node master. A message of the master makes it
/// a backup: until then, a node that the routing counts as a replica has another role.
#[derive(Debug, Clone, Default)]
pub(super) enum Role {
    /// It has heard of no order of the slot: it has nothing, or waits for its first copy.
    #[default]
    Outside,
    /// It gives the slot's order.
    Master(Master),
    /// The routing made it master, but it may lack acknowledged pushes. It serves no
    /// request and follows no master until the routing says something else.
    Unfit,
    /// It gave the slot's order, or holds the slot from its beginning. It is not master now, and
    /// the next master has said nothing yet.
    Former,
    /// It follows the order of a master.
    Backup {
        /// Whose order the staged transactions are in.
        master: NodeId,
        /// Whether the master has sent Recover on the present connection. Before that, what is
        /// staged here may have been undone.
        recovered: bool,
    },
    /// A copy of the slot has begun and not ended.
    Copied {
        /// The node that sends it.
        master: NodeId,
        /// What came with the copy and behind it.
        copy: CopyIn,
    },
}

impl Role {
    /// Whether the routing says that the node is master.
    pub(super) fn is_master(&self) -> bool {
        matches!(self, Self::Master(_) | Self::Unfit)
    }

    /// Whether what is staged in the slot is in this node's own order.
    pub(super) fn is_own_order(&self) -> bool {
        matches!(self, Self::Master(_) | Self::Former)
    }

    /// Whether a copy of the slot is on its way here.
    pub(super) fn is_copied(&self) -> bool {
        matches!(self, Self::Copied { .. })
    }

    /// Whether the copy that is on its way here cannot be taken in.
    pub(super) fn is_failed_copy(&self) -> bool {
        matches!(self, Self::Copied { copy, .. } if copy.failed.is_some())
    }

    /// Whether what is staged or copied here is in the order of this other node.
    pub(super) fn follows(&self, node: NodeId) -> bool {
        match self {
            Self::Backup { master, .. } | Self::Copied { master, .. } => *master == node,
            _ => false,
        }
    }

    /// The copy that this node sends here, if there is one.
    pub(super) fn copy_from(&mut self, node: NodeId) -> Option<&mut CopyIn> {
        match self {
            Self::Copied { master, copy } if *master == node => Some(copy),
            _ => None,
        }
    }
}

/// What a slot's master keeps of it.
#[derive(Debug, Clone, Default)]
pub(super) struct Master {
    /// Whether its content is to come from a checkpoint.
    pub(super) load: Load,
    /// Commits wait for these nodes.
    pub(super) required: Vec<NodeId>,
    /// These nodes get everything, too, but no commit waits for them.
    pub(super) extra: Vec<NodeId>,
}

/// Whether a slot's content is to come from a checkpoint before it is served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Load {
    /// It does not come from a checkpoint.
    #[default]
    NotAsked,
    /// The routing says that it does.
    Awaited,
    /// It is loaded, and the routing does not know yet.
    Done,
}

/// A copy of a slot that comes in. `CopyEnd` stages what was prepared since it began.
#[derive(Debug, Clone, Default)]
pub(super) struct CopyIn {
    /// The position of the copy.
    pub(super) position: u64,
    /// What was prepared behind the copy, position by position.
    pub(super) parts: VecDeque<(Arc<Transaction>, StagedRun)>,
    /// Everything up to this position is decided.
    pub(super) decided: u64,
    /// Why some of its rows could not be taken in.
    pub(super) failed: Option<Refusal>,
}

impl CopyIn {
    /// The last position.
    pub(super) fn end(&self) -> u64 {
        self.position + self.parts.len() as u64
    }

    /// Whether something before this position is missing.
    pub(super) fn leaves_gap(&self, position: u64) -> bool {
        self.failed.is_none() && self.end() + 1 < position
    }

    /// Keep what was prepared in a place, as [`crate::engine::Engine::stage`] would. Nothing
    /// before it may be missing.
    pub(super) fn stage(&mut self, transaction: &Arc<Transaction>, place: StagedRun) {
        let Some(at) = place.position.checked_sub(self.position + 1) else {
            return;
        };
        let at = at as usize;
        let known = self.parts.get(at);
        if known.is_none_or(|(known, _)| known.id != transaction.id) {
            self.parts.truncate(at);
        }
        let new = (Arc::clone(transaction), place);
        match self.parts.get_mut(at) {
            Some(known) => *known = new,
            None => self.parts.push_back(new),
        }
    }

    /// The table and the keys of each part that is kept and may create rows.
    pub(super) fn keys(&self) -> impl Iterator<Item = (u64, &[u64])> {
        let parts = self.parts.iter();
        let parts = parts.filter(|(transaction, _)| transaction.change.creates());
        parts.map(|(transaction, place)| {
            let run = place.run.start as usize..place.run.end as usize;
            (transaction.table, &transaction.batch.keys()[run])
        })
    }

    /// Drop what is not decided, from a position on.
    pub(super) fn discard_from(&mut self, position: u64) {
        let kept = position.saturating_sub(self.position + 1);
        self.parts.truncate(kept as usize);
    }
}

/// An entry of the master's order that is not decided.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    pub(super) lsn: u64,
    /// A push has one part; an entry that recovers slots may have more.
    pub(super) parts: Vec<Part>,
    /// The slots that this entry recovers; empty for a push.
    pub(super) recovers: Vec<u32>,
    /// The nodes whose answers are missing, and how many answers.
    pub(super) waiting: Vec<(NodeId, u32)>,
    pub(super) token: Option<Token>,
    pub(super) report: StageReport,
    pub(super) since: Micros,
    /// Some node was sent it on a later connection, too.
    pub(super) sent_again: bool,
}

/// Slots that this node has gained and does not serve yet.
#[derive(Debug, Clone)]
pub(super) struct Recovering {
    pub(super) lsn: u64,
    pub(super) slots: Vec<u32>,
    /// The routing version that gave them to this node.
    pub(super) version: u64,
    /// Whether every replica in sync has accepted what was staged, and it is applied here.
    pub(super) done: bool,
}
