"""Callbacks of a model file hear the same on a cluster's only worker as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backstay.job.model_definition import load
from backstay.job_spec import DataSpec, JobSpec
from backstay.pserver.local_cluster import LocalCluster
from backstay.trainer.worker.local_run import LocalRun
from tests.integration.job_processes import JobProcesses
from tests.integration.tiny_jobs import write_clicks, write_model

# PyTorch says so of its own sparse gradients.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")

RECORDER = """

from backstay.job.callbacks import Callback


class Recorder(Callback):
    def __init__(self, path):
        self.path = path

    def write(self, *words):
        with open(self.path, "a") as file:
            print(*words, file=file)

    def on_task_end(self, report):
        self.write("task", report.pass_number, report.task, report.examples)

    def on_pass_end(self, pass_number):
        self.write("pass", pass_number)

    def on_evaluation(self, metrics):
        self.write("evaluation", *sorted(metrics))

    def on_train_end(self, end):
        self.write("end", end.passes)


def callbacks(path):
    return [Recorder(path)]
"""


def job(folder: Path, heard: Path, **changes: Any) -> JobSpec:
    """Return a job of two passes whose callbacks write to a file."""
    fields: dict[str, Any] = {
        "name": "heard",
        "model": str(write_model(folder, "torch", RECORDER)),
        "callback_params": {"path": str(heard)},
        "training": DataSpec(paths=(str(write_clicks(folder / "train.csv", 1000)),)),
        "validation": DataSpec(paths=(str(write_clicks(folder / "test.csv", 300, seed=2)),)),
        "epochs": 2,
        "batch_size": 50,
        "records_per_task": 250,
    }
    return JobSpec(**{**fields, **changes})


@pytest.mark.slow
def test_they_hear_the_same_with_workers_as_without(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    here, there = tmp_path / "here.txt", tmp_path / "there.txt"
    alone = job(tmp_path, here)
    definition = load(alone.model, callback_params=alone.callback_params)
    LocalRun(alone, definition).run()
    spec = job(tmp_path, there)
    with (
        LocalCluster(servers=1, settings={"slot_count": 16}) as cluster,
        JobProcesses(cluster, spec, tmp_path) as processes,
    ):
        processes.start_worker("w-0")
        status = processes.over()
        assert status.state == "done", status.reason
        assert processes.code("w-0") == 0
    heard = here.read_text().splitlines()
    assert heard.count("evaluation auc logloss positives") == 2
    assert heard[4:6] == ["evaluation auc logloss positives", "pass 1"]
    assert heard[-3:] == ["evaluation auc logloss positives", "pass 2", "end 2"]
    assert there.read_text().splitlines() == heard
