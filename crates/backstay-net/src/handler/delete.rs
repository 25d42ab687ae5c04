//! `Delete`: the rows of some keys of a sparse table go.

use backstay_core::engine::StageReport;
use backstay_core::error::Refusal;
use backstay_core::transaction::Change;
use backstay_core::wire::{DeleteReply, Opcode, PushMeta};
use tokio::io::AsyncWrite;

use super::{Reply, RequestHandler};
use crate::frame_io::Frame;

impl<W: AsyncWrite + Unpin> RequestHandler<W> {
    /// Whether there is an answer already.
    pub(super) fn delete(&mut self, frame: Frame) -> Result<bool, Refusal> {
        let meta = PushMeta::decode(&frame.meta)?;
        if meta.change != Change::Delete || meta.row_elements != 0 {
            let reason = "a delete is of kind 4 and has no row_elements";
            return Err(Refusal::Protocol(reason.into()));
        }
        self.change_rows(frame, &meta, 0, Reply::Delete)
    }

    pub(super) fn delete_reply(&mut self, request_id: u64, report: StageReport) {
        self.count_change(report);
        let reply = DeleteReply {
            routing_version: self.shared.store.routing_version(),
            applied_slots: report.staged,
            skipped_slots: report.skipped,
            rows: report.gone.deleted,
        };
        self.small_reply(Opcode::DeleteReply, request_id, &reply.encode(), &[]);
    }
}
