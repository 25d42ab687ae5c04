"""A launcher that runs in the job master's process, as the job file says."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path
from typing import ClassVar

import pytest

from backstay.config import ENDPOINT_VARIABLE
from backstay.job_engine.launch import ExitReason, LauncherReport, WorkerExit
from backstay.job_spec import LAUNCHERS, LauncherClasses, WorkersSpec
from backstay.master.config import MasterConfig
from backstay.master.host import MasterHost
from backstay.master.launcher import WorkerProgram
from tests.integration.counting_jobs import CLIENT, JOB, LIMIT_S, TASKS, Worker, counting_spec


class ThreadLauncher:
    """Workers as threads of this process."""

    IN_JOB_MASTER: ClassVar[bool] = True
    made: ClassVar[list[ThreadLauncher]] = []

    def __init__(self, program: WorkerProgram) -> None:
        self.program = program
        self.workers: dict[str, Worker] = {}
        self.wanted: set[str] = set()
        self.is_closed = False

    @classmethod
    def for_job(cls, program: WorkerProgram) -> ThreadLauncher:
        cls.made.append(cls(program))
        return cls.made[-1]

    def reconcile(self, wanted: Collection[str]) -> None:
        self.wanted = set(wanted)
        for one in self.wanted - self.workers.keys():
            endpoints = self.program.env[ENDPOINT_VARIABLE].split(",")
            self.workers[one] = Worker(endpoints, one)
            self.workers[one].start()

    def report(self) -> LauncherReport:
        running = tuple(name for name, one in self.workers.items() if one.is_alive())
        over = (WorkerExit(one, ExitReason.FINISHED) for one in self.workers.keys() - set(running))
        return LauncherReport(running, tuple(over))

    def acknowledge(self, worker_ids: Collection[str]) -> None:
        """The exits are told again: the job master must bear that."""

    def trouble(self) -> str:
        return ""

    def close(self) -> None:
        self.is_closed = True


def test_a_job_runs_with_the_launcher_of_its_job_file(
    endpoints: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    classes = LauncherClasses(f"{__name__}:{ThreadLauncher.__name__}")
    monkeypatch.setitem(LAUNCHERS, "threads", classes)
    spec = counting_spec(
        tmp_path, launcher="threads", workers=WorkersSpec(initial=2, min=1, max=2, env={"A": "b"})
    )

    async def run() -> str:
        config = MasterConfig(endpoints=tuple(endpoints), client=CLIENT)
        return await asyncio.wait_for(MasterHost(config, spec).run(), LIMIT_S)

    assert asyncio.run(run()) == "done"
    (launcher,) = ThreadLauncher.made
    assert launcher.program.env["A"] == "b"
    assert launcher.program.command("w-0")[-6:-2] == ["--job", JOB, "--worker-id", "w-0"]
    assert launcher.is_closed
    assert not launcher.report().running
    done = sum(one.first.total() for one in launcher.workers.values())
    assert done == TASKS + 1  # The end of training is a task, too.
