//! The operations, and the JSON form of an expression.

use serde::{Deserialize, Serialize};

/// The number of a node: its place in [`Expression::nodes`].
pub type NodeId = u32;

/// A computation over one row, as data: no loop, no call, no way to anything but its inputs.
///
/// ```json
/// {"nodes": [{"input": "weights"}, {"setting": "limit"}, {"minimum": [0, 1]}], "results": [2]}
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Expression {
    /// Each is computed once; its arguments stand before it.
    pub nodes: Vec<Node>,
    /// Which nodes are the results.
    pub results: Vec<NodeId>,
}

/// How a node gets its value.
#[derive(Clone, Copy)]
pub(super) enum Parts<'a> {
    Input(&'a str),
    Setting(&'a str),
    Constant(f64),
    Unary(Unary, NodeId),
    Binary(Binary, [NodeId; 2]),
    Reduction(Reduction, NodeId),
    Where([NodeId; 3]),
}

macro_rules! operations {
    (unary $($unary:ident)* ; binary $($binary:ident)* ; reduction $($reduction:ident)*) => {
        /// One value of an expression.
        #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
        #[serde(rename_all = "snake_case")]
        #[allow(missing_docs)] // The operations are named as in NumPy; docs/reference/tables.md.
        pub enum Node {
            Input(String),
            Setting(String),
            Constant(f64),
            Where(NodeId, NodeId, NodeId),
            $($unary(NodeId),)*
            $($binary(NodeId, NodeId),)*
            $($reduction(NodeId),)*
        }

        /// An operation on one value.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(super) enum Unary { $($unary),* }

        /// An operation on two values.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(super) enum Binary { $($binary),* }

        /// From a row's values to one.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(super) enum Reduction { $($reduction),* }

        impl Node {
            pub(super) fn parts(&self) -> Parts<'_> {
                match *self {
                    Self::Input(ref name) => Parts::Input(name),
                    Self::Setting(ref name) => Parts::Setting(name),
                    Self::Constant(value) => Parts::Constant(value),
                    Self::Where(holds, yes, no) => Parts::Where([holds, yes, no]),
                    $(Self::$unary(a) => Parts::Unary(Unary::$unary, a),)*
                    $(Self::$binary(a, b) => Parts::Binary(Binary::$binary, [a, b]),)*
                    $(Self::$reduction(a) => Parts::Reduction(Reduction::$reduction, a),)*
                }
            }
        }
    };
}

operations! {
    unary Neg Abs Sign Sqrt Exp Log Not;
    binary Add Sub Mul Div Pow Maximum Minimum
        Less LessEqual Greater GreaterEqual Equal NotEqual And Or;
    reduction Sum Mean Max Min
}

impl Parts<'_> {
    /// The nodes that it uses.
    pub(super) fn arguments(&self) -> &[NodeId] {
        match self {
            Self::Input(_) | Self::Setting(_) | Self::Constant(_) => &[],
            Self::Unary(_, a) | Self::Reduction(_, a) => std::slice::from_ref(a),
            Self::Binary(_, both) => both,
            Self::Where(all) => all,
        }
    }
}

impl Binary {
    /// Whether it compares two numbers.
    pub(super) fn compares(self) -> bool {
        matches!(
            self,
            Self::Less
                | Self::LessEqual
                | Self::Greater
                | Self::GreaterEqual
                | Self::Equal
                | Self::NotEqual
        )
    }

    /// Whether it joins two masks.
    pub(super) fn joins(self) -> bool {
        matches!(self, Self::And | Self::Or)
    }
}

impl Node {
    /// Its name in the JSON form.
    pub fn name(&self) -> String {
        let value = serde_json::to_value(self).unwrap_or_default();
        let name = value.as_object().and_then(|one| one.keys().next().cloned());
        name.unwrap_or_default()
    }
}
