"""What became of the rows that a job's progress goes with, and whether records still count once.

Decides from what was noted and what a node tells of restores, losses included; makes no call and
knows no time. Imports records and ``checkpoint.remote``.
"""

from __future__ import annotations

from typing import Literal

from backstay.checkpoint.remote import RestoreState
from backstay.job_engine.opened_job import StateIncarnation

__all__ = ["RowsChange", "StateIncarnation", "change_of", "why_inexact"]

RowsChange = Literal["none", "lost", "restored", "partly_restored"]


def change_of(noted: StateIncarnation, now: RestoreState) -> RowsChange:
    """Return what happened to the rows since they were noted.

    Args:
        noted: The rows that the progress goes with.
        now: The cluster's last restore, and its generation, as a node tells them.

    Returns:
        ``none`` also while a restore is under way; ``lost`` if slots lost their content,
        also if that was after a restore.
    """
    # A restore that is only requested has changed nothing yet, and has no version. While slots are
    # loaded, a master that has not heard of it yet still takes pushes for what was before. A
    # node that lags behind may tell of what was.
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


def why_inexact(change: RowsChange, now: RestoreState) -> str:
    """Return why records may count never or twice after a change; empty: it does not end that.

    After a restore of all slots, model and progress are of one time again.
    """
    if change == "lost":
        return "slots lost all their copies"
    if change == "partly_restored":
        return f"only {now.slots} of the slots were restored from {now.id}, the others went on"
    return ""
