//! Writing a part of a checkpoint or of a running export: some slots of this node, copied one after
//! the other.

use std::collections::btree_map::{BTreeMap, Entry};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use backstay_core::engine::{SlotMemory, SlotSnapshot, TableSnapshot};
use backstay_core::error::Refusal;
use backstay_core::hash::table_id;
use backstay_core::stream::StreamId;
use backstay_core::table::PlainRows;
use serde::{Deserialize, Serialize};

use super::chosen::{Chosen, ExportChoice};
use super::file::{write_whole, Pace};
use super::tensors::{make_header, Dtype};
use super::CheckpointError;
use crate::replicator::Replicator;

/// What a file says that it is.
const FORMAT: &str = "backstay-part-1";
pub(super) const EXPORT_FORMAT: &str = "backstay-export-part-1";

/// A slot to be written.
#[derive(Debug, Clone, Copy, Deserialize)]
pub struct SlotToWrite {
    /// Which.
    pub slot: u32,
    /// Only what has changed since the checkpoint in which it was at this position and of this
    /// epoch; None: all of it.
    pub base: Option<(u64, u64)>,
}

/// A part to be written.
#[derive(Debug, Clone, Deserialize)]
pub struct PartToWrite {
    /// The file.
    pub path: PathBuf,
    /// The id of the checkpoint, or of the element of an export, noted in the file.
    pub checkpoint: String,
    /// Bytes in a second, at most; 0: no limit.
    pub bytes_per_s: u64,
}

/// A slot as it was written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SlotWritten {
    /// Which.
    pub slot: u32,
    /// Pushes that it had applied.
    pub position: u64,
    /// The routing version at which its content began.
    pub epoch: u64,
    /// Whether all its rows were written.
    pub whole: bool,
    /// Rows that were written.
    pub rows: u64,
}

/// A part that was written.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct PartWritten {
    /// Its size.
    pub bytes: u64,
    /// Its SHA-256, in hex.
    pub sha256: String,
    /// Its slots. Those of which this node is no master (any more) are missing; without any, there
    /// is no file, nor if slots of an export have nothing to tell.
    pub slots: Vec<SlotWritten>,
}

/// What is gathered for one table.
#[derive(Default)]
struct TableRows {
    runs: Vec<u64>,
    rows: PlainRows,
    deleted_runs: Vec<u64>,
    deleted: Vec<u64>,
}

/// What is gathered for a part.
#[derive(Default)]
struct Content {
    slots: Vec<u64>,
    streams: Vec<u64>,
    closed: Vec<u64>,
    times: Vec<u64>,
    tables: BTreeMap<String, TableRows>,
}

/// An array to be written.
struct Tensor<'a> {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    /// Its numbers, little-endian.
    bytes: &'a [u8],
}

impl<'a> Tensor<'a> {
    /// Rows of unsigned numbers; `columns`: None for one dimension.
    fn numbers(name: String, columns: Option<usize>, values: &'a [u64]) -> Self {
        let shape = columns.map_or(vec![values.len()], |n| vec![values.len() / n, n]);
        Self {
            name,
            dtype: Dtype::U64,
            shape,
            bytes: bytemuck::cast_slice(values),
        }
    }

    /// `rows` rows of floats.
    fn floats(name: String, rows: usize, values: &'a [f32]) -> Self {
        Self {
            name,
            dtype: Dtype::F32,
            shape: vec![rows, values.len() / rows.max(1)],
            bytes: bytemuck::cast_slice(values),
        }
    }

    fn described(&self) -> (String, Dtype, Vec<usize>) {
        (self.name.clone(), self.dtype, self.shape.clone())
    }
}

/// Slots as they were copied, to be written.
pub struct CopiedSlots {
    /// Each with its epoch.
    slots: Vec<(u64, SlotSnapshot)>,
    /// The names of the tables with rows in them.
    names: BTreeMap<u64, String>,
    /// Of an export: what it has of each table.
    exported: Option<BTreeMap<u64, Chosen>>,
}

