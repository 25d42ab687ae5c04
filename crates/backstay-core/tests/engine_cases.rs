//! The engine, one situation at a time.

// What fails in a helper is a failed test; exact numbers are the point.
#![allow(clippy::unwrap_used, clippy::float_cmp)]

mod engine_support;

use std::sync::Arc;

use backstay_core::compensation::{Compensation, Reference};
use backstay_core::engine::{CopyPiece, Engine, ServingState};
use backstay_core::error::Refusal;
use backstay_core::hash::table_id;
use backstay_core::spec::TableSpec;
use backstay_core::staleness::PushStaleness;
use backstay_core::transaction::{Batch, Change, StagedRun, Transaction};
use engine_support::*;

#[test]
fn a_retry_is_skipped_where_it_is_applied_and_completes_the_rest() {
    let mut engine = engine(&counter());
    let transaction = push(1, 0, 0, &by_slot((0..20).collect()), -1.0);
    let mut places = Vec::new();
    let first = &transaction.runs()[..2];
    engine.admit(&transaction, first, &mut places).unwrap();
    assert_eq!(engine.stage(&transaction, &places, 1), None);
    engine.commit(&transaction, &places).unwrap();
    let report = apply(&mut engine, &transaction).unwrap();
    assert_eq!((report.staged, report.skipped), (2, 2));
    assert!((0..20).all(|key| read(&engine, key) == 1.0));
}

#[test]
fn a_commit_applies_what_stands_before_it() {
    let mut engine = engine(&counter());
    let pushes: Vec<_> = (0..3).map(|n| push(1, n, 0, &[5], -1.0)).collect();
    let mut places = Vec::new();
    for (tag, push) in pushes.iter().enumerate() {
        places.push(stage(&mut engine, push, tag as u64).unwrap().1);
    }
    engine.commit(&pushes[1], &places[1]).unwrap();
    assert_eq!(read(&engine, 5), 2.0);
    // Late: it has been applied.
    engine.commit(&pushes[0], &places[0]).unwrap();
    assert_eq!(read(&engine, 5), 2.0);
    engine.commit(&pushes[2], &places[2]).unwrap();
    assert_eq!(read(&engine, 5), 3.0);
}

#[test]
fn a_rollback_takes_along_what_was_staged_behind_it() {
    let mut engine = engine(&counter());
    let pushes: Vec<_> = (0..3).map(|n| push(1, n, 0, &[5], -1.0)).collect();
    let mut places = Vec::new();
    for push in &pushes {
        places.push(stage(&mut engine, push, 1).unwrap().1);
    }
    let slot = space().slot_of(5);
    engine.discard_from(slot, places[1][0].position);
    assert_eq!(engine.place(slot), (0, 1));
    // What was undone is not applied, nor is it in the way.
    for (push, places) in pushes.iter().zip(&places) {
        engine.commit(push, places).unwrap();
    }
    assert_eq!((read(&engine, 5), engine.position(slot)), (1.0, 1));
    // Rolled back is not applied: the retry goes through.
    apply(&mut engine, &pushes[2]).unwrap();
    assert_eq!(read(&engine, 5), 2.0);
}

/// A master's commit that is late in its apply queue names a place where another push stands by
/// now.
#[test]
fn a_late_commit_of_another_order_applies_nothing() {
    let mut engine = engine(&counter());
    let (old, new) = (push(1, 0, 0, &[5], -1.0), push(2, 0, 0, &[5], -8.0));
    let (_, old_places) = stage(&mut engine, &old, 1).unwrap();
    engine.discard_from(space().slot_of(5), old_places[0].position);
    let (_, new_places) = stage(&mut engine, &new, 2).unwrap();
    assert_eq!(old_places[0].position, new_places[0].position);
    engine.commit(&old, &old_places).unwrap();
    assert_eq!(read(&engine, 5), 0.0);
    engine.commit(&new, &new_places).unwrap();
    assert_eq!(read(&engine, 5), 8.0);
}

#[test]
fn a_place_that_is_not_the_next_one_is_refused_and_changes_nothing() {
    let mut engine = engine(&counter());
    let transaction = push(1, 0, 0, &by_slot((0..20).collect()), -1.0);
    let (_, mut places) = stage(&mut engine, &transaction, 1).unwrap();
    let other = push(1, 1, 0, &by_slot((0..20).collect()), -1.0);
    for place in &mut places {
        place.position = 2;
    }
    places[3].position = 3;
    assert_eq!(engine.stage(&other, &places, 2), Some(places[3]));
    assert!((0..SLOTS).all(|slot| engine.place(slot) == (0, 1)));
    places[3].position = 2;
    assert_eq!(engine.stage(&other, &places, 2), None);
}

