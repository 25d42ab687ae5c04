"""A control server takes a crowd that calls at once; refused callers may call again."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from grpc import aio

from backstay import rpc
from backstay._proto.v1 import job_pb2, job_pb2_grpc
from backstay.config import Pems, SecurityConfig
from backstay.control_server import ControlServer
from backstay.errors import ClosedError, ServerUnavailable, Unauthenticated

# gRPC by itself turns calls away at random when 1000 wait, and every call when 3000 do.
CROWD = 4000
LIMIT_S = 120.0
NOBODY = job_pb2.LeaveRequest()


@dataclass(frozen=True)
class Listens:
    listen_control: str = "127.0.0.1:0"
    token: str | None = None
    tls_require_client_cert: bool = False

    def read_pems(self) -> Pems:
        return Pems(None, None, None)


class Service(job_pb2_grpc.JobServiceServicer):
    """Answers who leaves, and never who joins."""

    def __init__(self) -> None:
        self.joining = asyncio.Event()

    async def Leave(  # noqa: N802 (the name is the service's)
        self, request: job_pb2.LeaveRequest, context: aio.ServicerContext[object, object]
    ) -> job_pb2.LeaveResponse:
        return job_pb2.LeaveResponse()

    async def Join(  # noqa: N802
        self, request: job_pb2.JoinRequest, context: aio.ServicerContext[object, object]
    ) -> job_pb2.JoinResponse:
        self.joining.set()
        await asyncio.Event().wait()
        raise AssertionError("it waits for ever")


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[ControlServer, Service]]:
    # The other calls belong to no caller.
    server, service = ControlServer(Listens()), Service()  # type: ignore[abstract]
    job_pb2_grpc.add_JobServiceServicer_to_server(service, server.services)
    await server.start([])
    try:
        yield server, service
    finally:
        await server.stop(0.0)


def test_a_crowd_that_calls_at_once_is_answered() -> None:
    async def scenario() -> None:
        async with (
            serving() as (server, _),
            rpc.open_aio_channel(server.address, SecurityConfig()) as channel,
        ):
            stub = job_pb2_grpc.JobServiceStub(channel)
            calls = [stub.Leave(NOBODY, timeout=LIMIT_S) for _ in range(CROWD)]
            codes = await asyncio.gather(*(call.code() for call in calls))
            assert Counter(codes) == {grpc.StatusCode.OK: CROWD}

    asyncio.run(scenario())


def test_a_call_that_the_server_breaks_off_may_be_repeated() -> None:
    async def scenario() -> None:
        async with (
            serving() as (server, service),
            rpc.open_aio_channel(server.address, SecurityConfig()) as channel,
        ):
            joining = job_pb2_grpc.JobServiceStub(channel).Join(job_pb2.JoinRequest())
            await service.joining.wait()
            await server.stop(0.0)
            with pytest.raises(ServerUnavailable), rpc.mapped_errors(server.address):
                await joining

    asyncio.run(scenario())


def test_a_call_of_a_channel_that_we_close_is_closed() -> None:
    async def scenario() -> None:
        async with serving() as (server, service):
            channel = rpc.open_channel(server.address, SecurityConfig())
            stub = job_pb2_grpc.JobServiceStub(channel)
            joining = stub.Join.future(job_pb2.JoinRequest(), timeout=LIMIT_S)
            await service.joining.wait()
            channel.close()
            with pytest.raises(ClosedError), rpc.mapped_errors(server.address):
                await asyncio.to_thread(joining.result, LIMIT_S)

    asyncio.run(scenario())


@pytest.mark.parametrize("token", [None, "secret-of-the-cluster"])
def test_a_service_may_be_added_while_the_server_runs(token: str | None) -> None:
    """Until then every call of it says so, whatever its shape; others are unknown."""
    not_yet = ServerUnavailable("not yet; ask again")

    async def scenario() -> None:
        server = ControlServer(Listens(token=token))
        await server.start(["backstay.v1.JobService"], not_yet)
        security = SecurityConfig(token=token)
        async with rpc.open_aio_channel(server.address, security) as channel:
            stub = job_pb2_grpc.JobServiceStub(channel)
            with pytest.raises(ServerUnavailable, match="not yet"), rpc.mapped_errors("there"):
                await stub.Leave(NOBODY, timeout=LIMIT_S)
            with pytest.raises(ServerUnavailable, match="not yet"), rpc.mapped_errors("there"):
                # Its requests never end.
                await anext(aiter(stub.CallStream(timeout=LIMIT_S)))
            other = job_pb2_grpc.JobServiceStub(channel)
            job_pb2_grpc.add_JobServiceServicer_to_server(Service(), server.services)  # type: ignore[abstract]
            await other.Leave(NOBODY, timeout=LIMIT_S)
            unknown: Any = channel.unary_unary("/backstay.v1.OtherService/Leave")
            with pytest.raises(grpc.RpcError) as raised:
                await unknown(b"", timeout=LIMIT_S)
            assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
        if token is not None:
            async with rpc.open_aio_channel(server.address, SecurityConfig()) as channel:
                with pytest.raises(Unauthenticated), rpc.mapped_errors("there"):
                    await job_pb2_grpc.JobServiceStub(channel).Leave(NOBODY, timeout=LIMIT_S)
        await server.stop(0.0)

    asyncio.run(scenario())
