"""The ends of training tasks: acknowledged and told as done while the next task is being trained.

A task of a thousand records is over in some ten milliseconds, and its last pushes and the master's
record of it take a good part of that. May import the stream and the leased work. Decides
nothing: what went wrong is for the worker's own thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from backstay.trainer.task_stream import TaskStream
from backstay.trainer.worker.leased_work import LeasedWork
from backstay.trainer.worker.stream_closing import StreamCloser

__all__ = ["ENDING_MAX", "TaskEnds"]

# Tasks whose batches are computed and that are not recorded yet, while another one is trained.
ENDING_MAX = 2


@dataclass(frozen=True)
class _Ending:
    work: LeasedWork
    stream: TaskStream
    is_first: Future[bool]


class TaskEnds:
    """Ends tasks one after the other, in a thread of its own; used by one thread.

    Invariant: a task is told as done only when all its pushes are acknowledged, and its stream is
    closed only when the master has recorded that.

    Args:
        complete: Tells the master that a task is done, with its mean loss; returns whether this
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
            Those that failed, with the reason; the oldest first.
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
