//! The rows that a client has pulled of some tables, kept until it pushes what it computed with them:
//! a push to these tables brings them along.
//!
//! The rows of the last pulls are kept, in two generations, so that memory is bounded.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::error::ClientError;

/// Pulls in a generation. A row is kept for so many at least.
const PULLS: usize = 64;

/// Rows by key, all of one width.
#[derive(Debug, Default)]
struct Generation {
    places: BTreeMap<u64, usize>,
    rows: Vec<f32>,
}

#[derive(Debug, Default)]
struct Table {
    newer: Generation,
    older: Generation,
    /// That came into the newer one.
    pulls: usize,
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct References {
    /// Whether there is a table at all; who asks for none pays nothing more.
    any: AtomicBool,
    tables: Mutex<BTreeMap<u64, Table>>,
}

impl Generation {
    fn put(&mut self, key: u64, row: &[f32]) {
        let at = *self.places.entry(key).or_insert(self.rows.len());
        if at == self.rows.len() {
            self.rows.extend_from_slice(row);
        } else {
            self.rows[at..at + row.len()].copy_from_slice(row);
        }
    }

    fn get(&self, key: u64, elements: usize) -> Option<&[f32]> {
        let &at = self.places.get(&key)?;
        self.rows.get(at..at + elements)
    }
}

impl References {
    /// Keep the rows of a table from now on.
    pub(super) fn keep(&self, table: u64) {
        self.tables.lock().entry(table).or_default();
        self.any.store(true, Ordering::Release);
    }

    /// Whether a table's rows are kept.
    pub(super) fn keeps(&self, table: u64) -> bool {
        self.any.load(Ordering::Acquire) && self.tables.lock().contains_key(&table)
    }

    /// The rows of another pull come; whether they are kept.
    pub(super) fn begin(&self, table: u64) -> bool {
        if !self.keeps(table) {
            return false;
        }
        let mut tables = self.tables.lock();
        let known = tables.entry(table).or_default();
        if known.pulls >= PULLS {
            known.older = std::mem::take(&mut known.newer);
            known.pulls = 0;
        }
        known.pulls += 1;
        true
    }

    /// Rows came: one for each key, \[n, `elements`].
    pub(super) fn came(&self, table: u64, keys: &[u64], rows: &[f32], elements: usize) {
        let mut tables = self.tables.lock();
        let known = tables.entry(table).or_default();
        for (&key, row) in keys.iter().zip(rows.chunks_exact(elements)) {
            known.newer.put(key, row);
        }
    }

    /// The rows of these keys, \[n, `elements`].
    pub(super) fn of(
        &self,
        table: u64,
        keys: &[u64],
        elements: usize,
    ) -> Result<Vec<f32>, ClientError> {
        let tables = self.tables.lock();
        let known = tables.get(&table);
        let mut rows = Vec::with_capacity(keys.len() * elements);
        for &key in keys {
            let row = known.and_then(|known| {
                let newer = known.newer.get(key, elements);
                newer.or_else(|| known.older.get(key, elements))
            });
            rows.extend_from_slice(row.ok_or_else(|| {
                ClientError::Invalid(format!(
                    "this client has not pulled key {key} in its last 64 pulls: a push to a table \
                     with delay compensation sends the weights that its gradients were computed \
                     with; pull the key again and compute its gradients anew"
                ))
            })?);
        }
        Ok(rows)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // What fails in a helper is a failed test.

    use super::*;

    #[test]
    fn the_rows_of_the_last_pulls_are_kept() {
        let references = References::default();
        assert!(!references.keeps(1));
        references.keep(1);
        assert!(references.keeps(1) && !references.keeps(2));
        references.came(1, &[5, 6], &[1.0, 2.0, 3.0, 4.0], 2);
        references.came(1, &[5], &[7.0, 8.0], 2);
        assert_eq!(references.of(1, &[6, 5], 2).unwrap(), [3.0, 4.0, 7.0, 8.0]);
        let refused = references.of(1, &[5, 9], 2).unwrap_err().to_string();
        assert!(refused.contains("has not pulled key 9"), "{refused}");
        for _ in 0..=PULLS {
            references.begin(1);
        }
        assert!(references.of(1, &[5, 6], 2).is_ok(), "a generation later");
        for _ in 0..PULLS {
            references.begin(1);
        }
        assert!(references.of(1, &[5], 2).is_err());
    }
}
