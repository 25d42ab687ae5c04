//! Changes of a table with a lifetime: rows that come by pushes, their statistics and their decay.
//!
//! `companion` counts keys without a row, `expiry` has the rows that go. See docs/adr/0013.

use super::companion::{Counters, Judge};
use super::row_step::{FreshState, RowStep};
use super::user_update::Met;
use super::{Moment, Place, Table, BLOCK};
use crate::compensation::{Compensated, Compensation, RevisedAdagrad};
use crate::error::Refusal;
use crate::expression::{Program, Statistic};
use crate::hash::{mix64, table_id, SlotSpace};
use crate::life::{self, Gone, Seen, SlotPart, Statistics};
use crate::optimizer::{Optimizer, OptimizerVisitor, RowOptimizer, User};
use crate::spec::lifetime::{
    Admission, Evict, Lifetime, ScoreRule, Unadmitted, FILTER_BLOCK_BYTES,
};
use crate::spec::TableSpec;
use crate::storage;
use crate::transaction::Change;

/// What a table's lifetime does, ready to be done.
#[derive(Debug, Clone)]
pub(super) struct Live {
    pub(super) statistics: Statistics,
    pub(super) admission: Admission,
    unadmitted: Unadmitted,
    pub(super) evict: Evict,
    /// If something uses one.
    pub(super) score: Option<ScoreRule>,
    companion: Option<u64>,
    /// Of the companion, if a score or a function admits.
    pub(super) counters: Option<Counters>,
    /// Blocks of the Bloom filter in each slot.
    pub(super) blocks: u64,
}

impl Live {
    pub(super) fn new(spec: &TableSpec, lifetime: &Lifetime, space: SlotSpace) -> Self {
        let bytes = match &lifetime.admission {
            Admission::After { filter_bytes, .. } => filter_bytes.unwrap_or(0),
            _ => 0,
        };
        Self {
            statistics: Statistics::of(lifetime),
            admission: lifetime.admission.clone(),
            unadmitted: lifetime.unadmitted,
            evict: lifetime.capacity.map_or(Evict::default(), |one| one.evict),
            score: lifetime.score_rule(),
            companion: spec.companion().map(|one| table_id(&one.name)),
            counters: Counters::of(lifetime),
            blocks: bytes / u64::from(space.count()) / FILTER_BLOCK_BYTES,
        }
    }
}

impl Table {
    /// Whether its rows come and go.
    pub fn has_lifetime(&self) -> bool {
        self.live.is_some()
    }

    /// The id of the table that counts keys without a row, if there is one.
    pub fn companion(&self) -> Option<u64> {
        self.live.as_ref()?.companion
    }

    /// The most rows of its companion in a slot: the blocks of a filter, or as many as there are keys.
    pub(crate) fn most_counters(&self) -> usize {
        let blocks = self.live.as_ref().map_or(0, |live| live.blocks);
        match blocks {
            0 => usize::MAX,
            _ => usize::try_from(blocks).unwrap_or(usize::MAX),
        }
    }

    /// Whether a key without a row reads as zeros.
    #[inline]
    pub(super) fn reads_zeros(&self) -> bool {
        let zeros = |live: &Live| live.unadmitted == Unadmitted::Zeros;
        self.live.as_ref().is_some_and(zeros)
    }

    /// Refuse what the table's lifetime does not have.
    pub(crate) fn check_lifetime(&self, change: Change) -> Result<(), Refusal> {
        let lacks = |what: &str| {
            Err(Refusal::InvalidRequest(format!(
                "table {} keeps no {what}: its lifetime does not use it",
                self.spec.name
            )))
        };
        let Some(lifetime) = &self.spec.lifetime else {
            return lacks("statistics of its rows");
        };
        match change {
            Change::Expire(one) => {
                if one.unseen_seconds.is_some() && !lifetime.keeps(Statistic::LastSeen) {
                    return lacks("time at which a row was seen last (unseen_seconds)");
                }
                if one.score_below.is_some() && !lifetime.uses_score() {
                    return lacks("score of a row (score_below)");
                }
                Ok(())
            }
            Change::Evict => Ok(()),
            _ if !lifetime.takes_counts() => lacks("show and click"),
            _ => Ok(()),
        }
    }

