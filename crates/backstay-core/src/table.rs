//! The rows of one table in a range of slots, and the kernels that read and change them.
//!
//! Keys arrive ordered by slot, so that the maps of one slot stay in cache; inside, work goes
//! in small blocks of three steps (ask for the index line, ask for the row, use it), so that
//! misses overlap instead of queueing.

mod companion;
mod expiry;
mod live;
mod row_step;
mod transfer;
mod user_update;

use std::sync::Arc;

use crate::compensation::{Compensated, Compensation, Reference, RevisedAdagrad};
use crate::error::Refusal;
use crate::hash::{mix64, table_id, SlotSpace};
use crate::initializer::RowInitializer;
use crate::optimizer::{Optimizer, OptimizerStamp, OptimizerVisitor, RowOptimizer};
use crate::row_map::RowMap;
use crate::spec::{TableKind, TableSpec};
use crate::staleness::StalenessCounts;
use crate::storage;
use crate::stream::TransactionId;
use crate::transaction::{Batch, Change, Update};

use live::Live;
use row_step::{FreshState, RowStep};
pub use transfer::{PlainRows, RowLayout, SlotRows};

/// Keys that are looked up together.
const BLOCK: usize = 32;

/// Where a key of a block was looked up: its hash, and the row that the index suggests.
#[derive(Debug, Clone, Copy, Default)]
struct Place {
    hash: u64,
    suggested: Option<usize>,
}

/// What a transaction tells all its rows.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Moment {
    /// The time in the slot.
    pub(crate) time: u32,
    /// Which transaction it is.
    pub(crate) id: TransactionId,
    /// What is done about the delay of its gradients.
    pub(crate) compensation: Compensation,
}

/// See the module's documentation.
#[derive(Debug, Clone)]
pub struct Table {
    id: u64,
    spec: Arc<TableSpec>,
    is_companion: bool,
    initializer: RowInitializer,
    space: SlotSpace,
    first_slot: u32,
    slots: u32,
    /// One per slot of the range; empty until the first row comes.
    maps: Vec<RowMap>,
    /// Whether the maps keep account of what changes for an export.
    exported: bool,
    elements: usize,
    weight_words: usize,
    /// Of the optimizer.
    optimizer_words: usize,
    /// Of the optimizer and of the compensation.
    kept_words: usize,
    /// Of these, and the statistics behind them.
    state_words: usize,
    /// What its lifetime does, if it has one.
    live: Option<Live>,
    allocated_bytes: usize,
    rows: usize,
    /// Update transactions that each slot of the range has applied; empty until the first one.
    updates: Vec<u64>,
    /// How stale those were that told, in slots that this node is master of.
    stale: StalenessCounts,
}

impl Table {
    /// An empty table over the slots `first_slot .. first_slot + slots`.
    pub fn new(spec: Arc<TableSpec>, space: SlotSpace, first_slot: u32, slots: u32) -> Self {
        let elements = spec.row_elements();
        let optimizer = &spec.optimizer;
        Self {
            id: table_id(&spec.name),
            is_companion: spec.is_companion(),
            initializer: RowInitializer::new(&spec),
            optimizer_words: optimizer.state_elements(elements),
            kept_words: optimizer.state_elements(elements)
                + spec.compensation.state_elements(elements),
            state_words: spec.state_words(),
            live: spec
                .lifetime
                .as_ref()
                .map(|one| Live::new(&spec, one, space)),
            weight_words: storage::weight_words(spec.storage, elements),
            spec,
            space,
            first_slot,
            slots,
            maps: Vec::new(),
            exported: false,
            elements,
            allocated_bytes: 0,
            rows: 0,
            updates: Vec::new(),
            stale: StalenessCounts::default(),
        }
    }

    /// The id under which it travels.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Its description.
    pub fn spec(&self) -> &Arc<TableSpec> {
        &self.spec
    }

    /// Whether it holds what another table counts of keys without a row.
    pub(crate) fn is_companion(&self) -> bool {
        self.is_companion
    }

    /// Rows of this range of slots.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Bytes allocated for those rows.
    pub fn allocated_bytes(&self) -> usize {
        self.allocated_bytes
    }

    /// Update transactions that a slot (its number in the range) has applied.
    pub(crate) fn updates(&self, slot: usize) -> u64 {
        self.updates.get(slot).copied().unwrap_or(0)
    }

