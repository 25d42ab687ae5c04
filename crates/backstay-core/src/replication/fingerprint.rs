//! A number for a replica's state, for searches that visit each state once.

use std::fmt::{self, Write};
use std::hash::{DefaultHasher, Hasher};

use super::replica::Replica;

/// Hashes what is written to it.
struct Sink(DefaultHasher);

impl Write for Sink {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.0.write(text.as_bytes());
        Ok(())
    }
}

/// A number for anything that can be printed.
pub fn fingerprint(what: &impl fmt::Debug) -> u64 {
    let mut sink = Sink(DefaultHasher::new());
    // Neither a hasher nor a derived Debug fails.
    let written = write!(sink, "{what:?}");
    debug_assert!(written.is_ok());
    sink.0.finish()
}

impl Replica {
    /// A number for everything that decides how this replica goes on, without its rows.
    pub fn fingerprint(&self) -> u64 {
        fingerprint(&(
            (self.routing.version, &self.slots, &self.peers),
            (&self.pending, &self.recovering, &self.work),
            (self.last_lsn, self.decided, self.lease_until),
            (&self.required, self.solo, self.next_heartbeat),
            self.report().1,
        ))
    }
}
