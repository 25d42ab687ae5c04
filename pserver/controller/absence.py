"""Who is missing, and who of them is still given time to come back.

Of what is decided from, only this depends on the time. The clock is the caller's, in any unit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from backstay.consensus.records import MemberRecord, RoutingTable

__all__ = ["Absences", "living"]


def living(members: Mapping[str, MemberRecord], gone: Collection[int]) -> dict[str, MemberRecord]:
    """Return the members without evidence that they are gone."""
    return {name: member for name, member in members.items() if member.instance not in gone}


class Absences:
    """Processes of the routing table whose lease is over without evidence of their death."""

    def __init__(self, grace: float) -> None:
        """Begin with no node missing.

        Args:
            grace: How long a process may come back with its memory.
        """
        self._grace = grace
        self._missing_since: dict[int, float] = {}
        self._waited_for: frozenset[int] = frozenset()

    def forget(self) -> None:
        """Begin anew: what an earlier leadership noted says nothing about now."""
        self._missing_since = {}
        self._waited_for = frozenset()

    def note(
        self,
        now: float,
        routing: RoutingTable | None,
        members: Mapping[str, MemberRecord],
        gone: Collection[int],
    ) -> frozenset[int]:
        """Take note of who is missing now, and return who of them is waited for.

        Whoever is found missing for the first time has been missing since now.
        """
        alive = {member.instance for member in members.values()}
        listed = {node.instance for node in routing.nodes} if routing is not None else set()
        missing = listed - alive - set(gone)
        self._missing_since = {one: self._missing_since.get(one, now) for one in missing}
        self._waited_for = frozenset(
            one for one, since in self._missing_since.items() if now < since + self._grace
        )
        return self._waited_for

    def next_end(self, now: float) -> float | None:
        """Return after how long the next process is given up, None if none is waited for.

        Of the processes that were waited for when last noted, also if their time is over.
        """
        ends = [self._missing_since[one] + self._grace for one in self._waited_for]
        return max(0.0, min(ends) - now) if ends else None
