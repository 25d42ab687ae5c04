//! Small clusters, all interleavings: every state that 2 pushes, up to 3 replicas and a few
//! faults can lead to is visited once, and checked.
//!
//! The search is depth first over clones of the cluster, with a memory of states visited.
//! What is explored, and how many states that were: docs/internals/simulation.md.

// What fails in a helper is a failed test; exact numbers are the point.
#![allow(clippy::unwrap_used, clippy::float_cmp)]
// How much is visited is the caller's choice.
#![allow(clippy::disallowed_methods, clippy::arc_with_non_send_sync)]

#[path = "exploration/world.rs"]
mod world;

use std::collections::BTreeSet;

use world::{Budget, Set, Step, World};

/// States of a scenario that an ordinary test run visits at most. `BACKSTAY_EXPLORE_LIMIT=0`
/// visits all of them.
const LIMIT: usize = 130_000;

/// Visit the states, each once; the first one that breaks a rule is a failure, told with its path.
fn explore(name: &str, world: World) {
    let limit = std::env::var("BACKSTAY_EXPLORE_LIMIT");
    let limit: usize = limit.map_or(LIMIT, |limit| limit.parse().unwrap());
    let mut visited = BTreeSet::new();
    let mut path: Vec<Step> = Vec::new();
    let mut transitions = 0u64;
    visited.insert(world.fingerprint());
    let mut stack = vec![(world.steps(), world)];
    while let Some((steps, world)) = stack.last_mut() {
        let Some(step) = steps.pop() else {
            stack.pop();
            path.pop();
            continue;
        };
        let mut next = world.clone();
        transitions += 1;
        path.push(step);
        next.apply(step);
        if !visited.insert(next.fingerprint()) {
            path.pop();
            continue;
        }
        if let Err(broken) = next.check() {
            panic!("{name}: {broken}, after {path:?}");
        }
        if visited.len() == limit {
            println!("{name}: the first {limit} states, {transitions} steps");
            return;
        }
        let steps = next.steps();
        stack.push((steps, next));
    }
    println!("{name}: all {} states, {transitions} steps", visited.len());
}

fn set(master: usize, in_sync: &[usize], catching_up: &[usize]) -> Set {
    Set {
        master: Some(master),
        in_sync: in_sync.to_vec(),
        catching_up: catching_up.to_vec(),
        term: 1,
        birth: 1,
    }
}

const NOTHING: Budget = Budget {
    crashes: 0,
    breaks: 0,
    changes: 0,
    sends: 1,
    time: 0,
    groundless: false,
    forced: false,
    sure: true,
    eager: true,
    late: false,
};

/// One slot with three replicas and two pushes under way, which are tried again; a new master is
/// chosen after a crash of the old one, a dead backup is taken out.
#[test]
fn a_crash_at_any_moment() {
    let budget = Budget {
        crashes: 1,
        changes: 2,
        sends: 2,
        forced: true,
        ..NOTHING
    };
    let world = World::new(3, vec![set(0, &[1, 2], &[])], [&[0], &[0]], budget);
    explore("crash, one slot", world.send_all());
}

/// The controller may also choose another master before the crash, or without.
#[test]
fn a_crash_or_a_handover_at_any_moment() {
    let budget = Budget {
        crashes: 1,
        changes: 1,
        ..NOTHING
    };
    let world = World::new(3, vec![set(0, &[1, 2], &[])], [&[0], &[0]], budget);
    explore("crash or handover", world.send_all());
}

/// The work of each lane is done as late as can be, reports are late.
#[test]
fn a_handover_at_any_moment() {
    let budget = Budget {
        changes: 1,
        eager: false,
        ..NOTHING
    };
    let world = World::new(2, vec![set(0, &[1], &[])], [&[0], &[0]], budget);
    explore("handover", world.send_all());
}

/// The old master has lost its lease but not its life, and comes back on a new connection
/// while the new one is at work.
#[test]
fn an_ousted_master_comes_back() {
    let budget = Budget {
        breaks: 1,
        changes: 1,
        ..NOTHING
    };
    let world = World::new(2, vec![set(0, &[1], &[])], [&[0], &[0]], budget);
    explore("ousted master", world);
}

/// Each node is master of one slot and backs the other up.
#[test]
fn two_slots_and_a_crash() {
    let sets = vec![set(0, &[1], &[]), set(1, &[0], &[])];
    let budget = Budget {
        crashes: 1,
        changes: 1,
        sends: 2,
        ..NOTHING
    };
    let world = World::new(2, sets, [&[0, 1], &[0]], budget);
    explore("crash, two slots", world.send_all());
}

/// The connection breaks, what was under way may still arrive, and either may become master.
#[test]
fn a_broken_connection() {
    let budget = Budget {
        breaks: 1,
        changes: 1,
        late: true,
        ..NOTHING
    };
    let world = World::new(2, vec![set(0, &[1], &[])], [&[0], &[0]], budget);
    explore("broken connection", world.send_all());
}

/// The client tries again, at any moment and at any master.
#[test]
fn a_retry_at_any_moment() {
    let budget = Budget {
        changes: 1,
        sends: 2,
        ..NOTHING
    };
    let world = World::new(2, vec![set(0, &[1], &[])], [&[0], &[0]], budget);
    explore("retry", world.send_all());
}

/// A replica is copied to while pushes come, is taken in, and may become master at once.
#[test]
fn a_copy_and_what_follows() {
    let budget = Budget {
        changes: 2,
        ..NOTHING
    };
    let world = World::new(2, vec![set(0, &[], &[1])], [&[0], &[0]], budget);
    explore("copy", world.send_all());
}

/// Promises run out while a routing change travels: no two nodes answer reads.
#[test]
fn a_handover_while_time_passes() {
    let budget = Budget {
        changes: 1,
        time: 2,
        ..NOTHING
    };
    let world = World::new(2, vec![set(0, &[1], &[])], [&[0], &[]], budget);
    explore("handover in time", world.send_all());
}

/// A backup is taken out, for a reason or none, and the one that is left is master in the end.
#[test]
fn two_changes() {
    let budget = Budget {
        changes: 2,
        groundless: true,
        ..NOTHING
    };
    let world = World::new(2, vec![set(0, &[1], &[])], [&[0], &[0]], budget);
    explore("two changes", world.send_all());
}
