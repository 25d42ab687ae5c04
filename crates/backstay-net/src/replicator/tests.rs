//! Connections between servers that were replaced; a clock that jumps; clients that were killed;
//! room for pushes during a copy.

use std::sync::atomic::AtomicU32;

use super::*;
use crate::clock::WallClock;
use backstay_core::engine::{CopyPiece, SlotMemory};
use backstay_core::hash::{table_id, SlotSpace};
use backstay_core::replication::message::{Refuse, SlotOrder};
use backstay_core::spec::TableSpec;
use backstay_core::stream::{TableTask, OWN_LEASE_US, OWN_PASS};
use backstay_core::stream_memory::StreamMemory;
use backstay_core::transaction::{Batch, Change, Run, StagedRun};

fn replicator() -> Arc<Replicator> {
    let store = Arc::new(Store::new(SlotSpace::new(4).unwrap(), 0));
    Replicator::new(1, store, ReplicaOptions::default())
}

fn order() -> Message {
    Message::Recover {
        number: 1,
        lsn: 0,
        slots: Vec::new(),
    }
}

/// What lies in the buffers of a connection that was replaced is of the past: a prepare
/// that was rolled back, say, which the next decision would apply.
#[test]
fn a_connection_that_was_replaced_is_not_heard() {
    let replicator = replicator();
    let mut answers = Vec::new();
    let (old, new) = (1, 2);
    assert!(replicator.master_connected(7, old));
    assert!(replicator.obey(7, old, order(), &mut answers));
    assert!(replicator.master_connected(7, new));
    assert!(!replicator.obey(7, old, order(), &mut answers));
    assert!(replicator.obey(7, new, order(), &mut answers));
    assert_eq!(answers.len(), 2);
}

/// Two connections of a master may be read in another order than it opened them in: the older
/// one must not undo what was confirmed on the newer.
#[test]
fn a_connection_that_is_read_after_its_successor_is_not_heard() {
    let replicator = replicator();
    let mut answers = Vec::new();
    assert!(replicator.master_connected(7, 2));
    assert!(!replicator.master_connected(7, 1));
    assert!(!replicator.obey(7, 1, order(), &mut answers));
    assert!(replicator.obey(7, 2, order(), &mut answers));
    assert!(
        replicator.master_connected(8, 1),
        "others count for themselves"
    );
}

/// The task of an old connection to a backup may notice its end after the next has begun.
#[test]
fn the_end_of_a_connection_that_was_replaced_changes_nothing() {
    let replicator = replicator();
    let (old, new) = (replicator.next_connection(), replicator.next_connection());
    replicator.link_up(7, old);
    replicator.link_up(7, new);
    replicator.link_down(7, old);
    assert!(replicator.take_outgoing(7, Way::ToBackup, old).is_none());
    let greeting = replicator.take_outgoing(7, Way::Heartbeats, new).unwrap();
    assert_eq!(greeting.len(), 1);
    let third = replicator.next_connection();
    replicator.link_up(7, third);
    replicator.link_down(7, third);
    assert_eq!(
        replicator
            .take_outgoing(7, Way::ToBackup, third)
            .unwrap()
            .len(),
        0
    );
}

const LEASE_END: Micros = 1_000;

/// A clock that jumps behind the end of the lease after it was read so many times.
fn jumping_clock() -> (Clock, Arc<AtomicU64>) {
    let reads = Arc::new(AtomicU64::new(u64::MAX));
    let left = Arc::clone(&reads);
    let clock = Clock::of(move || {
        let step = |left: u64| Some(left.saturating_sub(u64::from(left != u64::MAX)));
        let left = left.fetch_update(Ordering::AcqRel, Ordering::Acquire, step);
        if left == Ok(0) {
            LEASE_END + 1
        } else {
            1
        }
    });
    (clock, reads)
}

const TASK: StreamId = StreamId {
    job: 1,
    pass: 1,
    task: 1,
};

fn push(sequence: u64) -> Transaction {
    push_of(TASK, sequence)
}

fn push_of(stream: StreamId, sequence: u64) -> Transaction {
    let id = TransactionId { stream, sequence };
    let change = Change::update(1.0);
    let batch = Batch::new(&[0], &[-1.0]);
    let space = SlotSpace::new(4).unwrap();
    let table = table_id("t");
    Transaction::new(space, id, sequence, table, change, batch).unwrap()
}

