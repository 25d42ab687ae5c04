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
#[allow(missing_docs)] // The messages say it.
pub enum ExpressionError {
    #[error("{nodes} nodes; allowed: 1 to {MAX_NODES}")]
    TooManyNodes { nodes: usize },
    #[error("{bytes} bytes of JSON; allowed: up to {MAX_EXPRESSION_BYTES}")]
    TooLong { bytes: usize },
    #[error("node {node} ({name}) has {depth} nodes one behind the other before it; allowed: up to {MAX_DEPTH}")]
    TooDeep {
        node: usize,
        name: String,
        depth: usize,
    },
    #[error("node {node} ({name}) uses node {argument}; allowed: nodes before it")]
    Order {
        node: usize,
        name: String,
        argument: NodeId,
    },
    #[error("node {node} is the input {input:?}; allowed: one of {allowed}")]
    UnknownInput {
        node: usize,
        input: String,
        allowed: String,
    },
    #[error("node {node} is the setting {setting:?}; allowed: one of {allowed}")]
    UnknownSetting {
        node: usize,
        setting: String,
        allowed: String,
    },
    #[error("node {node} is the constant {value}; allowed: up to 1e30 in magnitude")]
    Constant { node: usize, value: String },
    #[error("node {node} ({name}) is given {given}; allowed: {allowed}")]
    Argument {
        node: usize,
        name: String,
        given: &'static str,
        allowed: &'static str,
    },
    #[error("{results} results; expected {expected}")]
    ResultCount { results: usize, expected: String },
    #[error("result {name} is {given}; allowed: {allowed}")]
    Result {
        name: String,
        given: String,
        allowed: &'static str,
    },
    #[error("its values take {bytes} bytes for a row of {elements} elements; allowed: up to {MAX_ROW_BYTES}")]
    RowTooLarge { elements: usize, bytes: usize },
}

impl Expression {
    /// Check everything and return the type of each node.
    pub fn check(&self, signature: &Signature) -> Result<Vec<Type>, ExpressionError> {
        let nodes = self.nodes.len();
        if !(1..=MAX_NODES).contains(&nodes) {
            return Err(ExpressionError::TooManyNodes { nodes });
        }
        let bytes = self.canonical_json().len();
        if bytes > MAX_EXPRESSION_BYTES {
            return Err(ExpressionError::TooLong { bytes });
        }
        let mut checker = Checker {
            signature,
            types: Vec::with_capacity(nodes),
            depths: Vec::with_capacity(nodes),
        };
        for node in &self.nodes {
            checker.take(node)?;
        }
        checker.results(&self.results)?;
        Ok(checker.types)
    }

    /// The expression in a fixed form.
    pub fn canonical_json(&self) -> String {
        // Names, numbers and lists only: there is nothing that could fail to serialise.
        serde_json::to_string(self).unwrap_or_default()
    }
}

/// Goes from node to node.
struct Checker<'a> {
    signature: &'a Signature,
    types: Vec<Type>,
    depths: Vec<usize>,
}

