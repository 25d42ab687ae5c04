"""A ``backstay train`` of a demo: started, watched, hurt, and asked how it went.

May import backstay's commands and clients. Every wait has a limit; what it tells comes from the
job master and from the processes themselves.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from backstay._proto.v1 import job_pb2
from backstay.config import ClientConfig
from backstay.errors import BackstayError, ServerUnavailable
from backstay.master.job_client import JobClient
from examples.common.launch import ProcessFailed, stops_held_back

__all__ = ["JobRun"]

LOOK_SECONDS = 0.02
START_SECONDS = 60.0
STOP_SECONDS = 40.0
ERROR_LINES_KEPT = 30
# Exit status of a job that was stopped.
STOPPED = 130
MASTER = "backstay.master.serve_cli"
# The demo asks all the time: a master that is gone shall not keep it waiting.
DEADLINE_MS = 1000


class JobRun:
    """The command and its job. A context manager, inside that of the cluster.

    Attributes:
        status: What the master said last.
    """

    def __init__(
        self, endpoints: Sequence[str], name: str, arguments: Sequence[str], folder: Path
    ) -> None:
        """Prepare.

        Args:
            endpoints: Of the cluster.
            name: Of the job.
            arguments: Of the command ``backstay``, without those that say where the servers are.
            folder: For its logs.
        """
        self._command = [sys.executable, "-m", "backstay.cli", *arguments]
        self._command += ["--name", name, "--endpoint", ",".join(endpoints), "--json"]
        self._command += ["--log-dir", str(folder / name)]
        self._errors = folder / f"{name}.err"
        self._client = JobClient(
            endpoints, name, config=ClientConfig.load(explicit={"deadline_ms": DEADLINE_MS})
        )
        self._process: subprocess.Popen[str] | None = None
        self._answer: list[str] = []
        self._reader: threading.Thread | None = None
        self.status = job_pb2.JobStatus()

    def __enter__(self) -> JobRun:
        with self._errors.open("w", encoding="utf-8") as errors, stops_held_back():
            self._process = subprocess.Popen(
                self._command, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        assert self._reader is not None
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._client.close()

    def look(self) -> bool:
        """Ask the master how the job goes; return whether it answered."""
        try:
            self.status = self._client.status()
        except BackstayError:
            return False
        return True

    @property
    def is_over(self) -> bool:
        """Whether the command has ended."""
        return self._process is not None and self._process.poll() is not None

    def result(self, *, stopped: bool = False) -> dict[str, Any]:
        """Return what the command printed at its end.

        Args:
            stopped: Whether it is to have been stopped, by ``jobs stop``.

        Raises:
            ProcessFailed: It ended otherwise.
        """
        assert self._process is not None
        assert self._reader is not None
        code = self._process.wait(STOP_SECONDS)
        self._reader.join()
        if code != (STOPPED if stopped else 0):
            raise ProcessFailed(f"the job ended with exit status {code}:\n{self._last_errors()}")
        result: dict[str, Any] = json.loads("".join(self._answer))
        return result

    # -- what may happen to it ------------------------------------------------------------

    def kill_worker(self) -> tuple[str, float]:
        """Kill a worker that holds a task; wait until another one holds that task, or it is done.

        Returns:
            The worker's name, and seconds from the kill until then.
        """
        worker = self._wait(
            "a worker with a task",
            lambda: next((one for one in self.status.workers if one.alive and one.tasks), None),
        )
        task = worker.tasks[0]
        begun_s = time.monotonic()
        psutil.Process(worker.pid).kill()

        def is_elsewhere() -> bool | None:
            # A task that is nowhere waits for somebody, unless its round is over.
            holders = {one.id for one in self.status.workers if task in one.tasks}
            moved = bool(holders) and worker.id not in holders
            done = not holders and not self.status.tasks.todo
            return (moved or done) or None

        self._wait(f"task {task} at another worker", is_elsewhere)
        return worker.id, time.monotonic() - begun_s

    def scale(self, workers: int) -> None:
        """Have so many workers."""
        self._tell("the number of workers", lambda: self._client.scale(workers))

    def stop_when_done(self) -> None:
        """End a job over data without an end when it has done what it has taken."""
        self._tell("a stop", lambda: self._client.stop("the demo ends", when_done=True))

    def kill_master(self) -> float:
        """Kill the job master; wait until tasks flow again, and return the seconds until then."""
        master = self._wait("a master", self._master)
        starts = self.status.master_starts
        begun_s = time.monotonic()
        master.kill()

        def is_back() -> bool | None:
            return (self.status.master_starts > starts and self.status.tasks.doing > 0) or None

        self._wait("another master that gives out tasks", is_back)
        return time.monotonic() - begun_s

    def _master(self) -> psutil.Process | None:
        assert self._process is not None
        for child in psutil.Process(self._process.pid).children():
            # It may end while it is looked at.
            with suppress(psutil.NoSuchProcess):
                if MASTER in child.cmdline():
                    return child
        return None

    def wait_for_workers(self, count: int) -> None:
        """Wait until so many workers live."""

        def are_there() -> bool | None:
            return sum(one.alive for one in self.status.workers) >= count or None

        self._wait(f"{count} workers", are_there)

    def _tell(self, what: str, call: Callable[[], Any]) -> None:
        def is_told() -> bool | None:
            try:
                call()
            except ServerUnavailable:
                return None
            return True

        self._wait(f"a master that takes {what}", is_told)

    def _wait(self, what: str, found: Callable[[], Any]) -> Any:
        deadline_s = time.monotonic() + START_SECONDS
        while True:
            if self.is_over:
                raise ProcessFailed(
                    f"training ended before there was {what}; train for more passes\n"
                    f"{self._last_errors()}"
                )
            if self.look() and (value := found()) is not None:
                return value
            if time.monotonic() > deadline_s:
                raise ProcessFailed(f"there was not {what} within {START_SECONDS:.0f} s")
            time.sleep(LOOK_SECONDS)

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            self._answer.extend(lines)

    def _last_errors(self) -> str:
        lines = self._errors.read_text(encoding="utf-8").splitlines()
        return "\n".join(lines[-ERROR_LINES_KEPT:])
