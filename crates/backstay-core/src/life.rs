//! What a row counts of its life, and what its table does by it: pure functions over its words.
//!
//! Statistics are words behind the optimizer's state of a row: when it was seen last (u32
//! seconds), its frequency (u32), its shows and clicks (f32 each). A row has those that its table's
//! [`Lifetime`] uses, in this order, so a table without a lifetime pays nothing. Time is a number
//! in the transaction ([`crate::transaction::Stamp`]); nothing here reads a clock. A user's score runs
//! over many rows at a time.

use std::ops::AddAssign;

use crate::expression::{RowBatch, Statistic, StatisticsOfRow};
use crate::hash::{mix64, SlotSpace};
use crate::spec::lifetime::{Expiry, Lifetime, ScoreRule, ShowClick};
use crate::staleness::PushStaleness;
use crate::stream::TransactionId;

/// The part of a share that an eviction makes free: 1/16.
const FREED_DIVISOR: usize = 16;

/// Where the statistics of a row lie behind its optimizer's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Statistics {
    last_seen: Option<usize>,
    frequency: Option<usize>,
    show: Option<usize>,
    click: Option<usize>,
    words: usize,
}

/// What a push tells of a key.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Seen {
    /// The time.
    pub time: u32,
    /// Pushes that named it.
    pub frequency: u32,
    /// Times that it was shown.
    pub show: f32,
    /// Times that it was clicked.
    pub click: f32,
}

impl Seen {
    /// By one push that says nothing of shows and clicks.
    pub fn once(time: u32) -> Self {
        Self {
            time,
            frequency: 1,
            show: 1.0,
            click: 0.0,
        }
    }

    /// Both together, at the later time.
    #[inline]
    #[must_use]
    pub fn and(self, later: Self) -> Self {
        Self {
            time: later.time,
            frequency: self.frequency.saturating_add(later.frequency),
            show: sum(self.show, later.show),
            click: sum(self.click, later.click),
        }
    }

    /// What a user's function is given of it.
    #[inline]
    pub fn inputs(&self) -> StatisticsOfRow {
        [
            f64::from(self.time),
            f64::from(self.frequency),
            f64::from(self.show),
            f64::from(self.click),
        ]
    }
}

/// Add counts. The sum stays finite: a score of infinite counts is a NaN, whose sign differs by
/// processor.
#[inline]
pub(crate) fn sum(counted: f32, more: f32) -> f32 {
    (counted + more).min(f32::MAX)
}

impl Statistics {
    /// Those that a policy uses.
    pub fn of(lifetime: &Lifetime) -> Self {
        let mut words = 0;
        let mut next = |statistic| {
            let (at, kept) = (words, lifetime.keeps(statistic));
            words += usize::from(kept);
            kept.then_some(at)
        };
        let [last_seen, frequency, show, click] = Statistic::ALL.map(&mut next);
        Self {
            last_seen,
            frequency,
            show,
            click,
            words,
        }
    }

    /// How many words they are.
    pub fn words(&self) -> usize {
        self.words
    }

    /// Count what a push tells; the words of a new row are zeros.
    #[inline]
    pub fn count(&self, words: &mut [u32], seen: Seen) {
        if let Some(at) = self.last_seen {
            words[at] = seen.time;
        }
        if let Some(at) = self.frequency {
            words[at] = words[at].saturating_add(seen.frequency);
        }
        if let Some(at) = self.show {
            words[at] = sum(f32::from_bits(words[at]), seen.show).to_bits();
        }
        if let Some(at) = self.click {
            words[at] = sum(f32::from_bits(words[at]), seen.click).to_bits();
        }
    }

    /// What a user's function is given of a row; 0 for what it does not keep.
    #[inline]
    pub fn inputs(&self, words: &[u32]) -> StatisticsOfRow {
        let count = |at: Option<usize>| at.map_or(0.0, |at| f64::from(words[at]));
        let sum = |at: Option<usize>| at.map_or(0.0, |at| f64::from(f32::from_bits(words[at])));
        [
            count(self.last_seen),
            count(self.frequency),
            sum(self.show),
            sum(self.click),
        ]
    }

    /// When the row was seen last; 0 if it does not keep that.
    pub fn last_seen(&self, words: &[u32]) -> u32 {
        self.last_seen.map_or(0, |at| words[at])
    }

    /// Begin to count the seconds anew.
    pub fn set_last_seen(&self, words: &mut [u32], time: u32) {
        if let Some(at) = self.last_seen {
            words[at] = time;
        }
    }

    /// Multiply shows and clicks.
    pub fn decay(&self, words: &mut [u32], rate: f32) {
        for at in [self.show, self.click].into_iter().flatten() {
            words[at] = (f32::from_bits(words[at]) * rate).to_bits();
        }
    }

    /// The score of a row by its shows and clicks; 0 if it does not keep them.
    #[inline]
    pub fn score(&self, words: &[u32], rule: &ShowClick) -> f64 {
        let (Some(show), Some(click)) = (self.show, self.click) else {
            return 0.0;
        };
        score(
            f32::from_bits(words[show]),
            f32::from_bits(words[click]),
            rule,
        )
    }
}

