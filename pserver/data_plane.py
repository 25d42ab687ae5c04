"""What the control plane asks of the native data server, in terms of records.

A thin adapter: it turns records into the arguments of the native calls. Rows never pass here.
"""

from __future__ import annotations

import threading

import numpy as np

from backstay._native import DataServer
from backstay.consensus.records import NO_MASTER, RoutingTable

__all__ = ["DataPlane"]


class DataPlane:
    """One node's data server, fed with routing and lease."""

    def __init__(self, server: DataServer, instance: int) -> None:
        """Wrap a server.

        Args:
            server: The native server.
            instance: This process, as routing tables name it.
        """
        self.server = server
        self._instance = instance
        self._stopped = threading.Event()

    def apply_routing(self, routing: RoutingTable) -> None:
        """Go by a routing table; one that is older than the present one is ignored."""
        index = next(
            (
                number
                for number, node in enumerate(routing.nodes)
                if node.instance == self._instance
            ),
            None,
        )
        owned = np.zeros(routing.slot_count, dtype=np.bool_)
        if index is not None and index != NO_MASTER:
            owned = routing.master_of_slot == index
        self.server.set_routing(routing.version, owned)

    def extend_lease(self, remaining_ms: int) -> None:
        """Tell it for how long this node's lease is surely alive; 0: it is lost."""

    def wait_report(self, known: int, timeout_ms: int) -> tuple[int, str]:
        """Wait until there is a newer report than number ``known``; call it in a thread."""
        self._stopped.wait(timeout_ms / 1000)
        return known, "{}"

    def stop(self, grace_ms: int) -> bool:
        """Stop taking requests, answer those being served, close. False if cut off by grace."""
        self._stopped.set()
        return self.server.stop(grace_ms)
