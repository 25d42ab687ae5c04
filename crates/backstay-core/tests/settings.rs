//! Settings of a table that change while it is pushed to: each transaction is applied under those
//! that its master took it on under, by every replica, whatever that one knows of the table.

// What fails in a helper is a failed test; exact numbers are the point.
#![allow(clippy::unwrap_used, clippy::float_cmp)]

mod engine_support;

use std::sync::Arc;

use backstay_core::engine::{CopyPiece, Engine};
use backstay_core::error::Refusal;
use backstay_core::hash::table_id;
use backstay_core::spec::TableSpec;
use backstay_core::transaction::{Change, StagedRun, Transaction};
use engine_support::*;
use proptest::prelude::*;

fn momentum(rate: f64, share: f64) -> Arc<TableSpec> {
    spec(&format!(
        r#"{{"momentum":{{"learning_rate":{rate},"momentum":{share}}}}}"#
    ))
}

fn adagrad(rate: f64, initial: f64) -> Arc<TableSpec> {
    spec(&format!(
        r#"{{"adagrad":{{"learning_rate":{rate},"initial_accumulator":{initial}}}}}"#
    ))
}

/// A push as a master takes it on.
fn stamped(master: &Engine, push: &Arc<Transaction>) -> Arc<Transaction> {
    let mut push = (**push).clone();
    master.stamp(&mut push, 0).unwrap();
    Arc::new(push)
}

fn assert_equal(one: &Engine, other: &Engine) {
    for slot in 0..SLOTS {
        assert_eq!(one.place(slot), other.place(slot));
        assert_eq!(one.digest(slot), other.digest(slot));
    }
}

#[test]
fn a_backup_applies_under_the_settings_of_its_master() {
    let (mut master, mut backup) = (engine(&momentum(1.0, 0.5)), engine(&momentum(1.0, 0.5)));
    let keys = by_slot((0..20).collect());
    for (sequence, rate) in [(0, 1.0), (1, 0.25)] {
        // The backup never hears of the change.
        master.change_settings(&momentum(rate, 0.5)).unwrap();
        let push = stamped(&master, &push(1, sequence, 0, &keys, -1.0));
        backup.check(&push).unwrap();
        apply(&mut master, &push).unwrap();
        apply(&mut backup, &push).unwrap();
    }
    assert_equal(&master, &backup);
    // v = 1, then 1.5: 1 * 1 + 0.25 * 1.5.
    assert_eq!(read(&backup, 7), 1.375);
}

/// What is staged keeps the settings it was taken on under, whichever master commits it.
#[test]
fn a_new_master_keeps_the_settings_of_what_is_staged() {
    let (mut master, mut backup) = (engine(&momentum(1.0, 0.5)), engine(&momentum(1.0, 0.5)));
    let old = stamped(&master, &push(1, 0, 0, &[5], -1.0));
    let (_, places) = stage(&mut master, &old, 1).unwrap();
    stage(&mut backup, &old, 1).unwrap();
    backup.change_settings(&momentum(8.0, 0.5)).unwrap();
    backup.commit_through(space().slot_of(5), 1).unwrap();
    master.commit(&old, &places).unwrap();
    assert_equal(&master, &backup);
    let new = stamped(&backup, &push(1, 1, 0, &[5], -1.0));
    apply(&mut backup, &new).unwrap();
    assert_eq!((read(&master, 5), read(&backup, 5)), (1.0, 13.0));
}

/// A row that is made by new weights gets the state that its master's settings give.
#[test]
fn a_row_begins_with_the_state_of_the_masters_settings() {
    let (mut master, mut backup) = (engine(&adagrad(1.0, 0.0)), engine(&adagrad(1.0, 0.0)));
    master.change_settings(&adagrad(1.0, 4.0)).unwrap();
    let mut assign = (*push(1, 0, 0, &[5], 2.0)).clone();
    assign.change = Change::Assign {
        only_if_absent: false,
    };
    let assign = stamped(&master, &Arc::new(assign));
    apply(&mut master, &assign).unwrap();
    apply(&mut backup, &assign).unwrap();
    assert_equal(&master, &backup);
}

