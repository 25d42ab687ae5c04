//! Which rows of a map have changed, in two generations of one bit for each row.
//!
//! An incremental checkpoint writes the rows that changed since the one it adds to. The recent
//! generation holds what changed since the last checkpoint was written; the earlier one what
//! changed before, for the case that the last one was never completed. The same is kept for the
//! increments of an export, apart from that.

/// See the module's documentation.
#[derive(Debug, Clone, Default)]
pub struct Marks {
    recent: Vec<u64>,
    earlier: Vec<u64>,
    /// Numbers under which another row stands than when the recent generation began.
    moved: Vec<u64>,
}

/// Which generations are asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Since {
    /// What changed since the last new generation.
    Recent,
    /// That, and what changed in the one before.
    Earlier,
}

/// What rows are copied for: each purpose has marks of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// A checkpoint, of all tables.
    Checkpoint,
    /// An increment of a running export, of the tables that are in it.
    Export,
}

/// From which position on the marks of a slot's rows say what has changed.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Spans {
    pub(crate) recent: u64,
    pub(crate) earlier: Option<u64>,
    /// Snapshots so far, and times that the content was replaced.
    pub(crate) number: u64,
}

impl Spans {
    /// After a snapshot at a position, which keeps what is known from before it.
    pub(crate) fn begun(self, position: u64, kept: Since) -> Self {
        Self {
            recent: position,
            earlier: match kept {
                Since::Recent => Some(self.recent),
                Since::Earlier => self.earlier,
            },
            number: self.number + 1,
        }
    }

    /// Marks that begin at a position, for a content that replaces the one before.
    pub(crate) fn replaced(self, position: u64) -> Self {
        Self {
            recent: position,
            earlier: None,
            number: self.number + 1,
        }
    }

    /// The fewest generations that say what has changed since a position; None if none do.
    pub(crate) fn since(&self, position: u64) -> Option<Since> {
        if self.recent <= position {
            return Some(Since::Recent);
        }
        let reaches = self.earlier.is_some_and(|earlier| earlier <= position);
        reaches.then_some(Since::Earlier)
    }
}

impl Marks {
    /// Marks for so many rows, none of which has changed.
    pub fn covering(rows: usize) -> Self {
        let mut recent = Vec::new();
        if rows > 0 {
            recent.reserve_exact(Self::bytes_for(rows) / 8);
            recent.resize(rows.div_ceil(64), 0);
        }
        Self {
            recent,
            ..Self::default()
        }
    }

    /// Make room for the mark of one more row, the `rows`-th.
    #[inline]
    pub fn cover(&mut self, rows: usize) {
        if rows > self.recent.len() * 64 {
            if self.recent.len() == self.recent.capacity() {
                self.recent.reserve_exact(self.recent.len().max(1));
            }
            self.recent.push(0);
        }
    }

    /// Bytes that [`Self::cover`] allocates for so many rows in all, at most.
    pub fn bytes_for(rows: usize) -> usize {
        rows.div_ceil(64).next_power_of_two() * 8
    }

    /// Note that a row has changed.
    #[inline]
    pub fn mark(&mut self, row: usize) {
        self.recent[row >> 6] |= 1 << (row & 63);
    }

    /// A row was removed, and the last one took its number.
    pub fn remove(&mut self, row: usize, last: usize) {
        for words in [&mut self.recent, &mut self.earlier] {
            let marked = bit(words, last);
            set(words, row, marked);
            set(words, last, false);
        }
        set(&mut self.moved, last, false);
        if row < last {
            let length = self.moved.len().max(last.div_ceil(64));
            self.moved.resize(length, 0);
            set(&mut self.moved, row, true);
        }
    }

