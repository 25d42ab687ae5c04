//! One connection: handshake, then a client's requests or a master's orders.
//!
//! A session works on one request at a time and reads the next only then. So the requests of a
//! connection apply in order, a slow server slows its clients (their bytes wait in the
//! socket), and a client that needs more than one core opens more connections. Pushes that wait
//! for backups wait side by side; a read waits for the pushes before it. The requests
//! themselves are worked on in [`crate::desk`].

use std::pin::pin;
use std::sync::Arc;

use backstay_core::error::Refusal;
use backstay_core::replication::Message;
<<<<<<< HEAD
use backstay_core::stream::TransactionId;
use backstay_core::transaction::{Batch, Transaction};
=======
>>>>>>> main
use backstay_core::wire::peer::{self, PeerFrame};
use backstay_core::wire::{Hello, HelloReply, Limits, Opcode, HEADER_BYTES};
use subtle::ConstantTimeEq;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::sync::watch;
use tokio::time::timeout;
use tracing::{debug, warn};

<<<<<<< HEAD
use crate::events::push_event;
=======
use crate::desk::{check_no_body, Desk};
>>>>>>> main
use crate::frame_io::{write_encoded, write_frame, Frame, FrameReader, ReadError};
use crate::server::{stop_signal, Shared};
use crate::stats::add;

/// What a frame may be before its sender is known: nothing bulky.
const HANDSHAKE_LIMITS: Limits = Limits {
    max_frame_bytes: 4096,
    max_keys: 0,
};

/// A connection: what comes in, and who works on it.
pub(crate) struct Session<R, W> {
    reader: FrameReader<R>,
    desk: Desk<W>,
}

<<<<<<< HEAD
/// Works on requests and answers them.
struct Desk<W> {
    shared: Arc<Shared>,
    writer: W,
    /// Buffers kept between requests, so that large ones are not mapped anew each time.
    request: Vec<u64>,
    reply: Vec<u64>,
    /// Bytes of `reply` that are to be sent.
    reply_bytes: usize,
    /// Pushes that wait for backups, in the order they came.
    later: VecDeque<Later>,
}

/// A push that waits for backups.
struct Later {
    request_id: u64,
    id: TransactionId,
    /// Unique keys of a push; none for the end of a stream.
    keys: Option<usize>,
    outcome: oneshot::Receiver<Outcome>,
}

=======
>>>>>>> main
impl<R: AsyncRead + Unpin, W: AsyncWrite + Unpin> Session<R, W> {
    pub(crate) fn new(shared: Arc<Shared>, reader: R, writer: W) -> Self {
        let stall = shared.options.stall_timeout;
        Self {
            reader: FrameReader::new(reader, stall),
            desk: Desk::new(shared, writer),
        }
    }

