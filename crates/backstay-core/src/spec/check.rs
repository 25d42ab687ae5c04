//! What a table description may hold, and how two of them differ.

use std::fmt::Display;

use serde_json::Value;
use thiserror::Error;

use super::{Initializer, NonFinitePolicy, TableKind, TableSpec};
use crate::expression::FunctionError;
use crate::optimizer::{Optimizer, MAX_NUMBER, MIN_EPSILON};

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

/// Most characters of a value in a message.
const MAX_SHOWN: usize = 200;

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
    /// A user function does not suit the table.
    #[error("table {table}: {field}: {reason}")]
    Function {
        /// The table's name, quoted.
        table: String,
        /// The path of the function.
        field: String,
        /// Why.
        reason: String,
    },
}

impl TableSpec {
    /// Read and check a description.
    pub fn from_json(text: &str) -> Result<Self, SpecError> {
        if text.len() > MAX_JSON_BYTES {
            return Err(SpecError::TooLong { bytes: text.len() });
        }
        let spec: Self =
            serde_json::from_str(text).map_err(|error| SpecError::Parse(error.to_string()))?;
        spec.check()?;
        Ok(spec)
    }

    /// Check every field; [`TableSpec::from_json`] does it, a spec built by hand needs it.
    pub fn check(&self) -> Result<(), SpecError> {
        let checker = Checker { table: &self.name };
        checker.name()?;
        checker.kind(&self.kind)?;
        checker.initializer(&self.initializer)?;
        checker.optimizer(&self.optimizer)?;
        let elements = self.row_elements();
        if let Optimizer::User(user) = &self.optimizer {
            checker.function("optimizer.user", user.check_elements(elements))?;
        }
        if let Some(pull) = &self.pull {
            checker.function("pull", pull.check_elements(elements))?;
        }
        match self.non_finite {
            NonFinitePolicy::Refuse => Ok(()),
            NonFinitePolicy::Clip { limit } => {
                checker.number("non_finite.clip.limit", limit, MIN_EPSILON, MAX_NUMBER)
            }
        }
    }

    /// The fields in which another description differs, as
    /// `optimizer.adam.beta1: 0.9 here, 0.8 there; ...`; `None` if they are equal.
    pub fn difference(&self, other: &Self) -> Option<String> {
        let (here, there) = (self.as_value(), other.as_value());
        let mut found = Vec::new();
        collect_differences("", &here, &there, &mut found);
        (!found.is_empty()).then(|| found.join("; "))
    }

    /// The fields of another description that a table of this one cannot take over, as
    /// [`Self::difference`] writes them; `None` if rows made here can go on under the other.
    pub fn fixed_difference(&self, other: &Self) -> Option<String> {
        self.with_settings_of(other).difference(other)
    }

    fn as_value(&self) -> Value {
        serde_json::to_value(self).unwrap_or_default()
    }
}

/// Writes the table's name into every error.
struct Checker<'a> {
    table: &'a str,
}

impl Checker<'_> {
    fn quoted(&self) -> String {
        let name: String = self.table.chars().take(MAX_NAME_BYTES).collect();
        format!("{name:?}")
    }

    fn refuse(&self, field: &str, value: &dyn Display, allowed: &dyn Display) -> SpecError {
        SpecError::OutOfRange {
            table: self.quoted(),
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

    fn optimizer(&self, optimizer: &Optimizer) -> Result<(), SpecError> {
        let (name, numbers) = (optimizer.name(), optimizer.numbers());
        let mut all = optimizer.ranges().iter().zip(numbers);
        all.try_for_each(|(&(field, (low, high)), value)| {
            self.number(&format!("optimizer.{name}.{field}"), value, low, high)
        })
    }

    fn function(&self, field: &str, checked: Result<(), FunctionError>) -> Result<(), SpecError> {
        checked.map_err(|error| SpecError::Function {
            table: self.quoted(),
            field: field.to_owned(),
            reason: error.to_string(),
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

/// A value as a message has it: an expression is long.
fn shown(value: &Value) -> String {
    let text = value.to_string();
    if text.chars().count() <= MAX_SHOWN {
        return text;
    }
    text.chars().take(MAX_SHOWN).chain("...".chars()).collect()
}

/// Append `path: a here, b there` for every leaf in which two descriptions differ.
fn collect_differences(path: &str, here: &Value, there: &Value, found: &mut Vec<String>) {
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
        _ if here != there => {
            found.push(format!(
                "{path}: {} here, {} there",
                shown(here),
                shown(there)
            ));
        }
        _ => {}
    }
}
