"""Task streams in a real cluster: whichever client pushes a batch, and how often, it counts once.

The table counts (SGD with rate 1, gradients of -1): each row is the number of times that its
batch was counted, and a batch touches rows of its own.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from backstay.config import ClientConfig
from backstay.consensus.clock import clock_s
from backstay.errors import BackstayError, InvalidRequest, NonFiniteGradient, TaskLeaseLost
from backstay.pserver.local_cluster import LocalCluster
from backstay.tables import SGD, TableSpec, Zeros
from backstay.trainer import Client, Table
from backstay.trainer.task_stream import TaskStream

DIM = 2
KEYS_PER_BATCH = 200
JOB = 2**64 - 5
FAR_S = 600.0
_tasks = itertools.count()


def counter(name: str, dim: int) -> TableSpec:
    return TableSpec.sparse(name, dim, optimizer=SGD(1.0), initializer=Zeros())


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(3, settings={"replicas": 2}) as running:
        yield running


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    with Client(cluster.endpoints) as one:
        yield one


@pytest.fixture
def other_worker(cluster: LocalCluster) -> Iterator[Client]:
    with Client(cluster.endpoints) as one:
        yield one


@pytest.fixture
def tables(client: Client) -> list[Table]:
    return [
        client.create_table(counter("counts", DIM)),
        client.create_table(TableSpec.dense("steps", (3,), optimizer=SGD(1.0))),
    ]


@pytest.fixture
def task() -> int:
    """A task that no other test works on."""
    return next(_tasks)


def keys_of(task: int, batch: int) -> np.ndarray:
    first = (task * 1_000 + batch) * KEYS_PER_BATCH
    return np.arange(first, first + KEYS_PER_BATCH, dtype=np.uint64)


def push_batch(client: Client, task: int, batch: int) -> None:
    gradients = np.full((KEYS_PER_BATCH, DIM), -1.0, dtype=np.float32)
    client.push_async("counts", keys_of(task, batch), gradients)


def train(client: Client, stream: TaskStream, task: int, first: int, end: int) -> None:
    with stream:
        for batch in range(first, end):
            stream.begin_batch(batch)
            push_batch(client, task, batch)


def counted(client: Client, task: int, batches: int) -> list[float]:
    """How often each batch was counted; all rows of a batch must agree."""
    counts = []
    for batch in range(batches):
        rows = client.pull("counts", keys_of(task, batch))
        assert rows.min() == rows.max(), f"batch {batch} is not whole: {np.unique(rows)}"
        counts.append(float(rows.max()))
    return counts


def test_a_replay_from_the_beginning_or_from_acknowledged_counts_nothing_twice(
    client: Client, other_worker: Client, tables: list[Table], task: int
) -> None:
    stream = client.task_stream(JOB, 1, task, tables)
    train(client, stream, task, 0, 8)
    stream.flush()
    assert stream.acknowledged == 8
    replay = other_worker.task_stream(JOB, 1, task, tables)
    train(other_worker, replay, task, 0, 10)
    replay.flush()
    rest = client.task_stream(JOB, 1, task, tables, first_batch=9)
    train(client, rest, task, 9, 12)
    rest.flush()
    assert (replay.acknowledged, rest.acknowledged) == (10, 12)
    assert counted(client, task, 12) == [1.0] * 12


def test_another_pass_and_another_task_count_again(
    client: Client, tables: list[Table], task: int
) -> None:
    for pass_number, number in ((1, 0), (2, 0), (1, 2**32 - 1)):
        stream = client.task_stream(JOB - 1 - task, pass_number, number, tables)
        train(client, stream, task, 0, 2)
        stream.flush()
    assert counted(client, task, 2) == [3.0, 3.0]


def test_two_attempts_at_once_count_each_batch_once(
    client: Client, other_worker: Client, tables: list[Table], task: int
) -> None:
    start = threading.Barrier(2)
    failures: list[BackstayError] = []

    def work(one: Client) -> None:
        stream = one.task_stream(JOB, 1, task, tables)
        start.wait()
        try:
            train(one, stream, task, 0, 60)
            stream.flush()
        except BackstayError as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(one,)) for one in (client, other_worker)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert counted(client, task, 60) == [1.0] * 60


def test_pushes_of_any_thread_go_into_the_open_stream_and_others_do_not(
    client: Client, other_worker: Client, tables: list[Table], task: int
) -> None:
    dense = tables[1]
    client.init_dense(dense, np.zeros(3, np.float32))
    before = client.pull_dense(dense)[0]
    for one in (client, other_worker):
        stream = one.task_stream(JOB, 1, task, tables)
        with stream:
            stream.begin_batch(0)
            push_batch(one, task, 0)
            thread = threading.Thread(
                target=one.push_dense, args=(dense, np.full(3, -1.0, np.float32))
            )
            thread.start()
            thread.join()
            # An assignment is not an update: it is made again.
            one.assign("counts", keys_of(task, 1), np.full((KEYS_PER_BATCH, DIM), 7.0, np.float32))
        stream.flush()
        # Outside of the stream a push is the client's own.
        push_batch(one, task, 2)
        one.flush()
    assert counted(client, task, 3) == [1.0, 7.0, 2.0]
    assert client.pull_dense(dense)[0] == before + 1.0


def test_acknowledged_counts_whole_batches_only(
    client: Client, tables: list[Table], task: int
) -> None:
    stream = client.task_stream(JOB, 1, task, tables, first_batch=3)
    with stream:
        assert stream.acknowledged == 3
        stream.begin_batch(3)
        push_batch(client, task, 3)
        client.flush()
        # The batch has not ended: its other table may come.
        assert stream.acknowledged == 3
        stream.begin_batch(4)
        assert stream.acknowledged == 4
        # A batch that pushes nothing is whole when it has ended.
        stream.begin_batch(6)
        assert stream.acknowledged == 6
    assert stream.acknowledged == 7


def test_wrong_use_is_named(client: Client, tables: list[Table], task: int) -> None:
    with pytest.raises(InvalidRequest, match="1 to 64 tables, not 0"):
        client.task_stream(JOB, 1, task, [])
    with pytest.raises(InvalidRequest, match="stands twice"):
        client.task_stream(JOB, 1, task, [tables[0], tables[0]])
    with pytest.raises(InvalidRequest, match="pass is 4294967296"):
        client.task_stream(JOB, 2**32, task, tables)
    stream = client.task_stream(JOB, 1, task, tables[1:])
    with stream, pytest.raises(InvalidRequest, match="another task stream of this client is open"):
        client.task_stream(JOB, 1, task, tables).__enter__()
    with stream, pytest.raises(InvalidRequest, match="counts is not one of this task's"):
        push_batch(client, task, 0)
    stream = client.task_stream(JOB, 1, task, tables)
    with stream, pytest.raises(InvalidRequest, match="call begin_batch"):
        push_batch(client, task, 0)


@pytest.mark.parametrize("again", ["the same table twice", "a batch that is over"])
def test_a_batch_pushes_once_to_a_table_and_batches_ascend(
    client: Client, tables: list[Table], task: int, again: str
) -> None:
    stream = client.task_stream(JOB, 1, task, tables)
    with stream:
        stream.begin_batch(0)
        push_batch(client, task, 0)
        if again == "the same table twice":
            with pytest.raises(InvalidRequest, match="pushed to this table already"):
                push_batch(client, task, 1)
            # The batch is not what its task says: nothing may build upon it.
            with pytest.raises(InvalidRequest, match="pushed to this table already"):
                stream.begin_batch(1)
        else:
            with pytest.raises(InvalidRequest, match="the next one is 1"):
                stream.begin_batch(0)
    assert counted(client, task, 2) == [1.0, 0.0]


def test_after_a_failed_push_no_later_one_leaves(
    client: Client, other_worker: Client, tables: list[Table], task: int
) -> None:
    stream = client.task_stream(JOB, 1, task, tables)
    with stream:
        stream.begin_batch(0)
        push_batch(client, task, 0)
        stream.begin_batch(1)
        with pytest.raises(NonFiniteGradient):
            client.push("counts", keys_of(task, 1), np.full((KEYS_PER_BATCH, DIM), np.nan))
        with pytest.raises(NonFiniteGradient):
            push_batch(client, task, 1)
        with pytest.raises(NonFiniteGradient):
            stream.begin_batch(2)
    for _ in range(2):
        with pytest.raises(NonFiniteGradient):
            stream.flush()
    assert stream.acknowledged == 1
    with pytest.raises(InvalidRequest, match="Whoever completes the task closes it"):
        stream.close_on_servers()
    # Nothing was skipped that was not applied: the next attempt completes the task.
    rest = other_worker.task_stream(JOB, 1, task, tables, first_batch=stream.acknowledged)
    train(other_worker, rest, task, 1, 4)
    rest.flush()
    assert counted(client, task, 4) == [1.0] * 4


def test_while_the_lease_is_over_pushes_wait_until_it_is_renewed(
    client: Client, tables: list[Table], task: int
) -> None:
    """I8, and only for the pushes of the task."""
    stream = client.task_stream(JOB, 1, task, tables)
    stream.lease_until(clock_s() + FAR_S)
    with stream:
        stream.begin_batch(0)
        push_batch(client, task, 0)
        client.flush()
        stream.lease_until(clock_s())
        stream.begin_batch(1)
        waiting = threading.Thread(target=push_batch, args=(client, task, 1))
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive()
        # Pulls, and pushes of others, have nothing to do with it.
        assert counted(client, task, 2) == [1.0, 0.0]
        stream.lease_until(clock_s() + FAR_S)
        waiting.join()
    stream.flush()
    assert counted(client, task, 2) == [1.0, 1.0]


def test_a_push_whose_lease_is_not_renewed_in_time_fails_and_was_not_sent(
    cluster: LocalCluster, client: Client, tables: list[Table], task: int
) -> None:
    """I8: a push leaves only while the lease is alive."""
    config = ClientConfig(deadline_ms=500)
    with Client(cluster.endpoints, config=config) as brief:
        stream = brief.task_stream(JOB, 1, task, tables)
        stream.lease_until(clock_s() - 1.0)
        with stream:
            stream.begin_batch(0)
            push_batch(brief, task, 0)
        with pytest.raises(BackstayError, match="lease of its task has expired"):
            stream.flush()
        assert stream.acknowledged == 0
    assert counted(client, task, 1) == [0.0]


def test_revoking_ends_waiting_and_later_pushes_at_once(
    client: Client, other_worker: Client, tables: list[Table], task: int
) -> None:
    stream = client.task_stream(JOB, 1, task, tables)
    stream.lease_until(clock_s())
    raised: list[BackstayError] = []

    def wait() -> None:
        try:
            client.push("counts", keys_of(task, 0), np.full((KEYS_PER_BATCH, DIM), -1.0))
        except TaskLeaseLost as error:
            raised.append(error)

    with stream:
        stream.begin_batch(0)
        waiting = threading.Thread(target=wait)
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        stream.revoke()
        waiting.join()
        assert len(raised) == 1
        stream.lease_until(clock_s() + FAR_S)  # Too late.
        with pytest.raises(TaskLeaseLost):
            push_batch(client, task, 0)
        with pytest.raises(TaskLeaseLost):
            stream.begin_batch(1)
    with pytest.raises(TaskLeaseLost):
        stream.flush()
    # Who revokes a hold knows: neither a flush nor close raises it again.
    client.flush()
    other = other_worker.task_stream(JOB, 1, task, tables)
    train(other_worker, other, task, 0, 2)
    other.flush()
    assert counted(client, task, 2) == [1.0, 1.0]


def test_late_pushes_after_the_close_are_skipped(
    client: Client, other_worker: Client, tables: list[Table], task: int
) -> None:
    stream = client.task_stream(JOB, 1, task, tables)
    train(client, stream, task, 0, 2)
    stream.flush()
    stream.close_on_servers()
    stream.close_on_servers()
    other_worker.close_task_stream(JOB, 1, task)
    late = other_worker.task_stream(JOB, 1, task, tables)
    train(other_worker, late, task, 0, 5)
    late.flush()
    assert counted(client, task, 5) == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_a_stream_with_the_most_tables_keeps_within_the_window(
    client: Client, other_worker: Client, task: int
) -> None:
    many = [client.create_table(counter(f"many-{n}", 1)) for n in range(64)]
    key, gradient = np.array([7], np.uint64), np.array([[-1.0]], np.float32)
    for one in (client, other_worker):
        stream = one.task_stream(JOB, 1, task, many)
        with stream:
            for batch in range(5):
                stream.begin_batch(batch)
                for table in reversed(many):
                    one.push_async(table, key, gradient)
        stream.flush()
        assert stream.acknowledged == 5
    assert {float(client.pull(table, key)[0, 0]) for table in many} == {5.0}


@pytest.mark.chaos
def test_a_killed_server_and_a_killed_worker_leave_each_batch_counted_once() -> None:
    """A server dies in the middle of a task; the worker gives up; another goes on."""
    batches = 40
    with LocalCluster(3, settings={"replicas": 2}) as cluster:
        first = Client(cluster.endpoints)
        tables = [first.create_table(counter("counts", DIM))]
        stream = first.task_stream(JOB, 1, 0, tables)
        with stream:
            for batch in range(batches // 2):
                if batch == batches // 4:
                    cluster.kill(2)
                stream.begin_batch(batch)
                push_batch(first, 0, batch)
        # As if the worker died: nothing of what is under way is waited for.
        acknowledged = stream.acknowledged
        stream.revoke()
        with Client(cluster.endpoints[:2]) as second:
            rest = second.task_stream(JOB, 1, 0, tables, first_batch=acknowledged)
            train(second, rest, 0, acknowledged, batches)
            rest.flush()
            assert rest.acknowledged == batches
            assert counted(second, 0, batches) == [1.0] * batches
            rest.close_on_servers()
        first.close()
