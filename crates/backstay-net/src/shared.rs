//! What the sessions and the links of a server share: its options, rows, counters and the signal
//! to stop.

use std::sync::Arc;
use std::time::Duration;

use backstay_core::replication::ReplicaOptions;
use backstay_core::wire::Limits;
use tokio::sync::watch;

use crate::replicator::Replicator;
use crate::stats::Counters;
use crate::store::Store;

/// What a server needs to know. The maker checks it.
#[derive(Clone)]
pub struct ServerOptions {
    /// The cluster's name; a client must give the same.
    pub cluster_id: String,
    /// The node's name.
    pub node_id: String,
    /// Drawn anew at each start.
    pub instance: u64,
    /// The shared secret, if any.
    pub token: Option<String>,
    /// TLS, if any.
    pub tls: Option<Arc<rustls::ServerConfig>>,
    /// Threads that move bytes and work on rows.
    pub io_threads: usize,
    /// What a frame may be.
    pub limits: Limits,
    /// Connections open at once.
    pub max_connections: u64,
    /// From accept to a good handshake, TLS included.
    pub handshake_timeout: Duration,
    /// From a frame's first byte to its last, and for writing an answer.
    pub stall_timeout: Duration,
    /// TLS for the connections to backups, if any.
    pub peer_tls: Option<Arc<rustls::ClientConfig>>,
    /// The stream of a task of which nothing was heard for so long expires.
    pub stream_grace: Duration,
    /// Whether this process is the server's alone: then what it takes besides counts against the
    /// limit of its memory, too.
    pub counts_process: bool,
    /// Times and limits of replication.
    pub replica: ReplicaOptions,
}

/// What the sessions share.
pub(crate) struct Shared {
    pub(crate) options: ServerOptions,
    pub(crate) store: Arc<Store>,
    pub(crate) replicator: Arc<Replicator>,
    pub(crate) counters: Counters,
}

/// Returns when the server is to stop.
pub(crate) async fn stop_signal(stopping: &mut watch::Receiver<bool>) {
    // An error means that the server object is gone: that is a stop, too.
    let _ = stopping.wait_for(|&stopping| stopping).await;
}
