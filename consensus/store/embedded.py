"""The coordination store inside the first pservers: a Raft group of 1, 3 or 5 members.

The default of ``backstay local``. PySyncObj carries the log; it unpickles what members send and
does not fsync its journal, so it listens on loopback only unless a secret is set, and etcd is
for production. Nodes that are no members use ``RemoteStore``. A watch reads the state of this
member when something has changed, so nothing is queued for it and a slow reader costs no memory.
Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from backstay.addresses import is_loopback, split_address
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
from backstay.consensus.store.embedded_raft import Outcome, RaftMember
from backstay.consensus.store.state import StoreState, command, transaction_command
from backstay.errors import ClosedError, ConfigError, StoreUnavailable

__all__ = ["ChangeSignal", "EmbeddedStore", "LocalWatch", "check_members"]

DEFAULT_DEADLINE_MS = 3000
MEMBER_COUNTS = (1, 3, 5)
# A command that got lost on its way to the leader is sent again after this, if that does no harm.
ATTEMPT_S = 1.0
PAUSE_S = 0.02


class ChangeSignal:
    """Wakes all callers that wait for a change."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """Wake all callers that wait now."""
        self._changed.set()
        self._changed = asyncio.Event()

    def waiter(self) -> asyncio.Event:
        """Return what to wait for; take it before looking at what may change."""
        return self._changed


class LocalWatch(Watch):
    """The changes of a prefix, read from a state in this process."""

    def __init__(
        self,
        read: Callable[[int], tuple[tuple[WatchBatch, ...], int]],
        start_revision: int,
        signal: ChangeSignal,
    ) -> None:
        """Begin.

        Args:
            read: Returns the batches from a revision on, none if there are none yet, and from
                where to read next; raises ``WatchLost``, and ``ClosedError`` when the store was
                closed.
            start_revision: The first revision wanted.
            signal: Tells when it is worth reading again.
        """
        self._read = read
        self._next = start_revision
        self._signal = signal
        self._ready: deque[WatchBatch] = deque()
        self._closed = False

    async def __anext__(self) -> WatchBatch:
        """Wait for the next batch."""
        while True:
            changed = self._signal.waiter()
            if self._closed:
                raise ClosedError("the watch was closed")
            if not self._ready:
                batches, self._next = self._read(self._next)
                self._ready.extend(batches)
            if self._ready:
                return self._ready.popleft()
            await changed.wait()

    async def aclose(self) -> None:
        """End the watch."""
        self._closed = True
        self._signal.notify()


def check_members(own: str, members: Sequence[str], secret: str | None) -> None:
    """Refuse a group that cannot work, or that would listen without protection.

    Raises:
        ConfigError: It says what is wrong and what to do.
    """
    if len(members) not in MEMBER_COUNTS or len(set(members)) != len(members):
        raise ConfigError(
            f"store_members: {len(members)} members ({', '.join(members)}); an embedded store has "
            "1, 3 or 5 different ones"
        )
    if own not in members:
        raise ConfigError(f"store_listen: {own} is not one of store_members {', '.join(members)}")
    if secret is not None and not re.fullmatch(r"[!-~]{8,1024}", secret):
        raise ConfigError(
            "store_secret: must be 8 to 1024 visible ASCII characters (value not shown)"
        )
    for member in members:
        host, _ = split_address("store_members", member)
        if host.startswith("["):
            raise ConfigError(f"store_members: {member}: IPv6 does not work here; use IPv4 or etcd")
        if secret is None and not is_loopback(host):
            raise ConfigError(
                f"store_members: {member} can be reached from other machines, and without a "
                "secret any caller that reaches it can run code in this process; set "
                "store_secret, use 127.0.0.1, or use etcd"
            )


class EmbeddedStore(CoordinationStore):
    """A member of the group, and a client of it."""

    def __init__(
        self,
        own: str,
        members: Sequence[str],
        *,
        secret: str | None = None,
        data_dir: Path | None = None,
        deadline_ms: int = DEFAULT_DEADLINE_MS,
    ) -> None:
        """Prepare; ``start`` begins. Make it while the event loop runs.

        Args:
            own: ``host:port`` of this member.
            members: All members, the same list everywhere.
            secret: Shared by all members; wanted where the addresses are not loopback.
            data_dir: Keeps log and snapshots over restarts; None keeps nothing.
            deadline_ms: For each call as a whole.

        Raises:
            ConfigError: The group cannot work like that.
        """
        check_members(own, members, secret)
        self._deadline_s = deadline_ms / 1000
        self._loop = asyncio.get_running_loop()
        self._changed = ChangeSignal()
        self._revision_seen = 0
        self._closed = False
        self._member = RaftMember(
            own,
            members,
            secret=secret,
            data_dir=data_dir,
            clock=self._loop.time,
            on_change=lambda: self._from_thread(self._changed.notify),
        )

    async def start(self) -> None:
        """Listen and take part; calls are answered once there is a leader.

        Raises:
            ListenError: The address cannot be listened on.
        """
        await asyncio.to_thread(self._member.start)

    @property
    def leader(self) -> str | None:
        """Address of the member that leads, as far as this one knows; None while none does."""
        return self._member.leader

    async def get(self, key: str) -> KeyValue | None:
        """Return a key, None if it is not there."""
        check_key(key)
        item: KeyValue | None = await self._read(lambda state: state.get(key))
        return item

    async def range(self, prefix: str) -> RangeResult:
        """Return all keys that begin with a prefix."""
        result: RangeResult = await self._read(lambda state: state.range(prefix))
        return result

    async def ranges(self, prefixes: Sequence[str]) -> list[RangeResult]:
        """Return what ``range`` does, for several prefixes: one command, and of one moment."""
        results: list[RangeResult] = await self._read(
            lambda state: [state.range(prefix) for prefix in prefixes]
        )
        return results

    async def transaction(self, txn: Txn) -> TxnResult:
        """Compare, then do one of two lists of operations."""
        result: TxnResult = await self._submit(transaction_command(txn), repeatable=False)
        return result

    async def lease_grant(self, ttl_ms: int) -> Lease:
        """Return a new lease."""
        check_ttl(ttl_ms)
        # One that was granted unseen ends by itself.
        lease: Lease = await self._submit(command("grant", ttl_ms), repeatable=True)
        return lease

    async def lease_keepalive(self, lease: int) -> int:
        """Give the lease its full time again and return it."""
        ttl_ms: int = await self._submit(command("keepalive", lease), repeatable=True)
        return ttl_ms

    async def lease_revoke(self, lease: int) -> None:
        """End a lease and remove its keys."""
        await self._submit(command("revoke", lease), repeatable=True)

    def watch(self, prefix: str, start_revision: int) -> Watch:
        """Return the changes of a prefix from a revision on."""

        def read(revision: int) -> tuple[tuple[WatchBatch, ...], int]:
            self._check_open()
            found: tuple[tuple[WatchBatch, ...], int] = self._member.read(
                lambda state: state.read_on(prefix, revision)
            )
            return found

        return LocalWatch(read, start_revision, self._changed)

    async def close(self) -> None:
        """Leave the group: hand leadership over, end the watches, stop listening."""
        if not self._closed:
            self._closed = True
            self._changed.notify()
            await asyncio.to_thread(self._member.stop)

    async def _read(self, reader: Callable[[StoreState], Any]) -> Any:
        """Read after a command that changes nothing has gone through the log."""
        return await self._submit(command("barrier"), repeatable=True, reader=reader)

    async def _submit(
        self,
        text: str,
        *,
        repeatable: bool,
        reader: Callable[[StoreState], Any] | None = None,
    ) -> Any:
        """Replicate a command within the deadline and return its result."""
        deadline = self._loop.time() + self._deadline_s
        reason = "no answer from the leader"
        while True:
            self._check_open()
            left_s = deadline - self._loop.time()
            if left_s <= 0:
                raise StoreUnavailable(
                    f"the embedded store did not answer within {self._deadline_s:g} s: {reason} "
                    f"(leader: {self.leader or 'none'}; is a majority of its members alive?)"
                )
            attempt_s = min(left_s, ATTEMPT_S) if repeatable else left_s
            outcome = await self._attempt(text, attempt_s, reader)
            if outcome is None:
                outcome = Outcome(done=False, reason=reason, applied=True)
            if outcome.error is not None:
                raise outcome.error
            if outcome.done:
                return outcome.value
            reason = outcome.reason
            if outcome.applied and not repeatable:
                raise StoreUnavailable(
                    f"embedded store: {reason} (it is not known whether the write happened)"
                )
            await asyncio.sleep(PAUSE_S)

    async def _attempt(
        self, text: str, timeout_s: float, reader: Callable[[StoreState], Any] | None
    ) -> Outcome | None:
        answer: asyncio.Future[Outcome] = self._loop.create_future()

        def deliver(outcome: Outcome) -> None:
            if not answer.done():
                answer.set_result(outcome)

        self._member.submit(
            text, lambda outcome: self._from_thread(lambda: deliver(outcome)), reader
        )
        done, _ = await asyncio.wait([answer], timeout=timeout_s)
        return answer.result() if done else None

    def _from_thread(self, action: Callable[[], None]) -> None:
        """Run something in the event loop; the loop may be over when the thread still ends."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(action)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the store was closed")
