//! Pushes into the streams of tasks: whichever client sends them and however often, a slot takes
//! each once. None leaves after the lease has expired. After a failed push no other leaves.

// What fails in a helper is a failed test; exact numbers are the point.
#![allow(clippy::unwrap_used, clippy::float_cmp)]

#[path = "support/changing.rs"]
mod changing;
#[path = "support/peer.rs"]
mod peer;
mod support;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use backstay_core::error::code;
use backstay_core::stream::StreamId;
use backstay_core::transaction::Change;
use backstay_core::wire::{CloseStream, Opcode, PushMeta};
use backstay_net::client::routing::{ServerAddress, NO_MASTER};
use backstay_net::client::{Client, ClientError, Deadline, Push, PushRequest, TaskStream};
use backstay_net::clock;
use changing::{address, client_of, counters, routing, server, update, BRIEF};
use peer::{peer_that, Act, Asked};
use support::{frame, keys, options, push_frame, push_meta, start, wait_until, Raw, DIM, PATIENCE};
use tokio::runtime::Runtime;

const TASK: StreamId = StreamId {
    job: 9,
    pass: 1,
    task: 3,
};
const TABLES: u32 = 2;
const KEYS: u64 = 50;

/// The keys of a batch: its own, so that each counter tells of one batch.
fn keys_of(batch: u64) -> Vec<u64> {
    (batch * KEYS..(batch + 1) * KEYS).collect()
}

async fn send(
    client: &Arc<Client>,
    stream: &TaskStream,
    batch: u64,
    patience: Duration,
) -> Result<Arc<Push>, ClientError> {
    let plan = client.plan(&keys_of(batch))?;
    let values = vec![-1.0; KEYS as usize * DIM];
    let deadline = Deadline::after(patience);
    let request = update(&values);
    let push = client.push_in(stream, 1, &request, &plan, deadline).await?;
    client.finish_in_background(&push);
    Ok(push)
}

async fn work(
    client: &Arc<Client>,
    stream: &TaskStream,
    batches: std::ops::Range<u64>,
) -> Result<(), ClientError> {
    for batch in batches {
        stream.begin_batch(batch)?;
        send(client, stream, batch, PATIENCE).await?;
    }
    stream.flush(client).await
}

#[test]
fn attempts_with_other_floors_count_each_batch_once() {
    let (servers, named): (Vec<_>, Vec<_>) = (1..3).map(server).unzip();
    let clients: Vec<_> = (0..3).map(|_| client_of(&named)).collect();
    for client in &clients {
        assert!(client.set_routing(routing(2, &named, |slot| slot % 2)));
    }
    Runtime::new().unwrap().block_on(async {
        let first = clients[0].task_stream(TASK, TABLES, 0).unwrap();
        work(&clients[0], &first, 0..10).await.unwrap();
        // Its floor is far below what the slots know, and other attempts are at it at the same time.
        let streams = clients
            .iter()
            .map(|one| one.task_stream(TASK, TABLES, 0).unwrap());
        let streams: Vec<_> = streams.collect();
        let (one, two, three) = tokio::join!(
            work(&clients[0], &streams[0], 0..100),
            work(&clients[1], &streams[1], 0..100),
            work(&clients[2], &streams[2], 5..90),
        );
        one.and(two).and(three).unwrap();
        assert_eq!(
            (streams[0].acknowledged(), streams[2].acknowledged()),
            (100, 90)
        );
    });
    for batch in 0..100 {
        let counts = servers.iter().map(|one| counters(one, &keys_of(batch)));
        let sums = counts.reduce(|a, b| a.iter().zip(b).map(|(a, b)| a + b).collect());
        assert_eq!(sums.unwrap(), [1.0; KEYS as usize], "batch {batch}");
    }
}

#[test]
fn a_push_with_a_lower_floor_than_the_slot_knows_is_harmless() {
    let server = start(options());
    let (mut one, mut two) = (Raw::greeted(&server), Raw::greeted(&server));
    let steps = [
        // (who, sequence, floor, whether it is applied)
        (0, 40, 40, true),
        (1, 40, 0, false),
        (1, 39, 0, false), // Below a floor that a client has sent.
        (1, 41, 0, true),
        (0, 41, 41, false),
        (1, 100, 10, true), // The floor in the slot stays where it was.
        (0, 43, 41, true),
        (1, 43, 10, false),
        (0, 100, 41, false),
    ];
    for (who, sequence, floor, applied) in steps {
        let meta = push_meta("t", 1, 99, sequence, floor);
        let raw = if who == 0 { &mut one } else { &mut two };
        raw.send(&push_frame(5, &meta, &[1], &[-1.0; DIM]));
        let reply = raw.expect_push_reply(5);
        let expected = if applied { (1, 0) } else { (0, 1) };
        assert_eq!(
            (reply.applied_slots, reply.skipped_slots),
            expected,
            "{sequence}"
        );
    }
    let close = CloseStream {
        stream: push_meta("t", 1, 99, 0, 0).id.stream,
        routing_version: u64::MAX,
    };
    one.send(&frame(Opcode::CloseStream, 6, &close.encode(), &[]));
    one.expect(Opcode::CloseStreamReply, 6);
    let meta = push_meta("t", 1, 99, 200, 150);
    two.send(&push_frame(7, &meta, &[1], &[-1.0; DIM]));
    assert_eq!(two.expect_push_reply(7).skipped_slots, 1);
}

