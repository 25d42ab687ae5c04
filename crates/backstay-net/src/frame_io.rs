//! Whole frames from and to a byte stream, with limits on size and on time.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use backstay_core::error::Refusal;
use backstay_core::wire::peer::Encoded;
use backstay_core::wire::{Header, Limits, HEADER_BYTES};
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::timeout;

use crate::memory::{Held, Memory, Part};

/// Bytes asked from the socket at once while headers are awaited.
const READ_AHEAD_BYTES: usize = 64 * 1024;
/// Bytes of a body allocated before any of it has come, whatever length it announces.
const FIRST_ALLOCATION_BYTES: usize = 1024 * 1024;

/// A large body waits for memory so many times for so long, and then it is read.
const MEMORY_LOOKS: u32 = 20;
const MEMORY_PAUSE: Duration = Duration::from_millis(5);

/// A peer that has sent nothing for so long after the last frame has nothing more on its way.
const DRAIN_SILENCE: Duration = Duration::from_millis(250);
/// The longest time that a closing connection stays open for its peer.
const DRAIN_TIME: Duration = Duration::from_secs(2);

/// Why no frame came.
#[derive(Debug, Error)]
pub enum ReadError {
    /// The bytes are not a frame that is accepted here.
    #[error("{0}")]
    Refused(#[from] Refusal),
    /// A sound header announces a larger frame than is accepted here.
    #[error("{refusal}")]
    TooLarge {
        /// The frame's number: its sender can be told which one it was.
        request_id: u64,
        /// How large, and the limit.
        refusal: Refusal,
    },
    /// The peer closed in the middle of a frame.
    #[error("the connection was closed in the middle of a frame")]
    Truncated,
    /// A frame began, and its rest did not come in time.
    #[error("a frame began, but its rest did not come within {0:?}")]
    Stalled(Duration),
    /// The socket failed.
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// A frame as it came.
#[derive(Debug)]
pub struct Frame {
    /// Its head.
    pub header: Header,
    /// Its meta part.
    pub meta: Vec<u8>,
    /// Its body in an aligned buffer, which may be longer than the body.
    pub body: Vec<u64>,
    /// The body's memory, until something else counts it.
    pub held: Held,
}

impl Frame {
    /// The body's bytes.
    pub fn body_bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.body)[..self.header.body_bytes as usize]
    }
}

/// Reads frames; keeps what it read ahead.
#[derive(Debug)]
pub struct FrameReader<R> {
    inner: R,
    ahead: Box<[u8]>,
    start: usize,
    end: usize,
    stall: Duration,
    memory: Arc<Memory>,
    /// What was read ahead.
    _held: Held,
}

impl<R: AsyncRead + Unpin> FrameReader<R> {
    /// A reader that gives a frame `stall` from its first byte to its last.
    pub fn new(inner: R, stall: Duration) -> Self {
        Self::counted(inner, stall, &Arc::default())
    }

    /// The same, on this account.
    pub fn counted(inner: R, stall: Duration, memory: &Arc<Memory>) -> Self {
        let mut held = Held::new(memory, Part::Buffers);
        held.set(READ_AHEAD_BYTES);
        Self {
            memory: Arc::clone(memory),
            _held: held,
            inner,
            ahead: vec![0; READ_AHEAD_BYTES].into_boxed_slice(),
            start: 0,
            end: 0,
            stall,
        }
    }

    /// The next frame; `None` if the peer closed between frames. `spare` is used for the body.
    ///
    /// Waits without limit for a frame to begin. Losing this future loses what it has read.
    pub async fn next(
        &mut self,
        limits: &Limits,
        spare: Vec<u64>,
    ) -> Result<Option<Frame>, ReadError> {
        let mut held = Held::new(&self.memory, Part::Buffers);
        held.set(spare.capacity() * 8);
        if self.start == self.end && self.fill().await? == 0 {
            return Ok(None);
        }
        match timeout(self.stall, self.rest(limits, spare, held)).await {
            Ok(frame) => frame.map(Some),
            Err(_) => Err(ReadError::Stalled(self.stall)),
        }
    }

