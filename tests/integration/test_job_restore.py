"""Model and progress go back together: each record counts once, whatever is restored when."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

from backstay.cli.audit import audit_job
from backstay.job_spec import CheckpointSpec
from backstay.master.job_client import JobClient
from backstay.pserver.ctl.cli import main as pserverctl
from backstay.pserver.local_cluster import LocalCluster
from tests.integration.counting_jobs import (
    CLIENT,
    JOB,
    LIMIT_S,
    Eventually,
    Masters,
    counting_spec,
    wait_for_master,
)
from tests.integration.counting_worker import CountingWorker, restore


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    settings = {"slot_count": 16, "checkpoint_url": str(tmp_path / "checkpoints")}
    with LocalCluster(servers=2, settings=settings) as cluster:
        yield cluster


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
    spec = counting_spec(
        tmp_path, audit=True, checkpoint=CheckpointSpec(every="none", every_tasks=10)
    )
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
        audit = audit_job(JOB, cluster.endpoints, CLIENT)
        assert audit.records_counted_once, audit
    finally:
        worker.allow(1000)
        client.close()
        masters.end()


# What takes the place of lost slots, nothing or what a checkpoint has, is not what was trained.
@pytest.mark.parametrize("on_slot_loss", ["empty", "restore"])
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
        setting = ["config", "set", f"on_slot_loss={on_slot_loss}"]
        told = CliRunner().invoke(pserverctl, ["--endpoint", cluster.endpoints[0], *setting])
        assert told.exit_code == 0, told.output
        masters = Masters(cluster.endpoints, tmp_path, plain_environment)
        spec = counting_spec(
            tmp_path, audit=True, checkpoint=CheckpointSpec(every="none", every_tasks=10)
        )
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
            assert "slots lost all their copies" in client.status().inexact
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
            assert client.status().inexact == ""
            audit = audit_job(JOB, cluster.endpoints, CLIENT)
            assert audit.records_counted_once, audit
        finally:
            for one in (worker, again):
                one.allow(1000)
            client.close()
            masters.end()