/// A table of node 1 alone; another node may be about to get copies of the other slots.
fn alone(with_newcomer: bool) -> RoutingTable {
    let slot = SlotSpace::new(4).unwrap().slot_of(0);
    let set_of_slot: Vec<u32> = (0..4)
        .map(|one| u32::from(with_newcomer && one != slot))
        .collect();
    let text = format!(
        r#"{{"format":2,"version":1,"slot_count":4,"nodes":[
           {{"node_id":"a","instance":1,"data_address":""}},
           {{"node_id":"b","instance":2,"data_address":"127.0.0.1:1"}}],"gone":[],
           "sets":[[0,[],[]],[0,[],[1]]],"set_of_slot":{set_of_slot:?},
           "term_of_slot":[1,1,1,1],"epoch_of_slot":[1,1,1,1]}}"#
    );
    RoutingTable::from_json(&text, 4).unwrap()
}

fn serving(clock: Clock, lease: Micros, with_newcomer: bool) -> Arc<Replicator> {
    let store = Arc::new(Store::new(SlotSpace::new(4).unwrap(), 0));
    let spec = r#"{"name":"t","kind":{"sparse":{"dim":1}},"initializer":{"zeros":{}},"optimizer":{"sgd":{"learning_rate":1.0}}}"#;
    let spec = TableSpec::from_json(spec).unwrap();
    store.create_table(&Arc::new(spec), 0).unwrap();
    let replicator = Replicator::with_clock(1, store, ReplicaOptions::default(), clock);
    replicator.hold_lease_until(lease);
    replicator.set_routing(alone(with_newcomer));
    replicator
}

/// A node without backups is stopped while it applies a push, until its lease is over: another
/// one may serve the slot by now, from a checkpoint, without that push. It must not acknowledge
/// it; nor once more when it is asked again, although it has the push.
#[test]
fn a_sole_master_acknowledges_nothing_after_its_lease() {
    for with_newcomer in [false, true] {
        let (clock, reads) = jumping_clock();
        let replicator = serving(clock, LEASE_END, with_newcomer);
        let outcome = |answer: Result<(Answer, Option<Vec<u64>>), Refusal>| match answer {
            Ok((Answer::Now(report), _)) => Ok(report),
            Ok((Answer::Later(mut receiver), _)) => receiver.try_recv().unwrap(),
            Err(refusal) => Err(refusal),
        };
        outcome(replicator.push(push(0))).unwrap();
        // It is read once when the push comes; the next time, all is over.
        reads.store(1, Ordering::Release);
        let refused = outcome(replicator.push(push(1))).unwrap_err();
        assert!(matches!(refused, Refusal::Incomplete(_)), "{refused:?}");
        let refused = outcome(replicator.push(push(1))).unwrap_err();
        assert!(
            matches!(&refused, Refusal::NotReady(why) if why.starts_with("this node's lease")),
            "{refused:?}"
        );
        // The lease was renewed after all.
        reads.store(u64::MAX, Ordering::Release);
        let report = outcome(replicator.push(push(1))).unwrap();
        assert_eq!((report.staged, report.skipped), (0, 1));
    }
}

fn own(client: u64) -> StreamId {
    StreamId {
        job: client,
        pass: OWN_PASS,
        task: 0,
    }
}

/// Workers that are killed leave their streams. They are ended after a lease, and no limit is
/// reached by them; those of clients that push stay, and those of tasks.
#[test]
fn the_streams_of_killed_clients_end() {
    let now = Arc::new(AtomicU64::new(1));
    let shown = Arc::clone(&now);
    let clock = Clock::of(move || shown.load(Ordering::Acquire));
    let replicator = serving(clock, Micros::MAX, false);
    let push = |stream, sequence| replicator.push(push_of(stream, sequence)).map(|_| ());
    push(TASK, 0).unwrap();
    let killed = StreamMemory::MAX_STREAMS as u64 - 2;
    for client in 0..killed {
        push(own(client), 0).unwrap();
    }
    push(own(killed), 0).unwrap();
    let before = replicator.store().allocated_bytes();
    assert!(
        before > killed * 32,
        "they count as memory in use: {before}"
    );
    let full = push(own(killed + 1), 0).unwrap_err();
    assert!(matches!(full, Refusal::LimitExceeded(_)), "{full:?}");
    now.fetch_add(OWN_LEASE_US - 1, Ordering::AcqRel);
    push(own(killed), 1).unwrap();
    assert_eq!(replicator.end_silent_streams(9), 0);
    now.fetch_add(1, Ordering::AcqRel);
    assert_eq!(replicator.end_silent_streams(100), 100);
    let ended = replicator.end_silent_streams(usize::MAX);
    assert_eq!(ended as u64 + 100, killed);
    push(own(killed + 1), 0).unwrap();
    push(own(killed), 2).unwrap();
    push(TASK, 1).unwrap();
    assert!(replicator.store().allocated_bytes() < before / 2);
    // One that was taken for dead comes back: it must not be told that all is well.
    let refused = push(own(killed - 1), 1).unwrap_err();
    assert!(matches!(refused, Refusal::InvalidRequest(_)), "{refused:?}");
    assert!(!refused.retry_safe());
}

