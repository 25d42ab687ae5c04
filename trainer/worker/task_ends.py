"""The ends of training tasks: a task is acknowledged and reported while the next one is trained.

A task of a thousand records is over in some ten milliseconds, and its last pushes and the job
master's record of it take a good part of that. Afterwards its stream is closed on the servers; a
stream that cannot be closed stays open, and costs the servers some bytes until they forget it. Of
a task that failed the job master is told the error in words and the records concerned. This module
may import the client, the stream, the link and the leased work. It decides nothing: the worker's
own thread handles failures.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from backstay.errors import BackstayError
from backstay.job.messages import BadRecordsMet, Task
from backstay.job.model_definition import ModelDefinition, is_users, user_traceback
from backstay.trainer.client import Client
from backstay.trainer.task_stream import TaskStream
from backstay.trainer.worker.leased_work import LeasedWork
from backstay.trainer.worker.master_link import MasterLink
from backstay.trainer.worker.task_feed import FeedFailed, TaskFeed

__all__ = ["ENDING_MAX", "StreamCloser", "TaskEnds", "bad_records_of", "failure_report"]

# Tasks whose batches are computed and that are not recorded yet, while another one is trained.
ENDING_MAX = 2

# Streams that may wait to be closed before the worker waits for them.
CLOSING_MAX = 16
PLACES_MAX = 100
PLACES_NAMED = 10

_LOG = logging.getLogger(__name__)


class StreamCloser:
    """Closes streams in a thread of its own, and tells the job master which ones are.

    Args:
        link: To the job master.
    """

    def __init__(self, link: MasterLink) -> None:
        self._link = link
        self._thread = ThreadPoolExecutor(1, "backstay-close")
        self._closing: deque[Future[None]] = deque()
        # The streams that could not be closed, for another try.
        self._again: deque[tuple[int, int]] = deque()

    def close_later(self, stream: TaskStream, task: Task) -> None:
        """Close the stream of a task that the job master has recorded as done."""
        pass_number, number = task.round, task.number
        self._closing.append(
            self._thread.submit(self._close, pass_number, number, stream.close_on_servers)
        )
        while len(self._closing) > CLOSING_MAX:
            self._closing.popleft().result()

    def close_for_others(
        self, client: Client, stream_job: int, incarnation: tuple[int, int]
    ) -> None:
        """Close streams that other workers have left behind.

        Args:
            client: The connection.
            stream_job: Of the job.
            incarnation: Of the connection; what was told of another one is forgotten.
        """
        again = [self._again.popleft() for _ in range(len(self._again))]
        for pass_number, number in [*again, *self._link.streams_to_close(incarnation)]:
            close = partial(client.close_task_stream, stream_job, pass_number, number)
            self._close(pass_number, number, close)

    def wait(self) -> None:
        """Wait until all that was begun is done; what failed is not tried again."""
        while self._closing:
            self._closing.popleft().result()
        self._again.clear()

    def shutdown(self) -> None:
        """End the thread, after what was begun."""
        self._thread.shutdown()

    def _close(self, pass_number: int, number: int, close: Callable[[], None]) -> None:
        try:
            close()
        except BackstayError as error:
            _LOG.warning("the stream of task %d-%d stays open: %s", pass_number, number, error)
            if error.retry_safe:
                self._again.append((pass_number, number))
            return
        self._link.stream_closed(pass_number, number)


@dataclass(frozen=True)
class _Ending:
    work: LeasedWork
    stream: TaskStream
    is_first: Future[bool]


class TaskEnds:
    """Ends tasks one after the other, in a thread of its own; used by one thread.

    Invariant: a task is told as done only when all its pushes are acknowledged, and its stream is
    closed only when the job master has recorded that.

    Args:
        complete: Tells the job master that a task is done, with its mean loss; returns whether this
            attempt was the first.
        closer: Of the streams.
    """

    def __init__(
        self, complete: Callable[[LeasedWork, float | None], bool], closer: StreamCloser
    ) -> None:
        self._complete = complete
        self._closer = closer
        self._thread = ThreadPoolExecutor(1, "backstay-end")
        self._endings: deque[_Ending] = deque()

    def begin(self, work: LeasedWork, stream: TaskStream, loss: float | None) -> None:
        """All batches of a task are computed: have it acknowledged and told."""

        def end() -> bool:
            stream.flush()
            return self._complete(work, loss)

        self._endings.append(_Ending(work, stream, self._thread.submit(end)))

    @property
    def are_pending(self) -> bool:
        """Whether there is something to collect."""
        return bool(self._endings)

    def collect(self, left: int = 0) -> list[tuple[LeasedWork, Exception]]:
        """Wait until at most so many tasks are ending, or none if one of them failed.

        Returns:
            The tasks that failed, with the reason; the oldest first.
        """
        failed: list[tuple[LeasedWork, Exception]] = []
        while len(self._endings) > (0 if failed else left):
            ending = self._endings.popleft()
            try:
                is_first = ending.is_first.result()
            except Exception as error:  # noqa: BLE001 (for the caller, whatever it is)
                failed.append((ending.work, error))
                continue
            if is_first:
                self._closer.close_later(ending.stream, ending.work.task)
        return failed

    def shutdown(self) -> None:
        """End the thread, after what was begun."""
        self._thread.shutdown()


def failure_report(
    work: LeasedWork, error: Exception, definition: ModelDefinition
) -> tuple[str, list[int]]:
    """Return the error in words, and positions within the task of the records concerned."""
    places = getattr(error, "backstay_places", ())
    cause = error
    if isinstance(error, FeedFailed):
        places = error.places
        assert isinstance(error.__cause__, Exception)
        cause = error.__cause__
    if isinstance(cause, BackstayError) and not is_users(cause, definition.path):
        text = f"{type(cause).__name__}: {cause}"
    else:
        text = user_traceback(cause, definition.path)
    named = [int(place) for place in places[:PLACES_MAX]]
    if named:
        numbers = ", ".join(str(work.task.start + place) for place in named[:PLACES_NAMED])
        more = ", ..." if len(places) > PLACES_NAMED else ""
        text += f"\nrecords of {work.task.shard}: {numbers}{more}"
    return text, named


def bad_records_of(feed: TaskFeed | None) -> BadRecordsMet:
    """Return the damaged records of a feed as the job master is told of them."""
    if feed is None:
        return BadRecordsMet()
    reports = feed.bad.reports
    return BadRecordsMet(
        feed.bad.count, tuple((one.file, one.offset, one.reason) for one in reports)
    )
