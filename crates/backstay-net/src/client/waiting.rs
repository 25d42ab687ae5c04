//! Reports what a client's calls wait for, because silence must not look like a hang.

use std::collections::VecDeque;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

/// A wait longer than this is reported.
const SILENCE: Duration = Duration::from_secs(1);
/// And again at this pace.
const PACE: Duration = Duration::from_secs(5);
/// Lines kept for a listener that is slow.
const MAX_LINES: usize = 16;

/// Something that the watcher of the control plane, or the user, should hear of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A server does not answer or refuses: the routing may have changed.
    Trouble,
    /// A call has been waiting for some time; for what, in words.
    Waiting(String),
    /// A wait has ended; after how long, in words.
    Resumed(String),
}

#[derive(Default)]
struct State {
    trouble: bool,
    lines: VecDeque<Event>,
    /// When the last line about waiting was written; none since nothing waits.
    last_line: Option<Instant>,
    ended: bool,
}

/// Collects the waits of all calls of a client into few events for one listener.
#[derive(Default)]
pub(crate) struct Waits {
    state: Mutex<State>,
    listener: Notify,
}

impl Waits {
    /// A server does not answer or refuses.
    pub(crate) fn trouble(&self) {
        self.state.lock().trouble = true;
        self.listener.notify_one();
    }

    /// A call has been waiting since then. Says so after a while, then at a steady pace,
    /// whichever of the client's calls it is.
    pub(crate) fn waiting(&self, since: Instant, what: impl FnOnce() -> String) {
        let now = Instant::now();
        if now.duration_since(since) < SILENCE {
            return;
        }
        let mut state = self.state.lock();
        if state
            .last_line
            .is_some_and(|last| now.duration_since(last) < PACE)
        {
            return;
        }
        state.last_line = Some(now);
        let text = format!(
            "waiting for {:.1} s: {}",
            now.duration_since(since).as_secs_f64(),
            what()
        );
        tracing::warn!("{text}");
        state.add(Event::Waiting(text));
        self.listener.notify_one();
    }

    /// A call that has been waiting since then goes on.
    pub(crate) fn resumed(&self, since: Instant, what: impl FnOnce() -> String) {
        let waited = since.elapsed();
        if waited < SILENCE {
            return;
        }
        let mut state = self.state.lock();
        if state.last_line.take().is_none() {
            return;
        }
        let text = format!("going on after {:.1} s: {}", waited.as_secs_f64(), what());
        tracing::info!("{text}");
        state.add(Event::Resumed(text));
        self.listener.notify_one();
    }

    /// The next event; `None` after [`Self::end`]. For one listener.
    pub(crate) async fn next(&self) -> Option<Event> {
        loop {
            {
                let mut state = self.state.lock();
                if state.ended {
                    return None;
                }
                if let Some(line) = state.lines.pop_front() {
                    return Some(line);
                }
                if std::mem::take(&mut state.trouble) {
                    return Some(Event::Trouble);
                }
            }
            self.listener.notified().await;
        }
    }

    pub(crate) fn end(&self) {
        self.state.lock().ended = true;
        self.listener.notify_one();
    }
}

impl State {
    fn add(&mut self, line: Event) {
        if self.lines.len() == MAX_LINES {
            self.lines.pop_front();
        }
        self.lines.push_back(line);
    }
}
