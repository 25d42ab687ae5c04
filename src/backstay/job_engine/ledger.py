"""The ledger of a round: who works on which task, what is done, what is dead-lettered.

Events come in as calls, with the time. ``take_changed`` returns which records the journal must
write before a call is answered. The states of a task and their transitions are in ``task.py``; the
ledger gives tasks to workers, takes them back when leases end, and finds tasks and leases quickly.
Its invariants:

- a task is done once: by the first ``complete`` of a lease that has not ended;
- a task is given out only if it has no live lease, or one, and that one's worker is slow;
- a lease that was revoked never completes, fails or returns a task;
- a job master that dies and reads its journal gives out nothing that is done or leased.

Time is seconds on one monotonic clock of the caller's and never goes back. A call costs O(log n)
or less, averaged over all calls, whatever the number of tasks and workers. Imports ``job_engine``,
``backstay.schedule`` and ``backstay.errors``; does no I/O and is not thread-safe.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from types import MappingProxyType
from typing import Literal

from backstay.errors import InvalidRequest
from backstay.job_engine.leases import LeaseQueue, Median
from backstay.job_engine.task import Event, Lease, State, Task
from backstay.job_engine.task_store import Sizes, TaskBits, TaskStore, chunk_of
from backstay.job_engine.values import (
    Changed,
    Counts,
    DeadLetter,
    Failure,
    Grant,
    LeasedTask,
    LedgerLimits,
    WorkerRecord,
)
from backstay.schedule.orders import task_order
from backstay.schedule.rounds import RoundId

__all__ = ["NOBODY", "TaskLedger"]

# The journal has a record under this name, too: streams that no worker was told to close yet, and
# acknowledged batches of tasks without a live lease.
NOBODY = ""


class _Worker:
    """What one worker has in this round.

    Attributes:
        leases: Its leases, live and expired, by task.
        streams: The streams that it is to close: task, and the attempt that did the task.
        told: The tasks among them that another worker did: this worker must be told of them.
        last_done: Task and attempt that it completed last; it may repeat that call.
    """

    __slots__ = ("last_done", "leases", "streams", "told")

    def __init__(self) -> None:
        self.leases: dict[int, Lease] = {}
        self.streams: dict[int, int] = {}
        self.told: set[int] = set()
        self.last_done: tuple[int, int] | None = None


class TaskLedger:
    """Who works on which task of a round, what is done, what is dead-lettered."""

    def __init__(
        self,
        round_id: RoundId,
        size: int,
        order_seed: int | None,
        limits: LedgerLimits,
        *,
        first_attempt: int = 1,
        done: TaskBits | None = None,
        dead_letters: Iterable[DeadLetter] = (),
        sizes: Sizes | None = None,
        keeps_streams: bool = False,
        is_sealed: bool = True,
    ) -> None:
        """Begin a round, or go on with one from its journal (then ``adopt`` what is leased).

        Args:
            round_id: Which round, for messages.
            size: Number of tasks, ``len(TaskTable)``.
            order_seed: Seed of the order in which tasks are given out; None takes them as they
                are numbered.
            limits: How often a task is tried, and how long a lease lasts.
            first_attempt: Number of the first lease; a job master passes
                ``values.first_attempt`` of its number of starts.
            done: The tasks that are done already; it is copied.
            dead_letters: The tasks that are dead-lettered.
            sizes: Batches of each task, shape (size,); None: they are not counted.
            keeps_streams: Whether tasks have streams that must be closed (training).
            is_sealed: Whether no task is added any more. Else ``grow`` adds some, and
                ``order_seed`` is None.

        Raises:
            InvalidRequest: ``done`` or ``dead_letters`` do not fit the number of tasks.
        """
        self.round_id = round_id
        self._size = size
        self._limits = limits
        # Of leases from now on. It may only grow: a lease never ends earlier than it was told.
        self.lease_ttl_s = limits.lease_ttl_s
        self._next_attempt = first_attempt
        self._cut = False
        if order_seed is not None and not is_sealed:
            raise InvalidRequest(f"{round_id}: a round that grows has no order but its numbers")
        self._sealed = is_sealed
        self._keeps_streams = keeps_streams
        done = TaskBits(size) if done is None else done.copy()
        if done.size != size:
            raise InvalidRequest(
                f"{round_id}: {done.size} tasks in the journal, {size} in the data"
            )
        self._tasks = TaskStore(done, task_order(order_seed, size), sizes)
        self._dead_letters: dict[int, DeadLetter] = {}
        self._workers: dict[str, _Worker] = {}
        # In the order in which they were granted.
        self._leases: dict[Lease, None] = {}
        self._open_streams = 0
        self._ends = LeaseQueue(lambda lease: lease.expires_s if lease.is_live else None)
        # The only live lease of its task, the oldest first.
        self._sole = LeaseQueue(lambda lease: lease.granted_s if self._is_sole(lease) else None)
        self._took_s = Median()
        self._dirty_chunks: set[int] = set()
        self._dirty_workers: set[str] = set()
        self._dirty_dead_letters: set[int] = set()
        for record in dead_letters:
            self._restore_dead_letter(record)

    # What workers ask and report.

    def assign(self, worker: str, now_s: float, *, is_idle: bool = True) -> Grant | None:
        """Give a worker a task; None if there is none for it.

        A task that is very slow comes first, then the tasks to do, then any slow task: it gets a
        speculative attempt.

        Args:
            worker: Who asks.
            now_s: The time.
            is_idle: Whether no other round has a task to do for it; only then it gets any slow one.
        """
        limits = self._limits
        has = self._workers.get(worker)
        if self._cut or (has is not None and len(has.leases) >= limits.leases_per_worker_max):
            return None
        median = self._took_s.value
        usual_s = limits.straggler_min_s if median is None else limits.straggler_factor * median
        slow = self._slowest(now_s - max(usual_s, limits.straggler_min_s), worker)
        task = self._tasks.take_next() if slow is None else None
        if slow is None and task is None and is_idle:
            # Nothing is left to do, so a task that takes longer than usual may be tried twice.
            slow = self._slowest(now_s - usual_s, worker)
        task = task if slow is None else slow
        if task is None:
            return None
        self._end_expired(task)
        lease = self._lease(task, worker, self._next_attempt, task.acknowledged, now_s)
        lease.timed = task.acknowledged == 0
        return Grant(task.number, lease.attempt, task.acknowledged, slow is not None)

    def renew(self, worker: str, leases: Iterable[LeasedTask], now_s: float) -> list[LeasedTask]:
        """Extend a worker's leases, take note of acknowledged batches, and return those revoked.

        An expired lease is confirmed unless the task was given to another worker since.
        """
        revoked = []
        has = self._workers.get(worker)
        for leased in leases:
            lease = None if has is None else has.leases.get(leased.task)
            if lease is None or lease.attempt != leased.attempt or lease.withdrawn:
                revoked.append(leased)
                continue
            task = lease.task
            if leased.acknowledged > task.acknowledged:
                self._tasks.acknowledge(task, leased.acknowledged)
            lease.expires_s = now_s + self.lease_ttl_s
            if lease.expired:
                self._step(task, Event.RENEW)
                lease.expired = False
                self._enter(lease)
        return revoked

    def withdraw(self, lease: Lease, why: str) -> bool:
        """Have a lease not be renewed any more: its task goes to another worker when it expires.

        Returns:
            False if it is over or was withdrawn before, and nothing changed.
        """
        if lease.ended or lease.withdrawn:
            return False
        lease.withdrawn = why
        return True

    def why_revoked(self, worker: str, task: int, attempt: int) -> str:
        """Return why a worker may not work on a task under an attempt, as far as is still known."""
        if not 0 <= task < self._size:
            return "the round has no such task"
        lease = self._find(worker, task, attempt)
        if lease is not None:
            return lease.withdrawn
        if self._cut:
            return "the round was cut short"
        state = self._tasks.state_of(task)
        if state is State.DONE:
            return "the task is done"
        if state is State.DEAD_LETTERED:
            return "the task failed too often"
        record = self._tasks.find(task)
        for other in record.leases if record is not None else ():
            return f"{other.worker} has the task now (attempt {other.attempt})"
        return "the task was taken back"

    def complete(
        self, worker: str, task: int, attempt: int, now_s: float, batches: int = 0
    ) -> bool:
        """Take note that a worker has done a task, and revoke the other worker's lease of it.

        Args:
            worker: Who.
            task: Which task.
            attempt: Number of the lease.
            now_s: The time.
            batches: Number of batches of the whole task.

        Returns:
            Whether this attempt is the one that counts (also when it is told again), False if it
            was revoked before.

        Raises:
            InvalidRequest: There is no such task, or that attempt was never given.
        """
        self._check(task, attempt)
        lease = self._find(worker, task, attempt)
        if lease is None:
            return self._was_done_by(worker, task, attempt)
        if lease.timed:
            self._took_s.add(now_s - lease.granted_s)
        record = self._tasks[task]
        self._make_done(record, Event.COMPLETE, batches)
        self._workers[worker].last_done = (task, attempt)
        if self._keeps_streams:
            self._open_stream(record, worker, attempt)
        self._tasks.drop(record)
        return True

    def fail(
        self,
        worker: str,
        task: int,
        attempt: int,
        failure: Failure,
        acknowledged: int = 0,
    ) -> Literal["retry", "dead_lettered", "revoked"]:
        """End a lease because the task failed; too often, and the task is dead-lettered.

        Returns:
            What comes of it; "revoked" if that lease was over before, and nothing changed.

        Raises:
            InvalidRequest: There is no such task, or that attempt was never given.
        """
        self._check(task, attempt)
        lease = self._find(worker, task, attempt)
        if lease is None:
            return "revoked"
        record = self._tasks[task]
        self._tasks.acknowledge(record, acknowledged)
        record.failed(failure)
        self._end(record, lease)
        self._came_back(record, to_front=False)
        return "dead_lettered" if record.state is State.DEAD_LETTERED else "retry"

    def give_back(
        self,
        worker: str,
        task: int,
        attempt: int,
        acknowledged: int,
        reason: str = "",
    ) -> bool:
        """End a lease for no fault of the task; return False if it was over before.

        Raises:
            InvalidRequest: There is no such task, or that attempt was never given.
        """
        self._check(task, attempt)
        lease = self._find(worker, task, attempt)
        if lease is None:
            return False
        record = self._tasks[task]
        self._tasks.acknowledge(record, acknowledged)
        self._end_without_failure(
            record, lease, f"given back: {reason}" if reason else "given back"
        )
        self._came_back(record, to_front=True)
        return True

    def drop_worker(self, worker: str) -> list[int]:
        """End all leases of a worker that is surely gone, and return their tasks.

        Its streams to close go to the next workers that ask.
        """
        has = self._workers.get(worker)
        if has is None:
            return []
        tasks, may_have_begun = [], True
        for lease in sorted(has.leases.values(), key=lambda lease: lease.attempt):
            task = lease.task
            # It does one task after the other, so a task that it asked for ahead did not kill it.
            self._end_without_failure(task, lease, "its worker was lost", was_begun=may_have_begun)
            may_have_begun = may_have_begun and task.acknowledged > lease.first_batch
            self._came_back(task, to_front=True)
            tasks.append(lease.task.number)
        for number, attempt in sorted(has.streams.items()):
            self._open_stream(self._tasks[number], NOBODY, attempt)
        del self._workers[worker]
        return tasks

    def expire(self, now_s: float) -> list[int]:
        """Make tasks whose leases ran out available to others, and return them."""
        tasks = []
        while (first := self._ends.first()) is not None and first[0] <= now_s:
            self._ends.pop()
            lease = first[1]
            lease.expired = True
            task = lease.task
            for other in task.leases:
                self._sole.push(other, len(self._leases))
            self._came_back(task, to_front=True)
            if task.state is not State.LEASED:
                tasks.append(task.number)
        return tasks

    def next_expiry(self) -> float | None:
        """Return a time before which no lease expires, None if nothing is leased."""
        first = self._ends.first()
        return None if first is None else first[0]

    def streams_to_close(self, worker: str, most: int = 64) -> list[int]:
        """Tell a worker of streams to close whose worker is lost; they are its own from now on.

        What it was told before is told again until it is closed: an answer may have been lost.
        """
        has, lost = self._workers.get(worker), self._workers.get(NOBODY)
        told = has.told if has is not None else set()
        if lost is not None and lost.streams and len(told) < most:
            has = self._worker(worker)
            for number, attempt in list(islice(lost.streams.items(), most - len(told))):
                self._open_stream(self._tasks[number], worker, attempt)
                has.told.add(number)
            told = has.told
        return sorted(told)

    def closed(self, tasks: Iterable[int]) -> None:
        """Take note that streams are closed; unknown ones are ignored."""
        for number in tasks:
            task = self._tasks.find(number)
            if task is not None and task.closer is not None:
                self._close_stream(task)
                self._tasks.drop(task)

    def retry_dead_letters(self, tasks: Iterable[int] | None = None) -> list[int]:
        """Put dead-lettered tasks (all, if None) back with fresh limits; return those put back."""
        if self._cut:
            return []
        wanted = (
            self._dead_letters.keys() if tasks is None else self._dead_letters.keys() & set(tasks)
        )
        back = sorted(wanted)
        for number in back:
            self._step(self._tasks[number], Event.RETRY)
            del self._dead_letters[number]
            self._dirty_dead_letters.add(number)
            self._tasks.put_back(number, to_front=False)
        return back

    def cut_short(self) -> None:
        """End the round for good: revoke all leases, and give no more tasks."""
        self._cut = True
        begun = [task for task in self._tasks.records() if task.was_begun]
        for task in sorted(begun, key=lambda task: task.number):
            if task.leases:
                self._step(task, Event.RELEASE)
            for lease in list(task.leases):
                self._end(task, lease)
            if self._keeps_streams:
                self._open_stream(task, NOBODY, 0)

    # A round that grows.

    def grow(self, size: int, sizes: Sizes | None) -> None:
        """Add tasks, which are given out after the others.

        Args:
            size: The number of all tasks now.
            sizes: Batches of each of the new tasks; None: they are not counted.

        Raises:
            InvalidRequest: The round is sealed, or had more tasks before.
        """
        if self._sealed or size < self._size:
            raise InvalidRequest(f"{self.round_id}: {size} tasks instead of {self._size}")
        self._tasks.grow(task_order(None, size), sizes)
        self._size = size

    def seal(self) -> None:
        """Add no tasks any more: the round is over when those that it has are."""
        self._sealed = True

    @property
    def is_sealed(self) -> bool:
        """Whether no task is added any more."""
        return self._sealed

    # The journal.

    def adopt(self, worker: str, leased: LeasedTask, now_s: float) -> bool:
        """Take over a lease from the journal; its time begins anew. False if there is none now."""
        number, attempt, acknowledged = leased
        if not (0 <= number < self._size and attempt >= 0 and acknowledged >= 0):
            raise InvalidRequest(f"{self.round_id}: a lease on task {number} of {self._size}")
        self._next_attempt = max(self._next_attempt, attempt + 1)
        state = self._tasks.state_of(number)
        if self._cut or state in (State.DONE, State.DEAD_LETTERED):
            self._dirty_workers.add(worker)
            record = self._tasks.find(number)
            is_orphan = state is State.DONE and (record is None or record.closer is None)
            if self._keeps_streams and is_orphan and worker != NOBODY:
                # The journal has that the task is done, but not who is to close the stream.
                self._open_stream(self._tasks[number], NOBODY, attempt)
            return False
        task = self._tasks[number]
        self._tasks.acknowledge(task, acknowledged)
        if worker == NOBODY:
            self._dirty_workers.add(NOBODY)
            self._tasks.note_unleased(task)
            return False
        for earlier in [lease for lease in task.leases if lease.worker == worker]:
            self._end(task, earlier)
        self._lease(task, worker, attempt, acknowledged, now_s)
        return True

    def adopt_worker(self, worker: str, record: WorkerRecord, now_s: float) -> None:
        """Take over all that the journal keeps of a worker: its leases and its streams to close.

        Raises:
            InvalidRequest: The record has tasks that the round has not.
        """
        for number, attempt in record.to_close:
            self._next_attempt = max(self._next_attempt, attempt + 1)
            if not 0 <= number < self._size:
                raise InvalidRequest(f"{self.round_id}: stream of task {number} of {self._size}")
            task = self._tasks[number]
            if attempt and task.state is not State.DONE:
                # The job master died between this record and the one of the done tasks.
                self._make_done(task, Event.RECOVER, None)
            if self._keeps_streams:
                self._open_stream(task, worker, attempt)
            self._tasks.drop(task)
        for leased in record.leased:
            self.adopt(worker, leased, now_s)

    def take_changed(self) -> Changed:
        """Return which records differ from the journal, and take them for written.

        Their values are made when they are written, because many calls may change one record.
        """
        changed = Changed(
            sorted(self._dirty_chunks),
            sorted(self._dirty_workers),
            sorted(self._dirty_dead_letters),
        )
        self._dirty_chunks.clear()
        self._dirty_workers.clear()
        self._dirty_dead_letters.clear()
        return changed

    @property
    def batches(self) -> int:
        """Batches of tasks done, and acknowledged ones of all others; each counts once."""
        return self._tasks.batches

    @property
    def counts(self) -> Counts:
        """How many tasks are in which state."""
        return self._tasks.counts

    @property
    def is_over(self) -> bool:
        """Whether every task is done or dead-lettered and none is added, or it was cut short."""
        if self._cut:
            return True
        return self._sealed and len(self.done) + len(self._dead_letters) == self._size

    @property
    def is_cut_short(self) -> bool:
        """Whether ``cut_short`` was called."""
        return self._cut

    @property
    def done(self) -> TaskBits:
        """The tasks done; not to be changed by the caller (``copy`` it to keep it)."""
        return self._tasks.done

    @property
    def dead_letters(self) -> Mapping[int, DeadLetter]:
        """The dead-lettered tasks by number."""
        return MappingProxyType(self._dead_letters)

    @property
    def open_streams(self) -> int:
        """How many streams of done tasks are not confirmed closed."""
        return self._open_streams

    @property
    def workers(self) -> frozenset[str]:
        """The workers that have leases or streams to close."""
        return frozenset(
            name for name, has in self._workers.items() if name and (has.leases or has.streams)
        )

    @property
    def leases(self) -> Iterator[Lease]:
        """All leases, live and expired; only this ledger changes them."""
        return iter(self._leases)

    def has_lease(self, worker: str) -> bool:
        """Return whether a worker has a lease, live or expired."""
        has = self._workers.get(worker)
        return has is not None and bool(has.leases)

    def record_of(self, worker: str) -> WorkerRecord:
        """Return a worker's leases and streams to close, as the journal keeps them."""
        has = self._workers.get(worker)
        if worker == NOBODY:
            numbers = sorted(self._tasks.unleased)
            leased = [LeasedTask(number, 0, self._tasks[number].acknowledged) for number in numbers]
        else:
            leases = has.leases.values() if has is not None else ()
            leased = [
                LeasedTask(lease.task.number, lease.attempt, lease.task.acknowledged)
                for lease in sorted(leases, key=lambda lease: lease.attempt)
            ]
        return WorkerRecord(tuple(leased), tuple(sorted(has.streams.items())) if has else ())

    # How it is done.

    def _restore_dead_letter(self, record: DeadLetter) -> None:
        number = record.task
        if not 0 <= number < self._size:
            raise InvalidRequest(f"{self.round_id}: dead-lettered task {number} of {self._size}")
        if number in self.done:
            self._dirty_dead_letters.add(number)  # the journal's record of it is out of date
            return
        self._tasks.restore_dead_letter(number, record.acknowledged)
        self._dead_letters[number] = record

    def _check(self, task: int, attempt: int) -> None:
        if not (0 <= task < self._size and 0 <= attempt < self._next_attempt):
            what = f"attempt {attempt} of task {task}"
            raise InvalidRequest(f"{self.round_id}: {what} of {self._size} was never given")

    def _worker(self, name: str) -> _Worker:
        has = self._workers.get(name)
        if has is None:
            has = self._workers[name] = _Worker()
        return has

    def _step(self, task: Task, event: Event) -> None:
        """Apply an event to a task; the journal gets acknowledged batches without a lease."""
        self._tasks.step(task, event)
        if task.acknowledged and not self._cut and self._tasks.note_unleased(task):
            self._dirty_workers.add(NOBODY)

    def _make_done(self, task: Task, event: Event, batches: int | None) -> None:
        """Take a task for done, whatever its leases; None: of as many batches as recorded."""
        self._step(task, event)
        for lease in list(task.leases):
            self._end(task, lease)
        if self._dead_letters.pop(task.number, None) is not None:
            self._dirty_dead_letters.add(task.number)
        self._tasks.count_done(task, batches)
        self._dirty_chunks.add(chunk_of(task.number))
        task.forget_trouble()

    def _was_done_by(self, worker: str, task: int, attempt: int) -> bool:
        """Return whether an attempt that is over did a task, as far as is still known."""
        has, record = self._workers.get(worker), self._tasks.find(task)
        if has is not None and has.last_done == (task, attempt):
            return True
        return record is not None and record.closer is not None and record.done_by == attempt

    # Leases.

    def _find(self, worker: str, task: int, attempt: int) -> Lease | None:
        has = self._workers.get(worker)
        lease = None if has is None else has.leases.get(task)
        return lease if lease is not None and lease.attempt == attempt else None

    def _lease(self, task: Task, worker: str, attempt: int, first: int, now_s: float) -> Lease:
        """Grant a lease of a task that is to do, or that others have leases of."""
        self._step(task, Event.LEASE)
        lease = Lease(worker, task, attempt, first, now_s, now_s + self.lease_ttl_s)
        self._next_attempt = max(self._next_attempt, attempt + 1)
        task.leases.append(lease)
        self._worker(worker).leases[task.number] = lease
        self._leases[lease] = None
        self._enter(lease)
        self._dirty_workers.add(worker)
        return lease

    def _enter(self, lease: Lease) -> None:
        self._ends.push(lease, len(self._leases))
        self._sole.push(lease, len(self._leases))

    def _end(self, task: Task, lease: Lease) -> None:
        """End a lease for good; the caller then applies the event that the task goes through."""
        lease.ended = True
        task.leases.remove(lease)
        del self._workers[lease.worker].leases[task.number]
        del self._leases[lease]
        self._dirty_workers.add(lease.worker)
        for other in task.leases:  # it may be the only live one now
            self._sole.push(other, len(self._leases))

    def _end_without_failure(
        self, task: Task, lease: Lease, why: str, *, was_begun: bool = True
    ) -> None:
        self._end(task, lease)
        task.ended_without_failure(lease, why, was_begun=was_begun)

    def _end_expired(self, task: Task) -> None:
        for lease in list(task.leases):
            if lease.expired:
                why = lease.withdrawn or "it was not renewed in time"
                self._end_without_failure(task, lease, why)

    def _is_sole(self, lease: Lease) -> bool:
        """Return whether a lease is the only live one of its task."""
        if lease.ended or lease.expired:
            return False
        leases = lease.task.leases
        return len(leases) == 1 or not any(one.is_live for one in leases if one is not lease)

    def _slowest(self, begun_s: float, except_worker: str) -> Task | None:
        """Return the task whose only live lease is the oldest of all, granted by ``begun_s``.

        Tasks that ``except_worker`` has a lease of, live or expired, are passed over.
        """
        first = self._sole.first()
        if first is None or first[0] > begun_s:
            return None
        passed: list[Lease] = []
        found: Task | None = None
        has = self._workers.get(except_worker)
        mine = has.leases if has is not None else {}
        while (first := self._sole.first()) is not None and first[0] <= begun_s:
            if first[1].task.number not in mine:
                found = first[1].task
                break
            passed.append(first[1])
            self._sole.pop()
        for lease in passed:  # as many as that worker has leases, at most
            self._sole.push(lease, len(self._leases))
        return found

    def _came_back(self, task: Task, *, to_front: bool) -> None:
        """Queue or dead-letter a task of which a lease has ended or expired, unless one is live."""
        if task.is_leased:
            self._step(task, Event.END_ONE)
            return
        if task.is_last_chance_over(self._limits):
            self._end_expired(task)
        dead_letter = task.dead_letter(self._limits)
        if dead_letter is None:
            self._step(task, Event.EXPIRE if task.leases else Event.RELEASE)
            self._tasks.put_back(task.number, to_front=to_front and task.comes_first)
            return
        self._step(task, Event.DEAD_LETTER)
        for lease in list(task.leases):
            self._end(task, lease)
        self._dead_letters[task.number] = dead_letter
        self._dirty_dead_letters.add(task.number)
        task.forget_trouble()

    # Streams.

    def _open_stream(self, task: Task, worker: str, attempt: int) -> None:
        """Make a worker the one who closes a task's stream."""
        if task.closer is not None:
            self._close_stream(task)
        task.closer, task.done_by = worker, attempt
        self._worker(worker).streams[task.number] = attempt
        self._open_streams += 1
        self._dirty_workers.add(worker)

    def _close_stream(self, task: Task) -> None:
        assert task.closer is not None
        has = self._workers[task.closer]
        del has.streams[task.number]
        has.told.discard(task.number)
        self._open_streams -= 1
        self._dirty_workers.add(task.closer)
        task.closer = None
