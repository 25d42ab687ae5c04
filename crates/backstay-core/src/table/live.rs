//! Rows that come and go: admission, statistics, expiry, decay and eviction of a table's rows.
//!
//! What is counted of keys without a row lies in a table of its own, the **companion**, which the
//! engine keeps beside the table: so copies, digests, checkpoints and the resize carry it as they
//! carry rows. It has one of three forms: a row with the count of each key; a row with the shows and
//! clicks of each key; or blocks of a counting Bloom filter. See docs/adr/0013.

use super::user_update::Met;
use super::{Place, Table, BLOCK};
use crate::error::Refusal;
use crate::expression::Program;
use crate::hash::{mix64, table_id, SlotSpace};
use crate::life::{self, Eviction, Gone, Seen, SlotPart, Statistics, Thresholds};
use crate::optimizer::{Optimizer, OptimizerVisitor, RowOptimizer, Sgd, User};
use crate::spec::lifetime::{Admission, Evict, Expiry, Lifetime, Unadmitted, FILTER_BLOCK_BYTES};
use crate::spec::{Initializer, NonFinitePolicy, Storage, TableKind, TableSpec};
use crate::staleness::{Compensated, Compensation, Delay};
use crate::storage;
use crate::stream::TransactionId;
use crate::transaction::Change;

/// What stands behind a table's name in its companion's; no name of a user's table has it.
pub const COMPANION_SUFFIX: &str = "@admission";

/// Words of a block of the Bloom filter: 256 bytes, of which a key uses 64.
const BLOCK_WORDS: u64 = 64;
/// Counters of a key, and the most that one holds. It has seven bits in a byte, so that the words
/// are finite as floats.
const CELLS: u32 = 3;
const CELL_MAX: u8 = 126;

/// What a transaction tells all its rows.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Moment {
    /// The time in the slot.
    pub(crate) time: u32,
    /// Which transaction it is.
    pub(crate) id: TransactionId,
    /// What moves its gradients; `None`: no weights stand behind them.
    pub(crate) delay: Option<Delay>,
}

/// What a table's lifetime does, ready to be done.
#[derive(Debug, Clone)]
pub(super) struct Live {
    pub(super) statistics: Statistics,
    admission: Admission,
    unadmitted: Unadmitted,
    eviction: Eviction,
    companion: Option<u64>,
    /// Blocks of the Bloom filter in each slot.
    blocks: u64,
}

impl Live {
    pub(super) fn new(spec: &TableSpec, lifetime: &Lifetime, space: SlotSpace) -> Self {
        let bytes = match lifetime.admission {
            Admission::After { filter_bytes, .. } => filter_bytes.unwrap_or(0),
            _ => 0,
        };
        Self {
            statistics: Statistics::of(lifetime),
            admission: lifetime.admission,
            unadmitted: lifetime.unadmitted,
            eviction: Eviction {
                evict: lifetime.capacity.map_or(Evict::default(), |one| one.evict),
                rule: lifetime.score.unwrap_or_default(),
            },
            companion: spec.companion().map(|one| table_id(&one.name)),
            blocks: bytes / u64::from(space.count()) / FILTER_BLOCK_BYTES,
        }
    }
}

impl TableSpec {
    /// The table beside this one that holds what is counted of keys without a row, if its admission
    /// counts.
    pub fn companion(&self) -> Option<Self> {
        let dim = match self.lifetime.as_ref()?.admission {
            Admission::Always | Admission::Probability { .. } => return None,
            Admission::After {
                filter_bytes: None, ..
            } => 1,
            Admission::After { .. } => BLOCK_WORDS,
            Admission::Score { .. } => 2,
        };
        Some(Self {
            name: format!("{}{COMPANION_SUFFIX}", self.name),
            kind: TableKind::Sparse { dim },
            storage: Storage::Float32,
            initializer: Initializer::Zeros {},
            seed: 0,
            optimizer: Optimizer::Sgd(Sgd { learning_rate: 0.0 }),
            non_finite: NonFinitePolicy::Refuse,
            // So that a counter knows when it was used last.
            pull: None,
            staleness: Compensation::Ignore,
            lifetime: Some(Lifetime {
                expiry: Some(Expiry {
                    unseen_seconds: Some(u32::MAX),
                    ..Expiry::default()
                }),
                ..Lifetime::default()
            }),
        })
    }

