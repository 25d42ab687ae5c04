//! The loops: one operation over many values.
//!
//! Every operation is a function of its arguments at one place, so the results do not depend on how
//! values are cut into loops. `reference` in `tests/expression_properties.rs` computes the same one
//! value at a time.

// A loop is compiled twice, for two kinds of processors: what it calls must become part of it.
#![allow(clippy::inline_always)]

use std::ops::{Add, Div, Mul, Neg, Sub};

use super::node::{Binary, Reduction, Unary};
use super::program::Operation;
use super::{canonical, math};

/// The argument of a loop.
#[derive(Clone, Copy)]
pub(super) enum Argument<'a, T> {
    /// One value for each of the loop's results.
    Each(&'a [T]),
    /// One value for all of them.
    One(T),
}

/// float32 or float64. A mask is 1 where it holds, and 0 elsewhere.
pub(super) trait Real:
    Copy
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
{
    const ZERO: Self;
    const ONE: Self;
    const TWO: Self;
    const HALF: Self;
    fn abs(self) -> Self;
    fn sqrt(self) -> Self;
    fn exp(self) -> Self;
    fn log(self) -> Self;
    /// Powers other than those that [`pow`] takes out.
    fn general_power(self, exponent: Self) -> Self;
}

macro_rules! real {
    ($real:ty, $exp:path, $log:path, $pow:path) => {
        impl Real for $real {
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            const TWO: Self = 2.0;
            const HALF: Self = 0.5;

            #[inline(always)]
            fn abs(self) -> Self {
                <$real>::abs(self)
            }

            #[inline(always)]
            fn sqrt(self) -> Self {
                <$real>::sqrt(self)
            }

            #[inline(always)]
            fn exp(self) -> Self {
                $exp(self)
            }

            #[inline(always)]
            fn log(self) -> Self {
                $log(self)
            }

            #[inline(always)]
            fn general_power(self, exponent: Self) -> Self {
                $pow(self, exponent)
            }
        }
    };
}

// Not std's: their results differ between platforms.
real!(f32, math::exp, math::log, libm::powf);
real!(f64, libm::exp, libm::log, libm::pow);

#[inline(always)]
fn mask<T: Real>(holds: bool) -> T {
    if holds {
        T::ONE
    } else {
        T::ZERO
    }
}

/// 1 above 0, -1 below, the value itself where it is 0 or NaN.
#[inline(always)]
fn sign<T: Real>(x: T) -> T {
    let below = if x < T::ZERO { -T::ONE } else { x };
    if x > T::ZERO {
        T::ONE
    } else {
        below
    }
}

/// NaN if one of them is.
#[inline(always)]
#[allow(clippy::eq_op)] // NaN differs from itself.
fn maximum<T: Real>(a: T, b: T) -> T {
    if a >= b || a != a {
        a
    } else {
        b
    }
}

/// NaN if one of them is.
#[inline(always)]
#[allow(clippy::eq_op)] // NaN differs from itself.
fn minimum<T: Real>(a: T, b: T) -> T {
    if a <= b || a != a {
        a
    } else {
        b
    }
}

/// The exponents that people write are exact operations of IEEE 754.
#[inline(always)]
fn pow<T: Real>(x: T, exponent: T) -> T {
    if exponent == T::HALF {
        x.sqrt()
    } else if exponent == T::TWO {
        x * x
    } else if exponent == T::ONE {
        x
    } else if exponent == -T::ONE {
        T::ONE / x
    } else {
        x.general_power(exponent)
    }
}

#[inline(always)]
fn map<T: Real>(a: Argument<'_, T>, out: &mut [T], f: impl Fn(T) -> T) {
    match a {
        Argument::Each(a) => {
            for (out, &a) in out.iter_mut().zip(a) {
                *out = f(a);
            }
        }
        Argument::One(a) => out.fill(f(a)),
    }
}

#[inline(always)]
fn map2<T: Real>(a: Argument<'_, T>, b: Argument<'_, T>, out: &mut [T], f: impl Fn(T, T) -> T) {
    match (a, b) {
        (Argument::Each(a), Argument::Each(b)) => {
            for ((out, &a), &b) in out.iter_mut().zip(a).zip(b) {
                *out = f(a, b);
            }
        }
        (Argument::Each(a), Argument::One(b)) => {
            for (out, &a) in out.iter_mut().zip(a) {
                *out = f(a, b);
            }
        }
        (Argument::One(a), Argument::Each(b)) => {
            for (out, &b) in out.iter_mut().zip(b) {
                *out = f(a, b);
            }
        }
        (Argument::One(a), Argument::One(b)) => out.fill(f(a, b)),
    }
}

#[inline(always)]
fn unary<T: Real>(operation: Unary, a: Argument<'_, T>, out: &mut [T]) {
    match operation {
        Unary::Neg => map(a, out, |a| -a),
        Unary::Abs => map(a, out, T::abs),
        Unary::Sign => map(a, out, sign),
        Unary::Sqrt => map(a, out, T::sqrt),
        Unary::Exp => map(a, out, T::exp),
        Unary::Log => map(a, out, T::log),
        Unary::Not => map(a, out, |a| T::ONE - a),
    }
}

