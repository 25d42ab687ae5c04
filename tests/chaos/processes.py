"""Processes of a run: started on a host of the network, ended with the run.

Each ends when the run's own process does, however that happens: a node by its lifeline, a
trainer by its standard input, and an etcd, which knows neither, by the parent-death signal.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from backstay import lifeline
from tests.chaos.network import Host

__all__ = ["NodeProcess", "Process"]

# Nothing of a caller's settings or proxies may reach the processes of a run.
_FOREIGN = ("BACKSTAY_", "PADDLE_", "TRAINING_", "ETCD")
READY_LIMIT_S = 60.0
END_LIMIT_S = 30.0


def environment() -> dict[str, str]:
    """Return the environment for a process of the run."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_FOREIGN) and not name.lower().endswith("_proxy")
    }


class Process:
    """One process on one host, which may be started more than once."""

    def __init__(self, host: Host, command: Sequence[str], log: Path) -> None:
        """Prepare; ``start`` starts it."""
        self.host = host
        self.log = log
        self._command = tuple(command)
        self._process: subprocess.Popen[bytes] | None = None
        self.paused = False

    @property
    def is_running(self) -> bool:
        """Whether it is there, be it paused."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._running().pid

    def start(self) -> None:
        """Start it; its standard input stays open until it is told to end."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self.host.prefix, *self._command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment(),
                start_new_session=True,
            )
        self.paused = False

    def kill(self) -> None:
        """End it at once, as a crash would."""
        process = self._running()
        process.kill()
        process.wait()
        self._forget()

    def pause(self) -> None:
        """Stop its clock (SIGSTOP)."""
        self._running().send_signal(signal.SIGSTOP)
        # Until then it may still answer.
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)
        self.paused = True

    def resume(self) -> None:
        """Let it go on (SIGCONT)."""
        self.paused = False
        self._running().send_signal(signal.SIGCONT)

    def finish(self, limit_s: float = END_LIMIT_S) -> int:
        """Close its standard input and wait for its end; kill it if that takes too long.

        Returns:
            Its exit code, negative if a signal ended it.
        """
        self.close_input()
        return self.wait(limit_s)

    def close_input(self) -> None:
        """Close its standard input, which asks it to end."""
        process = self._running()
        assert process.stdin is not None
        process.stdin.close()

    def terminate(self) -> None:
        """Ask it to end (SIGTERM)."""
        self._running().terminate()

    def wait(self, limit_s: float = END_LIMIT_S) -> int:
        """Wait for its end; kill it if that takes too long. Returns as ``finish``."""
        process = self._running()
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        self._forget()
        return code

    def log_tail(self, size: int = 2000) -> str:
        """Return the end of what it wrote."""
        return self.log.read_text(errors="replace")[-size:] if self.log.exists() else ""

    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "it was not started"
        return self._process

    def _forget(self) -> None:
        process = self._running()
        if process.stdin is not None:
            process.stdin.close()


class NodeProcess(Process):
    """``pserver serve``, with the line on which it says that it is ready."""

    def __init__(self, host: Host, config: Path, log: Path) -> None:
        """Prepare; ``config`` holds its settings."""
        super().__init__(host, (), log)
        self._config = config
        self._line: socket.socket | None = None

    def start(self) -> None:
        command = [*self.host.prefix, sys.executable, "-m", "backstay.pserver.serve_cli", "serve"]
        command += ["--config", str(self._config)]
        with self.log.open("ab") as log:
            self._process, self._line = lifeline.start(command, env=environment(), log=log)
        self.paused = False

    def wait_ready(self, limit_s: float = READY_LIMIT_S) -> None:
        """Wait until it serves."""
        assert self._line is not None
        self._line.settimeout(limit_s)
        if not self._line.recv(4096):
            self.wait()
            raise RuntimeError(f"{self.host.name} did not start: {self.log_tail()}")

    def _forget(self) -> None:
        super()._forget()
        if self._line is not None:
            self._line.close()
            self._line = None
