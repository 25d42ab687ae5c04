//! The way to one server: keeps a connection, opens it anew, sends requests until an answer
//! comes or the deadline has passed.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;
use std::time::Duration;

use backstay_core::error::code;
use tokio::sync::{oneshot, Notify};
use tokio::time::{sleep_until, timeout_at, Instant};

use super::connection::{refusal_of, Connection, Lost, OpenError, Reply};
use super::error::ClientError;
use super::out_frame::OutFrame;
use super::ClientOptions;
use crate::buffers::BufferPool;
use crate::frame_io::Frame;
use backstay_core::wire::Opcode;

/// Until when a call may try, and since when it does.
#[derive(Debug, Clone, Copy)]
pub struct Deadline {
    started: Instant,
    at: Instant,
}

impl Deadline {
    /// From now on.
    pub fn after(time: Duration) -> Self {
        let started = Instant::now();
        Self {
            started,
            at: started + time,
        }
    }

    pub(crate) fn waited_ms(&self) -> u128 {
        self.started.elapsed().as_millis()
    }
}

/// The pauses between the tries of one request: none before the first retry (the connection
/// may just have been closed), then doubling from 20 ms to 1 s.
pub(crate) struct Retry {
    deadline: Deadline,
    pause: Duration,
}

impl Retry {
    const FIRST: Duration = Duration::from_millis(20);
    const LONGEST: Duration = Duration::from_secs(1);

    pub(crate) fn new(deadline: Deadline) -> Self {
        Self {
            deadline,
            pause: Duration::ZERO,
        }
    }

    /// Wait before the next try; false if the deadline comes first.
    pub(crate) async fn pause(&mut self) -> bool {
        let next = Instant::now() + self.pause;
        self.pause = (self.pause * 2).clamp(Self::FIRST, Self::LONGEST);
        sleep_until(next.min(self.deadline.at)).await;
        next < self.deadline.at
    }
}

/// A request under way: its answer will come here.
pub(crate) struct Ticket {
    reply: oneshot::Receiver<Reply>,
    connection: Arc<Connection>,
    /// Silence longer than this means that the connection is dead without knowing it.
    patience: Duration,
}

impl Ticket {
    /// Whether an answer is here.
    pub(crate) fn is_ready(&self) -> bool {
        !self.reply.is_empty()
    }

    /// Wait for the answer; `None` if the deadline comes first. A connection that stays silent
    /// for too long is given up, as if it had broken.
    pub(crate) async fn wait(self, deadline: Deadline) -> Option<Reply> {
        let silence = Instant::now() + self.patience;
        match timeout_at(silence.min(deadline.at), self.reply).await {
            Ok(Ok(reply)) => Some(reply),
            // The sender is dropped only with the connection.
            Ok(Err(_)) => Some(Err(Lost::unanswered("the connection was closed"))),
            Err(_) if silence < deadline.at => {
                let reason = format!("no answer within {:?}", self.patience);
                Some(Err(self.connection.lose(&reason)))
            }
            Err(_) => None,
        }
    }
}

pub(crate) struct Link {
    pub(crate) address: String,
    /// The instance whose rows the caller relies on; 0 until the first handshake.
    instance: AtomicU64,
    /// Set once it is known that the process with those rows is gone.
    lost: AtomicBool,
    options: Arc<ClientOptions>,
    buffers: Arc<BufferPool>,
    trouble: Arc<Notify>,
    connection: tokio::sync::Mutex<Option<Arc<Connection>>>,
}

impl Link {
    pub(crate) fn new(
        address: &str,
        options: Arc<ClientOptions>,
        buffers: Arc<BufferPool>,
        trouble: Arc<Notify>,
    ) -> Self {
        Self {
            address: address.into(),
            instance: AtomicU64::new(0),
            lost: AtomicBool::new(false),
            options,
            buffers,
            trouble,
            connection: tokio::sync::Mutex::default(),
        }
    }

    /// An open connection, trying again and again until the deadline.
    pub(crate) async fn connection(
        &self,
        deadline: Deadline,
    ) -> Result<Arc<Connection>, ClientError> {
        let mut retry = Retry::new(deadline);
        let mut reason = String::from("no connection could be opened in time");
        loop {
            if self.lost.load(Ordering::Acquire) {
                return Err(self.state_lost());
            }
            match timeout_at(deadline.at, self.connect_once()).await {
                Ok(Ok(connection)) => return Ok(connection),
                Ok(Err(OpenError::Refused(error))) => return Err(self.named(error)),
                Ok(Err(OpenError::Transient(why))) => reason = why,
                Err(_) => return Err(self.unavailable(reason, deadline)),
            }
            tracing::debug!(address = self.address, reason, "waiting for the server");
            self.trouble.notify_one();
            if !retry.pause().await {
                return Err(self.unavailable(reason, deadline));
            }
        }
    }

    /// The process whose rows the caller relies on is known to be gone.
    pub(crate) fn mark_lost(&self) {
        self.lost.store(true, Ordering::Release);
    }

    fn state_lost(&self) -> ClientError {
        ClientError::StateLost {
            address: self.address.clone(),
        }
    }

