//! Times pushes under Adagrad and FTRL as user functions, beside the built-in ones: 53,248 uniform
//! keys a push, rows of 16 float32, in a table of a million rows and in one that fits the cache.
//!
//! `cargo run --release -p backstay-core --example user_functions`

// A step that fails ends the program. Time is what it measures.
#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

use std::sync::Arc;
use std::time::Instant;

use backstay_core::engine::{Engine, ServingState};
use backstay_core::hash::{table_id, SlotSpace};
use backstay_core::spec::TableSpec;
use backstay_core::stream::{StreamId, TransactionId};
use backstay_core::transaction::{Batch, Change, Transaction};
use serde_json::{json, Value};

const SLOTS: u32 = 1024;
const DIM: usize = 16;
const KEYS: usize = 53_248;
const TABLES: [u64; 2] = [1_000_000, 20_000];
/// Other work on the machine makes a turn longer: the shortest one counts, and the median of the
/// ratios of neighbours.
const TURNS: u64 = 200;
/// Different batches, so that rows are not in the cache by chance.
const BATCHES: u64 = 8;

/// The function of the tests' vectors.
fn user(name: &str, learning_rate: f64) -> Value {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../tests/vectors/user_functions.json"
    );
    let cases: Vec<Value> = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let found = |case: &Value| case["optimizer"]["user"]["name"] == name;
    let mut optimizer = cases.into_iter().find(found).unwrap()["optimizer"].clone();
    optimizer["user"]["learning_rate"] = json!(learning_rate);
    optimizer
}

fn engine(space: SlotSpace, optimizer: &Value) -> Engine {
    let mut engine = Engine::new(space, 0..SLOTS);
    for slot in 0..SLOTS {
        engine.set_serving_state(slot, ServingState::Serving);
    }
    let spec = json!({"name": "t", "kind": {"sparse": {"dim": DIM}}, "optimizer": optimizer});
    let spec = TableSpec::from_json(&spec.to_string()).unwrap();
    engine.create_table(&Arc::new(spec)).unwrap();
    engine
}

/// Keys as a client sends them: each once, in the order of their slots.
fn batch(space: SlotSpace, number: u64, rows: u64) -> Batch {
    let mut state = number + 1;
    let mut next = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % rows
    };
    let mut keys: Vec<u64> = (0..KEYS).map(|_| next()).collect();
    keys.sort_unstable_by_key(|&key| (space.slot_of(key), key));
    keys.dedup();
    let gradient = |at: usize| (at % 1_000) as f32 / 500.0 - 0.999;
    let values: Vec<f32> = (0..keys.len() * DIM).map(gradient).collect();
    Batch::new(&keys, &values)
}

fn push(space: SlotSpace, sequence: u64, batch: Batch) -> Transaction {
    let stream = StreamId {
        job: 1,
        pass: 0,
        task: 0,
    };
    let id = TransactionId { stream, sequence };
    let change = Change::update(1.0);
    Transaction::new(space, id, sequence, table_id("t"), change, batch).unwrap()
}

fn main() {
    let space = SlotSpace::new(SLOTS).unwrap();
    let pairs = [
        ("adagrad", json!({"adagrad": {"learning_rate": 0.05}})),
        ("ftrl", json!({"ftrl": {"learning_rate": 0.05, "l1": 0.1}})),
    ];
    for rows in TABLES {
        let batches: Vec<Batch> = (0..BATCHES).map(|one| batch(space, one, rows)).collect();
        for (name, built_in) in &pairs {
            let mut engines = [engine(space, built_in), engine(space, &user(name, 0.05))];
            let (mut best, mut ratios) = ([f64::INFINITY; 2], Vec::new());
            for turn in 0..TURNS {
                let batch = &batches[(turn % BATCHES) as usize];
                let mut took = [0.0; 2];
                for (engine, took) in engines.iter_mut().zip(&mut took) {
                    let push = push(space, turn, batch.clone());
                    let begun = Instant::now();
                    engine.apply(&push, push.runs()).unwrap();
                    *took = begun.elapsed().as_secs_f64() / batch.keys().len() as f64;
                }
                if turn >= BATCHES {
                    best = [best[0].min(took[0]), best[1].min(took[1])];
                    ratios.push(took[0] / took[1]);
                }
            }
            let [built_in, user] = best.map(|seconds| 1e-6 / seconds);
            ratios.sort_unstable_by(f64::total_cmp);
            let median = ratios[ratios.len() / 2];
            println!("{name}, {rows} rows: built in {built_in:.2} million keys/s, as a user function {user:.2}, ratio {:.2}; median of the turns {median:.2}", user / built_in);
        }
    }
}