impl Checker<'_> {
    fn take(&mut self, node: &Node) -> Result<(), ExpressionError> {
        let at = self.types.len();
        let parts = node.parts();
        let mut depth = 0;
        for &argument in parts.arguments() {
            let Some(before) = self.depths.get(argument as usize) else {
                return Err(ExpressionError::Order {
                    node: at,
                    name: node.name(),
                    argument,
                });
            };
            depth = depth.max(before + 1);
        }
        if depth > MAX_DEPTH {
            return Err(ExpressionError::TooDeep {
                node: at,
                name: node.name(),
                depth,
            });
        }
        let of = |argument: NodeId| self.types[argument as usize];
        let found = match parts {
            Parts::Input(name) => self.input(at, name)?,
            Parts::Setting(name) => self.setting(at, name)?,
            Parts::Constant(value) => constant(at, value)?,
            Parts::Unary(_, a) | Parts::Reduction(_, a) => one(at, node, of(a))?,
            Parts::Binary(_, [a, b]) => two(at, node, of(a), of(b))?,
            Parts::Where(all) => choice(at, node, all.map(of))?,
        };
        self.types.push(found);
        self.depths.push(depth);
        Ok(())
    }

    fn input(&self, node: usize, name: &str) -> Result<Type, ExpressionError> {
        let known = &self.signature.inputs;
        let found = known.iter().find(|(known, _)| known == name);
        found
            .map(|&(_, shape)| Type { shape, mask: false })
            .ok_or_else(|| ExpressionError::UnknownInput {
                node,
                input: shortened(name),
                allowed: listed(known.iter().map(|(name, _)| name)),
            })
    }

    fn setting(&self, node: usize, name: &str) -> Result<Type, ExpressionError> {
        let known = &self.signature.settings;
        if known.iter().any(|known| known == name) {
            return Ok(Type {
                shape: Shape::Batch,
                mask: false,
            });
        }
        Err(ExpressionError::UnknownSetting {
            node,
            setting: shortened(name),
            allowed: listed(known.iter()),
        })
    }

    fn results(&self, results: &[NodeId]) -> Result<(), ExpressionError> {
        let expected = &self.signature.results;
        if results.len() != expected.len() {
            return Err(ExpressionError::ResultCount {
                results: results.len(),
                expected: listed(expected.iter().map(|(name, _)| name)),
            });
        }
        for (&node, (name, wanted)) in results.iter().zip(expected) {
            let found = self.types.get(node as usize);
            let misses = |found: &Type| found.mask != wanted.mask || found.shape > wanted.shape;
            if found.is_none_or(misses) {
                return Err(ExpressionError::Result {
                    name: name.clone(),
                    given: found
                        .map_or_else(|| format!("node {node}"), |found| found.words().into()),
                    allowed: wanted.words(),
                });
            }
        }
        Ok(())
    }
}

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

fn one(at: usize, node: &Node, a: Type) -> Result<Type, ExpressionError> {
    match node {
        Node::Not(_) if !a.mask => refuse(at, node, "a number", "masks"),
        Node::Sum(_) | Node::Mean(_) if a.shape == Shape::Vector => Ok(Type {
            shape: Shape::Scalar,
            mask: false,
        }),
        Node::Max(_) | Node::Min(_) if a.shape == Shape::Vector && !a.mask => Ok(Type {
            shape: Shape::Scalar,
            mask: false,
        }),
        Node::Sum(_) | Node::Mean(_) | Node::Max(_) | Node::Min(_) => {
            let given = if a.mask {
                "a mask"
            } else {
                "one value for a row"
            };
            refuse(at, node, given, "a number for each element of the row")
        }
        Node::Not(_) => Ok(a),
        _ if a.mask => refuse(at, node, "a mask", "numbers"),
        _ => Ok(a),
    }
}

fn two(at: usize, node: &Node, a: Type, b: Type) -> Result<Type, ExpressionError> {
    let Parts::Binary(operation, _) = node.parts() else {
        return Ok(a);
    };
    let shape = a.shape.max(b.shape);
    if operation.joins() {
        if a.mask && b.mask {
            return Ok(Type { shape, mask: true });
        }
        return refuse(at, node, "a number", "masks");
    }
    let one_mask = matches!(node, Node::Add(..) | Node::Sub(..) | Node::Mul(..));
    if a.mask && b.mask || (a.mask || b.mask) && !one_mask {
        let allowed = if one_mask {
            "at most one mask"
        } else {
            "numbers"
        };
        return refuse(at, node, "a mask", allowed);
    }
    Ok(Type {
        shape,
        mask: operation.compares(),
    })
}

fn choice(at: usize, node: &Node, [holds, yes, no]: [Type; 3]) -> Result<Type, ExpressionError> {
    if !holds.mask {
        return refuse(at, node, "a number as its condition", "a mask");
    }
    if yes.mask || no.mask {
        return refuse(at, node, "a mask to choose from", "numbers");
    }
    Ok(Type {
        shape: holds.shape.max(yes.shape).max(no.shape),
        mask: false,
    })
}

fn constant(node: usize, value: f64) -> Result<Type, ExpressionError> {
    if value.abs() <= MAX_MAGNITUDE {
        return Ok(Type {
            shape: Shape::Batch,
            mask: false,
        });
    }
    Err(ExpressionError::Constant {
        node,
        value: format!("{value:?}"),
    })
}

fn refuse(
    at: usize,
    node: &Node,
    given: &'static str,
    allowed: &'static str,
) -> Result<Type, ExpressionError> {
    Err(ExpressionError::Argument {
        node: at,
        name: node.name(),
        given,
        allowed,
    })
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
