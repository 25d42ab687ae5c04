//! The streams that were closed in each of a range of slots, in the order of closing.
//!
//! A pass of a job closes a stream for each of its tasks, and nearly always in the same slots.
//! So 64 neighbouring tasks share an entry. Tasks that were closed in the same slots are one bit
//! each in it. A stream has one turn in the order, with a bit for each slot that closed it
//! then. So a task takes some thirty bytes, not some hundreds.
//!
//! A slot that has too many forgets its oldest. That depends only on which streams the slot closed,
//! and in which order. So replicas forget the same, and a copy of the slot has the order too.

use std::collections::{BTreeMap, VecDeque};

use crate::stream::StreamId;

const TASKS: u32 = 64;

/// Which tasks of a chunk were closed in exactly these slots; bits in both.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Group {
    slots: Box<[u64]>,
    tasks: u64,
}

/// See the module's documentation.
#[derive(Debug, Clone)]
pub(crate) struct ClosedStreams {
    words: usize,
    /// By job, pass, and task divided by [`TASKS`]; a task is in one group at most, and no group
    /// is without tasks or slots.
    chunks: BTreeMap<(u64, u32, u32), Vec<Group>>,
    /// By kind. Each has its limit, so many ends of one kind push none of another out.
    turns: [ClosingOrder; KINDS],
}

/// Streams of tasks, clients' own, and those that are closed in place of a task's that has expired.
const KINDS: usize = 3;

fn kind(stream: StreamId) -> usize {
    match stream.expired() {
        Some(_) => 2,
        None => usize::from(stream.is_own()),
    }
}

/// The order in which streams of one kind were closed.
#[derive(Debug, Clone)]
struct ClosingOrder {
    words: usize,
    /// How many are remembered of each slot.
    limit: usize,
    streams: VecDeque<StreamId>,
    /// The slots of each turn, `words` of them, a bit each.
    slots: VecDeque<u64>,
    /// How many turns have left the front: the first one now has this number.
    gone: u64,
    of_slot: Vec<OfSlot>,
}

/// What a slot has of the turns.
#[derive(Debug, Clone, Copy, Default)]
struct OfSlot {
    /// How many.
    count: usize,
    /// Its first one has this number, or a higher one.
    first: u64,
}

fn bit(slots: &[u64], slot: usize) -> bool {
    slots[slot / 64] >> (slot % 64) & 1 == 1
}

/// Put tasks into the group of exactly these slots.
fn join(groups: &mut Vec<Group>, slots: Box<[u64]>, tasks: u64) {
    match groups.iter_mut().find(|group| group.slots == slots) {
        Some(group) => group.tasks |= tasks,
        None => groups.push(Group { slots, tasks }),
    }
}

impl ClosingOrder {
    fn new(slots: usize, limit: usize) -> Self {
        Self {
            words: slots.div_ceil(64),
            limit,
            streams: VecDeque::new(),
            slots: VecDeque::new(),
            gone: 0,
            of_slot: vec![OfSlot::default(); slots],
        }
    }

    fn has(&self, turn: usize, slot: usize) -> bool {
        self.slots[turn * self.words + slot / 64] >> (slot % 64) & 1 == 1
    }

    /// A stream that is not known there is closed in a slot, as the newest.
    fn push(&mut self, stream: StreamId, slot: usize) {
        if self.streams.back() != Some(&stream) {
            self.streams.push_back(stream);
            self.slots.extend(std::iter::repeat_n(0, self.words));
        }
        let last = self.slots.len() - self.words;
        self.slots[last + slot / 64] |= 1 << (slot % 64);
        self.of_slot[slot].count += 1;
    }

    /// Take the oldest of a slot out, if it has more than are remembered.
    fn pop_surplus(&mut self, slot: usize) -> Option<StreamId> {
        let known = self.of_slot[slot];
        if known.count <= self.limit {
            return None;
        }
        let from = known.first.saturating_sub(self.gone) as usize;
        let turn = (from..self.streams.len()).find(|&turn| self.has(turn, slot))?;
        self.slots[turn * self.words + slot / 64] &= !(1 << (slot % 64));
        self.of_slot[slot] = OfSlot {
            count: known.count - 1,
            first: self.gone + turn as u64 + 1,
        };
        let stream = self.streams[turn];
        while !self.streams.is_empty() && self.slots.range(..self.words).all(|&word| word == 0) {
            self.streams.pop_front();
            self.slots.drain(..self.words);
            self.gone += 1;
        }
        Some(stream)
    }

