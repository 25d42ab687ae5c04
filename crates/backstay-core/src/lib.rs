//! The pure core of backstay: rows, optimizers, transactions and the wire format.
//!
//! Nothing here opens a socket, reads a clock, starts a thread or draws a random number:
//! the same calls in the same order give the same bytes on every replica, and a simulator
//! can drive them.
//!
//! From the bottom up: [`hash`] places keys; [`spec`] describes tables; [`initializer`],
//! [`optimizer`], [`storage`], [`gradient`] and [`life`] work on single rows; [`expression`] runs
//! users' functions over blocks of them; [`staleness`] counts how old a gradient is, and
//! [`compensation`] makes up for it; [`row_map`] holds the rows of one slot, by a [`row_index`],
//! with [`marks`] on rows that changed and the keys that were [`removed`], and [`table`] the rows of
//! many slots; [`read_table`] is for lookups alone, where an export is served;
//! [`stream_memory`] remembers what was applied of each [`stream`];
//! [`engine`] stages and commits [`transaction`]s; [`replication`] decides when;
//! [`wire`] lays requests out as bytes.

#[cfg(target_endian = "big")]
compile_error!("backstay lays arrays on the wire as they are in memory, little-endian");

mod closed;
pub mod compensation;
pub mod engine;
pub mod error;
pub mod expression;
pub mod gradient;
pub mod hash;
pub mod initializer;
pub mod life;
pub mod marks;
pub mod optimizer;
mod prefetch;
pub mod read_table;
pub mod removed;
pub mod replication;
pub mod row_index;
pub mod row_map;
pub mod spec;
pub mod staleness;
pub mod storage;
pub mod stream;
pub mod stream_memory;
pub mod table;
pub mod transaction;
pub mod wire;
