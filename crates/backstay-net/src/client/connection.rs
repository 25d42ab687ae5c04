//! One connection to a server: many requests in flight, each answered by number.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

use backstay_core::error::Refusal;
use backstay_core::wire::{ErrorMeta, Hello, HelloReply, Limits, Opcode};
use parking_lot::Mutex;
use rustls_pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio_rustls::TlsConnector;
use tracing::debug;

use super::error::ClientError;
use super::options::ClientOptions;
use crate::buffers::BufferPool;
use crate::frame_io::{write_frame, Frame, FrameReader, ReadError};
use crate::socket;

type Reader = FrameReader<Box<dyn AsyncRead + Send + Unpin>>;
type Writer = Box<dyn AsyncWrite + Send + Unpin>;

/// Why a request got no answer.
#[derive(Debug, Clone)]
pub(crate) struct Lost {
    pub(crate) reason: String,
    /// The server said that it had not taken the request.
    pub(crate) not_taken: bool,
}

impl Lost {
    /// It is unknown whether the request was taken.
    pub(crate) fn unanswered(reason: &str) -> Self {
        Self {
            reason: reason.into(),
            not_taken: false,
        }
    }
}

pub(crate) type Reply = Result<Frame, Lost>;

#[derive(Default)]
struct Pending {
    waiting: BTreeMap<u64, oneshot::Sender<Reply>>,
    lost: Option<Lost>,
}

/// What the reader task and the callers share.
struct Shared {
    pending: Mutex<Pending>,
    /// Taken while a frame is written. If the write breaks off, it is not put back, because the
    /// stream of frames is lost then.
    writer: tokio::sync::Mutex<Option<Writer>>,
    buffers: Arc<BufferPool>,
}

pub(crate) struct Connection {
    pub(crate) hello: HelloReply,
    shared: Arc<Shared>,
    next_request: AtomicU64,
    reader: tokio::task::AbortHandle,
}

impl Connection {
    /// Connect and shake hands once, without retries.
    pub(crate) async fn open(
        address: &str,
        options: &ClientOptions,
        buffers: &Arc<BufferPool>,
    ) -> Result<Self, OpenError> {
        let stream = TcpStream::connect(address).await?;
        socket::prepare(&stream)?;
        let (reader, mut writer): (Box<dyn AsyncRead + Send + Unpin>, Writer) = match &options.tls {
            None => {
                let (reader, writer) = stream.into_split();
                (Box::new(reader), Box::new(writer))
            }
            Some(tls) => {
                let name = server_name(address)?;
                let stream = TlsConnector::from(Arc::clone(tls))
                    .connect(name, stream)
                    .await?;
                let (reader, writer) = tokio::io::split(stream);
                (Box::new(reader), Box::new(writer))
            }
        };
        let mut reader = FrameReader::new(reader, options.stall_timeout);
        let hello = Hello {
            cluster_id: options.cluster_id.clone(),
            token: options.token.clone().unwrap_or_default(),
            client_name: options.client_name.clone(),
        };
        write_frame(&mut writer, Opcode::Hello, 0, &hello.encode(), &[]).await?;
        let limits = Limits {
            max_frame_bytes: options.max_frame_bytes,
            max_keys: u32::MAX,
        };
        let frame = reader
            .next(&limits, Vec::new())
            .await?
            .ok_or(ReadError::Truncated)?;
        if frame.header.opcode == Opcode::Error {
            return Err(OpenError::of(address, &frame)?);
        }
        if frame.header.opcode != Opcode::HelloReply {
            return Err(
                Refusal::Protocol("the handshake was not answered by a HelloReply".into()).into(),
            );
        }
        let hello = HelloReply::decode(&frame.meta)?;
        let shared = Arc::new(Shared {
            pending: Mutex::default(),
            writer: tokio::sync::Mutex::new(Some(writer)),
            buffers: Arc::clone(buffers),
        });
        let task = tokio::spawn(read_replies(reader, limits, Arc::clone(&shared)));
        Ok(Self {
            hello,
            shared,
            next_request: AtomicU64::new(1),
            reader: task.abort_handle(),
        })
    }

    /// Whether it can still be used.
    pub(crate) fn is_open(&self) -> bool {
        self.shared.pending.lock().lost.is_none()
    }

    /// A number for the next request on this connection.
    pub(crate) fn next_request_id(&self) -> u64 {
        self.next_request.fetch_add(1, Ordering::Relaxed)
    }

    /// Write a whole frame; its answer will come through the receiver. Frames leave in the
    /// order of the calls. `None`: when its turn came, it was not allowed to leave.
    pub(crate) async fn send(
        &self,
        request_id: u64,
        frame: &[u8],
        may_leave: impl Fn() -> bool,
    ) -> Result<Option<oneshot::Receiver<Reply>>, Lost> {
        let mut slot = self.shared.writer.lock().await;
        if !may_leave() {
            return Ok(None);
        }
        let receiver = self.register(request_id)?;
        let Some(mut writer) = slot.take() else {
            return Err(self.lose("an earlier request was broken off"));
        };
        let written = async {
            writer.write_all(frame).await?;
            writer.flush().await
        };
        if let Err(error) = written.await {
            return Err(self.lose(&error.to_string()));
        }
        *slot = Some(writer);
        Ok(Some(receiver))
    }

