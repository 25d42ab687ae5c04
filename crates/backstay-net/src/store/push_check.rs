//! What stands behind the gradients of a push, and what a request asks of a table's lifetime: checked
//! before anything changes.

use backstay_core::compensation::Reference;
use backstay_core::error::Refusal;
use backstay_core::gradient::{self, NonFinite};
use backstay_core::spec::{Lifetime, NonFinitePolicy, TableSpec};
use backstay_core::transaction::{Batch, Change, Update};

/// Refuse shows and clicks that are negative or not finite, then apply a policy to the gradients
/// before them. What tells from where gradients come is to be finite, too.
pub(super) fn check(
    policy: &NonFinitePolicy,
    spec: &TableSpec,
    update: Update,
    batch: &mut Batch,
) -> Result<Result<(), NonFinite>, Refusal> {
    let elements = spec.row_elements();
    let width = update.values(elements);
    // The shape is checked later, before anything changes.
    if batch.values().len() != batch.keys().len() * width {
        return Ok(Ok(()));
    }
    let counts = if update.has_counts { Update::COUNTS } else { 0 };
    let told = width - counts;
    let not_negative = |row: &[f32]| row[told..].iter().all(|&one| one >= 0.0);
    // Nearly always so, and looked at in long strides.
    if *policy == NonFinitePolicy::Refuse
        && gradient::first_non_finite(batch.values()).is_none()
        && batch.values().chunks_exact(width).all(not_negative)
    {
        return Ok(Ok(()));
    }
    for (key, row) in batch.keys().iter().zip(batch.values().chunks_exact(width)) {
        for (name, told) in ["show", "click"].into_iter().zip(&row[told..]) {
            if !(0.0..=f32::MAX).contains(told) {
                return Err(Refusal::InvalidRequest(format!(
                    "table {}: the {name} of key {key} is {told}; allowed: finite and not negative",
                    spec.name
                )));
            }
        }
        let reference = &row[elements..told];
        if let Some(at) = gradient::first_non_finite(reference) {
            let (name, found) = (&spec.name, reference[at]);
            return Err(Refusal::NonFinite(match spec.compensation.reference() {
                Some(Reference::Sum) => format!(
                    "table {name}: sum {at} that the gradient of key {key} came with is {found}"
                ),
                _ => format!(
                    "table {name}: weight {at} that the gradient of key {key} was computed with is {found}"
                ),
            }));
        }
    }
    let rows = batch.values_mut().chunks_exact_mut(width);
    // What was clipped before one that is refused does not matter: nothing of it is applied.
    let mut clipped = rows.map(|row| gradient::apply_policy(policy, &mut row[..elements]));
    Ok(clipped.find(Result::is_err).unwrap_or(Ok(())))
}

/// Refuse an expiry without a threshold, and a decay that changes nothing.
pub(super) fn check_change(spec: &TableSpec, change: Change) -> Result<(), Refusal> {
    let name = &spec.name;
    let lifetime = spec.lifetime.as_ref();
    let scores = lifetime.is_some_and(Lifetime::takes_counts);
    let reason = match change {
        Change::Expire(thresholds) if thresholds.is_empty() => format!(
            "table {name} has no expiry: say unseen_seconds, score_below or norm_below, or give the table one"
        ),
        Change::Decay { rate } if scores && rate >= 1.0 => format!(
            "a decay by {rate} of table {name} changes nothing: say a rate below 1, or give the table lifetime.score.decay"
        ),
        _ => return Ok(()),
    };
    Err(Refusal::InvalidRequest(reason))
}
