//! Which pushes of each stream a slot has applied: invariant I2, at most once per slot.
//!
//! A plain high-water mark would swallow a rolled-back push whose successor got through, and
//! a batch need not touch every slot, so gaps are normal. Hence a floor, below which the
//! client has settled everything, and a bitmap of the window above it.

use std::collections::BTreeMap;

use crate::error::Refusal;

/// How far a sequence number may be ahead of its stream's floor.
pub const WINDOW: u64 = 128;

/// Who numbers a series of pushes: a task of a pass of a job, or one client on its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamId {
    /// The job, or a random number drawn by a client.
    pub job: u64,
    /// The pass over the data.
    pub pass: u32,
    /// The task within the pass.
    pub task: u32,
}

/// One push: unique within a cluster, the same on every retry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TransactionId {
    /// The stream it belongs to.
    pub stream: StreamId,
    /// Its number in the stream.
    pub sequence: u64,
}

/// What a slot remembers of one stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StreamWindow {
    /// Every sequence below this is settled: applied, or given up by the client for good.
    pub floor: u64,
    /// Bit i: sequence `floor + i` has been applied.
    pub applied: u128,
}

impl StreamWindow {
    /// Whether a sequence needs no applying (any more).
    pub fn is_settled(&self, sequence: u64) -> bool {
        match sequence.checked_sub(self.floor) {
            None => true,
            Some(ahead) => ahead < WINDOW && self.applied >> ahead & 1 == 1,
        }
    }

    /// Raise the floor; what falls below it is settled and forgotten.
    pub fn raise_floor(&mut self, floor: u64) {
        if let Some(by) = floor.checked_sub(self.floor) {
            self.applied = if by < WINDOW { self.applied >> by } else { 0 };
            self.floor = floor;
        }
    }

    fn record(&mut self, sequence: u64) {
        if let Some(ahead) = sequence.checked_sub(self.floor) {
            debug_assert!(ahead < WINDOW);
            self.applied |= 1 << (ahead % WINDOW);
        }
    }
}

/// The streams a slot knows.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StreamMemory {
    windows: BTreeMap<StreamId, StreamWindow>,
}

impl StreamMemory {
    /// The most streams one slot remembers.
    pub const MAX_STREAMS: usize = 65_536;

    /// Whether `id` is settled here; refuses a sequence that could not be remembered.
    pub fn check(&self, id: TransactionId, floor: u64) -> Result<bool, Refusal> {
        if id.sequence < floor || id.sequence - floor >= WINDOW {
            return Err(Refusal::InvalidRequest(format!(
                "sequence {} must lie within {WINDOW} above its floor {floor}: settle older pushes first",
                id.sequence
            )));
        }
        match self.windows.get(&id.stream) {
            Some(window) => Ok(window.is_settled(id.sequence)),
            None if self.windows.len() >= Self::MAX_STREAMS => {
                Err(Refusal::LimitExceeded(format!(
                "{} streams of pushes are open on one slot, the limit: close clients that are done",
                Self::MAX_STREAMS
            )))
            }
            None => Ok(false),
        }
    }

    /// Remember that a push was applied, and what its client has settled.
    pub fn record(&mut self, id: TransactionId, floor: u64) {
        let window = self.windows.entry(id.stream).or_default();
        window.raise_floor(floor);
        window.record(id.sequence);
    }

    /// Forget a stream; true if it was known. Only for streams whose client is gone.
    pub fn forget(&mut self, stream: StreamId) -> bool {
        self.windows.remove(&stream).is_some()
    }

    /// Every stream with its window, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&StreamId, &StreamWindow)> {
        self.windows.iter()
    }

    /// The number of streams.
    pub fn len(&self) -> usize {
        self.windows.len()
    }

    /// Whether no stream is known.
    pub fn is_empty(&self) -> bool {
        self.windows.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    const STREAM: StreamId = StreamId {
        job: 7,
        pass: 0,
        task: 0,
    };

    fn id(sequence: u64) -> TransactionId {
        TransactionId {
            stream: STREAM,
            sequence,
        }
    }

    #[test]
    fn a_push_whose_successor_got_through_is_not_swallowed() {
        let mut memory = StreamMemory::default();
        memory.record(id(5), 4);
        assert_eq!(memory.check(id(4), 4), Ok(false));
        assert_eq!(memory.check(id(5), 4), Ok(true));
    }

    #[test]
    fn a_late_copy_below_the_floor_is_settled() {
        let mut memory = StreamMemory::default();
        memory.record(id(200), 190);
        assert_eq!(memory.check(id(3), 3), Ok(true));
        assert!(memory.check(id(3), 4).is_err());
        assert!(memory.check(id(500), 3).is_err());
    }

    proptest! {
        /// Against a set that remembers everything: no sequence is ever applied twice, and
        /// none that the client still cares about is reported as applied when it is not.
        #[test]
        fn agrees_with_a_perfect_memory(steps in prop::collection::vec((0u64..40, 0u64..3), 1..400)) {
            let mut memory = StreamMemory::default();
            let mut perfect = BTreeSet::new();
            let mut floor = 0u64;
            for (ahead, advance) in steps {
                floor += advance;
                let push = id(floor + ahead);
                let settled = memory.check(push, floor).unwrap();
                prop_assert_eq!(settled, perfect.contains(&push.sequence));
                if !settled {
                    memory.record(push, floor);
                    perfect.insert(push.sequence);
                }
            }
        }
    }
}
