//! Whole frames that ask for what cannot be: each gets a clear answer under its own number,
//! changes nothing, and the connection goes on. And what a slot remembers of a stream.

// What fails in a helper is a failed test; exact numbers are the point.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::float_cmp)]

mod support;

use std::time::Instant;

use backstay_core::hash::{table_id, SlotSpace};
use backstay_core::transaction::Change;
use backstay_core::wire::{CloseStream, Opcode, PushMeta};
use backstay_net::client::{ClientError, Deadline};
use backstay_net::server::Server;
use support::{
    assert_still_serves, block_on, client, client_options, frame, keys, options, pull, pull_meta,
    push, push_all, push_frame, push_meta, start, start_with_memory, Raw, DIM, PATIENCE, SLOTS,
};

const PROTOCOL: u16 = 1;
const UNKNOWN_TABLE: u16 = 3;
const INVALID_REQUEST: u16 = 5;
const NON_FINITE: u16 = 6;
const MEMORY_LIMIT: u16 = 7;
const LIMIT_EXCEEDED: u16 = 8;
const NOT_MASTER: u16 = 9;

fn rows(server: &Server) -> u64 {
    server.store().tables().iter().map(|table| table.rows).sum()
}

/// A request that is refused, on a connection that is served again afterwards.
fn assert_refused(bytes: &[u8], code: u16, words: &str) {
    let server = start(options());
    let mut raw = Raw::greeted(&server);
    raw.send(bytes);
    let meta = raw.expect_error(5, code, words);
    assert!(!meta.retry_safe);
    assert_eq!(rows(&server), 0, "something was applied");
    raw.send(&frame(Opcode::Ping, 6, &[], &[]));
    raw.expect(Opcode::Pong, 6);
    assert_eq!(server.snapshot().requests_refused, 1);
    assert_still_serves(&server);
}

/// A push of stream 99 with some field of its meta part changed.
fn changed_push(change: impl FnOnce(&mut PushMeta)) -> Vec<u8> {
    let mut meta = push_meta("t", 1, 99, 0, 0);
    change(&mut meta);
    push_frame(5, &meta, &[1], &[-1.0; DIM])
}

#[test]
fn a_pull_of_zero_keys() {
    assert_refused(&pull(5, "t", &[]), INVALID_REQUEST, "without keys");
}

#[test]
fn a_push_of_zero_keys() {
    assert_refused(&push(5, "t", &[], 99, 0), INVALID_REQUEST, "without keys");
}

#[test]
fn a_wrong_dimension() {
    let words = "rows of table t have 2 elements, not 3";
    let mut meta = pull_meta("t", 1);
    meta.row_elements = 3;
    let bytes = frame(Opcode::Pull, 5, &meta.encode(), &[0; 8]);
    assert_refused(&bytes, INVALID_REQUEST, words);
    let bytes = changed_push(|meta| meta.row_elements = 3);
    assert_refused(&bytes, INVALID_REQUEST, words);
}

#[test]
fn an_unknown_table() {
    let words = format!("no table with id {:#018x}", table_id("nowhere"));
    assert_refused(&pull(5, "nowhere", &[1]), UNKNOWN_TABLE, &words);
    assert_refused(&push(5, "nowhere", &[1], 99, 0), UNKNOWN_TABLE, &words);
}

#[test]
fn unsorted_keys() {
    let mut unsorted = keys(0, 100);
    unsorted.swap(10, 90);
    let words = "keys must be sorted by slot";
    assert_refused(&pull(5, "t", &unsorted), INVALID_REQUEST, words);
    assert_refused(&push(5, "t", &unsorted, 99, 0), INVALID_REQUEST, words);
}

#[test]
fn more_keys_than_the_limit() {
    let limit = u64::from(options().limits.max_keys);
    let bytes = pull(5, "t", &keys(0, limit + 1));
    assert_refused(&bytes, LIMIT_EXCEEDED, "max_keys_per_request");
}

#[test]
fn a_body_that_is_not_what_the_key_count_says() {
    let mut bytes = pull(5, "t", &[1, 2]);
    bytes[32 + 16] = 3;
    let words = "3 keys with 0 values each take 24 bytes, the body has 16";
    assert_refused(&bytes, INVALID_REQUEST, words);
    let words = "2 keys with 2 values each take 32 bytes, the body has 16";
    let bytes = changed_push(|meta| meta.key_count = 2);
    assert_refused(&bytes, INVALID_REQUEST, words);
}

