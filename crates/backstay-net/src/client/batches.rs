//! The numbers of a task's pushes, their floor, and how many batches are acknowledged. Pure: the
//! caller sends, waits and locks.
//!
//! A push of batch `b` to the table with ordinal `t` of `K` has the number `b*K + t`, whichever
//! worker sends it, so that a replay gives each push the number it had before. Numbers may be taken
//! out of order within a batch; hence the floor stays at the start of the batch that has begun, and
//! at the lowest push that is under way or has failed: a slot skips what lies below a floor.

use std::collections::BTreeSet;

/// The most tables of a task: two whole batches fit into what a slot remembers.
pub const MAX_TABLES: u32 = 64;
/// The most batches of a task: their numbers stay far from where arithmetic ends.
const MAX_BATCHES: u64 = 1 << 48;

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Batches {
    tables: u64,
    /// The batch that pushes belong to now; none between batches.
    begun: Option<u64>,
    /// No more pushes of the batches below this will come.
    ended: u64,
    /// The tables that the batch has pushed to, a bit each.
    taken: u64,
    in_flight: BTreeSet<u64>,
    /// The lowest number that failed; the floor never passes it.
    failed: Option<u64>,
}

impl Batches {
    /// Batches below `first_batch` are acknowledged everywhere. `tables` is 1 to [`MAX_TABLES`].
    pub(crate) fn new(tables: u32, first_batch: u64) -> Self {
        debug_assert!((1..=MAX_TABLES).contains(&tables));
        Self {
            tables: u64::from(tables),
            begun: None,
            ended: first_batch,
            taken: 0,
            in_flight: BTreeSet::new(),
            failed: None,
        }
    }

    /// End the batch before, begin this one.
    pub(crate) fn begin(&mut self, batch: u64) -> Result<(), String> {
        let lowest = self.begun.map_or(self.ended, |begun| begun + 1);
        if batch < lowest {
            return Err(format!(
                "batch {batch} cannot begin: the next one is {lowest}, batches ascend"
            ));
        }
        if batch >= MAX_BATCHES {
            return Err(format!(
                "batch {batch} cannot begin: a task has less than {MAX_BATCHES}"
            ));
        }
        (self.begun, self.ended, self.taken) = (Some(batch), batch, 0);
        Ok(())
    }

    /// The batch that has begun is whole.
    pub(crate) fn end(&mut self) {
        if let Some(batch) = self.begun.take() {
            self.ended = batch + 1;
        }
    }

    /// The number of the batch's push to a table.
    pub(crate) fn take(&mut self, ordinal: u32) -> Result<u64, String> {
        if u64::from(ordinal) >= self.tables {
            return Err(format!(
                "the task has {} tables, not {ordinal}",
                self.tables
            ));
        }
        let batch = self.begun.ok_or(
            "no batch has begun, so this push has no number: call begin_batch before its pushes",
        )?;
        if self.taken >> ordinal & 1 == 1 {
            return Err(format!(
                "batch {batch} has pushed to this table already: a batch of a task may push to a \
                 table once; add the gradients up, or call begin_batch for the next batch"
            ));
        }
        self.taken |= 1 << ordinal;
        let sequence = batch * self.tables + u64::from(ordinal);
        self.in_flight.insert(sequence);
        Ok(sequence)
    }

    /// A push will not be tried any more.
    pub(crate) fn push_ended(&mut self, sequence: u64, applied: bool) {
        self.in_flight.remove(&sequence);
        if !applied {
            self.fail_at(sequence);
        }
    }

    /// A push of the current batch failed before it had a number.
    pub(crate) fn fail(&mut self) {
        self.fail_at(self.begun.unwrap_or(self.ended) * self.tables);
    }

    fn fail_at(&mut self, sequence: u64) {
        self.failed = Some(self.failed.map_or(sequence, |known| known.min(sequence)));
    }

    /// Everything below this is applied wherever it belongs.
    pub(crate) fn floor(&self) -> u64 {
        let whole = self.ended * self.tables;
        let oldest = self.in_flight.first().copied();
        [oldest, self.failed]
            .into_iter()
            .flatten()
            .fold(whole, u64::min)
    }

