//! Replication messages as frames (`proto/data_plane.md`, "Between servers").
//!
//! Every message is a frame of opcode [`Opcode::Peer`]. Its meta part begins with the kind; the
//! values of a push are not copied into the frame but follow from where they lie.

mod decode;

use std::ops::Range;
use std::sync::Arc;

use super::frame::{cut_text, Header, Opcode, HEADER_BYTES};
use super::message::{PushMeta, MAX_ERROR_TEXT_BYTES};
use super::settings::{optimizer_words, stamp_words};
use crate::engine::SlotMemory;
use crate::error::Refusal;
use crate::replication::message::{Message, Refuse, SlotOrder};
use crate::replication::NodeId;
use crate::staleness::UNTOLD;
use crate::stream::StreamId;
use crate::transaction::{Change, StagedRun, Transaction};

pub use decode::decode;

/// Bytes that a frame between servers may be larger than the largest push: the places, and origins.
pub const MAX_PLACES_BYTES: u64 = 65_536 * (PLACE_WORDS as u64 + 1) * 8;

/// Version of the messages between servers; 1 had one connection for everything.
pub const PEER_VERSION: u64 = 7;

const PLACE_WORDS: usize = 3;
const ORDER_WORDS: usize = 6;
const STREAM_WORDS: usize = 5;
const CLOSED_WORDS: usize = 2;
const UPDATES_WORDS: usize = 2;

/// First message of a master on a new connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Introduction {
    /// Its process.
    pub instance: NodeId,
    /// Grows with each of its connections: an older one may be read after a newer one.
    pub connection: u64,
    /// What the connection is for.
    pub purpose: Purpose,
}

/// What a connection between servers is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// What is to be done in order, and its answers.
    Orders = 0,
    /// Heartbeats and read leases, which must not wait behind orders.
    Heartbeats = 1,
}

/// What a peer frame holds.
#[derive(Debug)]
pub enum PeerFrame {
    /// Who is there.
    Introduction(Introduction),
    /// A message.
    Message(Message),
}

/// A frame that is ready to be sent: its head, then pieces of a push, then its tail.
#[derive(Debug)]
pub struct Encoded {
    /// Header, meta, and the body's beginning.
    pub head: Vec<u8>,
    /// The push, with the ranges of keys that are sent.
    pub push: Option<(Arc<Transaction>, Vec<Range<usize>>)>,
    /// The body's end.
    pub tail: Vec<u8>,
}

impl Encoded {
    /// How long it is.
    pub fn bytes(&self) -> usize {
        let push = self.push.as_ref().map_or(0, |(transaction, ranges)| {
            let keys = transaction.batch.keys().len();
            let elements = transaction
                .batch
                .values()
                .len()
                .checked_div(keys)
                .unwrap_or(0);
            ranges
                .iter()
                .map(|range| range.len() * (8 + elements * 4))
                .sum()
        });
        self.head.len() + push + self.tail.len()
    }
}

#[derive(Clone, Copy)]
#[repr(u8)]
enum Kind {
    Introduction = 1,
    Heartbeat = 2,
    Prepare = 3,
    PrepareClose = 4,
    Commit = 5,
    Rollback = 6,
    Recover = 7,
    CopyBegin = 8,
    CopyRows = 9,
    CopyEnd = 10,
    ReadLease = 11,
    Accepted = 12,
    Refused = 13,
    CopyTaken = 14,
    Forget = 15,
}

impl Introduction {
    /// Lay it out.
    pub fn encode(self) -> Encoded {
        let fields = [
            self.instance,
            self.connection,
            self.purpose as u64,
            PEER_VERSION,
        ];
        frame(Kind::Introduction, &fields, &[])
    }
}

/// A frame of numbers.
fn frame(kind: Kind, fields: &[u64], body: &[u64]) -> Encoded {
    let mut meta = vec![kind as u8, 0, 0, 0, 0, 0, 0, 0];
    for field in fields {
        meta.extend(field.to_le_bytes());
    }
    let mut encoded = begin(&meta, body.len() * 8);
    encoded.head.extend_from_slice(bytemuck::cast_slice(body));
    encoded
}