    /// Whether it is a companion of another table.
    pub fn is_companion(&self) -> bool {
        self.name.ends_with(COMPANION_SUFFIX)
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
                if one.unseen_seconds.is_some() && !lifetime.keeps_last_seen() {
                    return lacks("time at which a row was seen last (unseen_seconds)");
                }
                if one.score_below.is_some() && !lifetime.keeps_show_and_click() {
                    return lacks("show and click (score_below)");
                }
                Ok(())
            }
            _ if !lifetime.keeps_show_and_click() => lacks("show and click"),
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
            Change::Update {
                learning_rate_scale,
            }
            | Change::Observe {
                learning_rate_scale,
            }
            | Change::Compare {
                learning_rate_scale,
                ..
            } => {
                let width = change.values(self.elements);
                let update = LiveUpdate {
                    table: self,
                    companion,
                    keys,
                    values,
                    width,
                    learning_rate_scale,
                    moment,
                };
                gone.not_admitted = match optimizer {
                    Optimizer::User(user) => update.by_user(user),
                    _ => optimizer.dispatch(update),
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
            Change::Decay { rate } => {
                for slot in self.slots_of(keys) {
                    self.decay(slot, rate);
                    if let Some(companion) = companion.as_deref_mut() {
                        companion.decay_counters(slot, rate);
                    }
                }
            }
            Change::Close => {}
        }
        gone
    }

    /// Remove the rows of lowest rank in a slot (its number in the cluster) if it has more than its
    /// share. How many rows went; of the companion's counters no account is kept.
    pub(crate) fn evict(&mut self, slot: u32, share: u32, companion: Option<&mut Table>) -> u64 {
        let (share, at) = (share as usize, (slot - self.first_slot) as usize);
        let Some(live) = &self.live else {
            return 0;
        };
        let eviction = live.eviction;
        if let Some(companion) = companion.filter(|one| !one.is_filter()) {
            let oldest = Eviction {
                evict: Evict::LeastRecent,
                ..eviction
            };
            companion.evict_by(at, share, oldest);
        }
        self.evict_by(at, share, eviction)
    }

    fn evict_by(&mut self, at: usize, share: usize, eviction: Eviction) -> u64 {
        let (Some(live), Some(map)) = (&self.live, self.maps.get(at)) else {
            return 0;
        };
        if map.len() <= share {
            return 0;
        }
        let first = self.weight_words + self.kept_words;
        let rows = map
            .keys()
            .map(|(key, row)| (key, &map.values(row)[first..]));
        let keys = eviction.choose(live.statistics, rows, share);
        self.remove(&keys)
    }

    /// The rows of a slot (its number in the cluster) that an expiry would remove.
    pub fn count_expired(&self, slot: u32, thresholds: &Thresholds, now: u32) -> Gone {
        let mut gone = Gone::default();
        let Some(map) = self.maps.get((slot - self.first_slot) as usize) else {
            return gone;
        };
        let mut scratch = vec![0.0; self.elements];
        for row in 0..map.len() {
            if let Some(reason) = self.reason(map.values(row), thresholds, now, &mut scratch) {
                gone.count(reason);
            }
        }
        gone
    }

    fn reason(
        &self,
        values: &[u32],
        thresholds: &Thresholds,
        now: u32,
        scratch: &mut [f32],
    ) -> Option<life::Reason> {
        let live = self.live.as_ref()?;
        let (weights, state) = values.split_at(self.weight_words);
        let statistics = &state[self.kept_words..];
        let norm = || {
            storage::decode(self.spec.storage, weights, scratch);
            life::squared_norm(scratch)
        };
        let rule = &live.eviction.rule;
        thresholds.reason(live.statistics, statistics, rule, now, norm)
    }

    fn expire(&mut self, at: usize, part: SlotPart, thresholds: &Thresholds, now: u32) -> Gone {
        let mut gone = Gone::default();
        let mut scratch = vec![0.0; self.elements];
        // From the last row on: the row that takes the place of one that goes was looked at before.
        for row in (0..self.maps[at].len()).rev() {
            let (key, values) = (self.maps[at].key(row), self.maps[at].values(row));
            if !part.has(mix64(key)) {
                continue;
            }
            if let Some(reason) = self.reason(values, thresholds, now, &mut scratch) {
                gone.count(reason);
                self.remove_one(at, key, mix64(key));
            }
        }
        gone
    }

    fn decay(&mut self, at: usize, rate: f32) {
        let first = self.weight_words + self.kept_words;
        let Some(live) = &self.live else { return };
        let (statistics, map) = (live.statistics, &mut self.maps[at]);
        for row in 0..map.len() {
            statistics.decay(&mut map.values_mut(row)[first..], rate);
        }
    }

