"""Model and progress go back together: each record counts once, whatever is restored when."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from backstay import rpc
from backstay.checkpoint import remote
from backstay.config import SecurityConfig
from backstay.errors import BackstayError, StateLost
from backstay.job_spec import CheckpointSpec
from backstay.master.job_client import JobClient
from backstay.pserver.local_cluster import LocalCluster
from backstay.trainer import Client
from backstay.trainer.readers import Shard
from backstay.trainer.worker.audit import RecordCounter, audit_records
from backstay.trainer.worker.master_link import Ended, MasterLink, Task, Wait
from tests.integration.counting_jobs import (
    CLIENT,
    JOB,
    LIMIT_S,
    TASKS,
    Eventually,
    Masters,
    counting_spec,
    wait_for_master,
)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    settings = {"slot_count": 16, "checkpoint_url": str(tmp_path / "checkpoints")}
    with LocalCluster(servers=2, settings=settings) as cluster:
        yield cluster


class CountingWorker(threading.Thread):
    """Counts each record of its tasks on the servers; a new client whenever the old one fails."""

    def __init__(self, endpoints: list[str]) -> None:
        super().__init__(name="counting", daemon=True)
        self._endpoints = endpoints
        self._link = MasterLink(endpoints, JOB, "w1", config=CLIENT)
        self._condition = threading.Condition()
        self._allowed = 0
        self.finished = 0
        self.failure: BaseException | None = None

    def allow(self, tasks: int) -> None:
        """Let it do so many more tasks."""
        with self._condition:
            self._allowed += tasks
            self._condition.notify_all()

    def run(self) -> None:
        try:
            terms = self._link.join()
            ended = False
            while not ended:
                # Leaving it says once more what it has lost.
                with suppress(StateLost), Client(self._endpoints) as client:
                    ended = self._work(client, terms.stream_job)
        except BaseException as error:  # noqa: BLE001 (the test looks at it)
            self.failure = error
        finally:
            self._link.close()

    def _work(self, client: Client, job: int) -> bool:
        """Work until the job ends (True), or until this client is of no use any more."""
        counter = RecordCounter(client, JOB)
        self._link.declare_tables([counter.table_name])
        table = client.table(counter.table_name)
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._allowed > 0, LIMIT_S)
            task = self._link.get_task()
            try:
                for stream_id in self._link.streams_to_close():
                    client.close_task_stream(job, *stream_id)
                    self._link.stream_closed(*stream_id)
            except BackstayError as error:
                if isinstance(task, Task):
                    self._link.give_back(task, settled_batches=0, reason=str(error))
                return False
            if isinstance(task, Ended):
                return True
            if isinstance(task, Wait):
                continue
            if task.kind != "training":
                self._link.complete(task, batches=1, examples=task.count)
                continue
            stream = client.task_stream(
                job, task.round, task.number, [table], first_batch=task.first_batch
            )
            try:
                with stream:
                    self._link.hold(task, stream)
                    for batch in range(task.first_batch, task.count):
                        stream.begin_batch(batch)
                        counter.count(task.shard, task.start, np.array([batch]))
                    stream.settle()
                if self._link.complete(task, batches=task.count, examples=task.count):
                    stream.close_on_servers()
                    self._link.stream_closed(task.round, task.number)
            except BackstayError as error:
                self._link.give_back(task, settled_batches=0, reason=str(error))
                return False
            with self._condition:
                self._allowed -= 1
                self.finished += 1


def restore(cluster: LocalCluster, checkpoint: str, eventually: Eventually) -> int:
    """Restore a checkpoint and return the version of that restore."""
    endpoint = cluster.endpoints[0]
    with rpc.open_channel(endpoint, SecurityConfig()) as channel, rpc.mapped_errors(endpoint):
        remote.restore(channel, checkpoint, timeout_s=30)

        def is_done() -> bool:
            return remote.restore_state(channel, timeout_s=5).state == "done"

        eventually(is_done)
        return remote.restore_state(channel, timeout_s=5).version


def has_gone_back(client: JobClient, starts: int) -> bool:
    status = client.status()
    return status.master_starts == starts and status.tasks.done <= 10


def test_a_checkpoint_restored_twice_takes_the_job_back_twice(
    cluster: LocalCluster,
    tmp_path: Path,
    plain_environment: dict[str, str],
    eventually: Eventually,
) -> None:
    masters = Masters(cluster.endpoints, tmp_path, plain_environment)
    spec = counting_spec(tmp_path, checkpoint=CheckpointSpec(every="none", every_tasks=10))
    masters.start(spec)
    wait_for_master(cluster.endpoints, 1, eventually)
    worker = CountingWorker(cluster.endpoints)
    client = JobClient(cluster.endpoints, JOB, config=CLIENT)
    try:
        worker.start()
        worker.allow(10)
        eventually(lambda: client.status().checkpoint != "")
        checkpoint = client.status().checkpoint
        first_start = client.status().master_starts
        versions = set[int]()
        for time_of_it in range(2):
            worker.allow(7)
            eventually(lambda: client.status().tasks.done == 17 or worker.failure is not None)
            assert worker.failure is None
            versions.add(restore(cluster, checkpoint, eventually))
            # The progress that was saved, or less: not what was done since.
            eventually(partial(has_gone_back, client, first_start + time_of_it + 1))
        assert len(versions) == 2
        # While nobody looks: the next master finds out when it begins.
        worker.allow(3)
        eventually(lambda: worker.finished == 27)
        masters.processes[-1].kill()
        masters.processes[-1].wait()
        restore(cluster, checkpoint, eventually)
        masters.start(spec, "--replaces", "1")
        wait_for_master(cluster.endpoints, 2, eventually)
        assert client.status().tasks.done <= 10
        worker.allow(1000)
        worker.join(LIMIT_S)
        assert worker.failure is None
        assert not worker.is_alive()
        assert client.status().state == "done"
        with Client(cluster.endpoints) as reader:
            shards = [Shard(str(tmp_path / "data.csv"), 4 * TASKS)]
            audit = audit_records(reader, JOB, shards, passes=1)
        assert audit.records_counted_once, audit
    finally:
        worker.allow(1000)
        client.close()
        masters.end()


def test_rows_that_are_lost_fail_the_job_and_a_restore_lets_it_go_on(
    tmp_path: Path, plain_environment: dict[str, str], eventually: Eventually
) -> None:
    settings = {
        "slot_count": 16,
        "replicas": 1,
        "return_grace_ms": 0,
        "lease_ttl_ms": 1500,
        "checkpoint_url": str(tmp_path / "checkpoints"),
    }
    with LocalCluster(servers=3, settings=settings) as cluster:
        masters = Masters(cluster.endpoints, tmp_path, plain_environment)
        spec = counting_spec(tmp_path, checkpoint=CheckpointSpec(every="none", every_tasks=10))
        masters.start(spec)
        wait_for_master(cluster.endpoints, 1, eventually)
        client = JobClient(cluster.endpoints, JOB, config=CLIENT)
        worker = CountingWorker(cluster.endpoints)
        again = CountingWorker(cluster.endpoints)
        try:
            worker.start()
            worker.allow(14)
            eventually(lambda: client.status().checkpoint != "" and worker.finished == 14)
            checkpoint = client.status().checkpoint
            cluster.kill(2)
            eventually(lambda: client.status().state == "failed")
            assert f"Restore {checkpoint}" in client.status().reason
            worker.allow(1000)
            worker.join(LIMIT_S)
            # The same command does not go on with a model that lacks what is done.
            assert masters.processes[-1].wait(LIMIT_S) == 5
            assert masters.start(spec).wait(LIMIT_S) == 5
            restore(cluster, checkpoint, eventually)
            masters.start(spec)
            wait_for_master(cluster.endpoints, masters.instance, eventually)
            again.allow(1000)
            again.start()
            again.join(LIMIT_S)
            assert again.failure is None
            assert client.status().state == "done"
            with Client(cluster.endpoints) as reader:
                shards = [Shard(str(tmp_path / "data.csv"), 4 * TASKS)]
                audit = audit_records(reader, JOB, shards, passes=1)
            assert audit.records_counted_once, audit
        finally:
            for one in (worker, again):
                one.allow(1000)
            client.close()
            masters.end()
