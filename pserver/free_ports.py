"""Ports of this machine for servers that are stopped and started again at the same address.

The system has a range from which it takes the ports of connections and of programs that ask for
any port. A port of that range can be another program's while its server is away, so these ports are
below it. Another program can still take a port before the server starts.
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
    """Return loopback ports that are free now, all different, in no order.

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
