"""What a node's control plane counts and times, for metrics and for ``pserverctl``.

Plain values, written by the event loop and read by the thread that answers a scrape; each is
replaced whole, so a reader sees the old one or the new one. Times come as arguments. It imports
records only, and decides nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from backstay.consensus import ClusterSnapshot
from backstay.consensus.records.routing import NO_MASTER, RoutingTable
from backstay.pserver.metrics.export_figures import ExportsFigures

__all__ = [
    "FAILOVER_BOUNDS_S",
    "Checkpoints",
    "ControlFigures",
    "Durations",
    "Failover",
    "InSyncChanges",
    "in_sync_changes",
]

FAILOVER_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass(frozen=True)
class Durations:
    """How often something took how long.

    Attributes:
        counts: By ``FAILOVER_BOUNDS_S``, not cumulative; the last one is what took longer.
        sum_s: All of it together.
    """

    counts: tuple[int, ...] = (0,) * (len(FAILOVER_BOUNDS_S) + 1)
    sum_s: float = 0.0

    def with_one(self, seconds: float) -> Durations:
        """Return this and one more."""
        counts = list(self.counts)
        counts[bisect_left(FAILOVER_BOUNDS_S, seconds)] += 1
        return Durations(tuple(counts), self.sum_s + seconds)

    @property
    def total(self) -> int:
        """How many there are."""
        return sum(self.counts)


@dataclass(frozen=True)
class Failover:
    """One node that was lost and replaced in the routing.

    Attributes:
        node_id: The node.
        routing_version: The routing table that goes on without it.
        seconds: From noticing its loss until that table was written.
    """

    node_id: str
    routing_version: int
    seconds: float

    def to_object(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {
            "node_id": self.node_id,
            "routing_version": self.routing_version,
            "duration_ms": round(self.seconds * 1000, 1),
        }


@dataclass(frozen=True)
class Checkpoints:
    """What this node did as the one that was asked for checkpoints.

    Attributes:
        written: Whole checkpoints.
        failed: Saves that were given up.
        last_s: How long the last whole one took.
        last_bytes: Of its files.
    """

    written: int = 0
    failed: int = 0
    last_s: float = 0.0
    last_bytes: int = 0


@dataclass(frozen=True)
class InSyncChanges:
    """Replicas that joined or left the in-sync sets of slots, masters counted among them."""

    added: int = 0
    removed: int = 0


def in_sync_changes(before: RoutingTable, now: RoutingTable, instance: int) -> InSyncChanges:
    """Return what changed in the sets of the slots of which this process is master now."""
    if before.slot_count != now.slot_count:
        return InSyncChanges()
    old_sets, new_sets = _in_sync_instances(before), _in_sync_instances(now)
    pairs, slots = np.unique(
        np.stack((before.set_of_slot, now.set_of_slot)), axis=1, return_counts=True
    )
    added = removed = 0
    for old, new, count in zip(pairs[0].tolist(), pairs[1].tolist(), slots.tolist(), strict=True):
        master = now.sets[new].master
        if master == NO_MASTER or now.nodes[master].instance != instance:
            continue
        added += count * len(new_sets[new] - old_sets[old])
        removed += count * len(old_sets[old] - new_sets[new])
    return InSyncChanges(added, removed)


def _in_sync_instances(routing: RoutingTable) -> list[frozenset[int]]:
    return [
        frozenset(routing.nodes[index].instance for index in one.synced) for one in routing.sets
    ]


def _holders(routing: RoutingTable) -> dict[int, str]:
    """Return who is master or in-sync backup of anything: instance to id."""
    indexes = {index for one in routing.sets for index in one.synced}
    return {routing.nodes[index].instance: routing.nodes[index].node_id for index in indexes}


class ControlFigures:
    """What the control plane of one node has done."""

    def __init__(self, memory_limit_bytes: int = 0) -> None:
        self.memory_limit_bytes = memory_limit_bytes
        self.is_controller = False
        self.lease_until_s = 0.0
        self.failovers = Durations()
        self.last_failover: Failover | None = None
        self.trainers = 0
        self.in_sync = InSyncChanges()
        self.checkpoints = Checkpoints()
        self.checkpoint_trouble = ""
        self.exports = ExportsFigures()
        self.report_sizes: Mapping[str, int] = {
            "silent": 0,
            "full": 0,
            "caught_up": 0,
            "refused": 0,
        }
        self._lost_since: dict[int, float] = {}
        self._holders: tuple[int, dict[int, str]] = (0, {})

    def take_routing(self, before: RoutingTable | None, now: RoutingTable, instance: int) -> None:
        """Count what a newer routing table changed for the slots of this process."""
        if before is not None:
            more = in_sync_changes(before, now, instance)
            self.in_sync = InSyncChanges(
                self.in_sync.added + more.added, self.in_sync.removed + more.removed
            )

    def checkpoint_written(self, seconds: float, size_bytes: int) -> None:
        """Count a whole checkpoint."""
        self.checkpoints = replace(
            self.checkpoints,
            written=self.checkpoints.written + 1,
            last_s=seconds,
            last_bytes=size_bytes,
        )

    def checkpoint_failed(self) -> None:
        """Count one that was given up."""
        self.checkpoints = replace(self.checkpoints, failed=self.checkpoints.failed + 1)

    def hears_from(self, trainers: int) -> None:
        """Note how many trainers tell this node that they are alive."""
        self.trainers = trainers

    def scheduled_checkpoints_fail(self, why: str) -> None:
        """Note why the last one that was due could not be written; empty: it was."""
        self.checkpoint_trouble = why

    def notice(self, snapshot: ClusterSnapshot, now_s: float) -> None:
        """Note since when which nodes that the routing relies on are lost."""
        routing = snapshot.routing
        if routing is None:
            return
        if self._holders[0] != routing.version:
            self._holders = (routing.version, _holders(routing))
        alive = {member.instance for member in snapshot.members.values()} - snapshot.deaths.keys()
        lost = self._holders[1].keys() - alive
        self._lost_since = {one: self._lost_since.get(one, now_s) for one in lost}

    def lost(self) -> Mapping[int, float]:
        """Return who is lost at present, and since when."""
        return dict(self._lost_since)

    def routing_written(
        self,
        lost: Mapping[int, float],
        before: RoutingTable | None,
        now: RoutingTable,
        now_s: float,
    ) -> None:
        """Time the failovers that a routing table which this controller wrote completes.

        Args:
            lost: ``lost()`` of when the table was decided.
            before: The table that it replaces.
            now: The table.
            now_s: When it had been written.
        """
        if before is None or not lost:
            return
        replaced = _holders(before).items() - _holders(now).items()
        for instance, node_id in sorted(replaced):
            since_s = lost.get(instance)
            if since_s is not None:
                one = Failover(node_id, now.version, now_s - since_s)
                self.failovers = self.failovers.with_one(one.seconds)
                self.last_failover = one

    def to_object(
        self, snapshot: ClusterSnapshot, now_s: float, cpu_s: float = 0.0
    ) -> dict[str, Any]:
        """Return the figures as a JSON object; ``cpu_s`` is what this process used."""
        last, plan, newest = self.last_failover, snapshot.plan, snapshot.checkpoint
        return {
            "controller": self.is_controller,
            "store_reachable": not snapshot.trouble,
            "store_trouble": snapshot.trouble,
            "memory_limit_bytes": self.memory_limit_bytes,
            "cpu_s": cpu_s,
            "lease_remaining_ms": max(0, round((self.lease_until_s - now_s) * 1000)),
            "report": dict(self.report_sizes),
            "in_sync_added": self.in_sync.added,
            "in_sync_removed": self.in_sync.removed,
            "failovers": self.failovers.total,
            "last_failover": last.to_object() if last is not None else None,
            "plan": None
            if plan is None
            else {
                "kind": plan.kind,
                "state": plan.state,
                "reason": plan.reason,
                "moves_left": plan.moves_left,
                "moves_total": plan.moves_total,
            },
            "checkpoint": None
            if newest is None
            else {"id": newest.id, "created": newest.created, "url": newest.url},
            "checkpoint_trouble": self.checkpoint_trouble,
            "loss": _loss(snapshot),
            "saving": None if snapshot.save is None else snapshot.save.id,
            "topics": self.exports.to_object(),
        }


def _loss(snapshot: ClusterSnapshot) -> dict[str, Any] | None:
    """Return the last loss of slots with all their copies, and what became of it."""
    routing, plan, accepted = snapshot.routing, snapshot.restore, snapshot.loss
    if routing is not None and routing.lost:
        first = min(int(routing.epoch_of_slot[slot]) for slot in routing.lost)
        return {"state": "waits", "slots": len(routing.lost), "routing_version": first}
    if plan is not None and plan.lost and (accepted is None or plan.version > accepted.version):
        return {
            "state": "restored" if plan.state == "done" else "restoring",
            "slots": plan.lost,
            "routing_version": plan.version,
            "checkpoint": plan.checkpoint,
            "created": plan.created,
        }
    if accepted is None:
        return None
    return {
        "state": "accepted",
        "slots": accepted.slots,
        "routing_version": accepted.version,
        "time": accepted.time,
    }
