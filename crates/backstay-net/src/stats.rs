//! Counters of a node's data plane. They only grow; rates are the reader's business.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use backstay_core::error::{code, Refusal};
use backstay_core::life::Gone;
use backstay_core::replication::ReplicaCounters;
use serde::Serialize;

use crate::memory::MemoryParts;

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
    pub(crate) rows_deleted: AtomicU64,
    pub(crate) rows_expired: AtomicU64,
    pub(crate) rows_evicted: AtomicU64,
    pub(crate) keys_not_admitted: AtomicU64,
    pub(crate) stale_slots: AtomicU64,
    pub(crate) staleness_sum: AtomicU64,
    pub(crate) staleness_unknown: AtomicU64,
    pub(crate) requests_refused: AtomicU64,
    /// By the refusals' codes, from 1 on.
    pub(crate) refused_by_code: [AtomicU64; code::NAMES.len()],
    pub(crate) frames_broken: AtomicU64,
    pub(crate) bytes_received: AtomicU64,
    pub(crate) bytes_sent: AtomicU64,
    pub(crate) peer_bytes_received: AtomicU64,
    pub(crate) peer_bytes_sent: AtomicU64,
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
    pub rows_deleted: u64,
    pub rows_expired: u64,
    pub rows_evicted: u64,
    pub keys_not_admitted: u64,
    pub stale_slots: u64,
    pub staleness_sum: u64,
    pub staleness_unknown: u64,
    pub requests_refused: u64,
    pub requests_refused_by_code: BTreeMap<&'static str, u64>,
    pub frames_broken: u64,
    pub bytes_received: u64,
    pub bytes_sent: u64,
    pub peer_bytes_received: u64,
    pub peer_bytes_sent: u64,
    pub routing_version: u64,
    pub row_bytes: u64,
    pub memory: MemoryParts,
    pub slots: SlotCounts,
    pub replication: Replication,
}

/// How many slots have which role at this node.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct SlotCounts {
    /// This node is their master and serves them.
    pub master: u64,
    /// This node is their master, and does not serve them yet.
    pub waiting: u64,
    /// This node is a backup.
    pub backup: u64,
    /// Being copied to this node.
    pub copied: u64,
    /// Not held here.
    pub outside: u64,
    /// Pushes staged and not applied, summed over all slots.
    pub staged: u64,
}

/// What a node's part in replication has done, and how long it took.
#[derive(Debug, Clone, Default, Serialize)]
#[allow(missing_docs)] // The names say it; docs/reference/metrics.md explains each to users.
pub struct Replication {
    pub pending: u64,
    pub prepared: u64,
    pub committed: u64,
    pub rolled_back: u64,
    pub staged_for_others: u64,
    pub refused_to_others: u64,
    pub promotions: u64,
    pub unfit_promotions: u64,
    pub slots_copied: u64,
    pub slots_installed: u64,
    pub commit: HistogramSnapshot,
    pub rollback: HistogramSnapshot,
    pub stage: HistogramSnapshot,
    pub promotion: HistogramSnapshot,
}

impl Replication {
    pub(crate) fn of(counters: &ReplicaCounters, pending: u64, times: &ReplicationTimes) -> Self {
        Self {
            pending,
            prepared: counters.prepared,
            committed: counters.committed,
            rolled_back: counters.rolled_back,
            staged_for_others: counters.staged_for_others,
            refused_to_others: counters.refused_to_others,
            promotions: counters.promotions,
            unfit_promotions: counters.unfit_promotions,
            slots_copied: counters.slots_copied,
            slots_installed: counters.slots_installed,
            commit: times.commit.snapshot(),
            rollback: times.rollback.snapshot(),
            stage: times.stage.snapshot(),
            promotion: times.promotion.snapshot(),
        }
    }
}

pub(crate) fn add(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}

impl Counters {
    /// What went by a change that this node took on as master.
    pub(crate) fn count_gone(&self, gone: &Gone) {
        for (counter, by) in [
            (&self.rows_deleted, gone.deleted),
            (&self.rows_expired, gone.expired()),
            (&self.rows_evicted, gone.evicted),
            (&self.keys_not_admitted, gone.not_admitted),
            (&self.stale_slots, gone.stale.known),
            (&self.staleness_sum, gone.stale.sum),
            (&self.staleness_unknown, gone.stale.unknown),
        ] {
            if by > 0 {
                add(counter, by);
            }
        }
    }

    pub(crate) fn count_refusal(&self, refusal: &Refusal) {
        add(&self.requests_refused, 1);
        if let Some(counter) = self.refused_by_code.get(refusal.code() as usize - 1) {
            add(counter, 1);
        }
    }

    pub(crate) fn snapshot(
        &self,
        routing_version: u64,
        row_bytes: u64,
        memory: MemoryParts,
        slots: SlotCounts,
        replication: Replication,
    ) -> Snapshot {
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
            rows_deleted: read(&self.rows_deleted),
            rows_expired: read(&self.rows_expired),
            rows_evicted: read(&self.rows_evicted),
            keys_not_admitted: read(&self.keys_not_admitted),
            stale_slots: read(&self.stale_slots),
            staleness_sum: read(&self.staleness_sum),
            staleness_unknown: read(&self.staleness_unknown),
            requests_refused: read(&self.requests_refused),
            requests_refused_by_code: code::NAMES
                .into_iter()
                .zip(self.refused_by_code.iter().map(read))
                .collect(),
            frames_broken: read(&self.frames_broken),
            bytes_received: read(&self.bytes_received),
            bytes_sent: read(&self.bytes_sent),
            peer_bytes_received: read(&self.peer_bytes_received),
            peer_bytes_sent: read(&self.peer_bytes_sent),
            routing_version,
            row_bytes,
            memory,
            slots,
            replication,
        }
    }
}

/// Upper bounds of a histogram's buckets, in microseconds: doubling.
pub const BUCKETS: usize = 20;

/// How often something took how long.
#[derive(Debug, Default)]
pub struct Histogram {
    buckets: [AtomicU64; BUCKETS],
    sum_micros: AtomicU64,
}

/// A histogram at one moment. Bucket `n` counts what took less than 2^n * 16 microseconds and no
/// less than half of that; the last one everything above, too.
#[derive(Debug, Clone, Default, Serialize)]
pub struct HistogramSnapshot {
    /// Not cumulative.
    pub buckets: Vec<u64>,
    /// All times together.
    pub sum_micros: u64,
}

impl Histogram {
    /// Something took so long.
    pub fn record(&self, time: std::time::Duration) {
        let micros = time.as_micros() as u64;
        let bucket = (64 - (micros / 16).leading_zeros()) as usize;
        add(&self.buckets[bucket.min(BUCKETS - 1)], 1);
        add(&self.sum_micros, micros);
    }

    pub(crate) fn snapshot(&self) -> HistogramSnapshot {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        HistogramSnapshot {
            buckets: self.buckets.iter().map(read).collect(),
            sum_micros: read(&self.sum_micros),
        }
    }
}

/// What takes how long.
#[derive(Debug, Default)]
pub struct ReplicationTimes {
    /// From a push's coming until it is applied here, all backups having staged it.
    pub commit: Histogram,
    /// From a push's coming until it was rolled back.
    pub rollback: Histogram,
    /// Staging a push of another master.
    pub stage: Histogram,
    /// From a routing table that makes this node master of more slots until it serves them all.
    pub promotion: Histogram,
}
