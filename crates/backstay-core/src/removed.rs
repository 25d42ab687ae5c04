//! The keys whose rows were removed from a map, in two generations as [`crate::marks`] has them.
//!
//! An incremental checkpoint names them. There is a limit on how many are known: behind it the
//! rows that are left are fewer than the removed keys, and a whole copy is smaller.

use crate::marks::Since;

/// So many keys of a generation are known, however few rows there are.
const MIN_KNOWN: usize = 64;

/// The keys of one generation, oldest first; a key may stand twice. None: too many.
type Generation = Option<Vec<u64>>;

/// See the module's documentation.
#[derive(Debug, Clone)]
pub struct Removed {
    recent: Generation,
    earlier: Generation,
}

impl Default for Removed {
    fn default() -> Self {
        Self {
            recent: Some(Vec::new()),
            earlier: Some(Vec::new()),
        }
    }
}

impl Removed {
    /// A row was removed, so many are left.
    pub fn push(&mut self, key: u64, left: usize) {
        if let Some(keys) = &mut self.recent {
            if keys.len() == keys.capacity() {
                // In small steps: many slots of a table that evicts grow at the same time.
                keys.reserve_exact((keys.len() / 8).max(8));
            }
            keys.push(key);
            if keys.len() > left.max(MIN_KNOWN) {
                self.recent = None;
            }
        }
    }

    /// The keys that were removed; None: they are too many to be known.
    pub fn keys(&self, since: Since) -> Option<impl Iterator<Item = u64> + '_> {
        let earlier: &[u64] = match since {
            Since::Recent => &[],
            Since::Earlier => self.earlier.as_ref()?,
        };
        Some(earlier.iter().chain(self.recent.as_ref()?).copied())
    }

    /// Begin a new generation: the earlier one becomes what [`Self::keys`] gives for `since`, so
    /// many rows being left. It grows with each generation that begins since an earlier one, as
    /// while checkpoints fail.
    pub fn begin(&mut self, since: Since, left: usize) {
        let earlier = self
            .keys(since)
            .map(Iterator::collect)
            .filter(|keys: &Vec<u64>| keys.len() <= left.max(MIN_KNOWN));
        *self = Self {
            recent: Some(Vec::new()),
            earlier,
        };
    }

    /// Bytes allocated.
    pub fn allocated_bytes(&self) -> usize {
        let bytes = |keys: &Generation| keys.as_ref().map_or(0, |keys| keys.capacity() * 8);
        bytes(&self.recent) + bytes(&self.earlier)
    }
}