/// A job that never came to its end leaves streams of its tasks. They expire after the grace time,
/// and what still comes of them is refused.
#[test]
fn the_streams_of_tasks_that_are_gone_expire() {
    let now = Arc::new(AtomicU64::new(1));
    let shown = Arc::clone(&now);
    let clock = Clock::of(move || shown.load(Ordering::Acquire));
    let replicator = serving(clock, Micros::MAX, false);
    let grace = 2 * OWN_LEASE_US;
    replicator.set_stream_grace(grace);
    let push = |stream, sequence| replicator.push(push_of(stream, sequence)).map(|_| ());
    let other = StreamId { task: 2, ..TASK };
    push(TASK, 0).unwrap();
    push(other, 0).unwrap();
    now.fetch_add(grace - 1, Ordering::AcqRel);
    push(other, 1).unwrap();
    assert_eq!(replicator.end_silent_streams(9), 0);
    now.fetch_add(1, Ordering::AcqRel);
    assert_eq!(replicator.end_silent_streams(9), 1);
    assert_eq!(replicator.store().open_streams(), [other].into());
    let refused = push(TASK, 0).unwrap_err();
    assert!(
        matches!(&refused, Refusal::InvalidRequest(why) if why.contains("has expired")),
        "{refused:?}"
    );
    // Slots that knew nothing of the stream refuse a late push, too: none applies a part of it.
    let space = SlotSpace::new(4).unwrap();
    let elsewhere = (1..100).find(|&key| space.slot_of(key) != space.slot_of(0));
    let id = push_of(TASK, 1).id;
    let batch = Batch::new(&[elsewhere.unwrap()], &[-1.0]);
    let change = Change::update(1.0);
    let late = Transaction::new(space, id, 1, table_id("t"), change, batch).unwrap();
    let refused = replicator.push(late).map(|_| ()).unwrap_err();
    assert!(matches!(refused, Refusal::InvalidRequest(_)), "{refused:?}");
    push(other, 2).unwrap();
    assert_eq!(replicator.end_silent_streams(9), 0);
    let mut rows = [0.0];
    replicator.pull(table_id("t"), &[0], &mut rows).unwrap();
    assert!((rows[0] - 4.0).abs() < f32::EPSILON);
}

/// What is ended is ended in the slot's order: a slot that was copied before and told of the same
/// transactions since is equal, bit for bit.
#[test]
fn the_end_of_a_silent_stream_is_a_transaction() {
    let now = Arc::new(AtomicU64::new(1));
    let shown = Arc::clone(&now);
    let clock = Clock::of(move || shown.load(Ordering::Acquire));
    let replicator = serving(clock, Micros::MAX, false);
    replicator.push(push_of(own(7), 0)).unwrap();
    let slot = SlotSpace::new(4).unwrap().slot_of(0);
    let before = replicator.store().slot_digest(slot).unwrap();
    replicator.end_silent_streams(9);
    now.fetch_add(OWN_LEASE_US, Ordering::AcqRel);
    assert_eq!(replicator.end_silent_streams(9), 1);
    let after = replicator.store().slot_digest(slot).unwrap();
    assert_eq!(after.0, before.0 + 1);
    assert_ne!(after.1, before.1);
    let memory = replicator.store().begin_copy(slot).memory;
    assert_eq!((memory.streams.len(), memory.closed), (0, vec![own(7)]));
}

const LIMIT: u64 = 4 << 20;
const ROWS: usize = 2000;

/// The first keys of a slot.
fn keys_of(slot: u32) -> impl Iterator<Item = u64> {
    let space = SlotSpace::new(2).unwrap();
    (0..).filter(move |&key| space.slot_of(key) == slot)
}

