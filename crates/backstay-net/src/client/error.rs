//! How a client's call can fail. Becomes the Python exceptions of `backstay.errors`.

use thiserror::Error;

/// See the module's documentation.
#[derive(Debug, Clone, Error)]
pub enum ClientError {
    /// No server answered at the address until the deadline; nothing was applied.
    #[error("{address}: {reason} (tried for {waited_ms} ms)")]
    Unavailable {
        /// Where.
        address: String,
        /// The last reason.
        reason: String,
        /// How long the call tried.
        waited_ms: u128,
    },
    /// A read was not answered in time.
    #[error("{address}: {reason} (no answer within {waited_ms} ms)")]
    Deadline {
        /// Where.
        address: String,
        /// What it waited for.
        reason: String,
        /// How long the call waited.
        waited_ms: u128,
    },
    /// A push was sent and no answer came, or only a part of its servers answered.
    #[error("push {sequence} to {address} may or may not be applied: {reason} (tried for {waited_ms} ms)")]
    OutcomeUnknown {
        /// Its number in the client's stream.
        sequence: u64,
        /// The server that did not answer.
        address: String,
        /// The last reason.
        reason: String,
        /// How long the call tried.
        waited_ms: u128,
    },
    /// The server refused.
    #[error("{address}: {message}")]
    Refused {
        /// One of [`backstay_core::error::code`], or a later release's.
        code: u16,
        /// Whether the server says that the same request may succeed later.
        retry_safe: bool,
        /// The server's words.
        message: String,
        /// Where.
        address: String,
    },
    /// Rows that this client relied on are gone.
    #[error("{reason}. Start the program again, with a new client: it goes on from what the cluster has now (pserverctl status)")]
    StateLost {
        /// Which, and how it is known.
        reason: String,
    },
    /// The peer does not speak the protocol.
    #[error("{address}: {reason}")]
    Protocol {
        /// Where.
        address: String,
        /// What was wrong.
        reason: String,
    },
    /// An argument is wrong; nothing was sent.
    #[error("{0}")]
    Invalid(String),
    /// The gradients hold NaN or infinity; nothing was sent.
    #[error("{0}")]
    NonFinite(String),
    /// Something is over its limit; nothing was sent.
    #[error("{0}")]
    LimitExceeded(String),
    /// The worker's lease of the task was revoked.
    #[error("the lease of this task was revoked, so nothing of it is sent any more: stop working on it; its pushes under way may or may not be applied, and whoever has the task now pushes the same batches, each of which counts once")]
    TaskLeaseLost,
    /// The client was closed.
    #[error("the client is closed")]
    Closed,
}
