//! A batch of keys made ready: equal keys merged, the rest ordered by server and slot.
//!
//! One plan serves any number of tables and calls. Keys are first distributed into one bucket
//! for each slot, then each bucket is rid of its duplicates with a table small enough for the
//! first-level cache; a single large hash table would miss it with every key.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

use backstay_core::hash::mix64;

use super::error::ClientError;
use super::routing::Routing;

/// Buckets with at most so many keys are searched one by one.
const LINEAR_KEYS: usize = 8;

/// Where one key of the batch went: position in the batch, number among the unique keys.
#[derive(Debug, Clone, Copy)]
pub struct Entry {
    /// Position in the batch.
    pub index: u32,
    /// Position among [`Plan::keys`].
    pub unique: u32,
}

/// The keys of one slot.
#[derive(Debug, Clone, Copy)]
struct Run {
    server: u32,
    first_key: u32,
    first_entry: u32,
}

/// Whole slots that stand together in a plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// Their unique keys.
    pub keys: Range<usize>,
    /// The entries that refer to them.
    pub entries: Range<usize>,
}

/// A part of a plan that goes to one server in one frame: whole slots.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// Index into the routing's servers, or [`super::routing::NO_MASTER`].
    pub server: u32,
    /// The first piece; the only one as long as the plan's routing holds.
    pub first: Piece,
    /// More of them, where slots have moved since the plan was made.
    pub more: Vec<Piece>,
}

impl Part {
    /// Its pieces, in the order in which they stand in the frame.
    pub fn pieces(&self) -> impl Iterator<Item = &Piece> {
        std::iter::once(&self.first).chain(&self.more)
    }

    /// How many unique keys it has.
    pub fn key_count(&self) -> usize {
        self.pieces().map(|piece| piece.keys.len()).sum()
    }

    /// The keys themselves, one piece behind the other.
    pub fn copy_keys(&self, plan: &Plan, out: &mut [u64]) {
        let mut at = 0;
        for piece in self.pieces() {
            let keys = &plan.keys()[piece.keys.clone()];
            out[at..at + keys.len()].copy_from_slice(keys);
            at += keys.len();
        }
    }

    fn append(&mut self, piece: Piece) {
        let last = self.more.last_mut().unwrap_or(&mut self.first);
        if last.keys.end == piece.keys.start {
            last.keys.end = piece.keys.end;
            last.entries.end = piece.entries.end;
        } else {
            self.more.push(piece);
        }
    }
}

/// See the module's documentation.
#[derive(Debug)]
pub struct Plan {
    routing: Arc<Routing>,
    keys: Vec<u64>,
    entries: Vec<Entry>,
    runs: Vec<Run>,
}

