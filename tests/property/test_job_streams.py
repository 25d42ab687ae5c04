"""Training data without an end: each offset counts once in each slot, whoever dies.

Two slots stand for the servers: a task is one push to each. A checkpoint reads the job's progress,
then copies one slot after the other while the job goes on. The job master dies between any two
writes of its journal, also while it goes back with a restore. Offsets that the source has dropped
before they were taken are counted, and are the only ones that count never.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from backstay.checkpoint.restore_state import RestoreState
from backstay.consensus.records.jobs import JobSpecRecord
from backstay.consensus.records.keys import JobKeys
from backstay.job.score_counts import Scores
from backstay.job_engine.engine import JobEngine
from backstay.job_engine.opening import RecordedJob, StateIncarnation, new_state, opened_job
from backstay.job_engine.rows_change import incarnation_in
from backstay.job_engine.values import Failure, LeasedTask
from backstay.job_spec import CheckpointSpec, DataSpec, JobSpec, PeriodSpec, ProgressiveSpec
from backstay.pserver.checkpoints.jobs import JOBS_PROGRESS, kept_records, with_taken
from backstay.runner.recorded_counts import recorded_counts
from backstay.schedule.rounds import RoundId
from backstay.schedule.takes import part_and_offset
from backstay.schedule.taking import PartEnds
from backstay.schedule.task_table import TaskTable
from tests.dict_journal import DictJournal
from tests.examples import examples

KEYS = JobKeys("job")
WORKERS = ("w1", "w2")
TTL_S = 2.0
SLOTS = 2
AHEAD = 9
# Writes after which a job master dies; the last one: it writes all.
WRITES = st.sampled_from([0, 1, 2, 3, 5, 8, 10_000])


class Slot:
    """What one slot has: pushes by task, and how often each offset was counted."""

    def __init__(self) -> None:
        self.seen: set[tuple[int, int]] = set()
        self.counts: Counter[tuple[str, int]] = Counter()

    def push(self, given: Given) -> None:
        key = given.round.number, given.lease.task
        if key not in self.seen:
            self.seen.add(key)
            self.counts.update(given.offsets)


class Given(NamedTuple):
    """A task as its worker knows it."""

    worker: str
    round: RoundId
    lease: LeasedTask
    offsets: tuple[tuple[str, int], ...]


class Checkpoint(NamedTuple):
    """What is written of a checkpoint; the slots as they were copied."""

    progress: dict[str, Any]
    slots: dict[int, Slot]


class StreamMachine(RuleBasedStateMachine):
    """A job, its source, its servers and its journal."""

    DATA = DataSpec(kind="kafka", paths=("t",))
    is_ending = False
    PROGRESSIVE: ProgressiveSpec | None = None

    @initialize(
        period=st.sampled_from([{"records": 4}, {"seconds": 3.0}, {"records": 9, "seconds": 8.0}]),
        per_task=st.integers(1, 3),
        start=st.sampled_from(["earliest", "latest"]),
        audit=st.booleans(),
    )
    def begin(self, period: dict[str, Any], per_task: int, start: str, audit: bool) -> None:
        self.spec = JobSpec(
            name=KEYS.job,
            model="model.py",
            training=self.DATA,
            period=PeriodSpec(**period, ahead_records=AHEAD, linger_s=4.0),
            records_per_task=per_task,
            task_lease_ttl_ms=int(TTL_S * 1000),
            max_task_retries=0,
            audit=audit,
            checkpoint=CheckpointSpec(every="none"),
            progressive=self.PROGRESSIVE,
        )
        self.now_s = 1000.0
        self.start = start
        self.ends = {"t/0": PartEnds(2, 9), "t/1": PartEnds(0, 0)}
        self.begins: dict[str, int] = {}
        self.store: dict[str, str] = {}
        self.slots = [Slot() for _ in range(SLOTS)]
        self.given: list[Given] = []
        self.requests = 0
        # Whether more may be to do than is taken ahead: tasks were put back, or done and undone.
        self.came_back = False
        # Whether a job master did; the sums for people may then count a task twice.
        self.died = False
        self.writing: Checkpoint | None = None
        self.saved: list[Checkpoint] = []
        self.restore = RestoreState("", "", "", 0, "")
        self.kept: dict[str, Any] = {}
        identity = JobSpecRecord("ab12", 1, self.spec.to_json())
        self.store[KEYS.spec] = identity.to_json()
        self.store[KEYS.state] = new_state(StateIncarnation(0, 0)).to_json()
        self.open()

    # The job master.

    def open(self) -> None:
        """Open the job as a new job master does: restores are looked at first."""
        self.died = hasattr(self, "job")
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
            tables={"training": TaskTable((), (), self.spec.records_per_task)},
            now_s=self.now_s,
        )
        self.job = JobEngine(opened, KEYS, self.journal, lambda: self.now_s)
        self.job.stage_state()
        self.look(10**6)
        self.job.advance()
        self.journal.write()

    def look(self, writes: int) -> bool:
        """Follow a restore; False: the job master died after so many writes."""
        if self.job.rows_are(self.restore, 0.0) != "restored":
            return True
        self.job.follow(self.restore, self.job.progress_in(self.kept), 0.0)
        self.journal.write(writes)
        if writes < 1000:
            return False
        self.job.note_incarnation(incarnation_in(self.restore))
        self.journal.write()
        return True

    @rule(writes=WRITES)
    def master_dies(self, writes: int) -> None:
        self.journal.write(writes)
        self.open()

    # The source.

    @rule(part=st.integers(0, 3), count=st.integers(1, 8))
    def producer_writes(self, part: int, count: int) -> None:
        name = f"t/{min(part, len(self.ends) - 1)}"
        one = self.ends[name]
        self.ends[name] = one._replace(end=one.end + count)

    @rule(chance=st.integers(0, 2))
    def topic_gets_a_partition(self, chance: int) -> None:
        if not chance and len(self.ends) < 4 and self.begins:
            name = f"t/{len(self.ends)}"
            self.ends[name] = PartEnds(0, 0)
            self.begins[name] = 0

    @rule(part=st.integers(0, 3), count=st.integers(1, 6))
    def topic_drops(self, part: int, count: int) -> None:
        name = f"t/{min(part, len(self.ends) - 1)}"
        one = self.ends[name]
        self.ends[name] = one._replace(lowest=min(one.lowest + count, one.end))

    def first(self) -> dict[str, int]:
        """Where a new job begins."""
        at_end = self.start == "latest"
        return {part: one.end if at_end else one.lowest for part, one in self.ends.items()}

    def told(self) -> tuple[Any, ...]:
        """What the source tells, and when."""
        return self.ends, self.now_s

    @rule(writes=WRITES)
    def source_is_asked(self, writes: int) -> None:
        if self.job.wants_start:
            self.begins = self.first()
            self.job.begin_stream(self.begins)
        planned = self.job.plan_take(*self.told())
        self.journal.write(writes)
        if writes < 1000:
            self.open()
            if not self.job.stream_record.positions:
                # It asks again where to begin: nothing was recorded.
                self.begins = {}
            return
        if planned is not None:
            self.job.take(planned)
        self.go_on()

    def go_on(self) -> None:
        self.job.advance()
        self.journal.write()

    # Workers.

    @rule(worker=st.sampled_from(WORKERS), writes=WRITES)
    def worker_asks(self, worker: str, writes: int) -> None:
        self.ask(worker, writes)

    def ask(self, worker: str, writes: int = 10_000) -> Given | None:
        self.job.join(worker, 7, "here", 1)
        self.requests += 1
        self.job.closed(self.job.streams_to_close(worker))
        answer = self.job.give(worker, self.requests, self.job.incarnation)
        self.journal.write(writes)
        if writes < 1000:
            self.open()
            return None
        self.go_on()
        if answer is None:
            return None
        opened, lease, _ = answer
        part = opened.table[lease.task]
        name, first = part_and_offset(part.shard)
        offsets = (first + part.start + n for n in range(part.count))
        given = Given(worker, opened.id, lease, tuple((name, offset) for offset in offsets))
        self.given.append(given)
        return given

    def holds(self, given: Given) -> bool:
        """Whether a worker may still push for a task."""
        opened = self.job.rounds.get(given.round)
        if opened is None:
            return False
        leased = opened.ledger.record_of(given.worker).leased
        return any(one[:2] == given.lease[:2] for one in leased)

    def pick(self, data: st.DataObject) -> Given | None:
        held = [given for given in self.given if self.holds(given)]
        return data.draw(st.sampled_from(held)) if held else None

    @precondition(lambda self: self.given)
    @rule(data=st.data(), slot=st.integers(0, SLOTS - 1))
    def worker_pushes_to_a_slot(self, data: st.DataObject, slot: int) -> None:
        if (given := self.pick(data)) is not None:
            self.slots[slot].push(given)

    @precondition(lambda self: self.given)
    @rule(data=st.data(), writes=WRITES)
    def worker_completes(self, data: st.DataObject, writes: int) -> None:
        if (given := self.pick(data)) is not None:
            self.complete(given, writes)

    def complete(self, given: Given, writes: int = 10_000) -> None:
        for slot in self.slots:
            slot.push(given)
        count, scores = len(given.offsets), Scores()
        scores.all.add(np.full(count, 0.5), np.zeros(count))
        self.job.complete(
            given.worker, given.round, given.lease, batches=1, examples=count, scores=scores
        )
        self.journal.write(writes)
        if writes < 1000:
            self.open()
            return
        self.job.closed([(given.round.number, given.lease.task)])
        self.go_on()

    @rule(tasks=st.integers(2, 8))
    def worker_is_busy(self, tasks: int) -> None:
        for _ in range(tasks):
            self.source_is_asked(10_000)
            if (given := self.ask("w3")) is not None:
                self.complete(given)

    @precondition(lambda self: self.given)
    @rule(data=st.data())
    def worker_fails(self, data: st.DataObject) -> None:
        if (given := self.pick(data)) is not None:
            self.job.fail(given.worker, given.round, given.lease, Failure("wrong", given.worker))
            self.go_on()

    @rule(worker=st.sampled_from(WORKERS))
    def worker_dies(self, worker: str) -> None:
        self.job.drop_worker(worker, "it was lost")
        self.go_on()

    @rule()
    def operator_retries(self) -> None:
        # They were no longer counted when more was taken.
        self.came_back |= self.job.retry_dead_letters([]) > 0
        self.go_on()

    @rule(seconds=st.sampled_from([0.5, 2.5, 5.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.job.expire()
        self.go_on()

    # Checkpoints.

    def progress(self) -> dict[str, Any]:
        document = kept_records(KEYS, self.store)
        incarnation = {"restore_version": self.restore.version}
        incarnation["generation"] = self.restore.generation
        return {JOBS_PROGRESS: {**incarnation, "jobs": {KEYS.job: document}}}

    @precondition(lambda self: self.writing is None)
    @rule()
    def checkpoint_begins(self) -> None:
        self.writing = Checkpoint(self.progress(), {})

    @precondition(lambda self: self.writing is not None)
    @rule(slot=st.integers(0, SLOTS - 1), chance=st.integers(0, 3))
    def checkpoint_copies_a_slot(self, slot: int, chance: int) -> None:
        assert self.writing is not None
        if chance:
            # So that a period may end meanwhile.
            return
        self.writing.slots.setdefault(slot, deepcopy(self.slots[slot]))
        if len(self.writing.slots) == SLOTS:
            progress = with_taken(self.writing.progress, self.progress())
            self.saved.append(self.writing._replace(progress=progress))
            self.writing = None

    @precondition(lambda self: self.saved)
    @rule(data=st.data(), writes=WRITES)
    def cluster_is_restored(self, data: st.DataObject, writes: int) -> None:
        checkpoint = data.draw(st.sampled_from(self.saved))
        self.journal.write()
        number = self.restore.version + 1
        self.restore = RestoreState("ckpt", "", "done", 0, "", number, number, number)
        self.kept = checkpoint.progress[JOBS_PROGRESS]
        # The one that is being written ends with it, as the lock has it.
        self.writing = None
        self.slots = [deepcopy(checkpoint.slots[slot]) for slot in range(SLOTS)]
        self.given = []
        self.came_back = True
        if not self.look(writes):
            self.open()
        self.go_on()
        if not self.job.stream_record.positions:
            self.begins = {}

    # What must be true.

    @invariant()
    def no_offset_counts_twice_in_a_slot(self) -> None:
        if self.is_exact:
            for slot in self.slots:
                assert max(slot.counts.values(), default=0) <= 1

    @invariant()
    def no_more_is_taken_ahead_than_the_job_allows(self) -> None:
        if hasattr(self, "job") and not self.came_back:
            assert self.ahead() <= AHEAD

    def ahead(self) -> int:
        return sum(one.records_ahead() for one in self.job.rounds.values())

    @property
    def is_exact(self) -> bool:
        """Whether a checkpoint took no longer than some periods."""
        return hasattr(self, "job") and not self.job.state.inexact

    def teardown(self) -> None:
        """A worker that goes on gets to the end of the source."""
        if not hasattr(self, "job"):
            return
        for worker in (*WORKERS, "w3"):
            self.job.drop_worker(worker, "it was lost")
        self.is_ending = True
        for _ in range(300):
            self.now_s += 5.0
            self.job.expire()
            self.job.retry_dead_letters([])
            self.source_is_asked(10_000)
            while (given := self.ask("w-last")) is not None:
                self.complete(given)
            lag = self.job.stream.lag
            if lag is not None and not lag.untaken and not self.ahead():
                break
        else:
            raise AssertionError("the job does not get to the end of its source")
        if self.is_exact:
            self.check_end()

    def check_end(self) -> None:
        job = self.job
        assert job.stream.lag is not None
        dropped = job.figures["dropped_records"] + job.stream.dropped + job.stream.lag.dropped
        every = {
            (part, offset)
            for part, one in self.ends.items()
            for offset in range(self.begins.get(part, 0), one.end)
        }
        for slot in self.slots:
            assert set(slot.counts) <= every
            assert len(every) - len(slot.counts) == dropped, "an offset was lost"
        if job.progressive is not None:
            assert job.progressive.shown()["examples"] == len(every) - dropped
        if not self.died:
            assert job.figures["examples"] == len(every) - dropped
        if self.spec.audit:
            counts = self.slots[0].counts
            audited: set[tuple[str, int]] = set()
            for task in recorded_counts(KEYS, self.store).tasks:
                offsets = {(task.shard, task.start + n) for n in range(task.records)}
                assert all(task.least <= counts[one] <= task.most for one in offsets)
                audited |= offsets
            assert audited == set(counts)


class ScoredMachine(StreamMachine):
    """The same, and what is predicted of each record counts once, too."""

    PROGRESSIVE = ProgressiveSpec(window_examples=5, half_life_examples=0)


class FolderMachine(StreamMachine):
    """The same, and the source is folders, which are closed one after the other."""

    DATA = DataSpec(kind="csv", paths=("d/*",))

    @initialize(
        period=st.sampled_from([{"folders": 1}, {"folders": 2, "seconds": 8.0}, {"records": 5}]),
        per_task=st.integers(1, 3),
        start=st.sampled_from(["earliest", "latest"]),
        audit=st.booleans(),
    )
    def begin(self, period: dict[str, Any], per_task: int, start: str, audit: bool) -> None:
        super().begin(period, per_task, start, audit)
        self.folders: dict[str, tuple[str, ...]] = {}
        self.ends = {}
        self.asked = 0
        self.close((3, 2), "8")

    def close(self, files: tuple[int, ...], name: str) -> None:
        folder = f"d/{name}"
        self.folders[folder] = tuple(f"{folder}/{number}" for number in range(len(files)))
        for file, count in zip(self.folders[folder], files, strict=True):
            self.ends[file] = PartEnds(0, count)

    @rule(files=st.lists(st.integers(0, 7), max_size=3), is_late=st.booleans())
    def folder_is_closed(self, files: list[int], is_late: bool) -> None:
        number = len(self.folders)
        # Some are closed later than those that sort after them.
        self.close(tuple(files), f"{number - is_late:03}{'-' * is_late}{number * is_late}")

    def producer_writes(self, part: int, count: int) -> None:
        """No file grows."""

    def topic_gets_a_partition(self, chance: int) -> None:
        """Nor are there partitions."""

    def topic_drops(self, part: int, count: int) -> None:
        """Nor is anything dropped."""

    def first(self) -> dict[str, int]:
        over = self.folders if self.start == "latest" else {}
        return {"/": 0, **{f"{folder}/": len(files) for folder, files in over.items()}}

    def told(self) -> tuple[Any, ...]:
        # The job takes what it was told more than once, until it is told anew.
        self.asked += 1
        if self.asked % 2 or self.is_ending:
            self.last_told = self.told_now()
        return self.last_told

    def told_now(self) -> tuple[Any, ...]:
        over = self.job.stream.positions
        left = {name: self.folders[name] for name in sorted(self.folders) if f"{name}/" not in over}
        ends = {file: self.ends[file] for files in left.values() for file in files}
        return ends, self.now_s, left

    def check_end(self) -> None:
        whole = self.ends
        before = {
            file
            for name, files in self.folders.items()
            for file in files
            if f"{name}/" in self.begins
        }
        self.ends = {file: one for file, one in whole.items() if file not in before}
        super().check_end()
        for _ in range(3):
            # Folders without records are left, perhaps.
            self.source_is_asked(10_000)
        assert self.job.stream.positions == {
            "/": 0,
            **{f"{folder}/": len(files) for folder, files in self.folders.items()},
        }
        self.ends = whole


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Each failure of a worker is a line of the log."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


TestStream = StreamMachine.TestCase
TestStream.settings = settings(max_examples=examples(150), stateful_step_count=60)

TestScored = ScoredMachine.TestCase
TestScored.settings = settings(max_examples=examples(30), stateful_step_count=60)

TestFolders = FolderMachine.TestCase
TestFolders.settings = settings(max_examples=examples(100), stateful_step_count=60)