/// Copy slots, each of one instant at which this node surely was its master. Those of which it is
/// none (any more) are left out.
///
/// Pushes wait meanwhile for the slot that is copied, so this is no work for a thread that others
/// go before.
///
/// Those behind more than `most_bytes` are left out, too: what has changed in a slot is known when
/// it is copied.
pub fn copy_slots(
    replicator: &Replicator,
    slots: &[SlotToWrite],
    most_bytes: u64,
    cancelled: &AtomicBool,
) -> Result<CopiedSlots, CheckpointError> {
    copy(replicator, slots, None, most_bytes, cancelled)
}

/// The same for a running export. Slots are left out, too, as long as this node keeps no account of
/// what changes in its tables.
pub fn copy_export(
    replicator: &Replicator,
    slots: &[SlotToWrite],
    choice: &ExportChoice,
    most_bytes: u64,
    cancelled: &AtomicBool,
) -> Result<CopiedSlots, CheckpointError> {
    let chosen = |name: &String| {
        let id = table_id(name);
        Ok((id, Chosen::new(replicator.store().spec(id)?, choice)))
    };
    let tables = choice
        .tables
        .iter()
        .map(chosen)
        .collect::<Result<_, Refusal>>()?;
    copy(replicator, slots, Some(tables), most_bytes, cancelled)
}

fn copy(
    replicator: &Replicator,
    slots: &[SlotToWrite],
    exported: Option<BTreeMap<u64, Chosen>>,
    most_bytes: u64,
    cancelled: &AtomicBool,
) -> Result<CopiedSlots, CheckpointError> {
    let tables: Option<Vec<u64>> = exported
        .as_ref()
        .map(|tables| tables.keys().copied().collect());
    let mut bytes = 0;
    let mut copied = CopiedSlots {
        slots: Vec::with_capacity(slots.len()),
        names: BTreeMap::new(),
        exported,
    };
    for asked in slots {
        if cancelled.load(Ordering::Relaxed) {
            return Err(CheckpointError::Cancelled);
        }
        if bytes > most_bytes {
            break;
        }
        let found = replicator.snapshot_slot(asked.slot, asked.base, tables.as_deref());
        let Some((epoch, snapshot)) = found else {
            continue;
        };
        let words = |table: &TableSnapshot| table.words.len() + 2 * table.deleted.len();
        bytes += 4 * snapshot.tables.iter().map(words).sum::<usize>() as u64;
        for table in &snapshot.tables {
            if let Entry::Vacant(name) = copied.names.entry(table.table) {
                name.insert(replicator.store().content_name(table.table)?);
            }
        }
        copied.slots.push((epoch, snapshot));
    }
    Ok(copied)
}

impl CopiedSlots {
    /// Write them to a file; no file if there are none.
    pub fn write(
        self,
        part: &PartToWrite,
        cancelled: &AtomicBool,
    ) -> Result<PartWritten, CheckpointError> {
        if self.slots.is_empty() {
            return Ok(PartWritten::default());
        }
        let mut content = Content::default();
        let mut slots = Vec::with_capacity(self.slots.len());
        for (epoch, snapshot) in self.slots {
            slots.push(SlotWritten {
                slot: snapshot.slot,
                position: snapshot.memory.position,
                epoch,
                whole: snapshot.whole,
                rows: content.add(&self.names, self.exported.as_ref(), epoch, &snapshot),
            });
        }
        let is_export = self.exported.is_some();
        if is_export && content.tables.is_empty() {
            return Ok(PartWritten {
                slots,
                ..PartWritten::default()
            });
        }
        let format = if is_export { EXPORT_FORMAT } else { FORMAT };
        let tensors = content.tensors(!is_export);
        let metadata = BTreeMap::from([
            ("format".to_owned(), format.to_owned()),
            ("checkpoint".to_owned(), part.checkpoint.clone()),
        ]);
        let described = tensors.iter().map(Tensor::described);
        let header = make_header(metadata, described)
            .map_err(|error| CheckpointError::damaged(&part.path, error.to_string()))?;
        let mut pieces = vec![&header[..]];
        pieces.extend(tensors.iter().map(|tensor| tensor.bytes));
        let pace = Pace {
            bytes_per_s: part.bytes_per_s,
            cancelled,
        };
        let (bytes, sha256) = write_whole(&part.path, &pieces, &pace)?;
        Ok(PartWritten {
            bytes,
            sha256,
            slots,
        })
    }
}

