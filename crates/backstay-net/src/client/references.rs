//! What pushes to some tables bring along: the rows that the client has pulled, or the sums of
//! gradients that came with them, kept until it pushes what it computed with them.
//!
//! Those of the last pulls are kept, in two generations for each table, so that memory is bounded.
//! The tables share the bound evenly; the older generation of a table goes first.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

use backstay_core::compensation::Reference;
use parking_lot::Mutex;

use super::error::ClientError;

/// Bytes that a client keeps of all its tables, 256 MiB. What the newest pull of a table brought is
/// kept in any case.
const MOST_BYTES: usize = 256 << 20;

/// Pulls in a generation. A row is kept for so many at least, if there is room.
const PULLS: usize = 64;

/// Of a key with its place, as the map has it.
const KEY_BYTES: usize = 24;

/// Values by key, all of one width.
#[derive(Debug, Default)]
struct Generation {
    places: BTreeMap<u64, usize>,
    rows: Vec<f32>,
}

#[derive(Debug)]
struct Table {
    reference: Reference,
    newer: Generation,
    older: Generation,
    /// That came into the newer one.
    pulls: usize,
}

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct References {
    /// Whether there is a table at all; who asks for none pays nothing more.
    any: AtomicBool,
    most_bytes: usize,
    tables: Mutex<BTreeMap<u64, Table>>,
}

impl Default for References {
    fn default() -> Self {
        Self {
            any: AtomicBool::default(),
            most_bytes: MOST_BYTES,
            tables: Mutex::default(),
        }
    }
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

    fn get(&self, key: u64, values: usize) -> Option<&[f32]> {
        let &at = self.places.get(&key)?;
        self.rows.get(at..at + values)
    }

    fn bytes(&self) -> usize {
        self.places.len() * KEY_BYTES + self.rows.capacity() * size_of::<f32>()
    }
}

impl Table {
    /// Another pull comes, of a table that may keep so many bytes.
    fn begin(&mut self, share: usize) {
        let is_full = self.pulls >= PULLS || 2 * self.newer.bytes() >= share;
        if is_full && self.pulls > 0 {
            self.older = std::mem::take(&mut self.newer);
            self.pulls = 0;
        }
        self.pulls += 1;
    }

    fn forget_older(&mut self, share: usize) {
        if self.newer.bytes() + self.older.bytes() > share {
            self.older = Generation::default();
        }
    }
}

impl References {
    /// Keep those of a table from now on.
    pub(super) fn keep(&self, table: u64, reference: Reference) {
        self.tables.lock().entry(table).or_insert_with(|| Table {
            reference,
            newer: Generation::default(),
            older: Generation::default(),
            pulls: 0,
        });
        self.any.store(true, Ordering::Release);
    }

    /// What is kept of a table, if something is.
    pub(super) fn kept(&self, table: u64) -> Option<Reference> {
        if !self.any.load(Ordering::Acquire) {
            return None;
        }
        self.tables.lock().get(&table).map(|one| one.reference)
    }

    /// The answers of another pull come; whether something is kept of them.
    pub(super) fn begin(&self, table: u64) -> bool {
        if !self.any.load(Ordering::Acquire) {
            return false;
        }
        let mut tables = self.tables.lock();
        let share = self.most_bytes / tables.len().max(1);
        let Some(known) = tables.get_mut(&table) else {
            return false;
        };
        known.begin(share);
        true
    }

    /// Rows came, with their sums if these were asked for: as many values for each key.
    pub(super) fn came(&self, table: u64, keys: &[u64], rows: &[f32], sums: &[f32]) {
        let mut tables = self.tables.lock();
        let share = self.most_bytes / tables.len().max(1);
        let Some(known) = tables.get_mut(&table) else {
            return;
        };
        let values = match known.reference {
            Reference::Weights => rows,
            Reference::Sum => sums,
        };
        // A pull that was asked for before they were to be kept has no sums.
        let width = values.len().checked_div(keys.len()).unwrap_or(0);
        if width == 0 {
            return;
        }
        for (&key, row) in keys.iter().zip(values.chunks_exact(width)) {
            known.newer.put(key, row);
        }
        known.forget_older(share);
    }

    /// Those of these keys, so many values for each.
    pub(super) fn of(
        &self,
        table: u64,
        keys: &[u64],
        values: usize,
    ) -> Result<Vec<f32>, ClientError> {
        let tables = self.tables.lock();
        let known = tables.get(&table);
        let mut rows = Vec::with_capacity(keys.len() * values);
        for &key in keys {
            let row = known.and_then(|known| {
                let newer = known.newer.get(key, values);
                newer.or_else(|| known.older.get(key, values))
            });
            rows.extend_from_slice(row.ok_or_else(|| {
                ClientError::Invalid(format!(
                    "this client has not pulled key {key} in its last {PULLS} pulls, or keeps no \
                     longer what came with it (at most {} MiB): a push to a table with delay \
                     compensation sends the weights that its gradients were computed with, or the \
                     sums that came with them; pull the key again and compute its gradients anew",
                    self.most_bytes >> 20
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
        assert_eq!(references.kept(1), None);
        references.keep(1, Reference::Weights);
        assert_eq!(references.kept(1), Some(Reference::Weights));
        assert_eq!(references.kept(2), None);
        references.came(1, &[5, 6], &[1.0, 2.0, 3.0, 4.0], &[]);
        references.came(1, &[5], &[7.0, 8.0], &[]);
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

    /// Pulls of 16 keys each, of 4 values.
    #[test]
    fn the_oldest_go_once_there_are_too_many_bytes() {
        let pull = |references: &References, table: u64, number: u64| {
            assert!(references.begin(table));
            let keys: Vec<u64> = (16 * number..16 * (number + 1)).collect();
            references.came(table, &keys, &[9.0; 32], &[number as f32; 64]);
            // Asked for before sums were to be kept.
            references.came(table, &keys, &[9.0; 32], &[]);
        };
        let bytes = |references: &References| -> usize {
            let tables = references.tables.lock();
            let of = |one: &Table| one.newer.bytes() + one.older.bytes();
            tables.values().map(of).sum()
        };
        let has = |references: &References, table: u64, number: u64| {
            let row = references.of(table, &[16 * number], 4);
            row.is_ok_and(|row| row == [number as f32; 4])
        };
        for (most, lasts) in [(1 << 14, 4), (1, 0)] {
            let references = References {
                most_bytes: most,
                ..References::default()
            };
            let tables = [1, 2];
            for table in tables {
                references.keep(table, Reference::Sum);
            }
            for number in 0..40 {
                for table in tables {
                    pull(&references, table, number);
                    assert!(has(&references, table, number), "the newest pull");
                    assert!(number < lasts || has(&references, table, number - lasts));
                }
                // The newest pull of each in any case.
                assert!(bytes(&references) <= most.max(2 * 16 * (KEY_BYTES + 16)));
            }
            assert!(!has(&references, 1, 0));
            let refused = references.of(1, &[0], 4).unwrap_err().to_string();
            assert!(refused.contains("has not pulled key 0"), "{refused}");
        }
    }

    #[test]
    fn a_row_that_is_pulled_again_takes_no_more_room() {
        let references = References {
            most_bytes: 4 * (KEY_BYTES + 8),
            ..References::default()
        };
        references.keep(1, Reference::Weights);
        references.begin(1);
        references.came(1, &[1], &[1.0, 1.0], &[]);
        for number in 0..20 {
            references.begin(1);
            references.came(1, &[2], &[number as f32, 0.0], &[]);
        }
        assert!(references.of(1, &[1, 2], 2).is_ok());
    }
}
