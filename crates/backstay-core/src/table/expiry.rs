//! Rows that go: by the thresholds of an expiry, or for want of room.

use super::live::Live;
use super::Table;
use crate::expression::RowBatch;
use crate::hash::mix64;
use crate::life::{self, Gone, Ranking, Reason, SlotPart, Thresholds};
use crate::row_map::RowMap;
use crate::spec::lifetime::{Evict, ScoreRule, MIN_SHARE};
use crate::storage;
use crate::transaction::Stamp;

/// Rows that an expiry looks at together.
const LOOK: usize = 64;

/// An expiry at work: what it goes by, and its memory.
struct Look<'l> {
    live: &'l Live,
    thresholds: &'l Thresholds,
    now: u32,
    /// The user's score, if it counts.
    batch: Option<RowBatch<'l>>,
    scratch: Vec<f32>,
    /// Of the rows that were looked at last.
    reasons: Vec<Option<Reason>>,
}

impl<'l> Look<'l> {
    fn new(live: &'l Live, thresholds: &'l Thresholds, now: u32, elements: usize) -> Self {
        let batch = match &live.score {
            Some(ScoreRule::Function(function)) if thresholds.score_below.is_some() => {
                Some(function.begin_rows(now, LOOK))
            }
            _ => None,
        };
        Self {
            live,
            thresholds,
            now,
            batch,
            scratch: vec![0.0; elements],
            reasons: Vec::with_capacity(LOOK),
        }
    }

    /// Find out which of some rows of a slot (its number in the range) go; at most [`LOOK`] of them.
    fn at(&mut self, table: &Table, slot: usize, rows: &[usize]) {
        let (live, map) = (self.live, &table.maps[slot]);
        let first = table.weight_words + table.kept_words;
        let scores = match &mut self.batch {
            Some(batch) => {
                for &row in rows {
                    batch.add(&live.statistics.inputs(&map.values(row)[first..]));
                }
                batch.run()
            }
            None => &[],
        };
        self.reasons.clear();
        for (n, &row) in rows.iter().enumerate() {
            let (values, scratch) = (map.values(row), &mut self.scratch);
            let statistics = &values[first..];
            let score = || match &live.score {
                Some(ScoreRule::ShowClick(rule)) => Some(live.statistics.score(statistics, rule)),
                Some(ScoreRule::Function(_)) => scores.get(n).map(|&one| life::given_score(one)),
                None => None,
            };
            let norm = || {
                storage::decode(table.spec.storage, &values[..table.weight_words], scratch);
                life::squared_norm(scratch)
            };
            let reason = self
                .thresholds
                .reason(live.statistics, statistics, score, self.now, norm);
            self.reasons.push(reason);
        }
    }
}

impl Table {
    /// The rows of a slot (its number in the cluster) that an expiry would remove.
    pub fn count_expired(&self, slot: u32, thresholds: &Thresholds, now: u32) -> Gone {
        let (mut gone, at) = (Gone::default(), (slot - self.first_slot) as usize);
        let (Some(map), Some(live)) = (self.maps.get(at), &self.live) else {
            return gone;
        };
        let mut look = Look::new(live, thresholds, now, self.elements);
        let rows: Vec<usize> = (0..map.len()).collect();
        for rows in rows.chunks(LOOK) {
            look.at(self, at, rows);
            look.reasons
                .iter()
                .flatten()
                .for_each(|&one| gone.count(one));
        }
        gone
    }

    pub(super) fn expire(
        &mut self,
        at: usize,
        part: SlotPart,
        thresholds: &Thresholds,
        now: u32,
    ) -> Gone {
        let mut gone = Gone::default();
        let Some(live) = self.live.clone() else {
            return gone;
        };
        let mut look = Look::new(&live, thresholds, now, self.elements);
        // From the last row on: the row that takes the place of one that goes was looked at before.
        let (mut left, mut rows) = (self.maps[at].len(), Vec::with_capacity(LOOK));
        while left > 0 {
            rows.clear();
            while left > 0 && rows.len() < LOOK {
                left -= 1;
                if part.has(mix64(self.maps[at].key(left))) {
                    rows.push(left);
                }
            }
            look.at(self, at, &rows);
            for (&row, reason) in rows.iter().zip(&look.reasons) {
                if let Some(reason) = *reason {
                    let key = self.maps[at].key(row);
                    gone.count(reason);
                    self.on_map(at, |map| map.remove(key, mix64(key)));
                }
            }
        }
        gone
    }

    /// Remove the rows of lowest rank in a slot (its number in the cluster) at its time if it has more
    /// than its share, and the oldest counters of the companion. How many of each went.
    pub(crate) fn evict(
        &mut self,
        slot: u32,
        stamp: Stamp,
        time: u32,
        companion: Option<&mut Table>,
    ) -> (u64, u64) {
        let at = (slot - self.first_slot) as usize;
        let Some(live) = &self.live else {
            return (0, 0);
        };
        let mut counters = 0;
        if let Some(companion) = companion.filter(|one| !one.is_filter()) {
            let keys = companion.lowest(at, stamp.counters as usize, Ranking::LeastRecent);
            counters = companion.evict_keys(at, &keys);
        }
        let ranking = match (live.evict, &live.score) {
            (Evict::LowestScore, Some(rule)) => Ranking::LowestScore(rule, time),
            (Evict::LeastFrequent, _) => Ranking::LeastFrequent,
            _ => Ranking::LeastRecent,
        };
        let keys = self.lowest(at, stamp.share as usize, ranking);
        (self.evict_keys(at, &keys), counters)
    }

    /// Bytes that evictions from a slot (its number in the cluster) can give back at most, for want of
    /// memory; with those of the companion's counters.
    pub(crate) fn evictable_bytes(&self, slot: u32, companion: Option<&Self>) -> usize {
        let at = (slot - self.first_slot) as usize;
        let of = |table: &Self| {
            let map = table.maps.get(at);
            map.map_or(0, |map| map.bytes_above(MIN_SHARE as usize - 1))
        };
        of(self) + companion.filter(|one| !one.is_filter()).map_or(0, of)
    }

    /// Remove rows of a slot (its number in the range), and give back what its index needs no more.
    fn evict_keys(&mut self, at: usize, keys: &[u64]) -> u64 {
        if keys.is_empty() {
            return 0;
        }
        let gone = self.remove(keys);
        // While memory is short, shares shrink, and the index is a part of them.
        self.on_map(at, RowMap::shrink);
        gone
    }

    /// The keys of the rows that go from a slot (its number in the range) with more than its share.
    fn lowest(&self, at: usize, share: usize, ranking: Ranking<'_>) -> Vec<u64> {
        let (Some(live), Some(map)) = (&self.live, self.maps.get(at)) else {
            return Vec::new();
        };
        if map.len() <= share {
            return Vec::new();
        }
        let first = self.weight_words + self.kept_words;
        let rows = map
            .keys()
            .map(|(key, row)| (key, &map.values(row)[first..]));
        ranking.choose(live.statistics, rows, share)
    }
}
