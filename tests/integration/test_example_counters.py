"""The demo's counters notice a push that is lost, and one that is counted twice."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from backstay.pserver.local_cluster import LocalCluster
from backstay.trainer import Client
from examples.common.counters import GROUPS, TABLE, Audit, Counters, _key_groups, audit

SLOT_COUNT = 64
STEPS = 2 * GROUPS + 1


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with (
        LocalCluster(servers=2, settings={"slot_count": SLOT_COUNT}) as cluster,
        Client(cluster.endpoints) as connected,
    ):
        yield connected


def train(client: Client, trainer: int) -> list[int]:
    counters = Counters(client, trainer)
    for _ in range(STEPS):
        counters.step()
        counters.clear_grad()
    counters.synchronize()
    seen = counters.take_acknowledgements()
    assert len(seen) == STEPS
    assert all(done.begun_s <= done.seen_s for done in seen)
    assert counters.take_acknowledgements() == []
    return counters.counted


def test_every_slot_has_a_counter_of_each_trainer() -> None:
    from backstay._native import slots_of

    keys = [np.concatenate(_key_groups(trainer, SLOT_COUNT)) for trainer in (0, 1)]
    for of_trainer in keys:
        assert sorted(slots_of(of_trainer, SLOT_COUNT)) == list(range(SLOT_COUNT))
    assert not set(keys[0]) & set(keys[1])


def test_lost_and_repeated_pushes_are_noticed(client: Client) -> None:
    counted = {trainer: train(client, trainer) for trainer in (0, 1)}
    assert counted == {0: [3, 2, 2, 2], 1: [3, 2, 2, 2]}
    assert audit(client, counted) == Audit(lost=0, duplicated=0)
    # One slot of one group takes a push of trainer 1 once more.
    key = _key_groups(1, SLOT_COUNT)[2][:1]
    client.push(TABLE, key, np.full((1, 1), -1.0, dtype=np.float32))
    assert audit(client, counted) == Audit(lost=0, duplicated=1)
    # Another one forgets two of trainer 0.
    client.assign(TABLE, _key_groups(0, SLOT_COUNT)[3][-1:], np.zeros((1, 1), dtype=np.float32))
    assert audit(client, counted) == Audit(lost=2, duplicated=1)
