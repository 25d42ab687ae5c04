//! Room for the rows that pushes under way may create: reserved before anything changes, so that
//! the memory limit holds. What is reserved counts together with the account of all parts
//! ([`crate::memory`]), and the transactions themselves count as long as anything has them.

use std::sync::Arc;
use std::time::Duration;

use backstay_core::engine::Engine;
use backstay_core::error::Refusal;
use backstay_core::transaction::{Run, Transaction};

use super::relief::GivingSlots;
use super::Store;
use crate::memory::{Held, Memory, Part};

/// Transactions under way may take this part of the limit; more of them have to wait.
const UNDER_WAY_DIVISOR: u64 = 8;
/// The longest time that the sender of new rows waits before its next push.
const LONGEST_PAUSE: Duration = Duration::from_millis(4);

/// How rows come to a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Coming {
    /// As they are, from another node or a checkpoint.
    Copied,
    /// By pushes, which may have to count them first.
    Pushed,
}

/// Memory reserved for a push under way, and the memory of the push.
#[derive(Debug)]
pub(super) struct Room {
    memory: Arc<Memory>,
    reserved: u64,
    /// The push needs new memory, and there is little.
    pause: Duration,
    push: Held,
}

/// Why another node's push got no [`Room`] when it came: it is attached in the place of it, and the
/// push is refused when its turn comes.
#[derive(Debug)]
pub(super) struct NoRoom(pub(super) Refusal);

impl Room {
    /// For how long the sender is to wait before its next push.
    pub(super) fn pause(&self) -> Duration {
        self.pause
    }

    /// The push waits for a copy that comes in, and counts as a part of it.
    pub(super) fn wait_for_a_copy(&mut self) {
        self.push.count_as(Part::Copies);
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        self.memory.give_back(self.reserved);
    }
}

impl Store {
    /// Bytes that the new rows of these runs of a push take, if they fit the limit; they are free
    /// again when what is returned is dropped. `giving`: whose rows may go for a push that has to wait.
    pub(super) fn reserve(
        &self,
        transaction: &Transaction,
        runs: &[Run],
        giving: GivingSlots,
    ) -> Result<Room, Refusal> {
        let reserved = if self.has_memory_limit() && transaction.change.creates() {
            // With much room a bound is enough that looks at no slot. With some, a bound is that looks at
            // no key. A push that got room so is not slowed.
            let most = self.sum_of_stripes(transaction, runs, Engine::growth_bound)?;
            if self.memory.reserve_easily(most) {
                return Ok(self.room(most, Duration::ZERO, transaction.allocated_bytes()));
            }
            let most = self.sum_of_stripes(transaction, runs, Engine::most_growth_bytes)?;
            if self.memory.reserve_most(most) {
                return Ok(self.room(most, Duration::ZERO, transaction.allocated_bytes()));
            }
            let wanted = self.growth_bytes(transaction, runs)?;
            self.promise(wanted, giving)?;
            wanted
        } else {
            0
        };
        let pause = match reserved {
            0 => Duration::ZERO,
            _ => LONGEST_PAUSE * self.memory.shortage_permille() as u32 / 1000,
        };
        Ok(self.room(reserved, pause, transaction.allocated_bytes()))
    }

    /// Promise bytes for new rows. If there are too few now, tables give up rows for them; but none does
    /// for what would not fit then either.
    fn promise(&self, wanted: u64, giving: GivingSlots) -> Result<(), Refusal> {
        if self.memory.reserve(wanted) {
            return Ok(());
        }
        if self.can_give_up(self.memory.lasting_lack(wanted), giving) {
            self.memory.note_lacked(wanted);
            return Err(self.no_room(wanted));
        }
        Err(Refusal::NoRoomEver(format!(
            "no memory for new rows: they need {wanted} bytes; {} of {} (memory_limit_bytes) are in use, and tables with a capacity have not so much to give up: add servers, raise the limit, give tables a capacity, or send smaller pushes",
            self.memory.used(),
            self.memory.limit_bytes()
        )))
    }

