//! Which steps the bias correction of Adam and its kin counts.

use serde::{Deserialize, Serialize};

/// See docs/adr/0014-steps-of-rows-or-trainers.md.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Steps {
    /// Those of the row: its first step has the size of the learning rate, whenever it comes.
    #[default]
    Row,
    /// Those of the trainer. Moments are taken as they are, and the trainer multiplies the
    /// learning rate scale of each push by the correction for its own step.
    Global,
}

impl Steps {
    /// As a flag of [`super::Settings`].
    pub(super) fn flag(self) -> bool {
        self == Self::Global
    }

    /// From that flag.
    pub(super) fn of_flag(is_global: bool) -> Self {
        if is_global {
            Self::Global
        } else {
            Self::Row
        }
    }

    /// `1 - beta^t` for the t-th update of a row; 1 where the trainer corrects.
    #[inline]
    pub(super) fn correction(self, beta: f64, step: u32) -> f64 {
        match self {
            Self::Row => 1.0 - power(beta, step),
            Self::Global => 1.0,
        }
    }
}

/// Add one to the count that a state word holds. It stays at 2^31 - 2^23, below the bits of
/// infinity, where every power of beta below 1 has long been 0.
#[inline]
pub(super) fn count_update(word: &mut f32) -> u32 {
    const LAST: u32 = 0x7f7f_ffff;
    let step = (word.to_bits() + 1).min(LAST);
    *word = f32::from_bits(step);
    step
}

/// `base` to the power `exponent` by squaring: products only, so the same on every machine,
/// which is not promised of `f64::powi`.
#[inline]
fn power(base: f64, exponent: u32) -> f64 {
    let (mut result, mut square, mut left) = (1.0, base, exponent);
    while left > 0 {
        if left & 1 == 1 {
            result *= square;
        }
        square *= square;
        left >>= 1;
    }
    result
}

#[cfg(test)]
mod tests {
    #![allow(clippy::float_cmp)] // Exact results are the point.

    use super::*;

    #[test]
    fn powers() {
        assert_eq!(power(0.5, 10), 2f64.powi(-10));
        assert_eq!(power(0.0, 1), 0.0);
        assert!((power(0.999, 12_345) / 0.999f64.powf(12_345.0) - 1.0).abs() < 1e-12);
        assert_eq!(power(0.999, u32::MAX), 0.0);
    }

    #[test]
    fn the_count_saturates_below_infinity() {
        let mut word = 0.0;
        assert_eq!(count_update(&mut word), 1);
        assert_eq!(word.to_bits(), 1);
        word = f32::MAX;
        assert_eq!(count_update(&mut word), f32::MAX.to_bits());
        assert_eq!(word, f32::MAX);
    }

    #[test]
    fn the_trainer_corrects_global_steps() {
        assert_eq!(Steps::Row.correction(0.5, 2), 0.75);
        assert_eq!(Steps::Global.correction(0.5, 2), 1.0);
        for steps in [Steps::Row, Steps::Global] {
            assert_eq!(Steps::of_flag(steps.flag()), steps);
        }
    }
}
