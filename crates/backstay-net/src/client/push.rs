//! Changing rows: each push has a number in the client's stream and keeps it on every retry,
//! so that a slot takes it at most once (invariant I2).
//!
//! Pushes leave in the order of their numbers. The floor, below which everything is settled,
//! travels with each; the distance between the two is limited, because a slot remembers only
//! so much.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

use backstay_core::gradient;
use backstay_core::stream::{TransactionId, WINDOW};
use backstay_core::transaction::Change;
use backstay_core::wire::{Opcode, PushMeta, PushReply};
use parking_lot::Mutex;

use super::error::ClientError;
use super::link::{Answer, Deadline, Link, Retry, Ticket};
use super::out_frame::{self, OutFrame};
use super::plan::{Part, Plan};
use super::{rows, Client};

/// What to push where.
pub struct PushRequest<'a> {
    /// The table's id.
    pub table: u64,
    /// Elements of its rows.
    pub row_elements: usize,
    /// What the values mean.
    pub change: Change,
    /// One row for each key of the batch.
    pub values: &'a [f32],
    /// Whether NaN and infinity are refused here, before anything is sent.
    pub require_finite: bool,
}

/// The pushes of a client that are not settled.
pub(super) struct PushQueue {
    /// Held while a push gets its number and leaves, so that the order is the same everywhere.
    order: tokio::sync::Mutex<()>,
    next_sequence: AtomicU64,
    in_flight: Mutex<BTreeMap<u64, Arc<Push>>>,
    /// Failures that nobody has been told of, by number; the oldest few.
    unreported: Mutex<BTreeMap<u64, ClientError>>,
    max_in_flight: usize,
}

/// Failures remembered until somebody asks.
const MAX_UNREPORTED: usize = 64;

impl PushQueue {
    pub(super) fn new(max_in_flight: usize) -> Self {
        Self {
            order: tokio::sync::Mutex::default(),
            next_sequence: AtomicU64::new(0),
            in_flight: Mutex::default(),
            unreported: Mutex::default(),
            max_in_flight: max_in_flight.clamp(1, WINDOW as usize / 2),
        }
    }

    /// The lowest number that is not settled.
    fn floor(&self) -> u64 {
        let first = self.in_flight.lock().keys().next().copied();
        first.unwrap_or_else(|| self.next_sequence.load(Ordering::Acquire))
    }

    /// The push to settle before another may leave: too many are under way, or the oldest
    /// lags so far behind that slots could not remember a newer one.
    fn oldest_if_full(&self) -> Option<Arc<Push>> {
        let in_flight = self.in_flight.lock();
        let (&oldest, push) = in_flight.first_key_value()?;
        let ahead = self.next_sequence.load(Ordering::Acquire) - oldest;
        (in_flight.len() >= self.max_in_flight || ahead >= WINDOW / 2).then(|| Arc::clone(push))
    }

    pub(super) async fn flush(&self, client: &Client) -> Result<(), ClientError> {
        let pushes: Vec<_> = self.in_flight.lock().values().cloned().collect();
        for push in pushes {
            // A failure is kept until it is reported, just below.
            let _ = push.settle(client).await;
        }
        let unreported = std::mem::take(&mut *self.unreported.lock());
        unreported.into_values().next().map_or(Ok(()), Err)
    }

    /// A push will not be tried any more.
    fn settled(&self, push: &Push, outcome: &Result<(), ClientError>) {
        self.in_flight.lock().remove(&push.sequence);
        let mut unreported = self.unreported.lock();
        if let (Err(error), true) = (outcome, unreported.len() < MAX_UNREPORTED) {
            unreported.insert(push.sequence, error.clone());
        }
    }
}

/// A push under way or settled.
pub struct Push {
    sequence: u64,
    deadline: Deadline,
    keys: u64,
    state: tokio::sync::Mutex<State>,
}

struct State {
    parts: Vec<PartPush>,
    /// Whether every part has been laid out; if not, the caller was interrupted.
    whole: bool,
    /// Parts that are known to be applied.
    applied: usize,
    outcome: Option<Result<(), ClientError>>,
}

struct PartPush {
    link: Arc<Link>,
    frame: OutFrame,
    ticket: Option<Ticket>,
    /// Whether some try of it may have been applied.
    maybe_applied: bool,
}

