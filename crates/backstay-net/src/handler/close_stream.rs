//! `CloseStream`: no more pushes of a stream will come.

use backstay_core::error::Refusal;
use backstay_core::wire::{CloseStream, Opcode};
use tokio::io::AsyncWrite;

use super::{check_no_body, Later, Reply, RequestHandler};
use crate::frame_io::Frame;
use crate::replicator::Answer;

impl<W: AsyncWrite + Unpin> RequestHandler<W> {
    /// Whether there is an answer already.
    pub(super) fn close_stream(&mut self, frame: &Frame) -> Result<bool, Refusal> {
        check_no_body(frame)?;
        let meta = CloseStream::decode(&frame.meta)?;
        let request_id = frame.header.request_id;
        let mut close = self.shared.store.close_of(meta.stream)?;
        close.known_version = meta.routing_version;
        let id = close.id;
        match self.shared.replicator.push(close)?.0 {
            Answer::Now(_) => {
                self.small_reply(Opcode::CloseStreamReply, request_id, &[], &[]);
                Ok(true)
            }
            Answer::Later(outcome) => {
                self.later.push_back(Later {
                    request_id,
                    id,
                    reply: Reply::CloseStream,
                    outcome,
                });
                Ok(false)
            }
        }
    }
}
