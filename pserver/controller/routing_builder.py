"""Builder of a routing table: the table while a decision changes it.

Processes are numbered by their place in the routing table that is there, new ones after them,
so that a number means the same process before and after; ``finish`` numbers them anew. Terms
are not set by those who change a slot: ``finish`` compares master and in-sync set with what
they were, so that no change can forget its term.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from backstay.consensus.records import (
    GONE_MAX,
    NO_MASTER,
    NOT_RESTORING,
    Event,
    EventKind,
    NodeRecord,
    NodeReport,
    Restoring,
    RoutingTable,
    SlotReplicas,
)
from backstay.errors import InvalidRequest
from backstay.pserver.controller.inputs import STEP_SIZES, ClusterRecords, StepSizes

__all__ = ["CATCHING_UP_MAX", "RoutingBuilder"]

# Slots that one process may be copying in at a time: a bound on the memory and the traffic of
# snapshots under way.
CATCHING_UP_MAX = 64
# Slots that an event names.
EVENT_SLOTS_MAX = 8


class RoutingBuilder:
    """The working state of one decision.

    Attributes:
        before: The routing table that is there.
        wanted: Copies wanted of each slot.
        processes: The processes by number.
        index_of: Their numbers by instance.
        alive: By number, whether the lease is alive and the process is not known dead.
        able: By number, whether it is alive and serves.
        leaves: By number, whether it is alive and a plan wants it to hold nothing.
        serving: By number, whether it is able and does not leave: only such take something new.
        waiting: By number, whether it may still come back with its memory.
        gone: By number, whether its memory is gone: it is dead, or another has its node id.
        held: For each slot the processes that hold it, by number.
        masters: By number, the slots it is master of.
        copies: By number, the slots it holds.
        copying: By number, the slots it is catching up in.
        hosts: By number, a number for its host.
        bytes_of_slot: The size of each slot; None if it is not known.
        moves_at_once: Slots that may be on the move at one time.
        sizes: Of steps.
        full: Numbers of those who had no room for a copy a short time ago.
        new_epoch: Slots that begin anew in this decision: a node that holds something of them holds
            nothing that counts.
        lost: Slots that lost all their copies and wait for a decision.
        restoring: Slots that wait for their content from a checkpoint, which is ``source``.
        given_up: Numbers of those who had them and may still live.
    """

    def __init__(
        self, records: ClusterRecords, before: RoutingTable, sizes: StepSizes = STEP_SIZES
    ) -> None:
        self.before = before
        self.wanted = records.config.replicas
        members = {key: records.members[key] for key in sorted(records.members)}
        self._dead = known_dead = records.gone | set(before.gone)
        living = {
            member.instance: member
            for member in members.values()
            if member.instance not in known_dead
        }
        self.processes: list[NodeRecord] = []
        for node in before.nodes:
            member = living.get(node.instance)
            self.processes.append(_stored(member.node()) if member else node)
        known = {node.instance for node in before.nodes}
        self.processes += [_stored(m.node()) for m in living.values() if m.instance not in known]
        self.index_of = {node.instance: i for i, node in enumerate(self.processes)}
        # A node id that is registered by another process: the one listed has lost its memory.
        # A process that is known dead replaces no other: then it is the record that is old.
        owner = {member.node_id: member.instance for member in living.values()}
        self.gone = [
            node.instance in known_dead or owner.get(node.node_id, node.instance) != node.instance
            for node in self.processes
        ]
        self.alive = [
            node.instance in living and not gone
            for node, gone in zip(self.processes, self.gone, strict=True)
        ]
        self.able = [
            alive and living[node.instance].status == "serving"
            for node, alive in zip(self.processes, self.alive, strict=True)
        ]
        plan = records.plan
        self.leaves = [
            alive and plan is not None and plan.lets_go(node.node_id, node.instance)
            for node, alive in zip(self.processes, self.alive, strict=True)
        ]
        self.serving = [
            able and not leaves for able, leaves in zip(self.able, self.leaves, strict=True)
        ]
        self.bytes_of_slot = (
            None if records.bytes_of_slot is None else records.bytes_of_slot.tolist()
        )
        self.moves_at_once = records.moves_at_once
        self.sizes = sizes
        self.waiting = [
            node.instance in records.waiting and not alive and not gone
            for node, alive, gone in zip(self.processes, self.alive, self.gone, strict=True)
        ]
        self.hosts = _host_numbers(self.processes)
        self.held: list[SlotReplicas] = list(before.replicas_of_slot)
        self.changed: dict[int, None] = {}
        self.new_epoch: set[int] = set()
        self.lost = set(before.lost)
        self.restoring = set(before.restoring.slots)
        self.source = before.restoring[:2]
        self.given_up: set[int] = set()
        self._count()
        self._apart = self._who_is_apart(records)
        self.full = {
            self.index_of[one]
            for _, report in self.heard(records)
            for one in report.full
            if one in self.index_of
        }
        self._notes: dict[tuple[EventKind, int, str], list[int]] = defaultdict(list)

    def slots_with(self, numbers: set[int]) -> list[int]:
        """Return the slots of the table that is there in which one of the processes is."""
        concerned = [
            master in numbers or not numbers.isdisjoint(in_sync + catching_up)
            for master, in_sync, catching_up in self.before.sets
        ]
        return np.flatnonzero(np.array(concerned)[self.before.set_of_slot]).tolist()

    def reaches(self, process: int, others: Iterable[int]) -> bool:
        """Return whether no report says that it and one of the others do not hear each other.

        A slot of such a pair keeps no copy in sync, so placements avoid it. Also a report that
        has not caught up with the last table counts here: else a copy that was taken from a
        silent node would be given back to it at once.
        """
        return self._apart[process].isdisjoint(others)

    def apart_from(self, process: int) -> set[int]:
        """Return the processes that it is reported not to hear, or that do not hear it."""
        return self._apart[process]

    def heard(self, records: ClusterRecords) -> Iterator[tuple[int, NodeReport]]:
        """Yield the reports of processes that are alive, each with its writer's number."""
        for instance in sorted(records.reports):
            report = records.reports[instance]
            reporter = self.index_of.get(instance)
            if reporter is not None and self.alive[reporter] and report.instance == instance:
                yield reporter, report

    def heir(self, in_sync: Sequence[int]) -> int:
        """Return which of the in-sync backups of a slot is to be its master.

        One that serves and hears the others; of those the one that is master of fewest slots.
        """

        def weight(number: int) -> tuple[bool, bool, int]:
            return (
                not self.serving[number],
                not self.reaches(number, in_sync),
                self.masters[number],
            )

        return min(in_sync, key=weight)

    def least_loaded(self) -> int | None:
        """Return the node that takes a slot without a replica; None: no node serves.

        Nodes that are to leave are better than none.
        """
        serving = np.flatnonzero(self.serving if any(self.serving) else self.able)
        if not serving.size:
            return None
        return int(serving[np.lexsort((self.copies[serving], self.masters[serving]))[0]])

    def put(self, slot: int, held: SlotReplicas) -> None:
        """Change who holds a slot."""
        old = self.held[slot]
        for number, sign in ((old, -1), (held, 1)):
            if number.master != NO_MASTER:
                self.masters[number.master] += sign
            for holder in number.holders:
                self.copies[holder] += sign
            for holder in number.catching_up:
                self.copying[holder] += sign
        self.held[slot] = held
        self.changed[slot] = None

    def restore(self, slot: int, url: str, checkpoint: str) -> None:
        """Let a slot begin anew and take its content from a checkpoint.

        One checkpoint at a time: slots that still wait for another one begin anew as well, to
        wait for this. Their new epoch tells what is loaded from this one from what came from
        the other.
        """
        if self.restoring and self.source != (url, checkpoint):
            self.new_epoch |= self.restoring
        self.source = (url, checkpoint)
        self.new_epoch.add(slot)
        self.restoring.add(slot)
        self.lost.discard(slot)

    def note(self, kind: EventKind, process: int, reason: str, slot: int | None = None) -> None:
        """Remember what was decided; what agrees in all but the slot becomes one event.

        ``reason`` may hold ``{slots}``, which becomes the number of slots in words.
        """
        concerned = self._notes[kind, process, reason]
        if slot is not None:
            concerned.append(slot)

    def name(self, process: int) -> str:
        """Return the node id of a process."""
        return self.processes[process].node_id

    def state(self, process: int) -> str:
        """Return in words why a process that is not alive is not."""
        return "the process is gone" if self.gone[process] else "the lease is over"

    def finish(self) -> tuple[RoutingTable | None, tuple[Event, ...]]:
        """Return the new routing table, or None if it would be the old one, and the events."""
        version = self.before.version + 1
        terms = self.before.term_of_slot.copy()
        epochs = self.before.epoch_of_slot.copy()
        differs = False
        for slot in sorted(self.changed):
            old, new = self.before.replicas_of_slot[slot], self.held[slot]
            if old == new:
                continue
            differs = True
            if old.master != new.master or set(old.in_sync) != set(new.in_sync):
                terms[slot] += 1
        epochs[sorted(self.new_epoch)] = version
        nodes, held = self._numbered_anew()
        # Their read leases are not waited for. One whose id another process has taken may live
        # on for a moment, cut off from the store.
        newly_gone = sorted(
            node.instance
            for node in self.processes
            if node.instance in self._dead and node.instance not in self.before.gone
        )
        gone = (*self.before.gone, *newly_gone)[-GONE_MAX:]
        restoring = NOT_RESTORING
        if self.restoring:
            restoring = Restoring(*self.source, tuple(sorted(self.restoring)))
        if (
            not differs
            and nodes == tuple(_stored(node) for node in self.before.nodes)
            and gone == self.before.gone
            and self.wanted == self.before.replicas
            and restoring == self.before.restoring
            and not self.new_epoch
            and self.lost == set(self.before.lost)
        ):
            return None, ()
        table = RoutingTable(
            version=version,
            nodes=nodes,
            replicas=self.wanted,
            replicas_of_slot=held,
            term_of_slot=terms,
            epoch_of_slot=epochs,
            generation=self.before.generation + bool(self.new_epoch),
            gone=gone,
            restoring=restoring,
            lost=tuple(sorted(self.lost)),
        )
        return table, self._events(version)

    def _who_is_apart(self, records: ClusterRecords) -> list[set[int]]:
        apart: list[set[int]] = [set() for _ in self.processes]
        for reporter, report in self.heard(records):
            for other in report.silent:
                number = self.index_of.get(other, reporter)
                if number != reporter:
                    apart[reporter].add(number)
                    apart[number].add(reporter)
        return apart

    def _count(self) -> None:
        count = len(self.processes)
        # Lists: adding to an element of an array takes ten times as long.
        masters, backups, copying = [0] * count, [0] * count, [0] * count
        slots_of_set = np.bincount(self.before.set_of_slot, minlength=len(self.before.sets))
        for (master, in_sync, catching_up), slots in zip(
            self.before.sets, slots_of_set.tolist(), strict=True
        ):
            if master != NO_MASTER:
                masters[master] += slots
            for holder in in_sync:
                backups[holder] += slots
            for holder in catching_up:
                copying[holder] += slots
        self.masters = np.array(masters, dtype=np.int64)
        self.copying = np.array(copying, dtype=np.int64)
        self.copies = self.masters + self.copying + np.array(backups, dtype=np.int64)

    def _numbered_anew(self) -> tuple[tuple[NodeRecord, ...], tuple[SlotReplicas, ...]]:
        """Leave out the processes that are neither alive nor in any set."""
        kept = [
            number
            for number in range(len(self.processes))
            if self.alive[number] or self.copies[number]
        ]
        nodes = tuple(self.processes[number] for number in kept)
        if not nodes:
            raise InvalidRequest("no node is registered, so none can be the controller")
        if kept == list(range(len(kept))):
            return nodes, tuple(self.held)
        new = dict(zip(kept, range(len(kept)), strict=True))
        new[NO_MASTER] = NO_MASTER
        translated: dict[SlotReplicas, SlotReplicas] = {}
        held = []
        for old in self.held:
            one = translated.get(old)
            if one is None:
                one = translated[old] = SlotReplicas(
                    new[old.master],
                    tuple([new[number] for number in old.in_sync]),
                    tuple([new[number] for number in old.catching_up]),
                )
            held.append(one)
        return nodes, tuple(held)

    def _events(self, version: int) -> tuple[Event, ...]:
        return tuple(
            Event(
                routing_version=version,
                kind=kind,
                node=self.name(process) if process >= 0 else "",
                slot_count=len(slots),
                slots=tuple(sorted(slots)[:EVENT_SLOTS_MAX]),
                reason=reason.replace("{slots}", counted(len(slots), "slot")),
            )
            for (kind, process, reason), slots in self._notes.items()
        )


def counted(count: int, noun: str) -> str:
    """Return a count with its noun."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _host_numbers(processes: Sequence[NodeRecord]) -> NDArray[np.int64]:
    """Return for each process a number for its host."""
    numbers: dict[str, int] = {}
    # A node that names no host is taken for a machine of its own.
    hosts = [node.host or f"/{node.node_id}" for node in processes]
    return np.array([numbers.setdefault(host, len(numbers)) for host in hosts], dtype=np.int64)


def _stored(node: NodeRecord) -> NodeRecord:
    """Return a node as the routing table keeps it: without its status."""
    return replace(node, status="unknown")
