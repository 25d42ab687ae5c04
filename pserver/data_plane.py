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

    def extend_lease(self, remaining_ms: int) -> None:
        """Tell it for how long this node's lease is surely alive; 0: it is lost."""
        self.server.extend_lease(remaining_ms)

    def wait_report(self, known: int, timeout_ms: int) -> tuple[int, str]:
        """Wait until there is a newer report than number ``known``; call it in a thread."""
        return self.server.wait_report(known, timeout_ms)

    def stop(self, grace_ms: int) -> bool:
        """Stop taking requests, answer those being served, close. False if cut off by grace."""
        return self.server.stop(grace_ms)
