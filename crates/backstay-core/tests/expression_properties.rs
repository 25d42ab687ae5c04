//! Random expressions against an interpreter that computes one value at a time, straight from the
//! rules in docs/reference/tables.md.

// What fails in a helper is a failed test; exact numbers are the point.
#![allow(clippy::unwrap_used, clippy::float_cmp)]

use backstay_core::expression::{
    canonical, Expression, Node, NodeId, Program, Shape, Signature, Type,
};
use proptest::prelude::*;

/// A value as the interpreter has it: float64, or float32 of a row or of its elements.
#[derive(Debug, Clone)]
enum Value {
    Wide(f64),
    Narrow(f32),
    Vector(Vec<f32>),
}
use Value::{Narrow, Vector, Wide};

const ELEMENTS: usize = 13;
const SETTINGS: [f64; 2] = [0.3, -2.0];
const TIME: f64 = 1_800_000_123.0;

fn number(shape: Shape) -> Type {
    Type { shape, mask: false }
}

fn signature(result: Type) -> Signature {
    Signature {
        inputs: vec![
            ("weights".into(), Shape::Vector),
            ("count".into(), Shape::Scalar),
            ("time".into(), Shape::Batch),
            ("last_seen".into(), Shape::Number),
        ],
        outside: None,
        settings: vec!["a".into(), "b".into()],
        results: vec![("result".into(), result)],
    }
}

/// The inputs of one row.
#[derive(Debug, Clone)]
struct Row {
    weights: Vec<f32>,
    count: f32,
    last_seen: f64,
}

fn elementwise(
    values: &[Value],
    narrow: &dyn Fn(&[f32]) -> f32,
    wide: &dyn Fn(&[f64]) -> f64,
) -> Value {
    let at = |place: usize| -> Vec<f32> {
        let one = |value: &Value| match value {
            Wide(value) => *value as f32,
            Narrow(value) => *value,
            Vector(all) => all[place],
        };
        values.iter().map(one).collect()
    };
    if values.iter().any(|value| matches!(value, Vector(_))) {
        return Vector((0..ELEMENTS).map(|place| narrow(&at(place))).collect());
    }
    if values.iter().any(|value| matches!(value, Narrow(_))) {
        return Narrow(narrow(&at(0)));
    }
    let all: Vec<f64> = values
        .iter()
        .map(|value| match value {
            Wide(value) => *value,
            _ => unreachable!(),
        })
        .collect();
    Wide(wide(&all))
}

macro_rules! both {
    ($values:expr, |$args:ident| $body:expr) => {
        elementwise(
            $values,
            &|$args: &[f32]| {
                #[allow(unused)]
                fn flag(holds: bool) -> f32 {
                    f32::from(u8::from(holds))
                }
                $body
            },
            &|$args: &[f64]| {
                #[allow(unused)]
                fn flag(holds: bool) -> f64 {
                    f64::from(u8::from(holds))
                }
                $body
            },
        )
    };
}

fn reference(node: &Node, values: &[Value], row: &Row) -> Value {
    let of = |nodes: &[NodeId]| -> Vec<Value> {
        nodes
            .iter()
            .map(|&one| values[one as usize].clone())
            .collect()
    };
    let vector = |node: NodeId| match &values[node as usize] {
        Vector(all) => all.clone(),
        other => panic!("{other:?} is reduced"),
    };
    match *node {
        Node::Input(ref name) => match name.as_str() {
            "weights" => Vector(row.weights.clone()),
            "count" => Narrow(row.count),
            "time" => Wide(TIME),
            _ => Wide(row.last_seen),
        },
        Node::Setting(ref name) => Wide(SETTINGS[usize::from(name == "b")]),
        Node::Constant(value) => Wide(value),
        Node::Neg(a) => both!(&of(&[a]), |x| -x[0]),
        Node::Abs(a) => both!(&of(&[a]), |x| x[0].abs()),
        Node::Sqrt(a) => both!(&of(&[a]), |x| x[0].sqrt()),
        Node::Sign(a) => both!(&of(&[a]), |x| if x[0] > 0.0 {
            1.0
        } else if x[0] < 0.0 {
            -1.0
        } else {
            x[0]
        }),
        Node::Exp(_) | Node::Log(_) => unreachable!(),
        Node::Not(a) => both!(&of(&[a]), |x| flag(x[0] == 0.0)),
        Node::Where(holds, yes, no) => {
            both!(&of(&[holds, yes, no]), |x| if x[0] == 0.0 {
                x[2]
            } else {
                x[1]
            })
        }
        Node::Sum(a) => Narrow(sum(&vector(a))),
        Node::Mean(a) => Narrow(sum(&vector(a)) / ELEMENTS as f32),
        Node::Max(a) => Narrow(fold(&vector(a), |a, b| a >= b || a.is_nan())),
        Node::Min(a) => Narrow(fold(&vector(a), |a, b| a <= b || a.is_nan())),
        _ => of_two(node, &of),
    }
}

