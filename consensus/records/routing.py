"""The routing table: which processes hold each slot, in which role, at which term.

A value: frozen, checked when made, equal when its content is equal. Its JSON form is the
``routing`` record of the coordination store, the only truth about who holds what; the data
servers read the same text. This module imports ``nodes``,
``json_record``, ``backstay.errors`` and numpy; it knows no clock and no network, and
it decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from backstay.consensus.records.nodes import NodeRecord
from backstay.errors import InvalidRequest
from backstay.json_record import NUMBER_MAX, Count, JsonRecord, Positive

__all__ = [
    "GONE_MAX",
    "NOBODY",
    "NOT_RESTORING",
    "NO_MASTER",
    "REPLICAS_MAX",
    "Restoring",
    "RoutingTable",
    "SlotReplicas",
]

NODE_COUNT_MAX = 2**16 - 1
SLOT_COUNT_MAX = 2**20
# Copies of a slot that a cluster may want.
REPLICAS_MAX = 3
# Processes known to be dead that a routing table remembers.
GONE_MAX = 64
NO_MASTER = -1


class SlotReplicas(NamedTuple):
    """The processes that hold one slot, by their index into the table's ``nodes``.

    Attributes:
        master: Its master, or ``NO_MASTER``.
        in_sync: Backups that have staged everything the master has committed; the master is
            not among them. Without a master: the processes that hold all that was
            acknowledged, of which none is reachable now.
        catching_up: Backups that do not have everything yet.
    """

    master: int
    in_sync: tuple[int, ...] = ()
    catching_up: tuple[int, ...] = ()

    @property
    def synced(self) -> tuple[int, ...]:
        """Master and in-sync backups: each has everything that was acknowledged."""
        return self.in_sync if self.master == NO_MASTER else (self.master, *self.in_sync)

    @property
    def holders(self) -> tuple[int, ...]:
        """All of them."""
        return self.synced + self.catching_up


# The master of a slot that has none.
NOBODY = SlotReplicas(NO_MASTER)


class Restoring(NamedTuple):
    """Slots whose content is to come from a checkpoint before their masters serve them.

    Attributes:
        url: The folder that the checkpoint is in.
        checkpoint: Its id; empty if no slot is restored.
        slots: The slots, in ascending order.
    """

    url: str
    checkpoint: str
    slots: tuple[int, ...]


NOT_RESTORING = Restoring("", "", ())


@dataclass(frozen=True, eq=False)
class RoutingTable:
    """Which nodes have which slot.

    Attributes:
        version: Grows with each change of anything below, from 1.
        nodes: The processes, in an order that the sets refer to.
        replicas: Copies that the cluster wants of each slot.
        replicas_of_slot: For each slot the processes that hold it; equal ones are one object.
        term_of_slot: uint64 [slot_count], read-only: grows when a slot's master or in-sync set
            changes. The fencing token of the slot.
        epoch_of_slot: uint64 [slot_count], read-only: the version at which the slot began
            empty. A replica of another epoch is worthless.
        generation: Grows whenever some slot lost all its copies, and with each restore.
        gone: Instances known for sure to be dead, oldest first.
        restoring: Slots that wait for their content from a checkpoint.
        lost: Slots that lost all their copies and wait for a decision, in ascending order. No
            node has or serves them before a checkpoint is restored or the loss is accepted.
        sets: The distinct values in ``replicas_of_slot``, in the order of their first slot.
        set_of_slot: int64 [slot_count], read-only: index into ``sets``.
        master_of_slot: int64 [slot_count], read-only: index into ``nodes``, or ``NO_MASTER``.
    """

    version: int
    nodes: tuple[NodeRecord, ...]
    replicas: int
    replicas_of_slot: tuple[SlotReplicas, ...]
    term_of_slot: NDArray[np.uint64]
    epoch_of_slot: NDArray[np.uint64]
    generation: int = 0
    gone: tuple[int, ...] = ()
    restoring: Restoring = NOT_RESTORING
    lost: tuple[int, ...] = ()
    sets: tuple[SlotReplicas, ...] = field(init=False)
    set_of_slot: NDArray[np.int64] = field(init=False)
    master_of_slot: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        """Refuse a table that contradicts itself, share equal sets and freeze the arrays."""
        self._check_numbers()
        self._check_nodes()
        index_of: dict[SlotReplicas, int] = {}
        order = [index_of.setdefault(held, len(index_of)) for held in self.replicas_of_slot]
        sets = tuple(index_of)
        _check_sets(sets, len(self.nodes))
        object.__setattr__(self, "sets", sets)
        set_of_slot = np.array(order, dtype=np.int64)
        self._freeze("set_of_slot", set_of_slot)
        object.__setattr__(self, "replicas_of_slot", tuple([sets[index] for index in order]))
        masters = np.array([held.master for held in sets], dtype=np.int64)
        self._freeze("master_of_slot", masters[set_of_slot])
        for name in ("term_of_slot", "epoch_of_slot"):
            self._freeze(name, _numbers(name, getattr(self, name), self.slot_count))
        if int(self.epoch_of_slot.max()) > self.version:
            raise InvalidRequest("routing table: a slot's epoch is after the table's version")

    @property
    def slot_count(self) -> int:
        """Number of slots: a power of two, fixed when the cluster is created."""
        return len(self.replicas_of_slot)

    def __eq__(self, other: object) -> bool:
        """Compare the content."""
        if not isinstance(other, RoutingTable):
            return NotImplemented
        return (
            self.version == other.version
            and self.generation == other.generation
            and self.replicas == other.replicas
            and self.nodes == other.nodes
            and self.gone == other.gone
            and self.restoring == other.restoring
            and self.lost == other.lost
            and self.replicas_of_slot == other.replicas_of_slot
            and np.array_equal(self.term_of_slot, other.term_of_slot)
            and np.array_equal(self.epoch_of_slot, other.epoch_of_slot)
        )

    def __hash__(self) -> int:
        """Agree with ``__eq__``."""
        return hash((self.version, self.nodes, self.replicas_of_slot))

    def slots_per_node(self) -> dict[str, int]:
        """Return the number of slots each node is master of."""
        masters = self.master_of_slot
        counts = np.bincount(masters[masters != NO_MASTER], minlength=len(self.nodes))
        return {node.node_id: int(count) for node, count in zip(self.nodes, counts, strict=True)}

    def to_json(self) -> str:
        """Return the table as the JSON that the coordination store keeps."""
        return _StoredRouting(
            version=self.version,
            generation=self.generation,
            replicas=self.replicas,
            slot_count=self.slot_count,
            nodes=tuple([_StoredNode.of(node) for node in self.nodes]),
            gone=self.gone,
            sets=self.sets,
            set_of_slot=self.set_of_slot.tolist(),
            term_of_slot=self.term_of_slot.tolist(),
            epoch_of_slot=self.epoch_of_slot.tolist(),
            restoring=_StoredRestoring(*self.restoring),
            lost=self.lost,
        ).to_json()

    @classmethod
    def from_json(cls, text: str) -> RoutingTable:
        """Return the table that ``to_json`` gave; no node has a status in it.

        Raises:
            InvalidRequest: It is not of that form.
        """
        stored = _StoredRouting.from_json(text)
        sets = _sets_of(stored)
        return cls(
            version=stored.version,
            nodes=tuple([NodeRecord(**vars(node)) for node in stored.nodes]),
            replicas=stored.replicas,
            replicas_of_slot=tuple([sets[index] for index in stored.set_of_slot]),
            term_of_slot=np.array(stored.term_of_slot, dtype=np.uint64),
            epoch_of_slot=np.array(stored.epoch_of_slot, dtype=np.uint64),
            generation=stored.generation,
            gone=stored.gone,
            restoring=Restoring(**vars(stored.restoring)),
            lost=stored.lost,
        )

    def _check_numbers(self) -> None:
        if not 1 <= self.version <= NUMBER_MAX:
            raise InvalidRequest(f"{_WHAT}: version {self.version} is not at least 1")
        if not 0 <= self.generation < self.version:
            raise InvalidRequest(f"{_WHAT}: generation {self.generation} at version {self.version}")
        if not 1 <= self.replicas <= REPLICAS_MAX:
            raise InvalidRequest(f"{_WHAT}: {self.replicas} replicas; 1 to {REPLICAS_MAX}")
        count = self.slot_count
        if not 1 <= count <= SLOT_COUNT_MAX or count & (count - 1):
            raise InvalidRequest(f"{_WHAT}: slot_count {count} is no power of two")
        if len(self.gone) > GONE_MAX or len(set(self.gone)) != len(self.gone):
            raise InvalidRequest(f"{_WHAT}: gone has over {GONE_MAX} instances, or one twice")
        restored = self.restoring.slots
        if list(restored) != sorted(set(restored)) or (restored and restored[-1] >= count):
            raise InvalidRequest(f"{_WHAT}: restoring names a slot twice, or one of {count} on")
        self._check_lost(restored)

    def _check_lost(self, restored: Sequence[int]) -> None:
        lost = self.lost
        if list(lost) != sorted(set(lost)) or (lost and lost[-1] >= self.slot_count):
            raise InvalidRequest(f"{_WHAT}: lost names a slot twice, or one that does not exist")
        if not set(lost).isdisjoint(restored):
            raise InvalidRequest(f"{_WHAT}: a slot is both lost and restoring")
        if any(self.replicas_of_slot[slot] != NOBODY for slot in lost):
            raise InvalidRequest(f"{_WHAT}: a node holds a slot that is lost")

    def _check_nodes(self) -> None:
        if not 1 <= len(self.nodes) <= NODE_COUNT_MAX:
            raise InvalidRequest(f"{_WHAT}: {len(self.nodes)} nodes; 1 to {NODE_COUNT_MAX}")
        for node in self.nodes:
            if not node.is_known:
                raise InvalidRequest(f"{_WHAT}: no node has met node {node.node_id!r} yet")
        if len({node.node_id for node in self.nodes}) != len(self.nodes):
            raise InvalidRequest(f"{_WHAT}: a node id appears more than once")
        if len({node.instance for node in self.nodes}) != len(self.nodes):
            raise InvalidRequest(f"{_WHAT}: an instance appears more than once")

    def _freeze(self, name: str, values: NDArray[np.uint64] | NDArray[np.int64]) -> None:
        values.setflags(write=False)
        object.__setattr__(self, name, values)


_WHAT = "routing table"


@dataclass(frozen=True)
class _StoredNode(JsonRecord, what="routing table: nodes"):
    """The JSON form of a node: without its status."""

    node_id: str
    instance: int
    control_address: str
    data_address: str
    host: str

    @classmethod
    def of(cls, node: NodeRecord) -> _StoredNode:
        return cls(node.node_id, node.instance, node.control_address, node.data_address, node.host)


@dataclass(frozen=True)
class _StoredRestoring(JsonRecord, what="routing table: restoring"):
    """The JSON form of ``Restoring``."""

    url: str
    checkpoint: str
    slots: tuple[Count, ...]


@dataclass(frozen=True)
class _StoredRouting(JsonRecord, what=_WHAT, added=("lost",)):
    """The JSON form of the table: each distinct set of replicas once."""

    format: Literal[2] = field(default=2, kw_only=True)
    version: int
    generation: int
    replicas: int
    slot_count: int
    nodes: tuple[_StoredNode, ...]
    gone: tuple[Count, ...]
    # Master, in-sync backups, backups that catch up.
    sets: tuple[tuple[int, tuple[Count, ...], tuple[Count, ...]], ...]
    set_of_slot: list[Count]
    term_of_slot: list[Positive]
    epoch_of_slot: list[Positive]
    restoring: _StoredRestoring
    lost: tuple[Count, ...] = ()


def _check_sets(sets: Sequence[SlotReplicas], node_count: int) -> None:
    """Refuse sets that name a node twice, or one that is not there.

    A large cluster has as many sets as slots, and this is in the way of a failover: the loop
    does no more than it must.
    """
    lowest, highest = 0, -1
    for master, in_sync, catching_up in sets:
        holders = (*in_sync, *catching_up)
        if master != NO_MASTER:
            holders = (master, *holders)
        if not holders:
            continue
        if len(set(holders)) != len(holders):
            raise InvalidRequest(f"{_WHAT}: a node appears more than once in {list(holders)}")
        lowest = min(lowest, *holders)
        highest = max(highest, *holders)
    if lowest < 0 or highest >= node_count:
        raise InvalidRequest(
            f"{_WHAT}: sets name nodes {lowest} to {highest}, but there are {node_count} nodes"
        )


def _sets_of(stored: _StoredRouting) -> list[SlotReplicas]:
    """Return the replica sets, after a check that the slots use each of them and no other."""
    sets = [SlotReplicas(*held) for held in stored.sets]
    order = stored.set_of_slot
    if len(order) != stored.slot_count:
        raise InvalidRequest(f"{_WHAT}: {len(order)} sets for {stored.slot_count} slots")
    if len(set(sets)) != len(sets):
        raise InvalidRequest(f"{_WHAT}: a set appears more than once")
    if order and set(order) != set(range(len(sets))):
        raise InvalidRequest(f"{_WHAT}: set_of_slot does not fit {len(sets)} sets")
    return sets


def _numbers(name: str, values: NDArray[np.uint64], slot_count: int) -> NDArray[np.uint64]:
    """Return a read-only copy, after a check."""
    numbers = np.array(values, dtype=np.uint64)
    if numbers.shape != (slot_count,):
        raise InvalidRequest(f"{_WHAT}: {numbers.shape} in {name} for {slot_count} slots")
    if int(numbers.min()) < 1 or int(numbers.max()) > NUMBER_MAX:
        raise InvalidRequest(f"{_WHAT}: {name} holds a number outside 1 to {NUMBER_MAX}")
    return numbers
