//! When rows of a sparse table come and go: admission, expiry, capacity, and what they count.
//!
//! A policy decides which statistics a row keeps ([`crate::life`]). What a table may take over
//! while rows exist: [`Lifetime::with_settings_of`].

use serde::{Deserialize, Serialize};

use crate::expression::{self, Function, Statistic};

/// Fewest rows that a capacity gives a slot: a smaller share would be emptied by a few pushes.
pub const MIN_SHARE: u64 = 16;
/// Bytes of a block of a counting Bloom filter, with its key, its age and its place in the index.
pub const FILTER_BLOCK_BYTES: u64 = 272;

/// When the rows of a table come and go.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Lifetime {
    /// Which keys get a row.
    pub admission: Admission,
    /// What a pull gives of a key without a row.
    pub unadmitted: Unadmitted,
    /// Which rows an expiry removes.
    pub expiry: Option<Expiry>,
    /// How many rows there may be.
    pub capacity: Option<Capacity>,
    /// The score of a row, and how it fades; there if something uses a score.
    pub score: Option<Score>,
}

/// Which keys get a row by a push.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Admission {
    /// All of them.
    #[default]
    Always,
    /// Those that so many pushes have named.
    After {
        /// The push of this number makes the row.
        occurrences: u32,
        /// Memory of a counting Bloom filter, in the whole cluster; None: an exact counter a key.
        #[serde(default)]
        filter_bytes: Option<u64>,
    },
    /// A part of all occurrences, by a hash of key and push.
    Probability {
        /// Above 0 and below 1.
        probability: f64,
    },
    /// Those whose statistics so far give this score.
    Score {
        /// The lowest that is admitted.
        at_least: f64,
    },
    /// Those for which a user's function holds.
    Function(Function<expression::Admission>),
}

/// What a pull gives of a key without a row, in a table with an admission.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Unadmitted {
    /// Its initial value.
    #[default]
    Initial,
    /// Zeros.
    Zeros,
}

/// Which rows an expiry removes: those for which any of these holds.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Expiry {
    /// No push has named it for more than so many seconds.
    pub unseen_seconds: Option<u32>,
    /// Its score is below.
    pub score_below: Option<f64>,
    /// The L2 norm of its weights is below.
    pub norm_below: Option<f64>,
    /// The servers expire rows in each period of so many seconds; None: when they are asked to.
    pub every_seconds: Option<u32>,
}

/// How many rows there may be, and which go first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Capacity {
    /// In the whole cluster, each row once.
    #[serde(default)]
    pub rows: Option<u64>,
    /// The same by the memory of rows.
    #[serde(default)]
    pub bytes: Option<u64>,
    /// Which rows go first.
    #[serde(default)]
    pub evict: Evict,
}

/// Which rows go first when there is no room.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Evict {
    /// Those that no push has named for the longest time.
    #[default]
    LeastRecent,
    /// Those that the fewest pushes have named.
    LeastFrequent,
    /// Those of the lowest score.
    LowestScore,
}

/// The score of a row, and how it fades.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "ScoreJson", into = "ScoreJson")]
pub struct Score {
    /// What the score is.
    pub rule: ScoreRule,
    /// What a decay multiplies shows and clicks by.
    pub decay: f64,
    /// The servers decay in each period of so many seconds; None: when they are asked to.
    pub decay_every_seconds: Option<u32>,
}

/// From the statistics of a row to its score.
#[derive(Debug, Clone, PartialEq)]
pub enum ScoreRule {
    /// By its shows and clicks.
    ShowClick(ShowClick),
    /// A user's function.
    Function(Function<expression::Score>),
}

/// `nonclick_coefficient * (show - click) + click_coefficient * click`, as the score of Paddle's
/// `CtrCommonAccessor`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ShowClick {
    /// Of shows without a click.
    pub nonclick_coefficient: f64,
    /// Of clicks.
    pub click_coefficient: f64,
}

impl Default for ShowClick {
    fn default() -> Self {
        Self {
            nonclick_coefficient: 0.1,
            click_coefficient: 1.0,
        }
    }
}

impl Default for Score {
    fn default() -> Self {
        Self {
            rule: ScoreRule::ShowClick(ShowClick::default()),
            decay: no_decay(),
            decay_every_seconds: None,
        }
    }
}

impl ScoreRule {
    /// Whether it depends on a statistic.
    pub fn uses(&self, statistic: Statistic) -> bool {
        match self {
            Self::ShowClick(_) => matches!(statistic, Statistic::Show | Statistic::Click),
            Self::Function(function) => function.uses(statistic),
        }
    }
}

/// The JSON form of a [`Score`]: coefficients or a function.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ScoreJson {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    nonclick_coefficient: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    click_coefficient: Option<f64>,
    #[serde(default = "no_decay")]
    decay: f64,
    #[serde(default)]
    decay_every_seconds: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    function: Option<Function<expression::Score>>,
}

fn no_decay() -> f64 {
    1.0
}

impl TryFrom<ScoreJson> for Score {
    type Error = &'static str;

