"""A job's model file in one process: trained, evaluated and used, in both frameworks."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backstay.errors import ConfigError, DataUnavailable, NonFiniteLoss, TooManyBadRecords
from backstay.job.model_definition import load
from backstay.job_spec import DataSpec, EarlyStop, JobSpec
from backstay.pserver.local_cluster import LocalCluster
from backstay.schedule.orders import task_order, task_order_seed
from backstay.schedule.rounds import RoundId, RoundKind
from backstay.trainer.adapter.session import Session, init
from backstay.trainer.worker.local_run import LocalProgress, LocalRun
from tests.integration.tiny_jobs import write_clicks, write_model

# PyTorch says so of its own sparse gradients.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")

RECORDS = 6000
BATCH = 100


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clicks")
    write_clicks(folder / "train.csv", RECORDS)
    write_clicks(folder / "test.csv", 1000, seed=2)
    return folder


@pytest.fixture(params=["paddle", "torch"])
def framework(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(request.param)
    return str(request.param)


def job(model: Path, data: Path, **changes: Any) -> JobSpec:
    """Return a job of two passes over the clicks."""
    fields: dict[str, Any] = {
        "name": "clicks",
        "model": str(model),
        "training": DataSpec(paths=(str(data / "train.csv"),)),
        "validation": DataSpec(paths=(str(data / "test.csv"),)),
        "epochs": 2,
        "batch_size": BATCH,
        "records_per_task": 1000,
    }
    return JobSpec(**{**fields, **changes})


def run(spec: JobSpec, **more: Any) -> Any:
    """Run a job in this process."""
    definition = load(spec.model, model_params=spec.model_params)
    return LocalRun(spec, definition, **more).run()


def test_trains_and_evaluates(framework: str, data: Path, tmp_path: Path) -> None:
    seen: list[LocalProgress] = []
    spec = job(write_model(tmp_path, framework), data, output=str(tmp_path / "out"))
    result = run(spec, report=seen.append)
    assert (result.examples, result.steps) == (2 * RECORDS, 2 * RECORDS // BATCH)
    assert (result.passes, result.reason) == (2, "")
    first, second = (metrics["auc"] for metrics in result.evaluations)
    assert second > first > 0.7
    assert seen[-1].metrics == result.evaluations[-1]
    with (data / "test.csv").open() as file:
        clicks = np.array([row["click"] for row in csv.DictReader(file)], np.float64)
    assert result.evaluations[0]["positives"] == pytest.approx(clicks.mean(), abs=1e-6)
    assert [path.suffix for path in (tmp_path / "out").iterdir()] in ([".pdparams"], [".pt"])


def test_a_model_that_does_not_get_into_its_output_is_kept(
    framework: str, data: Path, tmp_path: Path
) -> None:
    output, logs = tmp_path / "out", tmp_path / "logs"
    # As a full disk would do; it is found when the model is trained.
    output.touch()
    spec = job(write_model(tmp_path, framework), data, output=str(output), log_dir=str(logs))
    with pytest.raises(DataUnavailable, match=f"output: {output} .* The model is in {logs}"):
        run(replace(spec, epochs=1))
    (kept,) = (logs / "model-not-in-output").iterdir()
    assert kept.stat().st_size > 0


def test_the_same_seed_gives_the_same_model(framework: str, data: Path, tmp_path: Path) -> None:
    model = write_model(tmp_path, framework)
    one, same, other = (run(job(model, data, epochs=1, seed=seed)) for seed in (1, 1, 2))
    assert one.evaluations == same.evaluations
    assert one.evaluations != other.evaluations


def test_layers_of_backstay_get_a_server_only_when_there_are_any(
    framework: str, data: Path, tmp_path: Path
) -> None:
    opened: list[Session] = []
    with LocalCluster(servers=1) as cluster:

        def factory() -> Session:
            opened.append(init(cluster.endpoints, trainer_id=0, trainers_num=1, job="clicks"))
            return opened[-1]

        plain = write_model(tmp_path, framework)
        run(job(plain, data, epochs=1), session_factory=factory)
        assert opened == []
        text = plain.read_text(encoding="utf-8")
        text = text.replace("nn.Embedding(1000, dim, sparse=True)", "Embedding(1000, dim)")
        own = tmp_path / f"own_{framework}.py"
        own.write_text(f"from backstay.trainer.{framework} import Embedding\n{text}")
        result = run(job(own, data), session_factory=factory)
        assert result.evaluations[-1]["auc"] > 0.7
        assert len(opened) == 1
        # It is closed at the end, and another one can be opened.
        init(cluster.endpoints, trainer_id=0, trainers_num=1).close()
        with pytest.raises(ConfigError, match="init"):
            run(job(own, data))


def test_predictions_go_to_one_file_for_each_task(
    framework: str, data: Path, tmp_path: Path
) -> None:
    model, out = write_model(tmp_path, framework), tmp_path / "predictions"
    prediction = DataSpec(paths=(str(data / "test.csv"),))
    spec = job(model, data, training=None, validation=None, prediction=prediction, output=str(out))
    for _ in range(2):  # twice: the same files
        assert run(spec).predictions == 1000
    assert [path.name for path in sorted(out.iterdir())] == ["part-000000.csv"]
    with (out / "part-000000.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["record"]) for row in rows] == list(range(1000))
    assert all(0 < float(row["prediction"]) < 1 for row in rows)


PROCESSOR = """

SEEN = []


class PredictionOutputsProcessor:
    def process(self, predictions, worker_id):
        SEEN.append((len(predictions), worker_id))
