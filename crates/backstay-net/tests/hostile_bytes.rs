//! Bytes that are no proper frames, and clients that stop, stall or vanish, against a real
//! server. Each test is named after the attack and ends with a good client being served.

// What fails in a helper is a failed test; exact numbers are the point.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::float_cmp)]

mod support;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use backstay_core::wire::{checksum, Opcode, FLAG_CHECKSUM, HEADER_BYTES, MAX_META_BYTES};
use backstay_net::server::ServerOptions;
use support::{
    assert_still_serves, frame, head, hello, keys, options, pull, pull_meta, push, start,
    wait_until, Raw,
};

/// Short enough to wait for, long enough for a loaded machine to do honest work in.
const SHORT: Duration = Duration::from_millis(400);

const PROTOCOL: u16 = 1;
const UNAUTHENTICATED: u16 = 2;
const LIMIT_EXCEEDED: u16 = 8;

/// One frame from a greeted client that the server answers by an error and by closing.
fn assert_breaks_the_connection(bytes: &[u8], request_id: u64, code: u16, words: &str) {
    let server = start(options());
    let mut raw = Raw::greeted(&server);
    raw.send(bytes);
    raw.expect_error(request_id, code, words);
    raw.expect_closed();
    assert_eq!(server.snapshot().frames_broken, 1);
    assert_still_serves(&server);
}

#[test]
fn wrong_magic() {
    let mut bytes = frame(Opcode::Ping, 5, &[], &[]);
    bytes[0] = b'X';
    assert_breaks_the_connection(&bytes, 0, PROTOCOL, "instead of 0x59534b42");
}

#[test]
fn a_browser_calls() {
    let server = start(options());
    let mut raw = Raw::connect(&server);
    raw.send(b"GET / HTTP/1.1\r\nHost: pserver\r\nAccept: */*\r\n\r\n");
    raw.expect_error(0, PROTOCOL, "this port speaks backstay's data plane");
    raw.expect_closed();
    assert_still_serves(&server);
}

#[test]
fn wrong_version() {
    let mut bytes = frame(Opcode::Ping, 5, &[], &[]);
    bytes[4] = 3;
    assert_breaks_the_connection(&bytes, 0, PROTOCOL, "protocol version 3 came, 2 is spoken");
}

#[test]
fn a_hello_of_a_later_version_is_answered_in_ours() {
    let server = start(options());
    let mut raw = Raw::connect(&server);
    let mut bytes = hello("c", "");
    bytes[4] = 9;
    raw.send(&bytes);
    // `read` insists on version 2 in the header.
    raw.expect_error(0, PROTOCOL, "protocol version 9 came, 2 is spoken");
    raw.expect_closed();
    assert_still_serves(&server);
}

#[test]
fn unknown_opcode() {
    let mut bytes = frame(Opcode::Ping, 5, &[], &[]);
    bytes[5] = 0x7A;
    assert_breaks_the_connection(&bytes, 0, PROTOCOL, "unknown opcode 0x7a");
}

#[test]
fn unknown_flags() {
    let mut bytes = frame(Opcode::Ping, 5, &[], &[]);
    bytes[6] = 0x82;
    assert_breaks_the_connection(&bytes, 0, PROTOCOL, "unknown flags 0x0082");
}

#[test]
fn a_meta_part_over_its_limit() {
    let bytes = head(Opcode::Ping, 5, MAX_META_BYTES + 1, 0);
    assert_breaks_the_connection(&bytes, 0, PROTOCOL, "4097 bytes of meta");
}

#[test]
fn a_frame_over_the_limit() {
    // With the request's number, for the header was sound: its sender learns that it is final.
    let limit = options().limits.max_frame_bytes;
    let bytes = head(Opcode::Push, 5, 64, limit - 63);
    assert_breaks_the_connection(&bytes, 5, LIMIT_EXCEEDED, "max_frame_bytes");
}

#[test]
fn two_to_the_32_keys_announced_in_the_header_and_none_sent() {
    let bytes = head(Opcode::Pull, 5, 24, (1 << 32) * 8);
    assert_breaks_the_connection(&bytes, 5, LIMIT_EXCEEDED, "34359738392 bytes announced");
}

#[test]
fn a_body_of_two_to_the_64_bytes() {
    let bytes = head(Opcode::Pull, 5, 24, u64::MAX);
    assert_breaks_the_connection(&bytes, 5, LIMIT_EXCEEDED, "max_frame_bytes");
}

