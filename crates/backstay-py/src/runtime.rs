//! One tokio runtime for all clients of a process, and the door through which calls wait.

use std::future::Future;
use std::pin::pin;
use std::process;
use std::sync::OnceLock;
use std::time::Duration;

use pyo3::prelude::*;
use tokio::runtime::Runtime;
use tokio::time::timeout;

use crate::errors::fork_error;

/// How often a waiting call looks for Ctrl-C.
const SIGNAL_CHECK: Duration = Duration::from_millis(200);
/// Threads that read answers; callers send and unpack on their own threads.
const READER_THREADS: usize = 2;

static RUNTIME: OnceLock<(u32, Runtime)> = OnceLock::new();

fn runtime(py: Python<'_>) -> PyResult<&'static Runtime> {
    if RUNTIME.get().is_none() {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(READER_THREADS)
            .thread_name("backstay-client")
            .enable_all()
            .build()?;
        // If another thread was faster, this one is dropped unused.
        let _ = RUNTIME.set((process::id(), runtime));
    }
    match RUNTIME.get() {
        Some((pid, runtime)) if *pid == process::id() => Ok(runtime),
        _ => Err(fork_error(
            py,
            "this process was forked after backstay was used; its threads did not come along: \
             use the 'spawn' start method, or make the first client after the fork",
        )),
    }
}

/// Run a future to its end with the GIL released; Ctrl-C breaks it off.
pub(crate) fn block_on<F>(py: Python<'_>, future: F) -> PyResult<F::Output>
where
    F: Future + Send,
    F::Output: Send,
{
    let runtime = runtime(py)?;
    let mut future = pin!(future);
    loop {
        let waited =
            py.detach(|| runtime.block_on(async { timeout(SIGNAL_CHECK, future.as_mut()).await }));
        match waited {
            Ok(output) => return Ok(output),
            Err(_) => py.check_signals()?,
        }
    }
}
