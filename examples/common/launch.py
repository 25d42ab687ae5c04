"""What a program that starts servers and a job needs: their deaths noticed, its own stop in order.

May import backstay's local cluster. Starts no process itself.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import FrameType

from backstay.pserver.local_cluster import LocalCluster

__all__ = ["ProcessFailed", "check_servers", "stops_held_back"]


class ProcessFailed(RuntimeError):
    """A server died, or the job failed; the message holds the end of what it wrote."""


@contextmanager
def stops_held_back() -> Iterator[None]:
    """Let SIGTERM and Ctrl-C wait for the end of the block.

    A handler that raises while a process is being started would leave one behind that nobody
    knows. Handlers, unlike a mask of signals, are not passed on to it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []

    def hold(number: int, _: FrameType | None) -> None:
        held.append(number)

    before = {number: signal.signal(number, hold) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for stop in held:
            signal.raise_signal(stop)


def check_servers(cluster: LocalCluster, *, but: Collection[str] = ()) -> None:
    """Make sure that all servers run.

    Args:
        cluster: The servers.
        but: The ids of the nodes that may be down.

    Raises:
        ProcessFailed: One has died; the message holds the end of its log.
    """
    # A copy: one that leaves by a resize is taken off the list by another thread.
    for server in list(cluster.servers):
        if not server.is_running and server.node_id not in but:
            raise ProcessFailed(
                f"server {server.node_id} at {server.control_address} has died (exit status "
                f"{server.process.returncode}); it wrote last:\n{server.log_tail()}"
            )
