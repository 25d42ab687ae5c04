//! Which pushes of each stream the slots have applied: invariant I2, at most once per slot.

use std::collections::BTreeMap;

use crate::closed::ClosedStreams;
use crate::error::Refusal;
use crate::stream::{StreamId, StreamWindow, TransactionId, WINDOW};

/// The streams that a range of slots knows.
///
/// A push touches many slots with one stream, so windows lie side by side by stream: a slot
/// costs a push one line of memory here, not a search in a map of its own.
#[derive(Debug, Clone)]
pub struct StreamMemory {
    slots: usize,
    windows: BTreeMap<StreamId, Box<[StreamWindow]>>,
    /// Streams whose client has nothing open, by the slots that were told: what still
    /// comes is a late copy. Much smaller than windows.
    closed: ClosedStreams,
}

impl StreamMemory {
    /// The most streams that are remembered.
    pub const MAX_STREAMS: usize = 65_536;
    /// The most closed streams of tasks that a slot remembers. Each slot of a checkpoint lists
    /// them (24 bytes each), hence no more. docs/internals/exactly-once.md says what happens
    /// when more are closed than a checkpoint can bear.
    pub const MAX_CLOSED: usize = 8_192;
    /// The same of clients' own streams: late copies of their pushes come within seconds.
    pub const MAX_CLOSED_OWN: usize = 1_024;
    /// The same of streams of tasks that have expired.
    pub const MAX_EXPIRED: usize = 8_192;

    /// An empty memory of so many slots.
    pub fn new(slots: usize) -> Self {
        Self {
            slots,
            windows: BTreeMap::new(),
            closed: ClosedStreams::new(
                slots,
                [Self::MAX_CLOSED, Self::MAX_CLOSED_OWN, Self::MAX_EXPIRED],
            ),
        }
    }

    /// Refuse a push that could not be remembered.
    pub fn check(&self, id: TransactionId, floor: u64) -> Result<(), Refusal> {
        if id.sequence < floor || id.sequence - floor >= WINDOW {
            return Err(Refusal::InvalidRequest(format!(
                "sequence {} must lie within {WINDOW} above its floor {floor}: wait for older pushes first",
                id.sequence
            )));
        }
        let known =
            self.windows.contains_key(&id.stream) || self.closed.slots_of(id.stream).is_some();
        if known || self.windows.len() < Self::MAX_STREAMS {
            return Ok(());
        }
        Err(Refusal::LimitExceeded(format!(
            "{} streams of pushes are open, the limit: close clients that are done",
            Self::MAX_STREAMS
        )))
    }

    /// What is known of one stream, slot by slot.
    pub fn stream(&self, stream: StreamId) -> OneStream<'_> {
        OneStream {
            windows: self.windows.get(&stream).map(|windows| &**windows),
            closed: self.closed.slots_of(stream),
        }
    }

    /// The windows of a stream, one for each slot, to record pushes in.
    pub fn windows_mut(&mut self, stream: StreamId) -> &mut [StreamWindow] {
        let slots = self.slots;
        let fresh = || vec![StreamWindow::default(); slots].into_boxed_slice();
        self.windows.entry(stream).or_insert_with(fresh)
    }

    /// Close a stream in one slot. From now on only late copies of its pushes can come, and the
    /// slot skips them. If the slot forgot the stream at once, it would apply them again, so it
    /// forgets its oldest closed streams when it has too many.
    pub fn close(&mut self, stream: StreamId, slot: usize) {
        self.closed.close(stream, slot);
        self.forget(stream, slot);
    }

    fn forget(&mut self, stream: StreamId, slot: usize) {
        if let Some(windows) = self.windows.get_mut(&stream) {
            windows[slot] = StreamWindow::default();
            if !windows.iter().any(StreamWindow::is_known) {
                self.windows.remove(&stream);
            }
        }
    }

    /// End a stream of a task in one slot, of which nothing was heard for long. From now on its
    /// pushes are refused there: some may have been applied, and none is applied twice.
    pub fn expire(&mut self, stream: StreamId, slot: usize) {
        self.closed.close(stream.expiry(), slot);
        self.forget(stream, slot);
    }

    /// Replace what is known of one slot by another replica's memory: the streams that were
    /// closed, in the order of closing, and the windows; a stream may have both.
    pub fn replace(
        &mut self,
        slot: usize,
        closed: &[StreamId],
        windows: &[(StreamId, StreamWindow)],
    ) {
        for windows in self.windows.values_mut() {
            windows[slot] = StreamWindow::default();
        }
        self.windows
            .retain(|_, windows| windows.iter().any(StreamWindow::is_known));
        self.closed.replace(slot, closed);
        for &(stream, window) in windows {
            self.windows_mut(stream)[slot] = window;
        }
    }

    /// The open streams of clients' own, and of tasks.
    pub fn open(&self) -> impl Iterator<Item = StreamId> + '_ {
        let ends = |stream: &StreamId| stream.is_own() || stream.is_of_task();
        self.windows.keys().copied().filter(ends)
    }

    /// Bytes that this takes, about.
    pub fn allocated_bytes(&self) -> usize {
        // With its share of the map.
        let one = self.slots * size_of::<StreamWindow>() + 64;
        self.windows.len() * one + self.closed.allocated_bytes()
    }

    /// The open streams that one slot knows, in order.
    pub fn of_slot(&self, slot: usize) -> impl Iterator<Item = (StreamId, StreamWindow)> + '_ {
        let pairs = self
            .windows
            .iter()
            .map(move |(id, slots)| (*id, slots[slot]));
        pairs.filter(|(_, window)| window.is_known())
    }

    /// The streams that were closed in one slot: streams of tasks, then clients' own, each kind in
    /// the order of closing.
    pub fn closed_in(&self, slot: usize) -> impl Iterator<Item = StreamId> + '_ {
        self.closed.of_slot(slot)
    }
}

