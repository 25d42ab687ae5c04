//! Changing rows: each push has a number in the client's stream and keeps it on every retry,
//! so that a slot takes it at most once (invariant I2).
//!
//! Pushes leave in the order of their numbers. The floor, below which nothing is open any more,
//! travels with each; the distance between the two is limited, because a slot remembers only
//! so much.

use std::collections::BTreeSet;
use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

use backstay_core::gradient;
use backstay_core::stream::TransactionId;
use backstay_core::transaction::Change;
use backstay_core::wire::{DeleteReply, Opcode, PushMeta, PushReply};
use tokio::sync::MutexGuard;
use tokio::time::timeout_at;

use super::error::ClientError;
use super::link::{Deadline, Failure};
use super::out_frame::{self, OutFrame};
use super::plan::{Part, Plan};
use super::queue::PushQueue;
use super::request::Request;
use super::requests::Requests;
use super::routing::Routing;
use super::send_lease::SendLease;
use super::{no_routing, rows, Client};

/// What to push, and to which table.
pub struct PushRequest<'a> {
    /// The table's id.
    pub table: u64,
    /// Elements of its rows; 0 for a delete.
    pub row_elements: usize,
    /// What the values mean.
    pub change: Change,
    /// One row for each key of the batch.
    pub values: &'a [f32],
    /// Whether NaN and infinity are refused here, before anything is sent.
    pub require_finite: bool,
}

/// A push under way or over.
pub struct Push {
    queue: Arc<PushQueue<Push>>,
    id: TransactionId,
    /// Checked before each of its frames leaves.
    lease: Arc<SendLease>,
    deadline: Deadline,
    keys: u64,
    /// Rows that a delete removed, as far as the answers tell.
    removed: AtomicU64,
    state: tokio::sync::Mutex<State>,
}

struct State {
    requests: Requests,
    /// Whether every part has been laid out; if not, the caller was interrupted.
    whole: bool,
    outcome: Option<Result<(), ClientError>>,
}

impl Client {
    /// Number a push and send it. Wait for it with [`Push::wait`]; [`Client::flush`] waits for all.
    pub async fn push(
        &self,
        request: &PushRequest<'_>,
        plan: &Plan,
        deadline: Deadline,
    ) -> Result<Arc<Push>, ClientError> {
        self.push_to(&self.pushes, 0, request, plan, deadline).await
    }

    pub(super) async fn push_to(
        &self,
        queue: &Arc<PushQueue<Push>>,
        ordinal: u32,
        request: &PushRequest<'_>,
        plan: &Plan,
        deadline: Deadline,
    ) -> Result<Arc<Push>, ClientError> {
        self.check_open()?;
        check(request, plan)?;
        let routing = self.newest().ok_or_else(no_routing)?;
        let parts = plan.parts(&routing, self.keys_per_part(request.row_elements));
        self.check_limits(request, &routing, &parts, deadline)
            .await?;
        let _turn = queue.take_turn(self, deadline).await?;
        // The client may have been closed while this push waited.
        self.check_open()?;
        let (push, floor) = queue.number(ordinal, |id, lease| Push {
            queue: Arc::clone(queue),
            id,
            lease,
            deadline,
            keys: plan.keys().len() as u64,
            removed: AtomicU64::new(0),
            state: tokio::sync::Mutex::new(State {
                requests: Requests::default(),
                whole: false,
                outcome: None,
            }),
        })?;
        let mut state = push.state.lock().await;
        for part in parts {
            let frame = self.lay_out(request, plan, &part, routing.version, &push, floor);
            let link = self.link_to(&routing, part.server);
            let (sent, wanted) = opcodes(request.change);
            // The state has it before it is sent, so that an interrupted call keeps it.
            let one = Request::new(sent, wanted, frame, None, link, routing.version);
            state.requests.add(one.under(Some(&push.lease)));
            // Until it has left, so that pushes leave in the order of their numbers.
            let left = push.unless_revoked(state.requests.send_all(self, None, deadline));
            let left = left.await;
            let left = left.and_then(|()| state.requests.check_all_left(self, deadline));
            if let Err(error) = left {
                let outcome = Err(state.failure(&push, error));
                queue.push_ended(push.id.sequence, &outcome);
                state.outcome = Some(outcome);
                break;
            }
        }
        state.whole = true;
        drop(state);
        Ok(push)
    }

