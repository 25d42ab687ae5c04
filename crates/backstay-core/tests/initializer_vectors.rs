//! Initial weights against committed bytes: a change of one bit would make replicas of
//! different versions disagree, so a failure here is never fixed by new vectors.
//! They were written by a second implementation, `tools/make_initializer_vectors.py`.

// What fails in a helper is a failed test; exact numbers are the point.
#![allow(clippy::unwrap_used, clippy::float_cmp)]

use backstay_core::initializer::RowInitializer;
use backstay_core::spec::{Initializer, TableSpec};
use serde::Deserialize;

const PATH: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../tests/vectors/initializers.json"
);

#[derive(Deserialize)]
struct Case {
    table: String,
    seed: u64,
    initializer: Initializer,
    key: u64,
    /// The bits of the row's float32 weights, in hexadecimal.
    weights: Vec<String>,
}

fn bits(case: &Case) -> Vec<String> {
    let spec = serde_json::json!({
        "name": case.table, "kind": {"sparse": {"dim": 5}}, "seed": case.seed,
        "initializer": case.initializer, "optimizer": {"sgd": {}},
    });
    let mut weights = [0f32; 5];
    RowInitializer::new(&TableSpec::from_json(&spec.to_string()).unwrap())
        .fill(case.key, &mut weights);
    weights
        .iter()
        .map(|weight| format!("{:08x}", weight.to_bits()))
        .collect()
}

#[test]
fn every_bit_is_as_it_was() {
    let cases: Vec<Case> = serde_json::from_str(&std::fs::read_to_string(PATH).unwrap()).unwrap();
    for case in &cases {
        assert_eq!(
            bits(case),
            case.weights,
            "{:?} of key {}",
            case.initializer,
            case.key
        );
    }
    for name in [
        "zeros",
        "constant",
        "uniform",
        "normal",
        "truncated_normal",
        "xavier",
    ] {
        let has = |case: &Case| {
            serde_json::to_value(&case.initializer)
                .unwrap()
                .get(name)
                .is_some()
        };
        assert!(cases.iter().any(has), "{name} has no vector");
    }
}
