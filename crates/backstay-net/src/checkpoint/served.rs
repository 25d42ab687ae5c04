//! The tables of a running export where it is served: versions that never change, each made of the
//! one before and of parts of an element.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use backstay_core::error::Refusal;
use backstay_core::hash::SlotSpace;
use backstay_core::read_table::{ReadTable, SlotChange};
use serde::Deserialize;

use super::part::EXPORT_FORMAT;
use super::part_file::PartFile;
use super::tensors::Dtype;
use super::CheckpointError;

/// A slot that is wanted of a part.
#[derive(Debug, Clone, Copy, Deserialize)]
pub struct ServedSlot {
    /// Which.
    pub slot: u32,
    /// Its position, by the manifest.
    pub position: u64,
    /// Whether the part has all its rows.
    pub whole: bool,
}

/// A part of an element of an export.
#[derive(Debug, Clone, Deserialize)]
pub struct PartToServe {
    /// The file.
    pub path: PathBuf,
    /// Its size, by the manifest.
    pub bytes: u64,
    /// Its SHA-256, by the manifest.
    pub sha256: String,
    /// The element that it must be of.
    pub element: String,
    /// The slots that are wanted of it.
    pub slots: Vec<ServedSlot>,
}

/// See the module's documentation.
#[derive(Debug, Clone)]
pub struct ServedTables {
    tables: BTreeMap<String, ReadTable>,
}

impl ServedTables {
    /// Empty tables, each with the elements of a row.
    pub fn new(space: SlotSpace, tables: impl IntoIterator<Item = (String, usize)>) -> Self {
        let table = |(name, elements)| (name, ReadTable::new(space, elements));
        Self {
            tables: tables.into_iter().map(table).collect(),
        }
    }

    /// A table by its name.
    pub fn table(&self, name: &str) -> Result<&ReadTable, Refusal> {
        let found = self.tables.get(name);
        found.ok_or_else(|| Refusal::UnknownTable(name.to_owned()))
    }

    /// Bytes allocated for all tables.
    pub fn allocated_bytes(&self) -> usize {
        self.tables.values().map(ReadTable::allocated_bytes).sum()
    }

    /// The next version: with the slots that are wanted of these parts. A part that is not what it
    /// should be leaves this version as it is. `emptied`: slots that have no rows in it, whatever
    /// they have now.
    pub fn with(&self, parts: &[PartToServe], emptied: &[u32]) -> Result<Self, CheckpointError> {
        let mut next = self.clone();
        next.empty(emptied)?;
        for asked in parts {
            let part = PartFile::read(&asked.path, asked.bytes, &asked.sha256)?;
            check(&part, asked)?;
            // A table without rows of a slot is not among those of the part.
            let whole = asked.slots.iter().filter(|slot| slot.whole);
            let whole: Vec<u32> = whole.map(|slot| slot.slot).collect();
            next.empty(&whole)?;
            let wanted: BTreeSet<u64> = asked
                .slots
                .iter()
                .map(|slot| u64::from(slot.slot))
                .collect();
            for name in part.tables() {
                let table = next
                    .tables
                    .get_mut(&name)
                    .ok_or_else(|| part.damaged(format!("table {name} is not of this export")))?;
                change(&part, &name, table, &wanted)?;
            }
        }
        Ok(next)
    }

    fn empty(&mut self, slots: &[u32]) -> Result<(), CheckpointError> {
        for table in self.tables.values_mut() {
            table.change(slots.iter().map(|&slot| SlotChange {
                slot,
                whole: true,
                deleted: &[],
                keys: &[],
                weights: &[],
            }))?;
        }
        Ok(())
    }
}

/// Refuse a file of another element, or without the slots that its manifest says.
fn check(part: &PartFile<'_>, asked: &PartToServe) -> Result<(), CheckpointError> {
    for (name, wanted) in [("format", EXPORT_FORMAT), ("checkpoint", &asked.element)] {
        let found = part.metadata(name).unwrap_or_default();
        if found != wanted {
            return Err(part.damaged(format!("its {name} is {found:?}, not {wanted:?}")));
        }
    }
    let slots = part.array::<u64>("memory.slots", Dtype::U64, Some(3))?;
    let positions: BTreeMap<u64, u64> = slots.chunks(3).map(|row| (row[0], row[1])).collect();
    for asked in &asked.slots {
        let found = positions.get(&u64::from(asked.slot));
        if found != Some(&asked.position) {
            let what = format!("slot {} is not in it at its position", asked.slot);
            return Err(part.damaged(what));
        }
    }
    Ok(())
}

/// Put the changes of one table into it.
fn change(
    part: &PartFile<'_>,
    name: &str,
    table: &mut ReadTable,
    wanted: &BTreeSet<u64>,
) -> Result<(), CheckpointError> {
    let array = |what: &str| format!("table.{name}.{what}");
    let runs = part.array::<u64>(&array("runs"), Dtype::U64, Some(2))?;
    let keys = part.array::<u64>(&array("keys"), Dtype::U64, None)?;
    let elements = table.elements();
    let weights = part.array::<f32>(&array("weights"), Dtype::F32, Some(elements))?;
    let deleted_runs = part.array::<u64>(&array("deleted_runs"), Dtype::U64, Some(2))?;
    let deleted = part.array::<u64>(&array("deleted"), Dtype::U64, None)?;
    if weights.len() != keys.len() * elements {
        return Err(part.damaged(format!("table {name}: keys and weights do not fit")));
    }
    let mut changes: BTreeMap<u64, SlotChange<'_>> = BTreeMap::new();
    let empty = |slot: u64| SlotChange {
        slot: slot as u32,
        whole: false,
        deleted: &[],
        keys: &[],
        weights: &[],
    };
    for (slot, rows) in part.runs(name, &deleted_runs, deleted.len())? {
        let change = changes.entry(slot).or_insert_with(|| empty(slot));
        change.deleted = &deleted[rows];
    }
    for (slot, rows) in part.runs(name, &runs, keys.len())? {
        let change = changes.entry(slot).or_insert_with(|| empty(slot));
        change.weights = &weights[rows.start * elements..rows.end * elements];
        change.keys = &keys[rows];
    }
    changes.retain(|slot, _| wanted.contains(slot));
    table
        .change(changes.into_values())
        .map_err(|refusal| part.refused(refusal))
}