impl Client {
    /// Number a push and send it. Wait for it with [`Push::wait`]; [`Client::flush`] settles all.
    pub async fn push(
        &self,
        request: &PushRequest<'_>,
        plan: &Plan,
        deadline: Deadline,
    ) -> Result<Arc<Push>, ClientError> {
        self.check_open()?;
        check(request, plan)?;
        let parts = plan.parts(self.keys_per_part(request.row_elements));
        self.check_limits(request, plan, &parts, deadline).await?;
        let _order = self.pushes.order.lock().await;
        while let Some(oldest) = self.pushes.oldest_if_full() {
            // A failure is kept for its own caller or for a flush; here it is only in the way.
            let _ = oldest.settle(self).await;
        }
        let sequence = self.pushes.next_sequence.load(Ordering::Acquire);
        let push = Arc::new(Push {
            sequence,
            deadline,
            keys: plan.keys().len() as u64,
            state: tokio::sync::Mutex::new(State {
                parts: Vec::new(),
                whole: false,
                applied: 0,
                outcome: None,
            }),
        });
        // In this order: the floor may pass a number only after it is in flight.
        self.pushes
            .in_flight
            .lock()
            .insert(sequence, Arc::clone(&push));
        self.pushes
            .next_sequence
            .store(sequence + 1, Ordering::Release);
        let floor = self.pushes.floor();
        let mut state = push.state.lock().await;
        for part in parts {
            let link = self.link(plan.routing(), part.server);
            let frame = self.lay_out(request, plan, &part, sequence, floor);
            state.parts.push(PartPush {
                link,
                frame,
                ticket: None,
                maybe_applied: false,
            });
            // It is in the state before it is sent, so that an interrupted call keeps it.
            let Some(part) = state.parts.last_mut() else {
                continue;
            };
            if let Err(error) = part.send(deadline).await {
                let outcome = Err(state.failure(&push, error));
                self.pushes.settled(&push, &outcome);
                state.outcome = Some(outcome);
                break;
            }
        }
        state.whole = true;
        drop(state);
        Ok(push)
    }

    /// Refuse what a server would not take, before any part has left for another one.
    async fn check_limits(
        &self,
        request: &PushRequest<'_>,
        plan: &Plan,
        parts: &[Part],
        deadline: Deadline,
    ) -> Result<(), ClientError> {
        for part in parts {
            let link = self.link(plan.routing(), part.server);
            let hello = &link.connection(deadline).await?.hello;
            let keys = part.keys.len();
            out_frame::check(hello, keys, push_body_bytes(keys, request.row_elements))?;
        }
        Ok(())
    }

    /// Settle a push whether or not anybody waits for it: send it again if that is needed.
    pub fn settle_in_background(self: &Arc<Self>, push: &Arc<Push>) {
        let (client, push) = (Arc::clone(self), Arc::clone(push));
        // A failure is kept until somebody asks for it.
        tokio::spawn(async move { drop(push.settle(&client).await) });
    }

