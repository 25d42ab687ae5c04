//! Parts of checkpoints, from one node's rows to another's: what is written is loaded bit for bit,
//! and what is damaged, or not asked for (any more), is not.

// What fails in a helper is a failed test.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::Arc;
use std::time::Duration;

use backstay_core::engine::{CopyPiece, SlotMemory};
use backstay_core::error::Refusal;
use backstay_core::hash::{mix64, table_id, SlotSpace};
use backstay_core::life::Thresholds;
use backstay_core::replication::{ReplicaOptions, RoutingTable, Rows};
use backstay_core::spec::TableSpec;
use backstay_core::stream::{StreamId, TransactionId};
use backstay_core::transaction::{Batch, Change, Transaction};
use backstay_net::checkpoint::{
    copy_slots, load_part, CheckpointError, LoadedSlot, PartToLoad, PartToWrite, PartWritten,
    SlotToWrite,
};
use backstay_net::clock::WallClock;
use backstay_net::replicator::Replicator;
use backstay_net::store::Store;

const SLOTS: u32 = 8;
const ME: u64 = 7;
const FIRST: SlotToWrite = SlotToWrite {
    slot: 0,
    base: None,
};

/// One node, master of all slots; they wait to be loaded if `restoring`.
fn node(version: u64, restoring: bool) -> Arc<Replicator> {
    node_of(version, restoring, 0)
}

fn node_of(version: u64, restoring: bool, memory_limit_bytes: u64) -> Arc<Replicator> {
    let space = SlotSpace::new(SLOTS).unwrap();
    let store = Arc::new(Store::new(space, memory_limit_bytes));
    for (name, storage) in [("ads.v1", "float32"), ("users", "float16")] {
        let spec = format!(
            r#"{{"name":"{name}","kind":{{"sparse":{{"dim":5}}}},"storage":"{storage}","initializer":{{"uniform":{{"low":-1.0,"high":1.0}}}},"optimizer":{{"adagrad":{{"learning_rate":0.1}}}}}}"#
        );
        let spec = Arc::new(TableSpec::from_json(&spec).unwrap());
        store.create_table(&spec, 1).unwrap();
    }
    let node = Replicator::new(ME, store, ReplicaOptions::default());
    node.set_routing(routing(version, 1, restoring));
    node.hold_lease_until(u64::MAX);
    node
}

/// The same with a table of this description, by this clock.
fn node_at(
    version: u64,
    restoring: bool,
    now: &Arc<AtomicU32>,
    spec: &Arc<TableSpec>,
) -> Arc<Replicator> {
    let shown = Arc::clone(now);
    let clock = WallClock::of(move || shown.load(Ordering::SeqCst));
    let store = Store::with_clock(SlotSpace::new(SLOTS).unwrap(), 0, clock);
    store.create_table(spec, 1).unwrap();
    let node = Replicator::new(ME, Arc::new(store), ReplicaOptions::default());
    node.set_routing(routing(version, 1, restoring));
    node.hold_lease_until(u64::MAX);
    node
}

fn routing(version: u64, epoch: u64, restoring: bool) -> RoutingTable {
    let slots: Vec<u32> = (0..if restoring { SLOTS } else { 0 }).collect();
    let record = serde_json::json!({
        "format": 2, "version": version, "slot_count": SLOTS, "gone": [],
        "nodes": [{"instance": ME, "node_id": "n", "data_address": "127.0.0.1:1"}],
        "sets": [[0, [], []]], "set_of_slot": vec![0; SLOTS as usize],
        "term_of_slot": vec![1; SLOTS as usize], "epoch_of_slot": vec![epoch; SLOTS as usize],
        "restoring": {"url": "", "checkpoint": "", "slots": slots},
    });
    RoutingTable::from_json(&record.to_string(), SLOTS).unwrap()
}

fn push(node: &Arc<Replicator>, sequence: u64, table: &str, keys: &[u64]) {
    let change = Change::update(1.0);
    change_rows(node, sequence, table, keys, change);
}

