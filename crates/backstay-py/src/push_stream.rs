//! `PushStream`: the pushes of one task.

use std::sync::Arc;
use std::time::Duration;

use backstay_core::stream::StreamId;
use backstay_net::client::plan::Plan;
use backstay_net::client::{Client, ClientError, Deadline, Push, PushRequest, TaskStream};
use backstay_net::clock;
use pyo3::prelude::*;

use crate::errors::from_client;
use crate::runtime::block_on;

/// The pushes of one task: their numbers, their floor and the hold on the task.
#[pyclass(module = "backstay._native", frozen)]
pub(crate) struct PushStream {
    stream: TaskStream,
    client: Arc<Client>,
}

impl PushStream {
    pub(crate) fn new(
        client: &Arc<Client>,
        stream: StreamId,
        tables: u32,
        first_batch: u64,
    ) -> Result<Self, ClientError> {
        Ok(Self {
            stream: client.task_stream(stream, tables, first_batch)?,
            client: Arc::clone(client),
        })
    }
}

#[pymethods]
impl PushStream {
    /// End the batch before and number pushes as those of this one.
    fn begin_batch(&self, py: Python<'_>, batch: u64) -> PyResult<()> {
        let begun = self.stream.begin_batch(batch);
        begun.map_err(|error| from_client(py, &error))
    }

    /// End the batch, unless a push has failed.
    fn end_batch(&self) {
        self.stream.end_batch();
    }

    /// Let frames leave until this moment of `consensus.clock`; not a number: no hold.
    fn hold_until(&self, moment_s: f64) {
        self.stream.hold_until(clock::moment(moment_s));
    }

    /// Let no frame leave any more; what is under way raises `HoldLost`.
    fn revoke(&self) {
        self.stream.revoke();
    }

    /// How many batches, counted from 0, have ended and are acknowledged everywhere.
    fn settled(&self) -> u64 {
        self.stream.settled()
    }

    /// End the batch and wait for all pushes; raises the first failure.
    fn settle(&self, py: Python<'_>) -> PyResult<()> {
        block_on(py, self.stream.settle(&self.client))?.map_err(|error| from_client(py, &error))
    }

    /// Have every master close the stream.
    fn close_on_servers(&self, py: Python<'_>, deadline_ms: u64) -> PyResult<()> {
        let deadline = Deadline::after(Duration::from_millis(deadline_ms));
        block_on(py, self.stream.close(&self.client, deadline))?
            .map_err(|error| from_client(py, &error))
    }
}

/// Send a push: of a task's stream, or of the client's own.
pub(crate) async fn send(
    client: &Client,
    stream: Option<&PushStream>,
    ordinal: u32,
    request: &PushRequest<'_>,
    plan: &Plan,
    deadline: Deadline,
) -> Result<Arc<Push>, ClientError> {
    match stream {
        Some(stream) => {
            client
                .push_in(&stream.stream, ordinal, request, plan, deadline)
                .await
        }
        None => client.push(request, plan, deadline).await,
    }
}
