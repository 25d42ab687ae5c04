//! Table descriptions: what Python and Rust agree on, as JSON.
//!
//! [`TableSpec::from_json`] is the judge. It refuses unknown fields and values out of range,
//! fills in every default, and what it returns can be used without further checks: sizes do
//! not overflow and every number is finite in float32. `check` holds it. This module imports
//! [`crate::optimizer`], whose structs are the settings, [`crate::expression`], and
//! [`crate::storage`] for the size of a row.

mod check;
pub mod lifetime;
mod part;
mod ranges;

use serde::{Deserialize, Serialize};

use crate::compensation::Compensation;
use crate::expression::{Function, Pull};
use crate::optimizer::{Optimizer, RowOptimizer};
use crate::storage;

pub use check::{
    SpecError, MAX_BLOCK_ELEMENTS, MAX_DENSE_ELEMENTS, MAX_DIM, MAX_FAN, MAX_JSON_BYTES,
    MAX_NAME_BYTES, MAX_RANK,
};
pub use lifetime::Lifetime;
pub use part::Part;
pub use ranges::{ranges, Span};

/// Everything that decides the content of a table, given the pushes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TableSpec {
    /// Unique in the cluster; letters, digits and `_ . / -`.
    pub name: String,
    /// Rows by key, or one tensor in blocks.
    pub kind: TableKind,
    /// How weights are held in memory.
    #[serde(default)]
    pub storage: Storage,
    /// The value of a row before its first push.
    #[serde(default)]
    pub initializer: Initializer,
    /// Makes two tables of one name in two jobs start differently.
    #[serde(default)]
    pub seed: u64,
    /// What a push does to a row.
    pub optimizer: Optimizer,
    /// What happens to NaN and infinity in gradients.
    #[serde(default)]
    pub non_finite: NonFinitePolicy,
    /// When rows come and go; None: they stay until they are deleted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lifetime: Option<Lifetime>,
    /// What is done about gradients that are stale; absent: nothing.
    #[serde(default, skip_serializing_if = "Compensation::is_ignore")]
    pub compensation: Compensation,
    /// What a pull returns in the place of the weights; absent: the weights.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pull: Option<Function<Pull>>,
}

/// Sparse rows or a dense tensor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum TableKind {
    /// Rows of `dim` weights under any 64-bit key.
    Sparse {
        /// Weights of one row.
        dim: u64,
    },
    /// One tensor, cut in row-major order into blocks of `block_elements`.
    Dense {
        /// The tensor's shape; no dimension is 0.
        shape: Vec<u64>,
        /// Weights of one block; the last one is padded to it.
        #[serde(default = "default_block_elements")]
        block_elements: u64,
    },
}

/// The format of weights in memory. Optimizer state is always float32, and so is arithmetic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Storage {
    /// IEEE 754 binary32.
    #[default]
    Float32,
    /// The upper half of a float32.
    Bfloat16,
    /// IEEE 754 binary16.
    Float16,
}

/// The value of a row before its first push; see [`crate::initializer`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
#[allow(missing_docs)] // The fields are the parameters of the distributions named.
pub enum Initializer {
    /// All 0.
    Zeros {},
    /// All `value`.
    Constant { value: f64 },
    /// Uniform in `[low, high]`.
    Uniform { low: f64, high: f64 },
    /// Normal.
    Normal {
        #[serde(default)]
        mean: f64,
        #[serde(default = "default_std")]
        std: f64,
    },
    /// Normal, cut at two standard deviations from the mean.
    TruncatedNormal {
        #[serde(default)]
        mean: f64,
        #[serde(default = "default_std")]
        std: f64,
    },
    /// Scaled by the sizes of the layers that the weights connect.
    Xavier {
        fan_in: u64,
        fan_out: u64,
        #[serde(default = "one")]
        gain: f64,
        #[serde(default)]
        distribution: XavierDistribution,
    },
}

impl Default for Initializer {
    fn default() -> Self {
        Self::Zeros {}
    }
}

