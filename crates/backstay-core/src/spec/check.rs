//! What a table description may hold, and how two of them differ.

use std::fmt::Display;

use serde_json::Value;
use thiserror::Error;

use super::lifetime::{
    Admission, Capacity, Expiry, Lifetime, Score, ScoreRule, Unadmitted, FILTER_BLOCK_BYTES,
    MIN_SHARE,
};
use super::ranges::{ranges, Span};
use super::{Initializer, TableKind, TableSpec};
use crate::compensation::Compensation;
use crate::expression::{Function, FunctionError, OfStatistics, Statistic};
use crate::optimizer::{Optimizer, MAX_NUMBER};

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
/// Most occurrences that a Bloom filter's counter counts: it has seven bits.
const MAX_FILTERED: u64 = 100;
const FILTER_BYTES: &str = "lifetime.admission.after.filter_bytes";

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

impl SpecError {
    /// What is wrong, with `name` for the part that stands at `path`.
    pub fn of_part(&self, path: &str, name: &str) -> String {
        match self {
            Self::OutOfRange {
                field,
                value,
                allowed,
                ..
            } => {
                let rest = field.strip_prefix(path);
                let field = rest.map_or_else(|| field.clone(), |rest| format!("{name}{rest}"));
                format!("{field} is {value}; allowed: {allowed}")
            }
            Self::Function { reason, .. } | Self::Parse(reason) => reason.clone(),
            Self::TooLong { .. } => self.to_string(),
        }
    }
}

impl TableSpec {
    /// Read and check a description.
    pub fn from_json(text: &str) -> Result<Self, SpecError> {
        if text.len() > MAX_JSON_BYTES {
            return Err(SpecError::TooLong { bytes: text.len() });
        }
        let mut spec: Self = serde_json::from_str(text)
            .map_err(|error| SpecError::Parse(what_is_wrong(text, &error)))?;
        if let Some(lifetime) = &mut spec.lifetime {
            lifetime.fill_in();
        }
        spec.check()?;
        Ok(spec)
    }

    /// Check every field; [`TableSpec::from_json`] does it, a spec built by hand needs it.
    pub fn check(&self) -> Result<(), SpecError> {
        let checker = Checker { table: &self.name };
        checker.name()?;
        checker.numbers("", &serde_json::to_value(self).unwrap_or_default())?;
        checker.kind(&self.kind)?;
        checker.initializer(&self.initializer)?;
        let elements = self.row_elements();
        if let Optimizer::User(user) = &self.optimizer {
            checker.function("optimizer.user", user.check_elements(elements))?;
        }
        if let Some(pull) = &self.pull {
            checker.function("pull", pull.check_elements(elements))?;
        }
        checker.compensation(self)?;
        match (&self.lifetime, &self.kind) {
            (None, _) => Ok(()),
            (Some(_), TableKind::Dense { .. }) => {
                let allowed = "none in a dense table: its blocks neither come nor go";
                Err(checker.refuse("lifetime", &"set", &allowed))
            }
            (Some(lifetime), TableKind::Sparse { .. }) => checker.lifetime(lifetime),
        }
    }

    /// Check what depends on the cluster's number of slots: whether a slot's share of a capacity or
    /// of a filter is large enough.
    pub fn check_slots(&self, slots: u32) -> Result<(), SpecError> {
        let Some(lifetime) = &self.lifetime else {
            return Ok(());
        };
        let (rows, row_bytes) = (MIN_SHARE * u64::from(slots), self.row_bytes());
        let capacity = lifetime
            .capacity
            .map_or((None, None), |one| (one.rows, one.bytes));
        let filter = match &lifetime.admission {
            Admission::After { filter_bytes, .. } => *filter_bytes,
            _ => None,
        };
        let filter_least = FILTER_BLOCK_BYTES * u64::from(slots);
        for (field, value, least) in [
            ("lifetime.capacity.rows", capacity.0, rows),
            ("lifetime.capacity.bytes", capacity.1, rows * row_bytes),
            (FILTER_BYTES, filter, filter_least),
        ] {
            if let Some(value) = value.filter(|&value| value < least) {
                let allowed = format!("at least {least} in a cluster of {slots} slots");
                return Err(Checker { table: &self.name }.refuse(field, &value, &allowed));
            }
        }
        Ok(())
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
        let mut value = serde_json::to_value(self).unwrap_or_default();
        if let Some(fields) = value.as_object_mut() {
            // Absent from the canonical form if there is none.
            for field in ["lifetime", "compensation", "pull"] {
                fields.entry(field).or_insert(Value::Null);
            }
        }
        value
    }
}

