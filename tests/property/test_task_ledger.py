"""The ledger of a round against a plain model of it, with workers and masters that die at random.

The journal is a dictionary, written in two halves as a real one may be: the job master can die
between them. Each answer came after everything was written.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from backstay.job_engine.ledger import NOBODY, TaskLedger
from backstay.job_engine.task import State
from backstay.job_engine.task_store import CHUNK_TASKS, TaskBits
from backstay.job_engine.values import (
    ATTEMPTS_PER_MASTER,
    DeadLetter,
    Failure,
    Grant,
    LeasedTask,
    LedgerLimits,
    WorkerRecord,
)
from backstay.schedule.rounds import RoundId, RoundKind
from tests.examples import examples
from tests.ledger_changes import Changes, take_changes

ROUND = RoundId(RoundKind.TRAINING, 1)
LIMITS = LedgerLimits(
    lease_ttl_s=5.0,
    max_retries=1,
    max_without_progress=4,
    straggler_factor=1.0,
    straggler_min_s=0.5,
    leases_per_worker_max=3,
)
WORKERS = [f"w-{number}" for number in range(4)]
BATCHES = 5


def batches_of(task: int) -> int:
    """Every other task has damaged records, so that its last batch is missing."""
    return BATCHES - task % 2


@dataclass
class Journal:
    """What the coordination store has; texts, so that the records' forms are used as well."""

    done: dict[int, str] = field(default_factory=dict)
    workers: dict[str, str] = field(default_factory=dict)
    dead_letters: dict[int, str] = field(default_factory=dict)

    def write_tasks(self, changes: Changes) -> None:
        self.done |= changes.done
        for task, record in changes.dead_letters.items():
            if record is None:
                self.dead_letters.pop(task, None)
            else:
                self.dead_letters[task] = record.to_json()

    def write_workers(self, changes: Changes) -> None:
        for worker, record in changes.workers.items():
            if record:
                self.workers[worker] = record.to_json()
            else:
                self.workers.pop(worker, None)

    def ledger(
        self, size: int, seed: int | None, generation: int, now_s: float, ttl_s: float
    ) -> TaskLedger:
        ledger = TaskLedger(
            ROUND,
            size,
            seed,
            replace(LIMITS, lease_ttl_s=ttl_s),
            first_attempt=generation * ATTEMPTS_PER_MASTER,
            done=TaskBits.from_chunks(size, self.done),
            dead_letters=map(DeadLetter.from_json, self.dead_letters.values()),
            sizes=np.full(size, BATCHES, np.uint32),
            keeps_streams=True,
        )
        for worker, text in self.workers.items():
            ledger.adopt_worker(worker, WorkerRecord.from_json(text), now_s)
        return ledger

    def acknowledged(self) -> dict[int, int]:
        """Return the acknowledged batches of tasks that are not done, as far as written."""
        acknowledged: dict[int, int] = {}
        for text in self.workers.values():
            for task, _, batches in WorkerRecord.from_json(text).leased:
                acknowledged[task] = max(batches, acknowledged.get(task, 0))
        dead_letters = map(DeadLetter.from_json, self.dead_letters.values())
        return acknowledged | {one.task: one.acknowledged for one in dead_letters}


