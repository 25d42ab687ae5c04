//! Small clusters, all interleavings: every state that 2 pushes, up to 3 replicas and a few
//! faults can lead to is visited once, and checked.
//!
//! The search is depth first over clones of the cluster, with a memory of states visited.
//! What is explored, and how many states that were: docs/internals/simulation.md.

// What fails in a helper is a failed test; exact numbers are the point.
#![allow(clippy::unwrap_used, clippy::float_cmp)]

#[path = "exploration/world.rs"]
mod world;

use std::collections::HashSet;
use std::time::Instant;

use world::{Budget, Set, Step, World};

/// Visit every state; the first one that breaks a rule is a failure, told with its path.
fn explore(name: &str, world: World) {
    let began = Instant::now();
    let limit = std::env::var("BACKSTAY_EXPLORE_LIMIT");
    let limit: usize = limit.map_or(5_000_000, |limit| limit.parse().unwrap());
    let mut visited = HashSet::new();
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
        assert!(visited.len() < limit, "{name}: more than {limit} states");
        let steps = next.steps();
        stack.push((steps, next));
    }
    println!(
        "{name}: {} states, {transitions} steps, {:.1} s",
        visited.len(),
        began.elapsed().as_secs_f64()
    );
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
    retries: 1,
    time: 0,
    groundless: false,
    sure: true,
    late: false,
};

#[test]
fn a_handover_at_any_moment() {
    let budget = Budget {
        changes: 1,
        ..NOTHING
    };
    let world = World::new(3, vec![set(0, &[1, 2], &[])], [&[0], &[0]], budget);
    explore("handover", world);
}

#[test]
fn a_crash_at_any_moment() {
    let budget = Budget {
        crashes: 1,
        changes: 1,
        ..NOTHING
    };
    let world = World::new(3, vec![set(0, &[1, 2], &[])], [&[0], &[0]], budget);
    explore("crash", world);
}

#[test]
fn two_slots_and_a_crash() {
    let sets = vec![set(0, &[1], &[]), set(1, &[0], &[])];
    let budget = Budget {
        crashes: 1,
        changes: 1,
        ..NOTHING
    };
    let world = World::new(2, sets, [&[0, 1], &[0]], budget);
    explore("two slots, crash", world);
}

#[test]
fn a_copy_and_a_change() {
    let budget = Budget {
        changes: 2,
        ..NOTHING
    };
    let world = World::new(3, vec![set(0, &[1], &[2])], [&[0], &[0]], budget);
    explore("copy", world);
}
