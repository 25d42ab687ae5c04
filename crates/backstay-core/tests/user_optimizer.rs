//! Optimizers that users write: against `NumPy`, against the built-in ones, on replicas.

// What fails in a helper is a failed test; exact numbers are the point.
#![allow(clippy::unwrap_used, clippy::float_cmp)]

mod engine_support;

use std::sync::Arc;

use backstay_core::engine::Engine;
use backstay_core::error::Refusal;
use backstay_core::hash::table_id;
use backstay_core::optimizer::{Optimizer, OptimizerStamp, RowOptimizer};
use backstay_core::spec::TableSpec;
use backstay_core::transaction::{Batch, Change, Transaction};
use engine_support::*;
use proptest::prelude::*;
use serde::Deserialize;
use serde_json::{json, Value};

#[derive(Deserialize)]
struct Step {
    gradient: Vec<f32>,
    row: Vec<f32>,
}

#[derive(Deserialize)]
struct Case {
    optimizer: Value,
    exact: bool,
    weights: Vec<f32>,
    steps: Vec<Step>,
}

/// What `tools/make_user_function_vectors.py` wrote.
fn cases() -> Vec<Case> {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../tests/vectors/user_functions.json"
    );
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// A function of the vectors, with other settings.
fn user(name: &str, learning_rate: f64, settings: &[(&str, f64)]) -> Value {
    let found = |case: &Case| case.optimizer["user"]["name"] == name;
    let mut optimizer = cases().into_iter().find(found).unwrap().optimizer;
    optimizer["user"]["learning_rate"] = json!(learning_rate);
    for &(setting, value) in settings {
        optimizer["user"]["settings"][setting] = json!(value);
    }
    optimizer
}

fn table(optimizer: &Value, dim: usize, storage: &str) -> Arc<TableSpec> {
    let spec = json!({
        "name": "t", "kind": {"sparse": {"dim": dim}}, "storage": storage,
        "initializer": {"uniform": {"low": -1.0, "high": 1.0}}, "optimizer": optimizer,
    });
    Arc::new(TableSpec::from_json(&spec.to_string()).unwrap())
}

/// A table whose rows come and go.
fn table_with(lifetime: &Value, optimizer: &Value, dim: usize, storage: &str) -> Arc<TableSpec> {
    let mut spec: Value =
        serde_json::from_str(&table(optimizer, dim, storage).canonical_json()).unwrap();
    spec["lifetime"] = lifetime.clone();
    Arc::new(TableSpec::from_json(&spec.to_string()).unwrap())
}

fn push_of(sequence: u64, keys: &[u64], values: &[f32], scale: f32) -> Arc<Transaction> {
    let like = push(1, sequence, 0, &[], 0.0);
    let change = Change::update(scale);
    let batch = Batch::new(keys, values);
    let made = Transaction::new(space(), like.id, 0, table_id("t"), change, batch);
    Arc::new(made.unwrap())
}

#[test]
fn functions_compute_what_numpy_does() {
    for case in cases() {
        let optimizer: Optimizer = serde_json::from_value(case.optimizer.clone()).unwrap();
        let name = &case.optimizer["user"]["name"];
        let mut weights = case.weights.clone();
        let mut state = vec![f32::NAN; optimizer.state_elements(weights.len())];
        optimizer.init_state(&mut state);
        for (number, step) in case.steps.iter().enumerate() {
            optimizer.update(&mut weights, &mut state, &step.gradient, 1.0);
            for (at, (got, wanted)) in weights.iter().chain(&state).zip(&step.row).enumerate() {
                let close = (got - wanted).abs() <= 1e-6 * wanted.abs().max(1e-3);
                let fits = if case.exact {
                    got.to_bits() == wanted.to_bits()
                } else {
                    close
                };
                assert!(fits, "{name}, step {number}, {at}: {got} is not {wanted}");
            }
            assert_eq!(weights.len() + state.len(), step.row.len());
        }
    }
}

/// The built-in optimizers that the vectors have as functions.
fn twins(a: f64, b: f64) -> Vec<(Value, Value)> {
    vec![
        (
            json!({"adagrad": {"learning_rate": a, "epsilon": b}}),
            user("adagrad", a, &[("epsilon", b)]),
        ),
        (
            json!({"ftrl": {"learning_rate": a, "l1": b, "l2": 0.3}}),
            user("ftrl", a, &[("l1", b), ("l2", 0.3)]),
        ),
        (
            json!({"ftrl": {"learning_rate": a, "l1": b, "learning_rate_power": -0.4}}),
            user(
                "ftrl",
                a,
                &[("l1", b), ("l2", 0.0), ("learning_rate_power", -0.4)],
            ),
        ),
    ]
}

