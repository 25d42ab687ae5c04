"""Slots that lost all their copies: what becomes of them, decided once for all of them.

They come back from one checkpoint, by default together with all other slots, so that the model
and the progress that was saved with it are of one time. Where there is no checkpoint, or where
they are not to be restored by themselves, nobody holds and nobody serves them until an operator
restores one or accepts the loss.
"""

from __future__ import annotations

from backstay.consensus.checkpoint_records import RestorePlan
from backstay.consensus.records import SlotReplicas
from backstay.pserver.controller.inputs import ClusterRecords
from backstay.pserver.controller.restoring import being_restored
from backstay.pserver.controller.routing_builder import RoutingBuilder

__all__ = ["decide_losses"]


def decide_losses(builder: RoutingBuilder, records: ClusterRecords) -> RestorePlan | None:
    """Let slots that are lost come back from a checkpoint, or begin anew if that is accepted.

    Returns:
        The restore that is to be followed: the one of the records, or a new one that has yet to
        be begun.
    """
    plan = records.restore
    _begin_accepted(builder, records.accepted, has_tables=records.has_tables)
    if (
        not builder.lost
        or builder.least_loaded() is None
        or (plan is not None and plan.state == "requested")
    ):
        # What was asked for comes first; what it leaves is decided by the next decision.
        return plan
    again = being_restored(plan)
    checkpoint = again or records.on_loss
    if checkpoint is None:
        return plan
    if again is None and not records.lost_only:
        return RestorePlan(
            checkpoint.url, checkpoint.id, created=checkpoint.created, lost=len(builder.lost)
        )
    # Those that come back at this moment come from the same one: see ``RoutingBuilder.restore``.
    url, name = builder.source if builder.restoring else (checkpoint.url, checkpoint.id)
    for slot in sorted(builder.lost):
        new = builder.least_loaded()
        assert new is not None
        builder.put(slot, SlotReplicas(new))
        builder.restore(slot, url, name)
        builder.note(
            "restoring",
            new,
            f"{{slots}} that lost all copies come back as checkpoint {name} has them, without "
            f"what came since, on {builder.name(new)}",
            slot,
        )
    return plan


def _begin_accepted(builder: RoutingBuilder, accepted: int, *, has_tables: bool) -> None:
    """Let slots begin anew, empty, whose loss is accepted, or that can have held nothing."""
    epochs = builder.before.epoch_of_slot
    waiting = builder.lost - builder.new_epoch
    for slot in sorted(waiting):
        if has_tables and int(epochs[slot]) > accepted:
            continue
        new = builder.least_loaded()
        if new is None:
            return
        builder.put(slot, SlotReplicas(new))
        builder.lost.discard(slot)
        why = "an operator has accepted the loss" if has_tables else "there is no table"
        builder.note(
            "loss_accepted",
            new,
            f"{{slots}} begin anew, empty, on {builder.name(new)}: {why}",
            slot,
        )