#[test]
fn two_to_the_32_keys_announced_in_the_meta_and_none_sent() {
    let server = start(options());
    let mut raw = Raw::greeted(&server);
    let mut meta = pull_meta("t", 0);
    meta.key_count = u32::MAX;
    raw.send(&frame(Opcode::Pull, 5, &meta.encode(), &[]));
    raw.expect_error(5, LIMIT_EXCEEDED, "4294967295 keys in one request");
    // The frame itself was whole: the connection goes on.
    raw.send(&pull(6, "t", &[1]));
    raw.expect_rows(6);
    assert_still_serves(&server);
}

#[test]
fn a_body_announced_and_never_sent_holds_up_nobody() {
    let server = start(options());
    let mut raw = Raw::greeted(&server);
    raw.send(&head(Opcode::Pull, 5, 24, 1 << 19));
    raw.send(&pull_meta("t", 1 << 16).encode());
    assert_still_serves(&server);
    raw.finish_sending();
    raw.expect_closed();
    assert_still_serves(&server);
}

#[test]
fn a_frame_cut_off_anywhere() {
    let server = start(options());
    let bytes = push(5, "t", &keys(0, 4), 99, 0);
    let rows = || server.store().tables().iter().map(|t| t.rows).sum::<u64>();
    for length in [1, 4, 31, 32, 33, 95, 96, 97, 127, bytes.len() - 1] {
        let mut raw = Raw::greeted(&server);
        raw.send(&bytes[..length]);
        raw.finish_sending();
        raw.expect_closed();
        assert_eq!(rows(), 0, "a push of {length} bytes was applied");
    }
    assert_still_serves(&server);
}

#[test]
fn a_client_killed_in_the_middle_of_a_push() {
    let server = start(options());
    let bytes = push(5, "t", &keys(0, 4096), 99, 0);
    let mut raw = Raw::greeted(&server);
    raw.send(&bytes[..bytes.len() / 2]);
    drop(raw);
    wait_until("the end of the session", || {
        server.snapshot().connections_open == 0
    });
    assert!(server.store().tables().iter().all(|table| table.rows == 0));
    // Its stream is not burnt: the same push, whole, is applied.
    let mut raw = Raw::greeted(&server);
    raw.send(&bytes);
    assert_eq!(raw.expect_push_reply(5).skipped_slots, 0);
    assert_still_serves(&server);
}

#[test]
fn a_client_that_stops_in_the_middle_of_a_frame() {
    let server = start(ServerOptions {
        stall_timeout: SHORT,
        ..options()
    });
    for length in [1, 40, 100] {
        let mut raw = Raw::greeted(&server);
        raw.send(&push(5, "t", &keys(0, 4), 99, 0)[..length]);
        raw.expect_closed();
    }
    assert!(server.store().tables().iter().all(|table| table.rows == 0));
    assert_still_serves(&server);
}

#[test]
fn a_client_that_says_nothing_between_frames_is_left_alone() {
    let server = start(ServerOptions {
        stall_timeout: SHORT,
        handshake_timeout: SHORT,
        ..options()
    });
    let mut idle = Raw::greeted(&server);
    // Another one runs into the time limit, so that much time has passed for sure.
    let mut silent = Raw::connect(&server);
    silent.expect_closed();
    idle.send(&frame(Opcode::Ping, 1, &[], &[]));
    idle.expect(Opcode::Pong, 1);
    assert_still_serves(&server);
}

#[test]
fn a_client_that_connects_and_says_nothing() {
    let server = start(ServerOptions {
        handshake_timeout: SHORT,
        ..options()
    });
    let mut silent = Raw::connect(&server);
    assert_still_serves(&server);
    silent.expect_closed();
    assert_still_serves(&server);
}

#[test]
fn half_a_hello_and_then_nothing() {
    let server = start(ServerOptions {
        handshake_timeout: SHORT,
        ..options()
    });
    let mut slow = Raw::connect(&server);
    slow.send(&hello("c", "")[..40]);
    slow.expect_closed();
    assert_still_serves(&server);
}

#[test]
fn a_client_that_never_reads_its_answers() {
    let server = start(ServerOptions {
        stall_timeout: SHORT,
        ..options()
    });
    let mut deaf = Raw::greeted(&server);
    let request = pull(1, "t", &keys(0, 8192));
    // Until the buffers of both sides are full and the server gives the connection up.
    deaf.stream.set_write_timeout(Some(SHORT)).unwrap();
    while deaf.stream.write_all(&request).is_ok() {}
    assert_still_serves(&server);
    wait_until("the end of the session", || {
        server.snapshot().connections_open == 0
    });
}

