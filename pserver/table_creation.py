"""Creating a table: one transaction on ``tables/<name>``, then every living node takes it in.

The transaction decides which of two tables of one name there is. Nodes learn of a table from
the record, now or when they start; the caller of a creation waits until all that count as alive
have it, because the first push may go to any of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from backstay.consensus import ClusterView
from backstay.consensus.keys import Keys
from backstay.consensus.records import MemberRecord, TableRecord
from backstay.consensus.store import CoordinationStore, Get, Put, Txn, absent
from backstay.errors import BackstayError, ServerUnavailable, StoreUnavailable
from backstay.pserver.peers import PeerCalls
from backstay.pserver.table_registry import KnownTable, TableRegistry

__all__ = ["TableCreation", "TableKeeper"]

RETRY_PAUSE_S = 0.05

log = logging.getLogger(__name__)


class TableKeeper:
    """Takes tables in on this node: in the data plane first, then in the registry."""

    def __init__(self, registry: TableRegistry, create_native: Callable[[str], None]) -> None:
        """Prepare; ``create_native`` creates a table in the data plane."""
        self._registry = registry
        self._create_native = create_native
        self._failed: dict[str, str] = {}

    def apply(self, spec_json: str) -> KnownTable:
        """Take in a table by its description; one that is there already passes.

        Raises:
            BackstayError: It is refused; see ``TableRegistry.check``.
        """
        table = self._registry.check(spec_json)
        self._create_native(table.spec_json)
        self._registry.add(table)
        return table

    def apply_records(self, tables: dict[str, TableRecord]) -> list[str]:
        """Take in what the records hold and this node does not have; return the failures."""
        failures = []
        for name, record in tables.items():
            if name in self._registry:
                continue
            try:
                self.apply(record.spec_json)
            except BackstayError as error:
                failures.append(f"table {name!r}: {error}")
                if self._failed.get(name) != str(error):
                    self._failed[name] = str(error)
                    log.error("table %r of the cluster cannot be had here: %s", name, error)
        return failures


class TableCreation:
    """One node's part in creating tables, as the node that was asked."""

    def __init__(
        self,
        *,
        store: CoordinationStore,
        keys: Keys,
        view: ClusterView,
        node_id: str,
        registry: TableRegistry,
        keeper: TableKeeper,
        calls: PeerCalls,
        deadline_ms: int,
    ) -> None:
        """Prepare.

        Args:
            store: The coordination store.
            keys: Where the records are.
            view: Who is in the cluster.
            node_id: This node.
            registry: The tables that this node knows.
            keeper: Takes a table in on this node.
            calls: Asks the other nodes.
            deadline_ms: How long living nodes are waited for.
        """
        self._store = store
        self._keys = keys
        self._view = view
        self._node_id = node_id
        self._registry = registry
        self._keeper = keeper
        self._calls = calls
        self._deadline_s = deadline_ms / 1000

    async def create(self, spec_json: str) -> KnownTable:
        """Have the table on every living node and return it.

        Raises:
            TableConflict: The name is taken with other settings.
            ServerUnavailable: The store, or a node that counts as alive, did not answer. Repeat
                the call.
        """
        wanted = self._registry.check(spec_json)
        if wanted.name not in self._registry:
            wanted = await self._record(wanted)
            self._keeper.apply(wanted.spec_json)
        await self._wait_for_others(wanted)
        return wanted

    async def _record(self, wanted: KnownTable) -> KnownTable:
        """Make the record, or meet the one that is there."""
        key = self._keys.table(wanted.name)
        record = TableRecord(wanted.spec_json, wanted.id)
        try:
            result = await self._store.transaction(
                Txn((absent(key),), (Put(key, record.to_json()),), (Get(key),))
            )
        except StoreUnavailable as error:
            raise ServerUnavailable(
                f"table {wanted.name!r} cannot be created while the coordination store does not "
                f"answer; repeat the call. {error}"
            ) from error
        if not result.succeeded and result.results[0] is not None:
            # Whoever was first: its settings are the table's. Then ours must be equal.
            self._keeper.apply(TableRecord.from_json(result.results[0].value).spec_json)
            return self._registry.check(wanted.spec_json)
        log.info("table %r is created", wanted.name)
        return wanted

    async def _wait_for_others(self, table: KnownTable) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._deadline_s
        done: set[int] = {0}
        failures: dict[int, tuple[MemberRecord, str]] = {}
        while True:
            waiting = [
                member
                for member in self._view.snapshot().members.values()
                if member.instance not in done and member.node_id != self._node_id
            ]
            if not waiting:
                return
            if loop.time() >= deadline:
                lacking = "; ".join(
                    f"{member.node_id} at {member.control_address}: "
                    f"{failures.get(member.instance, (member, 'not asked'))[1]}"
                    for member in waiting
                )
                raise ServerUnavailable(
                    f"table {table.name!r} is not on every node yet; repeat the call. {lacking}"
                )
            outcomes = await asyncio.gather(
                *(self._calls.apply_table(one.control_address, table.spec_json) for one in waiting),
                return_exceptions=True,
            )
            for member, outcome in zip(waiting, outcomes, strict=True):
                if outcome is None:
                    done.add(member.instance)
                elif not isinstance(outcome, BackstayError) or not outcome.retry_safe:
                    raise outcome
                else:
                    address = member.control_address
                    reason = str(outcome).removeprefix(f"{address}: ")
                    failures[member.instance] = (member, reason)
            if any(outcome is not None for outcome in outcomes):
                await asyncio.sleep(RETRY_PAUSE_S)
