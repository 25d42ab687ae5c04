//! Tables' descriptions: what Python asks the core about them.

use std::collections::BTreeMap;
use std::sync::Arc;

use backstay_core::expression::{
    Admission, ExpressionBuilder, Function, Node, Pull, Score, Signature, Statistic,
};
use backstay_core::life;
use backstay_core::optimizer::{Per, User};
use backstay_core::spec::{ranges, Lifetime, Part, Span, TableSpec};
use backstay_core::table::Table;
use numpy::{
    PyArray1, PyArray2, PyArrayMethods, PyReadonlyArray1, PyReadonlyArray2, PyUntypedArrayMethods,
};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::config_error;
use crate::slot_space;

/// Add everything here to the module.
pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let spans = PyDict::new(module.py());
    for (path, span) in ranges() {
        match span {
            Span::Whole(low, high) => spans.set_item(path, (*low, *high))?,
            Span::Number(low, high) => spans.set_item(path, (*low, *high))?,
        }
    }
    module.add("TABLE_RANGES", spans)?;
    module.add_function(wrap_pyfunction!(canonical_table, module)?)?;
    module.add_function(wrap_pyfunction!(canonical_part, module)?)?;
    module.add_function(wrap_pyfunction!(table_facts, module)?)?;
    module.add_function(wrap_pyfunction!(check_table, module)?)?;
    module.add_function(wrap_pyfunction!(table_with_settings, module)?)?;
    module.add_function(wrap_pyfunction!(initial_rows, module)?)?;
    module.add_function(wrap_pyfunction!(pulled_rows, module)?)?;
    module.add_function(wrap_pyfunction!(row_scores, module)?)?;
    module.add_class::<FunctionBuilder>()
}

/// Check a table's JSON description and return it with every default filled in.
#[pyfunction]
fn canonical_table(py: Python<'_>, spec_json: &str) -> PyResult<String> {
    Ok(table_spec(py, spec_json)?.canonical_json())
}

/// Check a part of a description, which stands at `path`, and return it with every default filled
/// in. An error calls it `name`.
#[pyfunction]
fn canonical_part(py: Python<'_>, part_json: &str, path: &str, name: &str) -> PyResult<String> {
    let part = Part::from_json(part_json);
    part.map(|part| part.canonical_json())
        .map_err(|error| config_error(py, &error.of_part(path, name)))
}

/// Words behind the weights of a row; its statistics, in the order of their words; whether pushes may
/// tell of shows and clicks; whether rows have a score; weights and state of a row of what counts keys
/// without a row.
type TableFacts = (usize, Vec<&'static str>, bool, bool, Option<(usize, usize)>);

/// What follows from a table's JSON description.
#[pyfunction]
fn table_facts(py: Python<'_>, spec_json: &str) -> PyResult<TableFacts> {
    let spec = table_spec(py, spec_json)?;
    let lifetime = spec.lifetime.as_ref();
    let keeps = |one: &Statistic| lifetime.is_some_and(|lifetime| lifetime.keeps(*one));
    let statistics = Statistic::ALL.into_iter().filter(keeps);
    let companion = spec.companion();
    Ok((
        spec.state_words(),
        statistics.map(Statistic::name).collect(),
        lifetime.is_some_and(Lifetime::takes_counts),
        lifetime.is_some_and(Lifetime::uses_score),
        companion.map(|one| (one.row_elements(), one.state_words())),
    ))
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

pub(crate) fn table_spec(py: Python<'_>, spec_json: &str) -> PyResult<TableSpec> {
    TableSpec::from_json(spec_json).map_err(|error| config_error(py, &error.to_string()))
}

/// A user function that grows operation by operation; equal ones are one node.
#[pyclass(module = "backstay._native")]
struct FunctionBuilder {
    builder: ExpressionBuilder,
    /// The number of each node, by its JSON.
    nodes: BTreeMap<String, u32>,
}

#[pymethods]
impl FunctionBuilder {
    /// A function that stands at `path` in a description, with its settings, and its states and
    /// whether each is for an "element" or for the "row".
    #[new]
    fn new(
        py: Python<'_>,
        path: &str,
        settings: Vec<String>,
        states: Vec<(String, String)>,
    ) -> PyResult<Self> {
        let states = states.into_iter().map(|(name, per)| {
            let is_row = per == "row";
            (name, if is_row { Per::Row } else { Per::Element })
        });
        let builder = ExpressionBuilder::new(signature(py, path, settings, states)?);
        let nodes = BTreeMap::new();
        Ok(Self { builder, nodes })
    }

    /// The names of the inputs of a function that stands at `path`.
    #[staticmethod]
    fn inputs(py: Python<'_>, path: &str) -> PyResult<Vec<String>> {
        let inputs = signature(py, path, Vec::new(), std::iter::empty())?.inputs;
        Ok(inputs.into_iter().map(|(name, _)| name).collect())
    }

    fn constant(&mut self, py: Python<'_>, value: f64) -> PyResult<u32> {
        self.add(py, Node::Constant(value))
    }

    fn input(&mut self, py: Python<'_>, name: String) -> PyResult<u32> {
        self.add(py, Node::Input(name))
    }

    fn setting(&mut self, py: Python<'_>, name: String) -> PyResult<u32> {
        self.add(py, Node::Setting(name))
    }

    /// An operation on nodes.
    fn operation(&mut self, py: Python<'_>, name: &str, nodes: Vec<u32>) -> PyResult<u32> {
        let arguments = match nodes.as_slice() {
            [node] => serde_json::json!(node),
            _ => serde_json::json!(nodes),
        };
        let node = serde_json::from_value(serde_json::json!({ name: arguments }));
        let node = node.map_err(|error| config_error(py, &format!("{name}: {error}")))?;
        self.add(py, node)
    }

    /// The expression with these results, as JSON.
    fn finish(&self, py: Python<'_>, results: Vec<u32>) -> PyResult<String> {
        let expression = self.builder.finish(results);
        expression
            .map(|expression| expression.canonical_json())
            .map_err(|error| config_error(py, &error.reason))
    }
}

impl FunctionBuilder {
    fn add(&mut self, py: Python<'_>, node: Node) -> PyResult<u32> {
        let key = format!("{node:?}");
        if let Some(&number) = self.nodes.get(&key) {
            return Ok(number);
        }
        let added = self.builder.add(node);
        let number = added.map_err(|error| config_error(py, &error.reason))?;
        self.nodes.insert(key, number);
        Ok(number)
    }
}

fn signature(
    py: Python<'_>,
    path: &str,
    settings: Vec<String>,
    states: impl Iterator<Item = (String, Per)> + Clone,
) -> PyResult<Signature> {
    match path {
        "optimizer.user" => Ok(User::signature(settings, states)),
        "pull" => Ok(Function::<Pull>::signature(settings)),
        "lifetime.score.function" => Ok(Function::<Score>::signature(settings)),
        "lifetime.admission.function" => Ok(Function::<Admission>::signature(settings)),
        _ => Err(config_error(
            py,
            &format!("no user function stands at {path}"),
        )),
    }
}
