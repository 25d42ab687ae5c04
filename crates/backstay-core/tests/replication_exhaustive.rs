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

use backstay_core::hash::mix64;
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
        if steps.is_empty() {
            // Whatever happened before, it comes to such an end.
            if let Err(broken) = next.check_liveness() {
                panic!("{name}: {broken}, after {path:?}");
            }
        }
        stack.push((steps, next));
    }
    println!("{name}: all {} states, {transitions} steps", visited.len());
}

/// Take that many walks of random steps, each to an end where nothing can happen any more: where
/// there are too many states to visit all, this gets further than depth first.
fn wander(name: &str, world: &World, walks: u64) {
    for walk in 0..walks {
        let (mut world, mut path) = (world.clone(), Vec::new());
        let mut random = mix64(walk + 1);
        loop {
            let steps = world.steps();
            if steps.is_empty() {
                break;
            }
            random = mix64(random);
            let step = steps[(random % steps.len() as u64) as usize];
            path.push(step);
            world.apply(step);
            if let Err(broken) = world.check() {
                panic!("{name}, walk {walk}: {broken}, after {path:?}");
            }
        }
        if let Err(broken) = world.check_liveness() {
            panic!("{name}, walk {walk}: {broken}, after {path:?}");
        }
    }
    println!("{name}: {walks} walks");
}

