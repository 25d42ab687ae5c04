//! Why a request is refused. One enum; its codes travel in error frames and become the
//! Python exceptions of `backstay.errors`.

use thiserror::Error;

/// A request that was refused. But for [`Refusal::Incomplete`] and [`Refusal::RolledBack`],
/// nothing of it was applied.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Refusal {
    /// No table has this id or name.
    #[error("no table {0}: create it first, or check its name")]
    UnknownTable(String),
    /// The name is taken by a table with other settings.
    #[error("{0}")]
    TableConflict(String),
    /// A field of the request is wrong.
    #[error("{0}")]
    InvalidRequest(String),
    /// NaN or infinity among the gradients, and the table refuses them.
    #[error("{0}")]
    NonFinite(String),
    /// No room for new rows.
    #[error("{0}")]
    MemoryLimit(String),
    /// The same, and there will be none, whatever tables with a capacity give up. To clients it is a
    /// memory limit as the other.
    #[error("{0}")]
    NoRoomEver(String),
    /// Something is larger than its limit.
    #[error("{0}")]
    LimitExceeded(String),
    /// This node is not the slot's master by the routing version it knows.
    #[error("slot {slot} is not served here as of routing version {version}: fetch the routing table again")]
    NotMaster {
        /// The first slot of the request that is not served here.
        slot: u32,
        /// The routing version this node goes by.
        version: u64,
    },
    /// The same transaction, or the end of its stream, is still under way here.
    #[error("the same push, or its stream's end, is still under way: wait and send it again")]
    InFlight,
    /// Some slots have the push and others refused it: the same push again completes it.
    #[error("applied in some slots only, send the same push again: {0}")]
    Incomplete(String),
    /// This master may not serve at the moment: it waits for read leases, recovers what its
    /// predecessor left, or holds no live lease.
    #[error("not ready to serve: {0}")]
    NotReady(String),
    /// A backup did not confirm, or has no room, so the push was undone here. A backup that staged
    /// it may yet become master and keep it: only the same push again tells, and counts once.
    #[error("rolled back, send the same push again: {0}")]
    RolledBack(String),
    /// The server is shutting down.
    #[error("the server is shutting down")]
    Stopping,
    /// Wrong token or wrong cluster.
    #[error("{0}")]
    Unauthenticated(String),
    /// The peer does not follow the protocol.
    #[error("{0}")]
    Protocol(String),
}

impl Refusal {
    /// The number under which this refusal travels (see `proto/data_plane.md`).
    pub fn code(&self) -> u16 {
        match self {
            Self::Protocol(_) => code::PROTOCOL,
            Self::Unauthenticated(_) => code::UNAUTHENTICATED,
            Self::UnknownTable(_) => code::UNKNOWN_TABLE,
            Self::TableConflict(_) => code::TABLE_CONFLICT,
            Self::InvalidRequest(_) => code::INVALID_REQUEST,
            Self::NonFinite(_) => code::NON_FINITE,
            Self::MemoryLimit(_) | Self::NoRoomEver(_) => code::MEMORY_LIMIT,
            Self::LimitExceeded(_) => code::LIMIT_EXCEEDED,
            Self::NotMaster { .. } => code::NOT_MASTER,
            Self::Stopping => code::STOPPING,
            Self::InFlight => code::IN_FLIGHT,
            Self::Incomplete(_) => code::INCOMPLETE,
            Self::NotReady(_) => code::NOT_READY,
            Self::RolledBack(_) => code::ROLLED_BACK,
        }
    }

    /// Whether it is refused for want of memory.
    pub fn is_for_room(&self) -> bool {
        matches!(self, Self::MemoryLimit(_) | Self::NoRoomEver(_))
    }

    /// Whether the very same request may succeed later.
    pub fn retry_safe(&self) -> bool {
        matches!(
            self,
            Self::MemoryLimit(_)
                | Self::NoRoomEver(_)
                | Self::NotMaster { .. }
                | Self::Stopping
                | Self::InFlight
                | Self::Incomplete(_)
                | Self::NotReady(_)
                | Self::RolledBack(_)
        )
    }
}

/// The numbers of refusals on the wire.
#[allow(missing_docs)] // Each is the variant of its name.
pub mod code {
    pub const PROTOCOL: u16 = 1;
    pub const UNAUTHENTICATED: u16 = 2;
    pub const UNKNOWN_TABLE: u16 = 3;
    pub const TABLE_CONFLICT: u16 = 4;
    pub const INVALID_REQUEST: u16 = 5;
    pub const NON_FINITE: u16 = 6;
    pub const MEMORY_LIMIT: u16 = 7;
    pub const LIMIT_EXCEEDED: u16 = 8;
    pub const NOT_MASTER: u16 = 9;
    pub const STOPPING: u16 = 10;
    pub const IN_FLIGHT: u16 = 11;
    pub const INCOMPLETE: u16 = 12;
    pub const NOT_READY: u16 = 13;
    pub const ROLLED_BACK: u16 = 14;

    /// The numbers' names, from 1 on: for counters and logs.
    pub const NAMES: [&str; 14] = [
        "protocol",
        "unauthenticated",
        "unknown_table",
        "table_conflict",
        "invalid_request",
        "non_finite",
        "memory_limit",
        "limit_exceeded",
        "not_master",
        "stopping",
        "in_flight",
        "incomplete",
        "not_ready",
        "rolled_back",
    ];
}