/// A backup of slot 0, with a limit of memory, to which node 7 has just begun to copy slot 1.
fn copied_to() -> Arc<Replicator> {
    let store = Arc::new(Store::new(SlotSpace::new(2).unwrap(), LIMIT));
    let spec = r#"{"name":"t","kind":{"sparse":{"dim":16}},"initializer":{"zeros":{}},"optimizer":{"sgd":{"learning_rate":1.0}}}"#;
    let spec = Arc::new(TableSpec::from_json(spec).unwrap());
    store.create_table(&spec, 1).unwrap();
    let replicator = Replicator::new(1, store, ReplicaOptions::default());
    let routing = r#"{"format":2,"version":1,"slot_count":2,"gone":[],"nodes":[
        {"node_id":"a","instance":7,"data_address":""},{"node_id":"b","instance":1,"data_address":""}],
        "sets":[[0,[1],[]],[0,[],[1]]],"set_of_slot":[0,1],"term_of_slot":[1,1],"epoch_of_slot":[1,1]}"#;
    replicator.set_routing(RoutingTable::from_json(routing, 2).unwrap());
    assert!(replicator.master_connected(7, 1));
    let slots = vec![slot_order(0)];
    let recover = Message::Recover {
        number: 1,
        lsn: 0,
        slots,
    };
    assert!(matches!(
        told(&replicator, recover),
        Message::Accepted { .. }
    ));
    let begin = Message::CopyBegin {
        slot: slot_order(1),
    };
    assert!(replicator.obey(7, 1, begin, &mut Vec::new()));
    replicator
}

fn slot_order(slot: u32) -> SlotOrder {
    SlotOrder {
        slot,
        term: 1,
        version: 1,
        epoch: 1,
        decided: 0,
        end: 0,
    }
}

/// The answer to a message of node 7.
fn told(replicator: &Replicator, message: Message) -> Message {
    let mut answers = Vec::new();
    assert!(replicator.obey(7, 1, message, &mut answers));
    answers.pop().unwrap()
}

/// Node 7 pushes a row of slot 0, and these behind it, as its push number `lsn`.
fn prepared(replicator: &Replicator, lsn: u64, behind: impl Iterator<Item = u64>) -> Message {
    let keys: Vec<u64> = keys_of(0).take(1).chain(behind).collect();
    let batch = Batch::new(&keys, &vec![1.0; keys.len() * 16]);
    let id = push(lsn).id;
    let change = Change::Assign {
        only_if_absent: false,
    };
    let space = replicator.store().space();
    let mut push = Transaction::new(space, id, 0, table_id("t"), change, batch).unwrap();
    push.optimizer = Some(
        replicator
            .store()
            .spec(push.table)
            .unwrap()
            .optimizer
            .stamp(),
    );
    replicator.make_room(&mut push);
    let place = |run: &Run| StagedRun {
        term: 1,
        position: lsn,
        run: *run,
    };
    let prepare = Message::Prepare {
        number: lsn + 1,
        lsn,
        decided: lsn - 1,
        places: push.runs().iter().map(place).collect(),
        transaction: Arc::new(push),
    };
    told(replicator, prepare)
}

/// The rows of slot 1, and the end of its copy.
fn copied(replicator: &Replicator) -> Message {
    let keys: Vec<u64> = keys_of(1).take(ROWS).collect();
    let values = vec![1.0; ROWS * 16];
    let rows = Message::CopyRows {
        slot: 1,
        table: table_id("t"),
        rows: (keys, values, vec![]),
    };
    let taken = told(replicator, rows);
    assert!(matches!(taken, Message::CopyTaken { failed: false, .. }));
    let end = Message::CopyEnd {
        number: 99,
        slot: slot_order(1),
        memory: SlotMemory::default(),
    };
    told(replicator, end)
}

/// Pushes to the rows that a copy brings need no room of their own, and take none from the
/// slots that are here.
#[test]
fn pushes_behind_a_copy_take_no_room_for_the_rows_of_the_copy() {
    let replicator = copied_to();
    for lsn in 1..20 {
        let answer = prepared(&replicator, lsn, keys_of(1).take(ROWS));
        assert!(matches!(answer, Message::Accepted { .. }), "{answer:?}");
    }
    let answer = copied(&replicator);
    assert!(matches!(answer, Message::Accepted { .. }), "{answer:?}");
    replicator.work();
    assert!(replicator.store().allocated_bytes() <= LIMIT);
}

