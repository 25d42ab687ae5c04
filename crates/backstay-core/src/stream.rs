//! Streams of pushes, and which pushes of one stream a slot has applied.
//!
//! A plain high-water mark would swallow a rolled-back push whose successor got through, and
//! a batch need not touch every slot, so gaps are normal. Hence a floor, below which the
//! client has nothing open, and a bitmap of the window above it.

/// How far a sequence number may be ahead of its stream's floor.
pub const WINDOW: u64 = 128;

/// A series of numbered pushes: of a task of a pass of a job, or of one client on its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamId {
    /// The job, or a random number drawn by a client.
    pub job: u64,
    /// The pass over the data.
    pub pass: u32,
    /// The task within the pass.
    pub task: u32,
}

/// The pass of clients' own streams; no job has so many.
pub const OWN_PASS: u32 = u32::MAX;
/// The pass of the streams of tables, whose sequences are of servers; no job has so many.
const TABLE_PASS: u32 = u32::MAX - 1;
/// A server ends a client's own stream when it has applied nothing of it for so many microseconds.
pub const OWN_LEASE_US: u64 = 3_600_000_000;
/// Passes from here on are of no job. Added to the pass of a task's stream it gives the mark that
/// the stream has expired.
const EXPIRED: u32 = 1 << 31;

/// What servers do to a table by themselves; each has a stream of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum TableTask {
    /// Decay its shows and clicks: the sequences are the periods.
    Decay = 0,
    /// Expire its rows.
    Expire = 1,
    /// Evict its rows.
    Evict = 2,
}

impl StreamId {
    /// The stream in which all masters of a table do something to it.
    pub fn of_table(table: u64, task: TableTask) -> Self {
        Self {
            job: table,
            pass: TABLE_PASS,
            task: task as u32,
        }
    }

    /// Whether it is a client's own, not a task's.
    pub fn is_own(&self) -> bool {
        self.pass == OWN_PASS
    }

    /// Whether it is of a task of a job.
    pub fn is_of_task(&self) -> bool {
        self.pass < TABLE_PASS - EXPIRED
    }

    /// The stream that is closed in place of this one when nothing was heard of its task for long,
    /// and the task is not known to be done: what comes late is refused, and not taken for a copy.
    #[must_use]
    pub fn expiry(&self) -> Self {
        Self {
            pass: self.pass | EXPIRED,
            ..*self
        }
    }

    /// The stream of a task that expires when this one is closed.
    #[must_use]
    pub fn expired(&self) -> Option<Self> {
        let of = Self {
            pass: self.pass ^ EXPIRED,
            ..*self
        };
        of.is_of_task().then_some(of)
    }
}

/// One push: unique within a cluster, the same on every retry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TransactionId {
    /// The stream it belongs to.
    pub stream: StreamId,
    /// Its number in the stream.
    pub sequence: u64,
}

/// What a slot remembers of one stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StreamWindow {
    /// Every sequence below this is over: applied, or given up by the client for good.
    pub floor: u64,
    /// Bit i: sequence `floor + i` has been applied.
    pub applied: u128,
}

impl StreamWindow {
    /// Whether a push of this sequence is skipped: it is applied already, or below the floor.
    pub fn skips(&self, sequence: u64) -> bool {
        match sequence.checked_sub(self.floor) {
            None => true,
            Some(ahead) => ahead < WINDOW && self.applied >> ahead & 1 == 1,
        }
    }

    /// Whether any push of the stream has been applied.
    pub fn is_known(&self) -> bool {
        *self != Self::default()
    }

    /// Remember that a push was applied, and up to where its client has nothing open.
    pub fn record(&mut self, sequence: u64, floor: u64) {
        self.raise_floor(floor);
        if let Some(ahead) = sequence.checked_sub(self.floor) {
            debug_assert!(ahead < WINDOW);
            self.applied |= 1 << (ahead % WINDOW);
        }
    }

    /// Raise the floor; what falls below it is skipped from now on, and forgotten.
    fn raise_floor(&mut self, floor: u64) {
        if let Some(by) = floor.checked_sub(self.floor) {
            self.applied = if by < WINDOW { self.applied >> by } else { 0 };
            self.floor = floor;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_streams_of_tasks_expire() {
        let of = |pass| StreamId {
            job: 7,
            pass,
            task: 3,
        };
        for pass in [0, 1, 1 << 20] {
            assert_eq!(of(pass).expiry().expired(), Some(of(pass)));
            assert!(of(pass).is_of_task());
            assert!(!of(pass).expiry().is_of_task());
            assert_eq!(of(pass).expired(), None);
        }
        for pass in [OWN_PASS, TABLE_PASS] {
            assert!(!of(pass).is_of_task());
            assert_eq!(of(pass).expired(), None);
        }
    }
}
