//! The account of a node's memory: each part is counted where it is owned, and added up here.
//!
//! What the process takes besides (interpreter, libraries, what the allocator keeps) is known by
//! looking at its resident memory every now and then. So the limit holds for the process, and not
//! only for what is counted. Nothing here decides who gives way: [`crate::store`] does.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

use backstay_core::replication::Micros;
use serde::Serialize;

/// What takes memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// Rows of tables.
    Rows,
    /// Counters of keys without a row.
    Counters,
    /// What is remembered of streams.
    Streams,
    /// Transactions under way, from their coming until the last node or slot has done with them.
    Transactions,
    /// Copies of slots: what is on its way to other nodes, and old rows that are kept for it; pushes
    /// behind a copy that comes in.
    Copies,
    /// Buffers of connections.
    Buffers,
}

const PARTS: usize = 6;
/// Memory is short when less than this part of the limit is free.
const SPARE_DIVISOR: u64 = 32;
/// Rows leave this part of the limit to what does not ask first: buffers, streams, removed keys.
const UNASKED_DIVISOR: u64 = 64;
/// What is promised without a look at what is needed is at most this part of what is free.
const EASY_DIVISOR: u64 = 32;
/// A look at the resident memory tells what the process takes besides only if at least this much
/// of the most that was ever counted is in use: else it is memory that rows have left behind.
const NEARLY_MOST: (u64, u64) = (15, 16);
/// The allocator is asked to give memory back once in this time at most: it walks over all that is free,
/// and on a full node each look would ask it.
const TRIM_EVERY: Micros = 5_000_000;
/// The same if the process seems to have grown by more than this part of the limit since.
const TRIM_SOON: Micros = 1_000_000;
const GROWN_DIVISOR: u64 = 64;
/// If it is about to exceed the limit, it suffices that it has grown by this part.
const GROWN_TOO_FAR_DIVISOR: u64 = 256;

/// See the module's documentation.
#[derive(Debug, Default)]
pub struct Memory {
    /// 0: no limit.
    limit_bytes: u64,
    parts: [AtomicU64; PARTS],
    /// Promised to pushes under way.
    reserved: AtomicU64,
    /// The most that pushes lacked since somebody asked.
    lacked: AtomicU64,
    process: AtomicU64,
    /// The most that was counted at a look at the resident memory, since it was trimmed.
    most_counted: AtomicU64,
    /// When it was trimmed; 0: never.
    trimmed_at: AtomicU64,
}

/// The account at one moment, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[allow(missing_docs)] // The names say it; docs/reference/metrics.md explains each to users.
pub struct MemoryParts {
    pub rows: u64,
    pub counters: u64,
    pub streams: u64,
    pub transactions: u64,
    pub copies: u64,
    pub buffers: u64,
    pub process: u64,
}

impl Memory {
    /// Nothing is in use. A limit of 0 bytes means none.
    pub fn new(limit_bytes: u64) -> Self {
        Self {
            limit_bytes,
            ..Self::default()
        }
    }

    /// 0: no limit.
    pub fn limit_bytes(&self) -> u64 {
        self.limit_bytes
    }

    /// Bytes of one part.
    pub fn of(&self, part: Part) -> u64 {
        self.parts[part as usize].load(Ordering::Relaxed)
    }

    /// Bytes of everything.
    pub fn used(&self) -> u64 {
        self.counted() + self.process.load(Ordering::Relaxed)
    }

    fn counted(&self) -> u64 {
        let bytes = |part: &AtomicU64| part.load(Ordering::Relaxed);
        self.parts.iter().map(bytes).sum()
    }

    /// Every part.
    pub fn parts(&self) -> MemoryParts {
        MemoryParts {
            rows: self.of(Part::Rows),
            counters: self.of(Part::Counters),
            streams: self.of(Part::Streams),
            transactions: self.of(Part::Transactions),
            copies: self.of(Part::Copies),
            buffers: self.of(Part::Buffers),
            process: self.process.load(Ordering::Relaxed),
        }
    }

