//! Settings of an optimizer as they travel with a transaction.

use super::{Optimizer, Settings, User};
use crate::expression::MAX_SETTINGS;

/// Numbers of a stamp: the learning rate and the settings of a user function, the longest there are.
const NUMBERS: usize = 1 + MAX_SETTINGS;

/// Which optimizer with which settings: what a master notes on a transaction, so that every replica
/// applies it alike. It names a user function and does not hold it: the table's description does,
/// on every replica.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OptimizerStamp {
    /// Kind, then the flags in bits 8 and 9, or the fingerprint of a user function from bit 16 on.
    head: u64,
    numbers: [f64; NUMBERS],
}

impl OptimizerStamp {
    /// Words between servers.
    pub const WORDS: usize = 1 + NUMBERS;
    /// The kind of a [`User`].
    pub(super) const USER: u64 = 64;

    pub(super) fn of_settings(kind: u64, flags: [bool; 2], numbers: [f64; 5]) -> Self {
        let mut all = [0.0; NUMBERS];
        all[..numbers.len()].copy_from_slice(&numbers);
        Self {
            head: kind | u64::from(flags[0]) << 8 | u64::from(flags[1]) << 9,
            numbers: all,
        }
    }

    pub(super) fn of_user(user: &User) -> Self {
        Self {
            head: Self::USER | user.fingerprint() << 16,
            numbers: user.numbers(),
        }
    }

    pub(super) fn kind(&self) -> u64 {
        self.head & 0xff
    }

    pub(super) fn settings<S: Settings>(&self) -> S {
        let [a, b, c, d, e, ..] = self.numbers;
        let flags = [self.head >> 8 & 1 == 1, self.head >> 9 & 1 == 1];
        S::of([a, b, c, d, e], flags)
    }

    /// The table's function under these settings, if they are of that function.
    pub(super) fn user(&self, of_table: &User) -> Option<User> {
        let is_its = self.kind() == Self::USER && self.head >> 16 == of_table.fingerprint();
        is_its.then(|| of_table.with_numbers(&self.numbers))
    }

    /// What servers send each other; all zeros stand for no stamp.
    pub fn words(&self) -> [u64; Self::WORDS] {
        let mut words = [self.head; Self::WORDS];
        for (word, number) in words[1..].iter_mut().zip(self.numbers) {
            *word = number.to_bits();
        }
        words
    }

    /// From [`Self::words`]; `None` if there is no such optimizer.
    pub fn from_words(words: [u64; Self::WORDS]) -> Option<Self> {
        let [head, numbers @ ..] = words;
        Optimizer::has_kind(head & 0xff).then(|| Self {
            head,
            numbers: numbers.map(f64::from_bits),
        })
    }
}
