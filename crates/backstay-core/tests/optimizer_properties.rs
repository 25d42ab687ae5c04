//! What must hold for every optimizer, whatever the numbers.

// What fails in a helper is a failed test; exact numbers are the point.
#![allow(clippy::unwrap_used, clippy::float_cmp)]

use std::sync::LazyLock;

use backstay_core::optimizer::{Optimizer, OptimizerVisitor, RowOptimizer};
use proptest::prelude::*;
use serde_json::Value;

/// Those whose step depends on the whole row.
const ROW_WISE: [&str; 2] = ["rowwiseadagrad", "groupftrl"];

const DIM: usize = 7;

/// Every optimizer with every settings that it has vectors of; `optimizer_vectors.rs` misses none.
fn optimizers() -> &'static [Optimizer] {
    static ALL: LazyLock<Vec<Optimizer>> = LazyLock::new(|| {
        let path = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../tests/vectors/optimizers.json"
        );
        let text = std::fs::read_to_string(path).unwrap();
        let vectors: Value = serde_json::from_str(&text).unwrap();
        let cases = vectors["cases"].as_array().unwrap().iter();
        let all = cases.map(|case| serde_json::from_value(case["optimizer"].clone()).unwrap());
        let mut distinct: Vec<Optimizer> = Vec::new();
        for optimizer in all {
            if !distinct.contains(&optimizer) {
                distinct.push(optimizer);
            }
        }
        distinct
    });
    &ALL
}

/// Weights and state of one row, compared by bits.
#[derive(Debug, Clone)]
struct Row(Vec<f32>, Vec<f32>);

impl Row {
    fn new(optimizer: &impl RowOptimizer, weights: &[f32]) -> Self {
        let mut state = vec![f32::NAN; optimizer.state_elements(weights.len())];
        optimizer.init_state(&mut state);
        Self(weights.to_vec(), state)
    }

    fn bits(&self) -> Vec<u32> {
        self.0
            .iter()
            .chain(&self.1)
            .map(|value| value.to_bits())
            .collect()
    }
}

/// Apply pushes (row, gradient) in the order given.
struct Apply<'a> {
    rows: &'a mut [Row],
    pushes: &'a [(usize, Vec<f32>)],
}

impl OptimizerVisitor for Apply<'_> {
    type Out = ();

    fn visit<O: RowOptimizer>(self, optimizer: &O) {
        for (row, gradient) in self.pushes {
            let Row(weights, state) = &mut self.rows[*row];
            optimizer.update(weights, state, gradient, 1.0);
        }
    }
}

fn pushes() -> impl Strategy<Value = Vec<(usize, Vec<f32>)>> {
    let gradient = prop::collection::vec(prop_oneof![Just(0.0), -1e3f32..1e3, -1e-6f32..1e-6], DIM);
    prop::collection::vec((0usize..4, gradient), 1..30)
}

proptest! {
    #[test]
    fn same_bytes_whatever_the_order_and_grouping_of_rows(pushes in pushes(), cut in 0usize..30) {
        for optimizer in optimizers() {
            let mut together = vec![Row::new(optimizer, &[0.25; DIM]); 4];
            optimizer.dispatch(Apply { rows: &mut together, pushes: &pushes });
            // Row by row (a stable sort keeps each row's own order), in two calls.
            let mut sorted = pushes.clone();
            sorted.sort_by_key(|(row, _)| std::cmp::Reverse(*row));
            let mut apart = vec![Row::new(optimizer, &[0.25; DIM]); 4];
            let (first, second) = sorted.split_at(cut.min(sorted.len()));
            optimizer.dispatch(Apply { rows: &mut apart, pushes: first });
            optimizer.dispatch(Apply { rows: &mut apart, pushes: second });
            for (left, right) in together.iter().zip(&apart) {
                prop_assert_eq!(left.bits(), right.bits(), "{:?}", optimizer);
            }
        }
    }

    #[test]
    fn an_element_does_not_see_its_neighbours(pushes in pushes()) {
        // Also: the vectorised middle and the scalar end of a loop give the same bits.
        for optimizer in optimizers() {
            if ROW_WISE.contains(&optimizer.name()) {
                continue;
            }
            let mut whole = vec![Row::new(optimizer, &[0.25; DIM]); 4];
            optimizer.dispatch(Apply { rows: &mut whole, pushes: &pushes });
            for element in 0..DIM {
                let mut single = vec![Row::new(optimizer, &[0.25]); 4];
                let narrow: Vec<_> = pushes.iter().map(|(row, g)| (*row, vec![g[element]])).collect();
                optimizer.dispatch(Apply { rows: &mut single, pushes: &narrow });
                for (wide, narrow) in whole.iter().zip(&single) {
                    prop_assert_eq!(wide.0[element].to_bits(), narrow.0[0].to_bits(), "{:?}", optimizer);
                }
            }
        }
    }

    #[test]
    fn dispatch_and_direct_calls_agree(pushes in pushes()) {
        for optimizer in optimizers() {
            let mut dispatched = vec![Row::new(optimizer, &[0.25; DIM]); 4];
            optimizer.dispatch(Apply { rows: &mut dispatched, pushes: &pushes });
            let mut direct = vec![Row::new(optimizer, &[0.25; DIM]); 4];
            Apply { rows: &mut direct, pushes: &pushes }.visit(optimizer);
            for (left, right) in dispatched.iter().zip(&direct) {
                prop_assert_eq!(left.bits(), right.bits(), "{:?}", optimizer);
            }
        }
    }

    #[test]
    fn finite_gradients_give_finite_weights(pushes in pushes()) {
        for optimizer in optimizers() {
            let mut rows = vec![Row::new(optimizer, &[0.25; DIM]); 4];
            optimizer.dispatch(Apply { rows: &mut rows, pushes: &pushes });
            for row in &rows {
                prop_assert!(row.0.iter().all(|weight| weight.is_finite()), "{:?}", optimizer);
            }
        }
    }
}

