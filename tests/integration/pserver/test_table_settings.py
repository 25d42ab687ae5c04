"""Settings of a table that change while it is trained, on real processes.

The rows are those of NumPy, which changes its settings at the same push; copies are equal.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from backstay.config import ClientConfig
from backstay.errors import TableConflict
from backstay.pserver.ctl.cli import main as pserverctl
from backstay.pserver.local_cluster import LocalCluster
from backstay.tables import SGD, Adam, Momentum, TableSpec, Zeros
from backstay.trainer import Client

Eventually = Callable[[Callable[[], bool]], None]
KEYS = np.arange(600)
DIM = 2
PUSHES = 15


def ctl(cluster: LocalCluster, *arguments: str) -> Result:
    endpoints = ",".join(cluster.endpoints)
    return CliRunner().invoke(pserverctl, ["--endpoint", endpoints, *arguments])


def momentum(rate: float, share: float = 0.5) -> TableSpec:
    return TableSpec.sparse("v", DIM, optimizer=Momentum(rate, share), initializer=Zeros())


def copies_are_equal(cluster: LocalCluster) -> bool:
    """Whether all copies are there and equal; copies that differ are never equal later."""
    done = ctl(cluster, "verify", "--json")
    if done.exit_code == 0:
        return True
    assert not json.loads(done.stdout).get("different"), done.stdout
    return False


class Reference:
    """The rows as NumPy computes them: one velocity, one weight, in float32."""

    def __init__(self) -> None:
        self.velocity = self.weight = np.float32(0.0)

    def push(self, rate: float, share: float) -> None:
        self.velocity = np.float32(share) * self.velocity + np.float32(-1.0)
        self.weight -= np.float32(rate) * self.velocity


def test_each_push_counts_under_the_settings_of_its_time_when_masters_die(
    eventually: Eventually,
) -> None:
    """A master is killed in the middle of each phase; I4 and I2 with settings that change."""
    reference = Reference()
    settings = {"slot_count": 64, "replicas": 2}
    with LocalCluster(3, settings=settings) as cluster, Client(cluster.endpoints) as client:
        table = client.create_table(momentum(0.5))
        gradients = np.full((len(KEYS), DIM), -1, np.float32)
        for victim, (rate, share) in enumerate([(0.5, 0.5), (0.1, 0.5), (0.03, 0.9)]):
            if victim:
                done = ctl(
                    cluster, "tables", "set", "v", f"learning_rate={rate}", f"momentum={share}"
                )
                assert done.exit_code == 0, done.output
                assert f"revision {victim + 1}: learning_rate: " in done.stdout
            for number in range(PUSHES):
                if number == PUSHES // 2 and victim:
                    cluster.kill(victim)
                client.push(table, KEYS, gradients)
                reference.push(rate, share)
            rows = client.pull(table, KEYS)
            assert (rows == reference.weight).all(), (rows.min(), rows.max(), reference.weight)
            if victim:
                cluster.restart(victim)
            eventually(lambda: copies_are_equal(cluster))
        listed = json.loads(ctl(cluster, "tables", "--json").stdout)["tables"][0]
        assert (listed["revision"], listed["spec"]["optimizer"]["momentum"]["learning_rate"]) == (
            3,
            0.03,
        )


def test_a_change_under_pushes_has_one_place_in_each_slot(eventually: Eventually) -> None:
    """Every push counts once, under the old rate or the new one; copies agree which."""
    old, new = 1.0, 1 / 1024
    settings = {"slot_count": 64, "replicas": 2}
    with LocalCluster(3, settings=settings) as cluster, Client(cluster.endpoints) as client:
        spec = TableSpec.sparse("s", DIM, optimizer=SGD(old), initializer=Zeros())
        table = client.create_table(spec)
        gradients = np.full((len(KEYS), DIM), -1, np.float32)
        acknowledged = 0
        changed = threading.Event()
        marks: list[int] = []

        def change() -> None:
            marks.append(acknowledged)
            cluster.kill(2)
            done = ctl(cluster, "tables", "set", "s", f"learning_rate={new}")
            assert done.exit_code == 0, done.output
            # One more may be under way.
            marks.append(acknowledged + 1)
            changed.set()

        changer = threading.Thread(target=change)
        while not changed.is_set() or acknowledged < marks[1] + 10:
            if acknowledged == 20:
                changer.start()
            client.push(table, KEYS, gradients)
            acknowledged += 1
            assert acknowledged < 900, "it was never changed"
        changer.join()
        rows = client.pull(table, KEYS)
        under_old = np.floor(rows)
        under_new = (rows - under_old) * 1024
        assert (under_old + under_new == acknowledged).all()
        assert under_old.min() >= marks[0]
        assert under_old.max() <= marks[1]
        cluster.restart(2)
        eventually(lambda: copies_are_equal(cluster))


def test_what_the_command_says(tmp_path: Path) -> None:
    with LocalCluster(1) as cluster, Client(cluster.endpoints) as client:
        client.create_table(TableSpec.sparse("a/emb", 4, optimizer=Adam(0.1)))
        done = ctl(cluster, "tables", "set", "a/emb", "learning_rate=0.01", "--dry-run")
        assert done.stdout == "table 'a/emb', would change: learning_rate: 0.1 -> 0.01\n"
        done = ctl(cluster, "tables", "set", "a/emb", "learning_rate=0.01", "non_finite=clip:5")
        changed = "learning_rate: 0.1 -> 0.01, non_finite: refuse -> clip:5.0"
        assert (done.exit_code, done.stdout) == (0, f"table 'a/emb', revision 2: {changed}\n")
        done = ctl(cluster, "tables", "set", "a/emb", "learning_rate=0.01", "--json")
        document = json.loads(done.stdout)
        assert (document["changed"], document["revision"], document["dry_run"]) == ([], 2, False)
        shown = ctl(cluster, "tables").stdout
        assert "learning_rate=0.01" in shown
        assert "non_finite=clip:5.0" in shown
        for words, code, text in (
            (("a/emb", "dim=8"), 3, "dim of table 'a/emb' cannot be changed"),
            (("a/emb", "learning_rte=1"), 2, "did you mean learning_rate"),
            (("a/emb", "beta1=2"), 2, "optimizer.adam.beta1 is 2"),
            (("a/emb", "beta1"), 2, "expected KEY=VALUE"),
            (("a/em", "beta1=0.5"), 3, "this node knows: a/emb"),
        ):
            done = ctl(cluster, "tables", "set", *words)
            assert (done.exit_code, text in done.stderr) == (code, True), done.output
            assert done.stderr.count("\n") == 1


def test_a_loop_with_another_rate_is_refused_in_one_line_or_changes_it() -> None:
    with LocalCluster(1) as cluster:
        with Client(cluster.endpoints) as client:
            client.create_table(momentum(0.5))
            with pytest.raises(TableConflict) as refused:
                client.create_table(momentum(0.25))
            text = str(refused.value)
            assert "learning_rate: 0.5 there, 0.25 asked for" in text
            assert "pserverctl tables set v learning_rate=0.25, or update_settings=True" in text
            assert "\n" not in text
            # A traceback shows that line, and no pages of gRPC's.
            assert refused.value.__cause__ is None
            assert refused.value.__suppress_context__
            table = client.create_table(momentum(0.25), update_settings=True)
            assert table.spec.optimizer == Momentum(0.25, 0.5)
            other = TableSpec.sparse("v", DIM, optimizer=Adam())
            with pytest.raises(TableConflict, match="optimizer: momentum there, adam asked for"):
                client.create_table(other, update_settings=True)
        config = ClientConfig(update_settings=True)
        with Client(cluster.endpoints, config=config) as client:
            assert client.create_table(momentum(0.125)).spec.optimizer == Momentum(0.125, 0.5)
            assert client.table_notes == ["table 'v' goes on with learning_rate: 0.25 -> 0.125"]


def test_a_restore_leaves_the_settings_of_tables_that_are_there(tmp_path: Path) -> None:
    settings = {"slot_count": 16, "checkpoint_url": str(tmp_path)}
    with LocalCluster(1, settings=settings) as cluster:
        with Client(cluster.endpoints) as client:
            table = client.create_table(momentum(0.5))
            client.push(table, KEYS, np.full((len(KEYS), DIM), -1, np.float32))
            client.checkpoints.save()
            assert ctl(cluster, "tables", "set", "v", "learning_rate=0.25").exit_code == 0
            done = ctl(cluster, "checkpoint", "restore", "--yes")
            assert done.exit_code == 0, done.output
        with Client(cluster.endpoints) as client:
            assert client.table("v").spec.optimizer == Momentum(0.25, 0.5)
            client.push("v", KEYS, np.full((len(KEYS), DIM), -1, np.float32))
            # v = 1, then 1.5: 0.5 * 1 + 0.25 * 1.5.
            assert (client.pull("v", KEYS) == np.float32(0.875)).all()
    # A cluster that begins with it has what it holds.
    with (
        LocalCluster(2, settings={**settings, "restore": "latest"}) as cluster,
        Client(cluster.endpoints) as client,
    ):
        assert client.table("v").spec.optimizer == Momentum(0.5, 0.5)
        assert ctl(cluster, "tables", "set", "v", "learning_rate=0.25").exit_code == 0
        client.push("v", KEYS, np.full((len(KEYS), DIM), -1, np.float32))
        assert (client.pull("v", KEYS) == np.float32(0.875)).all()
