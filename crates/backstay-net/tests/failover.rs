//! A client whose servers change: slots move, servers hang, refuse, end or come back as other
//! processes. Nothing acknowledged may be lost, nothing counted twice, no slot cut, and a
//! call goes on as soon as the routing says where.

// What fails in a helper is a failed test; exact numbers are the point.
#![allow(clippy::unwrap_used, clippy::float_cmp)]

#[path = "support/changing.rs"]
mod changing;
#[path = "support/peer.rs"]
mod peer;
mod support;

use std::net::TcpListener;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::{Duration, Instant};

use backstay_core::error::code;
use backstay_core::hash::{mix64, table_id};
use backstay_core::transaction::Change;
use backstay_net::client::routing::{Routing, ServerAddress, NO_MASTER};
use backstay_net::client::{ClientError, Deadline, Event, PushRequest};
use backstay_net::server::Server;
use changing::{
    address, client_of, count, counters, routing, rows, server, update, AT_ONCE, BRIEF,
};
use peer::{peer, Act};
use support::{block_on, wait_until, DIM, PATIENCE, SLOTS};
use tokio::runtime::Runtime;

#[test]
fn pulls_read_the_right_rows_while_slots_move_between_servers() {
    let servers: Vec<(Server, ServerAddress)> = (1..=3).map(server).collect();
    let named: Vec<ServerAddress> = servers.iter().map(|(_, named)| named.clone()).collect();
    let keys: Vec<u64> = (0..1_500).map(|i| mix64(i) % 700).collect();
    let values: Vec<f32> = keys.iter().flat_map(|&key| [key as f32; DIM]).collect();
    block_on(async {
        // Every server has every row, so that each pull must give the same wherever it goes.
        for (_, named) in &servers {
            let client = client_of(std::slice::from_ref(named));
            let mut unique = keys.clone();
            unique.sort_unstable();
            unique.dedup();
            let plan = client.plan(&unique).unwrap();
            let values: Vec<f32> = unique.iter().flat_map(|&key| [key as f32; DIM]).collect();
            let assign = PushRequest {
                change: Change::Assign {
                    only_if_absent: false,
                },
                ..update(&values)
            };
            let push = client.push(&assign, &plan, Deadline::after(PATIENCE)).await;
            push.unwrap().wait(&client).await.unwrap();
        }
        let client = client_of(&named);
        let plan = Arc::new(client.plan(&keys).unwrap());
        let mut out = vec![f32::NAN; keys.len() * DIM];
        for version in 2..200 {
            let deadline = Deadline::after(PATIENCE);
            let pull = client.pull(table_id("t"), DIM, &plan, deadline).await;
            // The slots move between the asking and the answering.
            let master = |slot: u32| (mix64(u64::from(slot) * 512 + version) % 3) as u32;
            for (at, (server, _)) in servers.iter().enumerate() {
                let owned: Vec<bool> = (0..SLOTS).map(|slot| master(slot) == at as u32).collect();
                server.store().set_routing(version, &owned);
            }
            let news = tokio::spawn({
                let (client, routing) = (Arc::clone(&client), routing(version, &named, master));
                async move { client.set_routing(routing) }
            });
            out.fill(f32::NAN);
            let mut pull = pull.unwrap();
            pull.finish(&mut out, deadline).await.unwrap();
            assert!(out == values, "version {version}");
            assert!(news.await.unwrap());
        }
        assert!(client.counters.retries.load(Ordering::SeqCst) > 10);
    });
}

/// What is tried with a first server that fails in some way: a push and a pull that must go on
/// at the second one as soon as the routing says so.
fn goes_on_elsewhere(first: &ServerAddress, is_asked: impl Fn() -> bool + Sync) {
    let (second, named) = server(2);
    let servers = [first.clone(), named];
    let client = client_of(&servers);
    let keys: Vec<u64> = (0..300).collect();
    let runtime = Runtime::new().unwrap();
    let calls = runtime.spawn({
        let (client, keys) = (Arc::clone(&client), keys.clone());
        async move {
            count(&client, &keys, PATIENCE).await.unwrap();
            let counted = rows(&client, &keys, PATIENCE).await.unwrap();
            (counted, Instant::now())
        }
    });
    wait_until("the first server was asked", is_asked);
    // Long enough for the client to be in the middle of waiting.
    std::thread::sleep(Duration::from_millis(100));
    assert!(!calls.is_finished());
    let moved = Instant::now();
    client.set_routing(routing(2, &servers, |_| 1));
    let (counted, done) = runtime.block_on(calls).unwrap();
    assert!(done - moved < AT_ONCE, "{:?}", done - moved);
    assert_eq!(counted, vec![1.0; 300]);
    assert_eq!(counters(&second, &keys), counted);
}

