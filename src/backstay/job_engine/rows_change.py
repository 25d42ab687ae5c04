"""What became of the rows that a job's progress belongs to, and whether records still count once.

Decided from what the job noted and from what a node tells of restores and losses. Imports
``job_engine`` and the state of a restore; does no I/O.
"""

from __future__ import annotations

from typing import Literal

from backstay.checkpoint.restore_state import RestoreState
from backstay.job_engine.opening import StateIncarnation

__all__ = [
    "RowsChange",
    "cause_of",
    "change_of",
    "incarnation_in",
    "what_to_do",
    "why_inexact",
]

RowsChange = Literal["none", "lost", "restored", "partly_restored"]


def change_of(noted: StateIncarnation, now: RestoreState) -> RowsChange:
    """Return what happened to the rows since they were noted.

    Args:
        noted: The rows that the progress belongs to.
        now: The cluster's last restore, and its generation, as a node tells them.

    Returns:
        ``none`` also while a restore is under way; ``lost`` if slots lost their content,
        also if that was after a restore.
    """
    # A restore that is only requested has changed nothing yet, and has no version. While slots are
    # loaded, the restore is not over: the job goes back when it is. A node that lags behind may
    # tell of an earlier state.
    is_old = (
        now.version < noted.restore_version
        or now.generation < noted.generation
        or now.generation < now.done_generation
    )
    is_known = (now.version, now.generation) == noted
    if now.state in ("requested", "loading") or is_old or is_known:
        return "none"
    if now.version == noted.restore_version or now.generation > now.done_generation:
        return "lost"
    return "partly_restored" if now.slots else "restored"


def incarnation_in(restore: RestoreState) -> StateIncarnation:
    """Return the state incarnation that a node tells of."""
    return StateIncarnation(restore.version, restore.generation)


def why_inexact(change: RowsChange, now: RestoreState) -> str:
    """Return why records may count never or twice after a change; empty: each still counts once.

    After a restore of all slots, model and progress belong together again.
    """
    if change == "lost":
        return "slots lost all their copies"
    if change == "partly_restored":
        return f"only {now.slots} of the slots were restored from {now.id}, the others went on"
    return ""


def cause_of(restore: RestoreState) -> str:
    """Return why the cluster has the rows of a checkpoint, in words for people."""
    if not restore.lost:
        return f"the cluster was restored from {restore.id}"
    slots = "1 slot" if restore.lost == 1 else f"{restore.lost} slots"
    return f"{slots} lost all copies: all goes on from {restore.id} of {restore.created}"


def what_to_do(checkpoint: str) -> str:
    """Return what an operator can do with a job whose rows are lost.

    Args:
        checkpoint: The newest one of the job; empty: none.
    """
    if not checkpoint:
        return (
            "The job has no checkpoint: accept the loss (pserverctl slots accept-loss) and begin "
            "with --fresh"
        )
    return (
        f"Restore {checkpoint} (pserverctl checkpoint restore) and start the job again: it goes on "
        "from there. Or begin with --fresh"
    )
