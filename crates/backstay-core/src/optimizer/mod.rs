//! Optimizers: what a gradient does to one row, each in a file of its own.
//!
//! An optimizer sees one row at a time: its weights, its state (float32 words that lie behind
//! the weights) and the gradient. It keeps nothing else, so the result does not depend on the
//! order or grouping of rows, and replicas stay equal bit for bit. Loops run over slices of
//! equal length without branches, in the order of operations that the formulas give; nothing
//! is fused or reassociated, so every machine computes the same bits.
//!
//! Settings are float64. What depends on settings alone is computed in float64 and rounded
//! once, as PyTorch does; arithmetic on weights is float32. Imports [`crate::expression`], which `user`
//! runs, and [`crate::hash`].
//!
//! CONTRIBUTING.md, Recipes, lists every place of a new optimizer.

mod adadelta;
mod adagrad;
mod adagrad_decay;
mod adam;
mod adamax;
mod adamw;
mod amsgrad;
mod ftrl;
mod group_ftrl;
mod momentum;
mod rmsprop;
mod row_sum;
mod rowwise_adagrad;
mod sgd;
mod stamp;
mod steps;
mod user;

pub use adadelta::Adadelta;
pub use adagrad::Adagrad;
pub use adagrad_decay::AdagradDecay;
pub use adam::Adam;
pub use adamax::Adamax;
pub use adamw::AdamW;
pub use amsgrad::AmsGrad;
pub use ftrl::Ftrl;
pub use group_ftrl::GroupFtrl;
pub use momentum::Momentum;
pub use rmsprop::RmsProp;
pub use rowwise_adagrad::RowWiseAdagrad;
pub use sgd::Sgd;
pub use stamp::OptimizerStamp;
pub use steps::Steps;
pub use user::{Field, Per, User, UserBatch, UserState, MAX_FIELDS, MAX_STATES};

use serde::{Deserialize, Serialize};

/// Smallest epsilon: a smaller one is lost in float32, and 0 / 0 would follow.
pub const MIN_EPSILON: f64 = 1e-30;
/// Largest magnitude of any setting; far from where float32 overflows.
pub(crate) const MAX_NUMBER: f64 = 1e30;

/// Lowest and highest value of a setting.
pub type Range = (f64, f64);

pub(crate) const NOT_NEGATIVE: Range = (0.0, MAX_NUMBER);
pub(crate) const POSITIVE: Range = (MIN_EPSILON, MAX_NUMBER);
/// Up to the last number below 1.
pub(crate) const FRACTION: Range = (0.0, 1.0 - f64::EPSILON / 2.0);

/// The settings of an optimizer: its JSON form is that of the struct, and servers send each other
/// the numbers and flags in this order.
pub trait Settings: Sized {
    /// Name and range of each number.
    const NUMBERS: &'static [(&'static str, Range)];

    /// The numbers, then zeros.
    fn numbers(&self) -> [f64; 5];

    /// The flags, then false.
    fn flags(&self) -> [bool; 2] {
        [false; 2]
    }

    /// The optimizer with these settings.
    fn of(numbers: [f64; 5], flags: [bool; 2]) -> Self;

    /// These settings, except the ones that decide which state a row keeps.
    #[must_use]
    fn with_state_of(self, _held: &Self) -> Self {
        self
    }
}

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

macro_rules! optimizers {
    ($($kind:literal $name:literal $optimizer:ident)*) => {
        /// Any of the optimizers, with its settings.
        #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
        #[allow(missing_docs)] // Each variant is the struct of its name.
        pub enum Optimizer {
            $(#[serde(rename = $name)] $optimizer($optimizer),)*
            #[serde(rename = "user")] User(User),
        }

        impl Optimizer {
            /// The names in the JSON form of all but the user's own.
            pub const NAMES: &'static [&'static str] = &[$($name),*];

            /// Name and range of each number among the settings of each of these.
            pub const RANGES: &'static [(&'static str, &'static [(&'static str, Range)])] =
                &[$(($name, <$optimizer as Settings>::NUMBERS)),*];

            /// Its name in the JSON form.
            pub fn name(&self) -> &'static str {
                match self {
                    $(Self::$optimizer(_) => $name,)*
                    Self::User(_) => "user",
                }
            }

            /// Its settings, without the function of a [`User`].
            pub fn stamp(&self) -> OptimizerStamp {
                match self {
                    $(Self::$optimizer(one) => OptimizerStamp::of_settings($kind, one.flags(), one.numbers()),)*
                    Self::User(user) => OptimizerStamp::of_user(user),
                }
            }

            /// The optimizer of a stamp, in a table that has this one. `None` for a user's function
            /// if the table has another one, or none.
            pub fn under(&self, stamp: &OptimizerStamp) -> Option<Self> {
                match stamp.kind() {
                    $($kind => Some(Self::$optimizer(stamp.settings())),)*
                    _ => match self {
                        Self::User(user) => stamp.user(user).map(Self::User),
                        _ => None,
                    },
                }
            }

            /// Whether a stamp is of an optimizer that there is.
            pub(crate) fn has_kind(kind: u64) -> bool {
                matches!(kind, $($kind)|* | OptimizerStamp::USER)
            }

            /// This optimizer with the settings of another one, except the ones that decide the
            /// layout of a row: which optimizer it is, and what state it keeps.
            #[must_use]
            pub fn with_settings_of(&self, other: &Self) -> Self {
                match (self, other) {
                    $((Self::$optimizer(held), Self::$optimizer(wanted)) => {
                        Self::$optimizer(wanted.with_state_of(held))
                    })*
                    (Self::User(held), Self::User(wanted)) => {
                        Self::User(held.with_settings_of(wanted))
                    }
                    _ => self.clone(),
                }
            }

            /// Run a visitor with the optimizer's own type.
            pub fn dispatch<V: OptimizerVisitor>(&self, visitor: V) -> V::Out {
                match self {
                    $(Self::$optimizer(optimizer) => visitor.visit(optimizer),)*
                    Self::User(user) => visitor.visit(user),
                }
            }

            fn as_row_optimizer(&self) -> &dyn RowOptimizer {
                match self {
                    $(Self::$optimizer(optimizer) => optimizer,)*
                    Self::User(user) => user,
                }
            }
        }
    };
}

// Kind between servers, name in JSON, struct.
optimizers! {
    1 "sgd" Sgd
    2 "momentum" Momentum
    3 "adagrad" Adagrad
    4 "adam" Adam
    5 "adamw" AdamW
    6 "rmsprop" RmsProp
    7 "ftrl" Ftrl
    8 "rowwiseadagrad" RowWiseAdagrad
    9 "adadelta" Adadelta
    10 "adamax" Adamax
    11 "amsgrad" AmsGrad
    12 "adagraddecay" AdagradDecay
    13 "groupftrl" GroupFtrl
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
pub(crate) fn scaled_rate(learning_rate: f64, learning_rate_scale: f32) -> f32 {
    (learning_rate * f64::from(learning_rate_scale)) as f32
}
