//! A whole cluster as one value: nodes, connections, the store's records and the clients, with
//! every step that can happen next.

mod checks;
mod doing;
mod steps;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::Write;
use std::sync::Arc;

use backstay_core::compensation::Compensation;
use backstay_core::engine::{Engine, ServingState};
use backstay_core::error::Refusal;
use backstay_core::hash::{mix64, table_id, SlotSpace};
use backstay_core::life::Thresholds;
use backstay_core::optimizer::{Optimizer, Sgd};
use backstay_core::replication::{
    fingerprint, LocalRows, Message, NodeId, Replica, ReplicaOptions, Report, RoutingTable, Rows,
    Way, Work,
};
use backstay_core::spec::TableSpec;
use backstay_core::staleness::origin;
use backstay_core::stream::{StreamId, TransactionId};
use backstay_core::transaction::{Batch, Change, Run, StagedRun, Stamp, Transaction};

/// Times are in steps of the clock, one step is this long.
pub const STEP: u64 = 20;
/// So many steps of the clock after the last fault, all is to be well.
const QUIET_STEPS: u32 = 12;

const OPTIONS: ReplicaOptions = ReplicaOptions {
    read_lease: 2 * STEP,
    heartbeat: STEP,
    prepare_timeout: 3 * STEP,
    max_pending: 8,
    copies_at_once: 1,
    copy_bytes_per_s: u64::MAX,
    // A row in a message, and no second one before it is taken in.
    copy_piece_bytes: 1,
    copy_window_bytes: 1,
};

/// Who holds a slot, as the controller writes it. Nodes by number, from 0.
#[derive(Debug, Clone, PartialEq)]
pub struct Set {
    pub master: Option<usize>,
    pub in_sync: Vec<usize>,
    pub catching_up: Vec<usize>,
    pub term: u64,
    pub epoch: u64,
}

/// What may happen, and how often, in a search.
#[derive(Debug, Clone)]
#[allow(clippy::struct_excessive_bools)] // Switches, each on its own.
pub struct Budget {
    pub crashes: u32,
    pub breaks: u32,
    pub changes: u32,
    /// Parts sent of each push; more than one for each master are retries.
    pub sends: u32,
    pub time: u32,
    /// Whether the controller may take a backup out that no master reported.
    pub groundless: bool,
    /// Whether the controller changes the master of a slot only if that has died.
    pub forced: bool,
    /// Whether the controller knows at once that a crashed process is gone.
    pub sure: bool,
    /// Whether backups apply what is decided at once, masters apply and answer in one step, and
    /// reports come to the store at once.
    pub eager: bool,
    /// Whether a break leaves what was under way to be read later.
    pub late: bool,
    /// Slots that are copied to one node at once.
    pub copies_at_once: usize,
    /// Whether the second push deletes the rows of the first.
    pub deletes: bool,
    /// Whether the second push has them expire, by the clocks of masters, which differ.
    pub expires: bool,
    /// Whether the learning rates of pushes are divided by their staleness. All come from before the
    /// first.
    pub stale: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// The next message from a master to its backup; a new connection's first, if it is there.
    There(usize, usize),
    /// The old connection's rest is never read.
    DropOld(usize, usize),
    /// The next answer of a backup to its master.
    Back(usize, usize),
    /// The next heartbeat of a master.
    Beat(usize, usize),
    /// The next read lease of a backup to its master.
    ReadLease(usize, usize),
    /// The next piece of work of an apply queue.
    Do(usize, NodeId),
    /// A routing table comes to a node.
    Route(usize, u64),
    Connect(usize, usize),
    Break(usize, usize),
    Crash(usize),
    /// Slot, new master, whether the old one stays in sync.
    Promote(usize, usize, bool),
    /// Slot, backup: it is to catch up again.
    TakeOut(usize, usize),
    /// Slot, node: it gets a copy.
    Add(usize, usize),
    /// Slot, node: its copy is given up.
    Drop(usize, usize),
    /// Slot, node: its master says that it has caught up.
    TakeIn(usize, usize),
    /// A node's report comes to the store.
    Report(usize),
    /// A client sends what is missing of a push to the master of a slot.
    Send(usize, usize),
    /// A client stops waiting.
    GiveUp(usize),
    Time,
}

#[derive(Debug, Clone)]
enum Item {
    Hello,
    Message(Message),
}

