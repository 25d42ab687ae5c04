"""The job master's side of a job's launcher: its request handler, and the launcher if it runs here.

A launcher reports, and is told which worker processes should run. The engine decides; the handler
waits for its times. ``JobService`` calls it for a launcher in another process. A launcher in the
job master's process waits for other programs, so it has a thread (``LaunchLoop``); its calls
go to the handler in the event loop. Imports the launchers' interface and the job.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from types import TracebackType

from backstay.config import ENDPOINT_VARIABLE
from backstay.errors import StoreUnavailable
from backstay.job_engine.launch import ExitReason, LauncherReport, WorkerExit, WorkerWish
from backstay.job_spec import JobSpec
from backstay.master.job import Job
from backstay.master.launcher import Launcher, LaunchLoop, WorkerProgram, launcher_class

__all__ = ["ExitsSeen", "HostedLauncher", "LaunchHandler"]

# How long workers may take to leave when the job is over.
LEAVE_LIMIT_S = 5.0
EXITS_KEPT = 20
# An exit is told again until it is acknowledged, and that takes no longer than so many others.
IDS_KEPT = 20_000
WAIT_MS_MAX = 30_000
MIB = 1024 * 1024
# How long a call waits for the journal; launchers repeat it.
DURABLE_S = 4.0

# As what launchers see the end of a worker that was told to end.
_TOLD_TO_END = (ExitReason.PREEMPTED, ExitReason.FINISHED)

log = logging.getLogger(__name__)


class LaunchHandler:
    """Answers the launcher of one job."""

    def __init__(self, job: Job, on_exit: Callable[[WorkerExit], None] = lambda _: None) -> None:
        """Prepare.

        Args:
            job: The job.
            on_exit: Told each exit that is news, perhaps more than once.
        """
        self._job = job
        self._on_exit = on_exit
        # Whether no process reaches the store now, so that none but this one can lead.
        self.is_store_away_for_all = False
        # The workers of the last wish that was recorded.
        self._recorded: tuple[str, ...] = ()

    async def exchange(
        self,
        report: LauncherReport,
        *,
        known_version: int = 0,
        wait_ms: int = 0,
        trouble: str = "",
    ) -> WorkerWish:
        """Take in what runs and what has ended; return what should run, once it is recorded.

        The id of a worker that was told must never be told again for another process.

        Args:
            report: What the launcher tells.
            known_version: Of the wish that it knows; 0: none.
            wait_ms: How long to wait for another wish, at most.
            trouble: Why not all wanted workers run, for people; empty: nothing holds them up.

        Raises:
            StoreUnavailable: The journal cannot be written now.
        """
        job = self._job
        job.note_trouble("launcher", trouble)
        report = report._replace(exits=tuple(map(self._explained, report.exits)))
        for end in filter(self._is_news, report.exits):
            self._on_exit(end)
        job.report(report)
        wish = await self._news(known_version, wait_ms)
        try:
            await job.journal.durable(DURABLE_S)
        except StoreUnavailable:
            # Before the first wish was recorded it is not known which workers are wanted.
            if not (self.is_store_away_for_all and self._recorded):
                raise
            # To end a worker needs no record, because no id is given for it. Its room may be what
            # the servers wait for, through which the store is reached.
            return WorkerWish(0, tuple(one for one in self._recorded if one in wish.workers))
        self._recorded = wish.workers
        told = tuple(one.worker_id for one in report.exits)
        return wish._replace(acknowledged=told, ended=job.ended)

    def _is_news(self, end: WorkerExit) -> bool:
        """Whether an end is not just that of a worker that was wanted no more."""
        workers, worker = self._job.workers, end.worker_id
        is_good = end.reason in (ExitReason.PREEMPTED, ExitReason.FINISHED)
        return not is_good or workers.has_place(worker) or workers.has_hung(worker)

    def _explained(self, end: WorkerExit) -> WorkerExit:
        """Return the end of a worker with what only the job master knows of it.

        That it hung, which explains why it was told to end; the memory that it used, if it had too
        little.
        """
        if end.reason in _TOLD_TO_END and self._job.workers.has_hung(end.worker_id):
            return end._replace(reason=ExitReason.HUNG)
        known = self._job.known.get(end.worker_id)
        if end.reason is not ExitReason.OUT_OF_MEMORY or known is None or not known.resident_bytes:
            return end
        before_s = self._job.now() - known.heard_s
        used = (
            f"it used {known.resident_bytes / MIB:,.0f} MiB {before_s:.1f} s before that was seen"
        )
        return end._replace(last_words=f"{end.last_words}\n{used}".strip())

    async def _news(self, known_version: int, wait_ms: int) -> WorkerWish:
        """Wait for another wish than the one that is known, or for the end of the job."""
        job = self._job
        deadline_s = job.now() + min(wait_ms, WAIT_MS_MAX) / 1000
        while True:
            changed = job.changed
            wish, now_s = job.wish(), job.now()
            if wish.version != known_version or job.is_over or now_s >= deadline_s:
                return wish
            next_s = job.workers.next_change_s()
            until_s = deadline_s if next_s is None else min(deadline_s, next_s)
            try:
                await asyncio.wait_for(changed.wait(), max(until_s - now_s, 0.001))
            except asyncio.TimeoutError:
                continue


class ExitsSeen:
    """Counts the exits of workers by reason, and keeps the newest, for people."""

    def __init__(self, on_new: Callable[[WorkerExit], None] = lambda _: None) -> None:
        """Begin with none; ``on_new`` is told each exit once."""
        self.counts: Counter[str] = Counter()
        self.newest: deque[WorkerExit] = deque(maxlen=EXITS_KEPT)
        self._ids: dict[str, None] = {}
        self._on_new = on_new

    def __call__(self, end: WorkerExit) -> None:
        """Take in an exit, which may be told more than once."""
        if end.worker_id in self._ids:
            return
        self._ids[end.worker_id] = None
        if len(self._ids) > IDS_KEPT:
            del self._ids[next(iter(self._ids))]
        self.counts[end.reason.name] += 1
        self.newest.append(end)
        self._on_new(end)


class HostedLauncher:
    """Runs the launcher inside ``async with``; does nothing if it runs in the command."""

    def __init__(
        self,
        spec: JobSpec,
        endpoints: Sequence[str],
        handler: LaunchHandler,
        owner: str = "",
    ) -> None:
        """Prepare; call it while the event loop runs.

        Args:
            spec: The job.
            endpoints: Control addresses of pservers, for the workers.
            handler: Of the job.
            owner: Of the job on Kubernetes; empty: it runs elsewhere.

        Raises:
            ConfigError: A setting of the job does not fit the launcher.
        """
        self._handler = handler
        self._loop = asyncio.get_running_loop()
        kind = launcher_class(spec.launcher)
        env = {ENDPOINT_VARIABLE: ",".join(endpoints), **spec.workers.env}
        self._follower = (
            self._follower_of(kind.for_job(WorkerProgram(spec, env, owner)))
            if kind.IN_JOB_MASTER
            else None
        )

    async def __aenter__(self) -> HostedLauncher:
        if self._follower is not None:
            self._follower.__enter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._follower is not None:
            # The thread may be waiting for this loop.
            await asyncio.to_thread(self._follower.__exit__, kind, error, traceback)

    async def let_leave(self) -> None:
        """Wait until all workers of a job that is over have left; tell the rest to end."""
        if self._follower is not None:
            await asyncio.to_thread(self._follower.let_leave, LEAVE_LIMIT_S)

    def _follower_of(self, launcher: Launcher) -> LaunchLoop:
        def exchange(report: LauncherReport, *, known_version: int, wait_ms: int) -> WorkerWish:
            """Call the handler from the launcher's thread."""
            answer = self._handler.exchange(
                report, known_version=known_version, wait_ms=wait_ms, trouble=launcher.trouble()
            )
            return asyncio.run_coroutine_threadsafe(answer, self._loop).result()

        return LaunchLoop(launcher, exchange)
