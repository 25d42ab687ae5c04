//! The bare ceiling of one training step on this machine: what is left when everything that
//! makes a parameter server is taken away.
//!
//! One server thread and one client thread of one process talk over a loopback TCP connection
//! with no framing beyond a kind and a count. A step is: dedupe the batch, pull its rows, spread
//! them over the batch, compute and merge the gradients, push them with plain SGD. There is no
//! table but one, no error handling, no replication, no limit, and no second request in flight.
//!
//! Standard library only, so that it builds with the compiler alone:
//!
//! ```text
//! rustc -O -C target-cpu=native bench/ceiling.rs -o ceiling
//! ./ceiling keys_per_step=53248 keys=1000000 dim=16 steps=300 warmup=30
//! ```
//!
//! It prints one line of JSON. A failure of the connection ends the program: it is a measuring
//! instrument, not a server.

use std::io::{Read, Result, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Instant;

const LEARNING_RATE: f32 = 0.1;
const INITIAL_WEIGHT: f32 = 0.01;
const GRADIENT_SCALE: f32 = 1e-3;
/// Batches drawn before the clock starts and used in turn, so that drawing is not measured.
const BATCHES: usize = 8;
const PULL: u32 = 0;
const PUSH: u32 = 1;
/// A slot of the index that holds no key; the drawn keys are far smaller.
const EMPTY: u64 = u64::MAX;

/// Mixes all bits of a key (the finaliser of MurmurHash3), because keys are often consecutive.
fn mix64(mut key: u64) -> u64 {
    key ^= key >> 33;
    key = key.wrapping_mul(0xff51_afd7_ed55_8ccd);
    key ^= key >> 33;
    key = key.wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    key ^ (key >> 33)
}

/// Numbers keys in order of their first appearance: open addressing, linear probing, never grows.
struct KeyIndex {
    mask: usize,
    keys: Vec<u64>,
    numbers: Vec<u32>,
    count: u32,
}

impl KeyIndex {
    /// Room for `capacity` keys at a load of at most one half.
    fn with_capacity(capacity: usize) -> Self {
        let places = capacity.next_power_of_two() * 2;
        KeyIndex {
            mask: places - 1,
            keys: vec![EMPTY; places],
            numbers: vec![0; places],
            count: 0,
        }
    }

    #[inline]
    fn number_of(&mut self, key: u64) -> u32 {
        let mut place = mix64(key) as usize & self.mask;
        loop {
            if self.keys[place] == key {
                return self.numbers[place];
            }
            if self.keys[place] == EMPTY {
                self.keys[place] = key;
                self.numbers[place] = self.count;
                self.count += 1;
                return self.count - 1;
            }
            place = (place + 1) & self.mask;
        }
    }
}

/// Plain numbers that may be sent as the bytes they are.
trait Plain: Copy {}
impl Plain for u32 {}
impl Plain for u64 {}
impl Plain for f32 {}

fn bytes_of<T: Plain>(values: &[T]) -> &[u8] {
    // SAFETY: T is a primitive number without padding; the byte length is that of the slice.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), std::mem::size_of_val(values)) }
}

fn bytes_of_mut<T: Plain>(values: &mut [T]) -> &mut [u8] {
    // SAFETY: as above, and every bit pattern is a valid value of T.
    unsafe {
        std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), std::mem::size_of_val(values))
    }
}

/// Serves pulls and pushes until the client hangs up.
fn serve(mut connection: TcpStream, keys: usize, dim: usize) -> Result<()> {
    let mut index = KeyIndex::with_capacity(keys);
    let mut weights = vec![INITIAL_WEIGHT; (keys + 1) * dim];
    let (mut request, mut rows, mut values) = (Vec::new(), Vec::new(), Vec::new());
    loop {
        let mut header = [0u32; 2];
        connection.read_exact(bytes_of_mut(&mut header))?;
        let [kind, count] = header;
        request.resize(count as usize, 0u64);
        values.resize(count as usize * dim, 0f32);
        connection.read_exact(bytes_of_mut(&mut request))?;
        if kind == PUSH {
            connection.read_exact(bytes_of_mut(&mut values))?;
        }
        rows.clear();
        rows.extend(
            request
                .iter()
                .map(|&key| index.number_of(key) as usize * dim),
        );
        if kind == PULL {
            for (value, &row) in values.chunks_exact_mut(dim).zip(&rows) {
                value.copy_from_slice(&weights[row..row + dim]);
            }
            connection.write_all(bytes_of(&values))?;
        } else {
            for (gradient, &row) in values.chunks_exact(dim).zip(&rows) {
                for (weight, slope) in weights[row..row + dim].iter_mut().zip(gradient) {
                    *weight -= LEARNING_RATE * slope;
                }
            }
            connection.write_all(&[1])?;
        }
    }
}

