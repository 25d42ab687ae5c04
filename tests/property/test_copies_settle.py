"""Moves of copies come to an end, in whatever order the copies come in sync.

A process that took in several copies once dropped each as it came, and was given it again.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from backstay.consensus.records import SlotReplicas
from backstay.pserver.controller import ClusterRecords, StepSizes, decide
from tests.examples import examples
from tests.unit.controller_cluster import cluster, table, true_reports, with_slots


def _under_way(choose: random.Random) -> ClusterRecords:
    """Return a cluster whose copies lie unevenly, some of them on the move."""
    nodes = choose.randint(2, 7)
    replicas = choose.randint(1, min(3, nodes))
    records = cluster(nodes=nodes, replicas=replicas, slots=choose.choice([8, 16, 32]))
    if choose.random() < 0.3:
        pairs = {
            name: replace(one, host=f"h{number // 2}")
            for number, (name, one) in enumerate(sorted(records.members.items()))
        }
        records = replace(records, members=pairs)
    weights = [choose.random() ** 2 + 0.01 for _ in range(nodes)]

    def some(count: int, others: list[int]) -> list[int]:
        found: list[int] = []
        while len(found) < count:
            one = choose.choices(range(nodes), weights)[0]
            if one not in found and one not in others:
                found.append(one)
        return found

    held = []
    for _ in range(table(records).slot_count):
        more = choose.randint(0, 2) if choose.random() < 0.15 else 0
        synced = some(min(nodes, replicas + more), [])
        moves = len(synced) == replicas < nodes and choose.random() < 0.4
        held.append(SlotReplicas(synced[0], tuple(synced[1:]), tuple(some(moves, synced))))
    return with_slots(records, held)


@settings(max_examples=examples(100))
@example(seed=18, few=False, lowest_slot_first=True)
@example(seed=95, few=True, lowest_slot_first=True)
@given(seed=st.integers(0, 2**32), few=st.booleans(), lowest_slot_first=st.booleans())
def test_copies_that_come_in_sync_one_at_a_time_settle(
    seed: int, few: bool, lowest_slot_first: bool
) -> None:
    choose = random.Random(seed)
    sizes = StepSizes(early_handovers_min=1, spared_max=2) if few else StepSizes()
    records = _under_way(choose)
    taken_in = 0
    while True:
        # All that is decided without news, and then one copy is in sync.
        for _ in range(1000):
            decision = decide(replace(records, reports={}), sizes)
            if decision.routing is None:
                break
            records = replace(records, routing=decision.routing)
        else:
            pytest.fail("decisions do not come to an end")
        reports = true_reports(records).reports
        if not reports:
            break
        master = choose.choice(sorted(reports))
        caught_up = reports[master].caught_up
        one = caught_up[0] if lowest_slot_first else choose.choice(caught_up)
        news = {master: replace(reports[master], caught_up=(one,))}
        decision = decide(replace(records, reports=news), sizes)
        records = replace(records, routing=decision.routing or table(records))
        taken_in += 1
        assert taken_in <= 6 * table(records).slot_count, "copies come and go without an end"
    assert {len(one.synced) for one in table(records).sets} == {table(records).replicas}