#[test]
fn too_many_connections() {
    let server = start(ServerOptions {
        max_connections: 2,
        ..options()
    });
    let first = Raw::greeted(&server);
    let mut second = Raw::greeted(&server);
    let mut third = Raw::connect(&server);
    third.send(&hello("c", ""));
    let meta = third.expect_error(0, LIMIT_EXCEEDED, "2 connections are open, the limit");
    assert!(meta.retry_safe);
    third.expect_closed();
    // Open connections are not disturbed.
    second.send(&frame(Opcode::Ping, 1, &[], &[]));
    second.expect(Opcode::Pong, 1);
    drop((first, third));
    wait_until("room for another", || {
        server.snapshot().connections_open == 1
    });
    assert_eq!(server.snapshot().connections_refused, 1);
    assert_still_serves(&server);
}

#[test]
fn a_wrong_token() {
    let server = start(ServerOptions {
        token: Some("secret".into()),
        ..options()
    });
    for (token, words) in [
        ("", "a token is needed"),
        ("secreT", "the token is wrong"),
        ("secret2", "the token is wrong"),
    ] {
        let mut raw = Raw::connect(&server);
        raw.send(&hello("c", token));
        raw.expect_error(0, UNAUTHENTICATED, words);
        raw.expect_closed();
    }
    let mut good = support::client_options();
    good.token = Some("secret".into());
    support::use_well(&server.address().to_string(), good).unwrap();
}

