//! Replication messages as frames (`proto/data_plane.md`, "Between servers").
//!
//! Every message is a frame of opcode [`Opcode::Peer`]. Its meta part begins with the kind; the
//! values of a push are not copied into the frame but follow from where they lie.

use std::ops::Range;
use std::sync::Arc;

use super::frame::{cut_text, Header, Opcode, Reader, HEADER_BYTES};
use super::message::{PushMeta, MAX_ERROR_TEXT_BYTES};
use crate::engine::SlotMemory;
use crate::error::{code, Refusal};
use crate::hash::SlotSpace;
use crate::replication::message::{Message, Refuse, SettledSlot};
use crate::replication::NodeId;
use crate::stream::{StreamId, StreamWindow};
use crate::transaction::{Batch, Change, Run, StagedRun, Transaction};

/// Bytes that a frame between servers may be larger than the largest push: the places.
pub const MAX_PLACES_BYTES: u64 = 65_536 * PLACE_WORDS as u64 * 8;

const PLACE_WORDS: usize = 3;
const SETTLED_WORDS: usize = 6;
const STREAM_WORDS: usize = 5;
const CLOSED_WORDS: usize = 2;

/// First message of a master on a new connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Introduction {
    /// Its process.
    pub instance: NodeId,
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
    Settle = 7,
    CopyBegin = 8,
    CopyRows = 9,
    CopyEnd = 10,
    Promise = 11,
    Accepted = 12,
    Refused = 13,
}

impl Introduction {
    /// Lay it out.
    pub fn encode(self) -> Encoded {
        frame(Kind::Introduction, &[self.instance], &[])
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
        Message::Heartbeat {
            sent_at,
            version,
            decided,
        } => frame(Kind::Heartbeat, &[*sent_at, *version, *decided], &[]),
        Message::Prepare {
            number,
            lsn,
            decided,
            places,
            transaction,
        } => prepare([*number, *lsn, *decided], places, transaction),
        Message::Commit { decided } => frame(Kind::Commit, &[*decided], &[]),
        Message::Rollback { lsns } => frame(Kind::Rollback, &[lsns.len() as u64], lsns),
        Message::Settle { number, lsn, slots } => {
            let body: Vec<u64> = slots.iter().flat_map(settled_words).collect();
            frame(Kind::Settle, &[*number, *lsn, slots.len() as u64], &body)
        }
        Message::CopyBegin { slot } => frame(Kind::CopyBegin, &[], &settled_words(slot)),
        Message::CopyRows { slot, table, rows } => copy_rows(*slot, *table, rows),
        Message::CopyEnd {
            number,
            slot,
            memory,
        } => copy_end(*number, slot, memory),
        Message::Promise { sent_at, version } => frame(Kind::Promise, &[*sent_at, *version], &[]),
        Message::Accepted { number } => frame(Kind::Accepted, &[*number], &[]),
        Message::Refused { number, reason } => refused(*number, reason),
    }
}

