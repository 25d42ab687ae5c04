"""What a job's command leaves in its log folder, and how ``backstay jobs`` shows it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from backstay._proto.v1 import job_pb2
from backstay.cli import main
from backstay.config import ENDPOINT_VARIABLES
from backstay.errors import JobError
from backstay.runner.last_status import FILE_NAME, LastStatus, StatusFile


def status_of(steps: int) -> job_pb2.JobStatus:
    status = job_pb2.JobStatus(job="tiny", state="running", steps=steps, master_instance=7)
    status.workers.add(id="w-0", alive=True)
    status.evaluations.add(round=1, steps=steps, metrics={"auc": 0.75})
    return status


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, after a job of it has ended with a failed task."""
    for name in (*ENDPOINT_VARIABLES, "BACKSTAY_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "backstay-jobs" / "tiny"
    (folder / "workers").mkdir(parents=True)
    (folder / "workers" / "w-0.log").write_text("first\nlast\n")
    dead_letter = job_pb2.DeadLetter(
        kind=job_pb2.TASK_KIND_TRAINING, round=1, number=3, start=8, count=4, error="ValueError: no"
    )
    file = StatusFile(folder, ["127.0.0.1:7000"], are_own=True)
    file.ended(status_of(9), [dead_letter], state="failed", reason="too many")
    return folder


def backstay(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(main, ["jobs", *words])
    return done.exit_code, done.stdout, done.stderr


def test_it_is_written_now_and_then_and_at_the_end(tmp_path: Path) -> None:
    file = StatusFile(tmp_path, ["a:1", "b:2"], are_own=False)
    file.ended(None, [], state="failed", reason="the job master never answered")
    assert not (tmp_path / FILE_NAME).exists()
    file.seen(status_of(1))
    # A moment later: not again.
    file.seen(status_of(2))
    last = LastStatus.read(tmp_path)
    assert (last.status, last.is_over, last.endpoints) == (status_of(1), False, ("a:1", "b:2"))
    assert "its servers: --endpoint a:1,b:2" in last.origin(tmp_path)
    assert "or was killed" in last.origin(tmp_path)
    file.ended(status_of(5), [], state="stopped", reason="Ctrl-C")
    last = LastStatus.read(tmp_path)
    found = (last.status.state, last.status.reason, last.status.steps, last.is_over)
    assert found == ("stopped", "Ctrl-C", 5, True)


def test_a_folder_that_cannot_be_written_ends_no_job(tmp_path: Path) -> None:
    file = StatusFile(tmp_path / "none", [], are_own=True)
    file.ended(status_of(1), [], state="done", reason="")
    with pytest.raises(JobError, match="no job has left its status in"):
        LastStatus.read(tmp_path / "none")


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"written_ms": 1}', "{"])
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(JobError, match=rf"{FILE_NAME}: is damaged"):
        LastStatus.read(tmp_path)


def test_a_job_of_this_folder_is_shown_when_its_servers_have_ended(folder: Path) -> None:
    for words in (("show", "tiny"), ("show", "other", "--log-dir", str(folder))):
        code, shown, _ = backstay(*words)
        assert code == 0
        for part in ("tiny: failed (too many)", "auc 0.7500", "task 3", "  ValueError: no"):
            assert part in shown
        assert "its command and its own servers have ended" in shown
    document = json.loads(backstay("show", "tiny", "--json")[1])
    assert (document["state"], document["status"]["steps"]) == ("failed", "9")
    assert document["dead_letters"][0]["error"] == "ValueError: no"


def test_its_logs_are_there_too(folder: Path) -> None:
    assert backstay("logs", "tiny")[1].splitlines()[-1].startswith("w-0  ")
    for words in (("logs", "tiny"), ("logs", "any", "--log-dir", str(folder))):
        assert backstay(*words, "--worker", "w-0", "-n", "1")[1] == "last\n"


def test_without_a_folder_the_way_there_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for words in (("show", "other"), ("logs", "other")):
        code, _, said = backstay(*words)
        assert (code, "--log-dir FOLDER" in said) == (2, True)
    code, _, said = backstay("show", "tiny", "--log-dir", str(folder.parent))
    assert code == 3
    assert "no job has left its status in" in said
    # A cluster that is named is asked.
    monkeypatch.setenv("BACKSTAY_ENDPOINT", "not an address")
    assert backstay("show", "tiny")[0] == 2


def test_orders_go_to_the_servers_of_a_job_that_runs_here(folder: Path) -> None:
    file = StatusFile(folder, ["not an address"], are_own=True)
    code, _, said = backstay("scale", "tiny", "3")
    assert (code, "job 'tiny' is failed, and its servers have ended with its" in said) == (3, True)
    file.seen(status_of(1))
    for words in (("scale", "tiny", "3"), ("stop", "tiny"), ("retry", "tiny"), ("audit", "tiny")):
        code, _, said = backstay(*words)
        assert (code, "endpoint: 'not an address' is not" in said) == (2, True)
