"""An element of a running export: a base or an increment, as its manifest describes it.

Values, strict about their JSON form (docs/reference/checkpoint-format.md), and the rules about
them: when a new base is due, and which elements are kept. Pure: imports ``checkpoint.documents``,
``json_record``, ``backstay.tables`` and ``backstay.errors``.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from backstay.checkpoint.documents import FileEntry, parse_object, write_object
from backstay.errors import CheckpointDamaged, ConfigError, InvalidRequest
from backstay.json_record import Count, JsonRecord, Positive, dump
from backstay.tables import TableSpec

__all__ = [
    "BASE_AFTER_INCREMENTS",
    "ELEMENT_FILE",
    "Element",
    "ExportChoice",
    "Kind",
    "SlotLists",
    "base_is_due",
    "element_id",
    "kind_of",
    "number_of",
    "surplus",
]

Kind = Literal["base", "increment"]

ELEMENT_FILE = "manifest.json"
# A new base comes after so many increments, however small they are: a follower that begins reads
# them all.
BASE_AFTER_INCREMENTS = 1_000
# Nor before so many, however large they are: a base is written of all rows.
BASE_AFTER_AT_LEAST = 10
BASES_KEPT = 2
NUMBER_MAX = 10**12 - 1
NO_PART = -1

_ID = re.compile(r"(base|inc)-([0-9]{6,12})-[0-9a-f]{6}", re.ASCII)
_KINDS: dict[str, Kind] = {"base": "base", "inc": "increment"}


def element_id(kind: Kind, number: int, random_hex: str) -> str:
    """Return the id of an element, the name of its folder.

    Args:
        kind: Of the element.
        number: Above those of all elements before it; 0 to 10^12 - 1.
        random_hex: Six hexadecimal digits, so that two that are begun at once differ.
    """
    made = f"{'base' if kind == 'base' else 'inc'}-{number:06d}-{random_hex}"
    if number > NUMBER_MAX or not _ID.fullmatch(made):
        raise InvalidRequest(f"{made!r} is no id of an element, such as inc-000124-3fa9c1")
    return made


def kind_of(element: str) -> Kind | None:
    """Return what an id is of; None if it is no element's, and so not the name of its folder."""
    found = _ID.fullmatch(element)
    if found is None or f"{int(found[2]):06d}" != found[2]:
        return None
    return _KINDS[found[1]]


def number_of(element: str) -> int:
    """Return the number in an id.

    Raises:
        InvalidRequest: It is no id.
    """
    if kind_of(element) is None:
        raise InvalidRequest(f"{element!r} is no id of an element, such as inc-000124-3fa9c1")
    return int(element.split("-")[1])


@dataclass(frozen=True)
class ExportChoice(JsonRecord, what="choice of an export"):
    """Which rows and columns an export has.

    Attributes:
        tables: Names of its tables, sorted.
        statistics: Whether the statistics of rows go with their weights.
        score_at_least: The lowest score of a row, in tables whose lifetime uses one; None: any.
    """

    tables: tuple[str, ...]
    statistics: bool = False
    score_at_least: float | None = None


@dataclass(frozen=True)
class SlotLists(JsonRecord):
    """What an element says of each slot: lists with an entry for each.

    Attributes:
        part: Index into the element's parts; -1: it has nothing of the slot.
        position: Where the slot was.
        since: Its changes are those since here; 0 where it is whole.
        epoch: The routing version at which its content began.
        whole: 1 if all its rows are there.
        rows: Of it in its part, of all tables together.
    """

    part: tuple[int, ...]
    position: tuple[Count, ...]
    since: tuple[Count, ...]
    epoch: tuple[Count, ...]
    whole: tuple[Literal[0, 1], ...]
    rows: tuple[Count, ...]

    def __post_init__(self) -> None:
        """Refuse lists of different lengths."""
        lengths = {len(getattr(self, name)) for name in type(self).__dataclass_fields__}
        count = len(self.part)
        if lengths != {count} or not count or count & (count - 1):
            raise InvalidRequest("its lists do not have an entry for each slot")


