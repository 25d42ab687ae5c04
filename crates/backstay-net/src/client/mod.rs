//! The client's runtime: plan a batch, send its parts, wait, try again, never count twice.
//!
//! [`plan`] merges and orders keys; [`routing`] says where they go; `link` keeps the way to
//! each server; `request` tries one part of a call, `requests` all of them until they are
//! answered, `attend` waits meanwhile, [`split`] cuts them anew when slots move; `pull` and `push`
//! are the two kinds of calls; `queue` numbers pushes, pushes of a task by `batches` and while its
//! `send_lease` is alive (`task_stream`); `origins` knows from where rows came, `references` what they were; `lifetimes` expires and decays tables; `closing` waits and ends; [`rows`] moves values;
//! `waiting` says what is waited for.

mod attend;
mod batches;
mod closing;
mod connection;
mod error;
mod lifetimes;
mod link;
mod options;
mod origins;
mod out_frame;
mod own_stream;
pub mod plan;
mod pull;
mod push;
mod queue;
mod references;
mod request;
mod requests;
pub mod routing;
pub mod rows;
mod send_lease;
pub mod split;
mod task_stream;
mod waiting;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;

use backstay_core::compensation::Reference;
use backstay_core::staleness::{bucket_of, PushStaleness, BUCKETS};
use backstay_core::stream::StreamId;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::{sleep_until, Instant};

pub use error::ClientError;
pub use link::Deadline;
pub use options::ClientOptions;
pub use pull::Pull;
pub use push::{Done, Push, PushRequest};
pub use task_stream::TaskStream;
pub use waiting::Event;

use connection::Connection;
use link::{Backoff, Failure, Link};
use origins::Origins;
use plan::Plan;
use queue::PushQueue;
use references::References;
use routing::{Routing, ServerAddress};
use waiting::Waits;

use crate::buffers::BufferPool;

/// Memory kept for reuse, for requests and replies.
const SPARE_BYTES: usize = 128 * 1024 * 1024;

/// What a client has done so far.
#[derive(Debug, Default)]
#[allow(missing_docs)] // The names say it.
pub struct ClientCounters {
    pub pulls: AtomicU64,
    pub keys_pulled: AtomicU64,
    pub pushes_acknowledged: AtomicU64,
    pub keys_pushed: AtomicU64,
    /// Requests sent again.
    pub retries: AtomicU64,
    /// Requests or parts of them that went to another server than before.
    pub failovers: AtomicU64,
    /// Calls that had to wait for a server or for a newer routing.
    pub waits: AtomicU64,
    /// Slots of pushes of which it is known how stale the push was there.
    pub stale_slots: AtomicU64,
    /// Of these, all together.
    pub staleness_sum: AtomicU64,
    /// The highest.
    pub staleness_max: AtomicU64,
    /// Slots of pushes of which it is known, by [`bucket_of`] of the mean of their push.
    pub staleness_buckets: [AtomicU64; BUCKETS],
    /// Slots of pushes of which it is not known.
    pub staleness_unknown: AtomicU64,
}

impl ClientCounters {
    /// How stale a push was.
    fn count_staleness(&self, stale: &PushStaleness) {
        if *stale == PushStaleness::default() {
            return;
        }
        self.stale_slots.fetch_add(stale.known, Ordering::Relaxed);
        self.staleness_sum.fetch_add(stale.sum, Ordering::Relaxed);
        let max = u64::from(stale.max);
        self.staleness_max.fetch_max(max, Ordering::Relaxed);
        if let Some(mean) = stale.sum.checked_div(stale.known) {
            let bucket = bucket_of(u32::try_from(mean).unwrap_or(u32::MAX));
            self.staleness_buckets[bucket].fetch_add(stale.known, Ordering::Relaxed);
        }
        let unknown = stale.unknown;
        self.staleness_unknown.fetch_add(unknown, Ordering::Relaxed);
    }
}

/// A client of a cluster's data plane.
pub struct Client {
    options: Arc<ClientOptions>,
    routing: watch::Sender<Option<Arc<Routing>>>,
    /// By address and instance.
    links: Mutex<BTreeMap<(String, u64), Arc<Link>>>,
    /// The generation of the first routing: whose rows are relied on.
    first_generation: AtomicU64,
    state_lost: AtomicBool,
    /// What became of the rows that are lost, as the routing said that told of it.
    loss: Mutex<String>,
    /// The client's own stream.
    pushes: Arc<PushQueue<Push>>,
    /// Those of tasks, with something under way or a handle in use.
    tasks: Mutex<Vec<Arc<PushQueue<Push>>>>,
    origins: Origins,
    references: References,
    buffers: Arc<BufferPool>,
    waits: Waits,
    closed: AtomicBool,
    /// What it has done so far.
    pub counters: ClientCounters,
}

impl Client {
    /// A client that numbers its pushes in `stream`, which no other client may use.
    pub fn new(options: ClientOptions, stream: StreamId) -> Arc<Self> {
        Arc::new(Self {
            pushes: Arc::new(PushQueue::own(stream, options.max_pushes_in_flight)),
            tasks: Mutex::default(),
            options: Arc::new(options),
            routing: watch::Sender::new(None),
            links: Mutex::default(),
            first_generation: AtomicU64::new(0),
            state_lost: AtomicBool::new(false),
            loss: Mutex::default(),
            origins: Origins::default(),
            references: References::default(),
            buffers: Arc::new(BufferPool::new(SPARE_BYTES)),
            waits: Waits::default(),
            closed: AtomicBool::new(false),
            counters: ClientCounters::default(),
        })
    }

    /// Have pulls of a table ask from where their rows come, and pushes to it tell that, from now on:
    /// so it is known how stale they are.
    pub fn track_staleness(&self, table: u64) {
        self.origins.ask(table);
    }

