//! The way to one server: keeps a connection, opens it anew, and tells what an answer means.
//! It tries once; the call decides whether and where to try again (see `request`).

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::Duration;

use backstay_core::error::code;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::connection::{refusal_of, Connection, Lost, OpenError, Reply};
use super::error::ClientError;
use super::options::ClientOptions;
use super::routing::ServerAddress;
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

    pub(crate) fn started(&self) -> Instant {
        self.started
    }

    pub(crate) fn at(&self) -> Instant {
        self.at
    }
}

/// The pauses between the tries of one call: none before the first retry after a broken
/// connection (it may just have been closed), then doubling from 10 ms to 200 ms.
#[derive(Default)]
pub(crate) struct Backoff {
    pause: Duration,
}

impl Backoff {
    const FIRST: Duration = Duration::from_millis(10);
    const LONGEST: Duration = Duration::from_millis(200);

    /// How long to wait before the next try.
    pub(crate) fn next(&mut self) -> Duration {
        let pause = self.pause;
        self.pause = (pause * 2).clamp(Self::FIRST, Self::LONGEST);
        pause
    }

    /// A server has answered that it cannot serve: asking it again at once is no use.
    pub(crate) fn refused(&mut self) {
        self.pause = self.pause.max(Self::FIRST);
    }
}

/// A request under way: its answer will come here.
pub(crate) struct Ticket {
    pub(crate) reply: oneshot::Receiver<Reply>,
    connection: Arc<Connection>,
    pub(crate) sent_at: Instant,
}

impl Ticket {
    /// Whether an answer is here.
    pub(crate) fn is_ready(&self) -> bool {
        !self.reply.is_empty()
    }

    /// The connection has been silent for too long, and counts as broken.
    pub(crate) fn give_up(&self, patience: Duration) -> Lost {
        self.connection
            .lose(&format!("no answer within {patience:?}"))
    }
}

/// Why a connection is not there, or a frame did not leave.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Trying again may help; nothing was taken.
    Transient(String),
    /// Trying again does not help.
    Fatal(ClientError),
}

pub(crate) struct Link {
    pub(crate) server: ServerAddress,
    /// The instance whose rows the caller relies on; 0 until the first handshake if the
    /// routing does not say.
    instance: AtomicU64,
    options: Arc<ClientOptions>,
    buffers: Arc<BufferPool>,
    connection: tokio::sync::Mutex<Option<Arc<Connection>>>,
}

impl Link {
    pub(crate) fn new(
        server: &ServerAddress,
        options: Arc<ClientOptions>,
        buffers: Arc<BufferPool>,
    ) -> Self {
        Self {
            server: server.clone(),
            instance: AtomicU64::new(server.instance),
            options,
            buffers,
            connection: tokio::sync::Mutex::default(),
        }
    }

    pub(crate) fn address(&self) -> &str {
        &self.server.address
    }

    /// Whether it leads to this process.
    pub(crate) fn leads_to(&self, server: &ServerAddress) -> bool {
        self.server.instance == server.instance && self.server.address == server.address
    }

    fn state_lost(&self) -> ClientError {
        ClientError::StateLost {
            reason: format!(
                "{}: the pserver was restarted and lost its rows; there is no other copy",
                self.server.name()
            ),
        }
    }

    /// The connection, if one is open and no caller is opening it.
    pub(crate) fn open_connection(&self) -> Option<Arc<Connection>> {
        let connection = self.connection.try_lock().ok()?.clone()?;
        connection.is_open().then_some(connection)
    }

    /// Forget the connection.
    pub(crate) async fn close(&self) {
        self.connection.lock().await.take();
    }

    /// A guard to keep while a request is under way.
    pub(crate) fn ticket(
        connection: Arc<Connection>,
        sent: Result<oneshot::Receiver<Reply>, Lost>,
    ) -> Ticket {
        Ticket {
            reply: sent.unwrap_or_else(already_lost),
            connection,
            sent_at: Instant::now(),
        }
    }

    pub(crate) fn stall_timeout(&self) -> Duration {
        self.options.stall_timeout
    }

    /// An open connection: the one that is there, or a new one, tried once.
    pub(crate) async fn connection(&self) -> Result<Arc<Connection>, Failure> {
        match self.connect_once().await {
            Ok(connection) => Ok(connection),
            Err(OpenError::Refused(error)) => Err(Failure::Fatal(self.named(error))),
            Err(OpenError::Transient(reason)) => Err(Failure::Transient(reason)),
        }
    }

    async fn connect_once(&self) -> Result<Arc<Connection>, OpenError> {
        let mut slot = self.connection.lock().await;
        if let Some(connection) = slot.as_ref().filter(|connection| connection.is_open()) {
            return Ok(Arc::clone(connection));
        }
        let opening = Connection::open(self.address(), &self.options, &self.buffers);
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
        } else if expected != instance && self.server.instance == 0 {
            // Without a routing table only the instance tells: the rows that were there are gone.
            return Err(OpenError::Refused(self.state_lost()));
        } else if expected != instance {
            return Err(OpenError::Transient(format!(
                "another process (instance {instance}, not {expected}) answers at that address"
            )));
        }
        let connection = Arc::new(connection);
        *slot = Some(Arc::clone(&connection));
        Ok(connection)
    }

    /// Errors made below do not know the address.
    fn named(&self, error: ClientError) -> ClientError {
        match error {
            ClientError::Protocol { reason, .. } => ClientError::Protocol {
                address: self.address().into(),
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
                    refused: false,
                })
            }
            Ok(frame) => frame,
        };
        if frame.header.opcode == wanted {
            return Ok(Answer::Frame(frame));
        }
        let protocol = |reason: String| ClientError::Protocol {
            address: self.address().into(),
            reason,
        };
        if frame.header.opcode != Opcode::Error {
            return Err(protocol(format!(
                "{:?} came instead of {wanted:?}",
                frame.header.opcode
            )));
        }
        match refusal_of(self.address(), &frame).map_err(|error| protocol(error.to_string()))? {
            ClientError::Refused {
                code,
                retry_safe,
                message,
                ..
            } if passes_by_itself(code, retry_safe) => Ok(Answer::Again {
                reason: message,
                not_applied: matches!(code, code::NOT_MASTER | code::STOPPING | code::NOT_READY),
                refused: true,
            }),
            error => Err(error),
        }
    }
}

/// What became of one try of a request.
pub(crate) enum Answer {
    Frame(Frame),
    Again {
        reason: String,
        not_applied: bool,
        /// Whether the server itself refused.
        refused: bool,
    },
}

/// Whether to try again, because a slot moves in, another attempt finishes, or the server
/// restarts. An error of a later release says itself whether a retry is safe. A memory limit
/// does not pass by waiting.
fn passes_by_itself(code: u16, retry_safe: bool) -> bool {
    match code {
        code::NOT_MASTER
        | code::STOPPING
        | code::IN_FLIGHT
        | code::INCOMPLETE
        | code::NOT_READY
        | code::ROLLED_BACK => true,
        1..=code::ROLLED_BACK => false,
        _ => retry_safe,
    }
}

fn already_lost(lost: Lost) -> oneshot::Receiver<Reply> {
    let (sender, receiver) = oneshot::channel();
    // The receiver is alive: it is returned.
    let _ = sender.send(Err(lost));
    receiver
}