#[test]
fn a_meta_part_of_the_wrong_length() {
    let meta = pull_meta("t", 1).encode();
    let bytes = frame(Opcode::Pull, 5, &meta[..23], &[0; 8]);
    assert_refused(
        &bytes,
        PROTOCOL,
        "4 more bytes of meta are needed, 3 are there",
    );
    let bytes = frame(Opcode::Pull, 5, &[&meta[..], &[0]].concat(), &[0; 8]);
    assert_refused(&bytes, PROTOCOL, "1 bytes too many in meta");
}

#[test]
fn an_unknown_kind_of_push() {
    let mut bytes = push(5, "t", &[1], 99, 0);
    bytes[32 + 60] = 3;
    assert_refused(&bytes, PROTOCOL, "unknown kind of push 3");
}

#[test]
fn a_delete_in_the_frame_of_another_change() {
    let mut bytes = push(5, "t", &[1], 99, 0);
    for kind in [7, 4] {
        bytes[32 + 60] = kind;
        let words = "a delete, an expiry or a decay came in the frame of a push";
        assert_refused(&bytes, PROTOCOL, words);
    }
    bytes[5] = Opcode::Delete as u8;
    assert_refused(
        &bytes,
        PROTOCOL,
        "a delete is of kind 4 and has no row_elements",
    );
    let mut meta = push_meta("t", 1, 99, 0, 0);
    meta.row_elements = 0;
    let bytes = frame(
        Opcode::Delete,
        5,
        &meta.encode(),
        bytemuck::cast_slice(&[1u64]),
    );
    assert_refused(
        &bytes,
        PROTOCOL,
        "a delete is of kind 4 and has no row_elements",
    );
    meta.change = Change::Delete;
    let two = bytemuck::cast_slice::<u64, u8>(&[1, 2]);
    let bytes = frame(Opcode::Delete, 5, &meta.encode(), two);
    let words = "1 keys with 0 values each take 8 bytes, the body has 16";
    assert_refused(&bytes, INVALID_REQUEST, words);
}

#[test]
fn a_learning_rate_scale_that_is_no_number() {
    for learning_rate_scale in [f32::NAN, f32::INFINITY] {
        let change = Change::update(learning_rate_scale);
        let bytes = changed_push(|meta| meta.change = change);
        assert_refused(&bytes, INVALID_REQUEST, "learning_rate_scale is ");
    }
}

#[test]
fn nan_where_the_table_refuses_it() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let meta = push_meta("t", 2, 99, 0, 0);
        let bytes = push_frame(5, &meta, &keys(0, 2), &[1.0, 1.0, 1.0, bad]);
        let words = format!("table t: gradient element 3 is {bad}");
        assert_refused(&bytes, NON_FINITE, &words);
    }
}

#[test]
fn nan_assigned_is_refused_even_where_gradients_are_clipped() {
    let mut meta = push_meta("clipped", 1, 99, 0, 0);
    meta.change = Change::Assign {
        only_if_absent: false,
    };
    let bytes = push_frame(5, &meta, &[1], &[1.0, f32::NAN]);
    assert_refused(&bytes, NON_FINITE, "element 1 is NaN");
}

#[test]
fn nan_where_the_table_clips_it() {
    let server = start(options());
    let mut raw = Raw::greeted(&server);
    let meta = push_meta("clipped", 2, 99, 0, 0);
    let two = keys(0, 2);
    let values = [f32::NAN, -0.5, f32::NEG_INFINITY, 7.0];
    raw.send(&push_frame(1, &meta, &two, &values));
    raw.expect_push_reply(1);
    raw.send(&pull(2, "clipped", &two));
    assert_eq!(raw.expect_rows(2), [0.0, 0.5, 1.0, -1.0]);
    assert_still_serves(&server);
}

#[test]
fn a_slot_that_is_not_here() {
    let server = start(options());
    let space = SlotSpace::new(SLOTS).unwrap();
    let owned: Vec<bool> = (0..SLOTS).map(|slot| slot < SLOTS / 2).collect();
    server.store().set_routing(2, &owned);
    let elsewhere = *keys(0, 100).last().unwrap();
    let slot = space.slot_of(elsewhere);
    assert!(slot >= SLOTS / 2);
    let mut raw = Raw::greeted(&server);
    let words = format!("slot {slot} is not served here as of routing version 2");
    for bytes in [
        pull(5, "t", &[elsewhere]),
        push(5, "t", &[elsewhere], 99, 0),
    ] {
        raw.send(&bytes);
        let meta = raw.expect_error(5, NOT_MASTER, &words);
        assert!(meta.retry_safe);
        assert_eq!(meta.routing_version, 2, "the client learns whom to follow");
    }
    assert_eq!(rows(&server), 0);
    // The slot moves in: the same push is taken now, once.
    server.store().set_routing(3, &[true; SLOTS as usize]);
    raw.send(&push(6, "t", &[elsewhere], 99, 0));
    assert_eq!(raw.expect_push_reply(6).applied_slots, 1);
    assert_still_serves(&server);
}

