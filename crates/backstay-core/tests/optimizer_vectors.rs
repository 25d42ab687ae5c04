//! Optimizers against the numbers of Paddle's, PyTorch's and of float64 formulas
//! (tests/vectors/optimizers.json, written by `tools/make_optimizer_vectors.py`).

// What fails in a helper is a failed test; exact numbers are the point.
#![allow(clippy::unwrap_used, clippy::float_cmp)]

use std::collections::BTreeMap;

use backstay_core::optimizer::{Optimizer, RowOptimizer};
use serde::Deserialize;

/// Relative to the larger of a weight's expected and initial magnitude, because rounding
/// errors are relative to the values a weight passes through. It is 8 units in the last place
/// of a float32; the frameworks themselves fuse products and sums on some processors and round
/// `1 - beta` differently from each other, so bits cannot be asked for.
const TOLERANCE: f32 = 1e-6;

#[derive(Deserialize)]
struct Vectors {
    weights: Vec<Vec<f32>>,
    /// \[steps, rows, dim].
    gradients: Vec<Vec<Vec<f32>>>,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    source: String,
    optimizer: Optimizer,
    learning_rate_scales: Vec<f32>,
    expected_after_step: BTreeMap<usize, Vec<Vec<f32>>>,
}

fn vectors() -> Vectors {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../tests/vectors/optimizers.json"
    );
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// The largest error of a case in units of the tolerance, and where it is.
fn worst_error(case: &Case, vectors: &Vectors) -> (f32, String) {
    let optimizer = &case.optimizer;
    let mut worst = (0.0, String::new());
    for (row, initial) in vectors.weights.iter().enumerate() {
        let mut weights = initial.clone();
        let mut state = vec![f32::NAN; optimizer.state_elements(weights.len())];
        optimizer.init_state(&mut state);
        for (step, gradient) in vectors.gradients.iter().enumerate() {
            let scale = case.learning_rate_scales[step];
            optimizer.update(&mut weights, &mut state, &gradient[row], scale);
            let Some(expected) = case.expected_after_step.get(&(step + 1)) else {
                continue;
            };
            for (i, (&got, &want)) in weights.iter().zip(&expected[row]).enumerate() {
                let error = (got - want).abs() / (TOLERANCE * want.abs().max(initial[i].abs()));
                if error > worst.0 || error.is_nan() {
                    let place = format!("step {}, row {row}, element {i}", step + 1);
                    worst = (error, format!("{place}: {got} for {want}"));
                }
            }
        }
    }
    worst
}

#[test]
fn every_optimizer_agrees_with_its_references() {
    let vectors = vectors();
    let mut failed = Vec::new();
    for case in &vectors.cases {
        let (error, place) = worst_error(case, &vectors);
        let case = format!("{:?} of {}", case.optimizer, case.source);
        println!("{error:6.3} of the tolerance: {case}");
        if error.is_nan() || error > 1.0 {
            failed.push(format!("{case}: {error} times the tolerance at {place}"));
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

/// The sources of an optimizer that Paddle and PyTorch do not both have. What neither has is written
/// down in float64 beside its vectors.
const NOT_OF_BOTH_FRAMEWORKS: [(&str, &[&str]); 4] = [
    ("ftrl", &["ftrl"]),
    ("rowwiseadagrad", &["rowwise"]),
    ("adagraddecay", &["decay", "paddle"]),
    ("groupftrl", &["groupftrl"]),
];

#[test]
fn every_optimizer_has_a_reference() {
    let mut sources: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for case in vectors().cases {
        let source = case.source.split(' ').next().unwrap().to_owned();
        let of_name = sources.entry(case.optimizer.name()).or_default();
        of_name.push(source);
    }
    for &name in Optimizer::NAMES {
        let mut others = NOT_OF_BOTH_FRAMEWORKS.iter();
        let wanted = others.find(|(one, _)| *one == name);
        let wanted = wanted.map_or(&["paddle", "torch"][..], |(_, sources)| sources);
        for source in wanted {
            assert!(
                sources[name].iter().any(|s| s == source),
                "{name} has no case of {source}"
            );
        }
    }
}