@dataclass(frozen=True)
class Element(JsonRecord, what="element"):
    """The manifest of an element: all but the rows.

    Attributes:
        format: Of the manifest.
        id: The name of its folder.
        run: Random: which start of the export it is of.
        chain: The base that its chain began with. Elements of other chains do not fit.
        base: The newest base that was whole before it was begun; of a base itself.
        reason: Why its chain began.
        cluster: The name of the cluster that wrote it.
        cluster_uid: What tells that cluster from others of the same name, hexadecimal.
        generation: Of the cluster's rows.
        begun: Unix time at which it was begun: it has every push that was acknowledged before, in
            all slots but for ``left_out``.
        every_s: Seconds from one increment to the next.
        choice: Which rows and columns it has.
        specs: Descriptions of its tables.
        parts: Its files.
        slots: What it has of each slot.
        left_out: Slots whose master did not answer: the next increment will have their changes.
        base_bytes: Of the parts of ``base``.
        bytes_since_base: Of the parts of all increments since, with its own.
    """

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
    parts: tuple[FileEntry, ...]
    slots: SlotLists
    left_out: tuple[Count, ...]
    base_bytes: Count
    bytes_since_base: Count

    def __post_init__(self) -> None:
        """Refuse what contradicts itself."""
        for name in ("id", "chain", "base"):
            if kind_of(getattr(self, name)) is None:
                raise InvalidRequest(f"{name} {getattr(self, name)!r} is no id of an element")
        if "increment" in (kind_of(self.chain), kind_of(self.base)):
            raise InvalidRequest("its chain or its base is an increment")
        parts = range(NO_PART, len(self.parts))
        wrong = next((one for one in self.slots.part if one not in parts), None)
        if wrong is not None:
            raise InvalidRequest(f"slots.part names {wrong}, which is not one of {len(self.parts)}")
        if self.kind == "base" and not all(self.slots.whole):
            raise InvalidRequest("a base with slots that are not whole")
        if [spec.name for spec in self.tables] != list(self.choice.tables):
            raise InvalidRequest("its specs are not of the tables that it chooses")

    @property
    def kind(self) -> Kind:
        """What it is."""
        kind = kind_of(self.id)
        assert kind is not None
        return kind

    @property
    def number(self) -> int:
        """Its place in the order of elements."""
        return number_of(self.id)

    @cached_property
    def tables(self) -> tuple[TableSpec, ...]:
        """Descriptions of its tables."""
        try:
            return tuple(TableSpec.from_json(json.dumps(spec)) for spec in self.specs)
        except ConfigError as error:
            raise InvalidRequest(f"specs: {error}") from error

    @property
    def slot_count(self) -> int:
        """Number of slots."""
        return len(self.slots.part)

    @property
    def total_bytes(self) -> int:
        """Length of its parts together."""
        return sum(part.bytes for part in self.parts)

    @property
    def rows(self) -> int:
        """Rows in its parts."""
        return sum(self.slots.rows)

    @cached_property
    def position(self) -> NDArray[np.uint64]:
        """Where each slot was."""
        return np.array(self.slots.position, np.uint64)

    @cached_property
    def epoch(self) -> NDArray[np.uint64]:
        """The routing version at which the content of each slot began."""
        return np.array(self.slots.epoch, np.uint64)

    @cached_property
    def since(self) -> NDArray[np.uint64]:
        """Where the changes of each slot begin: 0 if it is whole."""
        return np.array(self.slots.since, np.uint64)

    def text(self) -> str:
        """Return the manifest, its checksum included."""
        document: dict[str, Any] = json.loads(dump(self.to_document()))
        return write_object(document)

    @classmethod
    def from_text(cls, text: str | bytes, where: str) -> Element:
        """Read a manifest; ``where`` is its name, for the error.

        Raises:
            CheckpointDamaged: It is none, was changed, or contradicts itself.
        """
        try:
            return cls.from_json(json.dumps(parse_object(text)))
        except InvalidRequest as error:
            raise CheckpointDamaged(f"{where}: {error}") from error


def base_is_due(newest: Element) -> bool:
    """Return whether the increments since the base are as large as the base, or many. Pure."""
    count = newest.number - number_of(newest.base)
    large = newest.bytes_since_base >= max(newest.base_bytes, 1)
    return count >= BASE_AFTER_INCREMENTS or (large and count >= BASE_AFTER_AT_LEAST)


def surplus(finished: list[str], keep: Positive = BASES_KEPT) -> list[str]:
    """Return the elements that need not be kept, in the order in which to delete them.

    Kept are the newest ``keep`` bases, and the increments that come after the oldest of these.

    Args:
        finished: Ids of the elements that have a manifest.
        keep: How many bases.
    """
    bases = sorted((one for one in finished if kind_of(one) == "base"), key=number_of)
    if len(bases) <= keep:
        return []
    oldest = number_of(bases[-keep])
    return sorted((one for one in finished if number_of(one) < oldest), key=number_of)