/// Why a text could not be read.
fn what_is_wrong(text: &str, error: &serde_json::Error) -> String {
    match serde_json::from_str::<Value>(text) {
        Err(error) => format!("not JSON: {error}"),
        Ok(value) if !value.is_object() => "it must be a JSON object".into(),
        // The same reason, but without line and column, and in words where several kinds are given.
        Ok(value) => serde_json::from_value::<TableSpec>(value)
            .map_or_else(|plain| plain.to_string(), |_| error.to_string()),
    }
}

/// Writes the table's name into every error.
pub(super) struct Checker<'a> {
    pub(super) table: &'a str,
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
        let allowed = format!("1 to {MAX_NAME_BYTES} of A-Z a-z 0-9 _ . / -");
        Err(self.refuse("name", &self.quoted(), &allowed))
    }

    /// Each number alone, of the part of the JSON form at a path.
    fn numbers(&self, path: &str, value: &Value) -> Result<(), SpecError> {
        if let Value::Object(fields) = value {
            return fields.iter().try_for_each(|(name, value)| {
                let dot = if path.is_empty() { "" } else { "." };
                self.numbers(&format!("{path}{dot}{name}"), value)
            });
        }
        match ranges().get(path) {
            // A null is what a lifetime does not set; elsewhere it is a NaN.
            Some(_) if value.is_null() && path.starts_with("lifetime.") => Ok(()),
            Some(span) if !span.holds(value) => Err(self.refuse(path, value, &span.words())),
            _ => Ok(()),
        }
    }

    pub(super) fn kind(&self, kind: &TableKind) -> Result<(), SpecError> {
        let TableKind::Dense { shape, .. } = kind else {
            return Ok(());
        };
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

    pub(super) fn initializer(&self, initializer: &Initializer) -> Result<(), SpecError> {
        match *initializer {
            Initializer::Uniform { low, high } if high < low => {
                let allowed = Span::Number(low, MAX_NUMBER).words();
                Err(self.refuse("initializer.uniform.high", &format!("{high:?}"), &allowed))
            }
            _ => Ok(()),
        }
    }

    fn compensation(&self, spec: &TableSpec) -> Result<(), SpecError> {
        let adagrad = matches!(spec.optimizer, Optimizer::Adagrad(_));
        if spec.compensation == Compensation::AdaptiveRevision && !adagrad {
            let name = spec.optimizer.name();
            let allowed = format!("with the optimizer adagrad only; this table has {name}");
            return Err(self.refuse("compensation", &"\"adaptive_revision\"", &allowed));
        }
        let whole = matches!(spec.optimizer, Optimizer::Ftrl(_) | Optimizer::GroupFtrl(_));
        if spec.compensation == Compensation::Scale && whole {
            let name = spec.optimizer.name();
            let allowed = format!(
                "\"ignore\" or delay_compensated with the optimizer {name}: its learning rate scales the whole weights, not only a step. \
                 If BACKSTAY_COMPENSATION or the job's mode.compensation says scale, give this layer a compensation= of its own"
            );
            return Err(self.refuse("compensation", &"\"scale\"", &allowed));
        }
        if spec.compensation.delay().is_none() {
            return Ok(());
        }
        let allowed = match (&spec.optimizer, &spec.pull) {
            (Optimizer::User(_), _) => "\"ignore\" or \"scale\" with an optimizer of your own",
            (_, Some(_)) => "\"ignore\" or \"scale\" with a function on pull: it hides the weights",
            _ => return Ok(()),
        };
        Err(self.refuse("compensation", &"\"delay_compensated\"", &allowed))
    }

    pub(super) fn lifetime(&self, lifetime: &Lifetime) -> Result<(), SpecError> {
        if *lifetime == Lifetime::default() {
            let allowed = "one of admission, expiry and capacity at least, or no lifetime at all";
            return Err(self.refuse("lifetime", &"without any setting", &allowed));
        }
        if lifetime.admission == Admission::Always && lifetime.unadmitted == Unadmitted::Zeros {
            let allowed =
                "\"initial\" with admission \"always\": every key that is pushed has a row";
            return Err(self.refuse("lifetime.unadmitted", &"\"zeros\"", &allowed));
        }
        self.admission(&lifetime.admission)?;
        if let Some(expiry) = &lifetime.expiry {
            self.expiry(expiry)?;
        }
        if let Some(capacity) = &lifetime.capacity {
            self.capacity(*capacity)?;
        }
        match (&lifetime.score, lifetime.uses_score()) {
            (Some(score), true) => self.score(score)?,
            (Some(_), false) => {
                let allowed = "null, where nothing uses a score: set expiry.score_below, admission.score or evict lowest_score";
                return Err(self.refuse("lifetime.score", &"set", &allowed));
            }
            (None, _) => {}
        }
        let below = lifetime.expiry.and_then(|expiry| expiry.score_below);
        match (&lifetime.admission, below) {
            (&Admission::Score { at_least }, Some(below)) if below > at_least => {
                let allowed = format!(
                    "at most lifetime.admission.score.at_least ({at_least:?}): a row would expire as it is admitted"
                );
                Err(self.refuse("lifetime.expiry.score_below", &below, &allowed))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn admission(&self, admission: &Admission) -> Result<(), SpecError> {
        match admission {
            Admission::After {
                occurrences,
                filter_bytes: Some(_),
            } if u64::from(*occurrences) > MAX_FILTERED => {
                let field = "lifetime.admission.after.occurrences";
                let allowed = format!("2 to {MAX_FILTERED} with a filter");
                Err(self.refuse(field, occurrences, &allowed))
            }
            Admission::Function(function) => {
                self.of_statistics("lifetime.admission.function", function)
            }
            _ => Ok(()),
        }
    }

    fn of_statistics<K: OfStatistics>(
        &self,
        field: &str,
        function: &Function<K>,
    ) -> Result<(), SpecError> {
        if function.uses_any() {
            return Ok(());
        }
        let allowed = "one whose result depends on last_seen, frequency, show or click";
        Err(self.refuse(field, &function.name(), &allowed))
    }

    pub(super) fn expiry(&self, expiry: &Expiry) -> Result<(), SpecError> {
        let by_score = expiry.score_below.or(expiry.norm_below);
        if expiry.unseen_seconds.is_none() && by_score.is_none() {
            let allowed = "one of unseen_seconds, score_below and norm_below at least";
            return Err(self.refuse("lifetime.expiry", &"without a threshold", &allowed));
        }
        Ok(())
    }

    pub(super) fn capacity(&self, capacity: Capacity) -> Result<(), SpecError> {
        let (value, allowed) = match (capacity.rows, capacity.bytes) {
            (Some(_), Some(_)) => ("in rows and in bytes", "one of the two"),
            (None, None) => ("without a size", "rows or bytes"),
            _ => return Ok(()),
        };
        Err(self.refuse("lifetime.capacity", &value, &allowed))
    }

    pub(super) fn score(&self, score: &Score) -> Result<(), SpecError> {
        if let ScoreRule::Function(function) = &score.rule {
            self.of_statistics("lifetime.score.function", function)?;
        }
        let fades = [Statistic::Show, Statistic::Click];
        if score.decay < 1.0 && !fades.into_iter().any(|one| score.rule.uses(one)) {
            let allowed = "1 with a function that uses neither show nor click: nothing would fade";
            return Err(self.refuse("lifetime.score.decay", &score.decay, &allowed));
        }
        if score.decay < 1.0 && score.decay as f32 >= 1.0 {
            let allowed = "1, or less than 0.99999998: float32 rounds this to 1";
            return Err(self.refuse("lifetime.score.decay", &score.decay, &allowed));
        }
        let field = "lifetime.score.decay_every_seconds";
        match score.decay_every_seconds {
            Some(seconds) if score.decay >= 1.0 => {
                let allowed = "null with lifetime.score.decay 1: nothing would fade";
                Err(self.refuse(field, &seconds, &allowed))
            }
            _ => Ok(()),
        }
    }

    fn function(&self, field: &str, checked: Result<(), FunctionError>) -> Result<(), SpecError> {
        checked.map_err(|error| SpecError::Function {
            table: self.quoted(),
            field: field.to_owned(),
            reason: error.to_string(),
        })
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