    fn try_from(json: ScoreJson) -> Result<Self, Self::Error> {
        let coefficients = (json.nonclick_coefficient, json.click_coefficient);
        let rule = match (json.function, coefficients) {
            (Some(function), (None, None)) => ScoreRule::Function(function),
            (Some(_), _) => {
                return Err(
                    "lifetime.score has a function and coefficients; allowed: one of the two",
                )
            }
            (None, (nonclick, click)) => {
                let other = ShowClick::default();
                ScoreRule::ShowClick(ShowClick {
                    nonclick_coefficient: nonclick.unwrap_or(other.nonclick_coefficient),
                    click_coefficient: click.unwrap_or(other.click_coefficient),
                })
            }
        };
        Ok(Self {
            rule,
            decay: json.decay,
            decay_every_seconds: json.decay_every_seconds,
        })
    }
}

impl From<Score> for ScoreJson {
    fn from(score: Score) -> Self {
        let (coefficients, function) = match score.rule {
            ScoreRule::ShowClick(rule) => (Some(rule), None),
            ScoreRule::Function(function) => (None, Some(function)),
        };
        Self {
            nonclick_coefficient: coefficients.map(|one| one.nonclick_coefficient),
            click_coefficient: coefficients.map(|one| one.click_coefficient),
            decay: score.decay,
            decay_every_seconds: score.decay_every_seconds,
            function,
        }
    }
}

impl Lifetime {
    /// Whether something uses a score.
    pub fn uses_score(&self) -> bool {
        let expires = self.expiry.is_some_and(|one| one.score_below.is_some());
        let admits = matches!(self.admission, Admission::Score { .. });
        expires || admits || self.evicts(Evict::LowestScore)
    }

    /// What the score is, if something uses one.
    pub fn score_rule(&self) -> Option<ScoreRule> {
        let rule = |score: &Score| score.rule.clone();
        self.uses_score().then(|| {
            self.score
                .as_ref()
                .map_or_else(|| rule(&Score::default()), rule)
        })
    }

    /// Whether a row keeps a statistic: whether something but its admission uses it.
    pub fn keeps(&self, statistic: Statistic) -> bool {
        let uses = match statistic {
            Statistic::LastSeen => {
                let unseen = self.expiry.is_some_and(|one| one.unseen_seconds.is_some());
                unseen || self.evicts(Evict::LeastRecent)
            }
            Statistic::Frequency => self.evicts(Evict::LeastFrequent),
            Statistic::Show | Statistic::Click => false,
        };
        uses || self.scores_by(statistic)
    }

    /// Whether the score, if something uses one, depends on a statistic.
    fn scores_by(&self, statistic: Statistic) -> bool {
        let other = matches!(statistic, Statistic::Show | Statistic::Click);
        let score = self.score.as_ref();
        self.uses_score() && score.map_or(other, |score| score.rule.uses(statistic))
    }

    /// Whether a push may tell of shows and clicks: whether rows or counters keep one of them.
    pub fn takes_counts(&self) -> bool {
        [Statistic::Show, Statistic::Click].into_iter().any(|one| {
            let admits = matches!(&self.admission, Admission::Function(admits) if admits.uses(one));
            admits || self.keeps(one)
        })
    }

    /// Whether a counter of a key without a row keeps a statistic, for what admits by it.
    pub(crate) fn counts(&self, statistic: Statistic) -> bool {
        match &self.admission {
            Admission::Score { .. } => self.scores_by(statistic),
            Admission::Function(function) => function.uses(statistic),
            Admission::Always | Admission::After { .. } | Admission::Probability { .. } => false,
        }
    }

    fn evicts(&self, by: Evict) -> bool {
        self.capacity.is_some_and(|one| one.evict == by)
    }

    /// Words of statistics behind a row's optimizer state.
    pub fn statistics_words(&self) -> usize {
        let kept = Statistic::ALL.into_iter().filter(|&one| self.keeps(one));
        kept.count()
    }

    /// Fill in the score's settings if something uses a score.
    pub(super) fn fill_in(&mut self) {
        if self.uses_score() {
            self.score.get_or_insert_with(Score::default);
        }
    }

    /// This policy with the settings of another one, as far as a table with rows can take them
    /// over: thresholds, periods, rates and the size of a capacity, if the statistics stay the same.
    /// What each replica looks up in its own description while it applies a transaction stays: what a
    /// score is, and what is admitted.
    #[must_use]
    pub fn with_settings_of(&self, other: &Self) -> Self {
        let capacity = match (self.capacity, other.capacity) {
            (Some(held), Some(wanted)) if held.rows.is_some() == wanted.rows.is_some() => {
                Some(Capacity {
                    evict: held.evict,
                    ..wanted
                })
            }
            (held, _) => held,
        };
        let score = match (&self.score, &other.score) {
            (Some(held), Some(wanted)) => Some(Score {
                rule: held.rule.clone(),
                ..wanted.clone()
            }),
            (held, _) => held.clone(),
        };
        let mut changed = Self {
            unadmitted: other.unadmitted,
            expiry: other.expiry,
            capacity,
            score,
            ..self.clone()
        };
        let kept = |one: &Self| (one.uses_score(), Statistic::ALL.map(|each| one.keeps(each)));
        if kept(&changed) != kept(self) {
            changed.expiry = self.expiry;
        }
        changed
    }
}
