//! Which node may answer reads, and until when: read leases of the backups, and the node's lease.
//!
//! With a read lease a backup says that it will not act, for some time, as master of slots that the
//! asker has by the routing version that the backup names. The backup counts the time from when it
//! answers, the master from when it asked. So the master stops first, however slow the network is.
//! A margin covers clocks that run at different speeds. A master does not count a read lease of a
//! newer routing version than its own: by that version, it may not be master any longer.

use super::message::Message;
use super::replica::Replica;
use super::rows::Rows;
use super::{Micros, NodeId};
use crate::engine::ServingState;

impl Replica {
    /// The node's lease in the coordination store is alive until then (0: it is lost).
    pub fn set_lease(&mut self, until: Micros) {
        self.lease_until = until;
    }

    /// Until when this node may answer reads of the slots it serves. What was read before counts
    /// if this still lies in the future afterwards.
    pub fn serving_until(&self) -> Micros {
        let leased = |node: &NodeId| {
            let peer = self.peers.get(node);
            peer.map_or(0, |peer| peer.read_lease_until)
        };
        let backups = self.required.iter().map(leased).min();
        let lease = self.solo.then_some(self.lease_until);
        [backups, lease]
            .into_iter()
            .flatten()
            .min()
            .unwrap_or(Micros::MAX)
    }

    pub(super) fn heartbeat(&mut self, now: Micros, node: NodeId) {
        let version = self.routing.version;
        let peer = self.peers.entry(node).or_default();
        if peer.up {
            peer.heartbeats.push_back(Message::Heartbeat {
                sent_at: now,
                version,
            });
        }
    }

    /// A master asks for a read lease.
    pub(super) fn grant_read_lease(
        &mut self,
        now: Micros,
        from: NodeId,
        sent_at: Micros,
        version: u64,
    ) {
        let mine = self.routing.version;
        let until = now + self.options.read_lease;
        let peer = self.peers.entry(from).or_default();
        peer.its_version = peer.its_version.max(version);
        peer.read_leases_given.retain(|_, until| *until > now);
        let given = peer.read_leases_given.entry(mine).or_default();
        *given = (*given).max(until);
        peer.to_master.push_back(Message::ReadLease {
            sent_at,
            version: mine,
        });
    }

    /// A backup has given a read lease.
    pub(super) fn read_lease_granted(
        &mut self,
        now: Micros,
        from: NodeId,
        sent_at: Micros,
        version: u64,
    ) {
        let counted = self.options.read_lease_counted();
        let silent_after = self.options.prepare_timeout;
        let mine = self.routing.version;
        let peer = self.peers.entry(from).or_default();
        peer.its_version = peer.its_version.max(version);
        if version <= mine {
            peer.read_lease_until = peer.read_lease_until.max(sent_at + counted);
        }
        // Also who goes by a newer table, or whose read lease comes too late to count, answers.
        if peer.up && !peer.is_stuck(silent_after, now) {
            peer.trouble_since = None;
            self.refresh_report(now);
        }
    }

    /// Whether another node may still answer reads of the slots gained by a routing version.
    fn is_leased_away(&self, now: Micros, version: u64) -> bool {
        self.peers.iter().any(|(node, peer)| {
            let leased = |(&given_at, &until): (&u64, &Micros)| given_at < version && until > now;
            peer.its_version < version
                && !self.routing.gone.contains(node)
                && peer.read_leases_given.iter().any(leased)
        })
    }

    /// What an entry recovers is applied here.
    pub fn recovered(&mut self, now: Micros, rows: &impl Rows, lsn: u64) {
        for recovering in &mut self.recovering {
            recovering.done |= recovering.lsn == lsn;
        }
        self.serve_recovered(now, rows);
    }

    /// Serve the slots that their former masters cannot serve any longer.
    pub(super) fn serve_recovered(&mut self, now: Micros, rows: &impl Rows) {
        let recovering = std::mem::take(&mut self.recovering);
        for one in recovering {
            if !one.done || self.is_leased_away(now, one.version) {
                self.recovering.push(one);
                continue;
            }
            for slot in one.slots {
                if self.slots[slot as usize].role.is_master() {
                    rows.set_serving_state(slot, ServingState::Serving);
                }
            }
        }
    }
}
