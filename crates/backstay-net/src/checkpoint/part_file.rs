//! Reading a part: its checksum, then its arrays. Nothing of a file is used before its checksum is
//! found right.

use std::borrow::Cow;
use std::cell::Cell;
use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::path::Path;

use backstay_core::error::Refusal;
use bytemuck::Pod;
use ring::digest::{Context, SHA256};

use super::file::hex;
use super::tensors::{Dtype, Header};
use super::CheckpointError;

/// Bytes that are read in one go: they are hashed while they are in the cache, and the system
/// reads ahead meanwhile.
const READ_BYTES: usize = 256 << 10;

thread_local! {
    /// What the last part of this thread was read into, until the thread ends:
    /// memory that is new costs the kernel about as long as it takes to read a file into it.
    static BUFFER: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// A file whose checksum was right.
pub struct PartFile<'a> {
    path: &'a Path,
    file: Vec<u8>,
    header: Header,
}

impl Drop for PartFile<'_> {
    fn drop(&mut self) {
        BUFFER.set(std::mem::take(&mut self.file));
    }
}

impl<'a> PartFile<'a> {
    /// Read it; its size and its SHA-256 are those that the manifest says.
    pub fn read(path: &'a Path, bytes: u64, sha256: &str) -> Result<Self, CheckpointError> {
        let mut opened = File::open(path).map_err(CheckpointError::io(path))?;
        let length = opened.metadata().map_err(CheckpointError::io(path))?.len();
        if length != bytes {
            // Not a byte of memory for what is not there.
            let what = format!("{length} bytes, the manifest says {bytes}");
            return Err(CheckpointError::damaged(path, what));
        }
        let mut file = BUFFER.take();
        let missing = (bytes as usize).saturating_sub(file.len());
        file.reserve_exact(missing);
        file.resize(bytes as usize, 0);
        let mut digest = Context::new(&SHA256);
        for piece in file.chunks_mut(READ_BYTES) {
            opened
                .read_exact(piece)
                .map_err(CheckpointError::io(path))?;
            digest.update(piece);
        }
        let found = hex(digest.finish().as_ref());
        if found != sha256 {
            let what = format!("its SHA-256 is {found}, the manifest says {sha256}");
            return Err(CheckpointError::damaged(path, what));
        }
        let header = Header::read(&file)
            .map_err(|error| CheckpointError::damaged(path, error.to_string()))?;
        Ok(Self { path, file, header })
    }

    /// It is not what it should be.
    pub fn damaged(&self, what: String) -> CheckpointError {
        CheckpointError::damaged(self.path, what)
    }

    /// Rows that do not fit each other or their slot are the file's fault.
    pub fn refused(&self, refusal: Refusal) -> CheckpointError {
        match refusal {
            Refusal::InvalidRequest(what) => self.damaged(what),
            other => other.into(),
        }
    }

    /// What the file says that it is, and of what.
    pub fn metadata(&self, name: &str) -> Option<String> {
        self.header.metadata().remove(name)
    }

    /// The names of the tables with rows, or deleted rows, in it.
    pub fn tables(&self) -> Vec<String> {
        let suffixes = [".runs", ".deleted_runs"];
        let name = |name: &String| {
            let table = name.strip_prefix("table.")?;
            suffixes
                .iter()
                .find_map(|suffix| table.strip_suffix(suffix))
                .map(str::to_owned)
        };
        let mut tables: Vec<String> = self.header.names().iter().filter_map(name).collect();
        tables.dedup();
        tables.sort();
        tables.dedup();
        tables
    }

    /// An array; empty if it is not there. `columns`: None for one dimension.
    pub fn array<T: Pod>(
        &self,
        name: &str,
        dtype: Dtype,
        columns: Option<usize>,
    ) -> Result<Cow<'_, [T]>, CheckpointError> {
        let Some((found, shape, range)) = self.header.tensor(name) else {
            return Ok(Cow::Borrowed(&[]));
        };
        let fits = match columns {
            None => shape.len() == 1,
            Some(columns) => shape.len() == 2 && (shape[1] == columns || range.is_empty()),
        };
        if found != dtype || !fits {
            let what = format!("tensor {name} is {found} {shape:?}");
            return Err(self.damaged(what));
        }
        let bytes = &self.file[range];
        // Our own files are laid out so that nothing has to be copied.
        Ok(bytemuck::try_cast_slice(bytes).map_or_else(
            |_| Cow::Owned(bytemuck::pod_collect_to_vec(bytes)),
            Cow::Borrowed,
        ))
    }

    /// The slots that `runs` of a table name, each with which of its `total` rows are its.
    pub fn runs(
        &self,
        table: &str,
        runs: &[u64],
        total: usize,
    ) -> Result<Vec<(u64, Range<usize>)>, CheckpointError> {
        let runs: Vec<_> = runs.chunks_exact(2).collect();
        if !runs.is_sorted_by(|a, b| a[0] < b[0]) {
            let what = format!("table {table}: its slots do not ascend, each once");
            return Err(self.damaged(what));
        }
        let mut at = 0usize;
        let mut found = Vec::with_capacity(runs.len());
        for run in runs {
            let end = at.checked_add(run[1] as usize).filter(|&end| end <= total);
            let end = end.ok_or_else(|| {
                self.damaged(format!("table {table}: runs of more rows than there are"))
            })?;
            found.push((run[0], at..end));
            at = end;
        }
        if at == total {
            return Ok(found);
        }
        Err(self.damaged(format!("table {table}: {total} rows, runs of {at}")))
    }
}
