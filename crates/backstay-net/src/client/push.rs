//! Changing rows: each push has a number in the client's stream and keeps it on every retry,
//! so that a slot takes it at most once (invariant I2).
//!
//! Pushes leave in the order of their numbers. The floor, below which nothing is open any more,
//! travels with each; the distance between the two is limited, because a slot remembers only
//! so much.

use std::collections::BTreeSet;
use std::future::Future;
use std::sync::atomic::Ordering;
use std::sync::Arc;

use backstay_core::compensation::Compensation;
use backstay_core::error::Refusal;
use backstay_core::gradient;
use backstay_core::life::Gone;
use backstay_core::stream::TransactionId;
use backstay_core::transaction::Change;
use backstay_core::wire::{DeleteReply, ExpireReply, Opcode, PushMeta, PushReply};
use parking_lot::Mutex;
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
#[derive(Clone)]
pub struct PushRequest<'a> {
    /// The table's id.
    pub table: u64,
    /// Elements of its rows; 0 for what has no values.
    pub row_elements: usize,
    /// What the values mean.
    pub change: Change,
    /// One row for each key of the batch.
    pub values: &'a [f32],
    /// Whether NaN and infinity are refused here, before anything is sent.
    pub require_finite: bool,
    /// Shows and clicks, one each for each key of the batch; with an update that has counts only.
    pub observed: Option<(&'a [f32], &'a [f32])>,
    /// With [`Change::Expire`]: count what would go, and change nothing.
    pub only_count: bool,
    /// With an update that has a reference: what tells from where the gradient of each different key of
    /// the batch comes, in the plan's order.
    pub references: &'a [f32],
}

impl<'a> PushRequest<'a> {
    /// A change of rows that says nothing of shows and clicks.
    pub fn new(table: u64, row_elements: usize, change: Change, values: &'a [f32]) -> Self {
        Self {
            table,
            row_elements,
            change,
            values,
            require_finite: false,
            observed: None,
            only_count: false,
            references: &[],
        }
    }

    /// Values that travel with each key.
    fn width(&self) -> usize {
        match self.change {
            change if change.updates() => change.values(self.row_elements),
            _ => self.row_elements,
        }
    }

    /// Values of each different key that tell from where its gradient comes.
    fn reference_values(&self) -> usize {
        let reference = match self.change {
            Change::Update(update) => update.reference,
            _ => None,
        };
        reference.map_or(0, |one| one.values(self.row_elements))
    }

    /// Of the request and of its reply.
    fn opcodes(&self) -> (Opcode, Opcode) {
        match self.change {
            Change::Delete => (Opcode::Delete, Opcode::DeleteReply),
            Change::Expire(_) if self.only_count => (Opcode::CountExpired, Opcode::ExpireReply),
            Change::Expire(_) => (Opcode::Expire, Opcode::ExpireReply),
            Change::Decay { .. } => (Opcode::Decay, Opcode::ExpireReply),
            _ => (Opcode::Push, Opcode::PushReply),
        }
    }
}

/// What a push did, as far as the answers tell: what a try did whose answer was lost is not among
/// it.
#[derive(Debug, Clone, Copy, Default)]
pub struct Done {
    /// Slots that applied it, or counted, by the answer.
    pub applied_slots: u64,
    /// Rows that went, or would.
    pub gone: Gone,
}

