//! Expiry and decay of a table by hand: slot by slot, and an expiry part by part, so that pushes of
//! others go on in between.

use std::time::Duration;

use backstay_core::life::{SlotPart, Thresholds};
use backstay_core::stream::{StreamId, TableTask};
use backstay_core::transaction::Change;
use tokio::time::{sleep, Instant};

use super::error::ClientError;
use super::link::Deadline;
use super::push::{Done, PushRequest};
use super::{no_routing, Client};

/// Steps in which a table is done: with more slots than that, some go together.
const STEPS: u32 = 1024;

impl Client {
    /// Remove the rows of a table that have expired, or only count them. No threshold: those of the
    /// table. It is a change of the client's own stream in each slot, so that a retry counts once.
    ///
    /// Rows count as unseen by the time at which the call began: a row of which a push came since must
    /// not go, however long the call takes.
    pub async fn expire(
        &self,
        table: u64,
        thresholds: Thresholds,
        only_count: bool,
        deadline: Deadline,
    ) -> Result<Done, ClientError> {
        let mut all = Done::default();
        let parts = if only_count {
            vec![SlotPart::WHOLE]
        } else {
            (0..SlotPart::PARTS).map(SlotPart::of).collect()
        };
        let called = Instant::now();
        for keys in self.steps(&parts)? {
            let begun = Instant::now();
            let thresholds = unseen_since(thresholds, begun - called);
            let request = PushRequest {
                only_count,
                ..PushRequest::new(table, 0, Change::Expire(thresholds), &[])
            };
            let push = self.push(&request, &self.plan(&keys)?, deadline).await?;
            push.wait(self).await?;
            if !only_count {
                sleep(begun.elapsed() * SlotPart::REST_FACTOR).await;
            }
            let done = push.done();
            all.applied_slots += done.applied_slots;
            all.gone += done.gone;
        }
        all.applied_slots /= parts.len() as u64;
        Ok(all)
    }

    /// Multiply the shows and clicks of a table by `rate` (0: the table's), once for a period: a slot
    /// does no period twice, and none before one that it did, whoever asks. How many slots did it now.
    pub async fn decay(
        &self,
        table: u64,
        rate: f32,
        period: u64,
        deadline: Deadline,
    ) -> Result<u64, ClientError> {
        let stream = StreamId::of_table(table, TableTask::Decay);
        let mut applied = 0;
        for keys in self.steps(&[SlotPart::WHOLE])? {
            // All askers number the period alike.
            let stream = self.task_stream(stream, 1, period)?;
            stream.begin_batch(period)?;
            let request = PushRequest::new(table, 0, Change::Decay { rate }, &[]);
            let plan = self.plan(&keys)?;
            let push = self.push_in(&stream, 0, &request, &plan, deadline).await?;
            push.wait(self).await?;
            applied += push.done().applied_slots;
        }
        Ok(applied)
    }

    /// The parts of slots, by a key each, in the steps in which a table is done.
    fn steps(&self, parts: &[SlotPart]) -> Result<Vec<Vec<u64>>, ClientError> {
        let space = self.newest().ok_or_else(no_routing)?.space;
        let count = space.count();
        let at_once = count.div_ceil(STEPS).max(1);
        let step = |first: u32, part: &SlotPart| {
            let slots = first..(first + at_once).min(count);
            slots.map(|slot| part.key(space, slot)).collect()
        };
        let firsts = (0..count).step_by(at_once as usize);
        let steps = firsts.flat_map(|first| parts.iter().map(move |part| step(first, part)));
        Ok(steps.collect())
    }
}

/// Thresholds that were given so long ago, as they are now.
fn unseen_since(thresholds: Thresholds, ago: Duration) -> Thresholds {
    let more = u32::try_from(ago.as_secs()).unwrap_or(u32::MAX);
    Thresholds {
        unseen_seconds: thresholds
            .unseen_seconds
            .map(|one| one.saturating_add(more)),
        ..thresholds
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_unseen_is_counted_from_the_call() {
        let given = Thresholds {
            unseen_seconds: Some(3),
            score_below: Some(0.5),
            norm_below: None,
        };
        let later = unseen_since(given, Duration::from_millis(12_900));
        assert_eq!(later.unseen_seconds, Some(15));
        assert_eq!(later.score_below, Some(0.5));
        assert_eq!(unseen_since(given, Duration::ZERO), given);
        let none = Thresholds::default();
        assert_eq!(unseen_since(none, Duration::from_secs(9)), none);
    }
}
