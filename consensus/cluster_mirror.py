"""The mirror of the cluster's records in one process, as the store last told them.

``ClusterMirror`` is fed with what is read and watched; services and the controller take
immutable snapshots of it and wait for newer ones. A record that cannot be read is never taken for
one that is not there: it is listed, and the controller must not decide. Everything here runs in
one asyncio event loop, makes no network call and reads no clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol

from backstay.consensus.records import (
    ClusterConfig,
    ClusterHealthRecord,
    ControllerRecord,
    MemberRecord,
    NodeRecord,
    NodeReport,
    RoutingTable,
    TableRecord,
)
from backstay.consensus.records.checkpoints import (
    CheckpointRecord,
    LossAcceptance,
    RestorePlan,
    SaveRecord,
)
from backstay.consensus.records.exports import ExportRecord
from backstay.consensus.records.keys import Keys
from backstay.consensus.records.packing import unpack
from backstay.consensus.records.plans import ResizePlan
from backstay.consensus.records.repairs import RepairRecord
from backstay.consensus.records.settings import ClusterSettings
from backstay.consensus.store import KeyValue, RangeResult
from backstay.errors import InvalidRequest
from backstay.json_record import JsonRecord

__all__ = ["ClusterMirror", "ClusterSnapshot", "ClusterView", "DeathRecord", "seen_routing"]

_NOT_TOLD = ClusterHealthRecord("UNKNOWN", "no controller has said anything yet", ())


@dataclass(frozen=True)
class DeathRecord(JsonRecord, what="death record", names={"node_id": "id", "noticed_by": "by"}):
    """``gone/<instance>``: a process that is known for sure to be gone.

    Attributes:
        instance: The process.
        node_id: Its node's id; ``id`` in the JSON form.
        noticed_by: Id of the node that has the evidence; ``by`` in the JSON form.
        reason: The evidence, in words.
        time: ISO 8601 text, for people only.
    """

    instance: int
    node_id: str
    noticed_by: str
    reason: str
    time: str


@dataclass(frozen=True)
class ClusterSnapshot:
    """The records at one moment.

    Attributes:
        revision: Grows with each change of anything below, in this process only; use it to
            wait for the next change. It is neither the store's nor the routing's.
        config: What is fixed for the cluster; None before it is read.
        settings: What may change while it runs; the defaults where there is no record.
        members: The nodes with a lease that is alive, by id.
        routing: The routing table; None before there is one.
        routing_json: The same as the store has it.
        routing_revision: The store's revision of the last write of the routing record.
        reports: What masters report, by instance.
        deaths: Processes known to be gone, by instance.
        status: How the cluster does, as the controller said.
        controller: The controller; None while there is none.
        tables: The tables by name.
        checkpoint: The newest whole checkpoint; None if there is none.
        save: The checkpoint that is being written; None if none is.
        restore: The checkpoint that is being restored, or was last; None if none ever was.
        restore_revision: The store's revision of the last write of that record.
        loss: The loss of slots that an operator accepted last; None if none ever was.
        plan: The resize, drain or rebalance that was asked for last; None before the first.
        plan_revision: The store's revision of the last write of that record.
        repairs: The newest repairs by id, for people.
        exports: The exports that go on, by name.
        unreadable: Keys whose record this version cannot read, each with the reason.
        trouble: Why the store does not answer; empty while it does.
    """

    revision: int = 0
    config: ClusterConfig | None = None
    settings: ClusterSettings = field(default_factory=ClusterSettings)
    members: Mapping[str, MemberRecord] = field(default_factory=lambda: MappingProxyType({}))
    routing: RoutingTable | None = None
    routing_json: str = ""
    routing_revision: int = 0
    reports: Mapping[int, NodeReport] = field(default_factory=lambda: MappingProxyType({}))
    deaths: Mapping[int, DeathRecord] = field(default_factory=lambda: MappingProxyType({}))
    status: ClusterHealthRecord = _NOT_TOLD
    controller: ControllerRecord | None = None
    tables: Mapping[str, TableRecord] = field(default_factory=lambda: MappingProxyType({}))
    checkpoint: CheckpointRecord | None = None
    save: SaveRecord | None = None
    restore: RestorePlan | None = None
    restore_revision: int = 0
    loss: LossAcceptance | None = None
    plan: ResizePlan | None = None
    plan_revision: int = 0
    repairs: Mapping[int, RepairRecord] = field(default_factory=lambda: MappingProxyType({}))
    exports: Mapping[str, ExportRecord] = field(default_factory=lambda: MappingProxyType({}))
    unreadable: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    trouble: str = ""

    @property
    def health(self) -> ClusterHealthRecord:
        """How the cluster does, as far as this process can know."""
        if self.trouble:
            return ClusterHealthRecord("UNKNOWN", self.trouble, tuple(sorted(self.members)))
        return self.status

    def member_of(self, instance: int) -> MemberRecord | None:
        """Return the registration of a process; None if it has none."""
        found = (member for member in self.members.values() if member.instance == instance)
        return next(found, None)


class ClusterView(Protocol):
    """Read access to the records."""

    @property
    def cluster_id(self) -> str:
        """Name of the cluster."""

    def snapshot(self) -> ClusterSnapshot:
        """Return what is known now."""

    async def newer_than(self, revision: int) -> ClusterSnapshot:
        """Wait until the revision is above ``revision`` and return what is known then."""


class ClusterMirror:
    """A ``ClusterView`` that others feed with what the store says."""

    def __init__(self, keys: Keys) -> None:
        """Begin with nothing known."""
        self._keys = keys
        self._seen: dict[str, int] = {}
        self._loaded: dict[str, int] = {}
        self._changed = asyncio.Event()
        self._snapshot = ClusterSnapshot()

    @property
    def cluster_id(self) -> str:
        """Name of the cluster."""
        return self._keys.cluster

    def snapshot(self) -> ClusterSnapshot:
        """Return what is known now."""
        return self._snapshot

    async def newer_than(self, revision: int) -> ClusterSnapshot:
        """Wait until the revision is above ``revision`` and return what is known then."""
        while self._snapshot.revision <= revision:
            await self._changed.wait()
        return self._snapshot

    def load(self, prefix: str, found: RangeResult) -> None:
        """Take over all records below a prefix; a record that is not among the items is gone.

        What is older than what was loaded already counts for nothing: of two readers of one
        prefix, one may be behind the other. A prefix is either always read whole or never.
        """
        if found.revision < self._loaded.get(prefix, 0):
            return
        self._loaded[prefix] = found.revision
        present = found.values()
        changes = _Changes(self._snapshot, self._keys)
        for key in [key for key in self._seen if key.startswith(prefix) and key not in present]:
            del self._seen[key]
            changes.remove(key)
        for key, item in present.items():
            if self._seen.get(key, 0) < item.mod_revision:
                self._seen[key] = item.mod_revision
                changes.put(item)
        if changes.any:
            self._put(changes.snapshot())

    def revision_of(self, key: str) -> int:
        """Return the store's revision of the last write of a record; 0 if it is not there."""
        return self._seen.get(key, 0)

    def set_trouble(self, reason: str) -> None:
        """Note why the store does not answer; empty when it does again."""
        if self._snapshot.trouble != reason:
            self._put(replace(self._snapshot, trouble=reason))

    def _put(self, snapshot: ClusterSnapshot) -> None:
        self._snapshot = replace(snapshot, revision=self._snapshot.revision + 1)
        # Wake all callers that wait now; later callers wait for the next change.
        self._changed.set()
        self._changed = asyncio.Event()


