//! Cutting a request anew after slots have moved: by the newest routing, never within a slot.

use std::ops::Range;

use super::routing::Routing;

/// The positions that go to one server, or to none for now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// Index into the routing's servers, or [`super::routing::NO_MASTER`].
    pub server: u32,
    /// Positions among the keys, ascending; each range holds whole slots.
    pub ranges: Vec<Range<usize>>,
}

/// Group keys, of which those of a slot stand together, by the server of their slot. Each key
/// is in one group, each slot's keys are in one range, and their order is kept.
pub fn by_server(keys: &[u64], routing: &Routing) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    for (at, &key) in keys.iter().enumerate() {
        let server = routing.server_of_key(key);
        let known = groups.iter().position(|group| group.server == server);
        let known = known.unwrap_or_else(|| {
            groups.push(Group {
                server,
                ranges: Vec::new(),
            });
            groups.len() - 1
        });
        let ranges = &mut groups[known].ranges;
        match ranges.last_mut() {
            Some(range) if range.end == at => range.end = at + 1,
            _ => ranges.push(at..at + 1),
        }
    }
    groups
}

/// How many different slots the keys, sorted by slot, are in.
pub(crate) fn slot_count(keys: &[u64], routing: &Routing) -> usize {
    let mut slots: Vec<u32> = keys.iter().map(|&key| routing.slot(key)).collect();
    slots.dedup();
    slots.len()
}
