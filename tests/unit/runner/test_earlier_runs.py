"""One process runs a job with a log folder; servers that are away are waited for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from backstay.errors import ConfigError, JobRefused, ProtocolError, StoreUnavailable
from backstay.runner import earlier_runs
from backstay.runner.earlier_runs import forget, goes_on, sole_run

SERVERS: Any = SimpleNamespace(are_own=False, endpoints=("there:1",), config=None)
ENTRY = SimpleNamespace(master_address="")
LED = SimpleNamespace(master_address="elsewhere:1")


def answers_in_turn(*answers: Any) -> Any:
    """Stands for a question to the servers: raises those answers that are errors."""
    left: Iterator[Any] = iter(answers)

    def ask(*_: object, **__: object) -> Any:
        answer = next(left)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return ask


def never(_: float) -> bool:
    """No signal tells the command to stop."""
    return False


@pytest.mark.parametrize(("entry", "known"), [(ENTRY, True), (None, False)])
def test_a_job_goes_on_once_its_former_master_is_gone(
    monkeypatch: pytest.MonkeyPatch, entry: object, known: bool
) -> None:
    asked = answers_in_turn(LED, StoreUnavailable("no leader"), LED, entry)
    monkeypatch.setattr(earlier_runs, "find_job", asked)
    assert goes_on(SERVERS, "tiny", never) is known


def test_records_are_removed_once_their_servers_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    led = JobRefused("job 'tiny' has a job master")
    asked = answers_in_turn(StoreUnavailable("no leader"), led, StoreUnavailable("again"), True)
    monkeypatch.setattr(earlier_runs, "forget_job", asked)
    forget(SERVERS, "tiny", never)
    with pytest.raises(StopIteration):
        asked()


def test_a_command_that_is_to_stop_waits_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    for answer, expected in [(LED, JobRefused), (StoreUnavailable("no leader"), StoreUnavailable)]:
        monkeypatch.setattr(earlier_runs, "find_job", answers_in_turn(answer))
        with pytest.raises(expected):
            goes_on(SERVERS, "tiny", lambda _: True)


def test_a_former_master_has_its_time_after_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0

    def waits_long(_: float) -> bool:
        nonlocal now_s
        now_s += earlier_runs.LEADERSHIP_LIMIT_S - 1
        return False

    monkeypatch.setattr(earlier_runs, "time", SimpleNamespace(monotonic=lambda: now_s))
    away = StoreUnavailable("no leader")
    monkeypatch.setattr(earlier_runs, "find_job", answers_in_turn(away, away, away, LED, None))
    assert not goes_on(SERVERS, "tiny", waits_long)
    monkeypatch.setattr(earlier_runs, "find_job", answers_in_turn(away, LED, LED, LED))
    with pytest.raises(JobRefused):
        goes_on(SERVERS, "tiny", waits_long)


def test_servers_of_another_release_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(earlier_runs, "find_job", answers_in_turn(ProtocolError("unknown method")))
    with pytest.raises(ProtocolError):
        goes_on(SERVERS, "tiny", never)


def test_a_job_that_another_process_runs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(earlier_runs, "LEADERSHIP_LIMIT_S", 0.0)
    monkeypatch.setattr(earlier_runs, "find_job", answers_in_turn(LED))
    with pytest.raises(JobRefused, match=r"its job master is at elsewhere:1.*--name"):
        goes_on(SERVERS, "tiny", never)


def test_a_second_run_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    folder = tmp_path / "backstay-jobs" / "tiny"
    for _ in range(2):
        with sole_run(folder, "tiny"):
            for _ in range(2):
                with (
                    pytest.raises(JobRefused, match=rf"by process {os.getpid()} on .*--name"),
                    sole_run(folder, "tiny"),
                ):
                    pass
            with sole_run(tmp_path / "other", "tiny"):
                pass


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="log_dir: cannot write to "), sole_run(folder, "a"):
            pass