#[test]
fn a_wrong_cluster() {
    let server = start(options());
    let mut raw = Raw::connect(&server);
    raw.send(&hello("other", ""));
    raw.expect_error(0, UNAUTHENTICATED, r#"this is cluster "c", not "other""#);
    raw.expect_closed();
    assert_still_serves(&server);
}

#[test]
fn a_name_whose_echo_is_cut_is_still_text() {
    let server = start(options());
    // Escaped in the answer, which grows over its limit; the odd byte moves the cut into a letter.
    for pad in ["", "x", "xy", "xyz"] {
        let mut raw = Raw::connect(&server);
        let name = format!("{pad}{}{}", "\u{1}".repeat(800), "ä".repeat(100));
        raw.send(&hello(&name, ""));
        raw.expect_error(0, UNAUTHENTICATED, "this is cluster");
        raw.expect_closed();
    }
    assert_still_serves(&server);
}

#[test]
fn a_text_longer_than_its_limit() {
    let server = start(options());
    let mut raw = Raw::connect(&server);
    let mut meta = 1025_u16.to_le_bytes().to_vec();
    meta.extend([b'x'; 1025]);
    meta.extend([0; 4]);
    raw.send(&frame(Opcode::Hello, 0, &meta, &[]));
    raw.expect_error(0, PROTOCOL, "a string field of 1025 bytes");
    raw.expect_closed();
    assert_still_serves(&server);
}

#[test]
fn a_request_before_the_handshake() {
    let server = start(options());
    let mut raw = Raw::connect(&server);
    raw.send(&push(3, "t", &[1], 99, 0));
    raw.expect_error(0, PROTOCOL, "the first frame must be a Hello");
    raw.expect_closed();
    assert!(server.store().tables().iter().all(|table| table.rows == 0));
    assert_still_serves(&server);
}

#[test]
fn a_bulky_frame_before_the_handshake() {
    let server = start(options());
    let mut raw = Raw::connect(&server);
    raw.send(&head(Opcode::Hello, 0, 10, 1 << 16));
    raw.expect_error(0, LIMIT_EXCEEDED, "the limit is 4096");
    raw.expect_closed();
    assert_still_serves(&server);
}

#[test]
fn a_body_where_none_belongs() {
    let server = start(options());
    let mut raw = Raw::connect(&server);
    raw.send(&head(Opcode::Hello, 0, 6, 8));
    raw.send(&[0; 6 + 8]);
    raw.expect_error(0, PROTOCOL, "a Hello has no body");
    raw.expect_closed();

    let mut raw = Raw::greeted(&server);
    raw.send(&frame(Opcode::Ping, 1, &[], &[0; 8]));
    raw.expect_error(1, PROTOCOL, "a Ping has no body");
    raw.send(&frame(Opcode::Ping, 2, &[0; 8], &[]));
    raw.expect_error(2, PROTOCOL, "8 bytes too many in meta");
    raw.send(&frame(Opcode::CloseStream, 3, &[0; 16], &[0; 8]));
    raw.expect_error(3, PROTOCOL, "a CloseStream has no body");
    raw.send(&frame(Opcode::Ping, 4, &[], &[]));
    raw.expect(Opcode::Pong, 4);
    assert_still_serves(&server);
}

#[test]
fn a_reply_sent_as_a_request() {
    let server = start(options());
    let mut raw = Raw::greeted(&server);
    let opcodes = [
        Opcode::Hello,
        Opcode::HelloReply,
        Opcode::Pong,
        Opcode::PullReply,
        Opcode::PushReply,
        Opcode::CloseStreamReply,
        Opcode::GoAway,
        Opcode::Error,
    ];
    for (opcode, id) in opcodes.into_iter().zip(1..) {
        raw.send(&frame(opcode, id, &[], &[]));
        raw.expect_error(id, PROTOCOL, "is not a request");
    }
    assert_still_serves(&server);
}

fn with_checksum(mut bytes: Vec<u8>, meta_bytes: usize, wrong_by: u32) -> Vec<u8> {
    let (meta, body) = bytes[HEADER_BYTES..].split_at(meta_bytes);
    let sum = checksum(meta, body) ^ wrong_by;
    bytes[6..8].copy_from_slice(&FLAG_CHECKSUM.to_le_bytes());
    bytes[20..24].copy_from_slice(&sum.to_le_bytes());
    bytes
}

#[test]
fn a_right_checksum_is_accepted() {
    let server = start(options());
    let mut raw = Raw::greeted(&server);
    raw.send(&with_checksum(push(5, "t", &keys(0, 9), 99, 0), 64, 0));
    raw.expect_push_reply(5);
    assert_still_serves(&server);
}

#[test]
fn bytes_damaged_on_their_way() {
    let server = start(options());
    for wrong_by in [1, 1 << 31] {
        let mut raw = Raw::greeted(&server);
        raw.send(&with_checksum(push(5, "t", &[1], 99, 0), 64, wrong_by));
        raw.expect_error(0, PROTOCOL, "the frame's checksum does not fit its bytes");
        raw.expect_closed();
    }
    assert!(server.store().tables().iter().all(|table| table.rows == 0));
    assert_still_serves(&server);
}

#[test]
fn a_checksum_without_its_flag() {
    let mut bytes = frame(Opcode::Ping, 5, &[], &[]);
    bytes[20] = 1;
    assert_breaks_the_connection(&bytes, 0, PROTOCOL, "a checksum came without its flag");
}

#[test]
fn a_client_that_keeps_sending_into_a_refusal_still_learns_the_reason() {
    let server = start(options());
    let mut raw = Raw::greeted(&server);
    let mut chunk = head(Opcode::Push, 5, 64, 1 << 40);
    chunk.resize(1 << 20, 0);
    // Everything is taken off the wire: a sender that is cut off would see a reset instead.
    for _ in 0..16 {
        raw.send(&chunk);
    }
    raw.expect_error(5, LIMIT_EXCEEDED, "max_frame_bytes");
    raw.expect_closed();
    assert_still_serves(&server);
}

#[test]
fn many_frames_in_one_write_and_one_frame_in_many_writes() {
    let server = start(options());
    let mut raw = Raw::greeted(&server);
    let mut bytes = Vec::new();
    for id in 1..=200 {
        bytes.extend(frame(Opcode::Ping, id, &[], &[]));
    }
    raw.send(&bytes);
    (1..=200).for_each(|id| drop(raw.expect(Opcode::Pong, id)));
    for byte in push(201, "t", &[1], 99, 0) {
        raw.send(&[byte]);
    }
    raw.expect_push_reply(201);
    assert_still_serves(&server);
}

#[test]
fn the_port_is_taken_by_something_that_answers_rubbish() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let stranger = std::thread::spawn(move || {
        let (mut stream, _): (TcpStream, _) = listener.accept().unwrap();
        stream
            .write_all(b"220 mail.example.org ESMTP service ready\r\n")
            .unwrap();
        // Until the client hangs up.
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
    });
    let error = support::use_well(&address, support::client_options()).unwrap_err();
    assert!(error.to_string().contains(&address), "{error}");
    assert!(
        error.to_string().contains("instead of 0x59534b42"),
        "{error}"
    );
    stranger.join().unwrap();
}
