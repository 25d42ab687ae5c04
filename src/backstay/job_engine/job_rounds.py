"""The rounds of a job that are under way, and what follows for the job when their tasks change.

``JobRounds`` opens rounds, cuts them short, and forgets them when nothing of them is left to do, as
the schedule says. Imports ``backstay.schedule`` and ``job_engine``; does no I/O.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence

from backstay.job_engine.open_round import OpenRound, open_round
from backstay.job_engine.opening import is_over
from backstay.job_engine.period_takes import PeriodTakes
from backstay.job_engine.standing import Basis, Standing
from backstay.job_engine.task_store import CHUNK_TASKS, TaskBits
from backstay.job_engine.values import DeadLetter, first_attempt
from backstay.schedule.rounds import RoundId, RoundKind
from backstay.schedule.schedule import Schedule
from backstay.schedule.task_table import TaskTable, round_table

__all__ = ["JobRounds", "is_recorded_done"]

log = logging.getLogger(__name__)


def is_recorded_done(
    schedule: Schedule, rounds: Mapping[RoundId, OpenRound], round_name: str, task: int
) -> bool:
    """Return whether a task of a round is done, as its records say."""
    round_id = RoundId.parse(round_name)
    opened = rounds.get(round_id)
    if opened is None:
        return is_over(schedule, round_id)
    done = opened.ledger.done
    return task < done.size and task in done


class JobRounds(Mapping[RoundId, OpenRound]):
    """The open rounds of a job, by id.

    Attributes:
        takes: What its periods have taken, if its training data have no end.
        task_lease_ttl_ms: How long leases last; the record may already have a longer time.
    """

    def __init__(
        self,
        basis: Basis,
        job: Standing,
        rounds: Mapping[RoundId, OpenRound],
        takes: PeriodTakes,
    ) -> None:
        """Begin with the rounds that the records know.

        Args:
            basis: Of the job.
            job: Where it stands.
            rounds: By id.
            takes: What its periods have taken.
        """
        self._basis = basis
        self._job = job
        self._rounds = dict(rounds)
        self.takes = takes
        self.task_lease_ttl_ms = job.state.task_lease_ttl_ms
        # Whose leases have changed since somebody asked; None: perhaps of all workers.
        self._changed: set[str] | None = None

    def __getitem__(self, round_id: RoundId) -> OpenRound:
        return self._rounds[round_id]

    def __iter__(self) -> Iterator[RoundId]:
        return iter(list(self._rounds))

    def __len__(self) -> int:
        return len(self._rounds)

    def open(
        self,
        round_id: RoundId,
        done: TaskBits | None = None,
        dead_letters: Iterable[DeadLetter] = (),
        begun_scores: Mapping[tuple[int, int], bytes] | None = None,
    ) -> OpenRound:
        """Return a round of the job, and keep it; see ``open_round``."""
        opened = self._rounds[round_id] = open_round(
            round_id,
            self._table(round_id),
            self._basis.spec,
            first_attempt=first_attempt(self._job.state.starts),
            task_lease_ttl_ms=self.task_lease_ttl_ms,
            steps=self._job.schedule.steps,
            done=done,
            dead_letters=dead_letters,
            begun_scores=begun_scores,
            is_sealed=self._job.is_sealed(round_id),
        )
        return opened

    def _table(self, round_id: RoundId) -> TaskTable:
        """Return the tasks of a round."""
        if self._job.is_period(round_id):
            return self.takes.table(round_id.number)
        return round_table(self._basis.tables, round_id)

    def takes_of_now(self) -> list[tuple[str, int]]:
        """Return what the periods have taken that are not over."""
        return self.takes.after(self._job.schedule.passes_over)

    def forget(self, round_id: RoundId) -> None:
        """Forget a round of which nothing is recorded."""
        self._rounds.pop(round_id, None)

    def erase_all(self, passes: Iterable[int]) -> None:
        """Forget all rounds, and have the journal remove what it has of them.

        Args:
            passes: Training passes of which it may have what was done, though they are closed.
        """
        for number in passes:
            closed = RoundId(RoundKind.TRAINING, number)
            for chunk in range(-(-len(self._table(closed)) // CHUNK_TASKS)):
                self._basis.records.stage_removal(self._basis.keys.done(str(closed), chunk))
        for opened in self._rounds.values():
            opened.erase(self._basis.records, self._basis.keys)
        self._rounds.clear()
        self._changed = None

    def stage(self, opened: OpenRound) -> None:
        """Have the journal write what has changed in a round."""
        workers = opened.stage(self._basis.records, self._basis.keys)
        if self._changed is not None:
            self._changed.update(workers)

    def take_lease_changes(self) -> set[str] | None:
        """Return whose leases have changed since the last call; None: perhaps of all workers."""
        changed, self._changed = self._changed, set()
        return changed

    # What follows for the job.

    def count_steps(self, opened: OpenRound) -> None:
        """Tell the schedule how many batches a round has; that may open or end rounds."""
        schedule = self._job.schedule
        before = schedule.open_rounds
        schedule.count_steps(opened.id, opened.ledger.batches)
        if schedule.open_rounds != before:
            self._job.stage()
            self._basis.notify()

    def count_all_steps(self) -> None:
        """Do so for each round."""
        for opened in self.values():
            self.count_steps(opened)

    def came_back(self, opened: OpenRound) -> None:
        """Stage that tasks of a round are to do again, and wake those who wait for one."""
        self.stage(opened)
        self.count_steps(opened)
        self._basis.notify()

    def take_back(self, worker: str, why: str) -> None:
        """Take back all tasks of a worker."""
        for opened in self.values():
            tasks = opened.ledger.drop_worker(worker)
            if tasks:
                log.warning("%s: %s; %s tasks %s go back", worker, why, opened.id, tasks)
            self.came_back(opened)

    def stage_all(self) -> None:
        """Have the journal write all rounds as they are."""
        for opened in self._rounds.values():
            opened.stage_all(self._basis.records, self._basis.keys)

    def lengthen_leases(self, ttl_ms: int) -> None:
        """Have leases last this long from now on, unless they last longer."""
        self.task_lease_ttl_ms = max(self.task_lease_ttl_ms, ttl_ms)
        for opened in self._rounds.values():
            opened.ledger.lease_ttl_s = self.task_lease_ttl_ms / 1000

    def next_expiry(self) -> float | None:
        """Return a time before which no lease expires; None: there is no lease."""
        ends = [opened.ledger.next_expiry() for opened in self._rounds.values()]
        return min((end for end in ends if end is not None), default=None)

    # Streams.

    def closed(self, streams: Iterable[tuple[int, int]]) -> bool:
        """Take note of streams (pass, task) that are closed on all servers.

        Returns:
            Whether a pass that is over has no open stream any more.
        """
        is_last = False
        for pass_number, task in streams:
            opened = self._rounds.get(RoundId(RoundKind.TRAINING, pass_number))
            if opened is not None:
                opened.ledger.closed([task])
                self.stage(opened)
                is_last = is_last or (opened.ledger.is_over and not opened.ledger.open_streams)
        return is_last

    def streams_to_close(self, worker: str) -> list[tuple[int, int]]:
        """Return streams (pass, task) that a worker is to close for others."""
        streams: list[tuple[int, int]] = []
        for opened in self._rounds.values():
            tasks = opened.ledger.streams_to_close(worker)
            streams += [(opened.id.number, task) for task in tasks]
            self.stage(opened)
        return streams

    # The schedule.

    def cut_others(self, wanted: Sequence[RoundId], reason: str) -> None:
        """Cut short all rounds that are not wanted."""
        for opened in self._rounds.values():
            if opened.id not in wanted and not opened.ledger.is_over:
                opened.ledger.cut_short()
                self.stage(opened)
                log.info("%s is cut short: %s", opened.id, reason)

    def drop_finished(self, wanted: Sequence[RoundId]) -> None:
        """Forget rounds that are over, have no dead-lettered tasks and no open streams.

        The done tasks of a pass that was cut short stay recorded: an audit reads them.
        """
        for opened in list(self._rounds.values()):
            ledger = opened.ledger
            waits = ledger.open_streams or (ledger.dead_letters and not ledger.is_cut_short)
            if opened.id not in wanted and ledger.is_over and not waits:
                del self._rounds[opened.id]
                opened.erase(self._basis.records, self._basis.keys, keeps_done=ledger.is_cut_short)
