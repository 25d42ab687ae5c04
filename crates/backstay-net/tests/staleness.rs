//! How stale pushes are, over real connections: who asks hears it, who does not sends what it always
//! sent, and requests that do not fit are refused.

// What fails in a helper is a failed test; exact numbers are the point.
#![allow(clippy::unwrap_used, clippy::float_cmp)]

mod support;

use std::sync::atomic::Ordering;
use std::sync::Arc;

use backstay_core::compensation::Reference;
use backstay_core::error::code;
use backstay_core::hash::table_id;
use backstay_core::spec::TableSpec;
use backstay_core::staleness::PushStaleness;
use backstay_core::transaction::Change;
use backstay_core::wire::{Opcode, PushReply};
use backstay_net::client::{Client, ClientError, Deadline, PushRequest};
use backstay_net::server::Server;
use support::*;

fn soon() -> Deadline {
    Deadline::after(PATIENCE)
}

async fn pull_all(client: &Arc<Client>, keys: &[u64]) -> Vec<f32> {
    let plan = Arc::new(client.plan(keys).unwrap());
    let mut rows = vec![f32::NAN; keys.len() * DIM];
    let mut pull = client
        .pull(table_id("t"), DIM, &plan, soon())
        .await
        .unwrap();
    pull.finish(&mut rows, soon()).await.unwrap();
    rows
}

async fn push_ones(client: &Client, keys: &[u64]) -> PushStaleness {
    let plan = client.plan(keys).unwrap();
    let values = vec![-1.0; keys.len() * DIM];
    push_all(client, &plan, &values, soon()).await.unwrap();
    let read = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
    PushStaleness {
        known: read(&client.counters.stale_slots),
        sum: read(&client.counters.staleness_sum),
        max: read(&client.counters.staleness_max) as u32,
        unknown: read(&client.counters.staleness_unknown),
    }
}

#[test]
fn a_client_that_asks_hears_how_stale_its_pushes_are() {
    let server = start(options());
    let address = server.address().to_string();
    let (one, other) = (
        client(&address, client_options()).unwrap().0,
        client(&address, client_options()).unwrap().0,
    );
    // Some thousands of keys, so that calls travel in several parts.
    let keys: Vec<u64> = (0..6001).collect();
    let slots = u64::from(SLOTS);
    block_on(async {
        one.track_staleness(table_id("t"));
        assert_eq!(pull_all(&one, &keys).await, vec![0.0; keys.len() * DIM]);
        for _ in 0..3 {
            assert_eq!(push_ones(&other, &keys).await, PushStaleness::default());
        }
        let mut wanted = PushStaleness {
            known: slots,
            sum: 3 * slots,
            max: 3,
            unknown: 0,
        };
        assert_eq!(push_ones(&one, &keys).await, wanted);
        // Without another pull its own push counts, too.
        wanted = PushStaleness {
            known: 2 * slots,
            sum: 7 * slots,
            max: 4,
            unknown: 0,
        };
        assert_eq!(push_ones(&one, &keys).await, wanted);
        assert_eq!(pull_all(&one, &keys).await, vec![5.0; keys.len() * DIM]);
        wanted.known += slots;
        assert_eq!(push_ones(&one, &keys).await, wanted);
    });
    let told = server.snapshot();
    assert_eq!(
        (told.stale_slots, told.staleness_sum),
        (3 * slots, 7 * slots)
    );
    // Pushes of staleness 3, 4 and 0, as the client counts them and as the server does.
    let bucket = |at: usize| one.counters.staleness_buckets[at].load(Ordering::Relaxed);
    assert_eq!((bucket(0), bucket(2), bucket(3)), (slots, slots, slots));
    let usage = server.store().usage("t").unwrap().stale;
    assert_eq!(
        (usage.buckets[0], usage.buckets[2], usage.buckets[3]),
        (slots, slots, slots)
    );
}

/// A server with table `d`, which compensates the delay of gradients.
fn delayed() -> Server {
    compensating(
        r#"{"sgd":{"learning_rate":1.0}},"compensation":{"delay_compensated":{"strength":0.5}}"#,
    )
}