    /// Refuse what a server would not take, before any part has left for another one. If a server
    /// does not answer now, it checks its limits itself later.
    async fn check_limits(
        &self,
        request: &PushRequest<'_>,
        routing: &Routing,
        parts: &[Part],
        deadline: Deadline,
    ) -> Result<(), ClientError> {
        let mut silent = BTreeSet::new();
        for part in parts {
            let Some(link) = self.link_to(routing, part.server) else {
                continue;
            };
            if silent.contains(&part.server) {
                continue;
            }
            let connection = match link.open_connection() {
                Some(connection) => connection,
                None => match self.connect_unless_moved(&link, routing, deadline).await {
                    Some(Ok(connection)) => connection,
                    Some(Err(Failure::Fatal(error))) => return Err(error),
                    Some(Err(Failure::Transient(_))) | None => {
                        silent.insert(part.server);
                        continue;
                    }
                },
            };
            let keys = part.key_count();
            let bytes = push_body_bytes(keys, request.row_elements);
            out_frame::check(&connection.hello, keys, bytes)?;
        }
        Ok(())
    }

    /// Finish a push even if the caller does not wait: send it again if that is needed.
    pub fn finish_in_background(self: &Arc<Self>, push: &Arc<Push>) {
        let (client, push) = (Arc::clone(self), Arc::clone(push));
        // A failure is kept until the caller asks for it.
        tokio::spawn(async move { drop(push.finish(&client).await) });
    }

    fn lay_out(
        &self,
        request: &PushRequest<'_>,
        plan: &Plan,
        part: &Part,
        routing_version: u64,
        push: &Push,
        floor: u64,
    ) -> OutFrame {
        let keys = part.key_count();
        let elements = request.row_elements;
        let meta = PushMeta {
            table: request.table,
            routing_version,
            id: push.id,
            floor,
            key_count: keys as u32,
            row_elements: elements as u32,
            change: request.change,
        };
        let body_bytes = push_body_bytes(keys, elements);
        let meta = meta.encode();
        let (opcode, _) = opcodes(request.change);
        let mut frame = OutFrame::new(opcode, &meta, keys, body_bytes, self.buffers.take());
        let (key_words, value_words) = frame.body_mut().split_at_mut(keys);
        part.copy_keys(plan, key_words);
        if elements == 0 {
            return frame;
        }
        let mut merged = &mut bytemuck::cast_slice_mut(value_words)[..keys * elements];
        for piece in part.pieces() {
            let (here, rest) = merged.split_at_mut(piece.keys.len() * elements);
            let entries = &plan.entries()[piece.entries.clone()];
            rows::merge(entries, piece.keys.start, request.values, here, elements);
            merged = rest;
        }
        frame
    }
}

impl PushQueue<Push> {
    /// Wait until a push may get its number and leave.
    async fn take_turn(
        &self,
        client: &Client,
        deadline: Deadline,
    ) -> Result<MutexGuard<'_, ()>, ClientError> {
        let turn = async {
            let turn = self.turn().await;
            while let Some(oldest) = self.oldest_if_full() {
                // The queue keeps a failure for its own caller or for a flush; ignore it here.
                let _ = oldest.finish(client).await;
            }
            turn
        };
        let in_time = timeout_at(deadline.at(), turn).await;
        in_time.map_err(|_| ClientError::Unavailable {
            address: String::from("this push was not sent"),
            reason: "earlier pushes were still under way".into(),
            waited_ms: deadline.waited_ms(),
        })
    }

    /// Wait until every push has ended; the first failure that the caller was not told of.
    pub(super) async fn flush(&self, client: &Client) -> Result<(), ClientError> {
        for push in self.in_flight() {
            // A failure is kept until it is reported, just below.
            let _ = push.finish(client).await;
        }
        self.take_failure().map_or(Ok(()), Err)
    }
}

/// Of the request and of its reply.
fn opcodes(change: Change) -> (Opcode, Opcode) {
    match change {
        Change::Delete => (Opcode::Delete, Opcode::DeleteReply),
        _ => (Opcode::Push, Opcode::PushReply),
    }
}

fn push_body_bytes(keys: usize, row_elements: usize) -> usize {
    keys * (8 + row_elements * 4)
}

fn check(request: &PushRequest<'_>, plan: &Plan) -> Result<(), ClientError> {
    if request.values.len() != plan.len() * request.row_elements {
        return Err(ClientError::Invalid(format!(
            "{} keys of {} elements need {} values, {} came",
            plan.len(),
            request.row_elements,
            plan.len() * request.row_elements,
            request.values.len()
        )));
    }
    if let Change::Update {
        learning_rate_scale: scale,
    } = request.change
    {
        if !scale.is_finite() || scale < 0.0 {
            return Err(ClientError::Invalid(format!(
                "learning_rate_scale is {scale}: must be finite and not negative"
            )));
        }
    }
    if request.require_finite {
        check_finite(request, plan)?;
    }
    Ok(())
}

