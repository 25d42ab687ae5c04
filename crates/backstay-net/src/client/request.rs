//! One request of a call. It is tried by the newest routing until it is answered or the deadline
//! is over, and cut anew where slots have moved. An answered part stays answered.
//!
//! docs/internals/data-plane.md draws what can happen to a request.

use std::ops::Range;
use std::pin::pin;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::Duration;

use backstay_core::error::Refusal;
use backstay_core::wire::{Opcode, PullMeta, PushMeta};
use tokio::time::{timeout_at, Instant};

use super::attend::{attend, Attended, Leg};
use super::connection::Lost;
use super::error::ClientError;
use super::link::{Answer, Deadline, Failure, Link, Ticket};
use super::out_frame::OutFrame;
use super::plan::{Part, Plan};
use super::routing::Routing;
use super::send_lease::SendLease;
use super::{split, Client};
use crate::frame_io::Frame;

/// A wait for the lease is looked at so often, to say so if it is long.
const SAY_AFTER: Duration = Duration::from_millis(500);

/// Since when a request is not answered as it should be, and the last reason.
#[derive(Clone)]
pub(super) struct Trouble {
    pub(super) since: Instant,
    pub(super) reason: String,
    /// Its connection broke: a new one may work at once.
    pub(super) broke: bool,
}

/// See the module's documentation.
pub(crate) struct Request {
    pub(super) frame: OutFrame,
    opcode: Opcode,
    wanted: Opcode,
    /// Which part of the plan it is, if its answer must go back to that place.
    part: Option<Part>,
    /// Where it goes by that version of the routing; none if its slots have no master.
    link: Option<Arc<Link>>,
    pub(super) version: u64,
    pub(super) ticket: Option<Ticket>,
    /// A try is under way that may be applied.
    sent: bool,
    /// An earlier try may have been applied.
    doubt: bool,
    pub(super) trouble: Option<Trouble>,
    pub(super) answered: bool,
    pub(super) failure: Option<ClientError>,
    /// It leaves only while this is alive.
    lease: Option<Arc<SendLease>>,
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
            lease: None,
        }
    }

    /// The same, to be sent only while this lease is alive.
    pub(crate) fn under(self, lease: Option<&Arc<SendLease>>) -> Self {
        let lease = lease.cloned();
        Self { lease, ..self }
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

    pub(super) fn is_over(&self) -> bool {
        self.answered || self.failure.is_some()
    }

    pub(super) fn is_missing(&self) -> bool {
        self.ticket.is_none() && !self.is_over()
    }

    /// Whether some try of it may have been applied.
    pub(super) fn maybe_applied(&self) -> bool {
        self.sent || self.doubt
    }

    pub(super) fn leg(&self) -> Leg<'_> {
        Leg {
            keys: self.frame.keys(),
            link: self.link.as_deref(),
            version: self.version,
            since: self.since(),
        }
    }

    /// Since when it waits.
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

    /// Send it once. If a retry may help, this is no error, and there is no ticket.
    pub(super) async fn try_send(
        &mut self,
        client: &Client,
        deadline: Deadline,
    ) -> Result<(), ClientError> {
        client.check_generation()?;
        let Some(link) = self.link.clone() else {
            let reason = client
                .newest()
                .filter(|routing| routing.version == self.version)
                .map_or_else(
                    || format!("no master as of routing {}", self.version),
                    |routing| routing.no_master(),
                );
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
        if !self.may_leave() {
            self.wait_for_lease(client, deadline).await;
            if !self.may_leave() || client.routing_version() > self.version {
                return Ok(());
            }
        }
        let request_id = connection.next_request_id();
        self.frame.set_request_id(request_id);
        // It may be applied, until an answer says otherwise.
        self.sent = true;
        let sending = connection.send(request_id, self.frame.bytes(), || self.may_leave());
        match attend(client, &self.leg(), sending, deadline, None).await {
            Attended::Done(Ok(Some(reply))) => {
                self.ticket = Some(Link::ticket(connection, Ok(reply)));
            }
            Attended::Done(Err(lost)) => self.ticket = Some(Link::ticket(connection, Err(lost))),
            Attended::Done(Ok(None)) => {
                self.sent = false;
                let reason = self.lease.as_ref().map_or("", |lease| lease.reason());
                self.missed(client, reason.into(), false);
            }
            Attended::Moved | Attended::Stalled | Attended::TimeUp => {
                // The frame broke off in the middle, so the server cannot have taken it.
                self.sent = false;
                self.missed(client, "it took no more bytes".into(), false);
            }
        }
        Ok(())
    }

    /// Whether its send lease, if it has one, is alive.
    fn may_leave(&self) -> bool {
        self.lease.as_ref().is_none_or(|lease| lease.is_alive())
    }

    /// Wait until it may leave or the time is up. Revoking the lease ends the whole call.
    async fn wait_for_lease(&mut self, client: &Client, deadline: Deadline) {
        let Some(lease) = self.lease.clone() else {
            return;
        };
        self.missed(client, lease.reason().into(), false);
        let since = self.since();
        let mut alive = pin!(lease.alive());
        while Instant::now() < deadline.at() {
            let until = deadline.at().min(Instant::now() + SAY_AFTER);
            if timeout_at(until, &mut alive).await.is_ok() {
                return;
            }
            client.waits.waiting(since, || lease.reason().into());
        }
    }

    /// Wait for the answer. `None`: it has to be tried again, or the time is up.
    pub(super) async fn answer(
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
            // A refusal says nothing about earlier tries: their outcome stays in doubt.
            Err(error) => Err(error),
        }
    }

    /// Go by the newest routing: as a whole (`None`), or cut into these.
    pub(super) fn relocate(
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
            self.cut(client, plan, &routing, group, link)
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
        routing: &Routing,
        group: &split::Group,
        link: Option<Arc<Link>>,
    ) -> Result<Self, ClientError> {
        let version = routing.version;
        let keys = group.ranges.iter().map(Range::len).sum::<usize>();
        let meta = self.meta_for(version, keys as u32);
        let meta = meta.map_err(|refusal| ClientError::Invalid(refusal.to_string()))?;
        let buffer = client.buffers.take();
        let (ranges, slot) = (&group.ranges, |key: u64| routing.slot(key));
        let frame = self.frame.cut(self.opcode, &meta, ranges, buffer, slot);
        let part = match (plan, &self.part) {
            (Some(plan), Some(part)) => plan.cut(part, group.server, &group.ranges),
            _ => None,
        };
        Ok(Self {
            doubt: self.maybe_applied(),
            trouble: self.trouble.clone(),
            lease: self.lease.clone(),
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
