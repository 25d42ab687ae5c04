//! A file that is there whole and on the disk, or not at all.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ring::digest::{Context, SHA256};

use super::CheckpointError;

/// Bytes that are written in one go; between two, the writer may pause or be told to stop.
const CHUNK_BYTES: usize = 1 << 20;
/// So often a writer that pauses looks whether it is to stop.
const LOOK: Duration = Duration::from_millis(100);

/// How fast, and whether at all.
pub struct Pace<'a> {
    /// Bytes in a second, at most; 0: no limit.
    pub bytes_per_s: u64,
    /// Set when the file is not wanted any longer.
    pub cancelled: &'a AtomicBool,
}

impl Pace<'_> {
    /// Wait until then, or until the file is not wanted any longer.
    fn wait(&self, until: Instant) -> Result<(), CheckpointError> {
        loop {
            if self.cancelled.load(Ordering::Relaxed) {
                return Err(CheckpointError::Cancelled);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            std::thread::sleep(left.min(LOOK));
        }
    }
}

/// Write a file of several pieces: aside, to the disk, then under its name. Returns its size and
/// its SHA-256 in hex.
pub fn write_whole(
    path: &Path,
    pieces: &[&[u8]],
    pace: &Pace<'_>,
) -> Result<(u64, String), CheckpointError> {
    let mut aside = path.as_os_str().to_owned();
    aside.push(".tmp");
    let aside = PathBuf::from(aside);
    let written = write_aside(&aside, pieces, pace);
    let placed = written.and_then(|written| {
        fs::rename(&aside, path).map_err(CheckpointError::io(path))?;
        sync_folder(path)?;
        Ok(written)
    });
    if placed.is_err() {
        // Whatever went wrong, it goes on being said; a file that cannot be removed is harmless.
        let _ = fs::remove_file(&aside);
    }
    placed
}

fn write_aside(
    path: &Path,
    pieces: &[&[u8]],
    pace: &Pace<'_>,
) -> Result<(u64, String), CheckpointError> {
    let mut file = File::create(path).map_err(CheckpointError::io(path))?;
    let mut digest = Context::new(&SHA256);
    let (begun, mut bytes) = (Instant::now(), 0u64);
    for chunk in pieces.iter().flat_map(|piece| piece.chunks(CHUNK_BYTES)) {
        if pace.cancelled.load(Ordering::Relaxed) {
            return Err(CheckpointError::Cancelled);
        }
        digest.update(chunk);
        file.write_all(chunk).map_err(CheckpointError::io(path))?;
        bytes += chunk.len() as u64;
        if pace.bytes_per_s > 0 {
            let due = Duration::from_secs_f64(bytes as f64 / pace.bytes_per_s as f64);
            pace.wait(begun + due)?;
        }
    }
    file.sync_all().map_err(CheckpointError::io(path))?;
    Ok((bytes, hex(digest.finish().as_ref())))
}

/// A file's name is on the disk only when its folder is.
fn sync_folder(path: &Path) -> Result<(), CheckpointError> {
    let folder = path.parent().unwrap_or(Path::new("."));
    let folder = if folder.as_os_str().is_empty() {
        Path::new(".")
    } else {
        folder
    };
    let opened = File::open(folder).map_err(CheckpointError::io(folder))?;
    opened.sync_all().map_err(CheckpointError::io(folder))
}

/// Bytes in hex.
pub fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}
