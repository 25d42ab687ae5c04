"""Pushes one after the other, each timed: what trainers feel of what else a cluster does.

Shared by the jobs about checkpoints and resizing. Their table has rows of 16 float32 with Adagrad
state, and keys spread over all 64 bits.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from backstay.tables import Adagrad, TableSpec
from backstay.trainer import Client, Table
from bench.jobs.local import BATCHES
from bench.jobs.memory import DIM, KEY_BYTES, SPREAD_MULTIPLIER, WEIGHT_BYTES, spread_keys

__all__ = ["ROW_BYTES", "PushTimes", "TimedPush", "fill", "pushing", "rows_of", "table_spec"]

ROW_BYTES = 2 * DIM * WEIGHT_BYTES + KEY_BYTES
FILL_KEYS = 262_144


class TimedPush(NamedTuple):
    """When a push began, by the monotonic clock, and for how long its trainer waited."""

    began: float
    took: float


class PushTimes:
    """Pushes of one trainer, in their order."""

    def __init__(self, pushes: list[TimedPush]) -> None:
        self.pushes = pushes

    def per_s(self, begin: float, end: float) -> float:
        """The rate of pushes that ended between two moments."""
        return sum(begin <= one.began + one.took < end for one in self.pushes) / (end - begin)

    def longest_s(self, begin: float, end: float) -> float:
        """The longest push that was under way between two moments; 0 if there was none."""
        return max(self._times(begin, end), default=0.0)

    def longer_s(self, limit: float, begin: float, end: float) -> float:
        """The time of all pushes under way between two moments that took longer than the limit."""
        return sum(took for took in self._times(begin, end) if took > limit)

    def percentile_s(self, share: float, begin: float, end: float) -> float:
        """The time that so many of the pushes under way did not exceed.

        It is the time of a push: between two of them, the longer one.

        Raises:
            ValueError: No push was under way.
        """
        times = sorted(self._times(begin, end))
        if not times:
            raise ValueError(f"no push was under way in {end - begin:.3f} s")
        return times[max(0, math.ceil(share * len(times)) - 1)]

    def _times(self, begin: float, end: float) -> list[float]:
        # One that began before counts too: it may have waited for what came.
        return [one.took for one in self.pushes if one.began < end and one.began + one.took > begin]


def rows_of(gigabytes: float) -> int:
    """How many rows have so many GB of weights, state and keys."""
    return int(gigabytes * 1e9) // ROW_BYTES


def table_spec() -> TableSpec:
    return TableSpec.sparse("embedding", DIM, optimizer=Adagrad(learning_rate=0.1))


def fill(client: Client, table: Table, rows: int) -> None:
    """Create every row, by a push, so that its state is written; contents repeat after 16 MB."""
    gradients = np.random.default_rng(0).standard_normal((FILL_KEYS, DIM), np.float32)
    for first in range(0, rows, FILL_KEYS):
        keys = spread_keys(first, min(first + FILL_KEYS, rows))
        client.push(table, keys, gradients[: len(keys)])


@contextmanager
def pushing(endpoints: list[str], rows: int, keys_per_push: int) -> Iterator[PushTimes]:
    """Let a trainer push to rows that are there, without a pause, on a thread of its own.

    Yields:
        What it has pushed so far; it grows.

    Raises:
        BackstayError: One of its pushes failed.
    """
    generator = np.random.default_rng(1)
    batches = [
        generator.integers(0, rows, keys_per_push, dtype=np.uint64) * SPREAD_MULTIPLIER
        for _ in range(BATCHES)
    ]
    gradients = np.full((keys_per_push, DIM), 1e-3, np.float32)
    pushes: list[TimedPush] = []
    failures: list[Exception] = []
    stop = threading.Event()

    def work() -> None:
        try:
            with Client(endpoints) as client:
                table = client.create_table(table_spec())
                while not stop.is_set():
                    keys = batches[len(pushes) % BATCHES]
                    began = time.monotonic()
                    client.push(table, keys, gradients)
                    pushes.append(TimedPush(began, time.monotonic() - began))
        except Exception as error:  # noqa: BLE001 (raised below, in the thread that waits)
            failures.append(error)

    thread = threading.Thread(target=work, name="trainer")
    thread.start()
    try:
        yield PushTimes(pushes)
    finally:
        stop.set()
        thread.join()
    if failures:
        raise failures[0]
