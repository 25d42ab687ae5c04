//! One connection: handshake, then a client's requests or a master's orders.
//!
//! A session works on one request at a time and reads the next only then. So the requests of a
//! connection apply in order, a slow server slows its clients (their bytes wait in the
//! socket), and a client that needs more than one core opens more connections. Pushes that wait
//! for backups wait side by side; a read waits for the pushes before it. The requests
//! themselves are worked on in [`crate::handler`].

use std::pin::pin;
use std::sync::Arc;

use backstay_core::error::Refusal;
use backstay_core::replication::Message;
use backstay_core::wire::peer::{self, PeerFrame, Purpose};
use backstay_core::wire::{Hello, HelloReply, Limits, Opcode, HEADER_BYTES};
use subtle::ConstantTimeEq;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::sync::watch;
use tokio::time::timeout;
use tracing::{debug, warn};

use crate::frame_io::{write_encoded, write_frame, Frame, FrameReader, ReadError};
use crate::handler::{check_no_body, RequestHandler};
use crate::shared::{stop_signal, Shared};
use crate::stats::add;

/// Limits of a frame before the handshake: small frames only.
const HANDSHAKE_LIMITS: Limits = Limits {
    max_frame_bytes: 4096,
    max_keys: 0,
};

/// A connection: what comes in, and who works on it.
pub(crate) struct Session<R, W> {
    reader: FrameReader<R>,
    handler: RequestHandler<W>,
}

impl<R: AsyncRead + Unpin, W: AsyncWrite + Unpin> Session<R, W> {
    pub(crate) fn new(shared: Arc<Shared>, reader: R, writer: W) -> Self {
        let stall = shared.options.stall_timeout;
        Self {
            reader: FrameReader::counted(reader, stall, shared.store.memory()),
            handler: RequestHandler::new(shared, writer),
        }
    }

    /// Serve until the client goes, breaks the protocol, or `stopping` turns true.
    pub(crate) async fn run(&mut self, peer: &str, mut stopping: watch::Receiver<bool>) {
        let allowed = self.handler.shared.options.handshake_timeout;
        let greeted = tokio::select! {
            biased;
            // Close without an answer: a client without a handshake tries again elsewhere.
            () = stop_signal(&mut stopping) => return,
            greeted = timeout(allowed, self.handshake()) => greeted,
        };
        match greeted {
            Ok(Ok(true)) => {}
            Ok(Ok(false)) => return,
            Ok(Err(error)) => return self.close_broken(peer, &error).await,
            Err(_) => {
                debug!(peer, "no handshake within {allowed:?}");
                return;
            }
        }
        loop {
            match self.next_frame(&mut stopping).await {
                Ok(Next::Frame(frame)) if frame.header.opcode == Opcode::Peer => {
                    return self.serve_peer(peer, frame, stopping).await;
                }
                Ok(Next::Frame(frame)) => {
                    let bytes = HEADER_BYTES + frame.meta.len() + frame.header.body_bytes as usize;
                    add(&self.handler.shared.counters.bytes_received, bytes as u64);
                    if let Err(error) = self.handler.serve(frame).await {
                        debug!(peer, %error, "connection lost while answering");
                        return;
                    }
                    self.handler.let_go_of_large_buffers();
                    let pause = self.handler.take_pause();
                    if !pause.is_zero() {
                        tokio::time::sleep(pause).await;
                    }
                }
                Ok(Next::Stop) => return self.say_goodbye().await,
                Ok(Next::Closed) => return,
                Err(error) => return self.close_broken(peer, &error).await,
            }
        }
    }

    /// The next request; meanwhile, answers to pushes that waited for backups are sent.
    async fn next_frame(
        &mut self,
        stopping: &mut watch::Receiver<bool>,
    ) -> Result<Next, ReadError> {
        let limits = self.handler.shared.options.limits;
        let spare = std::mem::take(&mut self.handler.request);
        self.handler.count_buffers();
        let mut next = pin!(self.reader.next(&limits, spare));
        loop {
            let waits = self.handler.has_later();
            tokio::select! {
                biased;
                () = stop_signal(stopping) => return Ok(Next::Stop),
                outcome = self.handler.next_later(), if waits => {
                    self.handler.answer_later(outcome).await?;
                }
                frame = &mut next => return Ok(frame?.map_or(Next::Closed, Next::Frame)),
            }
        }
    }

    /// Say `GoAway`: a request without an answer was not taken, and the client may repeat it.
    async fn say_goodbye(&mut self) {
        let stall = self.handler.shared.options.stall_timeout;
        let farewell = async {
            self.handler.answer_all().await?;
            write_frame(&mut self.handler.writer, Opcode::GoAway, 0, &[], &[]).await
        };
        if let Ok(Ok(())) = timeout(stall, farewell).await {
            self.close().await;
        }
    }

    /// Close so that the peer can still read what was sent before.
    async fn close(&mut self) {
        let _ = self.handler.writer.shutdown().await;
        self.reader.drain().await;
    }

    /// Say why, as far as the peer still listens, and close: the stream of frames is lost.
    async fn close_broken(&mut self, peer: &str, error: &ReadError) {
        add(&self.handler.shared.counters.frames_broken, 1);
        warn!(peer, %error, "closing a connection");
        match error {
            ReadError::Refused(refusal) => self.handler.error_reply(0, refusal),
            ReadError::TooLarge {
                request_id,
                refusal,
            } => self.handler.error_reply(*request_id, refusal),
            ReadError::Truncated | ReadError::Stalled(_) | ReadError::Io(_) => return,
        }
        match self.handler.flush_reply().await {
            Ok(()) => self.close().await,
            Err(error) => debug!(peer, %error, "the reason could not be delivered"),
        }
    }

