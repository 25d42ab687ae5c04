//! The meta part of each kind of frame.

use super::frame::{cut_text, Reader, MAX_TEXT_BYTES};
use crate::compensation::{Compensation, DelayCompensation, Reference};
use crate::error::Refusal;
use crate::life::Thresholds;
use crate::staleness::PushStaleness;
use crate::stream::{StreamId, TransactionId};
use crate::transaction::{Change, Update};

/// The most bytes of text in an error frame's body.
pub const MAX_ERROR_TEXT_BYTES: usize = 4096;

/// First frame on a connection: who calls, and whether it may.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// The cluster the client means.
    pub cluster_id: String,
    /// The shared secret; empty if the cluster has none.
    pub token: String,
    /// For logs.
    pub client_name: String,
}

impl Hello {
    /// Lay it out.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        for text in [&self.cluster_id, &self.token, &self.client_name] {
            put_text(&mut out, text);
        }
        out
    }

    /// Read it.
    pub fn decode(meta: &[u8]) -> Result<Self, Refusal> {
        let mut reader = Reader::new(meta);
        let hello = Self {
            cluster_id: reader.text()?,
            token: reader.text()?,
            client_name: reader.text()?,
        };
        reader.end()?;
        Ok(hello)
    }
}

/// The server's side of the handshake.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HelloReply {
    /// Drawn anew at each start of the process: a client sees that a server came back empty.
    pub instance: u64,
    /// The server's limit for one frame.
    pub max_frame_bytes: u64,
    /// The server's limit for one request.
    pub max_keys: u32,
    /// Slots of the cluster.
    pub slot_count: u32,
    /// The routing version the server goes by.
    pub routing_version: u64,
    /// The node's name.
    pub node_id: String,
}

impl HelloReply {
    /// Lay it out.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        out.extend(self.instance.to_le_bytes());
        out.extend(self.max_frame_bytes.to_le_bytes());
        out.extend(self.max_keys.to_le_bytes());
        out.extend(self.slot_count.to_le_bytes());
        out.extend(self.routing_version.to_le_bytes());
        put_text(&mut out, &self.node_id);
        out
    }

    /// Read it.
    pub fn decode(meta: &[u8]) -> Result<Self, Refusal> {
        let mut reader = Reader::new(meta);
        let reply = Self {
            instance: reader.u64()?,
            max_frame_bytes: reader.u64()?,
            max_keys: reader.u32()?,
            slot_count: reader.u32()?,
            routing_version: reader.u64()?,
            node_id: reader.text()?,
        };
        reader.end()?;
        Ok(reply)
    }
}

/// Read rows. Body: `key_count` u64 keys, sorted by slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PullMeta {
    /// The table's id.
    pub table: u64,
    /// The routing version the client goes by.
    pub routing_version: u64,
    /// How many keys the body holds.
    pub key_count: u32,
    /// Elements of a row as the client knows the table.
    pub row_elements: u32,
    /// Whether the answer is to have an origin for each slot, behind the rows.
    pub origins: bool,
    /// Whether it is to have the sum of gradients of each row, and its birth, behind the rows.
    pub sums: bool,
}

impl PullMeta {
    /// Lay it out.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(32);
        out.extend(self.table.to_le_bytes());
        out.extend(self.routing_version.to_le_bytes());
        out.extend(self.key_count.to_le_bytes());
        out.extend(self.row_elements.to_le_bytes());
        let flags =
            if self.origins { HAS_ORIGINS } else { 0 } | if self.sums { HAS_SUMS } else { 0 };
        if flags != 0 {
            out.extend(flags.to_le_bytes());
        }
        out
    }

    /// Read it.
    pub fn decode(meta: &[u8]) -> Result<Self, Refusal> {
        let mut reader = Reader::new(meta);
        let mut pull = Self {
            table: reader.u64()?,
            routing_version: reader.u64()?,
            key_count: reader.u32()?,
            row_elements: reader.u32()?,
            origins: false,
            sums: false,
        };
        if reader.left() >= 8 {
            let flags = check_flags(reader.u64()?, HAS_ORIGINS | HAS_SUMS, "a pull")?;
            if flags == 0 {
                return Err(Refusal::Protocol("a pull with flags sets none".into()));
            }
            (pull.origins, pull.sums) = (flags & HAS_ORIGINS != 0, flags & HAS_SUMS != 0);
        }
        reader.end()?;
        Ok(pull)
    }
}

