"""User functions on real processes whose masters die: rows are NumPy's, and copies are equal."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from click.testing import CliRunner, Result
from numpy.typing import NDArray

from backstay import _native
from backstay.checkpoint.export import export
from backstay.checkpoint.export_reader import Export
from backstay.checkpoint.reading import CheckpointReader
from backstay.checkpoint.statistics import scores_of, statistics_of
from backstay.checkpoint.storage import CheckpointStorage
from backstay.checkpoint.trained import CheckpointTables, TrainedTables
from backstay.errors import TableConflict
from backstay.pserver.ctl.cli import main as pserverctl
from backstay.pserver.local_cluster import LocalCluster
from backstay.tables import (
    SGD,
    AdmissionFunction,
    AdmitAfter,
    Capacity,
    Constant,
    Dense,
    Expiry,
    Lifetime,
    PullFunction,
    Score,
    ScoreFunction,
    TableSpec,
    Uniform,
    UserOptimizer,
    Zeros,
)
from backstay.trainer import Client
from backstay.trainer.adapter.exported_rows import sorted_rows
from backstay.trainer.adapter.offline import OfflineClient
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


def around_the_mean(weights: Any, *, scale: float = 2.0) -> Any:
    return (weights - np.mean(weights)) * scale + 1.0


@pytest.mark.parametrize("unadmitted", ["initial", "zeros"])
def test_a_served_model_reads_what_a_pull_returns(
    tmp_path: Path, unadmitted: Literal["initial", "zeros"]
) -> None:
    pull = PullFunction.of(around_the_mean)
    sgd = SGD(1.0)
    lifetime = Lifetime(AdmitAfter(2), unadmitted=unadmitted)
    rows = TableSpec.sparse("rows", 3, optimizer=sgd, lifetime=lifetime, pull=pull)
    # The last block of one reaches beyond it; the other was never set.
    dense = TableSpec.dense("dense", (5, 3), optimizer=sgd, block_elements=4, pull=pull)
    fresh = replace(dense, name="fresh", kind=Dense((2, 4), 4), initializer=Uniform(-1.0, 1.0))
    specs = (rows, dense, fresh)
    keys = np.arange(20)
    with (
        LocalCluster(1, settings={"slot_count": 16, "checkpoint_url": str(tmp_path)}) as cluster,
        Client(cluster.endpoints) as client,
    ):
        for spec in specs:
            client.create_table(spec)
        for _ in range(2):
            client.push("rows", keys[:10], np.arange(30, dtype=np.float32).reshape(10, 3))
        client.init_dense("dense", np.arange(15, dtype=np.float32).reshape(5, 3) ** 2)
        pulled = client.pull("rows", keys)
        tensors = {spec.name: client.pull_dense(spec.name) for spec in (dense, fresh)}
        assert np.unique(pulled[10:]).size == (1 if unadmitted == "zeros" else 30)
        saved = client.checkpoints.save().id
    storage = CheckpointStorage(str(tmp_path))
    exported = Export.open(export(storage, saved, tmp_path / "out"))
    with CheckpointTables(storage, saved) as kept:
        both: tuple[TrainedTables, ...] = (exported, kept)
        for tables in both:
            offline = OfflineClient(tables)
            assert np.array_equal(offline.pull("rows", keys), pulled)
            for name, tensor in tensors.items():
                assert np.array_equal(offline.pull_dense(name), tensor)
            found = tables.table("rows").lookup(keys)
            assert np.array_equal(found[:10], pulled[:10])
            assert not found[10:].any()
            assert np.array_equal(sorted_rows(tables.table("rows"), None)[1][:10], pulled[:10])
            # What is stored is as it was.
            assert not np.array_equal(tables.table("rows").to_numpy()[1], pulled[:10])


def test_another_function_is_refused_and_a_pulls_may_change() -> None:
    with (
        LocalCluster(1, settings={"slot_count": 16}) as cluster,
        Client(cluster.endpoints) as client,
    ):
        first = TableSpec.sparse("u", DIM, optimizer=UserOptimizer.of(adagrad, learning_rate=0.5))
        client.create_table(first)
        other = UserOptimizer.of(clipped_by_norm, learning_rate=0.5)
        with pytest.raises(TableConflict, match=r"optimizer\.user: another function") as raised:
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


# -- rows that come and go by functions ------------------------------------------------------

SLOTS = 16
USERS = 500
# The slot's share is 16 rows, and 15 are left by an eviction.
SHARE, LEFT = 16, 15
BELOW = 1.0


def again(time: Any, last_seen: Any, show: Any, *, day: float = 86_400.0, many: float = 1.0) -> Any:
    return (time - last_seen < day) | (show >= many)


def liking(time: Any, last_seen: Any, show: Any, click: Any, *, of_click: float = 3.0) -> Any:
    fresh = np.where(time - last_seen > 86_400 * 30, 0.0, 1.0)
    return fresh * (of_click * click + 0.25 * (show - click))


LIKED = Lifetime(
    AdmissionFunction.of(again),
    expiry=Expiry(score_below=BELOW),
    capacity=Capacity(rows=SHARE * SLOTS, evict="lowest_score"),
    score=Score(function=ScoreFunction.of(liking, of_click=2.0), decay=0.5),
)


class Liked:
    """What each slot keeps: its rows, (weight, show, click), and the shows of other keys."""

    def __init__(self) -> None:
        self.rows: list[dict[int, list[np.float32]]] = [{} for _ in range(SLOTS)]
        self.counted: list[dict[int, np.float32]] = [{} for _ in range(SLOTS)]
        self.evicted = 0

    def push(
        self, keys: NDArray[np.int64], shows: NDArray[np.float32], clicks: NDArray[np.float32]
    ) -> None:
        slots = _native.slots_of(keys.astype(np.uint64), SLOTS).tolist()
        for slot, key, show, click in zip(slots, keys.tolist(), shows, clicks, strict=True):
            rows, counted = self.rows[slot], self.counted[slot]
            if key not in rows:
                before = counted.get(key)
                last_seen = 0.0 if before is None else 1e9
                shown = show if before is None else before + show
                if not again(1e9, last_seen, shown):
                    counted[key] = shown
                    continue
                # The clicks before it were not counted: the function does not use them.
                begun = counted.pop(key, np.float32(0))
                rows[key] = [np.float32(0), begun, np.float32(0)]
            row = rows[key]
            row[:] = row[0] + np.float32(1), row[1] + show, row[2] + click
        for rows, counted in zip(self.rows, self.counted, strict=True):
            # Which counters go depends on the servers' clocks.
            assert len(counted) <= SHARE
            if len(rows) > SHARE:
                order = sorted(rows, key=lambda key: (self.score(rows[key]), key))
                for key in order[: len(rows) - LEFT]:
                    del rows[key]
                    self.evicted += 1

    @staticmethod
    def score(row: list[np.float32]) -> float:
        return float(liking(0.0, 0.0, float(row[1]), float(row[2]), of_click=2.0))

    def decay(self) -> None:
        half = np.float32(0.5)
        for rows, counted in zip(self.rows, self.counted, strict=True):
            for row in rows.values():
                row[1:] = row[1] * half, row[2] * half
            for key in counted:
                counted[key] = counted[key] * half

    def expire(self) -> int:
        low = [(rows, key) for rows in self.rows for key in rows if self.score(rows[key]) < BELOW]
        for rows, key in low:
            del rows[key]
        return len(low)

    def weights(self) -> dict[int, float]:
        return {key: float(row[0]) for rows in self.rows for key, row in rows.items()}


def test_rows_come_and_go_by_functions_while_masters_die(
    tmp_path: Path, eventually: Eventually
) -> None:
    spec = TableSpec.sparse("liked", 2, optimizer=SGD(1.0), initializer=Zeros(), lifetime=LIKED)
    assert spec.statistics == ("last_seen", "show", "click")
    settings = {"slot_count": SLOTS, "replicas": 2, "checkpoint_url": str(tmp_path / "kept")}
    model, expired, random = Liked(), 0, np.random.default_rng(5)
    users = np.arange(USERS)
    with LocalCluster(3, settings=settings) as cluster, Client(cluster.endpoints) as client:
        table = client.create_table(spec)

        def weights() -> dict[int, float]:
            found = client.pull(table, users)[:, 0]
            return {int(key): float(found[key]) for key in np.flatnonzero(found)}

        for number in range(24):
            if number in (6, 15):
                cluster.kill(number // 6)
            keys = np.unique(np.minimum(random.zipf(1.2, 500) - 1, USERS - 1))
            shows = random.integers(0, 5, len(keys)).astype(np.float32) / np.float32(3)
            clicks = np.where(random.random(len(keys)) < 0.3, shows, 0).astype(np.float32)
            client.push(table, keys, np.full((len(keys), 2), -1.0), shows=shows, clicks=clicks)
            model.push(keys, shows, clicks)
            if number % 6 == 3:
                model.decay()
                assert client.decay(table, period=number) == SLOTS
                counted = client.expire(table, dry_run=True)
                gone = model.expire()
                told = client.expire(table)
                assert counted.score == gone
                # The answer of a slot may be lost with its master: a retry counts nothing.
                assert told.score == gone or (told.score < gone and told.slots < SLOTS)
                expired += gone
                assert weights() == model.weights()
            if number in (10, 19):
                cluster.restart((number - 4) // 6)
        assert weights() == model.weights()
        assert expired > 50
        assert model.evicted > 50
        eventually(lambda: copies_are_equal(cluster))
        assert "admission user again day=86400.0 many=1.0" in ctl(cluster, "tables").stdout
        refused = ctl(cluster, "tables", "set", "liked", "score.of_click=9")
        assert "every copy of its rows goes by the function" in refused.output
        done = ctl(cluster, "tables", "set", "liked", "score.decay=0.75")
        assert "score.decay: 0.5 -> 0.75" in done.output, done.output
        saved = ctl(cluster, "checkpoint", "save")
        assert saved.exit_code == 0, saved.output
    check_what_was_saved(str(tmp_path / "kept"), tmp_path / "out", model)


def check_what_was_saved(url: str, out: Path, model: Liked) -> None:
    """Rows, their scores, and an export of some of them."""
    storage = CheckpointStorage(url)
    rows = {key: row for of_slot in model.rows for key, row in of_slot.items()}
    with CheckpointReader(storage, storage.ids()[-1]) as reader:
        spec = reader.manifest.table("liked")
        found = {}
        for part in reader.rows("liked"):
            kept = statistics_of(spec, part.state)
            scores = scores_of(spec, part.state, int(kept["last_seen"].max(initial=0)))
            for key, show, score in zip(part.keys.tolist(), kept["show"], scores, strict=True):
                found[key] = show, score
    assert found == {key: (row[1], model.score(row)) for key, row in rows.items()}
    least = sorted(score for _, score in found.values())[len(found) // 2]
    done = CliRunner().invoke(
        pserverctl, ["checkpoint", "export", "--score-at-least", str(least), url, str(out)]
    )
    assert done.exit_code == 0, done.output
    weights = Export.open(out).table("liked").lookup(np.array(list(rows)), unknown="zeros")[:, 0]
    assert weights.tolist() == [
        float(row[0]) if model.score(row) >= least else 0.0 for row in rows.values()
    ]


def test_another_function_of_a_lifetime_is_refused() -> None:
    with (
        LocalCluster(1, settings={"slot_count": SLOTS}) as cluster,
        Client(cluster.endpoints) as client,
    ):
        client.create_table(TableSpec.sparse("liked", 2, lifetime=LIKED))
        score = ScoreFunction.of(lambda last_seen, show, click: show + click + last_seen)
        for changed, says in (
            ({"score": score}, r"lifetime\.score\.function: another function"),
            ({"score": ScoreFunction.of(liking, of_click=9.0)}, r"settings\.of_click: 2\.0 there"),
            ({"score": None}, r"lifetime\.score\.function"),
            ({"admission": AdmissionFunction.of(again, day=1.0)}, r"settings\.day: 86400\.0 there"),
        ):
            other = TableSpec.sparse("liked", 2, lifetime=replace(LIKED, **changed))
            with pytest.raises(TableConflict, match=says) as raised:
                client.create_table(other, update_settings=True)
            assert len(str(raised.value)) < 2_500