#[test]
fn rows_until_the_memory_limit() {
    const LIMIT: u64 = 1 << 20;
    let server = start_with_memory(options(), LIMIT);
    let mut raw = Raw::greeted(&server);
    let old = keys(0, 500);
    let mut sequence = 0;
    let refused = loop {
        let new = keys(sequence * 500, 500);
        let meta = push_meta("t", new.len(), 99, sequence, sequence);
        raw.send(&push_frame(5, &meta, &new, &vec![-1.0; 500 * DIM]));
        let received = raw.read().unwrap();
        sequence += 1;
        assert!(sequence < 1000, "the limit does not hold");
        if received.header.opcode == Opcode::Error {
            break String::from_utf8(received.body).unwrap();
        }
    };
    assert!(
        refused.contains("of 1048576 (memory_limit_bytes) are in use"),
        "{refused}"
    );
    assert!(
        server.snapshot().row_bytes <= LIMIT,
        "{}",
        server.snapshot().row_bytes
    );
    let before = rows(&server);

    // Twice, and more of them than may still fit, so that the refusal is seen not to be sticky and to be marked as one that passes.
    let fresh = keys(1 << 40, 2000);
    raw.send(&push(6, "t", &fresh, 98, 0));
    assert!(
        raw.expect_error(6, MEMORY_LIMIT, "add servers, raise the limit")
            .retry_safe
    );
    assert_eq!(rows(&server), before);

    // Rows that exist go on learning, and everything can be read.
    raw.send(&push(7, "t", &old, 97, 0));
    raw.expect_push_reply(7);
    raw.send(&pull(8, "t", &old));
    assert_eq!(raw.expect_rows(8), vec![2.0; 500 * DIM]);
    raw.send(&pull(9, "t", &fresh));
    assert_eq!(raw.expect_rows(9), vec![0.0; 2000 * DIM]);
    assert_eq!(rows(&server), before, "a pull creates no row");
}

#[test]
fn the_same_push_again_is_answered_as_skipped() {
    let server = start(options());
    let some = keys(0, 20);
    let space = SlotSpace::new(SLOTS).unwrap();
    let mut slots: Vec<u32> = some.iter().map(|&key| space.slot_of(key)).collect();
    slots.dedup();
    let slots = slots.len() as u32;
    let mut raw = Raw::greeted(&server);
    // From another connection, too: the memory belongs to the slot, not to the session.
    let mut other = Raw::greeted(&server);
    raw.send(&push(1, "t", &some, 99, 0));
    let first = raw.expect_push_reply(1);
    assert_eq!((first.applied_slots, first.skipped_slots), (slots, 0));
    for id in 2..5 {
        other.send(&push(id, "t", &some, 99, 0));
        let again = other.expect_push_reply(id);
        assert_eq!((again.applied_slots, again.skipped_slots), (0, slots));
    }
    raw.send(&pull(6, "t", &some));
    assert_eq!(raw.expect_rows(6), vec![1.0; 20 * DIM]);
    let counts = server.snapshot();
    assert_eq!((counts.pushes_applied, counts.pushes_repeated), (1, 3));
    assert_still_serves(&server);
}

#[test]
fn a_push_that_was_applied_in_some_slots_is_completed() {
    let server = start(options());
    let mut raw = Raw::greeted(&server);
    let all = keys(0, 20);
    let space = SlotSpace::new(SLOTS).unwrap();
    // As after a failure in between: its first slot has it, the others do not.
    let first_slot: Vec<u64> = all
        .iter()
        .copied()
        .take_while(|&key| space.slot_of(key) == space.slot_of(all[0]))
        .collect();
    raw.send(&push(1, "t", &first_slot, 99, 0));
    raw.expect_push_reply(1);
    raw.send(&push(2, "t", &all, 99, 0));
    let reply = raw.expect_push_reply(2);
    assert_eq!(reply.skipped_slots, 1);
    assert!(reply.applied_slots > 0);
    raw.send(&pull(3, "t", &all));
    assert_eq!(raw.expect_rows(3), vec![1.0; 20 * DIM]);
    assert_still_serves(&server);
}

