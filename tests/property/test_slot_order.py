"""The order in which slots are dealt, for any number of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay.pserver.controller.first_routing import shuffled_slots

EXPECTED_16 = [10, 3, 11, 5, 7, 14, 4, 15, 1, 12, 2, 8, 9, 6, 13, 0]


@given(st.integers(0, 12).map(lambda exponent: 2**exponent))
def test_each_slot_has_one_place(slot_count: int) -> None:
    assert sorted(shuffled_slots(slot_count).tolist()) == list(range(slot_count))


@pytest.mark.parametrize("nodes", [2, 3, 4, 8])
@pytest.mark.parametrize("threads", [2, 4, 8])
def test_a_node_has_work_for_each_thread_by_any_simple_rule(nodes: int, threads: int) -> None:
    # Slot modulo threads and slot range by thread are the rules a data plane would use.
    slot_count = 1024
    fair = slot_count / nodes / threads
    for node in range(nodes):
        slots = shuffled_slots(slot_count)[node::nodes]
        for rule in (slots % threads, slots * threads // slot_count):
            assert np.bincount(rule, minlength=threads).min() > fair / 3


def test_the_order_stays_the_same() -> None:
    # A simulation's seed stands for the same run only as long as it does.
    assert shuffled_slots(16).tolist() == EXPECTED_16
