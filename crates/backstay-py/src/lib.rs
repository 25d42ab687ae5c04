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
mod tensors;

use std::sync::Arc;

use backstay_core::hash::{self, SlotSpace};
use backstay_core::life;
use backstay_core::replication::Report;
use backstay_core::spec::TableSpec;
use backstay_core::table::Table;
use numpy::{
    PyArray1, PyArray2, PyArrayMethods, PyReadonlyArray1, PyReadonlyArray2, PyUntypedArrayMethods,
};
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

/// Check a table's JSON description and return it with every default filled in.
#[pyfunction]
fn canonical_table(py: Python<'_>, spec_json: &str) -> PyResult<String> {
    Ok(table_spec(py, spec_json)?.canonical_json())
}

/// Refuse a description that a cluster with so many slots cannot have.
#[pyfunction]
fn check_table(py: Python<'_>, spec_json: &str, slot_count: u32) -> PyResult<()> {
    let fits = table_spec(py, spec_json)?.check_slots(slot_count);
    fits.map_err(|error| config_error(py, &error.to_string()))
}

/// The first description with the settings of the second, as far as a table can take them over.
#[pyfunction]
fn table_with_settings(py: Python<'_>, present_json: &str, wanted_json: &str) -> PyResult<String> {
    let (present, wanted) = (table_spec(py, present_json)?, table_spec(py, wanted_json)?);
    Ok(present.with_settings_of(&wanted).canonical_json())
}

/// The weights of keys [n] before their first push, [n, elements], before what a pull makes of them.
#[pyfunction]
fn initial_rows<'py>(
    py: Python<'py>,
    spec_json: &str,
    keys: PyReadonlyArray1<'py, u64>,
) -> PyResult<Bound<'py, PyArray2<f32>>> {
    let mut spec = table_spec(py, spec_json)?;
    spec.pull = None;
    let spec = Arc::new(spec);
    let (keys, elements) = (keys.as_slice()?, spec.row_elements());
    let table = Table::new(spec, slot_space(py, 1)?, 0, 1);
    let mut rows = vec![0.0; keys.len() * elements];
    py.detach(|| table.read(keys, &mut rows));
    PyArray1::from_vec(py, rows).reshape([keys.len(), elements])
}

/// What a pull makes of rows with these weights, [n, elements]: the bits that servers answer.
#[pyfunction]
fn pulled_rows<'py>(
    py: Python<'py>,
    spec_json: &str,
    weights: PyReadonlyArray2<'py, f32>,
) -> PyResult<Bound<'py, PyArray2<f32>>> {
    let spec = table_spec(py, spec_json)?;
    let (rows, elements) = (weights.shape()[0], spec.row_elements());
    if weights.shape()[1] != elements {
        let found = weights.shape()[1];
        let reason = format!(
            "table {}: rows of {found} weights, not {elements}",
            spec.name
        );
        return Err(config_error(py, &reason));
    }
    let mut pulled = weights.as_slice()?.to_vec();
    py.detach(|| {
        if let Some(pull) = spec.pull.as_ref().filter(|_| rows > 0) {
            pull.apply(elements, &mut pulled);
        }
    });
    PyArray1::from_vec(py, pulled).reshape([rows, elements])
}

/// The score of each row at a time in seconds, given the statistics behind its optimizer's state,
/// \[n, statistics]: as servers compute it.
#[pyfunction]
fn row_scores<'py>(
    py: Python<'py>,
    spec_json: &str,
    time: u32,
    statistics: PyReadonlyArray2<'py, u32>,
) -> PyResult<Bound<'py, PyArray1<f64>>> {
    let spec = table_spec(py, spec_json)?;
    let words = statistics.as_slice()?;
    let scores = py.detach(|| life::scores(spec.lifetime.as_ref()?, time, words));
    let none = || config_error(py, &format!("table {} has no score", spec.name));
    Ok(PyArray1::from_vec(py, scores.ok_or_else(none)?))
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

pub(crate) fn table_spec(py: Python<'_>, spec_json: &str) -> PyResult<TableSpec> {
    TableSpec::from_json(spec_json).map_err(|error| config_error(py, &error.to_string()))
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
    module.add_function(wrap_pyfunction!(canonical_table, module)?)?;
    module.add_function(wrap_pyfunction!(check_table, module)?)?;
    module.add_function(wrap_pyfunction!(table_with_settings, module)?)?;
    module.add_function(wrap_pyfunction!(initial_rows, module)?)?;
    module.add_function(wrap_pyfunction!(pulled_rows, module)?)?;
    module.add_function(wrap_pyfunction!(row_scores, module)?)?;
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
