"""A job over training data without an end, for tests: its engine, its records, its source."""

from __future__ import annotations

from typing import Any

from backstay.checkpoint.restore_state import RestoreState
from backstay.consensus.records.jobs import JobSpecRecord
from backstay.consensus.records.keys import JobKeys
from backstay.job_engine.engine import JobEngine
from backstay.job_engine.open_round import Assignment
from backstay.job_engine.opening import RecordedJob, StateIncarnation, new_state, opened_job
from backstay.job_engine.rows_change import incarnation_in
from backstay.job_spec import CheckpointSpec, DataSpec, JobSpec, PeriodSpec
from backstay.pserver.checkpoints.jobs import JOBS_PROGRESS, kept_records
from backstay.schedule.taking import PartEnds
from backstay.schedule.task_table import TaskTable
from tests.dict_journal import DictJournal

__all__ = ["KEYS", "StreamJob", "stream_spec"]

KEYS = JobKeys("job")
HELD_OUT = TaskTable(("held.csv",), (4,), 4)


def stream_spec(*, period: dict[str, Any] | None = None, **fields: Any) -> JobSpec:
    """A job with tasks of four records, and periods of twelve."""
    values: dict[str, Any] = {
        "records_per_task": 4,
        "batch_size": 4,
        "checkpoint": CheckpointSpec(every="none"),
        **fields,
    }
    is_folders = "folders" in (period or {})
    return JobSpec(
        name=KEYS.job,
        model="model.py",
        training=DataSpec(kind="csv" if is_folders else "kafka", paths=("t",)),
        period=PeriodSpec(**({"records": 12, "linger_s": 5.0} if period is None else period)),
        **values,
    )


class StreamJob:
    """A job, its records, and a source of one partition to begin with."""

    def __init__(self, spec: JobSpec | None = None) -> None:
        self.spec = spec or stream_spec()
        self.now_s = 100.0
        self.store = {
            KEYS.spec: JobSpecRecord("ab12", 1, self.spec.to_json()).to_json(),
            KEYS.state: new_state(StateIncarnation(0, 0)).to_json(),
        }
        self.ends: dict[str, PartEnds | None] = {"t/0": PartEnds(0, 0)}
        # Closed folders with their files, if the source has folders.
        self.folders: dict[str, tuple[str, ...]] | None = None
        self.restores = 0
        self.open()

    def open(self) -> None:
        """Have a new job master take the job over; it has not looked at restores yet."""
        self.journal = DictJournal(KEYS, self.store)
        recorded = RecordedJob(dict(self.store), KEYS)
        state = recorded.state()
        assert state is not None
        opened = opened_job(
            self.spec,
            KEYS,
            self.journal,
            recorded,
            identity=recorded.identity(self.spec, uid="ab12", now_ms=1),
            state=state,
            tables={
                "training": TaskTable((), (), self.spec.records_per_task),
                **({"validation": HELD_OUT} if self.spec.validation else {}),
            },
            now_s=self.now_s,
        )
        self.job = JobEngine(opened, KEYS, self.journal, lambda: self.now_s)
        self.job.stage_state()
        self.journal.write()

    def come(self, count: int, part: str = "t/0") -> None:
        """Have more records come, and the job take what it may."""
        one = self.ends.get(part) or PartEnds(0, 0)
        self.ends[part] = one._replace(end=one.end + count)
        self.look()

    def look(self, seconds: float = 0.0) -> None:
        """Let time pass, and ask the source, as the job master does."""
        self.now_s += seconds
        self.job.advance()
        if self.job.wants_start:
            known = {part: one.lowest for part, one in self.ends.items() if one is not None}
            self.job.begin_stream(known if self.folders is None else {"/": 0})
        left = self._left()
        ends = self.ends
        if left is not None:
            ends = {file: self.ends[file] for files in left.values() for file in files}
        planned = self.job.plan_take(ends, self.now_s, left)
        self.journal.write()
        if planned is not None:
            self.job.take(planned)
        self.job.advance()
        self.journal.write()

    def close_folder(self, name: str, **files: int) -> None:
        """Have one more folder, with files of so many records."""
        if self.folders is None:
            self.folders, self.ends = {}, {}
        names = tuple(f"{name}/{file}" for file in files)
        self.folders[name] = names
        self.ends |= dict(zip(names, (PartEnds(0, count) for count in files.values()), strict=True))

    def _left(self) -> dict[str, tuple[str, ...]] | None:
        if self.folders is None:
            return None
        over = self.job.stream.positions
        return {name: files for name, files in self.folders.items() if f"{name}/" not in over}

    def give(self) -> Assignment | None:
        given = self.job.assign("w1")
        self.journal.write()
        return given

    def done(self, given: Assignment, damaged: int = 0) -> None:
        count = given.round.table[given.lease.task].count
        self.job.complete(
            "w1", given.round.id, given.lease, batches=1, examples=count, damaged=damaged
        )
        self.job.closed([(given.round.id.number, given.lease.task)])
        self.job.advance()
        self.journal.write()

    def do(self, most: int = 1000) -> list[tuple[str, int, int]]:
        """Do what there is to do; return which records: shard, first, number."""
        parts: list[tuple[str, int, int]] = []
        while len(parts) < most and (given := self.give()) is not None:
            part = given.round.table[given.lease.task]
            parts.append((part.shard, part.start, part.count))
            self.done(given)
        return parts

    def kept(self) -> dict[str, Any]:
        """What a checkpoint that begins now keeps."""
        document = kept_records(KEYS, self.store)
        incarnation = {"restore_version": self.restores, "generation": self.restores}
        return {JOBS_PROGRESS: {**incarnation, "jobs": {KEYS.job: document}}}

    def restore(self, kept: dict[str, Any] | None, writes: int = 10**6) -> None:
        """Go back with a restore; the job master dies after so many writes."""
        self.restores += 1
        self.follow(kept, writes)

    def follow(self, kept: dict[str, Any] | None, writes: int = 10**6) -> None:
        number = self.restores
        restore = RestoreState("ckpt", "", "done", 0, "", number, number, number)
        assert self.job.rows_are(restore, 0.0) == "restored"
        progress = None if kept is None else self.job.progress_in(kept[JOBS_PROGRESS])
        self.job.follow(restore, progress, 0.0)
        self.journal.write(writes)
        if self.journal.waits:
            return
        self.job.note_incarnation(incarnation_in(restore))
        self.job.advance()
        self.journal.write()
