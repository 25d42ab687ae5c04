"""The records of a job over a dictionary: in their real order and groups, without a loop."""

from __future__ import annotations

from backstay.consensus.records.keys import JobKeys
from backstay.job_engine.outbox import Outbox

__all__ = ["DictJournal"]


class DictJournal(Outbox):
    """Writes groups of one change each, when it is told to."""

    def __init__(self, keys: JobKeys, store: dict[str, str]) -> None:
        super().__init__()
        self._records = store

    def write(self, most: int = 10**6) -> None:
        """Write so many groups at most."""
        while self.waits and most:
            most -= 1
            for key, value in self.take(1, 10**6):
                if value is not None:
                    self._records[key] = value
                else:
                    self._records.pop(key, None)
            self.written()