    /// Serve until the client goes, breaks the protocol, or `stopping` turns true.
    pub(crate) async fn run(&mut self, peer: &str, mut stopping: watch::Receiver<bool>) {
        let allowed = self.desk.shared.options.handshake_timeout;
        let greeted = tokio::select! {
            biased;
            // Without a word: a client that has not been greeted tries again elsewhere.
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
                    add(&self.desk.shared.counters.bytes_received, bytes as u64);
                    if let Err(error) = self.desk.serve(frame).await {
                        debug!(peer, %error, "connection lost while answering");
                        return;
                    }
                    self.desk.let_go_of_large_buffers();
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
        let limits = self.desk.shared.options.limits;
        let spare = std::mem::take(&mut self.desk.request);
        let mut next = pin!(self.reader.next(&limits, spare));
        loop {
            let waits = self.desk.has_later();
            tokio::select! {
                biased;
                () = stop_signal(stopping) => return Ok(Next::Stop),
                outcome = self.desk.next_later(), if waits => {
                    self.desk.answer_later(outcome).await?;
                }
                frame = &mut next => return Ok(frame?.map_or(Next::Closed, Next::Frame)),
            }
        }
    }

    /// What was not answered was not taken: the client may repeat it elsewhere.
    async fn say_goodbye(&mut self) {
        let stall = self.desk.shared.options.stall_timeout;
        let farewell = async {
            self.desk.answer_all().await?;
            write_frame(&mut self.desk.writer, Opcode::GoAway, 0, &[], &[]).await
        };
        if let Ok(Ok(())) = timeout(stall, farewell).await {
            self.close().await;
        }
    }

    /// Close so that the peer can still read what was sent before.
    async fn close(&mut self) {
        let _ = self.desk.writer.shutdown().await;
        self.reader.drain().await;
    }

    /// Say why, as far as the peer still listens, and close: the stream of frames is lost.
    async fn close_broken(&mut self, peer: &str, error: &ReadError) {
        add(&self.desk.shared.counters.frames_broken, 1);
        warn!(peer, %error, "closing a connection");
        match error {
            ReadError::Refused(refusal) => self.desk.error_reply(0, refusal),
            ReadError::TooLarge {
                request_id,
                refusal,
            } => self.desk.error_reply(*request_id, refusal),
            ReadError::Truncated | ReadError::Stalled(_) | ReadError::Io(_) => return,
        }
        match self.desk.flush_reply().await {
            Ok(()) => self.close().await,
            Err(error) => debug!(peer, %error, "the reason could not be delivered"),
        }
    }

    /// A master of slots that are replicated here: do what it says, until it goes.
    async fn serve_peer(&mut self, peer: &str, first: Frame, mut stopping: watch::Receiver<bool>) {
        let shared = Arc::clone(&self.desk.shared);
        let mut limits = shared.options.limits;
        limits.max_frame_bytes += peer::MAX_PLACES_BYTES;
        let master = match peer_frame(&shared, first) {
            Ok(PeerFrame::Introduction(who)) => who.instance,
            Ok(PeerFrame::Message(_)) => {
                let refusal = Refusal::Protocol("a server must introduce itself first".into());
                return self.close_broken(peer, &refusal.into()).await;
            }
            Err(refusal) => return self.close_broken(peer, &refusal.into()).await,
        };
        debug!(peer, master, "a master has connected");
        let connection = shared.replicator.master_connected(master);
        let mut answers = Vec::new();
        loop {
            let frame = tokio::select! {
                biased;
                () = stop_signal(&mut stopping) => return,
                frame = self.reader.next(&limits, Vec::new()) => frame,
            };
            let message = match frame {
                Ok(Some(frame)) => {
<<<<<<< HEAD
                    let bytes = HEADER_BYTES + frame.meta.len() + frame.header.body_bytes as usize;
                    add(&shared.counters.peer_bytes_received, bytes as u64);
=======
                    add(
                        &shared.counters.peer_bytes_received,
                        frame.header.body_bytes,
                    );
>>>>>>> main
                    peer_frame(&shared, frame)
                }
                Ok(None) => return,
                Err(error) => return self.close_broken(peer, &error).await,
            };
            match message {
                Ok(PeerFrame::Message(message)) => {
                    let replicator = &shared.replicator;
                    if !replicator.obey(master, connection, message, &mut answers) {
                        debug!(peer, master, "the master has connected anew");
                        return;
                    }
                }
                Ok(PeerFrame::Introduction(_)) => {}
                Err(refusal) => return self.close_broken(peer, &refusal.into()).await,
            }
            for answer in answers.drain(..) {
                let encoded = peer::encode(&answer);
                add(&shared.counters.peer_bytes_sent, encoded.bytes() as u64);
                let sent = write_encoded(&mut self.desk.writer, &encoded);
                match timeout(shared.options.stall_timeout, sent).await {
                    Ok(Ok(())) => {}
                    Ok(Err(_)) | Err(_) => return,
                }
            }
            // After the answer: its master waits for that, and not for this.
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
        let options = &self.desk.shared.options;
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
            slot_count: self.desk.shared.store.space().count(),
            routing_version: self.desk.shared.store.routing_version(),
            node_id: options.node_id.clone(),
        };
        write_frame(
            &mut self.desk.writer,
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
    if let PeerFrame::Message(Message::Prepare { transaction, .. }) = &mut decoded {
        if let Some(transaction) = Arc::get_mut(transaction) {
            store.make_room(transaction);
        }
    }
    Ok(decoded)
}
<<<<<<< HEAD

impl<W: AsyncWrite + Unpin> Desk<W> {
    /// One huge request must not hold its memory for as long as the connection lives.
    fn let_go_of_large_buffers(&mut self) {
        for buffer in [&mut self.request, &mut self.reply] {
            if buffer.len() > KEPT_WORDS {
                *buffer = Vec::new();
            }
        }
    }

    /// The outcome of the oldest push that waits.
    async fn next_later(&mut self) -> Outcome {
        match self.later.front_mut() {
            Some(later) => (&mut later.outcome).await.unwrap_or(Err(Refusal::Stopping)),
            None => std::future::pending().await,
        }
    }

    async fn answer_later(&mut self, outcome: Outcome) -> std::io::Result<()> {
        let Some(later) = self.later.pop_front() else {
            return Ok(());
        };
        match &outcome {
            Ok(report) => {
                push_event!(later.id, "push answered", applied_slots = report.staged);
            }
            Err(refusal) => push_event!(later.id, "push refused", reason = %refusal),
        }
        match outcome {
            Ok(report) => match later.keys {
                Some(keys) => self.push_reply(later.request_id, keys, report),
                None => self.small_reply(Opcode::CloseStreamReply, later.request_id, &[], &[]),
            },
            Err(refusal) => {
                self.shared.counters.count_refusal(&refusal);
                self.error_reply(later.request_id, &refusal);
            }
        }
        self.flush_reply().await
    }

    /// Wait for the backups' word on everything that came before.
    async fn answer_all(&mut self) -> std::io::Result<()> {
        while !self.later.is_empty() {
            let outcome = self.next_later().await;
            self.answer_later(outcome).await?;
        }
        Ok(())
    }

    async fn serve(&mut self, frame: Frame) -> std::io::Result<()> {
        let id = frame.header.request_id;
        if frame.header.opcode != Opcode::Push {
            // Requests of a connection are worked on in order; pushes may wait side by side.
            self.answer_all().await?;
        }
        let outcome = match frame.header.opcode {
            Opcode::Pull => self.pull(frame).map(|()| true),
            Opcode::Push => self.push(frame),
            Opcode::CloseStream => self.close_stream(&frame),
            Opcode::Ping => self.ping(&frame).map(|()| true),
            opcode => Err(Refusal::Protocol(format!("{opcode:?} is not a request"))),
        };
        match outcome {
            Ok(true) => {}
            Ok(false) => return Ok(()),
            Err(refusal) => {
                self.shared.counters.count_refusal(&refusal);
                self.error_reply(id, &refusal);
            }
        }
        self.flush_reply().await
    }

    fn pull(&mut self, frame: Frame) -> Result<(), Refusal> {
        let meta = PullMeta::decode(&frame.meta)?;
        let count = self.check_keys(&frame, meta.key_count, 0)?;
        let elements = self.check_elements(meta.table, meta.row_elements)?;
        let limit = self.shared.options.limits.max_frame_bytes;
        let body_bytes = count as u64 * elements as u64 * 4;
        if body_bytes > limit {
            return Err(Refusal::LimitExceeded(format!(
                "the answer to {count} keys takes {body_bytes} bytes, the limit is {limit} (max_frame_bytes): pull fewer keys at once"
            )));
        }
        let words = PULL_REPLY_WORDS + (count * elements).div_ceil(2);
        if self.reply.len() < words {
            self.reply.resize(words, 0);
        }
        let header = Header::plain(
            Opcode::PullReply,
            frame.header.request_id,
            PullReply::BYTES,
            body_bytes as usize,
        );
        let routing_version = self.shared.store.routing_version();
        let reply = PullReply {
            routing_version,
            row_count: meta.key_count,
            row_elements: meta.row_elements,
        };
        let (head, rows) = self.reply.split_at_mut(PULL_REPLY_WORDS);
        let head: &mut [u8] = bytemuck::cast_slice_mut(head);
        head[..HEADER_BYTES].copy_from_slice(&header.encode());
        head[HEADER_BYTES..].copy_from_slice(&reply.encode());
        let rows = &mut bytemuck::cast_slice_mut(rows)[..count * elements];
        self.shared
            .replicator
            .pull(meta.table, &frame.body[..count], rows)?;
        self.reply_bytes = PULL_REPLY_WORDS * 8 + body_bytes as usize;
        add(&self.shared.counters.pulls, 1);
        add(&self.shared.counters.keys_pulled, count as u64);
        self.request = frame.body;
        Ok(())
    }

    /// Whether there is an answer already.
    fn push(&mut self, frame: Frame) -> Result<bool, Refusal> {
        let meta = PushMeta::decode(&frame.meta)?;
        let elements = self.check_elements(meta.table, meta.row_elements)?;
        let count = self.check_keys(&frame, meta.key_count, elements)?;
        let (store, request_id) = (&self.shared.store, frame.header.request_id);
        push_event!(meta.id, "push received", table = meta.table, keys = count);
        let batch = Batch::from_words(frame.body, count, count * elements)?;
        let mut transaction = Transaction::new(
            store.space(),
            meta.id,
            meta.floor,
            meta.table,
            meta.change,
            batch,
        )?;
        let taken = store
            .prepare(&mut transaction)
            .and_then(|()| self.shared.replicator.push(transaction))
            .inspect_err(|refusal| push_event!(meta.id, "push refused", reason = %refusal))?;
        match taken {
            (Answer::Now(report), buffer) => {
                push_event!(meta.id, "push answered", applied_slots = report.staged);
                self.request = buffer.unwrap_or_default();
                self.push_reply(request_id, count, report);
                Ok(true)
            }
            (Answer::Later(outcome), _) => {
                self.later.push_back(Later {
                    request_id,
                    id: meta.id,
                    keys: Some(count),
                    outcome,
                });
                Ok(false)
            }
        }
    }

    fn push_reply(&mut self, request_id: u64, keys: usize, report: StageReport) {
        let counters = &self.shared.counters;
        let repeated = report.staged == 0 && report.skipped > 0;
        add(
            if repeated {
                &counters.pushes_repeated
            } else {
                &counters.pushes_applied
            },
            1,
        );
        add(&counters.keys_pushed, keys as u64);
        let reply = PushReply {
            routing_version: self.shared.store.routing_version(),
            applied_slots: report.staged,
            skipped_slots: report.skipped,
        };
        self.small_reply(Opcode::PushReply, request_id, &reply.encode(), &[]);
    }

    fn ping(&mut self, frame: &Frame) -> Result<(), Refusal> {
        check_no_body(frame)?;
        if !frame.meta.is_empty() {
            let reason = format!("{} bytes too many in meta", frame.meta.len());
            return Err(Refusal::Protocol(reason));
        }
        self.small_reply(Opcode::Pong, frame.header.request_id, &[], &[]);
        Ok(())
    }

    /// Whether there is an answer already.
    fn close_stream(&mut self, frame: &Frame) -> Result<bool, Refusal> {
        check_no_body(frame)?;
        let stream = CloseStream::decode(&frame.meta)?.stream;
        let request_id = frame.header.request_id;
        let close = self.shared.store.close_of(stream);
        let id = close.id;
        match self.shared.replicator.push(close)?.0 {
            Answer::Now(_) => {
                self.small_reply(Opcode::CloseStreamReply, request_id, &[], &[]);
                Ok(true)
            }
            Answer::Later(outcome) => {
                self.later.push_back(Later {
                    request_id,
                    id,
                    keys: None,
                    outcome,
                });
                Ok(false)
            }
        }
    }

    /// The number of keys, if the body holds exactly that many keys and rows.
    fn check_keys(&self, frame: &Frame, keys: u32, elements: usize) -> Result<usize, Refusal> {
        let limit = self.shared.options.limits.max_keys;
        if keys > limit {
            return Err(Refusal::LimitExceeded(format!(
                "{keys} keys in one request, the limit is {limit} (max_keys_per_request): send smaller batches or raise it"
            )));
        }
        if keys == 0 {
            return Err(Refusal::InvalidRequest("a request without keys".into()));
        }
        let wanted = u64::from(keys) * (8 + elements as u64 * 4);
        if frame.header.body_bytes != wanted {
            return Err(Refusal::InvalidRequest(format!(
                "{keys} keys with {elements} values each take {wanted} bytes, the body has {}",
                frame.header.body_bytes
            )));
        }
        Ok(keys as usize)
    }

    fn check_elements(&self, table: u64, announced: u32) -> Result<usize, Refusal> {
        let spec = self.shared.store.spec(table)?;
        let elements = spec.row_elements();
        if elements != announced as usize {
            return Err(Refusal::InvalidRequest(format!(
                "rows of table {} have {elements} elements, not {announced}",
                spec.name
            )));
        }
        Ok(elements)
    }

    fn small_reply(&mut self, opcode: Opcode, request_id: u64, meta: &[u8], body: &[u8]) {
        let header = Header::plain(opcode, request_id, meta.len(), body.len());
        let bytes = HEADER_BYTES + meta.len() + body.len();
        if self.reply.len() * 8 < bytes {
            self.reply.resize(bytes.div_ceil(8), 0);
        }
        let out: &mut [u8] = bytemuck::cast_slice_mut(&mut self.reply);
        out[..HEADER_BYTES].copy_from_slice(&header.encode());
        out[HEADER_BYTES..HEADER_BYTES + meta.len()].copy_from_slice(meta);
        out[HEADER_BYTES + meta.len()..bytes].copy_from_slice(body);
        self.reply_bytes = bytes;
    }

    fn error_reply(&mut self, request_id: u64, refusal: &Refusal) {
        let meta = ErrorMeta {
            code: refusal.code(),
            retry_safe: refusal.retry_safe(),
            routing_version: self.shared.store.routing_version(),
        };
        let text = refusal.to_string();
        let text = cut_text(&text, MAX_ERROR_TEXT_BYTES);
        self.small_reply(Opcode::Error, request_id, &meta.encode(), text.as_bytes());
    }

    async fn flush_reply(&mut self) -> std::io::Result<()> {
        let bytes = &bytemuck::cast_slice::<u64, u8>(&self.reply)[..self.reply_bytes];
        add(&self.shared.counters.bytes_sent, bytes.len() as u64);
        let write = async {
            self.writer.write_all(bytes).await?;
            self.writer.flush().await
        };
        // A client that reads nothing must not hold a session (and a stop) for ever.
        timeout(self.shared.options.stall_timeout, write).await?
    }
}

/// Refuse a body where the kind of frame has none.
fn check_no_body(frame: &Frame) -> Result<(), Refusal> {
    if frame.header.body_bytes == 0 {
        return Ok(());
    }
    Err(Refusal::Protocol(format!(
        "a {:?} has no body, {} bytes came",
        frame.header.opcode, frame.header.body_bytes
    )))
}
=======
>>>>>>> main