/// What a new master sends again must never be missing in between: it may be acknowledged.
#[test]
fn what_is_staged_again_stays_and_what_is_ordered_differently_gives_way() {
    let mut engine = engine(&counter());
    let pushes: Vec<_> = (0..4).map(|n| push(1, n, 0, &[5], -1.0)).collect();
    let mut places = Vec::new();
    for push in &pushes[..3] {
        places.push(stage(&mut engine, push, 1).unwrap().1);
    }
    let slot = space().slot_of(5);
    let ids = |engine: &Engine| -> Vec<u64> {
        let staged = engine.staged(slot);
        staged.map(|one| one.transaction.id.sequence).collect()
    };
    engine.commit(&pushes[0], &places[0]).unwrap();
    // Again, from the beginning: applied, here, here.
    for (push, places) in pushes.iter().zip(&places) {
        assert_eq!(engine.stage(push, places, 2), None);
        assert_eq!(ids(&engine), [1, 2]);
    }
    assert!(engine.staged(slot).all(|one| one.tag == 2));
    // Another order from the second place on.
    assert_eq!(engine.stage(&pushes[3], &places[1], 3), None);
    assert_eq!(ids(&engine), [3]);
    // The commit of what gave way takes nothing along.
    engine.commit(&pushes[2], &places[2]).unwrap();
    engine.commit(&pushes[1], &places[1]).unwrap();
    assert_eq!(engine.place(slot), (1, 2));
    engine.commit(&pushes[3], &places[1]).unwrap();
    assert_eq!((read(&engine, 5), engine.place(slot)), (2.0, (2, 2)));
}

#[test]
fn a_close_takes_its_place_in_the_order() {
    let mut engine = engine(&counter());
    let first = push(1, 0, 0, &by_slot((0..20).collect()), -1.0);
    let (_, places) = stage(&mut engine, &first, 1).unwrap();
    let close = close(1);
    let (report, closing) = stage(&mut engine, &close, 2).unwrap();
    assert_eq!(report.staged, SLOTS);
    engine.commit(&close, &closing).unwrap();
    assert!((0..20).all(|key| read(&engine, key) == 1.0));
    engine.commit(&first, &places).unwrap();
    assert!((0..20).all(|key| read(&engine, key) == 1.0));
    // Late copies, of the push and of the close.
    for late in [&first, &close] {
        let report = apply(&mut engine, late).unwrap();
        assert_eq!((report.staged, report.skipped), (0, SLOTS));
    }
    assert!((0..SLOTS).all(|slot| engine.place(slot) == (2, 2)));
}

/// Only a slot that was lost and began anew gets to see this: what it has not applied comes again,
/// and its client may be told meanwhile that the task is over.
#[test]
fn a_push_waits_for_the_end_of_its_stream_that_stands_before_it() {
    let mut engine = engine(&counter());
    let (closing, late) = (close(1), push(1, 0, 0, &[5], -1.0));
    let (_, places) = stage(&mut engine, &closing, 1).unwrap();
    assert_eq!(stage(&mut engine, &late, 2), Err(Refusal::InFlight));
    // Another stream's does not wait.
    let (_, others) = stage(&mut engine, &push(2, 0, 0, &[5], -2.0), 3).unwrap();
    assert_eq!(others.len(), 1);
    engine.commit(&closing, &places).unwrap();
    assert_eq!(apply(&mut engine, &late).unwrap().skipped, 1);
    assert_eq!(read(&engine, 5), 0.0);
}

/// However a push got behind its stream's end: what a slot remembers, a copy of it remembers.
#[test]
fn a_copy_has_the_window_of_a_closed_stream() {
    let (mut engine, mut copy) = (self::engine(&counter()), self::engine(&counter()));
    let (closing, late) = (close(1), push(1, 0, 0, &[5], -1.0));
    let slot = space().slot_of(5);
    let place = |position, transaction: &Transaction| {
        let mut runs = transaction.runs().iter();
        let run = *runs.find(|run| run.slot == slot).unwrap();
        [StagedRun {
            term: 0,
            position,
            run,
        }]
    };
    for (position, transaction) in [(1, &closing), (2, &late)] {
        let places = place(position, transaction);
        assert_eq!(engine.stage(transaction, &places, position), None);
        engine.commit(transaction, &places).unwrap();
    }
    let memory = engine.memory(slot);
    assert_eq!((memory.streams.len(), memory.closed.len()), (1, 1));
    let rows = engine.export_slot(table_id("t"), slot).unwrap();
    let rows = (&rows.0[..], &rows.1[..], &rows.2[..]);
    copy.import_slot(table_id("t"), slot, rows).unwrap();
    copy.set_memory(slot, &memory);
    assert_eq!(copy.memory(slot), memory);
    assert_eq!(copy.digest(slot), engine.digest(slot));
}

fn origins(engine: &Engine, keys: &[u64]) -> Vec<u64> {
    let mut origins = Vec::new();
    engine.origins(table_id("t"), keys, &mut origins).unwrap();
    origins
}

