//! When rows of a sparse table come and go: admission, expiry, capacity, and what they count.
//!
//! A policy decides which statistics a row keeps ([`crate::life`]). What a table may take over
//! while rows exist: [`Lifetime::with_settings_of`].

use serde::{Deserialize, Serialize};

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
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
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
    /// Those whose shows and clicks give this score.
    Score {
        /// The lowest that is admitted.
        at_least: f64,
    },
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

/// `nonclick_coefficient * (show - click) + click_coefficient * click`, as the score of Paddle's
/// `CtrCommonAccessor`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Score {
    /// Of shows without a click.
    pub nonclick_coefficient: f64,
    /// Of clicks.
    pub click_coefficient: f64,
    /// What a decay multiplies shows and clicks by.
    pub decay: f64,
    /// The servers decay in each period of so many seconds; None: when they are asked to.
    pub decay_every_seconds: Option<u32>,
}

impl Default for Score {
    fn default() -> Self {
        Self {
            nonclick_coefficient: 0.1,
            click_coefficient: 1.0,
            decay: 1.0,
            decay_every_seconds: None,
        }
    }
}

impl Lifetime {
    /// Whether a row keeps when it was seen last.
    pub fn keeps_last_seen(&self) -> bool {
        let unseen = self.expiry.is_some_and(|one| one.unseen_seconds.is_some());
        unseen || self.evicts(Evict::LeastRecent)
    }

    /// Whether a row keeps how many pushes named it.
    pub fn keeps_frequency(&self) -> bool {
        self.evicts(Evict::LeastFrequent)
    }

    /// Whether a row keeps its shows and clicks: whether something uses a score.
    pub fn keeps_show_and_click(&self) -> bool {
        let expires = self.expiry.is_some_and(|one| one.score_below.is_some());
        let admits = matches!(self.admission, Admission::Score { .. });
        expires || admits || self.evicts(Evict::LowestScore)
    }

    fn evicts(&self, by: Evict) -> bool {
        self.capacity.is_some_and(|one| one.evict == by)
    }

    /// Words of statistics behind a row's optimizer state.
    pub fn statistics_words(&self) -> usize {
        usize::from(self.keeps_last_seen())
            + usize::from(self.keeps_frequency())
            + 2 * usize::from(self.keeps_show_and_click())
    }

    /// Fill in the score's settings if something uses a score.
    pub(super) fn fill_in(&mut self) {
        if self.keeps_show_and_click() {
            self.score.get_or_insert_with(Score::default);
        }
    }

    /// This policy with the settings of another one, as far as a table with rows can take them
    /// over: thresholds, periods, rates and the size of a capacity, if the statistics stay the same.
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
        let score = match (self.score, other.score) {
            (Some(held), Some(wanted)) => Some(Score {
                decay: wanted.decay,
                decay_every_seconds: wanted.decay_every_seconds,
                ..held
            }),
            (held, _) => held,
        };
        let mut changed = Self {
            unadmitted: other.unadmitted,
            expiry: other.expiry,
            capacity,
            score,
            ..self.clone()
        };
        let kept = |one: &Self| {
            let (seen, frequency) = (one.keeps_last_seen(), one.keeps_frequency());
            (seen, frequency, one.keeps_show_and_click())
        };
        if kept(&changed) != kept(self) {
            changed.expiry = self.expiry;
        }
        changed
    }
}
