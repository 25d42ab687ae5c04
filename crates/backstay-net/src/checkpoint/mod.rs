//! Checkpoints and running exports: the rows of slots as files, and back.
//!
//! [`copy_slots`] copies slots, each in one short step, to be written to a file; [`load_part`]
//! checks a file and puts its rows into slots that wait for them; [`ServedTables`] take the rows of
//! exports where these are served. Which slots go where, and when a
//! checkpoint is whole, is decided elsewhere. The layout of the files is public: see
//! docs/reference/checkpoint-format.md. Runs on the caller's thread, never on those of the data
//! plane; file names come from the caller, never out of a file.

mod chosen;
mod file;
mod load;
mod part;
mod part_file;
mod served;
pub mod tensors;

use std::path::{Path, PathBuf};

use backstay_core::error::Refusal;

pub use chosen::ExportChoice;
pub use load::{load_part, LoadedSlot, PartToLoad};
pub use part::{
    copy_export, copy_slots, CopiedSlots, PartToWrite, PartWritten, SlotToWrite, SlotWritten,
};
pub use served::{PartToServe, ServedSlot, ServedTables};

/// Why a checkpoint's file was not written or not loaded.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The file system refuses.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file is not what it should be.
    #[error("{path} is damaged: {what}", path = path.display())]
    Damaged {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// The rows cannot be taken from here, or put there.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The caller gave up.
    #[error("the checkpoint was given up")]
    Cancelled,
}

impl CheckpointError {
    fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Self + '_ {
        move |source| Self::Io {
            path: path.to_path_buf(),
            source,
        }
    }

    fn damaged(path: &Path, what: impl Into<String>) -> Self {
        Self::Damaged {
            path: path.to_path_buf(),
            what: what.into(),
        }
    }
}
