//! Connections between nodes: which are wanted, and what it means that one opens or breaks.

use std::collections::BTreeSet;

use super::peer::Copy;
use super::replica::Replica;
use super::rows::Rows;
use super::state::{CopyIn, Entry, Role};
use super::{Micros, NodeId};
use crate::error::Refusal;

impl Replica {
    /// Every node that this one must keep a connection to.
    ///
    /// This node goes on trying to reach a silent member, even if no slot needs it. Until it
    /// answers again, the controller gives it no copy from here.
    pub fn wanted_links(&self) -> BTreeSet<NodeId> {
        let mut wanted = self.backups.clone();
        for member in &self.routing.members {
            let peer = self.peers.get(&member.instance);
            if peer.is_some_and(|peer| peer.trouble_since.is_some()) {
                wanted.insert(member.instance);
            }
        }
        wanted
    }

    /// A connection to a node was opened: begin anew on it.
    pub fn link_up(&mut self, now: Micros, rows: &impl Rows, node: NodeId) {
        let peer = self.peers.entry(node).or_default();
        peer.reset_way_there();
        peer.up = true;
        (peer.heard_at, peer.answered_at) = (now, now);
        peer.refused = false;
        peer.fallen_behind = false;
        for copy in peer.copies.values_mut() {
            *copy = match *copy {
                Copy::CaughtUp { term } | Copy::InDoubt { term } => Copy::CaughtUp { term },
                // What was sent of it went over the former connection.
                _ => Copy::Wanted,
            };
        }
        self.recount();
        self.release_waiting();
        self.resume(rows, node);
        self.heartbeat(now, node);
        self.copy_next(now, rows);
        self.refresh_report(now);
    }

    /// The connection to a node broke or could not be opened. `refused`: its port refuses
    /// connections.
    pub fn link_down(&mut self, now: Micros, rows: &impl Rows, node: NodeId, refused: bool) {
        // The end of a connection that is not needed is no trouble.
        let needed = self.backups.contains(&node);
        let peer = self.peers.entry(node).or_default();
        peer.up = false;
        peer.refused = refused;
        if needed {
            peer.trouble_since.get_or_insert(now);
        }
        peer.reset_way_there();
        for copy in peer.copies.values_mut() {
            *copy = match *copy {
                Copy::CaughtUp { term } | Copy::InDoubt { term } => Copy::InDoubt { term },
                _ => Copy::Wanted,
            };
        }
        self.recount();
        self.release_waiting();
        let waits = |entry: &&Entry| {
            entry.recovers.is_empty() && entry.waiting.iter().any(|(waited, _)| *waited == node)
        };
        if let Some(entry) = self.pending.iter().find(waits) {
            let reason = format!("the connection to backup {} broke", self.routing.name(node));
            self.roll_back(rows, entry.lsn, &Refusal::RolledBack(reason));
        }
        self.decide();
        self.refresh_report(now);
    }

    /// A master opened a connection to this node: what it had under way will come again.
    pub fn master_connected(&mut self, node: NodeId) {
        let peer = self.peers.entry(node).or_default();
        peer.to_master.clear();
        peer.prepared.clear();
        for slot in &mut self.slots {
            match &mut slot.role {
                Role::Backup { master, recovered } if *master == node => *recovered = false,
                // A copy that was under way begins anew.
                Role::Copied { master, copy } if *master == node => {
                    *copy = CopyIn {
                        failed: copy.failed.take(),
                        ..CopyIn::default()
                    };
                }
                _ => {}
            }
        }
    }

    /// Forget nodes that have left the routing, when the read leases given to them have expired.
    pub(super) fn forget_departed(&mut self, now: Micros) {
        let routing = &self.routing;
        self.peers.retain(|node, peer| {
            let member = routing
                .members
                .iter()
                .any(|member| member.instance == *node);
            if !member {
                // It may be silent, and its silence does not count when it comes back.
                peer.trouble_since = None;
            }
            member || peer.up || peer.read_leases_given.values().any(|&until| until > now)
        });
    }
}
