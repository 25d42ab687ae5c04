//! A request laid out for sending, kept until it is answered so that it can be sent again.

use std::ops::Range;

use backstay_core::wire::{Header, HelloReply, Opcode, HEADER_BYTES, MAX_META_BYTES};

use super::error::ClientError;

/// See the module's documentation. Meta parts of requests are whole words, so the body is
/// aligned.
#[derive(Debug, Default)]
pub(crate) struct OutFrame {
    words: Vec<u64>,
    bytes: usize,
    body_at: usize,
    keys: usize,
}

impl OutFrame {
    /// Lay out header and meta in `buffer`; the body's `keys` keys and what follows them,
    /// `body_bytes` in all, are to be filled in.
    pub(crate) fn new(
        opcode: Opcode,
        meta: &[u8],
        keys: usize,
        body_bytes: usize,
        mut buffer: Vec<u64>,
    ) -> Self {
        debug_assert_eq!(meta.len() % 8, 0);
        let header = Header::plain(opcode, 0, meta.len(), body_bytes);
        let bytes = HEADER_BYTES + meta.len() + body_bytes;
        if buffer.len() < bytes.div_ceil(8) {
            buffer.resize(bytes.div_ceil(8), 0);
        }
        let head: &mut [u8] = bytemuck::cast_slice_mut(&mut buffer);
        head[..HEADER_BYTES].copy_from_slice(&header.encode());
        head[HEADER_BYTES..HEADER_BYTES + meta.len()].copy_from_slice(meta);
        Self {
            words: buffer,
            bytes,
            body_at: (HEADER_BYTES + meta.len()) / 8,
            keys,
        }
    }

    /// The body, from its start to the end of the buffer.
    pub(crate) fn body_mut(&mut self) -> &mut [u64] {
        &mut self.words[self.body_at..]
    }

    /// The keys, from the start of the body.
    pub(crate) fn keys(&self) -> &[u64] {
        &self.words[self.body_at..][..self.keys]
    }

    /// Go by another routing version. In the meta part of a pull and of a push it is the
    /// second word.
    pub(crate) fn set_routing_version(&mut self, version: u64) {
        debug_assert!(self.body_at > HEADER_BYTES / 8 + 1);
        self.words[HEADER_BYTES / 8 + 1] = version.to_le();
    }

    /// The meta part.
    pub(crate) fn meta(&self) -> &[u8] {
        &self.bytes()[HEADER_BYTES..self.body_at * 8]
    }

    /// The same kind of request for some of its keys and their rows. `meta` must tell the new
    /// number of keys.
    pub(crate) fn cut(
        &self,
        opcode: Opcode,
        meta: &[u8],
        ranges: &[Range<usize>],
        buffer: Vec<u64>,
    ) -> Self {
        let keys = ranges.iter().map(Range::len).sum::<usize>();
        let row_bytes = (self.bytes - (self.body_at + self.keys) * 8) / self.keys.max(1);
        let mut frame = Self::new(opcode, meta, keys, keys * (8 + row_bytes), buffer);
        let rows: &[u8] = bytemuck::cast_slice(&self.words[self.body_at + self.keys..]);
        let (to_keys, to_rows) = frame.words[frame.body_at..].split_at_mut(keys);
        let to_rows: &mut [u8] = bytemuck::cast_slice_mut(to_rows);
        let mut at = 0;
        for range in ranges {
            let end = at + range.len();
            to_keys[at..end].copy_from_slice(&self.keys()[range.clone()]);
            to_rows[at * row_bytes..end * row_bytes]
                .copy_from_slice(&rows[range.start * row_bytes..range.end * row_bytes]);
            at = end;
        }
        frame
    }

    pub(crate) fn set_request_id(&mut self, request_id: u64) {
        // Bytes 8 to 16 of the header.
        self.words[1] = request_id.to_le();
    }

    /// Refuse what the server would not take, before it is sent.
    pub(crate) fn check(&self, hello: &HelloReply) -> Result<(), ClientError> {
        check(hello, self.keys, self.bytes - self.body_at * 8)
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.bytes]
    }

    pub(crate) fn into_buffer(self) -> Vec<u64> {
        self.words
    }
}

/// Refuse a request that a server would not take for its size.
pub(crate) fn check(hello: &HelloReply, keys: usize, body_bytes: usize) -> Result<(), ClientError> {
    let frame_bytes = body_bytes as u64 + u64::from(MAX_META_BYTES);
    let (what, size, limit, name) = if frame_bytes > hello.max_frame_bytes {
        (
            "bytes",
            body_bytes as u64,
            hello.max_frame_bytes,
            "max_frame_bytes",
        )
    } else if keys as u64 > u64::from(hello.max_keys) {
        (
            "keys",
            keys as u64,
            u64::from(hello.max_keys),
            "max_keys_per_request",
        )
    } else {
        return Ok(());
    };
    Err(ClientError::LimitExceeded(format!(
        "{size} {what} for pserver {} in one request, its limit is {limit} ({name}): \
         send smaller batches or raise it",
        hello.node_id
    )))
}
