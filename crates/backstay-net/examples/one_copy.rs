//! Times pushes at a node that holds the only copy of every slot: on the direct way, which such a
//! node takes, and on the common way, which a node with backups takes. It opens no socket.
//!
//! `cargo run --release -p backstay-net --example one_copy`

// A step that fails ends the program.
#![allow(clippy::unwrap_used)]

use std::ops::Range;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use backstay_core::hash::{table_id, SlotSpace};
use backstay_core::replication::{Micros, ReplicaOptions, RoutingTable};
use backstay_core::spec::TableSpec;
use backstay_core::stream::{StreamId, TransactionId};
use backstay_core::transaction::{Batch, Change, Transaction};
use backstay_net::replicator::{Answer, Replicator};
use backstay_net::store::Store;

const SLOTS: u32 = 1024;
const DIM: usize = 16;
/// Keys of a push, and pushes of each client in a turn.
const SIZES: [(usize, u64); 2] = [(3_328, 150), (53_248, 15)];
const CLIENTS: [u32; 2] = [1, 2];
/// Other work on the machine makes a turn longer, so the shortest turn counts. The two ways are
/// measured by turns.
const TURNS: u64 = 30;

/// The routing table of node 1 alone. With `newcomer`, node 2 is to get a copy of slot 0: then
/// node 1 takes the common way. It sends nothing, because node 2 is not connected.
fn routing(newcomer: bool) -> RoutingTable {
    let every_slot = |number: &str| vec![number; SLOTS as usize].join(",");
    let (sets, ones) = (every_slot("0"), every_slot("1"));
    let first_set = u32::from(newcomer);
    let text = format!(
        r#"{{"format":2,"version":1,"slot_count":{SLOTS},"nodes":[
           {{"node_id":"a","instance":1,"data_address":""}},
           {{"node_id":"b","instance":2,"data_address":"127.0.0.1:1"}}],"gone":[],
           "sets":[[0,[],[]],[0,[],[1]]],"set_of_slot":[{first_set}{}],
           "term_of_slot":[{ones}],"epoch_of_slot":[{ones}]}}"#,
        &sets[1..]
    );
    RoutingTable::from_json(&text, SLOTS).unwrap()
}

fn replicator(newcomer: bool) -> Arc<Replicator> {
    let store = Arc::new(Store::new(SlotSpace::new(SLOTS).unwrap(), 0));
    let spec = format!(
        r#"{{"name":"t","kind":{{"sparse":{{"dim":{DIM}}}}},"initializer":{{"zeros":{{}}}},"optimizer":{{"sgd":{{"learning_rate":0.1}}}}}}"#
    );
    let spec = TableSpec::from_json(&spec).unwrap();
    store.create_table(&Arc::new(spec), 1).unwrap();
    let replicator = Replicator::new(1, store, ReplicaOptions::default());
    replicator.hold_lease_until(Micros::MAX);
    replicator.set_routing(routing(newcomer));
    replicator
}

/// The pushes of one client in one turn.
fn pushes(space: SlotSpace, client: u32, keys: usize, sequences: Range<u64>) -> Vec<Transaction> {
    let stream = StreamId {
        job: 1,
        pass: 0,
        task: client,
    };
    let change = Change::update(1.0);
    let mut keys: Vec<u64> = (0..keys as u64)
        .map(|key| key * 7_919 % 1_000_000)
        .collect();
    keys.sort_by_key(|&key| (space.slot_of(key), key));
    let gradients = vec![0.5; keys.len() * DIM];
    let push = |sequence| {
        let id = TransactionId { stream, sequence };
        let batch = Batch::new(&keys, &gradients);
        Transaction::new(space, id, sequence, table_id("t"), change, batch).unwrap()
    };
    sequences.map(push).collect()
}

/// Send pushes one after the other, each when the one before is acknowledged.
fn send(replicator: &Arc<Replicator>, pushes: Vec<Transaction>) {
    for mut push in pushes {
        replicator.store().prepare(&mut push).unwrap();
        if let Answer::Later(outcome) = replicator.push(push).unwrap().0 {
            outcome.blocking_recv().unwrap().unwrap();
        }
    }
}

/// Microseconds for each push of a turn with so many clients.
fn time_turn(
    replicator: &Arc<Replicator>,
    clients: u32,
    keys: usize,
    sequences: Range<u64>,
) -> f64 {
    let all = f64::from(clients) * (sequences.end - sequences.start) as f64;
    let space = replicator.store().space();
    let of_client = |client| pushes(space, client, keys, sequences.clone());
    let work: Vec<_> = (0..clients).map(of_client).collect();
    let begun = Instant::now();
    thread::scope(|scope| {
        for pushes in work {
            scope.spawn(move || send(replicator, pushes));
        }
    });
    begun.elapsed().as_secs_f64() * 1e6 / all
}

fn main() {
    for (keys, count) in SIZES {
        for clients in CLIENTS {
            let ways = [replicator(false), replicator(true)];
            let mut best = [f64::INFINITY; 2];
            for turn in 0..TURNS {
                for (way, best) in ways.iter().zip(&mut best) {
                    let sequences = turn * count..(turn + 1) * count;
                    *best = best.min(time_turn(way, clients, keys, sequences));
                }
            }
            let [direct, common] = best;
            println!("{keys} keys, {clients} clients: {direct:.0} us for each push on the direct way, {common:.0} us on the common way");
        }
    }
}
