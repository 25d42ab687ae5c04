"""Damaged records of a job's data: how many each task has, known since it was read last.

A damaged record belongs to the data, not to a pass: every worker meets the same ones each time it
reads the task. So each counts once, over passes, speculative attempts, tries and restores. One pass
over the data finds all of them. Each period of a stream has data of its own. Imports
``backstay.errors`` and ``json_record``; does no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from backstay.errors import InvalidRequest
from backstay.json_record import JsonRecord, Positive

__all__ = ["DamagedRecords"]

# Of a part that is a record of its own.
PART_TASKS = 4096


class DamagedRecords:
    """The damaged records of each task, by the data: ``training``, ``validation``, ...; a period.

    No task without any is kept.
    """

    def __init__(self) -> None:
        """Begin with none known."""
        self._counts: dict[str, dict[int, int]] = {}

    def note(self, data: str, task: int, records: int) -> bool:
        """Take note of what a task was found to have; return whether that is news."""
        known = self._counts.setdefault(data, {})
        if known.get(task, 0) == records:
            return False
        if records:
            known[task] = records
        else:
            del known[task]
        return True

    def of_task(self, data: str, task: int) -> int:
        """Return how many a task has, as far as known."""
        return self._counts.get(data, {}).get(task, 0)

    def of_data(self, data: str) -> int:
        """Return how many one pass over the data meets, as far as known."""
        return sum(self._counts.get(data, {}).values())

    @property
    def total(self) -> int:
        """How many there are in all of the job's data, as far as known."""
        return sum(map(self.of_data, self._counts))

    @property
    def names(self) -> list[str]:
        """The data of which any are known."""
        return [name for name, known in self._counts.items() if known]

    def forget(self, data: str) -> list[int]:
        """Forget those of a data; returns the numbers of the parts that had any."""
        return sorted(set(map(self.part_of, self._counts.pop(data, {}))))

    @staticmethod
    def part_of(task: int) -> int:
        """Return the number of the part that has a task."""
        return task // PART_TASKS

    def part(self, data: str, number: int) -> str:
        """Return a part as JSON; empty if nothing of it is damaged."""
        first = number * PART_TASKS
        tasks = {
            str(task): count
            for task, count in sorted(self._counts.get(data, {}).items())
            if first <= task < first + PART_TASKS
        }
        return _Part(tasks).to_json() if tasks else ""

    def parts(self) -> dict[tuple[str, int], str]:
        """Return all parts that are not empty, by data and number."""
        names = {(data, self.part_of(task)) for data in self._counts for task in self._counts[data]}
        return {name: self.part(*name) for name in sorted(names)}

    def learn(self, parts: Mapping[str, str]) -> None:
        """Take over parts as they were recorded, by ``<data>/<number>``.

        What is known already stays: it was found later.

        Raises:
            InvalidRequest: They are no such strings.
        """
        for name, text in parts.items():
            data = name.partition("/")[0]
            tasks = _Part.from_json(text).tasks
            if not all(task.isdecimal() for task in tasks):
                raise InvalidRequest(f"damaged records: {name} holds more than numbers of tasks")
            known = self._counts.setdefault(data, {})
            for task, count in tasks.items():
                known.setdefault(int(task), count)


@dataclass(frozen=True)
class _Part(JsonRecord, what="damaged records"):
    """The JSON form of a part: how many records of each task are damaged."""

    tasks: Mapping[str, Positive]
