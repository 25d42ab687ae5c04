//! A client and a real server with a saboteur between them: connections cut before and after
//! the server has taken a push, servers stopped and started. The counter table (SGD, rate 1,
//! gradients of -1) must equal the acknowledged pushes.

// What fails in a helper is a failed test; exact numbers are the point.
#![allow(clippy::unwrap_used, clippy::float_cmp)]

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::time::Duration;

use backstay_core::hash::{table_id, SlotSpace};
use backstay_core::replication::ReplicaOptions;
use backstay_core::spec::TableSpec;
use backstay_core::stream::StreamId;
use backstay_core::transaction::Change;
use backstay_core::wire::Limits;
use backstay_net::client::routing::Routing;
use backstay_net::client::{Client, ClientError, ClientOptions, Deadline, PushRequest};
use backstay_net::server::{Server, ServerOptions};
use backstay_net::store::Store;
use tokio::runtime::Runtime;

const SLOTS: u32 = 64;
const DIM: usize = 2;
const PATIENT: Duration = Duration::from_secs(30);

fn space() -> SlotSpace {
    SlotSpace::new(SLOTS).unwrap()
}

fn server(listen: &str, instance: u64) -> Server {
    let store = Arc::new(Store::new(space(), 0));
    store.set_routing(1, &[true; SLOTS as usize]);
    let spec = r#"{"name":"t","kind":{"sparse":{"dim":2}},"initializer":{"zeros":{}},"optimizer":{"sgd":{"learning_rate":1.0}}}"#;
    let spec = Arc::new(TableSpec::from_json(spec).unwrap());
    store.create_table(&spec, 1).unwrap();
    let options = ServerOptions {
        cluster_id: "c".into(),
        node_id: "n".into(),
        instance,
        token: None,
        tls: None,
        io_threads: 2,
        limits: Limits {
            max_frame_bytes: 1 << 24,
            max_keys: 1 << 16,
        },
        max_connections: 64,
        handshake_timeout: Duration::from_secs(5),
        stall_timeout: Duration::from_secs(5),
        peer_tls: None,
        stream_grace: Duration::from_secs(3600),
        counts_process: false,
        replica: ReplicaOptions::default(),
    };
    Server::start(TcpListener::bind(listen).unwrap(), options, store).unwrap()
}

fn client(servers: &[impl ToString]) -> Arc<Client> {
    let options = ClientOptions {
        cluster_id: "c".into(),
        token: None,
        tls: None,
        client_name: "test".into(),
        connect_timeout: Duration::from_secs(2),
        stall_timeout: Duration::from_secs(2),
        max_frame_bytes: 1 << 24,
        part_bytes: 512,
        max_pushes_in_flight: 8,
    };
    let client = Client::new(
        options,
        StreamId {
            job: 77,
            pass: 0,
            task: 0,
        },
    );
    let addresses = servers.iter().map(ToString::to_string);
    let masters: Vec<u32> = (0..SLOTS).map(|slot| slot % servers.len() as u32).collect();
    client.set_routing(Routing::new(1, addresses.collect(), &masters).unwrap());
    client
}

/// Which connections to cut, and where.
#[derive(Clone, Copy)]
enum Cut {
    /// After so many bytes from the client: in the middle of a request.
    Request(usize),
    /// After so many bytes from the server: requests are taken, answers are lost.
    Reply(usize),
    /// As Reply, but the connection stays open and silent.
    Mute(usize),
    Never,
}

/// A proxy that cuts its n-th connection as `cuts[n]` says, and lets later ones through.
fn saboteur(target: String, cuts: Vec<Cut>) -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let accepted = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&accepted);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let cut = cuts.get(count.fetch_add(1, Ordering::SeqCst)).copied();
            let (client, server) = (stream.unwrap(), TcpStream::connect(&target).unwrap());
            let mute = matches!(cut, Some(Cut::Mute(_)));
            let (from_client, from_server) = match cut.unwrap_or(Cut::Never) {
                Cut::Request(bytes) => (bytes, usize::MAX),
                Cut::Reply(bytes) | Cut::Mute(bytes) => (usize::MAX, bytes),
                Cut::Never => (usize::MAX, usize::MAX),
            };
            let (c, s) = (client.try_clone().unwrap(), server.try_clone().unwrap());
            std::thread::spawn(move || forward(client, server, from_client, false));
            std::thread::spawn(move || forward(s, c, from_server, mute));
        }
    });
    (address, accepted)
}