    /// Take them over from another replica.
    pub(crate) fn set_updates(&mut self, slot: usize, updates: u64) {
        if updates > 0 || !self.updates.is_empty() {
            self.updates.resize(self.slots as usize, 0);
            self.updates[slot] = updates;
        }
    }

    /// Take the counts of all slots out, to count on; [`Self::put_updates`] puts them back.
    pub(crate) fn take_updates(&mut self) -> Vec<u64> {
        let mut updates = std::mem::take(&mut self.updates);
        updates.resize(self.slots as usize, 0);
        updates
    }

    /// See [`Self::take_updates`]; `stale` was counted meanwhile.
    pub(crate) fn put_updates(&mut self, updates: Vec<u64>, stale: &StalenessCounts) {
        self.updates = updates;
        self.stale += *stale;
    }

    /// How stale its pushes were, as far as this node was their master.
    pub fn staleness(&self) -> &StalenessCounts {
        &self.stale
    }

    /// Take over other settings of the optimizer and of the policy for gradients; they fit, see
    /// [`TableSpec::fixed_difference`].
    pub(crate) fn change_settings(&mut self, spec: &Arc<TableSpec>) {
        self.live = spec
            .lifetime
            .as_ref()
            .map(|one| Live::new(spec, one, self.space));
        self.spec = Arc::clone(spec);
    }

    /// Refuse settings under which rows of this table cannot be changed.
    pub fn check_stamp(
        &self,
        stamp: Option<&OptimizerStamp>,
        compensation: Compensation,
    ) -> Result<(), Refusal> {
        let fits = compensation.reference().is_none() || compensation.fits(self.spec.compensation);
        let stamp = stamp.filter(|_| fits).ok_or_else(|| self.foreign_stamp())?;
        let optimizer = self.optimizer_under(Some(stamp))?;
        let revises = compensation == Compensation::AdaptiveRevision;
        if revises && !matches!(optimizer, Optimizer::Adagrad(_)) {
            return Err(self.foreign_stamp());
        }
        Ok(())
    }

    /// The optimizer under the settings of a stamp, or the table's without one.
    pub fn optimizer_under(&self, stamp: Option<&OptimizerStamp>) -> Result<Optimizer, Refusal> {
        let of_table = &self.spec.optimizer;
        let Some(stamp) = stamp else {
            return Ok(of_table.clone());
        };
        let fits = |one: &Optimizer| one.state_elements(self.elements) == self.optimizer_words;
        let optimizer = of_table.under(stamp).filter(fits);
        optimizer.ok_or_else(|| self.foreign_stamp())
    }

    fn foreign_stamp(&self) -> Refusal {
        Refusal::InvalidRequest(format!(
            "a push to table {} came with settings of another optimizer, or with none",
            self.spec.name
        ))
    }

    /// 32-bit words of optimizer state and statistics behind a row's weights.
    pub fn state_elements(&self) -> usize {
        self.state_words
    }

    /// Refuse values that do not fill one row for each key, a delete of blocks of a dense table, and
    /// what a table's lifetime does not have.
    pub fn check_shape(&self, batch: &Batch, change: Change) -> Result<(), Refusal> {
        let (keys, values) = (batch.keys().len(), batch.values().len());
        match change {
            Change::Delete => return self.check_delete(values),
            Change::Update(update) => {
                if update.has_counts {
                    self.check_lifetime(change)?;
                }
                self.check_reference(update.reference)?;
            }
            Change::Expire(_) | Change::Evict | Change::Decay { .. } => {
                self.check_lifetime(change)?;
            }
            Change::Assign { .. } | Change::Close => {}
        }
        let wanted = keys * change.values(self.elements);
        if values == wanted {
            return Ok(());
        }
        Err(Refusal::InvalidRequest(format!(
            "table {} has rows of {} elements: {keys} keys need {wanted} values, {values} came",
            self.spec.name, self.elements,
        )))
    }

    /// Refuse gradients that do not tell from where they come, where that is needed, and that do,
    /// where it is not.
    fn check_reference(&self, told: Option<Reference>) -> Result<(), Refusal> {
        let wanted = self.spec.compensation.reference();
        if told == wanted {
            return Ok(());
        }
        let reason = match wanted {
            Some(Reference::Weights) => {
                "compensates the delay of gradients (compensation): a push must bring the weights that \
                 its gradients were computed with"
            }
            Some(Reference::Sum) => {
                "revises its steps (compensation): a push must bring the sums of gradients that came \
                 with the weights"
            }
            None => {
                "does not compensate the delay of gradients (compensation): a push brings no weights"
            }
        };
        let name = &self.spec.name;
        Err(Refusal::InvalidRequest(format!("table {name} {reason}")))
    }

