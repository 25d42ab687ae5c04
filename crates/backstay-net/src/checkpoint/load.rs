//! Loading a part: its rows into the slots that wait for them.
//!
//! Nothing of a file is used before its checksum is found right. All rows of a slot are put together
//! with nothing locked, so that many parts can be loaded side by side; changed rows go in by small
//! pieces. Each step that changes a slot is taken under the lock of the replication state, after a
//! look whether the slot still waits: the routing may give it to another node, or have it begin
//! anew, at any moment.

use std::borrow::Cow;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};

use backstay_core::engine::SlotMemory;
use backstay_core::error::Refusal;
use backstay_core::hash::table_id;
use backstay_core::replication::Rows;
use backstay_core::stream::{StreamId, StreamWindow};
use bytemuck::Pod;
use ring::digest::{Context, SHA256};
use serde::Deserialize;

use super::file::hex;
use super::tensors::{Dtype, Header};
use super::CheckpointError;
use crate::replicator::Replicator;

/// Changed rows that are put in under the lock in one go.
const ROWS_AT_ONCE: usize = 4096;
/// Bytes that are read in one go: they are hashed while they are in the cache, and the system
/// reads ahead meanwhile.
const READ_BYTES: usize = 256 << 10;

thread_local! {
    /// What the last part of this thread was read into, until the thread ends with the restore:
    /// memory that is new costs the kernel about as long as it takes to read a file into it.
    static BUFFER: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// A slot to be loaded.
#[derive(Debug, Clone, Copy, Deserialize)]
pub struct LoadedSlot {
    /// Which.
    pub slot: u32,
    /// Its epoch by the routing that asked for it.
    pub epoch: u64,
    /// Whether the part has all its rows; else its rows replace some of the rows that are there.
    pub whole: bool,
    /// Whether nothing comes behind: its streams are taken from here, and it is complete.
    pub last: bool,
}

/// A part to be loaded.
#[derive(Debug, Clone, Deserialize)]
pub struct PartToLoad {
    /// The file.
    pub path: PathBuf,
    /// Its size, by the manifest.
    pub bytes: u64,
    /// Its SHA-256, by the manifest.
    pub sha256: String,
    /// The slots that are wanted of it.
    pub slots: Vec<LoadedSlot>,
}

/// A file whose checksum was right.
struct Part<'a> {
    path: &'a Path,
    file: Vec<u8>,
    header: Header,
}

/// Load a part; returns the rows that were put in.
pub fn load_part(replicator: &Replicator, asked: &PartToLoad) -> Result<u64, CheckpointError> {
    let part = Part::read(asked)?;
    let memories = part.memories()?;
    let wanted: BTreeMap<u64, LoadedSlot> = asked
        .slots
        .iter()
        .map(|slot| (u64::from(slot.slot), *slot))
        .collect();
    for (slot, asked) in &wanted {
        if !memories.contains_key(slot) {
            return Err(part.damaged(format!("slot {slot} is not in it")));
        }
        if asked.whole {
            replicator.load_step(asked, |store| {
                store.clear_slot(asked.slot);
                Ok(())
            })?;
        }
    }
    let mut rows = 0;
    for table in part.tables() {
        rows += part.load_table(replicator, &table, &wanted)?;
    }
    let complete = memories
        .into_iter()
        .filter_map(|(slot, memory)| Some((*wanted.get(&slot)?, memory)))
        .filter(|(asked, _)| asked.last)
        .collect::<Vec<_>>();
    replicator.finish_loads(&complete)?;
    Ok(rows)
}

impl Drop for Part<'_> {
    fn drop(&mut self) {
        BUFFER.set(std::mem::take(&mut self.file));
    }
}

