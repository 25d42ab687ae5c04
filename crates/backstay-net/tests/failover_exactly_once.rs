//! Pushes while slots move between peers that share one truth, answers are lost and masters end
//! in the middle: each is counted once, and no slot is ever cut.

// What fails in a helper is a failed test; exact numbers are the point.
#![allow(clippy::unwrap_used, clippy::float_cmp)]

#[path = "support/changing.rs"]
mod changing;
#[path = "support/peer.rs"]
mod peer;
mod support;

use std::collections::hash_map::Entry;
use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use backstay_core::error::code;
use backstay_core::hash::{mix64, SlotSpace};
use backstay_core::wire::{Opcode, PushMeta};
use backstay_net::client::routing::{ServerAddress, NO_MASTER};
use backstay_net::client::Deadline;
use changing::{address, new_client, routing, update};
use peer::{peer_that, Act, Asked};
use support::{wait_until, DIM, PATIENCE, SLOTS};
use tokio::runtime::Runtime;

/// What all peers of a cluster know together, as if their replicas were perfect: who is master
/// of each slot, which pushes each slot has taken and with which keys, and every counter.
struct Truth {
    masters: Vec<u32>,
    taken: HashMap<(u32, u64), Vec<u64>>,
    counters: HashMap<u64, f32>,
    /// Draws what goes wrong.
    random: u64,
}

impl Truth {
    fn draw(&mut self) -> u64 {
        self.random = mix64(self.random + 1);
        self.random
    }

    /// A push arrives at peer `me`: it may be applied or not, and the answer may come or not.
    fn push(&mut self, me: u32, asked: &Asked) -> Act {
        let meta = PushMeta::decode(&asked.meta).unwrap();
        let (keys, values) = asked.body.split_at(meta.key_count as usize * 8);
        let keys: Vec<u64> = bytemuck::pod_collect_to_vec(keys);
        let values: Vec<f32> = bytemuck::pod_collect_to_vec(values);
        let space = SlotSpace::new(SLOTS).unwrap();
        let mut slots: Vec<(u32, Vec<usize>)> = Vec::new();
        for (at, &key) in keys.iter().enumerate() {
            let slot = space.slot_of(key);
            match slots.last_mut() {
                Some((last, keys)) if *last == slot => keys.push(at),
                Some((last, _)) if *last > slot => panic!("slot {slot} after {last}"),
                _ => slots.push((slot, vec![at])),
            }
        }
        if slots
            .iter()
            .any(|(slot, _)| self.masters[*slot as usize] != me)
        {
            return Act::Refuse(code::NOT_MASTER);
        }
        let fate = self.draw() % 32;
        if fate == 0 {
            return Act::Refuse(code::ROLLED_BACK);
        }
        // A master that dies in between has some slots of the push.
        let applied = if fate == 1 {
            slots.len() / 2
        } else {
            slots.len()
        };
        for (slot, places) in &slots[..applied] {
            let here: Vec<u64> = places.iter().map(|&at| keys[at]).collect();
            let first_time = match self.taken.entry((*slot, meta.id.sequence)) {
                Entry::Occupied(before) => {
                    assert_eq!(before.get(), &here, "slot {slot} was cut");
                    false
                }
                Entry::Vacant(entry) => {
                    entry.insert(here);
                    true
                }
            };
            for &at in places.iter().filter(|_| first_time) {
                *self.counters.entry(keys[at]).or_default() -= values[at * DIM];
            }
        }
        match fate {
            1 | 2 => Act::Close,
            3 => Act::Ignore,
            4 => Act::Refuse(code::INCOMPLETE),
            _ => Act::Answer(0.0),
        }
    }
}

/// Peers that share one truth, in which peer 0 is master of all.
fn peers(count: u32) -> (Arc<Mutex<Truth>>, Vec<ServerAddress>) {
    let truth = Arc::new(Mutex::new(Truth {
        masters: vec![0; SLOTS as usize],
        taken: HashMap::new(),
        counters: HashMap::new(),
        random: 7,
    }));
    let named = (0..count)
        .map(|me| {
            let truth = Arc::clone(&truth);
            let peer = peer_that(u64::from(me) + 1, move |_, asked| {
                if asked.header.opcode == Opcode::Push {
                    return truth.lock().unwrap().push(me, asked);
                }
                Act::Answer(0.0)
            });
            address(&format!("ps-{me}"), &peer.address, u64::from(me) + 1)
        })
        .collect();
    (truth, named)
}

/// I7: parts that are applied stay so, and retries complete the others.
#[test]
fn pushes_are_counted_once_while_slots_move_and_answers_are_lost() {
    const PEERS: u32 = 3;
    const VERSIONS: u64 = 60;
    let (truth, named) = peers(PEERS);
    let client = new_client(Duration::from_millis(300));
    client.set_routing(routing(1, &named, |_| 0));
    let keys: Vec<u64> = (0..1_000).collect();
    let runtime = Runtime::new().unwrap();
    let pushing = {
        let (client, keys) = (Arc::clone(&client), keys.clone());
        runtime.spawn(async move {
            // One plan for all: it grows stale with every move.
            let plan = client.plan(&keys).unwrap();
            let values = vec![-1.0; keys.len() * DIM];
            let mut pushed = 0;
            while client.routing_version() < 2 * VERSIONS {
                let deadline = Deadline::after(PATIENCE);
                let push = client.push(&update(&values), &plan, deadline).await;
                client.finish_in_background(&push.unwrap());
                pushed += 1;
            }
            client.flush().await.unwrap();
            pushed
        })
    };
    for version in 2..=VERSIONS {
        let acknowledged = client.counters.pushes_acknowledged.load(Ordering::SeqCst);
        // Some slots have no master for a while.
        let masters: Vec<u32> = {
            let mut truth = truth.lock().unwrap();
            let draw = |_| (truth.draw() % u64::from(PEERS)) as u32;
            truth.masters = (0..SLOTS).map(draw).collect();
            truth.masters.clone()
        };
        if version % 3 == 0 {
            let without = |slot: u32| {
                if slot.is_multiple_of(5) {
                    NO_MASTER
                } else {
                    masters[slot as usize]
                }
            };
            client.set_routing(routing(2 * version, &named, without));
        }
        let master = |slot: u32| masters[slot as usize];
        client.set_routing(routing(2 * version + 1, &named, master));
        wait_until("a push after a move", || {
            client.counters.pushes_acknowledged.load(Ordering::SeqCst) > acknowledged
                || pushing.is_finished()
        });
    }
    let pushed = runtime.block_on(pushing).unwrap();
    let truth = truth.lock().unwrap();
    assert!(keys.iter().all(|key| truth.counters[key] == pushed as f32));
    assert!(pushed > 20, "{pushed}");
    assert!(client.counters.failovers.load(Ordering::SeqCst) > 10);
}
