"""Workers as real processes: how they end, also by force, and that none outlives us."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from backstay.errors import ServerUnavailable
from backstay.job_engine.launch import ExitReason, LauncherReport, WorkerExit, WorkerWish
from backstay.master.launcher import LaunchLoop
from backstay.master.local_launcher import LocalLauncher, log_path
from tests.processes import is_gone
from tests.waiting import wait_until

WAIT_S = 120.0
READY = (
    "import sys; from backstay import lifeline; lifeline.attach(grace_s=1); print('up', flush=True)"
)
FOREVER = f"{READY}; import signal; signal.pause()"
# SIGTERM does nothing to it.
DEAF = f"import signal; signal.signal(15, signal.SIG_IGN); {READY}\nwhile True: signal.pause()"


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


@contextmanager
def launched(
    tmp_path: Path, programs: dict[str, str], *, grace_s: float = 10.0
) -> Iterator[LocalLauncher]:
    launcher = LocalLauncher(
        lambda worker_id: python(programs[worker_id]), tmp_path / "logs", stop_grace_s=grace_s
    )
    try:
        yield launcher
    finally:
        launcher.close()


def wait_until_up(tmp_path: Path, *worker_ids: str) -> None:
    paths = [log_path(tmp_path / "logs", one) for one in worker_ids]
    wait_until(lambda: all(path.exists() and "up" in path.read_text() for path in paths))


def test_each_end_is_told_with_its_code_and_last_words_until_acknowledged(tmp_path: Path) -> None:
    programs = {
        "good": "pass",
        "bad": "import sys; print('x' * 5000); sys.exit('this went wrong')",
        "shot": "import os; os.kill(os.getpid(), 9)",
    }
    with launched(tmp_path, programs) as launcher:
        launcher.reconcile(programs)
        wait_until(lambda: len(launcher.report().exits) == 3)
        exits = {one.worker_id: one for one in launcher.report().exits}
        assert {name: one.code for name, one in exits.items()} == {"good": 0, "bad": 1, "shot": -9}
        assert exits["bad"].last_words.endswith("this went wrong")
        assert len(exits["bad"].last_words) < 2100
        # A job master that has not heard of it yet wants it still.
        launcher.reconcile(programs)
        [bad] = [one for one in launcher.report().exits if one.worker_id == "bad"]
        assert bad.last_words.endswith("this went wrong")
        assert launcher.report().running == ()
        launcher.acknowledge(["good", "bad"])
        assert [one.worker_id for one in launcher.report().exits] == ["shot"]


def test_what_has_ended_is_not_started_again_but_told_again(tmp_path: Path) -> None:
    with launched(tmp_path, {"w-0": "print('once')"}) as launcher:
        launcher.reconcile(["w-0"])
        wait_until(lambda: launcher.report().exits)
        launcher.acknowledge(["w-0"])
        assert launcher.report().exits == ()
        # A job master that lost the news wants it still.
        launcher.reconcile(["w-0"])
        assert launcher.report().exits == (WorkerExit("w-0", ExitReason.FINISHED),)
        assert log_path(tmp_path / "logs", "w-0").read_text() == "once\n"


def test_a_program_that_cannot_be_started_counts_as_ended(tmp_path: Path) -> None:
    launcher = LocalLauncher(lambda _: ["/no/such/program"], tmp_path)
    launcher.reconcile(["w-0"])
    assert [one[:2] for one in launcher.report().exits] == [("w-0", ExitReason.CANNOT_START)]
    assert "/no/such/program" in launcher.report().exits[0].last_words
    launcher.close()


def test_one_that_is_no_longer_wanted_ends_and_the_others_go_on(tmp_path: Path) -> None:
    with launched(tmp_path, {"w-0": FOREVER, "w-1": FOREVER}) as launcher:
        launcher.reconcile(["w-0", "w-1"])
        wait_until_up(tmp_path, "w-0", "w-1")
        pid = launcher.pids()["w-1"]
        launcher.reconcile(["w-1"])
        wait_until(lambda: launcher.report().exits)
        assert launcher.report().exits == (
            WorkerExit("w-0", ExitReason.PREEMPTED, -signal.SIGTERM, "up"),
        )
        assert launcher.pids() == {"w-1": pid}


@pytest.mark.parametrize("paused", [False, True], ids=["deaf", "paused"])
def test_one_that_will_not_end_is_killed(tmp_path: Path, paused: bool) -> None:
    programs = {"w-0": FOREVER if paused else DEAF}
    with launched(tmp_path, programs, grace_s=0.2) as launcher:
        launcher.reconcile(programs)
        wait_until_up(tmp_path, "w-0")
        if paused:
            os.kill(launcher.pids()["w-0"], signal.SIGSTOP)

        def reconciled() -> bool:
            launcher.reconcile([])
            return bool(launcher.report().exits)

        wait_until(reconciled)
        assert launcher.report().exits[0].code == (-signal.SIGTERM if paused else -signal.SIGKILL)


def test_closing_leaves_no_process(tmp_path: Path) -> None:
    programs = {"w-0": FOREVER, "w-1": DEAF}
    with launched(tmp_path, programs, grace_s=0.5) as launcher:
        launcher.reconcile(programs)
        wait_until_up(tmp_path, *programs)
        pids = launcher.pids().values()
    assert all(is_gone(pid) for pid in pids)
    assert sorted(one.code for one in launcher.report().exits) == [-signal.SIGTERM, -signal.SIGKILL]


def test_no_worker_outlives_a_parent_that_is_killed(tmp_path: Path) -> None:
    parent = textwrap.dedent(f"""
        import signal, sys
        from pathlib import Path
        from backstay.master.local_launcher import LocalLauncher
        programs = {{"w-0": {FOREVER!r}, "w-1": {DEAF!r}}}
        launcher = LocalLauncher(lambda one: [sys.executable, "-c", programs[one]], Path("logs"))
        launcher.reconcile(programs)
        print(*launcher.pids().values(), flush=True)
        signal.pause()
    """)
    process = subprocess.Popen(python(parent), cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 2
        wait_until_up(tmp_path, "w-0", "w-1")
        process.kill()
    wait_until(lambda: all(is_gone(pid) for pid in pids))


class Master:
    """Plays a job master: what should run, and what it was told; now and then it is away."""

    def __init__(self) -> None:
        self.wanted: tuple[str, ...] = ()
        self.ended: tuple[str, str] | None = None
        self.has_told_end = False
        self.away = False
        self.version = 1
        self.running: tuple[str, ...] = ()
        self.codes: dict[str, int] = {}

    def __call__(self, report: LauncherReport, *, known_version: int, wait_ms: int) -> WorkerWish:
        if self.away:
            raise ServerUnavailable("no job master answers")
        self.running = report.running
        self.codes.update((one.worker_id, one.code) for one in report.exits)
        if known_version == self.version:
            threading.Event().wait(wait_ms / 1000)
        acknowledged = tuple(one.worker_id for one in report.exits)
        self.has_told_end = self.ended is not None
        return WorkerWish(self.version, self.wanted, acknowledged, self.ended)


def test_the_follower_does_what_the_master_says_and_goes_on_without_one(tmp_path: Path) -> None:
    programs = dict.fromkeys(("w-0", "w-1", "w-2"), FOREVER)
    master, troubles = Master(), list[str]()
    master.wanted = ("w-0", "w-1")
    launcher = LocalLauncher(lambda one: python(programs[one]), tmp_path / "logs")
    with LaunchLoop(launcher, master, on_trouble=troubles.append, trouble_after_s=0) as follower:
        wait_until(lambda: master.running == ("w-0", "w-1"))
        wait_until_up(tmp_path, "w-0", "w-1")
        master.away = True
        wait_until(lambda: troubles)
        assert troubles == ["no job master answers"]
        # Another one takes over, and wants another set.
        master.wanted, master.version, master.away = ("w-1", "w-2"), 2, False
        wait_until(lambda: master.running == ("w-1", "w-2") and master.codes)
        assert master.codes == {"w-0": -signal.SIGTERM}
        assert troubles == ["no job master answers", ""]
        wait_until_up(tmp_path, "w-2")
        master.ended = ("done", "")
        wait_until(lambda: master.has_told_end)
        # They have not heard of it, and do not leave by themselves.
        assert not follower.let_leave(0.2)
    assert not launcher.report().running


def test_workers_leave_by_themselves_when_the_job_is_over(tmp_path: Path) -> None:
    master = Master()
    master.wanted = ("w-0",)
    flag = tmp_path / "over"
    program = f"{READY}\nfrom pathlib import Path\nwhile not Path({str(flag)!r}).exists(): pass"
    launcher = LocalLauncher(lambda _: python(program), tmp_path / "logs")
    with LaunchLoop(launcher, master, on_trouble=lambda _: None) as follower:
        wait_until_up(tmp_path, "w-0")
        master.ended = ("done", "")
        wait_until(lambda: master.has_told_end)
        flag.touch()
        assert follower.let_leave(WAIT_S)
    assert [one.code for one in launcher.report().exits] in ([0], [])
