//! Any bytes into the frame reader and the decoders; what must hold is in `frame_case`.

#![no_main]

#[path = "../../crates/backstay-net/tests/support/frame_case.rs"]
mod frame_case;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    frame_case::check(input);
});
