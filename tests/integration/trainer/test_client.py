"""The Python client against real servers: what it promises, and what it says when it cannot."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from backstay import errors
from backstay._native import slots_of
from backstay.config import ClientConfig
from backstay.pserver.ctl.cli import main as pserverctl
from backstay.pserver.local_cluster import LocalCluster
from backstay.tables import SGD, Adam, Clip, TableSpec, Uniform, Zeros
from backstay.trainer import Client, Table
from tests.waiting import wait_until

DIM = 4


@pytest.fixture
def client(three_servers: LocalCluster) -> Iterator[Client]:
    with Client(three_servers.endpoints[0]) as client:
        yield client


@pytest.fixture
def counter(client: Client, request: pytest.FixtureRequest) -> Table:
    """A table of its own for each test: SGD with rate 1 on zeros, so rows count gradients."""
    name = re.sub(r"[^A-Za-z0-9_.]", ".", f"{request.node.name}.counter")
    spec = TableSpec.sparse(name, DIM, optimizer=SGD(1.0), initializer=Zeros())
    return client.create_table(spec)


def ones(*shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.full((*shape, DIM), -1.0, dtype=np.float32)


def test_equal_keys_are_summed_and_any_shape_goes(client: Client, counter: Table) -> None:
    keys = np.array([[3, 3, 9], [3, 2**63, 9]], dtype=np.uint64)
    client.push(counter, keys, ones(2, 3))
    rows = client.pull(counter, keys)
    assert rows.shape == (2, 3, DIM)
    assert rows.dtype == np.float32
    assert rows[..., 0].tolist() == [[3, 3, 2], [3, 1, 2]]


def test_a_single_key_has_no_shape_and_its_row_has_one(client: Client, counter: Table) -> None:
    client.push(counter, np.array(5), ones())
    assert client.pull(counter, np.array(5)).shape == (DIM,)
    assert client.pull(counter, np.array([5]))[0, 0] == 1


def test_foreign_byte_order_and_strides(client: Client, counter: Table) -> None:
    keys = np.array([2**63 + 5, 7, 9, 11, 13, 15], dtype=">u8")[::-2]
    client.push(counter, keys, -np.ones((12, 2 * DIM))[::4, ::2])
    counted = client.pull(counter, np.array([2**63 + 5, 7, 9, 11, 13, 15], dtype=np.uint64))
    assert counted[:, 0].tolist() == [0, 1, 0, 1, 0, 1]


def test_an_output_that_cannot_be_written_is_refused(client: Client, counter: Table) -> None:
    out = np.zeros((1, DIM), dtype=np.float32)
    out.flags.writeable = False
    with pytest.raises(errors.InvalidRequest, match="writeable"):
        client.pull(counter, np.array([1]), out=out)


def test_signed_keys_keep_their_bits(client: Client, counter: Table) -> None:
    client.push(counter, np.array([-1, -5]), ones(2))
    bits = np.array([2**64 - 1, 2**64 - 5], dtype=np.uint64)
    assert client.pull(counter, bits)[:, 0].tolist() == [1, 1]
    assert client.pull(counter, np.array([-1], dtype=np.int32))[0, 0] == 1


def test_a_batch_serves_several_tables_and_calls(client: Client, counter: Table) -> None:
    wide = client.create_table(
        TableSpec.sparse(counter.name + ".wide", 1, optimizer=SGD(1.0), initializer=Zeros())
    )
    batch = client.prepare(np.array([5, 6, 5]))
    assert (batch.size, batch.unique_count) == (3, 2)
    client.push(counter, batch, ones(3))
    client.push(wide, batch, np.full((3, 1), -1.0, dtype=np.float32))
    assert client.pull(counter, batch)[:, 0].tolist() == [2, 1, 2]
    assert client.pull(wide, batch)[:, 0].tolist() == [2, 1, 2]


def test_results_go_where_out_says(client: Client, counter: Table) -> None:
    client.push(counter, np.array([1]), ones(1))
    out = np.full((2, DIM), 9.0, dtype=np.float32)
    assert client.pull(counter, np.array([1, 2]), out=out) is out
    assert out[:, 0].tolist() == [1, 0]
    pending = client.pull_async(counter, np.array([2, 1]), out=out)
    assert pending.result() is out
    assert pending.done()
    assert pending.result() is out
    assert out[:, 0].tolist() == [0, 1]


def test_pushes_in_flight_apply_once_each(client: Client, counter: Table) -> None:
    keys = np.arange(500)
    for _ in range(200):
        client.push_async(counter, keys, ones(500))
    client.flush()
    assert np.array_equal(client.pull(counter, keys), np.full((500, DIM), 200.0))


def test_a_client_is_thread_safe(client: Client, counter: Table) -> None:
    keys = np.arange(300)

    def push_and_pull(_: int) -> None:
        for _ in range(20):
            client.push(counter, keys, ones(300))
            assert client.pull(counter, keys).shape == (300, DIM)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(push_and_pull, range(8)))
    assert np.array_equal(client.pull(counter, keys), np.full((300, DIM), 160.0))


def test_more_threads_than_pushes_in_flight(client: Client, counter: Table) -> None:
    """The window of a stream holds however many push at once."""
    keys = np.arange(20)

    def push(_: int) -> None:
        client.push_async(counter, keys, ones(20)).result()

    with ThreadPoolExecutor(150) as pool:
        list(pool.map(push, range(600)))
    assert np.array_equal(client.pull(counter, keys), np.full((20, DIM), 600.0))


def test_gradients_are_scaled_by_the_schedule(client: Client, counter: Table) -> None:
    client.push(counter, np.array([1]), ones(1), learning_rate_scale=0.5)
    assert client.pull(counter, np.array([1]))[0, 0] == 0.5


def test_tensors_by_dlpack(client: Client, counter: Table) -> None:
    class Tensor:
        """Not an ndarray, but it has DLPack, as tensors do."""

        def __init__(self, array: np.ndarray[Any, Any]) -> None:
            self._array = array

        def __dlpack__(self, **kwargs: Any) -> object:
            return self._array.__dlpack__(**kwargs)

        def __dlpack_device__(self) -> tuple[int, int]:
            return self._array.__dlpack_device__()

    client.push(counter, Tensor(np.array([8, 8])), Tensor(ones(2)))
    assert client.pull(counter, Tensor(np.array([8])))[0, 0] == 2


def test_dense_tensors_with_a_ragged_last_block(client: Client) -> None:
    spec = TableSpec.dense("dense", (37, 301), optimizer=SGD(1.0))
    table = client.create_table(spec)
    first = np.arange(37 * 301, dtype=np.float32).reshape(37, 301)
    client.init_dense(table, first)
    client.init_dense(table, -first)
    assert np.array_equal(client.pull_dense(table), first), "the first trainer's values win"
    client.push_dense_async(table, np.ones_like(first))
    client.flush()
    assert np.array_equal(client.pull_dense_async("dense").result(), first - 1)
    kept = np.empty_like(first)
    assert client.pull_dense(table, out=kept) is kept
    assert np.array_equal(kept, first - 1)
    with pytest.raises(errors.InvalidRequest, match="shape"):
        client.push_dense(table, first[:5])
    with pytest.raises(errors.InvalidRequest, match="dense: use pull_dense"):
        client.pull(table, np.array([1]))


def test_dense_tensors_of_whole_blocks_are_read_in_place(client: Client) -> None:
    table = client.create_table(TableSpec.dense("whole", (64, 64), optimizer=SGD(1.0)))
    values = np.arange(4096, dtype=np.float32).reshape(64, 64)
    client.init_dense(table, values)
    kept = np.zeros((64, 64), dtype=np.float32)
    assert client.pull_dense(table, out=kept) is kept
    assert np.array_equal(kept, values)


def test_a_key_never_pushed_reads_as_its_initial_value(client: Client) -> None:
    spec = TableSpec.sparse("lazy", DIM, optimizer=SGD(1.0), initializer=Uniform(-1.0, 1.0))
    table = client.create_table(spec)
    keys = np.arange(1000)
    initial = client.pull(table, keys)
    assert 0.4 < np.abs(initial).mean() < 0.6
    client.push(table, keys, np.zeros((1000, DIM), dtype=np.float32))
    assert np.array_equal(client.pull(table, keys), initial)


def test_assign_sets_rows(client: Client, counter: Table) -> None:
    rows = np.arange(2 * DIM, dtype=np.float32).reshape(2, DIM)
    client.assign(counter, np.array([4, 5]), rows)
    assert np.array_equal(client.pull(counter, np.array([5, 4])), rows[::-1])
    with pytest.raises(errors.InvalidRequest, match="each key once"):
        client.assign(counter, np.array([4, 4]), rows)


def test_deleted_rows_are_gone_and_a_push_makes_them_anew(client: Client) -> None:
    spec = TableSpec.sparse("gone", DIM, optimizer=Adam(0.1), initializer=Uniform(-1.0, 1.0))
    table = client.create_table(spec)
    keys = np.arange(1000)
    initial = client.pull(table, keys)
    client.push(table, keys, ones(1000))
    once = client.pull(table, keys)
    client.push(table, keys, ones(1000))
    # Equal keys count once, and keys without a row are passed over.
    assert client.delete(table, np.array([[3, 4, 5], [5, 2**40, 3]])) == 3
    assert client.delete(table, client.prepare(np.array([3, 4, 5]))) == 0
    rows = client.pull(table, keys)
    assert np.array_equal(rows[3:6], initial[3:6])
    assert not np.isin(rows[6:], initial[6:]).any()
    client.push(table, keys[:6], ones(6))
    assert np.array_equal(client.pull(table, keys[3:6]), once[3:6])
    assert client.delete("gone", keys) == 1000


def test_a_delete_is_refused_for_a_dense_table_and_for_no_keys(
    client: Client, counter: Table
) -> None:
    table = client.create_table(TableSpec.dense("kept", shape=(4,), optimizer=SGD(1.0)))
    client.push_dense(table, np.ones(4, np.float32))
    before = client.pull_dense(table)
    words = "table kept is dense: only rows of sparse tables can be deleted"
    with pytest.raises(errors.InvalidRequest, match=words):
        client.delete(table, table.block_keys())
    # The servers refuse it, too.
    plan = client.prepare(table.block_keys()).plan
    with pytest.raises(errors.InvalidRequest, match=words):
        client._push(table, plan, np.empty(0, np.float32), "delete", 1.0)
    assert np.array_equal(client.pull_dense(table), before)
    with pytest.raises(errors.InvalidRequest, match="no keys"):
        client.delete(counter, np.array([], dtype=np.int64))


@pytest.mark.parametrize(
    ("keys", "gradients", "complaint"),
    [
        (np.array([], dtype=np.int64), ones(0), "no keys"),
        (np.array([1.5]), ones(1), "dtype float64"),
        (np.array([1]), ones(2), "shape"),
        (np.array([1]), np.ones((1, DIM + 1), dtype=np.float32), "shape"),
        (np.array([1]), np.ones((1, DIM), dtype=np.int32), "dtype int32"),
    ],
)
def test_bad_arguments_are_named_and_nothing_is_sent(
    client: Client, counter: Table, keys: object, gradients: object, complaint: str
) -> None:
    with pytest.raises(errors.InvalidRequest, match=complaint):
        client.push(counter, keys, gradients)  # type: ignore[arg-type]
    assert client.pull(counter, np.array([1]))[0, 0] == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_gradients_are_refused_as_a_whole(
    client: Client, counter: Table, bad: float
) -> None:
    gradients = ones(50)
    gradients[31, 2] = bad
    with pytest.raises(errors.NonFiniteGradient, match="row 31"):
        client.push(counter, np.arange(50), gradients)
    assert not client.pull(counter, np.arange(50)).any()


def test_gradients_that_only_overflow_in_their_sum_are_refused_as_a_whole(
    client: Client, counter: Table
) -> None:
    keys = np.concatenate([np.arange(50), np.array([7])])
    gradients = np.full((51, DIM), 3e38, dtype=np.float32)
    with pytest.raises(errors.NonFiniteGradient, match="key 7"):
        client.push(counter, keys, gradients)
    assert not client.pull(counter, np.arange(50)).any()


@pytest.mark.parametrize("scale", [-1.0, float("nan"), float("inf")])
def test_a_wrong_learning_rate_scale_is_refused_as_a_whole(
    client: Client, counter: Table, scale: float
) -> None:
    with pytest.raises(errors.InvalidRequest, match="learning_rate_scale"):
        client.push(counter, np.arange(50), ones(50), learning_rate_scale=scale)
    assert not client.pull(counter, np.arange(50)).any()


def test_non_finite_gradients_are_clipped_where_the_table_says_so(client: Client) -> None:
    spec = TableSpec.sparse(
        "clipping", DIM, optimizer=SGD(1.0), initializer=Zeros(), non_finite=Clip(2.0)
    )
    table = client.create_table(spec)
    client.push(table, np.array([1]), np.array([[np.nan, np.inf, -np.inf, -1]], dtype=np.float32))
    assert client.pull(table, np.array([1]))[0].tolist() == [0, -2, 2, 1]


def test_unknown_tables_and_conflicts_are_named(client: Client, counter: Table) -> None:
    with pytest.raises(errors.UnknownTable, match="no-such-table"):
        client.table("no-such-table")
    with pytest.raises(errors.TableConflict, match="optimizer"):
        client.create_table(
            TableSpec.sparse(counter.name, DIM, optimizer=Adam(), initializer=Zeros())
        )
    assert client.create_table(counter.spec) == counter
    assert counter.name in [spec.name for spec in client.tables()]


def test_every_endpoint_leads_to_the_same_cluster(
    three_servers: LocalCluster, counter: Table
) -> None:
    with Client(three_servers.endpoints[0]) as writer, Client(three_servers.endpoints) as reader:
        writer.push(counter, np.array([77]), ones(1))
        assert reader.pull(counter.name, np.array([77]))[0, 0] == 1
        assert len(reader.cluster().nodes) == 3


def test_a_closed_client_says_so(three_servers: LocalCluster, counter: Table) -> None:
    client = Client(three_servers.endpoints[0])
    batch = client.prepare(np.array([1]))
    client.close()
    client.close()
    with pytest.raises(errors.ClosedError):
        client.push(counter, batch, ones(1))
    with pytest.raises(errors.ClosedError):
        client.table("anything")


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(errors.ServerUnavailable, match=r"127\.0\.0\.1:1\b"):
        Client("127.0.0.1:1", config=ClientConfig(deadline_ms=300))
    with pytest.raises(errors.ConfigError, match="not of the form host:port"):
        Client("localhost")


def test_new_rows_beyond_the_memory_limit_are_refused_and_old_ones_still_train() -> None:
    settings = {"memory_limit_bytes": 2**28, "slot_count": 16}
    with (
        LocalCluster(servers=1, settings=settings) as cluster,
        Client(cluster.endpoints) as client,
    ):
        # Rows of 64 KiB, because the limit is of the whole process; a push of ten is one frame.
        wide = 2**14
        table = client.create_table(
            TableSpec.sparse("t", wide, optimizer=SGD(1.0), initializer=Zeros())
        )
        accepted = 0

        def push_rows(first: int) -> None:
            client.push(table, np.arange(first, first + 10), np.ones((10, wide), np.float32))

        def push_new_rows_for_ever() -> None:
            nonlocal accepted
            while True:
                push_rows(accepted)
                accepted += 10

        with pytest.raises(errors.MemoryLimitReached, match="memory_limit_bytes") as refused:
            push_new_rows_for_ever()
        assert refused.value.retry_safe
        assert 500 < accepted < 2**28 // (4 * wide)
        for first in range(0, accepted, 10):
            push_rows(first)
        some = np.arange(0, accepted, 97)
        assert np.array_equal(client.pull(table, some), np.full((some.size, wide), -2, np.float32))


def test_a_server_that_comes_back_empty_is_not_trained_on() -> None:
    with (
        LocalCluster(servers=2, settings={"replicas": 1}) as cluster,
        Client(cluster.endpoints) as client,
    ):
        spec = TableSpec.sparse("t", DIM, optimizer=SGD(1.0), initializer=Zeros())
        table = client.create_table(spec)
        keys = np.arange(200)
        client.push(table, keys, ones(200))
        before = client.cluster().routing
        cluster.kill(1)
        cluster.restart(1)
        with pytest.raises(errors.StateLost, match="lost its rows"):
            client.pull(table, keys)
        with pytest.raises((errors.StateLost, errors.OutcomeUnknown)):
            client.push(table, keys, ones(200))
        # No client is served what is lost before an operator has accepted that.
        accept = ["--endpoint", cluster.endpoints[0], "slots", "accept-loss", "--yes"]
        assert CliRunner().invoke(pserverctl, accept).exit_code == 0
        # Another client meets the new server, which has learned its tables from its peer.
        with Client(cluster.endpoints[1]) as fresh:
            owner = before.master_of_slot[slots_of(keys.astype(np.uint64), before.slot_count)]
            counted = fresh.pull("t", keys)[:, 0]
            assert not counted[owner == 1].any(), "what ps-1 held is gone"
            assert set(counted[owner == 0].tolist()) <= {1.0, 2.0}, "what ps-0 holds is there"


def test_a_dead_server_is_named_at_the_deadline() -> None:
    config = ClientConfig(deadline_ms=500)
    with LocalCluster(servers=1) as cluster, Client(cluster.endpoints, config=config) as client:
        spec = TableSpec.sparse("t", DIM, optimizer=SGD(1.0), initializer=Zeros())
        table = client.create_table(spec)
        client.push(table, np.array([1]), ones(1))
        data_address = client.cluster().nodes[0].data_address
        cluster.kill(0)
        with pytest.raises(errors.ServerUnavailable, match=data_address):
            client.pull(table, np.array([1]))
        with pytest.raises((errors.ServerUnavailable, errors.OutcomeUnknown), match=data_address):
            client.push(table, np.array([1]), ones(1))


def test_a_trainer_killed_in_the_middle_of_pushes_harms_nobody(
    three_servers: LocalCluster, client: Client, counter: Table
) -> None:
    script = textwrap.dedent(
        f"""
        import numpy as np
        from backstay.trainer import Client
        client = Client({three_servers.endpoints[0]!r})
        keys = np.arange(20000)
        gradients = np.full((20000, {DIM}), -1.0, dtype=np.float32)
        while True:
            client.push({counter.name!r}, keys, gradients)
            print("pushed", flush=True)
        """
    )
    trainer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert trainer.stdout is not None
    pushed = [trainer.stdout.readline() for _ in range(5)]
    trainer.send_signal(signal.SIGKILL)
    pushed += trainer.stdout.readlines()
    trainer.stdout.close()
    trainer.wait()
    counts = client.pull(counter, np.arange(20000))
    # What it was told is there; of the push it was killed in, each slot has all or nothing.
    assert set(np.unique(counts)) <= {len(pushed), len(pushed) + 1}
    client.push(counter, np.arange(20000), ones(20000))
    after = client.pull(counter, np.arange(20000))
    # The servers may still have had the push that it was killed in before them.
    assert set(np.unique(after - counts)) <= {1, 2}
    assert set(np.unique(after)) <= {len(pushed) + 1, len(pushed) + 2}


def test_a_forked_process_is_refused_clearly(client: Client, counter: Table) -> None:
    client.pull(counter, np.array([1]))
    script = textwrap.dedent(
        f"""
        import os, sys
        import numpy as np
        from backstay.trainer import Client
        client = Client({client.cluster().nodes[0].control_address!r})
        client.pull({counter.name!r}, np.array([1]))
        if os.fork() == 0:
            try:
                client.pull({counter.name!r}, np.array([1]))
            except RuntimeError as error:
                os._exit(7 if "forked" in str(error) else 8)
            os._exit(9)
        status = os.waitstatus_to_exitcode(os.wait()[1])
        client.close()
        sys.exit(status)
        """
    )
    # Without gRPC's own handlers of a fork: they may crash the child while a stream is read.
    env = {**os.environ, "GRPC_ENABLE_FORK_SUPPORT": "0"}
    words = [sys.executable, "-W", "ignore", "-c", script]
    assert subprocess.run(words, env=env, check=False).returncode == 7


def test_a_program_that_forgets_to_close_ends_cleanly(three_servers: LocalCluster) -> None:
    script = f"""