    /// The error for a server that did not answer until the deadline.
    pub(crate) fn unavailable(&self, reason: String, deadline: Deadline) -> ClientError {
        ClientError::Unavailable {
            address: self.address.clone(),
            reason,
            waited_ms: deadline.waited_ms(),
        }
    }

    /// The connection, if one is open.
    pub(crate) async fn current(&self) -> Option<Arc<Connection>> {
        self.connection
            .lock()
            .await
            .clone()
            .filter(|connection| connection.is_open())
    }

    /// Forget the connection.
    pub(crate) async fn close(&self) {
        self.connection.lock().await.take();
    }

    /// Send a frame once. Only the deadline and what no retry can mend are errors here; a
    /// connection that breaks shows in the ticket.
    pub(crate) async fn send(
        &self,
        deadline: Deadline,
        frame: &mut OutFrame,
    ) -> Result<Ticket, ClientError> {
        let connection = self.connection(deadline).await?;
        frame.check(&connection.hello)?;
        let request_id = connection.next_request_id();
        frame.set_request_id(request_id);
        match timeout_at(deadline.at, connection.send(request_id, frame.bytes())).await {
            Ok(Ok(reply)) => Ok(self.ticket(connection, reply)),
            Ok(Err(lost)) => Ok(self.ticket(connection, already_lost(lost))),
            Err(_) => Err(ClientError::Deadline {
                address: self.address.clone(),
                waited_ms: deadline.waited_ms(),
            }),
        }
    }

    fn ticket(&self, connection: Arc<Connection>, reply: oneshot::Receiver<Reply>) -> Ticket {
        let patience = self.options.stall_timeout;
        Ticket {
            reply,
            connection,
            patience,
        }
    }

    /// The instance met at the first handshake; 0 before it.
    pub(crate) fn instance(&self) -> u64 {
        self.instance.load(Ordering::Acquire)
    }

    async fn connect_once(&self) -> Result<Arc<Connection>, OpenError> {
        let mut slot = self.connection.lock().await;
        if let Some(connection) = slot.as_ref().filter(|connection| connection.is_open()) {
            return Ok(Arc::clone(connection));
        }
        let opening = Connection::open(&self.address, &self.options, &self.buffers);
        let connection = tokio::time::timeout(self.options.connect_timeout, opening)
            .await
            .map_err(|_| {
                OpenError::Transient(format!(
                    "no handshake within {:?}",
                    self.options.connect_timeout
                ))
            })??;
        let instance = connection.hello.instance;
        let expected = self.instance.load(Ordering::Acquire);
        if expected == 0 {
            self.instance.store(instance, Ordering::Release);
        } else if expected != instance {
            return Err(OpenError::Refused(self.state_lost()));
        }
        let connection = Arc::new(connection);
        *slot = Some(Arc::clone(&connection));
        Ok(connection)
    }

    /// Errors made below do not know the address.
    fn named(&self, error: ClientError) -> ClientError {
        match error {
            ClientError::Protocol { reason, .. } => ClientError::Protocol {
                address: self.address.clone(),
                reason,
            },
            other => other,
        }
    }

    /// Turn a reply into the frame that was asked for, a reason to try again, or an error.
    pub(crate) fn judge(&self, reply: Reply, wanted: Opcode) -> Result<Answer, ClientError> {
        let frame = match reply {
            Err(lost) => {
                return Ok(Answer::Again {
                    reason: lost.reason,
                    not_applied: lost.not_taken,
                })
            }
            Ok(frame) => frame,
        };
        if frame.header.opcode == wanted {
            return Ok(Answer::Frame(frame));
        }
        let protocol = |reason: String| ClientError::Protocol {
            address: self.address.clone(),
            reason,
        };
        if frame.header.opcode != Opcode::Error {
            return Err(protocol(format!(
                "{:?} came instead of {wanted:?}",
                frame.header.opcode
            )));
        }
        match refusal_of(&self.address, &frame).map_err(|error| protocol(error.to_string()))? {
            ClientError::Refused {
                code,
                retry_safe,
                message,
                ..
            } if passes_by_itself(code, retry_safe) => Ok(Answer::Again {
                reason: message,
                not_applied: matches!(code, code::NOT_MASTER | code::STOPPING),
            }),
            error => Err(error),
        }
    }
}

/// What became of one try of a request.
pub(crate) enum Answer {
    Frame(Frame),
    Again { reason: String, not_applied: bool },
}

/// Whether to try again: the slot moves in, the twin finishes, the server restarts. Of what a
/// later release may say, its own word is taken. A memory limit does not pass by waiting.
fn passes_by_itself(code: u16, retry_safe: bool) -> bool {
    match code {
        code::NOT_MASTER | code::STOPPING | code::IN_FLIGHT | code::INCOMPLETE => true,
        1..=code::INCOMPLETE => false,
        _ => retry_safe,
    }
}

fn already_lost(lost: Lost) -> oneshot::Receiver<Reply> {
    let (sender, receiver) = oneshot::channel();
    // The receiver is alive: it is returned.
    let _ = sender.send(Err(lost));
    receiver
}
