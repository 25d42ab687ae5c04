//! Pushes into the stream of a task, beside the client's own: numbered by batch and table, sent
//! while the worker's lease of the task is alive.

use std::sync::Arc;

use backstay_core::replication::Micros;
use backstay_core::stream::StreamId;
use backstay_core::transaction::Change;

use super::batches::{Batches, MAX_TABLES};
use super::error::ClientError;
use super::link::Deadline;
use super::plan::Plan;
use super::push::{Push, PushRequest};
use super::queue::PushQueue;
use super::Client;

/// See the module's documentation. Once a push of it has failed, all later ones fail with the
/// same error.
pub struct TaskStream {
    queue: Arc<PushQueue<Push>>,
}

impl Client {
    /// A stream for the pushes of a task with so many tables, of which the batches below
    /// `first_batch` are acknowledged everywhere.
    pub fn task_stream(
        &self,
        stream: StreamId,
        tables: u32,
        first_batch: u64,
    ) -> Result<TaskStream, ClientError> {
        self.check_open()?;
        if !(1..=MAX_TABLES).contains(&tables) {
            let reason = format!("a task may have 1 to {MAX_TABLES} tables, not {tables}");
            return Err(ClientError::Invalid(reason));
        }
        let batches = Batches::new(tables, first_batch);
        let most = self.options.max_pushes_in_flight;
        let queue = Arc::new(PushQueue::task(stream, batches, most));
        let mut tasks = self.tasks.lock();
        // A queue that is not used stays only if a flush has to wait for it or to tell of it.
        tasks.retain(|known| Arc::strong_count(known) > 1 || !known.is_quiet());
        tasks.push(Arc::clone(&queue));
        Ok(TaskStream { queue })
    }

    /// Send a push as that of the current batch to the table with this ordinal; see
    /// [`Client::push`].
    pub async fn push_in(
        &self,
        stream: &TaskStream,
        ordinal: u32,
        request: &PushRequest<'_>,
        plan: &Plan,
        deadline: Deadline,
    ) -> Result<Arc<Push>, ClientError> {
        let attempt = Attempt(Some(&stream.queue));
        let updates = request.change.updates() || matches!(request.change, Change::Decay { .. });
        let pushed = if updates {
            let queue = &stream.queue;
            self.push_to(queue, ordinal, request, plan, deadline).await
        } else {
            let reason = "only updates go into the stream of a task";
            Err(ClientError::Invalid(reason.into()))
        };
        attempt.ends(&pushed);
        pushed
    }
}

/// A push of a task that is being made: if it fails, or its caller is interrupted, the batch is
/// not whole and no more pushes may follow.
struct Attempt<'a>(Option<&'a PushQueue<Push>>);

impl Attempt<'_> {
    fn ends(mut self, pushed: &Result<Arc<Push>, ClientError>) {
        if let (Some(queue), Err(error)) = (self.0.take(), pushed) {
            queue.fail(error);
        }
    }
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        if let Some(queue) = self.0 {
            queue.fail(&ClientError::Unavailable {
                address: "this push was not sent".into(),
                reason: "the call was interrupted".into(),
                waited_ms: 0,
            });
        }
    }
}

impl TaskStream {
    /// End the batch before, and number pushes as pushes of this one.
    pub fn begin_batch(&self, batch: u64) -> Result<(), ClientError> {
        self.queue.with_batches(|batches| batches.begin(batch))
    }

    /// No more pushes of the batch will come.
    pub fn end_batch(&self) {
        // After a failure there is nothing to end.
        let _ = self.queue.with_batches(|batches| {
            batches.end();
            Ok(())
        });
    }

    /// Let frames leave until this moment of the [clock](crate::clock): first sends and retries alike wait afterwards.
    pub fn lease_until(&self, until: Micros) {
        if let Some(lease) = self.queue.lease() {
            lease.set_until(until);
        }
    }

    /// Let no frame leave any more; pushes under way and later ones fail.
    pub fn revoke(&self) {
        if let Some(lease) = self.queue.lease() {
            lease.revoke();
        }
        self.queue.fail(&ClientError::TaskLeaseLost);
    }

    /// How many batches, counted from 0, have ended and are acknowledged everywhere.
    pub fn acknowledged(&self) -> u64 {
        self.queue.acknowledged_batches()
    }

    /// End the batch and wait for all pushes; the first failure, the same each time.
    pub async fn flush(&self, client: &Client) -> Result<(), ClientError> {
        self.end_batch();
        // The failure that is returned is the first one, told before or not.
        let _ = self.queue.flush(client).await;
        self.queue.failure().map_or(Ok(()), Err)
    }

    /// Have every master close the stream; only of a task that is done for good, with nothing
    /// of it under way here.
    pub async fn close(&self, client: &Client, deadline: Deadline) -> Result<(), ClientError> {
        if let Err(error) = self.flush(client).await {
            return Err(ClientError::Invalid(format!(
                "the stream cannot be closed by this worker, whose pushes failed: batches that \
                 are missing would count as applied. Whoever completes the task closes it \
                 ({error})"
            )));
        }
        client.close_stream(self.queue.stream(), deadline).await
    }
}