fn forward(mut from: TcpStream, mut to: TcpStream, mut allowance: usize, mute: bool) {
    let mut buffer = [0; 4096];
    while let Ok(count) = from.read(&mut buffer) {
        let pass = count.min(allowance);
        if mute && count > 0 && pass == 0 {
            continue;
        }
        if pass == 0 || to.write_all(&buffer[..pass]).is_err() {
            break;
        }
        allowance -= pass;
        if allowance == 0 && !mute {
            break;
        }
    }
    // Either end may be gone already.
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}

fn request(values: &[f32]) -> PushRequest<'_> {
    let change = Change::update(1.0);
    PushRequest {
        table: table_id("t"),
        row_elements: DIM,
        change,
        values,
        require_finite: true,
        observed: None,
        only_count: false,
        references: &[],
    }
}

async fn count(client: &Arc<Client>, keys: &[u64], patience: Duration) -> Result<(), ClientError> {
    let plan = client.plan(keys)?;
    let values = vec![-1.0; keys.len() * DIM];
    let push = client
        .push(&request(&values), &plan, Deadline::after(patience))
        .await?;
    push.wait(client).await
}

/// The rows that went, as far as the answers told.
async fn delete(client: &Arc<Client>, keys: &[u64]) -> u64 {
    let request = PushRequest {
        row_elements: 0,
        change: Change::Delete,
        ..request(&[])
    };
    let plan = client.plan(keys).unwrap();
    let push = client
        .push(&request, &plan, Deadline::after(PATIENT))
        .await
        .unwrap();
    push.wait(client).await.unwrap();
    push.removed()
}

async fn counts(client: &Arc<Client>, keys: &[u64]) -> Vec<f32> {
    let plan = Arc::new(client.plan(keys).unwrap());
    let mut out = vec![f32::NAN; keys.len() * DIM];
    let pull = client
        .pull(table_id("t"), DIM, &plan, Deadline::after(PATIENT))
        .await;
    pull.unwrap()
        .finish(&mut out, Deadline::after(PATIENT))
        .await
        .unwrap();
    out.chunks(DIM).map(|row| row[0]).collect()
}

fn runtime() -> Runtime {
    Runtime::new().unwrap()
}

/// I2: a retry on a new connection counts once.
#[test]
fn pushes_are_counted_once_whatever_is_cut() {
    let server = server("127.0.0.1:0", 1);
    // The handshake takes some 40 bytes one way and 67 the other: the cuts fall into requests
    // and into replies that follow it.
    let cut = |n: usize| [Cut::Request(100 + n * 377), Cut::Reply(70 + n * 53)];
    let (proxy, accepted) = saboteur(
        server.address().to_string(),
        (1..16).flat_map(cut).collect(),
    );
    runtime().block_on(async {
        let client = client(&[proxy]);
        let keys: Vec<u64> = (0..200).collect();
        for _ in 0..30 {
            count(&client, &keys, PATIENT).await.unwrap();
        }
        assert_eq!(counts(&client, &keys).await, vec![30.0; 200]);
        assert!(client.counters.retries.load(Ordering::SeqCst) > 5);
    });
    assert!(accepted.load(Ordering::SeqCst) > 5);
    assert!(server.stop(Duration::from_secs(5)));
}