/// Only updates of the table count, and a retry is no update.
#[test]
fn a_push_is_as_stale_as_its_slots_have_moved_on() {
    let mut engine = engine(&counter());
    let all = by_slot((0..40).collect());
    apply(&mut engine, &push(1, 0, 0, &all, -1.0)).unwrap();
    let pulled = origins(&engine, &all);
    assert_eq!(pulled.len(), SLOTS as usize);
    let some: Vec<u64> = all
        .iter()
        .copied()
        .filter(|&key| space().slot_of(key) < 2)
        .collect();
    for sequence in 1..4 {
        apply(&mut engine, &push(1, sequence, 0, &some, -1.0)).unwrap();
    }
    apply(&mut engine, &delete(1, 4, &all)).unwrap();
    assert_eq!(origins(&engine, &some), [pulled[0] + 3, pulled[1] + 3]);
    let stale = told(&push(2, 0, 0, &all, -1.0), &pulled);
    let wanted = PushStaleness {
        known: 4,
        sum: 6,
        max: 3,
        unknown: 0,
    };
    assert_eq!(apply(&mut engine, &stale).unwrap().gone.stale, wanted);
    let repeated = apply(&mut engine, &stale).unwrap();
    assert_eq!(
        (repeated.skipped, repeated.gone.stale),
        (4, PushStaleness::default())
    );
    let counts = engine.table(table_id("t")).unwrap().staleness();
    assert_eq!(
        (counts.buckets[0], counts.buckets[2], counts.sum),
        (2, 2, 6)
    );
    assert_eq!(counts.buckets.iter().sum::<u64>(), 4);
}

/// Each slot by its own staleness; the same again changes nothing.
#[test]
fn a_stale_push_is_slowed_by_the_staleness_of_each_slot() {
    let mut engine = engine(&counter());
    let all = by_slot((0..40).collect());
    let pulled = origins(&engine, &all);
    for slot in 0..SLOTS {
        for one in 0..u64::from(slot) {
            let key: Vec<u64> = all
                .iter()
                .copied()
                .filter(|&key| space().slot_of(key) == slot)
                .take(1)
                .collect();
            apply(
                &mut engine,
                &push(1, 10 * u64::from(slot) + one, 0, &key, 0.0),
            )
            .unwrap();
        }
    }
    let stale = scaled(&told(&push(2, 0, 0, &all, -6.0), &pulled));
    apply(&mut engine, &stale).unwrap();
    apply(&mut engine, &stale).unwrap();
    for key in all {
        let wanted = [6.0, 6.0, 3.0, 2.0][space().slot_of(key) as usize];
        assert_eq!(read(&engine, key), wanted);
    }
}

/// A table whose gradients are moved to where the weights are.
fn delayed(adaptive: bool, lifetime: &str) -> Arc<TableSpec> {
    let json = format!(
        r#"{{"name":"t","kind":{{"sparse":{{"dim":{DIM}}}}},"optimizer":{{"momentum":{{"learning_rate":1.0,"momentum":0.5}}}},"compensation":{{"delay_compensated":{{"strength":0.5,"adaptive":{adaptive}}}}}{lifetime}}}"#
    );
    Arc::new(TableSpec::from_json(&json).unwrap())
}

/// A push of gradients that were computed with these weights.
fn compared(
    spec: &TableSpec,
    sequence: u64,
    keys: &[u64],
    [gradient, weight]: [f32; 2],
) -> Arc<Transaction> {
    let push = push(1, sequence, 0, keys, 0.0);
    let row = [[gradient; DIM], [weight; DIM]].concat();
    let batch = Batch::new(keys, &row.repeat(keys.len()));
    let change = push.change.compared(Reference::Weights);
    let mut push = Transaction::new(space(), push.id, 0, push.table, change, batch).unwrap();
    push.compensation = spec.compensation;
    Arc::new(push)
}

