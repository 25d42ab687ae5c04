//! The requests of one call: sent until all have left, finished when all are answered or the
//! deadline has passed.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::Ordering;

use tokio::time::{sleep_until, Instant};

use super::attend::slots_of;
use super::error::ClientError;
use super::link::{Backoff, Deadline, Ticket};
use super::plan::Plan;
use super::request::Request;
use super::{split, Client};
use crate::frame_io::Frame;

/// Servers that an error names.
const MAX_NAMED: usize = 4;

/// What an error tells of one server.
struct Waited {
    slots: usize,
    since: Instant,
}

/// See the module's documentation.
#[derive(Default)]
pub(crate) struct Requests {
    list: Vec<Request>,
    backoff: Backoff,
    waited: bool,
}

impl Requests {
    pub(crate) fn add(&mut self, request: Request) {
        self.list.push(request);
    }

    /// Whether every answer that is awaited is here.
    pub(crate) fn is_ready(&self) -> bool {
        let ready = |request: &Request| {
            request.is_over() || request.ticket.as_ref().is_some_and(Ticket::is_ready)
        };
        self.list.iter().all(ready)
    }

    fn has_missing(&self) -> bool {
        self.list.iter().any(Request::is_missing)
    }

    /// The error for requests that have not left by the deadline.
    pub(crate) fn check_all_left(
        &self,
        client: &Client,
        deadline: Deadline,
    ) -> Result<(), ClientError> {
        if self.has_missing() {
            return Err(self.unanswered(client, deadline));
        }
        Ok(())
    }

    /// How many have been answered.
    fn answered(&self) -> usize {
        let answered = |request: &&Request| request.answered;
        self.list.iter().filter(answered).count()
    }

    /// Whether some slot may have applied a part of the call.
    pub(crate) fn started(&self) -> bool {
        self.answered() > 0 || self.list.iter().any(Request::maybe_applied)
    }

    /// Where the last of them goes.
    pub(crate) fn last_address(&self) -> String {
        self.list.last().map_or_else(String::new, Request::address)
    }

    /// Send the requests that are not under way, and try again until all have left or the time is
    /// up. Only a failure that no retry can mend is an error.
    pub(crate) async fn send_all(
        &mut self,
        client: &Client,
        plan: Option<&Plan>,
        deadline: Deadline,
    ) -> Result<(), ClientError> {
        loop {
            self.send_missing(client, plan, deadline).await?;
            if !self.has_missing() || !self.pause(client, deadline).await {
                return Ok(());
            }
        }
    }

    /// Send what is not under way once, by the newest routing. An error stays with its request,
    /// too, and the others are still sent; the first is returned.
    async fn send_missing(
        &mut self,
        client: &Client,
        plan: Option<&Plan>,
        deadline: Deadline,
    ) -> Result<(), ClientError> {
        let mut failure = Ok(());
        let mut at = 0;
        while let Some(request) = self.list.get_mut(at) {
            if !request.is_missing() {
                at += 1;
                continue;
            }
            let sent = match request.relocate(client, plan) {
                Ok(Some(cut)) => {
                    self.list.splice(at..=at, cut);
                    continue;
                }
                Ok(None) => request.try_send(client, deadline).await,
                Err(error) => Err(error),
            };
            if let Err(error) = sent {
                request.failure = Some(error.clone());
                failure = failure.and(Err(error));
            }
            at += 1;
        }
        failure
    }

    /// Wait until all are answered, sending again what has to be, until the deadline. Each
    /// answer goes to `take`. The first error is returned; with `to_the_end` the others are
    /// finished before.
    pub(crate) async fn finish(
        &mut self,
        client: &Client,
        plan: Option<&Plan>,
        deadline: Deadline,
        to_the_end: bool,
        mut take: impl FnMut(&Request, Frame) -> Result<(), ClientError>,
    ) -> Result<(), ClientError> {
        loop {
            for request in &mut self.list {
                if request.is_over() {
                    continue;
                }
                let taken = match request.answer(client, deadline).await {
                    Ok(Some(frame)) => take(request, frame).map(|()| {
                        let frame = std::mem::take(&mut request.frame);
                        client.buffers.give(frame.into_buffer());
                        true
                    }),
                    Ok(None) => Ok(false),
                    Err(error) => Err(error),
                };
                match taken {
                    Ok(answered) => request.answered = answered,
                    Err(error) if !to_the_end => return Err(error),
                    Err(error) => request.failure = Some(error),
                }
            }
            if !self.list.iter().any(|request| !request.is_over()) {
                break;
            }
            if !self.pause(client, deadline).await {
                break;
            }
            let sent = self.send_missing(client, plan, deadline).await;
            if !to_the_end {
                sent?;
            }
        }
        let failure = self.list.iter().find_map(|request| request.failure.clone());
        match failure {
            Some(failure) => Err(failure),
            None if self.list.iter().all(|request| request.answered) => Ok(()),
            None => Err(self.unanswered(client, deadline)),
        }
    }