    fn lay_out(
        &self,
        request: &PushRequest<'_>,
        plan: &Plan,
        part: &Part,
        sequence: u64,
        floor: u64,
    ) -> OutFrame {
        let keys = &plan.keys()[part.keys.clone()];
        let elements = request.row_elements;
        let meta = PushMeta {
            table: request.table,
            routing_version: plan.routing().version,
            id: TransactionId {
                stream: self.stream,
                sequence,
            },
            floor,
            key_count: keys.len() as u32,
            row_elements: elements as u32,
            change: request.change,
        };
        let body_bytes = push_body_bytes(keys.len(), elements);
        let mut frame = OutFrame::new(
            Opcode::Push,
            &meta.encode(),
            keys.len(),
            body_bytes,
            self.buffers.take(),
        );
        let (key_words, value_words) = frame.body_mut().split_at_mut(keys.len());
        key_words.copy_from_slice(keys);
        let merged = &mut bytemuck::cast_slice_mut(value_words)[..keys.len() * elements];
        let entries = &plan.entries()[part.entries.clone()];
        rows::merge(entries, part.keys.start, request.values, merged, elements);
        frame
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
    pub fn is_settled(&self) -> bool {
        // Locked means that somebody is busy settling it.
        self.state
            .try_lock()
            .is_ok_and(|state| state.outcome.is_some())
    }

    /// Wait until it is applied everywhere or failed for good; the same answer each time.
    pub async fn wait(&self, client: &Client) -> Result<(), ClientError> {
        let outcome = self.settle(client).await;
        client.pushes.unreported.lock().remove(&self.sequence);
        outcome
    }

    async fn settle(&self, client: &Client) -> Result<(), ClientError> {
        let mut state = self.state.lock().await;
        if let Some(outcome) = &state.outcome {
            return outcome.clone();
        }
        let outcome = match state.finish(self.deadline, client).await {
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
        for part in std::mem::take(&mut state.parts) {
            client.buffers.give(part.frame.into_buffer());
        }
        client.pushes.settled(self, &outcome);
        outcome
    }
}

impl State {
    async fn finish(&mut self, deadline: Deadline, client: &Client) -> Result<(), ClientError> {
        // The answers of all parts are needed to tell what is known of the whole.
        let mut failure = Ok(());
        for part in &mut self.parts {
            match part.finish(deadline, client).await {
                Ok(()) => self.applied += 1,
                Err(error) => failure = failure.and(Err(error)),
            }
        }
        failure?;
        if self.whole {
            return Ok(());
        }
        let address = self
            .parts
            .last()
            .map_or_else(String::new, |part| part.link.address.clone());
        Err(ClientError::Unavailable {
            address,
            reason: "the call was interrupted".into(),
            waited_ms: deadline.waited_ms(),
        })
    }

    /// The error to report, given what is known of all parts.
    fn failure(&self, push: &Push, error: ClientError) -> ClientError {
        let started = self.applied > 0 || self.parts.iter().any(|part| part.maybe_applied);
        let (address, reason) = match error {
            ClientError::Unavailable {
                address, reason, ..
            } => (address, reason),
            ClientError::Deadline { address, .. } => (address, "no answer in time".into()),
            // Refused here, but another server may have its part: not as if nothing happened.
            ClientError::Refused {
                address, message, ..
            } if started => (address, message),
            error => return error,
        };
        let waited_ms = push.deadline.waited_ms();
        if started {
            ClientError::OutcomeUnknown {
                sequence: push.sequence,
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

impl PartPush {
    async fn send(&mut self, deadline: Deadline) -> Result<(), ClientError> {
        // Until the answer says otherwise.
        let before = std::mem::replace(&mut self.maybe_applied, true);
        match self.link.send(deadline, &mut self.frame).await {
            Ok(ticket) => {
                self.ticket = Some(ticket);
                Ok(())
            }
            Err(error) => {
                // Broken off in the middle of a frame: it cannot have been taken.
                self.maybe_applied = before;
                Err(error)
            }
        }
    }

    async fn finish(&mut self, deadline: Deadline, client: &Client) -> Result<(), ClientError> {
        let mut never_taken = true;
        let mut last_reason = String::from("no answer in time");
        let mut retry = Retry::new(deadline);
        loop {
            if self.ticket.is_none() {
                self.send(deadline).await?;
            }
            let Some(ticket) = self.ticket.take() else {
                continue;
            };
            let Some(reply) = ticket.wait(deadline).await else {
                break;
            };
            let answer = self.link.judge(reply, Opcode::PushReply);
            if matches!(answer, Err(ClientError::Refused { .. })) {
                self.maybe_applied = false;
            }
            match answer? {
                Answer::Frame(frame) => {
                    return PushReply::decode(&frame.meta)
                        .map(|_| ())
                        .map_err(|refusal| ClientError::Protocol {
                            address: self.link.address.clone(),
                            reason: refusal.to_string(),
                        });
                }
                Answer::Again {
                    reason,
                    not_applied,
                } => {
                    tracing::debug!(address = self.link.address, reason, "sending a push again");
                    last_reason = reason;
                    never_taken &= not_applied;
                    self.maybe_applied = !never_taken;
                    client.counters.retries.fetch_add(1, Ordering::Relaxed);
                    if !retry.pause().await {
                        break;
                    }
                }
            }
        }
        Err(self.link.unavailable(last_reason, deadline))
    }
}