#[test]
fn a_server_that_takes_requests_and_stays_silent_is_left() {
    let silent = peer(1, |_| Act::Ignore);
    goes_on_elsewhere(&address("ps-1", &silent.address, 1), || {
        silent.requests.load(Ordering::SeqCst) > 0
    });
}

#[test]
fn a_server_that_does_not_even_shake_hands_is_left() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = listener.local_addr().unwrap().to_string();
    goes_on_elsewhere(&address("ps-1", &silent, 1), || true);
}

#[test]
fn a_server_that_is_gone_is_left() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let gone = listener.local_addr().unwrap().to_string();
    drop(listener);
    goes_on_elsewhere(&address("ps-1", &gone, 1), || true);
}

#[test]
fn another_process_at_the_address_is_waited_for_and_left() {
    let other = peer(77, |_| Act::Answer(9.0));
    goes_on_elsewhere(&address("ps-1", &other.address, 1), || true);
    assert_eq!(other.requests.load(Ordering::SeqCst), 0, "it was not asked");
}

#[test]
fn servers_that_refuse_or_break_off_are_left() {
    let acts = [
        Act::Refuse(code::NOT_MASTER),
        Act::Refuse(code::STOPPING),
        Act::Refuse(code::IN_FLIGHT),
        Act::Refuse(code::INCOMPLETE),
        Act::Refuse(code::NOT_READY),
        Act::Refuse(code::ROLLED_BACK),
        Act::GoAway,
        Act::Close,
    ];
    for act in acts {
        let bad = peer(1, move |_| act.clone());
        goes_on_elsewhere(&address("ps-1", &bad.address, 1), || {
            bad.requests.load(Ordering::SeqCst) > 0
        });
    }
}

#[test]
fn a_server_that_stops_reading_in_the_middle_of_a_push_is_left() {
    let stuck = peer(1, |_| Act::StopReading);
    let (second, named) = server(2);
    let servers = [address("ps-1", &stuck.address, 1), named];
    let client = client_of(&servers);
    // More than the sockets' buffers hold.
    let keys: Vec<u64> = (0..500_000).collect();
    let runtime = Runtime::new().unwrap();
    let call = runtime.spawn({
        let (client, keys) = (Arc::clone(&client), keys.clone());
        async move {
            let outcome = count(&client, &keys, PATIENCE).await;
            (outcome, Instant::now())
        }
    });
    wait_until("it was asked", || stuck.requests.load(Ordering::SeqCst) > 0);
    std::thread::sleep(Duration::from_millis(200));
    let moved = Instant::now();
    client.set_routing(routing(2, &servers, |_| 1));
    let (outcome, done) = runtime.block_on(call).unwrap();
    outcome.unwrap();
    assert!(done - moved < 3 * AT_ONCE, "{:?}", done - moved);
    assert_eq!(
        counters(&second, &keys[..2_000]),
        vec![1.0; 2_000],
        "all of it is there, once"
    );
}

#[test]
fn a_master_that_becomes_ready_is_asked_again_soon() {
    let late = peer(1, |n| {
        if n < 4 {
            Act::Refuse(code::NOT_READY)
        } else {
            Act::Answer(3.0)
        }
    });
    block_on(async {
        let client = client_of(&[address("ps-1", &late.address, 1)]);
        let begun = Instant::now();
        count(&client, &[1], PATIENCE).await.unwrap();
        assert!(begun.elapsed() < AT_ONCE);
        assert_eq!(client.counters.retries.load(Ordering::SeqCst), 4);
        assert_eq!(client.counters.waits.load(Ordering::SeqCst), 1);
        assert_eq!(rows(&client, &[1], PATIENCE).await.unwrap(), [3.0]);
    });
}

