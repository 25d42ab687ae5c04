"""What a process reports to the controller about the slots it masters.

A value: frozen, checked when made, strict about its JSON form. This module imports
``consensus.json_record``, ``consensus.node_records`` and ``backstay.errors``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from backstay.consensus.json_record import NUMBER_MAX, Count, JsonRecord
from backstay.consensus.node_records import INSTANCE_MAX
from backstay.errors import InvalidRequest

__all__ = ["CaughtUp", "NodeReport"]


class CaughtUp(NamedTuple):
    """A backup that has everything its master has committed, as that master says.

    Attributes:
        slot: The slot.
        term: The slot's term at which the master saw it.
        instance: The backup.
    """

    slot: Count
    term: Count
    instance: Count


@dataclass(frozen=True)
class NodeReport(JsonRecord, what="node report"):
    """``reports/<instance>``: what a process asks of the controller for the slots it masters.

    Attributes:
        instance: The process that reports.
        routing_version: The routing version that it had in force. A report counts at exactly
            this version.
        silent: Nodes that do not answer it: backups to take out of its in-sync sets, and those
            to give no copies.
        full: Nodes that had no room for a copy a short time ago.
        caught_up: Backups to take into them.
        loaded: (slot, its epoch): slots that have their content from a checkpoint now.
        load_trouble: Why slots cannot be loaded from a checkpoint; empty if they can.
    """

    instance: int
    routing_version: int
    silent: tuple[Count, ...] = ()
    full: tuple[Count, ...] = ()
    caught_up: tuple[CaughtUp, ...] = ()
    loaded: tuple[tuple[Count, Count], ...] = ()
    load_trouble: str = ""

    def is_news_after(self, written: NodeReport | None) -> bool:
        """Return whether the store should have this one in place of the one it has.

        Args:
            written: That one; None if it is not known, because an answer did not come.
        """
        if written is None:
            return True
        return (written.asks or self.asks) and self != written

    def adds_copies_only(self, written: NodeReport) -> bool:
        """Return whether it differs from that one in backups that have caught up meanwhile."""
        return set(self.caught_up) >= set(written.caught_up) and self == replace(
            written, caught_up=self.caught_up
        )

    @property
    def asks(self) -> bool:
        """Whether there is anything in it for the controller."""
        return bool(self.silent or self.full or self.caught_up or self.loaded or self.load_trouble)

    def __post_init__(self) -> None:
        """Refuse numbers that cannot be."""
        if not 1 <= self.instance <= INSTANCE_MAX:
            raise InvalidRequest(f"node report: instance {self.instance} is not 63 bits")
        if not 0 <= self.routing_version <= NUMBER_MAX:
            raise InvalidRequest(f"node report: routing_version {self.routing_version}")
