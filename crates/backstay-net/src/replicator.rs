//! Drives the replication state machine of one node: gives it the time and the rows, does its
//! work, and delivers its answers.
//!
//! The state is one value behind one lock, held for the short steps that put transactions in
//! order; rows are changed outside of it, queue by queue. A node none of whose slots has a backup
//! takes a shorter way: it applies pushes at once, side by side on different stripes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use backstay_core::engine::{ServingState, StageReport};
use backstay_core::error::Refusal;
use backstay_core::life::Gone;
use backstay_core::replication::{
    Message, Micros, NodeId, Replica, ReplicaOptions, Report, RoutingTable, Rows, Token, Way, Work,
};
use backstay_core::stream::{StreamId, TransactionId};
use backstay_core::transaction::Transaction;
use parking_lot::{Condvar, Mutex, RwLock};
use tokio::sync::{oneshot, watch, Notify};
use tracing::{debug, info, warn};

use crate::clock::Clock;
use crate::events::{self, push_event};
use crate::memory::Part;
use crate::stats::{self, ReplicationTimes, SlotCounts};
use crate::store::{retry_later, Asked, ShortOf, Store};

/// How a push went.
pub type Outcome = Result<StageReport, Refusal>;

/// The answer to a push: known now, or later.
#[derive(Debug)]
pub enum Answer {
    /// Every slot had it before, or there is no backup to wait for.
    Now(StageReport),
    /// When the backups have confirmed it.
    Later(oneshot::Receiver<Outcome>),
}

/// A push that waits for backups.
struct Waiter {
    begun: Instant,
    id: TransactionId,
    lsn: u64,
    /// What went by it, once it is applied.
    gone: Gone,
    answer: oneshot::Sender<Outcome>,
}

struct State {
    replica: Replica,
    waiters: BTreeMap<Token, Waiter>,
    next_token: Token,
    /// Apply queues that a thread works on.
    busy: BTreeSet<NodeId>,
    /// The newest connection to each backup, and from each master, by the master's count. Messages
    /// that still come on an older one must be ignored.
    current: BTreeMap<(NodeId, Way), u64>,
}

impl State {
    /// False if a newer one has begun already.
    fn begin(&mut self, node: NodeId, way: Way, connection: u64) -> bool {
        let known = self.current.entry((node, way)).or_default();
        let is_newer = connection > *known;
        *known = connection.max(*known);
        is_newer
    }

    fn is_current(&self, node: NodeId, way: Way, connection: u64) -> bool {
        self.current.get(&(node, way)) == Some(&connection)
    }
}

/// See the module's documentation.
pub struct Replicator {
    store: Arc<Store>,
    clock: Clock,
    state: Mutex<State>,
    /// Whether any slot of this node has, or gets, a replica elsewhere. A push that takes the short
    /// way holds it for reading, so no such push is under way when it changes.
    has_backups: RwLock<bool>,
    /// Until when reads may be answered; see [`Replica::serving_until`].
    serving_until: AtomicU64,
    /// Notified when there are messages for a node on a connection to it.
    outgoing: Mutex<BTreeMap<(NodeId, Way), Arc<Notify>>>,
    /// The nodes to be connected to, with their addresses.
    links: watch::Sender<BTreeMap<NodeId, String>>,
    report: Mutex<u64>,
    reported: Condvar,
    stopped: AtomicBool,
    /// Counts the connections to backups.
    connections: AtomicU64,
    /// Since when slots that were gained wait to be served.
    recovering_since: Mutex<Option<Instant>>,
    /// When something of streams of clients and tasks was applied here last.
    heard: Mutex<BTreeMap<StreamId, Micros>>,
    /// The stream of a task of which nothing was heard for so long ends.
    stream_grace: AtomicU64,
    relieving: Mutex<relief::Relieving>,
    periods: Mutex<periods::Periods>,
    /// Bytes of copies on their way that are counted.
    copy_bytes: AtomicU64,
    /// What takes how long.
    pub times: ReplicationTimes,
}

impl Replicator {
    /// For the rows in `store`, as the process `me`.
    pub fn new(me: NodeId, store: Arc<Store>, options: ReplicaOptions) -> Arc<Self> {
        Self::with_clock(me, store, options, Clock::default())
    }