    /// How many batches, counted from 0, have ended and are applied wherever they belong.
    pub(crate) fn acknowledged(&self) -> u64 {
        self.floor() / self.tables
    }

    /// The highest number that the current batch may take.
    pub(crate) fn highest(&self) -> u64 {
        (self.begun.unwrap_or(self.ended) + 1) * self.tables - 1
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use backstay_core::stream::WINDOW;
    use proptest::prelude::*;

    #[derive(Debug, Clone)]
    enum Step {
        Begin(u64),
        End,
        Take(u32),
        /// The n-th oldest open push ends.
        EndPush(usize, bool),
        Fail,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            3 => (0..3u64).prop_map(Step::Begin),
            1 => Just(Step::End),
            6 => (0..MAX_TABLES).prop_map(Step::Take),
            6 => (0..40usize, prop::bool::weighted(0.97)).prop_map(|(n, ok)| Step::EndPush(n, ok)),
            1 => Just(Step::Fail),
        ]
    }

    /// What a push is known to be, in a model that keeps everything.
    #[derive(PartialEq)]
    enum Fate {
        Open,
        Applied,
        Failed,
    }

    proptest! {
        /// The floor never passes what is not applied, nor the batch that has begun; a batch
        /// counts as acknowledged exactly when it and all before it have ended and are applied.
        #[test]
        fn the_floor_never_passes_what_is_not_applied(
            tables in 1..=MAX_TABLES,
            first in 0..5u64,
            steps in prop::collection::vec(step(), 1..200),
        ) {
            let mut batches = Batches::new(tables, first);
            let mut pushes: BTreeMap<u64, Fate> = BTreeMap::new();
            // The batch under way, and the first that is not whole because of a refused push.
            let (mut current, mut ended, mut broken) = (None::<u64>, first, None::<u64>);
            for step in steps {
                match step {
                    Step::Begin(ahead) => {
                        let batch = current.map_or(ended, |batch| batch + 1) + ahead;
                        batches.begin(batch).unwrap();
                        prop_assert!(batches.begin(batch).is_err());
                        (current, ended) = (Some(batch), batch);
                    }
                    Step::End => {
                        batches.end();
                        if let Some(batch) = current.take() {
                            ended = batch + 1;
                        }
                    }
                    Step::Take(ordinal) => {
                        let number = current
                            .filter(|_| ordinal < tables)
                            .map(|batch| batch * u64::from(tables) + u64::from(ordinal));
                        let fresh = number.filter(|number| !pushes.contains_key(number));
                        prop_assert_eq!(batches.take(ordinal).ok(), fresh);
                        if let Some(number) = fresh {
                            pushes.insert(number, Fate::Open);
                        }
                    }
                    Step::EndPush(nth, applied) => {
                        let mut open = pushes.iter().filter(|(_, fate)| **fate == Fate::Open);
                        if let Some((&number, _)) = open.nth(nth) {
                            batches.push_ended(number, applied);
                            let fate = if applied { Fate::Applied } else { Fate::Failed };
                            pushes.insert(number, fate);
                        }
                    }
                    Step::Fail => {
                        batches.fail();
                        let at = current.unwrap_or(ended);
                        broken = Some(broken.map_or(at, |known| known.min(at)));
                    }
                }
                let missing = pushes.iter().find(|(_, fate)| **fate != Fate::Applied);
                let limits = [
                    Some(ended * u64::from(tables)),
                    missing.map(|(&number, _)| number),
                    broken.map(|batch| batch * u64::from(tables)),
                ];
                let floor = limits.into_iter().flatten().min().unwrap();
                prop_assert_eq!(batches.floor(), floor);
                prop_assert_eq!(batches.acknowledged(), floor / u64::from(tables));
                // Two whole batches fit into the window of a slot.
                if floor + u64::from(tables) >= ended * u64::from(tables) {
                    prop_assert!(batches.highest() - floor < WINDOW);
                }
            }
        }
    }
}