/// Memory kept between plans of a thread, so that large batches are not mapped anew each time.
#[derive(Default)]
struct Scratch {
    ranks: Vec<u16>,
    scattered: Vec<(u64, u32)>,
    cursors: Vec<u32>,
    table: Vec<u32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl Plan {
    /// Make a batch ready for a routing table.
    pub fn new(keys: &[u64], routing: Arc<Routing>) -> Result<Self, ClientError> {
        if keys.is_empty() {
            return Err(ClientError::Invalid(
                "there are no keys: a batch needs at least one".into(),
            ));
        }
        if keys.len() > u32::MAX as usize / 2 {
            return Err(ClientError::LimitExceeded(format!(
                "{} keys in one batch: at most {}",
                keys.len(),
                u32::MAX / 2
            )));
        }
        let mut plan = Self {
            routing,
            keys: Vec::with_capacity(keys.len()),
            entries: Vec::with_capacity(keys.len()),
            runs: Vec::new(),
        };
        SCRATCH.with_borrow_mut(|scratch| {
            scratch.distribute(keys, &plan.routing);
            plan.merge(scratch);
        });
        Ok(plan)
    }

    /// The routing table it was made for.
    pub fn routing(&self) -> &Arc<Routing> {
        &self.routing
    }

    /// The unique keys, by server, then by slot.
    pub fn keys(&self) -> &[u64] {
        &self.keys
    }

    /// How many keys the batch had, duplicates included.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Never: a plan has at least one key.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// For each key of the batch, where it went, in the order of [`Self::keys`].
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Cut the plan into parts of about `keys_per_part` unique keys, never within a slot:
    /// a slot takes each push once. Parts of different servers alternate, so that all servers
    /// work from the start; parts of one server keep the order of their slots.
    ///
    /// `routing` may be newer than the one the plan was made for.
    pub fn parts(&self, routing: &Arc<Routing>, keys_per_part: usize) -> Vec<Part> {
        if Arc::ptr_eq(routing, &self.routing) {
            let runs = self.runs.iter().enumerate();
            return self.parts_of(runs.map(|(i, run)| (run.server, i)), keys_per_part);
        }
        // A server takes keys in the order of their slots, which is not that of an old routing.
        let mut order: Vec<(u32, u32, usize)> = Vec::with_capacity(self.runs.len());
        for (i, run) in self.runs.iter().enumerate() {
            let key = self.keys[run.first_key as usize];
            order.push((routing.server_of_key(key), routing.slot(key), i));
        }
        order.sort_unstable();
        let order = order.into_iter().map(|(server, _, i)| (server, i));
        self.parts_of(order, keys_per_part)
    }

    /// Parts of runs that come by server, then by slot.
    fn parts_of(
        &self,
        runs: impl Iterator<Item = (u32, usize)>,
        keys_per_part: usize,
    ) -> Vec<Part> {
        let mut parts: Vec<Part> = Vec::new();
        let mut keys = 0;
        for (server, run) in runs {
            let piece = self.piece_of_runs(run..run + 1);
            keys += piece.keys.len();
            match parts.last_mut() {
                Some(part) if part.server == server && keys <= keys_per_part.max(1) => {
                    part.append(piece);
                }
                _ => {
                    keys = piece.keys.len();
                    parts.push(Part {
                        server,
                        first: piece,
                        more: Vec::new(),
                    });
                }
            }
        }
        interleave(parts)
    }

    /// The part of `part` that stands at these positions of its frame: whole slots.
    pub(crate) fn cut(&self, part: &Part, server: u32, ranges: &[Range<usize>]) -> Option<Part> {
        let mut cut: Option<Part> = None;
        let mut at = 0;
        for piece in part.pieces() {
            let whole = at..at + piece.keys.len();
            for range in ranges {
                let (start, end) = (range.start.max(whole.start), range.end.min(whole.end));
                if start >= end {
                    continue;
                }
                let key = |position: usize| position - at + piece.keys.start;
                let first = self.run_at(key(start));
                let end = self.run_at(key(end));
                let piece = self.piece_of_runs(first..end);
                match &mut cut {
                    Some(cut) => cut.append(piece),
                    None => {
                        cut = Some(Part {
                            server,
                            first: piece,
                            more: Vec::new(),
                        });
                    }
                }
            }
            at = whole.end;
        }
        cut
    }

    /// The slots of a part, in the order in which their keys stand in its frame.
    pub(crate) fn slots_of<'a>(&'a self, part: &'a Part) -> impl Iterator<Item = u32> + 'a {
        let runs = move |piece: &Piece| self.run_at(piece.keys.start)..self.run_at(piece.keys.end);
        let runs = part.pieces().flat_map(runs);
        runs.map(move |run| {
            let key = self.keys[self.runs[run].first_key as usize];
            self.routing.slot(key)
        })
    }

    /// The run that begins at this unique key, or the number of runs at their end.
    fn run_at(&self, key: usize) -> usize {
        self.runs
            .partition_point(|run| (run.first_key as usize) < key)
    }

    fn piece_of_runs(&self, runs: Range<usize>) -> Piece {
        let (first, next) = (&self.runs[runs.start], self.runs.get(runs.end));
        let key_end = next.map_or(self.keys.len(), |next| next.first_key as usize);
        let entry_end = next.map_or(self.entries.len(), |next| next.first_entry as usize);
        Piece {
            keys: first.first_key as usize..key_end,
            entries: first.first_entry as usize..entry_end,
        }
    }

    fn merge(&mut self, scratch: &mut Scratch) {
        let mut start = 0;
        for rank in 0..scratch.cursors.len() {
            // After distribution a bucket's cursor stands at its end.
            let end = scratch.cursors[rank] as usize;
            if end > start {
                self.runs.push(Run {
                    server: self.routing.server_of_rank(rank),
                    first_key: self.keys.len() as u32,
                    first_entry: self.entries.len() as u32,
                });
                self.merge_bucket(&scratch.scattered[start..end], &mut scratch.table);
                start = end;
            }
        }
    }

    fn merge_bucket(&mut self, bucket: &[(u64, u32)], table: &mut Vec<u32>) {
        let first = self.keys.len();
        if bucket.len() <= LINEAR_KEYS {
            for &(key, index) in bucket {
                let found = self.keys[first..].iter().position(|&known| known == key);
                let unique = found.map_or(self.keys.len(), |at| first + at);
                if unique == self.keys.len() {
                    self.keys.push(key);
                }
                self.entries.push(Entry {
                    index,
                    unique: unique as u32,
                });
            }
            return;
        }
        let mask = (bucket.len() * 2).next_power_of_two() - 1;
        table.clear();
        table.resize(mask + 1, u32::MAX);
        for &(key, index) in bucket {
            let mut at = mix64(key) as usize & mask;
            let unique = loop {
                match table[at] {
                    u32::MAX => {
                        table[at] = self.keys.len() as u32;
                        self.keys.push(key);
                        break table[at];
                    }
                    unique if self.keys[unique as usize] == key => break unique,
                    _ => at = (at + 1) & mask,
                }
            };
            self.entries.push(Entry { index, unique });
        }
    }
}

/// Put the first parts of all servers first, then the second ones, and so on.
fn interleave(parts: Vec<Part>) -> Vec<Part> {
    let (mut server, mut turn) = (None, 0);
    let mut numbered: Vec<(usize, Part)> = Vec::with_capacity(parts.len());
    for part in parts {
        turn = if server == Some(part.server) {
            turn + 1
        } else {
            0
        };
        server = Some(part.server);
        numbered.push((turn, part));
    }
    numbered.sort_by_key(|(turn, part)| (*turn, part.server));
    numbered.into_iter().map(|(_, part)| part).collect()
}

impl Scratch {
    /// A counting sort of the keys by rank; equal ranks keep the order of the batch.
    fn distribute(&mut self, keys: &[u64], routing: &Routing) {
        self.cursors.clear();
        self.cursors.resize(routing.space.count() as usize, 0);
        self.ranks.clear();
        self.ranks.extend(keys.iter().map(|&key| {
            let rank = routing.rank(key);
            self.cursors[rank as usize] += 1;
            rank as u16
        }));
        let mut start = 0;
        for cursor in &mut self.cursors {
            start += std::mem::replace(cursor, start);
        }
        self.scattered.resize(keys.len(), (0, 0));
        for (index, (&key, &rank)) in keys.iter().zip(&self.ranks).enumerate() {
            let cursor = &mut self.cursors[rank as usize];
            self.scattered[*cursor as usize] = (key, index as u32);
            *cursor += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn routing(servers: u32, slots: u32) -> Arc<Routing> {
        let addresses = (0..servers).map(|n| n.to_string()).collect();
        let masters: Vec<u32> = (0..slots).map(|slot| slot % servers).collect();
        Arc::new(Routing::new(1, addresses, &masters).unwrap())
    }

    #[test]
    fn every_key_is_found_again_once_and_in_order() {
        for (servers, slots, spread) in [(1, 1, 50), (1, 1024, 5000), (3, 64, 200), (3, 1024, 3)] {
            let routing = routing(servers, slots);
            let keys: Vec<u64> = (0..4000).map(|i| mix64(i) % spread).collect();
            let plan = Plan::new(&keys, Arc::clone(&routing)).unwrap();
            let mut place = BTreeMap::new();
            for (at, &key) in plan.keys().iter().enumerate() {
                assert!(place.insert(key, at).is_none(), "key {key} stands twice");
            }
            let mut seen = vec![false; keys.len()];
            for entry in plan.entries() {
                assert_eq!(
                    plan.keys()[entry.unique as usize],
                    keys[entry.index as usize]
                );
                assert!(!std::mem::replace(&mut seen[entry.index as usize], true));
            }
            assert!(seen.iter().all(|&seen| seen));
            let ranks: Vec<u32> = plan.keys().iter().map(|&key| routing.rank(key)).collect();
            assert!(ranks.is_sorted());
        }
    }

    #[test]
    fn parts_cover_everything_and_never_cut_a_slot() {
        let routing = routing(3, 64);
        let keys: Vec<u64> = (0..3000).collect();
        let plan = Plan::new(&keys, Arc::clone(&routing)).unwrap();
        for size in [1, 10, 500, 1_000_000] {
            let (mut key, mut entry, mut last_rank) = (0, 0, None);
            let mut parts = plan.parts(&routing, size);
            let first: Vec<u32> = parts.iter().take(3).map(|part| part.server).collect();
            assert_eq!(first, [0, 1, 2], "all servers get work at once");
            parts.sort_by_key(|part| part.first.keys.start);
            for part in parts {
                assert!(part.more.is_empty());
                let (server, part) = (part.server, part.first);
                assert_eq!((part.keys.start, part.entries.start), (key, entry));
                (key, entry) = (part.keys.end, part.entries.end);
                for &unique in &plan.keys()[part.keys.clone()] {
                    assert_eq!(
                        routing.server_of_rank(routing.rank(unique) as usize),
                        server
                    );
                }
                let first = routing.rank(plan.keys()[part.keys.start]);
                assert_ne!(Some(first), last_rank, "a slot was cut");
                last_rank = Some(routing.rank(plan.keys()[part.keys.end - 1]));
                for e in &plan.entries()[part.entries.clone()] {
                    assert!(part.keys.contains(&(e.unique as usize)));
                }
            }
            assert_eq!((key, entry), (plan.keys().len(), plan.len()));
        }
    }
}
