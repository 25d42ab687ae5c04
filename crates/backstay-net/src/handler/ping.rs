//! `Ping`: whether the server answers.

use backstay_core::error::Refusal;
use backstay_core::wire::Opcode;
use tokio::io::AsyncWrite;

use super::{check_no_body, RequestHandler};
use crate::frame_io::Frame;

impl<W: AsyncWrite + Unpin> RequestHandler<W> {
    pub(super) fn ping(&mut self, frame: &Frame) -> Result<(), Refusal> {
        check_no_body(frame)?;
        if !frame.meta.is_empty() {
            let reason = format!("{} bytes too many in meta", frame.meta.len());
            return Err(Refusal::Protocol(reason));
        }
        self.small_reply(Opcode::Pong, frame.header.request_id, &[], &[]);
        Ok(())
    }
}
