"""The modes against a real server: local steps, steps of several workers, clocks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from backstay._proto.v1 import job_pb2
from backstay.config import SecurityConfig
from backstay.errors import (
    ConfigError,
    NotLeading,
    TaskLeaseLost,
    Unauthenticated,
    UnknownTable,
)
from backstay.job.messages import Task
from backstay.tables import (
    SGD,
    Adagrad,
    Adam,
    AdaptiveRevision,
    Compensation,
    DelayCompensated,
    TableSpec,
    Zeros,
)
from backstay.trainer import Client
from backstay.trainer.modes.gathering import GatheringClient, Gradient, Piece, put_together
from backstay.trainer.modes.geo import GeoClient
from backstay.trainer.modes.leading import FollowedTask, LedTask, StepLeader
from backstay.trainer.modes.staleness import StalenessGate
from backstay.trainer.worker.leased_work import LeasedWork
from backstay.trainer.worker.pace import BoundedPace
from backstay.trainer.worker.peers import Peers

PATIENCE_S = 20.0
JOIN_S = 20.0
TASK = LedTask(1, 0, 1)


@pytest.fixture
def client(endpoints: list[str]) -> Iterator[Client]:
    with Client(endpoints) as client:
        yield client


def keys_of(*numbers: int) -> NDArray[np.uint64]:
    return np.array(numbers, np.uint64)


# -- geo ------------------------------------------------------------------------------------


def test_local_steps_are_seen_here_at_once_and_elsewhere_after_the_exchange(
    client: Client,
) -> None:
    geo = GeoClient(client)
    spec = TableSpec.sparse("geo-rows", dim=2, optimizer=SGD(0.5), initializer=Zeros())
    rows = geo.create_table(spec)
    dense = geo.create_table(TableSpec.dense("geo-dense", [3], optimizer=SGD(0.1)))
    geo.init_dense(dense, np.ones(3, np.float32))
    ones = np.ones((3, 2), np.float32)
    geo.push(rows, keys_of(5, 9, 5), ones)
    geo.push(rows, keys_of(9, 5, 9), ones, learning_rate_scale=0.5)
    geo.push_dense(dense, np.full(3, 2.0, np.float32))
    here = geo.pull(rows, keys_of(5, 9, 1))
    wanted = np.array([[-1.25, -1.25], [-1.0, -1.0], [0, 0]], np.float32)
    np.testing.assert_allclose(here, wanted)
    np.testing.assert_allclose(geo.pull_dense(dense), np.full(3, 0.8), rtol=1e-6)
    np.testing.assert_array_equal(client.pull(rows, keys_of(5, 9)), np.zeros((2, 2)))
    geo.exchange()
    client.flush()
    there = client.pull(rows, keys_of(5, 9, 1))
    np.testing.assert_allclose(there, here)
    np.testing.assert_allclose(client.pull_dense(dense), np.full(3, 0.8), rtol=1e-6)


def test_local_steps_of_two_workers_add_up(endpoints: list[str], client: Client) -> None:
    spec = TableSpec.sparse("geo-two", dim=1, optimizer=SGD(1.0), initializer=Zeros())
    with Client(endpoints) as second:
        workers = [GeoClient(client), GeoClient(second)]
        for worker in workers:
            table = worker.create_table(spec)
            for _ in range(3):
                worker.push(table, keys_of(1), np.full((1, 1), -1.0, np.float32))
            assert worker.pull(table, keys_of(1)) == 3.0
        for worker in workers:
            worker.exchange()
            worker.flush()
        assert workers[0].pull(table, keys_of(1)) == 6.0


def test_steps_that_are_forgotten_are_never_sent(client: Client) -> None:
    geo = GeoClient(client)
    spec = TableSpec.sparse("geo-forget", dim=1, optimizer=SGD(1.0), initializer=Zeros())
    table = geo.create_table(spec)
    geo.push(table, keys_of(1), np.ones((1, 1), np.float32))
    geo.forget()
    geo.exchange()
    client.flush()
    assert client.pull(table, keys_of(1)) == 0.0


def test_geo_needs_sgd(client: Client) -> None:
    with pytest.raises(ConfigError, match="'geo-adam' has Adam, but steps can be summed up"):
        GeoClient(client).create_table(TableSpec.sparse("geo-adam", dim=1, optimizer=Adam()))


@pytest.mark.parametrize("compensation", [DelayCompensated(0.04), AdaptiveRevision()])
@pytest.mark.parametrize(("mode", "front"), [("geo", GeoClient), ("sync", GatheringClient)])
def test_tables_that_compensate_delay_are_refused_before_they_are_made(
    client: Client, mode: str, front: type[GeoClient | GatheringClient], compensation: Compensation
) -> None:
    name = f"late-{mode}"
    spec = TableSpec.sparse(name, dim=1, optimizer=Adagrad(0.1), compensation=compensation)
    kind = type(compensation).__name__
    words = f"mode {mode}: the table '{name}' has compensation={kind}, which is"
    with pytest.raises(ConfigError, match=words):
        front(client).create_table(spec)
    with pytest.raises(UnknownTable):
        client.table(name)


# -- sync -----------------------------------------------------------------------------------


@dataclass
class Regression:
    """A linear model with a sparse and a dense part: small enough to be checked by hand."""

    client: GatheringClient
    name: str
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        sparse = TableSpec.sparse(
            f"{self.name}-rows", dim=1, optimizer=Adagrad(0.5), initializer=Zeros()
        )
        self.rows = self.client.create_table(sparse)
        self.dense = self.client.create_table(
            TableSpec.dense(f"{self.name}-dense", [2], optimizer=Adam(0.1))
        )
        self.client.init_dense(self.dense, np.zeros(2, np.float32))

    def gradients(self, ids: NDArray[np.uint64], x: NDArray[np.float32]) -> list[Gradient]:
        """Return the mean gradient over some records, through pushes as a program makes them."""
        y = x.sum(axis=1) + (ids % 3)
        weights = self.client.pull_dense(self.dense)
        rows = self.client.pull(self.rows, ids)[:, 0]
        error = (rows + x @ weights - y).astype(np.float32)
        self.losses.append(float((error**2).mean()))
        by_row = (2 * error / len(ids))[:, None].astype(np.float32)
        self.client.push(self.rows, ids, by_row)
        self.client.push_dense(self.dense, (by_row * x).sum(axis=0).astype(np.float32))
        return self.client.take()

    def values(self) -> NDArray[np.float32]:
        rows = self.client.pull(self.rows, np.arange(40, dtype=np.uint64))[:, 0]
        return np.concatenate([rows, self.client.pull_dense(self.dense)])


def batch_of(number: int) -> tuple[NDArray[np.uint64], NDArray[np.float32]]:
    generator = np.random.default_rng(number)
    ids = generator.integers(0, 40, 24).astype(np.uint64)
    return ids, generator.normal(size=(24, 2)).astype(np.float32)


def piece_of(number: int, piece: Piece) -> tuple[NDArray[np.uint64], NDArray[np.float32]]:
    ids, x = batch_of(number)
    own = slice(piece.first, piece.first + piece.count)
    return ids[own], x[own]


def follow(
    endpoints: list[str], address: str, instance: int, name: str, steps: int | None
) -> threading.Thread:
    """Follow in a thread; after so many steps it takes one more and vanishes with it."""

    def run() -> None:
        with Client(endpoints) as own:
            model = Regression(GatheringClient(own), name)
            task = FollowedTask(address, TASK, instance, SecurityConfig(), 10_000)
            for done, (number, piece) in enumerate(iter(task.next_step, None)):
                if done == steps:
                    break
                gradients = model.gradients(*piece_of(number, piece))
                task.contribute(number, gradients, model.losses[-1])
            task.close()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def lead(leader: StepLeader, model: Regression, number: int) -> int:
    """Do one step; return how many pieces others have done."""
    piece = leader.cut(number, 24)
    parts = [(piece.count, model.gradients(*piece_of(number, piece)))]
    whole, left = leader.gather(PATIENCE_S)
    parts += [(one.piece.count, one.gradients) for one in whole]
    parts += [(piece.count, model.gradients(*piece_of(number, piece))) for piece in left]
    assert sum(count for count, _ in parts) == 24
    model.client.push_all(put_together(parts))
    model.client.flush()
    return len(whole)


def test_a_step_of_any_number_of_workers_is_one_big_batch(
    endpoints: list[str], client: Client
) -> None:
    alone = Regression(GatheringClient(client), "alone")
    for number in range(12):
        alone.client.push_all(alone.gradients(*batch_of(number)))
        alone.client.flush()
    together = Regression(GatheringClient(client), "together")
    with StepLeader("127.0.0.1", SecurityConfig()) as leader:
        leader.begin_task(TASK)
        helped = [lead(leader, together, number) for number in range(2)]
        threads = [follow(endpoints, leader.address, 1, "together", None)]
        threads.append(follow(endpoints, leader.address, 2, "together", 2))
        number = 2
        while number < 12:
            if number == 2:
                # Both take part from here on; the second one vanishes in the middle of a step.
                wait_for_followers(leader, 2)
            helped.append(lead(leader, together, number))
            number += 1
        leader.end_task()
        for thread in threads:
            thread.join(JOIN_S)
            assert not thread.is_alive()
    assert helped[:5] == [0, 0, 2, 2, 1]
    assert set(helped[5:]) == {1}
    assert alone.losses[-1] < alone.losses[0]
    np.testing.assert_allclose(together.values(), alone.values(), rtol=2e-5, atol=2e-6)


def wait_for_followers(leader: StepLeader, count: int) -> None:
    with leader._changed:
        arrived = leader._changed.wait_for(
            lambda: len(leader._book.followers) == count, timeout=PATIENCE_S
        )
    assert arrived


def test_who_delivers_late_loses_its_place(endpoints: list[str]) -> None:
    with StepLeader("127.0.0.1", SecurityConfig()) as leader:
        leader.begin_task(TASK)
        task = FollowedTask(leader.address, TASK, 7, SecurityConfig(), 10_000)
        steps = iter(task.next_step, None)
        first: list[tuple[int, Piece]] = []
        reader = threading.Thread(target=lambda: first.extend(steps))
        reader.start()
        wait_for_followers(leader, 1)
        assert leader.cut(0, 10) == Piece(0, 5)
        assert leader.gather(0.0) == ([], [Piece(5, 5)])
        assert leader.cut(1, 10) == Piece(0, 10), "it has no place any more"
        assert not task.contribute(0, [], 0.0)
        reader.join(JOIN_S)
        assert first == [(0, Piece(5, 5))]
        task.close()


def test_only_the_task_that_is_led_can_be_followed() -> None:
    with StepLeader("127.0.0.1", SecurityConfig()) as leader:
        leader.begin_task(TASK)
        other = FollowedTask(leader.address, LedTask(1, 0, 2), 7, SecurityConfig(), 10_000)
        with pytest.raises(NotLeading, match=r"task 0 of pass 1 \(attempt 2\)"):
            other.next_step()
        other.close()
        leader.end_task()
        task = FollowedTask(leader.address, TASK, 7, SecurityConfig(), 10_000)
        with pytest.raises(NotLeading):
            task.contribute(0, [], 0.0)
        task.close()


def test_workers_of_a_step_show_the_token() -> None:
    with StepLeader("127.0.0.1", SecurityConfig(token="a-long-secret")) as leader:
        leader.begin_task(TASK)
        task = FollowedTask(leader.address, TASK, 7, SecurityConfig(), 10_000)
        with pytest.raises(Unauthenticated):
            task.next_step()
        task.close()


# -- bounded --------------------------------------------------------------------------------


def test_nobody_gets_farther_ahead_than_agreed(endpoints: list[str], client: Client) -> None:
    with Client(endpoints) as second:
        working = {1, 2}
        revoked = threading.Event()

        def gate(own: int, by: Client) -> StalenessGate:
            return StalenessGate(
                by, "clocks", own, 3, others=lambda: working, is_unwanted=revoked.is_set
            )

        slow, fast = gate(1, client), gate(2, second)
        slow.begin_task(working)
        fast.begin_task(working)
        reached = threading.Semaphore(0)
        failures: list[BaseException] = []

        def run() -> None:
            try:
                for _ in range(20):
                    fast.step()
                    reached.release()
            except BaseException as error:  # noqa: BLE001 (looked at below)
                failures.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        for _ in range(3):
            assert reached.acquire(timeout=PATIENCE_S)
        # The fourth waits for the slow one's first step.
        assert not reached.acquire(timeout=0.2)
        slow.step()
        assert reached.acquire(timeout=PATIENCE_S)
        assert not reached.acquire(timeout=0.2)
        # The slow one has no task any more: no worker waits for it.
        working.discard(1)
        for _ in range(16):
            assert reached.acquire(timeout=PATIENCE_S)
        thread.join(JOIN_S)
        assert failures == []
        # Coming back, it begins where the other is.
        working.add(1)
        slow.begin_task(working)
        assert slow.clock == 20


def gate_of(client: Client, table: str, own: int, *others: int, **more: Any) -> StalenessGate:
    return StalenessGate(
        client, table, own, 2, others=lambda: others, is_unwanted=lambda: False, **more
    )


def test_a_new_worker_begins_where_the_slowest_one_is(client: Client) -> None:
    """Whom the job master names is known with the task, whatever the last sign of life told."""
    old = [gate_of(client, "clocks-new", own) for own in (1, 2)]
    for gate in old:
        gate.begin_task([])
    for gate, steps in zip(old, (9, 11), strict=True):
        for _ in range(steps):
            gate.step()
    new = [gate_of(client, "clocks-new", own) for own in (3, 4)]
    # The other one that is new has no clock yet, which is not a clock of 0.
    new[0].begin_task([1, 2, 3, 4])
    new[1].begin_task([1, 2, 3, 4])
    assert [gate.clock for gate in new] == [9, 9]
    # A process that has the name of one before it begins anew, too.
    again = gate_of(client, "clocks-new", 3)
    again.begin_task([1, 2, 3, 4])
    assert again.clock == 9


def test_a_clock_that_stood_still_holds_nobody_up(client: Client) -> None:
    now_s = 0.0
    idle = gate_of(client, "clocks-idle", 1, now=lambda: now_s)
    idle.begin_task([])
    idle.step()
    ahead = gate_of(client, "clocks-idle", 2)
    ahead.begin_task([])
    for _ in range(50):
        ahead.step()
    # It begins beside one that was idle for long, which the job master names again.
    new = gate_of(client, "clocks-idle", 3)
    new.begin_task([1, 2, 3])
    assert new.clock == 50 - 2 - 1
    # No worker waited for this one while its step took so long.
    idle = gate_of(client, "clocks-idle", 1, 2, 3, now=lambda: now_s)
    idle.begin_task([])
    idle.step()
    now_s = 60.0
    idle.step()
    assert idle.clock == 50 - 2 - 1 + 1


def test_a_wait_ends_when_the_task_is_revoked(client: Client) -> None:
    revoked = threading.Event()
    gate = StalenessGate(
        client, "clocks-revoked", 1, 1, others=lambda: {1, 2}, is_unwanted=revoked.is_set
    )
    other = gate_of(client, "clocks-revoked", 2)
    other.begin_task([])
    gate.begin_task([])
    gate.step()
    threading.Timer(0.2, revoked.set).start()
    with pytest.raises(TaskLeaseLost, match="the task was taken away"):
        gate.step()


def test_a_worker_that_is_to_end_waits_for_nobody(client: Client) -> None:
    told: list[str] = []
    peers = Peers()
    peers.learn(job_pb2.RenewLeasesResponse(training=[1, 2]), 0.0)
    pace = BoundedPace("ending", 1, 1, peers, lambda: "".join(told))
    pace.stand_before(client)
    other = gate_of(client, "ending/__clocks", 2)
    other.begin_task([])
    task = Task("training", 1, 0, 1, "shard", 0, 100, 0, 0, 0.0, training=frozenset({1, 2}))
    pace.begin_task(LeasedWork(task))
    threading.Timer(0.2, told.append, ["it was told to end"]).start()
    pace.begin_batch()
    with pytest.raises(TaskLeaseLost, match="is to end"):
        pace.begin_batch()
