//! An optimizer with its settings, and a stamp, as words: what a prepare carries between servers.

use crate::error::Refusal;
use crate::optimizer::Optimizer;
use crate::transaction::Stamp;

/// Words of an optimizer: its kind and flags, then its settings as float64.
pub(super) const OPTIMIZER_WORDS: usize = 6;

/// Lay it out; zeros for none.
pub(super) fn optimizer_words(optimizer: Option<&Optimizer>) -> [u64; OPTIMIZER_WORDS] {
    let Some(optimizer) = optimizer else {
        return [0; OPTIMIZER_WORDS];
    };
    let (kind, flags, numbers) = optimizer.words();
    let mut words = [kind | u64::from(flags[0]) << 8 | u64::from(flags[1]) << 9; OPTIMIZER_WORDS];
    for (word, number) in words[1..].iter_mut().zip(numbers) {
        *word = number.to_bits();
    }
    words
}

/// Read it.
pub(super) fn read_optimizer(words: [u64; OPTIMIZER_WORDS]) -> Result<Option<Optimizer>, Refusal> {
    let [head, numbers @ ..] = words;
    let flags = [head >> 8 & 1 == 1, head >> 9 & 1 == 1];
    match head & 0xff {
        0 => Ok(None),
        kind => Optimizer::from_words(kind, flags, numbers.map(f64::from_bits))
            .map(Some)
            .ok_or_else(|| Refusal::Protocol(format!("unknown optimizer {kind} between servers"))),
    }
}

/// Lay a stamp out.
pub(super) fn stamp_word(stamp: Stamp) -> u64 {
    u64::from(stamp.time) | u64::from(stamp.share) << 32
}

/// Read it.
pub(super) fn read_stamp(word: u64) -> Stamp {
    Stamp {
        time: word as u32,
        share: (word >> 32) as u32,
    }
}
