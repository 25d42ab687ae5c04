//! `Expire`, `CountExpired` and `Decay`: rows that have expired go, or are counted; shows and clicks
//! decay.
//! A key of the body stands for its slot.

use backstay_core::engine::StageReport;
use backstay_core::error::Refusal;
use backstay_core::transaction::Change;
use backstay_core::wire::{ExpireReply, Opcode, PushMeta};
use tokio::io::AsyncWrite;

use super::{Reply, RequestHandler};
use crate::frame_io::Frame;

impl<W: AsyncWrite + Unpin> RequestHandler<W> {
    /// Whether there is an answer already.
    pub(super) fn expire(&mut self, frame: Frame) -> Result<bool, Refusal> {
        let meta = PushMeta::decode(&frame.meta)?;
        let fits = match frame.header.opcode {
            Opcode::Decay => matches!(meta.change, Change::Decay { .. }),
            _ => matches!(meta.change, Change::Expire(_)),
        };
        if !fits || meta.row_elements != 0 {
            let reason = "an expiry is of kind 6, a decay of kind 7, and has no row_elements";
            return Err(Refusal::Protocol(reason.into()));
        }
        self.change_rows(frame, &meta, 0, Reply::Expire)
    }

    pub(super) fn count_expired(&mut self, frame: &Frame) -> Result<(), Refusal> {
        let meta = PushMeta::decode(&frame.meta)?;
        let Change::Expire(thresholds) = meta.change else {
            let reason = "rows are counted by the thresholds of an expiry, of kind 6";
            return Err(Refusal::Protocol(reason.into()));
        };
        let count = self.check_keys(frame, meta.key_count, 0)?;
        let store = &self.shared.store;
        let gone = store.count_expired(meta.table, &frame.body[..count], thresholds)?;
        self.shared.replicator.check_alive()?;
        let report = StageReport {
            staged: meta.key_count,
            skipped: 0,
            gone,
        };
        self.expired_reply(frame.header.request_id, report);
        Ok(())
    }

    pub(super) fn expire_reply(&mut self, request_id: u64, report: StageReport) {
        self.count_change(report);
        self.expired_reply(request_id, report);
    }

    fn expired_reply(&mut self, request_id: u64, report: StageReport) {
        let reply = ExpireReply {
            routing_version: self.shared.store.routing_version(),
            applied_slots: report.staged,
            skipped_slots: report.skipped,
            unseen: report.gone.unseen,
            score: report.gone.score,
            norm: report.gone.norm,
            counters: report.gone.counters,
        };
        self.small_reply(Opcode::ExpireReply, request_id, &reply.encode(), &[]);
    }
}
