"""The manifest: what a checkpoint consists of, and how its slots are spread over its parts.

A value: frozen, checked when made. Its JSON form is ``manifest.json`` of
docs/reference/checkpoint-format.md. It comes from a disk or an object store that any program may
have written to, so that nothing in it is believed before it is checked: names, sizes, numbers,
and that they agree with each other. Imports ``checkpoint.documents``,
``backstay.errors``, ``backstay.tables`` and the native hash of names; never does I/O.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from backstay._native import table_id
from backstay.checkpoint.documents import check_fields, parse_object, write_object
from backstay.errors import CheckpointDamaged, ConfigError, InvalidRequest
from backstay.tables import TableSpec

__all__ = [
    "FORMAT",
    "MANIFEST_FILE",
    "Kind",
    "Manifest",
    "Part",
    "SlotEntries",
    "check_part_name",
    "is_id",
    "new_id",
    "number_of",
]

Kind: TypeAlias = Literal["full", "incremental"]

FORMAT = 2
MANIFEST_FILE = "manifest.json"
SLOT_COUNT_MAX = 2**20
PART_COUNT_MAX = 2**20
TABLE_COUNT_MAX = 10_000
TAG_COUNT_MAX = 1_000
TEXT_LENGTH_MAX = 1_000
# What a JSON reader in any language keeps exactly as a signed 64-bit number.
NUMBER_MAX = 2**63 - 1
ID_NUMBER_MAX = 10**12 - 1

_ID = re.compile(r"ckpt-([0-9]{6,12})-[0-9a-f]{6}", re.ASCII)
_PART_NAME = re.compile(r"part-[0-9a-z]{1,32}-[0-9]{4,8}\.safetensors", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_CREATED = re.compile(
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,9})?(Z|\+00:00)",
    re.ASCII,
)


def new_id(number: int, random_hex: str) -> str:
    """Return the id of a new checkpoint.

    Args:
        number: Above those of all checkpoints before it; 0 to 10^12 - 1.
        random_hex: Six hexadecimal digits, so that two that are begun at once differ.

    Raises:
        InvalidRequest: An argument is not of that kind.
    """
    checkpoint_id = f"ckpt-{number:06d}-{random_hex}"
    if not is_id(checkpoint_id):
        raise InvalidRequest(
            f"checkpoint id {checkpoint_id!r}: the number must be 0 to {ID_NUMBER_MAX}, "
            "followed by six hexadecimal digits"
        )
    return checkpoint_id


def is_id(text: str) -> bool:
    """Return whether a string is the id of a checkpoint, and so safe as the name of a folder."""
    found = _ID.fullmatch(text)
    # A number is written in one way only: two ids of one number then differ in their digits.
    return found is not None and f"{int(found[1]):06d}" == found[1]


def number_of(checkpoint_id: str) -> int:
    """Return the number in an id.

    Raises:
        InvalidRequest: It is no id.
    """
    found = _ID.fullmatch(checkpoint_id)
    if found is None or not is_id(checkpoint_id):
        raise InvalidRequest(f"{checkpoint_id!r} is no checkpoint id, such as ckpt-000007-3fa9c1")
    return int(found[1])


def check_part_name(name: str) -> None:
    """Refuse what is not the name of a part: above all anything that leads out of its folder.

    Raises:
        InvalidRequest: It is not.
    """
    if not _PART_NAME.fullmatch(name):
        raise InvalidRequest(f"{name!r} is no part's name, such as part-6b1f0c2a-0000.safetensors")


@dataclass(frozen=True)
class Part:
    """One file of rows.

    Attributes:
        file: Its name in the checkpoint's folder.
        bytes: Its length.
        sha256: Of its content, in hex.
    """

    file: str
    bytes: int
    sha256: str

    def __post_init__(self) -> None:
        check_part_name(self.file)
        _check_number(f"bytes of {self.file}", self.bytes, 1)
        if not _SHA256.fullmatch(self.sha256):
            raise InvalidRequest(f"sha256 of {self.file} is not 64 hexadecimal digits")


@dataclass(frozen=True, eq=False)
class SlotEntries:
    """Where each slot is and what it holds; arrays of [slot_count], read-only.

    Attributes:
        part: int64, index into the manifest's parts.
        position: uint64, how many pushes the slot has applied.
        epoch: uint64, the routing version at which it began.
        whole: bool, all its rows are there; else those changed since the base.
        rows: uint64, rows of it in its part, of all tables together.
    """

    part: NDArray[np.int64]
    position: NDArray[np.uint64]
    epoch: NDArray[np.uint64]
    whole: NDArray[np.bool_]
    rows: NDArray[np.uint64]

    def __post_init__(self) -> None:
        for name, kind in _SLOT_TYPES.items():
            values: NDArray[Any] = np.array(getattr(self, name), dtype=kind)
            if values.ndim != 1 or len(values) != len(self.part):
                raise InvalidRequest(f"slots.{name} does not have one entry for each slot")
            values.setflags(write=False)
            object.__setattr__(self, name, values)

    def __len__(self) -> int:
        """Return the number of slots."""
        return len(self.part)

    def __eq__(self, other: object) -> bool:
        """Compare the content."""
        if not isinstance(other, SlotEntries):
            return NotImplemented
        return all(
            np.array_equal(getattr(self, name), getattr(other, name)) for name in _SLOT_TYPES
        )

    def __hash__(self) -> int:
        """Agree with ``__eq__``."""
        return hash(self.position.tobytes())


_SLOT_TYPES: Mapping[str, type] = {
    "part": np.int64,
    "position": np.uint64,
    "epoch": np.uint64,
    "whole": np.bool_,
    "rows": np.uint64,
}


@dataclass(frozen=True)
class Manifest:
    """Everything that is said of a checkpoint outside its parts.

    Attributes:
        id: The name of its folder.
        kind: "full", or "incremental": only what changed since ``base``.
        base: The id of the checkpoint that it adds to; None if full.
        cluster: The name of the cluster that wrote it.
        cluster_uid: What tells that cluster from others of the same name, hexadecimal.
        created: When it was begun: ISO 8601, UTC.
        routing_version: Of the cluster when it was begun.
        generation: The same.
        tables: Descriptions of all tables.
        parts: Its files; each holds some slots.
        slots: One entry for each slot.
        tags: What the caller noted: strings and numbers.
        progress: The trainers' progress; kept, not looked at.

    Raises:
        InvalidRequest: It contradicts itself; the message names the first thing that is wrong.
    """

    id: str
    kind: Kind
    base: str | None
    cluster: str
    cluster_uid: str
    created: str
    routing_version: int
    generation: int
    tables: tuple[TableSpec, ...]
    parts: tuple[Part, ...]
    slots: SlotEntries
    tags: Mapping[str, str | int | float] = field(default_factory=dict)
    progress: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._check_names()
        self._check_base()
        self._check_lists()
        self._check_slots()
        _check_tags(self.tags)

    @property
    def number(self) -> int:
        """The number in its id."""
        return number_of(self.id)

    @property
    def slot_count(self) -> int:
        """Number of slots: only a cluster with as many can take it."""
        return len(self.slots)

    @property
    def total_bytes(self) -> int:
        """Length of all parts together."""
        return sum(part.bytes for part in self.parts)

    def table(self, name: str) -> TableSpec:
        """Return the description of a table.

        Raises:
            InvalidRequest: The checkpoint has none of that name.
        """
        for spec in self.tables:
            if spec.name == name:
                return spec
        known = ", ".join(spec.name for spec in self.tables) or "none"
        raise InvalidRequest(f"checkpoint {self.id} has no table {name!r}; it has: {known}")

    def to_json(self) -> str:
        """Return ``manifest.json``, its checksum included.

        Raises:
            InvalidRequest: ``progress`` or ``tags`` hold what JSON has no form for.
        """
        document: dict[str, Any] = {
            "format": FORMAT,
            "id": self.id,
            "kind": self.kind,
            "base": self.base,
            "cluster": self.cluster,
            "cluster_uid": self.cluster_uid,
            "created": self.created,
            "routing_version": self.routing_version,
            "generation": self.generation,
            "slot_count": self.slot_count,
            "tables": [
                {"id": table_id(spec.name), "spec": json.loads(spec.to_json())}
                for spec in self.tables
            ],
            "parts": [
                {"file": part.file, "bytes": part.bytes, "sha256": part.sha256}
                for part in self.parts
            ],
            "slots": {
                name: getattr(self.slots, name).astype(np.int64).tolist() for name in _SLOT_TYPES
            },
            "tags": dict(self.tags),
            "progress": dict(self.progress),
        }
        return write_object(document)

    @classmethod
    def from_json(cls, text: str | bytes, where: str = MANIFEST_FILE) -> Manifest:
        """Read ``manifest.json``.

        Args:
            text: Its content.
            where: Its name, for the error.

        Raises:
            CheckpointDamaged: It is none, was changed, or contradicts itself; the message says
                where and what.
        """
        try:
            return cls(**_parts_of(parse_object(text)))
        except (InvalidRequest, ConfigError) as error:
            raise CheckpointDamaged(f"{where}: {error}") from error

    def _check_names(self) -> None:
        if not is_id(self.id):
            raise InvalidRequest(f"id {self.id!r} is no checkpoint id")
        if not 1 <= len(self.cluster) <= TEXT_LENGTH_MAX:
            raise InvalidRequest(f"cluster is not of 1 to {TEXT_LENGTH_MAX} characters")
        # Empty where the nodes are named by hand, without a coordination store.
        if len(self.cluster_uid) > TEXT_LENGTH_MAX or not set(self.cluster_uid) <= set(
            "0123456789abcdef"
        ):
            raise InvalidRequest(f"cluster_uid {self.cluster_uid!r} is not hexadecimal")
        if not _CREATED.fullmatch(self.created):
            raise InvalidRequest(f"created {self.created!r} is no time in ISO 8601 and UTC")
        _check_number("routing_version", self.routing_version)
        _check_number("generation", self.generation)

    def _check_base(self) -> None:
        if self.kind not in get_args(Kind):
            raise InvalidRequest(f"kind {self.kind!r} is neither full nor incremental")
        if self.kind == "full" and self.base is not None:
            raise InvalidRequest(f"a full checkpoint with the base {self.base!r}")
        if self.kind == "full" and not self.slots.whole.all():
            raise InvalidRequest("a full checkpoint with slots that are not whole")
        if self.kind == "incremental":
            if self.base is None or not is_id(self.base):
                raise InvalidRequest(f"an incremental checkpoint with the base {self.base!r}")
            # Numbers grow, so that no chain of bases can lead back to where it began.
            if number_of(self.base) >= self.number:
                raise InvalidRequest(f"base {self.base} is not before {self.id}")

    def _check_lists(self) -> None:
        if len(self.tables) > TABLE_COUNT_MAX:
            raise InvalidRequest(f"{len(self.tables)} tables; at most {TABLE_COUNT_MAX}")
        if len({spec.name for spec in self.tables}) != len(self.tables):
            raise InvalidRequest("a table appears more than once")
        if not 1 <= len(self.parts) <= PART_COUNT_MAX:
            raise InvalidRequest(f"{len(self.parts)} parts; 1 to {PART_COUNT_MAX}")
        if len({part.file for part in self.parts}) != len(self.parts):
            raise InvalidRequest("a part appears more than once")

    def _check_slots(self) -> None:
        count, slots = self.slot_count, self.slots
        if not 1 <= count <= SLOT_COUNT_MAX or count & (count - 1):
            raise InvalidRequest(f"slot_count {count} is no power of two up to {SLOT_COUNT_MAX}")
        if int(slots.part.min()) < 0 or int(slots.part.max()) >= len(self.parts):
            raise InvalidRequest(f"slots.part names a part that is not one of {len(self.parts)}")
        for name in ("position", "epoch", "rows"):
            if int(getattr(slots, name).max()) > NUMBER_MAX:
                raise InvalidRequest(f"slots.{name} holds a number above {NUMBER_MAX}")


_FIELDS: Mapping[str, tuple[type, ...]] = {
    "format": (int,),
    "id": (str,),
    "kind": (str,),
    "base": (str, type(None)),
    "cluster": (str,),
    "cluster_uid": (str,),
    "created": (str,),
    "routing_version": (int,),
    "generation": (int,),
    "slot_count": (int,),
    "tables": (list,),
    "parts": (list,),
    "slots": (dict,),
    "tags": (dict,),
    "progress": (dict,),
}


def _parts_of(document: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of :class:`Manifest` that a JSON object stands for."""
    number = document.get("format")
    if type(number) is int and number != FORMAT:
        raise InvalidRequest(f"format {number}, this version reads {FORMAT} only")
    check_fields("manifest", document, _FIELDS)
    if not 1 <= document["slot_count"] <= SLOT_COUNT_MAX:
        raise InvalidRequest(f"slot_count {document['slot_count']}; at most {SLOT_COUNT_MAX}")
    values = {item.name: document[item.name] for item in fields(Manifest)}
    values["tables"] = _tables_of(document["tables"])
    values["parts"] = _part_list_of(document["parts"])
    values["slots"] = _slots_of(document["slots"], document["slot_count"])
    return values