    fn of_slot(&self, slot: usize) -> impl Iterator<Item = StreamId> + '_ {
        let turns = (0..self.streams.len()).filter(move |&turn| self.has(turn, slot));
        turns.map(|turn| self.streams[turn])
    }

    /// Replace the order of one slot, of which each stream is named once.
    ///
    /// It shares the turns of other slots where that keeps both orders, because neighbouring slots
    /// nearly always have the same order.
    fn replace(&mut self, slot: usize, streams: &[StreamId]) {
        let (words, old) = (self.words, std::mem::take(&mut self.streams));
        let mut bits = std::mem::take(&mut self.slots);
        let bits = bits.make_contiguous();
        let mut turns: BTreeMap<StreamId, VecDeque<usize>> = BTreeMap::new();
        for (turn, &stream) in old.iter().enumerate() {
            bits[turn * words + slot / 64] &= !(1 << (slot % 64));
            turns.entry(stream).or_default().push_back(turn);
        }
        let mut from = 0;
        let keep = |these: &mut Self, turns: std::ops::Range<usize>| {
            for turn in turns {
                let slots = &bits[turn * words..(turn + 1) * words];
                if slots.iter().any(|&word| word != 0) {
                    these.streams.push_back(old[turn]);
                    these.slots.extend(slots);
                }
            }
        };
        self.of_slot[slot].count = 0;
        for &stream in streams {
            let turns = turns.entry(stream).or_default();
            while turns.front().is_some_and(|&turn| turn < from) {
                turns.pop_front();
            }
            if let Some(&turn) = turns.front() {
                keep(self, from..turn + 1);
                from = turn + 1;
            }
            self.push(stream, slot);
        }
        keep(self, from..old.len());
        for known in &mut self.of_slot {
            known.first = self.gone;
        }
    }
}

impl ClosedStreams {
    /// None is closed in any of so many slots. Of each slot so many streams of each kind are
    /// remembered.
    pub(crate) fn new(slots: usize, limits: [usize; KINDS]) -> Self {
        Self {
            words: slots.div_ceil(64),
            chunks: BTreeMap::new(),
            turns: limits.map(|limit| ClosingOrder::new(slots, limit)),
        }
    }

    /// The slots in which a stream was closed, a bit each; none if it was closed in none.
    pub(crate) fn slots_of(&self, stream: StreamId) -> Option<&[u64]> {
        let (chunk, task) = place(stream);
        let mut groups = self.chunks.get(&chunk)?.iter();
        let group = groups.find(|group| group.tasks >> task & 1 == 1)?;
        Some(&group.slots)
    }

    fn is_closed(&self, stream: StreamId, slot: usize) -> bool {
        self.slots_of(stream).is_some_and(|slots| bit(slots, slot))
    }

    /// Close a stream in one slot. A second time changes nothing.
    pub(crate) fn close(&mut self, stream: StreamId, slot: usize) {
        if self.is_closed(stream, slot) {
            return;
        }
        self.mark(stream, slot);
        let turns = &mut self.turns[kind(stream)];
        turns.push(stream, slot);
        if let Some(oldest) = turns.pop_surplus(slot) {
            self.unmark(oldest, slot);
        }
    }

    fn mark(&mut self, stream: StreamId, slot: usize) {
        let mut slots = self.take_out(stream);
        slots.resize(self.words, 0);
        slots[slot / 64] |= 1 << (slot % 64);
        self.put_in(stream, slots);
    }

    fn unmark(&mut self, stream: StreamId, slot: usize) {
        let mut slots = self.take_out(stream);
        if let Some(word) = slots.get_mut(slot / 64) {
            *word &= !(1 << (slot % 64));
        }
        if slots.iter().any(|&word| word != 0) {
            self.put_in(stream, slots);
        }
    }

    fn put_in(&mut self, stream: StreamId, slots: Vec<u64>) {
        let (chunk, task) = place(stream);
        let groups = self.chunks.entry(chunk).or_default();
        join(groups, slots.into_boxed_slice(), 1 << task);
    }

