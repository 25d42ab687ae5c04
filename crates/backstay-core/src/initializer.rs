//! The weights of a row before its first push.
//!
//! A weight is a function of (seed, table, key, element) alone, and the bytes are the same on
//! every machine: random bits come from a counter-based generator, and logarithm, sine and
//! cosine from `libm`, because those of the standard library differ between platforms. Any
//! replica can thus create any row at any time. Golden values in tests/vectors/ hold the bytes.
//!
//! The generator is `SplitMix64` (G. Steele, D. Lea and C. Flood, "Fast splittable pseudorandom
//! number generators", OOPSLA 2014), started per row; each output gives two elements, the even
//! one from its upper half and the odd one from its lower.

use std::f64::consts::TAU;

use crate::hash::{mix64, table_id};
use crate::spec::{Initializer, TableSpec, XavierDistribution};

/// The increment of `SplitMix64`: 2^64 over the golden ratio, odd.
const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// Probability of a standard normal value below -2.
const BELOW_MINUS_TWO: f64 = 0.022_750_131_948_179_207;

/// Makes the initial weights of any row of one table.
#[derive(Debug, Clone)]
pub struct RowInitializer {
    /// Where the streams of this table begin: its seed and id, mixed.
    stream: u64,
    law: Law,
}

#[derive(Debug, Clone, Copy)]
enum Law {
    Constant(f32),
    Uniform { low: f32, high: f32 },
    Normal { mean: f64, std: f64 },
    TruncatedNormal { mean: f64, std: f64 },
}

impl RowInitializer {
    /// The initializer of a checked table description.
    pub fn new(spec: &TableSpec) -> Self {
        let law = match spec.initializer {
            Initializer::Zeros {} => Law::Constant(0.0),
            Initializer::Constant { value } => Law::Constant(value as f32),
            Initializer::Uniform { low, high } => Law::Uniform {
                low: low as f32,
                high: high as f32,
            },
            Initializer::Normal { mean, std } => Law::Normal { mean, std },
            Initializer::TruncatedNormal { mean, std } => Law::TruncatedNormal { mean, std },
            Initializer::Xavier {
                fan_in,
                fan_out,
                gain,
                distribution,
            } => {
                let fans = fan_in as f64 + fan_out as f64;
                match distribution {
                    XavierDistribution::Uniform => {
                        let limit = (gain * libm::sqrt(6.0 / fans)) as f32;
                        Law::Uniform {
                            low: -limit,
                            high: limit,
                        }
                    }
                    XavierDistribution::Normal => Law::Normal {
                        mean: 0.0,
                        std: gain * libm::sqrt(2.0 / fans),
                    },
                }
            }
        };
        let stream = mix64(table_id(&spec.name) ^ mix64(spec.seed.wrapping_add(GAMMA)));
        Self { stream, law }
    }

    /// Write the initial weights of the row of `key`: element `i` depends on `i`, not on how
    /// many there are.
    pub fn fill(&self, key: u64, weights: &mut [f32]) {
        let start = mix64(self.stream.wrapping_add(mix64(key)));
        match self.law {
            Law::Constant(value) => weights.fill(value),
            Law::Uniform { low, high } => {
                let width = high - low;
                fill_pairs(start, weights, |bits| {
                    // 24 bits convert to float32 exactly. The product may round up beyond `high`.
                    let scale = |bits: u32| {
                        (low + width * ((bits >> 8) as i32 as f32 * (1.0 / 16_777_216.0))).min(high)
                    };
                    [scale((bits >> 32) as u32), scale(bits as u32)]
                });
            }
            Law::Normal { mean, std } => fill_pairs(start, weights, |bits| {
                normal_pair(bits).map(|value| (mean + std * value) as f32)
            }),
            Law::TruncatedNormal { mean, std } => fill_pairs(start, weights, |bits| {
                [(bits >> 32) as u32, bits as u32]
                    .map(|half| (mean + std * truncated_normal(half)) as f32)
            }),
        }
    }
}

/// Fill `weights` two by two from the `SplitMix64` stream that begins at `start`.
#[inline]
fn fill_pairs(start: u64, weights: &mut [f32], pair_of: impl Fn(u64) -> [f32; 2]) {
    let mut state = start;
    let mut pairs = weights.chunks_exact_mut(2);
    for pair in &mut pairs {
        state = state.wrapping_add(GAMMA);
        pair.copy_from_slice(&pair_of(split_mix(state)));
    }
    if let [last] = pairs.into_remainder() {
        *last = pair_of(split_mix(state.wrapping_add(GAMMA)))[0];
    }
}