impl Content {
    /// Add a slot; returns its rows.
    fn add(
        &mut self,
        names: &BTreeMap<u64, String>,
        exported: Option<&BTreeMap<u64, Chosen>>,
        epoch: u64,
        snapshot: &SlotSnapshot,
    ) -> u64 {
        let slot = u64::from(snapshot.slot);
        let memory = &snapshot.memory;
        self.slots.extend([slot, memory.position, epoch]);
        self.add_streams(slot, memory);
        if memory.time > 0 {
            self.times.extend([slot, u64::from(memory.time)]);
        }
        let mut all = 0;
        for table in &snapshot.tables {
            let chosen = exported.and_then(|tables| tables.get(&table.table));
            let chosen = chosen.map(|chosen| chosen.rows(table, snapshot.whole, memory.time));
            let rows = chosen.as_ref().map_or_else(
                || table.words.len() / table.layout.stride(),
                |(rows, _)| rows.0.len(),
            );
            let deleted = chosen.as_ref().map_or(&table.deleted, |(_, keys)| keys);
            if rows == 0 && deleted.is_empty() {
                continue;
            }
            let into = self.tables.entry(names[&table.table].clone()).or_default();
            if rows > 0 {
                into.runs.extend([slot, rows as u64]);
            }
            if !deleted.is_empty() {
                into.deleted_runs.extend([slot, deleted.len() as u64]);
                into.deleted.extend(deleted);
            }
            match chosen {
                None => table.layout.take_apart(&table.words, &mut into.rows),
                Some((rows, _)) => {
                    into.rows.0.extend(rows.0);
                    into.rows.1.extend(rows.1);
                    into.rows.2.extend(rows.2);
                }
            }
            all += rows as u64;
        }
        all
    }

    fn add_streams(&mut self, slot: u64, memory: &SlotMemory) {
        for (stream, window) in &memory.streams {
            let (job, task) = words_of(*stream);
            let (low, high) = (window.applied as u64, (window.applied >> 64) as u64);
            self.streams
                .extend([slot, job, task, window.floor, low, high]);
        }
        for &stream in &memory.closed {
            let (job, task) = words_of(stream);
            self.closed.extend([slot, job, task]);
        }
    }

    /// The arrays of the file: those of 64-bit numbers first, so that all are aligned.
    fn tensors(&self, with_streams: bool) -> Vec<Tensor<'_>> {
        let mut tensors = vec![Tensor::numbers("memory.slots".into(), Some(3), &self.slots)];
        if with_streams {
            tensors.push(Tensor::numbers(
                "memory.streams".into(),
                Some(6),
                &self.streams,
            ));
            tensors.push(Tensor::numbers(
                "memory.closed".into(),
                Some(3),
                &self.closed,
            ));
        }
        if with_streams && !self.times.is_empty() {
            let times = Tensor::numbers("memory.times".into(), Some(2), &self.times);
            tensors.push(times);
        }
        let with_rows = || {
            self.tables
                .iter()
                .filter(|(_, table)| !table.runs.is_empty())
        };
        for (name, table) in with_rows() {
            let runs = format!("table.{name}.runs");
            tensors.push(Tensor::numbers(runs, Some(2), &table.runs));
            let keys = format!("table.{name}.keys");
            tensors.push(Tensor::numbers(keys, None, &table.rows.0));
        }
        let with_deleted = self
            .tables
            .iter()
            .filter(|(_, table)| !table.deleted.is_empty());
        for (name, table) in with_deleted {
            let runs = format!("table.{name}.deleted_runs");
            tensors.push(Tensor::numbers(runs, Some(2), &table.deleted_runs));
            let keys = format!("table.{name}.deleted");
            tensors.push(Tensor::numbers(keys, None, &table.deleted));
        }
        for (name, table) in with_rows() {
            let (keys, weights, state) = &table.rows;
            let name = format!("table.{name}.");
            tensors.push(Tensor::floats(
                name.clone() + "weights",
                keys.len(),
                weights,
            ));
            if !state.is_empty() {
                tensors.push(Tensor::floats(name + "state", keys.len(), state));
            }
        }
        tensors
    }
}

fn words_of(stream: StreamId) -> (u64, u64) {
    let task = u64::from(stream.pass) << 32 | u64::from(stream.task);
    (stream.job, task)
}
