"""``pserverctl verify``: which slots it calls equal, different or undecided."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from backstay.consensus import NodeRecord, RoutingTable
from backstay.consensus.records import SlotReplicas
from backstay.pserver.client.verification import HeldSlot, compare_replicas

Held = Mapping[str, Mapping[int, HeldSlot]]


def routing(*held: SlotReplicas) -> RoutingTable:
    nodes = tuple(
        NodeRecord(f"ps-{n}", f"h:{7000 + n}", f"h:{7100 + n}", n + 1, "serving") for n in range(3)
    )
    slots = len(held)
    return RoutingTable(
        version=1,
        nodes=nodes,
        replicas=2,
        replicas_of_slot=held,
        term_of_slot=np.ones(slots, np.uint64),
        epoch_of_slot=np.ones(slots, np.uint64),
    )


def answers(*rounds: Held) -> Callable[[], Held]:
    """Each round once, the last one for ever."""
    left = list(rounds)
    return lambda: left.pop(0) if len(left) > 1 else left[0]


ONE, OTHER = HeldSlot(1, 5, 0xA), HeldSlot(1, 5, 0xB)
LATER = HeldSlot(1, 6, 0xA)
TWO_SLOTS = routing(SlotReplicas(0, (1,)), SlotReplicas(1, (2,)))


def test_equal_and_different_copies() -> None:
    found = {"ps-0": {0: ONE}, "ps-1": {0: ONE, 1: ONE}, "ps-2": {1: OTHER, 0: OTHER}}
    result = compare_replicas(TWO_SLOTS, answers(found))
    assert (result.equal, result.different, result.undecided) == ((0,), (1,), ())
    assert not result.is_good


def test_copies_met_at_different_positions_are_compared_again() -> None:
    first = {"ps-0": {0: ONE}, "ps-1": {0: LATER, 1: ONE}, "ps-2": {1: ONE}}
    second = {"ps-0": {0: LATER}, "ps-1": {0: LATER, 1: LATER}, "ps-2": {1: OTHER}}
    result = compare_replicas(TWO_SLOTS, answers(first, second))
    # The second round says nothing on slot 1 any more.
    assert (result.equal, result.different) == ((0, 1), ())
    assert result.is_good


def test_a_node_that_does_not_answer_leaves_its_slots_undecided() -> None:
    found = {"ps-0": {0: ONE}, "ps-1": {0: ONE, 1: ONE}}
    result = compare_replicas(TWO_SLOTS, answers(found))
    assert (result.equal, result.undecided, result.is_good) == ((0,), (1,), False)


def test_copies_that_catch_up_and_single_ones_are_not_compared() -> None:
    table = routing(SlotReplicas(0, (), (1,)))
    result = compare_replicas(table, answers({}))
    assert (result.single, result.undecided, result.is_good) == ((0,), (), True)
