//! The handler of the requests of one connection: one file for each command of the data plane.
//! What they share, and how answers are laid out and sent, stands here.

mod close_stream;
mod delete;
mod expire;
mod ping;
mod pull;
mod push;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use backstay_core::engine::StageReport;
use backstay_core::error::Refusal;
use backstay_core::stream::TransactionId;
use backstay_core::wire::{
    cut_text, ErrorMeta, Header, Opcode, HEADER_BYTES, MAX_ERROR_TEXT_BYTES,
};
use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::events::push_event;
use crate::frame_io::Frame;
use crate::memory::{Held, Part};
use crate::replicator::Outcome;
use crate::shared::Shared;
use crate::stats::add;

/// Words of a request's or an answer's buffer that are kept for the next one: 8 MiB.
const KEPT_WORDS: usize = 1 << 20;
/// The same while memory is short: 32 KiB.
const KEPT_WORDS_IF_SHORT: usize = 1 << 12;

/// Works on requests and answers them.
pub(crate) struct RequestHandler<W> {
    pub(crate) shared: Arc<Shared>,
    pub(crate) writer: W,
    /// Buffers kept between requests, so that large ones are not mapped anew each time.
    pub(crate) request: Vec<u64>,
    reply: Vec<u64>,
    /// Bytes of `reply` that are to be sent.
    reply_bytes: usize,
    /// Pushes that wait for backups, in the order they came.
    later: VecDeque<Later>,
    /// The memory of the buffers.
    held: Held,
    /// For how long the next request is to wait: memory is short.
    pause: Duration,
}

/// A push that waits for backups.
struct Later {
    request_id: u64,
    id: TransactionId,
    reply: Reply,
    outcome: oneshot::Receiver<Outcome>,
}

/// How a change of rows, or the end of a stream, is answered.
#[derive(Clone, Copy)]
enum Reply {
    /// To a push of so many keys, that told origins or not.
    Push {
        keys: usize,
        origins: bool,
    },
    Delete,
    Expire,
    CloseStream,
}

impl<W: AsyncWrite + Unpin> RequestHandler<W> {
    pub(crate) fn new(shared: Arc<Shared>, writer: W) -> Self {
        Self {
            held: Held::new(shared.store.memory(), Part::Buffers),
            pause: Duration::ZERO,
            shared,
            writer,
            request: Vec::new(),
            reply: Vec::new(),
            reply_bytes: 0,
            later: VecDeque::new(),
        }
    }

    /// Whether pushes wait for backups.
    pub(crate) fn has_later(&self) -> bool {
        !self.later.is_empty()
    }

    /// Release the memory of a huge request, which the connection need not keep; of smaller ones, too,
    /// if memory is short.
    pub(crate) fn let_go_of_large_buffers(&mut self) {
        let kept = if self.shared.store.memory().is_short() {
            KEPT_WORDS_IF_SHORT
        } else {
            KEPT_WORDS
        };
        for buffer in [&mut self.request, &mut self.reply] {
            if buffer.len() > kept {
                *buffer = Vec::new();
            }
        }
        self.count_buffers();
    }

    /// Count the memory of the buffers.
    pub(crate) fn count_buffers(&mut self) {
        let words = self.request.capacity() + self.reply.capacity();
        self.held.set(words * 8);
    }

    /// For how long the next request of this connection is to wait.
    pub(crate) fn take_pause(&mut self) -> Duration {
        std::mem::take(&mut self.pause)
    }

    /// The outcome of the oldest push that waits.
    pub(crate) async fn next_later(&mut self) -> Outcome {
        match self.later.front_mut() {
            Some(later) => (&mut later.outcome).await.unwrap_or(Err(Refusal::Stopping)),
            None => std::future::pending().await,
        }
    }

    pub(crate) async fn answer_later(&mut self, outcome: Outcome) -> std::io::Result<()> {
        let Some(later) = self.later.pop_front() else {
            return Ok(());
        };
        match &outcome {
            Ok(report) => {
                push_event!(later.id, "push answered", applied_slots = report.staged);
            }
            Err(refusal) => push_event!(later.id, "push refused", reason = %refusal),
        }
        match outcome {
            Ok(report) => self.reply_to(later.request_id, later.reply, report),
            Err(refusal) => {
                self.shared.counters.count_refusal(&refusal);
                self.error_reply(later.request_id, &refusal);
            }
        }
        self.flush_reply().await
    }

    /// Wait until the backups have answered everything that came before.
    pub(crate) async fn answer_all(&mut self) -> std::io::Result<()> {
        while !self.later.is_empty() {
            let outcome = self.next_later().await;
            self.answer_later(outcome).await?;
        }
        Ok(())
    }

    pub(crate) async fn serve(&mut self, frame: Frame) -> std::io::Result<()> {
        let id = frame.header.request_id;
        let changes = [Opcode::Push, Opcode::Delete, Opcode::Expire, Opcode::Decay];
        if !changes.contains(&frame.header.opcode) {
            // Requests of a connection are worked on in order; changes may wait side by side.
            self.answer_all().await?;
        }
        let outcome = match frame.header.opcode {
            Opcode::Pull => self.pull(frame).map(|()| true),
            Opcode::Push => self.push(frame),
            Opcode::Delete => self.delete(frame),
            Opcode::Expire | Opcode::Decay => self.expire(frame),
            Opcode::CountExpired => self.count_expired(&frame).map(|()| true),
            Opcode::CloseStream => self.close_stream(&frame),
            Opcode::Ping => self.ping(&frame).map(|()| true),
            opcode => Err(Refusal::Protocol(format!("{opcode:?} is not a request"))),
        };
        match outcome {
            Ok(true) => {}
            Ok(false) => return Ok(()),
            Err(refusal) => {
                self.shared.counters.count_refusal(&refusal);
                self.error_reply(id, &refusal);
            }
        }
        self.flush_reply().await
    }

