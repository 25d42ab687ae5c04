"""Slots that take their content from a checkpoint: asked for, loaded by their masters, served.

A restored slot begins anew: it gets a new birth and one master without backups, which does not
serve it before it has loaded it and the routing table says so. What any node held of it before
is void. The copies are made afterwards, as for any slot that has too few.
"""

from __future__ import annotations

from dataclasses import replace

from backstay.consensus.checkpoint_records import CheckpointRecord, RestorePlan
from backstay.consensus.records import NO_MASTER, SlotReplicas
from backstay.pserver.controller.draft import Draft, counted
from backstay.pserver.controller.inputs import ClusterRecords

__all__ = ["begin_restore", "being_restored", "follow_loads", "restore_after"]


def begin_restore(draft: Draft, plan: RestorePlan | None) -> None:
    """Let the slots of a restore that was requested begin anew, on the masters that they have."""
    # Those that are to leave are better than none.
    serves = draft.serving if any(draft.serving) else draft.able
    serving = [number for number, one in enumerate(serves) if one]
    if plan is None or plan.state != "requested" or not serving:
        return
    why = ""
    if plan.lost:
        why = f" of {plan.created}: {counted(plan.lost, 'slot')} lost all copies"
    for slot in plan.slots or range(draft.before.slot_count):
        master = draft.held[slot].master
        if master == NO_MASTER or not draft.alive[master]:
            master = min(serving, key=lambda number: (draft.masters[number], number))
        draft.put(slot, SlotReplicas(master))
        draft.restore(slot, plan.url, plan.checkpoint)
        draft.note(
            "restoring",
            master,
            f"{draft.name(master)} is to load {{slots}} from checkpoint {plan.checkpoint}{why}",
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


def follow_loads(draft: Draft, records: ClusterRecords) -> None:
    """Let the slots be served that their masters have loaded."""
    before = draft.before
    waiting = set(before.restoring.slots)
    for reporter, report in draft.heard(records):
        for slot, birth in report.loaded:
            # The birth tells a load that was asked for by this table from any older one.
            if (
                slot in waiting
                and slot not in draft.reborn
                and birth == int(before.birth_of_slot[slot])
                and before.replicas_of_slot[slot].master == reporter
            ):
                draft.restoring.discard(slot)
                draft.note(
                    "restored",
                    reporter,
                    f"{draft.name(reporter)} has loaded {{slots}} from checkpoint "
                    f"{before.restoring.checkpoint} and serves them",
                    slot,
                )


def restore_after(draft: Draft, plan: RestorePlan | None, version: int) -> RestorePlan | None:
    """Return what the restore's record is to say after this decision; None if it is right.

    Args:
        draft: As decided.
        plan: The record that is there.
        version: Of the routing table that this decision makes.
    """
    if plan is None or plan.state == "done":
        return None
    if plan.state == "requested":
        return replace(plan, state="loading", version=version) if draft.restoring else None
    if draft.restoring:
        return None
    # What is lost by this very decision is lost after it.
    return replace(plan, state="done", generation=draft.before.generation)