    /// Apply a change to `keys` with `values`, as [`Table::write`], in a table with a lifetime.
    /// `keys` of an expiry or a decay stand for their slots.
    pub(crate) fn write_live(
        &mut self,
        mut companion: Option<&mut Table>,
        keys: &[u64],
        values: &[f32],
        change: Change,
        optimizer: &Optimizer,
        moment: Moment,
    ) -> Gone {
        self.ensure_maps();
        if let Some(companion) = companion.as_deref_mut() {
            companion.ensure_maps();
        }
        let mut gone = Gone::default();
        match change {
            Change::Update(update) => {
                let kernel = LiveUpdate {
                    keys,
                    values,
                    width: update.values(self.elements),
                    table: self,
                    companion,
                    learning_rate_scale: update.learning_rate_scale,
                    moment,
                };
                gone.not_admitted = match (moment.compensation, optimizer) {
                    (_, Optimizer::User(user)) => kernel.by_user(user),
                    (Compensation::AdaptiveRevision, Optimizer::Adagrad(adagrad)) => {
                        kernel.run(&RevisedAdagrad::new(adagrad))
                    }
                    _ => optimizer.dispatch(kernel),
                };
            }
            Change::Assign { only_if_absent } => {
                let rows = (keys, values);
                self.assign_live(companion, rows, only_if_absent, optimizer, moment);
            }
            Change::Delete => {
                gone.deleted = self.remove(keys);
                if let Some(companion) = companion.filter(|one| !one.is_filter()) {
                    companion.remove(keys);
                }
            }
            Change::Expire(thresholds) => {
                for (slot, part) in self.parts_of(keys) {
                    gone += self.expire(slot, part, &thresholds, moment.time);
                    if let Some(companion) = companion.as_deref_mut() {
                        gone.counters += companion.forget(slot, part, &thresholds, moment.time);
                    }
                }
            }
            Change::Decay { rate } => self.decay(companion, keys, rate),
            // The engine evicts. A close has no rows.
            Change::Evict | Change::Close => {}
        }
        gone
    }

    /// Multiply the shows and clicks in the slots of the keys, also those of keys without a row.
    fn decay(&mut self, mut companion: Option<&mut Table>, keys: &[u64], rate: f32) {
        let counters = self.live.as_ref().and_then(|live| live.counters);
        for slot in self.slots_of(keys) {
            self.decay_slot(slot, rate);
            if let (Some(companion), Some(counters)) = (companion.as_deref_mut(), counters) {
                companion.decay_counters(slot, counters, rate);
            }
        }
    }

    fn decay_slot(&mut self, at: usize, rate: f32) {
        let first = self.weight_words + self.kept_words;
        let Some(live) = &self.live else { return };
        let (statistics, map) = (live.statistics, &mut self.maps[at]);
        for row in 0..map.len() {
            statistics.decay(&mut map.values_mut(row)[first..], rate);
        }
    }

    /// The slots (in the range) that keys sorted by slot stand for, each once.
    fn slots_of(&self, keys: &[u64]) -> Vec<usize> {
        let mut slots: Vec<usize> = keys
            .iter()
            .map(|&key| self.slot_in_range(mix64(key)))
            .collect();
        slots.dedup();
        slots
    }

    /// The parts of slots (in the range) that keys sorted by slot stand for. Each is looked at once,
    /// however often a request names it.
    fn parts_of(&self, keys: &[u64]) -> Vec<(usize, SlotPart)> {
        let mut parts: Vec<(usize, SlotPart)> = Vec::new();
        for &key in keys {
            let hash = mix64(key);
            let one = (self.slot_in_range(hash), SlotPart::of_hash(hash));
            let of_slot = parts.iter().rev().take_while(|(slot, _)| *slot == one.0);
            let mut seen = of_slot.map(|&(_, part)| part);
            if !seen.any(|part| part == one.1 || part == SlotPart::WHOLE) {
                parts.push(one);
            }
        }
        parts
    }

