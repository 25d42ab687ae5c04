//! Weights inside a row of 32-bit words: float32, or two 16-bit floats to a word.
//!
//! Rounding is to nearest, ties to even. A 16-bit format halves the memory of weights, not of
//! optimizer state; an update smaller than half a unit in the last place of a weight is lost,
//! so learning rates that are fine in float32 may stand still in bfloat16 (8 significant bits).
//! Words are as they lie in little-endian memory; an odd last half-word is 0.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::spec::Storage;

/// Words that `elements` weights take.
pub fn weight_words(storage: Storage, elements: usize) -> usize {
    match storage {
        Storage::Float32 => elements,
        Storage::Bfloat16 | Storage::Float16 => elements.div_ceil(2),
    }
}

/// Whether the words are the weights themselves, so that kernels can work in place.
#[inline]
pub fn is_plain(storage: Storage) -> bool {
    storage == Storage::Float32
}

/// Read the weights of a row.
///
/// `words` has [`weight_words`] of `weights.len()` words.
#[inline]
pub fn decode(storage: Storage, words: &[u32], weights: &mut [f32]) {
    let elements = weights.len();
    match storage {
        Storage::Float32 => weights.copy_from_slice(bytemuck::cast_slice(&words[..elements])),
        Storage::Bfloat16 => {
            let halves: &[bf16] = bytemuck::cast_slice(words);
            halves[..elements].convert_to_f32_slice(weights);
        }
        Storage::Float16 => {
            let halves: &[f16] = bytemuck::cast_slice(words);
            halves[..elements].convert_to_f32_slice(weights);
        }
    }
}

/// Write the weights of a row, rounded to the storage format.
///
/// `words` has [`weight_words`] of `weights.len()` words.
#[inline]
pub fn encode(storage: Storage, weights: &[f32], words: &mut [u32]) {
    let elements = weights.len();
    if !is_plain(storage) && elements % 2 == 1 {
        // Equal rows must be equal bytes, padding included.
        words[elements / 2] = 0;
    }
    match storage {
        Storage::Float32 => words[..elements].copy_from_slice(bytemuck::cast_slice(weights)),
        Storage::Bfloat16 => {
            let halves: &mut [bf16] = bytemuck::cast_slice_mut(words);
            halves[..elements].convert_from_f32_slice(weights);
        }
        Storage::Float16 => {
            let halves: &mut [f16] = bytemuck::cast_slice_mut(words);
            halves[..elements].convert_from_f32_slice(weights);
        }
    }
}

/// Round weights as [`encode`] followed by [`decode`] would.
#[inline]
pub fn round(storage: Storage, weights: &mut [f32]) {
    match storage {
        Storage::Float32 => {}
        Storage::Bfloat16 => weights
            .iter_mut()
            .for_each(|w| *w = bf16::from_f32(*w).to_f32()),
        Storage::Float16 => weights
            .iter_mut()
            .for_each(|w| *w = f16::from_f32(*w).to_f32()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::float_cmp)] // Exact results are the point.

    use super::*;
    use proptest::prelude::*;

    const ALL: [Storage; 3] = [Storage::Float32, Storage::Bfloat16, Storage::Float16];

    fn round_trip(storage: Storage, weights: &[f32]) -> Vec<f32> {
        let mut words = vec![u32::MAX; weight_words(storage, weights.len())];
        encode(storage, weights, &mut words);
        let mut back = vec![f32::NAN; weights.len()];
        decode(storage, &words, &mut back);
        back
    }

    #[test]
    fn ties_go_to_even() {
        // bfloat16 has 7 fraction bits: 1 + 2^-8 lies half way to 1 + 2^-7.
        let halfway = 1.0 + 2f32.powi(-8);
        assert_eq!(round_trip(Storage::Bfloat16, &[halfway])[0], 1.0);
        assert_eq!(
            round_trip(Storage::Bfloat16, &[halfway + 2f32.powi(-7)])[0],
            1.0 + 2f32.powi(-6)
        );
        // float16 has 10.
        let halfway = 1.0 + 2f32.powi(-11);
        assert_eq!(round_trip(Storage::Float16, &[halfway])[0], 1.0);
        assert_eq!(
            round_trip(Storage::Float16, &[halfway + 2f32.powi(-10)])[0],
            1.0 + 2f32.powi(-9)
        );
    }

    #[test]
    fn odd_rows_have_a_zero_last_half_word() {
        for storage in [Storage::Bfloat16, Storage::Float16] {
            let mut words = [u32::MAX; 2];
            encode(storage, &[1.0, 1.0, 1.0], &mut words);
            assert_eq!(words[1] >> 16, 0);
        }
    }

    #[test]
    fn float16_overflows_to_infinity_and_bfloat16_does_not() {
        assert_eq!(round_trip(Storage::Float16, &[70_000.0])[0], f32::INFINITY);
        assert!(round_trip(Storage::Bfloat16, &[70_000.0])[0].is_finite());
    }

    proptest! {
        #[test]
        fn a_second_round_trip_changes_nothing(bits in prop::collection::vec(any::<u32>(), 1..70)) {
            let weights: Vec<f32> = bits.into_iter().map(f32::from_bits).collect();
            for storage in ALL {
                let once = round_trip(storage, &weights);
                let twice = round_trip(storage, &once);
                prop_assert_eq!(bytemuck::cast_slice::<f32, u32>(&once), bytemuck::cast_slice::<f32, u32>(&twice));
            }
        }

        #[test]
        fn round_equals_encode_and_decode(bits in prop::collection::vec(any::<u32>(), 1..70)) {
            let mut weights: Vec<f32> = bits.into_iter().map(f32::from_bits).collect();
            for storage in ALL {
                let there_and_back = round_trip(storage, &weights);
                round(storage, &mut weights);
                prop_assert_eq!(
                    bytemuck::cast_slice::<f32, u32>(&weights),
                    bytemuck::cast_slice::<f32, u32>(&there_and_back)
                );
            }
        }

        #[test]
        fn the_error_is_at_most_half_a_unit(weight in -60_000f32..60_000.0) {
            for (storage, bits) in [(Storage::Float32, 24), (Storage::Bfloat16, 8), (Storage::Float16, 11)] {
                let back = round_trip(storage, &[weight])[0];
                // The second term is float16's smallest step, near 0.
                let bound = weight.abs() * 2f32.powi(-bits) + 2f32.powi(-25);
                prop_assert!((back - weight).abs() <= bound, "{storage:?}: {weight} became {back}");
            }
        }
    }
}
