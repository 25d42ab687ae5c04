"""What masters report: backups that are silent, and backups that have caught up.

A report counts only if its writer had the routing table in force that is there now. An older
one may speak of a stay in a slot that has ended since: a backup that caught up, was dropped and
taken in again holds nothing, at the same term.
"""

from __future__ import annotations

import numpy as np

from backstay.consensus.records import CaughtUp, NodeReport, SlotReplicas
from backstay.pserver.controller.inputs import ClusterRecords
from backstay.pserver.controller.routing_builder import RoutingBuilder

__all__ = ["REPORTS_MAX", "follow_reports"]

# Masters whose caught_up reports one decision may rely on: the transaction that writes it
# compares the revision of each, and etcd takes 128 comparisons and operations.
REPORTS_MAX = 64


def follow_reports(builder: RoutingBuilder, records: ClusterRecords) -> tuple[int, ...]:
    """Remove silent backups from the in-sync sets and add caught-up ones.

    Returns:
        The instances of the masters on whose word a backup was taken in.
    """
    relied_on: list[int] = []
    for reporter, report in builder.heard(records):
        if report.routing_version != builder.before.version:
            continue
        silent = {builder.index_of[one] for one in report.silent if one in builder.index_of}
        silent.discard(reporter)
        if silent:
            _take_out(builder, reporter, silent)
        full = {builder.index_of[one] for one in report.full if one in builder.index_of}
        if full:
            _spare(builder, reporter, full)
        if len(relied_on) < REPORTS_MAX and _take_in(builder, reporter, silent, report):
            relied_on.append(report.instance)
    return tuple(relied_on)


def _take_out(builder: RoutingBuilder, reporter: int, silent: set[int]) -> None:
    """Nothing that the reporter masters is to wait for the silent ones any more.

    A silent backup has to catch up. One that was catching up loses its place: its master may
    have asked for it to be taken in, and waits for it until a table says otherwise.
    """
    for slot in np.flatnonzero(builder.before.master_of_slot == reporter).tolist():
        held = builder.held[slot]
        out = tuple([number for number in held.in_sync if number in silent])
        stay = tuple([number for number in held.in_sync if number not in silent])
        copying = tuple([number for number in held.catching_up if number not in silent])
        if held.in_sync == stay and held.catching_up == copying:
            continue
        builder.put(slot, SlotReplicas(reporter, stay, copying + out))
        for number in out:
            builder.note(
                "backup_silent",
                number,
                f"{builder.name(number)} has to catch up in {{slots}}: {builder.name(reporter)}, "
                "their master, gets no answer from it",
                slot,
            )
        for number in held.catching_up:
            if number in silent:
                builder.note(
                    "copy_dropped",
                    number,
                    f"{builder.name(number)} gets no more copies in {{slots}}: "
                    f"{builder.name(reporter)}, their master, gets no answer from it",
                    slot,
                )


def _spare(builder: RoutingBuilder, reporter: int, full: set[int]) -> None:
    """Copy nothing more of the reporter's slots to those who have no room: others may have."""
    for slot in np.flatnonzero(builder.before.master_of_slot == reporter).tolist():
        held = builder.held[slot]
        stay = tuple([number for number in held.catching_up if number not in full])
        if stay == held.catching_up:
            continue
        builder.put(slot, held._replace(catching_up=stay))
        for number in set(held.catching_up) & full:
            builder.note(
                "copy_dropped",
                number,
                f"{builder.name(number)} gets no more copies in {{slots}}: it has no room "
                "(memory_limit_bytes)",
                slot,
            )


def _take_in(builder: RoutingBuilder, reporter: int, silent: set[int], report: NodeReport) -> bool:
    taken = False
    for entry in sorted(set(report.caught_up)):
        number = builder.index_of.get(entry.instance)
        if number is None or number in silent or not _holds(builder, reporter, number, entry):
            continue
        held = builder.held[entry.slot]
        rest = tuple([one for one in held.catching_up if one != number])
        builder.put(entry.slot, SlotReplicas(reporter, (*held.in_sync, number), rest))
        taken = True
        builder.note(
            "caught_up",
            number,
            f"{builder.name(number)} is in sync in {{slots}}, says their master "
            f"{builder.name(reporter)}",
            entry.slot,
        )
    return taken


def _holds(builder: RoutingBuilder, reporter: int, backup: int, entry: CaughtUp) -> bool:
    """Whether what the entry says is about the slot as it is in the table that is there.

    The reporter is alive and was master there, so it still is: only the dead are replaced
    before reports are followed.
    """
    before = builder.before
    return (
        entry.slot < before.slot_count
        # What is not served yet cannot have been copied: this is about what the slot was before,
        # in the same term, also if this decision lets it be served.
        and entry.slot not in before.restoring.slots
        and entry.slot not in builder.restoring
        and entry.term == int(before.term_of_slot[entry.slot])
        and before.replicas_of_slot[entry.slot].master == reporter
        and backup in builder.held[entry.slot].catching_up
    )
