"""The journal: what the engine decided, written to the coordination store in groups.

``Outbox`` says which records are to be written, with their values, and in which order. They go out
in transactions of at most 128 operations; ``durable`` waits for all that is staged.

Every transaction holds only while the ``master`` key is the one that this job master created
(fencing), and while nothing was journalled since its last one: a transaction whose outcome is
unknown is simply sent again, and whichever of the two comes late does nothing.

Imports ``backstay.consensus``; decides nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque

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
from backstay.job_engine.outbox import Outbox

__all__ = ["Journal"]

# One operation is the journal's own key.
CHANGES_MAX = OPERATIONS_MAX - 1
BYTES_MAX = VALUE_BYTES_MAX
RETRY = Backoff(first_s=0.02, longest_s=0.5)

log = logging.getLogger(__name__)


class Journal:
    """The writes of one job master; belongs to one event loop.

    Attributes:
        outbox: Where changes of the records are staged.
        trouble: Why nothing can be written now; empty: it can.
    """

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
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._wake = asyncio.Event()
        self.outbox = Outbox(self._wake.set)
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

    async def durable(self, timeout_s: float) -> None:
        """Wait until everything that is staged by now is written.

        Raises:
            StoreUnavailable: It is not, in that time; it will be when the store answers.
            NotJobMaster: It never will be: another process is the job master.
        """
        if self._failure is not None:
            raise self._failure
        if self.outbox.is_empty:
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((self.outbox.staged, done))
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
            if not self.outbox.waits:
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
        operations = self._next_group()
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
                self.outbox.not_written()
        if succeeded:
            self._revision, self._last = result.revision, record
            self._written += 1
            self.outbox.written()
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

    def _next_group(self) -> list[Operation]:
        return [
            Delete(write.key) if write.value is None else Put(write.key, write.value)
            for write in self.outbox.take(self._changes_max, BYTES_MAX)
        ]

    def _tell(self) -> None:
        """Wake those whose changes are written."""
        while self._waiting and self._waiting[0][0] < self.outbox.oldest:
            _, done = self._waiting.popleft()
            if not done.done():
                done.set_result(None)
