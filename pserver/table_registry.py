"""The tables that a node knows: their names and settings, and what may join them.

Pure: checking and canonical form come in as functions (they are the data plane's, which is the
judge of a description). It never talks to other nodes and holds no rows.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from backstay.errors import LimitExceeded, TableConflict, UnknownTable

__all__ = ["KnownTable", "TableRegistry", "differences"]

SPEC_BYTES_MAX = 65_536
DIFFERENCES_SHOWN_MAX = 8
NAMES_SHOWN_MAX = 5
# Comparing texts takes time, and the node has other callers.
NAMES_COMPARED_MAX = 500
_ABSENT = object()


@dataclass(frozen=True)
class KnownTable:
    """A table's name, the id under which it travels, and its canonical settings."""

    name: str
    id: int
    spec_json: str


class TableRegistry:
    """Name to settings. A table never changes and never leaves in this version."""

    def __init__(
        self,
        *,
        canonical: Callable[[str], str],
        id_of: Callable[[str], int],
        max_tables: int,
    ) -> None:
        """Begin empty.

        Args:
            canonical: Checks a description and returns it with all defaults filled in.
            id_of: Returns the id of a name.
            max_tables: How many tables there may be.
        """
        self._canonical = canonical
        self._id_of = id_of
        self._max_tables = max_tables
        self._tables: dict[str, KnownTable] = {}
        self._name_of_id: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._tables)

    def __contains__(self, name: object) -> bool:
        """Whether a table of that name is known."""
        return name in self._tables

    def __iter__(self) -> Iterator[KnownTable]:
        """Go through the tables in the order of their names."""
        return iter(sorted(self._tables.values(), key=lambda table: table.name))

    def get(self, name: str) -> KnownTable:
        """Return the table of that name.

        Raises:
            UnknownTable: There is none.
        """
        table = self._tables.get(name)
        if table is None:
            raise UnknownTable(
                f"no table {name[:200]!r}; create it first ({self._names_near(name)})"
            )
        return table

    def _names_near(self, name: str) -> str:
        """Say which tables there are: those with a similar name, else the first ones."""
        names = sorted(self._tables)
        if not names:
            return "this node knows no tables"
        near = difflib.get_close_matches(name[:200], names[:NAMES_COMPARED_MAX], NAMES_SHOWN_MAX)
        shown = near or names[:NAMES_SHOWN_MAX]
        more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
        return f"this node knows: {', '.join(shown)}{more}"

    def check(self, spec_json: str) -> KnownTable:
        """Return the table that a description makes, after asking whether it may be here.

        The registry does not change. A table that is here already with the same settings passes.

        Raises:
            ConfigError: A setting is wrong.
            TableConflict: The name is taken with other settings.
            LimitExceeded: The description is too long, or there are too many tables.
        """
        if len(spec_json) > SPEC_BYTES_MAX:
            raise LimitExceeded(
                f"a table description of {len(spec_json)} bytes; at most {SPEC_BYTES_MAX}"
            )
        canonical = self._canonical(spec_json)
        name: str = json.loads(canonical)["name"]
        table = KnownTable(name, self._id_of(name), canonical)
        present = self._tables.get(name)
        if present is not None:
            if present != table:
                raise TableConflict(_conflict(present, table))
            return present
        twin = self._name_of_id.get(table.id)
        if twin is not None:
            raise TableConflict(f"table {name!r} would have the same id as {twin!r}; rename it")
        if len(self._tables) >= self._max_tables:
            raise LimitExceeded(
                f"table {name!r}: there are {len(self._tables)} tables, and max_tables is "
                f"{self._max_tables}"
            )
        return table

    def add(self, table: KnownTable) -> None:
        """Take in a table that ``check`` has returned."""
        self._tables[table.name] = table
        self._name_of_id[table.id] = table.name


def differences(present: object, wanted: object, path: str = "") -> list[str]:
    """Return one line for each place in which two JSON values differ."""
    if isinstance(present, dict) and isinstance(wanted, dict):
        lines = []
        for key in sorted(present.keys() | wanted.keys()):
            inner = f"{path}.{key}" if path else key
            lines += differences(present.get(key, _ABSENT), wanted.get(key, _ABSENT), inner)
        return lines
    if present == wanted:
        return []
    return [f"{path}: {_shown(present)} there, {_shown(wanted)} asked for"]


def _conflict(present: KnownTable, wanted: KnownTable) -> str:
    lines = differences(json.loads(present.spec_json), json.loads(wanted.spec_json))
    if len(lines) > DIFFERENCES_SHOWN_MAX:
        more = len(lines) - DIFFERENCES_SHOWN_MAX
        lines = [*lines[:DIFFERENCES_SHOWN_MAX], f"and {more} more differences"]
    return f"table {present.name!r} exists with other settings: {'; '.join(lines)}"


def _shown(value: object) -> str:
    return "nothing" if value is _ABSENT else json.dumps(value)
