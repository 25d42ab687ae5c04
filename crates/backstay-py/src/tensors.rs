//! The headers of files of tensors, for what Python reads and writes of checkpoints.

use std::collections::BTreeMap;

use backstay_net::checkpoint::tensors::{make_header, Dtype, Header};
use numpy::PyReadonlyArray1;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// A tensor of a file: name, type, shape, and where its bytes begin and end.
type Described = (String, String, Vec<usize>, (usize, usize));

/// The header of a file for tensors (name, type, shape) in the order given, its length in front.
#[pyfunction]
pub(crate) fn make_tensor_header(
    py: Python<'_>,
    metadata: BTreeMap<String, String>,
    tensors: Vec<(String, String, Vec<usize>)>,
) -> PyResult<Bound<'_, PyBytes>> {
    let dtype = |name: String| serde_json::from_value::<Dtype>(name.into());
    let tensors = tensors
        .into_iter()
        .map(|(name, kind, shape)| Ok((name, dtype(kind)?, shape)))
        .collect::<Result<Vec<_>, serde_json::Error>>()
        .map_err(|error| PyValueError::new_err(error.to_string()))?;
    let header = make_header(metadata, tensors).map_err(|error| value_error(&error))?;
    Ok(PyBytes::new(py, &header))
}

/// The metadata and the tensors of a file, its header checked against its bytes.
#[pyfunction]
pub(crate) fn read_tensor_header(
    file: PyReadonlyArray1<'_, u8>,
) -> PyResult<(BTreeMap<String, String>, Vec<Described>)> {
    let header = Header::read(file.as_slice()?).map_err(|error| value_error(&error))?;
    let described = |name: String| {
        let (dtype, shape, range) = header.tensor(&name)?;
        let shape = shape.to_vec();
        Some((name, dtype.to_string(), shape, (range.start, range.end)))
    };
    let tensors = header.names().into_iter().filter_map(described).collect();
    Ok((header.metadata(), tensors))
}

fn value_error(error: &impl ToString) -> PyErr {
    PyValueError::new_err(error.to_string())
}