    fn room(&self, reserved: u64, pause: Duration, push_bytes: usize) -> Room {
        let mut push = Held::new(&self.memory, Part::Transactions);
        push.set(push_bytes);
        Room {
            memory: Arc::clone(&self.memory),
            reserved,
            pause,
            push,
        }
    }

    /// Refuse a push for now if those under way take too much: more would come than go.
    ///
    /// Those behind a copy that comes in are not among them. They have a limit of their own at the master
    /// that copies, and a slow copy would hold up all that this node is master of.
    pub(super) fn check_under_way(&self, transaction: &Transaction) -> Result<(), Refusal> {
        let most = self.memory.limit_bytes() / UNDER_WAY_DIVISOR;
        let (known, more) = (
            self.memory.of(Part::Transactions),
            transaction.allocated_bytes() as u64,
        );
        // A single one that is too large must not wait for ever.
        if most == 0 || known == 0 || known + more <= most {
            return Ok(());
        }
        Err(Refusal::NotReady(format!(
            "too many pushes at once: those under way take {known} bytes, and may take {most} (1/8 of memory_limit_bytes); raise memory_limit_bytes, or send smaller pushes, if this lasts"
        )))
    }

    /// Room for rows that come to one slot by another way than a push of their own.
    pub(super) fn room_for(
        &self,
        slot: u32,
        table: u64,
        keys: &[u64],
        coming: Coming,
    ) -> Result<Option<Room>, Refusal> {
        if !self.has_memory_limit() || keys.is_empty() {
            return Ok(None);
        }
        let engine = self.stripes[self.stripe(slot)].read();
        let wanted = match coming {
            Coming::Copied => engine.table(table)?.growth_bytes(keys),
            Coming::Pushed => engine.growth_bytes(table, keys)?,
        } as u64;
        drop(engine);
        match self.promise(wanted, GivingSlots::All) {
            Ok(()) => Ok(Some(self.room(wanted, Duration::ZERO, 0))),
            // The copy is tried again, when pushes and rows may be other ones.
            Err(Refusal::NoRoomEver(why)) => Err(Refusal::MemoryLimit(why)),
            Err(refusal) => Err(refusal),
        }
    }

    pub(super) fn growth_bytes(
        &self,
        transaction: &Transaction,
        runs: &[Run],
    ) -> Result<u64, Refusal> {
        if !transaction.change.creates() {
            return Ok(0);
        }
        let keys = transaction.batch.keys();
        let mut wanted = 0;
        for (stripe, runs) in self.stripes_of(runs) {
            // Runs may be left out in between.
            let run = |run: &Run| &keys[run.start as usize..run.end as usize];
            let part: Vec<u64> = runs.iter().flat_map(run).copied().collect();
            let engine = self.stripes[stripe].read();
            wanted += engine.growth_bytes(transaction.table, &part)? as u64;
        }
        Ok(wanted)
    }

    fn sum_of_stripes(
        &self,
        transaction: &Transaction,
        runs: &[Run],
        bytes: fn(&Engine, u64, &[Run]) -> Result<usize, Refusal>,
    ) -> Result<u64, Refusal> {
        let mut wanted = 0;
        for (stripe, runs) in self.stripes_of(runs) {
            let engine = self.stripes[stripe].read();
            wanted += bytes(&engine, transaction.table, runs)? as u64;
        }
        Ok(wanted)
    }

