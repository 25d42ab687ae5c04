"""Model and progress go back together: each record counts once, whatever is restored when.

Where only some slots go back while a job runs, that is refused, or said by the job itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from backstay import rpc
from backstay.checkpoint import remote
from backstay.config import SecurityConfig
from backstay.job.messages import Task
from backstay.job_spec import CheckpointSpec
from backstay.master.job_client import JobClient
from backstay.pserver.ctl.cli import main as pserverctl
from backstay.pserver.local_cluster import LocalCluster
from backstay.runner.audit import audit_job
from tests.integration.counting_jobs import CLIENT, JOB, LIMIT_S, TASKS, Eventually, wait_for_master
from tests.integration.counting_worker import ALL_TASKS, CountingWorker, counted_job, restore

EVERY_TEN = CheckpointSpec(every="none", every_tasks=10)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    settings = {"slot_count": 16, "checkpoint_url": str(tmp_path / "checkpoints")}
    with LocalCluster(servers=2, settings=settings) as cluster:
        yield cluster


def has_gone_back(client: JobClient, starts: int) -> bool:
    status = client.status()
    return status.master_starts == starts and status.tasks.done <= 10


def ctl(cluster: LocalCluster, *arguments: str) -> Result:
    return CliRunner().invoke(pserverctl, ["--endpoint", cluster.endpoints[0], *arguments])


def restore_slot(cluster: LocalCluster, *arguments: str) -> Result:
    return ctl(cluster, "checkpoint", "restore", "--slots", "3", "--yes", *arguments)


def test_a_checkpoint_restored_twice_takes_the_job_back_twice(
    cluster: LocalCluster,
    tmp_path: Path,
    plain_environment: dict[str, str],
    eventually: Eventually,
) -> None:
    with counted_job(cluster, tmp_path, plain_environment, eventually, EVERY_TEN) as job:
        client, worker, masters = job.client, job.worker, job.masters
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
        # While no job master looks: the next job master finds out when it begins.
        worker.allow(3)
        eventually(lambda: worker.finished == 27)
        masters.processes[-1].kill()
        masters.processes[-1].wait()
        restore(cluster, checkpoint, eventually)
        masters.start(job.spec, "--replaces", "1")
        wait_for_master(cluster.endpoints, 2, eventually)
        assert client.status().tasks.done <= 10
        job.train_on()
        assert client.status().state == "done"
        audit = audit_job(JOB, cluster.endpoints, CLIENT)
        assert audit.records_counted_once, audit


# What takes the place of lost slots, nothing or what a checkpoint has, is not what was trained.
@pytest.mark.parametrize("on_slot_loss", ["wait", "restore-lost"])
def test_rows_that_are_lost_fail_the_job_and_a_restore_lets_it_go_on(
    tmp_path: Path,
    plain_environment: dict[str, str],
    eventually: Eventually,
    on_slot_loss: str,
) -> None:
    settings = {
        "slot_count": 16,
        "replicas": 1,
        "return_grace_ms": 0,
        "lease_ttl_ms": 1500,
        "checkpoint_url": str(tmp_path / "checkpoints"),
    }
    with LocalCluster(servers=3, settings=settings) as cluster:
        told = ctl(cluster, "config", "set", f"on_slot_loss={on_slot_loss}")
        assert told.exit_code == 0, told.output
        again = CountingWorker(cluster.endpoints)
        with counted_job(cluster, tmp_path, plain_environment, eventually, EVERY_TEN) as job:
            client, worker, masters = job.client, job.worker, job.masters
            worker.allow(14)
            eventually(lambda: client.status().checkpoint != "" and worker.finished == 14)
            checkpoint = client.status().checkpoint
            cluster.kill(2)
            eventually(lambda: client.status().state == "failed")
            assert f"Restore {checkpoint}" in client.status().reason
            assert "slots lost all their copies" in client.status().inexact
            worker.allow(ALL_TASKS)
            worker.join(LIMIT_S)
            # The same command does not go on with a model that lacks what is done.
            assert masters.processes[-1].wait(LIMIT_S) == 5
            assert masters.start(job.spec).wait(LIMIT_S) == 5
            restore(cluster, checkpoint, eventually)
            masters.start(job.spec)
            wait_for_master(cluster.endpoints, masters.instance, eventually)
            again.allow(ALL_TASKS)
            again.start()
            again.join(LIMIT_S)
            assert again.failure is None
            assert client.status().state == "done"
            assert client.status().inexact == ""
            audit = audit_job(JOB, cluster.endpoints, CLIENT)
            assert audit.records_counted_once, audit


@pytest.mark.parametrize("every", ["none", "pass"])
def test_rows_that_are_lost_just_before_the_end_fail_the_job(
    tmp_path: Path,
    plain_environment: dict[str, str],
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
    every: str,
) -> None:
    settings = {
        "slot_count": 16,
        "replicas": 1,
        "return_grace_ms": 0,
        "lease_ttl_ms": 1500,
        "checkpoint_url": str(tmp_path / "checkpoints"),
    }
    spec = CheckpointSpec(every=every)
    with (
        LocalCluster(servers=3, settings=settings) as cluster,
        counted_job(cluster, tmp_path, plain_environment, eventually, spec) as job,
    ):
        link, worker = job.worker._link, job.worker
        complete = link.complete

        def complete_late(task: Task, *, batches: int, examples: int) -> bool:
            if worker.finished == TASKS - 1 and task.kind == "training":
                # All its pushes are acknowledged; the job master hears of the task after the loss.
                cluster.kill(2)
                eventually(lambda: generation(cluster) > 0)
            return complete(task, batches=batches, examples=examples)

        monkeypatch.setattr(link, "complete", complete_late)
        worker.allow(ALL_TASKS)
        assert job.masters.processes[-1].wait(LIMIT_S) == 5
        status = job.client.status()
        assert (status.state, status.checkpoint) == ("failed", "")
        assert "slots lost all their copies" in status.reason
        assert status.inexact


def generation(cluster: LocalCluster) -> int:
    """Of the rows: it grows when slots lose all their copies."""
    endpoint = cluster.endpoints[0]
    with rpc.open_channel(endpoint, SecurityConfig()) as channel, rpc.mapped_errors(endpoint):
        return remote.restore_state(channel, timeout_s=5).generation


def test_rows_that_are_lost_take_the_job_back_to_the_checkpoint_by_themselves(
    tmp_path: Path, plain_environment: dict[str, str], eventually: Eventually
) -> None:
    settings = {
        "slot_count": 16,
        "replicas": 1,
        "return_grace_ms": 0,
        "lease_ttl_ms": 1500,
        "checkpoint_url": str(tmp_path / "checkpoints"),
    }
    with (
        LocalCluster(servers=3, settings=settings) as cluster,
        counted_job(cluster, tmp_path, plain_environment, eventually, EVERY_TEN) as job,
    ):
        client, worker = job.client, job.worker
        worker.allow(14)
        eventually(lambda: client.status().checkpoint != "" and worker.finished == 14)
        checkpoint = client.status().checkpoint
        cluster.kill(2)
        eventually(lambda: "lost all copies: all goes on from" in client.status().trouble)
        assert checkpoint in client.status().trouble
        assert client.status().state == "running"
        worker.allow(ALL_TASKS)
        worker.join(LIMIT_S)
        assert worker.failure is None
        assert client.status().state == "done"
        assert client.status().inexact == ""
        audit = audit_job(JOB, cluster.endpoints, CLIENT)
        assert audit.records_counted_once, audit


def test_a_job_keeps_partial_restores_out_or_says_that_it_is_not_exact(
    cluster: LocalCluster,
    tmp_path: Path,
    plain_environment: dict[str, str],
    eventually: Eventually,
) -> None:
    with counted_job(cluster, tmp_path, plain_environment, eventually, EVERY_TEN) as job:
        client, worker = job.client, job.worker
        worker.allow(14)
        eventually(lambda: client.status().checkpoint != "" and worker.finished == 14)
        checkpoint = client.status().checkpoint
        refused = restore_slot(cluster)
        assert refused.exit_code == 3, refused.output
        assert f"job '{JOB}' (running)" in refused.output
        assert "--allow-inexact" in refused.output
        assert client.status().inexact == ""
        allowed = restore_slot(cluster, checkpoint, "--allow-inexact")
        assert allowed.exit_code == 0, allowed.output
        eventually(lambda: "only 1 of the slots" in client.status().inexact)
        # It goes on; a restore of everything makes it exact again, until the next partial one.
        worker.allow(3)
        restore(cluster, checkpoint, eventually)
        eventually(lambda: client.status().inexact == "")
        assert restore_slot(cluster, checkpoint, "--allow-inexact").exit_code == 0
        eventually(lambda: f"from {checkpoint}" in client.status().inexact)
        job.train_on()
        assert client.status().state == "done"
        audit = audit_job(JOB, cluster.endpoints, CLIENT)
        # Whatever the counters of records say.
        assert not audit.records_counted_once
        assert "only 1 of the slots" in audit.inexact


def test_an_audit_says_that_slots_were_restored_alone_after_the_end(
    cluster: LocalCluster,
    tmp_path: Path,
    plain_environment: dict[str, str],
    eventually: Eventually,
) -> None:
    every_pass = CheckpointSpec(every="pass")
    with counted_job(cluster, tmp_path, plain_environment, eventually, every_pass) as job:
        job.train_on()
        assert job.masters.processes[-1].wait(LIMIT_S) == 0
        assert audit_job(JOB, cluster.endpoints, CLIENT).records_counted_once
        # A job that is done keeps no job out; all its records are in this checkpoint.
        assert restore_slot(cluster).exit_code == 0
        audit = audit_job(JOB, cluster.endpoints, CLIENT)
        assert (audit.missing, audit.doubled) == (0, 0)
        assert not audit.records_counted_once
        assert "since the job's end: only 1 of the slots" in audit.inexact
