//! Loading a part: its rows into the slots that wait for them.
//!
//! All rows of a slot are put together
//! with nothing locked, so that many parts can be loaded side by side; changed rows go in by small
//! pieces. Each step that changes a slot is taken under the lock of the replication state, after a
//! look whether the slot still waits: the routing may give it to another node, or have it begin
//! anew, at any moment.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;

use backstay_core::engine::SlotMemory;
use backstay_core::hash::table_id;
use backstay_core::replication::Rows;
use backstay_core::stream::{StreamId, StreamWindow};
use serde::Deserialize;

use super::part_file::PartFile;
use super::tensors::Dtype;
use super::CheckpointError;
use crate::replicator::Replicator;

/// Changed rows that are put in under the lock in one go.
const ROWS_AT_ONCE: usize = 4096;
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

/// A part of a checkpoint.
struct Part<'a>(PartFile<'a>);

/// Load a part; returns the rows that were put in.
pub fn load_part(replicator: &Replicator, asked: &PartToLoad) -> Result<u64, CheckpointError> {
    let part = Part(PartFile::read(&asked.path, asked.bytes, &asked.sha256)?);
    let memories = part.memories()?;
    let wanted: BTreeMap<u64, LoadedSlot> = asked
        .slots
        .iter()
        .map(|slot| (u64::from(slot.slot), *slot))
        .collect();
    for (slot, asked) in &wanted {
        if !memories.contains_key(slot) {
            return Err(part.0.damaged(format!("slot {slot} is not in it")));
        }
        if asked.whole {
            replicator.load_step(asked, |store| {
                store.clear_slot(asked.slot);
                Ok(())
            })?;
        }
    }
    let mut rows = 0;
    for table in part.0.tables() {
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

impl Part<'_> {
    /// Position and streams of every slot in it.
    fn memories(&self) -> Result<BTreeMap<u64, SlotMemory>, CheckpointError> {
        let mut memories = BTreeMap::new();
        for row in self
            .0
            .array::<u64>("memory.slots", Dtype::U64, Some(3))?
            .chunks(3)
        {
            let memory = SlotMemory {
                position: row[1],
                ..SlotMemory::default()
            };
            memories.insert(row[0], memory);
        }
        let unknown = |slot| {
            self.0
                .damaged(format!("streams of slot {slot}, which is not in it"))
        };
        for row in self
            .0
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
            .0
            .array::<u64>("memory.closed", Dtype::U64, Some(3))?
            .chunks(3)
        {
            let memory = memories.get_mut(&row[0]).ok_or_else(|| unknown(row[0]))?;
            memory.closed.push(stream_of(row[1], row[2]));
        }
        for row in self
            .0
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
        let deleted_runs = self
            .0
            .array::<u64>(&name("deleted_runs"), Dtype::U64, Some(2))?;
        let deleted = self.0.array::<u64>(&name("deleted"), Dtype::U64, None)?;
        for (asked, keys) in self.runs(table, &deleted_runs, deleted.len(), wanted)? {
            for keys in deleted[keys].chunks(ROWS_AT_ONCE) {
                replicator
                    .load_step(asked, |store| store.remove_rows(asked.slot, id, keys))
                    .map_err(|refusal| self.0.refused(refusal))?;
            }
        }
        let runs = self.0.array::<u64>(&name("runs"), Dtype::U64, Some(2))?;
        let keys = self.0.array::<u64>(&name("keys"), Dtype::U64, None)?;
        let weights = self
            .0
            .array::<f32>(&name("weights"), Dtype::F32, Some(elements))?;
        let state = self
            .0
            .array::<f32>(&name("state"), Dtype::F32, Some(state_elements))?;
        if weights.len() != keys.len() * elements || state.len() != keys.len() * state_elements {
            return Err(self
                .0
                .damaged(format!("table {table}: keys, weights and state do not fit")));
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
                    .map_err(|refusal| self.0.refused(refusal))?;
                replicator.load_step(asked, |store| store.take_rows(prepared))?;
                continue;
            }
            for first in range.clone().step_by(ROWS_AT_ONCE) {
                let piece = rows_of(first..range.end.min(first + ROWS_AT_ONCE));
                replicator
                    .load_step(asked, |store| store.put_rows(asked.slot, id, piece))
                    .map_err(|refusal| self.0.refused(refusal))?;
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
        let runs = self.0.runs(table, runs, total)?.into_iter();
        let wanted = runs.filter_map(|(slot, rows)| Some((wanted.get(&slot)?, rows)));
        Ok(wanted.collect())
    }
}

fn stream_of(job: u64, pass_and_task: u64) -> StreamId {
    StreamId {
        job,
        pass: (pass_and_task >> 32) as u32,
        task: pass_and_task as u32,
    }
}