/// Whose steps count may change on a table with rows: their state is the same under both rules.
#[test]
fn the_rule_of_steps_changes_with_a_push() {
    let adam = |steps: &str| spec(&format!(r#"{{"adam":{{"steps":"{steps}"}}}}"#));
    let (mut master, mut backup) = (engine(&adam("row")), engine(&adam("row")));
    let mut alone = engine(&adam("row"));
    for (sequence, steps) in [(0, "row"), (1, "global"), (2, "row")] {
        master.change_settings(&adam(steps)).unwrap();
        let push = push(1, sequence, 0, &[5], -1.0);
        let stamped = stamped(&master, &push);
        apply(&mut master, &stamped).unwrap();
        apply(&mut backup, &stamped).unwrap();
        apply(&mut alone, &push).unwrap();
    }
    assert_equal(&master, &backup);
    assert_ne!(read(&master, 5), read(&alone, 5));
}

#[test]
fn a_push_of_another_node_needs_settings_that_fit() {
    let backup = engine(&momentum(1.0, 0.5));
    let bare = push(1, 0, 0, &[5], -1.0);
    assert!(matches!(
        backup.check(&bare),
        Err(Refusal::InvalidRequest(_))
    ));
    let other = stamped(&engine(&counter()), &bare);
    assert!(matches!(
        backup.check(&other),
        Err(Refusal::InvalidRequest(_))
    ));
    backup.check(&stamped(&backup, &bare)).unwrap();
}

#[test]
fn settings_that_change_the_rows_are_refused() {
    let mut engine = engine(&momentum(1.0, 0.5));
    let refused = engine.change_settings(&counter()).unwrap_err();
    assert!(matches!(refused, Refusal::TableConflict(_)), "{refused}");
    assert!(refused.to_string().contains("optimizer"), "{refused}");
    let text = momentum(1.0, 0.5).canonical_json();
    let wider = text.replace(r#""dim":3"#, r#""dim":4"#);
    let wider = Arc::new(TableSpec::from_json(&wider).unwrap());
    let refused = engine.change_settings(&wider).unwrap_err().to_string();
    assert!(
        refused.contains("kind.sparse.dim: 3 here, 4 there"),
        "{refused}"
    );
    assert_eq!(
        engine.table(table_id("t")).unwrap().spec(),
        &momentum(1.0, 0.5)
    );
}

/// A step of a slot's life with two replicas and one that joins.
#[derive(Debug, Clone)]
enum Step {
    /// Settings come to the master, to the backup, or to both; each hears in its own time.
    Change {
        rate: u32,
        share: u32,
        master: bool,
        backup: bool,
    },
    Push {
        keys: Vec<u64>,
    },
    /// The oldest staged push is applied by the master; by the backup, too, or later.
    Commit {
        by_backup: bool,
    },
    /// What is staged is undone, and taken on again.
    RollBack,
    /// The backup takes over what is staged, and the roles change.
    FailOver,
    /// The backup is lost, and copied anew.
    Copy,
}

fn step() -> impl Strategy<Value = Step> {
    let change = (0u32..64, 0u32..64, any::<bool>(), any::<bool>());
    prop_oneof![
        3 => change.prop_map(|(rate, share, master, backup)| Step::Change { rate, share, master, backup }),
        6 => prop::collection::vec(0u64..12, 1..8).prop_map(|keys| Step::Push { keys }),
        4 => any::<bool>().prop_map(|by_backup| Step::Commit { by_backup }),
        1 => Just(Step::RollBack),
        1 => Just(Step::FailOver),
        1 => Just(Step::Copy),
    ]
}

struct Pair {
    master: Engine,
    backup: Engine,
    /// Taken on and not applied by the master, in order.
    staged: Vec<(Arc<Transaction>, Vec<StagedRun>)>,
    /// The settings and the pushes as the master applied them, one after the other.
    applied: Vec<Arc<Transaction>>,
    sequence: u64,
}

impl Pair {
    fn new() -> Self {
        Self {
            master: engine(&momentum(1.0, 0.5)),
            backup: engine(&momentum(1.0, 0.5)),
            staged: Vec::new(),
            applied: Vec::new(),
            sequence: 0,
        }
    }

    fn take_on(&mut self, bare: &Arc<Transaction>) {
        let push = stamped(&self.master, bare);
        self.backup.check(&push).unwrap();
        let (_, places) = stage(&mut self.master, &push, 1).unwrap();
        assert_eq!(self.backup.stage(&push, &places, 1), None);
        self.staged.push((push, places));
    }

    fn commit(&mut self, by_backup: bool) {
        if self.staged.is_empty() {
            return;
        }
        let (push, places) = self.staged.remove(0);
        self.master.commit(&push, &places).unwrap();
        if by_backup {
            // It applies what is staged before, too.
            self.backup.commit(&push, &places).unwrap();
        }
        self.applied.push(push);
    }

    fn bring_up(&mut self) {
        while !self.staged.is_empty() {
            self.commit(true);
        }
        for slot in 0..SLOTS {
            let (position, _) = self.master.place(slot);
            self.backup.commit_through(slot, position).unwrap();
        }
    }

    fn do_step(&mut self, step: Step) {
        match step {
            Step::Change {
                rate,
                share,
                master,
                backup,
            } => {
                let next = momentum(f64::from(rate) / 64.0, f64::from(share) / 64.0);
                if master {
                    self.master.change_settings(&next).unwrap();
                }
                if backup {
                    self.backup.change_settings(&next).unwrap();
                }
            }
            Step::Push { keys } => {
                let bare = push(1, self.sequence, self.sequence, &by_slot(keys), -1.0);
                self.sequence += 1;
                self.take_on(&bare);
            }
            Step::Commit { by_backup } => self.commit(by_backup),
            Step::RollBack => {
                let undone = std::mem::take(&mut self.staged);
                for (_, places) in undone.iter().rev() {
                    for place in places {
                        self.master.discard_from(place.run.slot, place.position);
                        self.backup.discard_from(place.run.slot, place.position);
                    }
                }
                for (push, _) in &undone {
                    self.take_on(push);
                }
            }
            Step::FailOver => {
                self.bring_up();
                for slot in 0..SLOTS {
                    assert_eq!(self.master.digest(slot), self.backup.digest(slot));
                }
                std::mem::swap(&mut self.master, &mut self.backup);
            }
            Step::Copy => {
                self.backup = engine(&momentum(1.0, 0.5));
                for slot in 0..SLOTS {
                    let mut copy = self.master.begin_copy(slot);
                    while let CopyPiece::Rows(table, (keys, weights, state)) =
                        self.master.read_copy(slot, &mut copy.rows, u64::MAX)
                    {
                        self.backup
                            .add_rows(table, slot, (&keys[..], &weights[..], &state[..]))
                            .unwrap();
                    }
                    self.backup.set_memory(slot, &copy.memory);
                }
                for (push, places) in &self.staged {
                    assert_eq!(self.backup.stage(push, places, 1), None);
                }
            }
        }
    }
}

proptest! {
    /// I4 with settings that change: replicas are equal, and their rows are those of one engine
    /// that applies the same pushes, each under the settings it was taken on under.
    #[test]
    fn replicas_are_equal_whenever_settings_reach_them(steps in prop::collection::vec(step(), 1..60)) {
        let mut pair = Pair::new();
        for step in steps {
            pair.do_step(step);
        }
        pair.bring_up();
        assert_equal(&pair.master, &pair.backup);
        let mut alone = engine(&momentum(1.0, 0.5));
        for push in &pair.applied {
            let of_table = &momentum(1.0, 0.5).optimizer;
            let settings = of_table.under(&push.optimizer.unwrap()).unwrap();
            let text = serde_json::to_string(&settings).unwrap();
            alone.change_settings(&spec(&text)).unwrap();
            let mut bare = (**push).clone();
            bare.optimizer = None;
            apply(&mut alone, &Arc::new(bare)).unwrap();
        }
        assert_equal(&pair.master, &alone);
    }
}
