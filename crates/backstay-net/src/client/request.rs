//! One request of a call, tried until it is answered: by the newest routing, cut anew where
//! slots have moved, until the deadline. A part that is answered stays so.
//!
//! What has happened to a request is in docs/internals/client-failover.md, with a diagram.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::future::{poll_fn, Future};
use std::ops::Range;
use std::pin::{pin, Pin};
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use backstay_core::error::Refusal;
use backstay_core::wire::{Opcode, PullMeta, PushMeta};
use tokio::time::{sleep_until, Instant};

use super::connection::Lost;
use super::error::ClientError;
use super::link::{Answer, Backoff, Deadline, Failure, Link, Ticket};
use super::out_frame::OutFrame;
use super::plan::{Part, Plan};
use super::routing::Routing;
use super::{split, Client};
use crate::frame_io::Frame;

/// How long a server whose slots have moved away may still answer what it was asked before:
/// one that hands them over does so in a few milliseconds, one that hangs never does.
const GRACE: Duration = Duration::from_millis(50);
/// Silence for so long makes the client look whether the cluster has changed.
const LOOK: Duration = Duration::from_millis(500);
/// Servers that an error names.
const MAX_NAMED: usize = 4;

/// Since when a request is not answered as it should be, and the last reason.
#[derive(Clone)]
struct Trouble {
    since: Instant,
    reason: String,
    /// Its connection broke: a new one may work at once.
    broke: bool,
}

/// See the module's documentation.
pub(crate) struct Request {
    frame: OutFrame,
    opcode: Opcode,
    wanted: Opcode,
    /// Which part of the plan it is; only where the answer must be put back in its place.
    part: Option<Part>,
    /// Where it goes by that version of the routing; none if its slots have no master.
    link: Option<Arc<Link>>,
    version: u64,
    ticket: Option<Ticket>,
    /// A try is under way that may be applied.
    sent: bool,
    /// An earlier try may have been applied.
    doubt: bool,
    trouble: Option<Trouble>,
    answered: bool,
    failure: Option<ClientError>,
}

/// What a wait of a request depends on.
struct Leg<'a> {
    keys: &'a [u64],
    link: Option<&'a Link>,
    version: u64,
    since: Instant,
}

enum Attended<T> {
    Done(T),
    /// Other servers are the masters now.
    Moved,
    Stalled,
    TimeUp,
}

impl Leg<'_> {
    fn has_moved(&self, routing: &Routing) -> bool {
        self.keys.iter().any(|&key| {
            let server = routing.servers.get(routing.server_of_key(key) as usize);
            match (server, self.link) {
                (Some(server), Some(link)) => !link.leads_to(server),
                (server, link) => server.is_some() || link.is_some(),
            }
        })
    }

    fn describe(&self, client: &Client, reason: &str) -> String {
        let routing = client.newest();
        let Some(routing) = routing.as_deref() else {
            return reason.into();
        };
        let server = self
            .link
            .map_or_else(String::new, |link| link.server.name());
        let name = slots_of(split::slot_count(self.keys, routing), &server);
        let version = routing.version;
        if self.link.is_some() {
            format!("the master of {name}: {reason}; waiting for it or for routing newer than {version}")
        } else {
            format!("{name} without a master; waiting for routing newer than {version}")
        }
    }
}

/// "512 slots (ps-1 at 127.0.0.1:7001)".
fn slots_of(count: usize, server: &str) -> String {
    let slots = format!("{count} slot{}", if count == 1 { "" } else { "s" });
    if server.is_empty() {
        return slots;
    }
    format!("{slots} ({server})")
}

/// What an error tells of one server.
struct Waited {
    slots: usize,
    since: Instant,
}

/// Wait for `work`, and meanwhile look after the routing, the deadline, and those who want to
/// know what is waited for.
async fn attend<T>(
    client: &Client,
    leg: &Leg<'_>,
    work: impl Future<Output = T>,
    deadline: Deadline,
    stalled_at: Option<Instant>,
) -> Attended<T> {
    let mut work = pin!(work);
    if let Some(done) = ready_now(&mut work).await {
        return Attended::Done(done);
    }
    let mut routing = client.routing.subscribe();
    let mut known = leg.version;
    let mut give_up_at: Option<Instant> = None;
    let mut look_at = Instant::now() + LOOK;
    loop {
        if give_up_at.is_none() {
            let newest = routing.borrow_and_update().clone();
            if let Some(newest) = newest.filter(|newest| newest.version > known) {
                known = newest.version;
                if client.has_lost_state() || leg.has_moved(&newest) {
                    give_up_at = Some(Instant::now() + GRACE);
                }
            }
        }
        let wake = [Some(deadline.at()), stalled_at, give_up_at, Some(look_at)];
        let wake = wake.into_iter().flatten().min().unwrap_or(look_at);
        tokio::select! {
            biased;
            done = &mut work => return Attended::Done(done),
            // The sender lives as long as the client.
            _ = routing.changed(), if give_up_at.is_none() => continue,
            () = sleep_until(wake) => {}
        }
        let now = Instant::now();
        if now >= deadline.at() {
            return Attended::TimeUp;
        }
        if give_up_at.is_some_and(|at| now >= at) {
            return Attended::Moved;
        }
        if stalled_at.is_some_and(|at| now >= at) {
            return Attended::Stalled;
        }
        if now >= look_at {
            look_at = now + LOOK;
            client.waits.trouble();
            client
                .waits
                .waiting(leg.since, || leg.describe(client, "no answer"));
        }
    }
}

