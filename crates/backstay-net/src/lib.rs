//! The data plane of backstay over TCP: the server's and the client's runtime.
//!
//! [`store`] holds the engines behind locks; [`server`] accepts connections and runs a
//! [`session`] on each; [`replicator`] keeps the replicas of its slots equal, over connections
//! of its own; [`checkpoint`] writes slots to files and reads them back; [`client`] plans, sends, waits and retries; [`frame_io`] moves frames;
//! [`tls`] wraps sockets. Decisions about membership are made elsewhere and arrive here as a
//! routing table.

mod buffers;
pub mod checkpoint;
pub mod client;
pub mod clock;
mod events;
pub mod frame_io;
mod handler;
pub mod memory;
mod peer_link;
pub mod replicator;
pub mod server;
pub mod session;
mod shared;
mod socket;
pub mod stats;
pub mod store;
pub mod tls;
