"""Creating and changing tables: one transaction on ``tables/<name>``, then every node follows.

The transaction decides which of two tables of one name there is, and which settings it has: each
change is a revision. Nodes learn of it from the record, now or when they start; the caller waits
until all that count as alive have it, because the next push may go to any of them.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from backstay.consensus import ClusterView
from backstay.consensus.records import DeclaredTable, MemberRecord, TableRecord
from backstay.consensus.records.keys import Keys
from backstay.consensus.store import CoordinationStore, Get, Put, Txn, absent, mod_revision_is
from backstay.errors import (
    BackstayError,
    ConfigError,
    InvalidRequest,
    ServerUnavailable,
    StoreUnavailable,
)
from backstay.pserver.peers import PeerCalls
from backstay.pserver.tables.registry import KnownTable, TableRegistry
from backstay.pserver.tables.settings import settings_changed, with_assignments

__all__ = ["Declarer", "OtherSettings", "Outcome", "TableCreation", "TableKeeper", "settings_of"]

RETRY_PAUSE_S = 0.05
# Others change the same table at the same moment.
CHANGE_ATTEMPTS = 16

OtherSettings: TypeAlias = Literal["refuse", "update", "keep"]

log = logging.getLogger(__name__)


class TableKeeper:
    """Takes tables in on this node: in the data plane first, then in the registry."""

    def __init__(self, registry: TableRegistry, create_native: Callable[[str, int], None]) -> None:
        """Prepare; ``create_native`` creates or changes a table in the data plane."""
        self._registry = registry
        self._create_native = create_native
        self._failed: dict[tuple[str, int], str] = {}

    def apply(self, spec_json: str, revision: int) -> KnownTable:
        """Take in a table, or newer settings of one; an older revision changes nothing.

        Raises:
            BackstayError: It is refused; see ``TableRegistry.recorded``.
        """
        table = self._registry.recorded(spec_json, revision)
        if table.revision == revision:
            self._create_native(table.spec_json, revision)
            self._registry.add(table)
        return table

    def have(self, spec_json: str) -> KnownTable:
        """Have a table whose rows fit; one that is there keeps its settings.

        Raises:
            BackstayError: It is refused; see ``TableRegistry.recorded``.
        """
        name = self._registry.described(spec_json).name
        if name in self._registry:
            present = self._registry.get(name)
            self._registry.changed(present, spec_json)
            return present
        # The cluster's record, of a later revision, is on its way.
        return self.apply(spec_json, 0)

    def apply_records(self, tables: dict[str, TableRecord]) -> list[str]:
        """Take in what the records hold and this node does not have; return the failures."""
        failures = []
        for name, record in tables.items():
            if name in self._registry and self._registry.get(name).revision >= record.revision:
                continue
            try:
                self.apply(record.spec_json, record.revision)
            except BackstayError as error:
                failures.append(f"table {name!r}: {error}")
                if self._failed.get((name, record.revision)) != str(error):
                    self._failed[name, record.revision] = str(error)
                    log.error("table %r of the cluster cannot be had here: %s", name, error)
        return failures


@dataclass(frozen=True)
class Declarer:
    """The start of a job for which a table is declared.

    Attributes:
        job: Number of the job's streams.
        start: Which of its starts it is.
    """

    job: int
    start: int


@dataclass(frozen=True)
class Outcome:
    """A table, and what became of other settings that were asked for.

    Attributes:
        table: As it is now.
        changed: What was changed, "learning_rate: 0.1 -> 0.01" each.
        kept: What was asked for and not taken over, in the same form.
    """

    table: KnownTable
    changed: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


class TableCreation:
    """One node's part in creating and changing tables, as the node that was asked."""

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

    async def create(
        self,
        spec_json: str,
        *,
        other_settings: OtherSettings = "refuse",
        declarer: Declarer | None = None,
    ) -> Outcome:
        """Have the table on every living node.

        Args:
            spec_json: Its description.
            other_settings: What happens to a table that is there with other settings.
            declarer: With "update": the start of a job that this is for. Its first worker sets
                the settings, and only if they differ from what the last start asked for.

        Raises:
            TableConflict: The name is taken with other rows, or with other settings that are to
                be refused.
            ServerUnavailable: The store, or a node that counts as alive, did not answer. Repeat
                the call.
        """
        wanted = self._registry.described(spec_json)
        if wanted.name not in self._registry:
            self._registry.check(spec_json)
            await self._record(wanted, declarer)
        if other_settings == "refuse":
            outcome = Outcome(self._registry.check(spec_json))
        else:
            # Refuses other rows, whatever the settings are.
            self._registry.changed(self._registry.get(wanted.name), spec_json)
            outcome = await self._declare(wanted, other_settings, declarer)
        await self._wait_for_others(outcome.table)
        return outcome

    async def have(self, spec_json: str) -> KnownTable:
        """Have a table whose rows fit on every living node; one that is there stays as it is.

        Raises:
            TableConflict: The name is taken with other rows.
            ServerUnavailable: As of ``create``.
        """
        return (await self.create(spec_json, other_settings="keep")).table

    async def set(
        self, name: str, settings: Mapping[str, Any], *, dry_run: bool = False
    ) -> Outcome:
        """Change settings of a table, on every living node.

        Args:
            name: The table's.
            settings: Those of its optimizer by name, and ``non_finite``.
            dry_run: Only say what would change.

        Raises:
            UnknownTable: There is no such table.
            ConfigError: There is no such setting, or its value is out of range.
            TableConflict: The setting cannot change on a table that has rows.
            ServerUnavailable: As of ``create``.
        """

        def decide(present: KnownTable, record: TableRecord) -> TableRecord | None:
            wanted = with_assignments(present.spec_json, settings)
            return _renewed(record, self._registry.changed(present, wanted))

        self._registry.get(name)
        if dry_run:
            _, record = await self._read(name)
            present = self._known(name, record)
            renewed = decide(present, record)
            if renewed is None:
                return Outcome(present)
            return Outcome(present, settings_changed(present.spec_json, renewed.spec_json))
        outcome = await self._change(name, decide)
        await self._wait_for_others(outcome.table)
        return outcome

    async def _declare(
        self, wanted: KnownTable, other_settings: OtherSettings, declarer: Declarer | None
    ) -> Outcome:
        """Decide what a table that is there becomes by a declaration with the same rows."""

        def decide(present: KnownTable, record: TableRecord) -> TableRecord | None:
            renewed = record
            if declarer is not None:
                known = record.declared
                if known is not None and known.job == declarer.job:
                    if known.start >= declarer.start:
                        return None
                    # The same file again: what was set by hand since stays.
                    is_news = self._canonical(known.spec_json) != wanted.spec_json
                else:
                    is_news = True
                told = DeclaredTable(declarer.job, declarer.start, wanted.spec_json)
                renewed = replace(record, declared=told)
                if not is_news:
                    return renewed
            return _renewed(renewed, self._registry.changed(present, wanted.spec_json)) or (
                renewed if renewed != record else None
            )

        if other_settings == "keep":
            outcome = Outcome(self._registry.get(wanted.name))
        else:
            outcome = await self._change(wanted.name, decide)
        kept = settings_changed(outcome.table.spec_json, wanted.spec_json)
        return replace(outcome, kept=kept)

    async def _change(
        self, name: str, decide: Callable[[KnownTable, TableRecord], TableRecord | None]
    ) -> Outcome:
        """Replace a table's record by what is decided of it as it is; None: it stays."""
        key = self._keys.table(name)
        for _ in range(CHANGE_ATTEMPTS):
            at, record = await self._read(name)
            present = self._known(name, record)
            renewed = decide(present, record)
            if renewed is None:
                return Outcome(self._keeper.apply(present.spec_json, present.revision))
            written = await self._store_answers(
                name,
                self._store.transaction(
                    Txn((mod_revision_is(key, at),), (Put(key, renewed.to_json()),), ())
                ),
            )
            if written.succeeded:
                changed = settings_changed(present.spec_json, renewed.spec_json)
                if changed:
                    what = ", ".join(changed)
                    log.info("table %r, revision %d: %s", name, renewed.revision, what)
                return Outcome(self._keeper.apply(renewed.spec_json, renewed.revision), changed)
        raise ServerUnavailable(f"table {name!r} is being changed by others; repeat the call")

    async def _read(self, name: str) -> tuple[int, TableRecord]:
        found = await self._store_answers(name, self._store.get(self._keys.table(name)))
        if found is None:
            raise InvalidRequest(f"table {name!r} has no record in the coordination store")
        return found.mod_revision, TableRecord.from_json(found.value)

    def _known(self, name: str, record: TableRecord) -> KnownTable:
        text = self._canonical(record.spec_json)
        return KnownTable(name, record.table_id, text, record.revision)

    def _canonical(self, spec_json: str) -> str:
        return self._registry.described(spec_json).spec_json

    async def _store_answers(self, name: str, call: Any) -> Any:
        try:
            return await call
        except StoreUnavailable as error:
            raise ServerUnavailable(
                f"table {name!r} cannot be created or changed while the coordination store does "
                f"not answer; repeat the call. {error}"
            ) from error

    async def _record(self, wanted: KnownTable, declarer: Declarer | None) -> None:
        """Make the record, or take in the one that is there."""
        key = self._keys.table(wanted.name)
        declared = None
        if declarer is not None:
            declared = DeclaredTable(declarer.job, declarer.start, wanted.spec_json)
        record = TableRecord(wanted.spec_json, wanted.id, declared=declared)
        result = await self._store_answers(
            wanted.name,
            self._store.transaction(
                Txn((absent(key),), (Put(key, record.to_json()),), (Get(key),))
            ),
        )
        if result.succeeded:
            log.info("table %r is created", wanted.name)
        elif result.results[0] is not None:
            # The first caller's settings are the table's.
            record = TableRecord.from_json(result.results[0].value)
        self._keeper.apply(record.spec_json, record.revision)

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
                *(
                    self._calls.apply_table(one.control_address, table.spec_json, table.revision)
                    for one in waiting
                ),
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


def _renewed(record: TableRecord, table: KnownTable) -> TableRecord | None:
    """Return a record with the settings of a table; None if it has them."""
    if table.revision == record.revision:
        return None
    return replace(record, spec_json=table.spec_json, revision=table.revision)


def settings_of(text: str) -> Mapping[str, Any]:
    """Read settings that came as a JSON object.

    Raises:
        ConfigError: They are none.
    """
    try:
        settings = json.loads(text)
    except ValueError:
        settings = None
    if not isinstance(settings, dict) or not settings:
        raise ConfigError("settings: expected an object with at least one setting")
    return settings
