"""When the next snapshot of a chain is due: by time, by pushes, or by both.

Whether that one is full is a rule of the chain (``backstay.checkpoint.chain``). Asks for counts of
pushes only if they matter; writes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from backstay.pserver.snapshots.pushes import PushCounts, PushesSince

__all__ = ["Due", "Every", "is_due"]

# Between two looks how many pushes there were.
LOOK_S = 0.5


@dataclass(frozen=True)
class Every:
    """How far one snapshot is from the next.

    Attributes:
        seconds: At most so many; 0: time does not count.
        pushes: At most so many; 0: pushes do not count.
        by_busiest: The pushes of the busiest node count; otherwise those of all nodes together.
    """

    seconds: float = 0.0
    pushes: int = 0
    by_busiest: bool = False


def is_due(every: Every, seconds: float, since: PushesSince | None) -> bool:
    """Return whether a snapshot is to be written now. Pure.

    Args:
        every: How far snapshots are apart.
        seconds: Since the last one.
        since: The pushes since; None: they are not counted.
    """
    pushes = 0 if since is None else since.busiest if every.by_busiest else since.total
    return (0 < every.seconds <= seconds) or (0 < every.pushes <= pushes)


class Due:
    """Follows one chain: what came since its last snapshot."""

    def __init__(self, pushes: PushCounts) -> None:
        """Prepare; ``pushes`` looks at the nodes."""
        self._pushes = pushes
        self._begun_s = 0.0
        self._since: PushesSince | None = None

    def forget(self, now_s: float) -> None:
        """Begin anew; pushes count from the next look on."""
        self._begun_s = now_s
        self._since = None

    async def begin(self, every: Every, now_s: float) -> None:
        """Begin anew, with the pushes of this moment."""
        self.forget(now_s)
        await self._look(every)

    def rest(self, now_s: float) -> None:
        """Count the seconds from now; pushes as before."""
        self._begun_s = now_s

    async def is_due(self, every: Every, now_s: float) -> bool:
        """Return whether the next snapshot is to be written now."""
        await self._look(every)
        return is_due(every, now_s - self._begun_s, self._since)

    def next_look_s(self, every: Every, now_s: float) -> float:
        """Return in how many seconds to ask again."""
        left_s = max(self._begun_s + every.seconds - now_s, 0.0) if every.seconds else LOOK_S
        return min(left_s, LOOK_S) if every.pushes else left_s

    async def _look(self, every: Every) -> None:
        if not every.pushes:
            return
        look = await self._pushes.look()
        if self._since is None:
            self._since = PushesSince(look)
        self._since.look(look)