def _tables_of(values: Sequence[object]) -> tuple[TableSpec, ...]:
    specs = []
    for value in values:
        entry = check_fields("a table", value, {"id": (int,), "spec": (dict,)})
        spec = TableSpec.from_json(json.dumps(entry["spec"]))
        if entry["id"] != table_id(spec.name):
            raise InvalidRequest(f"id {entry['id']} is not that of table {spec.name!r}")
        specs.append(spec)
    return tuple(specs)


def _part_list_of(values: Sequence[object]) -> tuple[Part, ...]:
    expected = {"file": (str,), "bytes": (int,), "sha256": (str,)}
    return tuple(Part(**check_fields("a part", value, expected)) for value in values)


def _slots_of(value: object, slot_count: int) -> SlotEntries:
    lists = check_fields("slots", value, dict.fromkeys(_SLOT_TYPES, (list,)))
    for name, values in lists.items():
        if len(values) != slot_count:
            raise InvalidRequest(
                f"slots.{name} has {len(values)} entries for {slot_count} slots: "
                "each slot must be there once"
            )
        # One pass in C over what may be a million numbers.
        if not set(map(type, values)) <= {int}:
            raise InvalidRequest(f"slots.{name} holds more than integers")
        highest = 1 if name == "whole" else NUMBER_MAX
        if min(values) < 0 or max(values) > highest:
            raise InvalidRequest(f"slots.{name} holds a number outside 0 to {highest}")
    return SlotEntries(**{name: np.array(values) for name, values in lists.items()})


def _check_number(name: str, value: int, lowest: int = 0) -> None:
    if type(value) is not int or not lowest <= value <= NUMBER_MAX:
        raise InvalidRequest(f"{name} is {value!r}, not {lowest} to {NUMBER_MAX}")


def _check_tags(tags: Mapping[str, object]) -> None:
    if len(tags) > TAG_COUNT_MAX:
        raise InvalidRequest(f"{len(tags)} tags; at most {TAG_COUNT_MAX}")
    for name, value in tags.items():
        if not 1 <= len(name) <= TEXT_LENGTH_MAX:
            raise InvalidRequest(f"a tag's name is not of 1 to {TEXT_LENGTH_MAX} characters")
        text = isinstance(value, str) and len(value) <= TEXT_LENGTH_MAX
        number = type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
        if not (text or number):
            raise InvalidRequest(
                f"tag {name!r} is neither a number nor a string of at most {TEXT_LENGTH_MAX}"
            )
