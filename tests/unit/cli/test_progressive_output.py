"""Progressive metrics where people and programs look: files, the display, `jobs show`."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import cast

import pytest
from rich.console import Console

from backstay._proto.v1 import job_pb2
from backstay.cli.progress import Display
from backstay.cli.status_text import print_status
from backstay.consensus.records.jobs import JobStateRecord
from backstay.job_spec import DataSpec, JobSpec
from backstay.master.status import recorded_status
from backstay.runner.last_status import LastStatus, StatusFile
from backstay.runner.metrics_log import FILE_NAME, MetricsLog, figures_of
from backstay.runner.outcome import Outcome
from backstay.runner.show import Servers
from backstay.runner.status_words import summary_lines

ALERT = "auc below 0.9 for 2 windows (0.75 in the last)"
FIGURES = {"examples": 1000.0, "skipped": 0.0, "auc": 0.75, "logloss": 0.5, "calibration": 1.25}
UNKNOWN = {"examples": 0.0, "skipped": 3.0, "auc": None, "logloss": None, "calibration": None}
RECORD = JobStateRecord(
    "running",
    figures={"steps": 40, "examples": 2000},
    progressive={
        "examples": 2000,
        "skipped": 3,
        "decayed": {**FIGURES, "examples": 1500.5},
        "by": {"de": FIGURES, "fr": UNKNOWN},
        "windows": [
            {
                "number": number,
                "steps": 20 * number,
                "window": FIGURES,
                "decayed": FIGURES,
                "window_by": {"de": FIGURES, "fr": UNKNOWN},
                "decayed_by": {"de": FIGURES, "fr": UNKNOWN},
                "alerts": [ALERT] if number == 2 else [],
            }
            for number in (1, 2)
        ],
        "alerts": [ALERT],
    },
)


def status() -> job_pb2.JobStatus:
    told = recorded_status("clicks", JobStateRecord.from_json(RECORD.to_json()))
    told.now_ms = 5000
    return told


def lines_of(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / FILE_NAME).read_text().splitlines()]


def test_each_window_is_a_line_once(tmp_path: Path) -> None:
    told = status()
    with MetricsLog(tmp_path, tensorboard=False) as log:
        log.write(told)
        log.write(told)
    plain, first, second = lines_of(tmp_path)
    assert plain["progressive"] == {
        "examples": 2000, "auc": 0.75, "logloss": 0.5, "calibration": 1.25, "skipped": 3,
        "windows": 2, "alerts": [ALERT],
    }  # fmt: skip
    assert (first["window"], second["window"]) == (1, 2)
    figures = {"examples": 1000, "auc": 0.75, "logloss": 0.5, "calibration": 1.25}
    unknown = {"examples": 0, "auc": None, "logloss": None, "calibration": None}
    assert second == {
        "time_s": 5.0,
        "window": 2,
        "step": 40,
        **figures,
        "skipped": 0,
        "decayed": figures,
        "by": {"de": {**figures, "decayed": figures}, "fr": {**unknown, "decayed": unknown}},
        "alerts": [ALERT],
    }
    # A job that goes on has these windows in its file already.
    with MetricsLog(tmp_path, tensorboard=False) as log:
        log.seen(told)
        log.write(told)
    assert sum("window" in line for line in lines_of(tmp_path)) == 2


def test_windows_are_scalars_of_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    with MetricsLog(tmp_path, tensorboard=True) as log:
        log.write(status())
    (path,) = (tmp_path / "tensorboard").iterdir()
    found: dict[tuple[str, int], float] = {}
    rest = path.read_bytes()
    while rest:
        size = int.from_bytes(rest[:8], "little")
        event, rest = Event.FromString(rest[12 : 12 + size]), rest[16 + size :]
        found |= {(one.tag, event.step): one.simple_value for one in event.summary.value}
    assert found["progressive/auc", 20] == 0.75
    assert found["progressive/decayed_calibration", 40] == 1.25
    assert found["progressive/logloss/de", 40] == 0.5
    assert not any(tag.endswith("/fr") for tag, _ in found), "nothing is known of it"


def test_a_job_without_them_has_lines_as_before() -> None:
    assert "progressive" not in figures_of(job_pb2.JobStatus(job="clicks"))
    assert recorded_status("clicks", JobStateRecord("done")).HasField("progressive") is False


def test_the_display_has_the_decayed_figures_and_alerts() -> None:
    console = Console(file=StringIO(), width=400)
    with Display("clicks", console=console) as shown:
        shown.update(status(), Servers(3, 3))
    line = cast(StringIO, console.file).getvalue()
    text = "auc 0.7500  logloss 0.5000  calibration 1.2500  (2,000 records, 3 skipped)"
    assert f"before training {text}" in line
    assert line.rstrip().endswith(f"(alert: {ALERT})")
    assert f"before training: {text}" in summary_lines(status())
    assert f"alert: {ALERT}" in summary_lines(status())


def test_show_has_the_newest_window_and_values(capsys: pytest.CaptureFixture[str]) -> None:
    print_status(status())
    text = capsys.readouterr().out
    assert "window 2, to step 40: 1,000 records, auc 0.7500  logloss 0.5000" in text
    assert "  de: auc 0.7500  logloss 0.5000  calibration 1.2500" in text
    assert "  fr: -" in text
    assert f"alert: {ALERT}" in text


def test_the_last_status_keeps_them(tmp_path: Path) -> None:
    StatusFile(tmp_path, ["a:1"], are_own=True).seen(status())
    assert LastStatus.read(tmp_path).status.progressive == status().progressive


def test_the_result_of_train_has_them() -> None:
    spec = JobSpec(name="clicks", model="m.py", training=DataSpec(paths=("x.csv",)))
    document = Outcome(status(), "stopped", f"alert: {ALERT}", 1.0).to_mapping(spec)
    assert (document["exit_code"], document["progressive"]["auc"]) == (130, 0.75)
    assert "progressive" not in Outcome(None, "failed", "", 1.0).to_mapping(spec)