#[test]
fn a_sequence_beyond_the_window() {
    let beyond = |sequence, floor| {
        let meta = push_meta("t", 1, 99, sequence, floor);
        push_frame(5, &meta, &[1], &[-1.0; DIM])
    };
    let words = "must lie within 128 above its floor";
    assert_refused(&beyond(128, 0), INVALID_REQUEST, words);
    assert_refused(&beyond(u64::MAX, 0), INVALID_REQUEST, words);
    assert_refused(&beyond(4, 5), INVALID_REQUEST, words);
    let server = start(options());
    let mut raw = Raw::greeted(&server);
    // The last of the window, the window at the end of all numbers, and a late one below it.
    for (sequence, floor, applied) in [(127, 0, 1), (u64::MAX, u64::MAX - 127, 1), (5, 0, 0)] {
        raw.send(&beyond(sequence, floor));
        assert_eq!(raw.expect_push_reply(5).applied_slots, applied);
    }
    assert_still_serves(&server);
}

#[test]
fn a_late_copy_after_its_stream_was_closed_is_skipped() {
    let server = start(options());
    let mut raw = Raw::greeted(&server);
    let close = CloseStream {
        stream: push_meta("t", 1, 99, 0, 0).id.stream,
        routing_version: u64::MAX,
    };
    raw.send(&push(1, "t", &[1], 99, 0));
    assert_eq!(raw.expect_push_reply(1).applied_slots, 1);
    // Closing twice is as good as once.
    for id in [2, 3] {
        raw.send(&frame(Opcode::CloseStream, id, &close.encode(), &[]));
        raw.expect(Opcode::CloseStreamReply, id);
    }
    raw.send(&push(4, "t", &[1], 99, 0));
    assert_eq!(raw.expect_push_reply(4).applied_slots, 0);
    assert_still_serves(&server);
}

#[test]
fn pipelined_requests_are_answered_in_order() {
    let server = start(options());
    let mut raw = Raw::greeted(&server);
    let mut bytes = Vec::new();
    // Numbers fall, so that an order by number would show.
    for n in 0..40_u64 {
        bytes.extend(push(1000 - 3 * n, "t", &[1], 99, n));
        bytes.extend(pull(999 - 3 * n, "t", &[1]));
        bytes.extend(pull(998 - 3 * n, "t", &[]));
    }
    raw.send(&bytes);
    for n in 0..40_u64 {
        raw.expect_push_reply(1000 - 3 * n);
        // Each pull sees the pushes before it, and none behind it.
        assert_eq!(raw.expect_rows(999 - 3 * n), [(n + 1) as f32; DIM]);
        raw.expect_error(998 - 3 * n, INVALID_REQUEST, "without keys");
    }
    assert_still_serves(&server);
}

/// A push by a real client to so many keys of slot 0, which no client cuts into parts.
fn push_to_one_slot(server: &Server, count: usize) -> Result<(), ClientError> {
    let space = SlotSpace::new(SLOTS).unwrap();
    let keys: Vec<u64> = (0..u64::MAX)
        .filter(|&key| space.slot_of(key) == 0)
        .take(count)
        .collect();
    let mut options = client_options();
    options.max_frame_bytes = 1 << 30;
    let address = server.address().to_string();
    block_on(async {
        let (client, _) = client(&address, options)?;
        let plan = client.plan(&keys)?;
        let values = vec![-1.0; count * DIM];
        push_all(&client, &plan, &values, Deadline::after(PATIENCE)).await
    })
}

#[test]
fn a_client_whose_batch_is_over_a_limit_learns_it_at_once() {
    let server = start(options());
    for (count, words) in [
        (20_000, "20000 keys for pserver"),
        (80_000, "1280000 bytes for pserver"),
    ] {
        let start = Instant::now();
        let error = push_to_one_slot(&server, count).unwrap_err();
        // Not tried again until the deadline: no later try would be smaller.
        assert!(start.elapsed() < PATIENCE / 2);
        assert!(error.to_string().contains(words), "{error}");
        assert!(matches!(error, ClientError::LimitExceeded(_)), "{error:?}");
    }
    assert_eq!(rows(&server), 0);
    assert_still_serves(&server);
}
