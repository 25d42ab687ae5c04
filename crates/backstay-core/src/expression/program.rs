//! An expression made ready to run: each operation is one loop over the elements of some rows.
//!
//! What is the same for all rows of a batch is computed once, in float64. What each row has, such as
//! a statistic, is float64, one value a row. Everything else is float32. Values lie in registers,
//! as many as are needed at one time, so that those of a block of rows stay in the cache. Nothing
//! is allocated for a row, and no result depends on how rows are cut into blocks.

use super::check::{ExpressionError, Shape, Signature, Type, MAX_ROW_BYTES};
use super::kernels::{self, Argument};
use super::node::{Binary, Expression, NodeId, Parts, Reduction, Unary};

/// Elements that are worked on together, if a row has fewer.
const BLOCK_ELEMENTS: usize = 1024;

/// Where values lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Bank {
    /// One float64 for the batch.
    Batch,
    /// A float64 for each row.
    Wide,
    /// A float32 for each row, or for each element.
    Narrow,
    /// The float32 of the input that lies outside.
    Outside,
}

/// A value: its bank, its register there, and whether it has one value for each element. Small,
/// because every step reads several.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place {
    bank: Bank,
    vector: bool,
    number: u16,
}

impl Place {
    fn new(bank: Bank, register: usize, vector: bool) -> Self {
        Self {
            bank,
            vector,
            // Some hundred nodes have some thousand values at most.
            number: register as u16,
        }
    }

    #[inline]
    fn register(self) -> usize {
        usize::from(self.number)
    }

    /// Whether it is in a register that other values can have before and after it.
    fn has_register(self) -> bool {
        matches!(self.bank, Bank::Wide | Bank::Narrow)
    }
}

/// How a step makes its value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Operation {
    Unary(Unary),
    Binary(Binary),
    Where,
    Reduce(Reduction),
    /// From float64 to float32.
    Round,
    /// From one value a row to one for each element.
    Repeat,
}

#[derive(Debug, Clone, Copy)]
struct Step {
    operation: Operation,
    arguments: [Option<Place>; 3],
    out: Place,
}

/// See the module's documentation.
#[derive(Debug, Clone)]
pub struct Program {
    /// How many values of a batch are given: its inputs, then the settings.
    given: usize,
    /// The constants and their registers.
    constants: Vec<(usize, f64)>,
    batch_steps: Vec<Step>,
    steps: Vec<Step>,
    /// Where each input of the signature lies; `None` if it is not used.
    inputs: Vec<Option<Place>>,
    results: Vec<Place>,
    batch_registers: usize,
    wide_registers: usize,
    narrow_registers: usize,
}

/// Banks that have registers.
const BANKS: usize = 3;

impl Program {
    /// Check an expression and make it ready.
    pub fn new(expression: &Expression, signature: &Signature) -> Result<Self, ExpressionError> {
        let types = expression.check(signature)?;
        let mut lowering = Lowering::new(signature);
        let live = live_nodes(expression);
        for (at, node) in expression.nodes.iter().enumerate() {
            let place = if live[at] {
                lowering.node(node.parts(), types[at], signature)
            } else {
                None
            };
            lowering.places.push(place);
        }
        let results = expression.results.iter().zip(&signature.results);
        lowering.results = results
            .filter_map(|(&node, (_, wanted))| {
                let place = lowering.places[node as usize]?;
                Some(lowering.result(place, wanted.shape))
            })
            .collect();
        Ok(lowering.finish())
    }

    /// Whether a result depends on an input; its number is that of the signature.
    pub fn uses(&self, input: usize) -> bool {
        self.inputs[input].is_some()
    }

    /// Refuse rows for which it would take too much memory.
    pub fn check_elements(&self, elements: usize) -> Result<(), ExpressionError> {
        let bytes = self.narrow_registers * elements * size_of::<f32>();
        if bytes <= MAX_ROW_BYTES {
            return Ok(());
        }
        let reason = format!(
            "its values take {bytes} bytes for a row of {elements} elements; allowed: up to {MAX_ROW_BYTES}"
        );
        Err(reason.into())
    }

