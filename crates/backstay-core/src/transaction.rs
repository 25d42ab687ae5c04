//! A push as it travels and waits: its identity, its keys and its values.

use std::any::Any;
use std::sync::Arc;

use crate::compensation::{Compensation, Reference};
use crate::error::Refusal;
use crate::hash::SlotSpace;
use crate::life::Thresholds;
use crate::optimizer::OptimizerStamp;
use crate::spec::TableSpec;
use crate::staleness;
use crate::stream::TransactionId;

/// Keys and the values that go with them, in one 8-byte aligned buffer, as they came from
/// the wire: first all keys, then all values.
#[derive(Debug, Clone, Default)]
pub struct Batch {
    words: Vec<u64>,
    keys: usize,
    values: usize,
}

impl Batch {
    /// A batch laid over a received buffer. Refuses a buffer that is too short.
    pub fn from_words(words: Vec<u64>, keys: usize, values: usize) -> Result<Self, Refusal> {
        if keys.saturating_add(values.div_ceil(2)) > words.len() {
            return Err(Refusal::InvalidRequest(format!(
                "{keys} keys and {values} values announced, but only {} bytes came",
                words.len() * 8
            )));
        }
        Ok(Self {
            words,
            keys,
            values,
        })
    }

    /// A batch made of separate arrays.
    pub fn new(keys: &[u64], values: &[f32]) -> Self {
        let mut words = keys.to_vec();
        words.resize(keys.len() + values.len().div_ceil(2), 0);
        let mut batch = Self {
            words,
            keys: keys.len(),
            values: values.len(),
        };
        batch.values_mut().copy_from_slice(values);
        batch
    }

    /// The keys, \[n].
    pub fn keys(&self) -> &[u64] {
        &self.words[..self.keys]
    }

    /// The values, \[n, `row_elements`], row by row.
    pub fn values(&self) -> &[f32] {
        &bytemuck::cast_slice(&self.words[self.keys..])[..self.values]
    }

    /// The values, to be changed in place (clipping).
    pub fn values_mut(&mut self) -> &mut [f32] {
        &mut bytemuck::cast_slice_mut(&mut self.words[self.keys..])[..self.values]
    }

    /// Bytes allocated for keys and values.
    pub fn allocated_bytes(&self) -> usize {
        self.words.capacity() * 8
    }

    /// Give the buffer back for reuse.
    pub fn into_words(self) -> Vec<u64> {
        self.words
    }
}

/// What a transaction does to the rows it names.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Change {
    /// Run the table's optimizer with the values as gradients.
    Update(Update),
    /// Set the weights to the values, with fresh optimizer state.
    Assign {
        /// Leave rows alone that exist already.
        only_if_absent: bool,
    },
    /// Remove the rows; a key without one is no error. No values.
    Delete,
    /// Remove the rows that have expired from the slots of the keys. No values. No threshold: those
    /// of the table, which are filled in when it is stamped.
    Expire(Thresholds),
    /// Remove the rows above the share of its stamp from the slots of the keys. No values. Servers
    /// make it; no request carries it.
    Evict,
    /// Multiply the shows and clicks of all rows in the slots of the keys. No values.
    Decay {
        /// By this; 0: by the table's rate.
        rate: f32,
    },
    /// Close the transaction's stream: late copies of its pushes are skipped. No rows.
    Close,
}

/// An update of rows, and what stands behind the gradient of each key.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Update {
    /// Multiplies the learning rate of this push (schedules).
    pub learning_rate_scale: f32,
    /// What tells from where the gradient comes; `None`: nothing does.
    pub reference: Option<Reference>,
    /// Whether show and click of the key come last.
    pub has_counts: bool,
}

impl Update {
    /// Values of show and click.
    pub const COUNTS: usize = 2;

    /// Whether nothing stands behind the gradients.
    pub fn is_plain(&self) -> bool {
        self.reference.is_none() && !self.has_counts
    }

    /// Values for each key, in a table of rows of so many elements.
    pub fn values(&self, elements: usize) -> usize {
        let reference = self.reference.map_or(0, |one| one.values(elements));
        let counts = if self.has_counts { Self::COUNTS } else { 0 };
        elements + reference + counts
    }
}

impl Change {
    /// An update with nothing behind its gradients.
    pub const fn update(learning_rate_scale: f32) -> Self {
        Self::Update(Update {
            learning_rate_scale,
            reference: None,
            has_counts: false,
        })
    }

