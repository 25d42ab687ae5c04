//! What an expression may be, and what each of its values is.

use thiserror::Error;

use super::node::{Expression, Node, NodeId, Parts};

/// Most nodes of an expression.
pub const MAX_NODES: usize = 256;
/// Longest chain of nodes, each the argument of the next.
pub const MAX_DEPTH: usize = 128;
/// Longest JSON text of an expression.
pub const MAX_EXPRESSION_BYTES: usize = 16_384;
/// Largest magnitude of a constant or a setting; far from where float32 overflows.
pub const MAX_MAGNITUDE: f64 = 1e30;
/// Most memory for the values of one row.
pub const MAX_ROW_BYTES: usize = 64 << 20;

/// What a value is. In an operation of two shapes the later one wins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Shape {
    /// A float64 that is the same for all rows of a batch: a setting, a constant, the time.
    Batch,
    /// A float64 of each row: a statistic.
    Number,
    /// A float32 of each row: a state of one word, or what a reduction gives.
    Scalar,
    /// A float32 of each element of each row.
    Vector,
}

/// The type of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Type {
    /// Its shape.
    pub shape: Shape,
    /// Whether it is true or false, not a number.
    pub mask: bool,
}

/// What stands around an expression: what it is given and what it must return.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Signature {
    /// Name and shape of each input.
    pub inputs: Vec<(String, Shape)>,
    /// The input, of shape [`Shape::Vector`], that lies in one piece elsewhere and is given to
    /// each run, not copied.
    pub outside: Option<usize>,
    /// Names of the settings.
    pub settings: Vec<String>,
    /// Name and type of each result. A result of an earlier shape is repeated to this one.
    pub results: Vec<(String, Type)>,
}

/// Why an expression was refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{}{reason}", .node.map(|node| format!("node {node}: ")).unwrap_or_default())]
pub struct ExpressionError {
    /// The node that breaks a rule; none if it is the expression as a whole.
    pub node: Option<usize>,
    /// Which rule, and what is allowed.
    pub reason: String,
}

impl From<String> for ExpressionError {
    fn from(reason: String) -> Self {
        Self { node: None, reason }
    }
}

impl Expression {
    /// Check everything and return the type of each node.
    pub fn check(&self, signature: &Signature) -> Result<Vec<Type>, ExpressionError> {
        self.check_length()?;
        let mut builder = ExpressionBuilder::new(signature.clone());
        for node in &self.nodes {
            builder.add(node.clone())?;
        }
        builder.check_results(&self.results)?;
        Ok(builder.types)
    }

    /// The expression in a fixed form.
    pub fn canonical_json(&self) -> String {
        // Names, numbers and lists only: there is nothing that could fail to serialise.
        serde_json::to_string(self).unwrap_or_default()
    }

    fn check_length(&self) -> Result<(), ExpressionError> {
        let bytes = self.canonical_json().len();
        if bytes > MAX_EXPRESSION_BYTES {
            let reason = format!("{bytes} bytes of JSON; allowed: up to {MAX_EXPRESSION_BYTES}");
            return Err(reason.into());
        }
        Ok(())
    }
}

/// An expression that grows node by node.
#[derive(Debug, Clone)]
pub struct ExpressionBuilder {
    signature: Signature,
    nodes: Vec<Node>,
    types: Vec<Type>,
    depths: Vec<usize>,
}

impl ExpressionBuilder {
    /// One without nodes.
    pub fn new(signature: Signature) -> Self {
        Self {
            signature,
            nodes: Vec::new(),
            types: Vec::new(),
            depths: Vec::new(),
        }
    }

    /// Add a node and return its number.
    pub fn add(&mut self, node: Node) -> Result<NodeId, ExpressionError> {
        let at = self.nodes.len();
        if at == MAX_NODES {
            let reason =
                format!("more than {MAX_NODES} operations, inputs, settings and constants");
            return Err(reason.into());
        }
        let (found, depth) = self
            .type_and_depth(&node)
            .map_err(|reason| ExpressionError {
                node: Some(at),
                reason,
            })?;
        self.types.push(found);
        self.depths.push(depth);
        self.nodes.push(node);
        Ok(at as NodeId)
    }

    /// The expression with these results.
    pub fn finish(&self, results: Vec<NodeId>) -> Result<Expression, ExpressionError> {
        self.check_results(&results)?;
        let expression = Expression {
            nodes: self.nodes.clone(),
            results,
        };
        expression.check_length()?;
        Ok(expression)
    }

    fn type_and_depth(&self, node: &Node) -> Result<(Type, usize), String> {
        let parts = node.parts();
        let mut depth = 0;
        for &argument in parts.arguments() {
            let Some(before) = self.depths.get(argument as usize) else {
                return Err(format!(
                    "{} uses a node that does not stand before it",
                    node.name()
                ));
            };
            depth = depth.max(before + 1);
        }
        if depth > MAX_DEPTH {
            return Err(format!(
                "more than {MAX_DEPTH} operations one behind the other"
            ));
        }
        let of = |argument: NodeId| self.types[argument as usize];
        let found = match parts {
            Parts::Input(name) => self.input(name)?,
            Parts::Setting(name) => self.setting(name)?,
            Parts::Constant(value) => constant(value)?,
            Parts::Unary(_, a) | Parts::Reduction(_, a) => one(node, of(a))?,
            Parts::Binary(_, [a, b]) => two(node, of(a), of(b))?,
            Parts::Where(all) => choice(all.map(of))?,
        };
        Ok((found, depth))
    }