/// New rows that were pushed behind a copy count when it ends: the limit holds.
#[test]
fn a_copy_with_too_many_new_rows_behind_it_is_refused() {
    let replicator = copied_to();
    for lsn in 1..20 {
        let new = keys_of(1).skip(lsn as usize * ROWS).take(ROWS);
        let answer = prepared(&replicator, lsn, new);
        assert!(matches!(answer, Message::Accepted { .. }), "{answer:?}");
    }
    let answer = copied(&replicator);
    let full = |reason: &Refuse| matches!(reason, Refuse::Rows(Refusal::MemoryLimit(_)));
    assert!(
        matches!(&answer, Message::Refused { reason, .. } if full(reason)),
        "{answer:?}"
    );
    replicator.work();
    assert!(replicator.store().allocated_bytes() <= LIMIT);
}

/// Each push that another node has prepared here counts until it is applied or dropped.
#[test]
fn staged_pushes_and_copies_under_way_count() {
    let replicator = copied_to();
    let memory = Arc::clone(replicator.store().memory());
    assert_eq!(memory.of(Part::Transactions), 0);
    for lsn in 1..4 {
        let answer = prepared(&replicator, lsn, keys_of(1).take(ROWS));
        assert!(matches!(answer, Message::Accepted { .. }), "{answer:?}");
    }
    let staged = 3 * ROWS as u64 * 72;
    // They wait for the copy.
    assert!(memory.of(Part::Copies) >= staged);
    copied(&replicator);
    replicator.work();
    // The last one is not decided.
    let one = ROWS as u64 * 72;
    let undecided = memory.of(Part::Copies);
    assert!((one..2 * one).contains(&undecided));
    let answer = prepared(&replicator, 4, keys_of(0).skip(1).take(ROWS));
    assert!(matches!(answer, Message::Accepted { .. }), "{answer:?}");
    assert!((one..2 * one).contains(&memory.of(Part::Transactions)));
    // Rows that change while their slot is copied from here are kept for the copy.
    let store = replicator.store();
    store.set_routing(2, &[true, true]);
    let mut copy = store.begin_copy(0);
    let kept = || memory.of(Part::Copies) - undecided;
    assert_eq!(kept(), 0);
    change_a_row(&replicator, 0);
    assert!(kept() >= 72);
    while !matches!(store.read_copy(0, &mut copy.rows, 1), CopyPiece::End) {}
    assert_eq!(kept(), 0, "what was read is kept no more");
    // A copy is given up, and nothing more happens in its slot.
    let copy = store.begin_copy(0);
    change_a_row(&replicator, 1);
    store.end_copies();
    assert!(kept() >= 72, "it goes on");
    drop(copy);
    store.end_copies();
    assert_eq!(kept(), 0);
}

/// A copy that comes in slowly has many pushes behind it. They do not count among those under way, or no
/// push would be taken of which this node is the master.
#[test]
fn pushes_behind_a_copy_do_not_hold_up_others() {
    let replicator = copied_to();
    for lsn in 1..7 {
        let answer = prepared(&replicator, lsn, keys_of(1).take(ROWS));
        assert!(matches!(answer, Message::Accepted { .. }), "{answer:?}");
    }
    let store = replicator.store();
    assert!(store.memory().of(Part::Copies) > LIMIT / 8);
    let (mut one, mut other) = (change_of_a_row(store, 0), change_of_a_row(store, 1));
    store.prepare(&mut one).unwrap();
    store.prepare(&mut other).unwrap();
    assert!(store.memory().of(Part::Transactions) > 0);
}

/// A push to a row of slot 0.
fn change_of_a_row(store: &Store, sequence: u64) -> Transaction {
    let keys: Vec<u64> = keys_of(0).take(1).collect();
    let batch = Batch::new(&keys, &[1.0; 16]);
    let id = push_of(own(9), sequence).id;
    let change = Change::update(1.0);
    Transaction::new(store.space(), id, 0, table_id("t"), change, batch).unwrap()
}

/// Change a row of slot 0 here, as master.
fn change_a_row(replicator: &Replicator, sequence: u64) {
    let store = replicator.store();
    let mut push = change_of_a_row(store, sequence);
    store.prepare(&mut push).unwrap();
    let mut places = Vec::new();
    store.admit(&push, &mut places).unwrap();
    let push = Arc::new(push);
    assert_eq!(store.stage(&push, &places, 9), None);
    store.commit(&push, &places).unwrap();
}

/// The connection to the backup of [`master_of_small_backup`].
const TO_BACKUP: u64 = 1;

