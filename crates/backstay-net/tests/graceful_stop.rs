//! A server that stops: what it answers was applied, what it does not answer was not taken.

// What fails in a helper is a failed test; exact numbers are the point.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::float_cmp)]

mod support;

use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use backstay_core::hash::table_id;
use backstay_core::spec::TableSpec;
use backstay_core::wire::{Limits, Opcode, PullMeta};
use backstay_net::server::{Server, ServerOptions};
use support::{frame, hello, keys, options, pull, push, start, wait_until, Raw, PATIENCE};

/// Elements of the rows of table `wide`.
const WIDE: u32 = 16_384;
/// Keys whose rows together are more than the buffers of a connection hold: 64 MiB.
const MANY: u64 = 1024;

/// A server whose table `wide` gives answers that no socket buffer swallows.
fn start_wide() -> Server {
    let server = start(ServerOptions {
        limits: Limits {
            max_frame_bytes: 1 << 27,
            max_keys: 1 << 14,
        },
        ..options()
    });
    let spec = format!(
        r#"{{"name":"wide","kind":{{"sparse":{{"dim":{WIDE}}}}},"optimizer":{{"sgd":{{"learning_rate":1.0}}}}}}"#
    );
    let spec = TableSpec::from_json(&spec).unwrap();
    server.store().create_table(&Arc::new(spec), 1).unwrap();
    server
}

fn pull_wide(request_id: u64) -> Vec<u8> {
    let keys = keys(0, MANY);
    let meta = PullMeta {
        table: table_id("wide"),
        routing_version: 1,
        key_count: keys.len() as u32,
        row_elements: WIDE,
        origins: false,
        sums: false,
    };
    frame(
        Opcode::Pull,
        request_id,
        &meta.encode(),
        bytemuck::cast_slice(&keys),
    )
}

/// Wait until the server takes no new connections: it has been told to stop by then.
fn wait_until_stopping(address: std::net::SocketAddr) {
    wait_until("the stop", || TcpStream::connect(address).is_err());
}

/// Wait until the first bytes of an answer are here: it is being written.
fn wait_for_bytes(raw: &Raw) {
    assert_eq!(raw.stream.peek(&mut [0]).unwrap(), 1);
}

#[test]
fn an_idle_client_is_told() {
    let server = start(options());
    let mut raw = Raw::greeted(&server);
    let stopping = std::thread::spawn(move || server.stop(PATIENCE));
    raw.expect(Opcode::GoAway, 0);
    raw.expect_closed();
    drop(raw);
    assert!(stopping.join().unwrap(), "the stop was clean");
}

#[test]
fn the_request_being_served_is_answered_and_nothing_after_it_is_taken() {
    let server = start_wide();
    let (address, store) = (server.address(), Arc::clone(server.store()));
    let mut raw = Raw::greeted(&server);
    raw.send(&pull_wide(1));
    raw.send(&push(2, "t", &keys(0, 10), 99, 0));
    wait_for_bytes(&raw);
    let stopping = std::thread::spawn(move || server.stop(PATIENCE));
    wait_until_stopping(address);
    let reply = raw.expect(Opcode::PullReply, 1);
    assert_eq!(reply.body.len(), MANY as usize * WIDE as usize * 4);
    raw.expect(Opcode::GoAway, 0);
    raw.expect_closed();
    drop(raw);
    assert!(stopping.join().unwrap(), "the stop was clean");
    assert!(store.tables().iter().all(|table| table.rows == 0));
}

#[test]
fn an_answer_on_its_way_survives_the_stop_whatever_else_was_sent() {
    let server = start_wide();
    let address = server.address();
    let mut raw = Raw::greeted(&server);
    raw.send(&pull_wide(1));
    // Never read by the server: closing on top of it would take the answer back off the wire.
    raw.send(&push(2, "t", &keys(0, 8192), 99, 0));
    wait_for_bytes(&raw);
    let stopping = std::thread::spawn(move || server.stop(PATIENCE));
    wait_until_stopping(address);
    // All but what the buffers hold without our help; the rest only after the server is gone.
    let mut reader = raw.stream.try_clone().unwrap();
    let most = 32 + 16 + MANY * u64::from(WIDE) * 4 - (1 << 20);
    let sink = &mut std::io::sink();
    let taken = std::io::copy(&mut std::io::Read::take(&mut reader, most), sink).unwrap();
    assert_eq!(taken, most);
    assert!(stopping.join().unwrap(), "the stop was clean");
    let mut rest = Vec::new();
    std::io::Read::read_to_end(&mut reader, &mut rest).unwrap();
    // The end of the answer and the whole GoAway.
    assert_eq!(rest.len(), (1 << 20) + 32);
}

#[test]
fn pings_behind_the_stop_are_not_answered() {
    let server = start(options());
    let mut raw = Raw::greeted(&server);
    let stopping = std::thread::spawn(move || server.stop(PATIENCE));
    raw.expect(Opcode::GoAway, 0);
    // The connection is closing: this may fail, and must not be answered.
    let _ = std::io::Write::write_all(&mut raw.stream, &pull(1, "t", &[1]));
    raw.expect_closed();
    drop(raw);
    assert!(stopping.join().unwrap());
}

#[test]
fn a_client_that_says_nothing_does_not_hold_up_the_stop() {
    // Far longer than the grace given: neither a silent nor half a handshake is waited for.
    let server = start(ServerOptions {
        handshake_timeout: Duration::from_secs(3600),
        stall_timeout: Duration::from_secs(3600),
        ..options()
    });
    let mut silent = Raw::connect(&server);
    let mut half = Raw::connect(&server);
    half.send(&hello("c", "")[..20]);
    let mut stuck = Raw::greeted(&server);
    stuck.send(&push(1, "t", &keys(0, 10), 99, 0)[..100]);
    wait_until("three connections", || {
        server.snapshot().connections_open == 3
    });
    let stopping = std::thread::spawn(move || server.stop(PATIENCE));
    stuck.expect(Opcode::GoAway, 0);
    stuck.expect_closed();
    silent.expect_closed();
    half.expect_closed();
    assert!(stopping.join().unwrap(), "the stop was clean");
}

#[test]
fn clients_that_ignore_the_goodbye_are_left_behind() {
    let server = start(options());
    let (mut one, two) = (Raw::greeted(&server), Raw::greeted(&server));
    // They stay open to the end: the server closes by itself.
    assert!(server.stop(PATIENCE), "the stop was clean");
    one.expect(Opcode::GoAway, 0);
    drop((one, two));
}

#[test]
fn a_client_that_never_reads_is_cut_off_by_the_grace() {
    let server = start_wide();
    let mut deaf = Raw::greeted(&server);
    deaf.send(&pull_wide(1));
    wait_for_bytes(&deaf);
    let start = Instant::now();
    assert!(!server.stop(Duration::from_millis(200)), "it was cut off");
    assert!(start.elapsed() < PATIENCE / 2);
}