/// Source: the score of Paddle's `CtrCommonAccessor`.
pub fn score(show: f32, click: f32, rule: &ShowClick) -> f64 {
    let (show, click) = (f64::from(show), f64::from(click));
    rule.nonclick_coefficient * (show - click) + rule.click_coefficient * click
}

/// The score that a user's function gives. A NaN is lower than any number: its row goes first and is
/// not admitted. Both zeros are one.
pub fn given_score(result: f64) -> f64 {
    if result.is_nan() {
        f64::NEG_INFINITY
    } else {
        result + 0.0
    }
}

/// The score of each row at a time, given the statistics of all rows one behind the other. None if the
/// policy has no score.
pub fn scores(lifetime: &Lifetime, time: u32, words: &[u32]) -> Option<Vec<f64>> {
    let statistics = Statistics::of(lifetime);
    let rule = lifetime.score_rule()?;
    let rows = words.chunks_exact(statistics.words().max(1));
    Some(match &rule {
        ScoreRule::ShowClick(rule) => rows.map(|row| statistics.score(row, rule)).collect(),
        ScoreRule::Function(function) => {
            given_scores(function.begin_rows(time, usize::MAX), statistics, rows)
        }
    })
}

/// The scores of rows by a user's function, many rows at a time.
fn given_scores<'a>(
    mut batch: RowBatch<'_>,
    statistics: Statistics,
    rows: impl Iterator<Item = &'a [u32]>,
) -> Vec<f64> {
    let mut scores = Vec::with_capacity(rows.size_hint().0);
    for words in rows {
        batch.add(&statistics.inputs(words));
        if batch.rows() == batch.most() {
            scores.extend(batch.run().iter().map(|&one| given_score(one)));
        }
    }
    scores.extend(batch.run().iter().map(|&one| given_score(one)));
    scores
}

/// A number that grows with a float.
fn ascending(value: f64) -> u64 {
    let bits = value.to_bits();
    let flipped = if value.is_sign_negative() {
        u64::MAX
    } else {
        1 << 63
    };
    bits ^ flipped
}

/// Which rows of a slot go first for want of room: those of the lowest rank.
#[derive(Debug, Clone, Copy)]
pub enum Ranking<'r> {
    /// Those that no push has named for the longest time.
    LeastRecent,
    /// Those that the fewest pushes have named.
    LeastFrequent,
    /// Those of the lowest score at a time.
    LowestScore(&'r ScoreRule, u32),
}

/// The key of a row and its statistics.
type RowOfSlot<'a> = (u64, &'a [u32]);

impl Ranking<'_> {
    /// The keys of the rows that go so that 1/16 of `share` is free, given all rows of a slot, each
    /// with its statistics; in ascending order of (rank, key), which no place in memory decides.
    pub fn choose<'a>(
        self,
        statistics: Statistics,
        rows: impl Iterator<Item = RowOfSlot<'a>>,
        share: usize,
    ) -> Vec<u64> {
        let mut ranked: Vec<(u64, u64)> = match self {
            Self::LeastRecent => {
                let rank = |words: &[u32]| u64::from(statistics.last_seen(words));
                rows.map(|(key, words)| (rank(words), key)).collect()
            }
            Self::LeastFrequent => {
                let rank =
                    |words: &[u32]| statistics.frequency.map_or(0, |at| u64::from(words[at]));
                rows.map(|(key, words)| (rank(words), key)).collect()
            }
            Self::LowestScore(ScoreRule::ShowClick(rule), _) => {
                let rank = |words: &[u32]| ascending(statistics.score(words, rule));
                rows.map(|(key, words)| (rank(words), key)).collect()
            }
            Self::LowestScore(ScoreRule::Function(function), time) => {
                let (keys, words): (Vec<u64>, Vec<&[u32]>) = rows.unzip();
                let batch = function.begin_rows(time, usize::MAX);
                let scores = given_scores(batch, statistics, words.into_iter());
                scores.into_iter().map(ascending).zip(keys).collect()
            }
        };
        let left = share - share / FREED_DIVISOR;
        let Some(gone) = ranked.len().checked_sub(left).filter(|&gone| gone > 0) else {
            return Vec::new();
        };
        if gone < ranked.len() {
            ranked.select_nth_unstable(gone);
            ranked.truncate(gone);
        }
        ranked.sort_unstable();
        ranked.into_iter().map(|(_, key)| key).collect()
    }
}

/// The thresholds of an expiry, as they travel; a row goes if it is beyond any of them.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Thresholds {
    /// Seconds since a push named it.
    pub unseen_seconds: Option<u32>,
    /// Of its score.
    pub score_below: Option<f64>,
    /// Of the L2 norm of its weights.
    pub norm_below: Option<f64>,
}

impl From<Expiry> for Thresholds {
    fn from(expiry: Expiry) -> Self {
        Self {
            unseen_seconds: expiry.unseen_seconds,
            score_below: expiry.score_below,
            norm_below: expiry.norm_below,
        }
    }
}

/// Which rows of a slot an expiry looks at, in as many parts as pushes can wait for: a hash of the key
/// decides, and the key that stands for the slot says which part it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotPart {
    part: u64,
    parts: u64,
}

