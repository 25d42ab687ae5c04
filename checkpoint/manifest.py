"""The manifest: what a snapshot consists of, and how its slots are spread over its parts.

A checkpoint and a running export are each a chain of snapshots: a full one has all rows, a delta
those that changed since. One record describes them all; docs/reference/checkpoint-format.md has its
two JSON forms. A manifest comes from a disk or an object store that any program may have written
to, so nothing in it is believed before it is checked: names, sizes, numbers, and that they agree
with each other. Imports ``checkpoint.documents``, ``json_record``, ``backstay.errors``,
``backstay.tables`` and the native hash of names; never does I/O.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from backstay._native import table_id
from backstay.checkpoint.documents import parse_object, write_object
from backstay.errors import CheckpointDamaged, ConfigError, InvalidRequest
from backstay.json_record import NUMBER_MAX, Count, JsonRecord, Positive
from backstay.tables import TableSpec

__all__ = [
    "MANIFEST_FILE",
    "NO_PART",
    "ExportChoice",
    "Kind",
    "Manifest",
    "Part",
    "Prefix",
    "Series",
    "SlotEntries",
    "check_part_name",
    "is_id",
    "kind_of",
    "new_id",
    "number_of",
]

Kind: TypeAlias = Literal["full", "delta"]
# Snapshots of a kind of chain have an order of their own: one folder may hold both.
Series: TypeAlias = Literal["checkpoint", "export"]
Prefix: TypeAlias = Literal["ckpt", "base", "inc"]

MANIFEST_FILE = "manifest.json"
SLOT_COUNT_MAX = 2**20
PART_COUNT_MAX = 2**20
TABLE_COUNT_MAX = 10_000
TAG_COUNT_MAX = 1_000
TEXT_LENGTH_MAX = 1_000
ID_NUMBER_MAX = 10**12 - 1
# The index of the part of a slot that has nothing to tell.
NO_PART = -1

_ID = re.compile(r"(ckpt|base|inc)-([0-9]{6,12})-[0-9a-f]{6}", re.ASCII)
_SERIES: Mapping[str, Series] = {"ckpt": "checkpoint", "base": "export", "inc": "export"}
_KINDS: Mapping[str, Kind] = {"base": "full", "inc": "delta"}
_PART_NAME = re.compile(r"part-[0-9a-z]{1,32}-[0-9]{4,8}\.safetensors", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_CREATED = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,9})?(Z|\+00:00)", re.ASCII)


def new_id(number: int, random_hex: str, prefix: Prefix = "ckpt") -> str:
    """Return the id of a new snapshot, the name of its folder.

    Args:
        number: Above those of all snapshots before it; 0 to 10^12 - 1.
        random_hex: Six hexadecimal digits, so that two that are begun at once differ.
        prefix: ``ckpt`` of a checkpoint; ``base`` or ``inc`` of a full snapshot or a delta of an
            export.

    Raises:
        InvalidRequest: An argument is not of that kind.
    """
    text = f"{prefix}-{number:06d}-{random_hex}"
    if not is_id(text):
        raise InvalidRequest(
            f"checkpoint id {text!r}: the number must be 0 to {ID_NUMBER_MAX}, "
            "followed by six hexadecimal digits"
        )
    return text


def is_id(text: str, series: Series | None = None) -> bool:
    """Return whether a string is the id of a snapshot, and so safe as the name of a folder.

    Args:
        text: The string.
        series: Of which the snapshot must be; None: of any.
    """
    fits = _ID.fullmatch(text)
    # A number is written in one way only: two ids of one number then differ in their digits.
    if fits is None or f"{int(fits[2]):06d}" != fits[2]:
        return False
    return series in (None, _SERIES[fits[1]])


def number_of(snapshot_id: str) -> int:
    """Return the number in an id.

    Raises:
        InvalidRequest: The text is no id.
    """
    if not is_id(snapshot_id):
        raise InvalidRequest(
            f"{snapshot_id!r} is no checkpoint id, such as ckpt-000007-3fa9c1, and no id of a "
            "snapshot of an export, such as inc-000124-3fa9c1"
        )
    return int(snapshot_id.split("-")[1])


def kind_of(snapshot_id: str) -> Kind | None:
    """Return what an id of an export's snapshot says of its kind; None of every other text."""
    return _KINDS.get(snapshot_id.partition("-")[0]) if is_id(snapshot_id, "export") else None


