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

/// Group keys by the server of their slot; keys of one slot must stand together. Each key
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

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};
    use std::sync::Arc;

    use super::*;
    use crate::client::plan::{Part, Plan};
    use crate::client::routing::{ServerAddress, NO_MASTER};
    use proptest::prelude::*;

    const SLOTS: usize = 64;

    fn routing(version: u64, masters: &[u8]) -> Arc<Routing> {
        let server = |n: u8| ServerAddress {
            node_id: String::new(),
            address: n.to_string(),
            instance: 1,
        };
        // One number more than there are servers stands for none.
        let master = |&n: &u8| if n == 5 { NO_MASTER } else { u32::from(n) };
        let masters: Vec<u32> = masters.iter().map(master).collect();
        Arc::new(Routing::of(version, 0, (0..5).map(server).collect(), &masters).unwrap())
    }

    fn masters() -> impl Strategy<Value = Vec<u8>> {
        prop::collection::vec(0..=5u8, SLOTS)
    }

    fn keys_of(plan: &Plan, part: &Part) -> Vec<u64> {
        let mut keys = vec![0; part.key_count()];
        part.copy_keys(plan, &mut keys);
        keys
    }

    /// Each entry of a part refers to a key of the same piece.
    fn check_entries(plan: &Plan, part: &Part) {
        for piece in part.pieces() {
            let entries = &plan.entries()[piece.entries.clone()];
            let referred: BTreeSet<usize> = entries.iter().map(|e| e.unique as usize).collect();
            assert!(referred.into_iter().eq(piece.keys.clone()));
        }
    }

    proptest! {
        /// However often slots move, and whatever was acknowledged before, each slot goes out
        /// once as a whole, to its master, sorted by slot.
        #[test]
        fn each_slot_goes_out_once_and_whole(
            batch in prop::collection::vec(0..2_000u64, 1..600),
            planned in masters(),
            moves in prop::collection::vec((masters(), any::<u64>()), 1..5),
            keys_per_part in 1..200usize,
        ) {
            let first = routing(1, &planned);
            let plan = Plan::new(&batch, Arc::clone(&first)).unwrap();
            let mut whole: BTreeMap<u32, BTreeSet<u64>> = BTreeMap::new();
            for &key in plan.keys() {
                whole.entry(first.slot(key)).or_default().insert(key);
            }
            // The plan may be stale from the start.
            let mut by = routing(2, &moves[0].0);
            let mut open = plan.parts(&by, keys_per_part);
            let mut done: BTreeMap<u32, BTreeSet<u64>> = BTreeMap::new();
            for (version, (masters, acknowledged)) in (3..).zip(&moves) {
                for part in &open {
                    let keys = keys_of(&plan, part);
                    prop_assert!(keys.iter().all(|&key| by.server_of_key(key) == part.server));
                    prop_assert!(keys.iter().map(|&key| by.slot(key)).is_sorted());
                    check_entries(&plan, part);
                }
                let mut cut = Vec::new();
                by = routing(version, masters);
                for (at, part) in open.into_iter().enumerate() {
                    let keys = keys_of(&plan, &part);
                    if acknowledged >> (at % 64) & 1 == 1 {
                        for key in keys {
                            let fresh = done.entry(by.slot(key)).or_default().insert(key);
                            prop_assert!(fresh, "key {key} was sent twice");
                        }
                        continue;
                    }
                    for group in by_server(&keys, &by) {
                        let sub = plan.cut(&part, group.server, &group.ranges).unwrap();
                        let expected = group.ranges.iter().flat_map(|r| keys[r.clone()].to_vec());
                        prop_assert!(keys_of(&plan, &sub).into_iter().eq(expected));
                        cut.push(sub);
                    }
                }
                open = cut;
                // What is acknowledged are whole slots.
                prop_assert!(done.iter().all(|(slot, keys)| whole[slot] == *keys));
            }
            for part in &open {
                for key in keys_of(&plan, part) {
                    prop_assert!(done.entry(by.slot(key)).or_default().insert(key));
                }
                let slots: BTreeSet<u32> = keys_of(&plan, part).iter().map(|&k| by.slot(k)).collect();
                prop_assert!(slots.iter().all(|slot| done[slot] == whole[slot]), "a slot was cut");
            }
            prop_assert_eq!(done, whole);
        }
    }
}
