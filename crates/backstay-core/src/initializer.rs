//! The weights of a row before its first push.
//!
//! A weight is a function of (seed, table, key, element) alone, and the bytes are the same on
//! every machine: random bits come from a counter-based generator, and logarithm, sine and
//! cosine from `libm`, because the standard library's differ between platforms. Any
//! replica can thus create any row at any time. Golden values in tests/vectors/ hold the bytes.
//!
//! The generator is SplitMix64 (G. Steele, D. Lea and C. Flood, "Fast splittable pseudorandom
//! number generators", OOPSLA 2014), started per row; each output gives two elements, the even
//! one from its upper half and the odd one from its lower.

mod quantile;

use std::f64::consts::TAU;

use self::quantile::normal_quantile;
use crate::hash::{mix64, table_id};
use crate::spec::{Initializer, TableSpec, XavierDistribution};

/// The increment of SplitMix64: 2^64 over the golden ratio, odd.
const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// Probability of a standard normal value below -2.
const BELOW_MINUS_TWO: f64 = 0.022_750_131_948_179_21;

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
                        (low + width * ((bits >> 8) as f32 * (1.0 / 16_777_216.0))).min(high)
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

/// Fill `weights` two by two from the SplitMix64 stream that begins at `start`.
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

/// The output function of SplitMix64.
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

#[cfg(test)]
mod tests;
