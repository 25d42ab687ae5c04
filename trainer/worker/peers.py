"""What a worker and its job master tell each other of the other workers, with each sign of life.

These are the workers that this one waits for; in bounded mode the clocks that count; in sync mode
the leader. The threads of the training and of the link write them. This module imports the
messages' values and does no I/O.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from backstay._proto.v1 import job_pb2
from backstay.job.messages import Task, key_of, key_of_message

__all__ = ["Peers"]

NAMES_MAX = 8


@dataclass(frozen=True)
class _Waiting:
    begun_s: float
    whom: Callable[[], Sequence[str]]


@dataclass(frozen=True)
class _LeaderAnswer:
    # When the call left that the job master answered so.
    asked_s: float
    key: tuple[str, int, int] | None


class Peers:
    """The other workers, as of the last sign of life."""

    def __init__(self) -> None:
        self._waiting: _Waiting | None = None
        self._led: _LeaderAnswer | None = None
        self._training: frozenset[int] = frozenset()

    @property
    def training(self) -> frozenset[int]:
        """In bounded mode: the clocks of the workers that have a training task and get on."""
        return self._training

    @contextmanager
    def waiting(self, whom: Callable[[], Sequence[str]]) -> Iterator[None]:
        """Tell that this worker waits for others meanwhile, so that it is not taken for hung.

        Args:
            whom: Returns their names, as far as they are known; from the link's thread.
        """
        self._waiting = _Waiting(time.monotonic(), whom)
        try:
            yield
        finally:
            self._waiting = None

    def is_led(self, task: Task, since_s: float) -> bool:
        """Return False if another lease than a task's is the one that leads, or none does.

        Args:
            task: As the job master gave it, with its leader.
            since_s: ``time.monotonic()`` then: what was asked before is old news.
        """
        led = self._led
        return led is None or led.asked_s < since_s or led.key == key_of(task)

    def tell(self, request: job_pb2.RenewLeasesRequest) -> None:
        """Put into a sign of life whom this worker waits for."""
        waiting = self._waiting
        if waiting is not None:
            passed_s = time.monotonic() - waiting.begun_s
            request.waiting_ms = max(1, int(1000 * passed_s))
            request.waits_for.extend(list(waiting.whom())[:NAMES_MAX])

    def learn(self, answer: job_pb2.RenewLeasesResponse, asked_s: float) -> None:
        """Take in the answer to one that was sent at ``asked_s``."""
        self._training = frozenset(answer.training)
        led = key_of_message(answer.led) if answer.HasField("led") else None
        self._led = _LeaderAnswer(asked_s, led)