    pub(super) fn slot_in_range(&self, hash: u64) -> usize {
        (self.space.slot_of_hash(hash) - self.first_slot) as usize
    }

    fn assign_live(
        &mut self,
        mut companion: Option<&mut Table>,
        (keys, values): (&[u64], &[f32]),
        only_if_absent: bool,
        optimizer: &Optimizer,
        moment: Moment,
    ) {
        let Some(live) = &self.live else { return };
        let statistics = live.statistics;
        let fresh = FreshState::new(self, moment.id);
        let seen = Seen {
            show: 0.0,
            ..Seen::once(moment.time)
        };
        for (&key, value) in keys.iter().zip(values.chunks_exact(self.elements)) {
            let hash = mix64(key);
            let (slot, row, created) = self.find_or_create(key, hash, None);
            if let Some(companion) = companion.as_deref_mut().filter(|one| !one.is_filter()) {
                companion.on_map(slot, |map| map.remove(key, hash));
            }
            if !created && only_if_absent {
                continue;
            }
            let words = self.maps[slot].values_mut(row);
            let (weights, state) = words.split_at_mut(self.weight_words);
            let (state, counted) = state.split_at_mut(self.kept_words);
            storage::encode(self.spec.storage, value, weights);
            fresh.write(optimizer, state);
            counted.fill(0);
            statistics.count(counted, seen);
        }
    }
}

/// The optimizer's kernel over a batch of a table with a lifetime. How many keys got no row.
struct LiveUpdate<'a> {
    table: &'a mut Table,
    companion: Option<&'a mut Table>,
    keys: &'a [u64],
    values: &'a [f32],
    /// Values of each key: the gradient, and show and click behind it if the push tells of them.
    width: usize,
    learning_rate_scale: f32,
    moment: Moment,
}

impl OptimizerVisitor for LiveUpdate<'_> {
    type Out = u64;

    fn visit<O: RowOptimizer>(self, optimizer: &O) -> u64 {
        match self.moment.compensation.delay() {
            None => self.run(optimizer),
            Some(delay) => self.run(&Compensated::new(optimizer, delay)),
        }
    }
}

impl LiveUpdate<'_> {
    #[inline]
    fn run<O: RowOptimizer>(mut self, optimizer: &O) -> u64 {
        let Some(live) = self.table.live.clone() else {
            return 0;
        };
        let mut judge = Judge::new(&live, self.moment.time);
        let gradient = self.gradient_values();
        let step = RowStep::new(self.table, optimizer, self.moment, self.learning_rate_scale);
        let mut scratch = step.scratch(self.table.elements);
        let mut places = [Place::default(); BLOCK];
        let mut not_admitted = 0;
        for (block, values) in self
            .keys
            .chunks(BLOCK)
            .zip(self.values.chunks(BLOCK * self.width))
        {
            self.table.look_up(block, &mut places);
            self.prefetch_counters(&places[..block.len()]);
            for ((&key, &place), value) in block
                .iter()
                .zip(&places)
                .zip(values.chunks_exact(self.width))
            {
                let seen = self.seen(value);
                let Some((slot, row, begin)) =
                    self.find_or_admit(&live, &mut judge, key, place, seen)
                else {
                    not_admitted += 1;
                    continue;
                };
                let table = &mut *self.table;
                let words = table.maps[slot].values_mut(row);
                let (weights, state) = words.split_at_mut(table.weight_words);
                let (state, counted) = state.split_at_mut(table.kept_words);
                if let Some(begin) = begin {
                    live.statistics.count(counted, begin);
                }
                live.statistics.count(counted, seen);
                let begins = begin.map(|_| (&table.initializer, key));
                step.apply((weights, state), begins, &value[..gradient], &mut scratch);
            }
        }
        not_admitted
    }
}

/// A row that was found or made: its slot in the range, its number, and what it begins with.
type Found = (usize, usize, Option<Seen>);

