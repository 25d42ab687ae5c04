//! What a client is told when it is made.

use std::sync::Arc;
use std::time::Duration;

/// What a client needs to know.
#[derive(Clone)]
pub struct ClientOptions {
    /// The cluster's name.
    pub cluster_id: String,
    /// The shared secret, if any.
    pub token: Option<String>,
    /// TLS, if any.
    pub tls: Option<Arc<rustls::ClientConfig>>,
    /// For the servers' logs.
    pub client_name: String,
    /// For one try to connect, handshake included.
    pub connect_timeout: Duration,
    /// From a reply's first byte to its last.
    pub stall_timeout: Duration,
    /// The largest reply that is accepted.
    pub max_frame_bytes: u64,
    /// Bodies are cut into parts of about so many bytes, so that the work of both sides and
    /// the transfer overlap.
    pub part_bytes: usize,
    /// Pushes that may be under way at once.
    pub max_pushes_in_flight: usize,
}