fn delete(node: &Arc<Replicator>, sequence: u64, table: &str, keys: &[u64]) {
    change_rows(node, sequence, table, keys, Change::Delete);
}

fn change_rows(node: &Arc<Replicator>, sequence: u64, table: &str, keys: &[u64], change: Change) {
    let space = node.store().space();
    let mut keys = keys.to_vec();
    keys.sort_by_key(|&key| (space.slot_of(key), key));
    let mut values: Vec<f32> = keys
        .iter()
        .flat_map(|&key| [mix64(key ^ sequence) as f32 / 1e19; 5])
        .collect();
    if !change.creates() {
        values.clear();
    }
    let stream = StreamId {
        job: 3,
        pass: 1,
        task: 2,
    };
    let id = TransactionId { stream, sequence };
    let batch = Batch::new(&keys, &values);
    let mut push = Transaction::new(space, id, 0, table_id(table), change, batch).unwrap();
    node.store().prepare(&mut push).unwrap();
    node.push(push).unwrap();
}

fn filled() -> Arc<Replicator> {
    let node = node(1, false);
    let keys: Vec<u64> = (0..20_000).map(mix64).collect();
    push(&node, 1, "ads.v1", &keys);
    push(&node, 2, "users", &keys[..500]);
    push(&node, 3, "ads.v1", &keys[300..900]);
    node
}

fn write(node: &Replicator, path: &Path, base: Option<&PartWritten>) -> PartWritten {
    let of = |slot: u32| base.map(|base| &base.slots[slot as usize]);
    let slots = (0..SLOTS).map(|slot| SlotToWrite {
        slot,
        base: of(slot).map(|known| (known.position, known.epoch)),
    });
    let part = PartToWrite {
        path: path.to_path_buf(),
        checkpoint: "ckpt-000001-abcdef".into(),
        bytes_per_s: 0,
    };
    let slots: Vec<SlotToWrite> = slots.collect();
    let goes_on = AtomicBool::new(false);
    copy_slots(node, &slots, u64::MAX, &goes_on)
        .and_then(|copied| copied.write(&part, &goes_on))
        .unwrap()
}

fn load(
    node: &Replicator,
    path: &Path,
    written: &PartWritten,
    last: bool,
) -> Result<u64, CheckpointError> {
    let slots = written.slots.iter().map(|slot| LoadedSlot {
        slot: slot.slot,
        epoch: 1,
        whole: slot.whole,
        last,
    });
    let part = PartToLoad {
        path: path.to_path_buf(),
        bytes: written.bytes,
        sha256: written.sha256.clone(),
        slots: slots.collect(),
    };
    load_part(node, &part)
}

/// A folder of its own, gone at the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("backstay-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).unwrap();
    }
}

fn digests(node: &Replicator) -> Vec<(u64, u64)> {
    (0..SLOTS)
        .map(|slot| node.store().slot_digest(slot).unwrap())
        .collect()
}

/// The memory of a slot, and its rows by table and key.
type Content = (SlotMemory, BTreeMap<(u64, u64), (Vec<u32>, Vec<u32>)>);

/// What a restore brings back of each slot: all but the counts of updates, which begin anew.
fn contents(node: &Replicator) -> Vec<Content> {
    let store = node.store();
    let words = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect();
    let of = |slot: u32| {
        let (mut copy, mut found) = (store.begin_copy(slot), BTreeMap::new());
        while let CopyPiece::Rows(table, (keys, weights, state)) =
            store.read_copy(slot, &mut copy.rows, 1 << 16)
        {
            let (wide, kept) = (weights.len() / keys.len(), state.len() / keys.len());
            for (n, key) in keys.into_iter().enumerate() {
                let weights = words(&weights[n * wide..][..wide]);
                let row = (weights, words(&state[n * kept..][..kept]));
                found.insert((table, key), row);
            }
        }
        copy.memory.updates.clear();
        (copy.memory, found)
    };
    (0..SLOTS).map(of).collect()
}

