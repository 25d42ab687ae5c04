"""Tasks that end while the next one is trained: told in order, closed when recorded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest

from backstay.errors import ServerUnavailable
from backstay.job.messages import Task
from backstay.trainer.worker.leased_work import LeasedWork
from backstay.trainer.worker.task_ends import StreamCloser, TaskEnds


class Stream:
    """Pushes that end when they are let, well or not."""

    def __init__(self, events: list[str], number: int, error: Exception | None = None) -> None:
        self.may_end = threading.Event()
        self._events, self._number, self._error = events, number, error

    def flush(self) -> None:
        assert self.may_end.wait(30)
        self._events.append(f"acknowledged {self._number}")
        if self._error is not None:
            raise self._error


class Ends:
    """Ends under test, and what they did."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.not_first: set[int] = set()
        self.tested = TaskEnds(self._complete, cast(StreamCloser, self))

    def _complete(self, work: LeasedWork, loss: float | None) -> bool:
        self.events.append(f"told {work.task.number}")
        return work.task.number not in self.not_first

    def close_later(self, stream: Stream, task: Task) -> None:
        self.events.append(f"closed {task.number}")

    def begin(self, number: int, error: Exception | None = None) -> Stream:
        stream = Stream(self.events, number, error)
        work = LeasedWork(Task("training", 1, number, 1, "shard", 0, 100, 0, 0, 0.0))
        self.tested.begin(work, cast(Any, stream), 0.5)
        return stream


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.tested.shutdown()


def test_a_task_is_told_once_it_is_acknowledged_and_closed_once_it_was_told(ends: Ends) -> None:
    first, second = ends.begin(1), ends.begin(2)
    assert ends.tested.are_pending
    assert ends.tested.collect(left=2) == [], "no call waits for the two"
    second.may_end.set()
    assert ends.events == [], "not told before the earlier ones"
    first.may_end.set()
    assert ends.tested.collect() == []
    told = [event for event in ends.events if not event.startswith("closed")]
    assert told == ["acknowledged 1", "told 1", "acknowledged 2", "told 2"]
    assert [event for event in ends.events if event.startswith("closed")] == [
        "closed 1",
        "closed 2",
    ]


def test_a_stream_that_another_worker_completed_is_not_closed(ends: Ends) -> None:
    ends.not_first.add(1)
    ends.begin(1).may_end.set()
    assert ends.tested.collect() == []
    assert ends.events == ["acknowledged 1", "told 1"]
    assert not ends.tested.are_pending


def test_one_that_fails_is_reported_with_all_that_came_after_it(ends: Ends) -> None:
    error = ServerUnavailable("gone")
    for stream in (ends.begin(1, error), ends.begin(2), ends.begin(3, error)):
        stream.may_end.set()
    failed = ends.tested.collect(left=2)
    assert [(work.task.number, why) for work, why in failed] == [(1, error), (3, error)]
    assert "told 1" not in ends.events
    assert "closed 2" in ends.events
    assert ends.tested.collect() == []
