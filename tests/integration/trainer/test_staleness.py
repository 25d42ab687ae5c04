"""Tables that divide the learning rate of stale pushes, on real servers with copies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from backstay.errors import ConfigError, InvalidRequest
from backstay.pserver.local_cluster import LocalCluster
from backstay.tables import SGD, Adagrad, AdaptiveRevision, DelayCompensated, TableSpec, Zeros
from backstay.trainer import Client

KEYS = np.arange(300, dtype=np.uint64)
SPEC = TableSpec.sparse("emb", 2, optimizer=SGD(1.0), initializer=Zeros(), compensation="scale")


def test_a_stale_push_takes_a_shorter_step_on_all_copies() -> None:
    ones = np.full((300, 2), -1, np.float32)
    settings = {"replicas": 2, "slot_count": 64}
    with (
        LocalCluster(servers=3, settings=settings) as cluster,
        Client(cluster.endpoints) as slow,
        Client(cluster.endpoints) as fast,
    ):
        table = slow.create_table(SPEC)
        assert not slow.pull(table, KEYS).any()
        for _ in range(4):
            # It has pulled nothing, so its staleness is not known.
            fast.push("emb", KEYS, ones)
        slow.push(table, KEYS, ones)
        assert (slow.pull(table, KEYS) == 4.25).all()
        slow.push(table, KEYS, ones)
        stats = slow.stats()
        # The first push had 4 in each slot, the second none.
        assert stats.staleness_sum == 2 * stats.stale_slots > 0
        buckets = {at: count for at, count in enumerate(stats.staleness_buckets) if count}
        assert buckets == {0: stats.stale_slots // 2, 3: stats.stale_slots // 2}
        # Whoever serves now counts as its predecessor did, and has the same rows.
        fast.push("emb", KEYS, ones)
        fast.push("emb", KEYS, ones)
        cluster.kill(1)
        slow.push(table, KEYS, ones)
        assert (slow.pull(table, KEYS) == np.float32(7.25) + np.float32(1) / 3).all()


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_late_gradient_is_moved_to_where_the_weights_are(adaptive: bool) -> None:
    spec = TableSpec.sparse(
        "moved",
        2,
        optimizer=SGD(1.0),
        initializer=Zeros(),
        compensation=DelayCompensated(0.5, adaptive=adaptive, decay=0.0),
    )
    twos = np.full((300, 2), -2, np.float32)
    with (
        LocalCluster(servers=3, settings={"replicas": 2, "slot_count": 64}) as cluster,
        Client(cluster.endpoints) as late,
        Client(cluster.endpoints) as fast,
    ):
        table = late.create_table(spec)
        late.pull(table, KEYS)
        fast.pull("moved", KEYS)
        fast.push("moved", KEYS, twos)
        cluster.kill(1)
        late.push(table, KEYS, twos)
        # Constant: -2 + 0.5 * 4 * 2; adaptive: 0.5 is divided by the root of 4.
        wanted = 0.0 if not adaptive else 2.0
        assert np.abs(late.pull(table, KEYS) - wanted).max() < 1e-5
        with pytest.raises(InvalidRequest, match="has not pulled key"):
            late.push(table, KEYS + np.uint64(1000), twos)


@dataclass
class Paper:
    """A weight under McMahan and Streeter's AdaptiveRevision, of rate 0.5, from 0."""

    weight: float = 0.0
    total: float = 0.0
    z: float = 0.25
    highest: float = 0.25

    def update(self, gradient: float, read: float) -> float:
        """Take a gradient whose weights had seen this total; return the weight."""
        since, old = self.total - read, 0.5 / self.highest**0.5
        self.z += gradient**2 + 2 * gradient * since
        self.highest = max(self.highest, self.z)
        new = 0.5 / self.highest**0.5
        self.weight += (old - new) * since - new * gradient
        self.total += gradient
        return self.weight


def test_late_gradients_revise_after_a_failover_and_after_a_restore(tmp_path: Path) -> None:
    spec = TableSpec.sparse(
        "revised",
        2,
        optimizer=Adagrad(0.5, initial_accumulator=0.25),
        initializer=Zeros(),
        compensation=AdaptiveRevision(),
    )
    paper = Paper()
    settings = {"slot_count": 64, "checkpoint_url": str(tmp_path)}

    def check(client: Client, wanted: float) -> None:
        assert np.abs(client.pull("revised", KEYS) - wanted).max() < 1e-5

    def push(client: Client, gradient: float) -> None:
        client.push("revised", KEYS, np.full((300, 2), gradient, np.float32))

    with (
        LocalCluster(servers=3, settings={**settings, "replicas": 2}) as cluster,
        Client(cluster.endpoints) as late,
        Client(cluster.endpoints) as fast,
    ):
        late.create_table(spec)
        check(late, 0.0)
        check(fast, 0.0)
        push(fast, -2.0)
        paper.update(-2.0, 0.0)
        cluster.kill(1)
        push(late, 1.5)
        check(late, paper.update(1.5, 0.0))
        saved = late.checkpoints.save().id
    with (
        LocalCluster(1, settings={**settings, "restore": saved}) as fresh,
        Client(fresh.endpoints) as late,
        Client(fresh.endpoints) as fast,
    ):
        # Its sum goes on from -0.5.
        check(late, paper.weight)
        check(fast, paper.weight)
        push(fast, -1.0)
        paper.update(-1.0, -0.5)
        push(late, -3.0)
        check(fast, paper.update(-3.0, -0.5))


def test_settings_of_a_delay_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"DelayCompensated.strength is -1"):
        DelayCompensated(-1)
    with pytest.raises(ConfigError, match=r"DelayCompensated.decay is 1"):
        DelayCompensated(1, decay=1.0)


def test_a_word_that_there_is_not_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="`scael`, expected one of `ignore`, `scale`, `d"):
        TableSpec.from_json(SPEC.to_json().replace('"scale"', '"scael"'))