import numpy as np
from backstay.trainer import Client
client = Client({three_servers.endpoints[0]!r})
client.prepare(np.array([1]))
"""
    command = [sys.executable, "-c", script]
    for _ in range(5):
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (ended.returncode, ended.stderr) == (0, "")


def test_ctrl_c_breaks_off_a_call_that_waits() -> None:
    with LocalCluster(servers=1) as cluster, Client(cluster.endpoints) as client:
        spec = TableSpec.sparse("t", DIM, optimizer=SGD(1.0), initializer=Zeros())
        table = client.create_table(spec)
        pid = cluster.pids[0]
        os.kill(pid, signal.SIGSTOP)
        # On a busy machine a thread of it may still answer before all are stopped.
        stat = Path(f"/proc/{pid}/stat")
        wait_until(lambda: ") T " in stat.read_text(), stat.read_text)
        # A program that was started in the background ignores the signal.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            threading.Timer(0.3, signal.raise_signal, [signal.SIGINT]).start()
            with pytest.raises(KeyboardInterrupt):
                client.pull(table, np.array([1]))
        finally:
            signal.signal(signal.SIGINT, before)
            os.kill(pid, signal.SIGCONT)
        assert client.pull(table, np.array([1]))[0, 0] == 0


def test_a_wrong_token_is_refused_on_both_planes() -> None:
    with LocalCluster(servers=1, settings={"token": "open-sesame"}) as cluster:
        with Client(cluster.endpoints, config=ClientConfig(token="open-sesame")) as client:
            spec = TableSpec.sparse("t", DIM, optimizer=SGD(1.0), initializer=Zeros())
            client.push(client.create_table(spec), np.array([1]), ones(1))
        for token in (None, "open-barley"):
            with pytest.raises(errors.Unauthenticated):
                Client(cluster.endpoints, config=ClientConfig(token=token))
