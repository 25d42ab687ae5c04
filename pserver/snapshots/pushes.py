"""Counts the pushes that the servers have applied since a moment, for snapshots that go by pushes.

Asks the nodes for their figures, and leaves out a node that does not answer. It may import the view
of the cluster and the calls to its nodes; it never writes and decides nothing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import NamedTuple

from backstay.consensus import ClusterView
from backstay.consensus.records import MemberRecord
from backstay.errors import BackstayError
from backstay.pserver.peers import PeerCalls

__all__ = ["PushCounts", "PushLook", "PushesSince"]

# A node that hangs keeps its lease for longer than a snapshot may wait for a count.
ANSWER_S = 1.0


class PushLook(NamedTuple):
    """The counts of a moment; a process is named by its instance.

    Attributes:
        members: The processes that were in the cluster.
        counts: Of those that answered, how many pushes each has applied as a master since it began.
    """

    members: frozenset[int]
    counts: Mapping[int, int]


class PushesSince:
    """How many pushes each process has applied since a moment. Pure.

    A process that answered then counts what it has applied since. One that was silent then begins
    at its first answer: what it had applied before is not known to be newer. One that came later
    counts all that it has applied. What a process has counted stays when it is gone.
    """

    def __init__(self, then: PushLook) -> None:
        """Begin at a look."""
        self._members = then.members
        self._begins = dict(then.counts)
        self._since: dict[int, int] = {}

    def look(self, now: PushLook) -> None:
        """Take over a later look."""
        for process, count in now.counts.items():
            begin = self._begins.setdefault(process, count if process in self._members else 0)
            self._since[process] = max(count - begin, 0)

    @property
    def busiest(self) -> int:
        """Of the process that has applied most."""
        return max(self._since.values(), default=0)

    @property
    def total(self) -> int:
        """Of all; a push counts once for each master that it touched."""
        return sum(self._since.values())


class PushCounts:
    """Looks at the nodes of a cluster."""

    def __init__(self, view: ClusterView, calls: PeerCalls) -> None:
        """Prepare; ``view`` is the cluster as this node sees it."""
        self._view = view
        self._calls = calls

    async def look(self) -> PushLook:
        """Return what the nodes count now."""
        nodes = list(self._view.snapshot().members.values())
        counts = await asyncio.gather(*map(self._of, nodes))
        answered = zip(nodes, counts, strict=True)
        return PushLook(
            frozenset(node.instance for node in nodes),
            {node.instance: count for node, count in answered if count is not None},
        )

    async def _of(self, node: MemberRecord) -> int | None:
        try:
            call = self._calls.node_stats(node.control_address)
            answer = await asyncio.wait_for(call, ANSWER_S)
        except (BackstayError, asyncio.TimeoutError):
            return None
        count: int = json.loads(answer.data_plane_json)["pushes_applied"]
        return count
