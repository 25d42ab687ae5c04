//! `exp` and `log` in float32 with the same bits on every machine.
//!
//! The platform's own differ between machines, and a loop over a call does not vectorise. These are
//! straight lines of float64 additions, multiplications, one division and integer steps, all of
//! them exact or rounded as IEEE 754 says. The error in float64 is below 1e-11 relative, so the
//! float32 result is the nearest one, but for about one argument in ten thousand, where it is the
//! other neighbour.
//!
//! Source: the usual reductions (J.-M. Muller, "Elementary functions", 3rd edition, 2016, section
//! 11.1 for exp, 11.2 for log): `exp(x) = 2^k * exp(r)` with a Taylor polynomial, and
//! `log(x) = k * ln 2 + 2 * atanh((m - 1) / (m + 1))` with the series of atanh.

// See `kernels`.
#![allow(clippy::inline_always)]

use std::f64::consts::{FRAC_1_SQRT_2, LN_2, LOG2_E};

/// Added to a number and subtracted again, it rounds the number to an integer; the sum's low bits
/// are that integer.
const SHIFT: f64 = 6_755_399_441_055_744.0; // 1.5 * 2^52
const EXPONENT_SHIFT: u32 = 52;
const EXPONENT_BIAS: u64 = 1023;

/// e to the power of `x`, in float32.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    let x = f64::from(x);
    // Behind these the float32 result is infinite or 0. NaN passes both comparisons by.
    let x = if x > 89.0 { 89.0 } else { x };
    let x = if x < -104.5 { -104.5 } else { x };
    let shifted = x * LOG2_E + SHIFT;
    let r = x - (shifted - SHIFT) * LN_2;
    // 1 / n! from n = 9 down; |r| is at most 0.3466.
    let mut sum = 1.0 / 362_880.0;
    sum = sum * r + 1.0 / 40_320.0;
    sum = sum * r + 1.0 / 5_040.0;
    sum = sum * r + 1.0 / 720.0;
    sum = sum * r + 1.0 / 120.0;
    sum = sum * r + 1.0 / 24.0;
    sum = sum * r + 1.0 / 6.0;
    sum = sum * r + 0.5;
    sum = sum * r + 1.0;
    sum = sum * r + 1.0;
    let two_to_k =
        (shifted.to_bits() << EXPONENT_SHIFT).wrapping_add(EXPONENT_BIAS << EXPONENT_SHIFT);
    (sum * f64::from_bits(two_to_k)) as f32
}

/// The natural logarithm of `x`, in float32: -infinity of 0, NaN below.
#[inline(always)]
pub(super) fn log(x: f32) -> f32 {
    // Every positive float32 is a normal float64.
    let bits = f64::from(x).to_bits();
    // k + 1024, where x = m * 2^k and m is in [sqrt(1/2), sqrt(2)).
    let raised = bits
        .wrapping_sub(FRAC_1_SQRT_2.to_bits())
        .wrapping_add(1024 << EXPONENT_SHIFT)
        >> EXPONENT_SHIFT;
    let m = f64::from_bits(bits.wrapping_sub(raised.wrapping_sub(1024) << EXPONENT_SHIFT));
    // The integer in the low bits of 2^52.
    let k = f64::from_bits(4_503_599_627_370_496_f64.to_bits() | raised)
        - (4_503_599_627_370_496.0 + 1024.0);
    let s = (m - 1.0) / (m + 1.0);
    let z = s * s;
    // 1 / (2n + 1) from n = 7 down; z is at most 0.0295.
    let mut sum = 1.0 / 15.0;
    sum = sum * z + 1.0 / 13.0;
    sum = sum * z + 1.0 / 11.0;
    sum = sum * z + 1.0 / 9.0;
    sum = sum * z + 1.0 / 7.0;
    sum = sum * z + 1.0 / 5.0;
    sum = sum * z + 1.0 / 3.0;
    sum = sum * z + 1.0;
    let log = (k * LN_2 + 2.0 * s * sum) as f32;
    let log = if x == 0.0 { f32::NEG_INFINITY } else { log };
    let log = if x < 0.0 { f32::NAN } else { log };
    // Infinity and NaN are their own logarithms.
    if x < f32::INFINITY {
        log
    } else {
        x
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Distance in units in the last place.
    fn apart(got: f32, exact: f64) -> f64 {
        let nearest = exact as f32;
        if got.to_bits() == nearest.to_bits() || got.is_nan() && nearest.is_nan() {
            return 0.0;
        }
        let ulp = f64::from(nearest.abs().next_up()) - f64::from(nearest.abs());
        (f64::from(got) - exact).abs() / ulp
    }

    /// Every so manyth float32 there is.
    fn all() -> impl Iterator<Item = f32> {
        (0..=u32::MAX).step_by(4_999).map(f32::from_bits)
    }

    #[test]
    fn both_are_within_half_a_unit_in_the_last_place() {
        for x in all() {
            let exact = libm::exp(f64::from(x));
            assert!(apart(exp(x), exact) < 0.5001, "exp({x}) is {}", exp(x));
            let exact = libm::log(f64::from(x));
            assert!(apart(log(x), exact) < 0.5001, "log({x}) is {}", log(x));
        }
    }

    #[test]
    fn the_edges() {
        let bits = |x: f32| x.to_bits();
        for (x, result) in [
            (0.0, 1.0),
            (-0.0, 1.0),
            (f32::INFINITY, f32::INFINITY),
            (f32::NEG_INFINITY, 0.0),
            (88.8, f32::INFINITY),
            (-104.0, 0.0),
        ] {
            assert_eq!(bits(exp(x)), bits(result), "exp({x})");
        }
        for (x, result) in [
            (1.0, 0.0),
            (0.0, f32::NEG_INFINITY),
            (-0.0, f32::NEG_INFINITY),
            (f32::INFINITY, f32::INFINITY),
        ] {
            assert_eq!(bits(log(x)), bits(result), "log({x})");
        }
        for x in [f32::NAN, -f32::NAN] {
            assert!(exp(x).is_nan() && log(x).is_nan());
        }
        assert!(log(-1.0).is_nan() && log(f32::NEG_INFINITY).is_nan());
        // The smallest and the largest float32, and a few bits that may never change.
        assert_eq!(bits(exp(-103.0)), 1);
        assert_eq!(bits(log(f32::from_bits(1))), bits(-103.278_93));
        assert_eq!(bits(exp(1.0)), 0x402d_f854);
        assert_eq!(bits(log(10.0)), 0x4013_5d8e);
    }
}