/// Bytes of rows, table by table.
fn counted(node: &Replicator) -> u64 {
    let usage = node.store().tables();
    let rows: u64 = usage.iter().map(|table| table.bytes).sum();
    rows + node.store().stream_bytes()
}

#[test]
fn what_is_written_is_loaded_bit_for_bit_and_then_served() {
    let folder = Folder::new("roundtrip");
    let (full, later) = (folder.0.join("full"), folder.0.join("later"));
    let source = filled();
    let first = write(&source, &full, None);
    assert!(first.slots.iter().all(|slot| slot.whole && slot.epoch == 1));
    let keys: Vec<u64> = (100..600).map(mix64).collect();
    push(&source, 4, "ads.v1", &keys);
    let second = write(&source, &later, Some(&first));
    assert!(second.slots.iter().all(|slot| !slot.whole));
    assert_eq!(second.slots.iter().map(|slot| slot.rows).sum::<u64>(), 500);
    assert!(second.bytes * 10 < first.bytes);

    let target = node(1, true);
    load(&target, &full, &first, false).unwrap();
    let (_, report) = target.wait_report(0, Duration::ZERO);
    assert!(report.loaded.is_empty(), "half of a chain is no content");
    assert_eq!(load(&target, &later, &second, true).unwrap(), 500);
    assert_eq!(contents(&target), contents(&source));
    let (_, report) = target.wait_report(0, Duration::ZERO);
    assert_eq!(report.loaded, (0..SLOTS).map(|slot| (slot, 1)).collect());

    let (table, mut out) = (table_id("users"), [0.0; 5]);
    assert!(
        target.pull(table, &[1], &mut out).is_err(),
        "not before the routing says so"
    );
    target.set_routing(routing(2, 1, false));
    target.pull(table, &[1], &mut out).unwrap();
    // It remembers which pushes it has: this one does not count again.
    let before = digests(&target);
    push(&target, 4, "ads.v1", &keys);
    assert_eq!(digests(&target), before);
}

/// What is counted of keys without a row, the statistics of rows and the time of a slot come along;
/// an incremental part has the rows that expired.
#[test]
fn what_a_lifetime_counts_is_written_and_loaded() {
    let folder = Folder::new("lifetime");
    let (full, later) = (folder.0.join("full"), folder.0.join("later"));
    let lifetime = r#"{"admission":{"after":{"occurrences":2}},"expiry":{"unseen_seconds":50}}"#;
    let spec = format!(
        r#"{{"name":"l","kind":{{"sparse":{{"dim":5}}}},"optimizer":{{"sgd":{{"learning_rate":0.1}}}},"lifetime":{lifetime}}}"#
    );
    let spec = Arc::new(TableSpec::from_json(&spec).unwrap());
    let now = Arc::new(AtomicU32::new(100));
    let keys: Vec<u64> = (0..5000).map(mix64).collect();
    let source = node_at(1, false, &now, &spec);
    push(&source, 1, "l", &keys);
    push(&source, 2, "l", &keys[..2000]);
    let first = write(&source, &full, None);
    now.store(160, Ordering::SeqCst);
    push(&source, 3, "l", &keys[1000..2100]);
    let slots: Vec<u64> = (0..SLOTS)
        .map(|slot| source.store().space().key_in(slot, 0))
        .collect();
    change_rows(
        &source,
        4,
        "l",
        &slots,
        Change::Expire(Thresholds::default()),
    );
    let usage = source.store().usage("l").unwrap();
    // 2000 to 2100 have become rows; the counters of the rest are too old.
    assert_eq!((usage.rows, usage.counters.0), (1100, 0));
    let second = write(&source, &later, Some(&first));
    assert!(second.slots.iter().all(|slot| !slot.whole || slot.rows > 0));

    let target = node_at(1, true, &Arc::new(AtomicU32::new(0)), &spec);
    load(&target, &full, &first, false).unwrap();
    assert_eq!(target.store().usage("l").unwrap().counters.0, 3000);
    load(&target, &later, &second, true).unwrap();
    assert_eq!(contents(&target), contents(&source));
    assert_eq!(target.store().usage("l").unwrap().rows, 1100);
    // Its clock is far behind, and the slots are not.
    target.set_routing(routing(2, 1, false));
    source.set_routing(routing(2, 1, false));
    for node in [&source, &target] {
        push(node, 5, "l", &keys[1500..1600]);
    }
    assert_eq!(contents(&target), contents(&source));
}