/// What the slots remember of one stream.
#[derive(Debug, Clone, Copy)]
pub struct OneStream<'a> {
    windows: Option<&'a [StreamWindow]>,
    closed: Option<&'a [u64]>,
}

impl OneStream<'_> {
    /// Whether a sequence needs no applying (any more) in a slot.
    pub fn skips(&self, slot: usize, sequence: u64) -> bool {
        self.is_closed(slot)
            || self
                .windows
                .is_some_and(|windows| windows[slot].skips(sequence))
    }

    /// Whether a slot has applied something of it and it was not closed since.
    pub fn is_open(&self, slot: usize) -> bool {
        self.windows.is_some_and(|windows| windows[slot].is_known())
    }

    /// Whether the stream was closed in a slot.
    pub fn is_closed(&self, slot: usize) -> bool {
        self.closed
            .is_some_and(|bits| bits[slot / 64] >> (slot % 64) & 1 == 1)
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
        let mut window = StreamWindow::default();
        window.record(5, 4);
        assert!(!window.skips(4));
        assert!(window.skips(5));
    }

    #[test]
    fn a_late_copy_below_the_floor_is_skipped() {
        let mut memory = StreamMemory::new(2);
        memory.windows_mut(STREAM)[1].record(200, 190);
        assert!(memory.stream(STREAM).skips(1, 3));
        assert!(!memory.stream(STREAM).skips(0, 3));
        assert!(memory.check(id(3), 3).is_ok());
        assert!(memory.check(id(3), 4).is_err());
        assert!(memory.check(id(500), 3).is_err());
    }

    #[test]
    fn a_slot_lists_the_streams_it_has_met() {
        let mut memory = StreamMemory::new(2);
        memory.windows_mut(STREAM)[1].record(0, 0);
        assert_eq!(memory.of_slot(0).count(), 0);
        assert_eq!(memory.of_slot(1).count(), 1);
    }

    #[test]
    fn closing_is_a_matter_of_each_slot() {
        let mut memory = StreamMemory::new(70);
        memory.windows_mut(STREAM)[1].record(0, 0);
        memory.windows_mut(STREAM)[69].record(0, 0);
        memory.close(STREAM, 69);
        assert!(memory.stream(STREAM).skips(69, 5));
        assert!(!memory.stream(STREAM).skips(1, 5));
        assert_eq!(memory.closed_in(69).count(), 1);
        memory.replace(69, &[], &[]);
        assert!(!memory.stream(STREAM).skips(69, 0));
        assert!(memory.stream(STREAM).skips(1, 0));
    }

    proptest! {
        /// Against a set that remembers everything: no sequence is ever applied twice, and
        /// none that the client still cares about is reported as applied when it is not.
        #[test]
        fn agrees_with_a_perfect_memory(steps in prop::collection::vec((0u64..40, 0u64..3), 1..400)) {
            let mut window = StreamWindow::default();
            let mut perfect = BTreeSet::new();
            let mut floor = 0u64;
            for (ahead, advance) in steps {
                floor += advance;
                let push = floor + ahead;
                let skips = window.skips(push);
                prop_assert_eq!(skips, perfect.contains(&push));
                if !skips {
                    window.record(push, floor);
                    perfect.insert(push);
                }
            }
        }
    }
}
