"""The tables that a node knows: their names and settings, what may join them, what may change.

Pure: checking, canonical form and which settings may change come in as functions (they are the data
plane's, which is the judge of a description). It never talks to other nodes and holds no rows.
"""

from __future__ import annotations

import difflib
import json
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from backstay.errors import LimitExceeded, TableConflict, UnknownTable
from backstay.listing import listed
from backstay.pserver.tables.settings import (
    COMPENSATION,
    NON_FINITE,
    compensation_of,
    lifetime_settings,
    settings_of,
    shown_policy,
)
from backstay.tables import TableSpec

__all__ = ["KnownTable", "TableRegistry", "differences", "differences_of"]

SPEC_BYTES_MAX = 65_536
DIFFERENCES_SHOWN_MAX = 8
# Characters of a value in a message: an expression is long.
VALUE_SHOWN_MAX = 200
NAMES_SHOWN_MAX = 5
# Comparing descriptions takes time, and the node has other callers.
NAMES_COMPARED_MAX = 500
_ABSENT = object()


@dataclass(frozen=True)
class KnownTable:
    """A table's name, the id under which it travels, and its canonical settings.

    Attributes:
        name: Unique in the cluster.
        id: A fixed hash of the name.
        spec_json: The description, with every default filled in.
        revision: Which of its settings these are: 1 when it was made, one more with each change.
    """

    name: str
    id: int
    spec_json: str
    revision: int = 1


class TableRegistry:
    """Name to settings. A table's rows keep their layout, and it never leaves in this version."""

    def __init__(
        self,
        *,
        canonical: Callable[[str], str],
        fits: Callable[[str], None],
        id_of: Callable[[str], int],
        with_settings: Callable[[str, str], str],
        max_tables: int,
    ) -> None:
        """Begin empty.

        Args:
            canonical: Checks a description and returns it with all defaults filled in.
            fits: Refuses a description that this cluster cannot have.
            id_of: Returns the id of a name.
            with_settings: Returns the first description with the settings of the second, as far as
                a table can take them over.
            max_tables: How many tables there may be.
        """
        self._canonical = canonical
        self._fits = fits
        self._id_of = id_of
        self._with_settings = with_settings
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

    def specs(self) -> list[TableSpec]:
        """Return the descriptions of all tables, in the order of their names."""
        return [TableSpec.from_json(table.spec_json) for table in self]

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
        left = [name for name in names if name not in shown]
        return f"this node knows: {listed([*shown, *left], len(shown))}"

    def check(self, spec_json: str) -> KnownTable:
        """Return the table that a description makes, after asking whether it may be here.

        The registry does not change. A table that is here already with the same settings passes.

        Raises:
            ConfigError: A setting is wrong.
            TableConflict: The name is taken with other settings.
            LimitExceeded: The description is too long, or there are too many tables.
        """
        table = self.described(spec_json)
        present = self._tables.get(table.name)
        if present is None:
            self._fits(table.spec_json)
            self._check_new(table)
            return table
        if present.spec_json != table.spec_json:
            self.changed(present, table.spec_json)  # Says what can never change, if that differs.
            raise TableConflict(_other_settings(present, table))
        return present

    def recorded(self, spec_json: str, revision: int) -> KnownTable:
        """Return what a table of the cluster's records is here once that record is taken in.

        Raises:
            ConfigError: A setting is wrong.
            TableConflict: Rows that are here cannot go on under it.
            LimitExceeded: There are too many tables.
        """
        table = replace(self.described(spec_json), revision=revision)
        present = self._tables.get(table.name)
        if present is None:
            self._check_new(table)
            return table
        if revision <= present.revision:
            return present
        self.changed(present, table.spec_json)
        return table

    def changed(self, present: KnownTable, spec_json: str) -> KnownTable:
        """Return a table with other settings, of the next revision; itself if they are the same.

        Raises:
            ConfigError: A setting is wrong.
            TableConflict: They differ in what the layout of a row depends on.
        """
        wanted = self.described(spec_json)
        nearest = self._with_settings(present.spec_json, wanted.spec_json)
        if nearest != wanted.spec_json:
            raise TableConflict(_other_rows(present, differences_of(nearest, wanted.spec_json)))
        if wanted.spec_json == present.spec_json:
            return present
        self._fits(wanted.spec_json)
        return replace(wanted, revision=present.revision + 1)

    def described(self, spec_json: str) -> KnownTable:
        """Return the table that a description makes, whatever there is.

        Raises:
            ConfigError: A setting is wrong.
            LimitExceeded: The description is too long.
        """
        if len(spec_json) > SPEC_BYTES_MAX:
            raise LimitExceeded(
                f"a table description of {len(spec_json)} bytes; at most {SPEC_BYTES_MAX}"
            )
        canonical = self._canonical(spec_json)
        name: str = json.loads(canonical)["name"]
        return KnownTable(name, self._id_of(name), canonical)

    def _check_new(self, table: KnownTable) -> None:
        other = self._name_of_id.get(table.id)
        if other is not None:
            raise TableConflict(
                f"table {table.name!r} would have the same id as {other!r}; rename it"
            )
        if len(self._tables) >= self._max_tables:
            raise LimitExceeded(
                f"table {table.name!r}: there are {len(self._tables)} tables, and max_tables is "
                f"{self._max_tables}"
            )

    def add(self, table: KnownTable) -> None:
        """Take in a table that ``check`` or ``recorded`` has returned."""
        self._tables[table.name] = table
        self._name_of_id[table.id] = table.name