/// The result, if it is there without waiting.
async fn ready_now<F: Future>(work: &mut Pin<&mut F>) -> Option<F::Output> {
    poll_fn(|context| match work.as_mut().poll(context) {
        Poll::Ready(done) => Poll::Ready(Some(done)),
        Poll::Pending => Poll::Ready(None),
    })
    .await
}

impl Request {
    pub(crate) fn new(
        opcode: Opcode,
        wanted: Opcode,
        frame: OutFrame,
        part: Option<Part>,
        link: Option<Arc<Link>>,
        version: u64,
    ) -> Self {
        Self {
            frame,
            opcode,
            wanted,
            part,
            link,
            version,
            ticket: None,
            sent: false,
            doubt: false,
            trouble: None,
            answered: false,
            failure: None,
        }
    }

    /// Which part of the plan it is.
    pub(crate) fn part(&self) -> Option<&Part> {
        self.part.as_ref()
    }

    /// Where it was sent; empty if its slots had no master.
    pub(crate) fn address(&self) -> String {
        let link = self.link.as_ref();
        link.map_or_else(String::new, |link| link.address().into())
    }

    fn is_over(&self) -> bool {
        self.answered || self.failure.is_some()
    }

    fn is_missing(&self) -> bool {
        self.ticket.is_none() && !self.is_over()
    }

    /// Whether some try of it may have been applied.
    fn maybe_applied(&self) -> bool {
        self.sent || self.doubt
    }

