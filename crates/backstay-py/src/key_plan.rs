//! `KeyPlan`: the keys of a batch, made ready for pulls and pushes.

use std::sync::Arc;

use backstay_net::client::plan::Plan;
use pyo3::prelude::*;

/// A batch of keys made ready: equal keys merged, the rest ordered by server and slot.
#[pyclass(module = "backstay._native", frozen)]
pub(crate) struct KeyPlan {
    pub(crate) plan: Arc<Plan>,
}

#[pymethods]
impl KeyPlan {
    /// Keys of the batch, duplicates included.
    #[getter]
    fn size(&self) -> usize {
        self.plan.len()
    }

    /// Different keys of the batch.
    #[getter]
    fn unique_count(&self) -> usize {
        self.plan.keys().len()
    }

    /// The routing version it was made for.
    #[getter]
    fn routing_version(&self) -> u64 {
        self.plan.routing().version
    }
}
