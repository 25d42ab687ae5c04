"""One process's call stream on the job master: many calls in a message, each answered when ready.

Signs of life are answered at once. Other calls wait for tasks or for the journal and run beside
each other. Answers that are ready at the same time share a message. Imports the generated messages
and ``backstay.rpc``; decides nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

from grpc import aio

from backstay import rpc
from backstay._proto.v1 import job_pb2
from backstay.errors import BackstayError, NotJobMaster, ServerUnavailable

__all__ = ["WAITING_MAX", "CallStream"]

# Calls of one stream that wait for their answers. Beyond that a call is refused, and the caller
# repeats it: signs of life behind it must not wait.
WAITING_MAX = 1024

Handlers: TypeAlias = Mapping[str, Callable[[Any], Awaitable[Any]]]

log = logging.getLogger(__name__)


class CallStream:
    """One stream, in the job master; belongs to one event loop."""

    def __init__(
        self,
        renew: Callable[[job_pb2.RenewLeasesRequest], job_pb2.RenewLeasesResponse],
        handlers: Handlers,
        context: aio.ServicerContext[job_pb2.WorkerCalls, job_pb2.WorkerAnswers],
    ) -> None:
        """Prepare.

        Args:
            renew: Answers a sign of life.
            handlers: Answer the other calls, by the name of their field.
            context: Of the gRPC call.
        """
        self._renew = renew
        self._handlers = handlers
        self._context = context
        self._waiting: set[asyncio.Task[None]] = set()
        self._is_stopping = False
        self._answers: list[job_pb2.WorkerAnswer] = []
        # gRPC takes one message at a time.
        self._writing = asyncio.Lock()

    async def serve(self, stopping: asyncio.Future[None]) -> None:
        """Answer calls until the process ends the stream.

        Args:
            stopping: Done when this server stops: the calls that wait then are answered, and the
                stream ends.
        """
        reading = asyncio.create_task(self._read())
        try:
            await asyncio.wait({reading, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                reading.result()
            # The next job master may have begun: it knows of no lease that is renewed here.
            self._is_stopping = True
            if not reading.done() and self._waiting:
                await asyncio.wait(self._waiting)
        finally:
            for task in (reading, *self._waiting):
                task.cancel()

    async def _read(self) -> None:
        while True:
            message: object = await self._context.read()
            if not isinstance(message, job_pb2.WorkerCalls):
                return  # aio.EOF
            ready = []
            for call in message.calls:
                if self._is_stopping:
                    ready.append(_refused(call, NotJobMaster("this job master is stopping")))
                elif call.HasField("renew_leases"):
                    ready.append(await self._answer(call))
                elif len(self._waiting) >= WAITING_MAX:
                    full = ServerUnavailable(f"{WAITING_MAX} calls of the stream wait; repeat it")
                    ready.append(_refused(call, full))
                else:
                    self._begin(call)
            if ready:
                # No more is read until these are sent: a process that does not read waits itself.
                await self._send(ready)

    def _begin(self, call: job_pb2.WorkerCall) -> None:
        task = asyncio.create_task(self._answer_later(call))
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    async def _answer_later(self, call: job_pb2.WorkerCall) -> None:
        await self._send([await self._answer(call)])

    async def _answer(self, call: job_pb2.WorkerCall) -> job_pb2.WorkerAnswer:
        """Return the answer to a call, or the error that it meets."""
        answer = job_pb2.WorkerAnswer(id=call.id)
        try:
            name = call.WhichOneof("call")
            if name == "renew_leases":
                answer.renew_leases.CopyFrom(self._renew(call.renew_leases))
            elif name is None:
                raise ServerUnavailable("this job master does not know the call; a newer one may")
            else:
                response = await self._handlers[name](getattr(call, name))
                getattr(answer, name).CopyFrom(response)
        except BackstayError as error:
            return _refused(call, error)
        except Exception as error:
            log.exception("a worker's call failed; this is a bug")
            answer.error.text = repr(error)
        return answer

    async def _send(self, answers: list[job_pb2.WorkerAnswer]) -> None:
        """Send answers, and those of others that wait meanwhile in the same message."""
        self._answers += answers
        async with self._writing:
            if self._answers:
                ready, self._answers = self._answers, []
                try:
                    await self._context.write(job_pb2.WorkerAnswers(answers=ready))
                except Exception:
                    # grpcio has several classes for it; the next read says that the stream is over.
                    log.debug("the call stream is closed; its answers are dropped", exc_info=True)


def _refused(call: job_pb2.WorkerCall, error: BackstayError) -> job_pb2.WorkerAnswer:
    """Return the error that a call meets, as its answer."""
    _, text, metadata = rpc.status_of(error)
    said = job_pb2.CallError(error=metadata[0][1], text=text)
    return job_pb2.WorkerAnswer(id=call.id, error=said)
