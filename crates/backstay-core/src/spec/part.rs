//! The parts of a description, each of which Python makes and checks alone.

use serde::{Deserialize, Serialize};

use super::check::{Checker, SpecError};
use super::lifetime::{Admission, Capacity, Expiry, Lifetime, Score};
use super::{Initializer, NonFinitePolicy, TableKind};
use crate::compensation::Compensation;
use crate::expression::{self, Function, Pull};
use crate::optimizer::Optimizer;

/// A part, under the path at which it stands in a description.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)] // Each variant is the type of its name.
pub enum Part {
    #[serde(rename = "kind")]
    Kind(TableKind),
    #[serde(rename = "initializer")]
    Initializer(Initializer),
    #[serde(rename = "optimizer")]
    Optimizer(Optimizer),
    #[serde(rename = "non_finite")]
    NonFinite(NonFinitePolicy),
    #[serde(rename = "compensation")]
    Compensation(Compensation),
    #[serde(rename = "pull")]
    Pull(Function<Pull>),
    #[serde(rename = "lifetime")]
    Lifetime(Lifetime),
    #[serde(rename = "lifetime.admission")]
    Admission(Admission),
    #[serde(rename = "lifetime.admission.function")]
    AdmissionFunction(Function<expression::Admission>),
    #[serde(rename = "lifetime.expiry")]
    Expiry(Expiry),
    #[serde(rename = "lifetime.capacity")]
    Capacity(Capacity),
    #[serde(rename = "lifetime.score")]
    Score(Score),
    #[serde(rename = "lifetime.score.function")]
    ScoreFunction(Function<expression::Score>),
}

impl Part {
    /// Read and check a part. What depends on another part is left out.
    pub fn from_json(text: &str) -> Result<Self, SpecError> {
        let parse = |error: serde_json::Error| SpecError::Parse(error.to_string());
        // By way of a value, whose errors have no line and column.
        let value: serde_json::Value = serde_json::from_str(text).map_err(parse)?;
        let mut part = serde_json::from_value(value).map_err(parse)?;
        if let Self::Lifetime(lifetime) = &mut part {
            lifetime.fill_in();
        }
        let checker = Checker { table: "" };
        match &part {
            Self::Kind(kind) => checker.kind(kind)?,
            Self::Initializer(initializer) => checker.initializer(initializer)?,
            Self::Lifetime(lifetime) => checker.lifetime(lifetime)?,
            Self::Admission(admission) => checker.admission(admission)?,
            Self::Expiry(expiry) => checker.expiry(expiry)?,
            Self::Capacity(capacity) => checker.capacity(*capacity)?,
            Self::Score(score) => checker.score(score)?,
            // Ranges and the rules of a function are all there is.
            Self::Optimizer(_)
            | Self::NonFinite(_)
            | Self::Compensation(_)
            | Self::Pull(_)
            | Self::AdmissionFunction(_)
            | Self::ScoreFunction(_) => {}
        }
        Ok(part)
    }

    /// The part with every default filled in.
    pub fn canonical_json(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }
}
