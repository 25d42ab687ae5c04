"""Sync mode at the master: one training task at a time, and everybody has a part in it.

Who holds the task leads its steps; who asks for one meanwhile is sent there. Values only.
"""

from __future__ import annotations

from backstay.course.rounds import RoundKind
from backstay.master.core.holds import HeldTask
from backstay.master.known_workers import KnownWorkers
from backstay.master.open_round import Given, OpenRound

__all__ = ["is_led", "led_by_other"]


def is_led(opened: OpenRound) -> bool:
    """Return whether somebody holds a task of this round, which must be of training."""
    return opened.id.kind is RoundKind.TRAINING and opened.ledger.counts.doing > 0


def led_by_other(opened: OpenRound, known: KnownWorkers, worker: str) -> Given | None:
    """Return the task of whoever leads.

    None if nobody is known to: the leader has not been heard of since this master began, it hangs,
    or it is this worker itself.
    """
    for hold in opened.ledger.holds:
        leader = known.get(hold.worker)
        leads = hold.worker != worker and not (hold.expired or hold.withdrawn)
        if leads and leader is not None and leader.sync_address:
            return Given(opened, HeldTask(hold.task.number, hold.attempt, 0), leader.sync_address)
    return None