/// The master of all slots, without a limit of memory. Its table has a capacity; node 2 is its backup.
fn master_of_small_backup() -> Arc<Replicator> {
    let store = Arc::new(Store::new(SlotSpace::new(4).unwrap(), 0));
    let spec = r#"{"name":"t","kind":{"sparse":{"dim":1}},"optimizer":{"sgd":{"learning_rate":1.0}},
        "lifetime":{"capacity":{"rows":1000000}}}"#;
    let spec = TableSpec::from_json(spec).unwrap();
    store.create_table(&Arc::new(spec), 0).unwrap();
    let replicator = Replicator::new(1, store, ReplicaOptions::default());
    replicator.hold_lease_until(Micros::MAX);
    let routing = r#"{"format":2,"version":1,"slot_count":4,"gone":[],"nodes":[
        {"node_id":"a","instance":1,"data_address":""},
        {"node_id":"b","instance":2,"data_address":"127.0.0.1:1"}],
        "sets":[[0,[1],[]]],"set_of_slot":[0,0,0,0],"term_of_slot":[1,1,1,1],
        "epoch_of_slot":[1,1,1,1]}"#;
    replicator.set_routing(RoutingTable::from_json(routing, 4).unwrap());
    replicator.link_up(2, TO_BACKUP);
    answer(&replicator, false);
    replicator
}

/// Answer everything as the backup; one without room refuses what may create rows.
fn answer(replicator: &Replicator, is_full: bool) {
    let full = || Refusal::MemoryLimit("full".into());
    answer_with(replicator, is_full.then(full).as_ref());
}

/// The same; what may create rows is refused so.
fn answer_with(replicator: &Replicator, refusal: Option<&Refusal>) {
    let mut messages = replicator
        .take_outgoing(2, Way::Heartbeats, TO_BACKUP)
        .unwrap();
    messages.extend(
        replicator
            .take_outgoing(2, Way::ToBackup, TO_BACKUP)
            .unwrap(),
    );
    for message in messages {
        let said = match (message, refusal) {
            (Message::Heartbeat { sent_at, version }, _) => Message::ReadLease { sent_at, version },
            (
                Message::Prepare {
                    number,
                    transaction,
                    ..
                },
                Some(refusal),
            ) if transaction.change.creates() => Message::Refused {
                number,
                reason: Refuse::Rows(refusal.clone()),
            },
            (Message::Prepare { number, .. } | Message::Recover { number, .. }, _) => {
                Message::Accepted { number }
            }
            _ => continue,
        };
        replicator.receive(2, TO_BACKUP, said);
    }
}

/// Push new rows; the outcome once the backup has answered, and the share that went with it.
fn pushed(replicator: &Arc<Replicator>, sequence: u64, is_full: bool) -> (Outcome, u32) {
    let (mut outcome, share) = begin_push(replicator, sequence);
    answer(replicator, is_full);
    (outcome.try_recv().unwrap(), share)
}

/// Push new rows: what the outcome comes by, and the share that went with it.
fn begin_push(replicator: &Arc<Replicator>, sequence: u64) -> (oneshot::Receiver<Outcome>, u32) {
    let space = replicator.store().space();
    let mut keys: Vec<u64> = (sequence * 400..sequence * 400 + 400).collect();
    keys.sort_by_key(|&key| space.slot_of(key));
    begin_push_of(replicator, sequence, &keys)
}

/// The same of these keys.
fn begin_push_of(
    replicator: &Arc<Replicator>,
    sequence: u64,
    keys: &[u64],
) -> (oneshot::Receiver<Outcome>, u32) {
    let change = Change::update(1.0);
    let batch = Batch::new(keys, &vec![1.0; keys.len()]);
    let id = push_of(own(3), sequence).id;
    let space = replicator.store().space();
    let mut made = Transaction::new(space, id, 0, table_id("t"), change, batch).unwrap();
    replicator.store().prepare(&mut made).unwrap();
    let share = made.stamp.share;
    let Answer::Later(outcome) = replicator.push(made).unwrap().0 else {
        panic!("there is a backup to wait for");
    };
    (outcome, share)
}

/// Longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(20);

