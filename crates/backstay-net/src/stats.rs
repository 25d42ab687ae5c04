//! Counters of a node's data plane. They only grow; rates are the reader's business.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;

/// See the module's documentation.
#[derive(Debug, Default)]
pub struct Counters {
    pub(crate) connections_open: AtomicU64,
    pub(crate) connections_accepted: AtomicU64,
    pub(crate) connections_refused: AtomicU64,
    pub(crate) pulls: AtomicU64,
    pub(crate) keys_pulled: AtomicU64,
    pub(crate) pushes_applied: AtomicU64,
    pub(crate) pushes_repeated: AtomicU64,
    pub(crate) keys_pushed: AtomicU64,
    pub(crate) requests_refused: AtomicU64,
    pub(crate) frames_broken: AtomicU64,
    pub(crate) bytes_received: AtomicU64,
    pub(crate) bytes_sent: AtomicU64,
}

/// The counters at one moment, with gauges.
#[derive(Debug, Clone, Serialize)]
#[allow(missing_docs)] // The names say it; docs/reference/cli.md explains each to users.
pub struct Snapshot {
    pub connections_open: u64,
    pub connections_accepted: u64,
    pub connections_refused: u64,
    pub pulls: u64,
    pub keys_pulled: u64,
    pub pushes_applied: u64,
    pub pushes_repeated: u64,
    pub keys_pushed: u64,
    pub requests_refused: u64,
    pub frames_broken: u64,
    pub bytes_received: u64,
    pub bytes_sent: u64,
    pub routing_version: u64,
    pub row_bytes: u64,
}

pub(crate) fn add(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}

impl Counters {
    pub(crate) fn snapshot(&self, routing_version: u64, row_bytes: u64) -> Snapshot {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Snapshot {
            connections_open: read(&self.connections_open),
            connections_accepted: read(&self.connections_accepted),
            connections_refused: read(&self.connections_refused),
            pulls: read(&self.pulls),
            keys_pulled: read(&self.keys_pulled),
            pushes_applied: read(&self.pushes_applied),
            pushes_repeated: read(&self.pushes_repeated),
            keys_pushed: read(&self.keys_pushed),
            requests_refused: read(&self.requests_refused),
            frames_broken: read(&self.frames_broken),
            bytes_received: read(&self.bytes_received),
            bytes_sent: read(&self.bytes_sent),
            routing_version,
            row_bytes,
        }
    }
}
