"""The journal: what the job master decided, written to the coordination store in groups.

A change is *staged* as a key and a function that gives its value when it is written, so that many
changes of one record cost one write. Everything staged goes out in transactions of at most 128
operations, in the order in which the keys were staged first; ``durable`` waits for it. A removal is
never written before anything that was staged before it: it does not take the place of a change of
the same record that still waits.

Every transaction holds only while the ``master`` key is the one that this job master created
(fencing), and while nothing was journalled since its last one: a transaction whose outcome is
unknown is simply sent again, and whichever of the two comes late does nothing.

Imports ``backstay.consensus``; decides nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from backstay.backoff import Backoff
from backstay.consensus.records.jobs import JournalRecord
from backstay.consensus.records.keys import JobKeys
from backstay.consensus.store import (
    OPERATIONS_MAX,
    VALUE_BYTES_MAX,
    CoordinationStore,
    Delete,
    Get,
    Operation,
    Put,
    Txn,
    mod_revision_is,
)
from backstay.consensus.store.follow import FencingToken
from backstay.errors import LeaseLost, NotJobMaster, StoreUnavailable

__all__ = ["Journal", "Render"]

# Gives the value to write, or None if the key is to go.
Render: TypeAlias = Callable[[], str | None]

# One operation is the journal's own key.
CHANGES_MAX = OPERATIONS_MAX - 1
BYTES_MAX = VALUE_BYTES_MAX
RETRY = Backoff(first_s=0.02, longest_s=0.5)

log = logging.getLogger(__name__)


class _Change(NamedTuple):
    number: int
    render: Render


class _Place(NamedTuple):
    """What is staged: a change of a record, or its removal after that."""

    key: str
    removes: bool = False


class Journal:
    """The writes of one job master; belongs to one event loop."""

    def __init__(
        self,
        store: CoordinationStore,
        keys: JobKeys,
        instance: int,
        *,
        changes_max: int = CHANGES_MAX,
    ) -> None:
        """Prepare; ``open`` says under which token, ``run`` writes.

        Args:
            store: The coordination store.
            keys: The job's keys.
            instance: Of this process.
            changes_max: In one transaction; tests write less.
        """
        self._store = store
        self._changes_max = changes_max
        self._keys = keys
        self._instance = instance
        self._token: FencingToken | None = None
        self._revision = 0
        self._written = 0
        self._last: JournalRecord | None = None
        # In the order in which they were staged first since their last write: by number.
        self._pending: dict[_Place, _Change] = {}
        self._in_flight: dict[_Place, _Change] = {}
        self._staged = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._wake = asyncio.Event()
        self._failure: Exception | None = None
        self.trouble = ""

    @property
    def transactions(self) -> int:
        """How many were written."""
        return self._written

    async def open(self, token: FencingToken) -> None:
        """Begin, or go on after the key was lost and created anew, to write under a token.

        Raises:
            NotJobMaster: Another job master has written since this one did last.
            StoreUnavailable: The store does not answer.
        """
        found = await self._store.get(self._keys.journal)
        record = JournalRecord.from_json(found.value) if found is not None else None
        revision = found.mod_revision if found is not None else 0
        is_own = record is not None and record.instance == self._instance
        # Until it has written itself, it finds what the job master before it wrote last.
        if self._last is not None and not is_own and revision != self._revision:
            raise NotJobMaster(
                f"another process has been the job master of {self._keys.job!r} in the meantime"
            )
        self._token, self._revision = token, revision
        self._last = JournalRecord(self._instance, record.number if record is not None else 0)
        self._wake.set()

    def stage(self, key: str, render: Render) -> None:
        """Have a record written soon.

        Args:
            key: Its key.
            render: Called when it is written, perhaps more than once; None: the key goes.
        """
        self._staged += 1
        self._pending.pop(_Place(key, removes=True), None)
        before = self._pending.get(_Place(key))
        number = self._staged if before is None else before.number
        self._pending[_Place(key)] = _Change(number, render)
        self._wake.set()

    def stage_first(self, key: str, render: Render) -> None:
        """Have a record written before all that is not written by now, or with it."""
        self._staged += 1
        self._pending.pop(_Place(key, removes=True), None)
        self._pending.pop(_Place(key), None)
        waiting = (*self._in_flight.values(), *self._pending.values())
        number = min((one.number for one in waiting), default=self._staged) - 1
        self._pending = {_Place(key): _Change(number, render), **self._pending}
        self._wake.set()

    def stage_text(self, key: str, text: str) -> None:
        """Have a record written soon, as it is."""
        self.stage(key, lambda: text)

    def stage_removal(self, key: str) -> None:
        """Have a record removed soon, but not before what is staged by now is written."""
        self._staged += 1
        self._pending.setdefault(_Place(key, removes=True), _Change(self._staged, lambda: None))
        self._wake.set()

    async def durable(self, timeout_s: float) -> None:
        """Wait until everything that is staged by now is written.

        Raises:
            StoreUnavailable: It is not, in that time; it will be when the store answers.
            NotJobMaster: It never will be: another process is the job master.
        """
        if self._failure is not None:
            raise self._failure
        if not self._pending and not self._in_flight:
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((self._staged, done))
        try:
            await asyncio.wait_for(done, timeout_s)
        except asyncio.TimeoutError:
            why = self.trouble or "it is slow"
            raise StoreUnavailable(
                f"not recorded within {timeout_s:g} s: {why}; repeat the call"
            ) from None

    async def run(self) -> None:
        """Write what is staged until cancelled.

        Raises:
            NotJobMaster: Another process is the job master.
            LeaseLost: The key is gone, and no other process has it; create it anew, ``open``
                and run again: nothing that was staged is lost.
            StoreError: The store refuses this client, or has lost its data.
        """
        retries = RETRY.begin()
        while True:
            self._wake.clear()
            if not self._pending:
                await self._wake.wait()
                continue
            try:
                await self._write()
            except StoreUnavailable as error:
                if not self.trouble:
                    log.warning("the journal waits for the coordination store: %s", error)
                self.trouble = str(error)
                await asyncio.sleep(retries.next_s())
            else:
                if self.trouble:
                    log.info("the coordination store answers again")
                self.trouble = ""
                retries.reset()

    def fail(self, error: Exception) -> None:
        """Let all waiting calls know that nothing will be written any more."""
        self._failure = error
        while self._waiting:
            _, done = self._waiting.popleft()
            if not done.done():
                done.set_exception(error)

    async def _write(self) -> None:
        """Write one group; what it held is staged again if that did not succeed."""
        assert self._token is not None
        assert self._last is not None
        self._in_flight, operations = self._next_group()
        record = JournalRecord(self._instance, self._last.number + 1)
        operations.append(Put(self._keys.journal, record.to_json()))
        succeeded = False
        try:
            result = await self._store.transaction(
                Txn(
                    (
                        self._token.still_mine(),
                        mod_revision_is(self._keys.journal, self._revision),
                    ),
                    tuple(operations),
                    (Get(self._keys.master), Get(self._keys.journal)),
                )
            )
            succeeded = result.succeeded
        finally:
            if not succeeded:
                self._stage_again()
        if succeeded:
            self._revision, self._last = result.revision, record
            self._written += 1
            self._in_flight = {}
            self._tell()
            return
        master, journal = result.results
        if master is None:
            raise LeaseLost(f"the key {self._keys.master} is gone")
        if master.create_revision != self._token.create_revision:
            raise NotJobMaster(f"another process is the job master of {self._keys.job!r}")
        # An earlier try of this job master got through unseen.
        assert journal is not None
        self._revision = journal.mod_revision
        self._last = JournalRecord.from_json(journal.value)

    def _next_group(self) -> tuple[dict[_Place, _Change], list[Operation]]:
        """Take the oldest pending changes, as many as fit."""
        group: dict[_Place, _Change] = {}
        operations: list[Operation] = []
        size = 0
        for place, change in self._pending.items():
            key, value = place.key, change.render()
            size += len(key) + len(value or "")
            # No key may be in a transaction twice.
            is_twice = place.removes and _Place(key) in group
            if group and (len(group) == self._changes_max or size > BYTES_MAX or is_twice):
                break
            group[place] = change
            operations.append(Delete(key) if value is None else Put(key, value))
        for place in group:
            del self._pending[place]
        return group, operations

    def _stage_again(self) -> None:
        """Put the group back in front; what was staged since wins, at the older place."""
        again = {
            place: _Change(change.number, self._pending.get(place, change).render)
            for place, change in self._in_flight.items()
        }
        self._pending = {**self._pending, **again}
        self._pending = dict(sorted(self._pending.items(), key=lambda item: item[1].number))
        self._in_flight = {}
        self._wake.set()

    def _tell(self) -> None:
        """Wake those whose changes are written."""
        oldest = next(iter(self._pending.values())).number if self._pending else self._staged + 1
        while self._waiting and self._waiting[0][0] < oldest:
            _, done = self._waiting.popleft()
            if not done.done():
                done.set_result(None)
