"""Commands that are run around a job, on this machine, one after the other.

Each command is a line for ``/bin/sh``. Its output goes to a file or to standard error, because
standard output belongs to the result of the job.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from backstay.errors import JobError

__all__ = ["run_hooks"]

KILL_WAIT_S = 5.0
LOOK_PAUSE_S = 0.1

log = logging.getLogger(__name__)


def run_hooks(
    commands: Sequence[str],
    env: Mapping[str, str],
    *,
    timeout_s: float,
    stopped: Callable[[], bool],
    output: Path | None = None,
) -> None:
    """Run the commands in turn; end at the first that fails.

    Args:
        commands: Lines for the shell.
        env: Variables on top of this process's.
        timeout_s: Most that one of them may take.
        stopped: Whether the user wants the job to stop: the command is ended then.
        output: The file that takes what the commands print; None: standard error.

    Raises:
        JobError: A command failed, took too long or was stopped; the message names it.
    """
    for command in commands:
        log.info("hook: %s", command)
        with _opened(output) as descriptor:
            process = subprocess.Popen(
                ["/bin/sh", "-c", command],
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
                stdout=descriptor,
                stderr=descriptor,
                # A group of its own, so that it can be ended with all that it starts.
                start_new_session=True,
            )
        why = _wait(process, timeout_s, stopped)
        if why:
            raise JobError(f"the hook {command!r} {why}")


@contextmanager
def _opened(output: Path | None) -> Iterator[int]:
    if output is None:
        yield sys.stderr.fileno()
        return
    with output.open("ab") as file:
        yield file.fileno()


def _wait(process: subprocess.Popen[bytes], timeout_s: float, stopped: Callable[[], bool]) -> str:
    """Return "" once the process has ended well, else what went wrong; it has ended then, too."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            code = process.wait(LOOK_PAUSE_S)
        except subprocess.TimeoutExpired:
            if stopped():
                _end(process)
                return "was stopped"
            if time.monotonic() < deadline_s:
                continue
            _end(process)
            return f"took longer than hooks.timeout_s ({timeout_s:g} s)"
        if code < 0:
            return f"was ended by signal {-code}"
        return "" if code == 0 else f"failed with exit code {code}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the shell and what it has started: its whole session."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(KILL_WAIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
