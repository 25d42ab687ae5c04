"""The coordination store in etcd (3.4 or later), for production.

Messages and stubs come from aetcd; its client is not used, because it has no TLS and no list of
endpoints, and its watches end with the connection. All keys lie below ``/<cluster>/``, so that
several clusters can share one etcd. Belongs to one event loop; reads no wall clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from aetcd import rpc as etcd
from grpc import aio

from backstay import rpc
from backstay.consensus.store import (
    Compare,
    CoordinationStore,
    Event,
    Get,
    KeyValue,
    Lease,
    Operation,
    Put,
    RangeResult,
    Txn,
    TxnResult,
    Watch,
    WatchBatch,
    check_key,
    check_ttl,
)
from backstay.consensus.store.failover import Failure, Members, ResumingWatch
from backstay.errors import (
    InvalidRequest,
    LeaseLost,
    StoreAuthError,
    StoreDataLost,
    StoreError,
    StoreUnavailable,
    WatchLost,
)

__all__ = ["EtcdStore", "EtcdTls"]

T = TypeVar("T")

DEFAULT_DEADLINE_MS = 3000
PROBE_INTERVAL_S = 1.0
SILENCE_S = 3.0
_OPTIONS = (
    *(option for option in rpc.CHANNEL_OPTIONS if option[0] != "grpc.max_reconnect_backoff_ms"),
    ("grpc.max_reconnect_backoff_ms", 500),
)
# A member that is cut off from the others says so instead of answering from its old state.
_HAS_LEADER = ("hasleader", "true")
_PUT_EVENT = 0
_NEVER_SENT = ("failed to connect to all addresses", "Connection refused", "errors resolving")
# etcd turns these down before anything is proposed.
_NOT_PROPOSED = ("no leader", "not leader", "too many requests", "not healthy", "not capable")
_STALE_TOKEN = ("invalid auth token", "revision in header is old")


@dataclass(frozen=True)
class EtcdTls:
    """PEM for TLS to etcd: the authority, and this client's certificate if it needs one."""

    ca: bytes
    cert: bytes | None = None
    key: bytes | None = None