def differences(present: object, wanted: object, path: str = "") -> list[str]:
    """Return one line for each place in which two JSON values differ."""
    if path.endswith(".expression") and _ABSENT not in (present, wanted) and present != wanted:
        # Its operations would tell nobody anything.
        return [f"{path.removesuffix('.expression')}: another function"]
    if isinstance(present, dict) and isinstance(wanted, dict):
        lines = []
        for key in sorted(present.keys() | wanted.keys()):
            inner = f"{path}.{key}" if path else key
            lines += differences(present.get(key, _ABSENT), wanted.get(key, _ABSENT), inner)
        return lines
    if present == wanted:
        return []
    return [f"{path}: {_shown(present)} there, {_shown(wanted)} asked for"]


def differences_of(present_json: str, wanted_json: str) -> list[str]:
    """Return the differences of two descriptions; one line if they name two optimizers."""
    present, wanted = json.loads(present_json), json.loads(wanted_json)
    lines = []
    if present["optimizer"].keys() != wanted["optimizer"].keys():
        there, asked = (next(iter(spec.pop("optimizer"))) for spec in (present, wanted))
        lines = [f"optimizer: {there} there, {asked} asked for"]
    return lines + differences(present, wanted)


def _other_rows(present: KnownTable, lines: list[str]) -> str:
    return (
        f"table {present.name!r} exists with other settings: {_few(lines)}. Its rows are laid out "
        "for what is there, so this cannot be changed: use what is there, or another name for the "
        "table or the job"
    )


def _other_settings(present: KnownTable, wanted: KnownTable) -> str:
    lines = differences_of(present.spec_json, wanted.spec_json)
    asked = _assignments(json.loads(present.spec_json), json.loads(wanted.spec_json))
    by_hand = f"pserverctl tables set {shlex.quote(present.name)} {asked}, or " if asked else ""
    return (
        f"table {present.name!r} exists with other settings: {_few(lines)}. To change them: "
        f"{by_hand}update_settings=True where the trainer connects"
    )


def _assignments(present: dict[str, Any], wanted: dict[str, Any]) -> str:
    """Return what ``pserverctl tables set`` takes to make one description the other."""
    before, after = settings_of(present), settings_of(wanted)
    words = [
        f"{name}={_shown(after[name])}"
        for name in after
        if after[name] != before.get(name, after[name])
    ]
    if present[NON_FINITE] != wanted[NON_FINITE]:
        words.append(f"{NON_FINITE}={shown_policy(wanted[NON_FINITE])}")
    if compensation_of(present) != compensation_of(wanted):
        words.append(f"{COMPENSATION}={compensation_of(wanted)}")
    old, new = lifetime_settings(present), lifetime_settings(wanted)
    words += [f"{name}={_word(new[name])}" for name in new if new[name] != old[name]]
    return shlex.join(words)


def _few(lines: list[str]) -> str:
    if len(lines) > DIFFERENCES_SHOWN_MAX:
        more = len(lines) - DIFFERENCES_SHOWN_MAX
        lines = [*lines[:DIFFERENCES_SHOWN_MAX], f"and {more} more differences"]
    return "; ".join(lines)


def _shown(value: object) -> str:
    text = "nothing" if value is _ABSENT else json.dumps(value)
    return text if len(text) <= VALUE_SHOWN_MAX else f"{text[:VALUE_SHOWN_MAX]}..."


def _word(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
