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
    /// Words at its end, one for each slot: where the gradients of a push come from.
    origins: usize,
    /// Bytes behind the rows: those, and what fills up the last word of the rows.
    tail_bytes: usize,
}

impl OutFrame {
    /// Lay out header and meta in `buffer`; the body's `keys` keys and what follows them,
    /// `body_bytes` in all, are to be filled in.
    pub(crate) fn new(
        opcode: Opcode,
        meta: &[u8],
        keys: usize,
        body_bytes: usize,
        buffer: Vec<u64>,
    ) -> Self {
        Self::with_origins(opcode, meta, keys, body_bytes, &[], buffer)
    }

    /// The same, with an origin for each slot behind the `body_bytes`.
    pub(crate) fn with_origins(
        opcode: Opcode,
        meta: &[u8],
        keys: usize,
        body_bytes: usize,
        origins: &[u64],
        mut buffer: Vec<u64>,
    ) -> Self {
        debug_assert_eq!(meta.len() % 8, 0);
        let tail_bytes = match origins.len() {
            0 => 0,
            count => body_bytes.next_multiple_of(8) - body_bytes + count * 8,
        };
        let body_bytes = body_bytes + tail_bytes;
        let header = Header::plain(opcode, 0, meta.len(), body_bytes);
        let bytes = HEADER_BYTES + meta.len() + body_bytes;
        if buffer.len() < bytes.div_ceil(8) {
            buffer.resize(bytes.div_ceil(8), 0);
        }
        let head: &mut [u8] = bytemuck::cast_slice_mut(&mut buffer);
        head[..HEADER_BYTES].copy_from_slice(&header.encode());
        head[HEADER_BYTES..HEADER_BYTES + meta.len()].copy_from_slice(meta);
        if !origins.is_empty() {
            let first = bytes / 8 - origins.len();
            // The half of a word that no value may fill.
            buffer[first - 1] = 0;
            buffer[first..bytes / 8].copy_from_slice(origins);
        }
        Self {
            words: buffer,
            bytes,
            body_at: (HEADER_BYTES + meta.len()) / 8,
            keys,
            origins: origins.len(),
            tail_bytes,
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
    /// number of keys. `slot` is that of a key.
    pub(crate) fn cut(
        &self,
        opcode: Opcode,
        meta: &[u8],
        ranges: &[Range<usize>],
        buffer: Vec<u64>,
        slot: impl Fn(u64) -> u32,
    ) -> Self {
        let keys = ranges.iter().map(Range::len).sum::<usize>();
        let rows_bytes = self.bytes - (self.body_at + self.keys) * 8 - self.tail_bytes;
        let row_bytes = rows_bytes / self.keys.max(1);
        let origins = self.origins_in(ranges, slot);
        let body_bytes = keys * (8 + row_bytes);
        let mut frame = Self::with_origins(opcode, meta, keys, body_bytes, &origins, buffer);
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

    /// The origins of the slots in these ranges of keys, which hold whole slots.
    fn origins_in(&self, ranges: &[Range<usize>], slot: impl Fn(u64) -> u32) -> Vec<u64> {
        let mut origins = Vec::new();
        if self.origins == 0 {
            return origins;
        }
        let all = &self.words[self.bytes / 8 - self.origins..self.bytes / 8];
        let runs = self.keys().chunk_by(|&a, &b| slot(a) == slot(b));
        let mut at = 0;
        for (run, &origin) in runs.zip(all) {
            if ranges.iter().any(|range| range.contains(&at)) {
                origins.push(origin);
            }
            at += run.len();
        }
        origins
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Three slots of two keys, one and three, rows of three values: an odd number of them.
    fn frame() -> OutFrame {
        let keys = [1u64, 2, 11, 21, 22, 23];
        let bytes = keys.len() * (8 + 3 * 4);
        let origins = [100, 101, 102];
        let mut frame =
            OutFrame::with_origins(Opcode::Push, &[0; 64], 6, bytes, &origins, Vec::new());
        frame.body_mut()[..6].copy_from_slice(&keys);
        let values: Vec<f32> = (0..18).map(|n| n as f32).collect();
        let rows: &mut [f32] = bytemuck::cast_slice_mut(&mut frame.body_mut()[6..15]);
        rows.copy_from_slice(&values);
        frame
    }

    #[test]
    fn a_part_of_a_push_has_the_origins_of_its_slots() {
        let frame = frame();
        let slot = |key: u64| key as u32 / 10;
        for (ranges, keys, origins) in [
            ([0..2, 3..6], vec![1u64, 2, 21, 22, 23], vec![100u64, 102]),
            ([2..3, 6..6], vec![11], vec![101]),
            ([0..2, 2..3], vec![1, 2, 11], vec![100, 101]),
        ] {
            let cut = frame.cut(Opcode::Push, &[0; 64], &ranges, Vec::new(), slot);
            assert_eq!(cut.keys(), keys);
            let body = &cut.bytes()[HEADER_BYTES + 64..];
            let told: Vec<u64> =
                bytemuck::pod_collect_to_vec(&body[body.len() - origins.len() * 8..]);
            assert_eq!(told, origins);
            let rows = (keys.len() * 12).next_multiple_of(8);
            assert_eq!(body.len(), keys.len() * 8 + rows + origins.len() * 8);
            let first = ranges[0].start as f32 * 3.0;
            let values: Vec<f32> = bytemuck::pod_collect_to_vec(&body[keys.len() * 8..][..12]);
            assert_eq!(values, [first, first + 1.0, first + 2.0]);
        }
    }
}
