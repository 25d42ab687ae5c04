"""Sync mode, between workers: the service of a task's leader, and the calls of its followers.

Gradients travel by gRPC between the workers of a step; rows stay between workers and servers. A
thread of its own runs the service; the training thread cuts, computes, gathers. May import
:mod:`backstay.rpc`, the control server and this package.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from grpc import aio
from numpy.typing import NDArray

from backstay import rpc
from backstay._proto.v1 import sync_pb2, sync_pb2_grpc
from backstay.config import Pems, SecurityConfig
from backstay.control_server import ControlServer
from backstay.errors import InvalidRequest, NotLeading
from backstay.trainer.modes.gathering import Gradient, Piece
from backstay.trainer.modes.step_book import Contribution, StepBook

__all__ = ["FollowedTask", "LedTask", "StepLeader", "gradients_of", "parts_of"]

_LOG = logging.getLogger(__name__)

# Below the limit of a message, with room for keys.
PART_BYTES_MAX = 8 * 1024 * 1024
# 1 GiB of float32: far more than a dense tensor should have in one table.
ELEMENTS_MAX = 1 << 28
START_LIMIT_S = 10.0
STOP_GRACE_S = 1.0


@dataclass(frozen=True)
class LedTask:
    """A training task in the hands of one worker.

    Attributes:
        round: The pass.
        number: Of the task.
        attempt: Of the lease.
    """

    round: int
    number: int
    attempt: int

    def to_message(self) -> sync_pb2.LedTask:
        """Return it as it travels."""
        return sync_pb2.LedTask(round=self.round, number=self.number, attempt=self.attempt)

    @classmethod
    def of(cls, message: sync_pb2.LedTask) -> LedTask:
        """Return what a message says."""
        return cls(message.round, message.number, message.attempt)


@dataclass(frozen=True)
class _Listening:
    """What a control server asks for."""

    listen_control: str
    security: SecurityConfig

    @property
    def token(self) -> str | None:
        """What every caller must show."""
        return self.security.token

    @property
    def tls_require_client_cert(self) -> bool:
        """The token is what callers are known by."""
        return False

    def read_pems(self) -> Pems:
        """Read the certificate files."""
        return self.security.read_pems()


class StepLeader(sync_pb2_grpc.SyncServiceServicer):
    """Serves the followers of the task that this worker leads. A context manager."""

    def __init__(self, host: str, security: SecurityConfig) -> None:
        """Prepare.

        Args:
            host: Where to listen, on a port of the system's choice.
            security: Token and, with a certificate, TLS.
        """
        self._listening = _Listening(f"{host}:0", security)
        self._changed = threading.Condition()
        self._task: LedTask | None = None
        self._book = StepBook()
        self._queues: dict[int, asyncio.Queue[sync_pb2.SyncStep | None]] = {}
        self._names: dict[int, str] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sync", daemon=True)
        self._server: ControlServer | None = None
        self.address = ""

    def __enter__(self) -> StepLeader:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Listen.

        Raises:
            ListenError: The host cannot be listened on.
        """
        self._thread.start()
        self._wait_for(self._serve())

    def close(self) -> None:
        """End the task and the service."""
        self.end_task()
        if self._server is not None:
            self._wait_for(self._server.stop(STOP_GRACE_S))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # -- the training thread --------------------------------------------------------------

    def begin_task(self, task: LedTask) -> None:
        """Lead a task: followers may come."""
        self.end_task()
        with self._changed:
            self._task = task
            self._book = StepBook()

    def end_task(self) -> None:
        """Stop leading; the followers' streams end."""
        with self._changed:
            self._task = None
            queues, self._queues = list(self._queues.values()), {}
            self._names = {}
        for queue in queues:
            self._loop.call_soon_threadsafe(queue.put_nowait, None)

    @property
    def followers(self) -> Sequence[int]:
        """Instances of those who take part now."""
        with self._changed:
            return self._book.followers

    def cut(self, batch: int, records: int) -> Piece:
        """Give each follower its piece of a batch; return the leader's own."""
        with self._changed:
            own, pieces = self._book.begin(batch, records)
            for follower, piece in pieces.items():
                step = sync_pb2.SyncStep(
                    batch=batch, first_record=piece.first, record_count=piece.count
                )
                queue = self._queues[follower]
                self._loop.call_soon_threadsafe(queue.put_nowait, step)
        return own

    @property
    def partners(self) -> Sequence[int]:
        """Instances of those who have a piece of the step that was cut last."""
        with self._changed:
            return self._book.partners

    def awaited(self) -> list[str]:
        """Return the names of those whose piece is still to come; from any thread."""
        with self._changed:
            return [self._names.get(one, str(one)) for one in self._book.awaited()]

    def gather(self, patience_s: float) -> tuple[list[Contribution], list[Piece]]:
        """Wait for the followers' pieces; return what has come, and what the leader must do itself.

        Args:
            patience_s: After so long, who has not delivered loses its place.
        """
        until_s = time.monotonic() + patience_s
        with self._changed:
            while self._book.awaited():
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    for late in self._book.awaited():
                        _LOG.warning(
                            "worker %s has not delivered its piece in %.1f s: it loses its place, "
                            "and this worker computes the piece",
                            self._names[late],
                            patience_s,
                        )
                        self._drop(late)
                    break
                self._changed.wait(left_s)
            return self._book.finish()

    # -- the service's thread -------------------------------------------------------------

    async def Follow(  # noqa: N802 (the name is the service's)
        self, request: sync_pb2.FollowRequest, context: aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[sync_pb2.SyncStep]:
        """Let a worker take part."""
        queue: asyncio.Queue[sync_pb2.SyncStep | None] = asyncio.Queue()
        with self._changed:
            self._check_leading(request.task)
            self._book.join(request.instance)
            self._names[request.instance] = request.worker_id or str(request.instance)
            self._queues[request.instance] = queue
            self._changed.notify_all()
        try:
            while (step := await queue.get()) is not None:
                yield step
        finally:
            with self._changed:
                # Another stream of the same worker may have taken its place.
                if self._queues.get(request.instance) is queue:
                    self._drop(request.instance)
                    self._changed.notify_all()

    async def Contribute(  # noqa: N802
        self, request: sync_pb2.ContributeRequest, context: aio.ServicerContext[Any, Any]
    ) -> sync_pb2.ContributeResponse:
        """Take a part of a follower's gradients."""
        gradients = gradients_of(request.gradients)
        predictions = np.frombuffer(request.predictions, "<f4") if request.predictions else None
        with self._changed:
            self._check_leading(request.task)
            taken = self._book.take(
                request.instance,
                request.batch,
                gradients,
                is_last=request.last,
                loss=request.loss,
                predictions=predictions,
            )
            self._changed.notify_all()
        return sync_pb2.ContributeResponse(taken=taken)

    def _check_leading(self, task: sync_pb2.LedTask) -> None:
        if self._task is None or LedTask.of(task) != self._task:
            raise NotLeading(
                f"this worker does not lead task {task.number} of pass {task.round} (attempt "
                f"{task.attempt}); ask the job master again"
            )

    def _drop(self, follower: int) -> None:
        self._book.leave(follower)
        queue = self._queues.pop(follower, None)
        if queue is not None:
            self._loop.call_soon_threadsafe(queue.put_nowait, None)

    async def _serve(self) -> None:
        server = ControlServer(self._listening)
        sync_pb2_grpc.add_SyncServiceServicer_to_server(self, server.services)
        await server.start(["backstay.v1.SyncService"])
        await server.set_serving()
        self._server, self.address = server, server.address

    def _wait_for(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(START_LIMIT_S)


class FollowedTask:
    """A task that another worker leads: its steps in, gradients out."""

    def __init__(
        self,
        address: str,
        task: LedTask,
        instance: int,
        security: SecurityConfig,
        deadline_ms: int,
        worker_id: str = "",
    ) -> None:
        """Prepare; nothing is asked yet.

        Args:
            address: Of the leader.
            task: What it leads.
            instance: Of this process.
            security: Token and TLS.
            deadline_ms: Of one call.
            worker_id: Name of this worker, for people.
        """
        self._worker_id = worker_id
        self._address = address
        self._task = task.to_message()
        self._instance = instance
        self._timeout_s = deadline_ms / 1000
        self._channel = rpc.open_channel(address, security, tls_name=security.job_tls_name)
        self._stub = sync_pb2_grpc.SyncServiceStub(self._channel)
        self._call: Any = None

    def next_step(self) -> tuple[int, Piece] | None:
        """Wait for a step: (batch, piece); None: the leader has ended the task or dropped this one.

        Raises:
            NotLeading: It does not lead that task.
            ServerUnavailable: The leader is gone.
            ClosedError: :meth:`cancel` was called.
        """
        with rpc.mapped_errors(self._address):
            if self._call is None:
                request = sync_pb2.FollowRequest(
                    task=self._task, instance=self._instance, worker_id=self._worker_id
                )
                self._call = self._stub.Follow(request)
            step = next(self._call, None)
        if step is None:
            return None
        return step.batch, Piece(step.first_record, step.record_count)

    def contribute(
        self,
        batch: int,
        gradients: Sequence[Gradient],
        loss: float,
        predictions: NDArray[Any] | None = None,
    ) -> bool:
        """Send the gradients of this worker's piece; return whether they were wanted.

        Args:
            batch: Number of the batch.
            gradients: Of the piece.
            loss: Mean over it.
            predictions: What the model answered. It is told if it is one number for each record.

        Raises:
            NotLeading, ServerUnavailable, DeadlineExceeded: The leader is gone or no longer leads.
        """
        taken = True
        messages = list(parts_of(gradients))
        answers = b""
        if predictions is not None and predictions.size == len(predictions):
            answers = predictions.astype("<f4").tobytes()
        with rpc.mapped_errors(self._address):
            for number, part in enumerate(messages):
                is_last = number == len(messages) - 1
                request = sync_pb2.ContributeRequest(
                    task=self._task, instance=self._instance, batch=batch, gradients=part,
                    last=is_last, loss=loss, predictions=answers if is_last else b"",
                )  # fmt: skip
                taken = self._stub.Contribute(request, timeout=self._timeout_s).taken
                if not taken:
                    break
        return taken

    def cancel(self) -> None:
        """End :meth:`next_step`; from any thread."""
        if self._call is not None:
            self._call.cancel()

    def close(self) -> None:
        """End everything."""
        self.cancel()
        self._channel.close()


def parts_of(gradients: Sequence[Gradient]) -> Iterator[list[sync_pb2.TableGradient]]:
    """Yield gradients as messages, cut so that each list fits into one; at least one list."""
    part: list[sync_pb2.TableGradient] = []
    room = PART_BYTES_MAX
    for gradient in gradients:
        for message in _messages_of(gradient):
            size = len(message.values) + len(message.keys) + len(message.counts)
            if part and size > room:
                yield part
                part, room = [], PART_BYTES_MAX
            part.append(message)
            room -= size
    yield part


def _messages_of(gradient: Gradient) -> Iterator[sync_pb2.TableGradient]:
    values = np.ascontiguousarray(gradient.values, "<f4")
    common: dict[str, Any] = {
        "table": gradient.table,
        "learning_rate_scale": gradient.scale,
    }
    if gradient.keys is None:
        flat = values.reshape(-1)
        step = PART_BYTES_MAX // 4
        for offset in range(0, flat.size, step):
            piece = flat[offset : offset + step].tobytes()
            yield sync_pb2.TableGradient(values=piece, offset=offset, elements=flat.size, **common)
        return
    dim = values.shape[1]
    rows = max(1, PART_BYTES_MAX // (16 + 4 * dim))
    keys = np.ascontiguousarray(gradient.keys, "<u8")
    told = np.empty((0, 2)) if gradient.counts is None else gradient.counts
    counts = np.ascontiguousarray(told, "<f4")
    for first in range(0, len(keys), rows):
        yield sync_pb2.TableGradient(
            keys=keys[first : first + rows].tobytes(),
            values=values[first : first + rows].tobytes(),
            counts=counts[first : first + rows].tobytes(),
            dim=dim,
            **common,
        )


def gradients_of(messages: Sequence[sync_pb2.TableGradient]) -> list[Gradient]:
    """Return what messages say; a dense tensor may be in several parts.

    Raises:
        InvalidRequest: The sizes of one do not fit.
    """
    return [_gradient_of(message) for message in messages]


def _gradient_of(message: sync_pb2.TableGradient) -> Gradient:
    values = np.frombuffer(message.values, "<f4")
    scale = message.learning_rate_scale
    if message.dim:
        keys = np.frombuffer(message.keys, "<u8")
        if values.size != keys.size * message.dim:
            raise InvalidRequest(
                f"gradient of {message.table!r}: {values.size} numbers for {keys.size} rows of "
                f"{message.dim}"
            )
        counts = np.frombuffer(message.counts, "<f4")
        if counts.size not in (0, 2 * keys.size):
            raise InvalidRequest(
                f"gradient of {message.table!r}: {counts.size} shows and clicks for {keys.size} "
                "keys"
            )
        rows = values.reshape(len(keys), message.dim)
        told = counts.reshape(-1, 2) if counts.size else None
        return Gradient(message.table, keys, rows, scale, counts=told)
    if not message.offset + values.size <= message.elements <= ELEMENTS_MAX:
        raise InvalidRequest(
            f"gradient of {message.table!r}: {values.size} numbers at {message.offset} of "
            f"{message.elements}"
        )
    return Gradient(message.table, None, values, scale, message.offset, message.elements)
