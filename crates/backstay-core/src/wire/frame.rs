//! The frame: a fixed header, a small meta part, a body of raw arrays.

use crate::error::Refusal;

/// The first four bytes of every frame: `BKSY`.
pub const MAGIC: u32 = u32::from_le_bytes(*b"BKSY");
/// The version this code speaks.
pub const PROTOCOL_VERSION: u8 = 2;
/// Bytes of a header.
pub const HEADER_BYTES: usize = 32;
/// The most bytes a meta part may have.
pub const MAX_META_BYTES: u32 = 4096;
/// The most bytes of one string in a meta part.
pub const MAX_TEXT_BYTES: usize = 1024;
/// Header flag: the checksum field holds the CRC-32C of meta and body.
pub const FLAG_CHECKSUM: u16 = 1;

/// What a frame asks or answers. A reply's number is its request's plus 0x80.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Opcode {
    /// First frame of a client.
    Hello = 0x01,
    /// Is anybody there?
    Ping = 0x02,
    /// Read rows.
    Pull = 0x10,
    /// Change rows.
    Push = 0x11,
    /// A client will push no more in a stream.
    CloseStream = 0x12,
    /// Remove rows.
    Delete = 0x13,
    /// Remove rows that have expired.
    Expire = 0x14,
    /// Count the rows that an expiry would remove.
    CountExpired = 0x15,
    /// Have shows and clicks decay.
    Decay = 0x16,
    /// Servers among themselves: see [`super::peer`].
    Peer = 0x20,
    /// Answer to [`Opcode::Hello`].
    HelloReply = 0x81,
    /// Answer to [`Opcode::Ping`].
    Pong = 0x82,
    /// Answer to [`Opcode::Pull`].
    PullReply = 0x90,
    /// Answer to [`Opcode::Push`].
    PushReply = 0x91,
    /// Answer to [`Opcode::CloseStream`].
    CloseStreamReply = 0x92,
    /// Answer to [`Opcode::Delete`].
    DeleteReply = 0x93,
    /// Answer to [`Opcode::Expire`], [`Opcode::CountExpired`] and [`Opcode::Decay`].
    ExpireReply = 0x94,
    /// The server stops: it answers what it has read and takes nothing new.
    GoAway = 0xFE,
    /// The request of the same number was refused.
    Error = 0xFF,
}

impl Opcode {
    fn from_byte(byte: u8) -> Option<Self> {
        Some(match byte {
            0x01 => Self::Hello,
            0x02 => Self::Ping,
            0x10 => Self::Pull,
            0x11 => Self::Push,
            0x12 => Self::CloseStream,
            0x13 => Self::Delete,
            0x14 => Self::Expire,
            0x15 => Self::CountExpired,
            0x16 => Self::Decay,
            0x20 => Self::Peer,
            0x81 => Self::HelloReply,
            0x82 => Self::Pong,
            0x90 => Self::PullReply,
            0x91 => Self::PushReply,
            0x92 => Self::CloseStreamReply,
            0x93 => Self::DeleteReply,
            0x94 => Self::ExpireReply,
            0xFE => Self::GoAway,
            0xFF => Self::Error,
            _ => return None,
        })
    }
}

/// What a receiver accepts.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// The most bytes of meta and body together.
    pub max_frame_bytes: u64,
    /// The most keys of one request.
    pub max_keys: u32,
}

/// The fixed head of every frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// What it is.
    pub opcode: Opcode,
    /// [`FLAG_CHECKSUM`] or 0.
    pub flags: u16,
    /// Chosen by the client, unique among its open requests; the reply repeats it.
    pub request_id: u64,
    /// Bytes of the meta part.
    pub meta_bytes: u32,
    /// CRC-32C of meta and body, if the flag says so; else 0.
    pub checksum: u32,
    /// Bytes of the body.
    pub body_bytes: u64,
}

impl Header {
    /// The head of a frame that carries no checksum.
    pub fn plain(opcode: Opcode, request_id: u64, meta_bytes: usize, body_bytes: usize) -> Self {
        Self {
            opcode,
            flags: 0,
            request_id,
            meta_bytes: meta_bytes as u32,
            checksum: 0,
            body_bytes: body_bytes as u64,
        }
    }