    /// As a companion: forget what was counted too long ago. How many counters went. The counters
    /// of a filter have no age of their own, so they are halved once in that time.
    fn forget(&mut self, at: usize, part: SlotPart, thresholds: &Thresholds, now: u32) -> u64 {
        let Some(live) = &self.live else { return 0 };
        let (statistics, first) = (live.statistics, self.weight_words + self.kept_words);
        let mut forgotten = 0;
        for row in (0..self.maps[at].len()).rev() {
            let is_filter = self.is_filter();
            let map = &mut self.maps[at];
            let age = statistics.last_seen(&map.values(row)[first..]);
            if !thresholds.is_unseen(age, now) || !part.has(mix64(map.key(row))) {
                continue;
            }
            if is_filter {
                let words = map.values_mut(row);
                statistics.set_last_seen(&mut words[first..], now);
                let mut left = 0;
                for word in &mut words[..BLOCK_WORDS as usize] {
                    *word = *word >> 1 & 0x3f3f_3f3f;
                    left |= *word;
                }
                if left != 0 {
                    continue;
                }
            } else {
                forgotten += 1;
            }
            let key = self.maps[at].key(row);
            self.remove_one(at, key, mix64(key));
        }
        forgotten
    }

    /// As a companion: shows and clicks of keys without a row fade as those of rows.
    fn decay_counters(&mut self, at: usize, rate: f32) {
        if self.elements != 2 {
            return;
        }
        let map = &mut self.maps[at];
        for row in 0..map.len() {
            for word in &mut map.values_mut(row)[..2] {
                *word = (f32::from_bits(*word) * rate).to_bits();
            }
        }
    }

