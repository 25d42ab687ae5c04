"""User functions on real processes whose masters die: rows are NumPy's, and copies are equal."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from backstay.errors import TableConflict
from backstay.pserver.ctl.cli import main as pserverctl
from backstay.pserver.local_cluster import LocalCluster
from backstay.tables import Constant, PullFunction, TableSpec, UserOptimizer
from backstay.trainer import Client
from tools.make_user_function_vectors import adagrad, clipped_by_norm

Eventually = Callable[[Callable[[], bool]], None]
KEYS = np.arange(600)
DIM = 11
PUSHES = 8


def clip(weights: Any, *, limit: float = 1.0) -> Any:
    return np.clip(weights, -limit, limit)


def ctl(cluster: LocalCluster, *arguments: str) -> Result:
    endpoints = ",".join(cluster.endpoints)
    return CliRunner().invoke(pserverctl, ["--endpoint", endpoints, *arguments])


def copies_are_equal(cluster: LocalCluster) -> bool:
    done = ctl(cluster, "verify", "--json")
    if done.exit_code == 0:
        return True
    assert not json.loads(done.stdout).get("different"), done.stdout
    return False


def test_rows_are_numpys_while_settings_change_and_masters_die(eventually: Eventually) -> None:
    spec = TableSpec.sparse(
        "u",
        DIM,
        optimizer=UserOptimizer.of(clipped_by_norm, learning_rate=0.5),
        initializer=Constant(0.25),
        pull=PullFunction.of(clip, limit=0.5),
    )
    given = {"learning_rate": 0.5, "momentum": 0.9, "limit": 1.0}
    weights = np.full(DIM, 0.25, np.float32)
    velocity, count = np.zeros(DIM, np.float32), np.float32(0.0)
    random = np.random.default_rng(3)
    with (
        LocalCluster(3, settings={"slot_count": 64, "replicas": 2}) as cluster,
        Client(cluster.endpoints) as client,
    ):
        table = client.create_table(spec)
        for victim, changes in enumerate([{}, {"momentum": 0.5, "limit": 2.0}, {"limit": 0.5}]):
            if victim:
                words = [f"{name}={value}" for name, value in changes.items()]
                done = ctl(cluster, "tables", "set", "u", *words)
                assert done.exit_code == 0, done.output
                given.update(changes)
            for number in range(PUSHES):
                if number == PUSHES // 2 and victim:
                    cluster.kill(victim)
                gradient = random.normal(size=DIM).astype(np.float32)
                client.push(table, KEYS, np.tile(gradient, (len(KEYS), 1)))
                weights, velocity, count = clipped_by_norm(
                    weights, gradient, velocity, count, **given
                )
            rows = client.pull(table, KEYS)
            assert np.array_equal(rows, np.tile(clip(weights, limit=0.5), (len(KEYS), 1)))
            if victim:
                cluster.restart(victim)
            eventually(lambda: copies_are_equal(cluster))
        assert np.abs(weights).max() > 0.5
        done = ctl(cluster, "tables", "set", "u", "pull.limit=0.25")
        assert "pull.limit: 0.5 -> 0.25" in done.output, done.output
        # A key without a row, too.
        assert client.pull(table, np.array([10_000])).max() == 0.25
        assert client.pull(table, KEYS).max() == np.float32(0.25)
        shown = ctl(cluster, "tables").stdout
        assert "user clipped_by_norm" in shown
        assert "expression" not in shown


def test_another_function_is_refused_and_a_pulls_may_change() -> None:
    with (
        LocalCluster(1, settings={"slot_count": 16}) as cluster,
        Client(cluster.endpoints) as client,
    ):
        first = TableSpec.sparse("u", DIM, optimizer=UserOptimizer.of(adagrad, learning_rate=0.5))
        client.create_table(first)
        other = UserOptimizer.of(clipped_by_norm, learning_rate=0.5)
        with pytest.raises(TableConflict, match=r"optimizer\.user\.expression") as raised:
            client.create_table(TableSpec.sparse("u", DIM, optimizer=other), update_settings=True)
        assert len(str(raised.value)) < 2_500
        refused = ctl(cluster, "tables", "set", "u", "expression=1")
        assert "cannot be changed" in refused.output
        unknown = ctl(cluster, "tables", "set", "u", "epsylon=1")
        assert "did you mean epsilon?" in unknown.output
        clipped = TableSpec.sparse(
            "u", DIM, optimizer=first.optimizer, pull=PullFunction.of(clip, limit=0.01)
        )
        with pytest.raises(TableConflict, match="update_settings=True"):
            client.create_table(clipped, update_settings=False)
        table = client.create_table(clipped, update_settings=True)
        assert np.abs(client.pull(table, KEYS)).max() == np.float32(0.01)