#[derive(Debug, Clone, Default)]
struct Link {
    /// By the master.
    up: bool,
    /// The backup has read the beginning of the connection that is up.
    heard: bool,
    there: VecDeque<(u64, Item)>,
    back: VecDeque<(u64, Message)>,
    /// Heartbeats, on a connection of their own, and their answers.
    beats: VecDeque<(u64, Message)>,
    read_leases: VecDeque<(u64, Message)>,
}

#[derive(Debug, Clone)]
struct Node {
    replica: Replica,
    rows: LocalRows,
    /// Taken from the replica at once: it can take nothing of it back.
    work: BTreeMap<NodeId, VecDeque<Work>>,
    print: u64,
}

#[derive(Debug, Clone, Default)]
struct Push {
    /// Of the slots it touches.
    acknowledged: BTreeSet<u32>,
    attempts: u64,
    /// The parts under way: token, slots.
    waits: Vec<(u64, Vec<u32>)>,
}

#[derive(Debug, Clone)]
pub struct World {
    slots: u32,
    touches: Vec<Vec<u32>>,
    nodes: Vec<Option<Arc<Node>>>,
    links: Vec<Vec<Arc<Link>>>,
    tables: Vec<(Vec<Set>, Arc<RoutingTable>)>,
    reports: Vec<Option<Report>>,
    pushes: Vec<Push>,
    now: u64,
    budget: Budget,
}

pub fn instance(node: usize) -> NodeId {
    node as u64 + 1
}

fn number(instance: NodeId) -> usize {
    instance as usize - 1
}

fn space(slots: u32) -> SlotSpace {
    SlotSpace::new(slots).unwrap()
}

/// The key that a push changes in a slot: each has its own.
fn key(slots: u32, push: usize, slot: u32) -> u64 {
    let mut fitting = (0..).filter(|&key| space(slots).slot_of(key) == slot);
    fitting.nth(push).unwrap()
}

fn engine(slots: u32, expires: bool) -> Engine {
    let lifetime = if expires {
        r#","lifetime":{"expiry":{"unseen_seconds":3},"capacity":{"rows":99,"evict":"least_frequent"}}"#
    } else {
        ""
    };
    let json = format!(
        r#"{{"name":"t","kind":{{"sparse":{{"dim":1}}}},"initializer":{{"constant":{{"value":0.0}}}},"optimizer":{{"sgd":{{"learning_rate":1.0}}}}{lifetime}}}"#
    );
    let mut engine = Engine::new(space(slots), 0..slots);
    let spec = Arc::new(TableSpec::from_json(&json).unwrap());
    engine.create_table(&spec).unwrap();
    engine
}

fn table(version: u64, nodes: usize, sets: &[Set], gone: &[NodeId]) -> Arc<RoutingTable> {
    let mut members = String::new();
    for node in 0..nodes {
        let comma = if node > 0 { "," } else { "" };
        let one = instance(node);
        write!(
            members,
            r#"{comma}{{"node_id":"n{node}","instance":{one},"data_address":""}}"#
        )
        .unwrap();
    }
    let list = |of: &dyn Fn(&Set) -> String| sets.iter().map(of).collect::<Vec<_>>().join(",");
    let text = format!(
        r#"{{"format":2,"version":{version},"slot_count":{},"nodes":[{members}],"gone":{gone:?},
           "sets":[{}],"set_of_slot":{:?},"term_of_slot":[{}],"epoch_of_slot":[{}]}}"#,
        sets.len(),
        list(&|set| {
            let master = set
                .master
                .map_or(-1, |master| i64::try_from(master).unwrap());
            format!("[{master},{:?},{:?}]", set.in_sync, set.catching_up)
        }),
        (0..sets.len()).collect::<Vec<_>>(),
        list(&|set| set.term.to_string()),
        list(&|set| set.epoch.to_string()),
    );
    Arc::new(RoutingTable::from_json(&text, sets.len() as u32).unwrap())
}

impl Node {
    fn refresh(&mut self, slots: u32) {
        let engine = self.rows.0.borrow();
        for queue in self.replica.apply_queues() {
            while let Some(work) = self.replica.next_work(queue) {
                self.work.entry(queue).or_default().push_back(work);
            }
        }
        let mut print = self.replica.fingerprint();
        for (queue, work) in self.work.iter().filter(|(_, work)| !work.is_empty()) {
            let work: Vec<_> = work.iter().map(|one| (one, self.stands(one))).collect();
            print = mix64(print ^ fingerprint(&(queue, work)));
        }
        for slot in 0..slots {
            let staged: Vec<_> = engine
                .staged(slot)
                .map(|one| (one.tag, one.transaction.id, one.transaction.optimizer))
                .collect();
            let all = (engine.memory(slot), engine.serving_state(slot), staged);
            print = mix64(print ^ fingerprint(&all)) ^ engine.digest(slot);
        }
        self.print = print;
    }

