"""Streams of tasks that are recorded as done are closed on the servers, while training goes on.

May import the client, the stream and the link. A stream that cannot be closed stays open, which
costs the servers some bytes and nothing else: they forget it by themselves.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from backstay.errors import BackstayError
from backstay.job.messages import Task
from backstay.trainer.client import Client
from backstay.trainer.task_stream import TaskStream
from backstay.trainer.worker.master_link import MasterLink

__all__ = ["StreamCloser"]

# Streams that may wait to be closed before the worker waits for them.
CLOSING_MAX = 16

_LOG = logging.getLogger(__name__)


class StreamCloser:
    """Closes streams in a thread of its own, and tells the master which ones are.

    Args:
        link: To the master.
    """

    def __init__(self, link: MasterLink) -> None:
        self._link = link
        self._thread = ThreadPoolExecutor(1, "backstay-close")
        self._closing: deque[Future[None]] = deque()
        # Those that could not be closed, for another try.
        self._again: deque[tuple[int, int]] = deque()

    def close_later(self, stream: TaskStream, task: Task) -> None:
        """Close the stream of a task that the master has recorded as done."""
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
