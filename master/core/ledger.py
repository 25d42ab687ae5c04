"""The ledger of one round: who works on which task, what is done, what is parked.

A task is to do, held by a worker (two, if the first is slow), done or parked, as drawn in
docs/internals/jobs.md. The ledger hands tasks out, takes them back when holds end, and says what
the journal must know. Its invariants:

- a task is done once: by the first ``complete`` of a hold that is valid;
- a task is given out only if nobody holds it, or one worker does and is slow;
- a hold that was revoked never completes, fails or returns a task;
- a master that dies and reads its journal gives nothing out that is done or held.

Time is seconds on one monotonic clock of the caller's and never goes back. A call costs O(log n)
or less, averaged over all calls, whatever the number of tasks and workers. Imports ``master.core``,
numpy and ``backstay.errors``; does no I/O and is not thread-safe.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Literal

from backstay.course.orders import task_order
from backstay.course.rounds import RoundId
from backstay.errors import InvalidRequest
from backstay.master.core.batch_count import BatchCount, Sizes
from backstay.master.core.closing import NOBODY, StreamsToClose
from backstay.master.core.hold_book import Hold, HoldBook, Median
from backstay.master.core.holds import (
    Changes,
    Counts,
    Failure,
    Grant,
    HeldTask,
    LedgerLimits,
    ParkedTask,
    WorkerRecord,
)
from backstay.master.core.task_bits import TaskBits, chunk_of
from backstay.master.core.task_states import DONE, HELD, PARKED, TODO, TaskStates
from backstay.master.core.todo import TodoQueue
from backstay.master.core.trouble import Trouble

__all__ = ["NOBODY", "TaskLedger"]


class TaskLedger:
    """Who works on which task of a round, what is done, what is parked."""

    def __init__(
        self,
        round_id: RoundId,
        size: int,
        order_seed: int | None,
        limits: LedgerLimits,
        *,
        first_attempt: int = 1,
        done: TaskBits | None = None,
        parked: Iterable[ParkedTask] = (),
        sizes: Sizes | None = None,
        keeps_streams: bool = False,
    ) -> None:
        """Begin a round, or go on with one from its journal (then ``adopt`` what is held).

        Args:
            round_id: Which round, for messages.
            size: Number of tasks, ``len(TaskTable)``.
            order_seed: Seed of the order in which tasks are given out; None takes them as they
                are numbered.
            limits: See there.
            first_attempt: Number of the first hold; a master that goes on with a job passes
                ``generation * ATTEMPTS_PER_MASTER`` with a generation no earlier one had.
            done: The tasks that are done already; it is copied.
            parked: The tasks that are parked.
            sizes: Batches of each task, shape (size,); None: they are not counted.
            keeps_streams: Whether tasks have streams that must be closed (training).

        Raises:
            InvalidRequest: ``done`` or ``parked`` do not fit the number of tasks.
        """
        self.round_id = round_id
        self._size = size
        self._limits = limits
        # Of holds from now on; it may only grow: no hold ends before the time that it was given.
        self.hold_ttl_s = limits.hold_ttl_s
        self._next_attempt = first_attempt
        self._done = TaskBits(size) if done is None else done.copy()
        self._parked: dict[int, ParkedTask] = {}
        self._cut = False
        self._keeps_streams = keeps_streams
        self._book = HoldBook()
        self._streams = StreamsToClose()
        self._took_s = Median()
        self._trouble = Trouble(limits)
        # A complete that is told again, its answer having been lost, is that of the worker's last.
        self._last_done: dict[str, tuple[int, int]] = {}
        # Every task to do is in it.
        self._todo = TodoQueue(task_order(order_seed, size))
        self._dirty_chunks: set[int] = set()
        self._dirty_workers: set[str] = set()
        self._dirty_parked: set[int] = set()
        self._restore(parked, sizes)

    # What workers ask and report.

    def assign(self, worker: str, now_s: float) -> Grant | None:
        """Give a worker a task: one to do, else one whose worker is slow; None if there is none."""
        limits = self._limits
        if self._cut or self._book.count_of_worker(worker) >= limits.holds_per_worker_max:
            return None
        median = self._took_s.value
        usual_s = limits.straggler_min_s if median is None else limits.straggler_factor * median
        slow = self._book.slowest(now_s - max(usual_s, limits.straggler_min_s), worker)
        task = self._next_todo() if slow is None else None
        if slow is None and task is None:
            # Nothing is left to do: what takes longer than usual may as well be tried twice.
            slow = self._book.slowest(now_s - usual_s, worker)
        if slow is not None:
            task = slow.task
            self._end_lapsed(task)
        if task is None:
            return None
        first_batch = self._batches.of(task)
        hold = self._hold(HeldTask(task, self._next_attempt, first_batch), worker, now_s)
        hold.timed = first_batch == 0
        return Grant(task, hold.attempt, first_batch, slow is not None)

    def renew(self, worker: str, holds: Iterable[HeldTask], now_s: float) -> list[HeldTask]:
        """Extend a worker's holds, take note of settled batches, and return those revoked.

        A hold whose time ran out but whose task nobody was given since is confirmed.
        """
        revoked = []
        for held in holds:
            hold = self._book.find(worker, held.task, held.attempt)
            if hold is None or hold.withdrawn:
                revoked.append(held)
                continue
            self._batches.settle(held.task, held.settled)
            hold.expires_s = now_s + self.hold_ttl_s
            if hold.lapsed:
                self._book.revive(hold)
                self._states.hold(held.task)
                self._batches.take_up(held.task)
        return revoked

    def complete(
        self, worker: str, task: int, attempt: int, now_s: float, batches: int = 0
    ) -> bool:
        """Take note that a worker has done a task, and revoke its twin's hold.

        Args:
            worker: Who.
            task: Which task.
            attempt: Number of the hold.
            now_s: The time.
            batches: Number of batches of the whole task.

        Returns:
            Whether this attempt is the one that counts (also when it is told again), False if it
            was revoked before.

        Raises:
            InvalidRequest: There is no such task, or that attempt was never given.
        """
        hold = self._find(worker, task, attempt)
        if hold is None:
            return (
                self._last_done.get(worker) == (task, attempt)
                or self._streams.attempt_of(task) == attempt
            )
        if hold.timed:
            self._took_s.add(now_s - hold.granted_s)
        self._make_done(task, batches)
        self._last_done[worker] = (task, attempt)
        if self._keeps_streams:
            self._streams.add(task, worker, attempt)
        return True

    def fail(
        self, worker: str, task: int, attempt: int, failure: Failure, now_s: float, settled: int = 0
    ) -> Literal["retry", "parked", "revoked"]:
        """End a hold because the task failed; too often, and it is parked.

        Returns:
            What comes of it; "revoked" if that hold was over before, and nothing changed.

        Raises:
            InvalidRequest: There is no such task, or that attempt was never given.
        """
        hold = self._find(worker, task, attempt)
        if hold is None:
            return "revoked"
        self._batches.settle(task, settled)
        self._trouble.failed(task, failure)
        self._end(hold)
        self._came_back(task, to_front=False)
        return "parked" if self._states[task] == PARKED else "retry"

    def give_back(
        self, worker: str, task: int, attempt: int, settled: int, now_s: float, reason: str = ""
    ) -> bool:
        """End a hold for no fault of the task; return False if it was over before.

        Raises:
            InvalidRequest: There is no such task, or that attempt was never given.
        """
        hold = self._find(worker, task, attempt)
        if hold is None:
            return False
        self._batches.settle(task, settled)
        self._end_fruitless(hold, f"given back: {reason}" if reason else "given back")
        self._came_back(task, to_front=True)
        return True

    def drop_worker(self, worker: str, now_s: float) -> list[int]:
        """End all holds of a worker that is surely gone, and return their tasks.

        Its streams to close go to the next workers that ask.
        """
        tasks, may_have_begun = [], True
        for hold in self._book.of_worker(worker):
            # What it asked for ahead is not what it died of: it does one task after the other.
            self._end_fruitless(hold, "its worker was lost", was_begun=may_have_begun)
            may_have_begun = may_have_begun and self._batches.of(hold.task) > hold.first_batch
            self._came_back(hold.task, to_front=True)
            tasks.append(hold.task)
        if self._streams.orphan(worker):
            self._dirty_workers |= {worker, NOBODY}
        self._last_done.pop(worker, None)
        return tasks

    def expire(self, now_s: float) -> list[int]:
        """Make tasks whose holds ran out available to others, and return them."""
        tasks = []
        while (hold := self._book.lapse_next(now_s)) is not None:
            self._came_back(hold.task, to_front=True)
            if self._states[hold.task] != HELD:
                tasks.append(hold.task)
        return tasks

    def next_expiry(self) -> float | None:
        """Return a time before which no hold runs out, None if nothing is held."""
        return self._book.next_end()

    def streams_to_close(self, worker: str, most: int = 64) -> list[int]:
        """Give a worker streams to close whose worker is lost; they are its own from now on."""
        tasks, changed = self._streams.hand_out(worker, most)
        if changed:
            self._dirty_workers |= {worker, NOBODY}
        return tasks

    def closed(self, tasks: Iterable[int]) -> None:
        """Take note that streams are closed; unknown ones are ignored."""
        self._dirty_workers |= self._streams.close(tasks)

    def retry_parked(self, tasks: Iterable[int] | None = None) -> list[int]:
        """Put parked tasks (all, if None) back with fresh limits; return those put back."""
        if self._cut:
            return []
        wanted = self._parked.keys() if tasks is None else self._parked.keys() & set(tasks)
        back = sorted(wanted)
        for task in back:
            self._batches.restore(task, self._parked.pop(task).settled)
            self._dirty_parked.add(task)
            self._trouble.forget(task)
            self._states.unpark(task)
            self._batches.put_aside(task)
            self._todo.put(task, to_front=False)
        return back

    def cut_short(self) -> None:
        """End the round: revoke all holds and give out nothing more. For good."""
        self._cut = True
        begun = self._book.tasks | self._batches.begun | self._trouble.tasks | self._parked.keys()
        for hold in list(self._book):
            self._end(hold)
            self._states.release(hold.task)
        for task in begun if self._keeps_streams else ():
            self._streams.add(task, NOBODY, 0)
            self._dirty_workers.add(NOBODY)

    # The journal.

    def adopt(self, worker: str, held: HeldTask, now_s: float) -> bool:
        """Take over a hold from the journal; its time begins anew. False if there is none now."""
        task, attempt, settled = held
        if not (0 <= task < self._size and attempt >= 0 and settled >= 0):
            raise InvalidRequest(f"{self.round_id}: a hold on task {task} of {self._size}")
        self._next_attempt = max(self._next_attempt, attempt + 1)
        if self._cut or self._states[task] in (DONE, PARKED):
            self._dirty_workers.add(worker)
            is_orphan = self._states[task] == DONE and task not in self._streams
            if self._keeps_streams and is_orphan and worker != NOBODY:
                # The journal got that it is done, but not who did it and is to close the stream.
                self._streams.add(task, NOBODY, attempt)
                self._dirty_workers.add(NOBODY)
            return False
        for earlier in self._book.of_task(task):
            if earlier.worker == worker:
                self._end(earlier)
        self._batches.settle(task, settled)
        if worker == NOBODY:
            self._batches.put_aside(task)
            return False
        self._hold(held, worker, now_s)
        return True

    def adopt_worker(self, worker: str, record: WorkerRecord, now_s: float) -> None:
        """Take over all that the journal keeps of a worker: its holds and its streams to close.

        Raises:
            InvalidRequest: The record has tasks that the round has not.
        """
        for task, attempt in record.to_close:
            self._next_attempt = max(self._next_attempt, attempt + 1)
            if not 0 <= task < self._size:
                raise InvalidRequest(f"{self.round_id}: stream of task {task} of {self._size}")
            if self._keeps_streams:
                self._streams.add(task, worker, attempt)
            if attempt and self._states[task] != DONE:
                # Of the two records that say so, the other one was not written any more.
                self._make_done(task, None)
        for held in record.held:
            self.adopt(worker, held, now_s)

    def take_changes(self) -> Changes:
        """Return what differs from the journal, and take it for written."""
        if self._batches.take_aside_changed():
            self._dirty_workers.add(NOBODY)
        changes = Changes(
            {number: self._done.chunk(number) for number in sorted(self._dirty_chunks)},
            {worker: self.record_of(worker) for worker in sorted(self._dirty_workers)},
            {task: self._parked.get(task) for task in sorted(self._dirty_parked)},
        )
        self._dirty_chunks.clear()
        self._dirty_workers.clear()
        self._dirty_parked.clear()
        return changes

    @property
    def batches(self) -> int:
        """Batches of tasks done, and settled ones of all others; each counts once."""
        return self._batches.total

    @property
    def counts(self) -> Counts:
        """How many tasks are in which state."""
        done, parked = len(self._done), len(self._parked)
        doing = self._states.held
        return Counts(self._size - doing - done - parked, doing, done, parked)

    @property
    def is_over(self) -> bool:
        """Whether every task is done or parked, or the round was cut short."""
        return self._cut or len(self._done) + len(self._parked) == self._size

    @property
    def is_cut_short(self) -> bool:
        """Whether ``cut_short`` was called."""
        return self._cut

    @property
    def done(self) -> TaskBits:
        """The tasks done; not to be changed by the caller (``copy`` it to keep it)."""
        return self._done

    @property
    def parked(self) -> Mapping[int, ParkedTask]:
        """The parked tasks by number."""
        return MappingProxyType(self._parked)

    @property
    def open_streams(self) -> int:
        """How many streams of done tasks are not confirmed closed."""
        return len(self._streams)

    @property
    def workers(self) -> frozenset[str]:
        """The workers that hold a task or have streams to close."""
        return frozenset((self._book.workers | self._streams.workers) - {NOBODY})

    @property
    def holds(self) -> Iterable[Hold]:
        """All holds, live and lapsed; one that the caller has ``withdrawn`` is not renewed."""
        return self._book

    def record_of(self, worker: str) -> WorkerRecord:
        """Return a worker's holds and streams to close, as the journal keeps them."""
        if worker == NOBODY:  # it "holds", by no attempt, tasks to do that have settled batches
            held = [HeldTask(task, 0, settled) for task, settled in self._batches.aside()]
        else:
            held = [
                HeldTask(hold.task, hold.attempt, self._batches.of(hold.task))
                for hold in self._book.of_worker(worker)
            ]
        return WorkerRecord(tuple(held), tuple(self._streams.of_worker(worker)))

    # How it is done.

    def _restore(self, parked: Iterable[ParkedTask], sizes: Sizes | None) -> None:
        """Bring the states in line with what is done and parked."""
        if self._done.size != self._size:
            raise InvalidRequest(
                f"{self.round_id}: {self._done.size} tasks in the journal, {self._size} in the data"
            )
        self._states = TaskStates(self._done)
        self._batches = BatchCount(self._done, sizes)
        for record in parked:
            if not 0 <= record.task < self._size:
                raise InvalidRequest(f"{self.round_id}: parked task {record.task} of {self._size}")
            if self._states[record.task] == DONE:
                self._dirty_parked.add(record.task)  # nothing says that it is parked any more
                continue
            self._states.park(record.task)
            self._parked[record.task] = record
            self._batches.total += record.settled

    def _find(self, worker: str, task: int, attempt: int) -> Hold | None:
        if not (0 <= task < self._size and 0 <= attempt < self._next_attempt):
            what = f"attempt {attempt} of task {task}"
            raise InvalidRequest(f"{self.round_id}: {what} of {self._size} was never given")
        return self._book.find(worker, task, attempt)

    def _hold(self, held: HeldTask, worker: str, now_s: float) -> Hold:
        """Make a worker hold a task that is to do, or held by others."""
        over_s = now_s + self.hold_ttl_s
        hold = Hold(worker, held.task, held.attempt, held.settled, now_s, over_s)
        self._next_attempt = max(self._next_attempt, held.attempt + 1)
        self._book.add(hold)
        self._dirty_workers.add(worker)
        self._states.hold(held.task)
        self._batches.take_up(held.task)
        return hold

    def _make_done(self, task: int, batches: int | None) -> None:
        """Take a task for done, whoever holds it; None: of as many batches as its records give."""
        for each in self._book.of_task(task):
            self._end(each)
        settled = self._batches.forget(task)
        if (parked := self._parked.pop(task, None)) is not None:
            settled = parked.settled
            self._dirty_parked.add(task)
        self._states.finish(task)
        self._done.add(task)
        self._batches.finish(task, batches, settled)
        self._dirty_chunks.add(chunk_of(task))
        self._trouble.forget(task)

    def _end(self, hold: Hold) -> None:
        self._book.end(hold)
        self._dirty_workers.add(hold.worker)

    def _end_fruitless(self, hold: Hold, why: str, *, was_begun: bool = True) -> None:
        """End a hold without a failure; it was in vain unless batches were settled meanwhile."""
        self._end(hold)
        if self._batches.of(hold.task) > hold.first_batch:
            self._trouble.fruitful(hold.task)
        elif was_begun:
            self._trouble.fruitless(hold.task, hold.worker, why)

    def _end_lapsed(self, task: int) -> None:
        for hold in self._book.of_task(task):
            if hold.lapsed:
                self._end_fruitless(hold, hold.withdrawn or "it was not renewed in time")

    def _came_back(self, task: int, to_front: bool) -> None:
        """Queue or park a task of which a hold has ended or lapsed, unless somebody holds it."""
        if self._book.is_held(task):
            return
        self._states.release(task)
        lapsed = len(self._book.of_task(task))
        if self._trouble.is_last_chance_over(task, lapsed):
            self._end_lapsed(task)
        if not self._park_if_spent(task):
            self._batches.put_aside(task)
            self._todo.put(task, to_front and self._trouble.comes_first(task))

    def _park_if_spent(self, task: int) -> bool:
        """Park a task to do that has gone wrong too often."""
        verdict = self._trouble.verdict(task)
        if verdict is None:
            return False
        for lapsed in self._book.of_task(task):
            self._end(lapsed)
        self._states.park(task)
        self._parked[task] = ParkedTask(task, *verdict, self._batches.forget(task))
        self._dirty_parked.add(task)
        self._trouble.forget(task)
        return True

    def _next_todo(self) -> int | None:
        """Take the next task to do out of the queue; what lapsed of its holds is over for good."""
        if not self.counts.todo:
            return None
        while (task := self._todo.take()) is not None:
            if self._states[task] == TODO:
                self._end_lapsed(task)
                return task
        return None