    /// Values for each key, in a table of rows of so many elements.
    pub fn values(&self, elements: usize) -> usize {
        match self {
            Self::Update(update) => update.values(elements),
            Self::Assign { .. } => elements,
            Self::Delete | Self::Expire(_) | Self::Evict | Self::Decay { .. } | Self::Close => 0,
        }
    }

    /// The elements of a row for which so many values travel with each key; `None`: there is no such
    /// row.
    pub fn elements(&self, values: usize) -> Option<usize> {
        let rest = values.checked_sub(self.values(0))?;
        match self {
            // A reference has a value for each of the gradient, besides those of `values(0)`.
            Self::Update(Update {
                reference: Some(_), ..
            }) => (rest % 2 == 0).then_some(rest / 2),
            _ => Some(rest),
        }
    }

    /// The same of which gradients tell from where they come.
    #[must_use]
    pub fn compared(self, reference: Reference) -> Self {
        match self {
            Self::Update(update) => Self::Update(Update {
                reference: Some(reference),
                ..update
            }),
            other => other,
        }
    }

    /// The same that tells of each key how often it was shown and clicked.
    #[must_use]
    pub const fn counted(self) -> Self {
        match self {
            Self::Update(update) => Self::Update(Update {
                has_counts: true,
                ..update
            }),
            other => other,
        }
    }

    /// The same with the learning rate divided.
    #[must_use]
    pub fn slowed(self, divisor: f32) -> Self {
        match self {
            Self::Update(update) => Self::Update(Update {
                learning_rate_scale: update.learning_rate_scale / divisor,
                ..update
            }),
            other => other,
        }
    }

    /// Whether it brings gradients.
    pub fn updates(&self) -> bool {
        matches!(self, Self::Update(_))
    }

    /// Whether it may create rows.
    pub fn creates(&self) -> bool {
        self.values(1) > 0
    }

    /// Whether rows above the share of its stamp go.
    pub fn evicts(&self) -> bool {
        self.creates() || *self == Self::Evict
    }
}

/// What a transaction of a table with a lifetime has from its master, so that every replica does
/// the same by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stamp {
    /// The master's time, in seconds. A slot takes the highest that it has seen, so that times do
    /// not fall along its order.
    pub time: u32,
    /// Rows that the table may have in a slot; 0: no limit.
    pub share: u32,
    /// Counters of keys without a row that it may have there, if `share` is a limit.
    pub counters: u32,
}

/// The rows of one slot in a transaction: `start..end` of its keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// The slot.
    pub slot: u32,
    /// Its first key.
    pub start: u32,
    /// Behind its last key.
    pub end: u32,
    /// Where its gradients come from: a word of [`crate::staleness`].
    pub origin: u64,
}

/// A run with its place in the slot's order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StagedRun {
    /// The slot's term under which it was given its place; 0 if there are no replicas.
    pub term: u64,
    /// The slot's position once it is applied.
    pub position: u64,
    /// Which slot, which keys.
    pub run: Run,
}

/// One push to one master.
#[derive(Debug, Clone)]
pub struct Transaction {
    /// The same on every retry.
    pub id: TransactionId,
    /// Everything below it in its stream is acknowledged, or given up by the client.
    pub floor: u64,
    /// The table's id.
    pub table: u64,
    /// What to do.
    pub change: Change,
    /// To which rows, ordered by slot.
    pub batch: Batch,
    /// The routing version that its client went by: it knows no life of a slot that began later.
    pub known_version: u64,
    /// The settings under which its master took it on; it travels with them, so that a change of
    /// settings has one place in a slot's order, whatever each replica knows of the table. `None`:
    /// the table's, where there are no replicas.
    pub optimizer: Option<OptimizerStamp>,
    /// The same of a table with a lifetime.
    pub stamp: Stamp,
    /// What is done about its staleness.
    pub compensation: Compensation,
    runs: Vec<Run>,
    attachment: Option<Attachment>,
}

/// Something that lives as long as a transaction.
#[derive(Clone)]
struct Attachment(Arc<dyn Any + Send + Sync>);

impl std::fmt::Debug for Attachment {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.type_id().fmt(out)
    }
}

impl Transaction {
    /// A transaction over a batch. Refuses keys that are not sorted by slot.
    pub fn new(
        space: SlotSpace,
        id: TransactionId,
        floor: u64,
        table: u64,
        change: Change,
        batch: Batch,
    ) -> Result<Self, Refusal> {
        let runs = cut(space, batch.keys())?;
        Ok(Self {
            id,
            floor,
            table,
            change,
            batch,
            known_version: u64::MAX,
            optimizer: None,
            stamp: Stamp::default(),
            compensation: Compensation::Ignore,
            runs,
            attachment: None,
        })
    }