/// The operations on two values.
fn of_two(node: &Node, of: &dyn Fn(&[NodeId]) -> Vec<Value>) -> Value {
    match *node {
        Node::Add(a, b) => both!(&of(&[a, b]), |x| x[0] + x[1]),
        Node::Sub(a, b) => both!(&of(&[a, b]), |x| x[0] - x[1]),
        Node::Mul(a, b) => both!(&of(&[a, b]), |x| x[0] * x[1]),
        Node::Div(a, b) => both!(&of(&[a, b]), |x| x[0] / x[1]),
        Node::Pow(a, b) => elementwise(
            &of(&[a, b]),
            &|x| match x[1] {
                0.5 => x[0].sqrt(),
                2.0 => x[0] * x[0],
                1.0 => x[0],
                -1.0 => 1.0 / x[0],
                _ => libm::powf(x[0], x[1]),
            },
            &|x| match x[1] {
                0.5 => x[0].sqrt(),
                2.0 => x[0] * x[0],
                1.0 => x[0],
                -1.0 => 1.0 / x[0],
                _ => libm::pow(x[0], x[1]),
            },
        ),
        Node::Maximum(a, b) => {
            both!(&of(&[a, b]), |x| if x[0] >= x[1] || x[0].is_nan() {
                x[0]
            } else {
                x[1]
            })
        }
        Node::Minimum(a, b) => {
            both!(&of(&[a, b]), |x| if x[0] <= x[1] || x[0].is_nan() {
                x[0]
            } else {
                x[1]
            })
        }
        Node::Less(a, b) => both!(&of(&[a, b]), |x| flag(x[0] < x[1])),
        Node::LessEqual(a, b) => both!(&of(&[a, b]), |x| flag(x[0] <= x[1])),
        Node::Greater(a, b) => both!(&of(&[a, b]), |x| flag(x[0] > x[1])),
        Node::GreaterEqual(a, b) => both!(&of(&[a, b]), |x| flag(x[0] >= x[1])),
        Node::Equal(a, b) => both!(&of(&[a, b]), |x| flag(x[0] == x[1])),
        Node::NotEqual(a, b) => both!(&of(&[a, b]), |x| flag(x[0] != x[1])),
        Node::And(a, b) => both!(&of(&[a, b]), |x| flag(x[0] != 0.0 && x[1] != 0.0)),
        Node::Or(a, b) => both!(&of(&[a, b]), |x| flag(x[0] != 0.0 || x[1] != 0.0)),
        ref other => unreachable!("{other:?}"),
    }
}

fn fold(all: &[f32], keeps: fn(f32, f32) -> bool) -> f32 {
    let mut best = all[0];
    for &next in &all[1..] {
        best = if keeps(best, next) { best } else { next };
    }
    best
}

/// For 8 to 15 elements: eight sums, as a tree, then the rest.
fn sum(all: &[f32]) -> f32 {
    let tree = |at: usize| (all[at] + all[at + 1]) + (all[at + 2] + all[at + 3]);
    let mut sum = tree(0) + tree(4);
    for value in &all[8..] {
        sum += value;
    }
    sum
}

fn interpret(expression: &Expression, row: &Row) -> Value {
    let mut values = Vec::new();
    for node in &expression.nodes {
        let value = reference(node, &values, row);
        values.push(value);
    }
    values[expression.results[0] as usize].clone()
}

