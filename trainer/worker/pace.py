"""What the mode of a job changes in a worker: when steps are sent, and who waits for whom.

``async`` changes nothing: the optimizer keeps its steps in flight. ``bounded`` waits before a batch
for workers that are behind; ``geo`` steps on copies and sends what changed every so many batches;
``sync`` is in ``sync_pace``. May import the modes and the feed; knows no framework.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from backstay.errors import ConfigError
from backstay.job.messages import Task
from backstay.trainer.client import Client
from backstay.trainer.model.program import Program
from backstay.trainer.modes.geo import GeoClient
from backstay.trainer.modes.staleness import StalenessGate
from backstay.trainer.worker.leased_work import LeasedWork
from backstay.trainer.worker.peers import Peers
from backstay.trainer.worker.task_feed import ReadyBatch, TaskFeed

__all__ = ["BoundedPace", "GeoPace", "Pace", "Participant"]


@dataclass(frozen=True)
class Participant:
    """What a worker that takes part in another one's task brings.

    Attributes:
        feed_from: Makes the batches of the task from a number on.
        begins: Called before each batch.
        is_unwanted: Whether this worker is to end; asked while it waits, too.
    """

    feed_from: Callable[[int], TaskFeed]
    begins: Callable[[], None]
    is_unwanted: Callable[[], bool]


class Pace:
    """The pace of async mode, and the base of the others.

    Attributes:
        batches_per_push: Batches that are sent together, and counted as acknowledged together.
        overlaps_tasks: Whether the next task may be asked for, and begun, before this one is
            recorded as done.
    """

    batches_per_push = 1
    overlaps_tasks = True

    def stand_before(self, client: Client) -> Any:
        """Return what the program takes for its client, on a new connection."""
        return client

    def begin_task(self, work: LeasedWork) -> None:
        """A training task begins."""

    def begin_batch(self) -> None:
        """A batch is about to begin.

        Raises:
            TaskLeaseLost: The task was revoked while this worker waited.
        """

    def step(self, program: Program, fed: ReadyBatch) -> tuple[float, NDArray[Any] | None]:
        """Compute a batch and step; return what ``Program.train_batch`` does."""
        return program.train_batch(fed.features, fed.labels)

    def send(self) -> None:
        """Send what the batches since the last call have changed."""

    def end_task(self) -> None:
        """The training task has ended, in any way."""

    def follow(self, task: Task, program: Program, ways: Participant) -> int:
        """Take part in a task that another worker leads; return in how many steps.

        Raises:
            ConfigError: In this mode no worker does.
        """
        raise ConfigError(f"task {task.round}-{task.number} has a leader, but the mode has none")

    def close(self) -> None:
        """This worker ends."""

    def abandon(self) -> None:
        """Forget what was not sent."""


class BoundedPace(Pace):
    """No worker is more than ``staleness`` batches ahead of the slowest one.

    Args:
        job: Name of the job.
        own: Clock of this worker.
        staleness: See there.
        peers: The other workers.
        stop_reason: Why this worker is to end; empty: it is not.
    """

    def __init__(
        self,
        job: str,
        own: int,
        staleness: int,
        peers: Peers,
        stop_reason: Callable[[], str],
    ) -> None:
        self._job = job
        self._own = own
        self._staleness = staleness
        self._peers = peers
        self._stop_reason = stop_reason
        self._gate: StalenessGate | None = None
        self._work: LeasedWork | None = None

    def stand_before(self, client: Client) -> Any:
        """Keep the clocks by this connection."""
        self._gate = StalenessGate(
            client,
            f"{self._job}/__clocks",
            self._own,
            self._staleness,
            others=lambda: self._peers.training,
            is_unwanted=lambda: (
                bool(self._stop_reason()) or (self._work is not None and self._work.is_revoked)
            ),
        )
        return client

    def begin_task(self, work: LeasedWork) -> None:
        """Take part from where the slowest one is."""
        assert self._gate is not None
        self._work = work
        self._gate.begin_task(work.task.training)

    def begin_batch(self) -> None:
        """Wait for who is behind."""
        assert self._gate is not None
        with self._peers.waiting(tuple):
            self._gate.step()


class GeoPace(Pace):
    """Steps on copies; what changed is sent every ``local_steps`` batches, and with the last.

    Args:
        local_steps: See there.
    """

    def __init__(self, local_steps: int) -> None:
        self.batches_per_push = local_steps
        self._front: GeoClient | None = None

    def stand_before(self, client: Client) -> Any:
        """Have the program step on copies."""
        self._front = GeoClient(client)
        return self._front

    def send(self) -> None:
        """Exchange."""
        assert self._front is not None
        self._front.exchange()

    def abandon(self) -> None:
        """Forget the copies, and the steps on them."""
        if self._front is not None:
            self._front.forget()
