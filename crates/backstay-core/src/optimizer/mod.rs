//! Optimizers: what a gradient does to one row, each in a file of its own.
//!
//! An optimizer sees one row at a time: its weights, its state (float32 words that lie behind
//! the weights) and the gradient. It keeps nothing else, so the result does not depend on the
//! order or grouping of rows, and replicas stay equal bit for bit. Loops run over slices of
//! equal length without branches, in the order of operations that the formulas give; nothing
//! is fused or reassociated, so every machine computes the same bits.
//!
//! Settings are float64. What depends on settings alone is computed in float64 and rounded
//! once, as PyTorch does; arithmetic on weights is float32. Imports [`crate::spec`] only.

mod adagrad;
mod adam;
mod adamw;
mod ftrl;
mod momentum;
mod rmsprop;
mod sgd;

pub use adagrad::Adagrad;
pub use adam::Adam;
pub use adamw::AdamW;
pub use ftrl::Ftrl;
pub use momentum::Momentum;
pub use rmsprop::RmsProp;
pub use sgd::Sgd;

use crate::spec::OptimizerSpec;

/// One optimizer with its settings.
pub trait RowOptimizer {
    /// float32 words of state behind a row of `row_elements` weights.
    fn state_elements(&self, row_elements: usize) -> usize;

    /// Write the state of a row that has had no push.
    fn init_state(&self, state: &mut [f32]);

    /// Apply one gradient to one row.
    ///
    /// `gradient` is as long as `weights`, and `state` has [`Self::state_elements`] of that.
    /// `learning_rate_scale` multiplies the learning rate for this push; schedules live in
    /// the trainer.
    fn update(
        &self,
        weights: &mut [f32],
        state: &mut [f32],
        gradient: &[f32],
        learning_rate_scale: f32,
    );
}

/// A function that is compiled once per optimizer, so that a batch chooses its optimizer once
/// and not once per row.
pub trait OptimizerVisitor {
    /// What it returns.
    type Out;

    /// Run it.
    fn visit<O: RowOptimizer>(self, optimizer: &O) -> Self::Out;
}

/// Any of the optimizers.
#[derive(Debug, Clone)]
#[allow(missing_docs)] // Each variant is the struct of its name.
pub enum Optimizer {
    Sgd(Sgd),
    Momentum(Momentum),
    Adagrad(Adagrad),
    Adam(Adam),
    AdamW(AdamW),
    RmsProp(RmsProp),
    Ftrl(Ftrl),
}

impl Optimizer {
    /// The optimizer of a checked table description.
    #[rustfmt::skip] // A table: pattern and value of an optimizer stand one above the other.
    pub fn from_spec(spec: &OptimizerSpec) -> Self {
        match *spec {
            OptimizerSpec::Sgd { learning_rate } =>
                Self::Sgd(Sgd { learning_rate }),
            OptimizerSpec::Momentum { learning_rate, momentum, nesterov } =>
                Self::Momentum(Momentum { learning_rate, momentum, nesterov }),
            OptimizerSpec::Adagrad { learning_rate, epsilon, initial_accumulator } =>
                Self::Adagrad(Adagrad { learning_rate, epsilon, initial_accumulator }),
            OptimizerSpec::Adam { learning_rate, beta1, beta2, epsilon } =>
                Self::Adam(Adam { learning_rate, beta1, beta2, epsilon }),
            OptimizerSpec::AdamW { learning_rate, beta1, beta2, epsilon, weight_decay } =>
                Self::AdamW(AdamW { adam: Adam { learning_rate, beta1, beta2, epsilon }, weight_decay }),
            OptimizerSpec::RmsProp { learning_rate, rho, epsilon, momentum, centered, epsilon_inside_sqrt } =>
                Self::RmsProp(RmsProp { learning_rate, rho, epsilon, momentum, centered, epsilon_inside_sqrt }),
            OptimizerSpec::Ftrl { learning_rate, l1, l2, learning_rate_power, initial_accumulator } =>
                Self::Ftrl(Ftrl { learning_rate, l1, l2, learning_rate_power, initial_accumulator }),
        }
    }

    /// Run a visitor with the optimizer's own type.
    pub fn dispatch<V: OptimizerVisitor>(&self, visitor: V) -> V::Out {
        match self {
            Self::Sgd(optimizer) => visitor.visit(optimizer),
            Self::Momentum(optimizer) => visitor.visit(optimizer),
            Self::Adagrad(optimizer) => visitor.visit(optimizer),
            Self::Adam(optimizer) => visitor.visit(optimizer),
            Self::AdamW(optimizer) => visitor.visit(optimizer),
            Self::RmsProp(optimizer) => visitor.visit(optimizer),
            Self::Ftrl(optimizer) => visitor.visit(optimizer),
        }
    }

    fn as_row_optimizer(&self) -> &dyn RowOptimizer {
        match self {
            Self::Sgd(optimizer) => optimizer,
            Self::Momentum(optimizer) => optimizer,
            Self::Adagrad(optimizer) => optimizer,
            Self::Adam(optimizer) => optimizer,
            Self::AdamW(optimizer) => optimizer,
            Self::RmsProp(optimizer) => optimizer,
            Self::Ftrl(optimizer) => optimizer,
        }
    }
}

/// For a single row; batches use [`Optimizer::dispatch`].
impl RowOptimizer for Optimizer {
    fn state_elements(&self, row_elements: usize) -> usize {
        self.as_row_optimizer().state_elements(row_elements)
    }

    fn init_state(&self, state: &mut [f32]) {
        self.as_row_optimizer().init_state(state);
    }

    fn update(
        &self,
        weights: &mut [f32],
        state: &mut [f32],
        gradient: &[f32],
        learning_rate_scale: f32,
    ) {
        self.as_row_optimizer()
            .update(weights, state, gradient, learning_rate_scale);
    }
}

/// The learning rate of one push, in float32.
#[inline]
fn scaled_rate(learning_rate: f64, learning_rate_scale: f32) -> f32 {
    (learning_rate * f64::from(learning_rate_scale)) as f32
}