    fn leg(&self) -> Leg<'_> {
        Leg {
            keys: self.frame.keys(),
            link: self.link.as_deref(),
            version: self.version,
            since: self.since(),
        }
    }

    /// Since when it waits for what it should have.
    fn since(&self) -> Instant {
        match (&self.trouble, &self.ticket) {
            (Some(trouble), _) => trouble.since,
            (None, Some(ticket)) => ticket.sent_at,
            (None, None) => Instant::now(),
        }
    }

    fn missed(&mut self, client: &Client, reason: String, broke: bool) {
        client.waits.trouble();
        let since = self.since();
        self.trouble = Some(Trouble {
            since,
            reason,
            broke,
        });
    }

    /// Send it once. What a retry may mend is no error: it has no ticket then.
    async fn try_send(&mut self, client: &Client, deadline: Deadline) -> Result<(), ClientError> {
        client.check_generation()?;
        let Some(link) = self.link.clone() else {
            let reason = format!("no master as of routing {}", self.version);
            self.missed(client, reason, false);
            return Ok(());
        };
        let connection = match link.open_connection() {
            Some(connection) => connection,
            None => match attend(client, &self.leg(), link.connection(), deadline, None).await {
                Attended::Done(Ok(connection)) => connection,
                Attended::Done(Err(Failure::Fatal(error))) => return Err(error),
                Attended::Done(Err(Failure::Transient(reason))) => {
                    self.missed(client, reason, false);
                    return Ok(());
                }
                Attended::Moved => return Ok(()),
                Attended::TimeUp | Attended::Stalled => {
                    let reason = "no connection could be opened in time".into();
                    self.missed(client, reason, false);
                    return Ok(());
                }
            },
        };
        self.frame.check(&connection.hello)?;
        let request_id = connection.next_request_id();
        self.frame.set_request_id(request_id);
        // Until the answer says otherwise.
        self.sent = true;
        let sending = connection.send(request_id, self.frame.bytes());
        match attend(client, &self.leg(), sending, deadline, None).await {
            Attended::Done(sent) => self.ticket = Some(link.ticket(connection, sent)),
            Attended::Moved | Attended::Stalled | Attended::TimeUp => {
                // Broken off in the middle of a frame: it cannot have been taken.
                self.sent = false;
                self.missed(client, "it took no more bytes".into(), false);
            }
        }
        Ok(())
    }

    /// Wait for the answer. `None`: it has to be tried again, or the time is up.
    async fn answer(
        &mut self,
        client: &Client,
        deadline: Deadline,
    ) -> Result<Option<Frame>, ClientError> {
        let Some(link) = self.link.clone() else {
            return Ok(None);
        };
        let leg = Leg {
            keys: self.frame.keys(),
            link: Some(&link),
            version: self.version,
            since: self.since(),
        };
        let Some(ticket) = &mut self.ticket else {
            return Ok(None);
        };
        let stalled_at = Some(ticket.sent_at + link.stall_timeout());
        let reply = match attend(client, &leg, &mut ticket.reply, deadline, stalled_at).await {
            Attended::Done(Ok(reply)) => reply,
            // The sender is dropped only with the connection.
            Attended::Done(Err(_)) => Err(Lost::unanswered("the connection was closed")),
            Attended::Stalled => Err(ticket.give_up(link.stall_timeout())),
            Attended::Moved => Err(Lost::unanswered("no answer before its slots moved")),
            Attended::TimeUp => return Ok(None),
        };
        self.ticket = None;
        self.sent = false;
        match link.judge(reply, self.wanted) {
            Ok(Answer::Frame(frame)) => {
                if let Some(trouble) = &self.trouble {
                    client.waits.resumed(trouble.since, || link.server.name());
                }
                Ok(Some(frame))
            }
            Ok(Answer::Again {
                reason,
                not_applied,
                refused,
            }) => {
                tracing::debug!(address = link.address(), reason, "sending it again");
                self.doubt |= !not_applied;
                client.counters.retries.fetch_add(1, Ordering::Relaxed);
                self.missed(client, reason, !refused);
                Ok(None)
            }
            Err(error) => {
                if matches!(error, ClientError::Refused { .. }) {
                    self.doubt = false;
                }
                Err(error)
            }
        }
    }

    /// Go by the newest routing: as a whole (`None`), or cut into these.
    fn relocate(
        &mut self,
        client: &Client,
        plan: Option<&Plan>,
    ) -> Result<Option<Vec<Self>>, ClientError> {
        let Some(routing) = client.newest() else {
            return Ok(None);
        };
        if routing.version <= self.version {
            return Ok(None);
        }
        let groups = split::by_server(self.frame.keys(), &routing);
        if let [group] = &groups[..] {
            let link = client.link_to(&routing, group.server);
            self.count_failover(client, link.as_ref());
            self.link = link;
            self.version = routing.version;
            self.frame.set_routing_version(routing.version);
            return Ok(None);
        }
        let cut = groups.iter().map(|group| {
            let link = client.link_to(&routing, group.server);
            self.count_failover(client, link.as_ref());
            self.cut(client, plan, routing.version, group, link)
        });
        let cut = cut.collect::<Result<Vec<_>, _>>()?;
        client
            .buffers
            .give(std::mem::take(&mut self.frame).into_buffer());
        Ok(Some(cut))
    }

    fn count_failover(&self, client: &Client, link: Option<&Arc<Link>>) {
        let same = match (&self.link, link) {
            (Some(old), Some(new)) => old.leads_to(&new.server),
            (_, None) => true,
            (None, Some(_)) => false,
        };
        if !same {
            client.counters.failovers.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn cut(
        &self,
        client: &Client,
        plan: Option<&Plan>,
        version: u64,
        group: &split::Group,
        link: Option<Arc<Link>>,
    ) -> Result<Self, ClientError> {
        let keys = group.ranges.iter().map(Range::len).sum::<usize>();
        let meta = self.meta_for(version, keys as u32);
        let meta = meta.map_err(|refusal| ClientError::Invalid(refusal.to_string()))?;
        let buffer = client.buffers.take();
        let frame = self.frame.cut(self.opcode, &meta, &group.ranges, buffer);
        let part = match (plan, &self.part) {
            (Some(plan), Some(part)) => plan.cut(part, group.server, &group.ranges),
            _ => None,
        };
        Ok(Self {
            doubt: self.maybe_applied(),
            trouble: self.trouble.clone(),
            ..Self::new(self.opcode, self.wanted, frame, part, link, version)
        })
    }

    fn meta_for(&self, routing_version: u64, key_count: u32) -> Result<Vec<u8>, Refusal> {
        let meta = self.frame.meta();
        Ok(if self.opcode == Opcode::Pull {
            PullMeta {
                routing_version,
                key_count,
                ..PullMeta::decode(meta)?
            }
            .encode()
        } else {
            PushMeta {
                routing_version,
                key_count,
                ..PushMeta::decode(meta)?
            }
            .encode()
        })
    }
}

/// The requests of one call.
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

    /// The error for what has not left until the deadline.
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

    /// Whether some slot may have something of the call.
    pub(crate) fn started(&self) -> bool {
        self.answered() > 0 || self.list.iter().any(Request::maybe_applied)
    }

    /// Where the last of them goes.
    pub(crate) fn last_address(&self) -> String {
        self.list.last().map_or_else(String::new, Request::address)
    }

    /// Send what is not under way, waiting and trying again until all have left or the time is
    /// up. Only what no retry can mend is an error.
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
    /// settled before.
    pub(crate) async fn settle(
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

    /// The error for what was not answered until the deadline: whom it waited for, since when.
    fn unanswered(&self, client: &Client, deadline: Deadline) -> ClientError {
        let routing = client.newest();
        let open = || self.list.iter().filter(|request| !request.is_over());
        let address = open().next().map_or_else(String::new, Request::address);
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
        // Nothing but silence: no word of a server, none of the system.
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
