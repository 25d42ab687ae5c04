//! User functions: what a user computes for each row, as data.
//!
//! A Python function is traced into an [`Expression`], which is part of a table's description. It
//! has no loop, no jump and no way to anything but its inputs, so it ends, and it computes the
//! same bits on every machine: float32 and float64 as IEEE 754 has them, sums in one order, `exp`
//! and `log` of our own (`math`, libm), no fused operations. A NaN can have different bits on two
//! machines until it is stored: [`canonical`] makes them equal.
//!
//! `node` has the form, `check` the rules, `program` the way it runs and `kernels` its loops.
//! Imports nothing else of the core.

mod check;
mod function;
mod kernels;
mod math;
mod node;
mod program;

pub use check::{
    ExpressionBuilder, ExpressionError, Shape, Signature, Type, MAX_DEPTH, MAX_EXPRESSION_BYTES,
    MAX_MAGNITUDE, MAX_NODES, MAX_ROW_BYTES,
};
pub use function::{
    check_names, check_number, Admission, Function, FunctionError, FunctionKind, OfStatistics,
    Pull, RowBatch, Score, Statistic, StatisticsOfRow, MAX_SETTINGS,
};
pub use node::{Expression, Node, NodeId};
pub use program::{Evaluation, Program};

/// A number to be stored: every NaN with the same bits.
#[inline]
pub fn canonical(value: f32) -> f32 {
    // By its bits: a comparison of floats says nothing about the NaN that comes out.
    let bits = value.to_bits();
    let nan = bits & 0x7fff_ffff > 0x7f80_0000;
    f32::from_bits(if nan { 0x7fc0_0000 } else { bits })
}