fn assert_equal_rows(one: &Engine, other: &Engine, what: &str) {
    for slot in 0..SLOTS {
        let id = table_id("t");
        let rows = (one.export_slot(id, slot), other.export_slot(id, slot));
        assert_eq!(rows.0, rows.1, "{what}");
        assert_eq!(one.digest(slot), other.digest(slot), "{what}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Bit for bit, with repeated keys in a push, rows that are new and rows that exist, in every
    /// storage, however pushes are cut.
    #[test]
    fn adagrad_and_ftrl_equal_the_built_in_ones(
        pushes in prop::collection::vec(prop::collection::vec(0u64..60, 1..150), 1..4),
        dim in prop::sample::select(vec![1usize, 3, 16, 70]),
        storage in prop::sample::select(vec!["float32", "bfloat16", "float16"]),
        rate in 0.01f64..1.0,
        b in 1e-6f64..0.5,
    ) {
        for (built_in, function) in twins(rate, b) {
            let (mut one, mut other) =
                (engine(&table(&built_in, dim, storage)), engine(&table(&function, dim, storage)));
            for (sequence, keys) in pushes.iter().enumerate() {
                let mut keys = keys.clone();
                // Equal keys stay, side by side or with others of their slot between them.
                keys.sort_by_key(|&key| space().slot_of(key));
                let value = |at: usize| ((at * 37 + sequence) % 101) as f32 / 50.0 - 1.0;
                let values: Vec<f32> = (0..keys.len() * dim).map(value).collect();
                let push = push_of(sequence as u64, &keys, &values, 0.5);
                apply(&mut one, &push).unwrap();
                apply(&mut other, &push).unwrap();
            }
            assert_equal_rows(&one, &other, &function.to_string());
        }
    }

    /// The same where rows come and go: admission, statistics and eviction go by the keys alone.
    #[test]
    fn functions_equal_the_built_in_ones_in_a_table_with_a_lifetime(
        pushes in prop::collection::vec(prop::collection::vec(0u64..300, 1..150), 1..6),
        dim in prop::sample::select(vec![1usize, 3, 16]),
        storage in prop::sample::select(vec!["float32", "bfloat16"]),
        policy in prop::sample::select(vec![
            r#"{"admission":{"after":{"occurrences":2}},"expiry":{"unseen_seconds":4}}"#,
            r#"{"admission":{"score":{"at_least":1.5}},"unadmitted":"zeros"}"#,
            r#"{"capacity":{"rows":128,"evict":"least_frequent"}}"#,
            r#"{"admission":{"probability":{"probability":0.4}},"expiry":{"score_below":0.1}}"#,
        ]),
    ) {
        let lifetime: Value = serde_json::from_str(policy).unwrap();
        for (built_in, function) in twins(0.3, 0.1) {
            let spec = |optimizer| table_with(&lifetime, optimizer, dim, storage);
            let specs = [spec(&built_in), spec(&function)];
            let counts = usize::from(policy.contains("score")) * 2;
            let mut engines = [engine(&specs[0]), engine(&specs[1])];
            for (sequence, keys) in pushes.iter().enumerate() {
                let mut keys = keys.clone();
                keys.sort_by_key(|&key| space().slot_of(key));
                // Behind the gradients shows and clicks, which are not negative.
                let value = |at: usize| match at % (dim + counts) {
                    inner if inner < dim => ((at * 37 + sequence) % 101) as f32 / 50.0 - 1.0,
                    _ => (at % 3) as f32,
                };
                let values: Vec<f32> = (0..keys.len() * (dim + counts)).map(value).collect();
                for (engine, spec) in engines.iter_mut().zip(&specs) {
                    let mut push = Transaction::clone(&push_of(sequence as u64, &keys, &values, 0.5));
                    if counts > 0 {
                        push.change = Change::update(0.5).counted();
                    }
                    push.stamp_by(spec, space(), 10 + sequence as u32);
                    apply(engine, &Arc::new(push)).unwrap();
                }
            }
            assert_equal_rows(&engines[0], &engines[1], &function.to_string());
        }
    }

    /// A replica that applies slot by slot has the bytes of one that applies whole pushes.
    #[test]
    fn replicas_are_equal_however_a_push_is_cut(
        keys in prop::collection::vec(0u64..200, 1..300),
        at in 0usize..4,
    ) {
        let case = &cases()[at];
        let dim = 5;
        let spec = table(&case.optimizer, dim, "float32");
        let (mut whole, mut by_slot) = (engine(&spec), engine(&spec));
        let mut keys = keys;
        keys.sort_by_key(|&key| space().slot_of(key));
        for sequence in 0..3u64 {
            let value = |at: usize| ((at as u64 * 31 + sequence) % 89) as f32 / 30.0 - 1.0;
            let values: Vec<f32> = (0..keys.len() * dim).map(value).collect();
            let push = push_of(sequence, &keys, &values, 1.0);
            apply(&mut whole, &push).unwrap();
            let (_, places) = stage(&mut by_slot, &push, 1).unwrap();
            for place in places.iter().rev() {
                by_slot.commit_through(place.run.slot, place.position).unwrap();
            }
        }
        assert_equal_rows(&whole, &by_slot, &case.optimizer.to_string());
    }
}

fn stamped(master: &Engine, push: &Arc<Transaction>) -> Arc<Transaction> {
    let mut push = (**push).clone();
    master.stamp(&mut push, 0).unwrap();
    Arc::new(push)
}

/// A change of settings has one place in the order, also for a replica that never hears of it.
#[test]
fn settings_change_and_the_function_stays() {
    let old = spec(&user("adagrad", 0.1, &[]).to_string());
    let new = spec(&user("adagrad", 0.7, &[("epsilon", 0.5)]).to_string());
    let (mut master, mut backup) = (engine(&old), engine(&old));
    let before = stamped(&master, &push(1, 0, 0, &[5], -1.0));
    let (_, places) = stage(&mut master, &before, 1).unwrap();
    stage(&mut backup, &before, 1).unwrap();
    master.change_settings(&new).unwrap();
    let after = stamped(&master, &push(1, 1, 0, &[5], -1.0));
    backup.check(&after).unwrap();
    let (_, later) = stage(&mut master, &after, 1).unwrap();
    stage(&mut backup, &after, 1).unwrap();
    for (push, places) in [(&before, &places), (&after, &later)] {
        master.commit(push, places).unwrap();
        backup.commit(push, places).unwrap();
    }
    assert_equal_rows(&master, &backup, "settings");
    let first = 0.1f32 / (1.0 + 1e-6);
    assert_eq!(read(&backup, 5), first + 0.7 / (2f32.sqrt() + 0.5));
    let words = after.optimizer.unwrap().words();
    assert_eq!(OptimizerStamp::from_words(words), after.optimizer);
    // Another function in a table with rows is refused, as is a setting of another name.
    let text = new.canonical_json();
    for (from, to, message) in [
        (r#"{"sqrt":6}"#, r#"{"abs":6}"#, "optimizer.user.expression"),
        (
            r#""initial":0.0"#,
            r#""initial":1.0"#,
            "optimizer.user.states",
        ),
        ("epsilon", "delta", "optimizer.user.settings"),
    ] {
        let other = TableSpec::from_json(&text.replace(from, to)).unwrap();
        let refused = master
            .change_settings(&Arc::new(other))
            .unwrap_err()
            .to_string();
        assert!(refused.contains(message), "{refused}");
    }
}

/// The table's rows would not fit what another function does with them.
#[test]
fn a_push_with_the_stamp_of_another_function_is_refused() {
    let adagrad = engine(&spec(&user("adagrad", 0.1, &[]).to_string()));
    let text = user("adagrad", 0.1, &[]).to_string();
    let other = engine(&spec(&text.replace(r#"{"sqrt":6}"#, r#"{"abs":6}"#)));
    let built_in = engine(&spec(r#"{"sgd": {"learning_rate": 1.0}}"#));
    let bare = push(1, 0, 0, &[5], -1.0);
    for (one, another) in [
        (&adagrad, &other),
        (&adagrad, &built_in),
        (&built_in, &adagrad),
    ] {
        let refused = one.check(&stamped(another, &bare));
        assert!(
            matches!(refused, Err(Refusal::InvalidRequest(_))),
            "{refused:?}"
        );
        one.check(&stamped(one, &bare)).unwrap();
    }
    let mut forced = adagrad.clone();
    let push = stamped(&other, &bare);
    assert!(apply(&mut forced, &push).is_err());
}

/// Whichever NaN a machine makes, the same one is stored.
#[test]
fn every_nan_is_stored_with_the_same_bits() {
    let function = json!({"user": {"name": "f", "expression": {
        "nodes": [{"input": "weights"}, {"sub": [0, 0]}, {"div": [1, 1]}, {"neg": 2}], "results": [3],
    }}});
    let mut engine = engine(&table(&function, 2, "float32"));
    apply(&mut engine, &push_of(0, &[1], &[1.0, 1.0], 1.0)).unwrap();
    let mut out = [0.0; 2];
    engine.read(table_id("t"), &[1], &mut out).unwrap();
    assert_eq!(out.map(f32::to_bits), [0x7fc0_0000; 2]);
}

fn refusal(optimizer: &Value) -> String {
    let spec = json!({"name": "t", "kind": {"sparse": {"dim": 2}}, "optimizer": optimizer});
    TableSpec::from_json(&spec.to_string())
        .unwrap_err()
        .to_string()
}

#[test]
fn bad_functions_are_refused_by_name() {
    let of = |field: &str, value: Value| {
        let mut optimizer = user("adagrad", 0.1, &[]);
        optimizer["user"][field] = value;
        refusal(&optimizer)
    };
    let state = |name: &str| json!([{"name": name, "per": "element"}]);
    let many: Vec<Value> = (0..9)
        .map(|n| json!({"name": format!("s{n}"), "per": "row"}))
        .collect();
    for (field, value, message) in [
        ("name", json!("a b"), "'a b' is no name of a function"),
        ("learning_rate", json!(-1), "learning_rate is"),
        ("settings", json!({"epsilon": 1e31}), "epsilon is 1e31"),
        (
            "settings",
            json!({"weights": 1}),
            "'weights' names two things",
        ),
        (
            "settings",
            json!({"accumulator": 1}),
            "'accumulator' names two things",
        ),
        (
            "settings",
            json!({}),
            "node 4: no setting 'epsilon'; there are none",
        ),
        ("states", state("gradient"), "'gradient' names two things"),
        ("states", state("time"), "'time' names two things"),
        ("states", json!([]), "node 2: no input 'accumulator'"),
        ("states", json!(many), "9 of state; allowed: up to 8"),
        (
            "states",
            json!([{"name": "a", "per": "slot"}]),
            "unknown variant `slot`",
        ),
        (
            "states",
            json!([{"name": "a", "per": "row", "x": 1}]),
            "unknown field `x`",
        ),
        ("code", json!("import os"), "unknown field `code`"),
    ] {
        let found = of(field, value);
        assert!(found.contains(message), "{field}: {found}");
    }
}

/// What a pull returns is computed from what is stored, and stores nothing.
#[test]
fn a_pull_returns_what_its_function_says() {
    let clip = json!({"name": "clip", "settings": {"limit": 0.25}, "expression": {"nodes": [
        {"input": "weights"}, {"setting": "limit"}, {"minimum": [0, 1]}, {"neg": 1},
        {"maximum": [2, 3]},
    ], "results": [4]}});
    let sgd = json!({"sgd": {"learning_rate": 1.0}});
    for dim in [1usize, 16, 700] {
        let plain = table(&sgd, dim, "float32");
        let mut with_pull: Value = serde_json::from_str(&plain.canonical_json()).unwrap();
        with_pull["pull"] = clip.clone();
        let with_pull = Arc::new(TableSpec::from_json(&with_pull.to_string()).unwrap());
        let (mut one, mut other) = (engine(&plain), engine(&with_pull));
        let keys = by_slot((0..100).collect());
        for engine in [&mut one, &mut other] {
            let values = vec![0.125; 50 * dim];
            apply(engine, &push_of(0, &keys[..50], &values, 1.0)).unwrap();
        }
        assert_equal_rows(&one, &other, "stored");
        let mut all = [vec![0.0; 100 * dim], vec![0.0; 100 * dim]];
        one.read(table_id("t"), &keys, &mut all[0]).unwrap();
        other.read(table_id("t"), &keys, &mut all[1]).unwrap();
        let [plain_rows, pulled] = all;
        assert!(plain_rows.iter().any(|weight| weight.abs() > 0.25));
        let wanted: Vec<f32> = plain_rows
            .iter()
            .map(|one| one.clamp(-0.25, 0.25))
            .collect();
        assert_eq!(pulled, wanted);
        // It may come, change and go.
        other.change_settings(&plain).unwrap();
        let mut again = vec![0.0; 100 * dim];
        other.read(table_id("t"), &keys, &mut again).unwrap();
        assert_eq!(again, plain_rows);
        other.change_settings(&with_pull).unwrap();
    }
}