    fn register(&self, request_id: u64) -> Result<oneshot::Receiver<Reply>, Lost> {
        let mut pending = self.shared.pending.lock();
        if let Some(lost) = &pending.lost {
            return Err(Lost {
                not_taken: true,
                ..lost.clone()
            });
        }
        let (sender, receiver) = oneshot::channel();
        pending.waiting.insert(request_id, sender);
        Ok(receiver)
    }

    /// Give the connection up.
    pub(crate) fn lose(&self, reason: &str) -> Lost {
        let lost = Lost {
            reason: reason.into(),
            not_taken: false,
        };
        self.shared.lose(&lost);
        lost
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

impl Shared {
    fn lose(&self, lost: &Lost) {
        let waiting = {
            let mut pending = self.pending.lock();
            pending.lost.get_or_insert_with(|| lost.clone());
            std::mem::take(&mut pending.waiting)
        };
        // Close our half, too, so that the server need not wait for it. A send under way
        // finds out by itself.
        if let Ok(mut writer) = self.writer.try_lock() {
            writer.take();
        }
        for (_, sender) in waiting {
            // A caller that gave up has dropped its receiver.
            let _ = sender.send(Err(lost.clone()));
        }
    }
}

async fn read_replies(mut reader: Reader, limits: Limits, shared: Arc<Shared>) {
    loop {
        let spare = shared.buffers.take();
        let lost = match reader.next(&limits, spare).await {
            Ok(Some(frame)) if frame.header.opcode == Opcode::GoAway => Lost {
                reason: "the server is shutting down".into(),
                not_taken: true,
            },
            Ok(Some(frame))
                if frame.header.request_id == 0 && frame.header.opcode == Opcode::Error =>
            {
                Lost {
                    reason: String::from_utf8_lossy(frame.body_bytes()).into_owned(),
                    not_taken: false,
                }
            }
            Ok(Some(frame)) => {
                let waiting = shared
                    .pending
                    .lock()
                    .waiting
                    .remove(&frame.header.request_id);
                if let Some(sender) = waiting {
                    // A caller that gave up has dropped its receiver.
                    let _ = sender.send(Ok(frame));
                } else {
                    debug!(
                        request = frame.header.request_id,
                        "an answer to no open request"
                    );
                }
                continue;
            }
            Ok(None) => Lost {
                reason: "the server closed the connection".into(),
                not_taken: false,
            },
            Err(error) => Lost {
                reason: error.to_string(),
                not_taken: false,
            },
        };
        return shared.lose(&lost);
    }
}

/// Why a connection could not be opened.
#[derive(Debug)]
pub(crate) enum OpenError {
    /// Trying again may help.
    Transient(String),
    /// The server refused us.
    Refused(ClientError),
}

impl OpenError {
    /// What an error frame in answer to the handshake means.
    fn of(address: &str, frame: &Frame) -> Result<Self, Refusal> {
        Ok(match refusal_of(address, frame)? {
            // For example too many connections: there may be room later.
            error @ ClientError::Refused {
                retry_safe: true, ..
            } => Self::Transient(error.to_string()),
            error => Self::Refused(error),
        })
    }
}

impl From<std::io::Error> for OpenError {
    fn from(error: std::io::Error) -> Self {
        // A wrong certificate does not become right by trying again.
        if error.kind() == std::io::ErrorKind::InvalidData {
            return Self::Refused(ClientError::Protocol {
                address: String::new(),
                reason: error.to_string(),
            });
        }
        Self::Transient(error.to_string())
    }
}

impl From<ReadError> for OpenError {
    fn from(error: ReadError) -> Self {
        match error {
            ReadError::Refused(refusal) => refusal.into(),
            ReadError::Io(error) => error.into(),
            other => Self::Transient(other.to_string()),
        }
    }
}

impl From<Refusal> for OpenError {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(ClientError::Protocol {
            address: String::new(),
            reason: refusal.to_string(),
        })
    }
}

/// The error in an error frame.
pub(crate) fn refusal_of(address: &str, frame: &Frame) -> Result<ClientError, Refusal> {
    let meta = ErrorMeta::decode(&frame.meta)?;
    let message = String::from_utf8_lossy(frame.body_bytes()).into_owned();
    Ok(ClientError::Refused {
        code: meta.code,
        retry_safe: meta.retry_safe,
        message,
        address: address.into(),
    })
}

fn server_name(address: &str) -> Result<ServerName<'static>, OpenError> {
    let host = address
        .rsplit_once(':')
        .map_or(address, |(host, _)| host)
        .trim_matches(['[', ']']);
    ServerName::try_from(host.to_owned()).map_err(|error| {
        OpenError::Refused(ClientError::Invalid(format!(
            "{host:?} is no name to check a certificate against: {error}"
        )))
    })
}