impl<'a> Part<'a> {
    fn read(asked: &'a PartToLoad) -> Result<Self, CheckpointError> {
        let path = &*asked.path;
        let mut opened = File::open(path).map_err(CheckpointError::io(path))?;
        let length = opened.metadata().map_err(CheckpointError::io(path))?.len();
        if length != asked.bytes {
            // Not a byte of memory for what is not there.
            let what = format!("{length} bytes, the manifest says {}", asked.bytes);
            return Err(CheckpointError::damaged(path, what));
        }
        let mut file = BUFFER.take();
        let missing = (asked.bytes as usize).saturating_sub(file.len());
        file.reserve_exact(missing);
        file.resize(asked.bytes as usize, 0);
        let mut digest = Context::new(&SHA256);
        for piece in file.chunks_mut(READ_BYTES) {
            opened
                .read_exact(piece)
                .map_err(CheckpointError::io(path))?;
            digest.update(piece);
        }
        let found = hex(digest.finish().as_ref());
        if found != asked.sha256 {
            let what = format!("its SHA-256 is {found}, the manifest says {}", asked.sha256);
            return Err(CheckpointError::damaged(path, what));
        }
        let header = Header::read(&file)
            .map_err(|error| CheckpointError::damaged(path, error.to_string()))?;
        Ok(Self { path, file, header })
    }

    fn damaged(&self, what: String) -> CheckpointError {
        CheckpointError::damaged(self.path, what)
    }

    /// Rows that do not fit each other or their slot are the file's fault.
    fn refused(&self, refusal: Refusal) -> CheckpointError {
        match refusal {
            Refusal::InvalidRequest(what) => self.damaged(what),
            other => other.into(),
        }
    }

    /// The names of the tables with rows, or deleted rows, in it.
    fn tables(&self) -> Vec<String> {
        let suffixes = [".runs", ".deleted_runs"];
        let name = |name: &String| {
            let table = name.strip_prefix("table.")?;
            suffixes
                .iter()
                .find_map(|suffix| table.strip_suffix(suffix))
                .map(str::to_owned)
        };
        let mut tables: Vec<String> = self.header.names().iter().filter_map(name).collect();
        tables.dedup();
        tables.sort();
        tables.dedup();
        tables
    }

