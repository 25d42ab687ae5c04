"""The records of a cluster: a node, and the routing table.

Both are values: frozen, checked when made, and equal when their content is equal. Their JSON
form is the one that the coordination store keeps. This module imports ``backstay.errors`` and
``backstay.addresses`` and numpy; it knows no clock, no network and no randomness.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from backstay.addresses import split_address
from backstay.errors import ConfigError, InvalidRequest

__all__ = ["NodeRecord", "NodeStatus", "RoutingTable"]

NodeStatus = Literal["unknown", "starting", "serving", "stopping", "unreachable"]
NODE_STATUSES: tuple[NodeStatus, ...] = get_args(NodeStatus)
INSTANCE_MAX = 2**63 - 1
NODE_COUNT_MAX = 2**16 - 1


@dataclass(frozen=True)
class NodeRecord:
    """What the cluster knows about one node.

    Attributes:
        node_id: Unique in the cluster and the same after a restart.
        control_address: ``host:port`` of its gRPC services.
        data_address: ``host:port`` of its data plane; empty as long as nobody has met it.
        instance: Random number of this run of the process; 0 as long as nobody has met it.
            Another instance under the same id means that what it held in memory is gone.
        status: ``unknown`` (not met), ``starting`` (has not met its peers), ``serving``,
            ``stopping`` or ``unreachable`` (was met, does not answer now).
    """

    node_id: str
    control_address: str
    data_address: str = ""
    instance: int = 0
    status: NodeStatus = "unknown"

    def __post_init__(self) -> None:
        """Refuse a record that contradicts itself."""
        if not self.node_id:
            raise InvalidRequest("node record: node_id is empty")
        if self.status not in NODE_STATUSES:
            raise InvalidRequest(f"node {self.node_id}: unknown status {self.status!r}")
        if not 0 <= self.instance <= INSTANCE_MAX:
            raise InvalidRequest(f"node {self.node_id}: instance {self.instance} is not 63 bits")
        known = [self.instance != 0, self.data_address != "", self.status != "unknown"]
        if any(known) and not all(known):
            raise InvalidRequest(
                f"node {self.node_id}: instance, data_address and status must be known together"
            )
        for name in ("control_address", "data_address"):
            address = getattr(self, name)
            if address or name == "control_address":
                _check_address(self.node_id, name, address)

    @property
    def is_known(self) -> bool:
        """Whether the node was ever met, so that its data address and instance are known."""
        return self.instance != 0

    def to_json(self) -> dict[str, object]:
        """Return the record as a JSON object."""
        return {
            "node_id": self.node_id,
            "control_address": self.control_address,
            "data_address": self.data_address,
            "instance": self.instance,
            "status": self.status,
        }

    @classmethod
    def from_json(cls, value: object) -> NodeRecord:
        """Return the record that ``to_json`` gave.

        Raises:
            InvalidRequest: It is not such an object.
        """
        return cls(**_fields_of("node record", value, _NODE_FIELDS))  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class RoutingTable:
    """Which node is master of each slot.

    Attributes:
        version: Grows with each change of a slot's master, from 1.
        slot_count: A power of two, fixed when the cluster is created.
        nodes: The nodes, in an order that ``master_of_slot`` refers to.
        master_of_slot: uint16 [slot_count], read-only: index into ``nodes``.
    """

    version: int
    slot_count: int
    nodes: tuple[NodeRecord, ...]
    master_of_slot: NDArray[np.uint16]

    def __post_init__(self) -> None:
        """Refuse a table that contradicts itself, and freeze the array."""
        if self.version < 1:
            raise InvalidRequest(f"routing table: version {self.version} is not at least 1")
        if self.slot_count < 1 or self.slot_count & (self.slot_count - 1):
            raise InvalidRequest(f"routing table: slot_count {self.slot_count} is no power of two")
        if not 1 <= len(self.nodes) <= NODE_COUNT_MAX:
            raise InvalidRequest(f"routing table: {len(self.nodes)} nodes; 1 to {NODE_COUNT_MAX}")
        if len({node.node_id for node in self.nodes}) != len(self.nodes):
            raise InvalidRequest("routing table: a node id appears more than once")
        masters = np.array(self.master_of_slot, dtype=np.int64)
        if masters.shape != (self.slot_count,):
            raise InvalidRequest(
                f"routing table: {masters.shape} masters for {self.slot_count} slots"
            )
        if masters.min() < 0 or masters.max() >= len(self.nodes):
            raise InvalidRequest(
                f"routing table: master {masters.min()} to {masters.max()}, "
                f"but there are {len(self.nodes)} nodes"
            )
        frozen = masters.astype(np.uint16)
        frozen.setflags(write=False)
        object.__setattr__(self, "master_of_slot", frozen)

    def __eq__(self, other: object) -> bool:
        """Compare the content."""
        if not isinstance(other, RoutingTable):
            return NotImplemented
        return (
            self.version == other.version
            and self.nodes == other.nodes
            and np.array_equal(self.master_of_slot, other.master_of_slot)
        )

    def __hash__(self) -> int:
        """Agree with ``__eq__``."""
        return hash((self.version, self.nodes, self.master_of_slot.tobytes()))

    def owned_by(self, node_id: str) -> NDArray[np.bool_]:
        """Return bool [slot_count]: whether that node is master of each slot.

        Raises:
            InvalidRequest: The table has no such node.
        """
        for index, node in enumerate(self.nodes):
            if node.node_id == node_id:
                owned: NDArray[np.bool_] = self.master_of_slot == index
                return owned
        raise InvalidRequest(f"routing table: no node {node_id!r}")

    def slots_per_node(self) -> dict[str, int]:
        """Return the number of slots each node is master of."""
        counts = np.bincount(self.master_of_slot, minlength=len(self.nodes))
        return {node.node_id: int(count) for node, count in zip(self.nodes, counts, strict=True)}

    def to_json(self) -> str:
        """Return the table as the text that the coordination store keeps."""
        return json.dumps(
            {
                "version": self.version,
                "slot_count": self.slot_count,
                "nodes": [node.to_json() for node in self.nodes],
                "master_of_slot": self.master_of_slot.tolist(),
            },
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, text: str) -> RoutingTable:
        """Return the table that ``to_json`` gave.

        Raises:
            InvalidRequest: It is not such a text.
        """
        try:
            document = json.loads(text)
        except ValueError as error:
            raise InvalidRequest(f"routing table: not JSON: {error}") from error
        parts = _fields_of("routing table", document, _ROUTING_FIELDS)
        masters = parts["master_of_slot"]
        if not _are_whole_numbers(masters):
            raise InvalidRequest("routing table: master_of_slot holds more than whole numbers")
        return cls(
            version=parts["version"],  # type: ignore[arg-type]
            slot_count=parts["slot_count"],  # type: ignore[arg-type]
            nodes=tuple(NodeRecord.from_json(node) for node in parts["nodes"]),  # type: ignore[attr-defined]
            master_of_slot=np.array(masters, dtype=np.int64),
        )


_NODE_FIELDS: Mapping[str, type] = {
    "node_id": str,
    "control_address": str,
    "data_address": str,
    "instance": int,
    "status": str,
}
_ROUTING_FIELDS: Mapping[str, type] = {
    "version": int,
    "slot_count": int,
    "nodes": list,
    "master_of_slot": list,
}


def _fields_of(what: str, value: object, expected: Mapping[str, type]) -> dict[str, object]:
    """Return a JSON object's fields, after a check that they are exactly the expected ones."""
    if not isinstance(value, dict) or value.keys() != expected.keys():
        raise InvalidRequest(f"{what}: expected an object with the fields {', '.join(expected)}")
    for name, kind in expected.items():
        if type(value[name]) is not kind:
            raise InvalidRequest(f"{what}: {name} is not of type {kind.__name__}")
    return value


def _are_whole_numbers(values: object) -> bool:
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value <= NODE_COUNT_MAX for value in values
    )


def _check_address(node_id: str, name: str, address: str) -> None:
    try:
        split_address(name, address)
    except ConfigError as error:
        raise InvalidRequest(f"node {node_id}: {error}") from error
