"""The coordination store as everything above it sees it: values, and one interface.

A small consistent key-value store with revisions, leases, transactions and watches, modelled on
etcd's. Keys are text, values are text (JSON records). Behind the interface stand etcd, the
embedded Raft store, a client of the embedded store, and memory; ``open_store`` chooses.

All calls belong to one asyncio event loop. Reads are linearizable: they see every write that had
completed before they began. This module imports ``backstay.errors`` only, does no I/O and reads
no clock.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, TypeAlias

from backstay.errors import InvalidRequest

__all__ = [
    "KEY_BYTES_MAX",
    "OPERATIONS_MAX",
    "TTL_MS_MAX",
    "TTL_MS_MIN",
    "VALUE_BYTES_MAX",
    "Compare",
    "CoordinationStore",
    "Delete",
    "Event",
    "Get",
    "KeyValue",
    "Lease",
    "Operation",
    "Put",
    "RangeResult",
    "Txn",
    "TxnResult",
    "Watch",
    "WatchBatch",
    "absent",
    "check_key",
    "check_ttl",
    "check_value",
    "create_revision_is",
    "exists",
    "mod_revision_is",
    "value_is",
    "version_is",
]

KEY_BYTES_MAX = 512
# etcd takes requests of 1.5 MiB at most by default; the routing of 65,536 slots fits in well.
VALUE_BYTES_MAX = 1_048_576
# etcd's default for one transaction.
OPERATIONS_MAX = 128
TTL_MS_MIN = 100
TTL_MS_MAX = 3_600_000


@dataclass(frozen=True)
class KeyValue:
    """One key as it stands.

    Attributes:
        key: The key.
        value: Its value.
        create_revision: Revision of the write that created it; a new one after each deletion.
        mod_revision: Revision of its last write.
        version: Number of writes since it was created, from 1.
        lease: The lease it goes with, 0 for none.
    """

    key: str
    value: str
    create_revision: int
    mod_revision: int
    version: int
    lease: int = 0


@dataclass(frozen=True)
class RangeResult:
    """All keys of a prefix at one revision.

    Attributes:
        items: Sorted by key.
        revision: The store's revision when they were read: ``watch(prefix, revision + 1)`` goes
            on from here without a gap.
    """

    items: tuple[KeyValue, ...]
    revision: int

    def values(self) -> dict[str, KeyValue]:
        """Return the items by key."""
        return {item.key: item for item in self.items}


CompareTarget: TypeAlias = Literal["mod_revision", "create_revision", "version", "value", "exists"]


@dataclass(frozen=True)
class Compare:
    """A condition of a transaction: the target of the key equals the operand.

    A key that is not there has mod revision, create revision and version 0, and no value.
    """

    key: str
    target: CompareTarget
    operand: int | str | bool


def mod_revision_is(key: str, revision: int) -> Compare:
    """Hold if the key was last written at that revision; 0: it is not there."""
    return Compare(key, "mod_revision", revision)


def create_revision_is(key: str, revision: int) -> Compare:
    """Hold if the key was created at that revision; 0: it is not there."""
    return Compare(key, "create_revision", revision)


def version_is(key: str, version: int) -> Compare:
    """Hold if the key was written that many times since its creation."""
    return Compare(key, "version", version)


def value_is(key: str, value: str) -> Compare:
    """Hold if the key is there with that value."""
    return Compare(key, "value", value)


def exists(key: str) -> Compare:
    """Hold if the key is there."""
    return Compare(key, "exists", operand=True)


def absent(key: str) -> Compare:
    """Hold if the key is not there."""
    return Compare(key, "exists", operand=False)


@dataclass(frozen=True)
class Put:
    """Write a key; without a lease it stays, also if it was bound to one before."""

    key: str
    value: str
    lease: int = 0


@dataclass(frozen=True)
class Delete:
    """Remove a key; nothing happens if it is not there."""

    key: str


@dataclass(frozen=True)
class Get:
    """Read a key inside a transaction; it comes before any write of that key."""

    key: str


Operation: TypeAlias = Put | Delete | Get


@dataclass(frozen=True)
class Txn:
    """If all comparisons hold, do ``success``, otherwise ``failure``; all at one revision.

    Attributes:
        compare: The conditions; none means that they hold.
        success: What to do then.
        failure: What to do otherwise.
    """

    compare: tuple[Compare, ...] = ()
    success: tuple[Operation, ...] = ()
    failure: tuple[Operation, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what some implementation would refuse."""
        for conditions_or_operations in (self.compare, self.success, self.failure):
            if len(conditions_or_operations) > OPERATIONS_MAX:
                raise InvalidRequest(
                    f"transaction: {len(conditions_or_operations)} parts; "
                    f"at most {OPERATIONS_MAX} comparisons and as many operations a branch"
                )
        for condition in self.compare:
            check_key(condition.key)
        for branch in (self.success, self.failure):
            written: set[str] = set()
            for operation in branch:
                check_key(operation.key)
                if isinstance(operation, Put):
                    check_value(operation.key, operation.value)
                if operation.key in written:
                    raise InvalidRequest(
                        f"transaction: {operation.key!r} is used again after it was written"
                    )
                if not isinstance(operation, Get):
                    written.add(operation.key)