    fn reply_to(&mut self, request_id: u64, reply: Reply, report: StageReport) {
        match reply {
            Reply::Push { keys, origins } => self.push_reply(request_id, keys, origins, report),
            Reply::Delete => self.delete_reply(request_id, report),
            Reply::Expire => self.expire_reply(request_id, report),
            Reply::CloseStream => {
                self.small_reply(Opcode::CloseStreamReply, request_id, &[], &[]);
            }
        }
    }

    /// The number of keys, if the body holds exactly that many keys and rows.
    fn check_keys(&self, frame: &Frame, keys: u32, elements: usize) -> Result<usize, Refusal> {
        let keys = self.check_key_count(keys)?;
        let wanted = keys as u64 * (8 + elements as u64 * 4);
        if frame.header.body_bytes != wanted {
            return Err(Refusal::InvalidRequest(format!(
                "{keys} keys with {elements} values each take {wanted} bytes, the body has {}",
                frame.header.body_bytes
            )));
        }
        Ok(keys)
    }

    /// The number of keys, and the origins behind their values, if the body holds nothing else.
    fn check_origins(
        &self,
        frame: &Frame,
        keys: u32,
        elements: usize,
    ) -> Result<(usize, Vec<u64>), Refusal> {
        let keys = self.check_key_count(keys)?;
        let before = keys.saturating_add(keys.saturating_mul(elements).div_ceil(2));
        let words = usize::try_from(frame.header.body_bytes / 8).unwrap_or(usize::MAX);
        let is_whole = frame.header.body_bytes.is_multiple_of(8) && words <= frame.body.len();
        let origins = frame.body[..words.min(frame.body.len())].get(before..);
        match origins.filter(|origins| is_whole && origins.len() <= keys) {
            Some(origins) => Ok((keys, origins.to_vec())),
            None => Err(Refusal::InvalidRequest(format!(
                "{keys} keys with {elements} values each and an origin for each slot do not take \
                 the {} bytes that the body has",
                frame.header.body_bytes
            ))),
        }
    }

    fn check_key_count(&self, keys: u32) -> Result<usize, Refusal> {
        let limit = self.shared.options.limits.max_keys;
        if keys > limit {
            return Err(Refusal::LimitExceeded(format!(
                "{keys} keys in one request, the limit is {limit} (max_keys_per_request): send smaller batches or raise it"
            )));
        }
        if keys == 0 {
            return Err(Refusal::InvalidRequest("a request without keys".into()));
        }
        Ok(keys as usize)
    }

    fn check_elements(&self, table: u64, announced: u32) -> Result<usize, Refusal> {
        let spec = self.shared.store.spec(table)?;
        let elements = spec.row_elements();
        if elements != announced as usize {
            return Err(Refusal::InvalidRequest(format!(
                "rows of table {} have {elements} elements, not {announced}",
                spec.name
            )));
        }
        Ok(elements)
    }

    fn small_reply(&mut self, opcode: Opcode, request_id: u64, meta: &[u8], body: &[u8]) {
        let header = Header::plain(opcode, request_id, meta.len(), body.len());
        let bytes = HEADER_BYTES + meta.len() + body.len();
        if self.reply.len() * 8 < bytes {
            self.reply.resize(bytes.div_ceil(8), 0);
        }
        let out: &mut [u8] = bytemuck::cast_slice_mut(&mut self.reply);
        out[..HEADER_BYTES].copy_from_slice(&header.encode());
        out[HEADER_BYTES..HEADER_BYTES + meta.len()].copy_from_slice(meta);
        out[HEADER_BYTES + meta.len()..bytes].copy_from_slice(body);
        self.reply_bytes = bytes;
    }

    pub(crate) fn error_reply(&mut self, request_id: u64, refusal: &Refusal) {
        let meta = ErrorMeta {
            code: refusal.code(),
            retry_safe: refusal.retry_safe(),
            routing_version: self.shared.store.routing_version(),
        };
        let text = refusal.to_string();
        let text = cut_text(&text, MAX_ERROR_TEXT_BYTES);
        self.small_reply(Opcode::Error, request_id, &meta.encode(), text.as_bytes());
    }

    pub(crate) async fn flush_reply(&mut self) -> std::io::Result<()> {
        let bytes = &bytemuck::cast_slice::<u64, u8>(&self.reply)[..self.reply_bytes];
        add(&self.shared.counters.bytes_sent, bytes.len() as u64);
        let write = async {
            self.writer.write_all(bytes).await?;
            self.writer.flush().await
        };
        // A client that reads nothing must not hold a session (and a stop) for ever.
        timeout(self.shared.options.stall_timeout, write).await?
    }
}

/// Refuse a body where the kind of frame has none.
pub(crate) fn check_no_body(frame: &Frame) -> Result<(), Refusal> {
    if frame.header.body_bytes == 0 {
        return Ok(());
    }
    Err(Refusal::Protocol(format!(
        "a {:?} has no body, {} bytes came",
        frame.header.opcode, frame.header.body_bytes
    )))
}
