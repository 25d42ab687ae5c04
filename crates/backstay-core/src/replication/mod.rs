//! Replication of slots: two-phase commit between a master and its in-sync backups.
//!
//! A pure state machine. [`Replica`] is one node's part in it. Its inputs are requests, messages,
//! broken connections, the routing and the time. Its outputs are messages to send and
//! [`Work`] to do on the rows, which it reaches through [`Rows`]. It opens no socket and reads
//! no clock, so a server and a simulator drive the same code.
//!
//! The protocol is primary-backup in the style of `PacificA` (Lin et al., MSR-TR-2008-25): the
//! configuration of each slot (master, in-sync backups, term) comes from outside, here from the
//! controller through the coordination store. The backups have the fence against a replaced master.
//! A master answers reads only with a read lease of every in-sync backup.
//!
//! - [`routing`]: the routing record, as this node needs it.
//! - [`message`]: what nodes say to each other.
//! - `peer`: what is known of another node, and what is under way to it.
//! - `state`: the values a replica's state is made of.
//! - [`replica`]: what happens when routing, time or connections change.
//! - `master`: prepare, commit, rollback, recovery after a promotion.
//! - `backup`: stage, apply, discard; the fence.
//! - `catch_up`: copying slots to a replica that lacks them.
//! - `credit`: how much of a copy may be on its way.
//! - `fingerprint`: a number for a state, for exhaustive searches.
//! - `read_lease`: who may answer reads, and until when.

mod backup;
mod catch_up;
mod credit;
mod fingerprint;
mod links;
mod load;
mod master;
pub mod message;
mod pace;
mod peer;
mod read_lease;
pub mod replica;
pub mod routing;
pub mod rows;
mod state;

pub use fingerprint::fingerprint;
pub use message::Message;
pub use replica::Replica;
pub use routing::RoutingTable;
pub use rows::{LocalRows, Rows};
pub use state::{ReplicaCounters, ReplicaOptions, Report, Token, Way, Work};

/// One process of a pserver: the number it draws at its start. Never 0.
pub type NodeId = u64;

/// Microseconds on the node's own monotonic clock, from any origin.
pub type Micros = u64;