impl SlotPart {
    /// Parts in which a large slot expires.
    pub const PARTS: u64 = 8;
    /// After each part comes a rest of so many times as long: pushes go first.
    pub const REST_FACTOR: u32 = 2;
    /// All rows.
    pub const WHOLE: Self = Self { part: 0, parts: 1 };

    /// One of [`Self::PARTS`].
    pub fn of(part: u64) -> Self {
        Self {
            part,
            parts: Self::PARTS,
        }
    }

    /// The key that stands for this part of a slot.
    pub fn key(self, space: SlotSpace, slot: u32) -> u64 {
        // Of a whole slot 0, so that any key may stand for one.
        space.key_in(slot, (self.parts - 1) << 8 | self.part)
    }

    /// What the hash of a key stands for. A key of a row, or one that is damaged, stands for the whole
    /// slot.
    pub fn of_hash(hash: u64) -> Self {
        let number = hash & 0xff_ffff_ffff;
        let (part, parts) = (number & 0xff, (number >> 8) + 1);
        if parts == Self::PARTS && part < parts {
            return Self { part, parts };
        }
        Self::WHOLE
    }

    /// Whether a row is in it; `hash` is its key's.
    #[inline]
    pub fn has(self, hash: u64) -> bool {
        // The slot takes the bits above, the index of a map those below.
        (hash >> 40) & (self.parts - 1) == self.part
    }
}

/// Why a row goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// No push has named it for long.
    Unseen,
    /// Its score is low.
    Score,
    /// Its weights are small.
    Norm,
}

impl Thresholds {
    /// Whether none is set.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Whether a time is too long ago.
    pub fn is_unseen(&self, last_seen: u32, now: u32) -> bool {
        self.unseen_seconds
            .is_some_and(|most| now.saturating_sub(last_seen) > most)
    }

    /// The first reason for which a row goes, given its statistics, its score if it has one, and the
    /// squared norm of its weights.
    pub fn reason(
        &self,
        statistics: Statistics,
        words: &[u32],
        score: impl FnOnce() -> Option<f64>,
        now: u32,
        weights: impl FnOnce() -> f64,
    ) -> Option<Reason> {
        if statistics.last_seen.is_some() && self.is_unseen(statistics.last_seen(words), now) {
            return Some(Reason::Unseen);
        }
        let low = |below: f64| score().is_some_and(|score| score < below);
        if self.score_below.is_some_and(low) {
            return Some(Reason::Score);
        }
        let small = |below: f64| weights() < below * below;
        self.norm_below.is_some_and(small).then_some(Reason::Norm)
    }
}

/// The square of the L2 norm, summed in float64 in the order of the weights.
pub fn squared_norm(weights: &[f32]) -> f64 {
    let square = |&weight: &f32| f64::from(weight) * f64::from(weight);
    weights.iter().map(square).sum()
}

/// Whether an occurrence is one of the part that is admitted: a hash of key, push and seed decides,
/// so all replicas and all retries agree.
pub fn is_drawn(key: u64, id: TransactionId, seed: u64, probability: f64) -> bool {
    let stream = id.stream;
    let task = u64::from(stream.pass) << 32 | u64::from(stream.task);
    let words = [stream.job, task, id.sequence, seed];
    let mix = |hash: u64, word: u64| mix64(hash.rotate_left(5) ^ word);
    let hash = words
        .into_iter()
        .fold(mix64(key ^ 0x5bd1_e995_9d1b_54a3), mix);
    // The upper 53 bits as a number in [0, 1).
    ((hash >> 11) as f64) < probability * (1u64 << 53) as f64
}

/// What a transaction did to the rows of some slots, beyond changing their weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Gone {
    /// Rows that a delete removed.
    pub deleted: u64,
    /// Rows that an expiry removed, by reason.
    pub unseen: u64,
    /// The same.
    pub score: u64,
    /// The same.
    pub norm: u64,
    /// Counters of keys without a row that an expiry forgot.
    pub counters: u64,
    /// Rows that went for want of room.
    pub evicted: u64,
    /// Counters of keys without a row that went for want of room.
    pub evicted_counters: u64,
    /// Keys of a push that got no row.
    pub not_admitted: u64,
    /// How stale its gradients were.
    pub stale: PushStaleness,
}

impl Gone {
    /// Rows that an expiry removed.
    pub fn expired(&self) -> u64 {
        self.unseen + self.score + self.norm
    }

    /// Count a row that goes.
    pub fn count(&mut self, reason: Reason) {
        *match reason {
            Reason::Unseen => &mut self.unseen,
            Reason::Score => &mut self.score,
            Reason::Norm => &mut self.norm,
        } += 1;
    }
}

impl AddAssign for Gone {
    fn add_assign(&mut self, other: Self) {
        self.deleted += other.deleted;
        self.unseen += other.unseen;
        self.score += other.score;
        self.norm += other.norm;
        self.counters += other.counters;
        self.evicted += other.evicted;
        self.evicted_counters += other.evicted_counters;
        self.not_admitted += other.not_admitted;
        self.stale += other.stale;
    }
}