/// The rows. Body: `row_count` rows of `row_elements` f32 each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PullReply {
    /// The routing version the server goes by.
    pub routing_version: u64,
    /// As many as keys were asked for.
    pub row_count: u32,
    /// Elements of a row.
    pub row_elements: u32,
}

impl PullReply {
    /// Bytes of its meta part.
    pub const BYTES: usize = 16;

    /// Lay it out.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        out[0..8].copy_from_slice(&self.routing_version.to_le_bytes());
        out[8..12].copy_from_slice(&self.row_count.to_le_bytes());
        out[12..16].copy_from_slice(&self.row_elements.to_le_bytes());
        out
    }

    /// Read it.
    pub fn decode(meta: &[u8]) -> Result<Self, Refusal> {
        let mut reader = Reader::new(meta);
        let reply = Self {
            routing_version: reader.u64()?,
            row_count: reader.u32()?,
            row_elements: reader.u32()?,
        };
        reader.end()?;
        Ok(reply)
    }
}

/// The flag of what tells, or asks for, origins.
const HAS_ORIGINS: u64 = 1;

/// The flag of a pull that asks for sums of gradients.
const HAS_SUMS: u64 = 2;

/// The flags, if they are among the known ones.
fn check_flags(flags: u64, known: u64, what: &str) -> Result<u64, Refusal> {
    if flags & !known != 0 {
        let reason = format!("unknown flags {flags:#x} of {what}: use matching releases");
        return Err(Refusal::Protocol(reason));
    }
    Ok(flags)
}

/// The number of a [`Change`] on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum PushKind {
    /// Gradients for the optimizer.
    Update = 0,
    /// New weights.
    Assign = 1,
    /// New weights for rows that do not exist yet.
    AssignIfAbsent = 2,
    /// The end of a stream; between servers only.
    Close = 3,
    /// Rows go: of the meta of a [`super::Opcode::Delete`], and between servers.
    Delete = 4,
    /// Gradients for the optimizer, each with its shows and clicks.
    Observe = 5,
    /// Rows that have expired go: of the meta of a [`super::Opcode::Expire`] or
    /// [`super::Opcode::CountExpired`], and between servers.
    Expire = 6,
    /// Shows and clicks decay: of the meta of a [`super::Opcode::Decay`], and between servers.
    Decay = 7,
    /// As an update, each gradient with the weights that it was computed with.
    Compare = 8,
    /// The same, with shows and clicks behind these.
    CompareObserved = 9,
    /// As an update, each gradient with the sum of gradients that its weights had seen.
    Revise = 10,
    /// The same, with shows and clicks behind these.
    ReviseObserved = 11,
}

/// Of the thresholds of an expiry: which are set.
const HAS_UNSEEN: u32 = 1;
const HAS_SCORE: u32 = 2;
const HAS_NORM: u32 = 4;

/// Change rows. Body: `key_count` u64 keys, sorted by slot, then as many rows of
/// `row_elements` f32, and of a push that tells of them show and click. Of a delete, an expiry and a
/// decay `row_elements` is 0.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PushMeta {
    /// The table's id.
    pub table: u64,
    /// The routing version the client goes by.
    pub routing_version: u64,
    /// The same on every retry.
    pub id: TransactionId,
    /// Everything below it in the stream is acknowledged, or given up by the client.
    pub floor: u64,
    /// How many keys the body holds.
    pub key_count: u32,
    /// Elements of a row.
    pub row_elements: u32,
    /// What to do.
    pub change: Change,
    /// Whether an origin for each slot stands behind the values.
    pub origins: bool,
    /// What is done about its staleness: between servers only.
    pub compensation: Compensation,
}