def check_part_name(name: str) -> None:
    """Refuse what is not the name of a part: above all anything that leads out of its folder.

    Raises:
        InvalidRequest: The name is not.
    """
    if not _PART_NAME.fullmatch(name):
        raise InvalidRequest(f"{name!r} is no part's name, such as part-6b1f0c2a-0000.safetensors")


@dataclass(frozen=True)
class Part(JsonRecord, what="part"):
    """One file of rows.

    Attributes:
        file: Its name in the snapshot's folder.
        bytes: Its length.
        sha256: Of its content, in hex.
    """

    file: str
    bytes: Positive
    sha256: str

    def __post_init__(self) -> None:
        """Refuse a name that leads elsewhere, and what is no length or checksum."""
        check_part_name(self.file)
        _check_number(f"bytes of {self.file}", self.bytes, 1)
        if not _SHA256.fullmatch(self.sha256):
            raise InvalidRequest(f"sha256 of {self.file} is not 64 hexadecimal digits")


@dataclass(frozen=True)
class ExportChoice(JsonRecord, what="choice of an export"):
    """Which rows and columns an export has; a checkpoint has all.

    Attributes:
        tables: Names of its tables, sorted.
        statistics: Whether the statistics of rows go with their weights.
        score_at_least: The lowest score of a row, in tables whose lifetime uses one; None: any.
    """

    tables: tuple[str, ...]
    statistics: bool = False
    score_at_least: float | None = None


@dataclass(frozen=True, eq=False)
class SlotEntries:
    """Where each slot is and what it holds; arrays of [slot_count], read-only.

    Attributes:
        part: int64, index into the manifest's parts; ``NO_PART``: nothing is told of the slot.
        position: uint64, how many pushes the slot has applied.
        epoch: uint64, the routing version at which its content began.
        whole: bool, all its rows are there; else those changed since ``since``.
        rows: uint64, rows of it in its part, of all tables together.
        since: uint64, the position at which the changes begin, 0 if the slot is whole. None of a
            checkpoint: they begin at the position in its base.
    """

    part: NDArray[np.int64]
    position: NDArray[np.uint64]
    epoch: NDArray[np.uint64]
    whole: NDArray[np.bool_]
    rows: NDArray[np.uint64]
    since: NDArray[np.uint64] | None = None

    def __post_init__(self) -> None:
        for name, kind in _SLOT_TYPES.items():
            if (given := getattr(self, name)) is None:
                continue
            values: NDArray[Any] = np.array(given, dtype=kind)
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
        return self.to_lists() == other.to_lists()

    def __hash__(self) -> int:
        """Agree with ``__eq__``."""
        return hash(self.position.tobytes())

    def to_lists(self) -> dict[str, list[int]]:
        """Return the lists of the JSON form."""
        given = {name: getattr(self, name) for name in _SLOT_TYPES}
        return {
            name: values.astype(np.int64).tolist()
            for name, values in given.items()
            if values is not None
        }