fn begin(meta: &[u8], body_bytes: usize) -> Encoded {
    let header = Header::plain(Opcode::Peer, 0, meta.len(), body_bytes);
    let mut head = Vec::with_capacity(HEADER_BYTES + meta.len());
    head.extend_from_slice(&header.encode());
    head.extend_from_slice(meta);
    Encoded {
        head,
        push: None,
        tail: Vec::new(),
    }
}

/// Lay a message out.
pub fn encode(message: &Message) -> Encoded {
    match message {
        Message::Heartbeat { sent_at, version } => {
            frame(Kind::Heartbeat, &[*sent_at, *version], &[])
        }
        Message::Prepare {
            number,
            lsn,
            decided,
            places,
            transaction,
        } => prepare([*number, *lsn, *decided], places, transaction),
        Message::Commit { decided } => frame(Kind::Commit, &[*decided], &[]),
        Message::Rollback { lsns } => frame(Kind::Rollback, &[lsns.len() as u64], lsns),
        Message::Forget { slots } => {
            let body: Vec<u64> = slots.iter().map(|&slot| u64::from(slot)).collect();
            frame(Kind::Forget, &[slots.len() as u64], &body)
        }
        Message::Recover { number, lsn, slots } => {
            let body: Vec<u64> = slots.iter().flat_map(order_words).collect();
            frame(Kind::Recover, &[*number, *lsn, slots.len() as u64], &body)
        }
        Message::CopyBegin { slot } => frame(Kind::CopyBegin, &[], &order_words(slot)),
        Message::CopyRows { slot, table, rows } => copy_rows(*slot, *table, rows),
        Message::CopyEnd {
            number,
            slot,
            memory,
        } => copy_end(*number, slot, memory),
        Message::CopyTaken { slot, failed } => frame(
            Kind::CopyTaken,
            &[u64::from(*slot), u64::from(*failed)],
            &[],
        ),
        Message::ReadLease { sent_at, version } => {
            frame(Kind::ReadLease, &[*sent_at, *version], &[])
        }
        Message::Accepted { number } => frame(Kind::Accepted, &[*number], &[]),
        Message::Refused { number, reason } => refused(*number, reason),
    }
}

fn prepare(
    [number, lsn, decided]: [u64; 3],
    places: &[StagedRun],
    transaction: &Arc<Transaction>,
) -> Encoded {
    let keys: usize = places
        .iter()
        .map(|place| (place.run.end - place.run.start) as usize)
        .sum();
    let total = transaction.batch.keys().len();
    let elements = transaction
        .batch
        .values()
        .len()
        .checked_div(total)
        .unwrap_or(0);
    let numbers = [number, lsn, decided, places.len() as u64];
    let told = places.iter().any(|place| place.run.origin != UNTOLD);
    let meta = prepare_meta(numbers, transaction, [keys, elements], told);
    let values = keys * elements * 4;
    let padding = values.next_multiple_of(8) - values;
    let mut encoded = begin(
        &meta,
        keys * 8 + values + padding + places.len() * words_of_place(told) * 8,
    );
    let mut ranges: Vec<Range<usize>> = Vec::new();
    let mut tail = vec![0; padding];
    for place in places {
        let (start, end) = (place.run.start as usize, place.run.end as usize);
        match ranges.last_mut() {
            Some(range) if range.end == start => range.end = end,
            _ => ranges.push(start..end),
        }
        let count = u64::from(place.run.end - place.run.start);
        let words = [
            u64::from(place.run.slot) | count << 32,
            place.term,
            place.position,
        ];
        tail.extend_from_slice(bytemuck::cast_slice(&words));
    }
    if told {
        let origins = places.iter().map(|place| place.run.origin);
        tail.extend(origins.flat_map(u64::to_le_bytes));
    }
    encoded.push = Some((Arc::clone(transaction), ranges));
    encoded.tail = tail;
    encoded
}

