//! What a client is told of a push that one backup has no room for: that nothing of it was
//! applied only if no other backup may keep it.

// What fails in a helper is a failed test; exact numbers are the point.
#![allow(clippy::unwrap_used, clippy::float_cmp)]
#![allow(clippy::disallowed_methods, clippy::arc_with_non_send_sync)]

use std::sync::Arc;

use backstay_core::engine::Engine;
use backstay_core::error::Refusal;
use backstay_core::hash::{table_id, SlotSpace};
use backstay_core::optimizer::Optimizer;
use backstay_core::replication::message::Refuse;
use backstay_core::replication::{
    LocalRows, Message, NodeId, Replica, ReplicaOptions, RoutingTable, Rows, Way, Work,
};
use backstay_core::spec::TableSpec;
use backstay_core::stream::{StreamId, TransactionId};
use backstay_core::transaction::{Batch, Change, Transaction};

const MASTER: NodeId = 1;
const FULL: NodeId = 2;
const OTHER: NodeId = 3;
const KEY: u64 = 7;

struct Node {
    replica: Replica,
    rows: LocalRows,
}

impl Node {
    /// A node that goes by the first routing table: the master with these backups in sync.
    fn new(me: NodeId, in_sync: &str) -> Self {
        let json = r#"{"name":"t","kind":{"sparse":{"dim":1}},"initializer":{"zeros":{}},"optimizer":{"sgd":{"learning_rate":1.0}}}"#;
        let mut engine = Engine::new(SlotSpace::new(1).unwrap(), 0..1);
        let spec = Arc::new(TableSpec::from_json(json).unwrap());
        engine.create_table(&spec).unwrap();
        let mut node = Self {
            replica: Replica::new(me, 1, ReplicaOptions::default()),
            rows: LocalRows(engine.into()),
        };
        node.replica.set_lease(u64::MAX);
        node.route(table(1, 0, in_sync));
        node
    }

    fn route(&mut self, table: Arc<RoutingTable>) {
        self.replica.set_routing(1, &self.rows, table);
        self.work();
    }

    fn receive(&mut self, from: NodeId, message: Message) {
        self.replica.receive(1, &self.rows, from, message);
    }

    /// Do all work; the outcomes that clients are told.
    fn work(&mut self) -> Vec<Result<(), Refusal>> {
        let mut told = Vec::new();
        let queues = self.replica.apply_queues();
        for queue in queues {
            while let Some(work) = self.replica.next_work(queue) {
                match work {
                    Work::Commit {
                        transaction,
                        places,
                        ..
                    } => {
                        self.rows.commit(&transaction, &places).unwrap();
                    }
                    Work::Recovered { lsn } => self.replica.recovered(1, &self.rows, lsn),
                    Work::Answer { outcome, alone, .. } => {
                        told.push(self.replica.acknowledge(1, outcome, alone).map(|_| ()));
                    }
                }
            }
        }
        told
    }

    fn row(&self) -> f32 {
        let mut out = [0.0];
        let engine = self.rows.0.borrow();
        let table = engine.table(table_id("t")).unwrap();
        table.read(&[KEY], &mut out);
        out[0]
    }
}

/// One slot; master and backups are numbers of the list of nodes, from 0.
fn table(version: u64, master: usize, in_sync: &str) -> Arc<RoutingTable> {
    let text = format!(
        r#"{{"format":2,"version":{version},"slot_count":1,"gone":[],"nodes":[
           {{"node_id":"n1","instance":1,"data_address":""}},
           {{"node_id":"n2","instance":2,"data_address":""}},
           {{"node_id":"n3","instance":3,"data_address":""}}],
           "sets":[[{master},{in_sync},[]]],"set_of_slot":[0],"term_of_slot":[{version}],"epoch_of_slot":[1]}}"#
    );
    Arc::new(RoutingTable::from_json(&text, 1).unwrap())
}

