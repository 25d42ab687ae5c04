//! The settings under which a transaction is applied, as words of a prepare.

use crate::error::Refusal;
use crate::optimizer::Stamp;

/// Lay them out; zeros for none.
pub(super) fn stamp_words(stamp: Option<&Stamp>) -> [u64; Stamp::WORDS] {
    stamp.map_or([0; Stamp::WORDS], Stamp::words)
}

/// Read them.
pub(super) fn read_stamp(words: [u64; Stamp::WORDS]) -> Result<Option<Stamp>, Refusal> {
    if words[0] == 0 {
        return Ok(None);
    }
    let kind = words[0] & 0xff;
    let unknown = || Refusal::Protocol(format!("unknown optimizer {kind} between servers"));
    Stamp::from_words(words).map(Some).ok_or_else(unknown)
}