/// Run over rows in blocks of `block`.
fn run(
    expression: &Expression,
    result: Type,
    rows: &[Row],
    block: usize,
    outside: Option<usize>,
) -> Vec<Vec<f32>> {
    let signature = Signature {
        outside,
        ..signature(result)
    };
    let program = Program::new(expression, &signature).unwrap();
    let mut evaluation = program.begin(ELEMENTS, block, &[TIME, SETTINGS[0], SETTINGS[1]]);
    let mut all = Vec::new();
    for rows in rows.chunks(block) {
        for (at, row) in rows.iter().enumerate() {
            if let Some(input) = evaluation.narrow_input(0) {
                input[at * ELEMENTS..(at + 1) * ELEMENTS].copy_from_slice(&row.weights);
            }
            if let Some(input) = evaluation.narrow_input(1) {
                input[at] = row.count;
            }
            if let Some(input) = evaluation.wide_input(3) {
                input[at] = row.last_seen;
            }
        }
        let weights: Vec<f32> = rows.iter().flat_map(|row| row.weights.clone()).collect();
        evaluation.run(rows.len(), &weights);
        let width = if result.shape == Shape::Vector {
            ELEMENTS
        } else {
            1
        };
        let results = evaluation.result(0)[..rows.len() * width].chunks(width);
        all.extend(results.map(<[f32]>::to_vec));
    }
    all
}

/// An expression of the nodes that a list of random words asks for, as far as they are allowed.
/// `exact`: without `exp` and `log`, which the interpreter takes from elsewhere.
fn expression_of(words: &[(u8, u32, u32, u32)], exact: bool) -> (Expression, Type) {
    let mut nodes = vec![
        Node::Input("weights".into()),
        Node::Input("count".into()),
        Node::Input("time".into()),
        Node::Input("last_seen".into()),
        Node::Setting("a".into()),
        Node::Setting("b".into()),
        Node::Constant(0.1),
        Node::Constant(2.0),
    ];
    let any = signature(number(Shape::Vector));
    for &(word, a, b, c) in words {
        let at = |x: u32| x % nodes.len() as u32;
        let (a, b, c) = (at(a), at(b), at(c));
        let node = match word % 27 {
            0 => Node::Neg(a),
            1 => Node::Abs(a),
            2 => Node::Sign(a),
            3 => Node::Sqrt(a),
            4 if !exact => Node::Exp(a),
            5 if !exact => Node::Log(a),
            6 => Node::Not(a),
            7 => Node::Add(a, b),
            8 => Node::Sub(a, b),
            9 => Node::Mul(a, b),
            10 => Node::Div(a, b),
            11 => Node::Pow(a, b),
            12 => Node::Maximum(a, b),
            13 => Node::Minimum(a, b),
            14 => Node::Less(a, b),
            15 => Node::LessEqual(a, b),
            16 => Node::Greater(a, b),
            17 => Node::GreaterEqual(a, b),
            18 => Node::Equal(a, b),
            19 => Node::NotEqual(a, b),
            20 => Node::And(a, b),
            21 => Node::Or(a, b),
            22 => Node::Sum(a),
            23 => Node::Mean(a),
            24 => Node::Max(a),
            25 => Node::Min(a),
            _ => Node::Where(a, b, c),
        };
        nodes.push(node);
        let tried = Expression {
            results: vec![0],
            nodes: nodes.clone(),
        };
        if tried.check(&any).is_err() {
            nodes.pop();
        }
    }
    let last = nodes.len() as NodeId - 1;
    let types = Expression {
        results: vec![0],
        nodes: nodes.clone(),
    }
    .check(&any)
    .unwrap();
    let found = types[last as usize];
    let shape = found.shape.max(Shape::Scalar);
    let results = vec![last];
    (Expression { nodes, results }, Type { shape, ..found })
}

