//! The streams that were closed in each of a range of slots.
//!
//! A pass of a job closes a stream for each of its tasks, and nearly always in the same slots.
//! So 64 neighbouring tasks share an entry, in which those that were closed in the same slots are
//! one bit each: some two bytes a task, not a hundred.

use std::collections::BTreeMap;

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

impl ClosedStreams {
    /// None is closed in any of so many slots.
    pub(crate) fn new(slots: usize) -> Self {
        Self {
            words: slots.div_ceil(64),
            chunks: BTreeMap::new(),
        }
    }

    /// The slots in which a stream was closed, a bit each; none if it was closed in none.
    pub(crate) fn slots_of(&self, stream: StreamId) -> Option<&[u64]> {
        let (chunk, task) = place(stream);
        let mut groups = self.chunks.get(&chunk)?.iter();
        let group = groups.find(|group| group.tasks >> task & 1 == 1)?;
        Some(&group.slots)
    }

    /// Close a stream in one slot.
    pub(crate) fn close(&mut self, stream: StreamId, slot: usize) {
        let mut slots = self.forget(stream);
        slots.resize(self.words, 0);
        slots[slot / 64] |= 1 << (slot % 64);
        let (chunk, task) = place(stream);
        let groups = self.chunks.entry(chunk).or_default();
        join(groups, slots.into_boxed_slice(), 1 << task);
    }

    /// Forget that a stream was closed; in which slots it was.
    pub(crate) fn forget(&mut self, stream: StreamId) -> Vec<u64> {
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

    /// Forget everything about one slot.
    pub(crate) fn clear(&mut self, slot: usize) {
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
    }

    /// The streams that were closed in one slot, in order.
    pub(crate) fn of_slot(&self, slot: usize) -> impl Iterator<Item = StreamId> + '_ {
        self.chunks
            .iter()
            .flat_map(move |(&(job, pass, chunk), groups)| {
                let told = groups.iter().filter(|group| bit(&group.slots, slot));
                let tasks = told.fold(0, |tasks, group| tasks | group.tasks);
                let first = chunk * TASKS;
                let closed = (0..TASKS).filter(move |task| tasks >> task & 1 == 1);
                closed.map(move |task| StreamId {
                    job,
                    pass,
                    task: first + task,
                })
            })
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
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    const SLOTS: usize = 70;

    #[derive(Debug, Clone)]
    enum Step {
        Close(StreamId, usize),
        CloseAll(StreamId),
        Forget(StreamId),
        Clear(usize),
    }

    fn stream() -> impl Strategy<Value = StreamId> {
        // Near the ends of chunks and of the numbers, so that a slip by one is found.
        let task = prop_oneof![0..4u32, 62..67u32, (u32::MAX - 2)..=u32::MAX];
        (0..2u64, 0..2u32, task).prop_map(|(job, pass, task)| StreamId { job, pass, task })
    }

    fn step() -> impl Strategy<Value = Step> {
        let slot = || prop_oneof![0..3usize, 62..SLOTS];
        prop_oneof![
            6 => (stream(), slot()).prop_map(|(stream, slot)| Step::Close(stream, slot)),
            3 => stream().prop_map(Step::CloseAll),
            2 => stream().prop_map(Step::Forget),
            1 => slot().prop_map(Step::Clear),
        ]
    }

    proptest! {
        /// The same as a set of (slot, stream), in the same order.
        #[test]
        fn agrees_with_a_set(steps in prop::collection::vec(step(), 1..80)) {
            let mut closed = ClosedStreams::new(SLOTS);
            let mut set: BTreeSet<(usize, StreamId)> = BTreeSet::new();
            for step in steps {
                match step {
                    Step::Close(stream, slot) => {
                        closed.close(stream, slot);
                        set.insert((slot, stream));
                    }
                    Step::CloseAll(stream) => {
                        for slot in 0..SLOTS {
                            closed.close(stream, slot);
                            set.insert((slot, stream));
                        }
                    }
                    Step::Forget(stream) => {
                        closed.forget(stream);
                        set.retain(|&(_, known)| known != stream);
                    }
                    Step::Clear(slot) => {
                        closed.clear(slot);
                        set.retain(|&(known, _)| known != slot);
                    }
                }
                let streams: BTreeSet<StreamId> = set.iter().map(|&(_, stream)| stream).collect();
                for slot in 0..SLOTS {
                    let here = set.iter().filter(|(known, _)| *known == slot);
                    prop_assert!(closed.of_slot(slot).eq(here.map(|&(_, stream)| stream)));
                    for &stream in &streams {
                        let is_closed = closed.slots_of(stream).is_some_and(|slots| bit(slots, slot));
                        prop_assert_eq!(is_closed, set.contains(&(slot, stream)));
                    }
                }
                let groups = closed.chunks.values().flatten();
                prop_assert!(groups.clone().all(|group| group.tasks != 0));
                prop_assert_eq!(groups.map(|group| group.tasks.count_ones()).sum::<u32>(), streams.len() as u32);
            }
        }
    }

    #[test]
    fn the_tasks_of_a_pass_share_their_entries() {
        let mut closed = ClosedStreams::new(16);
        for n in 0..6_400u32 {
            // Not in the order of their numbers.
            let stream = StreamId {
                job: 1,
                pass: 1,
                task: n * 7 % 6_400,
            };
            for slot in 0..16 {
                closed.close(stream, slot);
            }
        }
        assert_eq!(closed.chunks.len(), 100);
        assert!(closed.chunks.values().all(|groups| groups.len() == 1));
    }
}
