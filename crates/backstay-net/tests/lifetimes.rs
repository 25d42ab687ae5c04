//! Tables whose rows come and go, over real connections: what a push tells of shows and clicks,
//! expiry by hand and in periods, decay once for a period, and what is refused.

// What fails in a helper is a failed test; exact numbers are the point.
#![allow(clippy::unwrap_used, clippy::float_cmp)]

mod support;

use std::net::TcpListener;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::Arc;

use backstay_core::error::code;
use backstay_core::hash::{table_id, SlotSpace};
use backstay_core::life::Thresholds;
use backstay_core::spec::TableSpec;
use backstay_core::transaction::Change;
use backstay_core::wire::{ExpireReply, Opcode};
use backstay_net::client::{Client, ClientError, Deadline, PushRequest};
use backstay_net::clock::WallClock;
use backstay_net::server::Server;
use backstay_net::store::Store;
use support::*;

/// Rows of zeros with SGD of rate 1, by this clock.
fn server(lifetime: &str, now: &Arc<AtomicU32>) -> Server {
    let shown = Arc::clone(now);
    let clock = WallClock::of(move || shown.load(Ordering::SeqCst));
    let store = Store::with_clock(SlotSpace::new(SLOTS).unwrap(), 0, clock);
    store.set_routing(1, &[true; SLOTS as usize]);
    let spec = format!(
        r#"{{"name":"t","kind":{{"sparse":{{"dim":{DIM}}}}},"optimizer":{{"sgd":{{"learning_rate":1.0}}}},"lifetime":{lifetime}}}"#
    );
    let spec = Arc::new(TableSpec::from_json(&spec).unwrap());
    store.create_table(&spec, 1).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    Server::start(listener, options(), Arc::new(store)).unwrap()
}

fn client_of(server: &Server) -> Arc<Client> {
    client(&server.address().to_string(), client_options())
        .unwrap()
        .0
}

fn soon() -> Deadline {
    Deadline::after(PATIENCE)
}

/// Push -1 to every element of each key, and tell of shows and clicks if there are any.
async fn push_keys(
    client: &Client,
    keys: &[u64],
    told: Option<(&[f32], &[f32])>,
) -> Result<(), ClientError> {
    let (change, values) = (
        match told {
            Some(_) => Change::update(1.0).counted(),
            None => Change::update(1.0),
        },
        vec![-1.0; keys.len() * DIM],
    );
    let request = PushRequest {
        observed: told,
        require_finite: true,
        ..PushRequest::new(table_id("t"), DIM, change, &values)
    };
    let push = client.push(&request, &client.plan(keys)?, soon()).await?;
    push.wait(client).await
}

async fn values(client: &Arc<Client>, keys: &[u64]) -> Vec<f32> {
    let plan = Arc::new(client.plan(keys).unwrap());
    let mut rows = vec![f32::NAN; keys.len() * DIM];
    let mut pull = client
        .pull(table_id("t"), DIM, &plan, soon())
        .await
        .unwrap();
    pull.finish(&mut rows, soon()).await.unwrap();
    rows.chunks(DIM).map(|row| row[0]).collect()
}

const NONE: Thresholds = Thresholds {
    unseen_seconds: None,
    score_below: None,
    norm_below: None,
};

