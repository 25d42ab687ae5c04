"""Evidence that a process is gone: its ports refuse connections.

A refusal comes from the operating system of the machine at that address and says that nothing
listens there; a time-out says nothing, because a machine or a network that hangs looks the
same. It opens sockets and closes them; it never sends a byte and changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from backstay.addresses import is_loopback, split_address

__all__ = ["Presence", "all_refuse", "can_judge"]

CONNECT_TIMEOUT_S = 1.0


class Presence:
    """What stands at an address, as far as one attempt to connect tells."""

    LISTENS = "listens"
    REFUSES = "refuses"
    UNKNOWN = "unknown"


async def presence_at(address: str, timeout_s: float = CONNECT_TIMEOUT_S) -> str:
    """Try once to connect and return one of ``Presence``."""
    host, port = split_address("address", address)
    try:
        _, writer = await asyncio.wait_for(
            asyncio.open_connection(host.strip("[]"), port), timeout=timeout_s
        )
    except ConnectionRefusedError:
        return Presence.REFUSES
    except (OSError, asyncio.TimeoutError):
        return Presence.UNKNOWN
    # An abort, not a close: the peer need not answer, and this side waits for nothing.
    writer.transport.abort()
    return Presence.LISTENS


async def all_refuse(addresses: Sequence[str], timeout_s: float = CONNECT_TIMEOUT_S) -> bool:
    """Whether every one of the addresses refuses connections; False if there is none."""
    found = await asyncio.gather(*(presence_at(address, timeout_s) for address in addresses))
    return bool(found) and all(presence == Presence.REFUSES for presence in found)


def can_judge(own_host: str, their_host: str, addresses: Sequence[str]) -> bool:
    """Whether a refusal seen from here says anything about a process on another machine.

    A loopback address means this machine, also if another host announced it.
    """
    hosts = [split_address("address", address)[0] for address in addresses]
    return own_host == their_host or not any(is_loopback(host) for host in hosts)