    /// In which places a piece of work finds the very transaction that it is about.
    fn stands(&self, work: &Work) -> Vec<bool> {
        let Work::Commit {
            transaction,
            places,
            ..
        } = work
        else {
            return Vec::new();
        };
        let stands = |place: &StagedRun| {
            let staged = self.rows.staged(place.run.slot);
            let mut staged = staged
                .iter()
                .zip(self.rows.position(place.run.slot).0 + 1..);
            staged
                .any(|(one, at)| at == place.position && Arc::ptr_eq(&one.transaction, transaction))
        };
        places.iter().map(stands).collect()
    }

    fn apply_queues(&self) -> impl Iterator<Item = NodeId> + '_ {
        let busy = self.work.iter().filter(|(_, work)| !work.is_empty());
        busy.map(|(&queue, _)| queue)
    }

    fn next_work(&mut self, queue: NodeId) -> Option<Work> {
        let taken = self.work.get_mut(&queue).and_then(VecDeque::pop_front);
        taken.or_else(|| self.replica.next_work(queue))
    }

    fn holds(&self, id: TransactionId, slot: u32) -> bool {
        let engine = self.rows.0.borrow();
        let waits = engine.staged(slot).any(|one| one.transaction.id == id);
        waits || Self::applied(&engine, id, slot)
    }

    fn applied(engine: &Engine, id: TransactionId, slot: u32) -> bool {
        let memory = engine.memory(slot);
        let mut windows = memory.streams.iter();
        windows.any(|(stream, window)| *stream == id.stream && window.skips(id.sequence))
    }
}

fn id(push: usize) -> TransactionId {
    let stream = StreamId {
        job: push as u64 + 1,
        pass: 0,
        task: 0,
    };
    TransactionId {
        stream,
        sequence: 0,
    }
}

impl World {
    /// All nodes up, connected and serving by the first routing table.
    pub fn new<const PUSHES: usize>(
        nodes: usize,
        sets: Vec<Set>,
        touches: [&[u32]; PUSHES],
        budget: Budget,
    ) -> Self {
        let slots = sets.len() as u32;
        let options = ReplicaOptions {
            copies_at_once: budget.copies_at_once,
            ..OPTIONS
        };
        let node = |number: usize| {
            let mut node = Node {
                replica: Replica::new(instance(number), slots, options),
                rows: LocalRows(engine(slots, budget.expires).into()),
                work: BTreeMap::new(),
                print: 0,
            };
            node.replica.set_lease(u64::MAX);
            node.refresh(slots);
            Some(Arc::new(node))
        };
        let first = table(1, nodes, &sets, &[]);
        let mut world = Self {
            slots,
            touches: touches.iter().map(|slots| slots.to_vec()).collect(),
            nodes: (0..nodes).map(node).collect(),
            links: vec![vec![Arc::default(); nodes]; nodes],
            tables: vec![(sets, first)],
            reports: vec![None; nodes],
            pushes: vec![Push::default(); PUSHES],
            now: STEP,
            budget,
        };
        for node in 0..nodes {
            world.apply(Step::Route(node, 1));
        }
        world.come_to_rest();
        world
    }

    /// A node's lease in the coordination store is alive for so long from now.
    #[allow(dead_code)] // Histories by hand use it.
    pub fn lease(&mut self, at: usize, remaining: u64) {
        let until = self.now + remaining;
        self.on(at, |node, _| node.replica.set_lease(until));
    }

    /// Whether a node would answer a read now.
    #[allow(dead_code)] // Histories by hand use it.
    pub fn answers_reads(&self, at: usize, slot: u32) -> bool {
        let node = self.nodes[at].as_ref().unwrap();
        node.rows.serving_state(slot) == ServingState::Serving
            && self.now < node.replica.serving_until()
    }