/// With and without a lifetime, whose statistics stand behind the mean squares; a copy goes on alike.
#[test]
fn a_late_gradient_is_moved_to_where_the_weights_are() {
    let keys = by_slot((0..40).collect());
    for adaptive in [false, true] {
        let mut seen = Vec::new();
        for lifetime in ["", r#","lifetime":{"expiry":{"unseen_seconds":9}}"#] {
            let spec = delayed(adaptive, lifetime);
            let (mut engine, mut copy) = (engine(&spec), self::engine(&spec));
            for (sequence, values) in [[-2.0, 0.0], [-2.0, 0.0], [1.0, -0.5]].iter().enumerate() {
                apply(
                    &mut engine,
                    &compared(&spec, sequence as u64, &keys, *values),
                )
                .unwrap();
            }
            for slot in 0..SLOTS {
                let rows = engine.export_slot(table_id("t"), slot).unwrap();
                let rows = (&rows.0[..], &rows.1[..], &rows.2[..]);
                copy.import_slot(table_id("t"), slot, rows).unwrap();
                copy.set_memory(slot, &engine.memory(slot));
            }
            for engine in [&mut engine, &mut copy] {
                apply(engine, &compared(&spec, 3, &keys, [0.5, 0.25])).unwrap();
            }
            assert!((0..SLOTS).all(|slot| engine.digest(slot) == copy.digest(slot)));
            seen.push(read(&engine, keys[0]).to_bits());
        }
        assert_eq!(seen[0], seen[1]);
    }
    let spec = delayed(false, "");
    let mut engine = engine(&spec);
    apply(&mut engine, &compared(&spec, 0, &keys, [-2.0, 0.0])).unwrap();
    assert_eq!(read(&engine, keys[0]), 2.0);
    // g' = -2 + 0.5 * 4 * (2 - 0) = 2; the momentum of before is -2.
    apply(&mut engine, &compared(&spec, 1, &keys, [-2.0, 0.0])).unwrap();
    assert_eq!(read(&engine, keys[0]), 2.0 - (2.0 - 1.0));
}

#[test]
fn gradients_without_their_weights_are_refused_where_these_are_needed() {
    let (spec, keys) = (delayed(true, ""), [5]);
    let mut delayed = engine(&spec);
    let refused = apply(&mut delayed, &push(1, 0, 0, &keys, 1.0)).unwrap_err();
    assert!(
        refused.to_string().contains("must bring the weights"),
        "{refused}"
    );
    let compared = compared(&spec, 0, &keys, [1.0, 1.0]);
    let refused = apply(&mut engine(&counter()), &compared).unwrap_err();
    assert!(
        refused.to_string().contains("a push brings no weights"),
        "{refused}"
    );
    // Another node's, for rows of another layout.
    let mut foreign = (*compared).clone();
    foreign.optimizer = Some(spec.optimizer.stamp());
    assert_eq!(delayed.check(&foreign), Ok(()));
    let staleness = r#"{"delay_compensated":{"strength":0.5}}"#;
    foreign.compensation = serde_json::from_str(staleness).unwrap();
    assert!(delayed.check(&foreign).is_err());
}

/// What the client read of it was another row, or none: the gradient is taken as it is.
#[test]
fn a_gradient_of_a_row_that_its_push_creates_is_not_moved() {
    let keys = by_slot((0..40).collect());
    for lifetime in ["", r#","lifetime":{"expiry":{"unseen_seconds":9}}"#] {
        for storage in ["float32", "bfloat16"] {
            let json = format!(
                r#"{{"name":"t","kind":{{"sparse":{{"dim":{DIM}}}}},"storage":"{storage}","initializer":{{"constant":{{"value":0.125}}}},"optimizer":{{"sgd":{{"learning_rate":1.0}}}},"compensation":{{"delay_compensated":{{"strength":0.5}}}}{lifetime}}}"#
            );
            let spec = Arc::new(TableSpec::from_json(&json).unwrap());
            let (mut one, mut other) = (engine(&spec), engine(&spec));
            let created = compared(&spec, 0, &keys, [-2.0, 64.0]);
            for engine in [&mut one, &mut other] {
                apply(engine, &created).unwrap();
                assert_eq!(read(engine, keys[0]), 2.125);
            }
            // Once more, as a client sends it that got no answer.
            apply(&mut other, &created).unwrap();
            // Its row is there by now: 2.125 - (-2 + 0.5 * 4 * (2.125 - 0.125)).
            let late = compared(&spec, 1, &keys, [-2.0, 0.125]);
            for engine in [&mut one, &mut other] {
                apply(engine, &late).unwrap();
                assert_eq!(read(engine, keys[0]), 0.125);
            }
            assert!((0..SLOTS).all(|slot| one.digest(slot) == other.digest(slot)));
        }
    }
}

/// A table of Adagrad that revises its steps.
fn revising(lifetime: &str) -> Arc<TableSpec> {
    let json = format!(
        r#"{{"name":"t","kind":{{"sparse":{{"dim":{DIM}}}}},"optimizer":{{"adagrad":{{"learning_rate":0.5,"initial_accumulator":0.25}}}},"compensation":"adaptive_revision"{lifetime}}}"#
    );
    Arc::new(TableSpec::from_json(&json).unwrap())
}

fn sums(engine: &Engine, keys: &[u64]) -> Vec<f32> {
    let mut sums = vec![f32::NAN; keys.len() * (DIM + 1)];
    engine.read_sums(table_id("t"), keys, &mut sums).unwrap();
    sums
}