    /// The same, by this clock.
    pub fn with_clock(
        me: NodeId,
        store: Arc<Store>,
        options: ReplicaOptions,
        clock: Clock,
    ) -> Arc<Self> {
        let slots = store.space().count();
        Arc::new(Self {
            store,
            clock,
            state: Mutex::new(State {
                replica: Replica::new(me, slots, options),
                waiters: BTreeMap::new(),
                next_token: 0,
                busy: BTreeSet::new(),
                current: BTreeMap::new(),
            }),
            has_backups: RwLock::new(false),
            // Before the first routing record only the routing says what is served.
            serving_until: AtomicU64::new(Micros::MAX),
            outgoing: Mutex::default(),
            links: watch::channel(BTreeMap::new()).0,
            report: Mutex::new(0),
            reported: Condvar::new(),
            stopped: AtomicBool::new(false),
            connections: AtomicU64::new(0),
            recovering_since: Mutex::default(),
            heard: Mutex::default(),
            stream_grace: AtomicU64::new(streams::GRACE),
            relieving: Mutex::default(),
            periods: Mutex::default(),
            copy_bytes: AtomicU64::new(0),
            times: ReplicationTimes::default(),
        })
    }

    /// The rows.
    pub fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// This process.
    pub fn me(&self) -> NodeId {
        self.state.lock().replica.me()
    }

    fn now(&self) -> Micros {
        self.clock.now()
    }

    /// Go by a newer routing record.
    pub fn set_routing(&self, table: RoutingTable) {
        let table = Arc::new(table);
        let version = table.version;
        {
            let mut has_backups = self.has_backups.write();
            self.with(|replica, now, store| {
                replica.set_routing(now, store, Arc::clone(&table));
                let wanted = replica.wanted_links();
                *has_backups = !wanted.is_empty();
                let address = |member: &backstay_core::replication::routing::Member| {
                    let wanted = wanted.contains(&member.instance);
                    wanted.then(|| (member.instance, member.data_address.clone()))
                };
                let links = table.members.iter().filter_map(address).collect();
                self.links.send_replace(links);
            });
        }
        info!(version, "going by a new routing table");
    }

    /// The node's lease in the coordination store is alive until this moment of the
    /// [clock](crate::clock); 0: it is lost. A moment, not a duration: a thread that is
    /// paused on the way here would lengthen the lease.
    pub fn hold_lease_until(&self, until: Micros) {
        self.with(|replica, _, _| replica.set_lease(until));
    }

    /// Take on a push that [`Store::prepare`] has checked.
    pub fn push(
        self: &Arc<Self>,
        transaction: Transaction,
    ) -> Result<(Answer, Option<Vec<u64>>), Refusal> {
        let has_backups = self.has_backups.read();
        if !*has_backups {
            self.check_lease()?;
            let report = self.store.apply(&transaction)?;
            self.hear(transaction.id.stream);
            // Look again: after a pause another node may be master here, without this push.
            if let Err(refusal) = self.check_lease() {
                return Err(Refusal::Incomplete(refusal.to_string()));
            }
            return Ok((Answer::Now(report), Some(transaction.batch.into_words())));
        }
        drop(has_backups);
        let (answer, receiver) = oneshot::channel();
        let transaction = Arc::new(transaction);
        let outcome = self.with_state(|state, now, store| {
            state.next_token += 1;
            let token = state.next_token;
            let outcome = state.replica.push(now, store, token, &transaction);
            if let Ok(None) = outcome {
                let waiter = Waiter {
                    begun: Instant::now(),
                    id: transaction.id,
                    lsn: state.replica.last_lsn(),
                    gone: Gone::default(),
                    answer,
                };
                push_event!(waiter.id, "push staged", lsn = waiter.lsn);
                state.waiters.insert(token, waiter);
            }
            outcome
        })?;
        Ok((outcome.map_or(Answer::Later(receiver), Answer::Now), None))
    }

    /// Take on a transaction of this server's own, and wait for the backups; what went.
    fn push_and_wait(self: &Arc<Self>, made: Transaction) -> Result<Gone, Refusal> {
        match self.push(made)?.0 {
            Answer::Now(report) => Ok(report.gone),
            Answer::Later(outcome) => {
                let report = outcome.blocking_recv();
                Ok(report.unwrap_or(Err(Refusal::Stopping))?.gone)
            }
        }
    }

    /// Refuse a read if another node may be master by now.
    pub fn check_alive(&self) -> Result<(), Refusal> {
        self.check_serving("this master waits for its backups' read leases, or its lease is over")
    }