    /// The end of a stream, for each of `slots` (ascending). Its sequence is above all others.
    pub fn close(id: TransactionId, slots: impl IntoIterator<Item = u32>) -> Self {
        let run = |slot| Run {
            slot,
            start: 0,
            end: 0,
            origin: staleness::UNTOLD,
        };
        Self {
            id,
            floor: id.sequence,
            table: 0,
            change: Change::Close,
            batch: Batch::default(),
            known_version: u64::MAX,
            optimizer: None,
            stamp: Stamp::default(),
            compensation: Compensation::Ignore,
            runs: slots.into_iter().map(run).collect(),
            attachment: None,
        }
    }

    /// Fix the settings under which every replica applies it: those of its table, and the time of
    /// its master in seconds.
    pub fn stamp_by(&mut self, spec: &TableSpec, space: SlotSpace, time: u32) {
        self.optimizer = Some(spec.optimizer.stamp());
        if self.change.updates() {
            self.compensation = spec.compensation;
        }
        let Some(lifetime) = &spec.lifetime else {
            return;
        };
        let share = spec.share(space.count()).unwrap_or(0);
        let share = u32::try_from(share).unwrap_or(u32::MAX);
        self.stamp = Stamp {
            time,
            share,
            counters: share,
        };
        match &mut self.change {
            Change::Expire(thresholds) if thresholds.is_empty() => {
                *thresholds = lifetime.expiry.map(Into::into).unwrap_or_default();
            }
            Change::Decay { rate } if *rate == 0.0 => {
                let score = lifetime.score.as_ref();
                *rate = score.map_or(1.0, |score| score.decay as f32);
            }
            _ => {}
        }
    }

    /// Let something live as long as the transaction, such as memory reserved for it.
    pub fn attach(&mut self, attachment: impl Any + Send + Sync) {
        self.attachment = Some(Attachment(Arc::new(attachment)));
    }

    /// Bytes allocated for it.
    pub fn allocated_bytes(&self) -> usize {
        size_of::<Self>() + self.runs.capacity() * size_of::<Run>() + self.batch.allocated_bytes()
    }

    /// What was attached, if it is of this type.
    pub fn attachment<T: Any>(&self) -> Option<&T> {
        self.attachment.as_ref()?.0.downcast_ref()
    }

    /// Whether something was attached.
    pub fn has_attachment(&self) -> bool {
        self.attachment.is_some()
    }

    /// Whether `next` has to wait, in a slot where this one is staged, until this one is applied
    /// or undone: it is the same one again, or a push of the stream that this one ends.
    pub fn holds_back(&self, next: &Self) -> bool {
        let ends = |stream| self.id.stream == stream || self.id.stream.expired() == Some(stream);
        self.id == next.id || self.change == Change::Close && ends(next.id.stream)
    }

    /// Say from where the gradients of each slot come. Refuses another number than that of its slots.
    pub fn tell_origins(&mut self, origins: &[u64]) -> Result<(), Refusal> {
        if origins.len() != self.runs.len() {
            return Err(Refusal::InvalidRequest(format!(
                "{} origins came for the {} slots of a push: there must be one for each",
                origins.len(),
                self.runs.len()
            )));
        }
        for (run, &origin) in self.runs.iter_mut().zip(origins) {
            run.origin = origin;
        }
        Ok(())
    }

    /// Whether it says from where its gradients come in any slot.
    pub fn tells_origins(&self) -> bool {
        self.runs.iter().any(|run| run.origin != staleness::UNTOLD)
    }

    /// Its slots, ascending, with their keys.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }
}

/// Cut keys into runs of one slot each.
pub fn cut(space: SlotSpace, keys: &[u64]) -> Result<Vec<Run>, Refusal> {
    let mut runs: Vec<Run> = Vec::new();
    for (at, &key) in keys.iter().enumerate() {
        let (slot, at) = (space.slot_of(key), at as u32);
        match runs.last_mut() {
            Some(run) if run.slot == slot => run.end = at + 1,
            Some(run) if run.slot > slot => {
                return Err(Refusal::InvalidRequest(format!(
                    "key {key} of slot {slot} follows one of slot {}: keys must be sorted by slot",
                    run.slot
                )));
            }
            _ => runs.push(Run {
                slot,
                start: at,
                end: at + 1,
                origin: staleness::UNTOLD,
            }),
        }
    }
    Ok(runs)
}
