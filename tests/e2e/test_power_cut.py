"""Everything dies at once under load: store, pservers, the job master and its workers.

Then the same commands again. With a checkpoint the job goes on from it; without one the cluster
and the job say what is lost, and a job that begins from nothing does so.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from backstay.pserver.ctl.cli import main as pserverctl
from backstay.pserver.local_cluster import LocalCluster
from tests.e2e.test_train_command import (
    BACKSTAY,
    JOB,
    MODEL,
    RECORDS,
    close,
    open_gate,
    shown,
    started,
)
from tests.etcd import EtcdCluster
from tests.waiting import wait_until

pytest.importorskip("torch")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PASSES = 5
# Most of it is the start of workers, which load a framework, on a machine that does much else.
RUN_LIMIT_S = 180.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    rows = "".join(f"{number}\n" for number in range(RECORDS))
    (tmp_path / "train.csv").write_text("n\n" + rows)
    (tmp_path / "job.yaml").write_text(JOB.replace("epochs: 2", f"epochs: {PASSES}"))
    return tmp_path


@pytest.fixture(params=["etcd", "embedded"])
def etcd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EtcdCluster | None]:
    if request.param == "embedded":
        yield None
        return
    with EtcdCluster(tmp_path) as running:
        yield running


def settings(etcd: EtcdCluster | None, **more: Any) -> dict[str, Any]:
    store = {"store": "etcd", "store_endpoints": list(etcd.endpoints)} if etcd else {}
    return {"slot_count": 64, "lease_ttl_ms": 2000, "return_grace_ms": 500, **store, **more}


@contextmanager
def in_a_group(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """Run a command whose processes can all be killed at once."""
    with (folder / "stderr").open("a") as log:
        process = subprocess.Popen(
            [*BACKSTAY, *words],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        with process:
            try:
                yield process
            finally:
                process.kill()


def run(folder: Path, *words: str) -> dict[str, Any]:
    """Run a command to its end and return what it says."""
    with started(folder, *words) as process:
        output, _ = process.communicate(timeout=RUN_LIMIT_S)
    assert output, (folder / "stderr").read_text()
    result: dict[str, Any] = json.loads(output)
    return result


def cut_power(
    cluster: LocalCluster, etcd: EtcdCluster | None, command: subprocess.Popen[str]
) -> None:
    """Kill it all, and start servers and store again."""
    os.killpg(command.pid, signal.SIGKILL)
    for server in cluster.servers:
        server.process.send_signal(signal.SIGKILL)
    if etcd is not None:
        etcd.kill()
    command.wait()
    for index in range(len(cluster.servers)):
        cluster.kill(index)
    if etcd is not None:
        etcd.start()
    cluster.restart(*range(len(cluster.servers)))


def status(cluster: LocalCluster) -> dict[str, Any]:
    said = CliRunner().invoke(
        pserverctl, ["--endpoint", ",".join(cluster.endpoints), "status", "--json"]
    )
    report: dict[str, Any] = json.loads(said.output)
    return report


def train_to_the_middle(folder: Path, endpoint: str) -> dict[str, Any]:
    """Let the first pass be judged, and return what is shown when workers work on the second."""
    close(folder, "training")
    open_gate(folder, "evaluation")

    def is_there() -> dict[str, Any]:
        seen = shown(folder, endpoint)
        is_judged = len(seen.get("evaluations", [])) == 1
        return seen if is_judged and seen.get("tasks", {}).get("doing") == "2" else {}

    seen: dict[str, Any] = wait_until(is_there)
    return seen


def test_a_power_cut_with_a_checkpoint_takes_everything_back_to_it(
    folder: Path, etcd: EtcdCluster | None
) -> None:
    more = {"checkpoint_url": str(folder / "checkpoints"), "restore": "latest"}
    with LocalCluster(2, settings=settings(etcd, **more)) as cluster:
        endpoint = ",".join(cluster.endpoints)
        command = ("train", "job.yaml", "--endpoint", endpoint, "--json")
        close(folder, "evaluation")
        with in_a_group(folder, *command) as process:
            wait_until(lambda: shown(folder, endpoint).get("checkpoint"))
            before = train_to_the_middle(folder, endpoint)
            cut_power(cluster, etcd, process)
        open_gate(folder, "training")
        result = run(folder, *command)
        loss = status(cluster)["loss"]
    assert (loss["state"], loss["slots"]) == ("restored", 64)
    assert (result["state"], result["exit_code"]) == ("done", 0), result
    assert result["records_counted_once"]
    assert (result["audit"]["records"], result["audit"]["passes"]) == (RECORDS, PASSES)
    scores = {one["round"]: one["metrics"]["auc"] for one in result["evaluations"]}
    assert sorted(scores) == list(range(1, PASSES + 1))
    # The model goes on where it was: judged again after the first pass, it is the same.
    (last,) = before["evaluations"]
    assert scores[1] == pytest.approx(float(last["metrics"]["auc"]), abs=1e-12)
    assert scores[PASSES] > 0.9


def test_a_power_cut_without_a_checkpoint_is_said_and_a_job_may_begin_anew(
    folder: Path, etcd: EtcdCluster | None
) -> None:
    with LocalCluster(2, settings=settings(etcd)) as cluster:
        endpoint = ",".join(cluster.endpoints)
        command = ("train", "job.yaml", "--endpoint", endpoint, "--json")
        close(folder, "evaluation")
        with in_a_group(folder, *command) as process:
            wait_until(lambda: shown(folder, endpoint).get("kind") == "TASK_KIND_EVALUATION")
            train_to_the_middle(folder, endpoint)
            cut_power(cluster, etcd, process)
        open_gate(folder, "training")
        wait_until(lambda: status(cluster)["slots_lost"] == 64)
        failed = run(folder, *command)
        assert failed["state"] == "failed"
        assert failed["exit_code"] != 0
        assert "slots lost all their copies" in failed["reason"]
        assert "pserverctl slots accept-loss" in failed["reason"]
        assert status(cluster)["slots_lost"] == 64
        result = run(folder, *command, "--fresh")
        assert "64 slots had lost all copies" in (folder / "stderr").read_text()
        wait_until(lambda: status(cluster)["healthy"])
    assert (result["state"], result["exit_code"]) == ("done", 0), result
    assert result["records_counted_once"]
    assert [one["round"] for one in result["evaluations"]] == list(range(1, PASSES + 1))