fn push() -> Arc<Transaction> {
    let stream = StreamId {
        job: 1,
        pass: 0,
        task: 0,
    };
    let id = TransactionId {
        stream,
        sequence: 0,
    };
    let change = Change::update(1.0);
    let (space, batch) = (SlotSpace::new(1).unwrap(), Batch::new(&[KEY], &[-1.0]));
    let mut push = Transaction::new(space, id, 0, table_id("t"), change, batch).unwrap();
    let sgd: Optimizer = serde_json::from_str(r#"{"sgd":{"learning_rate":1.0}}"#).unwrap();
    push.optimizer = Some(sgd.stamp());
    Arc::new(push)
}

fn connect(master: &mut Node, backup: &mut Node) {
    let (to, from) = (backup.replica.me(), master.replica.me());
    master.replica.link_up(1, &master.rows, to);
    backup.replica.master_connected(from);
    deliver(master, backup);
    // With the last backup, the master has recovered its slot and serves it.
    master.work();
}

/// All messages of the master to a backup, and the answers.
fn deliver(master: &mut Node, backup: &mut Node) {
    let (to, from) = (backup.replica.me(), master.replica.me());
    for message in master.replica.take_messages(to, Way::ToBackup) {
        backup.receive(from, message);
    }
    for answer in backup.replica.take_messages(from, Way::ToMaster) {
        master.receive(to, answer);
    }
}

/// The same, but the backup answers a Prepare that it has no room.
fn refuse_for_lack_of_room(master: &mut Node, full: &mut Node) {
    for message in master.replica.take_messages(FULL, Way::ToBackup) {
        let Message::Prepare { number, .. } = message else {
            full.receive(MASTER, message);
            continue;
        };
        for answer in full.replica.take_messages(MASTER, Way::ToMaster) {
            master.receive(FULL, answer);
        }
        let reason = Refuse::Rows(Refusal::MemoryLimit("full".into()));
        master.receive(FULL, Message::Refused { number, reason });
    }
}

/// One backup has no room, the other has staged the push. The master dies before its Rollback
/// arrives there, and that backup becomes the master: it keeps the push (invariant I6). A client
/// that was told that nothing was applied would send the gradients again under another number.
#[test]
fn a_push_that_another_backup_may_keep_is_not_called_unapplied() {
    let (mut master, mut full) = (Node::new(MASTER, "[1,2]"), Node::new(FULL, "[1,2]"));
    let mut other = Node::new(OTHER, "[1,2]");
    connect(&mut master, &mut full);
    connect(&mut master, &mut other);
    let taken = master.replica.push(1, &master.rows, 1, &push()).unwrap();
    assert!(taken.is_none());
    deliver(&mut master, &mut other);
    refuse_for_lack_of_room(&mut master, &mut full);
    let told = master.work();
    drop(master);
    other.route(table(2, 2, "[]"));
    assert_eq!(other.row(), 1.0, "the new master keeps what it has staged");
    assert!(
        matches!(&told[..], [Err(Refusal::RolledBack(reason))] if reason.contains("full")),
        "{told:?}"
    );
}

/// A backup has staged the push, and its connection breaks while the other one is silent. On the next
/// connection it has no room for the same push, which it has staged already.
#[test]
fn a_push_that_was_staged_on_an_earlier_connection_is_not_called_unapplied() {
    let (mut master, mut full) = (Node::new(MASTER, "[1,2]"), Node::new(FULL, "[1,2]"));
    let mut other = Node::new(OTHER, "[1,2]");
    connect(&mut master, &mut full);
    connect(&mut master, &mut other);
    master.replica.push(1, &master.rows, 1, &push()).unwrap();
    deliver(&mut master, &mut full);
    master.replica.link_down(1, &master.rows, FULL, false);
    master.replica.link_up(1, &master.rows, FULL);
    full.replica.master_connected(MASTER);
    master.route(table(2, 0, "[1]"));
    refuse_for_lack_of_room(&mut master, &mut full);
    let told = master.work();
    drop(master);
    full.route(table(3, 1, "[]"));
    assert_eq!(full.row(), 1.0, "the new master keeps what it has staged");
    assert!(
        matches!(&told[..], [Err(Refusal::RolledBack(_))]),
        "{told:?}"
    );
}

/// The only backup has no room, so nobody but the master has staged the push, and the client may be
/// told so at once.
#[test]
fn a_push_that_the_only_backup_refuses_is_refused_for_lack_of_room() {
    let (mut master, mut full) = (Node::new(MASTER, "[1]"), Node::new(FULL, "[1]"));
    connect(&mut master, &mut full);
    master.replica.push(1, &master.rows, 1, &push()).unwrap();
    refuse_for_lack_of_room(&mut master, &mut full);
    let told = master.work();
    assert!(
        matches!(&told[..], [Err(Refusal::MemoryLimit(_))]),
        "{told:?}"
    );
    assert_eq!(master.row(), 0.0);
    full.route(table(2, 1, "[]"));
    assert_eq!(full.row(), 0.0);
}
