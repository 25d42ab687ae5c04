"""The journal of a job master over a dictionary: its real order and groups, without a loop."""

from __future__ import annotations

from typing import cast

from backstay.consensus.records.keys import JobKeys
from backstay.consensus.store import CoordinationStore, Delete, Put
from backstay.master.journal import Journal

__all__ = ["DictJournal"]


class DictJournal(Journal):
    """Writes groups of one change each, when it is told to."""

    def __init__(self, keys: JobKeys, store: dict[str, str]) -> None:
        super().__init__(cast(CoordinationStore, None), keys, 1, changes_max=1)
        self._records = store

    def write(self, most: int = 10**6) -> None:
        """Write so many groups at most."""
        while self._pending and most:
            most -= 1
            _, operations = self._next_group()
            for operation in operations:
                if isinstance(operation, Put):
                    self._records[operation.key] = operation.value
                elif isinstance(operation, Delete):
                    self._records.pop(operation.key, None)
