"""The first placement of masters and copies, for clusters of any shape."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from backstay.consensus.records import SlotReplicas
from backstay.pserver.controller.first_routing import place_replicas


@given(
    st.integers(0, 8).map(lambda exponent: 2**exponent),
    st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=12),
    st.integers(1, 3),
)
def test_the_first_placement_is_even_and_on_distinct_hosts(
    slots: int, hosts: list[str], replicas: int
) -> None:
    placed = place_replicas(slots, hosts, replicas)
    masters = np.bincount([held.master for held in placed], minlength=len(hosts))
    assert masters.max() - masters.min() <= 1
    for held in placed:
        assert len(set(held.holders)) == min(replicas, len(hosts))
        spread = len({hosts[number] for number in held.holders})
        assert spread == min(replicas, len(set(hosts)))


@given(
    st.integers(0, 8).map(lambda exponent: 2**exponent),
    st.integers(1, 12),
    st.integers(1, 3),
)
def test_the_first_placement_needs_no_moves(slots: int, nodes: int, replicas: int) -> None:
    placed = place_replicas(slots, [f"h{number}" for number in range(nodes)], replicas)
    copies = np.bincount([one for held in placed for one in held.holders], minlength=nodes)
    assert copies.max() - copies.min() <= 1


def test_the_masters_of_one_node_have_backups_on_all_others() -> None:
    placed = place_replicas(1024, ["a", "b", "c", "d", "e"], 2)
    for node in range(5):
        backups = np.bincount(
            [held.in_sync[0] for held in placed if held.master == node], minlength=5
        )
        others = np.delete(backups, node)
        assert others.max() - others.min() <= 2
    assert placed[0] == SlotReplicas(placed[0].master, placed[0].in_sync)
