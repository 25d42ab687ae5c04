//! An optimizer with its settings as words: what a prepare carries between servers.

use crate::error::Refusal;
use crate::spec::OptimizerSpec;

/// Words of an optimizer: its kind and flags, then its settings as float64.
pub(super) const OPTIMIZER_WORDS: usize = 6;

/// Lay it out; zeros for none.
pub(super) fn optimizer_words(optimizer: Option<&OptimizerSpec>) -> [u64; OPTIMIZER_WORDS] {
    use OptimizerSpec::{Adagrad, Adam, AdamW, Ftrl, Momentum, RmsProp, Sgd};
    let Some(optimizer) = optimizer else {
        return [0; OPTIMIZER_WORDS];
    };
    #[rustfmt::skip] // A table: one line per optimizer.
    let (kind, flags, settings) = match *optimizer {
        Sgd { learning_rate: a } => (1, [false; 2], [a, 0.0, 0.0, 0.0, 0.0]),
        Momentum { learning_rate: a, momentum: b, nesterov } => (2, [nesterov, false], [a, b, 0.0, 0.0, 0.0]),
        Adagrad { learning_rate: a, epsilon: b, initial_accumulator: c } => (3, [false; 2], [a, b, c, 0.0, 0.0]),
        Adam { learning_rate: a, beta1: b, beta2: c, epsilon: d } => (4, [false; 2], [a, b, c, d, 0.0]),
        AdamW { learning_rate: a, beta1: b, beta2: c, epsilon: d, weight_decay: e } => (5, [false; 2], [a, b, c, d, e]),
        RmsProp { learning_rate: a, rho: b, epsilon: c, momentum: d, centered, epsilon_inside_sqrt } =>
            (6, [centered, epsilon_inside_sqrt], [a, b, c, d, 0.0]),
        Ftrl { learning_rate: a, l1: b, l2: c, learning_rate_power: d, initial_accumulator: e } =>
            (7, [false; 2], [a, b, c, d, e]),
    };
    let mut words = [kind | u64::from(flags[0]) << 8 | u64::from(flags[1]) << 9; OPTIMIZER_WORDS];
    for (word, setting) in words[1..].iter_mut().zip(settings) {
        *word = setting.to_bits();
    }
    words
}

/// Read it.
pub(super) fn read_optimizer(
    words: [u64; OPTIMIZER_WORDS],
) -> Result<Option<OptimizerSpec>, Refusal> {
    use OptimizerSpec::{Adagrad, Adam, AdamW, Ftrl, Momentum, RmsProp, Sgd};
    let [head, settings @ ..] = words;
    let [a, b, c, d, e] = settings.map(f64::from_bits);
    let flags = [head >> 8 & 1 == 1, head >> 9 & 1 == 1];
    #[rustfmt::skip] // A table: one line per optimizer.
    let optimizer = match head & 0xff {
        0 => return Ok(None),
        1 => Sgd { learning_rate: a },
        2 => Momentum { learning_rate: a, momentum: b, nesterov: flags[0] },
        3 => Adagrad { learning_rate: a, epsilon: b, initial_accumulator: c },
        4 => Adam { learning_rate: a, beta1: b, beta2: c, epsilon: d },
        5 => AdamW { learning_rate: a, beta1: b, beta2: c, epsilon: d, weight_decay: e },
        6 => RmsProp {
            learning_rate: a, rho: b, epsilon: c, momentum: d,
            centered: flags[0], epsilon_inside_sqrt: flags[1],
        },
        7 => Ftrl { learning_rate: a, l1: b, l2: c, learning_rate_power: d, initial_accumulator: e },
        kind => return Err(Refusal::Protocol(format!("unknown optimizer {kind} between servers"))),
    };
    Ok(Some(optimizer))
}
