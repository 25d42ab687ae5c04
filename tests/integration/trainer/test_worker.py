"""Workers against real servers and a real master: whatever they do, each record counts once.

The workers that die do so in the middle of a task, by SIGKILL, at a batch that the test chooses:
a callback of the model file does it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backstay.exit_codes import ExitCode
from backstay.job_spec import DataSpec, JobSpec, ModeSpec
from backstay.pserver.client.inspection import ClusterInspection
from backstay.pserver.local_cluster import LocalCluster
from backstay.runner.audit import audit_job
from backstay.trainer.worker.audit import RecordsAudit
from tests.integration.job_processes import JobProcesses
from tests.integration.tiny_jobs import write_clicks, write_model

RECORDS = 4000
BATCH = 50
TASK = 500

# Sends this process a signal before its batch number AT_BATCH.
SIGNAL_AT_BATCH = """

import os
import signal
from backstay.job.callbacks import Callback


class SignalAtBatch(Callback):
    batches = 0

    def on_batch_begin(self, step):
        self.batches += 1
        if self.batches == int(os.environ.get("AT_BATCH", "0")):
            os.kill(os.getpid(), getattr(signal, os.environ["SIGNAL"]))


def callbacks():
    return [SignalAtBatch()]
"""


# Fails where the pushes of a batch do not count from the steps of all workers.
STEPS_OF_ALL = """

from backstay.trainer.adapter.session import connection


class StepsOfAll(SignalAtBatch):
    def on_batch_begin(self, step):
        assert connection(None)[0].push_steps.done == step, step
        super().on_batch_begin(step)


def callbacks():
    return [StepsOfAll()]
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(servers=2, settings={"slot_count": 16}) as running:
        yield running


def job(folder: Path, name: str, framework: str, extra: str, **changes: Any) -> JobSpec:
    """Return an audited job of two passes over the clicks."""
    pytest.importorskip(framework)
    training = DataSpec(paths=(str(write_clicks(folder / "train.csv", RECORDS)),))
    validation = DataSpec(paths=(str(write_clicks(folder / "test.csv", 1000, seed=2)),))
    fields: dict[str, Any] = {
        "name": name,
        "model": str(write_model(folder, framework, extra)),
        "training": training,
        "validation": validation,
        "epochs": 2,
        "batch_size": BATCH,
        "records_per_task": TASK,
        "task_lease_ttl_ms": 1000,
        "audit": True,
        "mode": ModeSpec(steps_in_flight=4),
    }
    return JobSpec(**{**fields, **changes})


def audit(cluster: LocalCluster, spec: JobSpec) -> RecordsAudit:
    """Count the records of a job that is over."""
    return audit_job(spec.name, cluster.endpoints, cluster.client_config())


@pytest.mark.parametrize("framework", ["paddle", pytest.param("torch", marks=pytest.mark.slow)])
def test_a_worker_killed_in_a_task(cluster: LocalCluster, tmp_path: Path, framework: str) -> None:
    spec = job(tmp_path, f"killed-{framework}", framework, SIGNAL_AT_BATCH)
    with JobProcesses(cluster, spec, tmp_path) as processes:
        # The fifth batch of its second task.
        processes.start_worker("w-0", SIGNAL="SIGKILL", AT_BATCH="15")
        assert processes.code("w-0") == -9
        processes.start_worker("w-1")
        processes.start_worker("w-2")
        status = processes.over()
        assert status.state == "done", status.reason
        assert processes.code("w-1") == processes.code("w-2") == 0
    told = audit(cluster, spec)
    assert told.records_counted_once, told
    assert told.right == RECORDS
    # The audit's figure: attempts that were cut short count with the rest.
    assert status.examples == 2 * RECORDS
    assert len(status.evaluations) == 2
    assert status.evaluations[-1].metrics["auc"] > 0.7
    assert set(status.evaluations[-1].metrics) == {"auc", "logloss", "positives"}


def test_sigterm_gives_the_task_back(cluster: LocalCluster, tmp_path: Path) -> None:
    extra = SIGNAL_AT_BATCH + STEPS_OF_ALL
    spec = job(tmp_path, "told-to-end", "torch", extra, epochs=1, task_lease_ttl_ms=60_000)
    with JobProcesses(cluster, spec, tmp_path) as processes:
        processes.start_worker("w-0", SIGNAL="SIGTERM", AT_BATCH="14")
        assert processes.code("w-0") == 0
        assert "it was told to end (SIGTERM)" in processes.log("w-0")
        # With a lease of a minute the job would be late if the task were not given back.
        processes.start_worker("w-1")
        status = processes.over()
        assert status.state == "done", status.reason
        # What was acknowledged is not done again: the other worker has the rest.
        assert status.steps == RECORDS // BATCH
        assert status.examples == RECORDS
    told = audit(cluster, spec)
    assert told.records_counted_once, told


