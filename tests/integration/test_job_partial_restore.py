"""Some slots only go back to a checkpoint while a job runs: refused, or said by the job itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

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


def restore_slot(cluster: LocalCluster, *arguments: str) -> Result:
    given = ("checkpoint", "restore", "--slots", "3", "--yes", *arguments)
    return CliRunner().invoke(pserverctl, ["--endpoint", cluster.endpoints[0], *given])


def test_a_job_keeps_partial_restores_out_or_says_that_it_is_not_exact(
    cluster: LocalCluster,
    tmp_path: Path,
    plain_environment: dict[str, str],
    eventually: Eventually,
) -> None:
    masters = Masters(cluster.endpoints, tmp_path, plain_environment)
    spec = counting_spec(
        tmp_path, checkpoint=CheckpointSpec(every="none", every_tasks=10), audit=True
    )
    masters.start(spec)
    wait_for_master(cluster.endpoints, 1, eventually)
    worker = CountingWorker(cluster.endpoints)
    client = JobClient(cluster.endpoints, JOB, config=CLIENT)
    try:
        worker.start()
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
        worker.allow(1000)
        worker.join(LIMIT_S)
        assert worker.failure is None
        assert not worker.is_alive()
        assert client.status().state == "done"
        audit = audit_job(JOB, cluster.endpoints, CLIENT)
        # Whatever the counters of records say.
        assert not audit.records_counted_once
        assert "only 1 of the slots" in audit.inexact
    finally:
        worker.allow(1000)
        client.close()
        masters.end()


def test_an_audit_says_that_slots_were_restored_alone_after_the_end(
    cluster: LocalCluster,
    tmp_path: Path,
    plain_environment: dict[str, str],
    eventually: Eventually,
) -> None:
    masters = Masters(cluster.endpoints, tmp_path, plain_environment)
    spec = counting_spec(tmp_path, checkpoint=CheckpointSpec(every="pass"), audit=True)
    master = masters.start(spec)
    wait_for_master(cluster.endpoints, 1, eventually)
    worker = CountingWorker(cluster.endpoints)
    try:
        worker.start()
        worker.allow(1000)
        worker.join(LIMIT_S)
        assert worker.failure is None
        assert master.wait(LIMIT_S) == 0
        assert audit_job(JOB, cluster.endpoints, CLIENT).records_counted_once
        # A job that is done keeps nobody out; all its records are in this checkpoint.
        assert restore_slot(cluster).exit_code == 0
        audit = audit_job(JOB, cluster.endpoints, CLIENT)
        assert (audit.missing, audit.doubled) == (0, 0)
        assert not audit.records_counted_once
        assert "since the job's end: only 1 of the slots" in audit.inexact
    finally:
        worker.allow(1000)
        masters.end()