_SLOT_TYPES: Mapping[str, type] = {
    "part": np.int64,
    "position": np.uint64,
    "epoch": np.uint64,
    "whole": np.bool_,
    "rows": np.uint64,
    "since": np.uint64,
}


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything that is said of a snapshot outside its parts.

    A checkpoint has optimizer state, streams and the progress of trainers, and every slot. An
    export has what it chooses, and may leave slots out.

    Attributes:
        id: The name of its folder.
        base: None: it is full. Of a delta: a checkpoint's adds to this snapshot; an export's to
            this full one and the deltas since.
        cluster: The name of the cluster that wrote it.
        cluster_uid: What tells that cluster from others of the same name, hexadecimal.
        generation: Of the cluster's rows when it was begun.
        begun: Unix time at which it was begun: it has every push that was acknowledged before, in
            all slots but for ``left_out``.
        tables: Descriptions of its tables.
        parts: Its files; each holds some slots.
        slots: One entry for each slot.
        choice: Which rows and columns an export has; None: a checkpoint.
        routing_version: Of the cluster when a checkpoint was begun.
        tags: What the caller of a checkpoint noted: strings and numbers.
        progress: The trainers' progress in a checkpoint; kept, not looked at.
        run: Random: which start of an export it is of.
        chain: The full snapshot that an export's chain began with. Those of other chains do not
            fit.
        reason: Why that chain began.
        every_s: Seconds from one delta of an export to the next.
        left_out: Slots of an export whose master did not answer: the next delta has their changes.
        base_bytes: Of the parts of the newest full snapshot of an export.
        bytes_since_base: Of the parts of all deltas since, with its own.

    Raises:
        InvalidRequest: It contradicts itself; the message names the first thing that is wrong.
    """

    id: str
    base: str | None
    cluster: str
    cluster_uid: str
    generation: int
    begun: float
    tables: tuple[TableSpec, ...]
    parts: tuple[Part, ...]
    slots: SlotEntries
    choice: ExportChoice | None = None
    routing_version: int = 0
    tags: Mapping[str, str | int | float] = field(default_factory=dict)
    progress: Mapping[str, Any] = field(default_factory=dict)
    run: str = ""
    chain: str = ""
    reason: str = ""
    every_s: float = 0.0
    left_out: tuple[int, ...] = ()
    base_bytes: int = 0
    bytes_since_base: int = 0

    def __post_init__(self) -> None:
        self._check_names()
        self._check_base()
        self._check_lists()
        self._check_slots()
        _check_tags(self.tags)

    @property
    def kind(self) -> Kind:
        """Whether it has all rows, or those that changed."""
        return "full" if self.base is None else "delta"

    @property
    def series(self) -> Series:
        """What it is a snapshot of."""
        return "checkpoint" if self.choice is None else "export"

    @property
    def number(self) -> int:
        """Its place in the order of its series."""
        return number_of(self.id)

    @property
    def newest_full(self) -> str:
        """The id of the newest full snapshot that was whole when an export's was begun."""
        return self.base or self.id

    @property
    def created(self) -> str:
        """When it was begun: ISO 8601, UTC."""
        begun = datetime.fromtimestamp(self.begun, timezone.utc)
        return begun.isoformat(timespec="milliseconds")

    @property
    def slot_count(self) -> int:
        """Number of slots: only a cluster with as many can take it."""
        return len(self.slots)

    @property
    def total_bytes(self) -> int:
        """Length of all parts together."""
        return sum(part.bytes for part in self.parts)

    @property
    def rows(self) -> int:
        """Rows in its parts, of all tables together."""
        return int(self.slots.rows.sum())

    def table(self, name: str) -> TableSpec:
        """Return the description of a table.

        Raises:
            InvalidRequest: The snapshot has none of that name.
        """
        for spec in self.tables:
            if spec.name == name:
                return spec
        names = ", ".join(spec.name for spec in self.tables) or "none"
        raise InvalidRequest(f"checkpoint {self.id} has no table {name!r}; it has: {names}")

    def to_json(self) -> str:
        """Return ``manifest.json``, its checksum included.

        Raises:
            InvalidRequest: ``progress`` or ``tags`` hold what JSON has no form for.
        """
        specs = [json.loads(spec.to_json()) for spec in self.tables]
        document: dict[str, Any] = {
            "id": self.id,
            "cluster": self.cluster,
            "cluster_uid": self.cluster_uid,
            "generation": self.generation,
            "parts": [asdict(part) for part in self.parts],
            "slots": self.slots.to_lists(),
        }
        if self.choice is None:
            document |= {
                "format": 2,
                "kind": "full" if self.base is None else "incremental",
                "base": self.base,
                "created": self.created,
                "routing_version": self.routing_version,
                "slot_count": self.slot_count,
                "tables": [
                    {"id": table_id(spec.name), "spec": text}
                    for spec, text in zip(self.tables, specs, strict=True)
                ],
                "tags": dict(self.tags),
                "progress": dict(self.progress),
            }
        else:
            document |= {
                "format": 1,
                "base": self.newest_full,
                "specs": specs,
                "choice": {**asdict(self.choice), "tables": list(self.choice.tables)},
                "left_out": list(self.left_out),
                **{name: getattr(self, name) for name in _EXPORT_FIELDS},
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
            document = parse_object(text)
            is_export = "specs" in document
            stored = _StoredExport if is_export else _StoredCheckpoint
            return stored.from_json(json.dumps(document)).manifest()
        except (InvalidRequest, ConfigError) as error:
            raise CheckpointDamaged(f"{where}: {error}") from error

    def _check_names(self) -> None:
        if not is_id(self.id, self.series):
            raise InvalidRequest(f"id {self.id!r} is no {self.series} id")
        if not 1 <= len(self.cluster) <= TEXT_LENGTH_MAX:
            raise InvalidRequest(f"cluster is not of 1 to {TEXT_LENGTH_MAX} characters")
        # Empty where the nodes are named by hand, without a coordination store.
        if len(self.cluster_uid) > TEXT_LENGTH_MAX or not set(self.cluster_uid) <= set(
            "0123456789abcdef"
        ):
            raise InvalidRequest(f"cluster_uid {self.cluster_uid!r} is not hexadecimal")
        if not (math.isfinite(self.begun) and self.begun >= 0):
            raise InvalidRequest(f"begun {self.begun} is no Unix time")
        for name in ("routing_version", "generation", "base_bytes", "bytes_since_base"):
            _check_number(name, getattr(self, name))

    def _check_base(self) -> None:
        if self.base is None:
            if not self.slots.whole.all():
                raise InvalidRequest("a full snapshot with slots that are not whole")
        elif not is_id(self.base, self.series):
            raise InvalidRequest(f"a delta with the base {self.base!r}")
        if self.choice is None:
            # Numbers grow, so that no chain of bases can lead back to where it began.
            if self.base is not None and number_of(self.base) >= self.number:
                raise InvalidRequest(f"base {self.base} is not before {self.id}")
            return
        if kind_of(self.id) != self.kind:
            raise InvalidRequest(f"{self.id} is the id of a {kind_of(self.id)}, it has {self.base}")
        for name in (self.chain, self.newest_full):
            if kind_of(name) != "full":
                raise InvalidRequest(f"its chain or its base is {name!r}, no full snapshot")

    def _check_lists(self) -> None:
        if len(self.tables) > TABLE_COUNT_MAX:
            raise InvalidRequest(f"{len(self.tables)} tables; at most {TABLE_COUNT_MAX}")
        names = [spec.name for spec in self.tables]
        if len(set(names)) != len(names):
            raise InvalidRequest("a table appears more than once")
        if self.choice is not None and names != list(self.choice.tables):
            raise InvalidRequest("its specs are not of the tables that it chooses")
        least = 1 if self.choice is None else 0
        if not least <= len(self.parts) <= PART_COUNT_MAX:
            raise InvalidRequest(f"{len(self.parts)} parts; {least} to {PART_COUNT_MAX}")
        if len({part.file for part in self.parts}) != len(self.parts):
            raise InvalidRequest("a part appears more than once")

    def _check_slots(self) -> None:
        count, slots = self.slot_count, self.slots
        if not 1 <= count <= SLOT_COUNT_MAX or count & (count - 1):
            raise InvalidRequest(f"slot_count {count} is no power of two up to {SLOT_COUNT_MAX}")
        least = 0 if self.choice is None else NO_PART
        for index in (int(slots.part.min()), int(slots.part.max())):
            if not least <= index < len(self.parts):
                raise InvalidRequest(
                    f"slots.part names {index}, a part that is not one of {len(self.parts)}"
                )
        if (slots.since is None) != (self.choice is None):
            raise InvalidRequest("slots.since is that of an export, and of nothing else")
        for name in ("position", "epoch", "rows", "since"):
            values = getattr(slots, name)
            if values is not None and int(values.max()) > NUMBER_MAX:
                raise InvalidRequest(f"slots.{name} holds a number above {NUMBER_MAX}")
        if self.left_out and (self.choice is None or max(self.left_out) >= count):
            raise InvalidRequest("left_out names slots that it cannot leave out")


_EXPORT_FIELDS = ("run", "chain", "reason", "begun", "every_s", "base_bytes", "bytes_since_base")


@dataclass(frozen=True)
class _StoredSlots(JsonRecord, what="slots"):
    part: tuple[int, ...]
    position: tuple[Count, ...]
    epoch: tuple[Count, ...]
    whole: tuple[Literal[0, 1], ...]
    rows: tuple[Count, ...]

    def entries(self) -> SlotEntries:
        return SlotEntries(**{name: np.array(values) for name, values in vars(self).items()})


@dataclass(frozen=True)
class _StoredExportSlots(_StoredSlots, what="slots"):
    since: tuple[Count, ...]


@dataclass(frozen=True)
class _StoredTable(JsonRecord, what="table"):
    id: int
    spec: dict[str, Any]


@dataclass(frozen=True)
class _StoredCheckpoint(JsonRecord, what="manifest"):
    """The form of a checkpoint: ``manifest.json`` without its checksum."""

    format: Literal[2]
    id: str
    kind: Literal["full", "incremental"]
    base: str | None
    cluster: str
    cluster_uid: str
    created: str
    routing_version: Count
    generation: Count
    slot_count: int
    tables: tuple[_StoredTable, ...]
    parts: tuple[Part, ...]
    slots: _StoredSlots
    tags: dict[str, Any]
    progress: dict[str, Any]

    def manifest(self) -> Manifest:
        if (self.kind == "full") != (self.base is None):
            raise InvalidRequest(f"kind {self.kind!r} with the base {self.base!r}")
        if not _CREATED.fullmatch(self.created):
            raise InvalidRequest(f"created {self.created!r} is no time in ISO 8601 and UTC")
        for name, values in vars(self.slots).items():
            if len(values) != self.slot_count:
                raise InvalidRequest(
                    f"slots.{name} has {len(values)} entries, slot_count {self.slot_count}: each "
                    "slot must be there once"
                )
        specs = tuple(TableSpec.from_json(json.dumps(table.spec)) for table in self.tables)
        for table, spec in zip(self.tables, specs, strict=True):
            if table.id != table_id(spec.name):
                raise InvalidRequest(f"id {table.id} is not that of table {spec.name!r}")
        return Manifest(
            id=self.id,
            base=self.base,
            cluster=self.cluster,
            cluster_uid=self.cluster_uid,
            generation=self.generation,
            begun=_unix_time(self.created),
            tables=specs,
            parts=self.parts,
            slots=self.slots.entries(),
            routing_version=self.routing_version,
            tags=self.tags,
            progress=self.progress,
        )


@dataclass(frozen=True)
class _StoredExport(JsonRecord, what="manifest"):
    """The form of a snapshot of an export, likewise."""

    format: Literal[1]
    id: str
    run: str
    chain: str
    base: str
    reason: str
    cluster: str
    cluster_uid: str
    generation: Count
    begun: float
    every_s: float
    choice: ExportChoice
    specs: tuple[dict[str, Any], ...]
    parts: tuple[Part, ...]
    slots: _StoredExportSlots
    left_out: tuple[Count, ...]
    base_bytes: Count
    bytes_since_base: Count

    def manifest(self) -> Manifest:
        return Manifest(
            id=self.id,
            base=None if kind_of(self.id) == "full" else self.base,
            cluster=self.cluster,
            cluster_uid=self.cluster_uid,
            generation=self.generation,
            tables=tuple(TableSpec.from_json(json.dumps(spec)) for spec in self.specs),
            parts=self.parts,
            slots=self.slots.entries(),
            choice=self.choice,
            left_out=self.left_out,
            **{name: getattr(self, name) for name in _EXPORT_FIELDS},
        )


def _unix_time(created: str) -> float:
    seconds, _, fraction = created.removesuffix("Z").removesuffix("+00:00").partition(".")
    try:
        begun = datetime.fromisoformat(seconds).replace(tzinfo=timezone.utc).timestamp()
    except ValueError as error:
        raise InvalidRequest(f"created {created!r} is no time: {error}") from error
    # The nearest number to the text, as it is the nearest to the time that was written.
    return float(f"{begun:.0f}.{fraction or 0}")


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