/// A push of gradients that were computed when these sums were read.
fn revised(sequence: u64, keys: &[u64], gradient: f32, sums: &[f32]) -> Arc<Transaction> {
    let push = push(1, sequence, 0, keys, 0.0);
    let rows = sums.chunks_exact(DIM + 1);
    let values: Vec<f32> = rows
        .flat_map(|sums| [&[gradient; DIM], sums].concat())
        .collect();
    let batch = Batch::new(keys, &values);
    let change = push.change.compared(Reference::Sum);
    let mut push = Transaction::new(space(), push.id, 0, push.table, change, batch).unwrap();
    push.compensation = Compensation::AdaptiveRevision;
    Arc::new(push)
}

/// With and without a lifetime, whose statistics stand behind; a copy goes on alike.
#[test]
fn a_late_gradient_revises_the_steps_before_it() {
    let keys = by_slot((0..40).collect());
    let gradients = [-2.0f32, -1.0, 0.5, 1.5];
    let (mut wanted, mut z, mut highest, mut sum) = (0.0f64, 0.25f64, 0.25f64, 0.0f64);
    for (number, gradient) in gradients.map(f64::from).into_iter().enumerate() {
        // All but the last were computed before the first; it comes fresh.
        let since = if number < 3 { sum } else { 0.0 };
        let old = 0.5 / highest.sqrt();
        z += gradient * gradient + 2.0 * gradient * since;
        highest = highest.max(z);
        let new = 0.5 / highest.sqrt();
        wanted += (old - new) * since - new * gradient;
        sum += gradient;
    }
    let mut seen = Vec::new();
    for lifetime in ["", r#","lifetime":{"expiry":{"unseen_seconds":9}}"#] {
        let spec = revising(lifetime);
        let (mut engine, mut copy) = (engine(&spec), self::engine(&spec));
        let pulled = sums(&engine, &keys);
        assert!(pulled.iter().all(|&one| one == 0.0));
        for (sequence, &gradient) in gradients[..3].iter().enumerate() {
            let late = revised(sequence as u64, &keys, gradient, &pulled);
            apply(&mut engine, &late).unwrap();
        }
        for slot in 0..SLOTS {
            let rows = engine.export_slot(table_id("t"), slot).unwrap();
            let rows = (&rows.0[..], &rows.1[..], &rows.2[..]);
            copy.import_slot(table_id("t"), slot, rows).unwrap();
            copy.set_memory(slot, &engine.memory(slot));
        }
        assert_eq!(sums(&engine, &keys), sums(&copy, &keys));
        let fresh = revised(3, &keys, gradients[3], &sums(&engine, &keys));
        for engine in [&mut engine, &mut copy] {
            apply(engine, &fresh).unwrap();
            // A retry.
            apply(engine, &fresh).unwrap();
        }
        assert!((0..SLOTS).all(|slot| engine.digest(slot) == copy.digest(slot)));
        assert!((f64::from(read(&engine, keys[0])) - wanted).abs() < 1e-5);
        seen.push(read(&engine, keys[0]).to_bits());
    }
    assert_eq!(seen[0], seen[1]);
}

/// A row whose state has begun anew since the pull: what was applied before is not revised.
#[test]
fn sums_of_a_state_that_is_no_more_count_as_none() {
    let keys = by_slot((0..40).collect());
    for lifetime in ["", r#","lifetime":{"expiry":{"unseen_seconds":9}}"#] {
        let mut one = engine(&revising(lifetime));
        let nothing = vec![0.0; keys.len() * (DIM + 1)];
        apply(&mut one, &revised(0, &keys, 3.0, &nothing)).unwrap();
        let before = sums(&one, &keys);
        let assigned = {
            let push = push(1, 1, 0, &keys, 0.0);
            let change = Change::Assign {
                only_if_absent: false,
            };
            let batch = push.batch.clone();
            Arc::new(Transaction::new(space(), push.id, 0, push.table, change, batch).unwrap())
        };
        let mut fresh = one.clone();
        for engine in [&mut one, &mut fresh] {
            apply(engine, &assigned).unwrap();
        }
        let after = sums(&one, &keys);
        let births = |sums: &[f32]| sums.chunks(DIM + 1).map(|one| one[DIM]).collect::<Vec<_>>();
        assert!(births(&before)
            .iter()
            .zip(births(&after))
            .all(|(&a, b)| a != b && b > 0.0));
        apply(&mut one, &revised(2, &keys, 0.001, &before)).unwrap();
        apply(&mut fresh, &revised(2, &keys, 0.001, &after)).unwrap();
        assert!((0..SLOTS).all(|slot| one.digest(slot) == fresh.digest(slot)));
        // The same of rows that were deleted, and made by another push.
        apply(&mut one, &delete(2, 0, &keys)).unwrap();
        assert!(sums(&one, &keys).iter().all(|&sum| sum == 0.0));
        apply(&mut one, &revised(3, &keys, 0.5, &before)).unwrap();
        assert!(births(&sums(&one, &keys)) != births(&after));
        let mut unread = one.clone();
        apply(&mut one, &revised(4, &keys, 0.001, &before)).unwrap();
        apply(&mut unread, &revised(4, &keys, 0.001, &nothing)).unwrap();
        assert!((0..SLOTS).all(|slot| one.digest(slot) == unread.digest(slot)));
    }
}

