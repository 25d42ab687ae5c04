"""A job's tasks in virtual time: workers that die, two attempts at once, late pushes.

The trainers here do what ``TaskStream`` and a worker do: number the pushes of a task by batch and
table, keep the floor, replay a task from its first batch that is not acknowledged, close its stream
once it is done.
The history judges: however often a batch was pushed, each slot counts it once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from tests.sim.events import MS
from tests.sim.trainer import BACKOFF, Push, Trainer

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster
    from tests.sim.pserver import Pserver

__all__ = ["TaskBook", "TaskTrainer"]

JOB = 1 << 40
BATCHES = 6
TABLES = 2
CLOSE_TIMEOUT = 400 * MS


@dataclass
class Task:
    """A task, as the job master knows it."""

    number: int
    batches: list[list[list[int]]]
    """Of each batch the keys of each table's push; the same for every reader."""
    workers: set[int] = field(default_factory=set)
    acknowledged: int = 0
    is_done: bool = False
    is_closed: bool = False

    @property
    def stream(self) -> tuple[int, int, int]:
        """The stream of its pushes."""
        return (JOB, 1, self.number)


class TaskBook:
    """A job master with a perfect memory: who has which task, and what is done."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster = cluster
        # Its own, so that runs without tasks stay what they were.
        self.random = Random(f"tasks {seed}")
        self.tasks: list[Task] = []

    @property
    def unfinished(self) -> list[int]:
        """Tasks that were begun and are not done, or whose stream is not closed."""
        return [task.number for task in self.tasks if not (task.is_done and task.is_closed)]

    def take(self, worker: int, *, begin: bool) -> Task | None:
        """Give a worker a task: one given back, one of another worker, or a new one."""
        free = [task for task in self.tasks if not task.is_done and not task.workers]
        slow = [task for task in self.tasks if not task.is_done and task.workers]
        if free:
            task = self.random.choice(free)
        elif slow and self.random.random() < 0.3:
            task = self.random.choice(slow)
            self.cluster.queue.counts["speculative"] += 1
        elif begin:
            task = Task(len(self.tasks), [self._batch() for _ in range(BATCHES)])
            self.tasks.append(task)
        else:
            return None
        task.workers.add(worker)
        return task

    def _batch(self) -> list[list[int]]:
        keys = [self.random.sample(self.cluster.keys, self.random.choice((1, 2, 5)))]
        keys.append(self.random.sample(self.cluster.keys, 2))
        return [self.cluster.sort_keys(one) for one in keys]

    def replay_all(self) -> None:
        """Have everything pushed once more, by trainers that do not know that it is done."""
        replayers = [one for one in self.cluster.trainers if isinstance(one, TaskTrainer)]
        for number, task in enumerate(self.tasks):
            replayers[number % len(replayers)].late.append(task)
        for one in replayers:
            one.replay_late()
        limit = self.cluster.queue.now + self.cluster.options.healed_within
        # Slots that were lost count them anew, and their replicas must agree again.
        while any(one.late or one.pushes for one in replayers) or self.cluster.missing():
            if self.cluster.queue.now > limit:
                self.cluster.fail("liveness: late pushes are not answered")
            self.cluster.queue.run_until(self.cluster.queue.now + 50 * MS)


class TaskTrainer(Trainer):
    """A worker: one task at a time, a few pushes under way, dies and comes back."""

    def __init__(self, cluster: Cluster, number: int, book: TaskBook) -> None:
        super().__init__(cluster, number)
        self.book = book
        self.late: list[Task] = []
        self._task: Task | None = None
        self._batch = 0

    @property
    def floor(self) -> int:
        """Never above what is not acknowledged, nor above the batch that has begun."""
        return min((self._batch - 1) * TABLES, min(self.pushes, default=1 << 60))

    def _go_on(self) -> None:
        self.queue.after(self.queue.between(100, self._pause), self._go_on)
        random = self.book.random
        if not self._version:
            return
        if self._task is None:
            self._take()
        elif random.random() < 0.02:
            self._die(self._task)
        elif self._task.is_done and random.random() < 0.5:
            # The other attempt was faster; it took a while to hear of it.
            self._drop("revoked")
        elif self._batch < BATCHES:
            if len(self.pushes) < self._window:
                self._push_batch(self._task)
        elif not self.pushes:
            self._complete(self._task)

    def _take(self) -> None:
        task = self.book.take(self.number, begin=not self.stopping)
        if task is not None:
            self._task, self._batch = task, task.acknowledged

    def _push_batch(self, task: Task) -> None:
        batch = self._batch
        self._batch += 1
        for table, keys in enumerate(task.batches[batch]):
            slots = {self.cluster.slot_of[key] for key in keys}
            self.begin(Push(task.stream, batch * TABLES + table, list(keys), slots))

    def _acknowledged(self) -> int:
        return min(self._batch, min(self.pushes, default=1 << 60) // TABLES)

    def _die(self, task: Task) -> None:
        """What is under way stays under way; the job master knows what it was told, or less."""
        acknowledged = self.book.random.randint(
            task.acknowledged, max(task.acknowledged, self._acknowledged())
        )
        task.acknowledged = acknowledged
        self._drop("worker_deaths")

    def _drop(self, why: str) -> None:
        self.queue.counts[why] += 1
        if self._task is not None:
            self._task.workers.discard(self.number)
        self._task = None
        self.pushes.clear()

    def _complete(self, task: Task) -> None:
        is_first = not task.is_done
        task.is_done = True
        task.workers.discard(self.number)
        self._task = None
        if is_first:
            self.queue.counts["tasks_done"] += 1
            self._close(task)

    # Closing, as the client does: every master of one routing, and again if that has changed

    def _close(self, task: Task) -> None:
        version = self._version
        replicas = self.cluster.routings[version - 1].replicas_of_slot
        if any(held.master < 0 for held in replicas):
            self.queue.after(BACKOFF * 4, partial(self._close, task))
            return
        masters = list(self._masters(range(self.cluster.options.slots)))
        missing = set(masters)
        is_over = False

        def again() -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                self._close(task)

        def answered(process: Pserver, code: int) -> None:
            nonlocal is_over
            if code == 0:
                missing.discard(process)
            if is_over or missing:
                return
            is_over = True
            if self._version == version:
                task.is_closed = True
            else:
                self._close(task)

        # Not in the order of the set: it differs from run to run.
        for process in masters:

            def answer(code: int, process: Pserver = process) -> None:
                self.cluster.network.send(
                    process.place, self.place, partial(answered, process, code)
                )

            self._carry(process, partial(process.on_close, task.stream, version, answer))
        self.queue.after(CLOSE_TIMEOUT, again)

    # Late pushes

    def replay_late(self) -> None:
        """Push every batch of the next late task at once, its stream being closed long ago."""
        if self.pushes:
            self.queue.after(BACKOFF, self.replay_late)
        elif self.late:
            task = self.late.pop()
            self.queue.counts["replays"] += 1
            self._batch = 1
            for self._batch in range(1, BATCHES + 1):
                for table, keys in enumerate(task.batches[self._batch - 1]):
                    slots = {self.cluster.slot_of[key] for key in keys}
                    sequence = (self._batch - 1) * TABLES + table
                    self.begin(Push(task.stream, sequence, list(keys), slots))
            self.queue.after(BACKOFF, self.replay_late)