    /// The rows that have changed, in ascending order.
    pub fn rows(&self, since: Since) -> impl Iterator<Item = usize> + '_ {
        let earlier: &[u64] = match since {
            Since::Recent => &[],
            Since::Earlier => &self.earlier,
        };
        either(&self.recent, earlier)
    }

    /// The numbers whose words differ from those when the last generation began, ascending.
    pub fn touched(&self) -> impl Iterator<Item = usize> + '_ {
        either(&self.recent, &self.moved)
    }

    /// Begin a new generation: the earlier one becomes what [`Self::rows`] gives for `since`.
    pub fn begin(&mut self, since: Since) {
        let mut earlier = vec![0; self.recent.len()];
        std::mem::swap(&mut earlier, &mut self.recent);
        // The same capacity again, or growing would not be foreseen any more.
        self.recent
            .reserve_exact(earlier.capacity() - self.recent.capacity());
        if since == Since::Earlier {
            for (word, &older) in earlier.iter_mut().zip(&self.earlier) {
                *word |= older;
            }
        }
        self.earlier = earlier;
        self.moved = Vec::new();
    }

    /// Nothing has changed.
    pub fn clear(&mut self) {
        self.recent.fill(0);
        self.earlier = Vec::new();
        self.moved = Vec::new();
    }

    /// Bytes allocated for the recent generation.
    pub fn recent_bytes(&self) -> usize {
        self.recent.capacity() * 8
    }

    /// Bytes allocated.
    pub fn allocated_bytes(&self) -> usize {
        (self.recent.capacity() + self.earlier.capacity() + self.moved.capacity()) * 8
    }
}

fn bit(words: &[u64], row: usize) -> bool {
    words
        .get(row >> 6)
        .is_some_and(|word| word >> (row & 63) & 1 == 1)
}

fn set(words: &mut [u64], row: usize, to: bool) {
    if let Some(word) = words.get_mut(row >> 6) {
        *word = *word & !(1 << (row & 63)) | u64::from(to) << (row & 63);
    }
}

/// The rows that have a bit in either, as far as the first reaches; ascending.
fn either<'a>(one: &'a [u64], other: &'a [u64]) -> impl Iterator<Item = usize> + 'a {
    one.iter().enumerate().flat_map(move |(at, &word)| {
        let mut bits = word | other.get(at).copied().unwrap_or(0);
        std::iter::from_fn(move || {
            let bit = bits.trailing_zeros();
            bits &= bits.wrapping_sub(1);
            (bit < 64).then(|| at * 64 + bit as usize)
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[derive(Debug, Clone)]
    enum Step {
        Add,
        Mark(usize),
        Remove(usize),
        Begin(Since),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => Just(Step::Add),
            4 => (0usize..300).prop_map(Step::Mark),
            2 => (0usize..300).prop_map(Step::Remove),
            1 => prop::bool::ANY.prop_map(|all| Step::Begin(if all { Since::Earlier } else { Since::Recent })),
        ]
    }

    proptest! {
        /// Against sets.
        #[test]
        fn remembers_what_changed(steps in prop::collection::vec(step(), 0..400)) {
            let mut marks = Marks::default();
            let (mut rows, mut most) = (0usize, 1);
            let (mut recent, mut earlier) = (BTreeSet::new(), BTreeSet::new());
            let mut moved = BTreeSet::new();
            for step in steps {
                match step {
                    Step::Add => {
                        rows += 1;
                        most = most.max(rows);
                        marks.cover(rows);
                    }
                    Step::Remove(row) if row < rows => {
                        rows -= 1;
                        marks.remove(row, rows);
                        for marked in [&mut recent, &mut earlier] {
                            marked.remove(&row);
                            if marked.remove(&rows) && row < rows {
                                marked.insert(row);
                            }
                        }
                        moved.remove(&rows);
                        moved.extend((row < rows).then_some(row));
                    }
                    Step::Mark(row) if row < rows => {
                        marks.mark(row);
                        recent.insert(row);
                    }
                    Step::Mark(_) | Step::Remove(_) => {}
                    Step::Begin(since) => {
                        marks.begin(since);
                        if since == Since::Recent {
                            earlier.clear();
                        }
                        earlier.append(&mut recent);
                        moved.clear();
                    }
                }
            }
            prop_assert!(marks.rows(Since::Recent).eq(recent.iter().copied()));
            prop_assert!(marks.touched().eq(recent.union(&moved).copied()));
            prop_assert!(marks.rows(Since::Earlier).eq(recent.union(&earlier).copied()));
            prop_assert!(marks.recent.capacity() * 8 <= Marks::bytes_for(most));
        }
    }
}
