//! Which server is master of each slot, as a client needs it to partition keys.

use backstay_core::hash::{mix64, SlotSpace};

use super::error::ClientError;

/// In place of a server's index: the slot has no master now.
pub const NO_MASTER: u32 = u32::MAX;

/// One process that may hold slots.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerAddress {
    /// Its name, for messages; may be empty.
    pub node_id: String,
    /// `host:port` of its data plane.
    pub address: String,
    /// Which process it must be, or 0 if the routing does not say: then the first one met.
    pub instance: u64,
}

impl ServerAddress {
    /// How messages name it.
    pub(crate) fn name(&self) -> String {
        if self.node_id.is_empty() {
            return self.address.clone();
        }
        format!("{} at {}", self.node_id, self.address)
    }
}

/// A routing table, with the order in which keys are laid out for sending: by server, then
/// by slot. Slots without a master come last.
#[derive(Debug)]
pub struct Routing {
    /// Grows with every change.
    pub version: u64,
    /// Grows whenever some slot lost all its copies and began anew, empty.
    pub generation: u64,
    /// What becomes of slots that lost all their copies, in words; empty if there are none.
    pub loss: String,
    /// The cluster's slots.
    pub space: SlotSpace,
    /// The processes that slots refer to.
    pub servers: Vec<ServerAddress>,
    /// Place of each slot in the order.
    rank_of_slot: Vec<u32>,
    /// The server of each place in the order.
    server_of_rank: Vec<u32>,
}

impl Routing {
    /// Build it from the addresses alone and the master of each slot, an index into them.
    pub fn new(
        version: u64,
        servers: Vec<String>,
        master_of_slot: &[u32],
    ) -> Result<Self, ClientError> {
        let servers = servers.into_iter().map(|address| ServerAddress {
            node_id: String::new(),
            address,
            instance: 0,
        });
        Self::of(version, 0, servers.collect(), master_of_slot)
    }

    /// Build it; a master is an index into `servers` or [`NO_MASTER`].
    pub fn of(
        version: u64,
        generation: u64,
        servers: Vec<ServerAddress>,
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
            .find(|&&master| master != NO_MASTER && master as usize >= servers.len())
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
            generation,
            loss: String::new(),
            space,
            servers,
            rank_of_slot,
            server_of_rank,
        })
    }

    /// Why slots have no master, for messages.
    pub(crate) fn no_master(&self) -> String {
        let loss = if self.loss.is_empty() {
            String::new()
        } else {
            format!(": {}", self.loss)
        };
        format!("no master as of routing {}{loss}", self.version)
    }

    /// Whether every slot has a master.
    pub(crate) fn is_complete(&self) -> bool {
        // Slots without one come last.
        self.server_of_rank.last() != Some(&NO_MASTER)
    }

    /// The place of a key's slot in the order.
    #[inline]
    pub fn rank(&self, key: u64) -> u32 {
        self.rank_of_slot[self.slot(key) as usize]
    }

    /// The server of a place in the order, or [`NO_MASTER`].
    #[inline]
    pub fn server_of_rank(&self, rank: usize) -> u32 {
        self.server_of_rank[rank]
    }

    /// A key's slot.
    #[inline]
    pub fn slot(&self, key: u64) -> u32 {
        self.space.slot_of_hash(mix64(key))
    }

    /// The server of a key's slot, or [`NO_MASTER`].
    #[inline]
    pub fn server_of_key(&self, key: u64) -> u32 {
        self.server_of_rank(self.rank(key) as usize)
    }

    /// The servers that are master of some slot now, by index.
    pub fn masters(&self) -> Vec<usize> {
        let mut masters: Vec<u32> = self.server_of_rank.clone();
        masters.dedup();
        masters.retain(|&master| master != NO_MASTER);
        masters.into_iter().map(|master| master as usize).collect()
    }
}
