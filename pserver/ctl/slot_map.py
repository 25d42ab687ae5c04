"""The map of the slots as ``pserverctl slots`` draws it: which cell says what. Pure.

A cell stands for one slot, or for as many as it takes to fit them all in: a letter for the node
that is master of most of them, and a mark for what is wrong with any of them. The text is the
same with and without colours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from backstay.consensus import RoutingTable
from backstay.consensus.records import NO_MASTER

__all__ = ["MARKS", "Cell", "SlotMap", "labels", "slot_map"]

LINES_MAX = 32
# The mark of each fault, the worst last; a sound slot has none.
MARKS = {
    "fine": " ",
    "catching_up": "+",
    "short": "-",
    "no_master": "!",
}
_ORDER = tuple(MARKS)


@dataclass(frozen=True)
class Cell:
    """Some slots in a row.

    Attributes:
        first_slot: The first of them.
        master: Index of the node that is master of most of them, or ``NO_MASTER``.
        state: The worst that is so of any of them: ``fine``, ``catching_up`` (a copy is being
            made), ``short`` (copies are missing and none is being made) or ``no_master``.
    """

    first_slot: int
    master: int
    state: str

    def text(self, names: Sequence[str]) -> str:
        """Return its letters and its mark, by the nodes' ``labels``."""
        letters = names[self.master] if self.master != NO_MASTER else "." * len(names[0])
        return letters + MARKS[self.state]


@dataclass(frozen=True)
class SlotMap:
    """The cells, line by line.

    Attributes:
        slots_per_cell: How many slots a cell stands for.
        lines: The cells.
    """

    slots_per_cell: int
    lines: tuple[tuple[Cell, ...], ...]


def labels(node_count: int) -> list[str]:
    """Return for each node its letters on the map, all of one length: A, B, ... or AA, AB, ..."""
    width = 1
    while 26**width < node_count:
        width += 1
    names = []
    for index in range(node_count):
        letters = ""
        for _ in range(width):
            index, digit = divmod(index, 26)
            letters = chr(ord("A") + digit) + letters
        names.append(letters)
    return names


def slot_map(routing: RoutingTable, width: int) -> SlotMap:
    """Return the map of a routing table.

    Args:
        routing: Who holds what.
        width: Characters that a line of cells may take.
    """
    cell_width = len(labels(len(routing.nodes))[0]) + 1
    per_line = 1
    while per_line * 2 * cell_width <= width and per_line * 2 <= routing.slot_count:
        per_line *= 2
    # Powers of two all of them, so cells are of one size and lines are full.
    cell_count = min(routing.slot_count, per_line * LINES_MAX)
    slots_per_cell = routing.slot_count // cell_count
    masters = routing.master_of_slot.reshape(cell_count, slots_per_cell)
    worst = _worst_of_slot(routing).reshape(cell_count, slots_per_cell).max(axis=1)
    cells = [
        Cell(index * slots_per_cell, _most_frequent(masters[index]), _ORDER[worst[index]])
        for index in range(cell_count)
    ]
    lines = (tuple(cells[at : at + per_line]) for at in range(0, cell_count, per_line))
    return SlotMap(slots_per_cell, tuple(lines))


def _worst_of_slot(routing: RoutingTable) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return for each slot the place of its state in ``_ORDER``."""
    worst = []
    for held in routing.sets:
        if held.master == NO_MASTER:
            state = "no_master"
        elif len(held.synced) < routing.replicas:
            # A copy under way is on the list already: it is being mended.
            mended = len(held.holders) >= routing.replicas
            state = "catching_up" if mended else "short"
        else:
            state = "catching_up" if held.catching_up else "fine"
        worst.append(_ORDER.index(state))
    places: np.ndarray[tuple[int], np.dtype[np.int64]] = np.array(worst, dtype=np.int64)
    return places[routing.set_of_slot]


def _most_frequent(masters: np.ndarray[tuple[int], np.dtype[np.int64]]) -> int:
    """Return the master of most slots; the first one of several; ``NO_MASTER`` if none has one."""
    found = masters[masters != NO_MASTER]
    return int(np.bincount(found).argmax()) if len(found) else NO_MASTER