    /// Take a stream out of its group; in which slots it was closed.
    fn take_out(&mut self, stream: StreamId) -> Vec<u64> {
        let (chunk, task) = place(stream);
        let Some(groups) = self.chunks.get_mut(&chunk) else {
            return Vec::new();
        };
        let Some(at) = groups.iter().position(|group| group.tasks >> task & 1 == 1) else {
            return Vec::new();
        };
        groups[at].tasks &= !(1 << task);
        if groups[at].tasks != 0 {
            return groups[at].slots.to_vec();
        }
        let group = groups.swap_remove(at);
        if groups.is_empty() {
            self.chunks.remove(&chunk);
        }
        group.slots.into_vec()
    }

    /// Take over what another replica of one slot remembers, oldest first.
    pub(crate) fn replace(&mut self, slot: usize, streams: &[StreamId]) {
        self.chunks.retain(|_, groups| {
            if groups.iter().any(|group| bit(&group.slots, slot)) {
                for mut group in std::mem::take(groups) {
                    group.slots[slot / 64] &= !(1 << (slot % 64));
                    if group.slots.iter().any(|&word| word != 0) {
                        join(groups, group.slots, group.tasks);
                    }
                }
            }
            !groups.is_empty()
        });
        for of in 0..KINDS {
            let mut order = Vec::new();
            for &stream in streams.iter().filter(|&&stream| kind(stream) == of) {
                if !self.is_closed(stream, slot) {
                    self.mark(stream, slot);
                    order.push(stream);
                }
            }
            self.turns[of].replace(slot, &order);
            while let Some(oldest) = self.turns[of].pop_surplus(slot) {
                self.unmark(oldest, slot);
            }
        }
    }

    /// The streams that were closed in one slot: kind after kind, each in the order of closing.
    pub(crate) fn of_slot(&self, slot: usize) -> impl Iterator<Item = StreamId> + '_ {
        self.turns.iter().flat_map(move |turns| turns.of_slot(slot))
    }

    /// Bytes that this takes, about.
    pub(crate) fn allocated_bytes(&self) -> usize {
        let turns = self.turns.iter().map(|turns| {
            turns.streams.capacity() * size_of::<StreamId>() + turns.slots.capacity() * 8
        });
        turns.sum::<usize>() + self.chunks.len() * (64 + self.words * 8)
    }
}

