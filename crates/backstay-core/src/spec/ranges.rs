//! The range of each number of a description, by its path in the JSON form.
//!
//! The binding gives them to Python, which refuses a setting where it is written. What depends on
//! more than one number is in `check`.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use serde_json::Value;

use super::check::{MAX_BLOCK_ELEMENTS, MAX_DIM, MAX_FAN};
use super::lifetime::MIN_SHARE;
use crate::compensation::DelayCompensation;
use crate::optimizer::{Optimizer, Range, FRACTION, MAX_NUMBER, NOT_NEGATIVE, POSITIVE};

/// Lowest and highest value of a number.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Span {
    /// Of an integer.
    Whole(u64, u64),
    /// Of a float64.
    Number(f64, f64),
}

/// Smallest probability and rate.
const MIN_RATE: f64 = 1e-9;
const ANY: Span = Span::Number(-MAX_NUMBER, MAX_NUMBER);
const SECONDS: Span = Span::Whole(1, i32::MAX.unsigned_abs() as u64);

/// All but those of optimizers and of the delay compensation, which stand beside their formulas.
const RANGES: &[(&str, Span)] = &[
    ("kind.sparse.dim", Span::Whole(1, MAX_DIM)),
    (
        "kind.dense.block_elements",
        Span::Whole(1, MAX_BLOCK_ELEMENTS),
    ),
    ("initializer.constant.value", ANY),
    ("initializer.uniform.low", ANY),
    ("initializer.uniform.high", ANY),
    ("initializer.normal.mean", ANY),
    ("initializer.normal.std", number(NOT_NEGATIVE)),
    ("initializer.truncated_normal.mean", ANY),
    ("initializer.truncated_normal.std", number(NOT_NEGATIVE)),
    ("initializer.xavier.fan_in", Span::Whole(1, MAX_FAN)),
    ("initializer.xavier.fan_out", Span::Whole(1, MAX_FAN)),
    ("initializer.xavier.gain", number(NOT_NEGATIVE)),
    ("seed", Span::Whole(0, u64::MAX)),
    ("optimizer.user.learning_rate", number(NOT_NEGATIVE)),
    ("non_finite.clip.limit", number(POSITIVE)),
    (
        "lifetime.admission.after.occurrences",
        Span::Whole(2, 65_535),
    ),
    (
        "lifetime.admission.after.filter_bytes",
        Span::Whole(65_536, 1 << 40),
    ),
    (
        "lifetime.admission.probability.probability",
        Span::Number(MIN_RATE, FRACTION.1),
    ),
    ("lifetime.admission.score.at_least", number(POSITIVE)),
    ("lifetime.expiry.unseen_seconds", SECONDS),
    ("lifetime.expiry.score_below", number(POSITIVE)),
    ("lifetime.expiry.norm_below", number(POSITIVE)),
    ("lifetime.expiry.every_seconds", SECONDS),
    ("lifetime.capacity.rows", Span::Whole(MIN_SHARE, 1 << 40)),
    ("lifetime.capacity.bytes", Span::Whole(1024, 1 << 50)),
    ("lifetime.score.nonclick_coefficient", number(NOT_NEGATIVE)),
    ("lifetime.score.click_coefficient", number(NOT_NEGATIVE)),
    ("lifetime.score.decay", Span::Number(MIN_RATE, 1.0)),
    ("lifetime.score.decay_every_seconds", SECONDS),
];

const fn number((low, high): Range) -> Span {
    Span::Number(low, high)
}

/// The range of each number, by its path.
pub fn ranges() -> &'static BTreeMap<String, Span> {
    static ALL: LazyLock<BTreeMap<String, Span>> = LazyLock::new(|| {
        let mut all: BTreeMap<String, Span> = RANGES
            .iter()
            .map(|&(path, span)| (path.to_owned(), span))
            .collect();
        for (name, numbers) in Optimizer::RANGES {
            let of = |&(field, range)| (format!("optimizer.{name}.{field}"), number(range));
            all.extend(numbers.iter().map(of));
        }
        let delay = "compensation.delay_compensated";
        let of = |&(field, range)| (format!("{delay}.{field}"), number(range));
        all.extend(DelayCompensation::NUMBERS.iter().map(of));
        all
    });
    &ALL
}

impl Span {
    /// Whether a value of the JSON form lies in it. A NaN, which is null there, lies nowhere.
    pub(super) fn holds(self, value: &Value) -> bool {
        match self {
            Self::Whole(low, high) => value
                .as_u64()
                .is_some_and(|one| (low..=high).contains(&one)),
            Self::Number(low, high) => value
                .as_f64()
                .is_some_and(|one| (low..=high).contains(&one)),
        }
    }

    /// What is allowed, for a message.
    pub(super) fn words(self) -> String {
        match self {
            Self::Whole(low, high) => format!("{low} to {high}"),
            Self::Number(low, high) => format!("a number from {low:?} to {high:?}"),
        }
    }
}