/// Sequence and floor of each push that came.
type Noted = Arc<Mutex<Vec<(u64, u64)>>>;

/// A peer that writes down the pushes it gets: (sequence, floor), and does what `act` says.
fn noting(act: impl Fn(usize, &Asked) -> Act + Send + Sync + 'static) -> (ServerAddress, Noted) {
    let noted = Noted::default();
    let notes = Arc::clone(&noted);
    let peer = peer_that(1, move |n, asked| {
        if asked.header.opcode == Opcode::Push {
            let meta = PushMeta::decode(&asked.meta).unwrap();
            assert_eq!(meta.id.stream, TASK);
            notes.lock().unwrap().push((meta.id.sequence, meta.floor));
        }
        act(n, asked)
    });
    (address("ps-1", &peer.address, 1), noted)
}

/// I8, for a push that has left once.
#[test]
fn a_retry_waits_for_the_lease_as_a_first_try_does() {
    // The first try is not answered, and the connection breaks only once the lease is over.
    let is_over = Arc::new(AtomicBool::new(false));
    let over = Arc::clone(&is_over);
    let (named, noted) = noting(move |n, _| {
        if n > 0 {
            return Act::Answer(0.0);
        }
        wait_until("the lease is over", || over.load(Ordering::SeqCst));
        Act::Close
    });
    let client = client_of(&[named]);
    Runtime::new().unwrap().block_on(async {
        let stream = client.task_stream(TASK, TABLES, 4).unwrap();
        stream.lease_until(clock::now() + PATIENCE.as_micros() as u64);
        stream.begin_batch(4).unwrap();
        let push = send(&client, &stream, 4, PATIENCE).await.unwrap();
        stream.lease_until(clock::now());
        is_over.store(true, Ordering::SeqCst);
        let retries = || client.counters.retries.load(Ordering::Relaxed);
        tokio::task::block_in_place(|| wait_until("the first try failed", || retries() == 1));
        // It would have been sent again at once.
        tokio::time::sleep(BRIEF).await;
        assert_eq!(*noted.lock().unwrap(), [(9, 8)]);
        assert!(!push.is_over());
        stream.lease_until(clock::now() + PATIENCE.as_micros() as u64);
        push.wait(&client).await.unwrap();
        assert_eq!(*noted.lock().unwrap(), [(9, 8), (9, 8)]);
    });
}

/// I8, when the job master has given the task to another worker.
#[test]
fn revoking_fails_what_waits_for_an_answer_and_what_comes_later() {
    let (named, noted) = noting(|_, _| Act::Ignore);
    let client = client_of(&[named]);
    Runtime::new().unwrap().block_on(async {
        let stream = client.task_stream(TASK, TABLES, 0).unwrap();
        stream.begin_batch(0).unwrap();
        let push = send(&client, &stream, 0, PATIENCE).await.unwrap();
        let revoke = async { stream.revoke() };
        let (outcome, ()) = tokio::join!(push.wait(&client), revoke);
        assert!(
            matches!(outcome, Err(ClientError::TaskLeaseLost)),
            "{outcome:?}"
        );
        let later = send(&client, &stream, 1, PATIENCE).await.err().unwrap();
        assert!(matches!(later, ClientError::TaskLeaseLost), "{later:?}");
        assert!(matches!(
            stream.flush(&client).await,
            Err(ClientError::TaskLeaseLost)
        ));
        assert_eq!(stream.acknowledged(), 0);
        client.flush().await.unwrap();
    });
    // The peer may read what was sent only now.
    let came = || !noted.lock().unwrap().is_empty();
    wait_until("the first push has come", came);
    assert_eq!(noted.lock().unwrap().len(), 1);
}