    /// How many rows of so many elements are best worked on together.
    pub fn block_rows(elements: usize) -> usize {
        (BLOCK_ELEMENTS / elements.max(1)).clamp(1, 64)
    }

    /// Begin a batch of rows of `elements`, at most `rows` at a time. `given` are the inputs of
    /// shape [`Shape::Batch`] in the order of the signature, then the settings.
    pub fn begin(&self, elements: usize, rows: usize, given: &[f64]) -> Evaluation<'_> {
        let mut batch = vec![0.0; self.batch_registers];
        batch[..self.given].copy_from_slice(given);
        for &(register, value) in &self.constants {
            batch[register] = value;
        }
        for step in &self.batch_steps {
            let argument = |place: &Option<Place>| {
                Argument::One(place.map_or(0.0, |place| batch[place.register()]))
            };
            let arguments = [0, 1, 2].map(|at| argument(&step.arguments[at]));
            let mut out = [0.0];
            kernels::compute_wide(step.operation, arguments, &mut out);
            batch[step.out.register()] = out[0];
        }
        Evaluation {
            program: self,
            elements,
            rows,
            batch,
            wide: vec![vec![0.0; rows]; self.wide_registers],
            narrow: vec![vec![0.0; rows * elements]; self.narrow_registers],
        }
    }
}

/// A program at work on one batch: write the inputs of some rows, run, read the results.
pub struct Evaluation<'p> {
    program: &'p Program,
    elements: usize,
    rows: usize,
    batch: Vec<f64>,
    wide: Vec<Vec<f64>>,
    narrow: Vec<Vec<f32>>,
}

