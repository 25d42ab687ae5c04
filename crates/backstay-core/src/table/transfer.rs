//! The rows of one slot as a whole: compared, copied out, taken in.

use std::sync::Arc;

use super::Table;
use crate::error::Refusal;
use crate::hash::{mix64, SlotSpace};
use crate::marks::{Purpose, Since, Spans};
use crate::row_map::{ReadingToken, RowMap, KEY_WORDS};
use crate::spec::Storage;
use crate::storage;

/// Rows of a slot as plain values: keys, weights, optimizer state.
pub type PlainRows = (Vec<u64>, Vec<f32>, Vec<f32>);

/// All rows of one slot, put together beside the table that is to take them.
#[derive(Debug)]
pub struct SlotRows {
    slot: u32,
    map: RowMap,
}

/// How a row lies in memory: two words of key, the weights, the optimizer's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowLayout {
    /// Weights of a row.
    pub elements: usize,
    /// Words that they take.
    pub weight_words: usize,
    /// Words of optimizer state.
    pub state_words: usize,
    /// How the weights lie in their words.
    pub storage: Storage,
}

impl RowLayout {
    /// Words of a row.
    pub fn stride(&self) -> usize {
        KEY_WORDS + self.weight_words + self.state_words
    }

    /// Take rows as they lie in memory apart, behind what `rows` holds already.
    pub fn take_apart(&self, words: &[u32], rows: &mut PlainRows) {
        let count = words.len() / self.stride();
        let (keys, weights, state) = rows;
        keys.reserve(count);
        state.reserve(count * self.state_words);
        let first = weights.len();
        weights.resize(first + count * self.elements, 0.0);
        let out = weights[first..].chunks_exact_mut(self.elements);
        for (row, weights) in words.chunks_exact(self.stride()).zip(out) {
            let (key, values) = row.split_at(KEY_WORDS);
            keys.push(u64::from(key[0]) | u64::from(key[1]) << 32);
            let (stored, kept) = values.split_at(self.weight_words);
            storage::decode(self.storage, stored, weights);
            state.extend_from_slice(bytemuck::cast_slice(kept));
        }
    }

    /// Put all rows of one slot together, for [`Table::replace_rows`]: with nothing locked, for it
    /// takes its time. Refuses rows that are of another slot or shape, and a key that stands twice.
    pub fn slot_rows(
        &self,
        space: SlotSpace,
        slot: u32,
        (keys, weights, state): (&[u64], &[f32], &[f32]),
    ) -> Result<SlotRows, Refusal> {
        self.check(space, slot, keys, weights, state)?;
        let mut map = self.empty_map();
        self.fill(&mut map, keys, weights, state)?;
        Ok(SlotRows { slot, map })
    }

    fn empty_map(&self) -> RowMap {
        RowMap::new(self.weight_words + self.state_words)
    }

    fn check(
        &self,
        space: SlotSpace,
        slot: u32,
        keys: &[u64],
        weights: &[f32],
        state: &[f32],
    ) -> Result<(), Refusal> {
        if weights.len() != keys.len() * self.elements
            || state.len() != keys.len() * self.state_words
        {
            return Err(Refusal::InvalidRequest(format!(
                "{} keys need {} weights and {} state values, got {} and {}",
                keys.len(),
                keys.len() * self.elements,
                keys.len() * self.state_words,
                weights.len(),
                state.len()
            )));
        }
        check_slot(space, slot, keys)
    }

    /// Add rows to a map; refuses a key that is there already, and adds none behind it.
    fn fill(
        &self,
        map: &mut RowMap,
        keys: &[u64],
        weights: &[f32],
        state: &[f32],
    ) -> Result<(), Refusal> {
        map.check_room(keys.len())?;
        map.reserve(keys.len());
        for (i, &key) in keys.iter().enumerate() {
            let hash = mix64(key);
            if map.find(key, hash).is_some() {
                return Err(twice(key));
            }
            let row = map.insert(key, hash);
            let weights = &weights[i * self.elements..][..self.elements];
            let state = &state[i * self.state_words..][..self.state_words];
            self.store(map.values_mut(row), weights, state);
        }
        Ok(())
    }

    /// Write a row's words behind its key.
    fn store(&self, words: &mut [u32], weights: &[f32], state: &[f32]) {
        let (weight_words, state_words) = words.split_at_mut(self.weight_words);
        storage::encode(self.storage, weights, weight_words);
        state_words.copy_from_slice(bytemuck::cast_slice(state));
    }
}

