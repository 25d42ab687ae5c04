"""The line between a node and the program that started it, if there is one.

It is one end of a socket pair, inherited as a file descriptor. The node writes one line of JSON
when it is ready, and stops when the other end closes; so a parent waits without polling, and
no node outlives a parent, however that ended. It imports nothing of the package.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass

__all__ = ["Ready", "Supervisor"]


@dataclass(frozen=True)
class Ready:
    """What a node says when it serves."""

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


class Supervisor:
    """The node's end of the line."""

    def __init__(self, file_descriptor: int) -> None:
        """Take over an inherited descriptor."""
        self._socket = socket.socket(fileno=file_descriptor)
        self._socket.setblocking(False)
        # Programs that this process starts must not keep the line open.
        self._socket.set_inheritable(False)

    def on_close(self, stop: Callable[[], None]) -> None:
        """Call ``stop`` when the other end closes; call this while the event loop runs."""
        loop = asyncio.get_running_loop()

        def readable() -> None:
            # The parent never writes, so this can only be the end of it.
            loop.remove_reader(self._socket)
            stop()

        loop.add_reader(self._socket, readable)

    def say_ready(self, ready: Ready) -> None:
        """Write the one line; a parent that is gone is noticed by ``on_close``."""
        try:
            self._socket.send(ready.to_line())
        except (BrokenPipeError, ConnectionResetError):
            return

    def close(self) -> None:
        """Close this end."""
        self._socket.close()
