//! The pushes of one stream that are under way: their numbers, their order, their failures.
//!
//! A client has a queue for its own stream, in which it numbers pushes one by one and gives up
//! pushes that fail, and one for each task it works on, where [`super::batches`] numbers them and a
//! failed push ends everything: no batch may be counted without one before it.
//!
//! A queue does not know what a push `P` is: [`super::push`] sends pushes and waits for them.

use std::collections::BTreeMap;
use std::sync::Arc;

use backstay_core::stream::{StreamId, TransactionId, WINDOW};
use parking_lot::Mutex;

use super::batches::Batches;
use super::error::ClientError;
use super::own_stream::OwnStream;
use super::send_lease::SendLease;
use crate::clock;

/// Failures remembered until the caller asks.
const MAX_UNREPORTED: usize = 64;

/// See the module's documentation.
pub(super) struct PushQueue<P> {
    /// Held while a push gets its number and leaves, so that the order is the same everywhere.
    order: tokio::sync::Mutex<()>,
    open: Mutex<Open<P>>,
    max_in_flight: usize,
}

enum Numbers {
    Own { next: u64, stream: OwnStream },
    Task(Batches, Task),
}

/// A task's stream, and what is checked before each frame of its pushes leaves.
struct Task {
    stream: StreamId,
    lease: Arc<SendLease>,
}

struct Open<P> {
    numbers: Numbers,
    in_flight: BTreeMap<u64, Arc<P>>,
    /// The first failure of a task's push: there will be no more.
    failure: Option<ClientError>,
    /// Failures that the caller has not been told of, by number; the oldest few.
    unreported: BTreeMap<u64, ClientError>,
}

impl<P> PushQueue<P> {
    /// For the pushes that a client numbers itself.
    pub(super) fn own(stream: StreamId, max_in_flight: usize) -> Self {
        let stream = OwnStream::new(stream);
        Self::new(Numbers::Own { next: 0, stream }, max_in_flight)
    }

    /// For the pushes of a task.
    pub(super) fn task(stream: StreamId, batches: Batches, max_in_flight: usize) -> Self {
        let lease = Arc::default();
        let task = Task { stream, lease };
        Self::new(Numbers::Task(batches, task), max_in_flight)
    }

    fn new(numbers: Numbers, max_in_flight: usize) -> Self {
        Self {
            order: tokio::sync::Mutex::default(),
            open: Mutex::new(Open {
                numbers,
                in_flight: BTreeMap::new(),
                failure: None,
                unreported: BTreeMap::new(),
            }),
            max_in_flight: max_in_flight.clamp(1, WINDOW as usize / 2),
        }
    }

    /// The stream of the newest pushes.
    pub(super) fn stream(&self) -> StreamId {
        match &self.open.lock().numbers {
            Numbers::Own { stream, .. } => stream.newest(),
            Numbers::Task(_, task) => task.stream,
        }
    }

    /// The lease of the task, of which these are the pushes.
    pub(super) fn lease(&self) -> Option<Arc<SendLease>> {
        match &self.open.lock().numbers {
            Numbers::Own { .. } => None,
            Numbers::Task(_, task) => Some(Arc::clone(&task.lease)),
        }
    }

    /// Wait for the turn of a push to get its number and leave. It ends when the guard goes.
    pub(super) async fn turn(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.order.lock().await
    }

    /// The push to wait for before another may leave.
    pub(super) fn oldest_if_full(&self) -> Option<Arc<P>> {
        self.open.lock().oldest_if_full(self.max_in_flight)
    }

    /// Number a push and keep it in flight. Returns the floor to send along, too. The caller must
    /// have the turn.
    pub(super) fn number(
        &self,
        ordinal: u32,
        make: impl FnOnce(TransactionId, Arc<SendLease>) -> P,
    ) -> Result<(Arc<P>, u64), ClientError> {
        let mut open = self.open.lock();
        if let Some(failure) = &open.failure {
            return Err(failure.clone());
        }
        let (sequence, stream, lease) = match &mut open.numbers {
            Numbers::Own { next, stream } => {
                *next += 1;
                let (stream, lease) = stream.of_next(clock::now());
                (*next - 1, stream, lease)
            }
            Numbers::Task(batches, task) => {
                let sequence = batches.take(ordinal).map_err(ClientError::Invalid)?;
                (sequence, task.stream, Arc::clone(&task.lease))
            }
        };
        let push = Arc::new(make(TransactionId { stream, sequence }, lease));
        // Under one lock: no floor may pass a number that is taken and not in flight.
        open.in_flight.insert(sequence, Arc::clone(&push));
        let floor = open.floor();
        Ok((push, floor))
    }

