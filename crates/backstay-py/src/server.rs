//! `DataServer`: one node's data plane.

use std::collections::BTreeSet;
use std::net::TcpListener;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use backstay_core::engine::ServingState;
use backstay_core::hash::table_id;
use backstay_core::replication::{ReplicaOptions, RoutingTable, Rows};
use backstay_core::wire::Limits;
use backstay_net::checkpoint;
use backstay_net::clock;
use backstay_net::server::{Server, ServerOptions};
use backstay_net::store::Store;
use backstay_net::tls::{self, Identity};
use numpy::{PyArray1, PyArray2, PyArrayMethods, PyReadonlyArray1, PyReadonlyArray2};
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;

use crate::errors::{closed_error, config_error, from_checkpoint, from_refusal};
use crate::slot_space;
use crate::tables::table_spec;

type PlainRows<'py> = (
    Bound<'py, PyArray1<u64>>,
    Bound<'py, PyArray2<f32>>,
    Bound<'py, PyArray2<f32>>,
);

/// One node's data plane: rows, optimizers and sockets, on threads of its own.
#[pyclass(module = "backstay._native", frozen)]
pub(crate) struct DataServer {
    server: Server,
    store: Arc<Store>,
    address: String,
}

type TlsSettings = (
    Option<Arc<tls::ServerConfig>>,
    Option<Arc<tls::ClientConfig>>,
);

/// The server's side, and the side of its connections to other servers.
fn tls_settings(
    py: Python<'_>,
    pair: (Option<&[u8]>, Option<&[u8]>),
    client_ca_pem: Option<&[u8]>,
    peer_ca_pem: Option<&[u8]>,
) -> PyResult<TlsSettings> {
    let wrong = |error: tls::TlsError| config_error(py, &error.to_string());
    let identity = match pair {
        (Some(cert_pem), Some(key_pem)) => Some(Identity { cert_pem, key_pem }),
        (None, None) => None,
        _ => {
            return Err(config_error(
                py,
                "tls_cert_file and tls_key_file go together: set both or neither",
            ))
        }
    };
    let server = identity.map(|identity| tls::server(identity, client_ca_pem));
    let client = peer_ca_pem.map(|ca| tls::client(ca, identity));
    Ok((
        server.transpose().map_err(wrong)?,
        client.transpose().map_err(wrong)?,
    ))
}

/// Tells a writer of checkpoints to give up.
#[pyclass(module = "backstay._native", frozen)]
pub(crate) struct Cancellation(AtomicBool);

#[pymethods]
impl Cancellation {
    #[new]
    fn new() -> Self {
        Self(AtomicBool::new(false))
    }

    fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Slots as they were copied, to be written to a part of a checkpoint; once.
#[pyclass(module = "backstay._native", frozen)]
pub(crate) struct CopiedSlots(Mutex<Option<checkpoint::CopiedSlots>>);

#[pymethods]
impl CopiedSlots {
    fn write(&self, py: Python<'_>, part_json: &str, cancelled: &Cancellation) -> PyResult<String> {
        let part = parsed(py, part_json)?;
        let copied = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        let copied = copied.ok_or_else(|| closed_error(py, "these slots were written before"))?;
        let written = py
            .detach(|| copied.write(&part, &cancelled.0))
            .map_err(|error| from_checkpoint(py, &error))?;
        serde_json::to_string(&written).map_err(|error| config_error(py, &error.to_string()))
    }
}

fn parsed<T: serde::de::DeserializeOwned>(py: Python<'_>, json: &str) -> PyResult<T> {
    serde_json::from_str(json).map_err(|error| config_error(py, &error.to_string()))
}

#[pymethods]
impl DataServer {
    #[new]
    #[pyo3(signature = (*, listen, cluster_id, node_id, instance, slot_count, token=None,
        tls_cert_pem=None, tls_key_pem=None, tls_client_ca_pem=None, tls_peer_ca_pem=None, io_threads=2,
        max_frame_bytes=268_435_456, max_keys_per_request=4_194_304, max_connections=4096,
        handshake_timeout_ms=5000, stall_timeout_ms=30_000, memory_limit_bytes=0, read_lease_ms=400,
        prepare_timeout_ms=1000, copy_bytes_per_s=50_331_648, stream_grace_s=604_800, counts_process=false))]
    #[allow(clippy::too_many_arguments)] // Keywords only; the dataclass on the Python side is the struct.
    fn new(
        py: Python<'_>,
        listen: &str,
        cluster_id: String,
        node_id: String,
        instance: u64,
        slot_count: u32,
        token: Option<String>,
        tls_cert_pem: Option<&[u8]>,
        tls_key_pem: Option<&[u8]>,
        tls_client_ca_pem: Option<&[u8]>,
        tls_peer_ca_pem: Option<&[u8]>,
        io_threads: usize,
        max_frame_bytes: u64,
        max_keys_per_request: u32,
        max_connections: u64,
        handshake_timeout_ms: u64,
        stall_timeout_ms: u64,
        memory_limit_bytes: u64,
        read_lease_ms: u64,
        prepare_timeout_ms: u64,
        copy_bytes_per_s: u64,
        stream_grace_s: u64,
        counts_process: bool,
    ) -> PyResult<Self> {
        let (tls, peer_tls) = tls_settings(
            py,
            (tls_cert_pem, tls_key_pem),
            tls_client_ca_pem,
            tls_peer_ca_pem,
        )?;
        let options = ServerOptions {
            cluster_id,
            node_id,
            instance,
            token,
            tls,
            io_threads,
            limits: Limits {
                max_frame_bytes,
                max_keys: max_keys_per_request,
            },
            max_connections,
            handshake_timeout: Duration::from_millis(handshake_timeout_ms),
            stall_timeout: Duration::from_millis(stall_timeout_ms),
            peer_tls,
            stream_grace: Duration::from_secs(stream_grace_s),
            counts_process,
            replica: ReplicaOptions {
                read_lease: read_lease_ms * 1000,
                heartbeat: read_lease_ms * 1000 / 4,
                prepare_timeout: prepare_timeout_ms * 1000,
                copy_bytes_per_s,
                ..ReplicaOptions::default()
            },
        };
        let store = Arc::new(Store::new(slot_space(py, slot_count)?, memory_limit_bytes));
        let listener = TcpListener::bind(listen).map_err(|error| {
            PyOSError::new_err((
                error.raw_os_error(),
                format!("cannot listen on {listen}: {error}"),
            ))
        })?;
        let server = Server::start(listener, options, Arc::clone(&store))?;
        Ok(Self {
            address: server.address().to_string(),
            server,
            store,
        })
    }

    #[getter]
    fn address(&self) -> &str {
        &self.address
    }

    fn set_routing(&self, version: u64, owned: PyReadonlyArray1<'_, bool>) -> PyResult<()> {
        self.store.set_routing(version, owned.as_slice()?);
        Ok(())
    }

    fn set_routing_json(&self, py: Python<'_>, routing_json: &str) -> PyResult<()> {
        let table = RoutingTable::from_json(routing_json, self.store.space().count())
            .map_err(|refusal| from_refusal(py, &refusal))?;
        py.detach(|| self.server.replicator().set_routing(table));
        Ok(())
    }

    /// The node's lease is alive until this moment of `consensus.clock`; 0.0: it is lost.
    fn hold_lease_until(&self, py: Python<'_>, until_s: f64) {
        let until = clock::moment(until_s);
        py.detach(|| self.server.replicator().hold_lease_until(until));
    }

    fn wait_report(&self, py: Python<'_>, known: u64, timeout_ms: u64) -> (u64, String) {
        let timeout = Duration::from_millis(timeout_ms);
        let (number, report) = py.detach(|| self.server.replicator().wait_report(known, timeout));
        (number, crate::report_json(&report))
    }

    fn slot_states_json(&self, py: Python<'_>) -> String {
        let state = |slot: u32| {
            let (term, source, copying) = self.server.replicator().slot_state(slot);
            let (position, end) = self.store.position(slot);
            let role = match self.store.serving_state(slot) {
                ServingState::Serving => "master",
                ServingState::Waiting => "waiting",
                ServingState::Elsewhere if source == 0 => "outside",
                ServingState::Elsewhere if copying => "copied",
                ServingState::Elsewhere => "backup",
            };
            serde_json::json!({"slot": slot, "term": term, "role": role,
                "follows": source, "position": position, "staged": end - position})
        };
        py.detach(|| {
            let slots = 0..self.store.space().count();
            serde_json::Value::Array(slots.map(state).collect()).to_string()
        })
    }

    #[pyo3(signature = (spec_json, revision=1))]
    fn create_table(&self, py: Python<'_>, spec_json: &str, revision: u64) -> PyResult<()> {
        let spec = Arc::new(table_spec(py, spec_json)?);
        py.detach(|| self.store.create_table(&spec, revision))
            .map_err(|refusal| from_refusal(py, &refusal))
    }

    fn tables_json(&self, py: Python<'_>) -> String {
        let describe = |table: backstay_net::store::TableUsage| {
            // The canonical form is JSON by construction.
            let spec: serde_json::Value =
                serde_json::from_str(&table.spec.canonical_json()).unwrap_or_default();
            serde_json::json!({"spec": spec, "id": table.id, "rows": table.rows,
                "master_rows": table.master_rows, "bytes": table.bytes,
                "counters": table.counters.0, "counter_bytes": table.counters.1,
                "staleness": {"buckets": table.stale.buckets, "sum": table.stale.sum,
                    "unknown": table.stale.unknown},
                "row_bytes": table.spec.row_bytes()})
        };
        py.detach(|| {
            serde_json::Value::Array(self.store.tables().into_iter().map(describe).collect())
                .to_string()
        })
    }

    fn table_usage(&self, py: Python<'_>, table: &str) -> PyResult<(u64, u64, u64)> {
        let usage = py.detach(|| self.store.usage(table));
        let usage = usage.map_err(|refusal| from_refusal(py, &refusal))?;
        Ok((usage.rows, usage.master_rows, usage.bytes))
    }

    fn table_staleness(&self, py: Python<'_>, table: &str) -> PyResult<(u64, u64)> {
        let usage = py.detach(|| self.store.usage(table));
        let stale = usage.map_err(|refusal| from_refusal(py, &refusal))?.stale;
        Ok((stale.buckets.iter().sum(), stale.sum))
    }

    fn stats_json(&self, py: Python<'_>) -> PyResult<String> {
        let snapshot = self.server.snapshot();
        serde_json::to_string(&snapshot).map_err(|error| config_error(py, &error.to_string()))
    }

    fn export_slot<'py>(
        &self,
        py: Python<'py>,
        table: &str,
        slot: u32,
    ) -> PyResult<PlainRows<'py>> {
        let rows = py.detach(|| self.store.export_slot(table, slot));
        let (keys, weights, state) = rows.map_err(|refusal| from_refusal(py, &refusal))?;
        let matrix = |values: Vec<f32>| {
            let columns = if keys.is_empty() {
                0
            } else {
                values.len() / keys.len()
            };
            PyArray1::from_vec(py, values).reshape([keys.len(), columns])
        };
        let (weights, state) = (matrix(weights)?, matrix(state)?);
        Ok((PyArray1::from_vec(py, keys), weights, state))
    }

    fn import_slot(
        &self,
        py: Python<'_>,
        table: &str,
        slot: u32,
        keys: PyReadonlyArray1<'_, u64>,
        weights: PyReadonlyArray2<'_, f32>,
        state: PyReadonlyArray2<'_, f32>,
    ) -> PyResult<()> {
        let rows = (keys.as_slice()?, weights.as_slice()?, state.as_slice()?);
        py.detach(|| self.store.import_slot(table, slot, rows))
            .map_err(|refusal| from_refusal(py, &refusal))
    }

    fn slot_digest(&self, py: Python<'_>, slot: u32) -> PyResult<(u64, u64)> {
        py.detach(|| self.store.slot_digest(slot))
            .map_err(|refusal| from_refusal(py, &refusal))
    }

    fn slot_bytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<u64>> {
        let bytes = py.detach(|| self.store.slot_bytes());
        PyArray1::from_vec(py, bytes)
    }

    /// Keep account of what changes in these tables for exports, and in no others.
    fn track_exports(&self, py: Python<'_>, tables: Vec<String>) {
        let ids: BTreeSet<u64> = tables.iter().map(|name| table_id(name)).collect();
        py.detach(|| self.store.track_exports(&ids));
    }

    /// A complete element of an export of these tables has the slots up to these positions.
    fn export_completed(&self, py: Python<'_>, positions: Vec<u64>, tables: Vec<String>) {
        let ids: Vec<u64> = tables.iter().map(|name| table_id(name)).collect();
        py.detach(|| self.store.export_completed(&positions, &ids));
    }

    #[pyo3(signature = (slots_json, most_bytes, cancelled, export_json=None))]
    fn copy_slots(
        &self,
        py: Python<'_>,
        slots_json: &str,
        most_bytes: u64,
        cancelled: &Cancellation,
        export_json: Option<&str>,
    ) -> PyResult<CopiedSlots> {
        let slots: Vec<checkpoint::SlotToWrite> = parsed(py, slots_json)?;
        let export = export_json.map(|json| parsed(py, json)).transpose()?;
        let (replicator, cancelled) = (self.server.replicator(), &cancelled.0);
        let copied = py
            .detach(|| match &export {
                None => checkpoint::copy_slots(replicator, &slots, most_bytes, cancelled),
                Some(choice) => {
                    checkpoint::copy_export(replicator, &slots, choice, most_bytes, cancelled)
                }
            })
            .map_err(|error| from_checkpoint(py, &error))?;
        Ok(CopiedSlots(Mutex::new(Some(copied))))
    }

    fn to_load(&self, py: Python<'_>) -> Vec<(u32, u64)> {
        py.detach(|| self.server.replicator().to_load())
    }

    fn load_part(&self, py: Python<'_>, request_json: &str) -> PyResult<u64> {
        let request = parsed(py, request_json)?;
        let replicator = self.server.replicator();
        py.detach(|| checkpoint::load_part(replicator, &request))
            .map_err(|error| from_checkpoint(py, &error))
    }

    fn stop(&self, py: Python<'_>, grace_ms: u64) -> bool {
        py.detach(|| self.server.stop(Duration::from_millis(grace_ms)))
    }
}