impl Evaluation<'_> {
    /// The most rows at a time.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Where to write an input of float32 before each [`Self::run`], row by row; its number is that
    /// of the signature. `None` if the expression does not use it.
    #[inline]
    pub fn narrow_input(&mut self, input: usize) -> Option<&mut [f32]> {
        let place = self.program.inputs[input]?;
        (place.bank == Bank::Narrow).then(|| &mut self.narrow[place.register()][..])
    }

    /// The same for an input of float64, one value a row.
    #[inline]
    pub fn wide_input(&mut self, input: usize) -> Option<&mut [f64]> {
        let place = self.program.inputs[input]?;
        (place.bank == Bank::Wide).then(|| &mut self.wide[place.register()][..])
    }

    /// Compute the results of the first `rows` rows that were written. `outside` are those rows of
    /// [`Signature::outside`], or empty if there is no such input.
    pub fn run(&mut self, rows: usize, outside: &[f32]) {
        for step in &self.program.steps {
            self.step(step, rows, outside);
        }
        for place in &self.program.results {
            if place.bank == Bank::Narrow {
                let n = self.count(*place, rows);
                kernels::canonicalize(&mut self.narrow[place.register()][..n]);
            }
        }
    }

    /// A result of the last run, row by row; every NaN has the same bits.
    #[inline]
    pub fn result(&self, result: usize) -> &[f32] {
        &self.narrow[self.program.results[result].register()]
    }

    /// The same for a result of [`Shape::Number`], one value a row. A NaN may have any bits: it is not
    /// to be stored.
    #[inline]
    pub fn wide_result(&self, result: usize) -> &[f64] {
        &self.wide[self.program.results[result].register()]
    }

    fn count(&self, place: Place, rows: usize) -> usize {
        if place.vector {
            rows * self.elements
        } else {
            rows
        }
    }

    fn step(&mut self, step: &Step, rows: usize, outside: &[f32]) {
        let n = self.count(step.out, rows);
        if step.out.bank == Bank::Wide {
            let mut out = std::mem::take(&mut self.wide[step.out.register()]);
            let [a, b, c] = step.arguments;
            let argument = |place| self.wide_argument(place, n);
            let arguments = [argument(a), argument(b), argument(c)];
            match (step.operation, arguments[0]) {
                (Operation::Repeat, Argument::One(value)) => out[..n].fill(value),
                _ => kernels::compute_wide(step.operation, arguments, &mut out[..n]),
            }
            self.wide[step.out.register()] = out;
            return;
        }
        // No argument lies in the register of the result.
        let mut out = std::mem::take(&mut self.narrow[step.out.register()]);
        match (step.operation, step.arguments[0]) {
            (Operation::Reduce(reduction), Some(a)) => {
                if let Argument::Each(a) =
                    self.narrow_argument(Some(a), self.count(a, rows), outside)
                {
                    kernels::reduce(reduction, a, self.elements, &mut out[..n]);
                }
            }
            (Operation::Round, Some(a)) => {
                for (out, &wide) in out.iter_mut().zip(&self.wide[a.register()][..n]) {
                    *out = wide as f32;
                }
            }
            (Operation::Repeat, Some(a)) => self.repeat(a, &mut out[..n], outside),
            _ => {
                let [a, b, c] = step.arguments;
                let argument = |place| self.narrow_argument(place, n, outside);
                let arguments = [argument(a), argument(b), argument(c)];
                kernels::compute(step.operation, arguments, &mut out[..n]);
            }
        }
        self.narrow[step.out.register()] = out;
    }

    fn repeat(&self, a: Place, out: &mut [f32], outside: &[f32]) {
        match a.bank {
            Bank::Batch => return out.fill(self.batch[a.register()] as f32),
            Bank::Outside => return out.copy_from_slice(&outside[..out.len()]),
            Bank::Wide | Bank::Narrow => {}
        }
        let of_rows = &self.narrow[a.register()];
        for (row, &value) in out.chunks_exact_mut(self.elements).zip(of_rows) {
            row.fill(value);
        }
    }

    #[inline]
    fn wide_argument(&self, place: Option<Place>, n: usize) -> Argument<'_, f64> {
        match place {
            Some(place) if place.bank == Bank::Wide => {
                Argument::Each(&self.wide[place.register()][..n])
            }
            Some(place) => Argument::One(self.batch[place.register()]),
            None => Argument::One(0.0),
        }
    }

    #[inline]
    fn narrow_argument<'a>(
        &'a self,
        place: Option<Place>,
        n: usize,
        outside: &'a [f32],
    ) -> Argument<'a, f32> {
        match place {
            Some(place) if place.bank == Bank::Outside => Argument::Each(&outside[..n]),
            Some(place) if place.bank == Bank::Narrow => {
                Argument::Each(&self.narrow[place.register()][..n])
            }
            Some(place) => Argument::One(self.batch[place.register()] as f32),
            None => Argument::One(0.0),
        }
    }
}

/// Whether some result needs each node.
fn live_nodes(expression: &Expression) -> Vec<bool> {
    let mut live = vec![false; expression.nodes.len()];
    for &node in &expression.results {
        live[node as usize] = true;
    }
    for at in (0..live.len()).rev() {
        if live[at] {
            for &argument in expression.nodes[at].parts().arguments() {
                live[argument as usize] = true;
            }
        }
    }
    live
}

/// Turns nodes into steps. Until [`Lowering::finish`] each value has a register of its own.
struct Lowering {
    given: usize,
    /// Of each node so far.
    places: Vec<Option<Place>>,
    inputs: Vec<Option<Place>>,
    results: Vec<Place>,
    constants: Vec<(usize, f64)>,
    batch_steps: Vec<Step>,
    steps: Vec<Step>,
    /// How many values there are in each bank.
    counts: [usize; BANKS],
}

