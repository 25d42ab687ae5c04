//! Statistics and determinism of initial weights; the bytes are held by golden values in
//! tests/vectors/initializers.json (see `tests/initializer_vectors.rs`).

#![allow(clippy::float_cmp)] // Exact results are the point.

use proptest::prelude::*;

use super::*;

fn row_initializer(name: &str, seed: u64, initializer: &str) -> RowInitializer {
    let json = format!(
        r#"{{"name": "{name}", "kind": {{"sparse": {{"dim": 1}}}}, "seed": {seed},
            "initializer": {initializer}, "optimizer": {{"sgd": {{}}}}}}"#
    );
    RowInitializer::new(&TableSpec::from_json(&json).unwrap())
}

/// 4,000 rows of 25 weights.
fn sample(initializer: &str) -> Vec<f32> {
    let rows = row_initializer("sample", 1, initializer);
    let mut weights = vec![0.0; 100_000];
    for (key, row) in weights.chunks_mut(25).enumerate() {
        rows.fill(key as u64, row);
    }
    weights
}

fn mean_and_deviation(values: &[f32]) -> (f64, f64) {
    let n = values.len() as f64;
    let mean = values.iter().map(|&v| f64::from(v)).sum::<f64>() / n;
    let variance = values
        .iter()
        .map(|&v| (f64::from(v) - mean).powi(2))
        .sum::<f64>()
        / n;
    (mean, variance.sqrt())
}

/// Within 5 standard errors of 100,000 draws.
fn assert_moments(values: &[f32], mean: f64, deviation: f64) {
    let (got_mean, got_deviation) = mean_and_deviation(values);
    let error = 5.0 * deviation / (values.len() as f64).sqrt();
    assert!(
        (got_mean - mean).abs() < error,
        "mean {got_mean} for {mean}"
    );
    assert!(
        (got_deviation - deviation).abs() < error,
        "deviation {got_deviation} for {deviation}"
    );
}

#[test]
fn constants() {
    assert!(sample(r#"{"zeros": {}}"#).iter().all(|w| w.to_bits() == 0));
    assert!(sample(r#"{"constant": {"value": 0.1}}"#)
        .iter()
        .all(|&w| w == 0.1));
}

#[test]
fn uniform_fills_its_range_evenly() {
    let weights = sample(r#"{"uniform": {"low": -1.0, "high": 3.0}}"#);
    assert!(weights.iter().all(|w| (-1.0..=3.0).contains(w)));
    assert_moments(&weights, 1.0, 4.0 / 12f64.sqrt());
    let mut bins = [0i32; 10];
    for weight in &weights {
        bins[(((weight + 1.0) * 2.5) as usize).min(9)] += 1;
    }
    assert!(bins.iter().all(|n| (n - 10_000).abs() < 500), "{bins:?}");
}

#[test]
fn normal_has_the_right_tails() {
    let weights = sample(r#"{"normal": {"mean": 2.0, "std": 0.5}}"#);
    assert_moments(&weights, 2.0, 0.5);
    // 4.55 % of a normal distribution lie more than two deviations away.
    let outside = weights.iter().filter(|&&w| (w - 2.0).abs() > 1.0).count();
    assert!((4_200..4_900).contains(&outside), "{outside}");
}

#[test]
fn truncated_normal_is_cut_at_two_deviations() {
    let weights = sample(r#"{"truncated_normal": {"mean": -1.0, "std": 0.25}}"#);
    assert!(weights.iter().all(|w| (-1.5..=-0.5).contains(w)));
    // The deviation of a standard normal cut at 2 is 0.87963.
    assert_moments(&weights, -1.0, 0.25 * 0.879_63);
}

#[test]
fn xavier_scales_with_the_layer_sizes() {
    let uniform = sample(r#"{"xavier": {"fan_in": 20, "fan_out": 4, "gain": 2.0}}"#);
    assert!(uniform.iter().all(|w| w.abs() <= 1.0));
    assert_moments(&uniform, 0.0, 1.0 / 3f64.sqrt());
    let normal = sample(r#"{"xavier": {"fan_in": 4, "fan_out": 4, "distribution": "normal"}}"#);
    assert_moments(&normal, 0.0, 0.5);
}

#[test]
fn neighbours_are_uncorrelated() {
    // The two halves of one output, neighbouring outputs, and the same element of
    // neighbouring keys.
    for initializer in [
        r#"{"normal": {"mean": 0, "std": 1}}"#,
        r#"{"uniform": {"low": -1.7, "high": 1.7}}"#,
    ] {
        let weights = sample(initializer);
        for distance in [1, 2, 25] {
            let pairs = weights.len() - distance;
            let sum: f32 = weights
                .iter()
                .zip(&weights[distance..])
                .map(|(a, b)| a * b)
                .sum();
            let correlation = sum / pairs as f32;
            assert!(
                correlation.abs() < 0.017,
                "{correlation} at distance {distance}"
            );
        }
    }
}

#[test]
fn the_generator_is_split_mix() {
    // First outputs of the published reference code for the seed 1234567.
    let output = |i: u64| split_mix(1_234_567u64.wrapping_add(GAMMA.wrapping_mul(i)));
    assert_eq!(output(1), 6_457_827_717_110_365_317);
    assert_eq!(output(2), 3_203_168_211_198_807_973);
}

#[test]
fn the_quantile_inverts_the_distribution_function() {
    for i in 1..10_000 {
        let probability = f64::from(i) / 10_000.0;
        let back = 0.5 * libm::erfc(-normal_quantile(probability) / std::f64::consts::SQRT_2);
        assert!(
            (back / probability - 1.0).abs() < 1e-13,
            "{back} for {probability}"
        );
    }
}

proptest! {
    #[test]
    fn a_weight_depends_on_its_place_alone(
        key: u64, seed: u64, length in 1usize..60, shorter in 1usize..60, law in 0usize..4,
    ) {
        let law = [
            r#"{"uniform": {"low": -1, "high": 1}}"#,
            r#"{"normal": {}}"#,
            r#"{"truncated_normal": {}}"#,
            r#"{"xavier": {"fan_in": 3, "fan_out": 5}}"#,
        ][law];
        let rows = row_initializer("t", seed, law);
        let mut long = vec![0.0; length];
        rows.fill(key, &mut long);
        let mut short = vec![f32::NAN; shorter.min(length)];
        row_initializer("t", seed, law).fill(key, &mut short);
        prop_assert_eq!(&long[..short.len()], &short[..]);
        prop_assert!(long.iter().all(|w| w.is_finite()));
    }

    #[test]
    fn seed_table_and_key_all_matter(key: u64, seed: u64) {
        let law = r#"{"uniform": {"low": -1, "high": 1}}"#;
        let fill = |rows: RowInitializer, key| {
            let mut weights = [0.0; 4];
            rows.fill(key, &mut weights);
            weights
        };
        let base = fill(row_initializer("t", seed, law), key);
        prop_assert_ne!(base, fill(row_initializer("t", seed, law), key.wrapping_add(1)));
        prop_assert_ne!(base, fill(row_initializer("t", seed.wrapping_add(1), law), key));
        prop_assert_ne!(base, fill(row_initializer("u", seed, law), key));
    }
}