/// Whether a table has rows to give up may take long to find out: meanwhile others have the state.
#[test]
fn the_state_is_free_while_a_refused_push_looks_for_rows_to_give_up() {
    let replicator = master_of_small_backup();
    pushed(&replicator, 0, false).0.unwrap();
    let space = replicator.store().space();
    let new = 1_000_000;
    let (mut outcome, _) = begin_push_of(&replicator, 1, &[new]);
    let other = (space.slot_of(new) + 1) % 4;
    std::thread::scope(|scope| {
        let held = replicator.store().hold_slot(other);
        let answering = scope.spawn(|| answer(&replicator, true));
        loop {
            let state = replicator.state.try_lock_for(PATIENCE);
            let state = state.expect("the state is held meanwhile");
            // A thread works on the answer.
            if !state.busy.is_empty() && state.replica.apply_queues().is_empty() {
                break;
            }
            drop(state);
            std::thread::yield_now();
        }
        assert!(outcome.try_recv().is_err(), "it is not found out yet");
        drop(held);
        answering.join().unwrap();
    });
    let refused = outcome.try_recv().unwrap().unwrap_err();
    assert!(matches!(refused, Refusal::NotReady(_)), "{refused:?}");
}

/// A backup that has less memory is full first. Its master lets the table give up rows then, and
/// does not find room for more than the backup has.
#[test]
fn a_full_backup_lets_its_master_evict() {
    let replicator = master_of_small_backup();
    let rows = || replicator.store().usage("t").unwrap().rows;
    let (outcome, capacity) = pushed(&replicator, 0, false);
    outcome.unwrap();
    assert_eq!((rows(), capacity), (400, 250_000));
    assert_eq!(replicator.relieve(), Gone::default());
    // It comes again, and no client is told that there is no room.
    let refused = pushed(&replicator, 1, true).0.unwrap_err();
    assert!(matches!(refused, Refusal::NotReady(_)), "{refused:?}");
    let relieving = {
        let replicator = Arc::clone(&replicator);
        std::thread::spawn(move || replicator.relieve())
    };
    while !relieving.is_finished() {
        answer(&replicator, true);
        std::thread::yield_now();
    }
    let gone = relieving.join().unwrap();
    assert!(gone.evicted > 0);
    assert_eq!(rows(), 400 - gone.evicted);
    let (outcome, share) = pushed(&replicator, 2, true);
    assert!(u64::from(share) < 100, "{share}");
    assert!(matches!(outcome, Err(Refusal::NotReady(_))), "{outcome:?}");
    let (outcome, _) = pushed(&replicator, 3, false);
    assert!(outcome.unwrap().gone.evicted > 0);
    assert!(rows() <= 4 * u64::from(share));
}

/// A backup that can never take a push says so: then its master evicts nothing for it, and tells the
/// client at once.
#[test]
fn no_row_goes_for_a_push_that_a_backup_can_never_take() {
    let replicator = master_of_small_backup();
    pushed(&replicator, 0, false).0.unwrap();
    let (mut outcome, _) = begin_push(&replicator, 1);
    let never = Refusal::NoRoomEver("too much".into());
    answer_with(&replicator, Some(&never));
    assert_eq!(outcome.try_recv().unwrap().unwrap_err(), never);
    assert_eq!(replicator.relieve(), Gone::default());
    assert_eq!(replicator.store().usage("t").unwrap().rows, 400);
    // The other side of it.
    let backup = copied_to();
    let answer = prepared(&backup, 1, keys_of(0).skip(1).take(70_000));
    let never = |reason: &Refuse| matches!(reason, Refuse::Rows(Refusal::NoRoomEver(_)));
    assert!(
        matches!(&answer, Message::Refused { reason, .. } if never(reason)),
        "{answer:?}"
    );
    assert_eq!(backup.store().memory().take_lacked(), 0);
}

