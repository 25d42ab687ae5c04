"""This node's place in the cluster: its lease, and its record under ``pservers/``.

The lease is renewed for as long as the node runs; if it is lost, the same process registers
again. A node id belongs to one living process: a second one that claims it is refused, and the
record of a dead predecessor is removed as soon as it is sure that it is dead. What the node says
about itself (status, sync) is level-triggered: the record is brought to what is wanted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from backstay.consensus.clock import clock_s
from backstay.consensus.cluster_mirror import DeathRecord
from backstay.consensus.records import ClusterConfig, MemberRecord
from backstay.consensus.records.keys import Keys
from backstay.consensus.records.nodes import MemberStatus
from backstay.consensus.store import (
    CoordinationStore,
    Get,
    KeyValue,
    Put,
    Txn,
    absent,
    mod_revision_is,
    value_is,
    version_is,
)
from backstay.consensus.store.follow import KeepAlive
from backstay.errors import (
    ConfigError,
    InvalidRequest,
    LeaseLost,
    StoreDataLost,
    StoreError,
    StoreUnavailable,
    TakenForDead,
)
from backstay.logs import fields
from backstay.pserver.membership.departures import now_text
from backstay.pserver.membership.own_node import OwnNode

__all__ = ["Predecessor", "Registration"]

RETRY_PAUSE_S = 0.1
# How long a predecessor that cannot be judged is waited for, in units of its lease's time.
PREDECESSOR_TTLS_MAX = 10
# Clocks of two machines run at slightly different speeds.
LEASE_MARGIN_PART = 20
LEASE_MARGIN_MIN_MS = 50

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Predecessor:
    """What is known about the process that holds this node's id.

    Attributes:
        is_gone: It is surely dead.
        answers: It answers, so it is surely alive.
    """

    is_gone: bool
    answers: bool


Judge = Callable[[MemberRecord], Awaitable[Predecessor]]


class Registration:
    """Holds the lease and keeps the record as it is wanted."""

    def __init__(
        self,
        store: CoordinationStore,
        keys: Keys,
        config: ClusterConfig,
        own: OwnNode,
        *,
        ttl_ms: int,
        judge: Judge,
        on_alive: Callable[[float], None],
        on_trouble: Callable[[str], None],
        catch_up: Callable[[], Awaitable[None]],
    ) -> None:
        """Prepare; call it while the event loop runs.

        Args:
            store: The coordination store.
            keys: Where the records are.
            config: The cluster's config record, as this node met it.
            own: This node, as it is to be known; lease and incarnation are filled in.
            ttl_ms: Time to live of the lease.
            judge: Says whether a process that holds the same id is dead or alive.
            on_alive: Called with the moment of ``clock_s`` until which the lease is surely alive;
                0 when it is lost.
            on_trouble: Called with the reason when the lease cannot be renewed, and with an
                empty string when it is renewed again.
            catch_up: Called with a new registration before it allows anything: its slots may
                have been given to others while there was none.
        """
        self._store = store
        self._keys = keys
        self._config = config
        self._own = own
        self._ttl_ms = ttl_ms
        self._judge = judge
        self._on_alive = on_alive
        self._on_trouble = on_trouble
        self._catch_up = catch_up
        self._loop = asyncio.get_running_loop()
        self._revision = 0
        self._published: MemberRecord | None = None
        self._changed = asyncio.Event()
        self._watchdog: asyncio.TimerHandle | None = None
        self._keepalive: KeepAlive | None = None
        self._leaving = False
        self._said = ""

    @property
    def is_registered(self) -> bool:
        """Whether this process has, or had, a place in the cluster."""
        return self._published is not None

    async def register(self) -> None:
        """Get a lease and claim the node's id; waits while the store does not answer.

        Raises:
            ConfigError: Another living process has this id.
            TakenForDead: Another node had evidence that this process is gone.
            StoreError: The store refuses.
        """
        margin_ms = max(LEASE_MARGIN_MIN_MS, self._ttl_ms // LEASE_MARGIN_PART)
        while True:
            keepalive = KeepAlive(self._store, self._ttl_ms, self._alive, margin_ms=margin_ms)
            try:
                lease = await keepalive.grant()
                await self._claim(lease.id)
            except StoreUnavailable as error:
                self._on_trouble(f"the coordination store does not answer: {error}")
                await asyncio.sleep(RETRY_PAUSE_S)
            except LeaseLost as error:
                log.warning("registering again: %s", error)
                await asyncio.sleep(RETRY_PAUSE_S)
            else:
                await self._catch_up()
                self._keepalive = keepalive
                self._alive(keepalive.alive_until)
                return

    async def hold(self, work: Callable[[int], Awaitable[None]]) -> None:
        """Renew the lease, keep the record, and run ``work`` with each lease; never returns.

        Args:
            work: Runs as long as the lease; it must not return.

        Raises:
            ConfigError, TakenForDead: As for ``register``, when the lease was lost.
        """
        while True:
            if self._keepalive is None and not await self._register_again():
                continue
            assert self._keepalive is not None
            tasks = [
                asyncio.ensure_future(self._keepalive.run()),
                asyncio.ensure_future(self._publish(self._keepalive.lease)),
                asyncio.ensure_future(work(self._keepalive.lease)),
            ]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            self._keepalive = None
            self._on_alive(0.0)
            if self._leaving:
                await asyncio.Event().wait()
            for outcome in outcomes:
                if isinstance(outcome, LeaseLost):
                    log.warning("the lease is lost, registering again: %s", outcome)
                elif isinstance(outcome, StoreError):
                    await self._wait_out(outcome)
                elif isinstance(outcome, Exception):
                    raise outcome

    async def _register_again(self) -> bool:
        """Register after the lease was lost; False if the store cannot be relied on now."""
        try:
            await self.register()
        except StoreError as error:
            await self._wait_out(error)
            return False
        return True

    async def _wait_out(self, error: StoreError) -> None:
        """Go on with what is known: what the store says now cannot be relied on."""
        if str(error) != self._said:
            self._said = str(error)
            log.critical("%s; serving on without the store", error)
        self._on_trouble(str(error))
        await asyncio.sleep(self._ttl_ms / 1000)

    async def set_status(self, status: MemberStatus) -> None:
        """Say this status, and wait until the store has it."""
        self._want(replace(self._own.record, status=status))
        while self._published is None or self._published.status != status:
            await self._changed.wait()

    def set_sync(self, sync: bool) -> None:
        """Say whether all replicas here are in sync."""
        self._want(replace(self._own.record, sync=sync))

    async def leave(self, reason: str) -> None:
        """End the lease: the process serves nothing any more, so no node has to wait for it.

        Raises:
            StoreError: The store does not answer; the lease ends by itself.
        """
        if self._keepalive is None:
            return
        self._leaving = True
        own = self._own.record
        death = DeathRecord(own.instance, own.node_id, own.node_id, reason, now_text())
        await self._store.put(self._keys.death(own.instance), death.to_json())
        await self._keepalive.revoke()

    def _want(self, record: MemberRecord) -> None:
        self._own.record = record
        self._signal()

    def _signal(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _alive(self, until: float) -> None:
        if self._keepalive is None:
            # A lease by which nothing is registered allows nothing: the slots of the one before
            # may be another's by now.
            return
        if until <= clock_s():
            return
        self._on_alive(until)
        self._on_trouble("")
        if self._watchdog is not None:
            self._watchdog.cancel()
        # Renewed at each third: at two thirds one renewal has failed.
        self._watchdog = self._loop.call_later(self._ttl_ms * 2 / 3000, self._overdue, now_text())

    def _overdue(self, last_answer: str) -> None:
        self._on_trouble(f"the coordination store has not answered since {last_answer}")

    def close(self) -> None:
        """Stop the clock that notices a store that does not answer."""
        if self._watchdog is not None:
            self._watchdog.cancel()

    async def _claim(self, lease: int) -> None:
        """Create the record, after its predecessor is gone."""
        wanted = self._own.record
        member, counter = self._keys.member(wanted.node_id), self._keys.incarnation(wanted.node_id)
        deadline = self._loop.time() + PREDECESSOR_TTLS_MAX * self._ttl_ms / 1000
        while True:
            counted = await self._store.get(counter)
            version = counted.version if counted is not None else 0
            record = replace(wanted, lease=lease, incarnation=version + 1)
            result = await self._store.transaction(
                Txn(
                    (
                        absent(member),
                        version_is(counter, version),
                        absent(self._keys.death(wanted.instance)),
                        value_is(self._keys.config, self._config.to_json()),
                    ),
                    success=(
                        Put(member, record.to_json(), lease),
                        Put(counter, str(version + 1)),
                    ),
                    failure=(
                        Get(member),
                        Get(self._keys.death(wanted.instance)),
                        Get(self._keys.config),
                    ),
                )
            )
            if result.succeeded:
                self._take(record, result.revision)
                return
            held, death, config = result.results
            self._check_may_join(death, config)
            if held is not None and await self._displace(held, lease, deadline):
                return

    def _check_may_join(self, death: KeyValue | None, config: KeyValue | None) -> None:
        if death is not None:
            raise TakenForDead(
                "this process was taken for dead, and its slots were given to others; start it "
                f"again ({death.value})"
            )
        if config is None or config.value != self._config.to_json():
            raise StoreDataLost(
                f"the record {self._keys.root + self._keys.config!r} is not the one of the cluster "
                "that this node joined: the store has lost its data or was replaced"
            )

    async def _displace(self, held: KeyValue, lease: int, deadline: float) -> bool:
        """Deal with the process that holds the id; True if it is this one, by this lease."""
        try:
            other = MemberRecord.from_json(held.value)
        except InvalidRequest as error:
            raise ConfigError(
                f"node_id: {self._own.record.node_id!r} is registered by a record that this "
                f"version cannot read: {error}"
            ) from error
        if other.instance == self._own.record.instance:
            if held.lease == lease:
                self._take(other, held.mod_revision)
                return True
            # A record of this process, under a lease that was lost or whose grant went unseen.
            await self._store.lease_revoke(held.lease)
            return False
        found = await self._judge(other)
        if found.is_gone:
            return False
        taken = (
            f"node_id: {other.node_id!r} is taken in cluster {self._keys.cluster!r} by a living "
            f"process at {other.control_address} on host {other.host!r} (instance "
            f"{other.instance}); give this node another id, or stop that one"
        )
        if found.answers or self._loop.time() > deadline:
            raise ConfigError(taken)
        log.info(
            "waiting for the lease of an earlier %s at %s to end",
            other.node_id,
            other.control_address,
            extra=fields(instance=other.instance),
        )
        await self._wait_for_end(held, deadline)
        return False

    async def _wait_for_end(self, held: KeyValue, deadline: float) -> None:
        async def gone() -> None:
            async with self._store.watch(held.key, held.mod_revision + 1) as watch:
                async for batch in watch:
                    if any(event.kind == "delete" for event in batch.events):
                        return

        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(gone(), timeout=max(0.0, deadline - self._loop.time()) + 1)

    def _take(self, record: MemberRecord, revision: int) -> None:
        lease, incarnation = record.lease, record.incarnation
        self._own.record = replace(self._own.record, lease=lease, incarnation=incarnation)
        self._published = record
        self._revision = revision
        log.info(
            "registered as %s, for the %d. time",
            record.node_id,
            record.incarnation,
            extra=fields(instance=record.instance, lease=record.lease),
        )
        self._signal()

    async def _publish(self, lease: int) -> None:
        """Bring the record to what is wanted, each time that changes."""
        key = self._keys.member(self._own.record.node_id)
        while True:
            changed = self._changed
            wanted = self._own.record
            if self._published == wanted:
                await changed.wait()
                continue
            try:
                result = await self._store.transaction(
                    Txn(
                        (mod_revision_is(key, self._revision),),
                        success=(Put(key, wanted.to_json(), lease),),
                        failure=(Get(key),),
                    )
                )
            except StoreUnavailable:
                await asyncio.sleep(RETRY_PAUSE_S)
                continue
            if not result.succeeded:
                held = result.results[0]
                if held is None or held.lease != lease:
                    raise LeaseLost("the registration was removed")
                # Our own write, whose answer did not come.
                self._revision = held.mod_revision
                continue
            self._revision = result.revision
            self._published = wanted
            self._signal()