BAD_FEED = """

plain_feed = feed


def feed(records, mode, metadata):
    if mode == "training" and 777 in records.column("user").astype(int):
        raise ValueError("user 777 is not welcome")
    return plain_feed(records, mode, metadata)
"""


def test_a_feed_that_fails_dead_letters_its_task(cluster: LocalCluster, tmp_path: Path) -> None:
    spec = job(tmp_path, "bad-feed", "torch", BAD_FEED, epochs=1, max_task_retries=1)
    path = Path(spec.training.paths[0] if spec.training else "")
    lines = path.read_text().splitlines()
    # Only one task has that user: the record 1234.
    lines = [line.replace("777,", "778,", 1) if line.startswith("777,") else line for line in lines]
    lines[1 + 1234] = "777,1,1"
    path.write_text("\n".join(lines) + "\n")
    with JobProcesses(cluster, spec, tmp_path) as processes:
        processes.start_worker("w-0")
        status = processes.over()
        dead_letters = processes.client.dead_letters()
        assert processes.code("w-0") == 0
    assert [task.number for task in dead_letters] == [1234 // TASK]
    assert "user 777 is not welcome" in dead_letters[0].error
    assert "plain_feed" not in dead_letters[0].error.splitlines()[-1]
    assert 1234 - 1000 in dead_letters[0].records
    assert status.dead_letters == 1
    told = audit(cluster, spec)
    # The batches of the failing task before the bad one count, the others not, none twice.
    assert told.records_counted_once, told
    assert (told.unfinished, told.passes) == (TASK, 1)


def test_a_pass_that_is_cut_short_is_judged_too(cluster: LocalCluster, tmp_path: Path) -> None:
    # In the middle of the second pass, with tasks under way.
    steps = RECORDS // BATCH + 3 * TASK // BATCH + 1
    spec = job(tmp_path, "cut-short", "torch", "", max_steps=steps)
    with JobProcesses(cluster, spec, tmp_path) as processes:
        processes.start_worker("w-0")
        processes.start_worker("w-1")
        status = processes.over()
        assert status.state == "done", status.reason
        assert processes.code("w-0") == processes.code("w-1") == 0
    told = audit(cluster, spec)
    assert told.records_counted_once, told
    assert told.passes == 1
    # The tasks that are recorded as done of the second pass are judged exactly; up to two of each
    # worker may be ending when the last step is counted.
    assert 0 < told.unfinished < RECORDS


def test_a_model_that_does_not_fit_the_tables_is_a_wrong_setting(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    spec = job(tmp_path, "refitted", "torch", "", epochs=1)
    with JobProcesses(cluster, spec, tmp_path) as processes:
        processes.start_worker("w-0")
        assert processes.over().state == "done"
    # The same file, with rows of another width.
    path = Path(spec.model)
    path.write_text(path.read_text().replace("custom_model(dim=4)", "custom_model(dim=8)"))
    with JobProcesses(cluster, replace(spec, epochs=2), tmp_path) as processes:
        # What is told before its job master is open is how it was.
        processes.until(lambda status: status.state == "running")
        last_words = tmp_path / "termination-log"
        processes.start_worker("w-1", BACKSTAY_LAST_WORDS=str(last_words))
        assert processes.code("w-1") == ExitCode.WRONG_SETTING
        for told in (processes.log("w-1"), last_words.read_text()):
            assert "dim: 4 there, 8 asked for" in told
            assert "give the model the old settings, or the job another name" in told
        # A file that fails is told with its traceback, as in a Pod of Kubernetes.
        path.write_text(path.read_text() + "\nraise ValueError('a fault of the user')\n")
        processes.start_worker("w-2", BACKSTAY_LAST_WORDS=str(last_words))
        assert processes.code("w-2") == ExitCode.WRONG_SETTING
        told = last_words.read_text()
        assert "Traceback (most recent call last):" in told
        assert ", in <module>" in told
        assert told.rstrip().endswith("ValueError: a fault of the user")


@pytest.mark.slow
def test_predictions_of_two_workers(cluster: LocalCluster, tmp_path: Path) -> None:
    spec = job(tmp_path, "predicted", "torch", "", epochs=1)
    with JobProcesses(cluster, spec, tmp_path) as processes:
        processes.start_worker("w-0")
        assert processes.over().state == "done"
    prediction = DataSpec(paths=(str(tmp_path / "test.csv"),))
    out = tmp_path / "out"
    spec = job(
        tmp_path, "predicting", "torch", "", training=None, validation=None, audit=False,
        prediction=prediction, output=str(out), records_per_task=100,
    )  # fmt: skip
    with JobProcesses(cluster, spec, tmp_path) as processes:
        processes.start_worker("w-0")
        processes.start_worker("w-1")
        assert processes.over().state == "done"
    assert len(list(out.glob("part-*.csv"))) == 10
    assert sorted(path.suffix for path in out.iterdir()) == [".csv"] * 10


SGD = """


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.5)
"""


@pytest.mark.parametrize(
    "mode",
    [
        ModeSpec(kind="bounded", staleness=2),
        pytest.param(ModeSpec(kind="geo", local_steps=3), marks=pytest.mark.slow),
    ],
    ids=lambda mode: mode.kind,
)
def test_other_modes_count_once_too(cluster: LocalCluster, tmp_path: Path, mode: ModeSpec) -> None:
    spec = job(tmp_path, f"mode-{mode.kind}", "torch", SGD + SIGNAL_AT_BATCH, mode=mode)
    with JobProcesses(cluster, spec, tmp_path) as processes:
        # In geo mode: one batch after an exchange, with a step that was not sent.
        processes.start_worker("w-0", SIGNAL="SIGKILL", AT_BATCH="15")
        assert processes.code("w-0") == -9
        processes.start_worker("w-1")
        processes.start_worker("w-2", SIGNAL="SIGTERM", AT_BATCH="8")
        assert processes.code("w-2") == 0
        status = processes.over()
        assert status.state == "done", status.reason
    told = audit(cluster, spec)
    assert told.records_counted_once, told


def test_a_job_divides_the_learning_rate_of_its_stale_pushes(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    mode = ModeSpec(kind="async", compensation="scale", steps_in_flight=4)
    spec = job(tmp_path, "scaled", "torch", SIGNAL_AT_BATCH, mode=mode)
    with JobProcesses(cluster, spec, tmp_path) as processes:
        processes.start_worker("w-0")
        processes.start_worker("w-1", SIGNAL="SIGKILL", AT_BATCH="15")
        assert processes.code("w-1") == -9
        processes.start_worker("w-2")
        status = processes.over()
        assert status.state == "done", status.reason
    assert status.evaluations[-1].metrics["auc"] > 0.7
    told = audit(cluster, spec)
    assert told.records_counted_once, told
    with ClusterInspection(cluster.endpoints, cluster.client_config()) as inspection:
        found = inspection.tables()["tables"]
    # The model's, not the one that counts records.
    trained = [one for one in found if re.match("scaled/(?!__)", one["name"])]
    assert len(trained) >= 2
    assert {one["spec"]["compensation"] for one in trained} == {"scale"}
    # With four steps of its own in flight even one worker's pushes are stale.
    assert all(one["staleness_sum"] > 0 for one in trained)


SEEDED = """

torch.manual_seed(1)
"""


@pytest.mark.slow
def test_in_sync_mode_a_step_of_two_workers_is_one_big_batch(tmp_path: Path) -> None:
    """With Adagrad, one update a step alone can give the numbers of one worker."""
    results = {}
    for name in ("alone", "together", "broken"):
        folder = tmp_path / name
        folder.mkdir()
        mode = ModeSpec(kind="sync")
        # The same name on a cluster of its own: first values go by the tables' names.
        spec = job(folder, "sync", "torch", SEEDED + SIGNAL_AT_BATCH, epochs=1, mode=mode)
        with (
            LocalCluster(servers=1, settings={"slot_count": 16}) as cluster,
            JobProcesses(cluster, spec, folder) as processes,
        ):
            if name == "broken":
                # It leads: it has the task before the others are there.
                processes.start_worker("w-2", SIGNAL="SIGKILL", AT_BATCH="10")
                processes.until(lambda status: any(one.tasks for one in status.workers))
            processes.start_worker("w-0")
            if name != "alone":
                processes.start_worker("w-1")
            if name == "broken":
                assert processes.code("w-2") == -9
            status = processes.over()
            assert status.state == "done", status.reason
            assert status.steps == RECORDS // BATCH
            told = audit(cluster, spec)
        assert told.records_counted_once, told
        results[name] = status.evaluations[-1].metrics
    # Sums of float32 in another order.
    assert results["together"]["logloss"] == pytest.approx(results["alone"]["logloss"], abs=1e-6)
    # It is killed before a batch: nothing of a step is half pushed.
    assert results["broken"]["logloss"] == pytest.approx(results["alone"]["logloss"], abs=1e-6)
