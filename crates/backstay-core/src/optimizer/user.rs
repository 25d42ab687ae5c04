//! A user's own rule: a Python function, traced into an expression.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::RowOptimizer;
use crate::expression::{
    check_names, check_number, Evaluation, Expression, FunctionError, Program, Shape, Signature,
    Type, MAX_SETTINGS,
};
use crate::hash::table_id;

/// Most states of a row.
pub const MAX_STATES: usize = 8;
/// What every such function may ask for, and the names that are kept for what it may ask for later.
const INPUTS: [(&str, Shape); 3] = [
    ("weights", Shape::Vector),
    ("gradient", Shape::Vector),
    ("learning_rate", Shape::Batch),
];
const KEPT_NAMES: [&str; 5] = ["time", "last_seen", "frequency", "show", "click"];
const WEIGHTS: usize = 0;
const GRADIENT: usize = 1;
/// The states are the inputs behind [`INPUTS`], and the results behind the weights.
const FIRST_STATE: usize = 3;

/// Whether a state has a value for each weight or one for the row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Per {
    /// One for each weight.
    Element,
    /// One.
    Row,
}

/// A part of a row's state.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UserState {
    /// The function's parameter.
    pub name: String,
    /// How many values.
    pub per: Per,
    /// Their value in a new row.
    #[serde(default)]
    pub initial: f64,
}

/// The JSON form.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct UserJson {
    name: String,
    #[serde(default = "default_learning_rate")]
    learning_rate: f64,
    #[serde(default)]
    settings: BTreeMap<String, f64>,
    #[serde(default)]
    states: Vec<UserState>,
    expression: Expression,
}

fn default_learning_rate() -> f64 {
    0.01
}

/// An expression from weights, gradient, learning rate, states and settings to new weights and
/// states, see [`crate::expression`].
///
/// The function is the table's for its whole life: rows have its states, and a replica may have to
/// apply what an older master took on. Learning rate and settings may change.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "UserJson", into = "UserJson")]
pub struct User {
    rule: Arc<Rule>,
    /// See [`User::numbers`].
    numbers: [f64; 1 + MAX_SETTINGS],
}

/// What all [`User`]s of one function share: each transaction has one of its own, with its settings.
#[derive(Debug)]
struct Rule {
    name: String,
    /// Names of the settings, in the order of their numbers.
    settings: Vec<String>,
    states: Vec<UserState>,
    expression: Expression,
    program: Program,
    fingerprint: u64,
}

impl PartialEq for Rule {
    fn eq(&self, other: &Self) -> bool {
        let all = |one: &Self| {
            (&one.name, &one.settings, &one.states, &one.expression)
                == (
                    &other.name,
                    &other.settings,
                    &other.states,
                    &other.expression,
                )
        };
        std::ptr::eq(self, other) || all(self)
    }
}

impl From<User> for UserJson {
    fn from(user: User) -> Self {
        let (rule, numbers) = (&user.rule, user.numbers);
        let settings = rule
            .settings
            .iter()
            .cloned()
            .zip(numbers[1..].iter().copied());
        Self {
            name: rule.name.clone(),
            learning_rate: numbers[0],
            settings: settings.collect(),
            states: rule.states.clone(),
            expression: rule.expression.clone(),
        }
    }
}

impl TryFrom<UserJson> for User {
    type Error = FunctionError;