"""


def test_predictions_go_to_the_users_processor(data: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    model = write_model(tmp_path, "torch", PROCESSOR)
    prediction = DataSpec(paths=(str(data / "test.csv"),))
    spec = job(model, data, training=None, validation=None, prediction=prediction)
    definition = load(model)
    LocalRun(spec, definition).run()
    assert definition.module.SEEN == [(BATCH, "local")] * 10


def test_predictions_need_a_place(data: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    prediction = DataSpec(paths=(str(data / "test.csv"),))
    model = write_model(tmp_path, "torch")
    with pytest.raises(ConfigError, match="nowhere to go"):
        run(job(model, data, training=None, validation=None, prediction=prediction))


CALLBACKS = """

from backstay.job.callbacks import Callback, LearningRateScheduler

CALLS = []
RATES = []


class Recorder(Callback):
    def on_task_end(self, report):
        CALLS.append(("task", report.pass_number, report.examples))

    def on_pass_end(self, pass_number):
        CALLS.append(("pass", pass_number))

    def on_evaluation(self, metrics):
        CALLS.append(("evaluation", sorted(metrics)))

    def on_train_end(self, end):
        CALLS.append(("end", end.passes, type(end.model).__name__))


def rate(step):
    RATES.append(step)
    return 0.0


def callbacks():
    return [Recorder(), LearningRateScheduler(rate)]
"""


def test_callbacks(framework: str, data: Path, tmp_path: Path) -> None:
    spec = job(write_model(tmp_path, framework, CALLBACKS), data, records_per_task=3000)
    definition = load(spec.model)
    result = LocalRun(spec, definition).run()
    evaluation = ("evaluation", ["auc", "logloss", "positives"])
    assert [
        ("task", 1, 3000), ("task", 1, 3000), evaluation,
        ("pass", 1), ("task", 2, 3000), ("task", 2, 3000), evaluation,
        ("pass", 2), ("end", 2, "Clicks"),
    ] == definition.module.CALLS  # fmt: skip
    assert list(range(result.steps)) == definition.module.RATES
    # At a rate of zero nothing is learned: the scheduler reached the optimizer.
    assert result.evaluations[0] == result.evaluations[1]


def test_a_stop_during_an_evaluation_begins_no_further_task(data: Path, tmp_path: Path) -> None:
    spec = job(write_model(tmp_path, "torch", CALLBACKS), data, epochs=1)
    definition = load(spec.model)
    local = LocalRun(spec, definition)
    definition.module.Recorder.on_evaluation = lambda _self, _metrics: local.stop()
    result = local.run()
    assert result.stopped
    assert "end" not in [call[0] for call in definition.module.CALLS]


TASKS_SEEN = """

from backstay.job.callbacks import Callback

TASKS = []


class Recorder(Callback):
    def on_task_end(self, report):
        TASKS.append((report.pass_number, report.task))


def callbacks():
    return [Recorder()]
"""


def test_tasks_are_done_in_the_order_in_which_a_master_gives_them(
    data: Path, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    spec = job(write_model(tmp_path, "torch", TASKS_SEEN), data, validation=None, seed=5)
    definition = load(spec.model)
    LocalRun(spec, definition).run()
    expected = []
    for number in (1, 2):
        seed = task_order_seed(spec, RoundId(RoundKind.TRAINING, number))
        expected += [(number, task) for task in task_order(seed, RECORDS // 1000)]
    assert expected == definition.module.TASKS


def test_a_metric_that_is_a_function_is_averaged_over_tasks(data: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    sizes = "\n\ndef eval_metrics():\n    return {'size': lambda labels, _: float(len(labels))}\n"
    result = run(
        job(write_model(tmp_path, "torch", sizes), data, training=None, records_per_task=600)
    )
    # As the master of a cluster does: two tasks, each weighted with its records.
    assert result.evaluations == ({"size": (600 * 600 + 400 * 400) / 1000},)


def test_a_damaged_record_counts_once_over_all_passes(data: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    lines = (data / "train.csv").read_text().splitlines()[:301]
    (tmp_path / "train.csv").write_text("\n".join([*lines[:50], "1,2", *lines[50:]]) + "\n")
    spec = job(write_model(tmp_path, "torch"), tmp_path, validation=None, max_bad_records=1)
    result = run(spec)
    assert (result.passes, result.bad_records, result.examples) == (2, 1, 2 * 300)
    with pytest.raises(TooManyBadRecords):
        run(replace(spec, max_bad_records=0))


def test_limits(data: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    model = write_model(tmp_path, "torch")
    result = run(job(model, data, max_steps=7))
    assert (result.steps, result.passes) == (7, 0)
    assert "max_steps" in result.reason
    assert len(result.evaluations) == 1, "of the model as it is at the end"
    rule = EarlyStop(metric="positives", patience=2)  # which never gets better
    result = run(job(model, data, epochs=9, early_stop=rule))
    assert result.passes == 3
    assert "positives" in result.reason
    result = run(job(model, data, epochs=1, evaluation_every_steps=20))
    assert len(result.evaluations) == 3


def test_failures_name_the_users_line(data: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    broken = "\n\ndef feed(records, mode, metadata):\n    return records.column('absent')\n"
    spec = job(write_model(tmp_path, "torch", broken), data)
    with pytest.raises(Exception, match="no column 'absent'"):
        run(spec)
    nan = "\n\ndef loss(labels, predictions):\n    return predictions.mean() * float('nan')\n"
    with pytest.raises(NonFiniteLoss, match="the loss is nan"):
        run(job(write_model(tmp_path, "torch", nan), data))
    alone = "\n\ndef feed(records, mode, metadata):\n    return records.column('user')\n"
    with pytest.raises(ConfigError, match="must return a pair: features, labels"):
        run(job(write_model(tmp_path, "torch", alone), data))