impl Lowering {
    fn new(signature: &Signature) -> Self {
        let of_batch = signature.inputs.iter().filter(|one| one.1 == Shape::Batch);
        let given = of_batch.count() + signature.settings.len();
        Self {
            given,
            places: Vec::new(),
            inputs: vec![None; signature.inputs.len()],
            results: Vec::new(),
            constants: Vec::new(),
            batch_steps: Vec::new(),
            steps: Vec::new(),
            counts: [given, 0, 0],
        }
    }

    fn node(&mut self, parts: Parts<'_>, found: Type, signature: &Signature) -> Option<Place> {
        let place = match parts {
            Parts::Input(name) => {
                let at = signature.inputs.iter().position(|(one, _)| one == name)?;
                if let Some(place) = self.inputs[at] {
                    return Some(place);
                }
                let before = signature.inputs[..at].iter();
                let place = if signature.outside == Some(at) {
                    Place::new(Bank::Outside, 0, true)
                } else if found.shape == Shape::Batch {
                    batch_place(before.filter(|one| one.1 == Shape::Batch).count())
                } else {
                    self.new_place(found.shape)
                };
                self.inputs[at] = Some(place);
                place
            }
            Parts::Setting(name) => {
                let at = signature.settings.iter().position(|one| one == name)?;
                batch_place(self.given - signature.settings.len() + at)
            }
            Parts::Constant(value) => {
                let place = self.new_place(Shape::Batch);
                self.constants.push((place.register(), value));
                place
            }
            Parts::Unary(operation, a) => {
                self.step(Operation::Unary(operation), found.shape, &[a])?
            }
            Parts::Binary(operation, both) => {
                self.step(Operation::Binary(operation), found.shape, &both)?
            }
            Parts::Where(all) => self.step(Operation::Where, found.shape, &all)?,
            Parts::Reduction(operation, a) => {
                let a = self.places[a as usize]?;
                let a = self.narrowed(a, true);
                self.push(Operation::Reduce(operation), &[a], Shape::Scalar)
            }
        };
        Some(place)
    }

    /// A step whose arguments are brought to the result's bank and length; values of the batch stay.
    fn step(&mut self, operation: Operation, shape: Shape, arguments: &[NodeId]) -> Option<Place> {
        let mut places = Vec::with_capacity(arguments.len());
        for &argument in arguments {
            let place = self.places[argument as usize]?;
            let stays = place.bank == Bank::Batch || shape <= Shape::Number;
            places.push(if stays {
                place
            } else {
                self.narrowed(place, shape == Shape::Vector)
            });
        }
        Some(self.push(operation, &places, shape))
    }

    /// A value in the form of a result.
    fn result(&mut self, place: Place, shape: Shape) -> Place {
        if shape == Shape::Number {
            // What is checked has no later shape.
            return match place.bank {
                Bank::Wide => place,
                _ => self.push(Operation::Repeat, &[place], shape),
            };
        }
        let place = self.narrowed(place, shape == Shape::Vector);
        if place.bank == Bank::Narrow {
            return place;
        }
        self.push(Operation::Repeat, &[place], Shape::Vector)
    }

    /// A value as float32 of each row, or of each element.
    fn narrowed(&mut self, place: Place, vector: bool) -> Place {
        let shape = if vector { Shape::Vector } else { Shape::Scalar };
        let narrow = if place.bank == Bank::Wide {
            self.push(Operation::Round, &[place], Shape::Scalar)
        } else {
            place
        };
        if narrow.bank != Bank::Batch && narrow.vector == vector {
            return narrow;
        }
        self.push(Operation::Repeat, &[narrow], shape)
    }

    fn push(&mut self, operation: Operation, arguments: &[Place], shape: Shape) -> Place {
        let mut step = Step {
            operation,
            arguments: [None; 3],
            out: self.new_place(shape),
        };
        for (to, &argument) in step.arguments.iter_mut().zip(arguments) {
            *to = Some(argument);
        }
        let steps = match shape {
            Shape::Batch => &mut self.batch_steps,
            _ => &mut self.steps,
        };
        // A row's value may be repeated for several operations.
        let known = steps.iter().find(|known| {
            operation == Operation::Repeat
                && (known.operation, known.arguments) == (operation, step.arguments)
                && (known.out.bank, known.out.vector) == (step.out.bank, step.out.vector)
        });
        if let Some(known) = known {
            return known.out;
        }
        steps.push(step);
        step.out
    }