#[test]
fn a_constant_gradient_for_long_stays_finite() {
    // Centred RMSProp's variance comes down to rounding noise around 0.
    for optimizer in optimizers() {
        let mut row = Row::new(optimizer, &[0.25; DIM]);
        for _ in 0..5_000 {
            optimizer.update(
                &mut row.0,
                &mut row.1,
                &[0.3, 1.0, -7.7, 1e-3, 0.0, 100.0, 1e-9],
                1.0,
            );
        }
        assert!(
            row.0.iter().all(|weight| weight.is_finite()),
            "{optimizer:?}: {:?}",
            row.0
        );
    }
}

#[test]
fn a_learning_rate_of_zero_moves_nothing() {
    for optimizer in optimizers() {
        let mut row = Row::new(optimizer, &[0.25; DIM]);
        optimizer.update(&mut row.0, &mut row.1, &[1.0; DIM], 0.0);
        assert_eq!(row.0, [0.25; DIM], "{optimizer:?}");
    }
}

#[test]
fn ftrl_with_l1_makes_exact_zeros() {
    let spec = r#"{"ftrl": {"learning_rate": 0.1, "l1": 1.0}}"#;
    let optimizer: Optimizer = serde_json::from_str(spec).unwrap();
    let mut row = Row::new(&optimizer, &[0.0; 2]);
    optimizer.update(&mut row.0, &mut row.1, &[0.5, 5.0], 1.0);
    assert_eq!(row.0[0].to_bits(), 0);
    assert!(row.0[1] < 0.0);
}

fn row_after(spec: &str, dim: usize, gradient: f32) -> Row {
    let optimizer: Optimizer = serde_json::from_str(spec).unwrap();
    let mut row = Row::new(&optimizer, &vec![0.0; dim]);
    let gradient: Vec<f32> = (0..dim).map(|i| gradient * (1 + i % 3) as f32).collect();
    optimizer.update(&mut row.0, &mut row.1, &gradient, 1.0);
    row
}

#[test]
fn group_ftrl_makes_whole_rows_zero_or_none() {
    let spec = r#"{"groupftrl": {"learning_rate": 0.1, "l21": 1.0}}"#;
    for dim in [1, 3, 4, 7, 16] {
        let small = row_after(spec, dim, 0.4);
        assert!(small.0.iter().all(|w| w.to_bits() == 0), "{dim}: {small:?}");
        let large = row_after(spec, dim, 1.1);
        assert!(large.0.iter().all(|w| *w < 0.0), "{dim}: {large:?}");
    }
}

#[test]
fn group_ftrl_without_a_group_is_ftrl() {
    let plain = r#"{"ftrl": {"learning_rate": 0.1, "l1": 0.5, "l2": 0.25}}"#;
    let group = r#"{"groupftrl": {"learning_rate": 0.1, "l1": 0.5, "l2": 0.25}}"#;
    for gradient in [0.2, 0.4, 3.0] {
        let (plain, group) = (row_after(plain, 7, gradient), row_after(group, 7, gradient));
        assert_eq!(plain.bits(), group.bits(), "{gradient}");
    }
}

#[test]
fn row_wise_adagrad_has_one_step_size_and_one_word() {
    let row = row_after(r#"{"rowwiseadagrad": {"learning_rate": 0.1}}"#, 7, 2.0);
    assert_eq!(row.1.len(), 1);
    // Gradients 2, 4, 6, 2, 4, 6, 2: a mean square of 116 / 7.
    assert!((row.1[0] - 116.0 / 7.0).abs() < 1e-5);
    assert!((row.0[2] / row.0[0] - 3.0).abs() < 1e-5);
}

#[test]
fn adagrad_with_decay_forgets_down_to_its_first_accumulator() {
    let spec =
        r#"{"adagraddecay": {"learning_rate": 0.1, "decay": 0.5, "initial_accumulator": 0.25}}"#;
    let optimizer: Optimizer = serde_json::from_str(spec).unwrap();
    let mut row = Row::new(&optimizer, &[0.0]);
    optimizer.update(&mut row.0, &mut row.1, &[2.0], 1.0);
    assert_eq!(row.1, [4.25]);
    for _ in 0..20 {
        optimizer.update(&mut row.0, &mut row.1, &[0.0], 1.0);
    }
    assert_eq!(row.1, [0.25]);
}
