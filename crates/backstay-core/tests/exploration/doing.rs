//! How messages arrive, connections break, work is done and clients send.

use super::*;

impl World {
    pub(super) fn deliver(&mut self, from: usize, to: usize) {
        let eager = self.budget.eager;
        let link = Arc::make_mut(&mut self.links[from][to]);
        match link.there.pop_front().unwrap().1 {
            Item::Hello => {
                // Answers to an earlier connection's messages go nowhere, also while a new
                // one is open whose beginning has not been read.
                let mut later = link.there.iter();
                let newest = !later.any(|(_, item)| matches!(item, Item::Hello));
                link.heard = link.up && newest;
                self.on(to, |node, _| node.replica.master_connected(instance(from)));
            }
            Item::Message(message) => self.on(to, |node, now| {
                node.replica
                    .receive(now, &node.rows, instance(from), message);
                let next = |node: &mut Node| {
                    let work = eager.then(|| node.next_work(instance(from)));
                    work.flatten()
                };
                while let Some(work) = next(node) {
                    if let Work::Commit {
                        transaction,
                        places,
                        ..
                    } = work
                    {
                        node.rows.commit(&transaction, &places).unwrap();
                    }
                }
            }),
        }
    }

    pub(super) fn sever(&mut self, from: usize, to: usize, refused: bool) {
        let link = Arc::make_mut(&mut self.links[from][to]);
        link.up = false;
        link.heard = false;
        link.back.clear();
        link.read_leases.clear();
        if !self.budget.late || refused {
            link.there.clear();
            link.beats.clear();
        }
        self.on(from, |node, now| {
            node.replica
                .link_down(now, &node.rows, instance(to), refused);
        });
    }

    pub(super) fn work(&mut self, at: usize, queue: NodeId) {
        let (mut answer, eager) = (None, self.budget.eager);
        self.on(at, |node, now| loop {
            match node.next_work(queue) {
                Some(Work::Commit {
                    transaction,
                    places,
                    ..
                }) => {
                    node.rows.commit(&transaction, &places).unwrap();
                }
                Some(Work::Answer {
                    token,
                    outcome,
                    alone,
                }) => {
                    let outcome = node.replica.acknowledge(now, outcome, alone);
                    answer = Some((token, outcome.is_ok()));
                    break;
                }
                Some(Work::Recovered { lsn }) => node.replica.recovered(now, &node.rows, lsn),
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

    pub(super) fn answered(&mut self, token: u64, done: bool) {
        let count = self.pushes.len() as u64;
        let push = &mut self.pushes[(token % count) as usize];
        if let Some(at) = push.waits.iter().position(|(waited, _)| *waited == token) {
            let (_, slots) = push.waits.remove(at);
            if done {
                push.acknowledged.extend(slots);
            }
        }
    }

    /// Whether a push may remove the rows of the first.
    pub(super) fn deletes(&self, push: usize) -> bool {
        (self.budget.deletes || self.budget.expires) && push == 1
    }

    pub(super) fn send(&mut self, push: usize, to: usize) {
        let busy = self.pushes[push].waits.iter();
        let busy: Vec<u32> = busy.flat_map(|(_, slots)| slots.clone()).collect();
        let slots = self.missing(push, to, &busy);
        let count = self.slots;
        let deletes = self.deletes(push);
        let of = if deletes { 0 } else { push };
        let keys: Vec<u64> = slots.iter().map(|&slot| key(count, of, slot)).collect();
        let (change, values) = if deletes && self.budget.expires {
            let thresholds = Thresholds {
                unseen_seconds: Some(3),
                ..Thresholds::default()
            };
            (Change::Expire(thresholds), Vec::new())
        } else if deletes {
            (Change::Delete, Vec::new())
        } else {
            let change = Change::update(1.0);
            (change, vec![-1.0; keys.len()])
        };
        let batch = Batch::new(&keys, &values);
        let mut transaction =
            Transaction::new(space(count), id(push), 0, table_id("t"), change, batch).unwrap();
        let pushes = self.pushes.len() as u64;
        let one = &mut self.pushes[push];
        one.attempts += 1;
        // The table's settings change between any two attempts.
        let settings = Optimizer::Sgd(Sgd {
            learning_rate: 1.0 + one.attempts as f64 / 64.0,
        });
        transaction.optimizer = Some(settings.stamp());
        if self.budget.stale {
            let sets = &self.tables.last().unwrap().0;
            let origin = |run: &Run| origin(sets[run.slot as usize].epoch, 0);
            let origins: Vec<u64> = transaction.runs().iter().map(origin).collect();
            transaction.tell_origins(&origins).unwrap();
            transaction.compensation = Compensation::Scale;
        }
        // A master's clock may be behind that of the one before.
        transaction.stamp = Stamp {
            time: 10 + 4 * push as u32 + one.attempts as u32 - 3 * to as u32,
            share: 99,
            counters: 99,
        };
        let transaction = Arc::new(transaction);
        let token = one.attempts * pushes + push as u64;
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
}