    fn new_place(&mut self, shape: Shape) -> Place {
        let bank = match shape {
            Shape::Batch => Bank::Batch,
            Shape::Number => Bank::Wide,
            Shape::Scalar | Shape::Vector => Bank::Narrow,
        };
        let count = &mut self.counts[bank as usize];
        *count += 1;
        Place::new(bank, *count - 1, shape == Shape::Vector)
    }

    fn finish(mut self) -> Program {
        let mut registers = Registers::new(&self);
        for input in self.inputs.iter_mut().flatten() {
            *input = registers.define(*input);
        }
        for at in 0..self.steps.len() {
            let mut step = self.steps[at];
            // The result's register is chosen while those of the arguments are taken.
            step.out = registers.define(step.out);
            let arguments = step.arguments;
            for place in step.arguments.iter_mut().flatten() {
                *place = registers.of(*place);
            }
            for place in arguments.into_iter().flatten() {
                registers.release(place, at);
            }
            self.steps[at] = step;
        }
        Program {
            given: self.given,
            constants: self.constants,
            batch_steps: self.batch_steps,
            steps: self.steps,
            inputs: self.inputs,
            results: self.results.iter().map(|&one| registers.of(one)).collect(),
            batch_registers: self.counts[Bank::Batch as usize],
            wide_registers: registers.used[Bank::Wide as usize],
            narrow_registers: registers.used[Bank::Narrow as usize],
        }
    }
}

fn batch_place(register: usize) -> Place {
    Place::new(Bank::Batch, register, false)
}

/// Gives values registers, and those of values that nothing uses any more to later ones.
struct Registers {
    /// The last step that uses each value, by bank; `usize::MAX` for results.
    last_uses: [Vec<usize>; BANKS],
    given: [Vec<usize>; BANKS],
    free: [Vec<usize>; BANKS],
    used: [usize; BANKS],
}

impl Registers {
    fn new(lowering: &Lowering) -> Self {
        let mut last_uses = lowering.counts.map(|count| vec![0; count]);
        for (at, step) in lowering.steps.iter().enumerate() {
            for place in step
                .arguments
                .iter()
                .flatten()
                .filter(|one| one.has_register())
            {
                last_uses[place.bank as usize][place.register()] = at;
            }
        }
        for place in &lowering.results {
            last_uses[place.bank as usize][place.register()] = usize::MAX;
        }
        Self {
            last_uses,
            given: lowering.counts.map(|count| vec![0; count]),
            free: [const { Vec::new() }; BANKS],
            used: [0; BANKS],
        }
    }

    fn define(&mut self, place: Place) -> Place {
        if !place.has_register() {
            return place;
        }
        let bank = place.bank as usize;
        let register = self.free[bank].pop().unwrap_or_else(|| {
            self.used[bank] += 1;
            self.used[bank] - 1
        });
        self.given[bank][place.register()] = register;
        Place::new(place.bank, register, place.vector)
    }

    fn of(&self, place: Place) -> Place {
        if !place.has_register() {
            return place;
        }
        let register = self.given[place.bank as usize][place.register()];
        Place::new(place.bank, register, place.vector)
    }

    fn release(&mut self, place: Place, at: usize) {
        if !place.has_register() || self.last_uses[place.bank as usize][place.register()] != at {
            return;
        }
        let (register, free) = (
            self.of(place).register(),
            &mut self.free[place.bank as usize],
        );
        // It may be two arguments of one step.
        if !free.contains(&register) {
            free.push(register);
        }
    }
}
