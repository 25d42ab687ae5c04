//! A peer that shakes hands as a server does, and then does what a script says.

// Each test program uses a part of it.
#![allow(dead_code, clippy::unwrap_used)]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;

use backstay_core::wire::{
    ErrorMeta, Header, HelloReply, Opcode, PullMeta, PullReply, PushReply, HEADER_BYTES,
};

use crate::support::{frame, ANY, DIM, SLOTS};

/// A request as it came.
pub struct Asked {
    pub header: Header,
    pub meta: Vec<u8>,
    pub body: Vec<u8>,
}

/// What the peer does with a request.
#[derive(Debug, Clone)]
pub enum Act {
    /// A push or the end of a stream is acknowledged; a pull is answered with this value in every element.
    Answer(f32),
    /// An error frame with this code.
    Refuse(u16),
    /// Nothing, and the connection stays open.
    Ignore,
    /// No further byte is read, and the connection stays open.
    StopReading,
    GoAway,
    Close,
}

/// A peer on loopback: its address, and how many requests have come.
pub struct Peer {
    pub address: String,
    pub requests: Arc<AtomicUsize>,
}

/// Do `act(n)` with the n-th request, counted over all connections.
pub fn peer(instance: u64, act: impl Fn(usize) -> Act + Send + Sync + 'static) -> Peer {
    peer_that(instance, move |n, _| act(n))
}

/// The same, by what was asked.
pub fn peer_that(
    instance: u64,
    act: impl Fn(usize, &Asked) -> Act + Send + Sync + 'static,
) -> Peer {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let requests = Arc::new(AtomicUsize::new(0));
    let (count, act) = (Arc::clone(&requests), Arc::new(act));
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (count, act) = (Arc::clone(&count), Arc::clone(&act));
            std::thread::spawn(move || serve(stream.unwrap(), instance, &count, &*act));
        }
    });
    Peer { address, requests }
}

fn serve(
    mut stream: TcpStream,
    instance: u64,
    count: &AtomicUsize,
    act: &dyn Fn(usize, &Asked) -> Act,
) {
    while let Some(asked) = read(&mut stream) {
        let id = asked.header.request_id;
        let reply = if asked.header.opcode == Opcode::Hello {
            let hello = HelloReply {
                instance,
                max_frame_bytes: 1 << 24,
                max_keys: 1 << 16,
                slot_count: SLOTS,
                routing_version: 1,
                node_id: "peer".into(),
            };
            frame(Opcode::HelloReply, id, &hello.encode(), &[])
        } else {
            match act(count.fetch_add(1, Ordering::SeqCst), &asked) {
                Act::Answer(value) => answer(&asked, value),
                Act::Refuse(code) => {
                    let error = ErrorMeta {
                        code,
                        retry_safe: true,
                        routing_version: 1,
                    };
                    frame(Opcode::Error, id, &error.encode(), b"as the script says")
                }
                Act::Ignore => continue,
                Act::StopReading => loop {
                    std::thread::park();
                },
                Act::GoAway => frame(Opcode::GoAway, 0, &[], &[]),
                Act::Close => return,
            }
        };
        if stream.write_all(&reply).is_err() {
            return;
        }
    }
}

fn answer(asked: &Asked, value: f32) -> Vec<u8> {
    let id = asked.header.request_id;
    if asked.header.opcode == Opcode::Pull {
        let keys = PullMeta::decode(&asked.meta).unwrap().key_count;
        let reply = PullReply {
            routing_version: 1,
            row_count: keys,
            row_elements: DIM as u32,
        };
        let rows = vec![value; keys as usize * DIM];
        let body = bytemuck::cast_slice(&rows);
        return frame(Opcode::PullReply, id, &reply.encode(), body);
    }
    if asked.header.opcode == Opcode::CloseStream {
        return frame(Opcode::CloseStreamReply, id, &[], &[]);
    }
    let reply = PushReply {
        routing_version: 1,
        applied_slots: 1,
        skipped_slots: 0,
        stale: None,
    };
    frame(Opcode::PushReply, id, &reply.encode(), &[])
}

fn read(stream: &mut TcpStream) -> Option<Asked> {
    let mut head = [0; HEADER_BYTES];
    stream.read_exact(&mut head).ok()?;
    let header = Header::decode(&head, &ANY).unwrap();
    let mut meta = vec![0; header.meta_bytes as usize];
    let mut body = vec![0; header.body_bytes as usize];
    stream.read_exact(&mut meta).ok()?;
    stream.read_exact(&mut body).ok()?;
    Some(Asked { header, meta, body })
}
