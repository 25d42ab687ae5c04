"""Workers as processes of this machine.

Each has a session of its own, its output in ``<log_dir>/<worker id>.log``, and a line to this
process (``backstay.lifeline``), so that none outlives it. A thread waits for each process; what it
finds is handed over in ``report``.

It imports ``job_engine.launch``, ``launcher`` and ``backstay.lifeline``, and knows no program.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from backstay import lifeline
from backstay.job_engine.launch import ExitReason, LauncherReport, WorkerExit
from backstay.master.launcher import WorkerProgram

__all__ = ["LocalLauncher", "log_path"]

LAST_WORDS_BYTES_MAX = 2048
# Each has a thread here; more belong on more machines.
WORKERS_MAX = 512

log = logging.getLogger(__name__)


def log_path(log_dir: Path, worker_id: str) -> Path:
    """Return where the output of a worker goes."""
    return log_dir / f"{worker_id}.log"


@dataclass
class _Running:
    """One process that was started and whose exit was not taken in yet."""

    process: subprocess.Popen[bytes]
    line: socket.socket
    log_begin: int
    kill_at_s: float | None = None


class LocalLauncher:
    """Runs the workers of a job on this machine; see ``Launcher`` for the calls."""

    IN_JOB_MASTER: ClassVar[bool] = False

    def __init__(
        self,
        command: Callable[[str], Sequence[str]],
        log_dir: Path,
        *,
        env: Mapping[str, str] | None = None,
        stop_grace_s: float = 10.0,
    ) -> None:
        """Prepare; nothing starts before ``reconcile``.

        Args:
            command: Returns the program and arguments of a worker. The program should call
                ``lifeline.attach`` first.
            log_dir: Folder of the logs; made if it is not there.
            env: Variables on top of this process's.
            stop_grace_s: How long a worker may take to end after SIGTERM, before SIGKILL.
        """
        self._command = command
        self._log_dir = log_dir
        self._env = {**os.environ, **(env or {})}
        self._stop_grace_s = stop_grace_s
        self._running: dict[str, _Running] = {}
        # The waiting threads hand over here; everything else belongs to the caller's thread.
        self._lock = threading.Lock()
        self._finished: list[tuple[str, int]] = []
        self._changed = threading.Condition(self._lock)
        self._exits: dict[str, WorkerExit] = {}
        # The ids of all workers that were ever started: none is started again.
        self._ended: dict[str, WorkerExit] = {}

    @classmethod
    def for_job(cls, program: WorkerProgram) -> LocalLauncher:
        """Return the launcher of a job, with logs in the job's folder."""
        return cls(program.command, Path(program.spec.log_dir) / "workers", env=program.env)

    def reconcile(self, wanted: Collection[str]) -> None:
        """Start what is missing and tell the others to end."""
        self._take_in()
        for worker_id in self._running.keys() - set(wanted):
            self._end(worker_id)
        for worker_id in sorted(set(wanted) - self._running.keys()):
            if worker_id in self._ended:
                # What is still to be told has its last words.
                self._exits.setdefault(worker_id, self._ended[worker_id])
            else:
                self._start(worker_id)

    def report(self) -> LauncherReport:
        """Return what runs and what has ended."""
        self._take_in()
        exits = (self._exits[worker_id] for worker_id in sorted(self._exits))
        return LauncherReport(tuple(sorted(self._running)), tuple(exits))

    def acknowledge(self, worker_ids: Collection[str]) -> None:
        """Forget these exits."""
        for worker_id in worker_ids:
            self._exits.pop(worker_id, None)

    def trouble(self) -> str:
        """Return nothing: a process starts at once, or its exit says why not."""
        return ""

    def pids(self) -> dict[str, int]:
        """Return the process id of each worker that runs, by worker id."""
        self._take_in()
        return {one: running.process.pid for one, running in self._running.items()}

    def close(self) -> None:
        """End all workers and wait until they are gone."""
        deadline_s = time.monotonic() + self._stop_grace_s
        while self._running:
            for worker_id in list(self._running):
                self._end(worker_id)
            with self._changed:
                # The next turn kills the processes that go on, and that cannot fail.
                self._changed.wait_for(
                    lambda: bool(self._finished), max(0.1, deadline_s - time.monotonic())
                )
            self._take_in()

    def _start(self, worker_id: str) -> None:
        if len(self._running) >= WORKERS_MAX:
            self._cannot_start(worker_id, f"{WORKERS_MAX} workers run here already")
            return
        self._log_dir.mkdir(parents=True, exist_ok=True)
        path = log_path(self._log_dir, worker_id)
        with path.open("ab") as output:
            begin = output.tell()
            try:
                process, line = lifeline.start(self._command(worker_id), env=self._env, log=output)
            except OSError as error:
                self._cannot_start(worker_id, str(error))
                return
        self._running[worker_id] = _Running(process, line, begin)
        log.info("worker %s runs as %d", worker_id, process.pid)
        threading.Thread(
            target=self._wait, args=(worker_id, process), name=f"wait-{process.pid}", daemon=True
        ).start()

    def _wait(self, worker_id: str, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        with self._changed:
            self._finished.append((worker_id, code))
            self._changed.notify_all()

    def _take_in(self) -> None:
        """Take note of the processes that have ended."""
        with self._lock:
            finished, self._finished = self._finished, []
        for worker_id, code in finished:
            running = self._running.pop(worker_id)
            running.line.close()
            path = log_path(self._log_dir, worker_id)
            words = lifeline.last_words(path, LAST_WORDS_BYTES_MAX, begin=running.log_begin)
            self._note_exit(WorkerExit(worker_id, ExitReason.of_code(code), code, words))

    def _cannot_start(self, worker_id: str, why: str) -> None:
        self._note_exit(WorkerExit(worker_id, ExitReason.CANNOT_START, last_words=why))

    def _note_exit(self, end: WorkerExit) -> None:
        log.info("worker %s %s", end.worker_id, end.how)
        self._exits[end.worker_id] = end
        self._ended[end.worker_id] = end._replace(last_words="")

    def _end(self, worker_id: str) -> None:
        """Tell a worker to end; once its grace is over, make it."""
        running = self._running[worker_id]
        now_s = time.monotonic()
        if running.kill_at_s is None:
            running.kill_at_s = now_s + self._stop_grace_s
            running.process.terminate()
            # One that is paused cannot stop.
            running.process.send_signal(signal.SIGCONT)
        elif now_s >= running.kill_at_s:
            running.process.kill()
