//! What is counted of keys without a row, and which of them get one.
//!
//! It lies in a table of its own, the **companion**, which the engine keeps beside the table: so
//! copies, digests, checkpoints and the resize carry it as they carry rows. It has one of three
//! forms: a row with the count of each key; a row with the statistics of each key by which a score
//! or a user's function decides; or blocks of a counting Bloom filter. See docs/adr/0013.

use super::live::Live;
use super::Table;
use crate::compensation::Compensation;
use crate::expression::{RowBatch, Statistic};
use crate::hash::mix64;
use crate::life::{self, Seen, SlotPart, Thresholds};
use crate::optimizer::{Optimizer, Sgd};
use crate::row_map::RowMap;
use crate::spec::lifetime::{Admission, Expiry, Lifetime, ScoreRule, ShowClick};
use crate::spec::{Initializer, NonFinitePolicy, Storage, TableKind, TableSpec};

/// What stands behind a table's name in its companion's; no name of a user's table has it.
pub const COMPANION_SUFFIX: &str = "@admission";

/// Words of a block of the Bloom filter: 256 bytes, of which a key uses 64.
const BLOCK_WORDS: u64 = 64;
/// Counters of a key, and the most that one holds. It has seven bits in a byte, so that the words
/// are finite as floats.
const CELLS: u32 = 3;
const CELL_MAX: u8 = 126;

/// Where the row of a key in the companion keeps what is counted for a score or a function: float32
/// words, and behind them when it was counted last.
#[derive(Debug, Clone, Copy)]
pub(super) struct Counters {
    frequency: Option<usize>,
    show: Option<usize>,
    click: Option<usize>,
    words: usize,
}

impl Counters {
    /// Those that an admission uses; None: it counts otherwise, or not at all.
    pub(super) fn of(lifetime: &Lifetime) -> Option<Self> {
        let counts = match &lifetime.admission {
            Admission::Score { .. } | Admission::Function(_) => |one| lifetime.counts(one),
            Admission::Always | Admission::After { .. } | Admission::Probability { .. } => {
                return None
            }
        };
        let mut words = 0;
        let mut next = |counted: bool| {
            let at = words;
            words += usize::from(counted);
            counted.then_some(at)
        };
        let (show, click) = (counts(Statistic::Show), counts(Statistic::Click));
        // A row has one word at least.
        let frequency = next(counts(Statistic::Frequency) || !(show || click));
        Some(Self {
            frequency,
            show: next(show),
            click: next(click),
            words,
        })
    }

    /// What was counted, and when; zeros of a new row.
    #[inline]
    fn read(&self, words: &[u32]) -> Seen {
        let number = |at: Option<usize>| at.map_or(0.0, |at| f32::from_bits(words[at]));
        Seen {
            time: words[self.words],
            frequency: number(self.frequency) as u32,
            show: number(self.show),
            click: number(self.click),
        }
    }

    #[inline]
    fn write(&self, words: &mut [u32], seen: Seen) {
        let numbers = [
            (self.frequency, seen.frequency as f32),
            (self.show, seen.show),
            (self.click, seen.click),
        ];
        for (at, number) in numbers {
            if let Some(at) = at {
                words[at] = number.to_bits();
            }
        }
        words[self.words] = seen.time;
    }
}

