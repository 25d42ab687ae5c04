//! What happens to NaN and infinity in gradients, before any row is touched.

use thiserror::Error;

use crate::spec::NonFinitePolicy;

/// A gradient that the table's policy refuses.
#[derive(Debug, Clone, PartialEq, Error)]
#[error("gradient element {index} is {value}, and the table's non_finite policy is to refuse it")]
pub struct NonFinite {
    /// Its place in the slice.
    pub index: usize,
    /// NaN or an infinity.
    pub value: f32,
}

/// Refuse or repair non-finite values of a batch of gradients, in place.
///
/// If it is refused, nothing was changed. With [`NonFinitePolicy::Clip`], NaN becomes 0 and
/// all values, finite ones too, are brought into `[-limit, limit]`.
pub fn apply_policy(policy: &NonFinitePolicy, gradients: &mut [f32]) -> Result<(), NonFinite> {
    match policy {
        NonFinitePolicy::Refuse => match first_non_finite(gradients) {
            Some(index) => Err(NonFinite {
                index,
                value: gradients[index],
            }),
            None => Ok(()),
        },
        NonFinitePolicy::Clip { limit } => {
            clip(gradients, *limit as f32);
            Ok(())
        }
    }
}

/// The place of the first NaN or infinity.
pub fn first_non_finite(values: &[f32]) -> Option<usize> {
    first_beyond(values, f32::MAX)
}

/// The place of the first value that is NaN or larger than `limit` in magnitude.
pub fn first_beyond(values: &[f32], limit: f32) -> Option<usize> {
    // A sum of flags over a chunk has no early exit, so it vectorises; the search that follows
    // runs at most once.
    const CHUNK: usize = 256;
    let within = |value: f32| value.abs() <= limit;
    let bad = |chunk: &[f32]| {
        chunk
            .iter()
            .fold(0u32, |any, &value| any | u32::from(!within(value)))
    };
    let chunk = values.chunks(CHUNK).position(|chunk| bad(chunk) != 0)?;
    let start = chunk * CHUNK;
    values[start..]
        .iter()
        .position(|&value| !within(value))
        .map(|offset| start + offset)
}

fn clip(gradients: &mut [f32], limit: f32) {
    for gradient in gradients {
        let known = if gradient.is_nan() { 0.0 } else { *gradient };
        *gradient = known.clamp(-limit, limit);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::float_cmp)] // Exact results are the point.

    use super::*;

    #[test]
    fn refuses_by_place_and_changes_nothing() {
        for (index, value) in [
            (0, f32::NAN),
            (255, f32::INFINITY),
            (256, f32::NEG_INFINITY),
            (999, f32::NAN),
        ] {
            let mut gradients = vec![1.0; 1000];
            gradients[index] = value;
            let before = gradients.clone();
            let error = apply_policy(&NonFinitePolicy::Refuse, &mut gradients).unwrap_err();
            assert_eq!(error.index, index);
            assert!(error
                .to_string()
                .contains(&format!("element {index} is {value}")));
            assert_eq!(
                bytemuck::cast_slice::<f32, u32>(&before),
                bytemuck::cast_slice::<f32, u32>(&gradients)
            );
        }
    }

    #[test]
    fn finite_gradients_pass_untouched() {
        let mut gradients = vec![f32::MAX, f32::MIN, 0.0, f32::MIN_POSITIVE / 2.0];
        let before = gradients.clone();
        assert_eq!(
            apply_policy(&NonFinitePolicy::Refuse, &mut gradients),
            Ok(())
        );
        assert_eq!(before, gradients);
        assert_eq!(apply_policy(&NonFinitePolicy::Refuse, &mut []), Ok(()));
    }

    #[test]
    fn clips_to_the_limit() {
        let mut gradients = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 11.0, -11.0, 9.5];
        assert_eq!(
            apply_policy(&NonFinitePolicy::Clip { limit: 10.0 }, &mut gradients),
            Ok(())
        );
        assert_eq!(gradients, [0.0, 10.0, -10.0, 10.0, -10.0, 9.5]);
    }
}
