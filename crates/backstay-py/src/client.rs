//! `DataClient`: a trainer's data plane.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::Duration;

use backstay_core::compensation::Reference;
use backstay_core::life::Thresholds;
use backstay_core::stream::{StreamId, OWN_PASS};
use backstay_net::client::routing::{Routing, ServerAddress};
use backstay_net::client::{Client, ClientOptions, Deadline, Event, Pull};
use backstay_net::tls::{self, Identity};
use numpy::{PyReadonlyArray1, PyReadwriteArray1};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::errors::{closed_error, config_error, from_client, runtime_error};
use crate::key_plan::KeyPlan;
use crate::push::{PendingPush, PushRequest, PushStream};
use crate::runtime::block_on;

/// A pull under way.
#[pyclass(module = "backstay._native", frozen)]
pub(crate) struct PendingPull {
    /// Taken by the call that waits for it.
    pull: std::sync::Mutex<Option<Pull>>,
    /// Given anew to the call that waits.
    patience: Duration,
}

#[pymethods]
impl PendingPull {
    fn done(&self) -> PyResult<bool> {
        Ok(lock(&self.pull)?.as_ref().is_none_or(Pull::is_ready))
    }

    /// Wait for the rows and write them to `out`; only once.
    fn finish(&self, py: Python<'_>, mut out: PyReadwriteArray1<'_, f32>) -> PyResult<()> {
        let pull = lock(&self.pull)?.take();
        let mut pull = pull.ok_or_else(|| closed_error(py, "this pull was waited for already"))?;
        let out = out.as_slice_mut()?;
        block_on(py, pull.finish(out, Deadline::after(self.patience)))?
            .map_err(|error| from_client(py, &error))
    }
}

/// A trainer's data plane: plans, sends, waits and retries, with the GIL released.
#[pyclass(module = "backstay._native", frozen)]
pub(crate) struct DataClient {
    client: Arc<Client>,
}

