"""Job masters in virtual time: the real job, journal and records, their shell a model.

``job_engine`` opens the job and decides, ``master.journal`` groups what is written; here calls come
late or twice, transactions are lost or of unknown outcome, masters die between any two of them,
stand still, and wake up when another one has their leadership.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from backstay.checkpoint.restore_state import RestoreState
from backstay.consensus.records.checkpoints import RestorePlan
from backstay.consensus.records.jobs import (
    JournalRecord,
    MasterRecord,
)
from backstay.consensus.records.keys import JobKeys
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
from backstay.consensus.store.follow import FencingToken
from backstay.errors import InvalidRequest, JobRefused, WorkerReplaced
from backstay.job_engine.opening import RecordedJob, opened_job
from backstay.job_engine.rows_change import incarnation_in
from backstay.master.job import Job
from backstay.master.journal import Journal
from tests.sim.events import MS, Clock, Micros

if TYPE_CHECKING:
    from tests.sim.jobs import JobBook

__all__ = ["KEYS", "LEASE_TTL_MS", "UID", "SimMaster"]

KEYS = JobKeys("job")
UID = "ab12"
LEASE_TTL_MS = 200
# So small that leases last longer when a few workers have followed dead ones.
RENEWALS_PER_S_MAX = 100
RETRY = 20 * MS
# Small, so that what belongs together is often written apart.
CHANGES_MAX = 2
LOOK = 60 * MS
EXPIRE = 20 * MS
NOT_MASTER = "not the job master"


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

    def begin(self, token: FencingToken, revision: int, number: int) -> None:
        """Write under a token from now on."""
        self._token, self._revision = token, revision
        self._last = JournalRecord(self._instance, number)

    def when_durable(self, what: Callable[[], object]) -> None:
        """Do something when all that is staged by now is written."""
        if self.outbox.is_empty:
            what()
            return
        self._callers.append((self.outbox.staged, what))
        self.write()

    def write(self) -> None:
        """Write the next group, unless one is under way."""
        if self._is_writing or not self.outbox.waits:
            return
        assert self._token is not None
        assert self._last is not None
        self._is_writing = True
        operations = self._next_group()
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
            self.outbox.written()
            while self._callers and self._callers[0][0] < self.outbox.oldest:
                self._callers.popleft()[1]()
            self.write()
            return
        self.outbox.not_written()
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


class SimMaster:
    """One process that is, or was, the job master."""

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
        recorded = RecordedJob({key: item.value for key, item in found.values().items()}, KEYS)
        spec, state = self.book.spec, recorded.state()
        assert state is not None
        opened = opened_job(
            spec,
            KEYS,
            self._journal.outbox,
            recorded,
            identity=recorded.identity(spec, uid=UID, now_ms=1),
            state=state,
            tables={"training": self.book.table()},
            now_s=self.now_s(),
        )
        job = Job(
            opened,
            KEYS,
            self._journal,
            self.now_s,
            renewals_per_s_max=RENEWALS_PER_S_MAX,
        )
        job.stage_state()

        def serve() -> None:
            job.advance()
            self._lengthen_leases(job)
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
        self._lengthen_leases(self.job)
        self.queue.after(EXPIRE, partial(self.handle, self._expire))

    def _lengthen_leases(self, job: Job) -> None:
        ttl_ms = job.plan_lease_ttl()
        if ttl_ms is not None:
            self._journal.when_durable(partial(self._lengthen, job, ttl_ms))

    def _lengthen(self, job: Job, ttl_ms: int) -> None:
        if ttl_ms > job.task_lease_ttl_ms:
            self.queue.counts["leases_lengthened"] += 1
            job.lengthen_leases(ttl_ms)

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
        change = job.rows_are(now, self.now_s())
        if change == "none":
            then()
            return
        if change == "lost":
            self.book.rescue()
            then()
            return
        assert plan is not None
        try:
            progress = job.progress_in(self.book.kept(plan))
        except InvalidRequest as error:
            job.cannot_follow(str(error))
            self.book.rescue()
            then()
            return
        self.queue.log(self.place, lambda: f"goes back to {plan.checkpoint}: {progress}")
        self.queue.counts["went_back"] += 1
        self.book.went_back += 1
        self._going_back = True
        job.follow(now, progress, self.now_s())

        def noting() -> None:
            job.note_incarnation(incarnation_in(now))
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
        except (JobRefused, WorkerReplaced) as error:
            answer(error)
            return
        job.advance()
        self._journal.when_durable(lambda: answer(result))
