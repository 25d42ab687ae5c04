"""A job's masters in virtual time: the real job, journal and records, their shell a model.

``master.job.Job`` decides, ``master.opening`` reads the records, ``master.journal`` groups what
is written; here calls come late or twice, transactions are lost or of unknown outcome, masters die
between any two of them, stand still, and wake up when another one has their leadership.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from backstay.checkpoint.remote import RestoreState
from backstay.consensus.checkpoint_records import RestorePlan
from backstay.consensus.job_records import (
    JournalRecord,
    MasterRecord,
)
from backstay.consensus.keys import JobKeys
from backstay.consensus.store import (
    CoordinationStore,
    Delete,
    Get,
    Put,
    RangeResult,
    Txn,
    TxnResult,
    mod_revision_is,
)
from backstay.consensus.store_follow import FencingToken
from backstay.errors import InvalidRequest, WorkerReplaced
from backstay.job_engine.opened_job import OpenedJob
from backstay.master.job import Job
from backstay.master.journal import Journal
from backstay.master.opening import open_job
from backstay.master.rows_change import StateIncarnation, change_of, why_inexact
from tests.sim.events import MS, Clock, Micros

if TYPE_CHECKING:
    from tests.sim.jobs import JobBook

__all__ = ["KEYS", "LEASE_TTL_MS", "UID", "SimMaster"]

KEYS = JobKeys("job")
UID = "ab12"
LEASE_TTL_MS = 200
RETRY = 20 * MS
# Small, so that what belongs together is often written apart.
CHANGES_MAX = 2
LOOK = 60 * MS
EXPIRE = 20 * MS
NOT_MASTER = "not the master"


def restore_state(plan: RestorePlan | None, generation: int) -> RestoreState:
    """Return what a node tells of the last restore, as ``CheckpointService`` does."""
    if plan is None:
        return RestoreState("", "", "", 0, "", generation=generation)
    return RestoreState(
        id=plan.checkpoint,
        url=plan.url,
        state=plan.state,
        slots_left=0,
        trouble="",
        version=plan.version,
        generation=generation,
        done_generation=plan.generation,
        slots=len(plan.slots),
    )


class SimJournal(Journal):
    """The real one's order and groups, written to the simulated store."""

    def __init__(self, master: SimMaster) -> None:
        super().__init__(
            cast(CoordinationStore, None), KEYS, master.instance, changes_max=CHANGES_MAX
        )
        self._master = master
        self._callers: deque[tuple[int, Callable[[], object]]] = deque()
        self._is_writing = False

    async def durable(self, timeout_s: float) -> None:
        """Opening a job needs nothing written in between: all its records are there."""

    def begin(self, token: FencingToken, revision: int, number: int) -> None:
        """Write under a token from now on."""
        self._token, self._revision = token, revision
        self._last = JournalRecord(self._instance, number)

    def when_durable(self, what: Callable[[], object]) -> None:
        """Do something when all that is staged by now is written."""
        if not self._pending and not self._in_flight:
            what()
            return
        self._callers.append((self._staged, what))
        self.write()

    def write(self) -> None:
        """Write the next group, unless one is under way."""
        if self._is_writing or not self._pending:
            return
        assert self._token is not None
        assert self._last is not None
        self._is_writing = True
        self._in_flight, operations = self._next_group()
        record = JournalRecord(self._instance, self._last.number + 1)
        operations.append(Put(KEYS.journal, record.to_json()))
        conditions = (self._token.still_mine(), mod_revision_is(KEYS.journal, self._revision))
        reads = (Get(KEYS.master), Get(KEYS.journal))
        txn = Txn(conditions, tuple(operations), reads)
        self._master.book.cluster.store.transact(self._master, txn, partial(self._done, record))

    def _done(self, record: JournalRecord, result: TxnResult | None, known: bool) -> None:
        self._is_writing = False
        queue = self._master.book.cluster.queue
        if known and result is not None and result.succeeded:
            self._revision, self._last = result.revision, record
            self._in_flight = {}
            oldest = next(iter(self._pending.values())).number if self._pending else None
            while self._callers and (oldest is None or self._callers[0][0] < oldest):
                self._callers.popleft()[1]()
            self.write()
            return
        self._stage_again()
        if known and result is not None:
            master, journal = result.results
            assert self._token is not None
            if master is None or master.create_revision != self._token.create_revision:
                self._master.die("masters_replaced")
                return
            assert journal is not None
            self._revision = journal.mod_revision
            self._last = JournalRecord.from_json(journal.value)
        queue.after(RETRY, partial(self._master.handle, self.write))


class _OneRead:
    """The store as ``open_job`` reads it: once."""

    def __init__(self, found: RangeResult) -> None:
        self._found = found

    async def range(self, _prefix: str) -> RangeResult:
        return self._found