impl PushMeta {
    /// Lay it out.
    pub fn encode(&self) -> Vec<u8> {
        let (kind, scale) = match self.change {
            Change::Update(update) => (update_kind(update), update.learning_rate_scale),
            Change::Assign {
                only_if_absent: false,
            } => (PushKind::Assign, 1.0),
            Change::Assign {
                only_if_absent: true,
            } => (PushKind::AssignIfAbsent, 1.0),
            Change::Close => (PushKind::Close, 1.0),
            Change::Delete => (PushKind::Delete, 1.0),
            Change::Expire(_) | Change::Evict => (PushKind::Expire, 1.0),
            Change::Decay { rate } => (PushKind::Decay, rate),
        };
        let mut out = Vec::with_capacity(64);
        out.extend(self.table.to_le_bytes());
        out.extend(self.routing_version.to_le_bytes());
        put_stream(&mut out, self.id.stream);
        out.extend(self.id.sequence.to_le_bytes());
        out.extend(self.floor.to_le_bytes());
        out.extend(self.key_count.to_le_bytes());
        out.extend(self.row_elements.to_le_bytes());
        out.extend(scale.to_le_bytes());
        out.push(kind as u8);
        out.extend([u8::from(self.origins), self.compensation.code(), 0]);
        match &self.change {
            Change::Expire(thresholds) => put_thresholds(&mut out, thresholds),
            Change::Evict => put_thresholds(&mut out, &Thresholds::default()),
            _ => {}
        }
        for number in self
            .compensation
            .delay()
            .iter()
            .flat_map(DelayCompensation::numbers)
        {
            out.extend(number.to_le_bytes());
        }
        out
    }

    /// Read it as another server sent it: its master has filled in the thresholds of an expiry, so one
    /// without any is an eviction.
    pub fn decode_of_peer(meta: &[u8]) -> Result<Self, Refusal> {
        let mut push = Self::decode(meta)?;
        if push.change == Change::Expire(Thresholds::default()) {
            push.change = Change::Evict;
        }
        Ok(push)
    }

    /// Read it as a client sent it.
    pub fn decode(meta: &[u8]) -> Result<Self, Refusal> {
        let mut reader = Reader::new(meta);
        let (table, routing_version) = (reader.u64()?, reader.u64()?);
        let id = TransactionId {
            stream: read_stream(&mut reader)?,
            sequence: reader.u64()?,
        };
        let floor = reader.u64()?;
        let (key_count, row_elements) = (reader.u32()?, reader.u32()?);
        let learning_rate_scale = reader.f32()?;
        let kind = reader.u8()?;
        let origins = check_flags(u64::from(reader.u8()?), HAS_ORIGINS, "a push")? != 0;
        let code = reader.u8()?;
        reader.take(1)?;
        let thresholds = match kind {
            6 => read_thresholds(&mut reader)?,
            _ => Thresholds::default(),
        };
        let compensation = read_compensation(&mut reader, code)?;
        reader.end()?;
        if !learning_rate_scale.is_finite() || learning_rate_scale < 0.0 {
            return Err(Refusal::InvalidRequest(format!(
                "learning_rate_scale is {learning_rate_scale}: must be finite and not negative"
            )));
        }
        let change = change_of(kind, learning_rate_scale, thresholds)?;
        if origins && !change.updates() {
            let reason = format!("a push of kind {kind} has no gradients, and so no origins");
            return Err(Refusal::InvalidRequest(reason));
        }
        Ok(Self {
            table,
            routing_version,
            id,
            floor,
            key_count,
            row_elements,
            change,
            origins,
            compensation,
        })
    }
}

/// The kind of an update.
fn update_kind(update: Update) -> PushKind {
    match (update.reference, update.has_counts) {
        (None, false) => PushKind::Update,
        (None, true) => PushKind::Observe,
        (Some(Reference::Weights), false) => PushKind::Compare,
        (Some(Reference::Weights), true) => PushKind::CompareObserved,
        (Some(Reference::Sum), false) => PushKind::Revise,
        (Some(Reference::Sum), true) => PushKind::ReviseObserved,
    }
}

/// The change of a kind of push.
fn change_of(
    kind: u8,
    learning_rate_scale: f32,
    thresholds: Thresholds,
) -> Result<Change, Refusal> {
    Ok(match kind {
        0 | 5 | 8..=11 => Change::Update(Update {
            learning_rate_scale,
            reference: match kind {
                8 | 9 => Some(Reference::Weights),
                10 | 11 => Some(Reference::Sum),
                _ => None,
            },
            has_counts: matches!(kind, 5 | 9 | 11),
        }),
        1 => Change::Assign {
            only_if_absent: false,
        },
        2 => Change::Assign {
            only_if_absent: true,
        },
        4 => Change::Delete,
        6 => Change::Expire(thresholds),
        7 if learning_rate_scale <= 1.0 => Change::Decay {
            rate: learning_rate_scale,
        },
        7 => {
            let reason = format!("a decay by {learning_rate_scale}: it must be from 0 to 1");
            return Err(Refusal::InvalidRequest(reason));
        }
        _ => return Err(Refusal::Protocol(format!("unknown kind of push {kind}"))),
    })
}