impl Table {
    /// The rows of one slot, ordered by key.
    pub fn export_slot(&self, slot: u32) -> PlainRows {
        let Some(map) = self.maps.get((slot - self.first_slot) as usize) else {
            return PlainRows::default();
        };
        let mut order: Vec<(u64, usize)> = map.keys().collect();
        order.sort_unstable();
        let mut weights = vec![0.0; order.len() * self.elements];
        let mut state = Vec::with_capacity(order.len() * self.state_words);
        for (&(_, row), out) in order.iter().zip(weights.chunks_exact_mut(self.elements)) {
            let values = map.values(row);
            storage::decode(self.spec.storage, &values[..self.weight_words], out);
            state.extend(
                values[self.weight_words..]
                    .iter()
                    .map(|&word| f32::from_bits(word)),
            );
        }
        (
            order.into_iter().map(|(key, _)| key).collect(),
            weights,
            state,
        )
    }

    /// Replace the rows of one slot.
    pub fn import_slot(
        &mut self,
        slot: u32,
        keys: &[u64],
        weights: &[f32],
        state: &[f32],
    ) -> Result<(), Refusal> {
        let rows = (keys, weights, state);
        self.replace_rows(self.layout().slot_rows(self.space, slot, rows)?);
        Ok(())
    }

    /// Replace the rows of one slot by rows that [`RowLayout::slot_rows`] has put together.
    pub fn replace_rows(&mut self, rows: SlotRows) {
        self.replace_map(rows.slot, rows.map);
    }

    /// Add rows to one slot; refuses a key that is there already, and adds none behind it.
    pub fn add_rows(
        &mut self,
        slot: u32,
        keys: &[u64],
        weights: &[f32],
        state: &[f32],
    ) -> Result<(), Refusal> {
        let layout = self.layout();
        layout.check(self.space, slot, keys, weights, state)?;
        self.ensure_maps();
        let at = (slot - self.first_slot) as usize;
        self.on_map(at, |map| layout.fill(map, keys, weights, state))
    }

    /// Drop the rows of one slot.
    pub fn clear_slot(&mut self, slot: u32) {
        if !self.maps.is_empty() {
            self.replace_map(slot, self.layout().empty_map());
        }
    }

    fn replace_map(&mut self, slot: u32, mut new: RowMap) {
        self.ensure_maps();
        if let Some(spans) = self.export_spans(slot) {
            // Of no position until the slot's memory comes: what changed is not known before.
            new.begin_export(u64::MAX, spans.number + 1);
        }
        let at = (slot - self.first_slot) as usize;
        self.on_map(at, |map| *map = new);
    }

    /// A hash of the rows of one slot that does not depend on the order they came in.
    pub fn digest_slot(&self, slot: u32) -> u64 {
        let Some(map) = self.maps.get((slot - self.first_slot) as usize) else {
            return 0;
        };
        map.keys().fold(0u64, |sum, (key, row)| {
            let hash = map
                .values(row)
                .iter()
                .fold(mix64(key ^ self.id), |hash, &word| {
                    mix64(hash.rotate_left(5) ^ u64::from(word))
                });
            sum.wrapping_add(hash)
        })
    }

    /// How its rows lie in memory.
    pub fn layout(&self) -> RowLayout {
        RowLayout {
            elements: self.elements,
            weight_words: self.weight_words,
            state_words: self.state_words,
            storage: self.spec.storage,
        }
    }

    /// Rows of one slot.
    pub fn rows_in(&self, slot: u32) -> usize {
        let map = self.maps.get((slot - self.first_slot) as usize);
        map.map_or(0, RowMap::len)
    }

    /// Rows of one slot, and how many have changed or gone; None: too many have gone.
    pub fn changed_in(&self, slot: u32, purpose: Purpose, since: Since) -> Option<(usize, usize)> {
        let map = self.maps.get((slot - self.first_slot) as usize);
        map.map_or(Some((0, 0)), |map| {
            Some((map.len(), map.changed(purpose, since)?))
        })
    }

    /// The keys of one slot that had a row and have none now, ascending.
    pub fn removed_in(&self, slot: u32, purpose: Purpose, since: Since) -> Vec<u64> {
        let map = self.maps.get((slot - self.first_slot) as usize);
        map.map_or_else(Vec::new, |map| map.removed(purpose, since))
    }

    /// Append rows of one slot as they lie in memory (see [`RowLayout`]) to the `words` of those
    /// before them: at most so many. Whether there are more.
    pub fn copy_more(&self, slot: u32, words: &mut Vec<u32>, most: usize) -> bool {
        let Some(map) = self.maps.get((slot - self.first_slot) as usize) else {
            return false;
        };
        let first = words.len() / self.layout().stride();
        let end = map.len().min(first.saturating_add(most));
        map.copy_rows(first..end, words);
        end < map.len()
    }

    /// Begin to read the rows of one slot as they are now; how many there are. Pushes may change
    /// them meanwhile.
    pub fn begin_reading(&mut self, slot: u32, token: &Arc<ReadingToken>) -> usize {
        let map = self.maps.get_mut((slot - self.first_slot) as usize);
        map.map_or(0, |map| map.begin_reading(token))
    }

