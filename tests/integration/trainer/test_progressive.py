"""Progressive metrics of real jobs: each record that was trained counts once, whoever dies.

The exact figures are those of scikit-learn on what the model file wrote down: the labels and the
predictions of every loss that it computed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn import metrics

from backstay.errors import ConfigError
from backstay.job.model_definition import load
from backstay.job_spec import AlertSpec, DataSpec, JobSpec, ModeSpec, ProgressiveSpec
from backstay.pserver.local_cluster import LocalCluster
from backstay.trainer.worker.local_run import LocalProgress, LocalRun
from tests.integration.job_processes import JobProcesses
from tests.integration.tiny_jobs import write_clicks, write_model
from tests.waiting import wait_until

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")

RECORDS = 4000
BATCH = 50
TASK = 500

# Sends this process SIGKILL before its batch number AT_BATCH.
KILLED_AT_BATCH = """

import os
import signal
from backstay.job.callbacks import Callback


class KilledAtBatch(Callback):
    batches = 0

    def on_batch_begin(self, step):
        self.batches += 1
        if self.batches == int(os.environ.get("AT_BATCH", "0")):
            os.kill(os.getpid(), signal.SIGKILL)


def callbacks():
    return [KilledAtBatch()]
"""
# Writes down what each loss saw: one file for each process.
NOTED = """

import json
import os
from pathlib import Path

plain_loss = loss


def loss(labels, predictions):
    with (Path(__file__).parent / f"seen-{os.getpid()}.jsonl").open("a") as file:
        rows = [labels.reshape(-1).tolist(), predictions.detach().reshape(-1).tolist()]
        file.write(json.dumps(rows) + "\\n")
    return plain_loss(labels, predictions)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(servers=2, settings={"slot_count": 16}) as running:
        yield running


def job(folder: Path, name: str, framework: str, extra: str = "", **changes: Any) -> JobSpec:
    pytest.importorskip(framework)
    fields: dict[str, Any] = {
        "name": name,
        "model": str(write_model(folder, framework, extra)),
        "training": DataSpec(paths=(str(write_clicks(folder / "train.csv", RECORDS)),)),
        "batch_size": BATCH,
        "records_per_task": TASK,
        "task_lease_ttl_ms": 1000,
        # A second attempt of a task would be seen, too, and counts nothing.
        "straggler_factor": 1e6,
        "progressive": ProgressiveSpec(window_examples=1000, half_life_examples=0),
    }
    return JobSpec(**{**fields, **changes})


def seen(folder: Path) -> tuple[Any, Any]:
    """Labels and predictions that the losses saw."""
    labels: list[float] = []
    predictions: list[float] = []
    for path in folder.glob("seen-*.jsonl"):
        for line in path.read_text().splitlines():
            rows = json.loads(line)
            labels += rows[0]
            predictions += rows[1]
    return np.array(labels), np.array(predictions)


def assert_exact(figures: Any, folder: Path) -> None:
    labels, predictions = seen(folder)
    assert figures.examples == len(labels)
    assert figures.auc == pytest.approx(metrics.roc_auc_score(labels, predictions), abs=2e-4)
    exact = metrics.log_loss(labels, predictions.astype(np.float64))
    assert figures.logloss == pytest.approx(exact, rel=1e-5)
    assert figures.calibration == pytest.approx(predictions.mean() / labels.mean(), rel=1e-5)


@pytest.mark.parametrize("framework", ["paddle", "torch"])
def test_figures_of_several_workers_are_those_of_all_records(
    cluster: LocalCluster, tmp_path: Path, framework: str
) -> None:
    spec = job(tmp_path, f"predicted-{framework}", framework, NOTED)
    with JobProcesses(cluster, spec, tmp_path) as processes:
        for worker in ("w-0", "w-1", "w-2"):
            processes.start_worker(worker)
        status = processes.over()
        assert status.state == "done", status.reason
    told = status.progressive
    assert (told.examples, told.skipped) == (RECORDS, 0)
    assert_exact(told.decayed, tmp_path)
    assert sum(window.window.examples for window in told.windows) == RECORDS
    assert [window.number for window in told.windows] == [1, 2, 3, 4]


