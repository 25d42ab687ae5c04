"""The batches of a task: read, put in order, cut and fed, in a thread ahead of the training.

Every worker reads the same records in the same order for (task, seed), because exactly-once relies
on that. The feed runs the user's ``feed``. This module may import readers, batches and the model
definition. It knows no framework, and only the readers use the network.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backstay.data import BadRecords, Metadata, Reader, open_reader, read_batch
from backstay.data.batch import Batch
from backstay.job.messages import Task
from backstay.job.model_definition import Mode, ModelDefinition
from backstay.job_spec import DataSpec, JobSpec
from backstay.schedule.rounds import RoundKind, data_of
from backstay.trainer.model.batches import split_feed
from backstay.trainer.worker.scoring import Groups, groups_of

__all__ = [
    "FeedFailed",
    "ReadyBatch",
    "TaskFeed",
    "TaskFeeds",
    "TaskRange",
    "groups_by",
    "record_order",
    "with_following",
]

# Batches that are ready before their turn.
BATCHES_AHEAD_MAX = 4
# How often a thread that waits for room looks whether it is still wanted.
CHECK_S = 0.1


@dataclass(frozen=True)
class TaskRange:
    """The part of the data that a task is.

    Attributes:
        shard: Name of the file or table.
        start: First place.
        count: Number of places.
        shuffle_seed: Of the order of its records; 0: as they are.
    """

    shard: str
    start: int
    count: int
    shuffle_seed: int = 0


@dataclass(frozen=True)
class ReadyBatch:
    """A batch, ready for the model.

    Attributes:
        number: In the task, from 0.
        places: The records' numbers among the good ones of the task, int64 [n].
        features: As ``feed`` returned them.
        labels: Likewise; None for predictions.
        groups: The column whose values get figures of their own; None: there is none.
    """

    number: int
    places: NDArray[np.int64]
    features: Any
    labels: Any
    groups: Groups | None = None


class FeedFailed(Exception):
    """Reading or ``feed`` failed; the cause is the error.

    Attributes:
        places: The records of the batch, int64 [n]; none: reading failed.
    """

    def __init__(self, places: NDArray[np.int64]) -> None:
        super().__init__("a batch could not be made")
        self.places = places


def record_order(count: int, seed: int) -> NDArray[np.int64]:
    """Return the order of a task's records, a permutation of 0..count-1; seed 0: as they are.

    Part of the job's contract: a task that is given again must be cut in the same way.
    """
    if seed == 0:
        return np.arange(count, dtype=np.int64)
    # PCG64 and its permutation are stable over versions of numpy (NEP 19 keeps bit generators;
    # the order is by keys drawn from it, so that nothing else of numpy matters).
    keys = np.random.PCG64(seed).random_raw(count)
    return np.argsort(keys, kind="stable").astype(np.int64)


class TaskFeed:
    """The batches of one task, in order, made by a thread of its own; a context manager.

    At most ``BATCHES_AHEAD_MAX`` wait. An iterator's end means that all were taken.

    Args:
        reader: Opens the data, or returns it open; called in the feed's thread.
        definition: Whose ``feed`` is called.
        mode: What it is told.
        part: The task.
        batch_size: Records in a batch; the last one may be short.
        first_batch: Those before it are not made.
        bad_records_max: How many damaged records may be skipped.
        groups_by: The column whose values get figures of their own; empty: none.
    """

    def __init__(
        self,
        reader: Callable[[], Reader],
        definition: ModelDefinition,
        mode: Mode,
        part: TaskRange,
        *,
        batch_size: int,
        first_batch: int = 0,
        bad_records_max: int = 0,
        groups_by: str = "",
    ) -> None:
        self.bad = BadRecords(bad_records_max)
        self.part = part
        self._reader = reader
        self._definition = definition
        self._mode = mode
        self._batch_size = batch_size
        self._first = first_batch
        self._groups_by = groups_by
        self._batches: int | None = None
        self._records = 0
        # Taken from the queue before its turn; of the thread that takes.
        self._first_ready: ReadyBatch | None = None
        self._ready: queue.Queue[ReadyBatch | Exception | None] = queue.Queue(BATCHES_AHEAD_MAX)
        self._unwanted = threading.Event()
        self._all_made = threading.Event()
        self._thread = threading.Thread(target=self._make, name="backstay-feed", daemon=True)
        self._thread.start()

    @property
    def batches(self) -> int:
        """Batches of the whole task; known once the first one was taken, or the end was met."""
        assert self._batches is not None
        return self._batches

    @property
    def known_batches(self) -> int | None:
        """The same, None before it is known."""
        return self._batches

    @property
    def records(self) -> int:
        """Good records of the whole task, those of batches before ``first_batch`` included.

        Known once the first batch was taken, or the end was met.
        """
        return self._records

    @property
    def all_made(self) -> bool:
        """Whether all batches are ready or taken: a good moment to ask for the next task."""
        return self._all_made.is_set()

    def first_ready(self) -> ReadyBatch | None:
        """Return the first batch if it is ready; it stays. Only before any was taken."""
        if self._first_ready is None:
            with contextlib.suppress(queue.Empty):
                item = self._ready.get_nowait()
                if isinstance(item, ReadyBatch):
                    self._first_ready = item
                else:
                    # The end, or an error: for its turn. No other thread puts any more.
                    self._ready.put(item)
        return self._first_ready

    def __iter__(self) -> Iterator[ReadyBatch]:
        """Yield the batches from ``first_batch`` on.

        Raises:
            FeedFailed: The user's ``feed`` failed, or the records cannot be read.
        """
        first, self._first_ready = self._first_ready, None
        if first is not None:
            yield first
        while (item := self._ready.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item

    def close(self) -> None:
        """Stop making batches; waits for the user's ``feed`` to return."""
        self._unwanted.set()
        while self._thread.is_alive():
            self._drain()
            self._thread.join(CHECK_S)

    def __enter__(self) -> TaskFeed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make(self) -> None:
        last: Exception | None = None
        try:
            for fed in self._made():
                if not self._put(fed):
                    return
        except FeedFailed as error:
            last = error
        self._all_made.set()
        self._put(last)

    def _made(self) -> Iterator[ReadyBatch]:
        part, places = self.part, np.empty(0, np.int64)
        try:
            reader = self._reader()
            records = read_batch(reader, part.shard, part.start, part.count, self.bad)
            order = record_order(len(records), part.shuffle_seed)
            size = self._batch_size
            self._records = len(records)
            self._batches = -(-len(records) // size)
            for number in range(self._first, self._batches):
                places = order[number * size : (number + 1) * size]
                yield self._feed(number, places, records, reader.metadata)
        except Exception as error:
            failed = FeedFailed(places)
            failed.__cause__ = error
            raise failed from error

    def _feed(
        self, number: int, places: NDArray[np.int64], records: Batch, metadata: Metadata
    ) -> ReadyBatch:
        if self.part.shuffle_seed == 0:
            batch = records[int(places[0]) : int(places[-1]) + 1]
        else:
            batch = records.take(places)
        fed = self._definition.feed(batch, self._mode, metadata)
        features, labels = split_feed(fed, self._mode)
        groups = groups_of(batch.column(self._groups_by)) if self._groups_by else None
        return ReadyBatch(number, places, features, labels, groups)

    def _put(self, item: ReadyBatch | Exception | None) -> bool:
        """Wait for room; return False if no more is wanted."""
        while not self._unwanted.is_set():
            try:
                self._ready.put(item, timeout=CHECK_S)
            except queue.Full:
                continue
            return True
        return False

    def _drain(self) -> None:
        try:
            while True:
                self._ready.get_nowait()
        except queue.Empty:
            return


def groups_by(spec: JobSpec, kind: str) -> str:
    """Return the column whose values get figures of their own in tasks of a kind; empty: none."""
    if spec.progressive is None or kind != "training":
        return ""
    return spec.progressive.by


def with_following(feed: TaskFeed) -> Iterator[tuple[ReadyBatch, ReadyBatch | None]]:
    """Yield each batch and, if there is one, the batch after it.

    Raises:
        FeedFailed: A batch could not be made; after the batches before it.
    """
    batches = iter(feed)
    current = next(batches, None)
    while current is not None:
        following: ReadyBatch | None = None
        failed: FeedFailed | None = None
        try:
            following = next(batches, None)
        except FeedFailed as error:
            failed = error
        yield current, following
        if failed is not None:
            raise failed
        current = following


class TaskFeeds:
    """Makes the feeds of a job's tasks; its readers are opened once."""

    def __init__(self, spec: JobSpec, definition: ModelDefinition) -> None:
        """Prepare.

        Args:
            spec: Of the job.
            definition: The user's.
        """
        self._spec = spec
        self._definition = definition
        self._readers: dict[str, Reader] = {}

    def of(self, task: Task, first_batch: int | None = None) -> TaskFeed:
        """Return the batches of a task, from its own first one on or from another."""
        spec = self._spec
        assert task.kind != "train_end"
        data = spec.data[data_of(RoundKind(task.kind))]
        return TaskFeed(
            lambda: self._reader(task.kind, data),
            self._definition,
            task.kind,
            TaskRange(task.shard, task.start, task.count, task.shuffle_seed),
            batch_size=spec.batch_size,
            first_batch=task.first_batch if first_batch is None else first_batch,
            bad_records_max=spec.max_bad_records,
            groups_by=groups_by(spec, task.kind),
        )

    def _reader(self, kind: str, data: DataSpec) -> Reader:
        if kind not in self._readers:
            self._readers[kind] = open_reader(
                data, module=self._definition.module, grows=self._spec.grows(kind)
            )
        return self._readers[kind]