#[test]
fn deletes_are_applied_once_whatever_is_cut() {
    let server = server("127.0.0.1:0", 1);
    let cut = |n: usize| [Cut::Request(100 + n * 377), Cut::Reply(70 + n * 53)];
    let (proxy, _) = saboteur(
        server.address().to_string(),
        (1..16).flat_map(cut).collect(),
    );
    runtime().block_on(async {
        let client = client(&[proxy]);
        let keys: Vec<u64> = (0..200).collect();
        // 50 keys of these have no row.
        let gone: Vec<u64> = (100..250).collect();
        let mut told = 0;
        for round in 1..=15 {
            for _ in 0..2 {
                count(&client, &keys, PATIENT).await.unwrap();
            }
            let removed = delete(&client, &gone).await;
            assert!(removed <= 100);
            told += removed;
            let mut expected = vec![2.0 * round as f32; 100];
            expected.resize(200, 0.0);
            assert_eq!(counts(&client, &keys).await, expected);
        }
        let node_told = server.snapshot().rows_deleted;
        assert!(told > 0 && told <= node_told && node_told == 15 * 100);
        assert!(client.counters.retries.load(Ordering::SeqCst) > 5);
    });
}

#[test]
fn many_pushes_in_flight_keep_their_number() {
    let server = server("127.0.0.1:0", 1);
    let cuts = vec![Cut::Reply(150), Cut::Request(9000)];
    let (proxy, _) = saboteur(server.address().to_string(), cuts);
    runtime().block_on(async {
        let client = client(&[proxy]);
        let keys: Vec<u64> = (0..50).collect();
        let plan = client.plan(&keys).unwrap();
        let values = vec![-1.0; keys.len() * DIM];
        for _ in 0..300 {
            // Not waited for: the client waits for the oldest when too many are open.
            client
                .push(&request(&values), &plan, Deadline::after(PATIENT))
                .await
                .unwrap();
        }
        client.flush().await.unwrap();
        assert_eq!(counts(&client, &keys).await, vec![300.0; 50]);
        assert_eq!(
            client.counters.pushes_acknowledged.load(Ordering::SeqCst),
            300
        );
    });
}

#[test]
fn a_push_left_alone_does_not_exhaust_the_window() {
    let server = server("127.0.0.1:0", 1);
    runtime().block_on(async {
        let client = client(&[server.address()]);
        let plan = client.plan(&[1, 2, 3]).unwrap();
        let values = vec![-1.0; 3 * DIM];
        let forgotten = client
            .push(&request(&values), &plan, Deadline::after(PATIENT))
            .await
            .unwrap();
        for _ in 0..400 {
            count(&client, &[1, 2, 3], PATIENT).await.unwrap();
        }
        forgotten.wait(&client).await.unwrap();
        assert_eq!(counts(&client, &[1, 2, 3]).await, vec![401.0; 3]);
    });
}

#[test]
fn a_failure_that_nobody_waited_for_is_reported_once_by_a_flush() {
    let server = server("127.0.0.1:0", 1);
    server.store().set_routing(1, &[false; SLOTS as usize]);
    runtime().block_on(async {
        let client = client(&[server.address()]);
        let plan = client.plan(&[1]).unwrap();
        let values = [-1.0; DIM];
        for _ in 0..20 {
            let brief = Deadline::after(Duration::from_millis(1));
            client.push(&request(&values), &plan, brief).await.unwrap();
        }
        assert!(client.flush().await.is_err());
        assert!(client.flush().await.is_ok());
        // One that is waited for is reported there, and not again.
        assert!(count(&client, &[1], Duration::from_millis(1))
            .await
            .is_err());
        assert!(client.flush().await.is_ok());
    });
}

#[test]
fn a_push_that_nobody_waits_for_is_sent_again_by_itself() {
    let server = server("127.0.0.1:0", 1);
    // The push is taken and its answer is cut; the next connection is let through.
    let (proxy, accepted) = saboteur(server.address().to_string(), vec![Cut::Reply(80)]);
    runtime().block_on(async {
        let client = client(&[&proxy]);
        let plan = client.plan(&[1]).unwrap();
        let push = client
            .push(&request(&[-1.0; DIM]), &plan, Deadline::after(PATIENT))
            .await;
        let push = push.unwrap();
        client.finish_in_background(&push);
        while !push.is_over() {
            tokio::task::yield_now().await;
        }
        assert_eq!(counts(&client, &[1]).await, vec![1.0]);
    });
    assert_eq!(accepted.load(Ordering::SeqCst), 2);
}

