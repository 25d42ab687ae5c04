"""Slots that take their content from a checkpoint: asked for, loaded by their masters, served.

A restored slot begins anew: it gets a new epoch and one master without backups, which does not
serve it before it has loaded it and the routing table says so. What any node held of it before
is void. The copies are made afterwards, as for any slot that has too few.

What becomes of slots that lost all their copies is decided once for all of them. They come back
from one checkpoint, by default together with all other slots, so that the model and the progress
that was saved with it are of one time. Where there is no checkpoint, or where they are not to be
restored by themselves, no node holds or serves them until an operator restores one or accepts the
loss.
"""

from __future__ import annotations

from dataclasses import replace

from backstay.consensus.records import NO_MASTER, SlotReplicas
from backstay.consensus.records.checkpoints import CheckpointRecord, RestorePlan
from backstay.pserver.controller.inputs import ClusterRecords
from backstay.pserver.controller.routing_builder import RoutingBuilder, counted

__all__ = ["begin_restore", "being_restored", "decide_losses", "follow_loads", "restore_after"]


def begin_restore(builder: RoutingBuilder, plan: RestorePlan | None) -> None:
    """Let the slots of a restore that was requested begin anew, on the masters that they have."""
    # Nodes that are to leave are better than none.
    serves = builder.serving if any(builder.serving) else builder.able
    serving = [number for number, one in enumerate(serves) if one]
    if plan is None or plan.state != "requested" or not serving:
        return
    why = ""
    if plan.lost:
        why = f" of {plan.created}: {counted(plan.lost, 'slot')} lost all copies"
    for slot in plan.slots or range(builder.before.slot_count):
        master = builder.held[slot].master
        if master == NO_MASTER or not builder.alive[master]:
            master = min(serving, key=lambda number: (builder.masters[number], number))
        builder.put(slot, SlotReplicas(master))
        builder.restore(slot, plan.url, plan.checkpoint)
        builder.note(
            "restoring",
            master,
            f"{builder.name(master)} is to load {{slots}} from checkpoint {plan.checkpoint}{why}",
            slot,
        )


def being_restored(plan: RestorePlan | None) -> CheckpointRecord | None:
    """Return the checkpoint that all slots are taking their content from, if there is one.

    What is loaded already has one copy for a moment. If that is lost before the restore is over
    it comes once more, whatever else becomes of slots that are lost.
    """
    if plan is None or plan.state != "loading" or plan.slots:
        return None
    return CheckpointRecord(plan.url, plan.checkpoint, plan.created)


def follow_loads(builder: RoutingBuilder, records: ClusterRecords) -> None:
    """Let the slots be served that their masters have loaded."""
    before = builder.before
    waiting = set(before.restoring.slots)
    for reporter, report in builder.heard(records):
        for slot, epoch in report.loaded:
            # The epoch tells a load that was asked for by this table from any older one.
            if (
                slot in waiting
                and slot not in builder.new_epoch
                and epoch == int(before.epoch_of_slot[slot])
                and before.replicas_of_slot[slot].master == reporter
            ):
                builder.restoring.discard(slot)
                builder.note(
                    "restored",
                    reporter,
                    f"{builder.name(reporter)} has loaded {{slots}} from checkpoint "
                    f"{before.restoring.checkpoint} and serves them",
                    slot,
                )


def restore_after(
    builder: RoutingBuilder, plan: RestorePlan | None, version: int
) -> RestorePlan | None:
    """Return what the restore's record is to say after this decision; None if it is right.

    Args:
        builder: As decided.
        plan: The record that is there.
        version: Of the routing table that this decision makes.
    """
    if plan is None or plan.state == "done":
        return None
    if plan.state == "requested":
        return replace(plan, state="loading", version=version) if builder.restoring else None
    if builder.restoring:
        return None
    # What is lost by this very decision is lost after it.
    return replace(plan, state="done", generation=builder.before.generation)


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
    # Slots that come back at this moment come from the same one: see ``RoutingBuilder.restore``.
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