/// The client's buffers, all allocated before the clock starts.
struct Trainer {
    connection: TcpStream,
    dim: usize,
    unique: Vec<u64>,
    number_of_key: Vec<u32>,
    pulled: Vec<f32>,
    looked_up: Vec<f32>,
    gradients: Vec<f32>,
}

impl Trainer {
    fn new(connection: TcpStream, keys_per_step: usize, dim: usize) -> Self {
        let values = keys_per_step * dim;
        Trainer {
            connection,
            dim,
            unique: Vec::with_capacity(keys_per_step),
            number_of_key: vec![0; keys_per_step],
            pulled: vec![0.0; values],
            looked_up: vec![0.0; values],
            gradients: vec![0.0; values],
        }
    }

    fn step(&mut self, batch: &[u64]) -> Result<()> {
        self.dedupe(batch);
        self.pull()?;
        self.combine();
        self.push()
    }

    fn dedupe(&mut self, batch: &[u64]) {
        let mut index = KeyIndex::with_capacity(batch.len());
        self.unique.clear();
        for (number_of_key, &key) in self.number_of_key.iter_mut().zip(batch) {
            *number_of_key = index.number_of(key);
            if *number_of_key as usize == self.unique.len() {
                self.unique.push(key);
            }
        }
    }

    fn pull(&mut self) -> Result<()> {
        self.connection
            .write_all(bytes_of(&[PULL, self.unique.len() as u32]))?;
        self.connection.write_all(bytes_of(&self.unique))?;
        let values = self.unique.len() * self.dim;
        self.connection
            .read_exact(bytes_of_mut(&mut self.pulled[..values]))
    }

    /// Spreads the rows over the batch, and merges the gradient of each looked-up key.
    fn combine(&mut self) {
        let dim = self.dim;
        for (row, &number) in self
            .looked_up
            .chunks_exact_mut(dim)
            .zip(&self.number_of_key)
        {
            let at = number as usize * dim;
            row.copy_from_slice(&self.pulled[at..at + dim]);
        }
        self.gradients[..self.unique.len() * dim].fill(0.0);
        for (row, &number) in self.looked_up.chunks_exact(dim).zip(&self.number_of_key) {
            let at = number as usize * dim;
            for (slope, weight) in self.gradients[at..at + dim].iter_mut().zip(row) {
                *slope += 2.0 * (weight - 1.0) * GRADIENT_SCALE;
            }
        }
    }

    fn push(&mut self) -> Result<()> {
        let values = self.unique.len() * self.dim;
        self.connection
            .write_all(bytes_of(&[PUSH, self.unique.len() as u32]))?;
        self.connection.write_all(bytes_of(&self.unique))?;
        self.connection
            .write_all(bytes_of(&self.gradients[..values]))?;
        self.connection.read_exact(&mut [0u8])
    }
}

/// Uniform keys from a xorshift generator; the modulus bias is far below the noise.
fn draw_batches(keys_per_step: usize, keys: usize) -> Vec<Vec<u64>> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % keys as u64
    };
    (0..BATCHES)
        .map(|_| (0..keys_per_step).map(|_| next()).collect())
        .collect()
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
    let keys_per_step = argument("keys_per_step", 53_248);
    let (keys, dim) = (argument("keys", 1_000_000), argument("dim", 16));
    let (steps, warmup) = (argument("steps", 300), argument("warmup", 30));

    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    std::thread::spawn(move || -> Result<()> {
        let (connection, _) = listener.accept()?;
        connection.set_nodelay(true)?;
        serve(connection, keys, dim)
    });
    let connection = TcpStream::connect(address)?;
    connection.set_nodelay(true)?;

    let batches = draw_batches(keys_per_step, keys);
    let mut trainer = Trainer::new(connection, keys_per_step, dim);
    for step in 0..warmup {
        trainer.step(&batches[step % BATCHES])?;
    }
    let started = Instant::now();
    let mut seconds = Vec::with_capacity(steps);
    for step in warmup..warmup + steps {
        let begun = Instant::now();
        trainer.step(&batches[step % BATCHES])?;
        seconds.push(begun.elapsed().as_secs_f64());
    }
    let total = started.elapsed().as_secs_f64();
    seconds.sort_by(f64::total_cmp);
    let (best, median) = (seconds[0], seconds[steps / 2]);
    let keys_per_step = keys_per_step as f64;
    println!(
        "{{\"keys_per_s\": {:.0}, \"mean_keys_per_s\": {:.0}, \"best_keys_per_s\": {:.0}, \
         \"median_step_ms\": {:.4}, \"best_step_ms\": {:.4}}}",
        keys_per_step / median,
        keys_per_step * steps as f64 / total,
        keys_per_step / best,
        median * 1e3,
        best * 1e3,
    );
    Ok(())
}