fn set(master: usize, in_sync: &[usize], catching_up: &[usize]) -> Set {
    Set {
        master: Some(master),
        in_sync: in_sync.to_vec(),
        catching_up: catching_up.to_vec(),
        term: 1,
        epoch: 1,
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
    copies_at_once: 4,
    deletes: false,
    expires: false,
    stale: false,
};

/// One slot with three replicas and two pushes under way, which are tried again; a new master is
/// chosen after a crash of the old one, a dead backup is taken out.
/// With the checks of every state (`exploration/checks.rs`) this tries I1, I2, I3, I4, I5 and I6.
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

/// The work of each apply queue is done as late as can be, reports are late.
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
/// while the new one is at work (I3).
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

/// A push and a delete of its row, both tried again, in any order; either node may become master.
#[test]
fn a_delete_and_its_retry_at_any_moment() {
    let budget = Budget {
        changes: 1,
        sends: 2,
        deletes: true,
        ..NOTHING
    };
    let world = World::new(2, vec![set(0, &[1], &[])], [&[0], &[0]], budget);
    explore("delete", world.send_all());
}

/// A push and an expiry of its row, both tried again, in any order, with masters whose clocks differ.
/// With the check of equal bytes this tries L1, L2 and L4.
#[test]
fn an_expiry_and_its_retry_at_any_moment() {
    let budget = Budget {
        changes: 1,
        sends: 2,
        expires: true,
        ..NOTHING
    };
    let world = World::new(2, vec![set(0, &[1], &[])], [&[0], &[0]], budget);
    explore("expiry", world.send_all());
}

/// Pushes whose learning rates depend on how many came before them, in any order, with a change of
/// the master and a retry. The check of equal bytes says that every replica divides alike.
#[test]
fn stale_pushes_and_a_retry_at_any_moment() {
    let budget = Budget {
        changes: 1,
        sends: 2,
        stale: true,
        ..NOTHING
    };
    let world = World::new(2, vec![set(0, &[1], &[])], [&[0], &[0], &[0]], budget);
    explore("stale", world.send_all());
}

/// A new replica has the counts that the staleness of later pushes is told by.
#[test]
fn a_copy_while_stale_pushes_come() {
    let budget = Budget {
        changes: 2,
        stale: true,
        ..NOTHING
    };
    let world = World::new(2, vec![set(0, &[], &[1])], [&[0], &[0], &[0]], budget);
    wander("copy and stale", &world, 3000);
    explore("copy and stale", world.send_all());
}

/// A copy is read while an expiry takes its rows away.
#[test]
fn a_copy_of_rows_that_expire() {
    let budget = Budget {
        changes: 2,
        expires: true,
        ..NOTHING
    };
    let world = World::new(2, vec![set(0, &[], &[1])], [&[0], &[0]], budget);
    explore("copy and expiry", world.send_all());
}

/// A copy is read while a delete takes its rows away.
#[test]
fn a_copy_of_rows_that_are_deleted() {
    let budget = Budget {
        changes: 2,
        deletes: true,
        ..NOTHING
    };
    let world = World::new(2, vec![set(0, &[], &[1])], [&[0], &[0]], budget);
    explore("copy and delete", world.send_all());
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

/// Two slots with rows are copied one after the other, a row at a time; a push comes between the
/// pieces, the connection may break, and the copies are taken in.
fn two_slots_with_rows(budget: Budget) -> World {
    let sets = vec![set(0, &[], &[]), set(0, &[], &[])];
    let mut world = World::new(2, sets, [&[0, 1], &[0, 1]], budget);
    for step in [Step::Send(0, 0), Step::Add(0, 1), Step::Add(1, 1)] {
        world.apply(step);
        world.finish_work();
    }
    for version in [2, 3] {
        world.apply(Step::Route(1, version));
    }
    world.apply(Step::Route(0, 3));
    world
}

/// What is pushed while a copy is under way is applied behind it, once, whichever node is master
/// then.
#[test]
fn copies_in_pieces_and_what_is_pushed_between_them() {
    let budget = Budget {
        changes: 4,
        ..NOTHING
    };
    explore("copies in pieces", two_slots_with_rows(budget));
}

/// A break in the middle of a copy, after which it begins anew.
#[test]
fn a_break_between_the_pieces_of_a_copy() {
    let budget = Budget {
        changes: 3,
        breaks: 1,
        late: true,
        ..NOTHING
    };
    explore("break in a copy", two_slots_with_rows(budget));
}

/// Read leases expire while a routing change travels: no two nodes answer reads.
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

/// A graceful stop with three copies: the master hands its slot over, its process ends, and it is
/// taken out. The two tables come to the others in any order and at any moment.
#[test]
fn a_graceful_stop_whose_tables_come_in_any_order() {
    let budget = Budget {
        crashes: 1,
        changes: 2,
        time: 1,
        ..NOTHING
    };
    let sets = vec![set(0, &[1, 2], &[])];
    let mut world = World::new(3, sets, [&[0], &[]], budget).send_all();
    world.apply(Step::There(0, 1));
    world.apply(Step::Promote(0, 1, true));
    world.apply(Step::Crash(0));
    world.apply(Step::TakeOut(0, 0));
    explore("graceful stop", world);
}

/// A node is taken out of two slots while it holds a push that is undone then, and is copied to,
/// one slot after the other. Apply queues are late: what is decided is applied after what came
/// later.
#[test]
fn copies_one_by_one_to_a_node_whose_apply_queue_is_late() {
    let budget = Budget {
        breaks: 2,
        changes: 2,
        sends: 2,
        time: 1,
        groundless: true,
        eager: false,
        copies_at_once: 1,
        ..NOTHING
    };
    let sets = vec![set(0, &[1, 2], &[]), set(0, &[1, 2], &[])];
    let mut world = World::new(3, sets, [&[1], &[0]], budget);
    for step in [
        Step::Send(0, 0),
        Step::There(0, 1),
        Step::Back(0, 1),
        Step::TakeOut(0, 1),
        Step::TakeOut(1, 1),
        Step::Route(0, 2),
        Step::Route(0, 3),
        Step::Break(0, 2),
        Step::Do(0, 1),
        Step::Connect(0, 2),
        Step::There(0, 2),
        Step::There(0, 2),
        Step::Back(0, 2),
    ] {
        world.apply(step);
    }
    wander("late apply queue", &world, 3_000);
}
