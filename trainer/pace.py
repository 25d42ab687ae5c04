"""What the mode of a job changes in a worker: when steps are sent, and who waits for whom.

``async`` changes nothing: the optimizer keeps its steps in flight. ``bounded`` waits before a batch
for those that are behind; ``geo`` steps on copies and sends what changed every so many batches. May
import the modes and the link; knows no framework.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from backstay.errors import ConfigError
from backstay.job_spec import JobSpec
from backstay.trainer.client import Client
from backstay.trainer.held_work import HeldWork
from backstay.trainer.master_link import MasterLink
from backstay.trainer.modes.geo import GeoClient
from backstay.trainer.modes.staleness import StalenessGate

__all__ = ["BoundedPace", "GeoPace", "Pace", "pace_of"]


class Pace:
    """The pace of async mode, and the base of the others.

    Attributes:
        batches_per_push: Batches that are sent together, and counted as settled together.
    """

    batches_per_push = 1

    def stand_before(self, client: Client) -> Any:
        """Return what the program takes for its client, on a new connection."""
        return client

    def begin_task(self, work: HeldWork) -> None:
        """A training task begins."""

    def begin_batch(self) -> None:
        """A batch is about to begin.

        Raises:
            HoldLost: The task was revoked while this worker waited.
        """

    def send(self) -> None:
        """Send what the batches since the last call have changed."""

    def abandon(self) -> None:
        """Forget what was not sent."""


class BoundedPace(Pace):
    """Nobody is more than ``staleness`` batches ahead of the slowest one.

    Args:
        job: Name of the job.
        own: Instance of this worker.
        staleness: See there.
        others: Instances of the workers that hold a training task.
    """

    def __init__(
        self, job: str, own: int, staleness: int, others: Callable[[], frozenset[int]]
    ) -> None:
        self._job = job
        self._own = own
        self._staleness = staleness
        self._others = others
        self._gate: StalenessGate | None = None
        self._work: HeldWork | None = None

    def stand_before(self, client: Client) -> Any:
        """Keep the clocks by this connection."""
        self._gate = StalenessGate(
            client,
            f"{self._job}/__clocks",
            self._own,
            self._staleness,
            others=self._others,
            is_revoked=lambda: self._work is not None and self._work.is_revoked,
        )
        return client

    def begin_task(self, work: HeldWork) -> None:
        """Take part from where the slowest one is."""
        assert self._gate is not None
        self._work = work
        self._gate.begin_task()

    def begin_batch(self) -> None:
        """Wait for who is behind."""
        assert self._gate is not None
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


def pace_of(spec: JobSpec, link: MasterLink) -> Pace:
    """Return the pace of a job's mode.

    Raises:
        ConfigError: The mode is ``sync``, which workers do not have yet.
    """
    mode = spec.mode
    if mode.kind == "async":
        return Pace()
    if mode.kind == "bounded":
        return BoundedPace(
            spec.name, link.instance, mode.staleness, lambda: link.training_instances
        )
    if mode.kind == "geo":
        return GeoPace(mode.local_steps)
    raise ConfigError(f"mode: workers cannot do {mode.kind!r} yet; use async, bounded or geo")
