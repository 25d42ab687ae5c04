//! What a table description may hold, and how two of them differ.

use std::fmt::Display;

use serde_json::Value;
use thiserror::Error;

use super::{Initializer, NonFinitePolicy, OptimizerSpec, TableKind, TableSpec};

/// Longest JSON text of one description.
pub const MAX_JSON_BYTES: usize = 65_536;
/// Longest table name.
pub const MAX_NAME_BYTES: usize = 200;
/// Most weights in a sparse row.
pub const MAX_DIM: u64 = 65_536;
/// Most weights in a block of a dense table.
pub const MAX_BLOCK_ELEMENTS: u64 = 1_048_576;
/// Most weights in a dense table (4 TiB of float32).
pub const MAX_DENSE_ELEMENTS: u64 = 1 << 40;
/// Most dimensions of a dense table.
pub const MAX_RANK: usize = 16;
/// Largest `fan_in` and `fan_out`.
pub const MAX_FAN: u64 = 1 << 40;
/// Smallest epsilon: a smaller one is lost in float32, and 0 / 0 would follow.
pub const MIN_EPSILON: f64 = 1e-30;
/// Largest magnitude of any setting; far from where float32 overflows.
const MAX_NUMBER: f64 = 1e30;

/// Lowest and highest value of settings.
const NOT_NEGATIVE: (f64, f64) = (0.0, MAX_NUMBER);
const POSITIVE: (f64, f64) = (MIN_EPSILON, MAX_NUMBER);
/// Up to the last number below 1.
const FRACTION: (f64, f64) = (0.0, 1.0 - f64::EPSILON / 2.0);

/// Why a table description was refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum SpecError {
    /// Not JSON, or not of the right form.
    #[error("table description: {0}")]
    Parse(String),
    /// The text is too long to be a table description.
    #[error("table description: {bytes} bytes; allowed are {MAX_JSON_BYTES}")]
    TooLong {
        /// Its length.
        bytes: usize,
    },
    /// A field is out of its range.
    #[error("table {table}: {field} is {value}; allowed: {allowed}")]
    OutOfRange {
        /// The table's name, quoted.
        table: String,
        /// The path of the field.
        field: String,
        /// What it holds.
        value: String,
        /// What it may hold.
        allowed: String,
    },
}

impl TableSpec {
    /// Check every field; [`TableSpec::from_json`] does it, a spec built by hand needs it.
    pub fn check(&self) -> Result<(), SpecError> {
        let checker = Checker { table: &self.name };
        checker.name()?;
        checker.kind(&self.kind)?;
        checker.initializer(&self.initializer)?;
        checker.optimizer(&self.optimizer)?;
        match self.non_finite {
            NonFinitePolicy::Refuse => Ok(()),
            NonFinitePolicy::Clip { limit } => {
                checker.number("non_finite.clip.limit", limit, MIN_EPSILON, MAX_NUMBER)
            }
        }
    }
}

/// Writes the table's name into every error.
struct Checker<'a> {
    table: &'a str,
}

