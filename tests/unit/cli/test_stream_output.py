"""Data without an end where people and programs look: files, the display, `jobs show`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from backstay._proto.v1 import job_pb2
from backstay.cli.status_text import print_status
from backstay.runner import metrics_log
from backstay.runner.metrics_log import FILE_NAME, OLD_FILE_NAME, MetricsLog, figures_of
from backstay.runner.status_words import lag_text


def status(steps: int = 7) -> job_pb2.JobStatus:
    told = job_pb2.JobStatus(job="clicks", state="running", steps=steps, master_instance=1)
    told.stream.lag_records, told.stream.lag_s, told.stream.ahead_records = 1234, 56.4, 200
    return told


def test_a_file_of_metrics_that_is_full_is_put_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_log, "FILE_BYTES_MAX", 2000)
    written = 0
    for part in range(3):
        # A job that goes on knows how full the file is.
        with MetricsLog(tmp_path, tensorboard=False) as log:
            for number in range(10):
                log.write(status(10 * part + number))
                written += 1
                paths = list(tmp_path.iterdir())
                assert {path.name for path in paths} <= {FILE_NAME, OLD_FILE_NAME}
                assert all(path.stat().st_size <= 2000 for path in paths)
    lines = [
        json.loads(line)["step"]
        for name in (OLD_FILE_NAME, FILE_NAME)
        for line in (tmp_path / name).read_text().splitlines()
    ]
    assert lines == list(range(written))[-len(lines) :], "the newest lines are there, in order"
    assert len(lines) < written


def test_the_lag_is_told_in_records_and_in_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    told = status()
    assert lag_text(told.stream) == "1,234 records, 56 s"
    figures = figures_of(told)
    assert (figures["lag_records"], figures["lag_s"]) == (1234, 56.4)
    told.stream.waiting_folders = 3
    print_status(told)
    shown = capsys.readouterr().out
    assert "lag 1,234 records, 56 s, 3 folders to count; 200 records taken, " in shown
    unknown = job_pb2.JobStatus()
    unknown.stream.SetInParent()
    assert lag_text(unknown.stream) == ""
    assert figures_of(unknown)["lag_s"] is None
