"""What the control plane asks of the native data server.

A thin adapter, so that one place knows the native calls. Rows never pass here.
"""

from __future__ import annotations

from backstay._native import DataServer

__all__ = ["DataPlane"]


class DataPlane:
    """One node's data server, fed with routing and lease."""

    def __init__(self, server: DataServer) -> None:
        """Wrap a server."""
        self.server = server

    def apply_routing(self, routing_json: str) -> None:
        """Go by a routing record; one that is older than the present one is ignored."""
        self.server.set_routing_json(routing_json)

    def hold_lease_until(self, until_s: float) -> None:
        """Tell it until which moment of ``clock_s`` this node's lease is surely alive; 0: lost.

        A moment and not a duration: a process that is paused on the way would lengthen the lease.
        """
        self.server.hold_lease_until(until_s)

    def wait_report(self, known: int, timeout_ms: int) -> tuple[int, str]:
        """Wait until there is a newer report than number ``known``; call it in a thread."""
        return self.server.wait_report(known, timeout_ms)

    def stop(self, grace_ms: int) -> bool:
        """Stop taking requests, answer those being served, close. False if cut off by grace."""
        return self.server.stop(grace_ms)
