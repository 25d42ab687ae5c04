//! What a table description may hold, and how two of them differ.

use std::fmt::Display;

use serde_json::Value;
use thiserror::Error;

use super::lifetime::{
    Admission, Capacity, Expiry, Lifetime, Score, ScoreRule, Unadmitted, FILTER_BLOCK_BYTES,
    MIN_SHARE,
};
use super::{Initializer, NonFinitePolicy, TableKind, TableSpec};
use crate::compensation::{Compensation, DelayCompensation};
use crate::expression::{Function, FunctionError, OfStatistics, Statistic};
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
/// Most occurrences that an exact counter counts before a row is made.
const MAX_OCCURRENCES: u64 = 65_535;
/// The same of a Bloom filter's counter: it has seven bits.
const MAX_FILTERED: u64 = 100;
/// Smallest probability and rate.
const MIN_RATE: f64 = 1e-9;
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

impl TableSpec {
    /// Read and check a description.
    pub fn from_json(text: &str) -> Result<Self, SpecError> {
        if text.len() > MAX_JSON_BYTES {
            return Err(SpecError::TooLong { bytes: text.len() });
        }
        let mut spec: Self =
            serde_json::from_str(text).map_err(|error| SpecError::Parse(error.to_string()))?;
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
        if let NonFinitePolicy::Clip { limit } = self.non_finite {
            checker.number("non_finite.clip.limit", limit, MIN_EPSILON, MAX_NUMBER)?;
        }
        checker.compensation(self)?;
        match &self.lifetime {
            None => Ok(()),
            Some(lifetime) => checker.lifetime(lifetime, &self.kind),
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
                "\"ignore\" or delay_compensated with the optimizer {name}: its learning rate scales the whole weights, not only a step"
            );
            return Err(self.refuse("compensation", &"\"scale\"", &allowed));
        }
        let Some(delay) = spec.compensation.delay() else {
            return Ok(());
        };
        let field = "compensation.delay_compensated";
        let mut all = DelayCompensation::NUMBERS.iter().zip(delay.numbers());
        all.try_for_each(|(&(name, (low, high)), value)| {
            self.number(&format!("{field}.{name}"), value, low, high)
        })?;
        let allowed = match (&spec.optimizer, &spec.pull) {
            (Optimizer::User(_), _) => "\"ignore\" or \"scale\" with an optimizer of your own",
            (_, Some(_)) => "\"ignore\" or \"scale\" with a function on pull: it hides the weights",
            _ => return Ok(()),
        };
        Err(self.refuse("compensation", &"\"delay_compensated\"", &allowed))
    }

    fn lifetime(&self, lifetime: &Lifetime, kind: &TableKind) -> Result<(), SpecError> {
        if matches!(kind, TableKind::Dense { .. }) {
            let allowed = "none in a dense table: its blocks neither come nor go";
            return Err(self.refuse("lifetime", &"set", &allowed));
        }
        if *lifetime == Lifetime::default() {
            let allowed = "one of admission, expiry and capacity at least, or no lifetime at all";
            return Err(self.refuse("lifetime", &"without any setting", &allowed));
        }
        self.admission(lifetime)?;
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

    fn admission(&self, lifetime: &Lifetime) -> Result<(), SpecError> {
        match &lifetime.admission {
            Admission::Always if lifetime.unadmitted == Unadmitted::Zeros => {
                let allowed =
                    "\"initial\" with admission \"always\": every key that is pushed has a row";
                Err(self.refuse("lifetime.unadmitted", &"\"zeros\"", &allowed))
            }
            Admission::Always => Ok(()),
            &Admission::After {
                occurrences,
                filter_bytes,
            } => {
                let most = if filter_bytes.is_some() {
                    MAX_FILTERED
                } else {
                    MAX_OCCURRENCES
                };
                let field = "lifetime.admission.after.occurrences";
                self.whole(field, u64::from(occurrences), (2, most))?;
                filter_bytes.map_or(Ok(()), |bytes| {
                    self.whole(FILTER_BYTES, bytes, (65_536, 1 << 40))
                })
            }
            &Admission::Probability { probability } => {
                let field = "lifetime.admission.probability.probability";
                self.number(field, probability, MIN_RATE, 1.0 - f64::EPSILON / 2.0)
            }
            &Admission::Score { at_least } => {
                let field = "lifetime.admission.score.at_least";
                self.number(field, at_least, MIN_EPSILON, MAX_NUMBER)
            }
            Admission::Function(function) => {
                self.of_statistics("lifetime.admission.function", function)
            }
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

    fn expiry(&self, expiry: &Expiry) -> Result<(), SpecError> {
        let (unseen, every) = (expiry.unseen_seconds, expiry.every_seconds);
        if unseen.is_none() && expiry.score_below.is_none() && expiry.norm_below.is_none() {
            let allowed = "one of unseen_seconds, score_below and norm_below at least";
            return Err(self.refuse("lifetime.expiry", &"without a threshold", &allowed));
        }
        for (field, seconds) in [("unseen_seconds", unseen), ("every_seconds", every)] {
            self.seconds(&format!("lifetime.expiry.{field}"), seconds)?;
        }
        let thresholds = [
            ("score_below", expiry.score_below),
            ("norm_below", expiry.norm_below),
        ];
        for (field, below) in thresholds {
            let field = format!("lifetime.expiry.{field}");
            below.map_or(Ok(()), |below| {
                self.number(&field, below, MIN_EPSILON, MAX_NUMBER)
            })?;
        }
        Ok(())
    }

    fn capacity(&self, capacity: Capacity) -> Result<(), SpecError> {
        match (capacity.rows, capacity.bytes) {
            (Some(rows), None) => self.whole("lifetime.capacity.rows", rows, (MIN_SHARE, 1 << 40)),
            (None, Some(bytes)) => self.whole("lifetime.capacity.bytes", bytes, (1024, 1 << 50)),
            (Some(_), Some(_)) => Err(self.refuse(
                "lifetime.capacity",
                &"in rows and in bytes",
                &"one of the two",
            )),
            (None, None) => {
                Err(self.refuse("lifetime.capacity", &"without a size", &"rows or bytes"))
            }
        }
    }

    fn score(&self, score: &Score) -> Result<(), SpecError> {
        match &score.rule {
            ScoreRule::ShowClick(rule) => {
                for (field, value) in [
                    ("nonclick_coefficient", rule.nonclick_coefficient),
                    ("click_coefficient", rule.click_coefficient),
                ] {
                    self.number(&format!("lifetime.score.{field}"), value, 0.0, MAX_NUMBER)?;
                }
            }
            ScoreRule::Function(function) => {
                self.of_statistics("lifetime.score.function", function)?;
            }
        }
        let fades = [Statistic::Show, Statistic::Click];
        if score.decay < 1.0 && !fades.into_iter().any(|one| score.rule.uses(one)) {
            let allowed = "1 with a function that uses neither show nor click: nothing would fade";
            return Err(self.refuse("lifetime.score.decay", &score.decay, &allowed));
        }
        self.number("lifetime.score.decay", score.decay, MIN_RATE, 1.0)?;
        if score.decay < 1.0 && score.decay as f32 >= 1.0 {
            let allowed = "1, or less than 0.99999998: float32 rounds this to 1";
            return Err(self.refuse("lifetime.score.decay", &score.decay, &allowed));
        }
        let field = "lifetime.score.decay_every_seconds";
        self.seconds(field, score.decay_every_seconds)?;
        match score.decay_every_seconds {
            Some(seconds) if score.decay >= 1.0 => {
                let allowed = "null with lifetime.score.decay 1: nothing would fade";
                Err(self.refuse(field, &seconds, &allowed))
            }
            _ => Ok(()),
        }
    }

    fn seconds(&self, field: &str, seconds: Option<u32>) -> Result<(), SpecError> {
        let most = u64::from(i32::MAX.unsigned_abs());
        seconds.map_or(Ok(()), |seconds| {
            self.whole(field, u64::from(seconds), (1, most))
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
        self.whole(field, value, (1, max))
    }

    fn whole(&self, field: &str, value: u64, (min, max): (u64, u64)) -> Result<(), SpecError> {
        if (min..=max).contains(&value) {
            return Ok(());
        }
        Err(self.refuse(field, &value, &format!("{min} to {max}")))
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
