//! What a lifetime costs at a node that holds the only copy of every slot: keys/s with statistics and
//! with admission, over those of a table without; and how long pushes take while 10 million rows
//! expire. It opens no socket.
//!
//! `cargo run --release -p backstay-net --example lifetimes`

// A step that fails ends the program.
#![allow(clippy::unwrap_used)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use backstay_core::hash::{mix64, table_id, SlotSpace};
use backstay_core::life::{SlotPart, Thresholds};
use backstay_core::replication::{Micros, ReplicaOptions, RoutingTable};
use backstay_core::spec::TableSpec;
use backstay_core::stream::{StreamId, TransactionId};
use backstay_core::transaction::{Batch, Change, Transaction};
use backstay_net::replicator::{Answer, Replicator};
use backstay_net::store::Store;

const SLOTS: u32 = 1024;
const DIM: usize = 16;
const KEYS: usize = 53_248;
const KNOWN: u64 = 1_000_000;
/// Other work on the machine makes a turn longer, so the shortest turn counts. The tables are
/// measured by turns.
const TURNS: u64 = 60;
const EXPIRING: u64 = 10_000_000;
const UPDATE: Change = Change::update(1.0);
const OBSERVE: Change = Change::update(1.0).counted();

fn replicator(tables: &[(&str, &str)]) -> Arc<Replicator> {
    let store = Arc::new(Store::new(SlotSpace::new(SLOTS).unwrap(), 0));
    for (name, lifetime) in tables {
        let spec = format!(
            r#"{{"name":"{name}","kind":{{"sparse":{{"dim":{DIM}}}}},"optimizer":{{"sgd":{{"learning_rate":0.1}}}}{lifetime}}}"#
        );
        let spec = TableSpec::from_json(&spec).unwrap();
        store.create_table(&Arc::new(spec), 1).unwrap();
    }
    let replicator = Replicator::new(1, store, ReplicaOptions::default());
    replicator.hold_lease_until(Micros::MAX);
    let every_slot = |number: &str| vec![number; SLOTS as usize].join(",");
    let (zeros, ones) = (every_slot("0"), every_slot("1"));
    let text = format!(
        r#"{{"format":2,"version":1,"slot_count":{SLOTS},"nodes":[{{"node_id":"a","instance":1,"data_address":""}}],
           "gone":[],"sets":[[0,[],[]]],"set_of_slot":[{zeros}],"term_of_slot":[{ones}],"epoch_of_slot":[{ones}]}}"#
    );
    replicator.set_routing(RoutingTable::from_json(&text, SLOTS).unwrap());
    replicator
}

/// Sends transactions of one stream.
struct Sender {
    replicator: Arc<Replicator>,
    stream: StreamId,
    next: u64,
}

impl Sender {
    fn new(replicator: &Arc<Replicator>, task: u32) -> Self {
        let stream = StreamId {
            job: 1,
            pass: 0,
            task,
        };
        Self {
            replicator: Arc::clone(replicator),
            stream,
            next: 0,
        }
    }

    fn make(&mut self, table: &str, change: Change, mut keys: Vec<u64>) -> Transaction {
        let space = self.replicator.store().space();
        keys.sort_by_key(|&key| (space.slot_of(key), key));
        keys.dedup();
        let id = TransactionId {
            stream: self.stream,
            sequence: self.next,
        };
        self.next += 1;
        let batch = Batch::new(&keys, &vec![0.5; keys.len() * change.values(DIM)]);
        Transaction::new(space, id, id.sequence, table_id(table), change, batch).unwrap()
    }

    fn send(&self, mut transaction: Transaction) -> Duration {
        let begun = Instant::now();
        self.replicator.store().prepare(&mut transaction).unwrap();
        if let Answer::Later(outcome) = self.replicator.push(transaction).unwrap().0 {
            outcome.blocking_recv().unwrap().unwrap();
        }
        begun.elapsed()
    }
}

/// The tables that are compared.
const TABLES: [(&str, &str); 5] = [
    ("none", ""),
    ("grows", ""),
    (
        "statistics",
        r#","lifetime":{"expiry":{"unseen_seconds":1000,"score_below":0.5}}"#,
    ),
    (
        "after",
        r#","lifetime":{"admission":{"after":{"occurrences":2}}}"#,
    ),
    (
        "filter",
        r#","lifetime":{"admission":{"after":{"occurrences":2,"filter_bytes":268435456}}}"#,
    ),
];
/// What is timed: a table, a change, whether half of the keys are new, and what it is.
const WAYS: [(&str, Change, bool, &str); 6] = [
    ("none", UPDATE, false, "no lifetime"),
    ("statistics", UPDATE, false, "last seen, show and click"),
    (
        "statistics",
        OBSERVE,
        false,
        "the same, shows and clicks told",
    ),
    ("grows", UPDATE, true, "no lifetime, half of the keys new"),
    ("after", UPDATE, true, "after 2, half of the keys new"),
    (
        "filter",
        UPDATE,
        true,
        "after 2 by a filter, half of the keys new",
    ),
];

