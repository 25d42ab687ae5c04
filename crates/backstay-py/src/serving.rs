//! `ServedTables`: the tables of a running export where it is served.

use backstay_net::checkpoint;
use numpy::{PyArray1, PyArray2, PyArrayMethods, PyReadonlyArray1};
use pyo3::prelude::*;

use crate::errors::{config_error, from_checkpoint, from_refusal};
use crate::slot_space;

type Array1<'py, T> = Bound<'py, PyArray1<T>>;
type Array2<'py, T> = Bound<'py, PyArray2<T>>;

/// One version, which never changes: any thread may look up in it while the next one is made.
#[pyclass(module = "backstay._native", frozen)]
pub(crate) struct ServedTables(checkpoint::ServedTables);

#[pymethods]
impl ServedTables {
    #[new]
    fn new(py: Python<'_>, slot_count: u32, tables: Vec<(String, usize)>) -> PyResult<Self> {
        let space = slot_space(py, slot_count)?;
        Ok(Self(checkpoint::ServedTables::new(space, tables)))
    }

    /// The next version.
    fn with_parts(&self, py: Python<'_>, parts_json: &str, emptied: Vec<u32>) -> PyResult<Self> {
        let parts: Vec<checkpoint::PartToServe> = serde_json::from_str(parts_json)
            .map_err(|error| config_error(py, &error.to_string()))?;
        let next = py.detach(|| self.0.with(&parts, &emptied));
        next.map(Self).map_err(|error| from_checkpoint(py, &error))
    }

    /// The rows of keys \[n], and whether each has one; zeros without.
    fn lookup<'py>(
        &self,
        py: Python<'py>,
        table: &str,
        keys: PyReadonlyArray1<'_, u64>,
    ) -> PyResult<(Array2<'py, f32>, Array1<'py, bool>)> {
        let found = self
            .0
            .table(table)
            .map_err(|refusal| from_refusal(py, &refusal))?;
        let keys = keys.as_slice()?;
        let mut rows = vec![0.0; keys.len() * found.elements()];
        let mut known = vec![false; keys.len()];
        py.detach(|| found.lookup(keys, &mut rows, &mut known));
        let rows = PyArray1::from_vec(py, rows).reshape([keys.len(), found.elements()])?;
        Ok((rows, PyArray1::from_vec(py, known)))
    }

    /// All keys \[n] and rows of a table, in no order.
    fn all_rows<'py>(
        &self,
        py: Python<'py>,
        table: &str,
    ) -> PyResult<(Array1<'py, u64>, Array2<'py, f32>)> {
        let found = self
            .0
            .table(table)
            .map_err(|refusal| from_refusal(py, &refusal))?;
        let (keys, weights) = py.detach(|| found.all_rows());
        let rows = PyArray1::from_vec(py, weights).reshape([keys.len(), found.elements()])?;
        Ok((PyArray1::from_vec(py, keys), rows))
    }

    /// The number of rows of a table.
    fn row_count(&self, py: Python<'_>, table: &str) -> PyResult<usize> {
        let found = self
            .0
            .table(table)
            .map_err(|refusal| from_refusal(py, &refusal))?;
        Ok(found.rows())
    }

    /// Bytes of memory that it takes.
    #[getter]
    fn allocated_bytes(&self) -> usize {
        self.0.allocated_bytes()
    }
}
