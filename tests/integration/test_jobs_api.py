"""``backstay.submit`` and ``backstay.train`` on this machine, as a notebook calls them."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import backstay
from backstay.errors import ConfigError, InvalidRequest, JobRefused
from backstay.runner.last_status import LastStatus, status_before
from tests.integration.tiny_jobs import write_clicks, write_model
from tests.waiting import wait_until

pytest.importorskip("torch")

LIMIT_S = 120.0
RECORDS = 400
# A batch takes so long that a test can interfere with the job.
SLOW = """

import time

_feed = feed


def feed(records, mode, metadata):
    time.sleep(0.1)
    return _feed(records, mode, metadata)
"""
INTERRUPTED = """
import backstay

try:
    backstay.train("job.yaml", epochs=100)
except KeyboardInterrupt:
    print("interrupted")
"""
JOB = """
name: clicks
model: clicks_torch.py
training: clicks.csv
validation: clicks.csv
batch_size: 20
records_per_task: 40
workers: {initial: 1, max: 2}
servers: {local: 1, replicas: 1}
hooks: {after: ["echo the job is $BACKSTAY_JOB_RESULT"]}
"""


@pytest.fixture
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("BACKSTAY_ENDPOINT", "BACKSTAY_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    write_model(tmp_path, "torch", SLOW)
    write_clicks(tmp_path / "clicks.csv", RECORDS)
    path = tmp_path / "job.yaml"
    path.write_text(JOB, encoding="utf-8")
    return path


def test_a_job_is_looked_at_scaled_and_stopped_and_the_next_call_goes_on(
    job_file: Path, capfd: Any
) -> None:
    job = backstay.submit(job_file, epochs=100)
    assert job.wait(timeout=0) is None
    wait_until(lambda: job.metrics.get("workers_alive") == 1, lambda: job.metrics, limit_s=LIMIT_S)
    assert job.state == "running"
    assert job.scale(2) == 1
    with pytest.raises(InvalidRequest, match="3"):
        job.scale(3)
    wait_until(lambda: job.metrics["workers_alive"] == 2, lambda: job.metrics, limit_s=LIMIT_S)
    wait_until(lambda: job.metrics["evaluations"], lambda: job.metrics, limit_s=LIMIT_S)
    assert 0 <= job.metrics["evaluations"][0]["metrics"]["auc"] <= 1
    job.stop("enough")
    stopped = job.wait(LIMIT_S)
    assert stopped is not None
    assert (stopped["state"], stopped["reason"], job.state) == ("stopped", "enough", "stopped")
    with pytest.raises(JobRefused, match="is stopped"):
        job.scale(1)

    # The passes that are over count: one more is the end.
    passes = 1 + stopped["steps"] // (RECORDS // 20)
    done = backstay.train(job_file, epochs=passes, workers={"initial": 2})
    assert (done["state"], done["examples"]) == ("done", passes * RECORDS)
    hooks_log = Path(done["log_dir"]) / "hooks.log"
    assert hooks_log.read_text() == "the job is stopped\nthe job is done\n"
    assert capfd.readouterr() == ("", "")


def test_an_interrupt_of_train_stops_the_job_in_good_order(job_file: Path) -> None:
    folder = job_file.parent / "backstay-jobs" / "clicks"
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED],
        cwd=job_file.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        wait_until(lambda: steps_of(folder) > 0, lambda: folder, limit_s=LIMIT_S)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
        process.wait()
    assert (said, process.returncode) == ("interrupted\n", 0)
    last = LastStatus.read(folder)
    assert (last.is_over, last.status.state, last.status.reason) == (True, "stopped", "interrupted")
    # Servers of the job's own have saved it.
    assert last.status.checkpoint


def steps_of(folder: Path) -> int:
    return int(status_before(folder).steps)


def test_a_wrong_model_file_is_the_error_of_whoever_waits(job_file: Path, capfd: Any) -> None:
    (job_file.parent / "clicks_torch.py").write_text("custom_model = 7\n", encoding="utf-8")
    job = backstay.submit(job_file)
    with pytest.raises(ConfigError, match="custom_model"):
        job.wait(LIMIT_S)
    assert job.state == "failed"
    assert job.metrics == {}
    assert capfd.readouterr() == ("", "")


def test_two_jobs_run_in_two_threads_under_two_names(job_file: Path) -> None:
    """No call needs the main thread."""
    summaries: dict[str, Any] = {}

    def run(name: str) -> None:
        summaries[name] = backstay.train(job_file, name=name, validation=None, hooks={"after": []})

    threads = [threading.Thread(target=run, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert {name: one["state"] for name, one in summaries.items()} == {"one": "done", "two": "done"}