    /// The same of a push at a node without backups, which needs its own lease only.
    fn check_lease(&self) -> Result<(), Refusal> {
        self.check_serving("this node's lease in the coordination store is over")
    }

    fn check_serving(&self, what_is_over: &str) -> Result<(), Refusal> {
        if self.now() < self.serving_until.load(Ordering::Acquire) {
            return Ok(());
        }
        Err(Refusal::NotReady(what_is_over.into()))
    }

    /// Read rows: committed state, of a moment at which this node was certainly the master.
    pub fn pull(&self, table: u64, keys: &[u64], out: &mut [f32]) -> Result<(), Refusal> {
        self.pull_and_tell(table, keys, out, Asked::default())
    }

    /// The same with what else is asked for; see [`Store::pull_and_tell`].
    pub fn pull_and_tell(
        &self,
        table: u64,
        keys: &[u64],
        out: &mut [f32],
        asked: Asked<'_>,
    ) -> Result<(), Refusal> {
        self.store.pull_and_tell(table, keys, out, asked)?;
        self.check_alive()
    }

    /// The number of the next connection to a backup.
    pub fn next_connection(&self) -> u64 {
        self.connections.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// A connection to a backup was opened.
    pub fn link_up(&self, node: NodeId, connection: u64) {
        debug!(node, connection, "connected to a backup");
        self.with_state(|state, now, store| {
            if state.begin(node, Way::ToBackup, connection) {
                state.replica.link_up(now, store, node);
            }
        });
    }

    /// A connection to a backup broke.
    pub fn link_down(&self, node: NodeId, connection: u64) {
        self.with_state(|state, now, store| {
            if state.is_current(node, Way::ToBackup, connection) {
                state.replica.link_down(now, store, node, false);
            }
        });
    }

    /// No connection to a backup could be opened. `refused`: its port refuses connections.
    pub fn no_link(&self, node: NodeId, refused: bool) {
        self.with(|replica, now, store| replica.link_down(now, store, node, refused));
    }

    /// A message from a backup.
    pub fn receive(&self, from: NodeId, connection: u64, message: Message) {
        self.with_state(|state, now, store| {
            if state.is_current(from, Way::ToBackup, connection) {
                state.replica.receive(now, store, from, message);
            }
        });
    }

    /// A master has connected. False if it has connected again since: the sessions of two
    /// connections may run in another order than the master opened them.
    pub fn master_connected(&self, node: NodeId, connection: u64) -> bool {
        self.with_state(|state, _, _| {
            let is_newer = state.begin(node, Way::ToMaster, connection);
            if is_newer {
                state.replica.master_connected(node);
            }
            is_newer
        })
    }

    /// Count a master's push, and reserve room for the rows that it may create here, if there is any.
    ///
    /// Not in slots whose copy is under way, because most of these rows come with it. When the copy
    /// ends, [`Rows::check_behind`] finds out which rows are new.
    pub(crate) fn make_room(&self, transaction: &mut Transaction) {
        if !self.store.has_memory_limit() {
            // Nor does anything depend on whether it waits for a copy.
            return self.store.make_room(transaction, &[], false);
        }
        let mut runs = transaction.runs().to_vec();
        {
            let state = self.state.lock();
            runs.retain(|run| !state.replica.is_copied_here(run.slot));
        }
        let waits = runs.len() < transaction.runs().len();
        self.store.make_room(transaction, &runs, waits);
    }

    /// A message from a master. Its answer goes to `answers` before any slow work. False if that
    /// master has connected again since, so that this connection is an old one. A heartbeat is
    /// always answered: it carries no order, and its answer says when it was sent.
    pub fn obey(
        &self,
        from: NodeId,
        connection: u64,
        message: Message,
        answers: &mut Vec<Message>,
    ) -> bool {
        let begun = Instant::now();
        let prepared = match &message {
            Message::Prepare {
                lsn, transaction, ..
            } => Some((*lsn, transaction.id)),
            Message::Rollback { lsns } => {
                debug!(target: "backstay_net::push", master = from, ?lsns, "pushes discarded");
                None
            }
            _ => None,
        };
        let copied = match &message {
            Message::CopyEnd { slot, .. } => Some(slot.slot),
            _ => None,
        };
        {
            let mut state = self.state.lock();
            let is_heartbeat = matches!(message, Message::Heartbeat { .. });
            if !is_heartbeat && !state.is_current(from, Way::ToMaster, connection) {
                return false;
            }
            let now = self.now();
            state.replica.receive(now, &*self.store, from, message);
            answers.extend(state.replica.take_messages(from, Way::ToMaster));
            self.publish(&state.replica);
        }
        if let (Some(slot), Some(Message::Refused { reason, .. })) = (copied, answers.last()) {
            warn!(
                slot,
                master = from,
                ?reason,
                "a copy of a slot could not be taken in"
            );
        }
        if let Some((lsn, id)) = prepared {
            self.times.stage.record(begun.elapsed());
            events::backup_answers(id, lsn, from, answers.last());
        }
        true
    }

    /// Do what is to be done in every apply queue that no thread works on.
    pub fn work(&self) {
        let mut state = self.state.lock();
        for queue in state.replica.apply_queues() {
            if !state.busy.insert(queue) {
                continue;
            }
            while let Some(work) = state.replica.next_work(queue) {
                let apart = || self.work_apart(queue, work);
                let (work, gone) = parking_lot::MutexGuard::unlocked(&mut state, apart);
                self.finish(&mut state, work, gone);
            }
            state.busy.remove(&queue);
        }
        self.publish(&state.replica);
    }

    /// The part of a piece of work that takes time, while others have the state. What is left of it,
    /// and what went by it.
    fn work_apart(&self, queue: NodeId, work: Work) -> (Work, Gone) {
        match work {
            // It may look at all slots, for rows to give up.
            Work::Answer {
                token,
                outcome: Err(Refusal::MemoryLimit(why)),
                alone,
            } => {
                let refusal = if self.store.begin_relief(ShortOf::ABackup) {
                    retry_later(&why)
                } else {
                    Refusal::MemoryLimit(why)
                };
                let answer = Work::Answer {
                    token,
                    outcome: Err(refusal),
                    alone,
                };
                (answer, Gone::default())
            }
            work => {
                let gone = self.commit(queue, &work);
                (work, gone)
            }
        }
    }

    /// Apply what a piece of work commits; what went by it.
    fn commit(&self, queue: NodeId, work: &Work) -> Gone {
        let Work::Commit {
            transaction,
            places,
            ..
        } = work
        else {
            return Gone::default();
        };
        let gone = self.store.commit(transaction, places);
        let gone = gone.unwrap_or_else(|refusal| {
            // Checked when it was staged; tables are never dropped.
            warn!(%refusal, "a decided push could not be applied");
            Gone::default()
        });
        self.hear(transaction.id.stream);
        push_event!(transaction.id, "push applied", master = queue);
        gone
    }

    fn finish(&self, state: &mut State, work: Work, gone: Gone) {
        match work {
            Work::Commit { token, .. } => {
                let waiter = token.and_then(|token| state.waiters.get_mut(&token));
                if let Some(waiter) = waiter {
                    waiter.gone += gone;
                }
            }
            Work::Recovered { lsn } => {
                let now = self.now();
                state.replica.recovered(now, &*self.store, lsn);
            }
            Work::Answer {
                token,
                outcome,
                alone,
            } => {
                let outcome = state.replica.acknowledge(self.now(), outcome, alone);
                if let Some(waiter) = state.waiters.remove(&token) {
                    let gone = waiter.gone;
                    let outcome = outcome.map(|report| StageReport { gone, ..report });
                    let times = match &outcome {
                        Ok(_) => {
                            push_event!(waiter.id, "push committed", lsn = waiter.lsn);
                            &self.times.commit
                        }
                        Err(reason) => {
                            push_event!(waiter.id, "push rolled back", lsn = waiter.lsn, %reason);
                            &self.times.rollback
                        }
                    };
                    times.record(waiter.begun.elapsed());
                    // The caller may be gone.
                    let _ = waiter.answer.send(outcome);
                }
            }
        }
    }

    fn with<T>(&self, step: impl FnOnce(&mut Replica, Micros, &Store) -> T) -> T {
        self.with_state(|state, now, store| step(&mut state.replica, now, store))
    }

    /// One step of the state machine, and the work that comes of it.
    fn with_state<T>(&self, step: impl FnOnce(&mut State, Micros, &Store) -> T) -> T {
        let outcome = {
            let mut state = self.state.lock();
            let now = self.now();
            let outcome = step(&mut state, now, &self.store);
            self.publish(&state.replica);
            outcome
        };
        self.work();
        outcome
    }

    /// Let others see what changed. Called with the state locked.
    fn publish(&self, replica: &Replica) {
        if replica.routing().version > 0 {
            self.serving_until
                .store(replica.serving_until(), Ordering::Release);
        }
        let mut recovering_since = self.recovering_since.lock();
        if replica.is_recovering() {
            recovering_since.get_or_insert_with(Instant::now);
        } else if let Some(since) = recovering_since.take() {
            self.times.promotion.record(since.elapsed());
        }
        drop(recovering_since);
        let copies = replica.copy_bytes();
        let before = self.copy_bytes.swap(copies, Ordering::Relaxed);
        self.store.memory().change(Part::Copies, before, copies);
        let outgoing = self.outgoing.lock();
        for (node, way) in replica.with_messages() {
            if let Some(notify) = outgoing.get(&(node, way)) {
                notify.notify_one();
            }
        }
        let mut known = self.report.lock();
        if *known != replica.report().0 {
            *known = replica.report().0;
            self.reported.notify_all();
        }
    }

    /// Messages for a backup, in order.
    /// `None` if the connection was replaced: they are for the newer one.
    pub(crate) fn take_outgoing(
        &self,
        node: NodeId,
        way: Way,
        connection: u64,
    ) -> Option<Vec<Message>> {
        let mut state = self.state.lock();
        let current = state.is_current(node, Way::ToBackup, connection);
        current.then(|| state.replica.take_messages(node, way).into())
    }

    /// Notified when there are messages for a backup.
    pub(crate) fn bell(&self, node: NodeId, way: Way) -> Arc<Notify> {
        Arc::clone(self.outgoing.lock().entry((node, way)).or_default())
    }

    /// The nodes to be connected to, as that changes.
    pub(crate) fn links(&self) -> watch::Receiver<BTreeMap<NodeId, String>> {
        self.links.subscribe()
    }

    /// Tell the state machine the time. Returns whether there is work now, which the caller does
    /// elsewhere, because applying pushes must not delay the next tick.
    pub(crate) fn tick(&self) -> bool {
        let mut state = self.state.lock();
        let now = self.now();
        state.replica.tick(now, &*self.store);
        self.publish(&state.replica);
        !state.replica.apply_queues().is_empty()
    }

    /// Wait until the report's number is above `known`, or for `timeout`, and return both.
    pub fn wait_report(&self, known: u64, timeout: Duration) -> (u64, Report) {
        let until = Instant::now() + timeout;
        {
            let mut number = self.report.lock();
            while *number <= known && !self.stopped.load(Ordering::Acquire) {
                if self.reported.wait_until(&mut number, until).timed_out() {
                    break;
                }
            }
        }
        let state = self.state.lock();
        let (number, report) = state.replica.report();
        (number, report.clone())
    }

    /// End all waits.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        let _number = self.report.lock();
        self.reported.notify_all();
    }