/// The chunk of a stream, and its bit there.
fn place(stream: StreamId) -> ((u64, u32, u32), u32) {
    let chunk = (stream.job, stream.pass, stream.task / TASKS);
    (chunk, stream.task % TASKS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::OWN_PASS;
    use proptest::prelude::*;

    const SLOTS: usize = 70;
    /// So few that nearly every close makes a slot forget one.
    const LIMITS: [usize; KINDS] = [5, 3, 4];

    #[derive(Debug, Clone)]
    enum Step {
        Close(StreamId, usize),
        CloseAll(StreamId),
        Clear(usize),
        /// A newcomer gets the first slot's memory as the second one's.
        Copy(usize, usize),
    }

    fn stream() -> impl Strategy<Value = StreamId> {
        // Near the ends of chunks and of the numbers, so that a slip by one is found.
        let task = prop_oneof![0..4u32, 62..67u32, (u32::MAX - 2)..=u32::MAX];
        let pass = prop_oneof![0..2u32, Just(OWN_PASS)];
        (0..2u64, pass, task, any::<bool>()).prop_map(|(job, pass, task, expires)| {
            let stream = StreamId { job, pass, task };
            if stream.is_of_task() && expires {
                stream.expiry()
            } else {
                stream
            }
        })
    }

    fn step() -> impl Strategy<Value = Step> {
        let slot = || prop_oneof![0..3usize, 62..SLOTS];
        prop_oneof![
            6 => (stream(), slot()).prop_map(|(stream, slot)| Step::Close(stream, slot)),
            3 => stream().prop_map(Step::CloseAll),
            1 => slot().prop_map(Step::Clear),
            2 => (slot(), slot()).prop_map(|(from, to)| Step::Copy(from, to)),
        ]
    }

    /// What one slot should remember: a list for each kind.
    type Lists = [VecDeque<StreamId>; KINDS];

    fn close(lists: &mut Lists, stream: StreamId) {
        let of = kind(stream);
        if !lists[of].contains(&stream) {
            lists[of].push_back(stream);
            if lists[of].len() > LIMITS[of] {
                lists[of].pop_front();
            }
        }
    }

    proptest! {
        /// The same as plain lists, one for each slot and kind, also after slots were copied.
        #[test]
        fn agrees_with_lists(steps in prop::collection::vec(step(), 1..120)) {
            let mut closed = ClosedStreams::new(SLOTS, LIMITS);
            let mut model: Vec<Lists> = vec![Lists::default(); SLOTS];
            let mut all = Vec::new();
            for step in steps {
                match step {
                    Step::Close(stream, slot) => {
                        closed.close(stream, slot);
                        close(&mut model[slot], stream);
                        all.push(stream);
                    }
                    Step::CloseAll(stream) => {
                        for (slot, lists) in model.iter_mut().enumerate() {
                            closed.close(stream, slot);
                            close(lists, stream);
                        }
                        all.push(stream);
                    }
                    Step::Clear(slot) => {
                        closed.replace(slot, &[]);
                        model[slot] = Lists::default();
                    }
                    Step::Copy(from, to) => {
                        let streams: Vec<StreamId> = closed.of_slot(from).collect();
                        closed.replace(to, &streams);
                        model[to] = model[from].clone();
                    }
                }
                for (slot, lists) in model.iter().enumerate() {
                    prop_assert!(closed.of_slot(slot).eq(lists.iter().flatten().copied()));
                    for &stream in &all {
                        let known = lists.iter().any(|list| list.contains(&stream));
                        prop_assert_eq!(closed.is_closed(stream, slot), known);
                    }
                }
                let groups = closed.chunks.values().flatten();
                prop_assert!(groups.clone().all(|group| group.tasks != 0));
                prop_assert!(groups.clone().all(|group| group.slots.iter().any(|&word| word != 0)));
                for turns in &closed.turns {
                    prop_assert_eq!(turns.slots.len(), turns.streams.len() * turns.words);
                }
            }
        }
    }

    fn task(task: u32) -> StreamId {
        StreamId {
            job: 1,
            pass: 1,
            task,
        }
    }

    #[test]
    fn the_tasks_of_a_pass_share_their_entries_and_slots_their_turns() {
        let mut closed = ClosedStreams::new(16, [8_192, 8, 8]);
        for n in 0..6_400u32 {
            // Not in the order of their numbers.
            for slot in 0..16 {
                closed.close(task(n * 7 % 6_400), slot);
            }
        }
        assert_eq!(closed.chunks.len(), 100);
        assert!(closed.chunks.values().all(|groups| groups.len() == 1));
        assert_eq!(closed.turns[0].streams.len(), 6_400);
        // Copied slot by slot, they share them again.
        let mut copy = ClosedStreams::new(16, [8_192, 8, 8]);
        for slot in 0..16 {
            copy.replace(slot, &closed.of_slot(slot).collect::<Vec<_>>());
        }
        assert_eq!(copy.turns[0].streams.len(), 6_400);
    }

    #[test]
    fn tasks_that_end_push_out_none_that_expired() {
        let mut closed = ClosedStreams::new(1, [8, 8, 8]);
        let expired = task(0).expiry();
        closed.close(expired, 0);
        for n in 1..100 {
            closed.close(task(n), 0);
        }
        assert!(closed.is_closed(expired, 0));
        let mut copy = ClosedStreams::new(1, [8, 8, 8]);
        copy.replace(0, &closed.of_slot(0).collect::<Vec<_>>());
        assert!(copy.of_slot(0).eq(closed.of_slot(0)));
    }

    #[test]
    fn clients_that_end_push_out_no_task() {
        let mut closed = ClosedStreams::new(1, [8, 8, 8]);
        closed.close(task(0), 0);
        for job in 0..100 {
            let own = StreamId {
                job,
                pass: OWN_PASS,
                task: 0,
            };
            closed.close(own, 0);
        }
        assert!(closed.is_closed(task(0), 0));
        assert_eq!(closed.of_slot(0).count(), 9);
    }
}