    fn check_delete(&self, values: usize) -> Result<(), Refusal> {
        if matches!(self.spec.kind, TableKind::Dense { .. }) {
            return Err(Refusal::InvalidRequest(format!(
                "table {} is dense: only rows of sparse tables can be deleted",
                self.spec.name
            )));
        }
        if values > 0 {
            return Err(Refusal::InvalidRequest(format!(
                "a delete of rows of table {} came with {values} values: it has none",
                self.spec.name
            )));
        }
        Ok(())
    }

    /// Refuse to hold `more` rows in a slot (its number within the range) if they might
    /// exceed the limit.
    pub fn check_room(&self, slot: usize, more: usize) -> Result<(), Refusal> {
        let map = self.maps.get(slot);
        map.map_or(Ok(()), |map| map.check_room(more))
    }

    /// Bytes that the rows which `keys`, sorted by slot, still lack would take, at most.
    pub fn growth_bytes(&self, keys: &[u64]) -> usize {
        self.growth(keys, |map, run| {
            let absent = run
                .iter()
                .filter(|&&key| map.find(key, mix64(key)).is_none());
            absent.count()
        })
    }

    /// The same of keys that all lack a row.
    pub(crate) fn growth_of_absent(&self, keys: &[u64]) -> usize {
        self.growth(keys, |_, run| run.len())
    }

    fn growth(&self, keys: &[u64], absent: impl Fn(&RowMap, &[u64]) -> usize) -> usize {
        let empty = RowMap::new(self.weight_words + self.state_words);
        let slot = |key: u64| self.space.slot_of(key);
        let growth = |run: &[u64]| {
            let map = self.map(mix64(run[0])).unwrap_or(&empty);
            map.growth_bytes(absent(map, run))
        };
        let runs = keys.chunk_by(|&a, &b| slot(a) == slot(b));
        self.first_bytes() + runs.map(growth).sum::<usize>()
    }

    /// Bytes that so many new rows in slots (their numbers within the range) would take, at most.
    pub(crate) fn growth_of(&self, counts: impl Iterator<Item = (usize, usize)>) -> usize {
        let empty = RowMap::new(self.weight_words + self.state_words);
        let growth = |(slot, more): (usize, usize)| {
            let map = self.maps.get(slot).unwrap_or(&empty);
            map.growth_bytes(more)
        };
        self.first_bytes() + counts.map(growth).sum::<usize>()
    }

    /// An upper bound for `more` new rows in at most so many slots. It looks at no slot.
    pub(crate) fn growth_bound(&self, more: usize, slots: usize) -> usize {
        let value_words = self.weight_words + self.state_words;
        let allocated = self.allocated_bytes();
        self.first_bytes() + RowMap::growth_bound(value_words, allocated, more, slots)
    }

    /// Bytes that come with the first row of the table.
    fn first_bytes(&self) -> usize {
        if self.maps.is_empty() {
            self.slots as usize * std::mem::size_of::<RowMap>()
        } else {
            0
        }
    }

    /// Those of `keys` that have no row, in the same order.
    pub(crate) fn absent(&self, keys: &[u64]) -> Vec<u64> {
        let has_row = |key: u64| {
            let hash = mix64(key);
            self.map(hash)
                .is_some_and(|map| map.find(key, hash).is_some())
        };
        keys.iter().copied().filter(|&key| !has_row(key)).collect()
    }

    /// Copy the weights of `keys` to `out`, \[n, `row_elements`].
    ///
    /// A key without a row reads as its initial value; no row is created, so a pull never
    /// changes state and replicas need not hear of it. A user function of the table goes over
    /// what was read.
    pub fn read(&self, keys: &[u64], out: &mut [f32]) {
        let mut places = [Place::default(); BLOCK];
        for (block, out) in keys
            .chunks(BLOCK)
            .zip(out.chunks_mut(BLOCK * self.elements))
        {
            self.look_up(block, &mut places);
            for ((&key, &Place { hash, suggested }), row_out) in block
                .iter()
                .zip(&places)
                .zip(out.chunks_exact_mut(self.elements))
            {
                let map = self.map(hash);
                match map.and_then(|map| Some((map, map.confirm(suggested, key, hash)?))) {
                    Some((map, row)) => {
                        let words = &map.values(row)[..self.weight_words];
                        storage::decode(self.spec.storage, words, row_out);
                    }
                    None if self.reads_zeros() => row_out.fill(0.0),
                    None => self.initial_weights(key, row_out),
                }
            }
        }
        if let Some(pull) = &self.spec.pull {
            pull.apply(self.elements, out);
        }
    }

