"""Ports of this machine for servers that are stopped and started again at the same address.

The system has a range from which it gives ports to connections, and to whoever asks for any. A
port from there is soon another's while its server is away; these are below the usual range. Who
asks may still come too late: between the answer and the server's start a port can be taken.
Asks the kernel; imports nothing of backstay.
"""

from __future__ import annotations

import secrets
import socket

__all__ = ["free_ports"]

# Linux gives away ports from 32768 on, others from 49152.
FIRST, COUNT = 20_000, 12_000
TRIES_MAX = 10_000


def free_ports(count: int) -> list[int]:
    """Return loopback ports that nobody uses now, all different, in no order.

    Raises:
        OSError: There are hardly any.
    """
    free: set[int] = set()
    for _ in range(TRIES_MAX):
        if len(free) == count:
            return list(free)
        port = FIRST + secrets.randbelow(COUNT)
        with socket.socket() as tried:
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
        free.add(port)
    raise OSError(f"fewer than {count} of the ports from {FIRST} to {FIRST + COUNT - 1} are free")