/// What is done about staleness, and the numbers of it.
fn read_compensation(reader: &mut Reader<'_>, code: u8) -> Result<Compensation, Refusal> {
    let mut numbers = [0.0; 3];
    if Compensation::has_numbers(code) {
        for number in &mut numbers {
            *number = reader.f64()?;
        }
    }
    Compensation::from_code(code, numbers).ok_or_else(|| {
        Refusal::Protocol(format!(
            "unknown compensation {code} of numbers {numbers:?}: use matching releases"
        ))
    })
}

/// A push was applied, in all of its slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PushReply {
    /// The routing version the server goes by.
    pub routing_version: u64,
    /// Slots in which it was applied now.
    pub applied_slots: u32,
    /// Slots that had applied it before: this was a retry.
    pub skipped_slots: u32,
    /// How stale it was where it was applied now, if it told origins.
    pub stale: Option<PushStaleness>,
}

impl PushReply {
    /// Lay it out.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(48);
        out.extend(self.routing_version.to_le_bytes());
        out.extend(self.applied_slots.to_le_bytes());
        out.extend(self.skipped_slots.to_le_bytes());
        if let Some(stale) = &self.stale {
            for number in [stale.known, stale.unknown, stale.sum] {
                out.extend(number.to_le_bytes());
            }
            out.extend(u64::from(stale.max).to_le_bytes());
        }
        out
    }

    /// Read it.
    pub fn decode(meta: &[u8]) -> Result<Self, Refusal> {
        let mut reader = Reader::new(meta);
        let mut reply = Self {
            routing_version: reader.u64()?,
            applied_slots: reader.u32()?,
            skipped_slots: reader.u32()?,
            stale: None,
        };
        if reader.left() >= 32 {
            reply.stale = Some(PushStaleness {
                known: reader.u64()?,
                unknown: reader.u64()?,
                sum: reader.u64()?,
                max: u32::try_from(reader.u64()?).unwrap_or(u32::MAX),
            });
        }
        reader.end()?;
        Ok(reply)
    }
}

/// A delete was applied, in all of its slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeleteReply {
    /// The routing version the server goes by.
    pub routing_version: u64,
    /// Slots in which it was applied now.
    pub applied_slots: u32,
    /// Slots that had applied it before: this was a retry.
    pub skipped_slots: u32,
    /// Rows that it removed now.
    pub rows: u64,
}

impl DeleteReply {
    /// Lay it out.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(24);
        out.extend(self.routing_version.to_le_bytes());
        out.extend(self.applied_slots.to_le_bytes());
        out.extend(self.skipped_slots.to_le_bytes());
        out.extend(self.rows.to_le_bytes());
        out
    }

    /// Read it.
    pub fn decode(meta: &[u8]) -> Result<Self, Refusal> {
        let mut reader = Reader::new(meta);
        let reply = Self {
            routing_version: reader.u64()?,
            applied_slots: reader.u32()?,
            skipped_slots: reader.u32()?,
            rows: reader.u64()?,
        };
        reader.end()?;
        Ok(reply)
    }
}

/// An expiry or a decay was applied, in all of its slots; or rows were counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ExpireReply {
    /// The routing version the server goes by.
    pub routing_version: u64,
    /// Slots in which it was applied now, or counted.
    pub applied_slots: u32,
    /// Slots that had applied it before.
    pub skipped_slots: u32,
    /// Rows that went now, or would, because no push named them for long.
    pub unseen: u64,
    /// Because their score is low.
    pub score: u64,
    /// Because their weights are small.
    pub norm: u64,
    /// Counters of keys without a row that went.
    pub counters: u64,
}

impl ExpireReply {
    /// Lay it out.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(48);
        out.extend(self.routing_version.to_le_bytes());
        out.extend(self.applied_slots.to_le_bytes());
        out.extend(self.skipped_slots.to_le_bytes());
        for rows in [self.unseen, self.score, self.norm, self.counters] {
            out.extend(rows.to_le_bytes());
        }
        out
    }

    /// Read it.
    pub fn decode(meta: &[u8]) -> Result<Self, Refusal> {
        let mut reader = Reader::new(meta);
        let reply = Self {
            routing_version: reader.u64()?,
            applied_slots: reader.u32()?,
            skipped_slots: reader.u32()?,
            unseen: reader.u64()?,
            score: reader.u64()?,
            norm: reader.u64()?,
            counters: reader.u64()?,
        };
        reader.end()?;
        Ok(reply)
    }
}

