//! The limit of memory holds: what is counted, and who gives way when it is reached. Rows of tables
//! with a capacity go first, then new rows are refused, and pulls go on.

// What fails in a helper is a failed test; exact numbers are the point.
#![allow(clippy::unwrap_used, clippy::float_cmp)]

mod support;

use std::net::TcpListener;
use std::sync::Arc;
use std::time::Instant;

use backstay_core::error::Refusal;
use backstay_core::hash::{table_id, SlotSpace};
use backstay_core::replication::Rows;
use backstay_core::spec::TableSpec;
use backstay_core::transaction::Change;
use backstay_net::client::{Client, ClientError, Deadline, PushRequest};
use backstay_net::memory::{Memory, Part};
use backstay_net::server::Server;
use backstay_net::store::Store;
use support::*;

const LIMIT: u64 = 16 << 20;
const KEYS: u64 = 2000;
/// Of a row.
const WIDE: usize = 32;

/// A server whose tables `plain`, `bounded` (with a capacity that is never reached) and `counted`
/// (rows after the second push) have rows of zeros.
fn server(limit: u64) -> Server {
    let store = Store::new(SlotSpace::new(SLOTS).unwrap(), limit);
    store.set_routing(1, &[true; SLOTS as usize]);
    for (name, lifetime) in [
        ("plain", ""),
        ("bounded", r#","lifetime":{"capacity":{"rows":1000000000}}"#),
        (
            "counted",
            r#","lifetime":{"admission":{"after":{"occurrences":2}}}"#,
        ),
    ] {
        let spec = format!(
            r#"{{"name":"{name}","kind":{{"sparse":{{"dim":{WIDE}}}}},"optimizer":{{"sgd":{{"learning_rate":1.0}}}}{lifetime}}}"#
        );
        let spec = Arc::new(TableSpec::from_json(&spec).unwrap());
        store.create_table(&spec, 1).unwrap();
    }
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    Server::start(listener, options(), Arc::new(store)).unwrap()
}

fn memory_of(server: &Server) -> &Memory {
    server.store().memory()
}

fn client_of(server: &Server) -> Arc<Client> {
    client(&server.address().to_string(), client_options())
        .unwrap()
        .0
}

/// Push -1 to `KEYS` rows, the first of which has this key.
async fn push_rows(client: &Client, table: &str, first: u64) -> Result<(), ClientError> {
    let keys: Vec<u64> = (first..first + KEYS).collect();
    let values = vec![-1.0; keys.len() * WIDE];
    let change = Change::update(1.0);
    let request = PushRequest {
        require_finite: true,
        ..PushRequest::new(table_id(table), WIDE, change, &values)
    };
    let deadline = Deadline::after(PATIENCE);
    let push = client
        .push(&request, &client.plan(&keys)?, deadline)
        .await?;
    push.wait(client).await
}

async fn value_of(client: &Arc<Client>, table: &str, key: u64) -> f32 {
    let plan = Arc::new(client.plan(&[key]).unwrap());
    let mut row = vec![f32::NAN; WIDE];
    let deadline = Deadline::after(PATIENCE);
    let pull = client.pull(table_id(table), WIDE, &plan, deadline).await;
    pull.unwrap().finish(&mut row, deadline).await.unwrap();
    row[0]
}

#[test]
fn each_part_is_counted_where_it_grows() {
    let server = server(0);
    let memory = memory_of(&server);
    assert_eq!(memory.used(), 0);
    block_on(async {
        let client = client_of(&server);
        push_rows(&client, "plain", 0).await.unwrap();
        let rows = memory.of(Part::Rows);
        assert!(rows >= KEYS * (8 + 4 * WIDE as u64));
        assert_eq!(rows, server.store().usage("plain").unwrap().bytes);
        // A stream is 32 bytes in each slot.
        assert!(memory.of(Part::Streams) >= u64::from(SLOTS) * 32);
        assert_eq!(memory.of(Part::Counters), 0);
        push_rows(&client, "counted", 0).await.unwrap();
        let counted = server.store().usage("counted").unwrap();
        assert_eq!(memory.of(Part::Counters), counted.counters.1);
        assert!(memory.of(Part::Counters) >= KEYS * 8);
        // What was read ahead, and soon again the frame of a part of the push, which serves the next one.
        let begun = Instant::now();
        while memory.of(Part::Buffers) < 64 * 1024 + 32 * 1024 {
            assert!(begun.elapsed() < PATIENCE, "{:?}", memory.parts());
            tokio::task::yield_now().await;
        }
        assert_eq!(memory.of(Part::Transactions), 0);
    });
    let parts = server.snapshot().memory;
    let summed = parts.rows + parts.counters + parts.streams;
    assert_eq!(summed, server.snapshot().row_bytes);
    assert_eq!((parts.copies, parts.process), (0, 0));
}

/// Twice as many keys as fit, to a table with a capacity: no push is refused, rows go.
#[test]
fn a_table_with_a_capacity_makes_room_for_its_new_rows() {
    let server = server(LIMIT);
    let memory = memory_of(&server);
    let fit = LIMIT / (8 + 4 * WIDE as u64 + 4);
    block_on(async {
        let client = client_of(&server);
        for first in (0..2 * fit).step_by(KEYS as usize) {
            push_rows(&client, "bounded", first).await.unwrap();
            assert!(memory.used() <= LIMIT, "{} of {LIMIT}", memory.used());
        }
        assert!(server.snapshot().rows_evicted > 0);
        assert!(
            memory.used() > LIMIT / 5 * 4,
            "{} of {LIMIT}",
            memory.used()
        );
        assert_eq!(
            server.snapshot().requests_refused_by_code["memory_limit"],
            0
        );
    });
}

/// A table without a capacity gets the room of one that has one, until that has none to give. Then
/// new rows are refused; those that are there are read and go on to learn.
#[test]
fn other_tables_get_the_room_of_one_with_a_capacity_before_they_are_refused() {
    let server = server(LIMIT);
    let memory = memory_of(&server);
    let rows = |table: &str| server.store().usage(table).unwrap().rows;
    let fit = LIMIT / (8 + 4 * WIDE as u64 + 4);
    block_on(async {
        let client = client_of(&server);
        for first in (0..fit).step_by(KEYS as usize) {
            push_rows(&client, "bounded", first).await.unwrap();
        }
        let before = rows("bounded");
        let mut first = 0;
        let refused = loop {
            match push_rows(&client, "plain", first).await {
                Ok(()) => first += KEYS,
                Err(refused) => break refused.to_string(),
            }
            assert!(memory.used() <= LIMIT, "{} of {LIMIT}", memory.used());
            assert!(first < 4 * fit, "the limit does not hold");
        };
        assert!(refused.contains("(memory_limit_bytes)"), "{refused}");
        assert!(rows("bounded") < before / 2, "{} rows", rows("bounded"));
        assert!(rows("plain") > fit / 3, "{} rows", rows("plain"));
        assert_eq!(value_of(&client, "plain", 0).await, 1.0);
        push_rows(&client, "plain", 0).await.unwrap();
        assert_eq!(value_of(&client, "plain", 0).await, 2.0);
    });
    assert!(memory.used() <= LIMIT);
}

/// Pushes behind a copy may have to count their keys first: that takes room, too.
#[test]
fn counters_of_pushes_behind_a_copy_need_room() {
    let space = SlotSpace::new(SLOTS).unwrap();
    let store = Store::new(space, 150_000);
    for (name, lifetime) in [
        ("plain", ""),
        (
            "counted",
            r#","lifetime":{"admission":{"after":{"occurrences":2}}}"#,
        ),
    ] {
        let spec = format!(
            r#"{{"name":"{name}","kind":{{"sparse":{{"dim":1}}}},"optimizer":{{"sgd":{{"learning_rate":1.0}}}}{lifetime}}}"#
        );
        let spec = Arc::new(TableSpec::from_json(&spec).unwrap());
        store.create_table(&spec, 1).unwrap();
    }
    let slot = space.slot_of(7);
    let keys: Vec<u64> = (0..)
        .filter(|&key| space.slot_of(key) == slot)
        .take(4000)
        .collect();
    let behind = |table: &str| {
        let keys = [(table_id(table), &keys[..])];
        store.check_behind(slot, keys.into_iter())
    };
    behind("plain").unwrap();
    let refused = behind("counted").unwrap_err();
    assert!(matches!(refused, Refusal::MemoryLimit(_)), "{refused:?}");
    assert_eq!(store.memory().used(), 0);
}
