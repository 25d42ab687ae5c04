//! Until when frames of a stream may leave: a worker's lease of its task, counted on its own
//! [clock] (invariant I8), or the end of a client's own stream.

use std::future::Future;

use backstay_core::replication::Micros;
use tokio::sync::watch;

use super::error::ClientError;
use crate::clock;

#[derive(Debug, Clone, Copy, PartialEq)]
enum State {
    /// The caller has set no limit.
    Unlimited,
    Until(Micros),
    Revoked,
}

impl State {
    fn is_alive(self) -> bool {
        match self {
            Self::Unlimited => true,
            Self::Until(until) => clock::now() < until,
            Self::Revoked => false,
        }
    }
}

/// See the module's documentation. Revoked is for good.
#[derive(Debug)]
pub(crate) struct SendLease {
    state: watch::Sender<State>,
    /// What is said while something waits for it.
    reason: &'static str,
}

impl Default for SendLease {
    fn default() -> Self {
        Self::of("the worker's lease of its task has expired: waiting for the job master to renew or revoke it")
    }
}

impl SendLease {
    /// Without a limit; this is said when it is over.
    pub(crate) fn of(reason: &'static str) -> Self {
        let state = watch::Sender::new(State::Unlimited);
        Self { state, reason }
    }

    #[cfg(test)]
    pub(crate) fn ends(&self) -> Option<Micros> {
        match *self.state.borrow() {
            State::Until(until) => Some(until),
            State::Unlimited | State::Revoked => None,
        }
    }

    /// Why something waits for it.
    pub(crate) fn reason(&self) -> &'static str {
        self.reason
    }

    /// Let frames leave until then.
    pub(crate) fn set_until(&self, until: Micros) {
        self.state.send_if_modified(|state| {
            if *state != State::Revoked {
                *state = State::Until(until);
            }
            *state != State::Revoked
        });
    }

    /// Let no frame leave any more.
    pub(crate) fn revoke(&self) {
        self.state.send_replace(State::Revoked);
    }

    /// Whether a frame may leave now.
    pub(crate) fn is_alive(&self) -> bool {
        self.state.borrow().is_alive()
    }

    /// Wait until a frame may leave. After a revocation this never returns.
    pub(crate) async fn alive(&self) {
        let mut changes = self.state.subscribe();
        // The sender lives as long as this future.
        let _ = changes.wait_for(|state| state.is_alive()).await;
    }

    /// Do `work`, unless it is revoked before that is done.
    pub(crate) async fn unless_revoked<T>(
        &self,
        work: impl Future<Output = Result<T, ClientError>>,
    ) -> Result<T, ClientError> {
        let mut changes = self.state.subscribe();
        tokio::select! {
            biased;
            _ = changes.wait_for(|state| *state == State::Revoked) => Err(ClientError::TaskLeaseLost),
            done = work => done,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn soon() -> Micros {
        clock::now() + 600_000_000
    }

    #[test]
    fn a_lease_ends_and_is_extended_but_not_after_it_was_revoked() {
        let lease = SendLease::default();
        assert!(lease.is_alive());
        lease.set_until(clock::now());
        assert!(!lease.is_alive());
        lease.set_until(soon());
        assert!(lease.is_alive());
        lease.revoke();
        lease.set_until(soon());
        assert!(!lease.is_alive());
    }

    #[tokio::test]
    async fn who_waits_for_it_goes_on_when_it_is_extended_and_fails_when_it_is_revoked() {
        let lease = SendLease::default();
        lease.set_until(clock::now());
        let extend = async { lease.set_until(soon()) };
        tokio::join!(lease.alive(), extend);
        lease.set_until(clock::now());
        let wait = lease.unless_revoked(async {
            lease.alive().await;
            Ok(())
        });
        let (outcome, ()) = tokio::join!(wait, async { lease.revoke() });
        assert!(matches!(outcome, Err(ClientError::TaskLeaseLost)));
    }
}
