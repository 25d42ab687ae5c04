//! A worker's hold on its task, counted on its own clock (invariant I8): no frame of the task's
//! pushes leaves while it is not alive.

use std::future::Future;

use tokio::sync::watch;
use tokio::time::Instant;

use super::error::ClientError;

#[derive(Debug, Clone, Copy, PartialEq)]
enum State {
    /// Nobody has set a limit.
    Unlimited,
    Until(Instant),
    Revoked,
}

impl State {
    fn is_alive(self) -> bool {
        match self {
            Self::Unlimited => true,
            Self::Until(until) => Instant::now() < until,
            Self::Revoked => false,
        }
    }
}

/// See the module's documentation. Revoked is for good.
#[derive(Debug)]
pub(crate) struct Hold(watch::Sender<State>);

impl Default for Hold {
    fn default() -> Self {
        Self(watch::Sender::new(State::Unlimited))
    }
}

impl Hold {
    /// Let frames leave until then.
    pub(crate) fn set_until(&self, until: Instant) {
        self.0.send_if_modified(|state| {
            if *state != State::Revoked {
                *state = State::Until(until);
            }
            *state != State::Revoked
        });
    }

    /// Let no frame leave any more.
    pub(crate) fn revoke(&self) {
        self.0.send_replace(State::Revoked);
    }

    /// Whether a frame may leave now.
    pub(crate) fn is_alive(&self) -> bool {
        self.0.borrow().is_alive()
    }

    /// Wait until a frame may leave; for ever once it is revoked.
    pub(crate) async fn alive(&self) {
        let mut changes = self.0.subscribe();
        // The sender lives as long as this future.
        let _ = changes.wait_for(|state| state.is_alive()).await;
    }

    /// Do `work`, unless it is revoked before that is done.
    pub(crate) async fn unless_revoked<T>(
        &self,
        work: impl Future<Output = Result<T, ClientError>>,
    ) -> Result<T, ClientError> {
        let mut changes = self.0.subscribe();
        tokio::select! {
            biased;
            _ = changes.wait_for(|state| *state == State::Revoked) => Err(ClientError::HoldLost),
            done = work => done,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(600)
    }

    #[test]
    fn a_hold_ends_and_is_extended_but_not_after_it_was_revoked() {
        let hold = Hold::default();
        assert!(hold.is_alive());
        hold.set_until(Instant::now());
        assert!(!hold.is_alive());
        hold.set_until(soon());
        assert!(hold.is_alive());
        hold.revoke();
        hold.set_until(soon());
        assert!(!hold.is_alive());
    }

    #[tokio::test]
    async fn who_waits_for_it_goes_on_when_it_is_extended_and_fails_when_it_is_revoked() {
        let hold = Hold::default();
        hold.set_until(Instant::now());
        let extend = async { hold.set_until(soon()) };
        tokio::join!(hold.alive(), extend);
        hold.set_until(Instant::now());
        let wait = hold.unless_revoked(async {
            hold.alive().await;
            Ok(())
        });
        let (outcome, ()) = tokio::join!(wait, async { hold.revoke() });
        assert!(matches!(outcome, Err(ClientError::HoldLost)));
    }
}