    fn try_from(json: UserJson) -> Result<Self, FunctionError> {
        json.check()?;
        let states = json.states.iter();
        let states = states.map(|state| (state.name.clone(), state.per));
        let signature = Self::signature(json.settings.keys().cloned().collect(), states);
        let program = Program::new(&json.expression, &signature).map_err(|error| {
            FunctionError::Expression {
                name: json.name.clone(),
                error,
            }
        })?;
        let fixed = (
            &json.states,
            json.settings.keys().collect::<Vec<_>>(),
            &json.expression,
        );
        let text = serde_json::to_string(&fixed).unwrap_or_default();
        let mut numbers = [0.0; 1 + MAX_SETTINGS];
        let all = std::iter::once(&json.learning_rate).chain(json.settings.values());
        for (number, &value) in numbers.iter_mut().zip(all) {
            *number = value;
        }
        let rule = Rule {
            fingerprint: table_id(&text) >> 16,
            program,
            name: json.name,
            settings: json.settings.into_keys().collect(),
            states: json.states,
            expression: json.expression,
        };
        Ok(Self {
            rule: Arc::new(rule),
            numbers,
        })
    }
}

impl UserJson {
    fn check(&self) -> Result<(), FunctionError> {
        let name = &self.name;
        let mut taken: Vec<&str> = INPUTS.iter().map(|one| one.0).chain(KEPT_NAMES).collect();
        check_names(name, "function", std::iter::once(name), &[])?;
        check_names(
            name,
            "state",
            self.states.iter().map(|state| &state.name),
            &taken,
        )?;
        taken.extend(self.states.iter().map(|state| state.name.as_str()));
        check_names(name, "setting", self.settings.keys(), &taken)?;
        let initial = |state: &UserState| (format!("initial of {}", state.name), state.initial);
        let initials = self.states.iter().map(initial);
        let settings = self
            .settings
            .iter()
            .map(|(name, &value)| (name.clone(), value));
        let rate = ("learning_rate".to_owned(), self.learning_rate);
        for (what, value) in initials.chain(settings).chain([rate]) {
            check_number(name, &what, value)?;
        }
        if self.learning_rate < 0.0 {
            return check_number(name, "learning_rate", f64::NAN);
        }
        Ok(())
    }
}

impl Per {
    fn shape(self) -> Shape {
        match self {
            Self::Element => Shape::Vector,
            Self::Row => Shape::Scalar,
        }
    }

    fn words(self, row_elements: usize) -> usize {
        match self {
            Self::Element => row_elements,
            Self::Row => 1,
        }
    }
}

impl User {
    /// What such a function is given and returns, with settings and states of these names.
    pub fn signature(
        settings: Vec<String>,
        states: impl Iterator<Item = (String, Per)> + Clone,
    ) -> Signature {
        let states = states.map(|(name, per)| (name, per.shape()));
        let inputs = INPUTS.iter().map(|&(name, shape)| (name.to_owned(), shape));
        let weights = std::iter::once(("weights".to_owned(), Shape::Vector));
        let number = |(name, shape)| (name, Type { shape, mask: false });
        Signature {
            inputs: inputs.chain(states.clone()).collect(),
            outside: Some(GRADIENT),
            settings,
            results: weights.chain(states).map(number).collect(),
        }
    }

    /// The name that its user gave it.
    pub fn name(&self) -> &str {
        &self.rule.name
    }

    /// A number for its states, the names of its settings and its expression.
    pub fn fingerprint(&self) -> u64 {
        self.rule.fingerprint
    }

    /// The learning rate, the settings in the order of their names, then zeros.
    pub fn numbers(&self) -> [f64; 1 + MAX_SETTINGS] {
        self.numbers
    }

    /// The same function with other [`Self::numbers`].
    #[must_use]
    pub fn with_numbers(&self, numbers: &[f64; 1 + MAX_SETTINGS]) -> Self {
        let mut other = self.clone();
        let kept = 1 + self.rule.settings.len();
        other.numbers[..kept].copy_from_slice(&numbers[..kept]);
        other
    }

    /// The same function with the settings of another one, if that has settings of the same names.
    #[must_use]
    pub fn with_settings_of(&self, other: &Self) -> Self {
        if self.rule.settings == other.rule.settings {
            self.with_numbers(&other.numbers)
        } else {
            self.clone()
        }
    }

