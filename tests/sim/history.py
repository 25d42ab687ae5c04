"""What was sent, acknowledged and read; and what must never be (invariants I1, I2, I3, I5)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

__all__ = ["History"]

Stream = tuple[int, int, int]


class History:
    """The counter table as everybody was told of it."""

    def __init__(self, slot_of: dict[int, int], fail: Callable[[str], None]) -> None:
        self._slot_of = slot_of
        self._fail = fail
        self.pushes = 0
        self.reads = 0
        self.lost_slots: set[int] = set()
        self._sent = dict.fromkeys(slot_of, 0)
        self._acknowledged = dict.fromkeys(slot_of, 0)
        self._seen = dict.fromkeys(slot_of, 0)
        # What was sent and what was acknowledged, however often: it counts once.
        self._begun: set[tuple[Stream, int]] = set()
        self._done: set[tuple[Stream, int, int]] = set()
        self._keys: dict[Stream, dict[int, list[int]]] = {}
        # Streams that were closed before all of their pushes were acknowledged.
        self._cut: set[Stream] = set()
        # The newest acknowledged pushes, by slot: what every in-sync replica must hold.
        self.recent: dict[int, list[tuple[Stream, int]]] = {}

    def sent(self, stream: Stream, sequence: int, keys: list[int]) -> None:
        """A trainer has begun a push; a replay of it is the same push."""
        if (stream, sequence) in self._begun:
            return
        self._begun.add((stream, sequence))
        self._keys.setdefault(stream, {})[sequence] = keys
        self.pushes += 1
        for key in keys:
            self._sent[key] += 1

    def acknowledged(
        self, stream: Stream, sequence: int, keys: list[int], ended: Collection[int] = ()
    ) -> None:
        """A part of a push is done; ``ended``: in slots that have begun anew since, and lost it."""
        if stream in self._cut:
            # Skipped, for all that anybody knows.
            return
        for key in keys:
            if (stream, sequence, key) not in self._done:
                self._done.add((stream, sequence, key))
                self._acknowledged[key] += 1
        for slot in {self._slot_of[key] for key in keys}.difference(ended):
            recent = self.recent.setdefault(slot, [])
            recent.append((stream, sequence))
            del recent[:-12]

    def cut(self, stream: Stream) -> None:
        """A stream is closed though its task is not done: untold pushes may be lost."""
        self._cut.add(stream)

    def slot_lost(self, slot: int) -> None:
        """A slot has begun anew, as the cluster said loudly: nothing is expected of it."""
        self.lost_slots.add(slot)
        self.recent.pop(slot, None)

    def expect(self, keys: list[int]) -> list[int]:
        """Return what a read that begins now must return at least."""
        return [max(self._acknowledged[key], self._seen[key]) for key in keys]

    def was_read(self, where: str, keys: list[int], counts: list[int], expected: list[int]) -> None:
        """A read has come back."""
        self.reads += 1
        for key, count, least in zip(keys, counts, expected, strict=True):
            if self._slot_of[key] in self.lost_slots:
                continue
            if count < least:
                self._fail(
                    f"I5: {where} read {count} for key {key} of slot {self._slot_of[key]}, "
                    f"where {least} had been acknowledged or read before the read began"
                )
            if count > self._sent[key]:
                self._fail(
                    f"I2: {where} read {count} for key {key}, pushed {self._sent[key]} times"
                )
            self._seen[key] = max(self._seen[key], count)

    def check_final(self, where: str, keys: list[int], counts: list[int]) -> None:
        """Everything was acknowledged, so every replica counts every push exactly once."""
        unsure: Counter[int] = Counter()
        for stream in self._cut:
            for sequence, pushed in self._keys.get(stream, {}).items():
                unsure.update(key for key in pushed if (stream, sequence, key) not in self._done)
        for key, count in zip(keys, counts, strict=True):
            sent, lost = self._sent[key], self._slot_of[key] in self.lost_slots
            if count > sent or (count < sent - unsure[key] and not lost):
                rule = "I2" if count > sent else "I1"
                self._fail(
                    f"{rule}: {where} counts {count} for key {key} of slot {self._slot_of[key]}, "
                    f"which was pushed and acknowledged {sent} times"
                )