impl LiveUpdate<'_> {
    /// Values of each key that the optimizer takes.
    #[inline]
    fn gradient_values(&self) -> usize {
        let elements = self.table.elements;
        let reference = self.moment.compensation.reference();
        elements + reference.map_or(0, |one| one.values(elements))
    }

    /// What the values of a key tell of it.
    #[inline]
    fn seen(&self, value: &[f32]) -> Seen {
        let mut seen = Seen::once(self.moment.time);
        if let [show, click] = value[self.gradient_values()..] {
            (seen.show, seen.click) = (show, click);
        }
        seen
    }

    /// Under a user's optimizer, as `Table::update_by_user`: the rows of a block that are there are
    /// gathered. How many keys got no row.
    fn by_user(mut self, user: &User) -> u64 {
        let Some(live) = self.table.live.clone() else {
            return 0;
        };
        let mut judge = Judge::new(&live, self.moment.time);
        let elements = self.table.elements;
        let most = Program::block_rows(elements).min(BLOCK);
        let mut batch = user.begin(elements, most, self.learning_rate_scale);
        let mut scratch = vec![0f32; elements];
        let mut places = [Place::default(); BLOCK];
        let (mut rows, mut gradients) = (Vec::with_capacity(most), Vec::new());
        let mut not_admitted = 0;
        for (block, values) in self
            .keys
            .chunks(most)
            .zip(self.values.chunks(most * self.width))
        {
            self.table.look_up(block, &mut places);
            self.prefetch_counters(&places[..block.len()]);
            let mut met = Met::nothing();
            for ((&key, &place), value) in block
                .iter()
                .zip(&places)
                .zip(values.chunks_exact(self.width))
            {
                if met.again(place.hash) {
                    self.table.update_rows(&mut batch, &rows, &gradients);
                    rows.clear();
                    gradients.clear();
                    met = Met::nothing();
                    met.again(place.hash);
                }
                let seen = self.seen(value);
                let Some((slot, row, begin)) =
                    self.find_or_admit(&live, &mut judge, key, place, seen)
                else {
                    not_admitted += 1;
                    continue;
                };
                if begin.is_some() {
                    self.table
                        .fill_new_row(user, key, (slot, row), &mut scratch);
                }
                let first = self.table.weight_words + self.table.kept_words;
                let counted = &mut self.table.maps[slot].values_mut(row)[first..];
                if let Some(begin) = begin {
                    live.statistics.count(counted, begin);
                }
                live.statistics.count(counted, seen);
                rows.push((slot, row));
                gradients.extend_from_slice(&value[..elements]);
            }
            self.table.update_rows(&mut batch, &rows, &gradients);
            rows.clear();
            gradients.clear();
        }
        not_admitted
    }

    #[inline]
    fn prefetch_counters(&self, places: &[Place]) {
        if let Some(companion) = self.companion.as_deref() {
            for place in places.iter().filter(|place| place.suggested.is_none()) {
                companion.prefetch(self.table.slot_in_range(place.hash), place.hash);
            }
        }
    }

    #[inline]
    fn find_or_admit(
        &mut self,
        live: &Live,
        judge: &mut Judge<'_>,
        key: u64,
        place: Place,
        seen: Seen,
    ) -> Option<Found> {
        let slot = self.table.slot_in_range(place.hash);
        if let Some(row) = self.table.maps[slot].confirm(place.suggested, key, place.hash) {
            return Some((slot, row, None));
        }
        let nothing = Seen {
            frequency: 0,
            show: 0.0,
            ..Seen::once(seen.time)
        };
        let (seed, id) = (self.table.spec.seed, self.moment.id);
        let begin = match (&live.admission, self.companion.as_deref_mut()) {
            (Admission::Always, _) => Some(nothing),
            (&Admission::Probability { probability }, _) => {
                life::is_drawn(key, id, seed, probability).then_some(nothing)
            }
            (_, Some(companion)) => companion.occurs(live, judge, key, place.hash, seen),
            (_, None) => None,
        };
        begin.map(|begin| (slot, self.table.create(slot, key, place.hash), Some(begin)))
    }
}