    /// A part of so many bytes takes other ones now.
    pub(crate) fn change(&self, part: Part, before: u64, after: u64) {
        let part = &self.parts[part as usize];
        if after > before {
            part.fetch_add(after - before, Ordering::Relaxed);
        } else if before > after {
            part.fetch_sub(before - after, Ordering::Relaxed);
        }
    }

    /// Bytes above which memory is short; the rest serves what is under way when that is noticed.
    fn mark(&self) -> u64 {
        self.limit_bytes - self.limit_bytes / SPARE_DIVISOR
    }

    /// Whether connections are to give up their spare buffers, and tables with a capacity rows.
    pub fn is_short(&self) -> bool {
        self.is_short_of(0)
    }

    /// The same if so many bytes more are wanted.
    pub(crate) fn is_short_of(&self, wanted: u64) -> bool {
        self.limit_bytes > 0 && self.used().saturating_add(wanted) > self.mark()
    }

    /// A push waits for so many bytes, which could not be promised: tables are to give up rows for it.
    pub(crate) fn note_lacked(&self, bytes: u64) {
        self.lacked.fetch_max(bytes, Ordering::AcqRel);
    }

    /// The most bytes that were noted since the last such call.
    pub(crate) fn take_lacked(&self) -> u64 {
        self.lacked.swap(0, Ordering::AcqRel)
    }

    /// How much of what is spare is in use, in thousandths.
    pub(crate) fn shortage_permille(&self) -> u64 {
        let above = self.used().saturating_sub(self.mark());
        let spare = (self.limit_bytes - self.mark()).max(1);
        if self.limit_bytes == 0 {
            return 0;
        }
        (above.saturating_mul(1000) / spare).min(1000)
    }

    /// Promise so many bytes if they are a small part of what is free above the mark; they may be
    /// far more than what is needed, and others must find room beside them. [`Self::give_back`] is
    /// to follow.
    pub(crate) fn reserve_easily(&self, bytes: u64) -> bool {
        self.reserve_if_free(bytes, bytes.saturating_mul(EASY_DIVISOR), self.mark())
    }

    /// Promise so many bytes if they fit half of what may be promised above the mark; they may be more
    /// than what is needed, and the other half is left to those that know what they need.
    pub(crate) fn reserve_most(&self, bytes: u64) -> bool {
        self.reserve_if_free(bytes, bytes, self.mark().midpoint(self.most_promised()))
    }

    /// Promise so many bytes up to nearly the limit. No bytes always fit.
    pub(crate) fn reserve(&self, bytes: u64) -> bool {
        if bytes == 0 || self.limit_bytes == 0 {
            // What `give_back` gets.
            self.reserved.fetch_add(bytes, Ordering::AcqRel);
            return true;
        }
        self.reserve_if_free(bytes, bytes, self.most_promised())
    }

    /// Up to here bytes are promised.
    fn most_promised(&self) -> u64 {
        self.limit_bytes - self.limit_bytes / UNASKED_DIVISOR
    }

    /// Bytes that must go before so many can be promised, even when all that goes by itself has gone.
    pub(crate) fn lasting_lack(&self, bytes: u64) -> u64 {
        let passing = [Part::Transactions, Part::Copies, Part::Buffers];
        let passing: u64 = passing.into_iter().map(|part| self.of(part)).sum();
        let lasting = self.used().saturating_sub(passing);
        let wanted = lasting.saturating_add(bytes);
        wanted.saturating_sub(self.most_promised())
    }