impl Checker<'_> {
    fn refuse(&self, field: &str, value: &dyn Display, allowed: &dyn Display) -> SpecError {
        SpecError::OutOfRange {
            table: format!(
                "{:?}",
                self.table.chars().take(MAX_NAME_BYTES).collect::<String>()
            ),
            field: field.to_owned(),
            value: value.to_string(),
            allowed: allowed.to_string(),
        }
    }

    fn name(&self) -> Result<(), SpecError> {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"_./-".contains(&byte);
        if (1..=MAX_NAME_BYTES).contains(&self.table.len()) && self.table.bytes().all(allowed) {
            return Ok(());
        }
        let value = format!("{} bytes long", self.table.len());
        Err(self.refuse(
            "name",
            &value,
            &format!("1 to {MAX_NAME_BYTES} of A-Z a-z 0-9 _ . / -"),
        ))
    }

    fn kind(&self, kind: &TableKind) -> Result<(), SpecError> {
        match kind {
            TableKind::Sparse { dim } => self.integer("kind.sparse.dim", *dim, MAX_DIM),
            TableKind::Dense {
                shape,
                block_elements,
            } => {
                self.integer(
                    "kind.dense.block_elements",
                    *block_elements,
                    MAX_BLOCK_ELEMENTS,
                )?;
                let elements = shape
                    .iter()
                    .try_fold(1u64, |product, &size| product.checked_mul(size));
                let fits = elements.is_some_and(|n| (1..=MAX_DENSE_ELEMENTS).contains(&n));
                if fits && (1..=MAX_RANK).contains(&shape.len()) {
                    return Ok(());
                }
                let allowed = format!(
                    "1 to {MAX_RANK} dimensions, none of them 0, of at most {MAX_DENSE_ELEMENTS} elements together"
                );
                Err(self.refuse("kind.dense.shape", &format!("{shape:?}"), &allowed))
            }
        }
    }

    fn initializer(&self, initializer: &Initializer) -> Result<(), SpecError> {
        match *initializer {
            Initializer::Zeros {} => Ok(()),
            Initializer::Constant { value } => self.finite("initializer.constant.value", value),
            Initializer::Uniform { low, high } => {
                self.finite("initializer.uniform.low", low)?;
                self.number("initializer.uniform.high", high, low, MAX_NUMBER)
            }
            Initializer::Normal { mean, std } => {
                self.finite("initializer.normal.mean", mean)?;
                self.number("initializer.normal.std", std, 0.0, MAX_NUMBER)
            }
            Initializer::TruncatedNormal { mean, std } => {
                self.finite("initializer.truncated_normal.mean", mean)?;
                self.number("initializer.truncated_normal.std", std, 0.0, MAX_NUMBER)
            }
            Initializer::Xavier {
                fan_in,
                fan_out,
                gain,
                ..
            } => {
                self.integer("initializer.xavier.fan_in", fan_in, MAX_FAN)?;
                self.integer("initializer.xavier.fan_out", fan_out, MAX_FAN)?;
                self.number("initializer.xavier.gain", gain, 0.0, MAX_NUMBER)
            }
        }
    }

    #[rustfmt::skip] // A table: one line per setting.
    fn optimizer(&self, optimizer: &OptimizerSpec) -> Result<(), SpecError> {
        use OptimizerSpec::{AdamW, Adagrad, Adam, Ftrl, Momentum, RmsProp, Sgd};
        match *optimizer {
            Sgd { learning_rate } => self.settings("sgd", &[
                ("learning_rate", learning_rate, NOT_NEGATIVE),
            ]),
            Momentum { learning_rate, momentum, .. } => self.settings("momentum", &[
                ("learning_rate", learning_rate, NOT_NEGATIVE),
                ("momentum", momentum, FRACTION),
            ]),
            Adagrad { learning_rate, epsilon, initial_accumulator } => self.settings("adagrad", &[
                ("learning_rate", learning_rate, NOT_NEGATIVE),
                ("epsilon", epsilon, POSITIVE),
                ("initial_accumulator", initial_accumulator, NOT_NEGATIVE),
            ]),
            Adam { learning_rate, beta1, beta2, epsilon } => {
                self.adam("adam", learning_rate, [beta1, beta2], epsilon)
            }
            AdamW { learning_rate, beta1, beta2, epsilon, weight_decay } => {
                self.adam("adamw", learning_rate, [beta1, beta2], epsilon)?;
                self.settings("adamw", &[("weight_decay", weight_decay, NOT_NEGATIVE)])
            }
            RmsProp { learning_rate, rho, epsilon, momentum, .. } => self.settings("rmsprop", &[
                ("learning_rate", learning_rate, NOT_NEGATIVE),
                ("rho", rho, FRACTION),
                ("epsilon", epsilon, POSITIVE),
                ("momentum", momentum, FRACTION),
            ]),
            Ftrl { learning_rate, l1, l2, learning_rate_power, initial_accumulator } => self.settings("ftrl", &[
                // The formula divides by it.
                ("learning_rate", learning_rate, POSITIVE),
                ("l1", l1, NOT_NEGATIVE),
                ("l2", l2, NOT_NEGATIVE),
                ("learning_rate_power", learning_rate_power, (-1.0, 0.0)),
                // With 0, a tiny first gradient would divide by 0.
                ("initial_accumulator", initial_accumulator, POSITIVE),
            ]),
        }
    }

    fn adam(&self, name: &str, rate: f64, betas: [f64; 2], epsilon: f64) -> Result<(), SpecError> {
        self.settings(
            name,
            &[
                ("learning_rate", rate, NOT_NEGATIVE),
                ("beta1", betas[0], FRACTION),
                ("beta2", betas[1], FRACTION),
                ("epsilon", epsilon, POSITIVE),
            ],
        )
    }

    /// Check (field, value, lowest and highest allowed) of an optimizer.
    fn settings(&self, optimizer: &str, all: &[(&str, f64, (f64, f64))]) -> Result<(), SpecError> {
        all.iter().try_for_each(|&(field, value, (low, high))| {
            self.number(&format!("optimizer.{optimizer}.{field}"), value, low, high)
        })
    }

    fn integer(&self, field: &str, value: u64, max: u64) -> Result<(), SpecError> {
        if (1..=max).contains(&value) {
            return Ok(());
        }
        Err(self.refuse(field, &value, &format!("1 to {max}")))
    }

    fn finite(&self, field: &str, value: f64) -> Result<(), SpecError> {
        self.number(field, value, -MAX_NUMBER, MAX_NUMBER)
    }

    /// NaN is in no range.
    fn number(&self, field: &str, value: f64, min: f64, max: f64) -> Result<(), SpecError> {
        if (min..=max).contains(&value) {
            return Ok(());
        }
        Err(self.refuse(field, &value, &format!("a number from {min:?} to {max:?}")))
    }
}

/// Append `path: a here, b there` for every leaf in which two descriptions differ.
pub(super) fn collect_differences(
    path: &str,
    here: &Value,
    there: &Value,
    found: &mut Vec<String>,
) {
    match (here, there) {
        (Value::Object(left), Value::Object(right)) if left.keys().eq(right.keys()) => {
            for ((key, left), right) in left.iter().zip(right.values()) {
                let path = if path.is_empty() {
                    key.clone()
                } else {
                    format!("{path}.{key}")
                };
                collect_differences(&path, left, right, found);
            }
        }
        _ if here != there => found.push(format!("{path}: {here} here, {there} there")),
        _ => {}
    }
}