    fn input(&self, name: &str) -> Result<Type, String> {
        let inputs = &self.signature.inputs;
        let input = inputs.iter().find(|(input, _)| input == name);
        input
            .map(|&(_, shape)| Type { shape, mask: false })
            .ok_or_else(|| {
                let there = listed(inputs.iter().map(|(input, _)| input));
                format!("no input '{}'; there are {there}", shortened(name))
            })
    }

    fn setting(&self, name: &str) -> Result<Type, String> {
        let settings = &self.signature.settings;
        if settings.iter().any(|setting| setting == name) {
            return Ok(BATCH);
        }
        let there = listed(settings.iter());
        Err(format!(
            "no setting '{}'; there are {there}",
            shortened(name)
        ))
    }

    fn check_results(&self, results: &[NodeId]) -> Result<(), ExpressionError> {
        let expected = &self.signature.results;
        if results.len() != expected.len() {
            let names = listed(expected.iter().map(|(name, _)| name));
            let reason = format!("it returns {} values; expected {names}", results.len());
            return Err(reason.into());
        }
        for (&node, (name, wanted)) in results.iter().zip(expected) {
            let Some(given) = self.types.get(node as usize) else {
                return Err(format!("result {name} is node {node}, which does not exist").into());
            };
            if given.mask != wanted.mask || given.shape > wanted.shape {
                let (given, allowed) = (given.words(), wanted.words());
                return Err(format!("the returned {name} is {given}; allowed: {allowed}").into());
            }
        }
        Ok(())
    }
}

const BATCH: Type = Type {
    shape: Shape::Batch,
    mask: false,
};

impl Type {
    fn words(self) -> &'static str {
        match (self.mask, self.shape) {
            (false, Shape::Vector) => "a number for each element of the row",
            (true, Shape::Vector) => "a mask for each element of the row",
            (false, _) => "a number for the row",
            (true, _) => "a mask for the row",
        }
    }
}

fn one(node: &Node, a: Type) -> Result<Type, String> {
    let scalar = Type {
        shape: Shape::Scalar,
        mask: false,
    };
    match node {
        Node::Not(_) if !a.mask => refuse(node, "a number", "masks, such as x > 0"),
        Node::Sum(_) | Node::Mean(_) if a.shape == Shape::Vector => Ok(scalar),
        Node::Max(_) | Node::Min(_) if a.shape == Shape::Vector && !a.mask => Ok(scalar),
        Node::Sum(_) | Node::Mean(_) | Node::Max(_) | Node::Min(_) => {
            refuse(node, a.words(), "a number for each element of the row")
        }
        Node::Not(_) => Ok(a),
        _ if a.mask => refuse(node, "a mask", "numbers; use where(mask, a, b)"),
        _ => Ok(a),
    }
}

fn two(node: &Node, a: Type, b: Type) -> Result<Type, String> {
    let Parts::Binary(operation, _) = node.parts() else {
        return Ok(a);
    };
    let shape = a.shape.max(b.shape);
    if operation.joins() {
        if a.mask && b.mask {
            return Ok(Type { shape, mask: true });
        }
        return refuse(node, "a number", "masks, such as x > 0");
    }
    if a.mask && b.mask {
        return refuse(node, "masks", "numbers. Join masks with & and |");
    }
    let takes_a_mask = matches!(node, Node::Add(..) | Node::Sub(..) | Node::Mul(..));
    if (a.mask || b.mask) && !takes_a_mask {
        return refuse(node, "a mask", "numbers; use where(mask, a, b)");
    }
    Ok(Type {
        shape,
        mask: operation.compares(),
    })
}

fn choice([holds, yes, no]: [Type; 3]) -> Result<Type, String> {
    if !holds.mask {
        return Err("where on a number; allowed: a mask, such as x > 0".into());
    }
    if yes.mask || no.mask {
        let reason = "where that chooses masks; allowed: numbers. Join masks with & and |";
        return Err(reason.into());
    }
    Ok(Type {
        shape: holds.shape.max(yes.shape).max(no.shape),
        mask: false,
    })
}

fn constant(value: f64) -> Result<Type, String> {
    if value.abs() <= MAX_MAGNITUDE {
        return Ok(BATCH);
    }
    Err(format!(
        "the constant {value:?}; allowed: up to 1e30 in magnitude"
    ))
}

fn refuse(node: &Node, given: &str, allowed: &str) -> Result<Type, String> {
    Err(format!("{} of {given}; allowed: {allowed}", node.name()))
}

fn shortened(name: &str) -> String {
    name.chars().take(64).collect()
}

fn listed<'a>(names: impl Iterator<Item = &'a String>) -> String {
    let all: Vec<&str> = names.map(String::as_str).collect();
    if all.is_empty() {
        return "none".into();
    }
    all.join(", ")
}
