"""The job master as a process of its own, started again when it dies.

A thread waits for the process. A job master that was killed is followed by another one, which names
it and so need not wait for its lease; one that ends by itself has said why by its exit code.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from backstay import lifeline
from backstay.backoff import Backoff
from backstay.errors import JobError

__all__ = ["MasterProcess"]

RESTARTS_MAX = 20
RESTART = Backoff(first_s=0.1, longest_s=5.0)
STOP_GRACE_S = 10.0
LAST_WORDS_BYTES_MAX = 4096

log = logging.getLogger(__name__)


class MasterProcess:
    """Keeps a job master running, from ``with`` to its end."""

    def __init__(
        self,
        command: Callable[[int, int], Sequence[str]],
        log_path: Path,
        *,
        env: Mapping[str, str],
        final_codes: frozenset[int],
        new_instance: Callable[[], int],
        on_restart: Callable[[int], None],
    ) -> None:
        """Prepare.

        Args:
            command: Makes the program and arguments out of the instance that the process is to
                have and that of the dead one before it (0: none).
            log_path: Where its output goes, over all restarts.
            env: Variables on top of this process's.
            final_codes: Exit codes after which it is not started again: the job is over, or
                another process would end in the same way.
            new_instance: Draws a number that no other process has.
            on_restart: Told the exit code each time that it is started again; from the thread.
        """
        self._command = command
        self._log_path = log_path
        self._env = {**os.environ, **env}
        self._final_codes = final_codes
        self._new_instance = new_instance
        self._on_restart = on_restart
        self._stopping = threading.Event()
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        self._instance = 0
        self._exit_code: int | None = None
        self._thread = threading.Thread(target=self._keep, name="master", daemon=True)

    def __enter__(self) -> MasterProcess:
        self._start(0)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Of the process that runs, or ran last."""
        assert self._process is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """How the last one ended for good; None: one runs, or will."""
        return self._exit_code

    def wait(self, timeout_s: float) -> bool:
        """Wait until it has ended for good; return whether it has."""
        return self._over.wait(timeout_s)

    def last_words(self) -> str:
        """Return the end of its log."""
        return lifeline.last_words(self._log_path, LAST_WORDS_BYTES_MAX)

    def stop(self) -> None:
        """End it: politely, after a while by force; harmless if repeated."""
        self._stopping.set()
        with self._lock:
            assert self._process is not None
            self._process.terminate()
            self._process.send_signal(signal.SIGCONT)
        if not self._over.wait(STOP_GRACE_S):
            with self._lock:
                self._process.kill()
            self._over.wait()

    def _start(self, replaced: int) -> None:
        self._instance = self._new_instance()
        command = self._command(self._instance, replaced)
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("ab") as output:
            try:
                process, line = lifeline.start(command, env=self._env, log=output)
            except OSError as error:
                raise JobError(f"the job master cannot be started: {error}") from error
        self._process, self._line = process, line

    def _keep(self) -> None:
        """Wait for the process and start it again, until it is to end or ends for good."""
        restarts = 0
        while True:
            assert self._process is not None
            assert self._line is not None
            code = self._process.wait()
            self._line.close()
            if self._stopping.is_set() or code in self._final_codes or restarts >= RESTARTS_MAX:
                break
            restarts += 1
            self._on_restart(code)
            # At once after the first, so that tasks flow again soon; slower when it goes on.
            if self._stopping.wait(RESTART.pause_s(restarts - 1)):
                break
            with self._lock:
                if self._stopping.is_set():
                    break
                try:
                    self._start(self._instance)
                except JobError as error:
                    log.error("%s", error)
                    break
        self._exit_code = code
        self._over.set()
