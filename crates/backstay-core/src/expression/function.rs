//! A user function with its settings, and what each kind of them is given and returns.
//!
//! The optimizer's kind is in [`crate::optimizer`]; it has states besides.

use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::check::{ExpressionError, Shape, Signature, Type, MAX_MAGNITUDE};
use super::node::Expression;
use super::program::{Evaluation, Program};

/// Most settings of a user function.
pub const MAX_SETTINGS: usize = 8;
/// Longest name of a user function, a setting or a state.
const MAX_NAME_BYTES: usize = 64;

/// Why a user function was refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[allow(missing_docs)] // The messages say it.
pub enum FunctionError {
    #[error("user function {name}: {error}")]
    Expression {
        name: String,
        error: ExpressionError,
    },
    #[error("user function {name}: '{}' is no name of a {what}; allowed: 1 to {MAX_NAME_BYTES} of A-Z a-z 0-9 _, no digit first", .given.escape_debug())]
    Name {
        name: String,
        what: &'static str,
        given: String,
    },
    #[error("user function {name}: '{given}' names two things, or is taken; choose another name for the {what}")]
    TakenName {
        name: String,
        what: &'static str,
        given: String,
    },
    #[error("user function {name}: {count} of {what}; allowed: up to {allowed}")]
    TooMany {
        name: String,
        what: &'static str,
        count: usize,
        allowed: usize,
    },
    #[error("user function {name}: {what} is {value}; allowed: a number up to 1e30 in magnitude")]
    Number {
        name: String,
        what: String,
        value: String,
    },
}

/// What a user function of a kind is given and returns.
pub trait FunctionKind {
    /// Its inputs, by name.
    const INPUTS: &'static [(&'static str, Shape)];
    /// Its result.
    const RESULT: (&'static str, Type);
}

/// A kind whose inputs are the time and the statistics of a row.
pub trait OfStatistics: FunctionKind {}

/// A statistic of a row, as an input of a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Statistic {
    /// When it was pushed last, in seconds.
    LastSeen,
    /// How often it was pushed.
    Frequency,
    /// Its shows, decayed.
    Show,
    /// Its clicks, decayed.
    Click,
}

impl Statistic {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::LastSeen, Self::Frequency, Self::Show, Self::Click];

    /// Its name as an input.
    pub fn name(self) -> &'static str {
        STATISTICS[self.input()].0
    }

    /// Its number among the inputs: the time is the first.
    fn input(self) -> usize {
        1 + self as usize
    }
}

/// What a pull returns in the place of a row's weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pull;

/// How much a row is worth.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Score;

/// Whether a key gets a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Admission;

const STATISTICS: &[(&str, Shape)] = &[
    ("time", Shape::Batch),
    ("last_seen", Shape::Number),
    ("frequency", Shape::Number),
    ("show", Shape::Number),
    ("click", Shape::Number),
];

impl FunctionKind for Pull {
    const INPUTS: &'static [(&'static str, Shape)] = &[("weights", Shape::Vector)];
    const RESULT: (&'static str, Type) = (
        "weights",
        Type {
            shape: Shape::Vector,
            mask: false,
        },
    );
}

impl FunctionKind for Score {
    const INPUTS: &'static [(&'static str, Shape)] = STATISTICS;
    const RESULT: (&'static str, Type) = (
        "score",
        Type {
            shape: Shape::Number,
            mask: false,
        },
    );
}

impl OfStatistics for Score {}

impl FunctionKind for Admission {
    const INPUTS: &'static [(&'static str, Shape)] = STATISTICS;
    const RESULT: (&'static str, Type) = (
        "admitted",
        Type {
            shape: Shape::Number,
            mask: true,
        },
    );
}

impl OfStatistics for Admission {}

/// The statistics of one row, or of a key that has none yet; as in [`Statistic::ALL`].
pub type StatisticsOfRow = [f64; Statistic::ALL.len()];

/// The JSON form of a [`Function`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FunctionJson {
    name: String,
    #[serde(default)]
    settings: BTreeMap<String, f64>,
    expression: Expression,
}

/// A user function of a kind, checked and ready to run.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(
    try_from = "FunctionJson",
    into = "FunctionJson",
    bound = "K: FunctionKind + Clone"
)]
pub struct Function<K> {
    json: Arc<FunctionJson>,
    program: Arc<Program>,
    kind: PhantomData<K>,
}

impl<K> PartialEq for Function<K> {
    fn eq(&self, other: &Self) -> bool {
        self.json == other.json
    }
}

impl<K: FunctionKind> TryFrom<FunctionJson> for Function<K> {
    type Error = FunctionError;

    fn try_from(json: FunctionJson) -> Result<Self, FunctionError> {
        check_names(&json.name, "function", std::iter::once(&json.name), &[])?;
        let taken: Vec<&str> = K::INPUTS.iter().map(|one| one.0).collect();
        check_names(&json.name, "setting", json.settings.keys(), &taken)?;
        for (setting, &value) in &json.settings {
            check_number(&json.name, setting, value)?;
        }
        let signature = Self::signature(json.settings.keys().cloned().collect());
        let program = Program::new(&json.expression, &signature).map_err(|error| {
            FunctionError::Expression {
                name: json.name.clone(),
                error,
            }
        })?;
        Ok(Self {
            json: Arc::new(json),
            program: Arc::new(program),
            kind: PhantomData,
        })
    }
}

