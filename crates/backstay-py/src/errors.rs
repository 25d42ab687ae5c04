//! Rust's errors become the exceptions of `backstay.errors`, here and nowhere else.

use backstay_core::error::{code, Refusal};
use backstay_net::checkpoint::CheckpointError;
use backstay_net::client::ClientError;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

/// An exception of the class `name` in `backstay.errors`.
fn exception(py: Python<'_>, name: &str, message: &str) -> PyErr {
    let made = py
        .import("backstay.errors")
        .and_then(|errors| errors.getattr(name))
        .and_then(|class| class.call1((message,)));
    match made {
        Ok(instance) => PyErr::from_value(instance),
        Err(error) => error,
    }
}

pub(crate) fn config_error(py: Python<'_>, message: &str) -> PyErr {
    exception(py, "ConfigError", message)
}

pub(crate) fn closed_error(py: Python<'_>, message: &str) -> PyErr {
    exception(py, "ClosedError", message)
}

pub(crate) fn fork_error(py: Python<'_>, message: &str) -> PyErr {
    exception(py, "ForkError", message)
}

pub(crate) fn runtime_error(message: &str) -> PyErr {
    PyRuntimeError::new_err(message.to_owned())
}

/// The class for a refusal's code. The codes that are missing here make the client try again
/// and never reach a user by themselves.
fn class_of_code(code: u16) -> &'static str {
    match code {
        code::PROTOCOL => "ProtocolError",
        code::UNAUTHENTICATED => "Unauthenticated",
        code::UNKNOWN_TABLE => "UnknownTable",
        code::TABLE_CONFLICT => "TableConflict",
        code::INVALID_REQUEST => "InvalidRequest",
        code::NON_FINITE => "NonFiniteGradient",
        code::MEMORY_LIMIT => "MemoryLimitReached",
        code::LIMIT_EXCEEDED => "LimitExceeded",
        code::NOT_MASTER => "NotMaster",
        code::STOPPING => "Stopping",
        _ => "RequestRefused",
    }
}

pub(crate) fn from_refusal(py: Python<'_>, refusal: &Refusal) -> PyErr {
    exception(py, class_of_code(refusal.code()), &refusal.to_string())
}

pub(crate) fn from_checkpoint(py: Python<'_>, error: &CheckpointError) -> PyErr {
    let class = match error {
        CheckpointError::Refused(refusal) => return from_refusal(py, refusal),
        CheckpointError::Io { .. } => "CheckpointUnavailable",
        CheckpointError::Damaged { .. } => "CheckpointDamaged",
        CheckpointError::Cancelled => "ClosedError",
    };
    exception(py, class, &error.to_string())
}

pub(crate) fn from_client(py: Python<'_>, error: &ClientError) -> PyErr {
    let class = match error {
        ClientError::Unavailable { .. } => "ServerUnavailable",
        ClientError::Deadline { .. } => "DeadlineExceeded",
        ClientError::OutcomeUnknown { .. } => "OutcomeUnknown",
        ClientError::Refused { code, .. } => class_of_code(*code),
        ClientError::StateLost { .. } => "StateLost",
        ClientError::Protocol { .. } => "ProtocolError",
        ClientError::Invalid(_) => "InvalidRequest",
        ClientError::NonFinite(_) => "NonFiniteGradient",
        ClientError::LimitExceeded(_) => "LimitExceeded",
        ClientError::TaskLeaseLost => "TaskLeaseLost",
        ClientError::Closed => "ClosedError",
    };
    exception(py, class, &error.to_string())
}
