//! A plain copy over loopback TCP, each way: the ceiling of a dense pull and a dense push.
//!
//! One server thread and one client thread of one process; a transfer is one `write_all` of the
//! whole buffer on one side and one `read_exact` on the other. A pull ends when the last byte is
//! read; a push ends when the server's one byte of acknowledgement is back.
//!
//! ```text
//! rustc -O -C target-cpu=native bench/loopback_copy.rs -o loopback_copy
//! ./loopback_copy bytes=67108864 repeats=30 warmup=5
//! ```
//!
//! It prints one line of JSON; GB are 10^9 bytes.

use std::io::{Read, Result, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Instant;

const PULL: u8 = 0;
const PUSH: u8 = 1;

fn serve(mut connection: TcpStream, bytes: usize) -> Result<()> {
    let mut buffer = vec![1u8; bytes];
    let mut kind = [0u8];
    loop {
        connection.read_exact(&mut kind)?;
        if kind[0] == PULL {
            connection.write_all(&buffer)?;
        } else {
            connection.read_exact(&mut buffer)?;
            connection.write_all(&kind)?;
        }
    }
}

/// Seconds of one transfer.
fn transfer(connection: &mut TcpStream, kind: u8, buffer: &mut [u8]) -> Result<f64> {
    let begun = Instant::now();
    connection.write_all(&[kind])?;
    if kind == PULL {
        connection.read_exact(buffer)?;
    } else {
        connection.write_all(buffer)?;
        connection.read_exact(&mut [0u8])?;
    }
    Ok(begun.elapsed().as_secs_f64())
}

/// The median seconds of `repeats` transfers, after `warmup` that do not count.
fn median(
    connection: &mut TcpStream,
    kind: u8,
    buffer: &mut [u8],
    repeats: usize,
    warmup: usize,
) -> Result<f64> {
    let mut seconds = Vec::with_capacity(repeats);
    for round in 0..warmup + repeats {
        let elapsed = transfer(connection, kind, buffer)?;
        if round >= warmup {
            seconds.push(elapsed);
        }
    }
    seconds.sort_by(f64::total_cmp);
    Ok(seconds[repeats / 2])
}

/// The value of `name=value` on the command line.
fn argument(name: &str, default: usize) -> usize {
    let prefix = format!("{name}=");
    let given = std::env::args().find_map(|word| word.strip_prefix(&prefix).map(str::to_owned));
    given.map_or(default, |word| {
        word.parse().expect("arguments are integers")
    })
}

fn main() -> Result<()> {
    let bytes = argument("bytes", 64 << 20);
    let (repeats, warmup) = (argument("repeats", 30), argument("warmup", 5));
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    std::thread::spawn(move || -> Result<()> {
        let (connection, _) = listener.accept()?;
        connection.set_nodelay(true)?;
        serve(connection, bytes)
    });
    let mut connection = TcpStream::connect(address)?;
    connection.set_nodelay(true)?;
    let mut buffer = vec![2u8; bytes];
    let pull = median(&mut connection, PULL, &mut buffer, repeats, warmup)?;
    let push = median(&mut connection, PUSH, &mut buffer, repeats, warmup)?;
    let gigabytes = bytes as f64 / 1e9;
    println!(
        "{{\"pull_gb_per_s\": {:.4}, \"push_gb_per_s\": {:.4}}}",
        gigabytes / pull,
        gigabytes / push,
    );
    Ok(())
}
