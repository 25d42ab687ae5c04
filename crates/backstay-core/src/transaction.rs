//! A push as it travels and waits: its identity, its keys and its values.

use crate::error::Refusal;
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

    /// Give the buffer back for reuse.
    pub fn into_words(self) -> Vec<u64> {
        self.words
    }
}

/// What a transaction does to the rows it names.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Change {
    /// Run the table's optimizer with the values as gradients.
    Update {
        /// Multiplies the learning rate of this push (schedules).
        learning_rate_scale: f32,
    },
    /// Set the weights to the values, with fresh optimizer state.
    Assign {
        /// Leave rows alone that exist already.
        only_if_absent: bool,
    },
}

/// One push to one master.
#[derive(Debug, Clone)]
pub struct Transaction {
    /// The same on every retry.
    pub id: TransactionId,
    /// Everything below it in its stream is settled for the client.
    pub floor: u64,
    /// The table's id.
    pub table: u64,
    /// What to do.
    pub change: Change,
    /// To which rows, ordered by slot.
    pub batch: Batch,
}