@dataclass(frozen=True)
class TxnResult:
    """How a transaction ended.

    Attributes:
        succeeded: Whether the comparisons held.
        revision: The store's revision afterwards; that of the writes if there were any.
        results: For each operation of the branch: what ``Get`` read (None: not there), and None
            for the others.
    """

    succeeded: bool
    revision: int
    results: tuple[KeyValue | None, ...]


@dataclass(frozen=True)
class Lease:
    """A lease: keys that were put with it go when it ends.

    Attributes:
        id: Its number, never 0.
        ttl_ms: The time it lives after its grant and after each keepalive. It can be longer
            than asked for: etcd counts in seconds and has a minimum.
    """

    id: int
    ttl_ms: int


@dataclass(frozen=True)
class Event:
    """A key was written or removed.

    Attributes:
        kind: ``put`` or ``delete``.
        key: The key.
        value: What was put; empty for a deletion.
        revision: The revision at which it happened.
        create_revision: Of the key that was put; 0 for a deletion.
        version: Of the key that was put; 0 for a deletion.
        lease: Of the key that was put; 0 for none.
    """

    kind: Literal["put", "delete"]
    key: str
    value: str
    revision: int
    create_revision: int = 0
    version: int = 0
    lease: int = 0


@dataclass(frozen=True)
class WatchBatch:
    """What happened, in order; the events of one revision are never split over two batches.

    Attributes:
        revision: Nothing of the watch up to here is missing.
        events: At least one.
    """

    revision: int
    events: tuple[Event, ...]


