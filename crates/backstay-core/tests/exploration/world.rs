//! A whole cluster as one value: nodes, connections, the store's records and the clients, with
//! every step that can happen next.

use std::collections::{BTreeSet, VecDeque};
use std::fmt::Write;
use std::sync::Arc;

use backstay_core::engine::{Engine, Standing};
use backstay_core::error::Refusal;
use backstay_core::hash::{mix64, table_id, SlotSpace};
use backstay_core::replication::{
    fingerprint, LocalRows, Message, NodeId, Replica, ReplicaOptions, Report, RoutingTable, Rows,
    Way, Work,
};
use backstay_core::spec::TableSpec;
use backstay_core::stream::{StreamId, TransactionId};
use backstay_core::transaction::{Batch, Change, Transaction};

/// Times are in steps of the clock, one step is this long.
pub const STEP: u64 = 20;
pub const PUSHES: usize = 2;

const OPTIONS: ReplicaOptions = ReplicaOptions {
    promise: 2 * STEP,
    heartbeat: STEP,
    prepare_timeout: 3 * STEP,
    max_pending: 8,
    copies_at_once: 4,
};

/// Who holds a slot, as the controller writes it. Nodes by number, from 0.
#[derive(Debug, Clone, PartialEq)]
pub struct Set {
    pub master: Option<usize>,
    pub in_sync: Vec<usize>,
    pub catching_up: Vec<usize>,
    pub term: u64,
    pub birth: u64,
}

/// What may happen, and how often, in a search.
#[derive(Debug, Clone)]
pub struct Budget {
    pub crashes: u32,
    pub breaks: u32,
    pub changes: u32,
    /// Parts sent of each push; more than one for each master are retries.
    pub sends: u32,
    pub time: u32,
    /// Whether the controller may take a backup out that nobody reported.
    pub groundless: bool,
    /// Whether the controller knows at once that a crashed process is gone.
    pub sure: bool,
    /// Whether backups apply what is decided at once, masters apply and answer in one step, and
    /// reports come to the store at once.
    pub eager: bool,
    /// Whether a break leaves what was under way to be read later.
    pub late: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// The next message from a master to its backup; a new connection's first, if it is there.
    There(usize, usize),
    /// The old connection's rest is never read.
    DropOld(usize, usize),
    /// The next answer of a backup to its master.
    Back(usize, usize),
    /// The next piece of work of a lane.
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
    /// Slot, node: its master says that it has caught up.
    TakeIn(usize, usize),
    /// A node's report comes to the store.
    Report(usize),
    /// A client sends what is missing of a push to the master of a slot.
    Send(usize, usize),
    /// A client waits no more.
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
}

#[derive(Debug, Clone)]
struct Node {
    replica: Replica,
    rows: LocalRows,
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

fn engine(slots: u32) -> Engine {
    let json = r#"{"name":"t","kind":{"sparse":{"dim":1}},"initializer":{"constant":{"value":0.0}},"optimizer":{"sgd":{"learning_rate":1.0}}}"#;
    let mut engine = Engine::new(space(slots), 0..slots);
    let spec = Arc::new(TableSpec::from_json(json).unwrap());
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
        r#"{{"format":1,"version":{version},"slot_count":{},"nodes":[{members}],"gone":{gone:?},
           "sets":[{}],"set_of_slot":{:?},"term_of_slot":[{}],"birth_of_slot":[{}]}}"#,
        sets.len(),
        list(&|set| {
            let master = set.master.map_or(-1, |master| master as i64);
            format!("[{master},{:?},{:?}]", set.in_sync, set.catching_up)
        }),
        (0..sets.len()).collect::<Vec<_>>(),
        list(&|set| set.term.to_string()),
        list(&|set| set.birth.to_string()),
    );
    Arc::new(RoutingTable::from_json(&text, sets.len() as u32).unwrap())
}

