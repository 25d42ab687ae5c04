//! The data plane's wire format, as `proto/data_plane.md` describes it. Bytes in, values out:
//! no sockets. Every length is checked against a limit before anything is allocated for it.

mod frame;
mod message;
pub mod peer;
mod settings;

pub use frame::{
    checksum, cut_text, Header, Limits, Opcode, FLAG_CHECKSUM, HEADER_BYTES, MAGIC, MAX_META_BYTES,
    MAX_TEXT_BYTES, PROTOCOL_VERSION,
};
pub use message::{
    CloseStream, DeleteReply, ErrorMeta, ExpireReply, Hello, HelloReply, PullMeta, PullReply,
    PushKind, PushMeta, PushReply, MAX_ERROR_TEXT_BYTES,
};