fn rows() -> impl Strategy<Value = Vec<Row>> {
    let weight = prop_oneof![
        8 => -3.0f32..3.0,
        1 => Just(0.0f32),
        1 => prop::num::f32::ANY,
    ];
    let row = (
        prop::collection::vec(weight, ELEMENTS),
        0.0f32..9.0,
        1.7e9f64..1.9e9,
    );
    let row = row.prop_map(|(weights, count, last_seen)| Row {
        weights,
        count,
        last_seen: last_seen.floor(),
    });
    prop::collection::vec(row, 1..9)
}

fn words() -> impl Strategy<Value = Vec<(u8, u32, u32, u32)>> {
    prop::collection::vec(any::<(u8, u32, u32, u32)>(), 1..40)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    /// Bits equal the interpreter's. `math` has the tests of `exp` and `log`.
    #[test]
    fn the_program_computes_what_the_interpreter_does(words in words(), rows in rows(), outside: bool) {
        let (expression, result) = expression_of(&words, true);
        let got = run(&expression, result, &rows, 4, outside.then_some(0));
        for (row, got) in rows.iter().zip(got) {
            let wanted = match (interpret(&expression, row), result.shape) {
                (Vector(all), _) => all,
                (Wide(one), Shape::Vector) => vec![one as f32; ELEMENTS],
                (Narrow(one), Shape::Vector) => vec![one; ELEMENTS],
                (Wide(one), _) => vec![one as f32],
                (Narrow(one), _) => vec![one],
            };
            let bits = |all: &[f32]| -> Vec<u32> {
                all.iter().map(|&one| canonical(one).to_bits()).collect()
            };
            prop_assert_eq!(bits(&got), bits(&wanted), "{}", expression.canonical_json());
        }
    }

    /// A result of statistics, settings and constants alone stays float64 if that is wanted.
    #[test]
    fn a_wide_result_is_not_rounded(words in words(), rows in rows(), block in 1usize..9) {
        let (mut expression, _) = expression_of(&words, true);
        expression.results = vec![0];
        let types = expression.check(&signature(number(Shape::Vector))).unwrap();
        let last = types.iter().rposition(|one| one.shape <= Shape::Number).unwrap();
        expression.results = vec![last as NodeId];
        let wanted = Type { shape: Shape::Number, ..types[last] };
        let program = Program::new(&expression, &signature(wanted)).unwrap();
        let mut evaluation = program.begin(ELEMENTS, block, &[TIME, SETTINGS[0], SETTINGS[1]]);
        for rows in rows.chunks(block) {
            if let Some(input) = evaluation.wide_input(3) {
                for (input, row) in input.iter_mut().zip(rows) {
                    *input = row.last_seen;
                }
            }
            evaluation.run(rows.len(), &[]);
            for (row, &got) in rows.iter().zip(evaluation.wide_result(0)) {
                let Wide(wanted) = interpret(&expression, row) else {
                    unreachable!()
                };
                let equal = got.to_bits() == wanted.to_bits() || got.is_nan() && wanted.is_nan();
                prop_assert!(equal, "{got} {wanted} {}", expression.canonical_json());
            }
        }
    }

    /// How rows are cut into blocks changes no bit.
    #[test]
    fn blocks_of_any_size_give_the_same_bits(words in words(), rows in rows(), block in 1usize..9) {
        let (expression, result) = expression_of(&words, false);
        let bits = |block| -> Vec<u32> {
            let all = run(&expression, result, &rows, block, None).concat();
            all.iter().map(|&one| canonical(one).to_bits()).collect()
        };
        prop_assert_eq!(bits(block), bits(8), "{}", expression.canonical_json());
    }

    /// The JSON form is a fixed point, and says the same.
    #[test]
    fn the_json_form_comes_back(words in words()) {
        let (expression, _) = expression_of(&words, false);
        let text = expression.canonical_json();
        let again: Expression = serde_json::from_str(&text).unwrap();
        prop_assert_eq!(again.canonical_json(), text);
        prop_assert_eq!(again, expression);
    }
}

fn refusal(json: &str) -> String {
    let expression: Expression = match serde_json::from_str(json) {
        Ok(expression) => expression,
        Err(error) => return error.to_string(),
    };
    let refused = expression.check(&signature(number(Shape::Vector)));
    refused.unwrap_err().to_string()
}