    /// Lay it out.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        out[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        out[4] = PROTOCOL_VERSION;
        out[5] = self.opcode as u8;
        out[6..8].copy_from_slice(&self.flags.to_le_bytes());
        out[8..16].copy_from_slice(&self.request_id.to_le_bytes());
        out[16..20].copy_from_slice(&self.meta_bytes.to_le_bytes());
        out[20..24].copy_from_slice(&self.checksum.to_le_bytes());
        out[24..32].copy_from_slice(&self.body_bytes.to_le_bytes());
        out
    }

    /// Read and check a header. An error here means that the stream of bytes is lost: the
    /// receiver says why and closes the connection.
    pub fn decode(bytes: &[u8; HEADER_BYTES], limits: &Limits) -> Result<Self, Refusal> {
        let [m0, m1, m2, m3, version, opcode, f0, f1, rest @ ..] = *bytes;
        let magic = u32::from_le_bytes([m0, m1, m2, m3]);
        if magic != MAGIC {
            return Err(Refusal::Protocol(format!(
                "frame starts with {magic:#010x} instead of {MAGIC:#010x}: this port speaks backstay's data plane"
            )));
        }
        if version != PROTOCOL_VERSION {
            return Err(Refusal::Protocol(format!(
                "protocol version {version} came, {PROTOCOL_VERSION} is spoken here: use matching releases"
            )));
        }
        let opcode = Opcode::from_byte(opcode)
            .ok_or_else(|| Refusal::Protocol(format!("unknown opcode {opcode:#04x}")))?;
        let mut rest = Reader::new(&rest);
        let header = Self {
            opcode,
            flags: u16::from_le_bytes([f0, f1]),
            request_id: rest.u64()?,
            meta_bytes: rest.u32()?,
            checksum: rest.u32()?,
            body_bytes: rest.u64()?,
        };
        header.check(limits)?;
        Ok(header)
    }

    fn check(&self, limits: &Limits) -> Result<(), Refusal> {
        if self.flags & !FLAG_CHECKSUM != 0 {
            return Err(Refusal::Protocol(format!(
                "unknown flags {:#06x}",
                self.flags
            )));
        }
        if self.flags & FLAG_CHECKSUM == 0 && self.checksum != 0 {
            return Err(Refusal::Protocol("a checksum came without its flag".into()));
        }
        if self.meta_bytes > MAX_META_BYTES {
            return Err(Refusal::Protocol(format!(
                "{} bytes of meta announced, at most {MAX_META_BYTES} are allowed",
                self.meta_bytes
            )));
        }
        let bytes = self.body_bytes.saturating_add(u64::from(self.meta_bytes));
        if bytes > limits.max_frame_bytes {
            return Err(Refusal::LimitExceeded(format!(
                "a frame of {bytes} bytes announced, the limit is {} (max_frame_bytes): send smaller batches or raise it",
                limits.max_frame_bytes
            )));
        }
        Ok(())
    }

    /// Check meta and body against the checksum, if the header carries one.
    pub fn verify(&self, meta: &[u8], body: &[u8]) -> Result<(), Refusal> {
        if self.flags & FLAG_CHECKSUM == 0 || checksum(meta, body) == self.checksum {
            return Ok(());
        }
        Err(Refusal::Protocol(
            "the frame's checksum does not fit its bytes: it was damaged on its way".into(),
        ))
    }
}

/// The longest start of `text` that has at most `most` bytes and ends with a whole character.
pub fn cut_text(text: &str, most: usize) -> &str {
    let mut length = text.len().min(most);
    while !text.is_char_boundary(length) {
        length -= 1;
    }
    &text[..length]
}

/// CRC-32C (Castagnoli) of meta followed by body.
pub fn checksum(meta: &[u8], body: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(meta), body)
}

/// Reads little-endian fields one after the other; refuses to read past the end.
pub(super) struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    pub(super) fn take(&mut self, count: usize) -> Result<&'a [u8], Refusal> {
        let (taken, rest) = self.rest.split_at_checked(count).ok_or_else(|| {
            Refusal::Protocol(format!(
                "{count} more bytes of meta are needed, {} are there",
                self.rest.len()
            ))
        })?;
        self.rest = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Refusal> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N)?);
        Ok(out)
    }

    pub(super) fn u8(&mut self) -> Result<u8, Refusal> {
        self.array().map(u8::from_le_bytes)
    }

    pub(super) fn u16(&mut self) -> Result<u16, Refusal> {
        self.array().map(u16::from_le_bytes)
    }

    pub(super) fn u32(&mut self) -> Result<u32, Refusal> {
        self.array().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64, Refusal> {
        self.array().map(u64::from_le_bytes)
    }

    pub(super) fn f32(&mut self) -> Result<f32, Refusal> {
        self.array().map(f32::from_le_bytes)
    }

    pub(super) fn f64(&mut self) -> Result<f64, Refusal> {
        self.array().map(f64::from_le_bytes)
    }

    /// A string: its length in bytes as u16, then UTF-8.
    pub(super) fn text(&mut self) -> Result<String, Refusal> {
        let length = self.u16()? as usize;
        if length > MAX_TEXT_BYTES {
            return Err(Refusal::Protocol(format!(
                "a string field of {length} bytes, at most {MAX_TEXT_BYTES} are allowed"
            )));
        }
        String::from_utf8(self.take(length)?.to_vec())
            .map_err(|_| Refusal::Protocol("a string field is not UTF-8".into()))
    }

    /// How many bytes are left.
    pub(super) fn left(&self) -> usize {
        self.rest.len()
    }

    /// Everything that is left.
    pub(super) fn rest(self) -> &'a [u8] {
        self.rest
    }

    /// Nothing may be left over.
    pub(super) fn end(self) -> Result<(), Refusal> {
        if self.rest.is_empty() {
            return Ok(());
        }
        Err(Refusal::Protocol(format!(
            "{} bytes too many in meta",
            self.rest.len()
        )))
    }
}
