"""Rows that come and go in a cluster whose masters are killed: those of a model in Python stay.

The model knows the policy and no server: a dictionary for each slot, in float32 where rows are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from numpy.typing import NDArray

from backstay import _native
from backstay.errors import ConfigError, InvalidRequest, RequestRefused, TableConflict
from backstay.pserver.ctl.cli import main as pserverctl
from backstay.pserver.local_cluster import LocalCluster
from backstay.tables import (
    SGD,
    AdmitAfter,
    AdmitByScore,
    Capacity,
    Expiry,
    Lifetime,
    Score,
    TableSpec,
    Zeros,
)
from backstay.trainer import Client
from tests.waiting import wait_until

SLOTS = 16
KEYS = np.arange(3000)
ROUNDS = 30
# The slot's share is 20 rows, and 19 are left by an eviction.
SHARE, LEFT = 20, 19


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    settings = {"slot_count": SLOTS, "replicas": 2}
    with LocalCluster(servers=3, settings=settings) as running:
        yield running


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    with Client(cluster.endpoints) as one:
        yield one


def ctl(cluster: LocalCluster, *arguments: str) -> Result:
    return CliRunner().invoke(pserverctl, ["--endpoint", ",".join(cluster.endpoints), *arguments])


def told(cluster: LocalCluster, *arguments: str) -> dict[str, Any]:
    """What a command prints as JSON."""
    done = ctl(cluster, *arguments, "--json")
    assert done.exit_code == 0, done.output
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def table_of(cluster: LocalCluster, name: str) -> dict[str, Any]:
    [found] = [one for one in told(cluster, "tables")["tables"] if one["name"] == name]
    return dict(found)


def copies_are_equal(cluster: LocalCluster) -> bool:
    """Whether each slot has two equal copies; copies that differ are never equal later."""
    done = ctl(cluster, "verify", "--json")
    answer = json.loads(done.stdout)
    assert not answer.get("different"), done.stdout
    return done.exit_code == 0 and answer["equal"] == SLOTS


def spec(name: str, lifetime: Lifetime | None) -> TableSpec:
    return TableSpec.sparse(name, 2, optimizer=SGD(1.0), initializer=Zeros(), lifetime=lifetime)


def batches(seed: int) -> Iterator[NDArray[np.int64]]:
    """Keys of some hundred, a few of them often."""
    generator = np.random.default_rng(seed)
    for _ in range(ROUNDS):
        yield np.unique(np.minimum(generator.zipf(1.3, 400) - 1, len(KEYS) - 1))


def weights(client: Client, table: str) -> dict[int, float]:
    """The rows that there are: each push adds 1 to a weight, and without a row it is 0."""
    found = client.pull(table, KEYS)[:, 0]
    return {int(key): float(found[key]) for key in np.flatnonzero(found)}


class Small:
    """A table that keeps the most frequent rows of each slot."""

    def __init__(self) -> None:
        self.slots: list[dict[int, list[int]]] = [{} for _ in range(SLOTS)]
        self.evicted = 0

    def push(self, keys: NDArray[np.int64]) -> None:
        slots = _native.slots_of(keys.astype(np.uint64), SLOTS)
        for key, slot in zip(keys.tolist(), slots.tolist(), strict=True):
            weight, frequency = self.slots[slot].get(key, (0, 0))
            self.slots[slot][key] = [weight + 1, frequency + 1]
        for rows in self.slots:
            if len(rows) > SHARE:
                order = sorted(rows, key=lambda key: (rows[key][1], key))
                for key in order[: len(rows) - LEFT]:
                    del rows[key]
                    self.evicted += 1

    def weights(self) -> dict[int, float]:
        return {key: row[0] for rows in self.slots for key, row in rows.items()}


def test_a_small_table_keeps_the_rows_of_its_policy_though_masters_are_killed(
    cluster: LocalCluster, client: Client
) -> None:
    capacity = Capacity(rows=SHARE * SLOTS, evict="least_frequent")
    table, model = client.create_table(spec("small", Lifetime(capacity=capacity))), Small()
    kills, restarts = {8: 0, 20: 2}, {14: 0, 26: 2}
    for number, keys in enumerate(batches(1)):
        if number in kills:
            cluster.kill(kills[number])
        client.push(table, keys, np.full((len(keys), 2), -1, np.float32))
        model.push(keys)
        if number % 7 == 0:
            assert weights(client, "small") == model.weights()
        if number in restarts:
            cluster.restart(restarts[number])
            wait_until(lambda: copies_are_equal(cluster), "two copies of each slot")
    assert weights(client, "small") == model.weights()
    assert model.evicted > 500
    wait_until(lambda: copies_are_equal(cluster), "equal copies")
    # Nodes hear of a new routing one after the other; each counts the rows that it is master of.
    kept = len(model.weights())
    wait_until(lambda: table_of(cluster, "small")["rows"] == kept, f"{kept} rows")


class Scored:
    """A table whose rows come with the third push, fade, and go with a low score."""

    def __init__(self, coefficients: tuple[float, float], decay: float) -> None:
        self.counts: dict[int, int] = {}
        self.rows: dict[int, list[np.float32]] = {}
        self.coefficients, self.rate = coefficients, np.float32(decay)

    def push(
        self, keys: NDArray[np.int64], shows: NDArray[np.float32], clicks: NDArray[np.float32]
    ) -> None:
        for key, show, click in zip(keys.tolist(), shows, clicks, strict=True):
            if key not in self.rows:
                self.counts[key] = self.counts.get(key, 0) + 1
                if self.counts[key] < 3:
                    continue
                del self.counts[key]
                self.rows[key] = [np.float32(0)] * 3
            row = self.rows[key]
            row[0], row[1], row[2] = row[0] + np.float32(1), row[1] + show, row[2] + click

    def decay(self) -> None:
        for row in self.rows.values():
            row[1], row[2] = row[1] * self.rate, row[2] * self.rate

    def low(self, below: float) -> list[int]:
        nonclick, click = self.coefficients
        return [
            key
            for key, row in self.rows.items()
            if nonclick * (float(row[1]) - float(row[2])) + click * float(row[2]) < below
        ]

    def weights(self) -> dict[int, float]:
        return {key: float(row[0]) for key, row in self.rows.items()}


def test_rows_are_admitted_decay_and_expire_as_the_model_says(
    cluster: LocalCluster, client: Client
) -> None:
    below = 0.55
    score = Score(nonclick_coefficient=0.25, click_coefficient=1.0, decay=0.5)
    lifetime = Lifetime(AdmitAfter(3), expiry=Expiry(score_below=below), score=score)
    table, model = client.create_table(spec("scored", lifetime)), Scored((0.25, 1.0), 0.5)
    generator = np.random.default_rng(2)
    expired = 0
    for number, keys in enumerate(batches(3)):
        if number == 12:
            cluster.kill(2)
        # Equal keys of one batch are one occurrence; what they tell is summed.
        doubled = np.concatenate([keys, keys[::3]])
        shows = generator.integers(1, 3, len(doubled)).astype(np.float32)
        clicks = np.floor(shows * generator.random(len(shows))).astype(np.float32)
        gradients = np.full((len(doubled), 2), -1, np.float32)
        gradients[len(keys) :] = 0
        client.push(table, doubled, gradients, shows=shows, clicks=clicks)
        sums = [one[: len(keys)].copy() for one in (shows, clicks)]
        for whole, one in zip(sums, (shows, clicks), strict=True):
            whole[::3] += one[len(keys) :]
        model.push(keys, *sums)
        if number % 5 != 4:
            continue
        model.decay()
        assert client.decay(table, period=number) == SLOTS
        assert client.decay(table, period=number) == 0, "a period counts once"
        assert client.decay(table, period=number - 1) == 0, "an older one does not"
        low = model.low(below)
        counted = told(cluster, "tables", "expire", "scored", "--dry-run")
        assert counted["by_reason"]["score"]["rows"] == counted["rows"] == len(low)
        assert weights(client, "scored") == model.weights(), "a dry run changes nothing"
        done = told(cluster, "tables", "expire", "scored")
        assert done["rows"] == len(low)
        assert done["bytes"] == len(low) * table_of(cluster, "scored")["row_bytes"]
        for key in low:
            del model.rows[key]
        expired += len(low)
        assert weights(client, "scored") == model.weights()
        assert client.expire(table).rows == 0
    assert expired > 50
    kept = len(model.rows)
    wait_until(lambda: table_of(cluster, "scored")["rows"] == kept, f"{kept} rows")
    assert table_of(cluster, "scored")["counters"] >= len(model.counts)
    assert "score_below=0.55" in ctl(cluster, "tables").stdout
    if not cluster.servers[2].is_running:
        cluster.restart(2)
    wait_until(lambda: copies_are_equal(cluster), "equal copies")


def test_a_dry_run_counts_the_ids_that_wait_for_a_row(
    cluster: LocalCluster, client: Client
) -> None:
    lifetime = Lifetime(AdmitAfter(2), expiry=Expiry(unseen_seconds=1))
    table = client.create_table(spec("waiting", lifetime))
    for count in (40, 10):
        client.push(table, np.arange(count), np.full((count, 2), -1, np.float32))
    words = ("tables", "expire", "waiting")

    def is_old() -> bool:
        counted = told(cluster, *words, "--dry-run")
        return (counted["rows"], counted["counters"]) == (10, 30)

    wait_until(is_old, "10 rows and 30 counters of more than a second")
    shown = ctl(cluster, *words, "--dry-run").stdout
    assert "10 rows would expire" in shown
    assert "30 counters of keys without a row would be forgotten" in shown
    done = told(cluster, *words)
    assert (done["rows"], done["counters"]) == (10, 30)
    assert told(cluster, *words, "--dry-run")["counters"] == 0


def test_what_does_not_fit_is_refused_by_name_and_nothing_is_sent(
    cluster: LocalCluster, client: Client
) -> None:
    plain = client.create_table(spec("plain", None))
    clicked = client.create_table(spec("clicked", Lifetime(AdmitByScore(5.0))))
    keys, ones = np.array([1, 2, 1]), np.full((3, 2), -1, np.float32)
    for table, counts, says in (
        (plain, {"shows": np.ones(3)}, "plain counts no shows and clicks"),
        (clicked, {"shows": np.array([1, -1, 1])}, "shows have the number -1"),
        (clicked, {"clicks": np.array([1, np.nan, 1])}, "clicks have the number nan"),
        (clicked, {"clicks": np.array([1, np.inf, 1])}, "clicks have the number inf"),
        (clicked, {"clicks": np.ones(2)}, r"clicks have shape \(2,\), must be \(3,\)"),
    ):
        for push in (client.push, client.push_async):
            with pytest.raises(InvalidRequest, match=says):
                push(table, keys, ones, **counts)
    assert not client.pull(plain, keys).any()
    assert table_of(cluster, "clicked")["counters"] == 0
    with pytest.raises(InvalidRequest, match="plain has no lifetime"):
        client.expire(plain)
    with pytest.raises(InvalidRequest, match="clicked has no expiry"):
        client.expire(clicked)
    with pytest.raises(InvalidRequest, match="unseen_seconds: its lifetime keeps no last_seen"):
        client.expire(clicked, unseen_seconds=5)
    with pytest.raises(InvalidRequest, match="plain keeps no shows"):
        client.decay(plain, period=1)
    with pytest.raises(InvalidRequest, match=r"rate is 1\.0"):
        client.decay(clicked, period=1, rate=1.0)
    with pytest.raises(TableConflict, match="lifetime"):
        client.create_table(spec("clicked", None))
    with pytest.raises((RequestRefused, ConfigError), match="rows"):
        client.create_table(spec("tiny", Lifetime(capacity=Capacity(rows=SLOTS * 16 - 1))))
    assert "tiny" not in [one.name for one in client.tables()]


def test_a_policy_changes_where_the_rows_stay_the_same(
    cluster: LocalCluster, client: Client
) -> None:
    lifetime = Lifetime(expiry=Expiry(unseen_seconds=86_400), capacity=Capacity(rows=SLOTS * SHARE))
    table = client.create_table(spec("changed", lifetime))
    client.push(table, KEYS[:200], np.full((200, 2), -1, np.float32))
    words = ["expiry.norm_below=1.5", f"capacity.rows={SLOTS * 100}"]
    done = ctl(cluster, "tables", "set", "changed", *words)
    assert done.exit_code == 0, done.output
    assert "expiry.norm_below: null -> 1.5" in done.stdout
    # The norm of (1, 1) is below 1.5, that of (2, 2) is not.
    client.push(table, KEYS[:50], np.full((50, 2), -1, np.float32))
    assert told(cluster, "tables", "expire", "changed")["by_reason"]["norm"]["rows"] == 150
    assert table_of(cluster, "changed")["rows"] == 50
    for word, says in (
        ("expiry.score_below=1", "rows"),
        ("capacity.evict=least_frequent", "cannot be changed"),
        ("admission=always", "cannot be changed"),
        ("expiry.norm_blow=1", "did you mean expiry.norm_below"),
        ("expiry.norm_below=-1", "norm_below"),
    ):
        refused = ctl(cluster, "tables", "set", "changed", word)
        assert refused.exit_code != 0
        assert says in refused.output + str(refused.stderr), refused.output
    refused = ctl(cluster, "tables", "set", "plain", "expiry.norm_below=1")
    assert "has no lifetime" in refused.output + str(refused.stderr)