/// An expression, and what its refusal says.
const HOSTILE: &[(&str, &str)] = &[
    (
        r#"{"nodes":[{"shell":"rm"}],"results":[0]}"#,
        "unknown variant `shell`",
    ),
    (
        r#"{"nodes":[{"input":"weights"}],"results":[0],"code":1}"#,
        "unknown field `code`",
    ),
    (
        r#"{"nodes":[{"input":"weights","neg":0}],"results":[0]}"#,
        "expected",
    ),
    (
        r#"{"nodes":[{"add":[0]}],"results":[0]}"#,
        "invalid length 1",
    ),
    (r#"{"nodes":[{"neg":-1}],"results":[0]}"#, "expected u32"),
    (
        r#"{"nodes":[],"results":[0]}"#,
        "result result is node 0, which does not exist",
    ),
    (
        r#"{"nodes":[{"input":"weights"},{"neg":1}],"results":[1]}"#,
        "node 1: neg uses a node that does not stand before it",
    ),
    (
        r#"{"nodes":[{"input":"password"}],"results":[0]}"#,
        "node 0: no input 'password'; there are weights, count, time, last_seen",
    ),
    (
        r#"{"nodes":[{"setting":"c"}],"results":[0]}"#,
        "node 0: no setting 'c'; there are a, b",
    ),
    (
        r#"{"nodes":[{"constant":1e31}],"results":[0]}"#,
        "node 0: the constant 1e31; allowed: up to 1e30",
    ),
    (
        r#"{"nodes":[{"input":"count"},{"sum":0}],"results":[0]}"#,
        "node 1: sum of a number for the row; allowed: a number for each element",
    ),
    (
        r#"{"nodes":[{"input":"count"},{"not":0}],"results":[0]}"#,
        "node 1: not of a number; allowed: masks",
    ),
    (
        r#"{"nodes":[{"input":"count"},{"less":[0,0]},{"sqrt":1}],"results":[0]}"#,
        "node 2: sqrt of a mask; allowed: numbers",
    ),
    (
        r#"{"nodes":[{"input":"count"},{"where":[0,0,0]}],"results":[0]}"#,
        "node 1: where on a number; allowed: a mask",
    ),
    (
        r#"{"nodes":[{"input":"count"},{"less":[0,0]}],"results":[1]}"#,
        "the returned result is a mask for the row; allowed: a number for each element of the row",
    ),
    (
        r#"{"nodes":[{"input":"count"}],"results":[]}"#,
        "it returns 0 values; expected result",
    ),
    (
        r#"{"nodes":[{"input":"count"}],"results":[7]}"#,
        "result result is node 7",
    ),
];

#[test]
fn hostile_expressions_are_refused_by_name() {
    for (json, message) in HOSTILE {
        let found = refusal(json);
        assert!(found.contains(message), "{json}: {found}");
    }
}

#[test]
fn what_is_too_large_is_refused() {
    let chain = |count: u32| Expression {
        nodes: std::iter::once(Node::Input("weights".into()))
            .chain((0..count).map(Node::Neg))
            .collect(),
        results: vec![count],
    };
    let check = |expression: &Expression| expression.check(&signature(number(Shape::Vector)));
    assert!(check(&chain(128)).is_ok());
    let deep = check(&chain(129)).unwrap_err().to_string();
    assert!(
        deep.contains("node 129: more than 128 operations one behind the other"),
        "{deep}"
    );
    let many = Expression {
        nodes: vec![Node::Input("weights".into()); 257],
        results: vec![0],
    };
    let many = check(&many).unwrap_err().to_string();
    assert_eq!(
        many,
        "more than 256 operations, inputs, settings and constants"
    );
    let mut long = chain(1);
    long.nodes = vec![Node::Input("w".repeat(20_000))];
    let long = check(&long).unwrap_err().to_string();
    assert!(
        long.contains("bytes of JSON; allowed: up to 16384"),
        "{long}"
    );
    let program = Program::new(&chain(1), &signature(number(Shape::Vector))).unwrap();
    assert!(program.check_elements(1 << 20).is_ok());
    let large = program.check_elements(1 << 24).unwrap_err().to_string();
    assert!(large.contains("for a row of 16777216 elements"), "{large}");
}
