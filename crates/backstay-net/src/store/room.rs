//! Room for the rows that pushes under way may create: reserved before anything changes, so that
//! the memory limit holds.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

use backstay_core::error::Refusal;
use backstay_core::transaction::{Run, Transaction};

use super::Store;

/// Memory reserved for a push under way.
#[derive(Debug)]
pub(super) struct Room {
    reserved: Arc<AtomicU64>,
    bytes: u64,
}

impl Drop for Room {
    fn drop(&mut self) {
        self.reserved.fetch_sub(self.bytes, Ordering::AcqRel);
    }
}

impl Store {
    /// Bytes that the new rows of these runs of a push take, if they fit the limit; they are free again when
    /// what is returned is dropped.
    pub(super) fn reserve(&self, transaction: &Transaction, runs: &[Run]) -> Result<Room, Refusal> {
        if self.memory_limit_bytes == 0 {
            return self.reserve_bytes(0);
        }
        self.reserve_bytes(self.growth_bytes(transaction, runs)?)
    }

    /// The same for so many bytes.
    pub(super) fn reserve_bytes(&self, wanted: u64) -> Result<Room, Refusal> {
        let reserved = Arc::clone(&self.reserved_bytes);
        let all = reserved.fetch_add(wanted, Ordering::AcqRel) + wanted;
        let room = Room {
            reserved,
            bytes: wanted,
        };
        if wanted > 0 && self.allocated_bytes() + all > self.memory_limit_bytes {
            return Err(self.no_room(wanted));
        }
        Ok(room)
    }

    /// The same for rows that come to one slot by another way than a push.
    pub(super) fn room_for(
        &self,
        slot: u32,
        table: u64,
        keys: &[u64],
    ) -> Result<Option<Room>, Refusal> {
        if self.memory_limit_bytes == 0 || keys.is_empty() {
            return Ok(None);
        }
        let engine = self.stripes[self.stripe(slot)].read();
        let wanted = engine.table(table)?.growth_bytes(keys) as u64;
        drop(engine);
        self.reserve_bytes(wanted).map(Some)
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

    pub(super) fn no_room(&self, wanted: u64) -> Refusal {
        Refusal::MemoryLimit(format!(
            "the new rows need {wanted} bytes; {} of {} (memory_limit_bytes) are in use: add servers or raise the limit",
            self.allocated_bytes(),
            self.memory_limit_bytes
        ))
    }
}