    /// A push will not be tried any more.
    pub(super) fn push_ended(&self, sequence: u64, outcome: &Result<(), ClientError>) {
        let mut open = self.open.lock();
        open.in_flight.remove(&sequence);
        if let Numbers::Task(batches, _) = &mut open.numbers {
            batches.push_ended(sequence, outcome.is_ok());
        }
        if let Err(error) = outcome {
            open.fail(error);
            // The caller revoked the lease itself and need not hear of it.
            if open.unreported.len() < MAX_UNREPORTED
                && !matches!(error, ClientError::TaskLeaseLost)
            {
                open.unreported.insert(sequence, error.clone());
            }
        }
    }

    /// A push of a task failed before it had a number: no more will follow.
    pub(super) fn fail(&self, error: &ClientError) {
        let mut open = self.open.lock();
        if let Numbers::Task(batches, _) = &mut open.numbers {
            batches.fail();
        }
        open.fail(error);
    }

    /// The caller was told of the outcome of a push.
    pub(super) fn reported(&self, sequence: u64) {
        self.open.lock().unreported.remove(&sequence);
    }

    /// Do something with the batches of a task, unless a push of it has failed.
    pub(super) fn with_batches<T>(
        &self,
        work: impl FnOnce(&mut Batches) -> Result<T, String>,
    ) -> Result<T, ClientError> {
        let mut open = self.open.lock();
        if let Some(failure) = &open.failure {
            return Err(failure.clone());
        }
        match &mut open.numbers {
            Numbers::Task(batches, _) => work(batches).map_err(ClientError::Invalid),
            Numbers::Own { .. } => Err(ClientError::Invalid("this stream has no batches".into())),
        }
    }

    /// How many batches of a task are acknowledged.
    pub(super) fn acknowledged_batches(&self) -> u64 {
        match &self.open.lock().numbers {
            Numbers::Task(batches, _) => batches.acknowledged(),
            Numbers::Own { .. } => 0,
        }
    }

    /// The first failure of a task's push.
    pub(super) fn failure(&self) -> Option<ClientError> {
        self.open.lock().failure.clone()
    }

    /// Whether there is nothing to wait for and nothing to tell.
    pub(super) fn is_quiet(&self) -> bool {
        let open = self.open.lock();
        open.in_flight.is_empty() && open.unreported.is_empty()
    }

    /// Do something while no push is getting its number.
    pub(super) async fn between_pushes<T>(&self, work: impl FnOnce() -> T) -> T {
        let _turn = self.turn().await;
        work()
    }

    /// The pushes that are under way.
    pub(super) fn in_flight(&self) -> Vec<Arc<P>> {
        self.open.lock().in_flight.values().cloned().collect()
    }

    /// The first failure that the caller was not told of. All count as told then.
    pub(super) fn take_failure(&self) -> Option<ClientError> {
        let unreported = std::mem::take(&mut self.open.lock().unreported);
        unreported.into_values().next()
    }
}

impl<P> Open<P> {
    /// Every number below it is over: applied, or given up where that is allowed.
    fn floor(&self) -> u64 {
        match &self.numbers {
            Numbers::Own { next, .. } => self.in_flight.keys().next().map_or(*next, |&first| first),
            Numbers::Task(batches, _) => batches.floor(),
        }
    }

    /// The push to wait for before another may leave: too many are under way, or the oldest
    /// lags so far behind that slots could not remember a newer one.
    fn oldest_if_full(&self, max_in_flight: usize) -> Option<Arc<P>> {
        let (&oldest, push) = self.in_flight.first_key_value()?;
        let lags = match &self.numbers {
            Numbers::Own { next, .. } => next - oldest >= WINDOW / 2,
            Numbers::Task(batches, _) => batches.highest().saturating_sub(oldest) >= WINDOW,
        };
        (self.in_flight.len() >= max_in_flight || lags).then(|| Arc::clone(push))
    }

    fn fail(&mut self, error: &ClientError) {
        if matches!(self.numbers, Numbers::Task(..)) {
            self.failure.get_or_insert_with(|| error.clone());
        }
    }
}
