"""A line between a process and the program that started it: when one end goes, the other knows.

It is one end of a socket pair, inherited as a file descriptor that the variable
``BACKSTAY_LIFELINE`` names. The kernel closes the parent's end however the parent ends, SIGKILL
included; the child then stops as after SIGTERM, and is gone at the latest when its grace is over.
So nothing that we start outlives us. It imports nothing of the package.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

__all__ = ["VARIABLE", "attach", "last_words", "start"]

VARIABLE = "BACKSTAY_LIFELINE"
EXIT_PARENT_GONE = 70


def start(
    command: Sequence[str], *, env: Mapping[str, str], log: IO[bytes] | int | None
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a program in a session of its own, with a line to it.

    Args:
        command: The program and its arguments.
        env: Its whole environment; the variable of the line is added.
        log: Where its output goes; None: where ours goes.

    Returns:
        The process and our end of the line. Close that only when the process is to end, or has.

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


def attach(*, grace_s: float = 5.0) -> bool:
    """Tie this process to the one that started it, if that one gave it a line; call it first.

    When the line closes, this process gets SIGTERM, and ends by force after the grace.

    Args:
        grace_s: How long it may take to stop by itself.

    Returns:
        Whether there is a line.
    """
    text = os.environ.pop(VARIABLE, "")
    if not text:
        return False
    line = socket.socket(fileno=int(text))
    # Programs that this process starts must not keep the line open.
    line.set_inheritable(False)
    threading.Thread(target=_watch, args=(line, grace_s), name="lifeline", daemon=True).start()
    return True


def _watch(line: socket.socket, grace_s: float) -> None:
    # The parent never writes, so this returns at the end of it only.
    line.recv(1)
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(grace_s)
    os._exit(EXIT_PARENT_GONE)
