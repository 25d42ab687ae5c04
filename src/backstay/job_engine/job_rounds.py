"""The rounds of a job that its master keeps in memory, and what the journal has of them.

They are brought in line with the schedule: opened, cut short, and forgotten when nothing of them is
left to do. Decides nothing about the job's schedule. Does no I/O of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence

from backstay.consensus.keys import JobKeys
from backstay.job_engine.open_round import OpenRound, open_round
from backstay.job_engine.records import Records
from backstay.job_engine.task_bits import CHUNK_TASKS, TaskBits
from backstay.job_engine.values import DeadLetter
from backstay.job_spec import JobSpec
from backstay.schedule.rounds import RoundId, RoundKind
from backstay.schedule.task_table import TaskTable, round_table

__all__ = ["JobRounds"]

log = logging.getLogger(__name__)


class JobRounds(Mapping[RoundId, OpenRound]):
    """Rounds by their ids; belongs to one event loop."""

    def __init__(
        self,
        rounds: Mapping[RoundId, OpenRound],
        tables: Mapping[str, TaskTable],
        spec: JobSpec,
        keys: JobKeys,
        records: Records,
    ) -> None:
        """Begin with those that the records know.

        Args:
            rounds: By id.
            tables: The tasks of the job's data.
            spec: Of the job.
            keys: The job's keys.
            records: Where changes go.
        """
        self._rounds = dict(rounds)
        self._tables = tables
        self._spec = spec
        self._keys = keys
        self._records = records

    def __getitem__(self, round_id: RoundId) -> OpenRound:
        return self._rounds[round_id]

    def __iter__(self) -> Iterator[RoundId]:
        return iter(list(self._rounds))

    def __len__(self) -> int:
        return len(self._rounds)

    def open(
        self,
        round_id: RoundId,
        *,
        first_attempt: int,
        task_lease_ttl_ms: int,
        steps: int,
        done: TaskBits | None = None,
        dead_letters: Iterable[DeadLetter] = (),
    ) -> OpenRound:
        """Return a round of the job, and keep it; see ``open_round``."""
        opened = self._rounds[round_id] = open_round(
            round_id,
            self._tables,
            self._spec,
            first_attempt=first_attempt,
            task_lease_ttl_ms=task_lease_ttl_ms,
            steps=steps,
            done=done,
            dead_letters=dead_letters,
        )
        return opened

    def forget(self, round_id: RoundId) -> None:
        """Keep a round no more, of which nothing is recorded."""
        self._rounds.pop(round_id, None)

    def erase_all(self, passes: Iterable[int]) -> None:
        """Forget all rounds, and have the journal remove what it has of them.

        Args:
            passes: Training passes of which it may have what was done, though they are closed.
        """
        for number in passes:
            closed = RoundId(RoundKind.TRAINING, number)
            for chunk in range(-(-len(round_table(self._tables, closed)) // CHUNK_TASKS)):
                self._records.stage_removal(self._keys.done(str(closed), chunk))
        for opened in self._rounds.values():
            opened.erase(self._records, self._keys)
        self._rounds.clear()

    def stage(self, opened: OpenRound) -> None:
        """Have the journal write what has changed in a round."""
        opened.stage(self._records, self._keys)

    def stage_all(self) -> None:
        """Have the journal write all rounds as they are."""
        for opened in self._rounds.values():
            opened.stage_all(self._records, self._keys)

    def set_lease_ttl(self, ttl_ms: int) -> None:
        """Have leases last so long from now on."""
        for opened in self._rounds.values():
            opened.ledger.lease_ttl_s = ttl_ms / 1000

    def next_expiry(self) -> float | None:
        """Return a time before which no lease runs out."""
        ends = [opened.ledger.next_expiry() for opened in self._rounds.values()]
        return min((end for end in ends if end is not None), default=None)

    # Streams.

    def closed(self, streams: Iterable[tuple[int, int]]) -> bool:
        """Take note of streams (pass, task) that are closed on all servers.

        Returns:
            Whether those were the last of a pass that is over.
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
        """End all rounds but those that are wanted, whatever is left of them to do."""
        for opened in self._rounds.values():
            if opened.id not in wanted and not opened.ledger.is_over:
                opened.ledger.cut_short()
                self.stage(opened)
                log.info("%s is cut short: %s", opened.id, reason)

    def drop_finished(self, wanted: Sequence[RoundId]) -> None:
        """Forget rounds that are over, have no dead-lettered tasks and no open streams.

        Which tasks were done of a pass that was cut short stays recorded: an audit asks for it.
        """
        for opened in list(self._rounds.values()):
            ledger = opened.ledger
            waits = ledger.open_streams or (ledger.dead_letters and not ledger.is_cut_short)
            if opened.id not in wanted and ledger.is_over and not waits:
                del self._rounds[opened.id]
                opened.erase(self._records, self._keys, keeps_done=ledger.is_cut_short)