    /// The next rows of a reading, at most so many. None if the slot's content was replaced since.
    pub fn read_on(
        &mut self,
        slot: u32,
        token: &Arc<ReadingToken>,
        most: usize,
    ) -> Option<PlainRows> {
        let map = self.maps.get_mut((slot - self.first_slot) as usize)?;
        let (mut words, mut rows) = (Vec::new(), PlainRows::default());
        map.read_on(token, most, &mut words)?;
        self.layout().take_apart(&words, &mut rows);
        Some(rows)
    }

    /// Drop the rows of one slot that are kept for readings which are over.
    pub(crate) fn end_readings(&mut self, slot: u32) {
        let map = self.maps.get_mut((slot - self.first_slot) as usize);
        if let Some(map) = map {
            map.end_readings();
        }
    }

    /// Bring copies of the first rows of one slot up to date with what has changed since the last
    /// generation began, and append the rest.
    pub fn patch(&self, slot: u32, purpose: Purpose, words: &mut Vec<u32>) {
        if let Some(map) = self.maps.get((slot - self.first_slot) as usize) {
            map.patch(purpose, words);
            self.copy_more(slot, words, usize::MAX);
        }
    }

    /// The rows of one slot that have changed.
    pub fn copy_changed(&self, slot: u32, purpose: Purpose, since: Since) -> Vec<u32> {
        let mut words = Vec::new();
        if let Some(map) = self.maps.get((slot - self.first_slot) as usize) {
            map.copy_changed(purpose, since, &mut words);
        }
        words
    }

    /// What has changed in one slot up to now is of an earlier generation.
    pub fn begin_generation(&mut self, slot: u32, since: Since) {
        self.on_map_if_any(slot, |map| map.begin_generation(since));
    }

    /// Nothing counts as changed in one slot, whose rows are those of this position.
    pub fn clear_marks(&mut self, slot: u32, position: u64) {
        self.on_map_if_any(slot, |map| map.clear_marks(position));
    }

    /// Keep account of what changes from now on for an export, or of nothing any more. An account
    /// that is kept already goes on. `position` is that of each slot, `number` tells this account
    /// from those before it.
    pub(crate) fn track_export(
        &mut self,
        wanted: bool,
        number: u64,
        position: impl Fn(u32) -> u64,
    ) {
        if wanted == self.exported {
            return;
        }
        self.exported = wanted;
        if wanted {
            self.ensure_maps();
        }
        for slot in self.first_slot..self.first_slot + self.maps.len() as u32 {
            self.on_map_if_any(slot, |map| {
                if wanted {
                    map.begin_export(position(slot), number);
                } else {
                    map.end_export();
                }
            });
        }
    }

    /// Since when the changes of a slot are known for an export; None if the table is in none.
    pub(crate) fn export_spans(&self, slot: u32) -> Option<Spans> {
        let map = self.maps.get((slot - self.first_slot) as usize);
        map.and_then(RowMap::export_spans)
    }

    /// An increment has what changed in one slot up to this position.
    pub(crate) fn begin_increment(&mut self, slot: u32, position: u64, since: Since) {
        self.on_map_if_any(slot, |map| map.begin_increment(position, since));
    }

    /// Put rows into one slot: each is new, or replaces the one of its key.
    pub fn put_rows(
        &mut self,
        slot: u32,
        keys: &[u64],
        weights: &[f32],
        state: &[f32],
    ) -> Result<(), Refusal> {
        let layout = self.layout();
        layout.check(self.space, slot, keys, weights, state)?;
        self.ensure_maps();
        let at = (slot - self.first_slot) as usize;
        self.maps[at].check_room(keys.len())?;
        for (i, &key) in keys.iter().enumerate() {
            let (_, row, _) = self.find_or_create(key, mix64(key), None);
            let weights = &weights[i * layout.elements..][..layout.elements];
            let state = &state[i * layout.state_words..][..layout.state_words];
            layout.store(self.maps[at].values_mut(row), weights, state);
        }
        Ok(())
    }

    /// Remove rows from one slot; keys without a row are passed over. Refuses keys of another slot.
    pub fn remove_rows(&mut self, slot: u32, keys: &[u64]) -> Result<(), Refusal> {
        check_slot(self.space, slot, keys)?;
        self.remove(keys);
        Ok(())
    }

    /// Change the map of a slot (its number in the cluster) if the table has had rows.
    fn on_map_if_any(&mut self, slot: u32, change: impl FnOnce(&mut RowMap)) {
        if !self.maps.is_empty() {
            self.on_map((slot - self.first_slot) as usize, change);
        }
    }
}

fn check_slot(space: SlotSpace, slot: u32, keys: &[u64]) -> Result<(), Refusal> {
    match keys.iter().find(|&&key| space.slot_of(key) != slot) {
        Some(key) => Err(Refusal::InvalidRequest(format!(
            "key {key} does not belong to slot {slot}"
        ))),
        None => Ok(()),
    }
}

fn twice(key: u64) -> Refusal {
    Refusal::InvalidRequest(format!("key {key} stands twice in the rows to import"))
}