    fn remove_one(&mut self, at: usize, key: u64, hash: u64) {
        let map = &mut self.maps[at];
        let before = map.allocated_bytes();
        if map.remove(key, hash) {
            self.rows -= 1;
        }
        self.allocated_bytes = self.allocated_bytes + self.maps[at].allocated_bytes() - before;
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

    fn slot_in_range(&self, hash: u64) -> usize {
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
        let seen = Seen {
            show: 0.0,
            ..Seen::once(moment.time)
        };
        for (&key, value) in keys.iter().zip(values.chunks_exact(self.elements)) {
            let hash = mix64(key);
            let (slot, row, created) = self.find_or_create(key, hash, None);
            if let Some(companion) = companion.as_deref_mut().filter(|one| !one.is_filter()) {
                companion.remove_one(slot, key, hash);
            }
            if !created && only_if_absent {
                continue;
            }
            let words = self.maps[slot].values_mut(row);
            let (weights, state) = words.split_at_mut(self.weight_words);
            let (own, rest) = state.split_at_mut(self.optimizer_words);
            storage::encode(self.spec.storage, value, weights);
            optimizer.init_state(bytemuck::cast_slice_mut(own));
            rest.fill(0);
            statistics.count(&mut rest[self.kept_words - self.optimizer_words..], seen);
        }
    }

    /// As a companion: ask for what is known of a key.
    #[inline]
    fn prefetch(&self, slot: usize, hash: u64) {
        if !self.is_filter() {
            self.maps[slot].prefetch_index(hash);
        }
    }

    /// As a companion: count an occurrence of a key. What was counted before, if the key is to have
    /// a row now; it is counted here no more then.
    fn occurs(&mut self, live: &Live, key: u64, hash: u64, seen: Seen) -> Option<Seen> {
        let slot = self.slot_in_range(hash);
        match live.admission {
            Admission::Always | Admission::Probability { .. } => None,
            Admission::After {
                occurrences,
                filter_bytes: Some(_),
            } => self.occurs_in_filter(live.blocks, hash, occurrences, seen.time),
            Admission::After { occurrences, .. } => {
                let row = self.counter(slot, key, hash);
                let words = self.maps[slot].values_mut(row);
                let before = f32::from_bits(words[0]);
                words[0] = (before + 1.0).to_bits();
                words[1] = seen.time;
                if f64::from(before) + 1.0 < f64::from(occurrences) {
                    return None;
                }
                self.remove_one(slot, key, hash);
                Some(Seen {
                    frequency: before as u32,
                    show: 0.0,
                    ..Seen::once(seen.time)
                })
            }
            Admission::Score { at_least } => {
                let row = self.counter(slot, key, hash);
                let words = self.maps[slot].values_mut(row);
                let (show, click) = (f32::from_bits(words[0]), f32::from_bits(words[1]));
                let shows = life::sum(show, seen.show);
                let clicks = life::sum(click, seen.click);
                words[..3].copy_from_slice(&[shows.to_bits(), clicks.to_bits(), seen.time]);
                if life::score(shows, clicks, &live.eviction.rule) < at_least {
                    return None;
                }
                self.remove_one(slot, key, hash);
                Some(Seen {
                    time: seen.time,
                    frequency: 0,
                    show,
                    click,
                })
            }
        }
    }

    /// As a companion: whether it is a filter, whose rows are no keys'.
    fn is_filter(&self) -> bool {
        self.elements as u64 == BLOCK_WORDS
    }

    fn counter(&mut self, slot: usize, key: u64, hash: u64) -> usize {
        match self.maps[slot].find(key, hash) {
            Some(row) => row,
            None => self.create(slot, key, hash),
        }
    }

    /// A counting Bloom filter in blocks of one line of the cache (Putze, Sanders, Singler: Cache-,
    /// hash- and space-efficient Bloom filters, 2007), of whose counters of a key only the lowest
    /// grow (Cohen, Matias: Spectral Bloom filters, 2003).
    fn occurs_in_filter(
        &mut self,
        blocks: u64,
        hash: u64,
        occurrences: u32,
        time: u32,
    ) -> Option<Seen> {
        let slot = self.slot_in_range(hash);
        let mut bits = mix64(hash ^ 0x9e37_79b9_7f4a_7c15);
        // A share of a slot has fewer than 2^32 blocks.
        let block = (u64::from(bits as u32) * blocks) >> 32;
        let key = self.space.key_in(self.first_slot + slot as u32, block);
        let found = self.maps[slot].find(key, mix64(key));
        let row = found.unwrap_or_else(|| {
            let row = self.create(slot, key, mix64(key));
            self.maps[slot].values_mut(row)[BLOCK_WORDS as usize] = time;
            row
        });
        bits >>= 32;
        let words = &mut self.maps[slot].values_mut(row)[..BLOCK_WORDS as usize];
        let line = (bits & 3) as usize * 64;
        let cells: &mut [u8] = &mut bytemuck::cast_slice_mut(words)[line..line + 64];
        let at = |n: u32| (bits >> (2 + 6 * n) & 63) as usize;
        let least = (0..CELLS).map(|n| cells[at(n)]).min().unwrap_or(CELL_MAX);
        for n in 0..CELLS {
            if cells[at(n)] == least && least < CELL_MAX {
                cells[at(n)] = least + 1;
            }
        }
        let before = u32::from(least);
        (before + 1 >= occurrences).then_some(Seen {
            frequency: before,
            show: 0.0,
            ..Seen::once(time)
        })
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
        match self.moment.delay {
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
        let (elements, gradient) = (self.table.elements, self.gradient_values());
        let plain = storage::is_plain(self.table.spec.storage);
        let mut scratch = vec![0f32; if plain { 0 } else { elements }];
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
                match self.find_or_admit(&live, key, place, seen) {
                    Some(found) => {
                        self.update(
                            optimizer,
                            &live,
                            key,
                            found,
                            seen,
                            &value[..gradient],
                            &mut scratch,
                        );
                    }
                    None => not_admitted += 1,
                }
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
        match self.moment.delay {
            None => self.table.elements,
            Some(_) => 2 * self.table.elements,
        }
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
                let Some((slot, row, begin)) = self.find_or_admit(&live, key, place, seen) else {
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
    fn find_or_admit(&mut self, live: &Live, key: u64, place: Place, seen: Seen) -> Option<Found> {
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
        let begin = match (live.admission, self.companion.as_deref_mut()) {
            (Admission::Always, _) => Some(nothing),
            (Admission::Probability { probability }, _) => {
                life::is_drawn(key, id, seed, probability).then_some(nothing)
            }
            (_, Some(companion)) => companion.occurs(live, key, place.hash, seen),
            (_, None) => None,
        };
        begin.map(|begin| (slot, self.table.create(slot, key, place.hash), Some(begin)))
    }

    #[inline]
    #[allow(clippy::too_many_arguments)] // Apart, they are what the loop has at hand.
    fn update<O: RowOptimizer>(
        &mut self,
        optimizer: &O,
        live: &Live,
        key: u64,
        (slot, row, begin): Found,
        seen: Seen,
        gradient: &[f32],
        scratch: &mut [f32],
    ) {
        let table = &mut *self.table;
        let words: &mut [u32] = table.maps[slot].values_mut(row);
        let (weights, state) = words.split_at_mut(table.weight_words);
        let (state, counted) = state.split_at_mut(table.kept_words);
        let state: &mut [f32] = bytemuck::cast_slice_mut(state);
        if let Some(begin) = begin {
            // What stands behind it is zeros.
            optimizer.init_state(&mut state[..table.optimizer_words]);
            live.statistics.count(counted, begin);
        }
        live.statistics.count(counted, seen);
        let scale = self.learning_rate_scale;
        if scratch.is_empty() {
            let weights: &mut [f32] = bytemuck::cast_slice_mut(weights);
            if begin.is_some() {
                table.initializer.fill(key, weights);
            }
            optimizer.update(weights, state, gradient, scale);
        } else {
            let storage = table.spec.storage;
            if begin.is_some() {
                table.initializer.fill(key, scratch);
                storage::encode(storage, scratch, weights);
            }
            storage::decode(storage, weights, scratch);
            optimizer.update(scratch, state, gradient, scale);
            storage::encode(storage, scratch, weights);
        }
    }
}