#[test]
fn rows_that_expire_are_counted_before_they_go() {
    let now = Arc::new(AtomicU32::new(1000));
    let server = server(r#"{"expiry":{"unseen_seconds":50}}"#, &now);
    let (old, fresh): (Vec<u64>, Vec<u64>) = ((0..300).collect(), (300..500).collect());
    block_on(async {
        let client = client_of(&server);
        push_keys(&client, &old, None).await.unwrap();
        now.store(1051, Ordering::SeqCst);
        push_keys(&client, &fresh, None).await.unwrap();
        let table = table_id("t");
        for only_count in [true, true, false] {
            let done = client
                .expire(table, NONE, only_count, soon())
                .await
                .unwrap();
            assert_eq!(
                (done.gone.unseen, done.applied_slots),
                (300, u64::from(SLOTS))
            );
        }
        assert_eq!(
            client
                .expire(table, NONE, false, soon())
                .await
                .unwrap()
                .gone
                .unseen,
            0
        );
        assert_eq!(values(&client, &old).await, vec![0.0; 300]);
        assert_eq!(values(&client, &fresh).await, vec![1.0; 200]);
        // Thresholds of the call in the place of the table's.
        let by_norm = Thresholds {
            norm_below: Some(9.0),
            ..NONE
        };
        assert_eq!(
            client
                .expire(table, by_norm, false, soon())
                .await
                .unwrap()
                .gone
                .norm,
            200
        );
    });
    assert_eq!(server.snapshot().rows_expired, 500);
    assert_eq!(server.store().usage("t").unwrap().rows, 0);
}

#[test]
fn a_decay_counts_once_for_a_period_whoever_asks() {
    let now = Arc::new(AtomicU32::new(1000));
    let server = server(
        r#"{"expiry":{"score_below":1.0},"score":{"nonclick_coefficient":1.0,"decay":0.5}}"#,
        &now,
    );
    block_on(async {
        let (one, other) = (client_of(&server), client_of(&server));
        let keys = [1, 2, 3, 2];
        // Key 2 stands twice: 8 shows in all.
        let told: (&[f32], &[f32]) = (&[3.0, 4.0, 7.0, 4.0], &[0.0; 4]);
        push_keys(&one, &keys, Some(told)).await.unwrap();
        let table = table_id("t");
        assert_eq!(
            one.decay(table, 0.0, 70, soon()).await.unwrap(),
            u64::from(SLOTS)
        );
        for (client, period) in [(&one, 70), (&other, 70), (&other, 69)] {
            assert_eq!(client.decay(table, 0.0, period, soon()).await.unwrap(), 0);
        }
        assert_eq!(
            other.decay(table, 0.25, 71, soon()).await.unwrap(),
            u64::from(SLOTS)
        );
        // 0.375, 1 and 0.875 are left of 3, 8 and 7.
        let done = one.expire(table, NONE, false, soon()).await.unwrap();
        assert_eq!(done.gone.score, 2);
        assert_eq!(values(&one, &[1, 2, 3]).await, [0.0, 2.0, 0.0]);
    });
}

#[test]
fn servers_keep_the_periods_of_a_table_by_themselves() {
    let now = Arc::new(AtomicU32::new(1000));
    let policy = r#"{"expiry":{"unseen_seconds":35,"score_below":1.5,"every_seconds":10},"score":{"nonclick_coefficient":1.0,"decay":0.5,"decay_every_seconds":10}}"#;
    let server = server(policy, &now);
    let replicator = Arc::clone(server.replicator());
    // Of the period that began at 1000 s, which the server may have kept by now.
    replicator.keep_periods();
    block_on(async {
        let client = client_of(&server);
        push_keys(&client, &[1], Some((&[8.0], &[0.0])))
            .await
            .unwrap();
        push_keys(&client, &[2], Some((&[2.0], &[0.0])))
            .await
            .unwrap();
        replicator.keep_periods();
        now.store(1011, Ordering::SeqCst);
        // Whether here or in the server's own look: it is done once, the expiry before the decay.
        replicator.keep_periods();
        replicator.keep_periods();
        wait_until("the period from 1010 s on", || {
            server
                .store()
                .served_slots_without(
                    backstay_core::stream::StreamId {
                        job: table_id("t"),
                        pass: u32::MAX - 1,
                        task: 0,
                    },
                    1_010_000,
                )
                .is_empty()
        });
        assert_eq!(values(&client, &[1, 2]).await, [1.0, 1.0]);
        now.store(1020, Ordering::SeqCst);
        replicator.keep_periods();
        wait_until("the expiry of key 2", || {
            server.store().usage("t").unwrap().rows == 1
        });
        assert_eq!(values(&client, &[1, 2]).await, [1.0, 0.0]);
        now.store(1040, Ordering::SeqCst);
        replicator.keep_periods();
        wait_until("the expiry of key 1", || {
            server.store().usage("t").unwrap().rows == 0
        });
    });
    wait_until("the count", || server.snapshot().rows_expired <= 2);
}

#[test]
fn what_a_table_does_not_have_is_refused_by_name() {
    let now = Arc::new(AtomicU32::new(1000));
    let server = server(r#"{"admission":{"probability":{"probability":0.5}}}"#, &now);
    block_on(async {
        let client = client_of(&server);
        let refused = |error: ClientError| match error {
            ClientError::Refused { code, message, .. } => {
                assert_eq!(code, code::INVALID_REQUEST);
                message
            }
            other => panic!("{other:?}"),
        };
        let table = table_id("t");
        let told: (&[f32], &[f32]) = (&[1.0], &[0.0]);
        let error = push_keys(&client, &[1], Some(told)).await.unwrap_err();
        assert!(refused(error).contains("keeps no show and click"));
        for only_count in [true, false] {
            let error = client
                .expire(table, NONE, only_count, soon())
                .await
                .unwrap_err();
            assert!(refused(error).contains("has no expiry: say unseen_seconds"));
            let unseen = Thresholds {
                unseen_seconds: Some(1),
                ..NONE
            };
            let error = client
                .expire(table, unseen, only_count, soon())
                .await
                .unwrap_err();
            assert!(refused(error).contains("unseen_seconds"));
        }
        let error = client.decay(table, 0.0, 1, soon()).await.unwrap_err();
        assert!(refused(error).contains("show and click"));
        // The companion of a table is nobody's.
        for name in ["t@admission", "x"] {
            let request = PushRequest::new(table_id(name), 0, Change::Expire(NONE), &[]);
            let plan = client.plan(&[1]).unwrap();
            let push = client.push(&request, &plan, soon()).await.unwrap();
            let error = push.wait(&client).await.unwrap_err();
            assert!(
                matches!(
                    error,
                    ClientError::Refused {
                        code: code::UNKNOWN_TABLE,
                        ..
                    }
                ),
                "{error:?}"
            );
        }
    });
}

#[test]
fn shows_that_are_none_are_refused_before_anything_is_sent_and_by_the_server() {
    let now = Arc::new(AtomicU32::new(1000));
    let server = server(r#"{"expiry":{"score_below":1.0}}"#, &now);
    block_on(async {
        let client = client_of(&server);
        for (shows, clicks, wrong) in [
            (vec![1.0, -1.0], vec![0.0, 0.0], "shows[1] is -1"),
            (vec![1.0, 1.0], vec![0.0, f32::NAN], "clicks[1] is NaN"),
            (vec![f32::INFINITY, 1.0], vec![0.0, 0.0], "shows[0] is inf"),
            (vec![1.0], vec![0.0, 0.0], "1 shows came for 2 keys"),
        ] {
            let error = push_keys(&client, &[1, 2], Some((&shows, &clicks)))
                .await
                .unwrap_err();
            assert!(
                matches!(&error, ClientError::Invalid(text) if text.contains(wrong)),
                "{error:?}"
            );
        }
    });
    let mut raw = Raw::greeted(&server);
    let mut meta = push_meta("t", 1, 9, 0, 0);
    meta.change = Change::update(1.0).counted();
    meta.row_elements = DIM as u32 + 2;
    raw.send(&push_frame(1, &meta, &[77], &[1.0, 1.0, -2.0, 0.0]));
    raw.expect_error(1, code::INVALID_REQUEST, "the show of key 77 is -2");
    raw.send(&push_frame(2, &meta, &[77], &[f32::NAN, 1.0, 2.0, 0.0]));
    raw.expect_error(2, code::NON_FINITE, "NaN");
    meta.row_elements = 1;
    raw.send(&push_frame(3, &meta, &[77], &[1.0]));
    raw.expect_error(3, code::INVALID_REQUEST, "no show and click");
    assert_eq!(server.store().usage("t").unwrap().rows, 0);
}

#[test]
fn frames_of_the_wrong_kind_are_refused() {
    let now = Arc::new(AtomicU32::new(1000));
    let server = server(r#"{"expiry":{"norm_below":1.0}}"#, &now);
    let mut raw = Raw::greeted(&server);
    let mut meta = push_meta("t", 1, 9, 0, 0);
    let body = 5u64.to_le_bytes();
    for (n, (opcode, change)) in [
        (Opcode::Push, Change::Expire(NONE)),
        (Opcode::Push, Change::Decay { rate: 0.5 }),
        (Opcode::Expire, Change::Delete),
        (Opcode::Expire, Change::Decay { rate: 0.5 }),
        (Opcode::Decay, Change::Expire(NONE)),
        (Opcode::CountExpired, Change::Delete),
        (Opcode::Delete, Change::Expire(NONE)),
    ]
    .into_iter()
    .enumerate()
    {
        meta.change = change;
        meta.row_elements = 0;
        raw.send(&frame(opcode, n as u64, &meta.encode(), &body));
        raw.expect_error(n as u64, code::PROTOCOL, "");
    }
    meta.change = Change::Expire(NONE);
    raw.send(&frame(Opcode::Expire, 99, &meta.encode(), &body));
    let reply = ExpireReply::decode(&raw.expect(Opcode::ExpireReply, 99).meta).unwrap();
    assert_eq!((reply.applied_slots, reply.norm), (1, 0));
    // The same again: this slot has it.
    raw.send(&frame(Opcode::Expire, 100, &meta.encode(), &body));
    let reply = ExpireReply::decode(&raw.expect(Opcode::ExpireReply, 100).meta).unwrap();
    assert_eq!((reply.applied_slots, reply.skipped_slots), (0, 1));
}

#[test]
fn usage_and_counters_tell_of_keys_without_a_row() {
    let now = Arc::new(AtomicU32::new(1000));
    let server = server(
        r#"{"admission":{"after":{"occurrences":2}},"capacity":{"rows":1024}}"#,
        &now,
    );
    block_on(async {
        let client = client_of(&server);
        let keys: Vec<u64> = (0..100).collect();
        push_keys(&client, &keys, None).await.unwrap();
        push_keys(&client, &keys[..40], None).await.unwrap();
    });
    let usage = server.store().usage("t").unwrap();
    assert_eq!((usage.rows, usage.counters.0), (40, 60));
    assert!(usage.counters.1 > 0);
    assert_eq!(server.snapshot().keys_not_admitted, 100);
    assert_eq!(
        server.store().tables().len(),
        1,
        "a companion is no table of a user's"
    );
    let all = usage.bytes + usage.counters.1 + server.store().stream_bytes();
    assert_eq!(server.store().allocated_bytes(), all);
}

/// More keys than the capacity has rows: those that rank lowest go in the same push, and are counted.
#[test]
fn a_batch_larger_than_the_capacity_is_taken_and_keeps_what_ranks_highest() {
    let now = Arc::new(AtomicU32::new(1000));
    let server = server(r#"{"capacity":{"rows":1024}}"#, &now);
    let space = SlotSpace::new(SLOTS).unwrap();
    let keys: Vec<u64> = (0..3000).collect();
    block_on(async {
        let client = client_of(&server);
        push_keys(&client, &keys, None).await.unwrap();
        // They were seen at the same time, so the highest keys stay: 15/16 of the 16 of a slot.
        let mut left = vec![15; SLOTS as usize];
        let mut wanted = vec![0.0; keys.len()];
        for &key in keys.iter().rev() {
            let left = &mut left[space.slot_of(key) as usize];
            if *left > 0 {
                *left -= 1;
                wanted[key as usize] = 1.0;
            }
        }
        assert_eq!(values(&client, &keys).await, wanted);
    });
    let rows = server.store().usage("t").unwrap().rows;
    assert_eq!(rows, 15 * u64::from(SLOTS));
    assert_eq!(server.snapshot().rows_evicted, 3000 - rows);
}