#[test]
fn after_a_refused_push_no_later_one_leaves_and_no_floor_passes_it() {
    // The second batch is refused for good, after the third has left.
    let may_refuse = Arc::new(AtomicBool::new(false));
    let refuse = Arc::clone(&may_refuse);
    let (named, noted) = noting(move |_, asked| {
        let sequence = PushMeta::decode(&asked.meta).unwrap().id.sequence;
        if sequence != 3 {
            return Act::Answer(0.0);
        }
        wait_until("the third has left", || refuse.load(Ordering::SeqCst));
        Act::Refuse(code::MEMORY_LIMIT)
    });
    let client = client_of(&[named]);
    Runtime::new().unwrap().block_on(async {
        let stream = client.task_stream(TASK, TABLES, 0).unwrap();
        for batch in 0..3 {
            stream.begin_batch(batch).unwrap();
            send(&client, &stream, batch, PATIENCE).await.unwrap();
        }
        may_refuse.store(true, Ordering::SeqCst);
        let failed = stream.flush(&client).await.unwrap_err();
        assert!(
            failed.to_string().contains("as the script says"),
            "{failed}"
        );
        let errors = [
            stream.begin_batch(3).unwrap_err(),
            send(&client, &stream, 3, PATIENCE).await.err().unwrap(),
            stream.flush(&client).await.unwrap_err(),
        ];
        assert!(errors
            .iter()
            .all(|error| error.to_string() == failed.to_string()));
        assert_eq!(stream.acknowledged(), 1);
        let closed = stream.close(&client, Deadline::after(PATIENCE)).await;
        assert!(matches!(closed, Err(ClientError::Invalid(_))), "{closed:?}");
    });
    let noted = noted.lock().unwrap();
    assert_eq!(
        noted.iter().map(|push| push.0).collect::<Vec<_>>(),
        [1, 3, 5]
    );
    assert!(noted.iter().all(|(_, floor)| *floor <= 3), "{noted:?}");
}

#[test]
fn an_interrupted_push_ends_the_attempt() {
    let (named, noted) = noting(|_, _| Act::Answer(0.0));
    let client = client_of(&[named]);
    Runtime::new().unwrap().block_on(async {
        let stream = client.task_stream(TASK, TABLES, 0).unwrap();
        stream.lease_until(clock::now());
        stream.begin_batch(0).unwrap();
        // The caller gives up in the middle, as Ctrl-C makes it.
        let sending = tokio::time::timeout(BRIEF, send(&client, &stream, 0, PATIENCE));
        assert!(sending.await.is_err());
        stream.lease_until(clock::now() + PATIENCE.as_micros() as u64);
        let error = stream.begin_batch(1).unwrap_err();
        assert!(error.to_string().contains("interrupted"), "{error}");
        assert_eq!(stream.acknowledged(), 0);
    });
    assert_eq!(noted.lock().unwrap().len(), 0);
}

#[test]
fn only_updates_go_into_a_task() {
    let (_server, named) = server(1);
    let client = client_of(&[named]);
    Runtime::new().unwrap().block_on(async {
        let stream = client.task_stream(TASK, TABLES, 0).unwrap();
        stream.begin_batch(0).unwrap();
        let plan = client.plan(&keys(0, 4)).unwrap();
        let request = PushRequest {
            change: Change::Assign {
                only_if_absent: false,
            },
            ..update(&[0.0; 4 * DIM])
        };
        let deadline = Deadline::after(PATIENCE);
        let pushed = client.push_in(&stream, 0, &request, &plan, deadline).await;
        assert!(matches!(pushed.err(), Some(ClientError::Invalid(_))));
        for tables in [0, 65] {
            assert!(client.task_stream(TASK, tables, 0).is_err());
        }
    });
}

#[test]
fn a_stream_is_closed_by_every_master_however_often_they_must_be_asked() {
    let closed = Arc::new(Mutex::new(Vec::new()));
    let servers: Vec<_> = (1..4)
        .map(|number: u64| {
            let closed = Arc::clone(&closed);
            let peer = peer_that(number, move |n, asked| {
                assert_eq!(asked.header.opcode, Opcode::CloseStream);
                match n {
                    0 => return Act::Refuse(code::NOT_READY),
                    1 => return Act::Close,
                    2 => return Act::Refuse(code::IN_FLIGHT),
                    _ => {}
                }
                let stream = CloseStream::decode(&asked.meta).unwrap().stream;
                closed.lock().unwrap().push((number, stream));
                Act::Answer(0.0)
            });
            address(&format!("ps-{number}"), &peer.address, number)
        })
        .collect();
    let client = client_of(&servers);
    // A slot has no master at first: its master could not be told.
    let without = |slot| if slot == 7 { NO_MASTER } else { slot % 2 };
    assert!(client.set_routing(routing(2, &servers, without)));
    Runtime::new().unwrap().block_on(async {
        let short = client.close_stream(TASK, Deadline::after(BRIEF)).await;
        let error = short.unwrap_err().to_string();
        assert!(error.contains("slots have no master"), "{error}");
        let moved = async {
            tokio::task::yield_now().await;
            assert!(client.set_routing(routing(3, &servers, |slot| slot % 3)));
        };
        let closing = client.close_stream(TASK, Deadline::after(PATIENCE));
        let (done, ()) = tokio::join!(closing, moved);
        done.unwrap();
    });
    let mut closed = closed.lock().unwrap().clone();
    closed.sort_unstable();
    closed.dedup();
    assert_eq!(closed, [(1, TASK), (2, TASK), (3, TASK)]);
}