fn prepare_meta(
    numbers: [u64; 4],
    transaction: &Transaction,
    [keys, elements]: [usize; 2],
    origins: bool,
) -> Vec<u8> {
    // A close is told by the kind of frame.
    let (kind, change) = match transaction.change {
        Change::Close => (
            Kind::PrepareClose,
            Change::Assign {
                only_if_absent: false,
            },
        ),
        change => (Kind::Prepare, change),
    };
    let mut meta = vec![kind as u8, 0, 0, 0, 0, 0, 0, 0];
    let settings = optimizer_words(transaction.optimizer.as_ref());
    let stamp = stamp_words(transaction.stamp);
    for field in numbers.iter().chain(&settings).chain(&stamp) {
        meta.extend(field.to_le_bytes());
    }
    let push = PushMeta {
        table: transaction.table,
        routing_version: 0,
        id: transaction.id,
        floor: transaction.floor,
        key_count: keys as u32,
        row_elements: elements as u32,
        change,
        origins,
        compensation: transaction.compensation,
    };
    meta.extend(push.encode());
    meta
}

/// A place, and its origin if these travel.
fn words_of_place(origins: bool) -> usize {
    PLACE_WORDS + usize::from(origins)
}

fn order_words(one: &SlotOrder) -> [u64; ORDER_WORDS] {
    [
        u64::from(one.slot),
        one.term,
        one.version,
        one.epoch,
        one.decided,
        one.end,
    ]
}

fn copy_rows(slot: u32, table: u64, rows: &crate::table::PlainRows) -> Encoded {
    let (keys, weights, state) = rows;
    let fields = [
        u64::from(slot),
        table,
        keys.len() as u64,
        weights.len() as u64,
        state.len() as u64,
    ];
    let mut encoded = frame(Kind::CopyRows, &fields, &[]);
    let values = (weights.len() + state.len()) * 4;
    let padding = values.next_multiple_of(8) - values;
    let bytes = keys.len() * 8 + values + padding;
    let meta = encoded.head.split_off(HEADER_BYTES);
    encoded.head = Header::plain(Opcode::Peer, 0, meta.len(), bytes)
        .encode()
        .to_vec();
    encoded.head.reserve(meta.len() + bytes);
    encoded.head.extend(meta);
    encoded.head.extend_from_slice(bytemuck::cast_slice(keys));
    encoded
        .head
        .extend_from_slice(bytemuck::cast_slice(weights));
    encoded.head.extend_from_slice(bytemuck::cast_slice(state));
    encoded.tail = vec![0; padding];
    encoded
}

fn copy_end(number: u64, slot: &SlotOrder, memory: &SlotMemory) -> Encoded {
    let fields = [
        number,
        memory.position,
        memory.streams.len() as u64,
        memory.closed.len() as u64,
        u64::from(memory.time),
        memory.updates.len() as u64,
    ];
    let mut body = order_words(slot).to_vec();
    let id = |stream: &StreamId| {
        [
            stream.job,
            u64::from(stream.pass) << 32 | u64::from(stream.task),
        ]
    };
    for (stream, window) in &memory.streams {
        body.extend(id(stream));
        body.extend([
            window.floor,
            window.applied as u64,
            (window.applied >> 64) as u64,
        ]);
    }
    memory
        .closed
        .iter()
        .for_each(|stream| body.extend(id(stream)));
    for &(table, updates) in &memory.updates {
        body.extend([table, updates]);
    }
    frame(Kind::CopyEnd, &fields, &body)
}

fn refused(number: u64, reason: &Refuse) -> Encoded {
    let (code, text) = match reason {
        Refuse::OldTerm => (0, String::new()),
        Refuse::Gap => (1, String::new()),
        Refuse::NoCopy => (2, String::new()),
        Refuse::Rows(Refusal::NoRoomEver(why)) => (3, why.clone()),
        Refuse::Rows(refusal) => (0x100 + u64::from(refusal.code()), refusal.to_string()),
    };
    let mut meta = vec![Kind::Refused as u8, 0, 0, 0, 0, 0, 0, 0];
    for field in [number, code] {
        meta.extend(field.to_le_bytes());
    }
    let text = cut_text(&text, MAX_ERROR_TEXT_BYTES);
    let mut encoded = begin(&meta, text.len());
    encoded.head.extend(text.as_bytes());
    encoded
}
