//! `Pull`: the rows of some keys of a table.

use backstay_core::error::Refusal;
use backstay_core::wire::{Header, Opcode, PullMeta, PullReply, HEADER_BYTES};
use tokio::io::AsyncWrite;

use super::RequestHandler;
use crate::frame_io::Frame;
use crate::stats::add;

/// Words before the rows of a pull's answer: header and meta.
const PULL_REPLY_WORDS: usize = (HEADER_BYTES + PullReply::BYTES) / 8;

impl<W: AsyncWrite + Unpin> RequestHandler<W> {
    pub(super) fn pull(&mut self, frame: Frame) -> Result<(), Refusal> {
        let meta = PullMeta::decode(&frame.meta)?;
        let count = self.check_keys(&frame, meta.key_count, 0)?;
        let elements = self.check_elements(meta.table, meta.row_elements)?;
        let limit = self.shared.options.limits.max_frame_bytes;
        let body_bytes = count as u64 * elements as u64 * 4;
        if body_bytes > limit {
            return Err(Refusal::LimitExceeded(format!(
                "the answer to {count} keys takes {body_bytes} bytes, the limit is {limit} (max_frame_bytes): pull fewer keys at once"
            )));
        }
        let words = PULL_REPLY_WORDS + (count * elements).div_ceil(2);
        if self.reply.len() < words {
            self.reply.resize(words, 0);
        }
        let header = Header::plain(
            Opcode::PullReply,
            frame.header.request_id,
            PullReply::BYTES,
            body_bytes as usize,
        );
        let routing_version = self.shared.store.routing_version();
        let reply = PullReply {
            routing_version,
            row_count: meta.key_count,
            row_elements: meta.row_elements,
        };
        let (head, rows) = self.reply.split_at_mut(PULL_REPLY_WORDS);
        let head: &mut [u8] = bytemuck::cast_slice_mut(head);
        head[..HEADER_BYTES].copy_from_slice(&header.encode());
        head[HEADER_BYTES..].copy_from_slice(&reply.encode());
        let rows = &mut bytemuck::cast_slice_mut(rows)[..count * elements];
        self.shared
            .replicator
            .pull(meta.table, &frame.body[..count], rows)?;
        self.reply_bytes = PULL_REPLY_WORDS * 8 + body_bytes as usize;
        add(&self.shared.counters.pulls, 1);
        add(&self.shared.counters.keys_pulled, count as u64);
        self.request = frame.body;
        Ok(())
    }
}
