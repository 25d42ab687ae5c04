//! Streams of tasks of which nothing was heard for long: they end in the slot's order, what comes
//! late is refused, and nothing counts twice.

// What fails in a helper is a failed test; exact numbers are the point.
#![allow(clippy::unwrap_used, clippy::float_cmp)]

mod engine_support;

use std::sync::Arc;

use backstay_core::engine::Engine;
use backstay_core::error::Refusal;
use backstay_core::stream::{StreamId, TransactionId};
use backstay_core::transaction::Transaction;
use engine_support::*;

const KEY: u64 = 7;

fn stream(job: u64) -> StreamId {
    StreamId {
        job,
        pass: 0,
        task: 0,
    }
}

fn expiry(job: u64) -> Arc<Transaction> {
    let id = TransactionId {
        stream: stream(job).expiry(),
        sequence: u64::MAX,
    };
    Arc::new(Transaction::close(id, 0..SLOTS))
}

fn refused(engine: &mut Engine, push: &Arc<Transaction>) -> bool {
    let refusal = apply(engine, push).unwrap_err();
    let named = matches!(&refusal, Refusal::InvalidRequest(why) if why.contains("has expired"));
    named && !refusal.retry_safe()
}

/// I2: a push of a stream that has expired counts nowhere again.
#[test]
fn what_comes_late_of_an_expired_stream_is_refused_and_nothing_counts_twice() {
    let mut engine = engine(&counter());
    apply(&mut engine, &push(1, 0, 0, &[KEY], -1.0)).unwrap();
    apply(&mut engine, &push(2, 0, 0, &[KEY], -1.0)).unwrap();
    let before = engine.stream_bytes();
    let report = apply(&mut engine, &expiry(1)).unwrap();
    assert_eq!((report.staged, report.skipped), (SLOTS, 0));
    assert!(engine.stream_bytes() < before, "its memory is free");
    // The same push again, and one that never came.
    assert!(refused(&mut engine, &push(1, 0, 0, &[KEY], -1.0)));
    assert!(refused(&mut engine, &push(1, 1, 0, &[KEY], -1.0)));
    assert_eq!(read(&engine, KEY), 2.0);
    // Others go on, and a second expiry changes nothing.
    apply(&mut engine, &push(2, 1, 0, &[KEY], -1.0)).unwrap();
    let again = apply(&mut engine, &expiry(1)).unwrap();
    assert_eq!((again.staged, again.skipped), (0, SLOTS));
    assert_eq!(read(&engine, KEY), 3.0);
}

/// A stream that its worker has closed is done: what comes late is a copy, and is skipped.
#[test]
fn a_closed_stream_is_not_an_expired_one() {
    let mut engine = engine(&counter());
    apply(&mut engine, &push(1, 0, 0, &[KEY], -1.0)).unwrap();
    end(&mut engine, 1);
    let late = apply(&mut engine, &push(1, 0, 0, &[KEY], -1.0)).unwrap();
    assert_eq!((late.staged, late.skipped), (0, 1));
    assert_eq!(read(&engine, KEY), 1.0);
}

/// A push that comes while the end of its stream waits for backups waits, too.
#[test]
fn nothing_passes_an_expiry_that_is_under_way() {
    let mut engine = engine(&counter());
    apply(&mut engine, &push(1, 0, 0, &[KEY], -1.0)).unwrap();
    let end = expiry(1);
    let (_, places) = stage(&mut engine, &end, 1).unwrap();
    let late = push(1, 1, 0, &[KEY], -1.0);
    assert_eq!(apply(&mut engine, &late).unwrap_err(), Refusal::InFlight);
    engine.commit(&end, &places).unwrap();
    assert!(refused(&mut engine, &late));
    // It was undone after all.
    let mut other = engine_with_a_push();
    let (_, places) = stage(&mut other, &end, 1).unwrap();
    for place in places {
        other.discard_from(place.run.slot, place.position);
    }
    apply(&mut other, &late).unwrap();
    assert_eq!(read(&other, KEY), 2.0);
}

fn engine_with_a_push() -> Engine {
    let mut engine = engine(&counter());
    apply(&mut engine, &push(1, 0, 0, &[KEY], -1.0)).unwrap();
    engine
}

/// A replica that was copied after the expiry refuses the same, and is equal.
#[test]
fn a_copy_knows_what_has_expired() {
    let mut one = engine_with_a_push();
    apply(&mut one, &expiry(1)).unwrap();
    let mut other = engine(&counter());
    let slot = space().slot_of(KEY);
    let rows = one
        .export_slot(push(1, 0, 0, &[KEY], 0.0).table, slot)
        .unwrap();
    let table = push(1, 0, 0, &[KEY], 0.0).table;
    other
        .add_rows(table, slot, (&rows.0, &rows.1, &rows.2))
        .unwrap();
    other.set_memory(slot, &one.memory(slot));
    assert_eq!(one.digest(slot), other.digest(slot));
    assert!(refused(&mut other, &push(1, 1, 0, &[KEY], -1.0)));
}