    /// Promise `bytes` if `free` bytes are left below `most`.
    fn reserve_if_free(&self, bytes: u64, free: u64, most: u64) -> bool {
        let taken = self.used().saturating_add(free);
        let more = |reserved: u64| {
            (taken.saturating_add(reserved) <= most).then(|| reserved.saturating_add(bytes))
        };
        let promised = self
            .reserved
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, more);
        promised.is_ok()
    }

    /// Bytes that were promised are in use by now, or not needed.
    pub(crate) fn give_back(&self, bytes: u64) {
        self.reserved.fetch_sub(bytes, Ordering::AcqRel);
    }

    /// Look what the process takes besides. If it takes too much, the allocator is asked now and then
    /// to give back what rows have left behind. `now` is on one clock at every look.
    pub(crate) fn look(&self, now: Micros) {
        self.look_by(now, resident_bytes, trim);
    }

    fn look_by(&self, now: Micros, resident: impl Fn() -> Option<u64>, trim: impl FnOnce()) {
        let Some(bytes) = resident() else {
            return;
        };
        if self.limit_bytes == 0 || bytes <= self.mark() {
            return self.notice_resident(bytes, false);
        }
        if !self.is_trim_due(now, bytes) {
            // What seems to be more may be memory that rows have left behind: the next trim tells.
            let seen = bytes.saturating_sub(self.counted());
            self.process.fetch_min(seen, Ordering::Relaxed);
            return;
        }
        self.trimmed_at.store(now.max(1), Ordering::Relaxed);
        trim();
        if let Some(bytes) = resident() {
            self.notice_resident(bytes, true);
        }
    }

    /// Whether the allocator may have much to give back, given the bytes that are resident.
    fn is_trim_due(&self, now: Micros, resident: u64) -> bool {
        let last = self.trimmed_at.load(Ordering::Relaxed);
        let known = self.process.load(Ordering::Relaxed);
        let grown = resident.saturating_sub(self.counted().saturating_add(known));
        if resident > self.most_promised() && grown > self.limit_bytes / GROWN_TOO_FAR_DIVISOR {
            return true;
        }
        let rest = if grown > self.limit_bytes / GROWN_DIVISOR {
            TRIM_SOON
        } else {
            TRIM_EVERY
        };
        last == 0 || now.saturating_sub(last) >= rest
    }

    /// The process has so many bytes resident now. `trimmed`: the allocator has just given back what
    /// it could.
    fn notice_resident(&self, resident: u64, trimmed: bool) {
        let counted = self.counted();
        let (known, most) = (
            self.process.load(Ordering::Relaxed),
            self.most_counted.load(Ordering::Relaxed),
        );
        // What was more before says nothing any longer.
        let most = if trimmed { 0 } else { most };
        let process = process_bytes(known, most, counted, resident);
        self.process.store(process, Ordering::Relaxed);
        self.most_counted
            .store(most.max(counted), Ordering::Relaxed);
    }
}

/// What a process takes besides what is counted, given what it was thought to take, and the most
/// that was counted before.
///
/// Memory that rows have left behind is resident, too, and serves the next rows. So while less is
/// counted than before, a look can only lower what the process is thought to take.
fn process_bytes(known: u64, most: u64, counted: u64, resident: u64) -> u64 {
    let seen = resident.saturating_sub(counted);
    if counted >= most / NEARLY_MOST.1 * NEARLY_MOST.0 {
        seen
    } else {
        known.min(seen)
    }
}

/// Let the allocator give free pages back to the system.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn trim() {
    extern "C" {
        fn malloc_trim(pad: usize) -> i32;
    }
    // SAFETY: a function of glibc that takes no pointer, and that any thread may call at any time.
    unsafe {
        malloc_trim(0);
    }
}

/// Other allocators do so by themselves, or not.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
fn trim() {}

/// Bytes that this process has resident; None where the system does not say (not Linux).
fn resident_bytes() -> Option<u64> {
    resident_of(&std::fs::read_to_string("/proc/self/status").ok()?)
}

/// The same from the text of `/proc/self/status`.
fn resident_of(status: &str) -> Option<u64> {
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kilobytes: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kilobytes * 1024)
}