impl<K> From<Function<K>> for FunctionJson {
    fn from(function: Function<K>) -> Self {
        Arc::unwrap_or_clone(function.json)
    }
}

/// Refuse names that are none, that are there twice or are taken, and too many of them.
pub fn check_names<'a>(
    function: &str,
    what: &'static str,
    names: impl Iterator<Item = &'a String>,
    taken: &[&str],
) -> Result<(), FunctionError> {
    let name: String = function.chars().take(MAX_NAME_BYTES).collect();
    let mut before: Vec<&str> = taken.to_vec();
    for (at, given) in names.enumerate() {
        let word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
        let fits = (1..=MAX_NAME_BYTES).contains(&given.len()) && given.bytes().all(word);
        if !fits || given.as_bytes()[0].is_ascii_digit() {
            let given = given.chars().take(MAX_NAME_BYTES).collect();
            return Err(FunctionError::Name { name, what, given });
        }
        if before.contains(&given.as_str()) {
            let given = given.clone();
            return Err(FunctionError::TakenName { name, what, given });
        }
        if at == MAX_SETTINGS {
            return Err(FunctionError::TooMany {
                name,
                what,
                count: at + 1,
                allowed: MAX_SETTINGS,
            });
        }
        before.push(given);
    }
    Ok(())
}

/// Refuse a number that is not finite or too large.
pub fn check_number(function: &str, what: &str, value: f64) -> Result<(), FunctionError> {
    if value.abs() <= MAX_MAGNITUDE {
        return Ok(());
    }
    Err(FunctionError::Number {
        name: function.into(),
        what: what.into(),
        value: format!("{value:?}"),
    })
}

impl<K: FunctionKind> Function<K> {
    /// What a function of this kind is given and returns, besides settings of these names.
    pub fn signature(settings: Vec<String>) -> Signature {
        let inputs = K::INPUTS.iter().map(|&(name, shape)| (name.into(), shape));
        let (result, wanted) = K::RESULT;
        Signature {
            inputs: inputs.collect(),
            outside: None,
            settings,
            results: vec![(result.into(), wanted)],
        }
    }
}

impl<K> Function<K> {
    /// The name that its user gave it.
    pub fn name(&self) -> &str {
        &self.json.name
    }

    /// Its settings by name.
    pub fn settings(&self) -> &BTreeMap<String, f64> {
        &self.json.settings
    }

    /// Refuse rows for which it would take too much memory.
    pub fn check_elements(&self, elements: usize) -> Result<(), FunctionError> {
        self.program
            .check_elements(elements)
            .map_err(|error| FunctionError::Expression {
                name: self.json.name.clone(),
                error,
            })
    }

    fn begin(&self, elements: usize, rows: usize, inputs: &[f64]) -> Evaluation<'_> {
        let settings = self.json.settings.values().copied();
        let given: Vec<f64> = inputs.iter().copied().chain(settings).collect();
        let most = Program::block_rows(elements).min(rows.max(1));
        self.program.begin(elements, most, &given)
    }
}

impl Function<Pull> {
    /// Replace the weights of rows, \[n, `elements`], by the results.
    pub fn apply(&self, elements: usize, weights: &mut [f32]) {
        let mut evaluation = self.begin(elements, weights.len() / elements, &[]);
        for rows in weights.chunks_mut(elements * evaluation.rows()) {
            if let Some(input) = evaluation.narrow_input(0) {
                input[..rows.len()].copy_from_slice(rows);
            }
            evaluation.run(rows.len() / elements, &[]);
            rows.copy_from_slice(&evaluation.result(0)[..rows.len()]);
        }
    }
}

impl<K: OfStatistics> Function<K> {
    /// Whether its result depends on a statistic.
    pub fn uses(&self, statistic: Statistic) -> bool {
        self.program.uses(statistic.input())
    }

    /// Whether its result depends on a statistic at all.
    pub fn uses_any(&self) -> bool {
        Statistic::ALL.into_iter().any(|one| self.uses(one))
    }

    /// Begin to work on so many rows at a time in seconds.
    pub fn begin_rows(&self, time: u32, rows: usize) -> RowBatch<'_> {
        RowBatch {
            evaluation: self.begin(1, rows, &[f64::from(time)]),
            rows: 0,
        }
    }
}

/// Rows on their way through a function of their statistics: add some, run, read; then again.
pub struct RowBatch<'f> {
    evaluation: Evaluation<'f>,
    /// Those that were added since the last run.
    rows: usize,
}

impl RowBatch<'_> {
    /// The most rows of a run.
    pub fn most(&self) -> usize {
        self.evaluation.rows()
    }

    /// Rows that were added since the last run.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Add a row to the next run.
    #[inline]
    pub fn add(&mut self, row: &StatisticsOfRow) {
        for statistic in Statistic::ALL {
            if let Some(input) = self.evaluation.wide_input(statistic.input()) {
                input[self.rows] = row[statistic as usize];
            }
        }
        self.rows += 1;
    }

    /// The result of each row, in the order in which they were added. A mask is 1 where it holds.
    pub fn run(&mut self) -> &[f64] {
        let rows = std::mem::take(&mut self.rows);
        self.evaluation.run(rows, &[]);
        &self.evaluation.wide_result(0)[..rows]
    }
}
