//! The client's runtime: plan a batch, send its parts, wait, try again, never count twice.
//!
//! [`plan`] merges and orders keys; [`routing`] says where they go; `link` keeps the way to
//! each server; `pull` and `push` are the two kinds of calls; [`rows`] moves values.

mod connection;
mod error;
mod link;
mod out_frame;
pub mod plan;
mod pull;
mod push;
pub mod routing;
pub mod rows;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;
use std::time::Duration;

use backstay_core::stream::StreamId;
use backstay_core::wire::{CloseStream, Opcode};
use parking_lot::{Mutex, RwLock};
use tokio::sync::Notify;

pub use error::ClientError;
pub use link::Deadline;
pub use pull::Pull;
pub use push::{Push, PushRequest};

use link::{Answer, Link};
use out_frame::OutFrame;
use plan::Plan;
use push::PushQueue;
use routing::Routing;

use crate::buffers::BufferPool;

/// Memory kept for reuse, for requests and replies.
const SPARE_BYTES: usize = 128 * 1024 * 1024;

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

/// What a client has done so far.
#[derive(Debug, Default)]
#[allow(missing_docs)] // The names say it.
pub struct ClientCounters {
    pub pulls: AtomicU64,
    pub keys_pulled: AtomicU64,
    pub pushes_acknowledged: AtomicU64,
    pub keys_pushed: AtomicU64,
    pub retries: AtomicU64,
}

/// A client of a cluster's data plane.
pub struct Client {
    options: Arc<ClientOptions>,
    routing: RwLock<Option<Arc<Routing>>>,
    links: Mutex<BTreeMap<String, Arc<Link>>>,
    stream: StreamId,
    pushes: PushQueue,
    buffers: Arc<BufferPool>,
    /// Rung when a server does not answer: the routing may have changed.
    trouble: Arc<Notify>,
    unwatched: AtomicBool,
    closed: AtomicBool,
    /// What it has done so far.
    pub counters: ClientCounters,
}

impl Client {
    /// A client that numbers its pushes in `stream`, which nobody else may use.
    pub fn new(options: ClientOptions, stream: StreamId) -> Arc<Self> {
        Arc::new(Self {
            pushes: PushQueue::new(options.max_pushes_in_flight),
            options: Arc::new(options),
            routing: RwLock::default(),
            links: Mutex::default(),
            stream,
            buffers: Arc::new(BufferPool::new(SPARE_BYTES)),
            trouble: Arc::default(),
            unwatched: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            counters: ClientCounters::default(),
        })
    }

    /// Go by this routing table from now on.
    pub fn set_routing(&self, routing: Routing) {
        *self.routing.write() = Some(Arc::new(routing));
    }

    /// Connect to every server. From then on their rows are relied on: another instance at one
    /// of the addresses is [`ClientError::StateLost`].
    pub async fn connect(&self, deadline: Deadline) -> Result<(), ClientError> {
        let routing = self.routing.read().clone();
        let routing = routing.ok_or_else(no_routing)?;
        for server in 0..routing.servers.len() {
            self.link(&routing, server).connection(deadline).await?;
        }
        Ok(())
    }

    /// The instance met at an address; 0 if none was met.
    pub fn instance_of(&self, address: &str) -> u64 {
        let links = self.links.lock();
        links.get(address).map_or(0, |link| link.instance())
    }

    /// Wait until a server does not answer; false once nobody is to wait any more.
    ///
    /// Whoever knows the control plane should then look whether nodes or routing changed.
    pub async fn trouble(&self) -> bool {
        self.trouble.notified().await;
        !self.unwatched.load(Ordering::Acquire)
    }

    /// End [`Self::trouble`].
    pub fn unwatch(&self) {
        self.unwatched.store(true, Ordering::Release);
        self.trouble.notify_one();
    }

    /// The process at this address is known to have lost its rows: fail what needs it.
    pub fn mark_lost(&self, address: &str) {
        if let Some(link) = self.links.lock().get(address) {
            link.mark_lost();
        }
    }

    /// Make a batch of keys ready for this cluster.
    pub fn plan(&self, keys: &[u64]) -> Result<Plan, ClientError> {
        let routing = self.routing.read().clone();
        let routing = routing.ok_or_else(no_routing)?;
        Plan::new(keys, routing)
    }

    /// Wait until every push under way is settled; the first failure is returned.
    pub async fn flush(&self) -> Result<(), ClientError> {
        self.pushes.flush(self).await
    }

    /// Settle what is under way, tell the servers to forget the stream, disconnect.
    pub async fn close(&self, deadline: Deadline) -> Result<(), ClientError> {
        let flushed = self.flush().await;
        if self.closed.swap(true, Ordering::AcqRel) {
            return flushed;
        }
        self.unwatch();
        let links: Vec<_> = self.links.lock().values().cloned().collect();
        for link in links {
            // Best effort: a server that is gone has forgotten the stream anyway.
            if link.current().await.is_some() {
                if let Err(error) = self.close_stream(&link, deadline).await {
                    tracing::debug!(address = link.address, %error, "the stream was not closed");
                }
            }
            link.close().await;
        }
        flushed
    }

    async fn close_stream(&self, link: &Link, deadline: Deadline) -> Result<(), ClientError> {
        let meta = CloseStream {
            stream: self.stream,
        }
        .encode();
        let mut frame = OutFrame::new(Opcode::CloseStream, &meta, 0, 0, Vec::new());
        let ticket = link.send(deadline, &mut frame).await?;
        match ticket.wait(deadline).await {
            Some(reply) => match link.judge(reply, Opcode::CloseStreamReply)? {
                Answer::Frame(_) | Answer::Again { .. } => Ok(()),
            },
            None => Err(ClientError::Deadline {
                address: link.address.clone(),
                waited_ms: deadline.waited_ms(),
            }),
        }
    }

    fn check_open(&self) -> Result<(), ClientError> {
        if self.closed.load(Ordering::Acquire) {
            return Err(ClientError::Closed);
        }
        Ok(())
    }

    fn link(&self, routing: &Routing, server: usize) -> Arc<Link> {
        let address = &routing.servers[server];
        let mut links = self.links.lock();
        let link = links.entry(address.clone()).or_insert_with(|| {
            Arc::new(Link::new(
                address,
                Arc::clone(&self.options),
                Arc::clone(&self.buffers),
                Arc::clone(&self.trouble),
            ))
        });
        Arc::clone(link)
    }

    /// Unique keys of a part whose body takes about `part_bytes`.
    fn keys_per_part(&self, row_elements: usize) -> usize {
        (self.options.part_bytes / (8 + row_elements * 4)).max(1)
    }
}

fn no_routing() -> ClientError {
    ClientError::Invalid("no routing table has been set".into())
}