#[test]
fn keys_that_were_deleted_since_the_base_are_written_and_removed_by_a_load() {
    let folder = Folder::new("deleted");
    let (full, later) = (folder.0.join("full"), folder.0.join("later"));
    let source = filled();
    let first = write(&source, &full, None);
    let keys: Vec<u64> = (100..600).map(mix64).collect();
    delete(&source, 4, "ads.v1", &keys);
    push(&source, 5, "ads.v1", &keys[..50]);
    // Of this table there is nothing but deleted keys to tell.
    delete(&source, 6, "users", &keys[..20]);
    let second = write(&source, &later, Some(&first));
    assert!(second.slots.iter().all(|slot| !slot.whole));

    let target = node(1, true);
    load(&target, &full, &first, false).unwrap();
    load(&target, &later, &second, true).unwrap();
    assert_eq!(contents(&target), contents(&source));
    let rows = |node: &Replicator| -> Vec<u64> {
        let tables = node.store().tables();
        tables.iter().map(|table| table.rows).collect()
    };
    assert_eq!(rows(&target), rows(&source));
    // It remembers which deletes it has: this one does not count again.
    target.set_routing(routing(2, 1, false));
    let before = digests(&target);
    delete(&target, 4, "ads.v1", &keys);
    assert_eq!(digests(&target), before);
}

#[test]
fn a_flipped_bit_and_a_cut_are_named_and_nothing_is_loaded() {
    let folder = Folder::new("damage");
    let path = folder.0.join("part");
    let written = write(&filled(), &path, None);
    let good = std::fs::read(&path).unwrap();
    let mut flipped = good.clone();
    flipped[good.len() / 2] ^= 4;
    for bytes in [&flipped[..], &good[..good.len() - 1], &[]] {
        std::fs::write(&path, bytes).unwrap();
        let target = node(1, true);
        let error = load(&target, &path, &written, true).unwrap_err();
        assert!(matches!(error, CheckpointError::Damaged { .. }), "{error}");
        assert!(
            error.to_string().contains(&*path.to_string_lossy()),
            "{error}"
        );
        assert!(digests(&target).iter().all(|&(position, _)| position == 0));
    }
}

/// A part with some bytes of an array changed, and the checksum that it should have then.
fn forge(path: &Path, written: &PartWritten, array: &str, change: fn(&mut [u8])) -> PartWritten {
    let mut file = std::fs::read(path).unwrap();
    let data = 8 + u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&file[8..data]).unwrap();
    let place = |at: usize| header[array]["data_offsets"][at].as_u64().unwrap() as usize;
    let place = data + place(0)..data + place(1);
    change(&mut file[place]);
    std::fs::write(path, &file).unwrap();
    let digest = ring::digest::digest(&ring::digest::SHA256, &file);
    let hex = digest.as_ref().iter().map(|byte| format!("{byte:02x}"));
    PartWritten {
        sha256: hex.collect(),
        ..written.clone()
    }
}

/// The array, what is done to it, and what is said of that.
type Forgery = (&'static str, fn(&mut [u8]), &'static str);

