"""The job master as a process, beside real pservers: killed, doubled, without its store."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

from backstay import rpc
from backstay._proto.v1 import job_pb2, job_pb2_grpc
from backstay.cluster.directory import Directory
from backstay.config import ClientConfig, SecurityConfig
from backstay.consensus.records.jobs import MasterRecord
from backstay.consensus.records.keys import JobKeys
from backstay.errors import (
    InvalidRequest,
    JobRefused,
    TableConflict,
    Unauthenticated,
    UnknownJob,
    WorkerReplaced,
)
from backstay.job.calls import read_keys
from backstay.job.messages import Ended, EvaluationOutputs, Task, Wait
from backstay.job_engine.launch import LauncherReport
from backstay.job_spec import DataSpec, WorkersSpec
from backstay.master.job_client import JobClient, find_job, forget_job, list_jobs
from backstay.pserver.local_cluster import LocalCluster
from backstay.trainer.worker.master_link import MasterLink
from tests.etcd import EtcdCluster
from tests.integration.counting_jobs import (
    CLIENT,
    JOB,
    LIMIT_S,
    TASKS,
    Eventually,
    Masters,
    Worker,
    counting_spec,
    wait_for_master,
)
from tests.waiting import wait_until


@pytest.fixture
def masters(
    three_servers: LocalCluster, tmp_path: Path, plain_environment: dict[str, str]
) -> Iterator[Masters]:
    masters = Masters(three_servers.endpoints, tmp_path, plain_environment)
    yield masters
    masters.end()
    forget_job(three_servers.endpoints, JOB, config=CLIENT)


def all_tasks(passes: int) -> dict[tuple[str, int, int], int]:
    tasks = {
        ("training", number, task): 1 for number in range(1, passes + 1) for task in range(TASKS)
    }
    return tasks | {("train_end", 1, 0): 1}


def test_a_job_whose_master_is_killed_counts_every_task_once(
    masters: Masters, eventually: Eventually, tmp_path: Path
) -> None:
    spec = counting_spec(tmp_path, epochs=2)
    masters.start(spec)
    wait_for_master(masters.endpoints, 1, eventually)
    workers = [Worker(masters.endpoints, f"w{number}") for number in range(3)]
    # Each death comes when so many tasks are done, whatever that takes.
    reached = {count: threading.Event() for count in (15, 40, 60)}
    lock, done = threading.Lock(), Counter[str]()

    def count(_task: Task) -> None:
        with lock:
            done["tasks"] += 1
            if done["tasks"] in reached:
                reached[done["tasks"]].set()

    for worker in workers:
        worker.work = count
        worker.start()
    for event in reached.values():
        assert event.wait(LIMIT_S)
        masters.replace(spec)
    for worker in workers:
        worker.finish()
    told = sum((worker.first for worker in workers), Counter[tuple[str, int, int]]())
    # The last answers may be lost with a job master that dies; the job is over before the retry.
    unanswered = sum((worker.unanswered for worker in workers), Counter[tuple[str, int, int]]())
    assert told <= Counter(all_tasks(passes=2)) <= told + unanswered
    assert masters.processes[-1].wait(LIMIT_S) == 0
    (entry,) = list_jobs(masters.endpoints, config=CLIENT)
    assert find_job(masters.endpoints, entry.job, config=CLIENT) == entry
    assert find_job(masters.endpoints, "another", config=CLIENT) is None
    assert (entry.job, entry.state, entry.master_address) == (JOB, "done", "")


def test_of_two_masters_one_is_fenced_and_says_so(
    masters: Masters, eventually: Eventually, tmp_path: Path
) -> None:
    spec = counting_spec(tmp_path)
    first = masters.start(spec)
    wait_for_master(masters.endpoints, 1, eventually)
    link = MasterLink(masters.endpoints, JOB, "w1", config=CLIENT)
    link.join()
    task = link.get_task()
    assert isinstance(task, Task)
    link.lease(task)
    # It hangs, is taken for dead, and wakes up when another one is the job master.
    first.send_signal(signal.SIGSTOP)
    second = masters.start(spec, "--replaces", "1")
    wait_for_master(masters.endpoints, 2, eventually)
    first.send_signal(signal.SIGCONT)
    assert first.wait(LIMIT_S) == 4
    assert "another process" in (masters.folder / "master-1.log").read_text()
    # The lease went over to the second one.
    assert link.complete(task, batches=2, examples=task.count)
    assert second.poll() is None
    link.leave()
    link.close()


def test_a_second_master_that_replaces_nobody_waits_until_the_first_one_ends(
    masters: Masters, eventually: Eventually, tmp_path: Path
) -> None:
    spec = counting_spec(tmp_path)
    first = masters.start(spec)
    wait_for_master(masters.endpoints, 1, eventually)
    masters.start(spec)
    first.terminate()
    assert first.wait(LIMIT_S) == 0
    wait_for_master(masters.endpoints, 2, eventually)


def test_the_tasks_of_a_worker_that_falls_silent_go_to_another_one(
    masters: Masters, eventually: Eventually, tmp_path: Path
) -> None:
    masters.start(counting_spec(tmp_path, task_lease_ttl_ms=400))
    wait_for_master(masters.endpoints, 1, eventually)
    silent = MasterLink(masters.endpoints, JOB, "silent", config=CLIENT)
    silent.join()
    lost = silent.get_task()
    assert isinstance(lost, Task)
    silent.close()
    other = Worker(masters.endpoints, "other")
    other.start()
    other.finish()
    assert other.first == all_tasks(passes=1)
    assert other.ended == Ended("done", "")


def test_a_process_that_takes_a_workers_name_takes_its_place(
    masters: Masters, eventually: Eventually, tmp_path: Path
) -> None:
    masters.start(counting_spec(tmp_path))
    wait_for_master(masters.endpoints, 1, eventually)
    before, after = (MasterLink(masters.endpoints, JOB, "w1", config=CLIENT) for _ in range(2))
    before.join()
    task = before.get_task()
    assert isinstance(task, Task)
    after.join()
    with pytest.raises(WorkerReplaced, match="another process has joined as worker 'w1'"):
        before.complete(task, batches=1, examples=4)
    again = after.get_task()
    assert isinstance(again, Task)
    assert (again.number, again.first_batch) == (task.number, 0)
    assert again.attempt > task.attempt
    eventually(lambda: before.stop_reason is not None)
    for link in (before, after):
        link.close()


def test_what_is_given_back_is_gone_on_with_where_it_stood(
    masters: Masters, eventually: Eventually, tmp_path: Path
) -> None:
    masters.start(counting_spec(tmp_path, max_task_retries=0))
    wait_for_master(masters.endpoints, 1, eventually)
    link = MasterLink(masters.endpoints, JOB, "w1", config=CLIENT)
    link.join()
    link.declare_tables(["wide", "deep"])
    with pytest.raises(TableConflict, match="table 0"):
        link.declare_tables(["deep", "wide"])
    task = link.get_task()
    assert isinstance(task, Task)
    link.give_back(task, acknowledged_batches=3, reason="a push failed")
    again = link.get_task()
    assert isinstance(again, Task)
    assert (again.number, again.first_batch) == (task.number, 3)
    assert again.shuffle_seed == task.shuffle_seed != 0
    assert link.fail(again, "ValueError: no number", records=[1])
    client = JobClient(masters.endpoints, JOB, config=CLIENT)
    (dead_letter,) = client.dead_letters()
    assert (dead_letter.number, list(dead_letter.records)) == (task.number, [1])
    assert "no number" in dead_letter.error
    assert client.status().dead_letters == 1
    assert client.retry_dead_letters() == (1, False)
    assert client.dead_letters() == ()
    client.close()
    link.leave()
    link.close()


def test_evaluations_are_put_together_over_all_workers(
    masters: Masters, eventually: Eventually, tmp_path: Path
) -> None:
    data = DataSpec(paths=(str(tmp_path / "data.csv"),))
    masters.start(counting_spec(tmp_path, validation=data))
    wait_for_master(masters.endpoints, 1, eventually)
    worker = MasterLink(masters.endpoints, JOB, "w1", config=CLIENT)
    worker.join()
    while not isinstance(task := worker.get_task(), Ended):
        if isinstance(task, Wait):
            continue
        outputs = None
        if task.kind == "evaluation":
            rows = np.arange(task.start, task.start + task.count, dtype=np.float32)
            outputs = EvaluationOutputs(
                (rows / (4 * TASKS)).astype(np.float32),
                (rows >= 2 * TASKS).astype(np.float32),
                {"mine": float(task.start)},
                task.count,
                {"area": "auc"},
            )
        worker.complete(task, batches=1, examples=task.count, outputs=outputs)
        if task.kind == "training":
            worker.stream_closed(task.round, task.number)
    client = JobClient(masters.endpoints, JOB, config=CLIENT)
    (result,) = client.status().evaluations
    assert dict(result.metrics) == {"area": 1.0, "mine": np.mean(range(0, 4 * TASKS, 4))}
    assert result.records == 4 * TASKS
    client.close()
    worker.close()


def test_a_launcher_is_told_which_workers_should_run(
    masters: Masters, eventually: Eventually, tmp_path: Path
) -> None:
    spec = counting_spec(tmp_path, workers=WorkersSpec(initial=2, min=1, max=3))
    masters.start(spec)
    wait_for_master(masters.endpoints, 1, eventually)
    client = JobClient(masters.endpoints, JOB, config=CLIENT)
    answer = client.launch(LauncherReport(), wait_ms=0)
    assert len(answer.workers) == 2
    assert client.scale(3) == 2
    answer = client.launch(
        LauncherReport(answer.workers), known_version=answer.version, wait_ms=10_000
    )
    assert len(answer.workers) == 3
    # The next job master wants the same ones.
    masters.replace(spec)
    wait_for_master(masters.endpoints, 2, eventually)
    after = client.launch(LauncherReport(answer.workers), known_version=answer.version, wait_ms=0)
    assert set(after.workers) == set(answer.workers)
    with pytest.raises(InvalidRequest):
        client.scale(4)
    # The job master stays until this worker has heard of the end.
    worker = MasterLink(masters.endpoints, JOB, after.workers[0], config=CLIENT)
    worker.join()
    client.stop("enough", keep_state=False)
    assert client.launch(LauncherReport(after.workers), wait_ms=0).ended == ("stopped", "enough")
    assert isinstance(worker.get_task(), Ended)
    worker.close()
    assert masters.processes[-1].wait(LIMIT_S) == 0
    assert list_jobs(masters.endpoints, config=CLIENT) == ()
    with pytest.raises(UnknownJob, match="it has: none"):
        client.status()
    client.close()


def test_a_launcher_hears_of_the_end_though_the_job_master_has_left(
    masters: Masters, eventually: Eventually, tmp_path: Path
) -> None:
    masters.start(counting_spec(tmp_path))
    wait_for_master(masters.endpoints, 1, eventually)
    client = JobClient(masters.endpoints, JOB, config=CLIENT)
    client.stop("enough")
    assert masters.processes[-1].wait(LIMIT_S) == 0
    assert client.launch(LauncherReport(), wait_ms=0).ended == ("stopped", "enough")
    client.close()


def test_another_spec_is_refused_and_a_job_with_a_master_is_not_forgotten(
    masters: Masters, eventually: Eventually, tmp_path: Path
) -> None:
    masters.start(counting_spec(tmp_path))
    wait_for_master(masters.endpoints, 1, eventually)
    with pytest.raises(JobRefused, match="has a job master"):
        forget_job(masters.endpoints, JOB, config=CLIENT)
    other = masters.replace(counting_spec(tmp_path, records_per_task=8))
    assert other.wait(LIMIT_S) == 2
    assert "records_per_task is 8, was 4" in masters.log()


def test_the_token_is_asked_for(tmp_path: Path, plain_environment: dict[str, str]) -> None:
    token = "a-secret-of-the-cluster"
    settings: Mapping[str, object] = {"token": token}
    with LocalCluster(servers=1, settings=settings) as cluster:
        environment = plain_environment | {"BACKSTAY_TOKEN": token}
        masters = Masters(cluster.endpoints, tmp_path, environment)
        masters.start(counting_spec(tmp_path))
        config = ClientConfig(token=token, deadline_ms=20_000)
        try:
            directory = Directory(cluster.endpoints, config)
            key = JobKeys(JOB).master
            found = wait_until(lambda: read_keys(directory, key, single=True), "a job master")
            directory.close()
            address = MasterRecord.from_json(found[key]).address
            link = MasterLink(cluster.endpoints, JOB, "w1", config=config)
            link.join()
            link.close()
            with (
                rpc.open_channel(address, SecurityConfig()) as channel,
                pytest.raises(Unauthenticated, match="no token"),
                rpc.mapped_errors(address),
            ):
                job_pb2_grpc.JobServiceStub(channel).GetJob(job_pb2.GetJobRequest(), timeout=10)
        finally:
            masters.end()


@pytest.mark.slow
def test_workers_go_on_while_the_store_is_away(
    tmp_path: Path, plain_environment: dict[str, str], eventually: Eventually
) -> None:
    with EtcdCluster(tmp_path) as etcd:
        settings = {"store": "etcd", "store_endpoints": ",".join(etcd.endpoints)}
        with LocalCluster(servers=2, settings=settings) as cluster:
            masters = Masters(cluster.endpoints, tmp_path, plain_environment)
            workers = [Worker(cluster.endpoints, f"w{number}") for number in range(2)]
            client = JobClient(cluster.endpoints, JOB, config=CLIENT)
            away, back = threading.Event(), threading.Event()

            def work(task: Task) -> None:
                if task.number == TASKS // 2 and not away.is_set():
                    away.set()
                    assert back.wait(LIMIT_S)

            try:
                masters.start(
                    counting_spec(tmp_path, task_lease_ttl_ms=1000), "--lease-ttl-ms", "2000"
                )
                wait_for_master(cluster.endpoints, 1, eventually)
                client.status()
                for worker in workers:
                    worker.work = work
                    worker.start()
                assert away.wait(LIMIT_S)
                etcd.kill()
                # What the other worker has done cannot be recorded now, and it waits.
                eventually(lambda: client.status().trouble != "")
                # An outage that is longer than the lease and than the life of any lease.
                workers[0].join(timeout=4.0)
                assert all(worker.is_alive() for worker in workers)
                assert all(worker.link.stop_reason is None for worker in workers)
                etcd.start()
                back.set()
                for worker in workers:
                    worker.finish()
                told = sum((one.first for one in workers), Counter[tuple[str, int, int]]())
                assert told == all_tasks(passes=1)
                # The same master all along.
                assert masters.processes[0].wait(LIMIT_S) == 0
            finally:
                back.set()
                client.close()
                masters.end()