    /// Keep the rows of pulls of a table from now on, or the sums of gradients that come with them,
    /// and have pushes to it bring these along: it compensates the delay of gradients.
    pub fn keep_references(&self, table: u64, reference: Reference) {
        self.references.keep(table, reference);
    }

    /// Go by this routing table from now on, also in the calls that wait; false if it is not
    /// newer than the one that is known.
    pub fn set_routing(&self, routing: Routing) -> bool {
        let routing = Arc::new(routing);
        let is_newer = self.routing.send_if_modified(|known| {
            match known {
                None => self
                    .first_generation
                    .store(routing.generation, Ordering::Release),
                Some(known) if known.version >= routing.version => return false,
                Some(_) => {}
            }
            // Before anybody sees the routing: who goes by it relies on other rows.
            if routing.generation > self.first_generation.load(Ordering::Acquire) {
                if !routing.loss.is_empty() {
                    self.loss.lock().clone_from(&routing.loss);
                }
                self.state_lost.store(true, Ordering::Release);
            }
            *known = Some(Arc::clone(&routing));
            true
        });
        if is_newer {
            // Requests under way hold the links they need.
            let leads_somewhere = |link: &Link| routing.servers.iter().any(|s| link.leads_to(s));
            self.links.lock().retain(|_, link| leads_somewhere(link));
        }
        is_newer
    }

    /// The routing that calls go by now.
    pub(crate) fn newest(&self) -> Option<Arc<Routing>> {
        self.routing.borrow().clone()
    }

    /// The version of the routing that calls go by now; 0 if there is none.
    pub fn routing_version(&self) -> u64 {
        self.routing.borrow().as_ref().map_or(0, |r| r.version)
    }

    /// Connect to every master. Of a server whose instance the routing does not name, the rows
    /// are relied on from then on: another instance is [`ClientError::StateLost`].
    pub async fn connect(&self, deadline: Deadline) -> Result<(), ClientError> {
        let mut backoff = Backoff::default();
        'again: loop {
            let routing = self.newest().ok_or_else(no_routing)?;
            for server in routing.masters() {
                let link = self.link(&routing.servers[server]);
                let reason = match self.connect_unless_moved(&link, &routing, deadline).await {
                    Some(Ok(_)) => continue,
                    Some(Err(Failure::Fatal(error))) => return Err(error),
                    Some(Err(Failure::Transient(reason))) => reason,
                    None if Instant::now() < deadline.at() => continue 'again,
                    None => "no connection could be opened in time".into(),
                };
                self.waits.trouble();
                self.waits.waiting(deadline.started(), || {
                    format!("{}: {reason}", link.server.name())
                });
                sleep_until((Instant::now() + backoff.next()).min(deadline.at())).await;
                if Instant::now() >= deadline.at() {
                    return Err(ClientError::Unavailable {
                        address: link.address().into(),
                        reason,
                        waited_ms: deadline.waited_ms(),
                    });
                }
                continue 'again;
            }
            return Ok(());
        }
    }

    /// The next thing that the watcher of the control plane, or the user, should hear of; `None`
    /// when the client ends. For one listener.
    pub async fn next_event(&self) -> Option<Event> {
        self.waits.next().await
    }

    /// End [`Self::next_event`].
    pub fn unwatch(&self) {
        self.waits.end();
    }

    /// Whether rows that this client relied on are gone.
    fn has_lost_state(&self) -> bool {
        self.state_lost.load(Ordering::Acquire)
    }

    fn check_generation(&self) -> Result<(), ClientError> {
        if !self.has_lost_state() {
            return Ok(());
        }
        let generation = self.newest().map_or(0, |routing| routing.generation);
        let first = self.first_generation.load(Ordering::Acquire);
        let loss = self.loss.lock();
        let became = if loss.is_empty() { "" } else { ": " };
        Err(ClientError::StateLost {
            reason: format!(
                "the cluster lost its rows of some slots, with every copy (generation \
                 {generation}, this client began with {first}){became}{loss}"
            ),
        })
    }

    /// Make a batch of keys ready for this cluster.
    pub fn plan(&self, keys: &[u64]) -> Result<Plan, ClientError> {
        Plan::new(keys, self.newest().ok_or_else(no_routing)?)
    }

    fn check_open(&self) -> Result<(), ClientError> {
        if self.closed.load(Ordering::Acquire) {
            return Err(ClientError::Closed);
        }
        self.check_generation()
    }

    /// Connect, unless a newer routing or the deadline comes first.
    async fn connect_unless_moved(
        &self,
        link: &Link,
        routing: &Routing,
        deadline: Deadline,
    ) -> Option<Result<Arc<Connection>, Failure>> {
        let mut changes = self.routing.subscribe();
        let newer = changes.wait_for(|newest| {
            let newest = newest.as_ref().map_or(0, |newest| newest.version);
            newest > routing.version
        });
        tokio::select! {
            biased;
            connected = link.connection() => Some(connected),
            _ = newer => None,
            () = sleep_until(deadline.at()) => None,
        }
    }

    /// The way to a server of a routing, or none for [`routing::NO_MASTER`].
    fn link_to(&self, routing: &Routing, server: u32) -> Option<Arc<Link>> {
        Some(self.link(routing.servers.get(server as usize)?))
    }

    fn link(&self, server: &ServerAddress) -> Arc<Link> {
        let mut links = self.links.lock();
        let key = (server.address.clone(), server.instance);
        let link = links.entry(key).or_insert_with(|| {
            Arc::new(Link::new(
                server,
                Arc::clone(&self.options),
                Arc::clone(&self.buffers),
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
