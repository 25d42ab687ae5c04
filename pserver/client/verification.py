"""Whether the replicas of each slot are equal: ``pserverctl verify``.

Copies are comparable at equal term and position only, and pushes go on while nodes are asked one
after the other; so slots that were met at different positions are compared again. Pure: how
nodes are asked is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from backstay.consensus import RoutingTable

__all__ = ["HeldSlot", "Verification", "compare_replicas"]

ROUNDS_MAX = 20


@dataclass(frozen=True)
class HeldSlot:
    """What one node holds of a slot."""

    term: int
    position: int
    digest: int


@dataclass(frozen=True)
class Verification:
    """What the comparison found.

    Attributes:
        equal: Slots whose copies are equal.
        single: Slots with one copy: there is nothing to compare.
        different: Slots whose copies differ at the same term and position.
        undecided: Slots whose copies were never met at the same term and position.
    """

    equal: tuple[int, ...]
    single: tuple[int, ...]
    different: tuple[int, ...]
    undecided: tuple[int, ...]

    @property
    def is_good(self) -> bool:
        """Whether all copies that there are could be compared and are equal."""
        return not self.different and not self.undecided

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {
            "good": self.is_good,
            "equal": len(self.equal),
            "single": len(self.single),
            "different": list(self.different),
            "undecided": list(self.undecided),
        }


def compare_replicas(
    routing: RoutingTable, ask: Callable[[], Mapping[str, Mapping[int, HeldSlot]]]
) -> Verification:
    """Compare the in-sync copies of every slot.

    Args:
        routing: Who should hold what.
        ask: Returns, by node id, what each node that answers holds of each slot; called up to
            20 times.
    """
    holders = {
        slot: [routing.nodes[index].node_id for index in (held.master, *held.in_sync) if index >= 0]
        for slot, held in enumerate(routing.replicas_of_slot)
    }
    single = tuple(slot for slot, nodes in holders.items() if len(nodes) == 1)
    open_ = {slot for slot, nodes in holders.items() if len(nodes) != 1}
    equal: set[int] = set()
    different: set[int] = set()
    for _ in range(ROUNDS_MAX):
        if not open_:
            break
        found = ask()
        for slot in sorted(open_):
            copies = [found.get(node, {}).get(slot) for node in holders[slot]]
            places = {(copy.term, copy.position) if copy else None for copy in copies}
            if len(places) != 1 or None in places:
                continue
            digests = {copy.digest for copy in copies if copy}
            (equal if len(digests) == 1 else different).add(slot)
        open_ -= equal | different
    return Verification(
        tuple(sorted(equal)), single, tuple(sorted(different)), tuple(sorted(open_))
    )
