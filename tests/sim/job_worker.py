"""Workers of a simulated job: they ask, lease, push, flush, complete, close, die and come late.

What ``trainer.worker``, ``MasterLink`` and ``TaskStream`` do, in the order in which they do it. One
task at a time; a push leaves only while the lease is alive on the worker's own clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from backstay.errors import JobRefused, WorkerReplaced
from backstay.job_engine.leases import RENEWALS_PER_TTL
from backstay.job_engine.open_round import Assignment
from backstay.job_engine.opening import StateIncarnation
from backstay.job_engine.values import LeasedTask
from backstay.master.job import Job
from backstay.schedule.rounds import RoundId, RoundKind
from tests.sim.events import MS, Clock, Micros
from tests.sim.job_master import LEASE_TTL_MS, NOT_MASTER, SimMaster
from tests.sim.jobs import BATCHES, TABLES, JobBook
from tests.sim.trainer import BACKOFF, Push, Trainer

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster
    from tests.sim.pserver import Pserver

__all__ = ["JobWorker"]

CALL_TIMEOUT = 250 * MS
CLOSE_TIMEOUT = 400 * MS
# Of a lease, a tenth: the worker stops before it.
MARGIN_PART = 10


@dataclass
class Answer:
    """What ``GetTask`` answers."""

    given: Assignment | None
    to_close: list[tuple[int, int]]
    other_incarnation: bool = False


class JobWorker(Trainer):
    """One worker, which dies and is followed by another in its place."""

    def __init__(self, cluster: Cluster, number: int, book: JobBook) -> None:
        super().__init__(cluster, number)
        self.book = book
        self._clock = Clock(self.queue, book.random.randrange(-20_000, 20_001))
        self._lives = 0
        self._begin()

    # A process

    def _begin(self) -> None:
        """A new process, sometimes under the name of the one before."""
        self._lives += 1
        self.instance = 1 + self.number * 1000 + self._lives
        if self._lives == 1 or self.book.random.random() < 0.7:
            self.name = f"w-{self.number}-{self._lives}"
        self._master: SimMaster | None = None
        self._requests = 0
        self._asking = False
        self._ending = False
        self._paused_until = 0
        self._closed: list[tuple[int, int]] = []
        self._to_close: list[tuple[int, int]] = []
        self._given: Assignment | None = None
        self._lease_until: Micros = 0
        # How long leases last, as the job masters told; 0 until the worker has joined.
        self._ttl: Micros = 0
        self._batch = 0
        self._connected_at = 0
        self._rows = StateIncarnation(0, 0)
        self.pushes.clear()
        self._call(self._join, self._joined)

    def _joined(self, ttl_ms: int) -> None:
        self._ttl = ttl_ms * MS
        self._keep(self._lives)

    def _die(self) -> None:
        self.queue.counts["workers_killed"] += 1
        self.queue.log(self.place, lambda: f"{self.name} dies")
        self._begin()

    # Calls to the job master

    def _call(self, call: Callable[[Job, str], Any], done: Callable[[Any], None]) -> None:
        """Make a call, with this process's name, until a job master answers it."""
        life, name, instance = self._lives, self.name, self.instance
        is_open = True
        master = self._master or self.book.newest
        network = self.cluster.network

        def again(_reason: str) -> None:
            nonlocal is_open
            if is_open and self._lives == life:
                is_open = False
                self._master = None
                self.queue.after(BACKOFF, partial(self._call_if, life, call, done))

        def answered(result: Any) -> None:
            nonlocal is_open
            if not is_open or self._lives != life:
                return
            if result == NOT_MASTER or isinstance(result, JobRefused):
                # A job that is over takes no worker, until a restore takes the job back.
                again("refused")
                return
            is_open = False
            if isinstance(result, WorkerReplaced):
                self.queue.counts["workers_replaced"] += 1
                self._begin()
                return
            self._master = master
            done(result)

        def serve(job: Job) -> Any:
            if call is self._join:
                job.join(name, instance, "", 0)
            else:
                job.hear(name, instance, "", 0)
            return call(job, name)

        def answer(result: Any) -> None:
            if self.book.random.random() < 0.03:
                self.queue.counts["answers_lost"] += 1
                return
            network.send(master.place, self.place, partial(answered, result))

        def carry(reply: Callable[[Any], None]) -> None:
            network.send(
                self.place,
                master.place,
                partial(master.handle, partial(master.on_call, serve, reply)),
            )

        carry(answer)
        if self.book.random.random() < 0.05:
            self.queue.counts["calls_twice"] += 1
            late = self.queue.between(1 * MS, 500 * MS)
            self.queue.after(late, partial(carry, lambda _result: None))
        self.queue.after(CALL_TIMEOUT, partial(again, "no answer"))

    def _call_if(
        self, life: int, call: Callable[[Job, str], Any], done: Callable[[Any], None]
    ) -> None:
        if self._lives == life:
            self._call(call, done)

    @staticmethod
    def _join(job: Job, _name: str) -> int:
        return job.task_lease_ttl_ms

    # The loop

    def _go_on(self) -> None:
        self.queue.after(self.queue.between(100, self._pause), self._go_on)
        random = self.book.random
        if not self._version or self._ending or self.queue.now < self._paused_until:
            return
        if not self.stopping and random.random() < 0.01:
            self._die()
            return
        if not self.stopping and random.random() < 0.01:
            self.queue.counts["workers_paused"] += 1
            self._paused_until = self.queue.now + random.randrange(20 * MS, 3 * LEASE_TTL_MS * MS)
            return
        if not self._ttl:
            # It asks for a task once it has joined.
            return
        if not self._connected_at:
            self._connect()
        elif self._given is None:
            self._ask()
        elif self._given.round.id.kind is not RoundKind.TRAINING:
            self._complete(self._given)
        elif self._batch < self._batches(self._given):
            if len(self.pushes) < self._window:
                self._push_batch(self._given)
        elif not self.pushes:
            self._complete(self._given)

    def _connect(self) -> None:
        """Connect anew: what is pushed from now on relies on the rows of this routing."""
        self._connected_at = self._version
        plan, generation = self.book.rows()
        self._rows = StateIncarnation(plan.version if plan is not None else 0, generation)

    def _generation(self, version: int) -> int:
        return self.cluster.routings[version - 1].generation

    def _learn(self, version: int) -> None:
        connected_at = getattr(self, "_connected_at", 0)
        if connected_at and self._generation(version) > self._generation(connected_at):
            self._version = max(version, self._version)
            self._state_lost()
            return
        super()._learn(version)

    def _state_lost(self) -> None:
        self.queue.counts["state_lost"] += 1
        given, acknowledged = self._given, self._acknowledged()
        self.pushes.clear()
        self._connected_at = 0
        self._to_close.clear()
        if given is not None and not self._ending:
            self._give_back(given, acknowledged)

    def _give_back(self, given: Assignment, acknowledged: int) -> None:
        self.queue.counts["given_back"] += 1
        self._given = None
        lease = given.lease._replace(acknowledged=acknowledged)

        def give_back(job: Job, name: str) -> str:
            if job.is_of_later_master(lease):
                return NOT_MASTER
            job.give_back(name, given.round.id, lease, "the test wants it")
            return ""

        self._call(give_back, lambda _answer: None)

    def _ask(self) -> None:
        for stream in self._to_close[:]:
            self._to_close.remove(stream)
            self._close(stream, self._connected_at, self._lives)
        if self._asking:
            return
        self._asking = True
        self._requests += 1
        sent, request, rows = self._clock.now(), self._requests, self._rows
        closed = list(self._closed)

        def get_task(job: Job, name: str) -> Answer:
            job.closed(closed)
            given = job.give(name, request, rows)
            if not job.goes_with(rows):
                return Answer(given, [], other_incarnation=True)
            return Answer(given, job.streams_to_close(name))

        def told(answer: Answer) -> None:
            self._asking = False
            del self._closed[: len(closed)]
            if answer.other_incarnation and self._given is None:
                self._connected_at = 0
            if rows == self._rows and self._connected_at:
                self._to_close += answer.to_close
                if answer.given is not None:
                    self._take(answer.given, sent)
            elif answer.given is not None:
                # Asked for on a connection that is gone.
                self._give_back(answer.given, answer.given.lease.acknowledged)

        self._call(get_task, told)

    def _take(self, given: Assignment, sent: Micros) -> None:
        self._given, self._batch = given, given.lease.acknowledged
        self._lease_until = sent + self._ttl - self._ttl // MARGIN_PART
        self.queue.counts["tasks_taken"] += 1
        self.queue.log(
            self.place,
            lambda: f"{self.name} takes {given.round.id}-{given.lease.task} {given.lease}",
        )

    # Leases

    def _keep(self, life: int) -> None:
        if self._lives != life:
            return
        self.queue.after(self._ttl // RENEWALS_PER_TTL, partial(self._keep, life))
        given = self._given
        if given is None or self.queue.now < self._paused_until:
            return
        leased = given.lease._replace(acknowledged=self._acknowledged())
        sent = self._clock.now()

        def keep(job: Job, name: str) -> tuple[list[tuple[RoundId, LeasedTask]], int] | str:
            if job.is_of_later_master(leased):
                return NOT_MASTER
            return job.renew(name, [(given.round.id, leased)]), job.task_lease_ttl_ms

        def told(answer: tuple[list[tuple[RoundId, LeasedTask]], int]) -> None:
            revoked, ttl_ms = answer
            self._ttl = ttl_ms * MS
            if self._given is not given or self._ending:
                return
            if revoked:
                self.queue.counts["revoked"] += 1
                self._given = None
                self.pushes.clear()
            else:
                self._lease_until = max(
                    self._lease_until, sent + self._ttl - self._ttl // MARGIN_PART
                )

        self._call(keep, told)

    # Pushes

    @property
    def floor(self) -> int:
        """Never above what is not acknowledged, nor above the batch that has begun."""
        return min((self._batch - 1) * TABLES, min(self.pushes, default=1 << 60))

    def _acknowledged(self) -> int:
        if self._given is None or self._given.round.id.kind is not RoundKind.TRAINING:
            return 0
        return min(self._batch, min(self.pushes, default=1 << 60) // TABLES)

    def _push_batch(self, given: Assignment) -> None:
        if self.book.random.random() < 0.01:
            # A push that fails for good ends the attempt.
            acknowledged = self._acknowledged()
            self.pushes.clear()
            self._give_back(given, acknowledged)
            return
        number, task, batch = given.round.id.number, given.lease.task, self._batch
        self._batch += 1
        stream = (self.book.stream_job, number, task)
        for table, keys in enumerate(self.book.keys_of(number, task, batch)):
            slots = {self.cluster.slot_of[key] for key in keys}
            self.begin(Push(stream, batch * TABLES + table, list(keys), slots))

    def _send(self, push: Push) -> None:
        if self.pushes.get(push.sequence) is not push:
            return
        if self._clock.now() >= self._lease_until or self.queue.now < self._paused_until:
            self._try_later(push, BACKOFF)
            return
        super()._send(push)

    def _batches(self, given: Assignment) -> int:
        return BATCHES if given.round.id.kind is RoundKind.TRAINING else 1

    # The end of a task

    def _complete(self, given: Assignment) -> None:
        self._ending = True

        def complete(job: Job, name: str) -> bool | str:
            if job.is_of_later_master(given.lease):
                return NOT_MASTER
            batches = self._batches(given)
            counts, _ = job.complete(
                name, given.round.id, given.lease, batches=batches, examples=batches
            )
            return counts

        def told(first: bool) -> None:
            self._ending = False
            self._given = None
            if first and given.round.id.kind is RoundKind.TRAINING:
                number, task = given.round.id.number, given.lease.task
                self.book.told_first(number, task, self.name)
                if self._connected_at:
                    self._close((number, task), self._connected_at, self._lives)

        self._call(complete, told)

    # Closing, as the client does: every master of one routing, and again if that has changed

    def _close(self, stream: tuple[int, int], connected_at: int, life: int) -> None:
        if self._lives != life or self._connected_at != connected_at or not connected_at:
            return
        version = self._version
        replicas = self.cluster.routings[version - 1].replicas_of_slot
        if any(held.master < 0 for held in replicas):
            self.queue.after(BACKOFF * 4, partial(self._close, stream, connected_at, life))
            return
        name = (self.book.stream_job, *stream)
        if self.book.is_cut(*stream):
            self.cluster.history.cut(name)
        # In an order that every run of the seed has.
        missing = dict.fromkeys(self._masters(range(self.cluster.options.slots)))
        is_over = False

        def again() -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                self._close(stream, connected_at, life)

        def answered(process: Pserver, code: int) -> None:
            nonlocal is_over
            if code == 0:
                missing.pop(process, None)
            if is_over or missing or self._lives != life or self._connected_at != connected_at:
                return
            is_over = True
            if self._version == version:
                self.queue.counts["streams_closed"] += 1
                self._closed.append(stream)
            else:
                self._close(stream, connected_at, life)

        for process in list(missing):

            def answer(code: int, process: Pserver = process) -> None:
                self.cluster.network.send(
                    process.place, self.place, partial(answered, process, code)
                )

            self._carry(process, partial(process.on_close, name, version, answer))
        self.queue.after(CLOSE_TIMEOUT, again)
