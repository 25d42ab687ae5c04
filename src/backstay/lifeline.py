"""The lifeline: no process that backstay starts outlives the process that started it.

It is a socket pair. The child inherits one end as a file descriptor, and the environment variable
``BACKSTAY_LIFELINE`` holds its number. The kernel closes the parent's end when the parent ends,
even by SIGKILL. The child then stops as after SIGTERM, and ends by force when its grace is over. A
server also writes one line on it when it is ready, so its parent waits without polling. Servers,
job masters and workers all use it. It imports nothing of the package and never polls.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from backstay.exit_codes import ExitCode

__all__ = ["VARIABLE", "Lifeline", "Ready", "attach", "last_words", "start"]

VARIABLE = "BACKSTAY_LIFELINE"


@dataclass(frozen=True)
class Ready:
    """What a server tells its parent when it serves."""

    node_id: str
    control_address: str
    data_address: str
    metrics_address: str = ""

    def to_line(self) -> bytes:
        """Return it as one line."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Ready:
        """Return what ``to_line`` gave."""
        return cls(**json.loads(line))


def start(
    command: Sequence[str], *, env: Mapping[str, str], log: IO[bytes] | int | None
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a program in a session of its own, with a lifeline to it.

    Args:
        command: The program and its arguments.
        env: Its whole environment; the lifeline's variable is added.
        log: Where its output goes; None: where ours goes.

    Returns:
        The process and our end of the lifeline. Close that only when the process is to end, or
        has ended.

    Raises:
        OSError: The program cannot be started.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            process = subprocess.Popen(
                command,
                env={**env, VARIABLE: str(theirs.fileno())},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                # Ctrl-C reaches every process of the terminal's group; these stop when told to.
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
    return process, ours


def last_words(log: Path, bytes_max: int, *, begin: int = 0) -> str:
    """Return the end of what a process wrote to its log.

    Args:
        log: The file.
        bytes_max: How much of it.
        begin: Where its output begins: what is before it is an earlier process's.

    Raises:
        OSError: It cannot be read.
    """
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(begin, size - bytes_max))
        return file.read(bytes_max).decode(errors="replace").strip()


class Lifeline:
    """The child's end."""

    def __init__(self, file_descriptor: int, *, grace_s: float) -> None:
        """Take over an inherited descriptor, and watch it in a thread."""
        self._socket = socket.socket(fileno=file_descriptor)
        # Programs that this process starts must not keep it open.
        self._socket.set_inheritable(False)
        self._grace_s = grace_s
        self._stop: Callable[[], object] = lambda: os.kill(os.getpid(), signal.SIGTERM)
        threading.Thread(target=self._watch, name="lifeline", daemon=True).start()

    def say_ready(self, ready: Ready) -> None:
        """Write the one line. If the parent is gone, the watching thread notices it."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self._socket.send(ready.to_line())

    def stop_by(self, stop: Callable[[], object], *, grace_s: float) -> None:
        """Call this, in the watching thread, instead of sending SIGTERM when the parent is gone.

        For a program that a second SIGTERM ends at once: it may be stopping already.

        Args:
            stop: Begins to stop.
            grace_s: How long that may take from now on.
        """
        self._stop, self._grace_s = stop, grace_s

    def _watch(self) -> None:
        # The parent never writes, so this returns only when the parent's end is closed.
        self._socket.recv(1)
        # An event loop that is closed has ended the program's work.
        with suppress(RuntimeError):
            self._stop()
        threading.Event().wait(self._grace_s)
        os._exit(ExitCode.PARENT_GONE)


def attach(*, grace_s: float = 5.0) -> Lifeline | None:
    """Tie this process to its parent, if the parent gave it a lifeline. Call it first.

    When the parent is gone, this process gets SIGTERM (see ``Lifeline.stop_by``), and ends by force
    after the grace.

    Args:
        grace_s: How long it may take to stop by itself.

    Returns:
        This end of the lifeline; None: the parent gave none.
    """
    number = os.environ.pop(VARIABLE, "")
    return Lifeline(int(number), grace_s=grace_s) if number else None
