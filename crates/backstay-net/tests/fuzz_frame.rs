//! The frame reader and all decoders against damaged frames and plain noise, from a seed.
//!
//! `BACKSTAY_FUZZ_CASES` and `BACKSTAY_FUZZ_SEED` choose how many and which; a failure names
//! its seed and its bytes. `fuzz/` runs the same checks guided by coverage.

// What fails in a helper is a failed test.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "support/counting.rs"]
mod counting;
#[path = "support/frame_case.rs"]
mod frame_case;

use std::fmt::Write;
use std::panic::catch_unwind;

use backstay_core::hash::mix64;
use backstay_core::wire::HEADER_BYTES;

#[global_allocator]
static ALLOCATOR: counting::Counting = counting::Counting;

/// What a reader may hold besides four times what has come: its read-ahead buffer, the first
/// piece of a body, and change.
const FIXED_BYTES: usize = 64 * 1024 + 1024 * 1024 + 64 * 1024;

/// Numbers from a seed.
struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix64(self.0)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }
}

/// One good frame of each kind and more: the vectors of the specification.
fn good_frames() -> Vec<Vec<u8>> {
    let vectors = include_str!("../../../proto/vectors/frames.json");
    let vectors: Vec<serde_json::Value> = serde_json::from_str(vectors).unwrap();
    let bytes = |vector: &serde_json::Value| {
        let hex = vector["hex"].as_str().unwrap();
        let byte = |at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
        (0..hex.len()).step_by(2).map(byte).collect()
    };
    vectors.iter().map(bytes).collect()
}

/// Damage in one place, of a kind that breaks parsers.
fn damage(bytes: &mut Vec<u8>, dice: &mut Dice) {
    const TELLING: [u64; 8] = [0, 1, 0x7f, 0x80, 0xff, 0xffff, 1 << 31, u64::MAX];
    if bytes.is_empty() {
        return;
    }
    let at = dice.below(bytes.len());
    match dice.below(6) {
        0 => bytes[at] ^= 1 << dice.below(8),
        1 => bytes[at] = dice.next() as u8,
        2 => bytes.truncate(at),
        3 => drop(bytes.splice(at..at, std::iter::repeat_n(0x41, 1 + dice.below(40)))),
        // A length field, or whatever lies there, takes a telling value.
        _ => {
            let places = [4, 6, 8, 16, 20, 24, HEADER_BYTES, at];
            let place = places[dice.below(places.len())];
            let value = TELLING[dice.below(TELLING.len())].wrapping_add(dice.next() % 3);
            let width = 1 << dice.below(4);
            for (byte, new) in bytes
                .iter_mut()
                .skip(place)
                .zip(&value.to_le_bytes()[..width])
            {
                *byte = *new;
            }
        }
    }
}

/// A pace, then good frames in a row of which most are damaged; now and then noise.
fn input(good: &[Vec<u8>], dice: &mut Dice) -> Vec<u8> {
    let paces = [0, 0, 1, 7, 32, 255];
    let mut bytes = vec![paces[dice.below(paces.len())]];
    if dice.below(10) == 0 {
        let length = dice.below(200);
        bytes.extend((0..length).map(|_| dice.next() as u8));
        return bytes;
    }
    for _ in 0..=dice.below(3) {
        let mut frame = good[dice.below(good.len())].clone();
        for _ in 0..dice.below(4) {
            damage(&mut frame, dice);
        }
        bytes.extend(frame);
    }
    bytes
}

fn number(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name}={text}")),
        Err(_) => default,
    }
}

#[test]
fn no_bytes_break_the_reader() {
    let cases = number("BACKSTAY_FUZZ_CASES", 200_000);
    let seed = number("BACKSTAY_FUZZ_SEED", 20_261_121);
    let good = good_frames();
    for bytes in &good {
        assert_eq!(frame_case::check(&[&[0], &bytes[..]].concat()), 1);
    }
    let mut dice = Dice(seed);
    let (mut whole, mut hardly) = (0, 0);
    for case in 0..cases {
        let bytes = input(&good, &mut dice);
        let before = counting::mark();
        let outcome = catch_unwind(|| frame_case::check(&bytes));
        let used = counting::peak() - before;
        let fine = outcome.is_ok() && used <= FIXED_BYTES + 4 * bytes.len();
        if !fine {
            let hex = bytes.iter().fold(String::new(), |mut hex, byte| {
                write!(hex, "{byte:02x}").unwrap();
                hex
            });
            panic!("case {case} of seed {seed} used {used} bytes, input {hex}: {outcome:?}");
        }
        whole += outcome.unwrap();
        hardly = hardly.max(used);
    }
    // Neither all noise nor all well-formed: both sides of every check are visited.
    let cases = cases as usize;
    assert!(whole > cases / 4 && whole < cases * 2, "{whole} of {cases}");
    assert!(hardly > 1024 * 1024, "no case announced much: {hardly}");
}
