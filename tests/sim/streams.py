"""A job over data without an end in virtual time: partitions grow, and periods take what is there.

Each offset is a batch, so the judge knows what each one pushes, whichever task it is in.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from backstay.job_engine.period_takes import period, tables_of
from backstay.job_spec import CheckpointSpec, DataSpec, JobSpec, PeriodSpec
from backstay.schedule.takes import part_and_offset
from backstay.schedule.task_table import TaskTable
from tests.sim.job_master import KEYS, LEASE_TTL_MS
from tests.sim.jobs import JobBook

__all__ = ["StreamBook"]

PARTS = ("t/0", "t/1", "t/2")
OFFSETS = 16


class StreamBook(JobBook):
    """The book of such a job; it ends with the last offset."""

    def _spec(self, seed: int) -> JobSpec:
        chosen = Random(f"stream {seed}")
        return JobSpec(
            name=KEYS.job,
            model="model.py",
            training=DataSpec(kind="kafka", paths=("t",)),
            period=PeriodSpec(
                records=chosen.choice((3, 7, 20)),
                ahead_records=chosen.choice((5, 12, 100)),
                linger_s=chosen.choice((0.0, 0.1)),
            ),
            batch_size=1,
            records_per_task=chosen.choice((1, 3, 5)),
            task_lease_ttl_ms=LEASE_TTL_MS,
            straggler_factor=1.5,
            straggler_min_s=0.05,
            max_task_retries=10,
            checkpoint=CheckpointSpec(every="none"),
            max_steps=len(PARTS) * OFFSETS,
            # So that all takes stay recorded, and the judge can read them.
            audit=True,
        )

    def table(self) -> TaskTable:
        """See ``JobBook``: periods have tasks of their own."""
        return TaskTable((), (), self.spec.records_per_task)

    def ends(self) -> dict[str, tuple[int, int]]:
        """See ``JobBook``: they grow at different rates until the faults are over."""
        done = self.cluster.queue.now / self.cluster.options.faults_end
        return {
            part: (0, min(OFFSETS, int(OFFSETS * done * (1 + number))))
            for number, part in enumerate(PARTS)
        }

    def _tables(self) -> dict[int, TaskTable]:
        found = self.cluster.store.state.range(KEYS.all_takes).values()
        return tables_of(
            {key.removeprefix(KEYS.all_takes): item.value for key, item in found.items()}
        )

    def _table(self, number: int) -> TaskTable:
        prefix = f"{KEYS.all_takes}{period(number)}/"
        found = self.cluster.store.state.range(prefix).values()
        return TaskTable.from_chunks(found[key].value for key in sorted(found))

    def tasks(self) -> Iterator[tuple[int, int]]:
        """See ``JobBook``."""
        for number, table in self._tables().items():
            yield from ((number, task) for task in range(len(table)))

    def batches(self, number: int, task: int) -> int:
        """See ``JobBook``."""
        return self._table(number)[task].count

    def _size(self, number: int) -> int:
        return len(self._tables().get(number, self.table()))

    def keys_of(self, number: int, task: int, batch: int) -> list[list[int]]:
        """See ``JobBook``: what an offset pushes."""
        records = self._table(number)[task]
        part, first = part_and_offset(records.shard)
        return self._keys_at(part, first + records.start + batch)

    def _keys_at(self, part: str, offset: int) -> list[list[int]]:
        return super().keys_of(PARTS.index(part), offset, 0)

    def check_end(self, where: str, keys: list[int], counts: list[int]) -> None:
        """See ``JobBook``; each offset is in one task."""
        taken = sorted(
            (part, first + number)
            for table in self._tables().values()
            for shard, count in table.shards
            for part, first in [part_and_offset(shard)]
            for number in range(count)
        )
        if taken != sorted((part, offset) for part in PARTS for offset in range(OFFSETS)):
            self.cluster.fail(f"job: the offsets that were taken are {taken}")
        super().check_end(where, keys, counts)
