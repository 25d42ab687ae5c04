//! The Python binding of backstay's data plane: `backstay._native`.
//!
//! Methods here only convert arguments; the work lies in `backstay-net`. Calls that may take
//! time go through [`runtime::block_on`], the one door that releases the GIL.

// PyO3 hands arguments over by value.
#![allow(clippy::needless_pass_by_value)]

mod client;
mod errors;
mod key_plan;
mod logging;
mod push;
mod runtime;
mod server;
mod serving;
#[cfg(feature = "simulation")]
mod simulation;
mod tables;
mod tensors;

use backstay_core::hash::{self, SlotSpace};
use backstay_core::replication::Report;
use numpy::{PyArray1, PyReadonlyArray1};
use pyo3::prelude::*;

use errors::config_error;

/// The 64-bit id under which a table travels: a fixed hash of its name.
#[pyfunction]
fn table_id(name: &str) -> u64 {
    hash::table_id(name)
}

/// The slot of each key, in the order given.
#[pyfunction]
fn slots_of<'py>(
    py: Python<'py>,
    keys: PyReadonlyArray1<'py, u64>,
    slot_count: u32,
) -> PyResult<Bound<'py, PyArray1<u32>>> {
    let space = slot_space(py, slot_count)?;
    let slots = keys.as_slice()?.iter().map(|&key| space.slot_of(key));
    Ok(PyArray1::from_iter(py, slots))
}

/// The CRC-32C of some bytes, as iSCSI, ext4 and Snappy's framing have it.
#[pyfunction(name = "crc32c")]
fn crc32c_of(py: Python<'_>, content: &[u8]) -> u32 {
    py.detach(|| ::crc32c::crc32c(content))
}

/// What a node wants of the controller, as JSON.
pub(crate) fn report_json(report: &Report) -> String {
    let json = serde_json::json!({
        "routing_version": report.routing_version,
        "silent": report.silent,
        "full": report.full,
        "caught_up": report.caught_up,
        "refused": report.refused,
        "loaded": report.loaded,
    });
    json.to_string()
}

pub(crate) fn slot_space(py: Python<'_>, slot_count: u32) -> PyResult<SlotSpace> {
    SlotSpace::new(slot_count).ok_or_else(|| {
        let most = SlotSpace::MAX_SLOTS;
        config_error(
            py,
            &format!("slot_count is {slot_count}: must be a power of two up to {most}"),
        )
    })
}

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("PROTOCOL_VERSION", backstay_core::wire::PROTOCOL_VERSION)?;
    module.add_function(wrap_pyfunction!(table_id, module)?)?;
    module.add_function(wrap_pyfunction!(slots_of, module)?)?;
    tables::add_to(module)?;
    module.add_function(wrap_pyfunction!(tensors::make_tensor_header, module)?)?;
    module.add_function(wrap_pyfunction!(tensors::read_tensor_header, module)?)?;
    module.add_function(wrap_pyfunction!(crc32c_of, module)?)?;
    module.add_function(wrap_pyfunction!(logging::log_to_stderr, module)?)?;
    module.add_class::<server::DataServer>()?;
    module.add_class::<server::Cancellation>()?;
    module.add_class::<server::CopiedSlots>()?;
    module.add_class::<serving::ServedTables>()?;
    module.add_class::<client::DataClient>()?;
    module.add_class::<key_plan::KeyPlan>()?;
    module.add_class::<client::PendingPull>()?;
    module.add_class::<push::PendingPush>()?;
    module.add_class::<push::PushRequest>()?;
    module.add_class::<push::PushStream>()?;
    #[cfg(feature = "simulation")]
    {
        module.add_class::<simulation::SimNode>()?;
        module.add_class::<simulation::SimMessage>()?;
        module.add_class::<simulation::SimSlot>()?;
    }
    Ok(())
}
