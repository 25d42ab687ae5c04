"""A task that this worker has a lease of: its state, and the batches that are being made of it.

The link's thread reports renewals and revocation, also before there is a stream: this module keeps
them until then. It may import the link's messages, the stream and the feed.
"""

from __future__ import annotations

import threading

from backstay.errors import TaskLeaseLost
from backstay.job.messages import Acknowledged, Task
from backstay.trainer.task_stream import TaskStream
from backstay.trainer.worker.scoring import AttemptScores
from backstay.trainer.worker.task_feed import TaskFeed

__all__ = ["LeasedWork"]

# More than a task has.
BATCHES_MAX = 2**62


class LeasedWork:
    """One attempt at a task; the link's ``LeaseHolder``.

    Attributes:
        task: What the job master said.
        feed: Its batches; None for a task without records.
        batches_per_push: Batches of the task that are one of its stream: see ``Pace``.
        incarnation: Those of the connection that it was asked for: see ``Connection``.
        examples: Records that this attempt has trained on.
        batches: Batches that this attempt has trained on.
        scores: Of what was predicted before that; None: the job has no progressive metrics.
    """

    def __init__(
        self,
        task: Task,
        batches_per_push: int = 1,
        incarnation: tuple[int, int] = (0, 0),
        scores: AttemptScores | None = None,
    ) -> None:
        self.task = task
        self.batches_per_push = batches_per_push
        self.incarnation = incarnation
        self.scores = scores
        self.feed: TaskFeed | None = None
        self.examples = 0
        self.batches = 0
        self._lock = threading.Lock()
        self._alive_until = task.leased_until
        self._revoked = False
        self._stream: TaskStream | None = None

    def __str__(self) -> str:
        task = self.task
        return f"{task.kind} task {task.round}-{task.number} (attempt {task.attempt})"

    def attach(self, stream: TaskStream) -> None:
        """Have the stream hear of the lease from now on, and of what is known already."""
        with self._lock:
            self._stream = stream
            stream.lease_until(self._alive_until)
            if self._revoked:
                stream.revoke()

    def lease_until(self, moment_s: float) -> None:
        """The lease is alive until then; from the link's thread."""
        with self._lock:
            self._alive_until = moment_s
            if self._stream is not None:
                self._stream.lease_until(moment_s)

    def revoke(self) -> None:
        """The task is another worker's, or done; from the link's thread."""
        with self._lock:
            self._revoked = True
            if self._stream is not None:
                self._stream.revoke()

    @property
    def is_revoked(self) -> bool:
        """Whether the task is no longer this worker's."""
        return self._revoked

    @property
    def acknowledged(self) -> int:
        """Batches of the task that are acknowledged everywhere."""
        stream = self._stream
        batches = None if self.feed is None else self.feed.known_batches
        if stream is None or batches is None:
            return self.task.first_batch
        # The last push of a task may be of fewer batches.
        return min(stream.acknowledged * self.batches_per_push, batches)

    def told(self) -> Acknowledged:
        """Return how far this attempt is as the job master is told: no further than its scores."""
        if self.scores is None:
            return Acknowledged(self.acknowledged)
        return Acknowledged(*self.scores.up_to(self.acknowledged))

    def all_scores(self) -> bytes:
        """Return the packed scores of all batches of this attempt, once it has done the task."""
        return b"" if self.scores is None else self.scores.up_to(BATCHES_MAX)[1]

    def check(self) -> None:
        """Go on only with a lease.

        Raises:
            TaskLeaseLost: The task is no longer this worker's.
        """
        if self._revoked:
            raise TaskLeaseLost(f"{self} is another worker's by now, or done")

    def close(self) -> None:
        """Stop making batches."""
        if self.feed is not None:
            self.feed.close()