    /// Wait before the next try, or until a newer routing comes; false if the time is up.
    async fn pause(&mut self, client: &Client, deadline: Deadline) -> bool {
        let waiting = |request: &&Request| !request.is_over();
        let Some(version) = self.list.iter().filter(waiting).map(|r| r.version).min() else {
            return true;
        };
        let broke = |request: &Request| request.trouble.as_ref().is_some_and(|t| t.broke);
        if !self.list.iter().filter(waiting).any(broke) {
            self.backoff.refused();
        }
        if !self.waited {
            self.waited = true;
            client.counters.waits.fetch_add(1, Ordering::Relaxed);
        }
        let until = (Instant::now() + self.backoff.next()).min(deadline.at());
        let mut routing = client.routing.subscribe();
        let newer = routing.wait_for(|routing| {
            let newest = routing.as_ref().map_or(0, |routing| routing.version);
            newest > version
        });
        tokio::select! {
            biased;
            _ = newer => self.backoff = Backoff::default(),
            () = sleep_until(until) => {}
        }
        let missing = self.list.iter().find(|request| request.is_missing());
        if let Some(request) = missing.or_else(|| self.list.iter().find(waiting)) {
            let leg = request.leg();
            let reason = request.trouble.as_ref().map(|trouble| &trouble.reason);
            client.waits.waiting(leg.since, || {
                leg.describe(client, reason.map_or("no answer", String::as_str))
            });
        }
        Instant::now() < deadline.at()
    }

    /// The error for requests that were not answered by the deadline. It names the servers that the
    /// call waited for, and since when.
    fn unanswered(&self, client: &Client, deadline: Deadline) -> ClientError {
        let routing = client.newest();
        let open = || self.list.iter().filter(|request| !request.is_over());
        let known = open()
            .map(Request::address)
            .find(|address| !address.is_empty());
        let address = known.unwrap_or_else(|| "no server".into());
        let mut targets: BTreeMap<(String, String), Waited> = BTreeMap::new();
        for request in open() {
            let leg = request.leg();
            let trouble = request.trouble.as_ref();
            let reason = trouble.map_or("no answer", |trouble| trouble.reason.as_str());
            let name = leg.link.map_or_else(String::new, |link| link.server.name());
            let waited = targets.entry((name, reason.into())).or_insert(Waited {
                slots: 0,
                since: leg.since,
            });
            waited.since = waited.since.min(leg.since);
            waited.slots += routing
                .as_deref()
                .map_or(0, |r| split::slot_count(leg.keys, r));
        }
        let more = targets.len().saturating_sub(MAX_NAMED);
        let named = targets
            .iter()
            .take(MAX_NAMED)
            .map(|((name, reason), waited)| {
                let slots = slots_of(waited.slots, name);
                let seconds = waited.since.elapsed().as_secs_f64();
                format!("{slots} for {seconds:.1} s: {reason}")
            });
        let named: Vec<String> = named.collect();
        let mut reason = format!("waited for the master of {}", named.join("; "));
        if more > 0 {
            let _ = write!(reason, "; and {more} more");
        }
        if let Some(routing) = routing {
            let _ = write!(reason, "; the routing is version {}", routing.version);
        }
        let waited_ms = deadline.waited_ms();
        // Only silence: neither a server nor the system has reported an error.
        if open().all(|request| request.ticket.is_some() && request.trouble.is_none()) {
            return ClientError::Deadline {
                address,
                reason,
                waited_ms,
            };
        }
        ClientError::Unavailable {
            address,
            reason,
            waited_ms,
        }
    }

    /// Give the memory of the frames back.
    pub(crate) fn recycle(&mut self, client: &Client) {
        for request in std::mem::take(&mut self.list) {
            client.buffers.give(request.frame.into_buffer());
        }
    }
}