#[test]
fn slots_without_a_master_are_waited_for_and_named() {
    let (_server, named) = server(1);
    let servers = [named];
    let runtime = Runtime::new().unwrap();
    let client = client_of(&servers);
    let keys: Vec<u64> = (0..300).collect();
    client.set_routing(routing(
        2,
        &servers,
        |slot| {
            if slot < 16 {
                NO_MASTER
            } else {
                0
            }
        },
    ));
    runtime.block_on(async {
        for error in [
            count(&client, &keys, BRIEF).await.unwrap_err(),
            rows(&client, &keys, BRIEF).await.unwrap_err(),
        ] {
            let text = error.to_string();
            assert!(text.contains("no master as of routing 2"), "{text}");
            assert!(text.contains(" slots for 0."), "{text}");
        }
    });
    let waiting = runtime.spawn({
        let (client, keys) = (Arc::clone(&client), keys.clone());
        async move { count(&client, &keys, PATIENCE).await }
    });
    // It says so after a second.
    let said = runtime.block_on(async {
        loop {
            match client.next_event().await.unwrap() {
                Event::Waiting(text) => return text,
                Event::Trouble | Event::Resumed(_) => {}
            }
        }
    });
    assert!(
        said.ends_with(" slots without a master; waiting for routing newer than 2"),
        "{said}"
    );
    client.set_routing(routing(3, &servers, |_| 0));
    runtime.block_on(waiting).unwrap().unwrap();
    let said = runtime.block_on(async {
        loop {
            match client.next_event().await.unwrap() {
                Event::Resumed(text) => return text,
                Event::Trouble | Event::Waiting(_) => {}
            }
        }
    });
    assert!(said.starts_with("going on after"), "{said}");
    // Of the push that failed, some parts had left before.
    let counted = runtime.block_on(rows(&client, &keys, PATIENCE)).unwrap();
    assert!(counted.iter().all(|&n| n == 1.0 || n == 2.0));
}

#[test]
fn what_is_known_of_a_push_at_the_deadline() {
    let outcomes = [
        (Act::Refuse(code::NOT_MASTER), true),
        (Act::Refuse(code::NOT_READY), true),
        (Act::Refuse(code::STOPPING), true),
        (Act::GoAway, true),
        (Act::Refuse(code::ROLLED_BACK), false),
        (Act::Refuse(code::IN_FLIGHT), false),
        (Act::Close, false),
        (Act::Ignore, false),
    ];
    for (act, not_applied) in outcomes {
        let shown = format!("{act:?}");
        let bad = peer(1, move |_| act.clone());
        block_on(async {
            let client = client_of(&[address("ps-1", &bad.address, 1)]);
            let error = count(&client, &[1], BRIEF).await.unwrap_err();
            assert_eq!(
                matches!(error, ClientError::Unavailable { .. }),
                not_applied,
                "{shown}: {error:?}"
            );
            assert_eq!(
                matches!(error, ClientError::OutcomeUnknown { .. }),
                !not_applied,
                "{shown}: {error:?}"
            );
            let text = error.to_string();
            let named = format!("the master of 1 slot (ps-1 at {}) for 0.", bad.address);
            assert!(text.contains(&named), "{text}");
            assert!(text.contains("the routing is version 1"), "{text}");
        });
    }
}

#[test]
fn a_doubt_stays_when_a_later_try_is_refused() {
    // The first try may have been applied; the later ones were not.
    let bad = peer(1, |n| {
        if n == 0 {
            Act::Refuse(code::ROLLED_BACK)
        } else {
            Act::Refuse(code::NOT_MASTER)
        }
    });
    block_on(async {
        let client = client_of(&[address("ps-1", &bad.address, 1)]);
        let error = count(&client, &[1], BRIEF).await.unwrap_err();
        assert!(
            matches!(error, ClientError::OutcomeUnknown { .. }),
            "{error:?}"
        );
    });
}

#[test]
fn a_silent_read_says_so_at_its_deadline() {
    let silent = peer(1, |_| Act::Ignore);
    block_on(async {
        let client = client_of(&[address("ps-1", &silent.address, 1)]);
        let error = rows(&client, &[1], BRIEF).await.unwrap_err();
        assert!(matches!(error, ClientError::Deadline { .. }), "{error:?}");
        assert!(error.to_string().contains("ps-1"), "{error}");
    });
}

#[test]
fn slots_that_wait_for_a_decision_are_said_to() {
    let (_server, named) = server(1);
    let servers = [named];
    let client = client_of(&servers);
    let mut lost = routing(2, &servers, |_| NO_MASTER);
    lost.loss = "64 slots wait for a decision".into();
    client.set_routing(lost);
    block_on(async {
        let text = count(&client, &[1], BRIEF).await.unwrap_err().to_string();
        assert!(
            text.contains("no master as of routing 2: 64 slots wait for a decision"),
            "{text}"
        );
    });
}

