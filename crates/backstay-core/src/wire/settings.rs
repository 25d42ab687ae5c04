//! The settings under which a transaction is applied, and its stamp, as words of a prepare.

use crate::error::Refusal;
use crate::optimizer::OptimizerStamp;
use crate::transaction::Stamp;

/// Lay settings out; zeros for none.
pub(super) fn optimizer_words(settings: Option<&OptimizerStamp>) -> [u64; OptimizerStamp::WORDS] {
    settings.map_or([0; OptimizerStamp::WORDS], OptimizerStamp::words)
}

/// Read them.
pub(super) fn read_optimizer(
    words: [u64; OptimizerStamp::WORDS],
) -> Result<Option<OptimizerStamp>, Refusal> {
    if words[0] == 0 {
        return Ok(None);
    }
    let kind = words[0] & 0xff;
    let unknown = || Refusal::Protocol(format!("unknown optimizer {kind} between servers"));
    OptimizerStamp::from_words(words)
        .map(Some)
        .ok_or_else(unknown)
}

/// Lay a stamp out.
pub(super) fn stamp_words(stamp: Stamp) -> [u64; 2] {
    let first = u64::from(stamp.time) | u64::from(stamp.share) << 32;
    [first, stamp.counters.into()]
}

/// Read it.
pub(super) fn read_stamp(words: [u64; 2]) -> Stamp {
    Stamp {
        time: words[0] as u32,
        share: (words[0] >> 32) as u32,
        counters: words[1] as u32,
    }
}
