//! Reading rows: every part is asked for at once, and spread as soon as it comes.

use std::sync::atomic::Ordering;
use std::sync::Arc;

use backstay_core::compensation::Reference;
use backstay_core::wire::{Opcode, PullMeta, PullReply, MAX_META_BYTES};

use super::error::ClientError;
use super::link::Deadline;
use super::out_frame::OutFrame;
use super::plan::Plan;
use super::request::Request;
use super::requests::Requests;
use super::{no_routing, rows, Client};
use crate::frame_io::Frame;

/// A pull under way.
pub struct Pull {
    client: Arc<Client>,
    plan: Arc<Plan>,
    table: u64,
    elements: usize,
    /// Whether the answers have origins.
    origins: bool,
    /// Whether they have sums of gradients.
    sums: bool,
    requests: Requests,
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
        let routing = self.newest().ok_or_else(no_routing)?;
        let mut requests = Requests::default();
        let origins = self.origins.asks(table);
        let sums = self.references.kept(table) == Some(Reference::Sum);
        let width = row_elements + sums_of(sums, row_elements);
        for part in plan.parts(&routing, self.keys_per_part(width)) {
            let keys = part.key_count();
            let told = if origins { keys * 8 } else { 0 };
            self.check_reply(keys * width * 4 + told)?;
            let meta = PullMeta {
                table,
                routing_version: routing.version,
                key_count: keys as u32,
                row_elements: row_elements as u32,
                origins,
                sums,
            };
            let meta = meta.encode();
            let buffer = self.buffers.take();
            let mut frame = OutFrame::new(Opcode::Pull, &meta, keys, keys * 8, buffer);
            part.copy_keys(plan, frame.body_mut());
            let link = self.link_to(&routing, part.server);
            let (asked, wanted) = (Opcode::Pull, Opcode::PullReply);
            requests.add(Request::new(
                asked,
                wanted,
                frame,
                Some(part),
                link,
                routing.version,
            ));
            requests.send_all(self, Some(plan), deadline).await?;
            requests.check_all_left(self, deadline)?;
        }
        Ok(Pull {
            client: Arc::clone(self),
            plan: Arc::clone(plan),
            table,
            elements: row_elements,
            origins,
            sums,
            requests,
        })
    }
}

/// Values of each key that come with its row.
fn sums_of(asked: bool, row_elements: usize) -> usize {
    if asked {
        Reference::Sum.values(row_elements)
    } else {
        0
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
        self.requests.is_ready()
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
        let (client, plan, elements) = (&self.client, &self.plan, self.elements);
        let (table, origins, told) = (self.table, self.origins, sums_of(self.sums, elements));
        let keeps = client.references.begin(table);
        let mut spread = |request: &Request, frame: Frame| {
            let Some(part) = request.part() else {
                return Ok(());
            };
            let count = part.key_count() * (elements + told);
            let reply = PullReply::decode(&frame.meta);
            let fits = reply.is_ok_and(|reply| {
                reply.row_count as usize == part.key_count()
                    && reply.row_elements as usize == elements
            });
            let slots: Vec<u32> = if origins {
                plan.slots_of(part).collect()
            } else {
                Vec::new()
            };
            // Origins begin with a whole word.
            let row_words = count.div_ceil(2);
            let wanted = if origins {
                (row_words + slots.len()) * 8
            } else {
                count * 4
            };
            if !fits || frame.header.body_bytes != wanted as u64 {
                return Err(ClientError::Protocol {
                    address: request.address(),
                    reason: "the answer does not hold the rows that were asked for".into(),
                });
            }
            let values = &bytemuck::cast_slice::<u64, f32>(&frame.body)[..count];
            let (mut values, mut sums) = values.split_at(part.key_count() * elements);
            for piece in part.pieces() {
                let entries = &plan.entries()[piece.entries.clone()];
                let (rows, rest) = values.split_at(piece.keys.len() * elements);
                let (here, others) = sums.split_at(piece.keys.len() * told);
                rows::spread(entries, piece.keys.start, rows, out, elements);
                if keeps {
                    let keys = &plan.keys()[piece.keys.clone()];
                    client.references.came(table, keys, rows, here);
                }
                (values, sums) = (rest, others);
            }
            if origins {
                let told = frame.body[row_words..].iter().copied();
                let all = plan.routing().space.count();
                client.origins.came(table, all, slots.into_iter().zip(told));
            }
            client.buffers.give(frame.body);
            Ok(())
        };
        self.requests
            .finish(client, Some(plan), deadline, false, &mut spread)
            .await?;
        let counters = &client.counters;
        counters.pulls.fetch_add(1, Ordering::Relaxed);
        counters
            .keys_pulled
            .fetch_add(plan.keys().len() as u64, Ordering::Relaxed);
        Ok(())
    }
}