    /// Deliver and do everything that is under way.
    pub fn come_to_rest(&mut self) {
        let quiet = |step: &Step| {
            matches!(
                step,
                Step::There(..)
                    | Step::Back(..)
                    | Step::Beat(..)
                    | Step::ReadLease(..)
                    | Step::Do(..)
                    | Step::Connect(..)
            )
        };
        while let Some(step) = self.steps().into_iter().find(quiet) {
            self.apply(step);
        }
    }

    /// Nothing breaks any more: everything arrives, all nodes hear of the newest table, and time
    /// passes. An error if a slot is not served then, or a node that answers is called silent.
    #[allow(dead_code)] // Not every test uses it.
    pub fn check_liveness(&self) -> Result<(), String> {
        let mut world = self.clone();
        let alive: Vec<usize> = (0..world.nodes.len())
            .filter(|&node| world.nodes[node].is_some())
            .collect();
        let newest = world.newest().1.version;
        for &node in &alive {
            world.apply(Step::Route(node, newest));
        }
        world.come_to_rest();
        for _ in 0..QUIET_STEPS {
            world.apply(Step::Time);
            world.come_to_rest();
        }
        let is_alive = |node: &usize| alive.contains(node);
        for (slot, set) in world.newest().0.iter().enumerate() {
            let Some(master) = set.master.filter(is_alive) else {
                continue;
            };
            // A master waits for the read leases of all its backups, whatever slots they hold.
            let sets = world.newest().0.iter();
            let mut backups = sets
                .filter(|set| set.master == Some(master))
                .flat_map(|set| &set.in_sync);
            if backups.all(is_alive) && !world.answers_reads(master, slot as u32) {
                return Err(format!("slot {slot} is not served, and everybody is there"));
            }
        }
        for &at in &alive {
            let silent = &world.nodes[at]
                .as_ref()
                .map(|node| node.replica.report().1.silent.clone());
            let mut silent = silent.iter().flatten();
            if let Some(node) = silent.find(|node| is_alive(&number(**node))) {
                return Err(format!(
                    "node {at} calls {} silent, which answers",
                    number(*node)
                ));
            }
        }
        Ok(())
    }

    /// Do all work of every apply queue.
    #[allow(dead_code)] // The search uses it.
    pub fn finish_work(&mut self) {
        let work = |step: &Step| matches!(step, Step::Do(..));
        while let Some(step) = self.steps().into_iter().find(work) {
            self.apply(step);
        }
    }

    /// All pushes are sent to the masters of their slots, in the order of their numbers.
    pub fn send_all(mut self) -> Self {
        for push in 0..self.pushes.len() {
            for to in 0..self.nodes.len() {
                if !self.missing(push, to, &[]).is_empty() {
                    self.send(push, to);
                }
            }
        }
        self
    }

    /// A number for the state.
    pub fn fingerprint(&self) -> u64 {
        let mut print = fingerprint(&(
            (&self.reports, &self.pushes, self.now, &self.budget),
            self.tables.last().map(|(sets, table)| (sets, &table.gone)),
            self.nodes
                .iter()
                .map(|node| node.as_ref().map(|node| node.print))
                .collect::<Vec<_>>(),
        ));
        for link in self.links.iter().flatten() {
            print = mix64(print ^ u64::from(link.up) << 1 ^ u64::from(link.heard));
            for (one, _) in &link.there {
                print = mix64(print ^ one);
            }
            for answers in [&link.back, &link.beats, &link.read_leases] {
                print = mix64(print ^ 7);
                for (one, _) in answers {
                    print = mix64(print ^ one);
                }
            }
        }
        print
    }

    fn newest(&self) -> &(Vec<Set>, Arc<RoutingTable>) {
        self.tables.last().unwrap()
    }

