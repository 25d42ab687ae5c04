//! The stripes under real threads, against a model that is one number for each slot.
//!
//! Every push adds 1 to all rows of the slots that it touches. So a slot's position, the value of
//! each of its rows, and the number of distinct pushes applied to it are one number at any moment:
//! in a pull, in a snapshot, in a copy that is read piece by piece, and in the end.

// What fails in a helper is a failed test.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::thread;

use backstay_core::engine::{CopyPiece, ServingState};
use backstay_core::error::Refusal;
use backstay_core::hash::{table_id, SlotSpace};
use backstay_core::replication::Rows;
use backstay_core::spec::TableSpec;
use backstay_core::stream::{StreamId, TransactionId};
use backstay_core::transaction::{Batch, Change, Transaction};
use backstay_net::store::Store;

const SLOTS: u32 = 8;
const KEYS: u64 = 600;
const STREAMS: u32 = 3;
const PUSHES: u64 = 1000;
/// Few, so that a copy is read in many pieces with pushes in between.
const BYTES_AT_ONCE: u64 = 64;

struct World {
    space: SlotSpace,
    keys: Vec<u64>,
    table: u64,
}

impl World {
    fn new() -> Self {
        let space = SlotSpace::new(SLOTS).unwrap();
        let mut keys: Vec<u64> = (0..KEYS).collect();
        keys.sort_by_key(|&key| space.slot_of(key));
        let table = table_id("t");
        Self { space, keys, table }
    }

    fn store(&self) -> Store {
        let spec = r#"{"name":"t","kind":{"sparse":{"dim":1}},"initializer":{"zeros":{}},"optimizer":{"sgd":{"learning_rate":1.0}}}"#;
        let store = Store::new(self.space, 0);
        store.set_routing(1, &[true; SLOTS as usize]);
        let spec = Arc::new(TableSpec::from_json(spec).unwrap());
        store.create_table(&spec, 1).unwrap();
        store
    }

    /// Which slots a push touches: not all, so that positions differ.
    fn touches(stream: u32, sequence: u64, slot: u32) -> bool {
        !(u64::from(stream) + sequence + u64::from(slot)).is_multiple_of(3)
    }

    /// Its sender has heard of all pushes before it.
    fn push(&self, stream: u32, sequence: u64) -> Transaction {
        let in_push = |key: &&u64| Self::touches(stream, sequence, self.space.slot_of(**key));
        let keys: Vec<u64> = self.keys.iter().filter(in_push).copied().collect();
        let stream = StreamId {
            job: 1,
            pass: 0,
            task: stream,
        };
        let change = Change::update(1.0);
        let batch = Batch::new(&keys, &vec![-1.0; keys.len()]);
        let id = TransactionId { stream, sequence };
        Transaction::new(self.space, id, sequence, self.table, change, batch).unwrap()
    }

    /// Send all pushes of a stream, each until it is acknowledged.
    fn send(&self, store: &Store, stream: u32) {
        for sequence in 0..PUSHES {
            let mut push = self.push(stream, sequence);
            store.prepare(&mut push).unwrap();
            loop {
                match store.apply(&push) {
                    Ok(_) => break,
                    Err(Refusal::NotMaster { .. } | Refusal::Incomplete(_)) => thread::yield_now(),
                    Err(other) => panic!("{other:?}"),
                }
            }
        }
    }

    /// Each slot's one value in a pull, which never goes back.
    fn pull(&self, store: &Store, seen: &mut BTreeMap<u32, f32>) {
        let mut values = vec![f32::NAN; self.keys.len()];
        match store.pull(self.table, &self.keys, &mut values) {
            Ok(()) => {}
            Err(Refusal::NotMaster { .. }) => return,
            Err(other) => panic!("{other:?}"),
        }
        let mut now: BTreeMap<u32, f32> = BTreeMap::new();
        for (&key, &value) in self.keys.iter().zip(&values) {
            let slot = self.space.slot_of(key);
            let first = *now.entry(slot).or_insert(value);
            assert_eq!(first.to_bits(), value.to_bits(), "slot {slot} is torn");
        }
        for (slot, value) in now {
            let before = seen.insert(slot, value);
            assert!(before.is_none_or(|before| before <= value), "slot {slot}");
        }
    }

    fn snapshot(store: &Store, slot: u32) {
        // None: not served at this moment.
        let Some(snapshot) = store.snapshot(slot, None, None) else {
            return;
        };
        for table in &snapshot.tables {
            let key_words = table.layout.stride() - table.layout.weight_words;
            for row in table.words.chunks(table.layout.stride()) {
                let value = f32::from_bits(row[key_words]);
                assert_eq!(value as u64, snapshot.memory.position, "slot {slot}");
            }
        }
    }

    fn copy(store: &Store, slot: u32) {
        let mut copy = store.begin_copy(slot);
        loop {
            match store.read_copy(slot, &mut copy.rows, BYTES_AT_ONCE) {
                CopyPiece::Rows(_, rows) => {
                    for &value in &rows.1 {
                        assert_eq!(value as u64, copy.memory.position, "slot {slot}");
                    }
                }
                CopyPiece::End => break,
                CopyPiece::Gone => panic!("nobody replaces slot {slot}"),
            }
            thread::yield_now();
        }
    }
}

fn until(done: &AtomicBool, mut step: impl FnMut(u32)) {
    let mut round = 0;
    while !done.load(Ordering::Acquire) {
        step(round % SLOTS);
        round += 1;
    }
}

#[test]
fn a_slot_is_one_number_whoever_looks_and_whoever_writes() {
    let world = World::new();
    let store = world.store();
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let (world, store, done) = (&world, &store, &done);
        // Each push comes from two threads: the second one is its retry.
        let senders: Vec<_> = (0..STREAMS * 2)
            .map(|number| scope.spawn(move || world.send(store, number / 2)))
            .collect();
        scope.spawn(move || until(done, |slot| World::snapshot(store, slot)));
        scope.spawn(move || until(done, |slot| World::copy(store, slot)));
        scope.spawn(move || {
            let mut seen = BTreeMap::new();
            until(done, |_| world.pull(store, &mut seen));
        });
        scope.spawn(move || {
            until(done, |slot| {
                store.set_serving_state(slot, ServingState::Elsewhere);
                thread::yield_now();
                store.set_serving_state(slot, ServingState::Serving);
            });
        });
        let ended: Vec<_> = senders
            .into_iter()
            .map(thread::ScopedJoinHandle::join)
            .collect();
        done.store(true, Ordering::Release);
        for sender in ended {
            sender.unwrap();
        }
    });
    let alone = world.store();
    for stream in 0..STREAMS {
        world.send(&alone, stream);
    }
    for slot in 0..SLOTS {
        let distinct = (0..STREAMS)
            .flat_map(|stream| (0..PUSHES).map(move |sequence| (stream, sequence)))
            .filter(|&(stream, sequence)| World::touches(stream, sequence, slot))
            .count() as u64;
        assert_eq!(store.slot_digest(slot).unwrap().0, distinct, "slot {slot}");
        assert_eq!(
            store.slot_digest(slot),
            alone.slot_digest(slot),
            "slot {slot}"
        );
    }
}
