"""The embedded store, reached through its members by gRPC: for other nodes and for tools.

Calls go to one member and to the next if it does not answer; watches resume behind the last
batch. Belongs to one event loop.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import grpc
from grpc import aio

from backstay import rpc
from backstay._proto.v1 import store_pb2, store_pb2_grpc
from backstay.config import SecurityConfig
from backstay.consensus.store import (
    CoordinationStore,
    KeyValue,
    Lease,
    RangeResult,
    Txn,
    TxnResult,
    Watch,
    WatchBatch,
    check_key,
    check_ttl,
)
from backstay.consensus.store.failover import Failure, Members, ResumingWatch
from backstay.consensus.store.messages import (
    batch_from_message,
    range_from_message,
    result_from_message,
    txn_to_message,
)
from backstay.errors import (
    ProtocolError,
    Stopping,
    StoreAuthError,
    StoreDataLost,
    StoreError,
    StoreUnavailable,
    TransportError,
    Unauthenticated,
)

__all__ = ["RemoteStore"]

DEFAULT_DEADLINE_MS = 3000
SILENCE_S = 3.0
_NEVER_SENT = ("connection refused", "does not resolve", "no route to host")


class RemoteStore(CoordinationStore):
    """A client of the embedded store; it connects when it is first used."""

    def __init__(
        self,
        endpoints: Sequence[str],
        security: SecurityConfig | None = None,
        *,
        deadline_ms: int = DEFAULT_DEADLINE_MS,
    ) -> None:
        """Prepare.

        Args:
            endpoints: Control addresses of the members.
            security: Token and TLS of the cluster.
            deadline_ms: For each call as a whole.
        """
        self._security = security or SecurityConfig()
        self._revision_seen = 0
        self._members = Members(
            endpoints,
            lambda endpoint: rpc.open_aio_channel(endpoint, self._security),
            self._classify,
            deadline_ms,
        )

    async def get(self, key: str) -> KeyValue | None:
        """Return a key, None if it is not there."""
        check_key(key)
        request = store_pb2.StoreRangeRequest(prefix=key, single=True)
        result = range_from_message(await self._read(request))
        return result.items[0] if result.items else None

    async def range(self, prefix: str) -> RangeResult:
        """Return all keys that begin with a prefix."""
        return range_from_message(await self._read(store_pb2.StoreRangeRequest(prefix=prefix)))

    async def transaction(self, txn: Txn) -> TxnResult:
        """Compare, then do one of two lists of operations."""
        seen = self._revision_seen
        response = await self._call(
            lambda stub: stub.Transact, txn_to_message(txn), repeatable=False
        )
        self._check_revision(response.revision, seen)
        return result_from_message(response)

    async def lease_grant(self, ttl_ms: int) -> Lease:
        """Return a new lease."""
        check_ttl(ttl_ms)
        request = store_pb2.StoreGrantLeaseRequest(ttl_ms=ttl_ms)
        response = await self._call(lambda stub: stub.GrantLease, request, repeatable=True)
        return Lease(response.lease, response.ttl_ms)

    async def lease_keepalive(self, lease: int) -> int:
        """Give the lease its full time again and return it."""
        request = store_pb2.StoreKeepLeaseRequest(lease=lease)
        response = await self._call(lambda stub: stub.KeepLease, request, repeatable=True)
        return int(response.ttl_ms)

    async def lease_revoke(self, lease: int) -> None:
        """End a lease and remove its keys."""
        request = store_pb2.StoreRevokeLeaseRequest(lease=lease)
        await self._call(lambda stub: stub.RevokeLease, request, repeatable=True)

    def watch(self, prefix: str, start_revision: int) -> Watch:
        """Return the changes of a prefix from a revision on."""

        def open_stream(
            _endpoint: str, channel: aio.Channel, revision: int
        ) -> AsyncGenerator[WatchBatch | None, None]:
            return self._watch_stream(channel, prefix, revision)

        return ResumingWatch(self._members, open_stream, start_revision, SILENCE_S)

    async def close(self) -> None:
        """End the watches and close the connections."""
        await self._members.close()

    async def _watch_stream(
        self, channel: aio.Channel, prefix: str, revision: int
    ) -> AsyncGenerator[WatchBatch | None, None]:
        # Interceptors for streams would be needed for the token otherwise.
        token = self._security.token
        metadata = () if token is None else ((rpc.AUTHORIZATION_KEY, rpc.bearer(token)),)
        request = store_pb2.StoreWatchRequest(prefix=prefix, start_revision=revision)
        call = _stub(channel).Watch(request, metadata=metadata)
        try:
            async for message in call:
                batch = batch_from_message(message)
                if batch is not None:
                    self._revision_seen = max(self._revision_seen, batch.revision)
                yield batch
        finally:
            call.cancel()

    async def _read(self, request: store_pb2.StoreRangeRequest) -> store_pb2.StoreRangeResponse:
        seen = self._revision_seen
        response: store_pb2.StoreRangeResponse = await self._call(
            lambda stub: stub.Range, request, repeatable=True
        )
        self._check_revision(response.revision, seen)
        return response

    async def _call(
        self, method: Callable[[Any], Any], request: object, *, repeatable: bool
    ) -> Any:
        async def attempt(_endpoint: str, channel: aio.Channel, timeout_s: float) -> Any:
            return await method(_stub(channel))(request, timeout=timeout_s)

        return await self._members.call(attempt, repeatable=repeatable)

    def _check_revision(self, revision: int, seen: int) -> None:
        """Notice a store that has lost its data."""
        if revision < seen:
            error = StoreDataLost(
                f"the embedded store has lost its data: revision {seen} was seen, now it stands "
                f"at {revision}; restart the nodes"
            )
            self._members.fail(error)
            raise error
        self._revision_seen = max(self._revision_seen, revision)

    def _classify(self, error: aio.AioRpcError, endpoint: str) -> Failure:
        meant = rpc.error_of(error, endpoint)
        if isinstance(meant, (Unauthenticated, StoreAuthError)):
            return Failure(StoreAuthError(str(meant)))
        if isinstance(meant, StoreUnavailable):
            return Failure(meant, elsewhere=True, applied=True)
        if isinstance(meant, Stopping):
            return Failure(StoreUnavailable(str(meant)), elsewhere=True)
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            text = f"{endpoint} does not serve the store; is it of another version?"
            return Failure(StoreUnavailable(text), elsewhere=True)
        if isinstance(meant, TransportError):
            never_sent = any(sign in str(meant) for sign in _NEVER_SENT)
            wrong_port = isinstance(meant, ProtocolError)
            return Failure(
                StoreUnavailable(str(meant)), elsewhere=True, applied=not (never_sent or wrong_port)
            )
        if isinstance(meant, StoreError):
            return Failure(meant)
        return Failure(meant)


def _stub(channel: aio.Channel) -> store_pb2_grpc.StoreServiceAsyncStub:
    # At run time there is one class of stubs for both kinds of channels.
    return store_pb2_grpc.StoreServiceStub(channel)