def _at_once(coroutine: Coroutine[Any, Any, OpenedJob]) -> OpenedJob:
    """Run a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return cast(OpenedJob, end.value)
    raise AssertionError("it waits")


class SimMaster:
    """One process that is, or was, the job's master."""

    def __init__(self, book: JobBook, instance: int) -> None:
        self.book = book
        self.queue = book.cluster.queue
        self.instance = instance
        self.place = f"master-{instance}"
        self.is_alive = True
        self.is_paused = False
        self.job: Job | None = None
        self._inbox: list[Callable[[], None]] = []
        self._clock = Clock(self.queue, book.random.randrange(-20_000, 20_001))
        self._journal = SimJournal(self)
        self._going_back = False
        self._elect()

    def now_s(self) -> float:
        """Return the time on this process's clock."""
        return self._clock.now() / 1e6

    # The process

    def handle(self, what: Callable[[], None]) -> None:
        """Do something now, after the pause, or never."""
        if self.is_paused and self.is_alive:
            self._inbox.append(what)
        elif self.is_alive:
            what()
            self._journal.write()

    def die(self, why: str) -> None:
        """End without a word."""
        if self.is_alive:
            self.queue.counts[why] += 1
            self.queue.log(self.place, lambda: f"ends: {why}")
            self.is_alive = False

    def pause(self, duration: Micros) -> None:
        """SIGSTOP and SIGCONT."""
        self.is_paused = True
        self.queue.after(duration, self._resume)

    def _resume(self) -> None:
        self.is_paused = False
        inbox, self._inbox = self._inbox, []
        for what in inbox:
            self.handle(what)

    # Taking the leadership

    def _elect(self) -> None:
        record = MasterRecord(self.place, self.instance, "", 0)
        txn = Txn((), (Delete(KEYS.master),))
        put = Txn((), (Put(KEYS.master, record.to_json()),))

        def ask(state: Any) -> tuple[int, RangeResult]:
            state.transact(txn)
            revision = state.transact(put).revision
            return revision, state.range(KEYS.root)

        def done(answer: tuple[int, RangeResult] | None, known: bool) -> None:
            if not known or answer is None:
                self.die("masters_failed")
                return
            self._open(*answer)

        self.book.cluster.store.request(self, ask, done)

    def _open(self, revision: int, found: RangeResult) -> None:
        last = found.values().get(KEYS.journal)
        self._journal.begin(
            FencingToken(KEYS.master, revision),
            last.mod_revision if last is not None else 0,
            JournalRecord.from_json(last.value).number if last is not None else 0,
        )
        opening = open_job(
            cast(CoordinationStore, _OneRead(found)),
            KEYS,
            self._journal,
            self.book.spec,
            uid=UID,
            now_ms=1,
            fresh=False,
            clock=self.now_s,
            incarnation=lambda: StateIncarnation(0, 0),
            restored=lambda: None,
        )
        job = Job(_at_once(opening), KEYS, self._journal, self.now_s)
        job.stage_state()

        def serve() -> None:
            job.advance()
            self._journal.when_durable(partial(self._serve, job))

        # As the real one: restores are looked at before anything is given out.
        self._look_once(job, serve)

    def _serve(self, job: Job) -> None:
        self.queue.counts["masters_served"] += 1
        self.queue.log(self.place, lambda: f"serves, start {job.state.starts}")
        self.job = job
        self.queue.after(EXPIRE, partial(self.handle, self._expire))
        self.queue.after(LOOK, partial(self.handle, self._look))

    def _expire(self) -> None:
        assert self.job is not None
        self.job.expire()
        self.job.advance()
        self.queue.after(EXPIRE, partial(self.handle, self._expire))

    # Restores, as ``Saving.look`` does

    def _look(self) -> None:
        assert self.job is not None
        job = self.job
        again = partial(self.queue.after, LOOK, partial(self.handle, self._look))
        if job.is_over or self._going_back:
            again()
            return
        self._look_once(job, again)

    def _look_once(self, job: Job, then: Callable[[], object]) -> None:
        def ask(_state: Any) -> tuple[RestorePlan | None, int]:
            return self.book.rows()

        def done(answer: tuple[RestorePlan | None, int] | None, known: bool) -> None:
            if not known or answer is None:
                self.queue.after(RETRY, partial(self.handle, partial(self._look_once, job, then)))
                return
            self._judge(job, *answer, then)

        self.book.cluster.store.request(self, ask, done)

    def _judge(
        self, job: Job, plan: RestorePlan | None, generation: int, then: Callable[[], object]
    ) -> None:
        now = restore_state(plan, generation)
        noted = StateIncarnation(job.state.restore_version, job.state.generation)
        change = change_of(noted, now)
        if change == "none":
            then()
            return
        why = why_inexact(change, now)
        if change == "lost":
            job.note_inexact(why)
            job.end("failed", why)
            self.book.rescue()
            then()
            return
        assert plan is not None
        try:
            progress = self.book.progress_of(plan, job)
        except InvalidRequest as error:
            job.end("failed", str(error))
            self.book.rescue()
            then()
            return
        self.queue.log(self.place, lambda: f"goes back to {plan.checkpoint}: {progress}")
        self.queue.counts["went_back"] += 1
        self.book.went_back += 1
        self._going_back = True
        job.go_back(progress)
        if why:
            job.note_inexact(why)

        def noting() -> None:
            job.note_incarnation(StateIncarnation(now.version, generation))
            job.advance()
            self._going_back = False
            self._journal.when_durable(then)

        self._journal.when_durable(noting)

    # Calls, as ``JobService`` answers them

    def on_call(self, call: Callable[[Job], Any], answer: Callable[[Any], None]) -> None:
        """Take a call; it is answered when all that it has staged is written."""
        job = self.job
        if job is None:
            answer(NOT_MASTER)
            return
        try:
            result = call(job)
        except WorkerReplaced as error:
            answer(error)
            return
        job.advance()
        self._journal.when_durable(lambda: answer(result))