    /// Copy what pushes to `keys` are to bring behind their gradients, to `out`: the sum of gradients
    /// of each row, and its birth; zeros of a key without a row. Refuses a table that keeps none.
    pub fn read_sums(&self, keys: &[u64], out: &mut [f32]) -> Result<(), Refusal> {
        let told = Reference::Sum.values(self.elements);
        if self.spec.compensation.reference() != Some(Reference::Sum) {
            return Err(Refusal::InvalidRequest(format!(
                "table {} keeps no sums of gradients: it does not revise its steps (compensation)",
                self.spec.name
            )));
        }
        let end = self.weight_words + self.kept_words;
        let mut places = [Place::default(); BLOCK];
        for (block, out) in keys.chunks(BLOCK).zip(out.chunks_mut(BLOCK * told)) {
            self.look_up(block, &mut places);
            for ((&key, &Place { hash, suggested }), out) in
                block.iter().zip(&places).zip(out.chunks_exact_mut(told))
            {
                let map = self.map(hash);
                match map.and_then(|map| Some((map, map.confirm(suggested, key, hash)?))) {
                    Some((map, row)) => {
                        let words = &map.values(row)[end - told..end];
                        out.copy_from_slice(bytemuck::cast_slice(words));
                    }
                    None => out.fill(0.0),
                }
            }
        }
        Ok(())
    }

    /// Apply a change to `keys` with `values`, \[n, `row_elements`], under the settings of
    /// `optimizer`, whose state fits the rows. How many rows it removed.
    pub(crate) fn write(
        &mut self,
        keys: &[u64],
        values: &[f32],
        change: Change,
        optimizer: &Optimizer,
        moment: Moment,
    ) -> u64 {
        match change {
            Change::Update(update) => self.update(keys, values, update, optimizer, moment),
            Change::Assign { only_if_absent } => {
                self.assign(keys, values, only_if_absent, optimizer, moment.id);
            }
            Change::Delete => return self.remove(keys),
            // Of tables with a lifetime: `write_live` does them. A close has no rows.
            Change::Expire(_) | Change::Evict | Change::Decay { .. } | Change::Close => {}
        }
        0
    }

    fn update(
        &mut self,
        keys: &[u64],
        values: &[f32],
        update: Update,
        optimizer: &Optimizer,
        moment: Moment,
    ) {
        let learning_rate_scale = update.learning_rate_scale;
        if let Optimizer::User(user) = optimizer {
            self.update_by_user(user, keys, values, learning_rate_scale);
            return;
        }
        let kernel = PlainUpdate {
            keys,
            values,
            width: update.values(self.elements),
            table: self,
            learning_rate_scale,
            moment,
        };
        match (moment.compensation, optimizer) {
            (Compensation::AdaptiveRevision, Optimizer::Adagrad(adagrad)) => {
                kernel.run(&RevisedAdagrad::new(adagrad));
            }
            _ => optimizer.dispatch(kernel),
        }
    }

    /// Remove the rows of `keys`, all in slots of this range; how many there were.
    pub(super) fn remove(&mut self, keys: &[u64]) -> u64 {
        if self.maps.is_empty() {
            return 0;
        }
        let mut removed = 0;
        for &key in keys {
            let hash = mix64(key);
            let at = self.slot_in_range(hash);
            removed += u64::from(self.on_map(at, |map| map.remove(key, hash)));
        }
        removed
    }

    fn assign(
        &mut self,
        keys: &[u64],
        values: &[f32],
        only_if_absent: bool,
        optimizer: &Optimizer,
        id: TransactionId,
    ) {
        self.ensure_maps();
        let fresh = FreshState::new(self, id);
        for (&key, value) in keys.iter().zip(values.chunks_exact(self.elements)) {
            let hash = mix64(key);
            let (slot, row, created) = self.find_or_create(key, hash, None);
            if created || !only_if_absent {
                let words = self.maps[slot].values_mut(row);
                let (weights, state) = words.split_at_mut(self.weight_words);
                storage::encode(self.spec.storage, value, weights);
                fresh.write(optimizer, state);
            }
        }
    }