    /// An array; empty if it is not there. `columns`: None for one dimension.
    fn array<T: Pod>(
        &self,
        name: &str,
        dtype: Dtype,
        columns: Option<usize>,
    ) -> Result<Cow<'_, [T]>, CheckpointError> {
        let Some((found, shape, range)) = self.header.tensor(name) else {
            return Ok(Cow::Borrowed(&[]));
        };
        let fits = match columns {
            None => shape.len() == 1,
            Some(columns) => shape.len() == 2 && (shape[1] == columns || range.is_empty()),
        };
        if found != dtype || !fits {
            let what = format!("tensor {name} is {found} {shape:?}");
            return Err(self.damaged(what));
        }
        let bytes = &self.file[range];
        // Our own files are laid out so that nothing has to be copied.
        Ok(bytemuck::try_cast_slice(bytes).map_or_else(
            |_| Cow::Owned(bytemuck::pod_collect_to_vec(bytes)),
            Cow::Borrowed,
        ))
    }

    /// Position and streams of every slot in it.
    fn memories(&self) -> Result<BTreeMap<u64, SlotMemory>, CheckpointError> {
        let mut memories = BTreeMap::new();
        for row in self
            .array::<u64>("memory.slots", Dtype::U64, Some(3))?
            .chunks(3)
        {
            let memory = SlotMemory {
                position: row[1],
                ..SlotMemory::default()
            };
            memories.insert(row[0], memory);
        }
        let unknown = |slot| self.damaged(format!("streams of slot {slot}, which is not in it"));
        for row in self
            .array::<u64>("memory.streams", Dtype::U64, Some(6))?
            .chunks(6)
        {
            let window = StreamWindow {
                floor: row[3],
                applied: u128::from(row[4]) | u128::from(row[5]) << 64,
            };
            let memory = memories.get_mut(&row[0]).ok_or_else(|| unknown(row[0]))?;
            memory.streams.push((stream_of(row[1], row[2]), window));
        }
        for row in self
            .array::<u64>("memory.closed", Dtype::U64, Some(3))?
            .chunks(3)
        {
            let memory = memories.get_mut(&row[0]).ok_or_else(|| unknown(row[0]))?;
            memory.closed.push(stream_of(row[1], row[2]));
        }
        for row in self
            .array::<u64>("memory.times", Dtype::U64, Some(2))?
            .chunks(2)
        {
            let memory = memories.get_mut(&row[0]).ok_or_else(|| unknown(row[0]))?;
            memory.time = row[1] as u32;
        }
        Ok(memories)
    }

    /// Put the rows of one table into the slots that are wanted; returns how many.
    fn load_table(
        &self,
        replicator: &Replicator,
        table: &str,
        wanted: &BTreeMap<u64, LoadedSlot>,
    ) -> Result<u64, CheckpointError> {
        let id = table_id(table);
        let (elements, state_elements) = replicator.store().row_shape(id)?;
        let name = |what: &str| format!("table.{table}.{what}");
        let deleted_runs = self.array::<u64>(&name("deleted_runs"), Dtype::U64, Some(2))?;
        let deleted = self.array::<u64>(&name("deleted"), Dtype::U64, None)?;
        for (asked, keys) in self.runs(table, &deleted_runs, deleted.len(), wanted)? {
            for keys in deleted[keys].chunks(ROWS_AT_ONCE) {
                replicator
                    .load_step(asked, |store| store.remove_rows(asked.slot, id, keys))
                    .map_err(|refusal| self.refused(refusal))?;
            }
        }
        let runs = self.array::<u64>(&name("runs"), Dtype::U64, Some(2))?;
        let keys = self.array::<u64>(&name("keys"), Dtype::U64, None)?;
        let weights = self.array::<f32>(&name("weights"), Dtype::F32, Some(elements))?;
        let state = self.array::<f32>(&name("state"), Dtype::F32, Some(state_elements))?;
        if weights.len() != keys.len() * elements || state.len() != keys.len() * state_elements {
            return Err(self.damaged(format!("table {table}: keys, weights and state do not fit")));
        }
        let rows_of = |range: Range<usize>| {
            let (first, end) = (range.start, range.end);
            (
                &keys[range],
                &weights[first * elements..end * elements],
                &state[first * state_elements..end * state_elements],
            )
        };
        let mut rows = 0;
        for (asked, range) in self.runs(table, &runs, keys.len(), wanted)? {
            rows += range.len() as u64;
            if asked.whole {
                let prepared = replicator
                    .store()
                    .prepare_rows(asked.slot, id, rows_of(range))
                    .map_err(|refusal| self.refused(refusal))?;
                replicator.load_step(asked, |store| store.take_rows(prepared))?;
                continue;
            }
            for first in range.clone().step_by(ROWS_AT_ONCE) {
                let piece = rows_of(first..range.end.min(first + ROWS_AT_ONCE));
                replicator
                    .load_step(asked, |store| store.put_rows(asked.slot, id, piece))
                    .map_err(|refusal| self.refused(refusal))?;
            }
        }
        Ok(rows)
    }

    /// Which of `total` rows belong to the slots that are wanted.
    fn runs<'w>(
        &self,
        table: &str,
        runs: &[u64],
        total: usize,
        wanted: &'w BTreeMap<u64, LoadedSlot>,
    ) -> Result<Vec<(&'w LoadedSlot, Range<usize>)>, CheckpointError> {
        let runs: Vec<_> = runs.chunks_exact(2).collect();
        if !runs.is_sorted_by(|a, b| a[0] < b[0]) {
            let what = format!("table {table}: its slots do not ascend, each once");
            return Err(self.damaged(what));
        }
        let mut at = 0usize;
        let mut found = Vec::new();
        for run in runs {
            let end = at.checked_add(run[1] as usize).filter(|&end| end <= total);
            let end = end.ok_or_else(|| {
                self.damaged(format!("table {table}: runs of more rows than there are"))
            })?;
            if let Some(asked) = wanted.get(&run[0]) {
                found.push((asked, at..end));
            }
            at = end;
        }
        if at == total {
            return Ok(found);
        }
        Err(self.damaged(format!("table {table}: {total} rows, runs of {at}")))
    }
}

fn stream_of(job: u64, pass_and_task: u64) -> StreamId {
    StreamId {
        job,
        pass: (pass_and_task >> 32) as u32,
        task: pass_and_task as u32,
    }
}