fn keys_per_second() {
    let replicator = replicator(&TABLES);
    let mut sender = Sender::new(&replicator, 0);
    for (table, _) in TABLES {
        for first in (0..2 * KNOWN).step_by(50_000) {
            let keys = (first..first + 50_000).map(|key| key % KNOWN).collect();
            let push = sender.make(table, UPDATE, keys);
            sender.send(push);
        }
    }
    let mut fresh = KNOWN;
    let mut draw = |turn: u64, with_new: bool| -> Vec<u64> {
        let keys = (0..KEYS as u64).map(|n| {
            if with_new && n % 2 == 1 {
                fresh += 1;
                return fresh;
            }
            mix64(turn * KEYS as u64 + n) % KNOWN
        });
        keys.collect()
    };
    let mut best = [f64::INFINITY; WAYS.len()];
    for turn in 0..TURNS {
        for (&(table, change, with_new, _), best) in WAYS.iter().zip(&mut best) {
            let push = sender.make(table, change, draw(turn, with_new));
            let keys = push.batch.keys().len() as f64;
            *best = best.min(sender.send(push).as_secs_f64() / keys);
        }
    }
    for ((.., what), one) in WAYS.iter().zip(best) {
        let of_none = best[0] / one;
        println!("{what}: {:.2} M keys/s, {of_none:.2} of none", 1e-6 / one);
    }
}

fn percentile(times: &mut [Duration], part: f64) -> Duration {
    times.sort_unstable();
    times[((times.len() - 1) as f64 * part) as usize]
}

fn pushes_while_rows_expire() {
    let lifetime = r#","lifetime":{"expiry":{"unseen_seconds":1000,"norm_below":1e-3}}"#;
    let replicator = replicator(&[("old", lifetime), ("t", "")]);
    let mut sender = Sender::new(&replicator, 0);
    for first in (0..EXPIRING).step_by(100_000) {
        let push = sender.make("old", UPDATE, (first..first + 100_000).collect());
        sender.send(push);
    }
    let mut time_pushes = |until: &dyn Fn(usize) -> bool| {
        let mut times = Vec::new();
        while !until(times.len()) {
            let first = times.len() as u64 * 3_328;
            let keys = (first..first + 3_328).map(|n| mix64(n) % KNOWN).collect();
            let push = sender.make("t", UPDATE, keys);
            times.push(sender.send(push));
        }
        times
    };
    time_pushes(&|sent| sent == 1_000);
    let mut before = time_pushes(&|sent| sent == 3_000);
    let done = AtomicBool::new(false);
    let (mut during, took) = thread::scope(|scope| {
        let expiry = scope.spawn(|| {
            let mut sender = Sender::new(&replicator, 1);
            let begun = Instant::now();
            // Every row: their weights are 0.05.
            let all = Change::Expire(Thresholds {
                norm_below: Some(1e3),
                ..Thresholds::default()
            });
            for slot in 0..SLOTS {
                for part in 0..SlotPart::PARTS {
                    let key = SlotPart::of(part).key(replicator.store().space(), slot);
                    let expire = sender.make("old", all, vec![key]);
                    // As clients and servers rest.
                    thread::sleep(sender.send(expire) * 2);
                }
            }
            done.store(true, Ordering::Release);
            begun.elapsed()
        });
        let during = time_pushes(&|_| done.load(Ordering::Acquire));
        (during, expiry.join().unwrap())
    });
    assert_eq!(replicator.store().usage("old").unwrap().rows, 0);
    let count = during.len();
    let [before_p99, during_p99] = [&mut before, &mut during].map(|times| percentile(times, 0.99));
    let [before_p50, during_p50] = [&mut before, &mut during].map(|times| percentile(times, 0.5));
    println!(
        "{EXPIRING} rows expire in {took:?}; pushes of 3328 keys meanwhile ({count}): median {during_p50:?} ({before_p50:?} before), p99 {during_p99:?} ({before_p99:?} before, {:.2} times)",
        during_p99.as_secs_f64() / before_p99.as_secs_f64()
    );
}

fn main() {
    keys_per_second();
    for _ in 0..3 {
        pushes_while_rows_expire();
    }
}
