"""The trainers that this node hears from, and their records in the store, bound to its lease.

A trainer says every few seconds that it is alive; most of that stays in memory. A record is
written when a trainer comes, when it goes, and now and then for its last push, many in one
transaction: 500 trainers cost a few writes in ten seconds. If the node dies, its lease ends and
the trainers register with another one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from backstay.consensus.records.keys import Keys
from backstay.consensus.records.trainers import TrainerRecord
from backstay.consensus.store import (
    Compare,
    CoordinationStore,
    Delete,
    Operation,
    Put,
    Txn,
    mod_revision_is,
)
from backstay.errors import InvalidRequest, LimitExceeded, StoreUnavailable

__all__ = ["TrainerRegistrations"]

TRAINERS_MAX = 10_000
# With so many trainers that this is more than the time to live, that is what they get: at most 150
# of them say in a second that they are alive.
TTL_FOR_EACH_MS = 20
# Records of trainers in one transaction.
WRITES_AT_ONCE = 100
TICK_S = 0.5
# News of a trainer's pushes is written once in that time, and a record without news once in the
# longer one: so a node finds out that another one has taken the trainer over.
REFRESH_S = 10.0
CHECK_S = 60.0

log = logging.getLogger(__name__)


@dataclass
class _Known:
    """A trainer that this node hears from.

    Attributes:
        wanted: What its record is to say.
        heard_s: When it was heard from last; monotonic seconds.
        ttl_ms: For how long it may be silent from then on.
        left: It said that it ends.
        written: The record in the store; None if it is not there, or not known.
        revision: Of that record.
        written_s: When it was written; monotonic seconds.
    """

    wanted: TrainerRecord
    heard_s: float
    ttl_ms: int
    left: bool = False
    written: TrainerRecord | None = None
    revision: int = 0
    written_s: float = 0.0


class TrainerRegistrations:
    """Hears from trainers and keeps their records."""

    def __init__(
        self,
        store: CoordinationStore,
        keys: Keys,
        *,
        ttl_ms: int,
        on_count: Callable[[int], None] = lambda count: None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Prepare; call it while the event loop runs.

        Args:
            store: The coordination store.
            keys: Where the records are.
            ttl_ms: A trainer that is silent for longer is gone.
            on_count: Called with how many trainers this node hears from, when that may have
                changed.
            clock: Monotonic seconds; default: the running loop's time.
        """
        self._store = store
        self._keys = keys
        self._ttl_ms = ttl_ms
        self._on_count = on_count
        self._clock = clock or asyncio.get_running_loop().time
        self._known: dict[str, _Known] = {}
        self._news = asyncio.Event()

    def register(self, record: TrainerRecord) -> int:
        """Note that a trainer is alive; answers at once.

        Returns:
            For how long it may be silent from now on, in milliseconds.

        Raises:
            LimitExceeded: This node hears from as many as it can; another one may take it.
        """
        known = self._known.get(record.trainer_id)
        if known is None:
            if len(self._known) >= TRAINERS_MAX:
                raise LimitExceeded(
                    f"{record.node} keeps the records of {TRAINERS_MAX} trainers: ask another node"
                )
            ttl_ms = max(self._ttl_ms, TTL_FOR_EACH_MS * (len(self._known) + 1))
            self._known[record.trainer_id] = _Known(record, self._clock(), ttl_ms)
            self._on_count(len(self._known))
            self._news.set()
            return ttl_ms
        if record.pushes == known.wanted.pushes:
            # The same push, whose time was computed again.
            record = replace(record, last_push=known.wanted.last_push)
        known.wanted, known.heard_s, known.left = record, self._clock(), False
        known.ttl_ms = max(self._ttl_ms, TTL_FOR_EACH_MS * len(self._known))
        return known.ttl_ms

    def deregister(self, trainer_id: str) -> None:
        """Note that a trainer ends; answers at once."""
        known = self._known.get(trainer_id)
        if known is not None:
            known.left = True
            self._news.set()

    async def run(self, lease: int) -> None:
        """Keep the records under this lease; never returns.

        Raises:
            LeaseLost: It is over.
        """
        self.forget_written()
        trouble = ""
        while True:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._news.wait(), TICK_S)
            self._news.clear()
            try:
                await self.write(lease)
            except StoreUnavailable as error:
                if str(error) != trouble:
                    log.info("records of trainers wait for the store: %s", error)
                trouble = str(error)
                await asyncio.sleep(TICK_S)
            else:
                trouble = ""

    def forget_written(self) -> None:
        """Note that the node's last lease is over, and its records with it."""
        for known in self._known.values():
            known.written, known.revision = None, 0

    async def write(self, lease: int) -> None:
        """Bring the records to what is wanted, as far as it is due.

        Raises:
            StoreUnavailable: The store does not answer; the rest is done by the next call.
        """
        now_s = self._clock()
        ended = [one for one in self._known.values() if self._has_ended(one, now_s)]
        for start in range(0, len(ended), WRITES_AT_ONCE):
            await self._remove(ended[start : start + WRITES_AT_ONCE])
        due = [one for one in self._known.values() if self._is_due(one, now_s)]
        for start in range(0, len(due), WRITES_AT_ONCE):
            await self._put(due[start : start + WRITES_AT_ONCE], lease)

    async def all(self) -> list[TrainerRecord]:
        """Return the trainers of the whole cluster, ordered by job, worker and id.

        Raises:
            StoreUnavailable: The store does not answer.
        """
        found = await self._store.range(self._keys.trainers)
        records = []
        for item in found.items:
            try:
                records.append(TrainerRecord.from_json(item.value))
            except InvalidRequest as error:
                log.warning("%s is left out: %s", item.key, error)
        return sorted(records, key=lambda one: (one.job, one.worker, one.trainer_id))

    def _has_ended(self, known: _Known, now_s: float) -> bool:
        return known.left or now_s - known.heard_s > known.ttl_ms / 1000

    def _is_due(self, known: _Known, now_s: float) -> bool:
        if known.written is None:
            return True
        if known.wanted.last_push > 0 and known.written.last_push == 0:
            return True
        pause_s = CHECK_S if known.written == known.wanted else REFRESH_S
        return now_s - known.written_s >= pause_s

    async def _put(self, some: Sequence[_Known], lease: int) -> None:
        """Write records, all in one transaction unless another node has taken one over."""
        wanted = [one.wanted for one in some]
        conditions = [
            mod_revision_is(self._key(one), one.revision) for one in some if one.written is not None
        ]
        puts = [Put(self._key(one), one.wanted.to_json(), lease) for one in some]
        for one in some:
            # Until it is confirmed: if it is not, nothing is known of the record.
            if one.written is None:
                one.revision = 0
        revision = await self._transact(conditions, puts)
        if revision is None and len(some) > 1:
            for one in some:
                await self._put([one], lease)
            return
        now_s = self._clock()
        for one, record in zip(some, wanted, strict=True):
            if revision is not None:
                one.written, one.revision, one.written_s = record, revision, now_s
            elif now_s - one.heard_s > one.ttl_ms / 2000:
                self._forget(one)
            else:
                # It calls this node: another node that wrote its record was its earlier one.
                one.written = None

    async def _remove(self, some: Sequence[_Known]) -> None:
        """Remove records; what another node has written since is its own."""
        present = [one for one in some if one.written is not None]
        conditions = [mod_revision_is(self._key(one), one.revision) for one in present]
        deletes = [Delete(self._key(one)) for one in present]
        if present and await self._transact(conditions, deletes) is None and len(some) > 1:
            for one in some:
                await self._remove([one])
            return
        for one in some:
            if one.left or self._has_ended(one, self._clock()):
                self._forget(one)
            else:
                # It was heard from while its record went.
                one.written = None

    async def _transact(
        self, conditions: Sequence[Compare], operations: Sequence[Operation]
    ) -> int | None:
        """Return the revision of the write; None if a condition does not hold."""
        result = await self._store.transaction(Txn(tuple(conditions), tuple(operations)))
        return result.revision if result.succeeded else None

    def _forget(self, known: _Known) -> None:
        self._known.pop(known.wanted.trainer_id, None)
        self._on_count(len(self._known))

    def _key(self, known: _Known) -> str:
        return self._keys.trainer(known.wanted.trainer_id)