/// Alone, with [`LIMIT`] bytes of memory: the tables `plain` and `bounded`, which has a capacity.
fn with_little_memory() -> Arc<Replicator> {
    let store = Arc::new(Store::new(SlotSpace::new(4).unwrap(), LIMIT));
    store.set_routing(1, &[true; 4]);
    for (name, lifetime) in [
        ("plain", ""),
        ("bounded", r#","lifetime":{"capacity":{"rows":1000000000}}"#),
    ] {
        let spec = format!(
            r#"{{"name":"{name}","kind":{{"sparse":{{"dim":1}}}},"optimizer":{{"sgd":{{"learning_rate":1.0}}}}{lifetime}}}"#
        );
        let spec = Arc::new(TableSpec::from_json(&spec).unwrap());
        store.create_table(&spec, 1).unwrap();
    }
    Replicator::new(1, store, ReplicaOptions::default())
}

/// Push to these keys of a table.
fn push_keys(
    replicator: &Arc<Replicator>,
    table: &str,
    sequence: u64,
    keys: std::ops::Range<u64>,
) -> Result<StageReport, Refusal> {
    let space = replicator.store().space();
    let mut keys: Vec<u64> = keys.collect();
    keys.sort_by_key(|&key| space.slot_of(key));
    let change = Change::update(1.0);
    let batch = Batch::new(&keys, &vec![1.0; keys.len()]);
    let id = push_of(own(5), sequence).id;
    let mut made = Transaction::new(space, id, sequence, table_id(table), change, batch).unwrap();
    replicator.store().prepare(&mut made)?;
    match replicator.push(made)?.0 {
        Answer::Now(report) => Ok(report),
        Answer::Later(_) => panic!("there is no backup to wait for"),
    }
}

/// A push that lacks more than tables with a capacity have is refused at once, and none gives up a row
/// for it. One that they have the room for waits until they gave it up.
#[test]
fn no_row_goes_for_a_push_that_can_never_fit() {
    let replicator = with_little_memory();
    for (sequence, first) in (0..40_000).step_by(2_000).enumerate() {
        for (at, table) in ["plain", "bounded"].into_iter().enumerate() {
            let sequence = 2 * sequence as u64 + at as u64;
            push_keys(&replicator, table, sequence, first..first + 2_000).unwrap();
        }
    }
    assert!(!replicator.store().memory().is_short());
    // More than the limit; and more than there is beside the rows of `plain`.
    for keys in [400_000, 180_000] {
        let new = 1_000_000..1_000_000 + keys;
        let refused = push_keys(&replicator, "plain", 50, new).unwrap_err();
        assert!(matches!(refused, Refusal::NoRoomEver(_)), "{refused:?}");
        assert_eq!(replicator.relieve(), Gone::default());
    }
    let rows = |table: &str| replicator.store().usage(table).unwrap().rows;
    assert_eq!((rows("plain"), rows("bounded")), (40_000, 40_000));
    let fits = || push_keys(&replicator, "plain", 50, 1_000_000..1_150_000);
    assert!(matches!(fits(), Err(Refusal::NotReady(_))));
    assert!(replicator.relieve().evicted > 0);
    fits().unwrap();
    assert!(rows("bounded") > 10_000, "{}", rows("bounded"));
}

/// A table with much to expire goes on with its period, while another one begins its next.
#[test]
fn tables_keep_their_periods_side_by_side() {
    let (day, ticks) = (Arc::new(AtomicU32::new(1000)), AtomicU64::new(1));
    let shown = Arc::clone(&day);
    let clock = WallClock::of(move || shown.load(Ordering::SeqCst));
    let store = Arc::new(Store::with_clock(SlotSpace::new(4).unwrap(), 0, clock));
    store.set_routing(1, &[true; 4]);
    for (name, every) in [("fast", 10), ("slow", 1000)] {
        let spec = format!(
            r#"{{"name":"{name}","kind":{{"sparse":{{"dim":1}}}},"optimizer":{{"sgd":{{"learning_rate":1.0}}}},
                "lifetime":{{"expiry":{{"unseen_seconds":5,"every_seconds":{every}}}}}}}"#
        );
        let spec = Arc::new(TableSpec::from_json(&spec).unwrap());
        store.create_table(&spec, 1).unwrap();
    }
    // All parts take equally long.
    let clock = Clock::of(move || ticks.fetch_add(1, Ordering::SeqCst));
    let options = ReplicaOptions::default();
    let replicator = Replicator::with_clock(1, Arc::clone(&store), options, clock);
    push_keys(&replicator, "fast", 0, 0..100).unwrap();
    // Enough for eight parts in each slot.
    push_keys(&replicator, "slow", 1, 0..20_000).unwrap();
    let is_kept = |table: &str, period: u64| {
        let stream = StreamId::of_table(table_id(table), TableTask::Expire);
        let last = period * 1000 * 8 + 7;
        store.served_slots_without(stream, last).is_empty()
    };
    for period in [1000, 1010] {
        day.store(period, Ordering::SeqCst);
        for _ in 0..9 {
            replicator.keep_periods_for(0);
        }
        assert!(is_kept("fast", u64::from(period)));
        assert!(!is_kept("slow", 1000));
    }
    // Its rows are older than 5 s by now.
    day.store(1019, Ordering::SeqCst);
    assert!(replicator.keep_periods().unseen > 0);
    assert!(is_kept("slow", 1000));
    assert_eq!(replicator.keep_periods(), Gone::default());
}