class Watch(ABC):
    """The changes of a prefix: an async iterator of batches, and a context manager that ends it.

    It survives outages of the store and goes on behind the last batch. If it cannot go on
    without a gap it raises ``WatchLost``: read the prefix again and watch from there.
    """

    def __aiter__(self) -> Watch:
        return self

    @abstractmethod
    async def __anext__(self) -> WatchBatch:
        """Wait for the next batch.

        Raises:
            WatchLost: Events are gone; read again.
            StoreAuthError: The store refuses this client.
            StoreDataLost: The store has lost its data.
            ClosedError: The store or the watch was closed.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """End the watch."""

    async def __aenter__(self) -> Watch:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()


class CoordinationStore(ABC):
    """The coordination store.

    Each call ends within the store's deadline. ``StoreUnavailable`` means that no answer came: a
    read can be repeated; of a write it is *not known* whether it happened, so make it one that
    does no harm when repeated (a put of the same value, or a transaction that compares a
    revision, and look at what is there).

    Every call may raise ``StoreUnavailable``, ``StoreAuthError``, ``StoreDataLost`` and
    ``ClosedError`` (all ``StoreError`` but the last); further errors are named at each.
    """

    @abstractmethod
    async def get(self, key: str) -> KeyValue | None:
        """Return a key, None if it is not there."""

    @abstractmethod
    async def range(self, prefix: str) -> RangeResult:
        """Return all keys that begin with a prefix; the empty prefix stands for all keys."""

    async def ranges(self, prefixes: Sequence[str]) -> list[RangeResult]:
        """Return what ``range`` does, for several prefixes at once."""
        return list(await asyncio.gather(*(self.range(prefix) for prefix in prefixes)))

    async def put(self, key: str, value: str, lease: int | None = None) -> int:
        """Write a key, bound to a lease if one is given, and return the revision.

        Raises:
            LeaseLost: The lease is not alive.
            InvalidRequest: Key or value is over its limit.
        """
        result = await self.transaction(Txn(success=(Put(key, value, lease or 0),)))
        return result.revision

    async def delete(self, key: str) -> bool:
        """Remove a key and tell whether it was there."""
        result = await self.transaction(Txn((exists(key),), success=(Delete(key),)))
        return result.succeeded

    @abstractmethod
    async def transaction(self, txn: Txn) -> TxnResult:
        """Compare, then do one of two lists of operations, as one step.

        Raises:
            LeaseLost: A put names a lease that is not alive; nothing was done.
        """

    @abstractmethod
    async def lease_grant(self, ttl_ms: int) -> Lease:
        """Return a new lease.

        Count its time from *before* this call, on a monotonic clock; ``KeepAlive`` does.

        Raises:
            InvalidRequest: The TTL is outside of its limits.
        """

    @abstractmethod
    async def lease_keepalive(self, lease: int) -> int:
        """Give the lease its full time again and return that time in milliseconds.

        Raises:
            LeaseLost: It is over, and its keys are gone.
        """

    @abstractmethod
    async def lease_revoke(self, lease: int) -> None:
        """End a lease and remove its keys; nothing happens if it is over already."""

    @abstractmethod
    def watch(self, prefix: str, start_revision: int) -> Watch:
        """Return the changes of a prefix from a revision on (inclusive).

        Args:
            prefix: The empty prefix stands for all keys.
            start_revision: The first one wanted, from 1: that of a ``RangeResult``, plus one.
        """

    @abstractmethod
    async def close(self) -> None:
        """End the watches and let go of connections; leases live on until their time is over."""

    async def __aenter__(self) -> CoordinationStore:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()


def check_key(key: str) -> None:
    """Refuse a key that some implementation cannot hold.

    Raises:
        InvalidRequest: It is empty, too long or not printable.
    """
    if not key or not key.isprintable():
        raise InvalidRequest(f"store key {key!r}: must be printable text, not empty")
    if len(key.encode()) > KEY_BYTES_MAX:
        raise InvalidRequest(f"store key {key[:64]!r}...: over {KEY_BYTES_MAX} bytes")


def check_value(key: str, value: str) -> None:
    """Refuse a value that is too large.

    Raises:
        InvalidRequest: It is over ``VALUE_BYTES_MAX``.
    """
    # Text of that many characters takes at least as many bytes; most values are small.
    if len(value) * 4 > VALUE_BYTES_MAX and len(value.encode()) > VALUE_BYTES_MAX:
        raise InvalidRequest(
            f"store key {key!r}: value of {len(value.encode())} bytes; at most {VALUE_BYTES_MAX}"
        )


def check_ttl(ttl_ms: int) -> None:
    """Refuse a TTL outside of its limits.

    Raises:
        InvalidRequest: It is outside.
    """
    if not TTL_MS_MIN <= ttl_ms <= TTL_MS_MAX:
        raise InvalidRequest(f"lease of {ttl_ms} ms: must be {TTL_MS_MIN} to {TTL_MS_MAX} ms")