/// A server with table `d`, of this optimizer and what stands behind it.
fn compensating(optimizer: &str) -> Server {
    let server = start(options());
    let spec =
        format!(r#"{{"name":"d","kind":{{"sparse":{{"dim":{DIM}}}}},"optimizer":{optimizer}}}"#);
    let spec = Arc::new(TableSpec::from_json(&spec).unwrap());
    server.store().create_table(&spec, 1).unwrap();
    server
}

async fn push_to_d(client: &Client, keys: &[u64]) -> Result<(), ClientError> {
    let (plan, values) = (client.plan(keys)?, vec![-2.0; keys.len() * DIM]);
    let change = Change::update(1.0);
    let request = PushRequest::new(table_id("d"), DIM, change, &values);
    client
        .push(&request, &plan, soon())
        .await?
        .wait(client)
        .await
}

async fn pull_d(client: &Arc<Client>, keys: &[u64]) -> Vec<f32> {
    let plan = Arc::new(client.plan(keys).unwrap());
    let mut rows = vec![f32::NAN; keys.len() * DIM];
    let mut pull = client
        .pull(table_id("d"), DIM, &plan, soon())
        .await
        .unwrap();
    pull.finish(&mut rows, soon()).await.unwrap();
    rows
}

#[test]
fn a_push_brings_the_weights_that_its_gradients_were_computed_with() {
    let server = delayed();
    let address = server.address().to_string();
    let made = || client(&address, client_options()).unwrap().0;
    let (one, other, unaware) = (made(), made(), made());
    let keys: Vec<u64> = (0..5001).collect();
    block_on(async {
        for client in [&one, &other] {
            client.keep_references(table_id("d"), Reference::Weights);
            assert_eq!(pull_d(client, &keys).await, vec![0.0; keys.len() * DIM]);
        }
        push_to_d(&other, &keys).await.unwrap();
        assert_eq!(pull_d(&other, &keys).await, vec![2.0; keys.len() * DIM]);
        // -2 + 0.5 * 4 * (2 - 0) = 2.
        push_to_d(&one, &keys).await.unwrap();
        assert_eq!(pull_d(&one, &keys).await, vec![0.0; keys.len() * DIM]);
        let refused = push_to_d(&one, &[9999]).await.unwrap_err();
        let text = refused.to_string();
        assert!(text.contains("has not pulled key 9999"), "{text}");
        let refused = push_to_d(&unaware, &keys).await.unwrap_err();
        let text = refused.to_string();
        assert!(text.contains("must bring the weights"), "{text}");
        assert_eq!(pull_d(&one, &keys).await, vec![0.0; keys.len() * DIM]);
    });
}

/// Two clients that pull before the other one pushes; a third one that keeps nothing is refused, and
/// one that pulls gets rows alone.
#[test]
fn a_push_brings_the_sums_that_came_with_its_weights() {
    let server = compensating(
        r#"{"adagrad":{"learning_rate":0.5,"initial_accumulator":1.0}},"compensation":"adaptive_revision""#,
    );
    let address = server.address().to_string();
    let made = || client(&address, client_options()).unwrap().0;
    let (one, other, unaware) = (made(), made(), made());
    // Some thousands, so that calls travel in several parts; an odd number of values.
    let keys: Vec<u64> = (0..5001).collect();
    let (mut weight, mut z) = (0.0f64, 1.0f64);
    let mut wanted = |since: f64| {
        let old = 0.5 / z.sqrt();
        z += 4.0 - 4.0 * since;
        weight += 2.0 * 0.5 / z.sqrt() + (old - 0.5 / z.sqrt()) * since;
        weight
    };
    block_on(async {
        for client in [&one, &other] {
            client.track_staleness(table_id("d"));
            client.keep_references(table_id("d"), Reference::Sum);
            assert_eq!(pull_d(client, &keys).await, vec![0.0; keys.len() * DIM]);
        }
        for (client, since) in [(&other, 0.0), (&one, -2.0), (&other, -2.0)] {
            push_to_d(client, &keys).await.unwrap();
            let wanted = wanted(since);
            let rows = pull_d(client, &keys).await;
            let near = |&row: &f32| (f64::from(row) - wanted).abs() < 1e-5;
            assert!(rows.iter().all(near), "{} for {wanted}", rows[0]);
        }
        let refused = push_to_d(&unaware, &keys).await.unwrap_err();
        let text = refused.to_string();
        assert!(text.contains("must bring the sums of gradients"), "{text}");
        assert_eq!(pull_d(&unaware, &keys).await, pull_d(&one, &keys).await);
    });
}

#[test]
fn sums_are_refused_where_there_are_none() {
    let server = delayed();
    let mut raw = Raw::greeted(&server);
    let mut meta = pull_meta("d", 1);
    meta.sums = true;
    let body = 8u64.to_le_bytes();
    raw.send(&frame(Opcode::Pull, 5, &meta.encode(), &body));
    raw.expect_error(5, code::INVALID_REQUEST, "keeps no sums of gradients");
    let mut meta = push_meta("d", 1, 78, 0, 0);
    meta.change = meta.change.compared(Reference::Sum);
    for (values, code, words) in [
        (4, code::INVALID_REQUEST, "are no gradient with its sums"),
        (5, code::INVALID_REQUEST, "must bring the weights"),
    ] {
        meta.row_elements = values;
        let values = vec![1.0; values as usize];
        raw.send(&push_frame(5, &meta, &[8], &values));
        raw.expect_error(5, code, words);
    }
    assert_still_serves(&server);
}

#[test]
fn weights_that_are_not_finite_are_refused_by_name() {
    let server = delayed();
    let mut raw = Raw::greeted(&server);
    let mut meta = push_meta("d", 1, 78, 0, 0);
    meta.change = meta.change.compared(Reference::Weights);
    for (values, code, words) in [
        (
            vec![1.0, 1.0, 0.0, f32::NAN],
            code::NON_FINITE,
            "weight 1 that the gradient of key 8 was computed with is NaN",
        ),
        (
            vec![1.0, 1.0, 0.0],
            code::INVALID_REQUEST,
            "3 elements are no gradient with as many weights",
        ),
    ] {
        meta.row_elements = values.len() as u32;
        raw.send(&push_frame(5, &meta, &[8], &values));
        raw.expect_error(5, code, words);
    }
    let refused = TableSpec::from_json(
        r#"{"name":"d","kind":{"sparse":{"dim":2}},"optimizer":{"sgd":{}},"compensation":{"delay_compensated":{"strength":-1}}}"#,
    );
    let text = refused.unwrap_err().to_string();
    assert!(
        text.contains("compensation.delay_compensated.strength is -1"),
        "{text}"
    );
    assert_still_serves(&server);
}

/// The meta part of a push that tells origins, of one key.
fn told(body: &[u8]) -> Vec<u8> {
    let mut meta = push_meta("t", 1, 77, 0, 0);
    meta.origins = true;
    frame(Opcode::Push, 5, &meta.encode(), body)
}

#[test]
fn origins_that_do_not_fit_are_refused() {
    let server = start(options());
    let mut raw = Raw::greeted(&server);
    let key_and_row = [8u64.to_le_bytes(), [0; 8]].concat();
    for (body, words) in [
        (key_and_row.clone(), "0 origins came for the 1 slots"),
        (
            [&key_and_row[..], &[0; 16]].concat(),
            "do not take the 32 bytes",
        ),
        (
            [&key_and_row[..], &[0; 4]].concat(),
            "do not take the 20 bytes",
        ),
        (key_and_row[..8].to_vec(), "do not take the 8 bytes"),
    ] {
        raw.send(&told(&body));
        raw.expect_error(5, code::INVALID_REQUEST, words);
    }
    raw.send(&told(&[&key_and_row[..], &[0; 8]].concat()));
    let reply = raw.expect_push_reply(5);
    let stale = PushStaleness {
        known: 1,
        ..PushStaleness::default()
    };
    let wanted = PushReply {
        routing_version: 1,
        applied_slots: 1,
        skipped_slots: 0,
        stale: Some(stale),
    };
    assert_eq!(reply, wanted);
    assert_still_serves(&server);
}