/// A client will push no more in this stream: the slots may forget it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CloseStream {
    /// The stream.
    pub stream: StreamId,
    /// The routing version the client goes by.
    pub routing_version: u64,
}

impl CloseStream {
    /// Lay it out.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(24);
        put_stream(&mut out, self.stream);
        out.extend(self.routing_version.to_le_bytes());
        out
    }

    /// Read it.
    pub fn decode(meta: &[u8]) -> Result<Self, Refusal> {
        let mut reader = Reader::new(meta);
        let stream = read_stream(&mut reader)?;
        let routing_version = reader.u64()?;
        reader.end()?;
        Ok(Self {
            stream,
            routing_version,
        })
    }
}

/// Why a request was refused. Body: the reason in words, UTF-8.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ErrorMeta {
    /// [`Refusal::code`].
    pub code: u16,
    /// Whether the same request may succeed later.
    pub retry_safe: bool,
    /// The routing version the server goes by.
    pub routing_version: u64,
}

impl ErrorMeta {
    /// Lay it out.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(16);
        out.extend(self.code.to_le_bytes());
        out.push(u8::from(self.retry_safe));
        out.extend([0; 5]);
        out.extend(self.routing_version.to_le_bytes());
        out
    }

    /// Read it.
    pub fn decode(meta: &[u8]) -> Result<Self, Refusal> {
        let mut reader = Reader::new(meta);
        let (code, retry_safe) = (reader.u16()?, reader.u8()? != 0);
        reader.take(5)?;
        let error = Self {
            code,
            retry_safe,
            routing_version: reader.u64()?,
        };
        reader.end()?;
        Ok(error)
    }
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    // Longer strings are cut: callers check lengths where it matters.
    let text = cut_text(text, MAX_TEXT_BYTES);
    out.extend((text.len() as u16).to_le_bytes());
    out.extend(text.as_bytes());
}

fn put_thresholds(out: &mut Vec<u8>, thresholds: &Thresholds) {
    let flag = |set: bool, flag: u32| if set { flag } else { 0 };
    let flags = flag(thresholds.unseen_seconds.is_some(), HAS_UNSEEN)
        | flag(thresholds.score_below.is_some(), HAS_SCORE)
        | flag(thresholds.norm_below.is_some(), HAS_NORM);
    out.extend(flags.to_le_bytes());
    out.extend(thresholds.unseen_seconds.unwrap_or(0).to_le_bytes());
    out.extend(thresholds.score_below.unwrap_or(0.0).to_le_bytes());
    out.extend(thresholds.norm_below.unwrap_or(0.0).to_le_bytes());
}

fn read_thresholds(reader: &mut Reader<'_>) -> Result<Thresholds, Refusal> {
    let (flags, unseen) = (reader.u32()?, reader.u32()?);
    let (score, norm) = (reader.f64()?, reader.f64()?);
    if flags & !(HAS_UNSEEN | HAS_SCORE | HAS_NORM) != 0 {
        let reason = format!("unknown thresholds {flags:#x} of an expiry");
        return Err(Refusal::Protocol(reason));
    }
    for (name, below) in [("score_below", score), ("norm_below", norm)] {
        if !below.is_finite() || below < 0.0 {
            return Err(Refusal::InvalidRequest(format!(
                "{name} is {below}: must be finite and not negative"
            )));
        }
    }
    Ok(Thresholds {
        unseen_seconds: (flags & HAS_UNSEEN != 0).then_some(unseen),
        score_below: (flags & HAS_SCORE != 0).then_some(score),
        norm_below: (flags & HAS_NORM != 0).then_some(norm),
    })
}

fn put_stream(out: &mut Vec<u8>, stream: StreamId) {
    out.extend(stream.job.to_le_bytes());
    out.extend(stream.pass.to_le_bytes());
    out.extend(stream.task.to_le_bytes());
}

fn read_stream(reader: &mut Reader<'_>) -> Result<StreamId, Refusal> {
    Ok(StreamId {
        job: reader.u64()?,
        pass: reader.u32()?,
        task: reader.u32()?,
    })
}
