//! Pushes: `PushRequest`, what is sent; `PendingPush`, what is under way; `PushStream`, the pushes
//! of one task.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use backstay_core::stream::StreamId;
use backstay_core::transaction::Change;
use backstay_net::client::{self, Client, ClientError, Deadline, Push, TaskStream};
use backstay_net::clock;
use numpy::{PyArray1, PyArrayMethods};
use pyo3::prelude::*;

use crate::errors::{config_error, from_client};
use crate::key_plan::KeyPlan;
use crate::runtime::block_on;

/// The pushes of one task: their numbers, their floor and the lease of the task.
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
    /// End the batch before, and number pushes as pushes of this one.
    fn begin_batch(&self, py: Python<'_>, batch: u64) -> PyResult<()> {
        let begun = self.stream.begin_batch(batch);
        begun.map_err(|error| from_client(py, &error))
    }

    /// End the batch, unless a push has failed.
    fn end_batch(&self) {
        self.stream.end_batch();
    }

    /// Let frames leave until this moment of `consensus.clock`; not a number: no lease.
    fn lease_until(&self, moment_s: f64) {
        self.stream.lease_until(clock::moment(moment_s));
    }

    /// Let no frame leave any more; what is under way raises `TaskLeaseLost`.
    fn revoke(&self) {
        self.stream.revoke();
    }

    /// How many batches, counted from 0, have ended and are acknowledged everywhere.
    fn acknowledged(&self) -> u64 {
        self.stream.acknowledged()
    }

    /// End the batch and wait for all pushes; raises the first failure.
    fn flush(&self, py: Python<'_>) -> PyResult<()> {
        block_on(py, self.stream.flush(&self.client))?.map_err(|error| from_client(py, &error))
    }

    /// Have every master close the stream.
    fn close_on_servers(&self, py: Python<'_>, deadline_ms: u64) -> PyResult<()> {
        let deadline = Deadline::after(Duration::from_millis(deadline_ms));
        block_on(py, self.stream.close(&self.client, deadline))?
            .map_err(|error| from_client(py, &error))
    }
}

/// Shows and clicks of a batch, one each for each key.
type Observed = (Option<Py<PyArray1<f32>>>, Option<Py<PyArray1<f32>>>);

/// One push: the gradients or values of a batch of keys for one table.
#[pyclass(module = "backstay._native", frozen)]
pub(crate) struct PushRequest {
    table: u64,
    row_elements: usize,
    plan: Py<KeyPlan>,
    values: Py<PyArray1<f32>>,
    /// Shows and clicks; either may be left out.
    observed: Option<Observed>,
    change: Change,
    require_finite: bool,
    patience: Duration,
    /// Of a task; None: of the client's own stream.
    stream: Option<Py<PushStream>>,
    ordinal: u32,
}

#[pymethods]
impl PushRequest {
    /// `kind` is `update`, `assign`, `assign_if_absent` or `delete`, which has no values and no
    /// `row_elements`.
    #[new]
    #[pyo3(signature = (*, table, row_elements, plan, values, kind, learning_rate_scale,
        require_finite, deadline_ms, stream=None, ordinal=0, shows=None, clicks=None))]
    #[allow(clippy::too_many_arguments)] // Keywords only: this is how Python fills a struct.
    fn new(
        py: Python<'_>,
        table: u64,
        row_elements: usize,
        plan: Py<KeyPlan>,
        values: Py<PyArray1<f32>>,
        kind: &str,
        learning_rate_scale: f32,
        require_finite: bool,
        deadline_ms: u64,
        stream: Option<Py<PushStream>>,
        ordinal: u32,
        shows: Option<Py<PyArray1<f32>>>,
        clicks: Option<Py<PyArray1<f32>>>,
    ) -> PyResult<Self> {
        Ok(Self {
            table,
            row_elements,
            plan,
            values,
            change: match (kind, &shows, &clicks) {
                (_, None, None) => change(py, kind, learning_rate_scale)?,
                ("update", ..) => Change::update(learning_rate_scale).counted(),
                _ => return Err(config_error(py, "shows and clicks go with an update only")),
            },
            observed: (shows.is_some() || clicks.is_some()).then_some((shows, clicks)),
            require_finite,
            patience: Duration::from_millis(deadline_ms),
            stream,
            ordinal,
        })
    }
}

impl PushRequest {
    /// Shows and clicks of each key: 1 and 0 where they are left out.
    fn observed(&self, py: Python<'_>) -> PyResult<Option<(Vec<f32>, Vec<f32>)>> {
        let Some((shows, clicks)) = &self.observed else {
            return Ok(None);
        };
        let keys = self.plan.get().plan.len();
        let told = |array: &Option<Py<PyArray1<f32>>>, otherwise: f32| match array {
            Some(array) => {
                let array = array.bind(py).try_readonly()?;
                Ok::<_, PyErr>(array.as_slice()?.to_vec())
            }
            None => Ok(vec![otherwise; keys]),
        };
        Ok(Some((told(shows, 1.0)?, told(clicks, 0.0)?)))
    }

    /// Send the push, then do `then` with it; the GIL is released until both are done.
    pub(crate) fn send<T, F>(
        &self,
        py: Python<'_>,
        client: &Client,
        then: impl FnOnce(Arc<Push>) -> F + Send,
    ) -> PyResult<T>
    where
        T: Send,
        F: Future<Output = Result<T, ClientError>> + Send,
    {
        let values = self.values.bind(py).try_readonly()?;
        let told = self.observed(py)?;
        let mut request = client::PushRequest::new(
            self.table,
            self.row_elements,
            self.change,
            values.as_slice()?,
        );
        request.require_finite = self.require_finite;
        request.observed = told
            .as_ref()
            .map(|(shows, clicks)| (&shows[..], &clicks[..]));
        let plan = &self.plan.get().plan;
        let deadline = Deadline::after(self.patience);
        let work = async {
            let push = match &self.stream {
                Some(stream) => {
                    let stream = &stream.get().stream;
                    client
                        .push_in(stream, self.ordinal, &request, plan, deadline)
                        .await?
                }
                None => client.push(&request, plan, deadline).await?,
            };
            then(push).await
        };
        block_on(py, work)?.map_err(|error| from_client(py, &error))
    }
}

fn change(py: Python<'_>, kind: &str, learning_rate_scale: f32) -> PyResult<Change> {
    match kind {
        "update" => Ok(Change::update(learning_rate_scale)),
        "assign" => Ok(Change::Assign {
            only_if_absent: false,
        }),
        "assign_if_absent" => Ok(Change::Assign {
            only_if_absent: true,
        }),
        "delete" => Ok(Change::Delete),
        _ => Err(config_error(py, &format!("unknown kind of push {kind:?}"))),
    }
}

/// A push under way or over.
#[pyclass(module = "backstay._native", frozen)]
pub(crate) struct PendingPush {
    push: Arc<Push>,
    client: Arc<Client>,
}

impl PendingPush {
    pub(crate) fn new(push: Arc<Push>, client: &Arc<Client>) -> Self {
        Self {
            push,
            client: Arc::clone(client),
        }
    }
}

#[pymethods]
impl PendingPush {
    fn done(&self) -> bool {
        self.push.is_over()
    }

    /// Wait until it is applied; raises if it is not.
    fn finish(&self, py: Python<'_>) -> PyResult<()> {
        block_on(py, self.push.wait(&self.client))?.map_err(|error| from_client(py, &error))
    }
}