    /// Serve a master of slots that are replicated here, until it disconnects.
    async fn serve_peer(&mut self, peer: &str, first: Frame, mut stopping: watch::Receiver<bool>) {
        let shared = Arc::clone(&self.handler.shared);
        let mut limits = shared.options.limits;
        limits.max_frame_bytes += peer::MAX_PLACES_BYTES;
        let (master, connection, purpose) = match peer_frame(&shared, first) {
            Ok(PeerFrame::Introduction(who)) => (who.instance, who.connection, who.purpose),
            Ok(PeerFrame::Message(_)) => {
                let refusal = Refusal::Protocol("a server must introduce itself first".into());
                return self.close_broken(peer, &refusal.into()).await;
            }
            Err(refusal) => return self.close_broken(peer, &refusal.into()).await,
        };
        let orders = purpose == Purpose::Orders;
        if orders && !shared.replicator.master_connected(master, connection) {
            debug!(peer, master, connection, "the master has connected anew");
            return;
        }
        debug!(peer, master, connection, ?purpose, "a master has connected");
        let mut answers = Vec::new();
        loop {
            let frame = tokio::select! {
                biased;
                () = stop_signal(&mut stopping) => return,
                frame = self.reader.next(&limits, Vec::new()) => frame,
            };
            let message = match frame {
                Ok(Some(frame)) => {
                    let bytes = HEADER_BYTES + frame.meta.len() + frame.header.body_bytes as usize;
                    add(&shared.counters.peer_bytes_received, bytes as u64);
                    peer_frame(&shared, frame)
                }
                Ok(None) => return,
                Err(error) => return self.close_broken(peer, &error).await,
            };
            match message {
                Ok(PeerFrame::Message(message)) => {
                    if matches!(message, Message::Heartbeat { .. }) == orders {
                        let reason = format!("a message on a connection for {purpose:?}");
                        return self
                            .close_broken(peer, &Refusal::Protocol(reason).into())
                            .await;
                    }
                    let replicator = &shared.replicator;
                    if !replicator.obey(master, connection, message, &mut answers) {
                        debug!(peer, master, "the master has connected anew");
                        return;
                    }
                }
                Ok(PeerFrame::Introduction(_)) => {
                    let refusal = Refusal::Protocol("a second introduction".into());
                    return self.close_broken(peer, &refusal.into()).await;
                }
                Err(refusal) => return self.close_broken(peer, &refusal.into()).await,
            }
            for answer in answers.drain(..) {
                let encoded = peer::encode(&answer);
                add(&shared.counters.peer_bytes_sent, encoded.bytes() as u64);
                let sent = write_encoded(&mut self.handler.writer, &encoded);
                match timeout(shared.options.stall_timeout, sent).await {
                    Ok(Ok(())) => {}
                    Ok(Err(_)) | Err(_) => return,
                }
            }
            // After the answer, because the master waits for the answer only.
            shared.replicator.work();
        }
    }

    /// Whether the client may go on.
    async fn handshake(&mut self) -> Result<bool, ReadError> {
        let Some(frame) = self.reader.next(&HANDSHAKE_LIMITS, Vec::new()).await? else {
            return Ok(false);
        };
        if frame.header.opcode != Opcode::Hello {
            return Err(Refusal::Protocol("the first frame must be a Hello".into()).into());
        }
        check_no_body(&frame)?;
        let hello = Hello::decode(&frame.meta)?;
        let options = &self.handler.shared.options;
        // Before anything is said about this cluster.
        let token = options.token.as_deref().unwrap_or_default();
        if !bool::from(hello.token.as_bytes().ct_eq(token.as_bytes())) {
            let reason = if hello.token.is_empty() {
                "a token is needed: set BACKSTAY_TOKEN or the setting token"
            } else {
                "the token is wrong: it is not the one of this cluster"
            };
            return Err(Refusal::Unauthenticated(reason.into()).into());
        }
        if hello.cluster_id != options.cluster_id {
            return Err(Refusal::Unauthenticated(format!(
                "this is cluster {:?}, not {:?}: check the endpoint",
                options.cluster_id, hello.cluster_id
            ))
            .into());
        }
        debug!(client = hello.client_name, "a client has connected");
        let reply = HelloReply {
            instance: options.instance,
            max_frame_bytes: options.limits.max_frame_bytes,
            max_keys: options.limits.max_keys,
            slot_count: self.handler.shared.store.space().count(),
            routing_version: self.handler.shared.store.routing_version(),
            node_id: options.node_id.clone(),
        };
        write_frame(
            &mut self.handler.writer,
            Opcode::HelloReply,
            frame.header.request_id,
            &reply.encode(),
            &[],
        )
        .await?;
        Ok(true)
    }
}

/// What comes next on a connection.
enum Next {
    Frame(Frame),
    Closed,
    Stop,
}

fn peer_frame(shared: &Shared, frame: Frame) -> Result<PeerFrame, Refusal> {
    if frame.header.opcode != Opcode::Peer {
        let reason = format!("{:?} among messages between servers", frame.header.opcode);
        return Err(Refusal::Protocol(reason));
    }
    let store = shared.replicator.store();
    let bytes = frame.header.body_bytes as usize;
    let mut decoded = peer::decode(store.space(), &frame.meta, frame.body, bytes)?;
    drop(frame.held);
    if let PeerFrame::Message(Message::Prepare { transaction, .. }) = &mut decoded {
        if let Some(transaction) = Arc::get_mut(transaction) {
            shared.replicator.make_room(transaction);
        }
    }
    Ok(decoded)
}
