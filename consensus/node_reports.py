"""What a process reports to the controller about the slots it masters.

A value: frozen, checked when made, strict about its JSON form. This module imports
``consensus.json_fields``, ``consensus.node_records`` and ``backstay.errors``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from backstay.consensus.json_fields import NUMBER_MAX, dump, parse_fields, whole_numbers_of
from backstay.consensus.node_records import INSTANCE_MAX
from backstay.errors import InvalidRequest

__all__ = ["CaughtUp", "NodeReport"]


@dataclass(frozen=True, order=True)
class CaughtUp:
    """A backup that has everything its master has committed, as that master says.

    Attributes:
        slot: The slot.
        term: The slot's term at which the master saw it.
        instance: The backup.
    """

    slot: int
    term: int
    instance: int


@dataclass(frozen=True)
class NodeReport:
    """``reports/<instance>``: what a process asks of the controller for the slots it masters.

    Attributes:
        instance: The process that reports.
        routing_version: The routing version that it had in force. A report counts at exactly
            this version.
        silent: Nodes that do not answer it: backups to take out of its in-sync sets, and those
            to give no copies.
        full: Nodes that had no room for a copy a short time ago.
        caught_up: Backups to take into them.
        loaded: (slot, its birth): slots that have their content from a checkpoint now.
        load_trouble: Why slots cannot be loaded from a checkpoint; empty if they can.
    """

    instance: int
    routing_version: int
    silent: tuple[int, ...] = ()
    caught_up: tuple[CaughtUp, ...] = ()
    full: tuple[int, ...] = ()
    loaded: tuple[tuple[int, int], ...] = ()
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

    def to_json(self) -> str:
        """Return the record as the text that the coordination store keeps."""
        return dump(
            {
                "instance": self.instance,
                "routing_version": self.routing_version,
                "silent": list(self.silent),
                "full": list(self.full),
                "caught_up": [[one.slot, one.term, one.instance] for one in self.caught_up],
                "loaded": [list(one) for one in self.loaded],
                "load_trouble": self.load_trouble,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> NodeReport:
        """Return the record that ``to_json`` gave.

        Raises:
            InvalidRequest: It is not such a text.
        """
        what = "node report"
        fields = parse_fields(what, text, _REPORT_FIELDS)
        caught_up = []
        for entry in fields["caught_up"]:
            numbers = whole_numbers_of(what, "caught_up", entry)
            if len(numbers) != 3:
                raise InvalidRequest(f"{what}: caught_up is not of [slot, term, instance]")
            caught_up.append(CaughtUp(*numbers))
        loaded = []
        for entry in fields["loaded"]:
            numbers = whole_numbers_of(what, "loaded", entry)
            if len(numbers) != 2:
                raise InvalidRequest(f"{what}: loaded is not of [slot, birth]")
            loaded.append((numbers[0], numbers[1]))
        return cls(
            instance=fields["instance"],
            routing_version=fields["routing_version"],
            silent=tuple(whole_numbers_of(what, "silent", fields["silent"])),
            full=tuple(whole_numbers_of(what, "full", fields["full"])),
            caught_up=tuple(caught_up),
            loaded=tuple(loaded),
            load_trouble=fields["load_trouble"],
        )


_REPORT_FIELDS: Mapping[str, type] = {
    "instance": int,
    "routing_version": int,
    "silent": list,
    "full": list,
    "caught_up": list,
    "loaded": list,
    "load_trouble": str,
}
