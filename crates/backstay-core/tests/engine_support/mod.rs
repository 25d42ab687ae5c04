//! An engine of few slots, and pushes to count in it.

// Each test program uses a part of it. A helper that fails is a test that fails.
#![allow(dead_code, clippy::unwrap_used, clippy::float_cmp)]

use std::sync::Arc;

use backstay_core::compensation::Compensation;
use backstay_core::engine::{Engine, ServingState, StageReport};
use backstay_core::error::Refusal;
use backstay_core::hash::{table_id, SlotSpace};
use backstay_core::spec::TableSpec;
use backstay_core::stream::{StreamId, TransactionId};
use backstay_core::transaction::{Batch, Change, StagedRun, Transaction};

pub const SLOTS: u32 = 4;
pub const DIM: usize = 3;

pub fn spec(optimizer: &str) -> Arc<TableSpec> {
    let json = format!(
        r#"{{"name":"t","kind":{{"sparse":{{"dim":{DIM}}}}},"initializer":{{"constant":{{"value":0.0}}}},"optimizer":{optimizer}}}"#
    );
    Arc::new(TableSpec::from_json(&json).unwrap())
}

/// Counts gradients exactly: rate 1, integer gradients of -1.
pub fn counter() -> Arc<TableSpec> {
    spec(r#"{"sgd":{"learning_rate":1.0}}"#)
}

pub fn space() -> SlotSpace {
    SlotSpace::new(SLOTS).unwrap()
}

/// The master of all slots.
pub fn engine(spec: &Arc<TableSpec>) -> Engine {
    let mut engine = Engine::new(space(), 0..SLOTS);
    engine.set_version(1);
    for slot in 0..SLOTS {
        engine.set_serving_state(slot, ServingState::Serving);
    }
    engine.create_table(spec).unwrap();
    engine
}

pub fn by_slot(mut keys: Vec<u64>) -> Vec<u64> {
    keys.sort_by_key(|&key| (space().slot_of(key), key));
    keys.dedup();
    keys
}

pub fn push(stream: u64, sequence: u64, floor: u64, keys: &[u64], value: f32) -> Arc<Transaction> {
    let values = vec![value; keys.len() * DIM];
    let id = TransactionId {
        stream: StreamId {
            job: stream,
            pass: 0,
            task: 0,
        },
        sequence,
    };
    let change = Change::update(1.0);
    let batch = Batch::new(keys, &values);
    Arc::new(Transaction::new(space(), id, floor, table_id("t"), change, batch).unwrap())
}

/// The same, and the table divides the learning rate by the staleness.
pub fn scaled(push: &Transaction) -> Arc<Transaction> {
    let mut push = push.clone();
    push.compensation = Compensation::Scale;
    Arc::new(push)
}

/// The same, from where its gradients come in each of its slots.
pub fn told(push: &Transaction, origins: &[u64]) -> Arc<Transaction> {
    let mut push = push.clone();
    push.tell_origins(origins).unwrap();
    Arc::new(push)
}

pub fn delete(stream: u64, sequence: u64, keys: &[u64]) -> Arc<Transaction> {
    let push = push(stream, sequence, 0, keys, 0.0);
    let batch = Batch::new(keys, &[]);
    let table = push.table;
    Arc::new(Transaction::new(space(), push.id, 0, table, Change::Delete, batch).unwrap())
}

/// Give a transaction its places and take them, as a master does.
pub fn stage(
    engine: &mut Engine,
    transaction: &Arc<Transaction>,
    tag: u64,
) -> Result<(StageReport, Vec<StagedRun>), Refusal> {
    let mut places = Vec::new();
    let report = engine.admit(transaction, transaction.runs(), &mut places)?;
    assert_eq!(engine.stage(transaction, &places, tag), None);
    Ok((report, places))
}

pub fn apply(engine: &mut Engine, transaction: &Arc<Transaction>) -> Result<StageReport, Refusal> {
    let (report, places) = stage(engine, transaction, 1)?;
    let gone = engine.commit(transaction, &places)?;
    Ok(StageReport { gone, ..report })
}

pub fn read(engine: &Engine, key: u64) -> f32 {
    let mut row = [0.0; DIM];
    engine.read(table_id("t"), &[key], &mut row).unwrap();
    assert!(row.iter().all(|&value| value == row[0]));
    row[0]
}

/// The end of a stream in all slots.
pub fn close(stream: u64) -> Arc<Transaction> {
    let id = TransactionId {
        stream: StreamId {
            job: stream,
            pass: 0,
            task: 0,
        },
        sequence: u64::MAX,
    };
    Arc::new(Transaction::close(id, 0..SLOTS))
}

/// End a stream: what the slots remember of its pushes goes.
pub fn end(engine: &mut Engine, stream: u64) {
    apply(engine, &close(stream)).unwrap();
}
