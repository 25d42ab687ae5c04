//! Large buffers kept for reuse: memory fresh from the system costs a page fault every 4 KiB,
//! which is more than copying into it.

use parking_lot::Mutex;

/// Buffers up to a total size.
#[derive(Debug)]
pub(crate) struct BufferPool {
    state: Mutex<State>,
    max_bytes: usize,
}

#[derive(Debug, Default)]
struct State {
    buffers: Vec<Vec<u64>>,
    bytes: usize,
}

impl BufferPool {
    pub(crate) fn new(max_bytes: usize) -> Self {
        Self {
            state: Mutex::default(),
            max_bytes,
        }
    }

    /// A buffer of any size and content, or an empty one.
    pub(crate) fn take(&self) -> Vec<u64> {
        let mut state = self.state.lock();
        let buffer = state.buffers.pop().unwrap_or_default();
        state.bytes -= buffer.capacity() * 8;
        buffer
    }

    /// Keep a buffer, if there is room for it.
    pub(crate) fn give(&self, buffer: Vec<u64>) {
        let bytes = buffer.capacity() * 8;
        let mut state = self.state.lock();
        if bytes > 0 && state.bytes + bytes <= self.max_bytes {
            state.bytes += bytes;
            state.buffers.push(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_buffers_up_to_its_size() {
        let pool = BufferPool::new(64);
        for words in [4, 3, 2] {
            pool.give(Vec::with_capacity(words));
        }
        assert_eq!(pool.take().capacity(), 3);
        assert_eq!(pool.take().capacity(), 4);
        assert_eq!(pool.take().capacity(), 0);
    }
}
