//! Why a request is refused. One enum; its codes travel in error frames and become the
//! Python exceptions of `backstay.errors`.

use thiserror::Error;

/// A request that was refused. But for [`Refusal::Incomplete`], nothing of it was applied.
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
    /// Something is larger than its limit.
    #[error("{0}")]
    LimitExceeded(String),
    /// This node does not hold the slot as of the routing version it knows.
    #[error("slot {slot} is not served here as of routing version {version}: fetch the routing table again")]
    NotMaster {
        /// The first slot of the request that is not served here.
        slot: u32,
        /// The routing version this node goes by.
        version: u64,
    },
    /// The same transaction is still under way here.
    #[error("the same transaction is still under way: wait for its first answer")]
    InFlight,
    /// Some slots have the push and others refused it: the same push again completes it.
    #[error("applied in some slots only, send the same push again: {0}")]
    Incomplete(String),
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
            Self::Protocol(_) => 1,
            Self::Unauthenticated(_) => 2,
            Self::UnknownTable(_) => 3,
            Self::TableConflict(_) => 4,
            Self::InvalidRequest(_) => 5,
            Self::NonFinite(_) => 6,
            Self::MemoryLimit(_) => 7,
            Self::LimitExceeded(_) => 8,
            Self::NotMaster { .. } => 9,
            Self::Stopping => 10,
            Self::InFlight => 11,
            Self::Incomplete(_) => 12,
        }
    }

    /// Whether the very same request may succeed later.
    pub fn retry_safe(&self) -> bool {
        matches!(
            self,
            Self::MemoryLimit(_)
                | Self::NotMaster { .. }
                | Self::Stopping
                | Self::InFlight
                | Self::Incomplete(_)
        )
    }
}
