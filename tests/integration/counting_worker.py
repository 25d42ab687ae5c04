"""A worker as a thread that counts its records on the servers, and restores under it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from click.testing import CliRunner

from backstay import rpc
from backstay.checkpoint import remote
from backstay.config import SecurityConfig
from backstay.errors import BackstayError, StateLost
from backstay.job.messages import Ended, Task, Wait
from backstay.job_spec import CheckpointSpec, JobSpec
from backstay.master.job_client import JobClient
from backstay.pserver.ctl.cli import main as pserverctl
from backstay.pserver.local_cluster import LocalCluster
from backstay.trainer import Client
from backstay.trainer.worker.audit import RecordCounter
from backstay.trainer.worker.master_link import MasterLink
from tests.integration.counting_jobs import (
    CLIENT,
    JOB,
    LIMIT_S,
    Eventually,
    Masters,
    counting_spec,
    wait_for_master,
)

__all__ = ["ALL_TASKS", "CountedJob", "CountingWorker", "counted_job", "restore"]

# More than any of these jobs has.
ALL_TASKS = 1000


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
        counter = RecordCounter(client, JOB, job)
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
                    self._link.give_back(task, acknowledged_batches=0, reason=str(error))
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
                    self._link.lease(task, stream)
                    for batch in range(task.first_batch, task.count):
                        stream.begin_batch(batch)
                        counter.count(task.shard, task.start, np.array([batch]))
                    stream.flush()
                if self._link.complete(task, batches=task.count, examples=task.count):
                    stream.close_on_servers()
                    self._link.stream_closed(task.round, task.number)
            except BackstayError as error:
                self._link.give_back(task, acknowledged_batches=0, reason=str(error))
                return False
            with self._condition:
                self._allowed -= 1
                self.finished += 1


class CountedJob(NamedTuple):
    """A job that is audited, its job masters, and a worker that does as many tasks as it is let."""

    spec: JobSpec
    masters: Masters
    client: JobClient
    worker: CountingWorker

    def train_on(self) -> None:
        """Let the worker come to the job's end, without a failure."""
        self.worker.allow(ALL_TASKS)
        self.worker.join(LIMIT_S)
        assert self.worker.failure is None
        assert not self.worker.is_alive()


@contextmanager
def counted_job(
    cluster: LocalCluster,
    folder: Path,
    environment: dict[str, str],
    eventually: Eventually,
    checkpoint: CheckpointSpec,
) -> Iterator[CountedJob]:
    """Begin such a job; its processes and its worker end with this."""
    masters = Masters(cluster.endpoints, folder, environment)
    spec = counting_spec(folder, audit=True, checkpoint=checkpoint)
    client = JobClient(cluster.endpoints, JOB, config=CLIENT)
    worker = CountingWorker(cluster.endpoints)
    try:
        masters.start(spec)
        wait_for_master(cluster.endpoints, 1, eventually)
        worker.start()
        yield CountedJob(spec, masters, client, worker)
    finally:
        worker.allow(ALL_TASKS)
        client.close()
        masters.end()


def keep_all_checkpoints(cluster: LocalCluster) -> None:
    """Keep those that are to be restored, however many come after them."""
    endpoints = ",".join(cluster.endpoints)
    words = ["--endpoint", endpoints, "config", "set", "checkpoint_keep_last=1000"]
    done = CliRunner().invoke(pserverctl, words)
    assert done.exit_code == 0, done.output


def restore(cluster: LocalCluster, checkpoint: str, eventually: Eventually) -> int:
    """Restore a checkpoint and return the version of that restore."""
    endpoint = cluster.endpoints[0]
    with rpc.open_channel(endpoint, SecurityConfig()) as channel, rpc.mapped_errors(endpoint):
        remote.restore(channel, checkpoint, timeout_s=30)

        def is_done() -> bool:
            return remote.restore_state(channel, timeout_s=5).state == "done"

        eventually(is_done)
        return remote.restore_state(channel, timeout_s=5).version