    pub(super) fn no_room(&self, wanted: u64) -> Refusal {
        Refusal::MemoryLimit(format!(
            "no memory for new rows: they need {wanted} bytes; {} of {} (memory_limit_bytes) are in use, and other pushes were promised some: add servers, raise the limit, or give tables a capacity",
            self.memory.used(),
            self.memory.limit_bytes()
        ))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use crate::clock::WallClock;
    use backstay_core::hash::{table_id, SlotSpace};
    use backstay_core::spec::TableSpec;
    use backstay_core::stream::{StreamId, TransactionId};
    use backstay_core::transaction::{Batch, Change};

    const LIMIT: u64 = 3_200_000;

    fn store() -> Store {
        let store = Store::new(SlotSpace::new(4).unwrap(), LIMIT);
        store.set_routing(1, &[true; 4]);
        let spec = r#"{"name":"t","kind":{"sparse":{"dim":1}},"initializer":{"zeros":{}},"optimizer":{"sgd":{"learning_rate":1.0}}}"#;
        let spec = Arc::new(TableSpec::from_json(spec).unwrap());
        store.create_table(&spec, 1).unwrap();
        store
    }

    fn push(key: u64, sequence: u64) -> Transaction {
        let stream = StreamId {
            job: 1,
            pass: 0,
            task: 0,
        };
        let id = TransactionId { stream, sequence };
        let change = Change::update(1.0);
        let (space, batch) = (SlotSpace::new(4).unwrap(), Batch::new(&[key], &[-1.0]));
        Transaction::new(space, id, sequence, table_id("t"), change, batch).unwrap()
    }

    #[test]
    fn who_pushes_new_rows_is_slowed_while_memory_is_short() {
        let store = store();
        let mut first = push(1, 0);
        assert_eq!(store.prepare(&mut first).unwrap(), Duration::ZERO);
        store.apply(&first).unwrap();
        drop(first);
        let used = store.memory.used();
        store.memory.change(Part::Buffers, 0, 3_130_000 - used);
        assert!(store.memory.is_short());
        let pause = store.prepare(&mut push(2, 1)).unwrap();
        assert!(pause > Duration::ZERO && pause < LONGEST_PAUSE, "{pause:?}");
        // Rows that are there need nothing.
        assert_eq!(store.prepare(&mut push(1, 1)).unwrap(), Duration::ZERO);
        store.memory.change(Part::Buffers, 0, LIMIT);
        let refused = store.prepare(&mut push(2, 1)).unwrap_err();
        assert!(matches!(refused, Refusal::MemoryLimit(_)), "{refused:?}");
        assert_eq!(store.prepare(&mut push(1, 1)).unwrap(), Duration::ZERO);
    }

    #[test]
    fn a_slot_is_later_than_all_that_it_has_seen() {
        let time = Arc::new(AtomicU32::new(100));
        let clock = Arc::clone(&time);
        let clock = WallClock::of(move || clock.load(Ordering::Relaxed));
        let store = Store::with_clock(SlotSpace::new(4).unwrap(), 0, clock);
        store.set_routing(1, &[true; 4]);
        let spec = r#"{"name":"t","kind":{"sparse":{"dim":1}},"initializer":{"zeros":{}},"optimizer":{"sgd":{"learning_rate":1.0}},"lifetime":{"capacity":{"rows":1000}}}"#;
        let spec = Arc::new(TableSpec::from_json(spec).unwrap());
        store.create_table(&spec, 1).unwrap();
        let mut one = push(1, 0);
        store.prepare(&mut one).unwrap();
        store.apply(&one).unwrap();
        // Another master's clock is behind.
        time.store(50, Ordering::Relaxed);
        let slot = one.runs()[0].slot;
        assert_eq!((store.seconds(), store.seconds_in(slot)), (50, 101));
        time.store(200, Ordering::Relaxed);
        assert_eq!(store.seconds_in(slot), 200);
    }

    #[test]
    fn pushes_under_way_take_a_part_of_the_memory() {
        let store = store();
        let (mut one, mut other) = (push(1, 0), push(2, 1));
        store.prepare(&mut one).unwrap();
        let known = store.memory.of(Part::Transactions);
        assert!(known > 0);
        store
            .memory
            .change(Part::Transactions, 0, LIMIT / UNDER_WAY_DIVISOR - known);
        let refused = store.prepare(&mut other).unwrap_err();
        assert!(matches!(refused, Refusal::NotReady(_)), "{refused:?}");
        store
            .memory
            .change(Part::Transactions, LIMIT / UNDER_WAY_DIVISOR - known, 0);
        store.prepare(&mut other).unwrap();
        drop((one, other));
        assert_eq!(store.memory.of(Part::Transactions), 0);
    }
}
