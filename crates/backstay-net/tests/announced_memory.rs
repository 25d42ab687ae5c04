//! Memory follows the bytes that come, not those announced. Alone in its program: it counts
//! what the whole process allocates.

// What fails in a helper is a failed test.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "support/counting.rs"]
mod counting;
mod support;

use backstay_core::wire::{Limits, Opcode};
use backstay_net::server::ServerOptions;
use support::{assert_still_serves, head, options, push_meta, start, Raw};

#[global_allocator]
static ALLOCATOR: counting::Counting = counting::Counting;

/// Of each hostile client.
const ANNOUNCED: u64 = 1 << 34;
const CLIENTS: usize = 32;
/// For each: its read-ahead buffer, the first piece of a body, tasks and sockets.
const ALLOWED: usize = CLIENTS * (1024 + 64 + 64) * 1024;

#[test]
fn two_to_the_32_keys_announced_by_many_and_none_sent() {
    let server = start(ServerOptions {
        // As if nothing were refused for its size.
        limits: Limits {
            max_frame_bytes: 1 << 40,
            max_keys: u32::MAX,
        },
        ..options()
    });
    assert_still_serves(&server);
    let before = counting::mark();
    let mut clients: Vec<Raw> = (0..CLIENTS).map(|_| Raw::greeted(&server)).collect();
    for raw in &mut clients {
        raw.send(&head(Opcode::Push, 1, 64, ANNOUNCED));
        raw.send(&push_meta("t", u32::MAX as usize, 9, 0, 0).encode());
    }
    assert_still_serves(&server);
    for raw in &mut clients {
        // Its end is seen only by a server that waits for the body: by then it is allocated.
        raw.finish_sending();
        raw.expect_closed();
    }
    let used = counting::peak() - before;
    assert!(used < ALLOWED, "{used} bytes for bodies that never came");
    assert_still_serves(&server);
}
