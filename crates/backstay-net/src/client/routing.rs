//! Who holds which slot, as a client needs it: for partitioning keys.

use backstay_core::hash::{mix64, SlotSpace};

use super::error::ClientError;

/// A routing table, with the order in which keys are laid out for sending: by server, then
/// by slot.
#[derive(Debug)]
pub struct Routing {
    /// Grows with every change.
    pub version: u64,
    /// The cluster's slots.
    pub space: SlotSpace,
    /// `host:port` of the data plane of each server that holds slots.
    pub servers: Vec<String>,
    /// Place of each slot in the order.
    rank_of_slot: Vec<u32>,
    /// The server of each place in the order.
    server_of_rank: Vec<u32>,
}

impl Routing {
    /// Build it from the master of each slot, an index into `servers`.
    pub fn new(
        version: u64,
        servers: Vec<String>,
        master_of_slot: &[u32],
    ) -> Result<Self, ClientError> {
        let space = u32::try_from(master_of_slot.len())
            .ok()
            .and_then(SlotSpace::new)
            .ok_or_else(|| {
                ClientError::Invalid(format!(
                    "{} slots: must be a power of two up to {}",
                    master_of_slot.len(),
                    SlotSpace::MAX_SLOTS
                ))
            })?;
        if let Some(bad) = master_of_slot
            .iter()
            .find(|&&master| master as usize >= servers.len())
        {
            return Err(ClientError::Invalid(format!(
                "master {bad} of {} servers",
                servers.len()
            )));
        }
        let mut order: Vec<u32> = (0..space.count()).collect();
        order.sort_by_key(|&slot| master_of_slot[slot as usize]);
        let mut rank_of_slot = vec![0; order.len()];
        for (rank, &slot) in order.iter().enumerate() {
            rank_of_slot[slot as usize] = rank as u32;
        }
        let server_of_rank = order
            .iter()
            .map(|&slot| master_of_slot[slot as usize])
            .collect();
        Ok(Self {
            version,
            space,
            servers,
            rank_of_slot,
            server_of_rank,
        })
    }

    /// The place of a key's slot in the order.
    #[inline]
    pub fn rank(&self, key: u64) -> u32 {
        self.rank_of_slot[self.space.slot_of_hash(mix64(key)) as usize]
    }

    /// The server of a place in the order.
    #[inline]
    pub fn server_of_rank(&self, rank: usize) -> usize {
        self.server_of_rank[rank] as usize
    }
}
