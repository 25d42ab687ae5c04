//! `Push`: gradients or values for some keys of a table.

use backstay_core::compensation::Reference;
use backstay_core::engine::StageReport;
use backstay_core::error::Refusal;
use backstay_core::transaction::{Batch, Change, Transaction};
use backstay_core::wire::{Opcode, PushMeta, PushReply};
use tokio::io::AsyncWrite;

use super::{Later, Reply, RequestHandler};
use crate::events::push_event;
use crate::frame_io::Frame;
use crate::replicator::Answer;
use crate::stats::add;

impl<W: AsyncWrite + Unpin> RequestHandler<W> {
    /// Whether there is an answer already.
    pub(super) fn push(&mut self, frame: Frame) -> Result<bool, Refusal> {
        let meta = PushMeta::decode(&frame.meta)?;
        if !meta.change.creates() {
            let reason = "a delete, an expiry or a decay came in the frame of a push";
            return Err(Refusal::Protocol(reason.into()));
        }
        // Show and click, or from where it comes, stand behind the gradient.
        let values = meta.row_elements as usize;
        let elements = meta.change.elements(values).ok_or_else(|| {
            let reference = match meta.change {
                Change::Update(update) => update.reference,
                _ => None,
            };
            let lacking = match reference {
                Some(Reference::Weights) => "are no gradient with as many weights behind it",
                Some(Reference::Sum) => "are no gradient with its sums and their birth behind it",
                None => "have no show and click",
            };
            let reason = format!("{values} elements {lacking}");
            Refusal::InvalidRequest(reason)
        })?;
        self.check_elements(meta.table, elements as u32)?;
        let elements = values;
        let (keys, origins) = (meta.key_count as usize, meta.origins);
        let reply = Reply::Push { keys, origins };
        self.change_rows(frame, &meta, elements, reply)
    }

    /// Take on a change of rows that have so many elements in its frame. Whether there is an
    /// answer already.
    pub(super) fn change_rows(
        &mut self,
        frame: Frame,
        meta: &PushMeta,
        elements: usize,
        reply: Reply,
    ) -> Result<bool, Refusal> {
        let (count, origins) = if meta.origins {
            let (count, origins) = self.check_origins(&frame, meta.key_count, elements)?;
            (count, Some(origins))
        } else {
            (self.check_keys(&frame, meta.key_count, elements)?, None)
        };
        let (store, request_id) = (&self.shared.store, frame.header.request_id);
        push_event!(meta.id, "push received", table = meta.table, keys = count);
        let batch = Batch::from_words(frame.body, count, count * elements)?;
        drop(frame.held);
        let mut transaction = Transaction::new(
            store.space(),
            meta.id,
            meta.floor,
            meta.table,
            meta.change,
            batch,
        )?;
        if let Some(origins) = origins {
            transaction.tell_origins(&origins)?;
        }
        transaction.known_version = meta.routing_version;
        let taken = store
            .prepare(&mut transaction)
            .and_then(|pause| {
                self.pause = pause;
                self.shared.replicator.push(transaction)
            })
            .inspect_err(|refusal| push_event!(meta.id, "push refused", reason = %refusal))?;
        match taken {
            (Answer::Now(report), buffer) => {
                push_event!(meta.id, "push answered", applied_slots = report.staged);
                self.request = buffer.unwrap_or_default();
                self.reply_to(request_id, reply, report);
                Ok(true)
            }
            (Answer::Later(outcome), _) => {
                self.later.push_back(Later {
                    request_id,
                    id: meta.id,
                    reply,
                    outcome,
                });
                Ok(false)
            }
        }
    }

    pub(super) fn count_change(&self, report: StageReport) {
        let counters = &self.shared.counters;
        counters.count_gone(&report.gone);
        let repeated = report.staged == 0 && report.skipped > 0;
        add(
            if repeated {
                &counters.pushes_repeated
            } else {
                &counters.pushes_applied
            },
            1,
        );
    }

    pub(super) fn push_reply(
        &mut self,
        request_id: u64,
        keys: usize,
        origins: bool,
        report: StageReport,
    ) {
        self.count_change(report);
        add(&self.shared.counters.keys_pushed, keys as u64);
        let reply = PushReply {
            routing_version: self.shared.store.routing_version(),
            applied_slots: report.staged,
            skipped_slots: report.skipped,
            stale: origins.then_some(report.gone.stale),
        };
        self.small_reply(Opcode::PushReply, request_id, &reply.encode(), &[]);
    }
}
