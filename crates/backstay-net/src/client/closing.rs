//! Waits for pushes under way, and ends streams and the client.

use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::Duration;

use backstay_core::stream::StreamId;
use backstay_core::wire::{CloseStream, Opcode};
use tokio::time::{sleep_until, timeout_at, Instant};

use super::connection::{Connection, Lost, Reply};
use super::error::ClientError;
use super::link::{Answer, Backoff, Deadline, Failure};
use super::out_frame::OutFrame;
use super::push::Push;
use super::queue::PushQueue;
use super::routing::Routing;
use super::{no_routing, Client};

/// How long a server may take to answer when a closing client asks it to forget its stream.
const FAREWELL: Duration = Duration::from_secs(2);

impl Client {
    /// Wait until every push under way has ended, pushes of tasks included; the first failure
    /// is returned.
    pub async fn flush(&self) -> Result<(), ClientError> {
        let mut outcome = self.pushes.flush(self).await;
        for queue in self.task_queues() {
            outcome = outcome.and(queue.flush(self).await);
        }
        outcome
    }

    /// Wait for what is under way, tell the servers to forget the client's own stream, disconnect.
    /// The streams of tasks stay: only a worker that knows that a task is done may close them.
    pub async fn close(&self, deadline: Deadline) -> Result<(), ClientError> {
        // In this order: a push that left behind the end of its stream would be skipped as a late
        // copy, without being applied.
        let close = || self.closed.swap(true, Ordering::AcqRel);
        let was_closed = self.pushes.between_pushes(close).await;
        for queue in self.task_queues() {
            queue.between_pushes(|| ()).await;
        }
        let flushed = self.flush().await;
        if was_closed {
            return flushed;
        }
        self.unwatch();
        let version = self.routing_version();
        let links: Vec<_> = self.links.lock().values().cloned().collect();
        for link in links {
            // Best effort: a server that is gone has forgotten the stream anyway.
            if let Some(connection) = link.open_connection() {
                let until = deadline.at().min(Instant::now() + FAREWELL);
                let told = timeout_at(until, tell(&connection, self.pushes.stream(), version));
                if !matches!(told.await, Ok(Ok(_))) {
                    tracing::debug!(address = link.address(), "the stream was not closed");
                }
            }
            link.close().await;
        }
        flushed
    }

    /// Have every master close a stream, whichever client pushed in it: what still comes of it
    /// counts as a late copy and is skipped. Only for streams whose pushes have ended for good.
    /// A second call changes nothing.
    pub async fn close_stream(
        &self,
        stream: StreamId,
        deadline: Deadline,
    ) -> Result<(), ClientError> {
        let mut backoff = Backoff::default();
        loop {
            let routing = self.newest().ok_or_else(no_routing)?;
            // Check after reading the routing: with a newer one, the rows may be other ones.
            self.check_open()?;
            let (address, reason) = match self.close_once(stream, &routing, deadline).await? {
                // Slots that moved meanwhile may have been with neither master.
                None if self.routing_version() == routing.version => return Ok(()),
                None => continue,
                Some(unfinished) => unfinished,
            };
            if Instant::now() >= deadline.at() {
                return Err(ClientError::Unavailable {
                    address,
                    reason,
                    waited_ms: deadline.waited_ms(),
                });
            }
            self.waits.trouble();
            let waits_for = || format!("closing the stream of a task: {address}: {reason}");
            self.waits.waiting(deadline.started(), waits_for);
            self.counters.retries.fetch_add(1, Ordering::Relaxed);
            backoff.refused();
            sleep_until((Instant::now() + backoff.next()).min(deadline.at())).await;
        }
    }

    /// Tell every master of a routing once. Returns where and why a master has not closed the
    /// stream, if a retry may help.
    async fn close_once(
        &self,
        stream: StreamId,
        routing: &Routing,
        deadline: Deadline,
    ) -> Result<Option<(String, String)>, ClientError> {
        if !routing.is_complete() {
            let reason = format!("slots have {}", routing.no_master());
            return Ok(Some((String::new(), reason)));
        }
        let mut asked = Vec::new();
        for server in routing.masters() {
            let link = self.link(&routing.servers[server]);
            let failed = |reason: String| Ok(Some((link.address().to_owned(), reason)));
            let connection = match self.connect_unless_moved(&link, routing, deadline).await {
                Some(Ok(connection)) => connection,
                Some(Err(Failure::Fatal(error))) => return Err(error),
                Some(Err(Failure::Transient(reason))) => return failed(reason),
                None => return failed("no connection could be opened in time".into()),
            };
            asked.push((Arc::clone(&link), connection));
        }
        // All at once: each waits for its backups.
        let mut answers = tokio::task::JoinSet::new();
        let version = routing.version;
        for (link, connection) in asked {
            let until = deadline.at().min(Instant::now() + link.stall_timeout());
            answers.spawn(async move {
                let told = timeout_at(until, tell(&connection, stream, version)).await;
                (link, told.ok())
            });
        }
        let mut unfinished = None;
        while let Some(answer) = answers.join_next().await {
            let Ok((link, told)) = answer else {
                continue;
            };
            let reason = match told.map(|reply| link.judge(reply, Opcode::CloseStreamReply)) {
                Some(Ok(Answer::Frame(_))) => continue,
                Some(Ok(Answer::Again { reason, .. })) => reason,
                Some(Err(error)) => return Err(error),
                None => "no answer in time".into(),
            };
            unfinished = Some((link.address().to_owned(), reason));
        }
        Ok(unfinished)
    }

    fn task_queues(&self) -> Vec<Arc<PushQueue<Push>>> {
        self.tasks.lock().clone()
    }
}

/// Tell a server that a stream has ended.
async fn tell(connection: &Connection, stream: StreamId, routing_version: u64) -> Reply {
    let close = CloseStream {
        stream,
        routing_version,
    };
    let meta = close.encode();
    let mut frame = OutFrame::new(Opcode::CloseStream, &meta, 0, 0, Vec::new());
    let request_id = connection.next_request_id();
    frame.set_request_id(request_id);
    let lost = || Lost::unanswered("the connection was closed");
    match connection.send(request_id, frame.bytes(), || true).await? {
        Some(reply) => reply.await.unwrap_or_else(|_| Err(lost())),
        None => Err(lost()),
    }
}
