//! What is held of any bytes that reach a frame reader: no panic, no error of a wrong kind,
//! nothing accepted that does not encode back to what came.
//!
//! Shared by the seeded run in the ordinary tests (`fuzz_frame.rs`) and the coverage-guided one
//! (`fuzz/fuzz_targets/frame.rs`).

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use backstay_core::error::Refusal;
use backstay_core::wire::{
    CloseStream, ErrorMeta, Header, Hello, HelloReply, Limits, PullMeta, PullReply, PushMeta,
    PushReply, HEADER_BYTES, MAX_META_BYTES,
};
use backstay_net::frame_io::{Frame, FrameReader, ReadError};
use tokio::io::{AsyncRead, ReadBuf};
use tokio::runtime::{Builder, Runtime};

/// Large, so that announcing much and sending little is part of the game.
pub const LIMITS: Limits = Limits {
    max_frame_bytes: 1 << 30,
    max_keys: 1 << 20,
};

thread_local! {
    static RUNTIME: Runtime = Builder::new_current_thread()
        .enable_time()
        .build()
        .expect("a runtime without sockets needs nothing of the system");
}

/// Bytes that arrive a few at a time.
struct Trickle<'a> {
    rest: &'a [u8],
    at_once: usize,
}

impl AsyncRead for Trickle<'_> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        let count = self.rest.len().min(self.at_once).min(out.remaining());
        let (now, later) = self.rest.split_at(count);
        out.put_slice(now);
        self.rest = later;
        Poll::Ready(Ok(()))
    }
}

/// Run one input; panics if something does not hold. Returns how many whole frames it held.
pub fn check(input: &[u8]) -> usize {
    // The first byte says how the rest arrives.
    let Some((&pace, bytes)) = input.split_first() else {
        return 0;
    };
    check_decoders(&bytes[..bytes.len().min(MAX_META_BYTES as usize)]);
    let trickle = Trickle {
        rest: bytes,
        at_once: if pace == 0 { usize::MAX } else { pace.into() },
    };
    RUNTIME.with(|runtime| runtime.block_on(read_all(trickle, bytes)))
}

async fn read_all(trickle: Trickle<'_>, bytes: &[u8]) -> usize {
    let mut reader = FrameReader::new(trickle, Duration::from_secs(3600));
    let (mut frames, mut at, mut spare) = (0, 0, Vec::new());
    loop {
        match reader.next(&LIMITS, spare).await {
            Ok(Some(frame)) => {
                at += check_frame(&frame, &bytes[at..]);
                frames += 1;
                spare = frame.body;
            }
            Ok(None) => {
                assert_eq!(at, bytes.len(), "the end came in the middle");
                return frames;
            }
            Err(error) => {
                check_read_error(&error, &bytes[at..]);
                return frames;
            }
        }
    }
}

/// A frame that was accepted is made of exactly the bytes that came; returns their number.
fn check_frame(frame: &Frame, bytes: &[u8]) -> usize {
    let parts = [&frame.header.encode()[..], &frame.meta, frame.body_bytes()].concat();
    assert_eq!(frame.meta.len(), frame.header.meta_bytes as usize);
    assert_eq!(frame.body_bytes().len() as u64, frame.header.body_bytes);
    assert!(bytes.starts_with(&parts));
    frame
        .header
        .verify(&frame.meta, frame.body_bytes())
        .expect("the reader has verified it");
    check_decoders(&frame.meta);
    parts.len()
}

fn check_read_error(error: &ReadError, bytes: &[u8]) {
    match error {
        ReadError::Refused(Refusal::Protocol(_)) => {}
        ReadError::TooLarge {
            request_id,
            refusal: Refusal::LimitExceeded(_),
        } => assert_eq!(bytes[8..16], request_id.to_le_bytes()),
        ReadError::Truncated => {
            let head = bytes.first_chunk::<HEADER_BYTES>();
            let announced = head.and_then(|head| Header::decode(head, &LIMITS).ok());
            let wanted = announced.map_or(HEADER_BYTES as u64, |header| {
                HEADER_BYTES as u64 + u64::from(header.meta_bytes) + header.body_bytes
            });
            assert!((bytes.len() as u64) < wanted, "it was all there");
        }
        other => panic!("bytes in memory do not give {other:?}"),
    }
}

/// Every kind of meta part, whatever the opcode said.
fn check_decoders(meta: &[u8]) {
    fn check<T: PartialEq + std::fmt::Debug>(
        meta: &[u8],
        decode: impl Fn(&[u8]) -> Result<T, Refusal>,
        encode: impl Fn(&T) -> Vec<u8>,
    ) {
        match decode(meta) {
            Ok(value) => {
                let bytes = encode(&value);
                assert_eq!(bytes.len(), meta.len(), "{value:?}");
                assert_eq!(decode(&bytes).as_ref(), Ok(&value));
            }
            Err(Refusal::Protocol(_) | Refusal::InvalidRequest(_)) => {}
            Err(other) => panic!("a meta part gives {other:?}"),
        }
    }
    check(meta, Hello::decode, Hello::encode);
    check(meta, HelloReply::decode, HelloReply::encode);
    check(meta, PullMeta::decode, PullMeta::encode);
    check(meta, PullReply::decode, |reply| reply.encode().to_vec());
    check(meta, PushMeta::decode, PushMeta::encode);
    check(meta, PushReply::decode, PushReply::encode);
    check(meta, CloseStream::decode, CloseStream::encode);
    check(meta, ErrorMeta::decode, ErrorMeta::encode);
}