/// What decides by what was counted of a key, at one time.
pub(super) enum Judge<'l> {
    /// Nothing is decided by that.
    Nothing,
    /// A score by shows and clicks that is so high.
    ShowClick(ShowClick, f64),
    /// A user's score that is so high.
    Score(RowBatch<'l>, f64),
    /// A user's function.
    Function(RowBatch<'l>),
}

impl<'l> Judge<'l> {
    pub(super) fn new(live: &'l Live, time: u32) -> Self {
        match (&live.admission, &live.score) {
            (&Admission::Score { at_least }, Some(ScoreRule::ShowClick(rule))) => {
                Self::ShowClick(*rule, at_least)
            }
            (&Admission::Score { at_least }, Some(ScoreRule::Function(function))) => {
                Self::Score(function.begin_rows(time, 1), at_least)
            }
            (Admission::Function(function), _) => Self::Function(function.begin_rows(time, 1)),
            _ => Self::Nothing,
        }
    }

    /// Whether a key gets a row by a push, given what was counted before it and with it.
    fn admits(&mut self, before: Seen, now: Seen) -> bool {
        match self {
            Self::Nothing => false,
            Self::ShowClick(rule, at_least) => life::score(now.show, now.click, rule) >= *at_least,
            Self::Score(batch, at_least) => {
                batch.add(&now.inputs());
                life::given_score(batch.run()[0]) >= *at_least
            }
            Self::Function(batch) => {
                // The push before this one says how long the key was away.
                let time = before.time;
                batch.add(&Seen { time, ..now }.inputs());
                batch.run()[0] != 0.0
            }
        }
    }
}

impl TableSpec {
    /// The table beside this one that holds what is counted of keys without a row, if its admission
    /// counts.
    pub fn companion(&self) -> Option<Self> {
        let lifetime = self.lifetime.as_ref()?;
        let dim = match &lifetime.admission {
            Admission::Always | Admission::Probability { .. } => return None,
            Admission::After {
                filter_bytes: None, ..
            } => 1,
            Admission::After { .. } => BLOCK_WORDS,
            Admission::Score { .. } | Admission::Function(_) => {
                Counters::of(lifetime)?.words as u64
            }
        };
        Some(Self {
            name: format!("{}{COMPANION_SUFFIX}", self.name),
            kind: TableKind::Sparse { dim },
            storage: Storage::Float32,
            initializer: Initializer::Zeros {},
            seed: 0,
            optimizer: Optimizer::Sgd(Sgd { learning_rate: 0.0 }),
            non_finite: NonFinitePolicy::Refuse,
            pull: None,
            compensation: Compensation::Ignore,
            // So that a counter knows when it was used last.
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

/// As a companion.
impl Table {
    /// Bytes that a push of `keys`, none of which has a row in its table, may add at most. A slot has at
    /// most so many counters.
    pub(crate) fn growth_of_counters(&self, keys: &[u64], most: usize) -> usize {
        if !self.is_filter() {
            return self.growth_bytes(keys);
        }
        // Keys are counted in blocks, whose keys are others.
        self.growth(keys, |map, run| {
            run.len().min(most.saturating_sub(map.len()))
        })
    }

    /// How many counters so many new keys in slots (their numbers within the range) may add to at most
    /// `most` in each.
    pub(crate) fn new_counters<'a>(
        &'a self,
        counts: impl Iterator<Item = (usize, usize)> + 'a,
        most: usize,
    ) -> impl Iterator<Item = (usize, usize)> + 'a {
        counts.map(move |(slot, more)| {
            let known = self.maps.get(slot).map_or(0, RowMap::len);
            (slot, more.min(most.saturating_sub(known)))
        })
    }

    /// Forget what was counted too long ago. How many counters went. The counters
    /// of a filter have no age of their own, so they are halved once in that time.
    pub(super) fn forget(
        &mut self,
        at: usize,
        part: SlotPart,
        thresholds: &Thresholds,
        now: u32,
    ) -> u64 {
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
            self.on_map(at, |map| map.remove(key, mix64(key)));
        }
        forgotten
    }

    /// How many counters an expiry would forget in a slot (its number in the cluster).
    pub(crate) fn count_forgotten(&self, slot: u32, thresholds: &Thresholds, now: u32) -> u64 {
        let map = self.maps.get((slot - self.first_slot) as usize);
        let (Some(map), Some(live)) = (map.filter(|_| !self.is_filter()), &self.live) else {
            return 0;
        };
        let first = self.weight_words + self.kept_words;
        let seen = |row: usize| live.statistics.last_seen(&map.values(row)[first..]);
        let forgotten = (0..map.len()).filter(|&row| thresholds.is_unseen(seen(row), now));
        forgotten.count() as u64
    }

    /// Shows and clicks of keys without a row fade as those of rows.
    pub(super) fn decay_counters(&mut self, at: usize, counters: Counters, rate: f32) {
        let map = &mut self.maps[at];
        for row in 0..map.len() {
            let words = map.values_mut(row);
            for at in [counters.show, counters.click].into_iter().flatten() {
                words[at] = (f32::from_bits(words[at]) * rate).to_bits();
            }
        }
    }

    /// Ask for what is known of a key.
    #[inline]
    pub(super) fn prefetch(&self, slot: usize, hash: u64) {
        if !self.is_filter() {
            self.maps[slot].prefetch_index(hash);
        }
    }

    /// Count an occurrence of a key. What was counted before, if the key is to have a row now; it is
    /// counted here no more then.
    pub(super) fn occurs(
        &mut self,
        live: &Live,
        judge: &mut Judge<'_>,
        key: u64,
        hash: u64,
        seen: Seen,
    ) -> Option<Seen> {
        let slot = self.slot_in_range(hash);
        match (&live.admission, live.counters) {
            (
                &Admission::After {
                    occurrences,
                    filter_bytes: Some(_),
                },
                _,
            ) => self.occurs_in_filter(live.blocks, hash, occurrences, seen.time),
            (&Admission::After { occurrences, .. }, _) => {
                let row = self.counter(slot, key, hash);
                let words = self.maps[slot].values_mut(row);
                let before = f32::from_bits(words[0]);
                words[0] = (before + 1.0).to_bits();
                words[1] = seen.time;
                if f64::from(before) + 1.0 < f64::from(occurrences) {
                    return None;
                }
                self.on_map(slot, |map| map.remove(key, hash));
                Some(Seen {
                    frequency: before as u32,
                    show: 0.0,
                    ..Seen::once(seen.time)
                })
            }
            (_, Some(counters)) => {
                let row = self.counter(slot, key, hash);
                let words = self.maps[slot].values_mut(row);
                let before = counters.read(words);
                let now = before.and(seen);
                counters.write(words, now);
                if !judge.admits(before, now) {
                    return None;
                }
                self.on_map(slot, |map| map.remove(key, hash));
                Some(Seen {
                    time: seen.time,
                    ..before
                })
            }
            (_, None) => None,
        }
    }

    /// Whether it is a filter, whose rows are no keys'.
    pub(crate) fn is_filter(&self) -> bool {
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