/// Memory that counts as long as this lives.
#[derive(Debug)]
pub struct Held {
    memory: Arc<Memory>,
    part: Part,
    bytes: u64,
}

impl Held {
    /// Nothing yet.
    pub fn new(memory: &Arc<Memory>, part: Part) -> Self {
        Self {
            memory: Arc::clone(memory),
            part,
            bytes: 0,
        }
    }

    /// It is of this part from now on.
    pub fn count_as(&mut self, part: Part) {
        self.memory.change(self.part, self.bytes, 0);
        self.memory.change(part, 0, self.bytes);
        self.part = part;
    }

    /// It takes so many bytes now.
    pub fn set(&mut self, bytes: usize) {
        let bytes = bytes as u64;
        self.memory.change(self.part, self.bytes, bytes);
        self.bytes = bytes;
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.memory.change(self.part, self.bytes, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_held_counts_until_it_is_dropped() {
        let memory = Arc::new(Memory::new(0));
        let mut one = Held::new(&memory, Part::Buffers);
        let mut other = Held::new(&memory, Part::Copies);
        one.set(100);
        other.set(7);
        one.set(40);
        assert_eq!((memory.of(Part::Buffers), memory.used()), (40, 47));
        one.count_as(Part::Copies);
        assert_eq!((memory.of(Part::Buffers), memory.used()), (0, 47));
        drop(one);
        assert_eq!((memory.of(Part::Copies), memory.used()), (7, 7));
        assert!(!memory.is_short(), "there is no limit");
    }

    #[test]
    fn nothing_is_promised_beyond_the_limit() {
        let memory = Memory::new(3_200);
        assert!(!memory.reserve_easily(97), "others must find room");
        assert!(memory.reserve_easily(96));
        memory.change(Part::Rows, 0, 2_904);
        assert!(!memory.reserve_easily(4), "the last part is spare");
        assert!(memory.reserve(150));
        assert_eq!(memory.take_lacked(), 0);
        for lacking in [7, 1] {
            assert!(!memory.reserve(lacking));
            memory.note_lacked(lacking);
        }
        assert_eq!((memory.take_lacked(), memory.take_lacked()), (7, 0));
        assert!(memory.reserve(0), "what needs nothing goes on");
        memory.give_back(50);
        assert!(memory.reserve(1));
        // A failing try takes nothing from others meanwhile.
        assert_eq!(memory.reserved.load(Ordering::Relaxed), 197);
    }

    #[test]
    fn what_goes_by_itself_is_no_lasting_lack() {
        let memory = Memory::new(6_400);
        memory.change(Part::Rows, 0, 3_000);
        memory.change(Part::Buffers, 0, 2_000);
        memory.change(Part::Transactions, 0, 1_000);
        assert!(!memory.reserve(1_000));
        assert_eq!(memory.lasting_lack(3_300), 0);
        assert_eq!(memory.lasting_lack(3_310), 10);
        assert_eq!(memory.lasting_lack(u64::MAX), u64::MAX - 6_300);
    }

    #[test]
    fn a_shortage_grows_from_the_mark_to_the_limit() {
        let memory = Memory::new(3_200);
        memory.change(Part::Rows, 0, 3_100);
        assert!(!memory.is_short());
        memory.change(Part::Rows, 0, 50);
        assert!(memory.is_short());
        assert_eq!(memory.shortage_permille(), 500);
        memory.change(Part::Rows, 0, 500);
        assert_eq!(memory.shortage_permille(), 1000);
    }

    #[test]
    fn memory_that_rows_left_behind_is_not_the_process() {
        let memory = Memory::new(1_000_000);
        memory.notice_resident(100, false);
        assert_eq!(memory.parts().process, 100);
        memory.change(Part::Rows, 0, 1_600);
        memory.notice_resident(1_750, false);
        assert_eq!(memory.parts().process, 150);
        // Half of the rows go; the allocator keeps their memory.
        memory.change(Part::Rows, 1_600, 800);
        memory.notice_resident(1_750, false);
        assert_eq!(memory.used(), 950);
        // It gives it back after all.
        memory.notice_resident(930, false);
        assert_eq!(memory.used(), 930);
        // They come again, and the interpreter has grown.
        memory.change(Part::Rows, 800, 1_600);
        memory.notice_resident(1_800, false);
        assert_eq!(memory.used(), 1_800);
    }

    #[test]
    fn after_the_allocator_gave_back_what_it_could_the_rest_is_the_process() {
        let memory = Memory::new(1_000);
        memory.change(Part::Rows, 0, 900);
        memory.notice_resident(980, false);
        memory.change(Part::Rows, 900, 500);
        memory.notice_resident(980, false);
        assert_eq!(memory.used(), 580);
        memory.notice_resident(700, true);
        assert_eq!(memory.used(), 700);
        // Now this is the most.
        memory.notice_resident(720, false);
        assert_eq!(memory.used(), 720);
    }

    #[test]
    fn a_bound_is_promised_half_of_what_is_above_the_mark() {
        let memory = Memory::new(3_200);
        memory.change(Part::Rows, 0, 3_100);
        assert!(memory.reserve_most(25));
        assert!(!memory.reserve_most(1));
        assert!(memory.reserve(25));
        assert!(!memory.reserve(1));
        memory.give_back(50);
        assert!(memory.reserve_most(1));
    }

    const SECOND: Micros = 1_000_000;

    /// The node is full: above the mark there is always more resident.
    #[test]
    fn the_allocator_of_a_full_node_is_asked_once_in_some_seconds() {
        let memory = Memory::new(3_200);
        memory.change(Part::Rows, 0, 3_000);
        let mut trims = 0;
        for look in 0..200 {
            let at = SECOND + look * SECOND * 3 / 10;
            memory.look_by(at, || Some(3_190), || trims += 1);
            assert_eq!(memory.parts().process, 190);
        }
        assert!((10..=13).contains(&trims), "{trims} times in a minute");
    }

    #[test]
    fn between_two_trims_the_process_only_takes_less() {
        let memory = Memory::new(3_200);
        memory.change(Part::Rows, 0, 3_000);
        let trimmed = |at: Micros, before: u64, after: u64| {
            let resident = std::cell::Cell::new(before);
            memory.look_by(at, || Some(resident.get()), || resident.set(after));
            resident.get() == after
        };
        assert!(trimmed(SECOND, 3_300, 3_190));
        assert!(!trimmed(SECOND + 1, 3_150, 0));
        assert_eq!(memory.parts().process, 150);
        // Rows go, and their memory stays; or the process grows. The next trim tells, soon if it is much.
        memory.change(Part::Rows, 3_000, 2_900);
        assert!(!trimmed(2 * SECOND - 1, 3_140, 0));
        assert_eq!(memory.used(), 3_050);
        assert!(trimmed(2 * SECOND, 3_140, 3_120));
        assert_eq!(memory.parts().process, 220);
        assert!(!trimmed(3 * SECOND, 3_140, 0), "this is not much");
        assert!(trimmed(7 * SECOND, 3_140, 3_130));
        assert_eq!(memory.parts().process, 230);
        assert!(!trimmed(7 * SECOND + 1, 3_142, 0), "nothing to give back");
        assert!(trimmed(7 * SECOND + 2, 3_160, 3_100), "the limit is near");
    }

    #[test]
    fn a_look_sees_this_process() {
        let memory = Memory::new(1);
        memory.look(1);
        assert!(memory.parts().process > 1 << 20);
    }

    #[test]
    fn resident_memory_is_read_from_the_status_of_a_process() {
        let status = "Name:\tbackstay\nVmHWM:\t  20 kB\nVmRSS:\t  12 kB\nThreads:\t1\n";
        assert_eq!(resident_of(status), Some(12 * 1024));
        assert_eq!(resident_of("Name:\tx\n"), None);
    }
}