class EtcdStore(CoordinationStore):
    """A client of etcd; it connects when it is first used."""

    def __init__(
        self,
        endpoints: Sequence[str],
        cluster: str,
        *,
        username: str | None = None,
        password: str | None = None,
        tls: EtcdTls | None = None,
        deadline_ms: int = DEFAULT_DEADLINE_MS,
    ) -> None:
        """Prepare.

        Args:
            endpoints: ``host:port`` of each member's client URL.
            cluster: Keys lie below ``/<cluster>/``.
            username: Together with a password, if etcd wants them.
            password: The password.
            tls: Turns TLS on.
            deadline_ms: For each call as a whole.
        """
        self._root = f"/{cluster}/"
        self._username, self._password = username, password
        self._tls = tls
        self._token: str | None = None
        self._token_lock = asyncio.Lock()
        self._revision_seen = 0
        self._cluster_id = 0
        self._members = Members(endpoints, self._open_channel, self._classify, deadline_ms)

    async def get(self, key: str) -> KeyValue | None:
        """Return a key, None if it is not there."""
        check_key(key)
        request = etcd.RangeRequest(key=self._full(key))
        response = await self._call(lambda s: etcd.KVStub(s).Range, request, repeatable=True)
        return self._item(response.kvs[0]) if response.kvs else None

    async def range(self, prefix: str) -> RangeResult:
        """Return all keys that begin with a prefix."""
        start = self._full(prefix)
        request = etcd.RangeRequest(key=start, range_end=_end_of(start))
        response = await self._call(lambda s: etcd.KVStub(s).Range, request, repeatable=True)
        return RangeResult(tuple(map(self._item, response.kvs)), response.header.revision)

    async def transaction(self, txn: Txn) -> TxnResult:
        """Compare, then do one of two lists of operations."""
        request = etcd.TxnRequest(
            compare=[self._compare(condition) for condition in txn.compare],
            success=[self._operation(operation) for operation in txn.success],
            failure=[self._operation(operation) for operation in txn.failure],
        )
        response = await self._call(lambda s: etcd.KVStub(s).Txn, request, repeatable=False)
        results = tuple(
            self._item(part.response_range.kvs[0]) if part.response_range.kvs else None
            for part in response.responses
        )
        return TxnResult(response.succeeded, response.header.revision, results)

    async def lease_grant(self, ttl_ms: int) -> Lease:
        """Return a new lease; etcd counts whole seconds and gives two at least."""
        check_ttl(ttl_ms)
        request = etcd.LeaseGrantRequest(TTL=-(-ttl_ms // 1000))
        # One that was granted unseen ends by itself.
        response = await self._call(
            lambda s: etcd.LeaseStub(s).LeaseGrant, request, repeatable=True
        )
        return Lease(response.ID, response.TTL * 1000)

    async def lease_keepalive(self, lease: int) -> int:
        """Give the lease its full time again and return it."""
        request = etcd.LeaseKeepAliveRequest(ID=lease)

        async def once(channel: aio.Channel, timeout_s: float, metadata: Any) -> Any:
            stream = etcd.LeaseStub(channel).LeaseKeepAlive(timeout=timeout_s, metadata=metadata)
            try:
                await stream.write(request)
                answer = await stream.read()
            finally:
                stream.cancel()
            if answer is aio.EOF:
                raise StoreUnavailable("etcd ended a keepalive without an answer")
            return answer

        response = await self._with_token(once, repeatable=True)
        if response.TTL <= 0:
            raise LeaseLost(f"lease {lease:x} is over: it ran out or was revoked")
        return int(response.TTL) * 1000

    async def lease_revoke(self, lease: int) -> None:
        """End a lease and remove its keys."""
        request = etcd.LeaseRevokeRequest(ID=lease)
        try:
            await self._call(lambda s: etcd.LeaseStub(s).LeaseRevoke, request, repeatable=True)
        except LeaseLost:
            return

    def watch(self, prefix: str, start_revision: int) -> Watch:
        """Return the changes of a prefix from a revision on."""
        start = self._full(prefix)

        def open_stream(
            endpoint: str, channel: aio.Channel, revision: int
        ) -> AsyncGenerator[WatchBatch | None, None]:
            return self._watch_stream(endpoint, channel, start, revision)

        return ResumingWatch(self._members, open_stream, start_revision, SILENCE_S)

    async def clear(self) -> int:
        """Remove all keys of the cluster; return how many there were."""
        start = self._full("")
        request = etcd.DeleteRangeRequest(key=start, range_end=_end_of(start))
        response = await self._call(lambda s: etcd.KVStub(s).DeleteRange, request, repeatable=True)
        return int(response.deleted)

    async def close(self) -> None:
        """End the watches and close the connections."""
        await self._members.close()

    # Watching

    async def _watch_stream(
        self, endpoint: str, channel: aio.Channel, start: bytes, revision: int
    ) -> AsyncGenerator[WatchBatch | None, None]:
        """Yield what one stream of one member brings."""
        metadata = await self._metadata(channel, SILENCE_S)
        call = etcd.WatchStub(channel).Watch(_watch_requests(start, revision), metadata=metadata)
        held: list[Event] = []
        try:
            async for response in call:
                if response.compact_revision:
                    raise WatchLost(
                        f"etcd was compacted at revision {response.compact_revision}; events "
                        f"from {revision} on were asked for"
                    )
                if response.canceled:
                    self._raise_cancelled(response.cancel_reason, endpoint)
                held.extend(map(self._event, response.events))
                if response.fragment:
                    continue
                for batch in _batches(held):
                    self._revision_seen = max(self._revision_seen, batch.revision)
                    yield batch
                held.clear()
                yield None
        finally:
            call.cancel()

    def _raise_cancelled(self, reason: str, endpoint: str) -> None:
        if any(sign in reason for sign in _STALE_TOKEN):
            self._token = None
        elif "permission denied" in reason:
            raise StoreAuthError(f"etcd at {endpoint} refuses this user the keys: {reason}")
        raise aio.AioRpcError(
            grpc.StatusCode.UNAVAILABLE,
            aio.Metadata(),
            aio.Metadata(),
            f"watch cancelled: {reason or 'no reason given'}",
        )

    def _event(self, event: Any) -> Event:
        key = self._own(event.kv.key)
        if event.type != _PUT_EVENT:
            return Event("delete", key, "", event.kv.mod_revision)
        item = self._item(event.kv)
        return Event(
            "put",
            key,
            item.value,
            item.mod_revision,
            item.create_revision,
            item.version,
            item.lease,
        )

    # Calls

    async def _call(
        self, method: Callable[[aio.Channel], Any], request: Any, *, repeatable: bool
    ) -> Any:
        async def once(channel: aio.Channel, timeout_s: float, metadata: Any) -> Any:
            return await method(channel)(request, timeout=timeout_s, metadata=metadata)

        # Answers about leases may come from a member that lags behind.
        is_current = not isinstance(request, (etcd.LeaseGrantRequest, etcd.LeaseRevokeRequest))
        seen = self._revision_seen
        response = await self._with_token(once, repeatable=repeatable)
        self._check_header(response.header, seen if is_current else None)
        return response

    async def _with_token(
        self,
        once: Callable[[aio.Channel, float, Any], Awaitable[T]],
        *,
        repeatable: bool,
    ) -> T:
        async def attempt(_endpoint: str, channel: aio.Channel, timeout_s: float) -> T:
            metadata = await self._metadata(channel, timeout_s)
            try:
                return await once(channel, timeout_s, metadata)
            except aio.AioRpcError as error:
                # A token ends by itself after some minutes; nothing was done with a stale one.
                if not any(sign in (error.details() or "") for sign in _STALE_TOKEN):
                    raise
                self._token = None
            return await once(channel, timeout_s, await self._metadata(channel, timeout_s))

        return await self._members.call(attempt, repeatable=repeatable)

    async def _metadata(self, channel: aio.Channel, timeout_s: float) -> Any:
        if self._username is None:
            return (_HAS_LEADER,)
        async with self._token_lock:
            if self._token is None:
                request = etcd.AuthenticateRequest(name=self._username, password=self._password)
                stub = etcd.AuthStub(channel)
                response = await stub.Authenticate(request, timeout=timeout_s)
                self._token = response.token
        return (_HAS_LEADER, ("token", self._token))

    def _check_header(self, header: Any, seen: int | None) -> None:
        """Notice a store that has lost its data, or another one behind the same address."""
        reason = None
        if self._cluster_id and header.cluster_id != self._cluster_id:
            reason = "another etcd cluster answers now"
        elif seen is not None and header.revision < seen:
            reason = f"revision {seen} was seen, now it stands at {header.revision}"
        if reason is not None:
            error = StoreDataLost(
                f"etcd has lost its data: {reason}; was it wiped or restored? Restart the "
                "nodes once it is what it should be"
            )
            self._members.fail(error)
            raise error
        self._cluster_id = header.cluster_id
        if seen is not None:
            self._revision_seen = max(self._revision_seen, header.revision)

    def _open_channel(self, endpoint: str) -> aio.Channel:
        if self._tls is None:
            return aio.insecure_channel(endpoint, options=_OPTIONS)
        credentials = grpc.ssl_channel_credentials(self._tls.ca, self._tls.key, self._tls.cert)
        return aio.secure_channel(endpoint, credentials, options=_OPTIONS)

    def _classify(self, error: aio.AioRpcError, endpoint: str) -> Failure:
        code, details = error.code(), error.details() or ""
        at = f"etcd at {endpoint}"
        if "requested lease not found" in details:
            return Failure(LeaseLost(f"{at}: the lease is over: it ran out or was revoked"))
        if "authentication failed" in details:
            return Failure(StoreAuthError(f"{at} refuses user {self._username!r}: {details}"))
        if "authentication is not enabled" in details:
            return Failure(
                StoreAuthError(f"{at} has no users (auth is not enabled); configure none here")
            )
        if "user name is empty" in details:
            return Failure(StoreAuthError(f"{at} wants user and password; none is configured"))
        if code in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED):
            return Failure(
                StoreAuthError(
                    f"{at} refuses user {self._username!r} below {self._root}: {details}"
                )
            )
        if code is grpc.StatusCode.INVALID_ARGUMENT:
            return Failure(InvalidRequest(f"{at}: {details}"))
        if "database space exceeded" in details:
            return Failure(StoreError(f"{at} is full: {details}; compact and defragment it"))
        return self._unavailable(code, details, at)

    def _unavailable(self, code: grpc.StatusCode, details: str, at: str) -> Failure:
        if "CERTIFICATE_VERIFY_FAILED" in details:
            return Failure(StoreAuthError(f"{at}: its certificate is not trusted: {details}"))
        never_sent = any(sign in details for sign in (*_NEVER_SENT, *_NOT_PROPOSED))
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            reason = "it did not answer in time"
        elif "Connection refused" in details:
            reason = "connection refused; is etcd running there?"
        elif "WRONG_VERSION_NUMBER" in details:
            reason = "it does not speak TLS, which is on here"
        elif ": Socket closed" in details and self._tls is None:
            reason = "it closed the connection; does it want TLS?"
        else:
            reason = details or code.name
        if code is grpc.StatusCode.UNIMPLEMENTED:
            reason = f"it is not an etcd 3.4 or later: {details}"
        return Failure(StoreUnavailable(f"{at}: {reason}"), elsewhere=True, applied=not never_sent)

    # Keys and messages

    def _full(self, key: str) -> bytes:
        return f"{self._root}{key}".encode()

    def _own(self, key: bytes) -> str:
        return key.decode()[len(self._root) :]

    def _item(self, item: Any) -> KeyValue:
        return KeyValue(
            self._own(item.key),
            item.value.decode(),
            item.create_revision,
            item.mod_revision,
            item.version,
            item.lease,
        )

    def _compare(self, condition: Compare) -> Any:
        compare = etcd.Compare(key=self._full(condition.key), result=etcd.Compare.EQUAL)
        if condition.target == "value":
            compare.target = etcd.Compare.VALUE
            compare.value = str(condition.operand).encode()
        elif condition.target == "version":
            compare.target = etcd.Compare.VERSION
            compare.version = int(condition.operand)
        elif condition.target == "mod_revision":
            compare.target = etcd.Compare.MOD
            compare.mod_revision = int(condition.operand)
        else:
            compare.target = etcd.Compare.CREATE
            compare.create_revision = int(condition.operand)
            if condition.target == "exists":
                compare.create_revision = 0
                wanted = etcd.Compare.GREATER if condition.operand else etcd.Compare.EQUAL
                compare.result = wanted
        return compare

    def _operation(self, operation: Operation) -> Any:
        key = self._full(operation.key)
        if isinstance(operation, Put):
            value = operation.value.encode()
            put = etcd.PutRequest(key=key, value=value, lease=operation.lease)
            return etcd.RequestOp(request_put=put)
        if isinstance(operation, Get):
            return etcd.RequestOp(request_range=etcd.RangeRequest(key=key))
        return etcd.RequestOp(request_delete_range=etcd.DeleteRangeRequest(key=key))


async def _watch_requests(start: bytes, revision: int) -> AsyncIterator[Any]:
    """Ask for the watch, then for a sign of life now and then."""
    yield etcd.WatchRequest(
        create_request=etcd.WatchCreateRequest(
            key=start, range_end=_end_of(start), start_revision=revision, fragment=True
        )
    )
    while True:
        await asyncio.sleep(PROBE_INTERVAL_S)
        yield etcd.WatchRequest(progress_request=etcd.WatchProgressRequest())


def _batches(events: Sequence[Event]) -> list[WatchBatch]:
    """Split the events of one answer by revision; etcd never splits a revision over answers."""
    batches: list[WatchBatch] = []
    for event in events:
        if batches and batches[-1].revision == event.revision:
            batches[-1] = WatchBatch(event.revision, (*batches[-1].events, event))
        else:
            batches.append(WatchBatch(event.revision, (event,)))
    return batches


def _end_of(prefix: bytes) -> bytes:
    """Return the first key behind all that begin with a prefix; the root ends in a slash."""
    end = bytearray(prefix)
    while end[-1] == 0xFF:
        end.pop()
    end[-1] += 1
    return bytes(end)
