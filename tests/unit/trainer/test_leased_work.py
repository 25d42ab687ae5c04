"""What the thread that renews leases may ask of the work at any time."""

from __future__ import annotations

import threading
from typing import Any, cast

from backstay.job.messages import Task
from backstay.trainer.worker.leased_work import LeasedWork
from backstay.trainer.worker.task_feed import TaskFeed


class Stream:
    acknowledged = 3

    def lease_until(self, monotonic_s: float) -> None:
        """Nothing waits for it here."""


class Feed:
    """A feed whose reader has not found out yet how many batches there are."""

    def __init__(self) -> None:
        self.known_batches: int | None = None


def work_of(batches_per_push: int) -> tuple[LeasedWork, Feed]:
    task = Task("training", 1, 0, 1, "shard", 0, 100, 2, 0, 0.0)
    work = LeasedWork(task, batches_per_push)
    feed = Feed()
    work.feed = cast(TaskFeed, feed)
    return work, feed


def test_acknowledged_batches_are_told_before_the_data_is_read() -> None:
    work, feed = work_of(4)
    assert work.acknowledged == 2, "before there is a stream: what the attempt began with"
    work.attach(cast(Any, Stream()))
    told: list[int] = []
    thread = threading.Thread(target=lambda: told.append(work.acknowledged))
    thread.start()
    thread.join()
    assert told == [2], "nothing is trained before it is known how many batches there are"
    feed.known_batches = 10
    assert work.acknowledged == 10, "the last push of a task may be of fewer batches"
