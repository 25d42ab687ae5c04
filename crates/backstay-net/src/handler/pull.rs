//! `Pull`: the rows of some keys of a table.

use backstay_core::compensation::Reference;
use backstay_core::error::Refusal;
use backstay_core::wire::{Header, Opcode, PullMeta, PullReply, HEADER_BYTES};
use tokio::io::AsyncWrite;

use super::RequestHandler;
use crate::frame_io::Frame;
use crate::stats::add;
use crate::store::Asked;

/// Words before the rows of a pull's answer: header and meta.
const PULL_REPLY_WORDS: usize = (HEADER_BYTES + PullReply::BYTES) / 8;

impl<W: AsyncWrite + Unpin> RequestHandler<W> {
    pub(super) fn pull(&mut self, frame: Frame) -> Result<(), Refusal> {
        let meta = PullMeta::decode(&frame.meta)?;
        let count = self.check_keys(&frame, meta.key_count, 0)?;
        let elements = self.check_elements(meta.table, meta.row_elements)?;
        let limit = self.shared.options.limits.max_frame_bytes;
        let told = if meta.sums {
            Reference::Sum.values(elements)
        } else {
            0
        };
        let values = count * (elements + told);
        let row_bytes = values as u64 * 4;
        // At most one origin for each key; how many slots there are is not known yet.
        let most = row_bytes + if meta.origins { count as u64 * 8 } else { 0 };
        if most > limit {
            return Err(Refusal::LimitExceeded(format!(
                "the answer to {count} keys takes {most} bytes, the limit is {limit} (max_frame_bytes): pull fewer keys at once"
            )));
        }
        let words = PULL_REPLY_WORDS + values.div_ceil(2);
        if self.reply.len() < words {
            self.reply.resize(words, 0);
        }
        let routing_version = self.shared.store.routing_version();
        let reply = PullReply {
            routing_version,
            row_count: meta.key_count,
            row_elements: meta.row_elements,
        };
        let rows: &mut [f32] = bytemuck::cast_slice_mut(&mut self.reply[PULL_REPLY_WORDS..]);
        let (rows, sums) = rows[..values].split_at_mut(count * elements);
        let mut origins = meta.origins.then(Vec::new);
        let asked = Asked {
            origins: origins.as_mut(),
            sums: meta.sums.then_some(sums),
        };
        let (replicator, keys) = (&self.shared.replicator, &frame.body[..count]);
        replicator.pull_and_tell(meta.table, keys, rows, asked)?;
        let body_bytes = match origins {
            None => row_bytes as usize,
            Some(origins) => self.lay_out_origins(words, values, &origins),
        };
        let request_id = frame.header.request_id;
        let header = Header::plain(Opcode::PullReply, request_id, PullReply::BYTES, body_bytes);
        let head: &mut [u8] = bytemuck::cast_slice_mut(&mut self.reply[..PULL_REPLY_WORDS]);
        head[..HEADER_BYTES].copy_from_slice(&header.encode());
        head[HEADER_BYTES..].copy_from_slice(&reply.encode());
        self.reply_bytes = PULL_REPLY_WORDS * 8 + body_bytes;
        add(&self.shared.counters.pulls, 1);
        add(&self.shared.counters.keys_pulled, count as u64);
        self.request = frame.body;
        Ok(())
    }

    /// Put origins behind the values of an answer of so many words; the bytes of its body then.
    fn lay_out_origins(&mut self, words: usize, values: usize, origins: &[u64]) -> usize {
        if self.reply.len() < words + origins.len() {
            self.reply.resize(words + origins.len(), 0);
        }
        if values % 2 == 1 {
            // The half of a word that no value fills.
            self.reply[words - 1] &= u64::from(u32::MAX);
        }
        self.reply[words..words + origins.len()].copy_from_slice(origins);
        (words - PULL_REPLY_WORDS + origins.len()) * 8
    }
}
