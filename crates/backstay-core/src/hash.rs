//! Hashing of keys to slots and of names to table ids. Pure arithmetic, fixed for ever:
//! clients and servers of every version must agree on it.

/// Mix the bits of a key so that every output bit depends on every input bit.
///
/// Source: the 64-bit finalizer of `MurmurHash3` (A. Appleby, public domain). A bijection.
#[inline]
pub fn mix64(mut x: u64) -> u64 {
    x ^= x >> 33;
    x = x.wrapping_mul(0xff51_afd7_ed55_8ccd);
    x ^= x >> 33;
    x = x.wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    x ^ (x >> 33)
}

/// The key whose [`mix64`] is `hash`.
pub fn unmix64(mut hash: u64) -> u64 {
    hash ^= hash >> 33;
    hash = hash.wrapping_mul(0x9cb4_b2f8_1293_37db);
    hash ^= hash >> 33;
    hash = hash.wrapping_mul(0x4f74_430c_22a5_4005);
    hash ^ (hash >> 33)
}

/// The id under which a table travels: FNV-1a of its name, mixed.
pub fn table_id(name: &str) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for byte in name.bytes() {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    }
    mix64(hash)
}

/// The key of one block of a dense table.
///
/// The table's id is part of it, so that the first blocks of many small tensors do not
/// all meet in one slot.
#[inline]
pub fn dense_block_key(table: u64, block: u64) -> u64 {
    table.wrapping_add(block)
}

/// How many slots a cluster has, and which slot a hash falls into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotSpace {
    bits: u32,
}

impl SlotSpace {
    /// The most slots a cluster may have.
    pub const MAX_SLOTS: u32 = 65_536;

    /// A space of `count` slots, or `None` if that is not a power of two up to [`Self::MAX_SLOTS`].
    pub fn new(count: u32) -> Option<Self> {
        (count.is_power_of_two() && count <= Self::MAX_SLOTS).then(|| Self {
            bits: count.trailing_zeros(),
        })
    }

    /// The number of slots.
    #[inline]
    pub fn count(self) -> u32 {
        1 << self.bits
    }

    /// The slot of a key whose [`mix64`] is `hash`: its top bits, so that the low bits stay
    /// free for the maps inside a slot.
    #[inline]
    pub fn slot_of_hash(self, hash: u64) -> u32 {
        // Two shifts, because a shift by 64 (one slot) is not defined.
        ((hash >> 1) >> (63 - self.bits)) as u32
    }

    /// The key of number `n` in a slot, for what has no key of its own. `n` is below 2^40.
    pub fn key_in(self, slot: u32, n: u64) -> u64 {
        // Two shifts, as above.
        unmix64((u64::from(slot) << (63 - self.bits)) << 1 | n)
    }

    /// The slot of a key.
    #[inline]
    pub fn slot_of(self, key: u64) -> u32 {
        self.slot_of_hash(mix64(key))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_the_top_bits() {
        let one = SlotSpace::new(1).unwrap();
        assert_eq!(one.slot_of(u64::MAX), 0);
        let space = SlotSpace::new(1024).unwrap();
        assert_eq!(space.slot_of_hash(u64::MAX), 1023);
        assert_eq!(space.slot_of_hash(1 << 54), 1);
        assert!(SlotSpace::new(1000).is_none());
        assert!(SlotSpace::new(0).is_none());
        assert!(SlotSpace::new(131_072).is_none());
    }

    #[test]
    fn ids_are_fixed_for_ever() {
        // Changing any of these would orphan every checkpoint and every running client.
        assert_eq!(mix64(0), 0);
        assert_eq!(mix64(1), 0xb456_bcfc_34c2_cb2c);
        assert_eq!(table_id("emb"), table_id("emb"));
        assert_ne!(table_id("emb"), table_id("emb2"));
    }

    #[test]
    fn keys_spread_evenly() {
        let space = SlotSpace::new(64).unwrap();
        let mut counts = [0u32; 64];
        for key in 0..64_000 {
            counts[space.slot_of(key) as usize] += 1;
        }
        assert!(
            counts.iter().all(|&n| (800..1200).contains(&n)),
            "{counts:?}"
        );
    }
}