#[test]
fn rows_that_contradict_each_other_are_named_and_no_slot_of_the_part_counts_as_loaded() {
    let folder = Folder::new("forged");
    let path = folder.0.join("part");
    let source = filled();
    let forgeries: [Forgery; 4] = [
        (
            "table.ads.v1.keys",
            |keys| keys.copy_within(..8, 8),
            "stands twice",
        ),
        (
            "table.ads.v1.keys",
            |keys| {
                let last = keys.len() - 8;
                keys.copy_within(..8, last);
            },
            "does not belong to slot",
        ),
        (
            "table.ads.v1.runs",
            |runs| runs.copy_within(..8, 16),
            "ascend",
        ),
        ("table.ads.v1.runs", |runs| runs[8] ^= 1, "rows"),
    ];
    for (array, change, said) in forgeries {
        let written = write(&source, &path, None);
        let forged = forge(&path, &written, array, change);
        let target = node(1, true);
        let error = load(&target, &path, &forged, true).unwrap_err();
        assert!(matches!(error, CheckpointError::Damaged { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains(&*path.to_string_lossy()), "{text}");
        assert!(text.contains(said), "{text}");
        assert_eq!(target.to_load().len(), SLOTS as usize);
        // The right file goes over whatever was put in before the fault was found.
        let written = write(&source, &path, None);
        load(&target, &path, &written, true).unwrap();
        assert_eq!(contents(&target), contents(&source));
    }
}

#[test]
fn rows_for_which_there_is_no_room_are_refused_and_reserve_none() {
    let folder = Folder::new("room");
    let path = folder.0.join("part");
    let source = filled();
    let written = write(&source, &path, None);
    let bytes = source.store().allocated_bytes();
    let target = node_of(1, true, bytes / 2);
    for _ in 0..3 {
        let error = load(&target, &path, &written, true).unwrap_err();
        assert!(
            matches!(error, CheckpointError::Refused(Refusal::MemoryLimit(_))),
            "{error}"
        );
        assert!(target.store().allocated_bytes() <= bytes / 2);
    }
    let roomy = node_of(1, true, bytes * 2);
    load(&roomy, &path, &written, true).unwrap();
    assert_eq!(contents(&roomy), contents(&source));
    assert_eq!(roomy.store().allocated_bytes(), counted(&roomy));
}

#[test]
fn of_the_slots_of_a_part_those_that_still_wait_are_loaded() {
    let target = node(1, true);
    let asked = |slot: u32, epoch: u64| LoadedSlot {
        slot,
        epoch,
        whole: true,
        last: true,
    };
    let memory = SlotMemory {
        position: 5,
        ..SlotMemory::default()
    };
    let slots = [asked(0, 1), asked(1, 2), asked(2, 1)].map(|asked| (asked, memory.clone()));
    let refused = target.finish_loads(&slots).unwrap_err();
    assert!(refused.to_string().contains("slot 1 "), "{refused}");
    let (_, report) = target.wait_report(0, Duration::ZERO);
    assert_eq!(report.loaded, [(0, 1), (2, 1)].into());
    assert_eq!(target.store().slot_digest(1).unwrap().0, 0);
}

#[test]
fn parts_that_are_loaded_side_by_side_are_whole() {
    let folder = Folder::new("side-by-side");
    let source = filled();
    let goes_on = AtomicBool::new(false);
    let parts: Vec<(PathBuf, PartWritten)> = (0..SLOTS)
        .map(|slot| {
            let path = folder.0.join(format!("part-{slot}"));
            let part = PartToWrite {
                path: path.clone(),
                checkpoint: "c".into(),
                bytes_per_s: 0,
            };
            let copied = copy_slots(
                &source,
                &[SlotToWrite { slot, base: None }],
                u64::MAX,
                &goes_on,
            );
            (path, copied.unwrap().write(&part, &goes_on).unwrap())
        })
        .collect();
    let target = node_of(1, true, source.store().allocated_bytes() * 2);
    std::thread::scope(|scope| {
        for (path, written) in &parts {
            let target = &target;
            scope.spawn(move || load(target, path, written, true).unwrap());
        }
    });
    assert_eq!(contents(&target), contents(&source));
    assert_eq!(target.store().allocated_bytes(), counted(&target));
    assert!(target.to_load().is_empty());
}

#[test]
fn a_slot_that_began_anew_meanwhile_takes_nothing_of_the_old_load() {
    let folder = Folder::new("anew");
    let path = folder.0.join("part");
    let written = write(&filled(), &path, None);
    let target = node(1, true);
    target.set_routing(routing(2, 2, true));
    assert!(matches!(
        load(&target, &path, &written, true),
        Err(CheckpointError::Refused(_))
    ));
    assert!(digests(&target).iter().all(|&(position, _)| position == 0));
    // Nor a slot that the routing does not ask to load.
    let served = node(1, false);
    assert!(matches!(
        load(&served, &path, &written, true),
        Err(CheckpointError::Refused(_))
    ));
}

#[test]
fn who_is_not_surely_the_master_writes_nothing() {
    let folder = Folder::new("elsewhere");
    let source = filled();
    source.hold_lease_until(0);
    let written = write(&source, &folder.0.join("part"), None);
    assert!(written.slots.is_empty());
    assert_eq!(std::fs::read_dir(&folder.0).unwrap().count(), 0);
}

#[test]
fn a_folder_that_cannot_be_written_is_named() {
    let source = filled();
    let part = PartToWrite {
        path: "/nonexistent/part".into(),
        checkpoint: "c".into(),
        bytes_per_s: 0,
    };
    let goes_on = AtomicBool::new(false);
    let copied = copy_slots(&source, &[FIRST], u64::MAX, &goes_on).unwrap();
    let error = copied.write(&part, &goes_on).unwrap_err();
    assert!(error.to_string().contains("/nonexistent/part"), "{error}");
}

#[test]
fn a_writer_that_is_told_to_stop_leaves_no_file() {
    let folder = Folder::new("cancelled");
    let source = filled();
    let part = PartToWrite {
        path: folder.0.join("part"),
        checkpoint: "c".into(),
        // So slow that it would take minutes.
        bytes_per_s: 1000,
    };
    let cancelled = Arc::new(AtomicBool::new(false));
    let copied = copy_slots(&source, &[FIRST], u64::MAX, &cancelled).unwrap();
    let writing = {
        let cancelled = Arc::clone(&cancelled);
        std::thread::spawn(move || copied.write(&part, &cancelled))
    };
    cancelled.store(true, std::sync::atomic::Ordering::Relaxed);
    let stopped = writing.join().unwrap();
    assert!(matches!(stopped, Err(CheckpointError::Cancelled)));
    let not_even_copied = copy_slots(&source, &[FIRST], u64::MAX, &cancelled);
    assert!(matches!(not_even_copied, Err(CheckpointError::Cancelled)));
    assert_eq!(std::fs::read_dir(&folder.0).unwrap().count(), 0);
}

#[test]
fn what_is_too_much_for_one_file_is_left_for_the_next() {
    let folder = Folder::new("much");
    let source = filled();
    let slots: Vec<SlotToWrite> = (0..SLOTS)
        .map(|slot| SlotToWrite { slot, base: None })
        .collect();
    let goes_on = AtomicBool::new(false);
    let copied = copy_slots(&source, &slots, 1, &goes_on).unwrap();
    let part = PartToWrite {
        path: folder.0.join("part"),
        checkpoint: "c".into(),
        bytes_per_s: 0,
    };
    assert_eq!(copied.write(&part, &goes_on).unwrap().slots.len(), 1);
}

#[test]
fn a_manifest_that_lies_about_a_size_takes_no_memory() {
    let folder = Folder::new("lie");
    let path = folder.0.join("part");
    let mut written = write(&filled(), &path, None);
    written.bytes = 1 << 62;
    let error = load(&node(1, true), &path, &written, true).unwrap_err();
    assert!(matches!(error, CheckpointError::Damaged { .. }), "{error}");
}
