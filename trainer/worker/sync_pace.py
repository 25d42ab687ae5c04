"""The pace of sync mode: one step of all workers at a time, each batch cut for all of them.

The worker with the lease of the task leads: it cuts the batch, computes a piece, puts all gradients
together and pushes them once. The others follow: they read the same records and send the gradients
of their pieces. May import the modes, the feed and ``job_engine``.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from numpy.typing import NDArray

from backstay.addresses import is_loopback, split_address
from backstay.config import SecurityConfig
from backstay.errors import (
    ClosedError,
    ConfigError,
    DataChanged,
    DeadlineExceeded,
    NotLeading,
    ServerUnavailable,
)
from backstay.job.messages import Task
from backstay.job_engine.stalls import clock_of_worker
from backstay.job_spec import JobSpec
from backstay.trainer.client import Client
from backstay.trainer.model.program import Program
from backstay.trainer.modes.gathering import (
    GatheringClient,
    Piece,
    predictions_together,
    put_together,
)
from backstay.trainer.modes.leading import FollowedTask, LedTask, StepLeader
from backstay.trainer.modes.pieces import piece_of
from backstay.trainer.modes.step_book import Contribution, Patience
from backstay.trainer.worker.leased_work import LeasedWork
from backstay.trainer.worker.master_link import MasterLink
from backstay.trainer.worker.pace import BoundedPace, GeoPace, Pace, Participant
from backstay.trainer.worker.task_feed import ReadyBatch, TaskFeed

__all__ = ["SyncPace", "pace_of"]

_LOG = logging.getLogger(__name__)
T = TypeVar("T")

# How often it is looked whether this worker is to end while it waits for a step.
LOOK_S = 0.2
CALL_DEADLINE_MS = 10_000


class SyncPace(Pace):
    """Leads the steps of this worker's leased task, or follows the steps of another worker's.

    Args:
        host: Where this worker's followers reach it; a port of the system's choice is taken.
        link: Joined.
        security: Token and certificates.
        patience: How long followers' pieces are waited for.
        tells_predictions: Whether a follower sends what the model answered, too.

    Raises:
        ListenError: The host cannot be listened on.
    """

    overlaps_tasks = False

    def __init__(
        self,
        host: str,
        link: MasterLink,
        security: SecurityConfig,
        patience: Patience,
        *,
        tells_predictions: bool = False,
    ) -> None:
        self._tells_predictions = tells_predictions
        self._link = link
        self._security = security
        self._patience = patience
        self._leader = StepLeader(host, security)
        self._leader.start()
        self._client: Client | None = None
        self._gathering: GatheringClient | None = None

    @property
    def address(self) -> str:
        """Where this worker can be followed."""
        return self._leader.address

    def stand_before(self, client: Client) -> Any:
        """Keep what steps would push."""
        self._client = client
        self._gathering = GatheringClient(client)
        return self._gathering

    def begin_task(self, work: LeasedWork) -> None:
        """Lead."""
        task = work.task
        self._leader.begin_task(LedTask(task.round, task.number, task.attempt))

    def end_task(self) -> None:
        """Stop leading."""
        self._leader.end_task()

    def step(self, program: Program, fed: ReadyBatch) -> tuple[float, NDArray[Any] | None]:
        """Have all workers compute the batch, and push its gradient once.

        Returns:
            The loss, and what the model answered if that is one tensor and the job asks for it.
        """
        assert self._client is not None
        assert self._gathering is not None
        # The step before must be in the values that this one computes on.
        self._client.flush()
        program.synchronize()
        begun_s = time.monotonic()
        parts = [self._piece(program, fed, self._leader.cut(fed.number, len(fed.places)))]
        own_s = time.monotonic() - begun_s
        with self._link.peers.waiting(self._leader.awaited):
            whole, left = self._leader.gather(self._patience.of(self._leader.partners, own_s))
        parts += whole
        parts += [self._piece(program, fed, piece) for piece in left]
        gradients = put_together([(one.piece.count, one.gradients) for one in parts])
        self._gathering.push_all(gradients)
        loss = sum(one.piece.count * one.loss for one in parts) / len(fed.places)
        if not self._tells_predictions:
            return loss, None
        return loss, predictions_together([(one.piece, one.predictions) for one in parts])

    def follow(self, task: Task, program: Program, ways: Participant) -> int:
        """Take part in a task until its leader ends it, drops this worker or is gone."""
        led = LedTask(task.round, task.number, task.attempt)
        followed = FollowedTask(
            task.leader, led, self._link.instance, self._security, CALL_DEADLINE_MS,
            self._link.worker_id,
        )  # fmt: skip
        ended = threading.Event()
        begun_s = time.monotonic()

        def watch() -> None:
            while not ended.wait(LOOK_S):
                # A leader that hangs, or stands still, ends no stream.
                if ways.is_unwanted() or not self._link.peers.is_led(task, begun_s):
                    # Again each time: the first may come before there is anything to cancel.
                    followed.cancel()

        watcher = threading.Thread(target=watch, name="backstay-follow", daemon=True)
        watcher.start()
        feed: TaskFeed | None = None
        done = 0
        try:
            while (step := _asked_of_leader(task, followed.next_step)) is not None:
                number, piece = step
                feed = ways.feed_from(number) if feed is None else feed
                ways.begins()
                program.synchronize()
                one = self._piece(program, _batch(feed, number), piece)
                predictions = one.predictions if self._tells_predictions else None
                deliver = partial(followed.contribute, number, one.gradients, one.loss, predictions)
                if not _asked_of_leader(task, deliver):
                    break
                done += 1
        finally:
            ended.set()
            watcher.join()
            followed.close()
            if feed is not None:
                feed.close()
        return done

    def abandon(self) -> None:
        """Forget what was kept of a step that failed."""
        if self._gathering is not None:
            self._gathering.take()

    def close(self) -> None:
        """End the service."""
        self._leader.close()

    def _piece(self, program: Program, fed: ReadyBatch, piece: Piece) -> Contribution:
        """Compute a piece; nothing is pushed."""
        assert self._gathering is not None
        self._gathering.take()
        features = piece_of(fed.features, piece, len(fed.places))
        labels = piece_of(fed.labels, piece, len(fed.places))
        loss, predictions = program.train_batch(features, labels)
        return Contribution(piece, self._gathering.take(), True, loss, predictions)


def pace_of(
    spec: JobSpec,
    link: MasterLink,
    endpoints: Sequence[str],
    security: SecurityConfig,
    stop_reason: Callable[[], str],
) -> Pace:
    """Return the pace of a job's mode.

    Args:
        spec: Of the job.
        link: Joined.
        endpoints: Of the pservers; sync mode listens on the address that leads there.
        security: Token and certificates.
        stop_reason: Why this worker is to end, empty if it is not; asked while it waits for others.

    Raises:
        ListenError: Sync mode cannot listen.
        ConfigError: Sync mode lacks a token or a certificate.
    """
    mode = spec.mode
    if spec.training is None or mode.kind == "async":
        return Pace()
    if mode.kind == "bounded":
        own = clock_of_worker(link.worker_id)
        return BoundedPace(spec.name, own, mode.staleness, link.peers, stop_reason)
    if mode.kind == "geo":
        return GeoPace(mode.local_steps)
    host = own_host(endpoints[0])
    if security.tls_ca_file is not None and security.tls_cert_file is None:
        raise ConfigError(
            "tls_cert_file: must be set: with tls_ca_file the workers of sync mode expect TLS of "
            "each other, and each needs a certificate for that"
        )
    if not is_loopback(host) and security.token is None:
        raise ConfigError(
            f"token: must be set: sync mode listens on {host} for the other workers, and takes "
            "gradients from any caller that shows it"
        )
    pace = SyncPace(
        host,
        link,
        security,
        Patience(spec.step_limit_s, spec.straggler_factor),
        tells_predictions=spec.progressive is not None,
    )
    link.lead_at(pace.address)
    return pace


def own_host(address: str) -> str:
    """Return the address of this machine from which that one is reached."""
    host, port = split_address("endpoint", address)
    family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        # Connecting a datagram socket sends nothing: the system chooses the way.
        probe.connect(place)
        own: str = probe.getsockname()[0]
    return f"[{own}]" if ":" in own else own


def _asked_of_leader(task: Task, call: Callable[[], T]) -> T | None:
    """Make a call to the leader; None if it is gone or no longer leads.

    The job master knows which worker leads.
    """
    try:
        return call()
    except (NotLeading, ServerUnavailable, DeadlineExceeded, ClosedError) as error:
        _LOG.info("task %d-%d is not followed any more: %s", task.round, task.number, error)
        return None


def _batch(feed: TaskFeed, number: int) -> ReadyBatch:
    """Take batches up to the one of this number, which must come."""
    for fed in feed:
        if fed.number == number:
            return fed
    raise DataChanged(f"the task has no batch {number} here: is the data the same as the leader's?")