fn prepare(
    [number, lsn, decided]: [u64; 3],
    places: &[StagedRun],
    transaction: &Arc<Transaction>,
) -> Encoded {
    let is_close = transaction.change == Change::Close;
    let kind = if is_close {
        Kind::PrepareClose
    } else {
        Kind::Prepare
    };
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
    let mut meta = vec![kind as u8, 0, 0, 0, 0, 0, 0, 0];
    for field in [number, lsn, decided, places.len() as u64] {
        meta.extend(field.to_le_bytes());
    }
    let push = PushMeta {
        table: transaction.table,
        routing_version: 0,
        id: transaction.id,
        floor: transaction.floor,
        key_count: keys as u32,
        row_elements: elements as u32,
        // A close is told by the kind of frame.
        change: if is_close {
            Change::Assign {
                only_if_absent: false,
            }
        } else {
            transaction.change
        },
    };
    meta.extend(push.encode());
    let values = keys * elements * 4;
    let padding = values.next_multiple_of(8) - values;
    let mut encoded = begin(
        &meta,
        keys * 8 + values + padding + places.len() * PLACE_WORDS * 8,
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
    encoded.push = Some((Arc::clone(transaction), ranges));
    encoded.tail = tail;
    encoded
}

fn settled_words(one: &SettledSlot) -> [u64; SETTLED_WORDS] {
    [
        u64::from(one.slot),
        one.term,
        one.version,
        one.birth,
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

fn copy_end(number: u64, slot: &SettledSlot, memory: &SlotMemory) -> Encoded {
    let fields = [
        number,
        memory.position,
        memory.streams.len() as u64,
        memory.closed.len() as u64,
    ];
    let mut body = settled_words(slot).to_vec();
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
    frame(Kind::CopyEnd, &fields, &body)
}

fn refused(number: u64, reason: &Refuse) -> Encoded {
    let (code, text) = match reason {
        Refuse::OldTerm => (0, String::new()),
        Refuse::Gap => (1, String::new()),
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

/// Read a frame: its meta part, and its body in an aligned buffer of which `body_bytes` count.
pub fn decode(
    space: SlotSpace,
    meta: &[u8],
    body: Vec<u64>,
    body_bytes: usize,
) -> Result<PeerFrame, Refusal> {
    let mut fields = Reader::new(meta);
    let kind = fields.u8()?;
    fields.take(7)?;
    let mut words = Words {
        rest: &body[..body_bytes / 8],
        slots: space.count(),
    };
    let message = match kind {
        1 => {
            let instance = fields.u64()?;
            fields.end()?;
            return Ok(PeerFrame::Introduction(Introduction { instance }));
        }
        2 => Message::Heartbeat {
            sent_at: fields.u64()?,
            version: fields.u64()?,
            decided: fields.u64()?,
        },
        3 | 4 => return decode_prepare(space, kind == 4, fields, body, body_bytes),
        5 => Message::Commit {
            decided: fields.u64()?,
        },
        6 => {
            let count = fields.u64()?;
            Message::Rollback {
                lsns: words.take(count)?.to_vec(),
            }
        }
        7 => {
            let (number, lsn, count) = (fields.u64()?, fields.u64()?, fields.u64()?);
            let slots = (0..count)
                .map(|_| words.settled())
                .collect::<Result<_, _>>()?;
            Message::Settle { number, lsn, slots }
        }
        8 => Message::CopyBegin {
            slot: words.settled()?,
        },
        9 => decode_copy_rows(&mut fields, &mut words)?,
        10 => decode_copy_end(&mut fields, &mut words)?,
        11 => Message::Promise {
            sent_at: fields.u64()?,
            version: fields.u64()?,
        },
        12 => Message::Accepted {
            number: fields.u64()?,
        },
        13 => {
            let (number, code) = (fields.u64()?, fields.u64()?);
            let text = &bytemuck::cast_slice::<u64, u8>(&body)[..body_bytes];
            let reason = decode_reason(code, &String::from_utf8_lossy(text));
            Message::Refused { number, reason }
        }
        _ => {
            return Err(Refusal::Protocol(format!(
                "unknown kind {kind} between servers"
            )))
        }
    };
    fields.end()?;
    Ok(PeerFrame::Message(message))
}

fn decode_reason(code: u64, text: &str) -> Refuse {
    match code {
        0 => Refuse::OldTerm,
        1 => Refuse::Gap,
        _ if code == 0x100 + u64::from(code::MEMORY_LIMIT) => {
            Refuse::Rows(Refusal::MemoryLimit(text.into()))
        }
        _ => Refuse::Rows(Refusal::InvalidRequest(text.into())),
    }
}

fn decode_prepare(
    space: SlotSpace,
    is_close: bool,
    mut fields: Reader<'_>,
    body: Vec<u64>,
    body_bytes: usize,
) -> Result<PeerFrame, Refusal> {
    let (number, lsn, decided) = (fields.u64()?, fields.u64()?, fields.u64()?);
    let count = fields.u64()? as usize;
    let push = PushMeta::decode(fields.rest())?;
    let (keys, elements) = (push.key_count as usize, push.row_elements as usize);
    let values = keys.saturating_mul(elements);
    let data_words = keys.saturating_add(values.div_ceil(2));
    let wanted = data_words.saturating_add(count.saturating_mul(PLACE_WORDS));
    if wanted != body_bytes / 8 {
        return Err(short());
    }
    let mut places = Vec::with_capacity(count);
    let mut start = 0u32;
    for words in body[data_words..wanted].chunks_exact(PLACE_WORDS) {
        let (slot, keys) = (words[0] as u32, (words[0] >> 32) as u32);
        if slot >= space.count() {
            return Err(Refusal::Protocol(format!(
                "slot {slot} of {}",
                space.count()
            )));
        }
        let end = start.checked_add(keys).ok_or_else(short)?;
        places.push(StagedRun {
            term: words[1],
            position: words[2],
            run: Run { slot, start, end },
        });
        start = end;
    }
    let transaction = if is_close {
        Transaction::close(push.id, places.iter().map(|place| place.run.slot))
    } else {
        let batch = Batch::from_words(body, keys, values)?;
        let whole = Transaction::new(space, push.id, push.floor, push.table, push.change, batch)?;
        // Its runs are computed anew from the keys, so damaged places are noticed here.
        if !whole
            .runs()
            .iter()
            .eq(places.iter().map(|place| &place.run))
        {
            return Err(Refusal::Protocol("places do not fit their keys".into()));
        }
        whole
    };
    Ok(PeerFrame::Message(Message::Prepare {
        number,
        lsn,
        decided,
        places,
        transaction: Arc::new(transaction),
    }))
}

fn decode_copy_rows(fields: &mut Reader<'_>, words: &mut Words<'_>) -> Result<Message, Refusal> {
    let (slot, table) = (words.slot(fields.u64()?)?, fields.u64()?);
    let (keys, wide, deep) = (fields.u64()?, fields.u64()?, fields.u64()?);
    let keys = words.take(keys)?.to_vec();
    let floats: &[f32] = bytemuck::cast_slice(words.rest);
    let (wide, deep) = (wide as usize, deep as usize);
    if floats.len() < wide.saturating_add(deep) {
        return Err(short());
    }
    let rows = (
        keys,
        floats[..wide].to_vec(),
        floats[wide..wide + deep].to_vec(),
    );
    Ok(Message::CopyRows { slot, table, rows })
}

fn decode_copy_end(fields: &mut Reader<'_>, words: &mut Words<'_>) -> Result<Message, Refusal> {
    let (number, position) = (fields.u64()?, fields.u64()?);
    let (streams, closed) = (fields.u64()?, fields.u64()?);
    let slot = words.settled()?;
    let id = |words: &[u64]| StreamId {
        job: words[0],
        pass: (words[1] >> 32) as u32,
        task: words[1] as u32,
    };
    let streams = words.take(streams.saturating_mul(STREAM_WORDS as u64))?;
    let streams = streams.chunks_exact(STREAM_WORDS).map(|words| {
        let applied = u128::from(words[3]) | u128::from(words[4]) << 64;
        let window = StreamWindow {
            floor: words[2],
            applied,
        };
        (id(words), window)
    });
    let streams = streams.collect();
    let closed = words.take(closed.saturating_mul(CLOSED_WORDS as u64))?;
    Ok(Message::CopyEnd {
        number,
        slot,
        memory: SlotMemory {
            position,
            streams,
            closed: closed.chunks_exact(CLOSED_WORDS).map(id).collect(),
        },
    })
}

/// Takes 64-bit words one after the other; refuses to go past the end.
struct Words<'a> {
    rest: &'a [u64],
    slots: u32,
}

impl<'a> Words<'a> {
    fn take(&mut self, count: u64) -> Result<&'a [u64], Refusal> {
        let count = usize::try_from(count).map_err(|_| short())?;
        let (taken, rest) = self.rest.split_at_checked(count).ok_or_else(short)?;
        self.rest = rest;
        Ok(taken)
    }

    fn slot(&self, number: u64) -> Result<u32, Refusal> {
        let slot = u32::try_from(number).ok().filter(|&slot| slot < self.slots);
        slot.ok_or_else(|| Refusal::Protocol(format!("slot {number} of {}", self.slots)))
    }

    fn settled(&mut self) -> Result<SettledSlot, Refusal> {
        let words = self.take(SETTLED_WORDS as u64)?;
        Ok(SettledSlot {
            slot: self.slot(words[0])?,
            term: words[1],
            version: words[2],
            birth: words[3],
            decided: words[4],
            end: words[5],
        })
    }
}

fn short() -> Refusal {
    Refusal::Protocol("a frame between servers is shorter or longer than it says".into())
}