    /// Let something happen.
    pub fn apply(&mut self, step: Step) {
        match step {
            Step::There(from, to) => self.deliver(from, to),
            Step::DropOld(from, to) => {
                let link = Arc::make_mut(&mut self.links[from][to]);
                while !matches!(link.there.front(), Some((_, Item::Hello)) | None) {
                    link.there.pop_front();
                }
            }
            Step::Back(to, from) => {
                let link = Arc::make_mut(&mut self.links[to][from]);
                let (_, message) = link.back.pop_front().unwrap();
                self.take(to, from, message);
            }
            Step::Beat(from, to) => {
                let link = Arc::make_mut(&mut self.links[from][to]);
                let (_, message) = link.beats.pop_front().unwrap();
                self.take(to, from, message);
            }
            Step::ReadLease(to, from) => {
                let link = Arc::make_mut(&mut self.links[to][from]);
                let (_, message) = link.read_leases.pop_front().unwrap();
                self.take(to, from, message);
            }
            Step::Do(at, queue) => self.work(at, queue),
            Step::Route(at, version) => {
                let table = Arc::clone(&self.tables[version as usize - 1].1);
                self.on(at, |node, now| {
                    node.replica.set_routing(now, &node.rows, table);
                });
            }
            Step::Connect(from, to) => self.connect(from, to),
            Step::Break(from, to) => {
                self.budget.breaks -= 1;
                self.sever(from, to, false);
            }
            Step::Crash(at) => self.crash(at),
            Step::Promote(slot, backup, keep) => self.change(slot, |set| {
                let old = set.master.replace(backup).unwrap();
                set.in_sync.retain(|&node| node != backup);
                if keep {
                    set.in_sync.push(old);
                }
            }),
            Step::TakeOut(slot, backup) => {
                let dead = self.nodes[backup].is_none();
                self.change(slot, |set| {
                    set.in_sync.retain(|&node| node != backup);
                    if !dead {
                        set.catching_up.push(backup);
                    }
                });
            }
            Step::Add(slot, node) => self.change(slot, |set| set.catching_up.push(node)),
            Step::Drop(slot, node) => {
                self.change(slot, |set| set.catching_up.retain(|&one| one != node));
            }
            Step::TakeIn(slot, node) => self.change(slot, |set| {
                set.catching_up.retain(|&one| one != node);
                set.in_sync.push(node);
            }),
            Step::Report(at) => {
                let node = self.nodes[at].as_ref().unwrap();
                self.reports[at] = Some(node.replica.report().1.clone());
            }
            Step::Send(push, to) => self.send(push, to),
            Step::GiveUp(push) => self.pushes[push].waits.clear(),
            Step::Time => self.pass_time(),
        }
    }

    fn take(&mut self, at: usize, from: usize, message: Message) {
        self.on(at, |node, now| {
            node.replica
                .receive(now, &node.rows, instance(from), message);
        });
    }

    fn connect(&mut self, from: usize, to: usize) {
        let link = Arc::make_mut(&mut self.links[from][to]);
        link.up = true;
        link.there.push_back((3, Item::Hello));
        self.on(from, |node, now| {
            node.replica.link_up(now, &node.rows, instance(to));
        });
    }

    fn crash(&mut self, at: usize) {
        self.budget.crashes -= 1;
        self.nodes[at] = None;
        self.reports[at] = None;
        for other in 0..self.nodes.len() {
            self.links[at][other] = Arc::default();
            if self.links[other][at].up {
                self.sever(other, at, true);
            }
        }
    }

    fn pass_time(&mut self) {
        self.budget.time = self.budget.time.saturating_sub(1);
        self.now += STEP;
        for at in 0..self.nodes.len() {
            if self.nodes[at].is_some() {
                self.on(at, |node, now| node.replica.tick(now, &node.rows));
            }
        }
    }

    /// Do something at a node, then put what it sends on the connections.
    fn on(&mut self, at: usize, what: impl FnOnce(&mut Node, u64)) {
        let (now, slots) = (self.now, self.slots);
        let node = Arc::make_mut(self.nodes[at].as_mut().unwrap());
        what(node, now);
        let addressed: Vec<_> = node.replica.with_messages().collect();
        for (to, way) in addressed {
            let messages = node.replica.take_messages(to, way);
            let to = number(to);
            let (from, backup) = match way {
                Way::ToBackup | Way::Heartbeats => (at, to),
                Way::ToMaster => (to, at),
            };
            let link = Arc::make_mut(&mut self.links[from][backup]);
            if !link.up {
                continue;
            }
            for message in messages {
                let print = fingerprint(&message);
                match way {
                    Way::ToBackup => link.there.push_back((print, Item::Message(message))),
                    Way::Heartbeats => link.beats.push_back((print, message)),
                    Way::ToMaster if matches!(message, Message::ReadLease { .. }) => {
                        link.read_leases.push_back((print, message));
                    }
                    // Answers on a closed connection go nowhere.
                    Way::ToMaster if !link.heard => {}
                    Way::ToMaster => link.back.push_back((print, message)),
                }
            }
        }
        node.refresh(slots);
        if self.budget.eager && self.budget.changes > 0 {
            self.reports[at] = Some(node.replica.report().1.clone());
        }
    }
}
