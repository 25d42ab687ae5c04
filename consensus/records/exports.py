"""``plans/export/<name>``: an export that goes on until it is stopped; and which tables it is of.

This module imports ``json_record``, ``backstay.job_spec``, whose section the record keeps, and
``backstay.errors``; it knows no clock and no network.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any

from backstay.errors import ConfigError, InvalidRequest
from backstay.job_spec import ExportsSpec
from backstay.json_record import JsonRecord, dump
from backstay.settings import from_mapping, to_mapping

__all__ = ["ExportRecord", "export_spec", "tables_of_exports"]

PATTERNS_MAX = 1_000

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}", re.ASCII)
# What is relative would be another folder on each node.
_PLACE = re.compile(r"/|[A-Za-z][A-Za-z0-9+.-]*://", re.ASCII)


def export_spec(values: Mapping[str, Any]) -> ExportsSpec:
    """Return what is to be exported, of plain values.

    Raises:
        InvalidRequest: They are no spec; the message names the field.
    """
    try:
        return from_mapping(ExportsSpec, dict(values), short=False)
    except ConfigError as error:
        raise InvalidRequest(str(error)) from error


@dataclass(frozen=True)
class _State(JsonRecord, what="export"):
    """What the record has besides the fields of the spec."""

    name: str
    run: str
    started: str
    stopping: bool
    trouble: str


@dataclass(frozen=True, kw_only=True)
class ExportRecord:
    """An export that goes on; the controller writes it. Its JSON has the fields of ``spec``, too.

    Attributes:
        name: Its name in the cluster.
        run: Random: which start it is.
        spec: What is exported, where and when; tables by the names that they have in the cluster.
        started: ISO 8601, for people; exports are in the order of this.
        stopping: Whether it ends with the next delta.
        trouble: Why the last delta could not be written; empty if it was.
    """

    name: str
    run: str
    spec: ExportsSpec
    started: str
    stopping: bool = False
    trouble: str = ""

    def __post_init__(self) -> None:
        """Refuse what cannot be, or would take too much room."""
        if not _NAME.fullmatch(self.name):
            raise InvalidRequest(f"name {self.name[:200]!r} is not 1 to 128 of A-Z a-z 0-9 _ . -")
        if not _PLACE.match(self.spec.url):
            raise InvalidRequest(f"url {self.spec.url!r} is neither an absolute path nor a URL")
        if not 1 <= len(self.spec.tables) <= PATTERNS_MAX or not all(self.spec.tables):
            raise InvalidRequest(f"tables is no list of 1 to {PATTERNS_MAX} names or patterns")

    def to_json(self) -> str:
        """Return the record as the JSON that the coordination store keeps."""
        state = {item.name: getattr(self, item.name) for item in fields(_State)}
        return dump({**state, **to_mapping(self.spec)})

    @classmethod
    def from_json(cls, text: str) -> ExportRecord:
        """Return the record that ``to_json`` gave.

        Raises:
            InvalidRequest: It is not of that form; the message names the field that is wrong.
        """
        try:
            values = json.loads(text)
        except ValueError as error:
            raise InvalidRequest(f"export: not JSON: {error}") from error
        if not isinstance(values, dict):
            raise InvalidRequest("export: not a JSON object")
        state = {item.name: values.pop(item.name, None) for item in fields(_State)}
        return cls(spec=export_spec(values), **vars(_State.from_json(json.dumps(state))))

    def takes(self, table: str) -> bool:
        """Return whether a table is in it, if no earlier export has it.

        Tables of backstay's own, such as the audit's, are part of no model.
        """
        own = table.rpartition("/")[2].startswith("__")
        return not own and any(fnmatchcase(table, pattern) for pattern in self.spec.tables)


def tables_of_exports(
    exports: Mapping[str, ExportRecord], tables: Iterable[str]
) -> dict[str, tuple[str, ...]]:
    """Return the tables of each export, sorted. A table is in the first one that takes it. Pure."""
    found: dict[str, list[str]] = {name: [] for name in exports}
    in_order = sorted(exports.values(), key=lambda one: (one.started, one.name))
    for table in sorted(tables):
        taker = next((one for one in in_order if one.takes(table)), None)
        if taker is not None:
            found[taker.name].append(table)
    return {name: tuple(some) for name, some in found.items()}