class _Changes:
    """A snapshot in the making: what differs from the one before."""

    def __init__(self, before: ClusterSnapshot, keys: Keys) -> None:
        self._before = before
        self._keys = keys
        self._values: dict[str, Any] = {}
        self._maps: dict[str, dict[Any, Any]] = {}
        self.any = False

    def put(self, item: KeyValue) -> None:
        self.any = True
        unreadable = self._map("unreadable")
        try:
            self._read(item)
        except InvalidRequest as error:
            # Repairs are for people, and no decision goes by an export: one that cannot be read
            # must not stop decisions.
            if not item.key.startswith((self._keys.repairs, self._keys.exports)):
                unreadable[item.key] = str(error)
        else:
            unreadable.pop(item.key, None)

    def remove(self, key: str) -> None:
        self.any = True
        keys = self._keys
        self._map("unreadable").pop(key, None)
        if key == keys.routing:
            # Kept: no routing record is no reason to forget which slots are where.
            self._map("unreadable")[key] = "the routing record was removed"
        elif key == keys.status:
            self._values["status"] = _NOT_TOLD
        elif key == keys.controller:
            self._values["controller"] = None
        elif key in (keys.checkpoint, keys.save, keys.restore, keys.loss):
            self._values[key.removeprefix(keys.plans)] = None
        elif key == keys.settings:
            self._values["settings"] = ClusterSettings()
        elif key == keys.plan:
            self._values.update(plan=None, plan_revision=0)
        elif key == keys.config:
            self._map("unreadable")[key] = "the config record was removed"
        elif key.startswith(keys.exports):
            self._map("exports").pop(key.removeprefix(keys.exports), None)
        elif key.startswith(keys.members):
            self._map("members").pop(key.removeprefix(keys.members), None)
        elif key.startswith(keys.tables):
            self._map("tables").pop(key.removeprefix(keys.tables), None)
        else:
            for prefix, name in (
                (keys.reports, "reports"),
                (keys.deaths, "deaths"),
                (keys.repairs, "repairs"),
            ):
                number = key.removeprefix(prefix)
                if key.startswith(prefix) and number.isdigit():
                    self._map(name).pop(int(number), None)

    def snapshot(self) -> ClusterSnapshot:
        for name, content in self._maps.items():
            self._values[name] = MappingProxyType(content)
        return replace(self._before, **self._values)

    def _read(self, item: KeyValue) -> None:
        keys, key = self._keys, item.key
        if key == keys.routing:
            text = unpack(item.value)
            self._values["routing"] = RoutingTable.from_json(text)
            self._values["routing_json"] = text
            self._values["routing_revision"] = item.mod_revision
        elif key == keys.config:
            self._values["config"] = ClusterConfig.from_json(item.value)
        elif key == keys.checkpoint:
            self._values["checkpoint"] = CheckpointRecord.from_json(item.value)
        elif key == keys.save:
            self._values["save"] = SaveRecord.from_json(item.value)
        elif key == keys.restore:
            self._values["restore"] = RestorePlan.from_json(item.value)
            self._values["restore_revision"] = item.mod_revision
        elif key == keys.loss:
            self._values["loss"] = LossAcceptance.from_json(item.value)
        elif key == keys.settings:
            self._values["settings"] = ClusterSettings.from_json(item.value)
        elif key == keys.status:
            self._values["status"] = ClusterHealthRecord.from_json(item.value)
        elif key == keys.controller:
            self._values["controller"] = ControllerRecord.from_json(item.value)
        elif key == keys.plan:
            self._values["plan"] = ResizePlan.from_json(item.value)
            self._values["plan_revision"] = item.mod_revision
        elif key.startswith(keys.repairs):
            repair = RepairRecord.from_json(item.value)
            self._map("repairs")[repair.repair_id] = repair
        elif key.startswith(keys.exports):
            export = ExportRecord.from_json(item.value)
            if key != keys.export(export.name):
                raise InvalidRequest(f"export record of {export.name!r} under another key")
            self._map("exports")[export.name] = export
        elif key.startswith(keys.members):
            member = MemberRecord.from_json(item.value)
            if key != keys.member(member.node_id):
                raise InvalidRequest(f"member record of {member.node_id!r} under another key")
            self._map("members")[member.node_id] = member
        elif key.startswith(keys.reports):
            report = NodeReport.from_json(item.value)
            self._map("reports")[report.instance] = report
        elif key.startswith(keys.deaths):
            death = DeathRecord.from_json(item.value)
            self._map("deaths")[death.instance] = death
        elif key.startswith(keys.tables):
            name = key.removeprefix(keys.tables)
            self._map("tables")[name] = TableRecord.from_json(item.value)

    def _map(self, name: str) -> dict[Any, Any]:
        if name not in self._maps:
            self._maps[name] = dict(getattr(self._before, name))
        return self._maps[name]


def seen_routing(snapshot: ClusterSnapshot) -> RoutingTable | None:
    """Return the routing table with the nodes' status, and with nodes that have no slot yet.

    A process without a living registration is ``unreachable``.
    """
    routing = snapshot.routing
    if routing is None:
        return None
    nodes: list[NodeRecord] = []
    for node in routing.nodes:
        member = snapshot.members.get(node.node_id)
        alive = member is not None and member.instance == node.instance
        status = member.status if member is not None and alive else "unreachable"
        nodes.append(replace(node, status=status))
    listed = {node.node_id for node in nodes} | {str(node.instance) for node in nodes}
    nodes += [
        member.node()
        for node_id, member in sorted(snapshot.members.items())
        if node_id not in listed and str(member.instance) not in listed
    ]
    return replace(routing, nodes=tuple(nodes))
