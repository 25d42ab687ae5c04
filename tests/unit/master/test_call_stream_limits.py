"""A process that sends calls and reads no answers makes the job master keep a bounded number."""

from __future__ import annotations

import asyncio
from typing import Any

from backstay._proto.v1 import job_pb2
from backstay.master.call_stream import WAITING_MAX, CallStream
from backstay.tasks import end_tasks

CALLS_PER_MESSAGE = 100
# Of the event loop; a stream that is read without a limit has read far more by then.
TURNS = 200


class Deaf:
    """The context of a stream whose other end sends on and on, and never reads."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.read_calls = 0

    async def read(self) -> job_pb2.WorkerCalls:
        message = job_pb2.WorkerCalls()
        for _ in range(CALLS_PER_MESSAGE):
            self.read_calls += 1
            getattr(message.calls.add(id=self.read_calls), self.name).SetInParent()
        await asyncio.sleep(0)
        return message

    async def write(self, _: job_pb2.WorkerAnswers) -> None:
        await asyncio.Event().wait()


async def calls_read(name: str) -> int:
    context = Deaf(name)

    async def waits(_: job_pb2.GetTaskRequest) -> Any:
        await asyncio.Event().wait()

    stream = CallStream(lambda _: job_pb2.RenewLeasesResponse(), {"get_task": waits}, context)  # type: ignore[arg-type]
    never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(stream.serve(never))
    for _ in range(TURNS):
        await asyncio.sleep(0)
    await end_tasks(serving)
    return context.read_calls


def test_signs_of_life_are_read_when_the_last_answers_are_sent() -> None:
    assert asyncio.run(calls_read("renew_leases")) == CALLS_PER_MESSAGE


def test_calls_beyond_the_limit_are_read_when_their_refusal_is_sent() -> None:
    assert asyncio.run(calls_read("get_task")) <= WAITING_MAX + CALLS_PER_MESSAGE