#[test]
fn a_connection_that_stays_silent_is_given_up() {
    // The first server takes connections' bytes and says nothing after the handshake.
    let server = server("127.0.0.1:0", 1);
    let (proxy, accepted) = saboteur(server.address().to_string(), vec![Cut::Mute(69)]);
    runtime().block_on(async {
        let client = client(&[&proxy]);
        count(&client, &[1], PATIENT).await.unwrap();
        assert_eq!(counts(&client, &[1]).await, vec![1.0]);
    });
    assert_eq!(accepted.load(Ordering::SeqCst), 2);
}

#[test]
fn a_server_that_is_not_there_is_named() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = free.local_addr().unwrap().to_string();
    drop(free);
    runtime().block_on(async {
        let client = client(&[&address]);
        let error = count(&client, &[1], Duration::from_millis(300))
            .await
            .unwrap_err();
        assert!(
            matches!(&error, ClientError::Unavailable { address: named, .. } if *named == address),
            "{error:?}"
        );
    });
}

#[test]
fn a_lost_answer_leaves_the_outcome_unknown() {
    let server = server("127.0.0.1:0", 1);
    // Takes every request, and cuts within the first answer after the handshake.
    let (proxy, _) = saboteur(server.address().to_string(), vec![Cut::Reply(80); 1000]);
    runtime().block_on(async {
        let client = client(&[proxy]);
        let error = count(&client, &[1], Duration::from_millis(500))
            .await
            .unwrap_err();
        assert!(
            matches!(error, ClientError::OutcomeUnknown { sequence: 0, .. }),
            "{error:?}"
        );
    });
}

#[test]
fn a_server_that_comes_back_empty_is_noticed() {
    let first = server("127.0.0.1:0", 1);
    let address = first.address().to_string();
    let runtime = runtime();
    let client = client(&[&address]);
    runtime.block_on(count(&client, &[1], PATIENT)).unwrap();
    assert!(first.stop(Duration::from_secs(5)));
    let _second = server(&address, 2);
    for _ in 0..2 {
        let error = runtime.block_on(count(&client, &[1], PATIENT)).unwrap_err();
        assert!(matches!(error, ClientError::StateLost { .. }), "{error:?}");
    }
}

/// I7: nobody is told that a push succeeded, or that nothing of it happened, which is in some slots.
#[test]
fn a_part_refused_by_one_of_two_servers_is_not_reported_as_if_nothing_happened() {
    let (one, other) = (server("127.0.0.1:0", 1), server("127.0.0.1:0", 2));
    // The second server serves no slot: its part is refused until the deadline.
    other.store().set_routing(1, &[false; SLOTS as usize]);
    runtime().block_on(async {
        let client = client(&[one.address(), other.address()]);
        let keys: Vec<u64> = (0..100).collect();
        let error = count(&client, &keys, Duration::from_millis(400))
            .await
            .unwrap_err();
        assert!(
            matches!(error, ClientError::OutcomeUnknown { .. }),
            "{error:?}"
        );
        // It moves in: the next push goes through, on both.
        other.store().set_routing(1, &[true; SLOTS as usize]);
        count(&client, &keys, PATIENT).await.unwrap();
    });
}

#[test]
fn an_orderly_stop_answers_what_it_took() {
    let server = server("127.0.0.1:0", 1);
    let address = server.address().to_string();
    let store = Arc::clone(server.store());
    let slot = space().slot_of(5);
    let acknowledged = std::thread::scope(|scope| {
        let pushing = scope.spawn(|| {
            runtime().block_on(async {
                let client = client(&[&address]);
                let mut acknowledged = 0;
                while count(&client, &[5], Duration::from_millis(300))
                    .await
                    .is_ok()
                {
                    acknowledged += 1;
                }
                acknowledged
            })
        });
        while store.slot_digest(slot).unwrap().0 < 50 {
            std::thread::yield_now();
        }
        assert!(server.stop(Duration::from_secs(5)));
        pushing.join().unwrap()
    });
    let (_, weights, _) = store.export_slot("t", slot).unwrap();
    assert_eq!(weights[0], acknowledged as f32);
    assert!(acknowledged >= 50);
}
