//! What a running export has of the rows of a table: weights, statistics if they are wanted, and
//! only rows of a high enough score.

use std::sync::Arc;

use backstay_core::engine::TableSnapshot;
use backstay_core::life::{self, Statistics};
use backstay_core::spec::TableSpec;
use backstay_core::table::PlainRows;
use serde::Deserialize;

/// What an export is of.
#[derive(Debug, Clone, Deserialize)]
pub struct ExportChoice {
    /// The names of its tables.
    pub tables: Vec<String>,
    /// Whether the statistics of rows go with them.
    pub statistics: bool,
    /// The lowest score of a row, in tables that have one.
    pub score_at_least: Option<f64>,
}

/// What an export has of one table.
pub struct Chosen {
    spec: Arc<TableSpec>,
    /// Words of statistics at the end of a row.
    statistics: usize,
    wants_statistics: bool,
    score_at_least: Option<f64>,
}

impl Chosen {
    pub fn new(spec: Arc<TableSpec>, choice: &ExportChoice) -> Self {
        let lifetime = spec.lifetime.as_ref();
        let statistics = lifetime.map_or(0, |lifetime| Statistics::of(lifetime).words());
        let has_score = lifetime.is_some_and(|lifetime| lifetime.score_rule().is_some());
        Self {
            statistics,
            wants_statistics: choice.statistics,
            score_at_least: choice.score_at_least.filter(|_| has_score),
            spec,
        }
    }

    /// The rows of a copy that are chosen, and the keys that have none: those that went, and those
    /// whose score is too low. `time` is the slot's.
    pub fn rows(&self, copy: &TableSnapshot, whole: bool, time: u32) -> (PlainRows, Vec<u64>) {
        let mut deleted = copy.deleted.clone();
        let mut rows = PlainRows::default();
        match self.scores(copy, time) {
            None => copy.layout.take_apart(&copy.words, &mut rows),
            Some((scores, least)) => {
                let stride = copy.layout.stride();
                let mut words = Vec::with_capacity(copy.words.len());
                for (row, score) in copy.words.chunks_exact(stride).zip(scores) {
                    if score >= least {
                        words.extend_from_slice(row);
                    } else if !whole {
                        deleted.push(u64::from(row[0]) | u64::from(row[1]) << 32);
                    }
                }
                copy.layout.take_apart(&words, &mut rows);
            }
        }
        rows.2 = self.statistics_in(&rows.2, copy.layout.state_words);
        (rows, deleted)
    }

    fn scores(&self, copy: &TableSnapshot, time: u32) -> Option<(Vec<f64>, f64)> {
        let least = self.score_at_least?;
        let stride = copy.layout.stride();
        let statistics = copy
            .words
            .chunks_exact(stride)
            .flat_map(|row| &row[stride - self.statistics..]);
        let words: Vec<u32> = statistics.copied().collect();
        let scores = life::scores(self.spec.lifetime.as_ref()?, time, &words)?;
        Some((scores, least))
    }

    /// The last columns of the state of rows.
    fn statistics_in(&self, state: &[f32], columns: usize) -> Vec<f32> {
        if !self.wants_statistics || self.statistics == 0 {
            return Vec::new();
        }
        let rows = state.chunks_exact(columns);
        rows.flat_map(|row| &row[columns - self.statistics..])
            .copied()
            .collect()
    }
}