    fn ensure_maps(&mut self) {
        if self.maps.is_empty() {
            let empty = RowMap::new(self.weight_words + self.state_words);
            self.maps = vec![empty; self.slots as usize];
            self.allocated_bytes += self.maps.capacity() * std::mem::size_of::<RowMap>();
        }
    }

    #[inline]
    fn map(&self, hash: u64) -> Option<&RowMap> {
        self.maps
            .get((self.space.slot_of_hash(hash) - self.first_slot) as usize)
    }

    #[inline]
    fn look_up(&self, block: &[u64], places: &mut [Place; BLOCK]) {
        for (&key, place) in block.iter().zip(places.iter_mut()) {
            place.hash = mix64(key);
            if let Some(map) = self.map(place.hash) {
                map.prefetch_index(place.hash);
            }
        }
        for place in &mut places[..block.len()] {
            place.suggested = self.map(place.hash).and_then(|map| map.suggest(place.hash));
        }
    }

    /// The slot (within the range) and number of the key's row, and whether it is new.
    #[inline]
    fn find_or_create(
        &mut self,
        key: u64,
        hash: u64,
        suggested: Option<usize>,
    ) -> (usize, usize, bool) {
        let slot = (self.space.slot_of_hash(hash) - self.first_slot) as usize;
        match self.maps[slot].confirm(suggested, key, hash) {
            Some(row) => (slot, row, false),
            None => (slot, self.create(slot, key, hash), true),
        }
    }

    #[cold]
    fn create(&mut self, slot: usize, key: u64, hash: u64) -> usize {
        self.on_map(slot, |map| map.insert(key, hash))
    }

    /// Change the map of a slot (its number in the range), and keep account of its rows and memory.
    #[allow(clippy::inline_always)] // Rows come and go by it one at a time.
    #[inline(always)]
    fn on_map<R>(&mut self, at: usize, change: impl FnOnce(&mut RowMap) -> R) -> R {
        let map = &mut self.maps[at];
        let (rows, bytes) = (map.len(), map.allocated_bytes());
        let result = change(map);
        self.rows = self.rows + map.len() - rows;
        self.allocated_bytes = self.allocated_bytes + map.allocated_bytes() - bytes;
        result
    }

    /// The initial weights of a key as they would be stored.
    fn initial_weights(&self, key: u64, out: &mut [f32]) {
        self.initializer.fill(key, out);
        storage::round(self.spec.storage, out);
    }
}

/// The optimizer's kernel over a batch, compiled once per optimizer.
struct PlainUpdate<'a> {
    table: &'a mut Table,
    keys: &'a [u64],
    values: &'a [f32],
    /// Values of each key.
    width: usize,
    learning_rate_scale: f32,
    moment: Moment,
}

impl OptimizerVisitor for PlainUpdate<'_> {
    type Out = ();

    fn visit<O: RowOptimizer>(self, optimizer: &O) {
        match self.moment.compensation.delay() {
            None => self.run(optimizer),
            Some(delay) => self.run(&Compensated::new(optimizer, delay)),
        }
    }
}

impl PlainUpdate<'_> {
    #[inline]
    fn run<O: RowOptimizer>(self, optimizer: &O) {
        let Self {
            table,
            keys,
            values,
            width,
            learning_rate_scale,
            moment,
        } = self;
        table.ensure_maps();
        let weight_words = table.weight_words;
        let step = RowStep::new(table, optimizer, moment, learning_rate_scale);
        let mut scratch = step.scratch(table.elements);
        let mut places = [Place::default(); BLOCK];
        for (block, gradients) in keys.chunks(BLOCK).zip(values.chunks(BLOCK * width)) {
            table.look_up(block, &mut places);
            for ((&key, &Place { hash, suggested }), gradient) in
                block.iter().zip(&places).zip(gradients.chunks_exact(width))
            {
                let (slot, row, created) = table.find_or_create(key, hash, suggested);
                let words = table.maps[slot].values_mut(row).split_at_mut(weight_words);
                let begins = created.then_some((&table.initializer, key));
                step.apply(words, begins, gradient, &mut scratch);
            }
        }
    }
}
