//! `SimNode`: one node's replication and rows without sockets, threads or clock, for simulators.
//!
//! It is the state machine that the server runs. Its driver delivers the messages, does the work
//! and tells the time.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use backstay_core::compensation::Reference;
use backstay_core::engine::{Engine, ServingState, SlotSnapshot, StageReport};
use backstay_core::error::Refusal;
use backstay_core::life::Thresholds;
use backstay_core::replication::{
    LocalRows, Message, NodeId, Replica, ReplicaOptions, RoutingTable, Way, Work,
};
use backstay_core::stream::{StreamId, TransactionId};
use backstay_core::table::PlainRows;
use backstay_core::transaction::{Batch, Change, Transaction};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::errors::from_refusal;
use crate::slot_space;
use crate::tables::table_spec;

/// Outcome of a push that waits for backups.
const PENDING: i32 = -1;

/// A message between two nodes.
#[pyclass(module = "backstay._native", frozen)]
pub(crate) struct SimMessage(Message);

#[pymethods]
impl SimMessage {
    /// What it is, in one word.
    #[getter]
    fn kind(&self) -> &'static str {
        match self.0 {
            Message::Heartbeat { .. } => "heartbeat",
            Message::Prepare { .. } => "prepare",
            Message::Commit { .. } => "commit",
            Message::Rollback { .. } => "rollback",
            Message::Forget { .. } => "forget",
            Message::Recover { .. } => "recover",
            Message::CopyBegin { .. } => "copy_begin",
            Message::CopyRows { .. } => "copy_rows",
            Message::CopyEnd { .. } => "copy_end",
            Message::ReadLease { .. } => "read_lease",
            Message::Accepted { .. } => "accepted",
            Message::Refused { .. } => "refused",
            Message::CopyTaken { .. } => "copy_taken",
        }
    }

    /// How many rows of a copy or of a push it carries.
    #[getter]
    fn rows(&self) -> usize {
        match &self.0 {
            Message::CopyRows { rows, .. } => rows.0.len(),
            Message::Prepare { places, .. } => places
                .iter()
                .map(|place| (place.run.end - place.run.start) as usize)
                .sum(),
            _ => 0,
        }
    }

    /// All of it, for traces.
    fn __repr__(&self) -> String {
        format!("{:?}", self.0)
    }
}

/// A slot as a checkpoint keeps it.
#[pyclass(module = "backstay._native", frozen)]
pub(crate) struct SimSlot {
    /// The routing version at which its content began.
    #[pyo3(get)]
    epoch: u64,
    snapshot: SlotSnapshot,
}

#[pymethods]
impl SimSlot {
    /// How many pushes it had applied.
    #[getter]
    fn position(&self) -> u64 {
        self.snapshot.memory.position
    }

    /// Whether it has all rows.
    #[getter]
    fn whole(&self) -> bool {
        self.snapshot.whole
    }
}

struct Node {
    replica: Replica,
    rows: LocalRows,
}

/// One node.
#[pyclass(module = "backstay._native", frozen)]
pub(crate) struct SimNode {
    node: Mutex<Node>,
    slots: u32,
}

impl SimNode {
    fn node(&self) -> MutexGuard<'_, Node> {
        self.node.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check_slot(&self, slot: u32) -> PyResult<()> {
        if slot < self.slots {
            return Ok(());
        }
        let slots = self.slots;
        Err(PyValueError::new_err(format!("slot {slot} of {slots}")))
    }
}