#[inline(always)]
fn binary<T: Real>(operation: Binary, a: Argument<'_, T>, b: Argument<'_, T>, out: &mut [T]) {
    match operation {
        Binary::Add => map2(a, b, out, |a, b| a + b),
        Binary::Sub => map2(a, b, out, |a, b| a - b),
        Binary::Mul | Binary::And => map2(a, b, out, |a, b| a * b),
        Binary::Div => map2(a, b, out, |a, b| a / b),
        Binary::Pow => power(a, b, out),
        // Of masks, the greater one holds if one of them does.
        Binary::Maximum | Binary::Or => map2(a, b, out, maximum),
        Binary::Minimum => map2(a, b, out, minimum),
        Binary::Less => map2(a, b, out, |a, b| mask(a < b)),
        Binary::LessEqual => map2(a, b, out, |a, b| mask(a <= b)),
        Binary::Greater => map2(a, b, out, |a, b| mask(a > b)),
        Binary::GreaterEqual => map2(a, b, out, |a, b| mask(a >= b)),
        Binary::Equal => map2(a, b, out, |a, b| mask(a == b)),
        Binary::NotEqual => map2(a, b, out, |a, b| mask(a != b)),
    }
}

/// One exponent for all: choose the loop once.
#[inline(always)]
fn power<T: Real>(a: Argument<'_, T>, b: Argument<'_, T>, out: &mut [T]) {
    match b {
        Argument::One(exponent) if exponent == T::HALF => map(a, out, T::sqrt),
        Argument::One(exponent) if exponent == T::TWO => map(a, out, |a| a * a),
        _ => map2(a, b, out, pow),
    }
}

/// Run an operation over float32. Values are wide only for single rows, so this is where time goes.
pub(super) fn compute(operation: Operation, arguments: [Argument<'_, f32>; 3], out: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2.
        return unsafe { compute_with_avx2(operation, arguments, out) };
    }
    compute_plain(operation, arguments, out);
}

/// The same loops over wider registers. The operations are those of IEEE 754 all the same, and none
/// are fused, so the bits are equal.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn compute_with_avx2(operation: Operation, arguments: [Argument<'_, f32>; 3], out: &mut [f32]) {
    compute_plain(operation, arguments, out);
}

