//! Waiting for a server's part of the work, while watching the routing and the deadline, and
//! telling listeners what is waited for.

use std::future::{poll_fn, Future};
use std::pin::{pin, Pin};
use std::task::Poll;
use std::time::Duration;

use tokio::time::{sleep_until, Instant};

use super::link::{Deadline, Link};
use super::routing::Routing;
use super::{split, Client};

/// How long a server whose slots have moved away may still answer what it was asked before:
/// one that hands them over does so in a few milliseconds, one that hangs never does.
const GRACE: Duration = Duration::from_millis(50);
/// Silence for so long makes the client look whether the cluster has changed.
const LOOK: Duration = Duration::from_millis(500);

/// What a wait of a request depends on.
pub(super) struct Leg<'a> {
    pub(super) keys: &'a [u64],
    pub(super) link: Option<&'a Link>,
    pub(super) version: u64,
    pub(super) since: Instant,
}

pub(super) enum Attended<T> {
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

    pub(super) fn describe(&self, client: &Client, reason: &str) -> String {
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
        } else if routing.loss.is_empty() {
            format!("{name} without a master; waiting for routing newer than {version}")
        } else {
            format!("{name} without a master: {}", routing.loss)
        }
    }
}

/// "512 slots (ps-1 at 127.0.0.1:7001)".
pub(super) fn slots_of(count: usize, server: &str) -> String {
    let slots = format!("{count} slot{}", if count == 1 { "" } else { "s" });
    if server.is_empty() {
        return slots;
    }
    format!("{slots} ({server})")
}

/// Wait for `work`, and meanwhile watch the routing and the deadline, and tell listeners what is
/// waited for.
pub(super) async fn attend<T>(
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