/// A push under way or over.
pub struct Push {
    queue: Arc<PushQueue<Push>>,
    id: TransactionId,
    /// Checked before each of its frames leaves.
    lease: Arc<SendLease>,
    deadline: Deadline,
    keys: u64,
    done: Mutex<Done>,
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
        let (mut compared, references);
        let kept = self.references.kept(request.table);
        let request = match kept.filter(|_| request.change.updates()) {
            Some(reference) => {
                let values = reference.values(request.row_elements);
                references = self.references.of(request.table, plan.keys(), values)?;
                compared = request.clone();
                compared.change = request.change.compared(reference);
                compared.references = &references;
                &compared
            }
            None => request,
        };
        let routing = self.newest().ok_or_else(no_routing)?;
        let parts = plan.parts(&routing, self.keys_per_part(request.width()));
        self.check_limits(request, plan, &routing, &parts, deadline)
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
            done: Mutex::default(),
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
            let (sent, wanted) = request.opcodes();
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
        plan: &Plan,
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
            let mut bytes = push_body_bytes(keys, request.width());
            if self.origins.asks(request.table) {
                bytes = bytes.next_multiple_of(8) + plan.slots_of(part).count() * 8;
            }
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
        let (elements, told) = (request.width(), request.reference_values());
        let origins = if request.change.updates() {
            self.origins.of(request.table, plan.slots_of(part))
        } else {
            None
        };
        let meta = PushMeta {
            table: request.table,
            routing_version,
            id: push.id,
            floor,
            key_count: keys as u32,
            row_elements: elements as u32,
            change: request.change,
            origins: origins.is_some(),
            compensation: Compensation::Ignore,
        };
        let body_bytes = push_body_bytes(keys, elements);
        let meta = meta.encode();
        let (opcode, _) = request.opcodes();
        let origins = origins.as_deref().unwrap_or_default();
        let buffer = self.buffers.take();
        let mut frame = OutFrame::with_origins(opcode, &meta, keys, body_bytes, origins, buffer);
        let (key_words, value_words) = frame.body_mut().split_at_mut(keys);
        part.copy_keys(plan, key_words);
        if elements == 0 {
            return frame;
        }
        let mut merged = &mut bytemuck::cast_slice_mut(value_words)[..keys * elements];
        for piece in part.pieces() {
            let (here, rest) = merged.split_at_mut(piece.keys.len() * elements);
            let entries = &plan.entries()[piece.entries.clone()];
            let (first, values) = (piece.keys.start, request.values);
            match request.observed {
                observed if told > 0 => {
                    let both = (values, &request.references[first * told..]);
                    rows::merge_compared(entries, first, both, observed, here, [elements, told]);
                }
                Some(told) => rows::merge_observed(entries, first, values, told, here, elements),
                None => rows::merge(entries, first, values, here, elements),
            }
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
    check_observed(request, plan)?;
    if let Change::Update(update) = request.change {
        let scale = update.learning_rate_scale;
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

/// Refuse shows and clicks that are not one for each key, finite and not negative.
fn check_observed(request: &PushRequest<'_>, plan: &Plan) -> Result<(), ClientError> {
    let has_counts = matches!(request.change, Change::Update(update) if update.has_counts);
    let Some((shows, clicks)) = request.observed.filter(|_| has_counts) else {
        if has_counts == request.observed.is_some() {
            return Ok(());
        }
        let reason = "shows and clicks go with an update, and both together";
        return Err(ClientError::Invalid(reason.into()));
    };
    for (name, told) in [("shows", shows), ("clicks", clicks)] {
        if told.len() != plan.len() {
            let (told, keys) = (told.len(), plan.len());
            let reason = format!("{told} {name} came for {keys} keys: there must be one for each");
            return Err(ClientError::Invalid(reason));
        }
        if let Some(at) = told.iter().position(|one| !(0.0..=f32::MAX).contains(one)) {
            return Err(ClientError::Invalid(format!(
                "{name}[{at}] is {}; allowed: finite and not negative",
                told[at]
            )));
        }
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

/// What an answer tells.
fn answered(opcode: Opcode, meta: &[u8]) -> Result<Done, Refusal> {
    let mut gone = Gone::default();
    let applied = match opcode {
        Opcode::DeleteReply => {
            let reply = DeleteReply::decode(meta)?;
            gone.deleted = reply.rows;
            reply.applied_slots
        }
        Opcode::ExpireReply => {
            let reply = ExpireReply::decode(meta)?;
            (gone.unseen, gone.score, gone.norm) = (reply.unseen, reply.score, reply.norm);
            gone.counters = reply.counters;
            reply.applied_slots
        }
        _ => {
            let reply = PushReply::decode(meta)?;
            gone.stale = reply.stale.unwrap_or_default();
            reply.applied_slots
        }
    };
    Ok(Done {
        applied_slots: u64::from(applied),
        gone,
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

    /// What it did, once it has ended.
    pub fn done(&self) -> Done {
        *self.done.lock()
    }

    /// Rows that a delete removed, once it has ended.
    pub fn removed(&self) -> u64 {
        self.done().gone.deleted
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
                client.counters.count_staleness(&self.done().gone.stale);
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
                let done = answered(frame.header.opcode, &frame.meta);
                let done = done.map_err(|refusal| ClientError::Protocol {
                    address: request.address(),
                    reason: refusal.to_string(),
                })?;
                let mut all = push.done.lock();
                all.applied_slots += done.applied_slots;
                all.gone += done.gone;
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
