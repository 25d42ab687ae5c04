"""``StoreService``: the coordination store for those who reach it through a node.

Every node serves it. The store of the nodes themselves is served whole to other nodes; one that
is shared with others, an etcd, only below one prefix.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from grpc import aio

from backstay import rpc
from backstay._proto.v1 import store_pb2, store_pb2_grpc
from backstay.consensus import store as values
from backstay.consensus.store import CoordinationStore, RangeResult, check_key
from backstay.consensus.store.messages import (
    batch_to_message,
    range_to_message,
    result_to_message,
    txn_from_message,
)
from backstay.errors import (
    BackstayError,
    ClosedError,
    InvalidRequest,
    Stopping,
    StoreUnavailable,
)

__all__ = ["StoreService"]

SIGN_OF_LIFE_S = 1.0


class StoreService(store_pb2_grpc.StoreServiceServicer):
    """Passes calls on to a store in this process."""

    def __init__(
        self,
        store: CoordinationStore,
        has_leader: Callable[[], bool],
        *,
        only_below: str = "",
    ) -> None:
        """Prepare.

        Args:
            store: Usually an ``EmbeddedStore``.
            has_leader: Whether this member is in touch with the group; a watch ends when not.
            only_below: Serve keys that begin with this and no others; empty: all.
        """
        self._store = store
        self._has_leader = has_leader
        self._only_below = only_below

    async def Range(  # noqa: N802 (the name is the service's)
        self,
        request: store_pb2.StoreRangeRequest,
        context: aio.ServicerContext[Any, Any],
    ) -> store_pb2.StoreRangeResponse:
        """Return all keys of a prefix, or one key."""
        self._check(request.prefix)
        if request.single:
            check_key(request.prefix)
        result = await self._store.range(request.prefix)
        if request.single:
            items = tuple(item for item in result.items if item.key == request.prefix)
            result = RangeResult(items, result.revision)
        return range_to_message(result)

    def _check(self, *keys: str) -> None:
        """Refuse keys that are not for those who come this way."""
        for key in keys:
            if not key.startswith(self._only_below):
                raise InvalidRequest(
                    f"key {key!r}: only those below {self._only_below!r} are served here; the "
                    "cluster's own records are to be read in its store"
                )

    async def Transact(  # noqa: N802
        self,
        request: store_pb2.StoreTransactRequest,
        context: aio.ServicerContext[Any, Any],
    ) -> store_pb2.StoreTransactResponse:
        """Compare, then do one of two lists of operations."""
        txn = txn_from_message(request)
        self._check(*(part.key for part in (*txn.compare, *txn.success, *txn.failure)))
        return result_to_message(await self._store.transaction(txn))

    async def GrantLease(  # noqa: N802
        self,
        request: store_pb2.StoreGrantLeaseRequest,
        context: aio.ServicerContext[Any, Any],
    ) -> store_pb2.StoreGrantLeaseResponse:
        """Return a new lease."""
        lease = await self._store.lease_grant(request.ttl_ms)
        return store_pb2.StoreGrantLeaseResponse(lease=lease.id, ttl_ms=lease.ttl_ms)

    async def KeepLease(  # noqa: N802
        self,
        request: store_pb2.StoreKeepLeaseRequest,
        context: aio.ServicerContext[Any, Any],
    ) -> store_pb2.StoreKeepLeaseResponse:
        """Give a lease its full time again."""
        ttl_ms = await self._store.lease_keepalive(request.lease)
        return store_pb2.StoreKeepLeaseResponse(ttl_ms=ttl_ms)

    async def RevokeLease(  # noqa: N802
        self,
        request: store_pb2.StoreRevokeLeaseRequest,
        context: aio.ServicerContext[Any, Any],
    ) -> store_pb2.StoreRevokeLeaseResponse:
        """End a lease."""
        await self._store.lease_revoke(request.lease)
        return store_pb2.StoreRevokeLeaseResponse()

    async def Watch(  # noqa: N802
        self,
        request: store_pb2.StoreWatchRequest,
        context: aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[store_pb2.StoreWatchResponse]:
        """Stream the changes of a prefix, and signs of life."""
        try:
            self._check(request.prefix)
            async with self._store.watch(request.prefix, request.start_revision) as watch:
                async for message in self._stream(watch):
                    yield message
        except ClosedError:
            await _abort(context, Stopping("the member of the store is shutting down"))
        except BackstayError as error:
            await _abort(context, error)

    async def _stream(self, watch: values.Watch) -> AsyncIterator[store_pb2.StoreWatchResponse]:
        """Yield batches as they come and a sign of life while none does."""
        step = asyncio.ensure_future(anext(watch))
        try:
            # At once, so that the client knows that it is being served.
            yield store_pb2.StoreWatchResponse()
            while True:
                await asyncio.wait([step], timeout=SIGN_OF_LIFE_S)
                if step.done():
                    yield batch_to_message(step.result())
                    step = asyncio.ensure_future(anext(watch))
                elif self._has_leader():
                    yield store_pb2.StoreWatchResponse()
                else:
                    raise StoreUnavailable("this member of the store knows no leader")
        finally:
            step.cancel()
            await asyncio.gather(step, return_exceptions=True)


async def _abort(context: aio.ServicerContext[Any, Any], error: BackstayError) -> None:
    """End a stream with an error, as the control server does for single answers."""
    code, text, metadata = rpc.status_of(error)
    await context.abort(code, text, metadata)
