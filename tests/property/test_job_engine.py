"""The engine of a job against a reference model of plain dictionaries.

The model knows nothing of the engine: a task has one state, and a lease is a worker and the time
when it ends. Workers come with old leases, die and fall silent, and the cluster is restored.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
from hypothesis import given, settings
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
from backstay.job_engine.engine import JobEngine
from backstay.job_engine.open_round import Assignment
from backstay.job_engine.opening import new_job
from backstay.job_engine.records import MemoryRecords
from backstay.job_engine.rows_change import incarnation_in
from backstay.job_engine.values import Failure
from backstay.job_spec import CheckpointSpec, DataSpec, JobSpec
from backstay.schedule.rounds import RoundKind
from backstay.schedule.task_table import TaskTable, cut_data
from tests.examples import examples

DATA = DataSpec(paths=("somewhere.csv",))
TTL_S = 2.0
MAX_RETRIES = 1
PASSES = 2
WORKERS = ("w1", "w2", "w3")


@dataclass(frozen=True)
class Shard:
    name: str
    records: int


def engine_of(spec: JobSpec, sizes: Sequence[int], clock: list[float]) -> JobEngine:
    shards = [Shard(f"s{number}", size) for number, size in enumerate(sizes)]
    tables: dict[str, TaskTable] = {name: cut_data(name, shards, spec) for name in spec.data}
    opened = new_job(spec, tables, JobSpecRecord("ab12", 1, spec.to_json()))
    return JobEngine(opened, JobKeys(spec.name), MemoryRecords(), lambda: clock[0])


class Given(NamedTuple):
    """A lease as a worker knows it."""

    worker: str
    task: tuple[str, int]
    assignment: Assignment

    @property
    def attempt(self) -> int:
        return self.assignment.lease.attempt


@dataclass
class Reference:
    """A task is to do unless it is in one of these; a lease is in ``ends`` until it is over."""

    done: dict[tuple[str, int], int] = field(default_factory=dict)
    dead: set[tuple[str, int]] = field(default_factory=set)
    failures: Counter[tuple[str, int]] = field(default_factory=Counter)
    ends: dict[tuple[tuple[str, int], int], float] = field(default_factory=dict)
    rounds: dict[str, int] = field(default_factory=dict)

    def has_live_lease(self, task: tuple[str, int], now_s: float) -> bool:
        return any(one == task and end_s > now_s for (one, _), end_s in self.ends.items())

    def end_leases(self, task: tuple[str, int]) -> None:
        self.ends = {lease: end for lease, end in self.ends.items() if lease[0] != task}

    def cut_short(self, kind: str) -> None:
        """Forget the rounds of a kind that are not over."""
        cut = {name for name in self.rounds if name.startswith(kind) and not self.is_over(name)}
        self.rounds = {name: n for name, n in self.rounds.items() if name not in cut}
        self.ends = {lease: end for lease, end in self.ends.items() if lease[0][0] not in cut}

    def bury(self, now_s: float) -> None:
        """Dead-letter what failed too often, unless another attempt may still succeed."""
        for task, failures in self.failures.items():
            if failures > MAX_RETRIES and not self.has_live_lease(task, now_s):
                self.dead.add(task)
                self.end_leases(task)

    def is_over(self, name: str) -> bool:
        tasks = {(name, number) for number in range(self.rounds[name])}
        return tasks <= self.done.keys() | self.dead

    def records(self) -> int:
        return sum(n for (name, _), n in self.done.items() if name.startswith("training"))


class EngineMachine(RuleBasedStateMachine):
    """Events in any order; the engine and the reference answer alike."""

    @initialize(sizes=st.lists(st.integers(1, 8), min_size=1, max_size=2))
    def begin(self, sizes: list[int]) -> None:
        spec = JobSpec(
            name="job",
            model="model.py",
            training=DATA,
            epochs=PASSES,
            records_per_task=2,
            batch_size=1,
            task_lease_ttl_ms=int(TTL_S * 1000),
            max_task_retries=MAX_RETRIES,
            checkpoint=CheckpointSpec(every="none"),
        )
        self.clock = [100.0]
        self.job = engine_of(spec, sizes, self.clock)
        self.reference = Reference()
        self.given: list[Given] = []
        self.requests = self.restores = 0
        self.highest: dict[str, int] = {}
        self.go_on()

    @property
    def now_s(self) -> float:
        return self.clock[0]

    def go_on(self) -> None:
        assert self.job.advance() == []
        for opened in self.job.rounds.values():
            if str(opened.id) not in self.reference.rounds:
                assert all(map(self.reference.is_over, self.reference.rounds)), "it is too early"
                self.reference.rounds[str(opened.id)] = len(opened.table)

    def is_valid(self, one: Given) -> bool:
        return (one.task, one.attempt) in self.reference.ends

    @rule(worker=st.sampled_from(WORKERS))
    def worker_asks(self, worker: str) -> None:
        if self.job.is_over:
            return
        self.job.join(worker, 7, "here", 1)
        self.requests += 1
        answer = self.job.give(worker, self.requests, self.job.incarnation)
        if answer is None:
            assert not self.todo(), "a task is to do, and no worker gets it"
            return
        task = (str(answer.round.id), answer.lease.task)
        assert task not in self.reference.done, "a task that is done was given out"
        assert task not in self.reference.dead, "a dead-lettered task was given out"
        others = [one for one in self.given if one.task == task and self.is_valid(one)]
        live = [one for one in others if self.reference.ends[one.task, one.attempt] > self.now_s]
        # A slow task gets a second worker when nothing else is to do.
        assert not live or (len(live) == 1 and live[0].worker != worker and not self.todo())
        highest = self.highest.get(task[0], -1)
        assert answer.lease.attempt > highest, "an attempt was given twice"
        self.highest[task[0]] = answer.lease.attempt
        for one in others:
            if one not in live:
                del self.reference.ends[one.task, one.attempt]
        self.reference.ends[task, answer.lease.attempt] = self.now_s + TTL_S
        self.given.append(Given(worker, task, answer))
        assert self.job.give(worker, self.requests, self.job.incarnation) == answer

    def todo(self) -> int:
        """How many tasks are neither done, nor dead-lettered, nor leased."""
        live = {task for task, _ in self.reference.ends if self.is_live(task)}
        out = self.reference.done.keys() | self.reference.dead | live
        return sum(self.reference.rounds.values()) - len(out)

    def is_live(self, task: tuple[str, int]) -> bool:
        return self.reference.has_live_lease(task, self.now_s)

    @precondition(lambda self: self.given)
    @rule(data=st.data())
    def worker_renews(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.given))
        revoked = self.job.renew(one.worker, [(one.assignment.round.id, one.assignment.lease)])
        fenced = not self.is_valid(one) or self.job.is_over
        assert bool(revoked) == fenced, "a lease that is over was renewed, or a good one was not"
        if not fenced:
            self.reference.ends[one.task, one.attempt] = self.now_s + TTL_S

    @precondition(lambda self: self.given)
    @rule(data=st.data())
    def worker_completes(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.given))
        round_id, lease = one.assignment.round.id, one.assignment.lease
        records = one.assignment.round.table[lease.task].count
        _, is_new = self.job.complete(
            one.worker, round_id, lease, batches=lease.acknowledged, examples=records
        )
        assert is_new == self.is_valid(one), "a lease that is over counts, or a good one does not"
        if is_new:
            self.reference.done[one.task] = records
            del self.reference.failures[one.task]
            self.reference.end_leases(one.task)
        self.go_on()

    @precondition(lambda self: self.given)
    @rule(data=st.data())
    def worker_fails(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.given))
        failure = Failure("no such column", one.worker)
        valid = self.is_valid(one)
        is_dead = self.job.fail(one.worker, one.assignment.round.id, one.assignment.lease, failure)
        if valid:
            self.reference.failures[one.task] += 1
            self.reference.ends.pop((one.task, one.attempt))
        self.reference.bury(self.now_s)
        assert is_dead == (valid and one.task in self.reference.dead)
        self.go_on()

    @precondition(lambda self: self.given)
    @rule(data=st.data())
    def worker_gives_back(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.given))
        self.job.give_back(one.worker, one.assignment.round.id, one.assignment.lease, "it leaves")
        self.reference.ends.pop((one.task, one.attempt), None)
        self.reference.bury(self.now_s)
        self.go_on()

    @rule(worker=st.sampled_from(WORKERS))
    def worker_dies(self, worker: str) -> None:
        self.job.drop_worker(worker, "it was lost")
        for one in self.given:
            if one.worker == worker:
                self.reference.ends.pop((one.task, one.attempt), None)
        self.reference.bury(self.now_s)
        self.go_on()

    @rule(seconds=st.sampled_from([0.5, 1.5, 3.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock[0] += seconds
        self.job.expire()
        self.reference.bury(self.now_s)
        self.go_on()

    @rule()
    def operator_retries(self) -> None:
        if self.job.is_over:
            return
        assert self.job.retry_dead_letters([]) == len(self.reference.dead)
        if self.reference.dead:
            # An end of training that has begun is cut short: another one follows the tasks.
            self.reference.cut_short("train_end")
        for task in self.reference.dead:
            del self.reference.failures[task]
        self.reference.dead.clear()
        self.go_on()

    @rule(chance=st.integers(0, 5))
    def cluster_is_restored(self, chance: int) -> None:
        if chance:
            return
        self.restores += 1
        number = self.restores
        restore = RestoreState("ckpt-1", "", "done", 0, "", number, number, number)
        assert self.job.rows_are(restore, 0.0) == "restored"
        self.job.follow(restore, None, 0.0)
        self.job.note_incarnation(incarnation_in(restore))
        self.reference = Reference()
        self.go_on()

    @invariant()
    def each_task_has_one_state(self) -> None:
        for opened in self.job.rounds.values():
            name = str(opened.id)
            tasks = [(name, number) for number in range(len(opened.table))]
            leased = sum(map(self.is_live, tasks))
            done = sum(task in self.reference.done for task in tasks)
            dead = sum(task in self.reference.dead for task in tasks)
            todo = len(tasks) - leased - done - dead
            assert tuple(opened.ledger.counts) == (todo, leased, done, dead)

    @invariant()
    def each_record_counts_once(self) -> None:
        assert self.job.figures["examples"] == self.reference.records()

    @invariant()
    def the_job_ends_when_nothing_is_left(self) -> None:
        if not self.job.is_over:
            return
        assert [name for name in self.reference.rounds if not self.reference.is_over(name)] == []
        passes = [name for name in self.reference.rounds if name.startswith("training")]
        assert len(passes) == PASSES
        assert self.job.state.state == ("failed" if self.reference.dead else "done")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Each failure of a worker is a line of the log."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=examples(60), stateful_step_count=40)


def rounds_of(spec: JobSpec) -> list[str]:
    """The rounds of a job that has evaluations after each pass, and nothing that ends it early."""
    names = []
    for number in range(1, spec.epochs + 1 if spec.training else 1):
        names += [f"training-{number}"]
        names += [f"evaluation-{number}"] if spec.validation else []
    names += ["train_end-1"] if spec.training else []
    alone = spec.validation and not spec.training
    return names + ["evaluation-1"] * bool(alone) + ["prediction-1"] * bool(spec.prediction)


@settings(max_examples=examples(50))
@given(
    kinds=st.sampled_from([(1, 0, 0), (1, 1, 0), (0, 1, 0), (0, 0, 1)]),
    passes=st.integers(1, 3),
    sizes=st.lists(st.integers(0, 8), min_size=1, max_size=2).filter(any),
)
def test_each_round_goes_once_over_every_record(
    kinds: tuple[int, int, int], passes: int, sizes: list[int]
) -> None:
    training, validation, prediction = (DATA if wanted else None for wanted in kinds)
    spec = JobSpec(
        name="job",
        model="model.py",
        training=training,
        validation=validation,
        prediction=prediction,
        epochs=passes,
        records_per_task=3,
        checkpoint=CheckpointSpec(every="none"),
    )
    job = engine_of(spec, sizes, [100.0])
    seen: dict[str, Counter[tuple[str, int]]] = {}
    while not job.is_over:
        for opened in job.advance():
            job.evaluated(opened, {})
        while (task := job.assign("the only one")) is not None:
            opened, lease, _ = task
            part = opened.table[lease.task]
            records = seen.setdefault(str(opened.id), Counter())
            if opened.id.kind is not RoundKind.TRAIN_END:
                records.update((part.shard, part.start + n) for n in range(part.count))
            job.complete(
                "the only one", opened.id, lease, batches=lease.acknowledged, examples=part.count
            )
            job.closed([(opened.id.number, lease.task)])
    assert list(seen) == rounds_of(spec)
    every = {(f"s{n}", record): 1 for n, size in enumerate(sizes) for record in range(size)}
    for name, records in seen.items():
        assert name.startswith("train_end") or records == every