class LedgerMachine(RuleBasedStateMachine):
    """Workers as they are: each knows its grants, and may come with old ones."""

    @initialize(size=st.integers(0, 5), seed=st.none() | st.integers(0, 3), more=st.booleans())
    def begin(self, size: int, seed: int | None, more: bool) -> None:
        # Sometimes so many that a second chunk is needed; all but a few are done.
        self.done = set(range(CHUNK_TASKS - 1)) if more else set()
        self.size = size + len(self.done)
        self.seed = seed
        self.now_s = 0.0
        self.generation = 1
        self.ttl_s = LIMITS.lease_ttl_s
        self.journal = Journal()
        bits = TaskBits(self.size)
        for task in self.done:
            bits.add(task)
        self.journal.done = bits.chunks()
        self.ledger = self.journal.ledger(self.size, seed, 1, 0.0, self.ttl_s)
        # Every grant ever answered, who got it, and which of them a worker may still rely on.
        self.grants: list[tuple[str, Grant]] = []
        self.valid: set[tuple[str, int, int]] = set()
        self.attempts: Counter[int] = Counter()
        self.revoked: set[int] = set()
        # The most that this job master, or one before it, was told.
        self.acknowledged: dict[int, int] = {}
        # What this job master knows.
        self.known: dict[int, int] = {}
        self.done_before = len(self.done)
        # Leases of workers that hang: not renewed, though as good as others until they are over.
        self.withdrawn: set[tuple[str, int, int]] = set()
        self.unclosed: set[int] = set()

    def write(self) -> None:
        changes = take_changes(self.ledger)
        self.journal.write_tasks(changes)
        self.journal.write_workers(changes)

    def pick(self, data: st.DataObject) -> tuple[str, Grant]:
        """Any grant there ever was, though mostly one that is good."""
        good = [
            (worker, grant)
            for worker, grant in self.grants
            if (worker, grant.task, grant.attempt) in self.valid
        ]
        old = not good or data.draw(st.integers(0, 3)) == 0
        return data.draw(st.sampled_from(self.grants if old else good))

    def workers_of(self, task: int) -> set[str]:
        return {worker for worker, leased, _ in self.valid if leased == task}

    def tell(self, task: int, acknowledged: int) -> None:
        for told in (self.acknowledged, self.known):
            told[task] = max(acknowledged, told.get(task, 0))

    def forget_dead_letters(self) -> None:
        """Dead-lettering ends what is left of the leases: no worker could rely on them."""
        self.valid = {each for each in self.valid if each[1] not in self.ledger.dead_letters}

    @rule(worker=st.sampled_from(WORKERS))
    def assign(self, worker: str) -> None:
        self.give(worker)

    @rule()
    def all_ask(self) -> None:
        """Nothing is left to do soon, and speculative attempts come about."""
        for worker in WORKERS:
            self.give(worker)

    def give(self, worker: str) -> None:
        todo = self.ledger.counts.todo
        grant = self.ledger.assign(worker, self.now_s)
        if grant is None:
            self.write()
            self.forget_expired()
            return
        assert grant.task not in self.done, "a task that is done was given out"
        assert worker not in self.workers_of(grant.task) or not grant.speculative
        lasting = {
            leased
            for leased in self.valid
            if leased[1] == grant.task and self.ends[leased] > self.now_s
        }
        if grant.speculative:
            assert len(lasting) <= 1, "a third worker got the task"
        else:
            assert not lasting, "a task was given out while somebody has a live lease"
            assert todo > 0
        self.valid = {
            leased for leased in self.valid if leased[1] != grant.task or leased in lasting
        }
        assert grant.first_batch <= self.acknowledged.get(grant.task, 0)
        assert self.attempts[grant.attempt] == 0, "an attempt's number was given twice"
        self.attempts[grant.attempt] += 1
        self.write()
        self.grants.append((worker, grant))
        self.valid.add((worker, grant.task, grant.attempt))
        self.ends[worker, grant.task, grant.attempt] = self.now_s + self.ttl_s
        self.forget_expired()

    @property
    def ends(self) -> dict[tuple[str, int, int], float]:
        if not hasattr(self, "_ends"):
            self._ends: dict[tuple[str, int, int], float] = {}
        return self._ends

    def forget_expired(self) -> None:
        """Drop from ``valid`` what the ledger has taken away from leases whose time is over."""
        for leased in list(self.valid):
            worker, task, attempt = leased
            record = self.ledger.record_of(worker)
            if not any(each[:2] == (task, attempt) for each in record.leased):
                assert self.ends[leased] <= self.now_s or task in self.ledger.dead_letters, (
                    "a lease was taken away in its time"
                )
                self.valid.discard(leased)
                self.revoked.add(attempt)

    @precondition(lambda self: self.grants)
    @rule(data=st.data(), acknowledged=st.integers(0, BATCHES - 1))
    def renew(self, data: st.DataObject, acknowledged: int) -> None:
        worker, grant = self.pick(data)
        leased = LeasedTask(grant.task, grant.attempt, acknowledged)
        lease = (worker, grant.task, grant.attempt)
        valid = lease in self.valid and lease not in self.withdrawn
        revoked = self.ledger.renew(worker, [leased], self.now_s)
        assert revoked == ([] if valid else [leased])
        if valid:
            self.tell(grant.task, acknowledged)
            self.ends[worker, grant.task, grant.attempt] = self.now_s + self.ttl_s

    @rule(worker=st.sampled_from(WORKERS))
    def worker_hangs(self, worker: str) -> None:
        for lease in self.ledger.leases:
            if lease.worker == worker:
                self.ledger.withdraw(lease, "it hangs")
                self.withdrawn.add((worker, lease.task.number, lease.attempt))

    @precondition(lambda self: self.grants)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        worker, grant = self.pick(data)
        leased = (worker, grant.task, grant.attempt)
        first = self.ledger.complete(*leased, self.now_s, batches_of(grant.task))
        if leased in self.valid:
            assert first
            assert grant.attempt not in self.revoked, "a revoked attempt completed a task"
            assert grant.task not in self.done, "a task was done twice"
            self.done.add(grant.task)
            self.unclosed.add(grant.task)
            for other in [each for each in self.valid if each[1] == grant.task]:
                self.valid.discard(other)
                if other != leased:
                    self.revoked.add(other[2])
        elif first:
            # The same attempt, told again.
            assert grant.task in self.done
            assert grant.attempt not in self.revoked
        self.write()

    @precondition(lambda self: self.grants)
    @rule(data=st.data(), acknowledged=st.integers(0, BATCHES - 1))
    def fail(self, data: st.DataObject, acknowledged: int) -> None:
        worker, grant = self.pick(data)
        leased = (worker, grant.task, grant.attempt)
        outcome = self.ledger.fail(*leased, Failure("no such column", worker, (3,)), acknowledged)
        assert (outcome != "revoked") == (leased in self.valid)
        self.end(leased, acknowledged)

    @precondition(lambda self: self.grants)
    @rule(data=st.data(), acknowledged=st.integers(0, BATCHES - 1))
    def give_back(self, data: st.DataObject, acknowledged: int) -> None:
        worker, grant = self.pick(data)
        leased = (worker, grant.task, grant.attempt)
        assert self.ledger.give_back(*leased, acknowledged) == (leased in self.valid)
        self.end(leased, acknowledged)

    def end(self, leased: tuple[str, int, int], acknowledged: int) -> None:
        if leased in self.valid:
            self.valid.discard(leased)
            self.tell(leased[1], acknowledged)
            self.revoked.add(leased[2])
        self.write()
        self.forget_expired()

    @rule(worker=st.sampled_from(WORKERS))
    def worker_dies(self, worker: str) -> None:
        tasks = self.ledger.drop_worker(worker)
        mine = {leased for leased in self.valid if leased[0] == worker}
        assert sorted(tasks) == sorted(leased[1] for leased in mine)
        self.valid -= mine
        self.revoked |= {leased[2] for leased in mine}
        self.write()
        self.forget_expired()

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0, 7.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        soonest = min((self.ends[leased] for leased in self.valid), default=None)
        told = self.ledger.next_expiry()
        if told is not None and soonest is not None and soonest > self.now_s:
            assert told <= soonest
        self.ledger.expire(self.now_s)
        assert self.ledger.next_expiry() is None or self.ledger.next_expiry() > self.now_s  # type: ignore[operator]
        self.write()
        self.forget_expired()

    @rule(worker=st.sampled_from(WORKERS), most=st.integers(1, 3))
    def close_for_others(self, worker: str, most: int) -> None:
        tasks = self.ledger.streams_to_close(worker, most)
        self.write()
        assert set(tasks) <= self.unclosed, "a stream was to be closed that is closed or in use"
        self.ledger.closed(tasks)
        self.unclosed -= set(tasks)
        self.write()

    @rule(data=st.data())
    def close_own(self, data: st.DataObject) -> None:
        if self.unclosed:
            task = data.draw(st.sampled_from(sorted(self.unclosed)))
            self.ledger.closed([task, task])
            self.unclosed.discard(task)
            self.write()

    @rule()
    def leases_last_longer(self) -> None:
        """More workers have come; what was given before keeps its time."""
        self.ttl_s += 1.0
        self.ledger.lease_ttl_s = self.ttl_s

    @rule()
    def retry_dead_letters(self) -> None:
        dead_letters = sorted(self.ledger.dead_letters)
        assert self.ledger.retry_dead_letters() == dead_letters
        self.write()

    @rule(between=st.booleans(), data=st.data())
    def master_dies(self, between: bool, data: st.DataObject) -> None:
        """A new one reads the journal; of the last changes it may have half, and no answer."""
        if between:
            self.change_unanswered(data)
        self.generation += 1
        # The time of leases is read from the job's record, which is never behind.
        self.ledger = self.journal.ledger(
            self.size, self.seed, self.generation, self.now_s, self.ttl_s
        )
        # Acknowledged batches are kept with the leases of their time, of ended leases, or
        # forgotten.
        self.known = self.journal.acknowledged()
        self.withdrawn = set()
        for leased in self.valid:
            self.ends[leased] = self.now_s + self.ttl_s
        self.write()
        self.forget_expired()

    def change_unanswered(self, data: st.DataObject) -> None:
        """One more change, of which the journal gets the tasks' half."""
        if not self.valid:
            return
        leased = data.draw(st.sampled_from(sorted(self.valid)))
        if data.draw(st.booleans()):
            assert self.ledger.complete(*leased, self.now_s, batches_of(leased[1]))
            self.done.add(leased[1])
            self.unclosed.add(leased[1])
            self.valid = {each for each in self.valid if each[1] != leased[1]}
        else:
            self.ledger.fail(*leased, Failure("lost", leased[0]))
        self.journal.write_tasks(take_changes(self.ledger))
        self.forget_dead_letters()

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "ledger"):
            return
        counts = self.ledger.counts
        assert counts.total == self.size
        assert min(counts) >= 0
        assert counts.done == len(self.done)
        assert all(task in self.ledger.done for task in self.done)
        assert counts.dead_letters == len(self.ledger.dead_letters)
        assert not self.done & self.ledger.dead_letters.keys()
        assert counts.doing <= len({leased[1] for leased in self.valid})
        assert self.ledger.open_streams == len(self.unclosed)
        assert self.ledger.is_over == (counts.done + counts.dead_letters == self.size)

    @invariant()
    def states_and_leases_agree(self) -> None:
        if not hasattr(self, "ledger"):
            return
        for task in self.ledger._tasks.records():
            live = any(lease.is_live for lease in task.leases)
            assert (task.state is State.LEASED) == live
            assert (task.state is State.EXPIRED) == (bool(task.leases) and not live)

    @invariant()
    def the_journal_says_the_same(self) -> None:
        if not hasattr(self, "ledger"):
            return
        assert self.journal.done == self.ledger.done.chunks()
        assert self.journal.dead_letters.keys() == self.ledger.dead_letters.keys()
        in_journal = {
            (worker, task, attempt)
            for worker, text in self.journal.workers.items()
            for task, attempt, _ in WorkerRecord.from_json(text).leased
            if worker != NOBODY
        }
        assert in_journal == self.valid

    @invariant()
    def each_batch_is_a_step_once(self) -> None:
        if not hasattr(self, "ledger"):
            return
        new = [task for task in self.done if task >= self.done_before]
        steps = BATCHES * self.done_before + sum(map(batches_of, new))
        steps += sum(most for task, most in self.known.items() if task not in self.done)
        assert self.ledger.batches == steps

    def teardown(self) -> None:
        """One worker that keeps on working gets the round to its end."""
        if not hasattr(self, "ledger"):
            return
        todo = self.ledger.counts
        for _ in range(4 * (todo.todo + todo.doing) + 4):
            if self.ledger.is_over:
                break
            grant = self.ledger.assign("w-last", self.now_s)
            if grant is None:
                self.now_s += self.ttl_s
                self.ledger.expire(self.now_s)
            else:
                assert self.ledger.complete("w-last", grant.task, grant.attempt, self.now_s)
        assert self.ledger.is_over, "a task got lost"
        for worker in WORKERS:
            self.ledger.drop_worker(worker)
        self.ledger.drop_worker("w-last")
        while tasks := self.ledger.streams_to_close("w-end"):
            self.ledger.closed(tasks)
        assert self.ledger.open_streams == 0


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=examples(100), stateful_step_count=40)