def test_a_killed_worker_makes_no_record_count_twice_or_never(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    by = ProgressiveSpec(window_examples=500, half_life_examples=0, by="ad", by_values_max=5)
    spec = job(
        tmp_path, "predicted-killed", "torch", KILLED_AT_BATCH, epochs=2, audit=True, progressive=by
    )
    with JobProcesses(cluster, spec, tmp_path) as processes:
        # In its second task, of which some batches are acknowledged by then.
        processes.start_worker("w-0", AT_BATCH="16")
        assert processes.code("w-0") == -9
        processes.start_worker("w-1", AT_BATCH="27")
        processes.start_worker("w-2")
        status = processes.over()
        assert status.state == "done", status.reason
    told = status.progressive
    assert told.examples == status.examples == 2 * RECORDS
    assert sum(figures.examples for figures in told.by.values()) == 2 * RECORDS
    assert len(told.by) == 6
    assert "other" in told.by
    # The model learns, and this is seen before it has trained on a record.
    assert told.windows[-1].window.auc > 0.7


@pytest.mark.parametrize(
    "mode",
    [
        ModeSpec(kind="sync"),
        ModeSpec(kind="bounded", staleness=2),
        pytest.param(ModeSpec(kind="geo", local_steps=3), marks=pytest.mark.slow),
    ],
    ids=lambda mode: mode.kind,
)
def test_every_mode_counts_each_record_once(
    cluster: LocalCluster, tmp_path: Path, mode: ModeSpec
) -> None:
    extra = KILLED_AT_BATCH
    if mode.kind == "geo":
        extra += "\n\ndef optimizer(parameters):\n    return torch.optim.SGD(parameters, lr=0.1)\n"
    # In sync w-3 must not have done all of it before w-0 has begun.
    epochs = 4 if mode.kind == "sync" else 1
    spec = job(tmp_path, f"predicted-{mode.kind}", "torch", extra, mode=mode, epochs=epochs)
    with JobProcesses(cluster, spec, tmp_path) as processes:
        if mode.kind == "sync":
            # All work at each step: a follower, or the leader, goes.
            processes.start_worker("w-3")
        processes.start_worker("w-0", AT_BATCH="15")
        assert processes.code("w-0") == -9
        processes.start_worker("w-1")
        processes.start_worker("w-2")
        status = processes.over()
        assert status.state == "done", status.reason
    assert status.progressive.examples == epochs * RECORDS


def test_an_alert_stops_the_job(cluster: LocalCluster, tmp_path: Path) -> None:
    # Everything is wrong with this model's calibration in its first windows.
    rules = (
        AlertSpec(metric="examples", above=10_000),
        AlertSpec(metric="auc", below=0.999, for_windows=2, action="stop"),
    )
    spec = job(tmp_path, "predicted-alert", "torch", epochs=50, alerts=rules)
    with JobProcesses(cluster, spec, tmp_path) as processes:
        processes.start_worker("w-0")
        status = processes.over()
        assert processes.code("w-0") == 0
    assert status.state == "stopped"
    assert status.reason.startswith("alert: auc below 0.999 for 2 windows (")
    assert len(status.progressive.windows) == 2
    assert status.progressive.windows[-1].alerts


def test_a_job_master_serves_its_figures(cluster: LocalCluster, tmp_path: Path) -> None:
    import re
    import urllib.request

    spec = job(tmp_path, "predicted-shown", "torch", epochs=50, prometheus="127.0.0.1:0")
    with JobProcesses(cluster, spec, tmp_path) as processes:
        processes.start_worker("w-0")
        processes.until(lambda status: status.progressive.examples > 0)
        found = re.search(r"metrics of the job at (\S+)", processes.log("master"))
        assert found is not None

        def scraped() -> str:
            with urllib.request.urlopen(found[1], timeout=30) as answer:
                text: str = answer.read().decode()
            return text

        wait_until(lambda: "backstay_job_prediction_auc{" in scraped())
        text = scraped()
        predicted = re.search(r"^backstay_job_predicted_total\S+ (\S+)$", text, re.MULTILINE)
        assert predicted is not None
        assert float(predicted[1]) >= TASK


@pytest.mark.parametrize("framework", ["paddle", "torch"])
def test_in_one_process(tmp_path: Path, framework: str) -> None:
    reports: list[LocalProgress] = []
    progressive = ProgressiveSpec(window_examples=1000, half_life_examples=0, by="ad")
    spec = job(tmp_path, "local", framework, NOTED, progressive=progressive)
    result = LocalRun(spec, load(spec.model), report=reports.append).run()
    told = result.record.progressive
    assert told["examples"] == RECORDS
    labels, predictions = seen(tmp_path)
    assert told["decayed"]["auc"] == pytest.approx(
        metrics.roc_auc_score(labels, predictions), abs=2e-4
    )
    assert len(told["by"]) == 17
    assert [window["number"] for window in told["windows"]] == [1, 2, 3, 4]


def test_an_alert_stops_one_process(tmp_path: Path) -> None:
    rule = AlertSpec(metric="auc", below=0.999, action="stop")
    spec = job(tmp_path, "local", "torch", epochs=50, alerts=(rule,))
    result = LocalRun(spec, load(spec.model)).run()
    assert result.stopped
    assert result.reason.startswith("alert: auc below 0.999 for 1 window (")


def test_a_model_that_answers_more_than_a_number_is_refused(tmp_path: Path) -> None:
    extra = (
        "\n\nplain_model = custom_model\n\n\nclass Two(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.one = plain_model()\n"
        "    def forward(self, users, ads):\n"
        "        one = self.one(users, ads)\n        return torch.stack([one, one], dim=1)\n\n\n"
        "def custom_model():\n    return Two()\n\n\n"
        "def loss(labels, predictions):\n    return (predictions[:, 0] - labels).square().mean()\n"
    )
    spec = job(tmp_path, "two", "torch", extra)
    with pytest.raises(ConfigError, match="one number for each record is needed"):
        LocalRun(spec, load(spec.model)).run()
