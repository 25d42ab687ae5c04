"""What commands print of figures and findings: each says what it counts."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from backstay import config
from backstay._proto.v1 import job_pb2
from backstay.checkpoint.remote import CheckpointInfo
from backstay.config import ClientConfig
from backstay.errors import ConfigError, NonFiniteLoss
from backstay.job.model_definition import load
from backstay.job_spec import JobSpec
from backstay.master.status import complete_with_spec
from backstay.pserver.ctl import checkpoint
from backstay.pserver.ctl import verify as verify_module
from backstay.pserver.ctl.cli import main
from backstay.runner.status_words import summary_lines
from backstay.trainer.model.batches import checked_loss

MODEL = """
def custom_model(): ...
def loss(labels, predictions): ...
def optimizer(parameters): ...
def feed(records, mode, metadata): ...
"""


@pytest.mark.parametrize(
    ("kind", "line"),
    [("validation", "16,281 records evaluated"), ("prediction", "16,281 records predicted")],
)
def test_a_job_that_trains_nothing_tells_its_records(kind: str, line: str) -> None:
    spec = JobSpec.from_mapping({"name": "c", "model": "m.py", kind: "d.csv", "output": "o"})
    # As the records tell it, when the master has ended.
    status = job_pb2.JobStatus(job="c", state="done", examples=16_281)
    complete_with_spec(status, spec)
    assert summary_lines(status)[1] == line


def test_a_job_that_trains_tells_its_steps() -> None:
    spec = JobSpec.from_mapping({"name": "c", "model": "m.py", "training": "d.csv"})
    status = job_pb2.JobStatus(job="c", state="done", examples=100, steps=10)
    complete_with_spec(status, spec)
    assert summary_lines(status)[1] == "100 examples in 10 steps"


def test_slots_of_a_busy_cluster_are_few_words_with_advice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    report = {"good": False, "equal": 800, "single": 0, "different": [], "silent_nodes": []}
    report["undecided"] = [*range(200), 300]
    monkeypatch.setattr(verify_module, "ask", lambda *_, **__: report)
    done = CliRunner().invoke(main, ["verify"])
    assert done.exit_code == 1
    assert "201 slots (0-199, 300): not compared" in done.output
    assert "run it again when fewer pushes come" in done.output
    assert len(done.output) < 400


def test_only_a_chain_is_told_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    info = CheckpointInfo(
        **dict.fromkeys(("slot_count", "rows", "bytes", "files"), 0),
        id="ckpt-2", kind="full", base="", created="now", cluster="c", tables=(), tags={}, url="",
    )  # fmt: skip
    for chain, told in ((["ckpt-2"], False), (["ckpt-1", "ckpt-2"], True)):
        monkeypatch.setattr(checkpoint, "ask", lambda *_, c=chain, **__: (info, c, {}))
        shown = CliRunner().invoke(main, ["checkpoint", "show"]).output
        assert "restored from" not in shown
        assert ("a restore of it reads: ckpt-1 + ckpt-2" in shown) is told


def test_a_loss_that_is_no_number_names_no_records_below() -> None:
    with pytest.raises(NonFiniteLoss, match="in the records of the batch") as caught:
        checked_loss(float("nan"))
    assert "below" not in str(caught.value)


def test_an_unknown_variable_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(config, "_warned_of", set())
    monkeypatch.setenv("BACKSTAY_ENDPONT", "x")
    for _ in range(3):
        ClientConfig.load()
    assert [one.message for one in caplog.records if "BACKSTAY_ENDPONT" in one.message] == [
        caplog.records[0].message
    ]


def test_a_keras_model_is_told_how_it_can_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What the file imports is all that is looked at.
    (tmp_path / "keras.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    for number, first in enumerate(("import keras", "import tensorflow as tf")):
        path = tmp_path / f"model_{number}.py"
        path.write_text(first + MODEL)
        with pytest.raises(ConfigError, match="KERAS_BACKEND=torch") as caught:
            load(path).framework()
        assert "set the job's framework" not in str(caught.value)
