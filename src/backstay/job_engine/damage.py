"""Damaged records of a job's data: how many are known, under which names, and their sum.

May import ``job_engine`` and ``schedule``; does no I/O.
"""

from __future__ import annotations

from backstay.job_engine.standing import Basis, Standing
from backstay.schedule.damaged import DamagedRecords
from backstay.schedule.rounds import RoundId, RoundKind, data_of

__all__ = ["Damage"]


class Damage:
    """The damaged records of one job.

    Attributes:
        records: As far as known.
    """

    def __init__(self, basis: Basis, job: Standing, records: DamagedRecords) -> None:
        """Begin with what is recorded."""
        self._basis = basis
        self._job = job
        self.records = records

    def name_of(self, round_id: RoundId) -> str:
        """Return under which name the damaged records of a round are known.

        Tasks of passes are the same in each; those of periods are not.
        """
        return str(round_id) if self._job.is_period(round_id) else data_of(round_id.kind)

    def is_over_period(self, name: str) -> bool:
        """Whether a name of damaged records is that of a period that is over."""
        kind, _, number = name.partition("-")
        is_period = kind == RoundKind.TRAINING.value and number.isdecimal()
        return is_period and int(number) <= self._job.schedule.passes_over

    def count(self) -> None:
        """Bring the sum of damaged records up to date; those of periods that are over are in it."""
        records, figures = self.records, self._job.figures
        over = filter(self.is_over_period, records.names) if self._basis.spec.is_stream else ()
        known = records.total - sum(map(records.of_data, over))
        figures["bad_records"] = figures["past_bad_records"] + known

    def forget(self, name: str) -> None:
        """Forget the damaged records of a period, and have the journal do so."""
        for part in self.records.forget(name):
            self._basis.records.stage_removal(self._basis.keys.damaged(name, part))

    def forget_periods(self) -> None:
        """Forget those of all periods."""
        for name in self.records.names:
            if name.startswith(f"{RoundKind.TRAINING.value}-"):
                self.forget(name)