#[test]
fn what_a_table_that_revises_does_not_take_is_refused() {
    let (spec, keys) = (revising(""), [5]);
    let mut revising = engine(&spec);
    let mut refused = |push: &Arc<Transaction>, words: &str| {
        let refused = apply(&mut revising, push).unwrap_err().to_string();
        assert!(refused.contains(words), "{refused}");
    };
    refused(
        &push(1, 0, 0, &keys, 1.0),
        "must bring the sums of gradients",
    );
    let delayed = delayed(false, "");
    refused(
        &compared(&delayed, 0, &keys, [1.0, 1.0]),
        "must bring the sums of gradients",
    );
    let one = revised(0, &keys, 1.0, &[0.0; DIM + 1]);
    let refused = apply(&mut engine(&delayed), &one).unwrap_err().to_string();
    assert!(refused.contains("must bring the weights"), "{refused}");
    let mut sums = [0.0; DIM + 1];
    let refused = engine(&delayed).read_sums(table_id("t"), &keys, &mut sums);
    let refused = refused.unwrap_err().to_string();
    assert!(refused.contains("keeps no sums"), "{refused}");
    // Another node's, of another optimizer with as much state.
    let mut foreign = (*one).clone();
    foreign.optimizer = Some(spec.optimizer.stamp());
    assert_eq!(revising.check(&foreign), Ok(()));
    foreign.optimizer = Some(delayed.optimizer.stamp());
    assert!(revising.check(&foreign).is_err());
    let spec = revised_json(r#"{"adam":{"learning_rate":0.5}}"#);
    let text = TableSpec::from_json(&spec).unwrap_err().to_string();
    assert!(
        text.contains("with the optimizer adagrad only; this table has adam"),
        "{text}"
    );
}

fn revised_json(optimizer: &str) -> String {
    format!(
        r#"{{"name":"t","kind":{{"sparse":{{"dim":2}}}},"optimizer":{optimizer},"compensation":"adaptive_revision"}}"#
    )
}

#[test]
fn an_origin_of_an_earlier_life_of_a_slot_is_unknown() {
    let mut engine = engine(&counter());
    let keys = by_slot((0..40).collect());
    apply(&mut engine, &push(1, 0, 0, &keys, -1.0)).unwrap();
    let pulled = origins(&engine, &keys);
    for slot in 0..2 {
        engine.clear_slot(slot);
        engine.set_epoch(slot, 2);
        engine.set_serving_state(slot, ServingState::Serving);
    }
    let late = told(&push(2, 0, 0, &keys, -1.0), &pulled);
    let stale = apply(&mut engine, &late).unwrap().gone.stale;
    assert_eq!((stale.known, stale.unknown, stale.sum), (2, 2, 0));
    assert_eq!(engine.table(table_id("t")).unwrap().staleness().unknown, 2);
}

#[test]
fn a_push_tells_an_origin_for_each_of_its_slots() {
    let mut one = (*push(1, 0, 0, &by_slot((0..40).collect()), -1.0)).clone();
    assert!(!one.tells_origins());
    let refused = one.tell_origins(&[0; 3]).unwrap_err().to_string();
    assert!(
        refused.contains("3 origins came for the 4 slots"),
        "{refused}"
    );
    one.tell_origins(&[0; 4]).unwrap();
    assert!(one.tells_origins());
}

#[test]
fn a_copied_slot_goes_on_as_the_original() {
    let spec = spec(r#"{"adam":{"learning_rate":0.1}}"#);
    let mut engine = engine(&spec);
    let mut copy = self::engine(&spec);
    apply(&mut copy, &push(9, 0, 0, &by_slot((0..60).collect()), 5.0)).unwrap();
    for sequence in 0..5 {
        let keys = by_slot((0..100).map(|key| key * (sequence + 1)).collect());
        apply(&mut engine, &push(1, sequence, 0, &keys, sequence as f32)).unwrap();
    }
    end(&mut engine, 2);
    for slot in 0..SLOTS {
        copy.clear_slot(slot);
        assert_eq!(copy.place(slot), (0, 0));
        let mut original = engine.begin_copy(slot);
        while let CopyPiece::Rows(table, rows) = engine.read_copy(slot, &mut original.rows, 1) {
            let rows = (&rows.0[..], &rows.1[..], &rows.2[..]);
            copy.add_rows(table, slot, rows).unwrap();
        }
        copy.set_memory(slot, &original.memory);
        assert_eq!(copy.memory(slot), engine.memory(slot));
        assert_eq!(copy.digest(slot), engine.digest(slot));
    }
    let next = push(1, 4, 0, &by_slot((0..100).collect()), 1.0);
    let late = push(2, 7, 0, &by_slot((0..100).collect()), 1.0);
    for engine in [&mut engine, &mut copy] {
        assert_eq!(apply(engine, &next).unwrap().staged, 0);
        assert_eq!(apply(engine, &late).unwrap().staged, 0);
        apply(engine, &push(1, 5, 0, &by_slot((0..100).collect()), 1.0)).unwrap();
    }
    assert!((0..SLOTS).all(|slot| copy.digest(slot) == engine.digest(slot)));
}

#[test]
fn a_slot_served_elsewhere_refuses_the_whole_part() {
    let mut engine = engine(&counter());
    engine.set_version(7);
    engine.set_serving_state(2, ServingState::Elsewhere);
    let keys = by_slot((0..20).collect());
    let refused = apply(&mut engine, &push(1, 0, 0, &keys, -1.0));
    assert_eq!(
        refused,
        Err(Refusal::NotMaster {
            slot: 2,
            version: 7
        })
    );
    assert_eq!(engine.tables().next().unwrap().rows(), 0);
    let mut out = vec![0.0; keys.len() * DIM];
    assert!(engine.read(table_id("t"), &keys, &mut out).is_err());
    engine.set_serving_state(2, ServingState::Waiting);
    let refused = apply(&mut engine, &push(1, 0, 0, &keys, -1.0));
    assert!(matches!(refused, Err(Refusal::NotReady(_))));
    let read = engine.read(table_id("t"), &keys, &mut out);
    assert!(matches!(read, Err(Refusal::NotReady(_))));
}

#[test]
fn what_was_sent_to_an_earlier_life_of_a_slot_is_refused() {
    let mut engine = engine(&counter());
    let keys = by_slot((0..20).collect());
    let mut late = push(1, 8, 8, &keys, -1.0);
    Arc::make_mut(&mut late).known_version = 6;
    assert!(apply(&mut engine, &late).is_ok());
    // As a restore does: the slot is empty, and takes what was applied before once more.
    engine.clear_slot(2);
    engine.set_epoch(2, 7);
    assert!(matches!(
        apply(&mut engine, &late),
        Err(Refusal::NotReady(_))
    ));
    let mut close = Transaction::close(late.id, 0..engine.slots().end);
    close.known_version = 6;
    let runs = close.runs().to_vec();
    assert!(matches!(
        engine.apply(&close, &runs),
        Err(Refusal::NotReady(_))
    ));
    let mut again = push(1, 0, 0, &keys, -1.0);
    Arc::make_mut(&mut again).known_version = 7;
    let report = apply(&mut engine, &again).unwrap();
    assert_eq!(report.staged, 1, "only the slot that began anew lacks it");
}

#[test]
fn a_pull_creates_no_row() {
    let json = r#"{"name":"t","kind":{"sparse":{"dim":3}},"initializer":{"uniform":{"low":-1.0,"high":1.0}},"optimizer":{"sgd":{"learning_rate":1.0}}}"#;
    let spec = Arc::new(TableSpec::from_json(json).unwrap());
    let mut engine = engine(&spec);
    let mut before = [0.0; DIM];
    engine.read(table_id("t"), &[9], &mut before).unwrap();
    assert!(before.iter().all(|value| *value != 0.0));
    assert_eq!(engine.tables().next().unwrap().rows(), 0);
    // The row made by the push starts from the very values that were read.
    apply(&mut engine, &push(1, 0, 0, &[9], 0.0)).unwrap();
    let mut after = [0.0; DIM];
    engine.read(table_id("t"), &[9], &mut after).unwrap();
    assert_eq!(before, after);
    assert_eq!(engine.tables().next().unwrap().rows(), 1);
}

#[test]
fn an_exported_slot_comes_back_the_same() {
    let spec = spec(r#"{"adam":{"learning_rate":0.1}}"#);
    let mut engine = engine(&spec);
    for sequence in 0..5 {
        let keys = by_slot((0..100).map(|key| key * (sequence + 1)).collect());
        apply(&mut engine, &push(1, sequence, 0, &keys, sequence as f32)).unwrap();
    }
    let mut copy = self::engine(&spec);
    for slot in 0..SLOTS {
        let (keys, weights, state) = engine.export_slot(table_id("t"), slot).unwrap();
        assert!(keys.is_sorted());
        copy.import_slot(table_id("t"), slot, (&keys, &weights, &state))
            .unwrap();
        assert_eq!(copy.export_slot(table_id("t"), slot).unwrap().0, keys);
    }
    end(&mut engine, 1);
    for slot in 0..SLOTS {
        copy.set_memory(slot, &engine.memory(slot));
        assert_eq!(engine.digest(slot), copy.digest(slot));
    }
    let hostile = copy.import_slot(table_id("t"), 0, (&[1, 1, 1], &[0.0; 9], &[0.0]));
    assert!(hostile.is_err());
}

#[test]
fn the_digest_sees_every_word_and_the_stream_memory() {
    let spec = counter();
    let slot = space().slot_of(5);
    let digest = |value: f32, sequence: u64| {
        let mut engine = engine(&spec);
        apply(&mut engine, &push(1, sequence, 0, &[5], value)).unwrap();
        engine.digest(slot)
    };
    assert_eq!(digest(1.0, 0), digest(1.0, 0));
    assert_ne!(digest(1.0, 0), digest(1.000_000_1, 0));
    assert_ne!(digest(1.0, 0), digest(1.0, 1));
    // How many updates there were: an assignment of the same weights is none.
    let update = push(1, 0, 0, &[5], -1.0);
    let mut assignment = Transaction::clone(&update);
    assignment.change = Change::Assign {
        only_if_absent: false,
    };
    assignment.batch.values_mut().fill(1.0);
    let [updated, assigned] = [update, Arc::new(assignment)].map(|one| {
        let mut engine = engine(&spec);
        apply(&mut engine, &one).unwrap();
        assert_eq!(read(&engine, 5), 1.0);
        engine.digest(slot)
    });
    assert_ne!(updated, assigned);
    // Which streams were closed, and in which order.
    let closed = |streams: &[u64]| {
        let mut engine = engine(&spec);
        for &stream in streams {
            end(&mut engine, stream);
        }
        engine.digest(slot)
    };
    assert_eq!(closed(&[1, 2]), closed(&[1, 2]));
    assert_ne!(closed(&[1, 2]), closed(&[2, 1]));
    assert_ne!(closed(&[1, 2]), closed(&[1]));
}

#[test]
fn a_copy_of_content_that_was_replaced_is_of_no_use() {
    let spec = counter();
    let mut engine = engine(&spec);
    apply(
        &mut engine,
        &push(1, 0, 0, &by_slot((0..60).collect()), 1.0),
    )
    .unwrap();
    let slot = 0;
    let mut copy = engine.begin_copy(slot);
    assert!(copy.rows.bytes_left() > 0);
    assert!(matches!(
        engine.read_copy(slot, &mut copy.rows, 1),
        CopyPiece::Rows(..)
    ));
    engine.clear_slot(slot);
    assert!(matches!(
        engine.read_copy(slot, &mut copy.rows, 1),
        CopyPiece::Gone
    ));
    copy.rows.stop();
    assert!(matches!(
        engine.read_copy(slot, &mut copy.rows, 1),
        CopyPiece::End
    ));
}

#[test]
fn a_delete_removes_rows_once_and_a_push_after_it_makes_them_anew() {
    let mut engine = engine(&spec(r#"{"adagrad":{"learning_rate":1.0}}"#));
    let keys = by_slot((0..20).collect());
    apply(&mut engine, &push(1, 0, 0, &keys, -1.0)).unwrap();
    let (first, fresh) = (
        engine.export_slot(table_id("t"), 2).unwrap(),
        read(&engine, 3),
    );
    apply(&mut engine, &push(1, 1, 0, &keys, -1.0)).unwrap();
    let gone = by_slot((0..30).collect());
    let report = apply(&mut engine, &delete(1, 2, &gone)).unwrap();
    assert_eq!((report.gone.deleted, report.skipped), (20, 0));
    assert_eq!(engine.table(table_id("t")).unwrap().rows(), 0);
    assert_eq!(read(&engine, 3), 0.0);
    // Weights and state begin anew.
    apply(&mut engine, &push(1, 3, 0, &keys, -1.0)).unwrap();
    assert_eq!(read(&engine, 3), fresh);
    assert_eq!(engine.export_slot(table_id("t"), 2).unwrap(), first);
    // A retry, and a late copy, of the delete.
    let report = apply(&mut engine, &delete(1, 2, &gone)).unwrap();
    assert_eq!(
        (report.staged, report.skipped, report.gone.deleted),
        (0, SLOTS, 0)
    );
    assert_eq!(engine.table(table_id("t")).unwrap().rows(), 20);
}

#[test]
fn blocks_of_a_dense_table_cannot_be_deleted() {
    let json = r#"{"name":"t","kind":{"dense":{"shape":[4],"block_elements":2}},"initializer":{"zeros":{}},"optimizer":{"sgd":{"learning_rate":1.0}}}"#;
    let mut engine = engine(&Arc::new(TableSpec::from_json(json).unwrap()));
    let refused = stage(&mut engine, &delete(1, 0, &[1]), 1).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "table t is dense: only rows of sparse tables can be deleted"
    );
}

#[test]
fn a_delete_with_values_is_refused() {
    let mut engine = engine(&counter());
    let mut delete = Transaction::clone(&push(1, 0, 0, &[1], 1.0));
    delete.change = Change::Delete;
    assert!(stage(&mut engine, &Arc::new(delete), 1).is_err());
}
