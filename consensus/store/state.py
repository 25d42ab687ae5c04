"""The coordination store as a state machine: commands in, results out.

The same commands in the same order give the same state and the same results, on every member
of a Raft group and in a simulator. For a replicated log a command is a JSON list of its name
and its arguments. Time is a command (``advance``): a lease is over when logical time has passed its
end, whatever any clock says. This module imports the values of ``consensus.store`` and
``backstay.errors``; it knows no clock, no thread, no I/O.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from backstay.consensus.store import (
    Compare,
    Delete,
    Event,
    Get,
    KeyValue,
    Lease,
    Operation,
    Put,
    RangeResult,
    Txn,
    TxnResult,
    WatchBatch,
    check_ttl,
)
from backstay.errors import InvalidRequest, LeaseLost, WatchLost

__all__ = ["HISTORY_MAX", "READ_MAX", "StoreState", "command", "execute", "transaction_command"]

# Revisions of which the events are kept for watches that lag behind.
HISTORY_MAX = 10_000
# And the size of their values.
HISTORY_BYTES_MAX = 64 * 1_048_576
# Revisions that a watch takes at once.
READ_MAX = 1000
_FORMAT = 1


@dataclass
class _LiveLease:
    ttl_ms: int
    end_ms: int
    keys: set[str] = field(default_factory=set)


class StoreState:
    """Keys, leases, revision, logical time and the newest events."""

    def __init__(self, *, history_max: int = HISTORY_MAX, lease_slack_ms: int = 0) -> None:
        """Begin empty at revision 1 and time 0, as etcd does.

        Args:
            history_max: Revisions whose events are kept.
            lease_slack_ms: Added to the end of each lease. Where time advances in steps, a step
                can hold time from before the keepalive; the longest step belongs here.
        """
        self._history_max = history_max
        self._lease_slack_ms = lease_slack_ms
        self._revision = 1
        self._now_ms = 0
        self._lead_term = 0
        self._next_lease = 1
        self._items: dict[str, KeyValue] = {}
        self._keys: list[str] = []  # sorted
        self._leases: dict[int, _LiveLease] = {}
        self._history: deque[WatchBatch] = deque()
        self._history_size = 0
        self._compacted = 1  # events at and below this revision are gone

    @property
    def revision(self) -> int:
        """Number of the newest change."""
        return self._revision

    @property
    def compacted_revision(self) -> int:
        """Events up to this revision are no longer kept."""
        return self._compacted

    @property
    def now_ms(self) -> int:
        """Logical time."""
        return self._now_ms

    def next_lease_end_ms(self) -> int | None:
        """Return the logical time at which the next lease is over, None without leases."""
        return min((lease.end_ms for lease in self._leases.values()), default=None)

    def lease_ids(self) -> tuple[int, ...]:
        """Return the leases that are alive."""
        return tuple(self._leases)

    # Reading

    def get(self, key: str) -> KeyValue | None:
        """Return a key, None if it is not there."""
        return self._items.get(key)

    def range(self, prefix: str) -> RangeResult:
        """Return all keys that begin with a prefix."""
        items = []
        for at in range(bisect_left(self._keys, prefix), len(self._keys)):
            if not self._keys[at].startswith(prefix):
                break
            items.append(self._items[self._keys[at]])
        return RangeResult(tuple(items), self._revision)

    def events_since(
        self, prefix: str, start_revision: int, limit: int = READ_MAX
    ) -> tuple[WatchBatch, ...]:
        """Return the events of a prefix from a revision on, at most ``limit`` revisions of them.

        Raises:
            WatchLost: Some of them are no longer kept.
        """
        if start_revision <= self._compacted and start_revision <= self._revision:
            raise WatchLost(
                f"events from revision {start_revision} on were asked for; the store keeps those "
                f"after {self._compacted}"
            )
        batches: list[WatchBatch] = []
        # The history has one batch per revision without gaps, so the first one has a known place.
        first = max(0, start_revision - self._compacted - 1)
        for at in range(first, len(self._history)):
            batch = self._history[at]
            events = tuple(event for event in batch.events if event.key.startswith(prefix))
            if events:
                batches.append(WatchBatch(batch.revision, events))
                if len(batches) == limit:
                    break
        return tuple(batches)

    def read_on(self, prefix: str, start_revision: int) -> tuple[tuple[WatchBatch, ...], int]:
        """Return what ``events_since`` does, and from which revision on to read next time.

        That revision grows also when nothing below the prefix changes. A caller that read on from
        its last event would look through all others each time, and lose its place when the
        history is cut.

        Raises:
            WatchLost: Some of them are no longer kept.
        """
        batches = self.events_since(prefix, start_revision, READ_MAX)
        if len(batches) == READ_MAX:
            return batches, batches[-1].revision + 1
        return batches, max(start_revision, self._revision + 1)

    # Writing

    def transact(self, txn: Txn) -> TxnResult:
        """Compare, then do one of the two branches.

        Raises:
            LeaseLost: A put names a lease that is not alive; nothing was done.
        """
        succeeded = all(self._holds(condition) for condition in txn.compare)
        branch = txn.success if succeeded else txn.failure
        for operation in branch:
            if isinstance(operation, Put) and operation.lease:
                self._live(operation.lease)
        results = tuple(
            self._items.get(operation.key) if isinstance(operation, Get) else None
            for operation in branch
        )
        self._write(branch)
        return TxnResult(succeeded, self._revision, results)

    def grant(self, ttl_ms: int) -> Lease:
        """Return a new lease.

        Raises:
            InvalidRequest: The TTL is outside of its limits.
        """
        check_ttl(ttl_ms)
        lease = Lease(self._next_lease, ttl_ms)
        self._next_lease += 1
        self._leases[lease.id] = _LiveLease(ttl_ms, self._full_end(ttl_ms))
        return lease

    def keepalive(self, lease: int) -> int:
        """Give a lease its full time again and return that time in milliseconds.

        Raises:
            LeaseLost: It is over.
        """
        live = self._live(lease)
        live.end_ms = self._full_end(live.ttl_ms)
        return live.ttl_ms

    def revoke(self, lease: int) -> None:
        """End a lease and remove its keys."""
        live = self._leases.pop(lease, None)
        if live is not None:
            self._write(tuple(Delete(key) for key in sorted(live.keys)))

    def advance(self, elapsed_ms: int) -> None:
        """Let logical time pass and end the leases whose time is over."""
        if elapsed_ms < 0:
            raise InvalidRequest(f"time cannot go back by {-elapsed_ms} ms")
        self._now_ms += elapsed_ms
        over = [(live.end_ms, lease) for lease, live in self._leases.items()]
        for end_ms, lease in sorted(over):
            if end_ms <= self._now_ms:
                self.revoke(lease)

    def take_lead(self, term: int, silent_ms: int) -> None:
        """Note a new leader: it drives the time from here on.

        Without a leader no owner could renew its lease. So each lease keeps at least half its time,
        and all of it if the silence was longer than that. Otherwise the silence counts, so that
        a leader that hangs does not lengthen its own lease by its election.

        Args:
            term: The leader's.
            silent_ms: How long surely nothing was carried out before.
        """
        if silent_ms < 0:
            raise InvalidRequest(f"time cannot go back by {-silent_ms} ms")
        if term <= self._lead_term:
            return
        self._lead_term = term
        for live in self._leases.values():
            half_ms = live.ttl_ms // 2
            if silent_ms > half_ms:
                live.end_ms = self._full_end(live.ttl_ms)
            else:
                live.end_ms = max(live.end_ms - silent_ms, self._full_end(half_ms))

    def tick(self, term: int, elapsed_ms: int) -> bool:
        """Let time pass on behalf of the leader of a term; false if another one has taken over."""
        if term != self._lead_term:
            return False
        self.advance(elapsed_ms)
        return True

    # The whole state as plain values

    def to_json(self) -> dict[str, object]:
        """Return the state as a JSON object; the events are not in it."""
        return {
            "format": _FORMAT,
            "revision": self._revision,
            "now_ms": self._now_ms,
            "lead_term": self._lead_term,
            "next_lease": self._next_lease,
            "items": [asdict(self._items[key]) for key in self._keys],
            "leases": [[lease, live.ttl_ms, live.end_ms] for lease, live in self._leases.items()],
        }

    def restore(self, state: Mapping[str, object]) -> None:
        """Become what ``to_json`` gave; watches from before must read again.

        Raises:
            InvalidRequest: It is not such an object.
        """
        try:
            if state["format"] != _FORMAT:
                raise InvalidRequest(f"store state: format {state['format']!r} is not {_FORMAT}")
            items = [KeyValue(**item) for item in state["items"]]  # type: ignore[attr-defined]
            leases = {
                int(lease): _LiveLease(int(ttl_ms), int(end_ms))
                for lease, ttl_ms, end_ms in state["leases"]  # type: ignore[attr-defined]
            }
            for item in items:
                if item.lease:
                    leases[item.lease].keys.add(item.key)
            revision, now_ms, lead_term, next_lease = (
                int(state[name])  # type: ignore[call-overload]
                for name in ("revision", "now_ms", "lead_term", "next_lease")
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidRequest(f"store state: not what was saved: {error!r}") from error
        self._revision, self._now_ms = revision, now_ms
        self._lead_term, self._next_lease = lead_term, next_lease
        self._items = {item.key: item for item in items}
        self._keys = sorted(self._items)
        self._leases = leases
        self._history.clear()
        self._history_size = 0
        self._compacted = revision

    # Inside

    def _full_end(self, ttl_ms: int) -> int:
        return self._now_ms + ttl_ms + self._lease_slack_ms

    def _live(self, lease: int) -> _LiveLease:
        live = self._leases.get(lease)
        if live is None:
            raise LeaseLost(f"lease {lease} is over: it ran out or was revoked")
        return live

    def _holds(self, condition: Compare) -> bool:
        item = self._items.get(condition.key)
        if condition.target == "exists":
            return (item is not None) == condition.operand
        if condition.target == "value":
            return item is not None and item.value == condition.operand
        actual: int = getattr(item, condition.target) if item is not None else 0
        return actual == condition.operand

    def _write(self, operations: tuple[Operation, ...]) -> None:
        """Do the writes among the operations at one new revision, if they change anything."""
        revision = self._revision + 1
        events: list[Event] = []
        for operation in operations:
            if isinstance(operation, Put):
                events.append(self._put(operation, revision))
            elif isinstance(operation, Delete) and operation.key in self._items:
                self._remove(operation.key)
                events.append(Event("delete", operation.key, "", revision))
        if not events:
            return
        self._revision = revision
        batch = WatchBatch(revision, tuple(events))
        self._history.append(batch)
        self._history_size += _size_of(batch)
        while len(self._history) > self._history_max or self._history_size > HISTORY_BYTES_MAX:
            oldest = self._history.popleft()
            self._history_size -= _size_of(oldest)
            self._compacted = oldest.revision

    def _put(self, put: Put, revision: int) -> Event:
        old = self._items.get(put.key)
        created, version = (old.create_revision, old.version) if old else (revision, 0)
        if old is None:
            self._keys.insert(bisect_left(self._keys, put.key), put.key)
        elif old.lease in self._leases:
            self._leases[old.lease].keys.discard(put.key)
        if put.lease:
            self._leases[put.lease].keys.add(put.key)
        self._items[put.key] = KeyValue(
            put.key, put.value, created, revision, version + 1, put.lease
        )
        return Event("put", put.key, put.value, revision, created, version + 1, put.lease)

    def _remove(self, key: str) -> None:
        item = self._items.pop(key)
        del self._keys[bisect_left(self._keys, key)]
        if item.lease in self._leases:
            self._leases[item.lease].keys.discard(key)


def _size_of(batch: WatchBatch) -> int:
    return sum(len(event.key) + len(event.value) for event in batch.events)


def command(name: str, *arguments: int) -> str:
    """Return a command without structure: grant, keepalive, revoke, lead, tick or barrier."""
    return json.dumps([name, *arguments])


def transaction_command(txn: Txn) -> str:
    """Return the command for a transaction."""
    return json.dumps(
        [
            "transaction",
            [[each.key, each.target, each.operand] for each in txn.compare],
            [_operation_to_json(each) for each in txn.success],
            [_operation_to_json(each) for each in txn.failure],
        ],
        separators=(",", ":"),
    )


def execute(state: StoreState, text: str) -> Any:
    """Carry a command out and return its result.

    Raises:
        LeaseLost: The command concerns a lease that is over.
        InvalidRequest: It is no command, or one of a later version.
    """
    try:
        name, *arguments = json.loads(text)
        match name, arguments:
            case "transaction", [compare, success, failure]:
                return state.transact(_transaction(compare, success, failure))
            case "grant", [ttl_ms]:
                return state.grant(ttl_ms)
            case "keepalive", [lease]:
                return state.keepalive(lease)
            case "revoke", [lease]:
                return state.revoke(lease)
            case "lead", [term, silent_ms]:
                return state.take_lead(term, silent_ms)
            case "tick", [term, elapsed_ms]:
                return state.tick(term, elapsed_ms)
            case "barrier", []:
                return None
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidRequest(f"store command {text[:100]!r}: {error}") from error
    raise InvalidRequest(f"store command {text[:100]!r}: unknown; a member of a later version?")


def _transaction(compare: Any, success: Any, failure: Any) -> Txn:
    return Txn(
        tuple(Compare(*each) for each in compare),
        tuple(_operation_from_json(each) for each in success),
        tuple(_operation_from_json(each) for each in failure),
    )


def _operation_to_json(operation: Operation) -> list[str | int]:
    if isinstance(operation, Put):
        return ["put", operation.key, operation.value, operation.lease]
    return ["get" if isinstance(operation, Get) else "delete", operation.key]


def _operation_from_json(value: Sequence[Any]) -> Operation:
    kind, *arguments = value
    kinds: dict[str, type[Put | Get | Delete]] = {"put": Put, "get": Get, "delete": Delete}
    return kinds[kind](*arguments)
