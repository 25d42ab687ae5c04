"""What of a job's records is to be written, and in which order.

A change is *staged* as a key and a function that gives its value, so that many changes of one
record cost one write. ``take`` decides the values of a group, in the order in which the keys were
staged first; the caller writes them and says whether that succeeded. A removal is never taken
before anything that was staged before it: it does not take the place of a change of the same record
that still waits. Imports the standard library only; does no I/O.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

__all__ = ["Outbox", "Render", "Write"]

# Gives the value to write, or None if the key is to go.
Render: TypeAlias = Callable[[], str | None]


class Write(NamedTuple):
    """One record that is to be written.

    Attributes:
        key: Its key.
        value: What to write; None: the key goes.
    """

    key: str
    value: str | None


class _Change(NamedTuple):
    number: int
    render: Render


class _Place(NamedTuple):
    """What is staged: a change of a record, or its removal after that."""

    key: str
    removes: bool = False


class Outbox:
    """The changes of one job's records that are not written yet."""

    def __init__(self, on_staged: Callable[[], None] = lambda: None) -> None:
        """Begin empty; ``on_staged`` is called when there is something to take."""
        self._on_staged = on_staged
        # In the order in which they were staged first since they were taken last: by number.
        self._waiting: dict[_Place, _Change] = {}
        self._taken: dict[_Place, _Change] = {}
        self._staged = 0

    @property
    def staged(self) -> int:
        """The number of the last change."""
        return self._staged

    @property
    def oldest(self) -> int:
        """The number of the oldest change that waits to be taken; all before it are taken."""
        oldest = next(iter(self._waiting.values()), None)
        return self._staged + 1 if oldest is None else oldest.number

    @property
    def waits(self) -> bool:
        """Whether there is something to take."""
        return bool(self._waiting)

    @property
    def is_empty(self) -> bool:
        """Whether all that was staged is written."""
        return not self._waiting and not self._taken

    def stage(self, key: str, render: Render) -> None:
        """Have a record written soon.

        Args:
            key: Its key.
            render: Called when it is taken, perhaps more than once; None: the key goes.
        """
        self._staged += 1
        self._waiting.pop(_Place(key, removes=True), None)
        before = self._waiting.get(_Place(key))
        number = self._staged if before is None else before.number
        self._waiting[_Place(key)] = _Change(number, render)
        self._on_staged()

    def stage_first(self, key: str, render: Render) -> None:
        """Have a record written before all that is not written by now, or with it."""
        self._staged += 1
        self._waiting.pop(_Place(key, removes=True), None)
        self._waiting.pop(_Place(key), None)
        others = (*self._taken.values(), *self._waiting.values())
        number = min((one.number for one in others), default=self._staged) - 1
        self._waiting = {_Place(key): _Change(number, render), **self._waiting}
        self._on_staged()

    def stage_text(self, key: str, text: str) -> None:
        """Have a record written soon, as it is."""
        self.stage(key, lambda: text)

    def stage_removal(self, key: str) -> None:
        """Have a record removed soon, but not before what is staged by now is written."""
        self._staged += 1
        self._waiting.setdefault(_Place(key, removes=True), _Change(self._staged, lambda: None))
        self._on_staged()

    def take(self, writes_max: int, size_max: int) -> list[Write]:
        """Take the oldest changes, as many as fit, with their values of now.

        Args:
            writes_max: How many at most.
            size_max: Characters of all keys and values, at most; one change may have more.
        """
        writes: list[Write] = []
        size = 0
        for place, change in self._waiting.items():
            write = Write(place.key, change.render())
            size += len(write.key) + len(write.value or "")
            # No key may be in a group twice.
            is_twice = place.removes and _Place(place.key) in self._taken
            if writes and (len(writes) == writes_max or size > size_max or is_twice):
                break
            self._taken[place] = change
            writes.append(write)
        for place in self._taken:
            del self._waiting[place]
        return writes

    def written(self) -> None:
        """Take note that what was taken is written."""
        self._taken = {}

    def not_written(self) -> None:
        """Put what was taken back in front; what was staged since wins, at the older place."""
        again = {
            place: _Change(change.number, self._waiting.get(place, change).render)
            for place, change in self._taken.items()
        }
        both = {**self._waiting, **again}
        self._waiting = dict(sorted(both.items(), key=lambda item: item[1].number))
        self._taken = {}
        self._on_staged()