/// The output function of `SplitMix64`.
#[inline]
fn split_mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

const TWO_TO_MINUS_32: f64 = 1.0 / 4_294_967_296.0;

/// Two independent standard normal values.
///
/// Source: G. Box and M. Muller, "A note on the generation of random normal deviates",
/// Annals of Mathematical Statistics 29 (1958).
fn normal_pair(bits: u64) -> [f64; 2] {
    // In (0, 1], so that the logarithm is finite.
    let first = ((bits >> 32) as f64 + 1.0) * TWO_TO_MINUS_32;
    let second = f64::from(bits as u32) * TWO_TO_MINUS_32;
    let radius = libm::sqrt(-2.0 * libm::log(first));
    let (sin, cos) = libm::sincos(TAU * second);
    [radius * cos, radius * sin]
}

/// A standard normal value, given that it lies in [-2, 2]: the inverse of its distribution
/// function, so that each element takes exactly one draw.
fn truncated_normal(bits: u32) -> f64 {
    let uniform = (f64::from(bits) + 0.5) * TWO_TO_MINUS_32;
    let probability = BELOW_MINUS_TWO + uniform * (1.0 - 2.0 * BELOW_MINUS_TWO);
    normal_quantile(probability).clamp(-2.0, 2.0)
}

/// The standard normal quantile of a probability from 1e-10 to 1 - 1e-10.
///
/// Source: M. Wichura, "Algorithm AS 241: the percentage points of the normal distribution",
/// Applied Statistics 37 (1988), PPND16 without its far tails; relative accuracy about 1e-16.
fn normal_quantile(probability: f64) -> f64 {
    const CENTRE_TOP: [f64; 8] = [
        2_509.080_928_730_122_672_7,
        33_430.575_583_588_128_105,
        67_265.770_927_008_700_853,
        45_921.953_931_549_871_457,
        13_731.693_765_509_461_125,
        1_971.590_950_306_551_442_7,
        133.141_667_891_784_377_45,
        3.387_132_872_796_366_608_0,
    ];
    const CENTRE_BOTTOM: [f64; 8] = [
        5_226.495_278_852_854_561_0,
        28_729.085_735_721_942_674,
        39_307.895_800_092_710_610,
        21_213.794_301_586_595_867,
        5_394.196_021_424_751_107_7,
        687.187_007_492_057_908_30,
        42.313_330_701_600_911_252,
        1.0,
    ];
    const TAIL_TOP: [f64; 8] = [
        7.745_450_142_783_414_076_40e-4,
        2.272_384_498_926_918_458_33e-2,
        2.417_807_251_774_506_117_70e-1,
        1.270_458_252_452_368_382_58,
        3.647_848_324_763_204_605_04,
        5.769_497_221_460_691_405_50,
        4.630_337_846_156_545_295_90,
        1.423_437_110_749_683_577_34,
    ];
    const TAIL_BOTTOM: [f64; 8] = [
        1.050_750_071_644_416_843_24e-9,
        5.475_938_084_995_344_946_00e-4,
        1.519_866_656_361_645_719_66e-2,
        1.481_039_764_274_800_745_90e-1,
        6.897_673_349_851_000_045_50e-1,
        1.676_384_830_183_803_849_40,
        2.053_191_626_637_758_821_87,
        1.0,
    ];
    let centred = probability - 0.5;
    if centred.abs() <= 0.425 {
        let r = 0.180_625 - centred * centred;
        return centred * polynomial(&CENTRE_TOP, r) / polynomial(&CENTRE_BOTTOM, r);
    }
    let tail = if centred < 0.0 {
        probability
    } else {
        1.0 - probability
    };
    let r = libm::sqrt(-libm::log(tail)) - 1.6;
    let value = polynomial(&TAIL_TOP, r) / polynomial(&TAIL_BOTTOM, r);
    if centred < 0.0 {
        -value
    } else {
        value
    }
}

/// Horner's rule, highest power first.
fn polynomial(coefficients: &[f64; 8], x: f64) -> f64 {
    coefficients
        .iter()
        .fold(0.0, |sum, coefficient| sum * x + coefficient)
}

#[cfg(test)]
mod tests;