impl Node {
    fn refresh(&mut self, slots: u32) {
        let engine = self.rows.0.borrow();
        let mut print = self.replica.fingerprint();
        for slot in 0..slots {
            let staged: Vec<_> = engine
                .staged(slot)
                .map(|one| (one.tag, one.transaction.id))
                .collect();
            let all = (engine.memory(slot), engine.standing(slot), staged);
            print = mix64(print ^ fingerprint(&all)) ^ engine.digest(slot);
        }
        self.print = print;
    }

    fn holds(&self, id: TransactionId, slot: u32) -> bool {
        let engine = self.rows.0.borrow();
        let waits = engine.staged(slot).any(|one| one.transaction.id == id);
        waits || Self::applied(&engine, id, slot)
    }

    fn applied(engine: &Engine, id: TransactionId, slot: u32) -> bool {
        let memory = engine.memory(slot);
        let mut windows = memory.streams.iter();
        windows.any(|(stream, window)| *stream == id.stream && window.is_settled(id.sequence))
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
    pub fn new(nodes: usize, sets: Vec<Set>, touches: [&[u32]; PUSHES], budget: Budget) -> Self {
        let slots = sets.len() as u32;
        let node = |number: usize| {
            let mut node = Node {
                replica: Replica::new(instance(number), slots, OPTIONS),
                rows: LocalRows(engine(slots).into()),
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
        loop {
            let quiet = |step: &Step| {
                matches!(
                    step,
                    Step::There(..) | Step::Back(..) | Step::Do(..) | Step::Connect(..)
                )
            };
            let Some(step) = world.steps().into_iter().find(quiet) else {
                return world;
            };
            world.apply(step);
        }
    }

    /// All pushes are sent to the masters of their slots, in the order of their numbers.
    pub fn send_all(mut self) -> Self {
        for push in 0..PUSHES {
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
            print = mix64(print ^ 7);
            for (one, _) in &link.back {
                print = mix64(print ^ one);
            }
        }
        print
    }

    fn newest(&self) -> &(Vec<Set>, Arc<RoutingTable>) {
        self.tables.last().unwrap()
    }

    /// Everything that can happen next.
    pub fn steps(&self) -> Vec<Step> {
        let mut steps = Vec::new();
        let alive = |node: usize| self.nodes[node].is_some();
        for (at, node) in self.nodes.iter().enumerate() {
            let Some(node) = node else { continue };
            for lane in node.replica.lanes() {
                steps.push(Step::Do(at, lane));
            }
            let wanted = node.replica.wanted_links();
            for (to, link) in self.links[at].iter().enumerate() {
                if let Some((_, item)) = link.there.front().filter(|_| alive(to)) {
                    steps.push(Step::There(at, to));
                    let new = link
                        .there
                        .iter()
                        .any(|(_, item)| matches!(item, Item::Hello));
                    if new && !matches!(item, Item::Hello) && !link.heard {
                        steps.push(Step::DropOld(at, to));
                    }
                }
                if link.up && !link.back.is_empty() {
                    steps.push(Step::Back(at, to));
                }
                if !link.up && wanted.contains(&instance(to)) && alive(to) {
                    steps.push(Step::Connect(at, to));
                }
                if link.up && self.budget.breaks > 0 {
                    steps.push(Step::Break(at, to));
                }
            }
            let known = node.replica.routing().version;
            for (_, table) in &self.tables {
                if table.version > known {
                    steps.push(Step::Route(at, table.version));
                }
            }
            let report = node.replica.report().1;
            if self.reports[at].as_ref() != Some(report) && self.budget.changes > 0 {
                steps.push(Step::Report(at));
            }
            if self.budget.crashes > 0 {
                steps.push(Step::Crash(at));
            }
        }
        for (at, push) in self.pushes.iter().enumerate() {
            let busy: Vec<u32> = push
                .waits
                .iter()
                .flat_map(|(_, slots)| slots.clone())
                .collect();
            if push.attempts < u64::from(self.budget.sends) {
                for to in 0..self.nodes.len() {
                    if alive(to) && !self.missing(at, to, &busy).is_empty() {
                        steps.push(Step::Send(at, to));
                    }
                }
                if !push.waits.is_empty() {
                    steps.push(Step::GiveUp(at));
                }
            }
        }
        if self.budget.changes > 0 {
            self.changes(&mut steps);
        }
        if self.budget.time > 0 {
            steps.push(Step::Time);
        }
        steps
    }

    /// What a client would send of a push to a node: the slots it masters by some routing that
    /// the client may have, without those acknowledged or under way.
    fn missing(&self, push: usize, to: usize, busy: &[u32]) -> Vec<u32> {
        let open = |slot: &&u32| {
            let known = self.nodes[to]
                .as_ref()
                .is_some_and(|node| node.rows.standing(**slot) != Standing::Elsewhere);
            !self.pushes[push].acknowledged.contains(*slot) && !busy.contains(slot) && known
        };
        self.touches[push].iter().filter(open).copied().collect()
    }

    fn changes(&self, steps: &mut Vec<Step>) {
        let (sets, table) = self.newest();
        for (slot, set) in sets.iter().enumerate() {
            let Some(master) = set.master else { continue };
            let dead = |node: usize| self.nodes[node].is_none();
            for &backup in &set.in_sync {
                if !dead(backup) {
                    steps.push(Step::Promote(slot, backup, false));
                    if !dead(master) {
                        steps.push(Step::Promote(slot, backup, true));
                    }
                }
                let report = self.reports[master].as_ref();
                let reported = report.is_some_and(|report| {
                    report.routing_version == table.version
                        && report.silent.contains(&instance(backup))
                });
                if reported || dead(backup) || self.budget.groundless {
                    steps.push(Step::TakeOut(slot, backup));
                }
            }
            for &node in &set.catching_up {
                let report = self.reports[master].as_ref();
                let entry = (slot as u32, set.term, instance(node));
                let reported = report.is_some_and(|report| {
                    report.routing_version == table.version && report.caught_up.contains(&entry)
                });
                if reported && !dead(node) {
                    steps.push(Step::TakeIn(slot, node));
                }
            }
            for node in 0..self.nodes.len() {
                let held = master == node
                    || set.in_sync.contains(&node)
                    || set.catching_up.contains(&node);
                if !held && !dead(node) {
                    steps.push(Step::Add(slot, node));
                }
            }
        }
    }

    /// Write a new routing table.
    fn change(&mut self, slot: usize, change: impl FnOnce(&mut Set)) {
        let (mut sets, old) = self.newest().clone();
        let before = sets[slot].clone();
        change(&mut sets[slot]);
        let set = &mut sets[slot];
        if (set.master, &set.in_sync) != (before.master, &before.in_sync) {
            set.term += 1;
        }
        let gone: Vec<NodeId> = (0..self.nodes.len())
            .filter(|&node| self.budget.sure && self.nodes[node].is_none())
            .map(instance)
            .collect();
        let new = table(old.version + 1, self.nodes.len(), &sets, &gone);
        self.tables.push((sets, new));
        self.budget.changes -= 1;
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
                self.on(to, |node, now| {
                    node.replica
                        .receive(now, &node.rows, instance(from), message);
                });
            }
            Step::Do(at, lane) => self.work(at, lane),
            Step::Route(at, version) => {
                let table = Arc::clone(&self.tables[version as usize - 1].1);
                self.on(at, |node, now| {
                    node.replica.set_routing(now, &node.rows, table);
                });
            }
            Step::Connect(from, to) => {
                let link = Arc::make_mut(&mut self.links[from][to]);
                link.up = true;
                link.there.push_back((3, Item::Hello));
                self.on(from, |node, now| {
                    node.replica.link_up(now, &node.rows, instance(to));
                });
            }
            Step::Break(from, to) => {
                self.budget.breaks -= 1;
                self.sever(from, to, false);
            }
            Step::Crash(at) => {
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
            Step::Time => {
                self.budget.time -= 1;
                self.now += STEP;
                for at in 0..self.nodes.len() {
                    if self.nodes[at].is_some() {
                        self.on(at, |node, now| node.replica.tick(now, &node.rows));
                    }
                }
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
                Way::ToBackup => (at, to),
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
                    // Answers on a connection that is no more go nowhere.
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

    fn deliver(&mut self, from: usize, to: usize) {
        let eager = self.budget.eager;
        let link = Arc::make_mut(&mut self.links[from][to]);
        match link.there.pop_front().unwrap().1 {
            Item::Hello => {
                link.heard = link.up;
                self.on(to, |node, _| node.replica.master_connected(instance(from)));
            }
            Item::Message(message) => self.on(to, |node, now| {
                node.replica
                    .receive(now, &node.rows, instance(from), message);
                while eager && node.replica.lanes().contains(&instance(from)) {
                    if let Some(Work::Commit {
                        transaction,
                        places,
                    }) = node.replica.next_work(instance(from))
                    {
                        node.rows.commit(&transaction, &places).unwrap();
                    }
                }
            }),
        }
    }

    fn sever(&mut self, from: usize, to: usize, refused: bool) {
        let link = Arc::make_mut(&mut self.links[from][to]);
        link.up = false;
        link.heard = false;
        link.back.clear();
        if !self.budget.late || refused {
            link.there.clear();
        }
        self.on(from, |node, now| {
            node.replica
                .link_down(now, &node.rows, instance(to), refused);
        });
    }

    fn work(&mut self, at: usize, lane: NodeId) {
        let (mut answer, eager) = (None, self.budget.eager);
        self.on(at, |node, now| loop {
            match node.replica.next_work(lane) {
                Some(Work::Commit {
                    transaction,
                    places,
                }) => node.rows.commit(&transaction, &places).unwrap(),
                Some(Work::Answer { token, outcome }) => {
                    answer = Some((token, outcome.is_ok()));
                    break;
                }
                Some(Work::Settled { lsn }) => node.replica.settled(now, &node.rows, lsn),
                None => break,
            }
            if !eager {
                break;
            }
        });
        if let Some((token, done)) = answer {
            self.answered(token, done);
        }
    }

    fn answered(&mut self, token: u64, done: bool) {
        let push = &mut self.pushes[(token % PUSHES as u64) as usize];
        if let Some(at) = push.waits.iter().position(|(waited, _)| *waited == token) {
            let (_, slots) = push.waits.remove(at);
            if done {
                push.acknowledged.extend(slots);
            }
        }
    }

    fn send(&mut self, push: usize, to: usize) {
        let busy = self.pushes[push].waits.iter();
        let busy: Vec<u32> = busy.flat_map(|(_, slots)| slots.clone()).collect();
        let slots = self.missing(push, to, &busy);
        let count = self.slots;
        let keys: Vec<u64> = slots.iter().map(|&slot| key(count, push, slot)).collect();
        let change = Change::Update {
            learning_rate_scale: 1.0,
        };
        let batch = Batch::new(&keys, &vec![-1.0; keys.len()]);
        let transaction =
            Transaction::new(space(count), id(push), 0, table_id("t"), change, batch).unwrap();
        let transaction = Arc::new(transaction);
        let one = &mut self.pushes[push];
        one.attempts += 1;
        let token = one.attempts * PUSHES as u64 + push as u64;
        one.waits.push((token, slots));
        let mut outcome = Ok(None);
        self.on(to, |node, now| {
            outcome = node.replica.push(now, &node.rows, token, &transaction);
        });
        match outcome {
            Ok(None) => {}
            Ok(Some(_)) => self.answered(token, true),
            Err(Refusal::NotReady(reason)) => {
                assert!(!reason.contains("moved on"), "{reason}");
                self.answered(token, false);
            }
            Err(Refusal::NotMaster { .. } | Refusal::InFlight) => self.answered(token, false),
            Err(other) => panic!("push {push} at {to}: {other}"),
        }
    }

    /// What must hold in every state; an error says what does not.
    pub fn check(&self) -> Result<(), String> {
        for slot in 0..self.slots {
            self.check_acknowledged(slot)?;
            self.check_equal(slot)?;
        }
        for (at, node) in self.nodes.iter().enumerate() {
            let Some(node) = node else { continue };
            if node.replica.counters.unfit_promotions > 0 {
                return Err(format!("node {at} was made master without being in sync"));
            }
            self.check_once(at, node)?;
            self.check_reads(at, node)?;
        }
        Ok(())
    }

    /// I1: what is acknowledged is in every in-sync replica.
    fn check_acknowledged(&self, slot: u32) -> Result<(), String> {
        let set = &self.newest().0[slot as usize];
        let mut holders = set.in_sync.clone();
        holders.extend(set.master);
        for (push, one) in self.pushes.iter().enumerate() {
            if !one.acknowledged.contains(&slot) {
                continue;
            }
            for &holder in &holders {
                let node = self.nodes[holder].as_ref();
                if node.is_some_and(|node| !node.holds(id(push), slot)) {
                    return Err(format!(
                        "push {push} was acknowledged in slot {slot}, and node {holder}, which is in sync, lacks it"
                    ));
                }
            }
        }
        Ok(())
    }

    /// I2: each push changes each of its rows once.
    fn check_once(&self, at: usize, node: &Node) -> Result<(), String> {
        let engine = node.rows.0.borrow();
        let table = engine.table(table_id("t")).unwrap();
        for (push, slots) in self.touches.iter().enumerate() {
            for &slot in slots {
                if node.replica.slot_state(slot).2 {
                    continue; // A copy that is under way.
                }
                let mut value = [0.0];
                table.read(&[key(self.slots, push, slot)], &mut value);
                let applied = f32::from(u8::from(Node::applied(&engine, id(push), slot)));
                if value[0] != applied {
                    return Err(format!(
                        "push {push} counts {} times in slot {slot} of node {at}, remembered {applied} times",
                        value[0]
                    ));
                }
            }
        }
        Ok(())
    }

    /// I4: at the same position the same bytes.
    fn check_equal(&self, slot: u32) -> Result<(), String> {
        let mut seen: Vec<(usize, u64, u64)> = Vec::new();
        for (at, node) in self.nodes.iter().enumerate() {
            let Some(node) = node else { continue };
            if node.replica.slot_state(slot).2 {
                continue;
            }
            let engine = node.rows.0.borrow();
            let (position, digest) = (engine.position(slot), engine.digest(slot));
            for &(other, known, known_digest) in &seen {
                if known == position && known_digest != digest {
                    return Err(format!(
                        "slot {slot} differs between nodes {other} and {at} at position {position}"
                    ));
                }
            }
            seen.push((at, position, digest));
        }
        Ok(())
    }

    /// I3, I5: who may answer reads has applied everything that was acknowledged.
    fn check_reads(&self, at: usize, node: &Node) -> Result<(), String> {
        if self.now >= node.replica.serving_until() {
            return Ok(());
        }
        let engine = node.rows.0.borrow();
        for slot in 0..self.slots {
            if engine.standing(slot) != Standing::Serving {
                continue;
            }
            for (push, one) in self.pushes.iter().enumerate() {
                let told = one.acknowledged.contains(&slot);
                if told && !Node::applied(&engine, id(push), slot) {
                    return Err(format!(
                        "node {at} may answer reads of slot {slot} without push {push}, which was acknowledged"
                    ));
                }
            }
        }
        Ok(())
    }
}