    /// What has been done so far, and how long it took.
    pub(crate) fn snapshot(&self) -> stats::Replication {
        let (counters, pending) = {
            let state = self.state.lock();
            (state.replica.counters, state.replica.pending())
        };
        stats::Replication::of(&counters, pending as u64, &self.times)
    }

    /// (term, whose order it follows, whether a copy of it is under way here) of a slot.
    pub fn slot_state(&self, slot: u32) -> (u64, NodeId, bool) {
        self.state.lock().replica.slot_state(slot)
    }

    /// What this node's slots are like now.
    pub(crate) fn slot_counts(&self) -> SlotCounts {
        let (store, mut counts) = (self.store(), SlotCounts::default());
        for slot in 0..store.space().count() {
            let (_, source, copying) = self.slot_state(slot);
            let (position, end) = store.position(slot);
            counts.staged += end - position;
            let counter = match store.serving_state(slot) {
                ServingState::Serving => &mut counts.master,
                ServingState::Waiting => &mut counts.waiting,
                ServingState::Elsewhere if source == 0 => &mut counts.outside,
                ServingState::Elsewhere if copying => &mut counts.copied,
                ServingState::Elsewhere => &mut counts.backup,
            };
            *counter += 1;
        }
        counts
    }
}

mod checkpoints;
pub(crate) mod periods;
pub(crate) mod relief;
pub(crate) mod streams;
#[cfg(test)]
mod tests;