    async fn rest(
        &mut self,
        limits: &Limits,
        mut body: Vec<u64>,
        mut held: Held,
    ) -> Result<Frame, ReadError> {
        let mut head = [0; HEADER_BYTES];
        self.copy(&mut head).await?;
        let header = Header::decode(&head, limits).map_err(|refusal| match refusal {
            // Magic and version were right, so the number is where it belongs.
            Refusal::LimitExceeded(_) => ReadError::TooLarge {
                request_id: head[8..16]
                    .iter()
                    .rev()
                    .fold(0, |id, &byte| id << 8 | u64::from(byte)),
                refusal,
            },
            refusal => refusal.into(),
        })?;
        let mut meta = vec![0; header.meta_bytes as usize];
        self.copy(&mut meta).await?;
        let bytes = usize::try_from(header.body_bytes).map_err(|_| {
            Refusal::LimitExceeded("the frame does not fit this machine's memory".into())
        })?;
        let (mut have, mut has_waited) = (0, false);
        while have < bytes {
            // Memory follows the bytes that come, not those announced.
            let goal = bytes.min((have * 4).max(FIRST_ALLOCATION_BYTES));
            if body.len() * 8 < goal {
                if goal > FIRST_ALLOCATION_BYTES && !has_waited {
                    wait_for_memory(&self.memory).await;
                    has_waited = true;
                }
                body.resize(goal.div_ceil(8), 0);
                held.set(body.capacity() * 8);
            }
            let goal = bytes.min(body.len() * 8);
            self.copy(&mut bytemuck::cast_slice_mut(&mut body)[have..goal])
                .await?;
            have = goal;
        }
        let frame = Frame {
            header,
            meta,
            body,
            held,
        };
        frame.header.verify(&frame.meta, frame.body_bytes())?;
        Ok(frame)
    }

    /// Fill `out`, first from what was read ahead.
    async fn copy(&mut self, out: &mut [u8]) -> Result<(), ReadError> {
        let mut have = 0;
        while have < out.len() {
            if self.start < self.end {
                let count = (self.end - self.start).min(out.len() - have);
                out[have..have + count]
                    .copy_from_slice(&self.ahead[self.start..self.start + count]);
                self.start += count;
                have += count;
            } else {
                // Large parts go straight to their place.
                let count = if out.len() - have >= READ_AHEAD_BYTES {
                    let count = self.inner.read(&mut out[have..]).await?;
                    have += count;
                    count
                } else {
                    self.fill().await?
                };
                if count == 0 {
                    return Err(ReadError::Truncated);
                }
            }
        }
        Ok(())
    }

    /// See [`drain`].
    pub(crate) async fn drain(&mut self) {
        drain(&mut self.inner).await;
    }

    async fn fill(&mut self) -> io::Result<usize> {
        self.start = 0;
        self.end = 0;
        self.end = self.inner.read(&mut self.ahead).await?;
        Ok(self.end)
    }
}

/// Wait for a while before a large body is read, as long as memory is short.
async fn wait_for_memory(memory: &Memory) {
    for _ in 0..MEMORY_LOOKS {
        if !memory.is_short() {
            return;
        }
        tokio::time::sleep(MEMORY_PAUSE).await;
    }
}

/// Read and drop what a peer still sends, until it closes or falls silent; limited in time.
///
/// The server does this before it closes a connection: if it closed over unread bytes, TCP would
/// drop what is still on its way to the peer, the last frame included.
pub(crate) async fn drain<R: AsyncRead + Unpin>(reader: &mut R) {
    let mut scratch = vec![0; READ_AHEAD_BYTES];
    let draining = async {
        while matches!(
            timeout(DRAIN_SILENCE, reader.read(&mut scratch)).await,
            Ok(Ok(1..))
        ) {}
    };
    // A peer that is not done by then loses what it has not read.
    let _ = timeout(DRAIN_TIME, draining).await;
}

/// Lay out and write a frame of few bytes.
pub async fn write_frame<W: AsyncWrite + Unpin>(
    writer: &mut W,
    opcode: backstay_core::wire::Opcode,
    request_id: u64,
    meta: &[u8],
    body: &[u8],
) -> io::Result<()> {
    let header = Header::plain(opcode, request_id, meta.len(), body.len());
    let mut bytes = Vec::with_capacity(HEADER_BYTES + meta.len() + body.len());
    bytes.extend_from_slice(&header.encode());
    bytes.extend_from_slice(meta);
    bytes.extend_from_slice(body);
    writer.write_all(&bytes).await?;
    writer.flush().await
}

/// Frames up to this size are put together first, and leave in one write.
const ONE_WRITE_BYTES: usize = 64 * 1024;

/// Write a message between servers; the values of a push are written from where they lie.
pub(crate) async fn write_encoded<W: AsyncWrite + Unpin>(
    writer: &mut W,
    encoded: &Encoded,
) -> io::Result<()> {
    let mut pieces: Vec<&[u8]> = vec![&encoded.head];
    if let Some((transaction, ranges)) = &encoded.push {
        let (keys, values) = (transaction.batch.keys(), transaction.batch.values());
        let elements = values.len().checked_div(keys.len()).unwrap_or(0);
        for range in ranges {
            pieces.push(bytemuck::cast_slice(&keys[range.clone()]));
        }
        for range in ranges {
            let values = &values[range.start * elements..range.end * elements];
            pieces.push(bytemuck::cast_slice(values));
        }
    }
    pieces.push(&encoded.tail);
    let mut together = Vec::new();
    for piece in pieces {
        if piece.len() >= ONE_WRITE_BYTES {
            if !together.is_empty() {
                writer.write_all(&together).await?;
                together.clear();
            }
            writer.write_all(piece).await?;
        } else {
            together.extend_from_slice(piece);
        }
    }
    writer.write_all(&together).await?;
    writer.flush().await
}