    /// Refuse rows for which it would take too much memory.
    pub fn check_elements(&self, row_elements: usize) -> Result<(), FunctionError> {
        let rule = &self.rule;
        rule.program
            .check_elements(row_elements)
            .map_err(|error| FunctionError::Expression {
                name: rule.name.clone(),
                error,
            })
    }

    /// Begin a batch with the learning rate times `learning_rate_scale`, at most `rows` at a time.
    pub fn begin(
        &self,
        row_elements: usize,
        rows: usize,
        learning_rate_scale: f32,
    ) -> UserBatch<'_> {
        let rule = &self.rule;
        let mut given = self.numbers;
        given[0] *= f64::from(learning_rate_scale);
        let mut fields = vec![Field {
            offset: 0,
            values: row_elements,
        }];
        let mut offset = 0;
        for state in &rule.states {
            let values = state.per.words(row_elements);
            fields.push(Field { offset, values });
            offset += values;
        }
        UserBatch {
            fields,
            evaluation: rule
                .program
                .begin(row_elements, rows, &given[..=rule.settings.len()]),
        }
    }
}

/// Rows on their way through the function: write the fields of some rows, run, read them.
pub struct UserBatch<'a> {
    fields: Vec<Field>,
    evaluation: Evaluation<'a>,
}

/// A part of a row that the function is given and returns: the weights, then each state.
#[derive(Debug, Clone, Copy)]
pub struct Field {
    /// Its first word behind the weights; 0 for the weights.
    pub offset: usize,
    /// How many values a row has.
    pub values: usize,
}

/// Most fields of a row.
pub const MAX_FIELDS: usize = 1 + MAX_STATES;

impl UserBatch<'_> {
    /// The fields of a row.
    pub fn fields(&self) -> &[Field] {
        &self.fields
    }

    /// Where to write a field of each row; `None` if the function does not use it.
    pub fn input(&mut self, field: usize) -> Option<&mut [f32]> {
        let of_state = |field| FIRST_STATE + field - 1;
        let input = if field == 0 { WEIGHTS } else { of_state(field) };
        self.evaluation.narrow_input(input)
    }

    /// A field of each row as it is now.
    pub fn result(&self, field: usize) -> &[f32] {
        self.evaluation.result(field)
    }

    /// Compute the new rows of the first `rows`, with their gradients.
    pub fn run(&mut self, rows: usize, gradients: &[f32]) {
        self.evaluation.run(rows, gradients);
    }
}

/// One row at a time, for few rows; [`crate::table`] works on blocks of rows.
impl RowOptimizer for User {
    fn state_elements(&self, row_elements: usize) -> usize {
        let states = self.rule.states.iter();
        let words = states.map(|state| state.per.words(row_elements));
        words.sum()
    }

    fn init_state(&self, state: &mut [f32]) {
        let states = &self.rule.states;
        let rows = states.iter().filter(|one| one.per == Per::Row).count();
        // States for each element share what those for the row leave.
        let elements = (state.len() - rows) / (states.len() - rows).max(1);
        let mut behind = state;
        for one in states {
            let (values, rest) = behind.split_at_mut(one.per.words(elements));
            values.fill(one.initial as f32);
            behind = rest;
        }
    }

    fn update(
        &self,
        weights: &mut [f32],
        state: &mut [f32],
        gradient: &[f32],
        learning_rate_scale: f32,
    ) {
        let mut batch = self.begin(weights.len(), 1, learning_rate_scale);
        for field in 0..batch.fields().len() {
            let Field { offset, values } = batch.fields()[field];
            let from = if field == 0 {
                &weights[..]
            } else {
                &state[offset..]
            };
            if let Some(input) = batch.input(field) {
                input[..values].copy_from_slice(&from[..values]);
            }
        }
        batch.run(1, gradient);
        for (field, &Field { offset, values }) in batch.fields().iter().enumerate() {
            let to = if field == 0 {
                &mut weights[..]
            } else {
                &mut state[offset..]
            };
            to[..values].copy_from_slice(&batch.result(field)[..values]);
        }
    }
}
