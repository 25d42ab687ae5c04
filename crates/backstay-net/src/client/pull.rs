//! Reading rows: every part is asked for at once, and spread as soon as it comes.

use std::sync::atomic::Ordering;
use std::sync::Arc;

use backstay_core::wire::{Opcode, PullMeta, PullReply, MAX_META_BYTES};

use super::error::ClientError;
use super::link::{Answer, Deadline, Link, Retry, Ticket};
use super::out_frame::OutFrame;
use super::plan::{Part, Plan};
use super::{rows, Client};
use crate::frame_io::Frame;

/// A pull under way.
pub struct Pull {
    client: Arc<Client>,
    plan: Arc<Plan>,
    elements: usize,
    parts: Vec<PartPull>,
}

struct PartPull {
    part: Part,
    link: Arc<Link>,
    frame: OutFrame,
    ticket: Option<Ticket>,
}

impl Client {
    /// Ask for the rows of a plan's keys in a table of `row_elements` elements a row.
    pub async fn pull(
        self: &Arc<Self>,
        table: u64,
        row_elements: usize,
        plan: &Arc<Plan>,
        deadline: Deadline,
    ) -> Result<Pull, ClientError> {
        self.check_open()?;
        let routing = plan.routing();
        let mut parts = Vec::new();
        for part in plan.parts(self.keys_per_part(row_elements)) {
            let link = self.link(routing, part.server);
            let keys = &plan.keys()[part.keys.clone()];
            self.check_reply(keys.len() * row_elements * 4)?;
            let meta = PullMeta {
                table,
                routing_version: routing.version,
                key_count: keys.len() as u32,
                row_elements: row_elements as u32,
            };
            let mut frame = OutFrame::new(
                Opcode::Pull,
                &meta.encode(),
                keys.len(),
                keys.len() * 8,
                self.buffers.take(),
            );
            frame.body_mut()[..keys.len()].copy_from_slice(keys);
            let ticket = Some(link.send(deadline, &mut frame).await?);
            parts.push(PartPull {
                part,
                link,
                frame,
                ticket,
            });
        }
        Ok(Pull {
            client: Arc::clone(self),
            plan: Arc::clone(plan),
            elements: row_elements,
            parts,
        })
    }
}

impl Client {
    /// Refuse to ask for more than is accepted as an answer.
    fn check_reply(&self, bytes: usize) -> Result<(), ClientError> {
        let limit = self.options.max_frame_bytes;
        if bytes as u64 + MAX_META_BYTES as u64 <= limit {
            return Ok(());
        }
        Err(ClientError::LimitExceeded(format!(
            "the rows of one slot take {bytes} bytes, this client's limit is {limit} \
             (max_frame_bytes): pull fewer keys or raise it"
        )))
    }
}

impl Pull {
    /// Values that [`Self::finish`] writes.
    pub fn output_elements(&self) -> usize {
        self.plan.len() * self.elements
    }

    /// Whether every answer has come.
    pub fn is_ready(&self) -> bool {
        let ready = |part: &PartPull| part.ticket.as_ref().is_none_or(Ticket::is_ready);
        self.parts.iter().all(ready)
    }

    /// Wait for the rows and write them to `out`, \[batch, `row_elements`], one row for each
    /// key of the batch.
    ///
    /// `deadline` is that of the waiting: a connection may have broken long ago unnoticed.
    pub async fn finish(&mut self, out: &mut [f32], deadline: Deadline) -> Result<(), ClientError> {
        if out.len() != self.output_elements() {
            return Err(ClientError::Invalid(format!(
                "out has {} elements, the batch needs {}",
                out.len(),
                self.output_elements()
            )));
        }
        for mut part in std::mem::take(&mut self.parts) {
            let frame = part.answer(deadline, &self.client).await?;
            let count = part.part.keys.len() * self.elements;
            let reply = PullReply::decode(&frame.meta);
            let fits = reply.is_ok_and(|reply| {
                reply.row_count as usize == part.part.keys.len()
                    && reply.row_elements as usize == self.elements
            });
            if !fits || frame.header.body_bytes != count as u64 * 4 {
                return Err(ClientError::Protocol {
                    address: part.link.address.clone(),
                    reason: "the answer does not hold the rows that were asked for".into(),
                });
            }
            let values = &bytemuck::cast_slice::<u64, f32>(&frame.body)[..count];
            let entries = &self.plan.entries()[part.part.entries.clone()];
            rows::spread(entries, part.part.keys.start, values, out, self.elements);
            self.client.buffers.give(frame.body);
            self.client.buffers.give(part.frame.into_buffer());
        }
        let counters = &self.client.counters;
        counters.pulls.fetch_add(1, Ordering::Relaxed);
        counters
            .keys_pulled
            .fetch_add(self.plan.keys().len() as u64, Ordering::Relaxed);
        Ok(())
    }
}

impl PartPull {
    /// The answer, asking again as long as that can help.
    async fn answer(&mut self, deadline: Deadline, client: &Client) -> Result<Frame, ClientError> {
        let mut last_reason = None;
        let mut retry = Retry::new(deadline);
        loop {
            let ticket = match self.ticket.take() {
                Some(ticket) => ticket,
                None => self.link.send(deadline, &mut self.frame).await?,
            };
            let Some(reply) = ticket.wait(deadline).await else {
                break;
            };
            match self.link.judge(reply, Opcode::PullReply)? {
                Answer::Frame(frame) => return Ok(frame),
                Answer::Again { reason, .. } => {
                    tracing::debug!(address = self.link.address, reason, "pulling again");
                    last_reason = Some(reason);
                    client.counters.retries.fetch_add(1, Ordering::Relaxed);
                    if !retry.pause().await {
                        break;
                    }
                }
            }
        }
        Err(match last_reason {
            Some(reason) => self.link.unavailable(reason, deadline),
            None => ClientError::Deadline {
                address: self.link.address.clone(),
                waited_ms: deadline.waited_ms(),
            },
        })
    }
}
