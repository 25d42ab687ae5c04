"""Parts of ``backstay train`` with real processes: hooks, a job master that is started again."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from backstay.errors import JobError
from backstay.runner.hooks import run_hooks
from backstay.runner.master_process import MasterProcess
from tests.processes import is_gone
from tests.waiting import wait_until

WAIT_S = 120.0


def never() -> bool:
    return False


def test_hooks_run_in_turn_with_their_variables(tmp_path: Path) -> None:
    path = tmp_path / "out"
    commands = [f"echo one $BACKSTAY_JOB >> {path}", f"echo two >> {path}"]
    run_hooks(commands, {"BACKSTAY_JOB": "census"}, timeout_s=WAIT_S, stopped=never)
    assert path.read_text() == "one census\ntwo\n"


@pytest.mark.parametrize(
    ("command", "timeout_s", "why"),
    [
        ("exit 7", WAIT_S, "failed with exit code 7"),
        ("kill -9 $$", WAIT_S, "was ended by signal 9"),
        ("sleep 1000", 0.2, r"took longer than hooks.timeout_s \(0.2 s\)"),
    ],
)
def test_a_hook_that_does_not_go_well_is_named_and_ends_them(
    tmp_path: Path, command: str, timeout_s: float, why: str
) -> None:
    after = tmp_path / "after"
    with pytest.raises(JobError, match=why) as caught:
        run_hooks([command, f"touch {after}"], {}, timeout_s=timeout_s, stopped=never)
    assert repr(command) in str(caught.value)
    assert not after.exists()


def test_a_hook_ends_with_all_that_it_has_started_when_the_job_is_stopped(tmp_path: Path) -> None:
    pid_path = tmp_path / "pid"
    command = f"sleep 1000 & echo $! > {pid_path}.new; mv {pid_path}.new {pid_path}; wait"
    with pytest.raises(JobError, match="was stopped"):
        run_hooks([command], {}, timeout_s=WAIT_S, stopped=pid_path.exists)
    pid = int(pid_path.read_text())
    # The process that adopts orphans may not have taken note of its end yet.
    wait_until(lambda: is_gone(pid))


class Masters:
    """Processes that stand in for masters: each writes its numbers, then does as it is told."""

    def __init__(self, tmp_path: Path, *programs: str) -> None:
        self._programs = list(programs)
        self._numbers = iter(range(1, 100))
        self.log_path = tmp_path / "master.log"
        self.restarts: list[int] = []
        self.started: list[tuple[int, int]] = []

    def command(self, instance: int, replaced: int) -> list[str]:
        self.started.append((instance, replaced))
        program = self._programs.pop(0) if len(self._programs) > 1 else self._programs[0]
        begin = "from backstay import lifeline; lifeline.attach(grace_s=1)"
        said = f"print('up {instance}', flush=True)"
        return [sys.executable, "-c", f"{begin}\n{said}\n{program}"]

    def process(self) -> MasterProcess:
        return MasterProcess(
            self.command,
            self.log_path,
            env={},
            final_codes=frozenset({0, 2}),
            new_instance=self._numbers.__next__,
            on_restart=self.restarts.append,
        )

    def wait_until_up(self, instance: int) -> None:
        wait_until(lambda: f"up {instance}\n" in self.log_path.read_text())


FOREVER = "import signal; signal.pause()"


def test_a_killed_master_is_followed_by_one_that_names_it(tmp_path: Path) -> None:
    masters = Masters(tmp_path, FOREVER)
    with masters.process() as master:
        for instance in (1, 2):
            masters.wait_until_up(instance)
            os.kill(master.pid, signal.SIGKILL)
        masters.wait_until_up(3)
        assert master.exit_code is None
    assert masters.started == [(1, 0), (2, 1), (3, 2)]
    assert masters.restarts == [-signal.SIGKILL, -signal.SIGKILL]
    assert master.exit_code == -signal.SIGTERM


@pytest.mark.parametrize("code", [0, 2])
def test_one_that_ends_for_good_is_not_followed(tmp_path: Path, code: int) -> None:
    masters = Masters(tmp_path, f"raise SystemExit({code})")
    with masters.process() as master:
        assert master.wait(WAIT_S)
        assert master.exit_code == code
        assert master.last_words() == "up 1"
    assert masters.restarts == []


def test_one_that_fails_again_and_again_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backstay.runner.master_process.RESTARTS_MAX", 2)
    masters = Masters(tmp_path, "raise SystemExit('no store')")
    with masters.process() as master:
        assert master.wait(WAIT_S)
        assert master.exit_code == 1
        assert master.last_words().endswith("no store")
    assert masters.restarts == [1, 1]


def test_one_that_does_not_stop_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backstay.runner.master_process.STOP_GRACE_S", 0.2)
    deaf = "import signal; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True)\n"
    masters = Masters(tmp_path, deaf + "while True: signal.pause()")
    with masters.process() as master:
        wait_until(lambda: "deaf" in masters.log_path.read_text())
    assert master.exit_code == -signal.SIGKILL
    assert masters.restarts == []
