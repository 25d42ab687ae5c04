"""Counts the pushes that the servers have applied, for exports that go by pushes.

Asks the nodes for their figures, and leaves out a node that does not answer. It may import the view
of the cluster and the calls to its nodes; it never writes and decides nothing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping

from backstay.consensus import ClusterView
from backstay.consensus.records import MemberRecord
from backstay.errors import BackstayError
from backstay.pserver.peers import PeerCalls

__all__ = ["PushCounts", "most_since"]

# A node that hangs keeps its lease for longer than an increment may wait for a count.
ANSWER_S = 1.0


def most_since(then: Mapping[str, int], now: Mapping[str, int]) -> int:
    """Return how many pushes the busiest node has applied between two counts. Pure.

    A node that was not there then, or that began anew, has applied all that it counts now.
    """
    since = (
        count - then[node] if count >= then.get(node, count + 1) else count
        for node, count in now.items()
    )
    return max(since, default=0)


class PushCounts:
    """Counts of the nodes of a cluster."""

    def __init__(self, view: ClusterView, calls: PeerCalls) -> None:
        """Prepare; ``view`` is the cluster as this node sees it."""
        self._view = view
        self._calls = calls

    async def now(self) -> dict[str, int]:
        """Return the pushes that each node has applied as a master since it began."""
        nodes = list(self._view.snapshot().members.values())
        counts = await asyncio.gather(*map(self._of, nodes))
        return {
            node.node_id: count
            for node, count in zip(nodes, counts, strict=True)
            if count is not None
        }

    async def _of(self, node: MemberRecord) -> int | None:
        try:
            call = self._calls.node_stats(node.control_address)
            answer = await asyncio.wait_for(call, ANSWER_S)
        except (BackstayError, asyncio.TimeoutError):
            return None
        count: int = json.loads(answer.data_plane_json)["pushes_applied"]
        return count
