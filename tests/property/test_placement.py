"""Placement of masters, for any number of nodes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay.errors import ConfigError
from backstay.pserver.placement import place_masters

EXPECTED_16_OVER_3 = [0, 2, 1, 1, 0, 0, 1, 1, 2, 0, 0, 2, 0, 2, 2, 1]
SLOT_COUNTS = st.integers(0, 12).map(lambda exponent: 2**exponent)


@given(SLOT_COUNTS, st.data())
def test_masters_are_balanced_to_within_one_slot(slot_count: int, data: st.DataObject) -> None:
    nodes = data.draw(st.integers(1, slot_count))
    masters = place_masters(slot_count, nodes)
    counts = np.bincount(masters, minlength=nodes)
    assert masters.shape == (slot_count,)
    assert masters.dtype == np.uint16
    assert counts.sum() == slot_count
    assert counts.max() - counts.min() <= 1
    assert counts.size == nodes


@given(SLOT_COUNTS, st.integers(1, 64))
def test_the_answer_is_a_function_of_the_numbers(slot_count: int, nodes: int) -> None:
    if nodes > slot_count:
        with pytest.raises(ConfigError, match="each node needs a slot"):
            place_masters(slot_count, nodes)
        return
    assert np.array_equal(place_masters(slot_count, nodes), place_masters(slot_count, nodes))


@pytest.mark.parametrize("nodes", [2, 3, 4, 8])
@pytest.mark.parametrize("threads", [2, 4, 8])
def test_a_node_has_work_for_each_thread_by_any_simple_rule(nodes: int, threads: int) -> None:
    # Slot modulo threads and slot range by thread are the rules a data plane would use.
    slot_count = 1024
    masters = place_masters(slot_count, nodes)
    fair = slot_count / nodes / threads
    for node in range(nodes):
        slots = np.flatnonzero(masters == node)
        for rule in (slots % threads, slots * threads // slot_count):
            assert np.bincount(rule, minlength=threads).min() > fair / 3


def test_the_placement_is_the_same_in_every_version() -> None:
    # Nodes of a fixed cluster compute it apart; a new version must not disagree with an old one.
    assert place_masters(16, 3).tolist() == EXPECTED_16_OVER_3