/// Refuse gradients that are not finite, or whose sum over equal keys is not. Here and not only
/// on the servers, because one of several might have applied its part.
fn check_finite(request: &PushRequest<'_>, plan: &Plan) -> Result<(), ClientError> {
    // Below this no sum of a batch can overflow, and nothing needs to be summed twice.
    const HARMLESS: f32 = 1e28;
    let (values, elements) = (request.values, request.row_elements);
    if gradient::first_beyond(values, HARMLESS).is_none() {
        return Ok(());
    }
    if let Some(at) = gradient::first_non_finite(values) {
        return Err(ClientError::NonFinite(format!(
            "row {} of the batch holds {}; the table refuses it (non_finite), nothing was sent",
            at / elements,
            values[at]
        )));
    }
    let mut sums = vec![0.0; plan.keys().len() * elements];
    rows::merge(plan.entries(), 0, values, &mut sums, elements);
    gradient::first_non_finite(&sums).map_or(Ok(()), |at| {
        Err(ClientError::NonFinite(format!(
            "the gradients of key {} sum up to {}; the table refuses it (non_finite), nothing was sent",
            plan.keys()[at / elements],
            sums[at]
        )))
    })
}

impl Push {
    /// Whether the outcome is known.
    pub fn is_over(&self) -> bool {
        // Locked means that a task is busy with it.
        self.state
            .try_lock()
            .is_ok_and(|state| state.outcome.is_some())
    }

    /// Wait until it is applied everywhere or failed for good; the same answer each time.
    pub async fn wait(&self, client: &Client) -> Result<(), ClientError> {
        let outcome = self.finish(client).await;
        self.queue.reported(self.id.sequence);
        outcome
    }

    /// Rows that a delete removed, once it has ended. What a try removed whose answer was lost is
    /// not among them.
    pub fn removed(&self) -> u64 {
        self.removed.load(Ordering::Acquire)
    }

    async fn finish(&self, client: &Client) -> Result<(), ClientError> {
        let mut state = self.state.lock().await;
        if let Some(outcome) = &state.outcome {
            return outcome.clone();
        }
        let finished = self.unless_revoked(state.finish(self, client));
        let outcome = match finished.await {
            Ok(()) => {
                client
                    .counters
                    .pushes_acknowledged
                    .fetch_add(1, Ordering::Relaxed);
                client
                    .counters
                    .keys_pushed
                    .fetch_add(self.keys, Ordering::Relaxed);
                Ok(())
            }
            Err(error) => Err(state.failure(self, error)),
        };
        state.outcome = Some(outcome.clone());
        state.requests.recycle(client);
        self.queue.push_ended(self.id.sequence, &outcome);
        outcome
    }

    /// Do `work`, unless the lease of the task, if it is a task's push, is revoked meanwhile.
    async fn unless_revoked(
        &self,
        work: impl Future<Output = Result<(), ClientError>>,
    ) -> Result<(), ClientError> {
        self.lease.unless_revoked(work).await
    }
}

impl State {
    async fn finish(&mut self, push: &Push, client: &Client) -> Result<(), ClientError> {
        let deadline = push.deadline;
        // The answers of all parts are needed to tell what is known of the whole.
        self.requests
            .finish(client, None, deadline, true, |request, frame| {
                let removed = match frame.header.opcode {
                    Opcode::DeleteReply => DeleteReply::decode(&frame.meta).map(|reply| reply.rows),
                    _ => PushReply::decode(&frame.meta).map(|_| 0),
                };
                let removed = removed.map_err(|refusal| ClientError::Protocol {
                    address: request.address(),
                    reason: refusal.to_string(),
                })?;
                push.removed.fetch_add(removed, Ordering::AcqRel);
                Ok(())
            })
            .await?;
        if self.whole {
            return Ok(());
        }
        Err(ClientError::Unavailable {
            address: self.requests.last_address(),
            reason: "the call was interrupted".into(),
            waited_ms: deadline.waited_ms(),
        })
    }

    /// The error to report, given what is known of all parts.
    fn failure(&self, push: &Push, error: ClientError) -> ClientError {
        let started = self.requests.started();
        let (address, reason) = match error {
            ClientError::Unavailable {
                address, reason, ..
            }
            | ClientError::Deadline {
                address, reason, ..
            } => (address, reason),
            // One server refused, but another may have its part, so the outcome is unknown.
            ClientError::Refused {
                address, message, ..
            } if started => (address, message),
            error => return error,
        };
        let waited_ms = push.deadline.waited_ms();
        if started {
            ClientError::OutcomeUnknown {
                sequence: push.id.sequence,
                address,
                reason,
                waited_ms,
            }
        } else {
            ClientError::Unavailable {
                address,
                reason,
                waited_ms,
            }
        }
    }
}