/// The two forms of Xavier initialization.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum XavierDistribution {
    /// Uniform within `gain * sqrt(6 / (fan_in + fan_out))` of 0.
    #[default]
    Uniform,
    /// Normal with standard deviation `gain * sqrt(2 / (fan_in + fan_out))`.
    Normal,
}

/// What happens to gradients that are NaN or infinite.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum NonFinitePolicy {
    /// The push is refused and nothing of it applied.
    #[default]
    Refuse,
    /// NaN becomes 0, and every value is brought into `[-limit, limit]`.
    Clip {
        /// Greater than 0.
        limit: f64,
    },
}

impl TableSpec {
    /// The description with every default filled in, fields in a fixed order.
    pub fn canonical_json(&self) -> String {
        // Strings, finite numbers and lists only: there is nothing that could fail to serialise.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// Weights of one row: `dim`, or `block_elements` for a dense table.
    pub fn row_elements(&self) -> usize {
        match self.kind {
            TableKind::Sparse { dim } => dim as usize,
            TableKind::Dense { block_elements, .. } => block_elements as usize,
        }
    }

    /// Weights of the whole tensor of a dense table; 0 for a sparse one.
    pub fn dense_elements(&self) -> u64 {
        match &self.kind {
            TableKind::Sparse { .. } => 0,
            // `check` has refused shapes whose product overflows.
            TableKind::Dense { shape, .. } => shape.iter().product(),
        }
    }

    /// Blocks of a dense table; 0 for a sparse one.
    pub fn dense_blocks(&self) -> u64 {
        match self.kind {
            TableKind::Sparse { .. } => 0,
            TableKind::Dense { block_elements, .. } => {
                self.dense_elements().div_ceil(block_elements)
            }
        }
    }

    /// Words behind the weights of a row: the optimizer's state, that of the compensation, then the
    /// statistics.
    pub fn state_words(&self) -> usize {
        let statistics = self.lifetime.as_ref().map_or(0, Lifetime::statistics_words);
        let elements = self.row_elements();
        let kept = self.compensation.state_elements(elements);
        self.optimizer.state_elements(elements) + kept + statistics
    }

    /// Bytes that a row takes in memory, with its key and its place in the index.
    pub fn row_bytes(&self) -> u64 {
        let weights = storage::weight_words(self.storage, self.row_elements());
        (2 + weights + self.state_words()) as u64 * 4 + 8
    }

    /// The rows that a slot may have of this table, if it has a capacity.
    pub fn share(&self, slots: u32) -> Option<u64> {
        let capacity = self.lifetime.as_ref()?.capacity?;
        let rows = capacity.rows.or_else(|| {
            let bytes = capacity.bytes?;
            Some(bytes / self.row_bytes())
        })?;
        Some(rows / u64::from(slots))
    }

    /// This description with the settings of another one, as far as a table can take them over:
    /// the optimizer's and the lifetime's, except the ones that decide the layout of a row, the
    /// policies for gradients, and what a pull returns.
    #[must_use]
    pub fn with_settings_of(&self, other: &Self) -> Self {
        let lifetime = match (&self.lifetime, &other.lifetime) {
            (Some(held), Some(wanted)) => Some(held.with_settings_of(wanted)),
            (held, _) => held.clone(),
        };
        Self {
            optimizer: self.optimizer.with_settings_of(&other.optimizer),
            non_finite: other.non_finite.clone(),
            lifetime,
            compensation: if self.compensation.fits(other.compensation) {
                other.compensation
            } else {
                self.compensation
            },
            pull: other.pull.clone(),
            ..self.clone()
        }
    }
}

impl Storage {
    /// The name in the JSON form.
    pub fn name(self) -> &'static str {
        match self {
            Self::Float32 => "float32",
            Self::Bfloat16 => "bfloat16",
            Self::Float16 => "float16",
        }
    }
}

fn one() -> f64 {
    1.0
}
fn default_std() -> f64 {
    0.01
}
fn default_block_elements() -> u64 {
    4096
}

#[cfg(test)]
mod tests;