/// Run an operation over float64.
pub(super) fn compute_wide(
    operation: Operation,
    arguments: [Argument<'_, f64>; 3],
    out: &mut [f64],
) {
    compute_plain(operation, arguments, out);
}

#[inline(always)]
fn compute_plain<T: Real>(operation: Operation, [a, b, c]: [Argument<'_, T>; 3], out: &mut [T]) {
    match operation {
        Operation::Unary(operation) => unary(operation, a, out),
        Operation::Binary(operation) => binary(operation, a, b, out),
        Operation::Where => match a {
            Argument::Each(holds) => choose(holds, b, c, out),
            Argument::One(holds) => match if holds == T::ZERO { c } else { b } {
                Argument::Each(chosen) => out.copy_from_slice(chosen),
                Argument::One(chosen) => out.fill(chosen),
            },
        },
        // These are not among values of one bank.
        Operation::Reduce(_) | Operation::Round | Operation::Repeat => {}
    }
}

/// Make the bits of every NaN the same.
pub(super) fn canonicalize(values: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2.
        return unsafe { canonicalize_with_avx2(values) };
    }
    canonicalize_plain(values);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn canonicalize_with_avx2(values: &mut [f32]) {
    canonicalize_plain(values);
}

#[inline(always)]
fn canonicalize_plain(values: &mut [f32]) {
    for value in values {
        *value = canonical(*value);
    }
}

/// `yes` where the mask holds, `no` elsewhere.
#[inline(always)]
fn choose<T: Real>(holds: &[T], yes: Argument<'_, T>, no: Argument<'_, T>, out: &mut [T]) {
    let places = out.iter_mut().zip(holds);
    match (yes, no) {
        (Argument::Each(yes), Argument::Each(no)) => {
            for (((out, &holds), &yes), &no) in places.zip(yes).zip(no) {
                *out = if holds == T::ZERO { no } else { yes };
            }
        }
        (Argument::Each(yes), Argument::One(no)) => {
            for ((out, &holds), &yes) in places.zip(yes) {
                *out = if holds == T::ZERO { no } else { yes };
            }
        }
        (Argument::One(yes), Argument::Each(no)) => {
            for ((out, &holds), &no) in places.zip(no) {
                *out = if holds == T::ZERO { no } else { yes };
            }
        }
        (Argument::One(yes), Argument::One(no)) => {
            for (out, &holds) in places {
                *out = if holds == T::ZERO { no } else { yes };
            }
        }
    }
}

/// Reduce each row of `elements` values to one.
pub(super) fn reduce(operation: Reduction, a: &[f32], elements: usize, out: &mut [f32]) {
    let fold = |row: &[f32], f: fn(f32, f32) -> f32| row[1..].iter().fold(row[0], |a, &b| f(a, b));
    for (out, row) in out.iter_mut().zip(a.chunks_exact(elements)) {
        *out = match operation {
            Reduction::Sum => sum(row),
            Reduction::Mean => sum(row) / elements as f32,
            Reduction::Max => fold(row, maximum),
            Reduction::Min => fold(row, minimum),
        };
    }
}

/// In `NumPy`'s order: up to 7 values one after the other; up to 128 in eight sums by place modulo 8
/// that are added as a tree, then what is left behind the last multiple of 8; more by halves whose
/// first has a length that 8 divides.
fn sum(row: &[f32]) -> f32 {
    let n = row.len();
    if n < 8 {
        return row.iter().fold(-0.0, |sum, x| sum + x);
    }
    if n > 128 {
        let half = n / 2 - n / 2 % 8;
        return sum(&row[..half]) + sum(&row[half..]);
    }
    let mut eight = [0.0; 8];
    eight.copy_from_slice(&row[..8]);
    let rest = row[8..].chunks_exact(8);
    let last = rest.remainder();
    for values in rest {
        for (sum, x) in eight.iter_mut().zip(values) {
            *sum += x;
        }
    }
    let [a, b, c, d, e, f, g, h] = eight;
    let whole = ((a + b) + (c + d)) + ((e + f) + (g + h));
    last.iter().fold(whole, |sum, x| sum + x)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const OPERATIONS: [Operation; 23] = [
        Operation::Unary(Unary::Neg),
        Operation::Unary(Unary::Abs),
        Operation::Unary(Unary::Sign),
        Operation::Unary(Unary::Sqrt),
        Operation::Unary(Unary::Exp),
        Operation::Unary(Unary::Log),
        Operation::Unary(Unary::Not),
        Operation::Binary(Binary::Add),
        Operation::Binary(Binary::Sub),
        Operation::Binary(Binary::Mul),
        Operation::Binary(Binary::Div),
        Operation::Binary(Binary::Pow),
        Operation::Binary(Binary::Maximum),
        Operation::Binary(Binary::Minimum),
        Operation::Binary(Binary::Less),
        Operation::Binary(Binary::LessEqual),
        Operation::Binary(Binary::Greater),
        Operation::Binary(Binary::GreaterEqual),
        Operation::Binary(Binary::Equal),
        Operation::Binary(Binary::NotEqual),
        Operation::Binary(Binary::And),
        Operation::Binary(Binary::Or),
        Operation::Where,
    ];

    type Loop = fn(Operation, [Argument<'_, f32>; 3], &mut [f32]);

    /// The result of one element at a time, which no vector loop computes.
    fn one_by_one(operation: Operation, [a, b, c]: [&[f32]; 3], ones: [bool; 3]) -> Vec<u32> {
        let at =
            |values: &[f32], one: bool, at: usize| Argument::One(values[if one { 0 } else { at }]);
        let element = |place: usize| {
            let mut out = [0.0];
            let arguments = [
                at(a, ones[0], place),
                at(b, ones[1], place),
                at(c, ones[2], place),
            ];
            compute_plain(operation, arguments, &mut out);
            canonical(out[0]).to_bits()
        };
        (0..a.len()).map(element).collect()
    }

    proptest! {
        /// Any float32 there is, in vectors of any length, wide or not, gives the bits of itself alone.
        #[test]
        fn every_loop_gives_the_same_bits(
            rows in prop::collection::vec((prop::num::f32::ANY, prop::num::f32::ANY, prop::num::f32::ANY), 1..70),
            ones: [bool; 3],
        ) {
            let column = |of: fn(&(f32, f32, f32)) -> f32| -> Vec<f32> { rows.iter().map(of).collect() };
            let columns = [column(|row| row.0), column(|row| row.1), column(|row| row.2)];
            let all = [&columns[0][..], &columns[1][..], &columns[2][..]];
            for operation in OPERATIONS {
                let argument = |at: usize| {
                    if ones[at] {
                        Argument::One(all[at][0])
                    } else {
                        Argument::Each(all[at])
                    }
                };
                let arguments = [argument(0), argument(1), argument(2)];
                let wanted = one_by_one(operation, all, ones);
                for run in [compute as Loop, compute_plain::<f32> as Loop] {
                    let mut out = vec![0.0; rows.len()];
                    run(operation, arguments, &mut out);
                    canonicalize(&mut out);
                    let bits: Vec<u32> = out.iter().map(|one| one.to_bits()).collect();
                    prop_assert_eq!(&bits, &wanted, "{:?}", operation);
                }
            }
        }
    }

    #[test]
    fn sums_of_long_rows_have_one_order() {
        let row: Vec<f32> = (0..1_000).map(|at| (at as f32).sin()).collect();
        let mut out = [0.0];
        reduce(Reduction::Sum, &row, row.len(), &mut out);
        // By halves whose first has a length that 8 divides.
        let by_hand = sum(&row[..496]) + sum(&row[496..]);
        assert_eq!(out[0].to_bits(), by_hand.to_bits());
        assert_eq!(sum(&[]).to_bits(), (-0.0f32).to_bits());
        assert_eq!(sum(&[-0.0; 3]).to_bits(), (-0.0f32).to_bits());
    }
}
