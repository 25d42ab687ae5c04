//! Table descriptions that must be read, and hostile ones that must be refused by name.

use super::*;
use crate::optimizer::Sgd;

/// A description with one part replaced.
fn json_with(part: &str, value: &str) -> String {
    let parts = [
        ("name", r#""t""#),
        ("kind", r#"{"sparse": {"dim": 4}}"#),
        ("optimizer", r#"{"sgd": {"learning_rate": 0.1}}"#),
    ];
    let mut fields: Vec<String> = parts
        .iter()
        .filter(|(name, _)| *name != part)
        .map(|(name, value)| format!(r#""{name}": {value}"#))
        .collect();
    if !part.is_empty() {
        fields.push(format!(r#""{part}": {value}"#));
    }
    format!("{{{}}}", fields.join(", "))
}

fn read(part: &str, value: &str) -> TableSpec {
    TableSpec::from_json(&json_with(part, value)).unwrap()
}

/// The message with which a description is refused.
fn refusal(part: &str, value: &str) -> String {
    TableSpec::from_json(&json_with(part, value))
        .unwrap_err()
        .to_string()
}

#[test]
fn defaults_are_filled_in() {
    assert_eq!(
        read("", "").canonical_json(),
        concat!(
            r#"{"name":"t","kind":{"sparse":{"dim":4}},"storage":"float32","#,
            r#""initializer":{"zeros":{}},"seed":0,"#,
            r#""optimizer":{"sgd":{"learning_rate":0.1}},"non_finite":"refuse"}"#
        )
    );
    let dense = read("kind", r#"{"dense": {"shape": [784, 10]}}"#);
    assert_eq!(
        dense.kind,
        TableKind::Dense {
            shape: vec![784, 10],
            block_elements: 4096
        }
    );
    assert_eq!(
        (
            dense.row_elements(),
            dense.dense_elements(),
            dense.dense_blocks()
        ),
        (4096, 7840, 2)
    );
    let sparse = read("", "");
    assert_eq!(
        (
            sparse.row_elements(),
            sparse.dense_elements(),
            sparse.dense_blocks()
        ),
        (4, 0, 0)
    );
}

/// As releases before user functions wrote it: their checkpoints and records are compared with it.
#[test]
fn a_lifetime_without_functions_is_written_as_ever() {
    let given = r#"{"admission": {"score": {"at_least": 2}}, "expiry": {"score_below": 0.5}}"#;
    let canonical = read("lifetime", given).canonical_json();
    let wanted = concat!(
        r#""lifetime":{"admission":{"score":{"at_least":2.0}},"unadmitted":"initial","#,
        r#""expiry":{"unseen_seconds":null,"score_below":0.5,"norm_below":null,"every_seconds":null},"#,
        r#""capacity":null,"score":{"nonclick_coefficient":0.1,"click_coefficient":1.0,"#,
        r#""decay":1.0,"decay_every_seconds":null}}}"#
    );
    assert!(canonical.ends_with(wanted), "{canonical}");
    assert_eq!(
        TableSpec::from_json(&canonical).unwrap().canonical_json(),
        canonical
    );
    let plain = read("lifetime", r#"{"expiry": {"norm_below": 1}}"#).canonical_json();
    assert!(
        plain.ends_with(r#""capacity":null,"score":null}}"#),
        "{plain}"
    );
}

#[test]
fn functions_of_a_lifetime_suit_it() {
    let function = |nodes: &str| {
        let result = nodes.matches('{').count() - 1;
        format!(r#"{{"name": "f", "expression": {{"nodes": [{nodes}], "results": [{result}]}}}}"#)
    };
    let expiry = r#""expiry": {"score_below": 1}"#;
    let with_score = |score: &str| format!(r#"{{{expiry}, "score": {{{score}}}}}"#);
    let seen = function(r#"{"input": "last_seen"}"#);
    let scored = with_score(&format!(r#""function": {seen}"#));
    let canonical = read("lifetime", &scored).canonical_json();
    assert!(canonical
        .contains(r#""score":{"decay":1.0,"decay_every_seconds":null,"function":{"name":"f","#));
    assert_eq!(
        TableSpec::from_json(&canonical).unwrap().canonical_json(),
        canonical
    );
    let mask = r#"{"input": "time"}, {"constant": 1}, {"greater": [0, 1]}"#;
    let time = function(r#"{"input": "time"}"#);
    for (lifetime, reason) in [
        (
            with_score(&format!(r#""function": {seen}, "decay": 0.5"#)),
            "lifetime.score.decay is 0.5",
        ),
        (
            with_score(&format!(r#""function": {seen}, "click_coefficient": 1"#)),
            "one of the two",
        ),
        (
            with_score(&format!(r#""function": {time}"#)),
            "lifetime.score.function is f; allowed",
        ),
        (
            with_score(&format!(r#""function": {}"#, function(mask))),
            "a mask",
        ),
        (
            format!(r#"{{"admission": {{"function": {}}}}}"#, function(mask)),
            "lifetime.admission.function is f",
        ),
        (
            format!(r#"{{"admission": {{"function": {seen}}}}}"#),
            "a mask for the row",
        ),
        (
            format!(r#"{{"expiry": {{"norm_below": 1}}, "score": {{"function": {seen}}}}}"#),
            "lifetime.score is set",
        ),
    ] {
        let refused = refusal("lifetime", &lifetime);
        assert!(refused.contains(reason), "{refused}");
    }
}

#[test]
fn the_canonical_form_is_a_fixed_point() {
    for (part, value) in [
        ("kind", r#"{"dense": {"shape": [3], "block_elements": 1}}"#),
        ("storage", r#""bfloat16""#),
        (
            "initializer",
            r#"{"uniform": {"low": -0.3333333333333333, "high": 1e-7}}"#,
        ),
        ("initializer", r#"{"xavier": {"fan_in": 1, "fan_out": 2}}"#),
        ("seed", "18446744073709551615"),
        ("optimizer", r#"{"momentum": {"learning_rate": 1}}"#),
        ("optimizer", r#"{"adagrad": {"learning_rate": 0.1}}"#),
        ("optimizer", r#"{"adam": {}}"#),
        ("optimizer", r#"{"adamw": {}}"#),
        ("optimizer", r#"{"rmsprop": {}}"#),
        ("optimizer", r#"{"adamax": {"steps": "global"}}"#),
        (
            "optimizer",
            r#"{"ftrl": {"learning_rate": 0.7000000000000001}}"#,
        ),
        ("non_finite", r#"{"clip": {"limit": 10}}"#),
    ] {
        let spec = read(part, value);
        let again = TableSpec::from_json(&spec.canonical_json()).unwrap();
        assert_eq!(again, spec);
        assert_eq!(again.canonical_json(), spec.canonical_json());
        assert_eq!(again.difference(&spec), None);
    }
}

#[test]
fn differences_are_named() {
    let here = read("optimizer", r#"{"adam": {"beta1": 0.9}}"#);
    let there = read("optimizer", r#"{"adam": {"beta1": 0.8, "epsilon": 1e-6}}"#);
    let difference = here.difference(&there).unwrap();
    assert_eq!(
        difference,
        "optimizer.adam.beta1: 0.9 here, 0.8 there; optimizer.adam.epsilon: 1e-8 here, 1e-6 there"
    );
    let other = read("", "").difference(&here).unwrap();
    assert!(other.starts_with(r#"optimizer: {"sgd":"#), "{other}");
    assert!(read("", "")
        .difference(&read("seed", "1"))
        .unwrap()
        .contains("seed: 0 here, 1 there"));
}

#[test]
fn settings_may_change_and_layouts_may_not() {
    let fixed = |here: &str, there: &str| {
        let (here, there) = (read("optimizer", here), read("optimizer", there));
        here.fixed_difference(&there)
    };
    assert_eq!(
        fixed(
            r#"{"adam": {}}"#,
            r#"{"adam": {"learning_rate": 1, "beta1": 0.5, "epsilon": 1}}"#
        ),
        None
    );
    assert_eq!(
        fixed(
            r#"{"momentum": {"learning_rate": 1}}"#,
            r#"{"momentum": {"learning_rate": 2, "nesterov": true}}"#
        ),
        None
    );
    assert_eq!(
        fixed(
            r#"{"rmsprop": {"momentum": 0.5}}"#,
            r#"{"rmsprop": {"momentum": 0.25}}"#
        ),
        None
    );
    assert_eq!(
        fixed(
            r#"{"rmsprop": {}}"#,
            r#"{"rmsprop": {"momentum": 0.5, "rho": 0.5}}"#
        )
        .unwrap(),
        "optimizer.rmsprop.momentum: 0.0 here, 0.5 there"
    );
    assert_eq!(
        fixed(
            r#"{"rmsprop": {}}"#,
            r#"{"rmsprop": {"centered": true, "rho": 0.5}}"#
        )
        .unwrap(),
        "optimizer.rmsprop.centered: false here, true there"
    );
    assert!(fixed(r#"{"sgd": {}}"#, r#"{"adam": {}}"#)
        .unwrap()
        .starts_with("optimizer: "));
    assert!(fixed(r#"{"adam": {}}"#, r#"{"adamw": {}}"#)
        .unwrap()
        .starts_with("optimizer: "));
    let clipped = read("non_finite", r#"{"clip": {"limit": 10}}"#);
    assert_eq!(read("", "").fixed_difference(&clipped), None);
    assert!(read("", "").fixed_difference(&read("seed", "1")).is_some());
}

#[test]
fn unknown_fields_and_words() {
    assert!(refusal("colour", "1").contains("unknown field `colour`"));
    assert!(refusal("kind", r#"{"sparse": {"dim": 4, "dims": 4}}"#).contains("`dims`"));
    assert!(refusal("optimizer", r#"{"adam": {"betas": 1}}"#).contains("`betas`"));
    assert!(refusal("optimizer", r#"{"lamb": {}}"#).contains("unknown variant `lamb`"));
    let rule = refusal("optimizer", r#"{"adam": {"steps": "all"}}"#);
    assert!(rule.contains("unknown variant `all`"), "{rule}");
    assert!(refusal("initializer", r#"{"zeros": {"value": 1}}"#).contains("`value`"));
    assert!(refusal("storage", r#""int8""#).contains("unknown variant `int8`"));
    assert!(refusal("non_finite", r#""ignore""#).contains("unknown variant `ignore`"));
}

#[test]
fn missing_and_repeated_fields() {
    assert!(TableSpec::from_json("{}")
        .unwrap_err()
        .to_string()
        .contains("missing field `name`"));
    assert!(refusal("kind", r#"{"sparse": {}}"#).contains("missing field `dim`"));
    let twice = json_with("seed", r#"1, "seed": 2"#);
    assert!(TableSpec::from_json(&twice)
        .unwrap_err()
        .to_string()
        .contains("duplicate field"));
    assert!(refusal("optimizer", r#"{"sgd": {}, "adam": {}}"#).starts_with("table description"));
}

#[test]
fn not_json_at_all() {
    let deep = "[".repeat(60_000);
    for text in ["", "null", "[]", "{", "\u{0}", deep.as_str()] {
        assert!(
            matches!(TableSpec::from_json(text), Err(SpecError::Parse(_))),
            "{text:.9}"
        );
    }
    let long = " ".repeat(MAX_JSON_BYTES + 1);
    assert_eq!(
        TableSpec::from_json(&long),
        Err(SpecError::TooLong {
            bytes: MAX_JSON_BYTES + 1
        })
    );
}

#[test]
fn names() {
    let most = format!("\"{}\"", "a".repeat(200));
    assert_eq!(read("name", &most).name.len(), 200);
    assert_eq!(read("name", r#""A-z_0/9.b""#).name, "A-z_0/9.b");
    let over = format!("\"{}\"", "a".repeat(201));
    for name in [
        r#""""#,
        r#""a b""#,
        r#""a\n""#,
        r#""é""#,
        r#""a\u0000""#,
        over.as_str(),
    ] {
        assert!(
            refusal("name", name).contains("allowed: 1 to 200 of A-Z"),
            "{name}"
        );
    }
}

#[test]
fn sizes() {
    assert!(refusal("kind", r#"{"sparse": {"dim": -1}}"#).contains("invalid value: integer `-1`"));
    let message = refusal("kind", r#"{"sparse": {"dim": 0}}"#);
    assert_eq!(
        message,
        r#"table "t": kind.sparse.dim is 0; allowed: 1 to 65536"#
    );
    assert!(refusal("kind", r#"{"sparse": {"dim": 65537}}"#).contains("is 65537"));
    assert!(refusal("kind", r#"{"sparse": {"dim": 18446744073709551616}}"#).contains("invalid"));
    let blocks = r#"{"dense": {"shape": [2], "block_elements": 1048577}}"#;
    assert!(refusal("kind", blocks).contains("kind.dense.block_elements is 1048577"));
}

#[test]
fn shapes_that_overflow() {
    for shape in [
        "[]",
        "[0]",
        "[2, 0]",
        "[4294967296, 4294967296]",
        "[18446744073709551615, 2]",
        "[18446744073709551615, 18446744073709551615, 0]",
        "[1099511627777]",
        "[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]",
    ] {
        let kind = format!(r#"{{"dense": {{"shape": {shape}}}}}"#);
        assert!(
            refusal("kind", &kind).contains("kind.dense.shape is ["),
            "{shape}"
        );
    }
    assert_eq!(
        read("kind", r#"{"dense": {"shape": [1099511627776]}}"#).dense_blocks(),
        1 << 28
    );
}

#[test]
fn optimizer_settings_out_of_range() {
    for (name, settings, field, value) in [
        ("sgd", r#""learning_rate": -0.1"#, "learning_rate", "-0.1"),
        ("sgd", r#""learning_rate": 1e31"#, "learning_rate", "1"),
        (
            "momentum",
            r#""learning_rate": 1, "momentum": 1"#,
            "momentum",
            "1",
        ),
        (
            "adagrad",
            r#""learning_rate": 1, "epsilon": 0"#,
            "epsilon",
            "0",
        ),
        ("adam", r#""beta1": -0.5"#, "beta1", "-0.5"),
        ("adam", r#""beta2": 1.0"#, "beta2", "1"),
        ("adamw", r#""weight_decay": -1"#, "weight_decay", "-1"),
        ("rmsprop", r#""rho": 2"#, "rho", "2"),
        ("ftrl", r#""learning_rate": 0"#, "learning_rate", "0"),
        ("ftrl", r#""learning_rate": 1, "l1": -1"#, "l1", "-1"),
        (
            "ftrl",
            r#""learning_rate": 1, "initial_accumulator": 0"#,
            "initial_accumulator",
            "0",
        ),
        (
            "ftrl",
            r#""learning_rate": 1, "learning_rate_power": 1"#,
            "learning_rate_power",
            "1",
        ),
    ] {
        let message = refusal("optimizer", &format!(r#"{{"{name}": {{{settings}}}}}"#));
        assert!(
            message.contains(&format!("optimizer.{name}.{field} is {value}")),
            "{message}"
        );
        assert!(message.contains("; allowed: a number from "), "{message}");
    }
}

#[test]
fn other_numbers_out_of_range() {
    for (part, value, message) in [
        (
            "initializer",
            r#"{"uniform": {"low": 1, "high": 0}}"#,
            "initializer.uniform.high is 0",
        ),
        (
            "initializer",
            r#"{"normal": {"mean": 0, "std": -1}}"#,
            "initializer.normal.std is -1",
        ),
        (
            "initializer",
            r#"{"truncated_normal": {"mean": 1e39}}"#,
            "truncated_normal.mean is 1",
        ),
        (
            "initializer",
            r#"{"xavier": {"fan_in": 0, "fan_out": 1}}"#,
            "xavier.fan_in is 0",
        ),
        (
            "non_finite",
            r#"{"clip": {"limit": 0}}"#,
            "non_finite.clip.limit is 0",
        ),
    ] {
        assert!(refusal(part, value).contains(message), "{message}");
    }
}

#[test]
fn nan_and_infinite_learning_rates() {
    // JSON has no NaN, but Python's json module writes it.
    for text in ["NaN", "Infinity", "-Infinity", "1e999"] {
        let optimizer = format!(r#"{{"sgd": {{"learning_rate": {text}}}}}"#);
        assert!(
            refusal("optimizer", &optimizer).starts_with("table description"),
            "{text}"
        );
    }
    for learning_rate in [f64::NAN, f64::INFINITY] {
        let spec = TableSpec {
            optimizer: Optimizer::Sgd(Sgd { learning_rate }),
            ..read("", "")
        };
        let message = spec.check().unwrap_err().to_string();
        assert!(
            message.contains("optimizer.sgd.learning_rate is"),
            "{message}"
        );
    }
}