#[test]
fn a_silent_server_rings_for_a_look_at_the_cluster() {
    let silent = peer(1, |_| Act::Ignore);
    block_on(async {
        let client = client_of(&[address("ps-1", &silent.address, 1)]);
        let call = rows(&client, &[1], PATIENCE);
        tokio::select! {
            event = client.next_event() => assert_eq!(event, Some(Event::Trouble)),
            _ = call => panic!("it was answered"),
        }
    });
}

#[test]
fn lost_slots_fail_what_waits_and_what_comes_after() {
    let silent = peer(1, |_| Act::Ignore);
    let servers = [address("ps-1", &silent.address, 1)];
    let client = client_of(&servers);
    let runtime = Runtime::new().unwrap();
    let waiting = runtime.spawn({
        let client = Arc::clone(&client);
        async move { count(&client, &[1], PATIENCE).await }
    });
    wait_until("it was asked", || {
        silent.requests.load(Ordering::SeqCst) > 0
    });
    let mut lost = Routing::of(2, 1, servers.to_vec(), &[0; SLOTS as usize]).unwrap();
    lost.loss = "slots go back to a checkpoint".into();
    client.set_routing(lost);
    // The client tells what became of them also when a newer routing does not say it.
    client.set_routing(Routing::of(3, 1, servers.to_vec(), &[0; SLOTS as usize]).unwrap());
    let begun = Instant::now();
    for outcome in [
        runtime.block_on(waiting).unwrap(),
        runtime.block_on(count(&client, &[1], PATIENCE)),
        runtime.block_on(rows(&client, &[1], PATIENCE)).map(drop),
    ] {
        let error = outcome.unwrap_err();
        assert!(matches!(error, ClientError::StateLost { .. }), "{error:?}");
        assert!(error.to_string().contains("generation 1"), "{error}");
        assert!(
            error.to_string().contains("go back to a checkpoint"),
            "{error}"
        );
    }
    assert!(begun.elapsed() < AT_ONCE);
}

#[test]
fn an_older_routing_is_left_aside() {
    let (_server, named) = server(1);
    let servers = [named];
    let client = client_of(&servers);
    assert!(client.set_routing(routing(5, &servers, |_| 0)));
    for version in [1, 4, 5] {
        assert!(!client.set_routing(routing(version, &servers, |_| NO_MASTER)));
    }
    assert_eq!(client.routing_version(), 5);
    block_on(count(&client, &[1], PATIENCE)).unwrap();
}

#[test]
fn connecting_waits_for_a_routing_with_servers_that_answer() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = address("ps-1", &silent.local_addr().unwrap().to_string(), 1);
    let (_server, named) = server(2);
    let servers = [silent, named];
    let client = client_of(&servers);
    let runtime = Runtime::new().unwrap();
    let error = runtime
        .block_on(client.connect(Deadline::after(BRIEF)))
        .unwrap_err();
    assert!(
        matches!(error, ClientError::Unavailable { .. }),
        "{error:?}"
    );
    let connecting = runtime.spawn({
        let client = Arc::clone(&client);
        async move { client.connect(Deadline::after(PATIENCE)).await }
    });
    client.set_routing(routing(2, &servers, |_| 1));
    runtime.block_on(connecting).unwrap().unwrap();
}

#[test]
fn a_push_behind_one_that_waits_keeps_its_own_deadline() {
    let silent = peer(1, |_| Act::Ignore);
    let servers = [address("ps-1", &silent.address, 1)];
    let client = client_of(&servers);
    client.set_routing(routing(2, &servers, |_| NO_MASTER));
    let runtime = Runtime::new().unwrap();
    let first = runtime.spawn({
        let client = Arc::clone(&client);
        async move { count(&client, &[1], PATIENCE).await }
    });
    wait_until("the first push waits", || {
        client.counters.waits.load(Ordering::SeqCst) > 0
    });
    let error = runtime.block_on(count(&client, &[1], BRIEF)).unwrap_err();
    assert!(
        matches!(error, ClientError::Unavailable { .. }),
        "{error:?}"
    );
    assert!(error.to_string().contains("earlier pushes"), "{error}");
    first.abort();
}