#[pymethods]
impl SimNode {
    #[new]
    #[pyo3(signature = (instance, slot_count, *, read_lease_us=400_000, heartbeat_us=100_000,
        prepare_timeout_us=1_000_000, max_pending=256, copies_at_once=4,
        copy_bytes_per_s=u64::MAX, copy_piece_bytes=65_536, copy_window_bytes=262_144))]
    #[allow(clippy::too_many_arguments)] // Keywords only.
    fn new(
        py: Python<'_>,
        instance: u64,
        slot_count: u32,
        read_lease_us: u64,
        heartbeat_us: u64,
        prepare_timeout_us: u64,
        max_pending: usize,
        copies_at_once: usize,
        copy_bytes_per_s: u64,
        copy_piece_bytes: u64,
        copy_window_bytes: u64,
    ) -> PyResult<Self> {
        let space = slot_space(py, slot_count)?;
        let options = ReplicaOptions {
            read_lease: read_lease_us,
            heartbeat: heartbeat_us,
            prepare_timeout: prepare_timeout_us,
            max_pending,
            copies_at_once,
            copy_bytes_per_s,
            copy_piece_bytes,
            copy_window_bytes,
        };
        let node = Node {
            replica: Replica::new(instance, slot_count, options),
            rows: LocalRows(Engine::new(space, 0..slot_count).into()),
        };
        Ok(Self {
            node: Mutex::new(node),
            slots: slot_count,
        })
    }

    /// Create a table of this description, or do nothing if it exists with the same settings.
    fn create_table(&self, py: Python<'_>, spec_json: &str) -> PyResult<()> {
        let spec = Arc::new(table_spec(py, spec_json)?);
        let created = self.node().rows.0.borrow_mut().create_table(&spec);
        created.map_err(|refusal| from_refusal(py, &refusal))
    }

    /// Give a table the settings of this description, for the pushes taken on from now on.
    fn change_settings(&self, py: Python<'_>, spec_json: &str) -> PyResult<()> {
        let spec = Arc::new(table_spec(py, spec_json)?);
        let changed = self.node().rows.0.borrow_mut().change_settings(&spec);
        changed.map_err(|refusal| from_refusal(py, &refusal))
    }

    /// Go by a routing record; one that is not newer changes nothing.
    fn set_routing_json(&self, py: Python<'_>, now: u64, routing_json: &str) -> PyResult<()> {
        let table = RoutingTable::from_json(routing_json, self.slots)
            .map_err(|refusal| from_refusal(py, &refusal))?;
        let node = &mut *self.node();
        node.replica.set_routing(now, &node.rows, Arc::new(table));
        Ok(())
    }

    /// This node's lease in the coordination store is alive until then.
    fn set_lease(&self, until: u64) {
        self.node().replica.set_lease(until);
    }

    /// A connection to a backup was opened.
    fn link_up(&self, now: u64, peer: u64) {
        let node = &mut *self.node();
        node.replica.link_up(now, &node.rows, peer);
    }

    /// The connection to a backup broke, or could not be opened; `refused`: its port refuses.
    fn link_down(&self, now: u64, peer: u64, refused: bool) {
        let node = &mut *self.node();
        node.replica.link_down(now, &node.rows, peer, refused);
    }

    /// A master opened a connection to this node.
    fn master_connected(&self, peer: u64) {
        self.node().replica.master_connected(peer);
    }

    /// Time passes.
    fn tick(&self, now: u64) {
        let node = &mut *self.node();
        node.replica.tick(now, &node.rows);
    }

    /// A message came.
    fn receive(&self, now: u64, sender: u64, message: &SimMessage) {
        let node = &mut *self.node();
        node.replica
            .receive(now, &node.rows, sender, message.0.clone());
    }

    /// What is to be done after a step: messages to send, in order, each with its peer and
    /// whether it goes on the connection that this node opened to the peer as its backup; the
    /// apply queues with work; the nodes to keep a connection to; the number of the report.
    #[allow(clippy::type_complexity)] // Taken apart at once, in Python.
    fn take_outcome(&self) -> (Vec<(u64, bool, SimMessage)>, Vec<u64>, Vec<u64>, u64) {
        let replica = &mut self.node().replica;
        let addressed: Vec<(NodeId, Way)> = replica.with_messages().collect();
        let mut taken = Vec::new();
        for (peer, way) in addressed {
            let messages = replica.take_messages(peer, way).into_iter();
            let to_backup = way != Way::ToMaster;
            taken.extend(messages.map(|message| (peer, to_backup, SimMessage(message))));
        }
        let links = replica.wanted_links().into_iter().collect();
        (taken, replica.apply_queues(), links, replica.report().0)
    }

    /// Do the next piece of work of an apply queue, if there is one: (kind, token, code, reason), where
    /// the last three are of an answer: code 0 is done.
    fn work(
        &self,
        py: Python<'_>,
        now: u64,
        queue: u64,
    ) -> PyResult<Option<(&'static str, u64, i32, String)>> {
        let node = &mut *self.node();
        let Some(work) = node.replica.next_work(queue) else {
            return Ok(None);
        };
        match work {
            Work::Commit {
                transaction,
                places,
                ..
            } => {
                let done = node.rows.0.borrow_mut().commit(&transaction, &places);
                done.map_err(|refusal| from_refusal(py, &refusal))?;
                Ok(Some(("commit", 0, 0, String::new())))
            }
            Work::Answer {
                token,
                outcome,
                alone,
            } => {
                let outcome = node.replica.acknowledge(now, outcome, alone);
                let (code, reason) = outcome_of(outcome.map(Some));
                Ok(Some(("answer", token, code, reason)))
            }
            Work::Recovered { lsn } => {
                node.replica.recovered(now, &node.rows, lsn);
                Ok(Some(("recovered", 0, 0, String::new())))
            }
        }
    }

    /// Take a push on, or without `values` a delete, or what `change` says (`expire`, `decay`), of which
    /// the keys stand for their slots; `keys` are sorted by slot. What `pull` told goes back as
    /// `origins`, and behind each gradient as `reference` (`weights`, `sums`) says. Returns (code,
    /// reason): -1 means that an answer with this token follows as work, 0 that every slot has had it
    /// before.
    #[pyo3(signature = (now, token, *, stream, sequence, floor, table, keys, values,
        known_version=u64::MAX, change="", origins=None, reference=""))]
    #[allow(clippy::too_many_arguments)] // Keywords only.
    fn push(
        &self,
        py: Python<'_>,
        now: u64,
        token: u64,
        stream: (u64, u32, u32),
        sequence: u64,
        floor: u64,
        table: u64,
        keys: Vec<u64>,
        values: Vec<f32>,
        known_version: u64,
        change: &str,
        origins: Option<Vec<u64>>,
        reference: &str,
    ) -> PyResult<(i32, String)> {
        let (job, pass, task) = stream;
        let id = TransactionId {
            stream: StreamId { job, pass, task },
            sequence,
        };
        let change = match (change, &values[..]) {
            ("expire", _) => Change::Expire(Thresholds::default()),
            ("decay", _) => Change::Decay { rate: 0.0 },
            (_, []) => Change::Delete,
            _ => Change::update(1.0),
        };
        let change = match reference {
            "weights" => change.compared(Reference::Weights),
            "sums" => change.compared(Reference::Sum),
            _ => change,
        };
        let space = slot_space(py, self.slots)?;
        let batch = Batch::new(&keys, &values);
        let mut transaction = Transaction::new(space, id, floor, table, change, batch)
            .map_err(|refusal| from_refusal(py, &refusal))?;
        transaction.known_version = known_version;
        if let Some(origins) = origins {
            let told = transaction.tell_origins(&origins);
            told.map_err(|refusal| from_refusal(py, &refusal))?;
        }
        let node = &mut *self.node();
        let seconds = (now / 1_000_000) as u32;
        let stamped = node.rows.0.borrow().stamp(&mut transaction, seconds);
        let outcome = stamped.and_then(|()| {
            node.replica
                .push(now, &node.rows, token, &Arc::new(transaction))
        });
        Ok(outcome_of(outcome))
    }

    /// Close a stream in every slot that is served here; the answer as of `push`.
    #[pyo3(signature = (now, token, stream, known_version=u64::MAX))]
    fn close_stream(
        &self,
        now: u64,
        token: u64,
        stream: (u64, u32, u32),
        known_version: u64,
    ) -> (i32, String) {
        let (job, pass, task) = stream;
        let id = TransactionId {
            stream: StreamId { job, pass, task },
            sequence: u64::MAX,
        };
        let node = &mut *self.node();
        let serves =
            |&slot: &u32| node.rows.0.borrow().serving_state(slot) == ServingState::Serving;
        let slots: Vec<u32> = (0..self.slots).filter(serves).collect();
        let mut transaction = Transaction::close(id, slots);
        transaction.known_version = known_version;
        let outcome = node
            .replica
            .push(now, &node.rows, token, &Arc::new(transaction));
        outcome_of(outcome)
    }

    /// Read rows as a client would: (code, values), where code 0 is done. The rows are read
    /// first, then it is checked that this node may still answer.
    fn read(&self, now: u64, table: u64, keys: Vec<u64>) -> (i32, Vec<f32>) {
        let node = self.node();
        let engine = node.rows.0.borrow();
        let elements = engine
            .table(table)
            .map_or(0, |table| table.spec().row_elements());
        let mut values = vec![0.0; keys.len() * elements];
        match engine.read(table, &keys, &mut values) {
            Err(refusal) => (i32::from(refusal.code()), Vec::new()),
            Ok(()) if now < node.replica.serving_until() => (0, values),
            Ok(()) => (
                i32::from(Refusal::NotReady(String::new()).code()),
                Vec::new(),
            ),
        }
    }

    /// The same with what a push will tell of them: (code, values, sums, origins), where sums are of a
    /// table that keeps some, and origins one for each slot.
    #[allow(clippy::type_complexity)] // Taken apart at once, in Python.
    fn pull(&self, now: u64, table: u64, keys: Vec<u64>) -> (i32, Vec<f32>, Vec<f32>, Vec<u64>) {
        let (code, values) = self.read(now, table, keys.clone());
        let (mut sums, mut origins) = (Vec::new(), Vec::new());
        let node = self.node();
        let engine = node.rows.0.borrow();
        if let (0, Ok(known)) = (code, engine.table(table)) {
            if known.spec().compensation.reference() == Some(Reference::Sum) {
                sums = vec![0.0; keys.len() * Reference::Sum.values(known.spec().row_elements())];
            }
            let told = engine.origins(table, &keys, &mut origins);
            let told = told.and_then(|()| match &mut sums[..] {
                [] => Ok(()),
                sums => engine.read_sums(table, &keys, sums),
            });
            if let Err(refusal) = told {
                return (
                    i32::from(refusal.code()),
                    Vec::new(),
                    Vec::new(),
                    Vec::new(),
                );
            }
        }
        (code, values, sums, origins)
    }

    /// Slots of pushes to a table of which this node, as master, knows how stale they were, and the sum.
    fn staleness(&self, table: u64) -> (u64, u64) {
        let node = self.node();
        let engine = node.rows.0.borrow();
        let counts = engine.table(table).map(|one| *one.staleness());
        counts.map_or((0, 0), |counts| (counts.buckets.iter().sum(), counts.sum))
    }

    /// The rows as they are, whichever node is their master.
    fn peek(&self, py: Python<'_>, table: u64, keys: Vec<u64>) -> PyResult<Vec<f32>> {
        let node = self.node();
        let engine = node.rows.0.borrow();
        let table = engine
            .table(table)
            .map_err(|refusal| from_refusal(py, &refusal))?;
        let mut values = vec![0.0; keys.len() * table.spec().row_elements()];
        table.read(&keys, &mut values);
        Ok(values)
    }

    /// Whether a push is applied or staged in a slot.
    fn holds(&self, stream: (u64, u32, u32), sequence: u64, slot: u32) -> PyResult<bool> {
        self.check_slot(slot)?;
        let (job, pass, task) = stream;
        let stream = StreamId { job, pass, task };
        let node = self.node();
        let engine = node.rows.0.borrow();
        // A push that is staged also says what its sender has heard of: all below its floor.
        let staged = engine.staged(slot).any(|one| {
            let (id, floor) = (one.transaction.id, one.transaction.floor);
            id.stream == stream && (id.sequence == sequence || sequence < floor)
        });
        let memory = engine.memory(slot);
        let mut known = memory.streams.iter().filter(|(of, _)| *of == stream);
        let applied = known.any(|(_, window)| window.skips(sequence));
        // A closed stream was applied before: only the rows can tell.
        Ok(staged || applied || memory.closed.contains(&stream))
    }

    /// Copy a slot as a checkpoint does, whole or what has changed since `base` (position,
    /// epoch); None if this node is not surely its master now.
    fn save_slot(
        &self,
        now: u64,
        slot: u32,
        base: Option<(u64, u64)>,
    ) -> PyResult<Option<SimSlot>> {
        self.check_slot(slot)?;
        let node = self.node();
        let mut engine = node.rows.0.borrow_mut();
        let serves = engine.serving_state(slot) == ServingState::Serving;
        if !serves || now >= node.replica.serving_until() {
            return Ok(None);
        }
        let epoch = node.replica.epoch(slot);
        let base = base.filter(|&(_, known)| known == epoch);
        let mut snapshot = engine.begin_snapshot(slot, base.map(|(position, _)| position));
        engine.finish_snapshot(&mut snapshot);
        Ok(Some(SimSlot { epoch, snapshot }))
    }

    /// The slots that are to be loaded from a checkpoint, each with its epoch.
    fn to_load(&self) -> Vec<(u32, u64)> {
        self.node().replica.to_load().collect()
    }

    /// Load a slot from what [`Self::save_slot`] gave, the oldest first, the first one whole;
    /// false if that is not asked of this node (any more).
    fn load_slot(
        &self,
        py: Python<'_>,
        now: u64,
        slot: u32,
        epoch: u64,
        chain: Vec<Bound<'_, SimSlot>>,
    ) -> PyResult<bool> {
        let node = &mut *self.node();
        if node.replica.check_load(slot, epoch).is_err() {
            return Ok(false);
        }
        let mut engine = node.rows.0.borrow_mut();
        for link in chain.iter().map(|link| &link.get().snapshot) {
            if link.whole {
                engine.clear_slot(slot);
            }
            for table in &link.tables {
                let mut rows = PlainRows::default();
                table.layout.take_apart(&table.words, &mut rows);
                let gone = engine.remove_rows(table.table, slot, &table.deleted);
                gone.map_err(|refusal| from_refusal(py, &refusal))?;
                let rows = (&rows.0[..], &rows.1[..], &rows.2[..]);
                let put = engine.put_rows(table.table, slot, rows);
                put.map_err(|refusal| from_refusal(py, &refusal))?;
            }
            engine.set_memory(slot, &link.memory);
        }
        drop(engine);
        node.replica.loaded(now, &[slot]);
        Ok(true)
    }

    /// What this node wants of the controller.
    fn report_json(&self) -> String {
        crate::report_json(self.node().replica.report().1)
    }

    /// Position of a slot, and position with what is staged.
    fn place(&self, slot: u32) -> PyResult<(u64, u64)> {
        self.check_slot(slot)?;
        Ok(self.node().rows.0.borrow().place(slot))
    }

    /// A hash of a slot's rows and memory.
    fn digest(&self, slot: u32) -> PyResult<u64> {
        self.check_slot(slot)?;
        Ok(self.node().rows.0.borrow().digest(slot))
    }

    /// Whether this node answers requests for a slot: "elsewhere", "waiting" or "serving".
    fn serving_state(&self, slot: u32) -> PyResult<&'static str> {
        self.check_slot(slot)?;
        Ok(match self.node().rows.0.borrow().serving_state(slot) {
            ServingState::Elsewhere => "elsewhere",
            ServingState::Waiting => "waiting",
            ServingState::Serving => "serving",
        })
    }

    /// Term, epoch and source of a slot, and whether a copy of it is under way to here.
    fn slot_state(&self, slot: u32) -> PyResult<(u64, u64, u64, bool)> {
        self.check_slot(slot)?;
        let node = self.node();
        let (term, source, torn) = node.replica.slot_state(slot);
        Ok((term, node.replica.epoch(slot), source, torn))
    }

    /// The routing version this node goes by.
    fn routing_version(&self) -> u64 {
        self.node().replica.routing().version
    }

    /// Until when this node may answer reads of the slots it serves.
    fn serving_until(&self) -> u64 {
        self.node().replica.serving_until()
    }

    /// Transactions that wait for backups.
    fn pending(&self) -> usize {
        self.node().replica.pending()
    }

    /// What was done so far, by name.
    fn counters(&self) -> BTreeMap<&'static str, u64> {
        let counters = self.node().replica.counters;
        BTreeMap::from([
            ("prepared", counters.prepared),
            ("committed", counters.committed),
            ("rolled_back", counters.rolled_back),
            ("staged_for_others", counters.staged_for_others),
            ("refused_to_others", counters.refused_to_others),
            ("promotions", counters.promotions),
            ("slots_copied", counters.slots_copied),
            ("slots_installed", counters.slots_installed),
            ("unfit_promotions", counters.unfit_promotions),
        ])
    }
}

fn outcome_of(outcome: Result<Option<StageReport>, Refusal>) -> (i32, String) {
    match outcome {
        Ok(None) => (PENDING, String::new()),
        Ok(Some(_)) => (0, String::new()),
        Err(refusal) => (i32::from(refusal.code()), refusal.to_string()),
    }
}