#[pymethods]
impl DataClient {
    #[new]
    #[pyo3(signature = (*, cluster_id, client_name, stream_job, stream_pass=OWN_PASS, stream_task=0, token=None,
        tls_ca_pem=None, tls_cert_pem=None, tls_key_pem=None, connect_timeout_ms=5000,
        stall_timeout_ms=30_000, max_frame_bytes=268_435_456, part_bytes=1_048_576,
        max_pushes_in_flight=16))]
    #[allow(clippy::too_many_arguments)] // Keywords only; the dataclass on the Python side is the struct.
    fn new(
        py: Python<'_>,
        cluster_id: String,
        client_name: String,
        stream_job: u64,
        stream_pass: u32,
        stream_task: u32,
        token: Option<String>,
        tls_ca_pem: Option<&[u8]>,
        tls_cert_pem: Option<&[u8]>,
        tls_key_pem: Option<&[u8]>,
        connect_timeout_ms: u64,
        stall_timeout_ms: u64,
        max_frame_bytes: u64,
        part_bytes: usize,
        max_pushes_in_flight: usize,
    ) -> PyResult<Self> {
        let identity = match (tls_cert_pem, tls_key_pem) {
            (Some(cert_pem), Some(key_pem)) => Some(Identity { cert_pem, key_pem }),
            (None, None) => None,
            _ => {
                return Err(config_error(
                    py,
                    "tls_cert_file and tls_key_file go together: set both or neither",
                ))
            }
        };
        let tls = match tls_ca_pem {
            Some(ca) => Some(
                tls::client(ca, identity).map_err(|error| config_error(py, &error.to_string()))?,
            ),
            None => None,
        };
        let options = ClientOptions {
            cluster_id,
            token,
            tls,
            client_name,
            connect_timeout: Duration::from_millis(connect_timeout_ms),
            stall_timeout: Duration::from_millis(stall_timeout_ms),
            max_frame_bytes,
            part_bytes,
            max_pushes_in_flight,
        };
        let stream = StreamId {
            job: stream_job,
            pass: stream_pass,
            task: stream_task,
        };
        Ok(Self {
            client: Client::new(options, stream),
        })
    }

    /// Go by this routing table, also in the calls that wait; false if it is not newer than the
    /// one that is known. `servers` are (node id, data address, instance); of each slot the
    /// index of its master is given, or 4294967295 if it has none; `loss` says what becomes of
    /// slots that lost all their copies.
    #[pyo3(signature = (version, servers, master_of_slot, *, generation=0, loss=""))]
    fn set_routing(
        &self,
        py: Python<'_>,
        version: u64,
        servers: Vec<(String, String, u64)>,
        master_of_slot: PyReadonlyArray1<'_, u32>,
        generation: u64,
        loss: &str,
    ) -> PyResult<bool> {
        let servers = servers
            .into_iter()
            .map(|(node_id, address, instance)| ServerAddress {
                node_id,
                address,
                instance,
            });
        let masters = master_of_slot.as_slice()?;
        let mut routing = Routing::of(version, generation, servers.collect(), masters)
            .map_err(|error| from_client(py, &error))?;
        routing.loss = loss.into();
        Ok(self.client.set_routing(routing))
    }

    /// The version of the routing table that calls go by; 0 if there is none yet.
    #[getter]
    fn routing_version(&self) -> u64 {
        self.client.routing_version()
    }

    /// Connect to every master.
    fn connect(&self, py: Python<'_>, deadline_ms: u64) -> PyResult<()> {
        let deadline = Deadline::after(Duration::from_millis(deadline_ms));
        block_on(py, self.client.connect(deadline))?.map_err(|error| from_client(py, &error))
    }

    /// The next (kind, text): `trouble` when a server does not answer or refuses, `waiting` when
    /// a call waits for long, `resumed` when it goes on. None after `unwatch` or `close`.
    fn next_event(&self, py: Python<'_>) -> PyResult<Option<(&'static str, String)>> {
        let event = block_on(py, self.client.next_event())?;
        Ok(event.map(|event| match event {
            Event::Trouble => ("trouble", String::new()),
            Event::Waiting(text) => ("waiting", text),
            Event::Resumed(text) => ("resumed", text),
        }))
    }

    /// End `next_event`.
    fn unwatch(&self) {
        self.client.unwatch();
    }

    /// Have pulls of a table ask from where their rows come, and pushes to it tell that.
    fn track_staleness(&self, table: u64) {
        self.client.track_staleness(table);
    }

    /// Keep the rows of pulls of a table, or the sums of gradients that come with them, and have
    /// pushes to it bring these along.
    #[pyo3(signature = (table, *, sums=false))]
    fn keep_references(&self, table: u64, sums: bool) {
        let reference = if sums {
            Reference::Sum
        } else {
            Reference::Weights
        };
        self.client.keep_references(table, reference);
    }

    /// Make a batch of keys ready.
    fn plan(&self, py: Python<'_>, keys: PyReadonlyArray1<'_, u64>) -> PyResult<KeyPlan> {
        let keys = keys.as_slice()?;
        let plan = py
            .detach(|| self.client.plan(keys))
            .map_err(|error| from_client(py, &error))?;
        Ok(KeyPlan {
            plan: Arc::new(plan),
        })
    }

    /// Ask for rows; wait for them with `PendingPull.finish`.
    fn pull_begin(
        &self,
        py: Python<'_>,
        table: u64,
        row_elements: usize,
        plan: &KeyPlan,
        deadline_ms: u64,
    ) -> PyResult<PendingPull> {
        let patience = Duration::from_millis(deadline_ms);
        let asking = self
            .client
            .pull(table, row_elements, &plan.plan, Deadline::after(patience));
        let pull = block_on(py, asking)?;
        let pull = pull.map_err(|error| from_client(py, &error))?;
        Ok(PendingPull {
            pull: std::sync::Mutex::new(Some(pull)),
            patience,
        })
    }

    /// Ask for rows and wait for them.
    fn pull(
        &self,
        py: Python<'_>,
        table: u64,
        row_elements: usize,
        plan: &KeyPlan,
        mut out: PyReadwriteArray1<'_, f32>,
        deadline_ms: u64,
    ) -> PyResult<()> {
        let deadline = Deadline::after(Duration::from_millis(deadline_ms));
        let out = out.as_slice_mut()?;
        let work = async {
            self.client
                .pull(table, row_elements, &plan.plan, deadline)
                .await?
                .finish(out, deadline)
                .await
        };
        block_on(py, work)?.map_err(|error| from_client(py, &error))
    }

    /// Send a push and let it finish in the background; wait for it with `PendingPush.finish`.
    fn push_begin(&self, py: Python<'_>, request: &PushRequest) -> PyResult<PendingPush> {
        let push = request.send(py, &self.client, |push| async {
            self.client.finish_in_background(&push);
            Ok(push)
        })?;
        Ok(PendingPush::new(push, &self.client))
    }

    /// Send a push and wait until it is applied; the rows that went, of a delete.
    fn push(&self, py: Python<'_>, request: &PushRequest) -> PyResult<u64> {
        request.send(py, &self.client, |push| async move {
            push.wait(&self.client).await?;
            Ok(push.removed())
        })
    }

    /// Remove the rows of a table that have expired, slot by slot, or only count them; JSON.
    #[pyo3(signature = (table, *, deadline_ms, dry_run=false, unseen_seconds=None,
        score_below=None, norm_below=None))]
    #[allow(clippy::too_many_arguments)] // Keywords only.
    fn expire(
        &self,
        py: Python<'_>,
        table: u64,
        deadline_ms: u64,
        dry_run: bool,
        unseen_seconds: Option<u32>,
        score_below: Option<f64>,
        norm_below: Option<f64>,
    ) -> PyResult<String> {
        let thresholds = Thresholds {
            unseen_seconds,
            score_below,
            norm_below,
        };
        for (name, below) in [("score_below", score_below), ("norm_below", norm_below)] {
            if below.is_some_and(|below| !(0.0..=f64::MAX).contains(&below)) {
                let reason = format!("{name} must be finite and not negative");
                return Err(config_error(py, &reason));
            }
        }
        let deadline = Deadline::after(Duration::from_millis(deadline_ms));
        let work = self.client.expire(table, thresholds, dry_run, deadline);
        let done = block_on(py, work)?.map_err(|error| from_client(py, &error))?;
        let gone = done.gone;
        Ok(
            serde_json::json!({"unseen": gone.unseen, "score": gone.score, "norm": gone.norm,
            "counters": gone.counters, "slots": done.applied_slots})
            .to_string(),
        )
    }

    /// Multiply the shows and clicks of a table, once for a period; the slots that did it now.
    #[pyo3(signature = (table, *, period, deadline_ms, rate=None))]
    fn decay(
        &self,
        py: Python<'_>,
        table: u64,
        period: u64,
        deadline_ms: u64,
        rate: Option<f32>,
    ) -> PyResult<u64> {
        if rate.is_some_and(|rate| !(rate > 0.0 && rate < 1.0)) {
            return Err(config_error(
                py,
                "the rate of a decay must be above 0 and below 1",
            ));
        }
        let deadline = Deadline::after(Duration::from_millis(deadline_ms));
        let work = self
            .client
            .decay(table, rate.unwrap_or(0.0), period, deadline);
        block_on(py, work)?.map_err(|error| from_client(py, &error))
    }

    /// A stream for the pushes of a task with so many tables.
    fn task_stream(
        &self,
        py: Python<'_>,
        job: u64,
        pass_number: u32,
        task: u32,
        tables: u32,
        first_batch: u64,
    ) -> PyResult<PushStream> {
        let stream = StreamId {
            job,
            pass: pass_number,
            task,
        };
        PushStream::new(&self.client, stream, tables, first_batch)
            .map_err(|error| from_client(py, &error))
    }

    /// Have every master close a stream: what still comes of it counts as a late copy.
    fn close_stream(
        &self,
        py: Python<'_>,
        job: u64,
        pass_number: u32,
        task: u32,
        deadline_ms: u64,
    ) -> PyResult<()> {
        let stream = StreamId {
            job,
            pass: pass_number,
            task,
        };
        let deadline = Deadline::after(Duration::from_millis(deadline_ms));
        block_on(py, self.client.close_stream(stream, deadline))?
            .map_err(|error| from_client(py, &error))
    }

    /// Wait until every push under way has ended.
    fn flush(&self, py: Python<'_>) -> PyResult<()> {
        block_on(py, self.client.flush())?.map_err(|error| from_client(py, &error))
    }

    /// Wait for what is under way, then disconnect.
    fn close(&self, py: Python<'_>, deadline_ms: u64) -> PyResult<()> {
        let deadline = Deadline::after(Duration::from_millis(deadline_ms));
        block_on(py, self.client.close(deadline))?.map_err(|error| from_client(py, &error))
    }

    /// What the client has done so far, by name.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let counters = &self.client.counters;
        let stats = PyDict::new(py);
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        stats.set_item("pulls", read(&counters.pulls))?;
        stats.set_item("keys_pulled", read(&counters.keys_pulled))?;
        stats.set_item("pushes_acknowledged", read(&counters.pushes_acknowledged))?;
        stats.set_item("keys_pushed", read(&counters.keys_pushed))?;
        stats.set_item("retries", read(&counters.retries))?;
        stats.set_item("failovers", read(&counters.failovers))?;
        stats.set_item("waits", read(&counters.waits))?;
        stats.set_item("stale_slots", read(&counters.stale_slots))?;
        stats.set_item("staleness_sum", read(&counters.staleness_sum))?;
        stats.set_item("staleness_max", read(&counters.staleness_max))?;
        let buckets = PyTuple::new(py, counters.staleness_buckets.iter().map(read))?;
        stats.set_item("staleness_buckets", buckets)?;
        stats.set_item("staleness_unknown", read(&counters.staleness_unknown))?;
        Ok(stats)
    }
}

fn lock<T>(mutex: &std::sync::Mutex<T>) -> PyResult<std::sync::MutexGuard<'_, T>> {
    mutex
        .lock()
        .map_err(|_| runtime_error("an earlier call crashed"))
}
