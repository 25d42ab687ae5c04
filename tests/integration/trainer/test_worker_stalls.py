"""Workers that hang or stand still while others wait for them: real processes, each record once.

A callback of the model file has a worker hang, its signs of life going on, or sends it SIGSTOP.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from backstay._proto.v1 import job_pb2
from backstay.job_spec import DataSpec, JobSpec, ModeSpec
from backstay.pserver.local_cluster import LocalCluster
from backstay.runner.audit import audit_job
from tests.integration.job_processes import JobProcesses
from tests.integration.tiny_jobs import write_clicks, write_model

pytestmark = pytest.mark.chaos

RECORDS = 3000
BATCH = 50
PAUSE_S = 10.0

# Has this process hang, or stand still, before its batch number AT_BATCH.
TROUBLE = """

import os
import signal
import threading
import time
from backstay.job.callbacks import Callback

torch.manual_seed(1)


class Trouble(Callback):
    batches = 0

    def on_batch_begin(self, step):
        self.batches += 1
        if self.batches == 1:
            open(os.environ["HAS_BEGUN"], "w").close()
        # Until all workers are there.
        while self.batches == 1 and not os.path.exists(os.environ["GATE"]):
            time.sleep(0.05)
        # A slow model, where it must last longer than somebody stands still.
        time.sleep(float(os.environ.get("STEP_S", "0")))
        if self.batches == int(os.environ.get("AT_BATCH", "0")):
            if os.environ["TROUBLE"] == "hang":
                threading.Event().wait()
            os.kill(os.getpid(), signal.SIGSTOP)


def callbacks():
    return [Trouble()]
"""


def spec_of(folder: Path, mode: ModeSpec, step_limit_s: float) -> JobSpec:
    """Return a job; in sync mode of one task, so that the first leader leads to the end."""
    return JobSpec(
        name="stalls",
        model=str(write_model(folder, "torch", TROUBLE)),
        training=DataSpec(paths=(str(write_clicks(folder / "train.csv", RECORDS)),)),
        validation=DataSpec(paths=(str(write_clicks(folder / "test.csv", 1000, seed=2)),)),
        batch_size=BATCH,
        records_per_task=RECORDS if mode.kind == "sync" else 500,
        # Shorter than PAUSE_S. On a busy machine a shorter lease expires, and another one leads.
        task_lease_ttl_ms=4000,
        step_limit_s=step_limit_s,
        audit=True,
        mode=mode,
    )


def train(
    folder: Path, mode: ModeSpec, *workers: dict[str, str], step_limit_s: float = 30.0
) -> tuple[float, str]:
    """Run a job, the first worker of which leads; return its model's logloss, and all logs.

    The others come when the first one is in its first batch. One that has not begun is not waited
    for: they could finish the job before it does.
    """
    folder.mkdir()
    spec = spec_of(folder, mode, step_limit_s)
    names = [f"w-{number}" for number in range(len(workers))]
    gate = folder / "all-are-there"
    with (
        LocalCluster(servers=1, settings={"slot_count": 16}) as cluster,
        JobProcesses(cluster, spec, folder) as processes,
    ):
        for name, variables in zip(names, workers, strict=True):
            begun = folder / f"{name}-has-begun"
            processes.start_worker(name, GATE=str(gate), HAS_BEGUN=str(begun), **variables)
            if name == names[0]:
                processes.until(lambda _, begun=begun: begun.exists())  # type: ignore[misc]
        processes.until(lambda status: len(status.workers) == len(workers))
        gate.touch()
        stopped = [name for name, one in zip(names, workers, strict=True) if is_to_stop(one)]
        for name in stopped:
            pid = pids(processes.client.status())[name]
            processes.until(lambda _, pid=pid: is_stopped(pid))  # type: ignore[misc]
            threading.Event().wait(PAUSE_S)
            assert processes.client.status().state == "running"
            os.kill(pid, signal.SIGCONT)
        status = processes.over()
        assert status.state == "done", status.reason
        assert status.steps == RECORDS // BATCH
        for name in stopped:
            assert processes.code(name) == 0, "it came back, and left in good order"
        told = audit_job(spec.name, cluster.endpoints, cluster.client_config())
        logs = "".join(processes.log(name) for name in ("master", *names))
    assert told.records_counted_once, told
    return status.evaluations[-1].metrics["logloss"], logs


def pids(status: job_pb2.JobStatus) -> dict[str, int]:
    return {worker.id: worker.pid for worker in status.workers}


def is_to_stop(variables: dict[str, str]) -> bool:
    return variables.get("TROUBLE") == "stop"


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0] == "T"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The logloss of the model that one worker trains."""
    return train(tmp_path_factory.mktemp("one") / "alone", ModeSpec(kind="sync"), {})[0]


HANG = {"TROUBLE": "hang", "AT_BATCH": "5"}
STOP = {"TROUBLE": "stop", "AT_BATCH": "5", "STEP_S": "0.25"}
SLOW = {"STEP_S": "0.25"}


def test_a_leader_that_hangs_is_followed_by_another(alone: float, tmp_path: Path) -> None:
    logloss, logs = train(tmp_path / "job", ModeSpec(kind="sync"), HANG, {}, {}, step_limit_s=5.0)
    assert logloss == pytest.approx(alone, abs=1e-6)
    assert "w-0 completed no step for" in logs


def test_a_follower_that_hangs_loses_its_place(alone: float, tmp_path: Path) -> None:
    logloss, logs = train(tmp_path / "job", ModeSpec(kind="sync"), SLOW, HANG, {})
    assert logloss == pytest.approx(alone, abs=1e-6)
    assert "worker w-1 has not delivered its piece" in logs


@pytest.mark.slow
@pytest.mark.parametrize(
    "workers", [(SLOW, STOP, SLOW), (STOP, SLOW, SLOW)], ids=["follower", "leader"]
)
def test_a_worker_that_stands_still_and_comes_back(
    alone: float, tmp_path: Path, workers: tuple[dict[str, str], ...]
) -> None:
    logloss, _ = train(tmp_path / "job", ModeSpec(kind="sync"), *workers)
    assert logloss == pytest.approx(alone, abs=1e-6)


def test_in_bounded_mode_a_worker_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    _, logs = train(
        tmp_path / "job", ModeSpec(kind="bounded", staleness=2), HANG, {}, {}, step_limit_s=5.0
    )
    assert "w-0 completes no step: the others no longer wait for it" in logs
