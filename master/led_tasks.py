"""Sync mode at the master: one training task at a time, and everybody has a part in it.

The worker with the lease of the task leads its steps; who asks for one meanwhile is sent there.
Values only.
"""

from __future__ import annotations

from backstay.master.core.values import LeasedTask
from backstay.master.known_workers import KnownWorkers
from backstay.master.open_round import Given, OpenRound
from backstay.schedule.rounds import RoundKind

__all__ = ["is_led", "led_by_other"]


def is_led(opened: OpenRound) -> bool:
    """Return whether somebody has a lease of a task of this round, which must be of training."""
    return opened.id.kind is RoundKind.TRAINING and opened.ledger.counts.doing > 0


def led_by_other(opened: OpenRound, known: KnownWorkers, worker: str) -> Given | None:
    """Return the task of whoever leads.

    None if nobody is known to: the leader has not been heard of since this master began, it hangs,
    or it is this worker itself.
    """
    for lease in opened.ledger.leases:
        leader = known.get(lease.worker)
        leads = lease.worker != worker and not (lease.expired or lease.withdrawn)
        if leads and leader is not None and leader.sync_address:
            return Given(
                opened, LeasedTask(lease.task.number, lease.attempt, 0), leader.sync_address
            )
    return None
