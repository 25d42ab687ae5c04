"""The job master as a process: takes the leadership, opens the job, serves it to its end.

The process listens (it answers calls with "not the job master yet"), waits for the leadership,
opens the job from its records, and serves it. If the key is lost and no other process took it, the
process creates the key anew and goes on. If another process has it, this one ends with
``NotJobMaster``. At the end the process tells the workers, then gives the leadership back. This
module is the shell: the modules that it assembles make the decisions.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, TypeVar

from backstay._proto.v1 import job_pb2, job_pb2_grpc
from backstay.addresses import split_address
from backstay.backoff import Backoff
from backstay.cluster.checkpoints import Checkpoints
from backstay.cluster.directory import Directory
from backstay.consensus.records.jobs import MasterRecord, RunState
from backstay.consensus.records.keys import JobKeys
from backstay.consensus.store import CoordinationStore, Delete, Txn
from backstay.consensus.store.follow import FencingToken
from backstay.consensus.store.remote import RemoteStore
from backstay.control_server import ControlServer
from backstay.data.opening import open_source
from backstay.errors import (
    ConfigError,
    DataError,
    InvalidRequest,
    JobRefused,
    LeaseLost,
    NotJobMaster,
    ServerUnavailable,
    StoreAuthError,
    StoreUnavailable,
)
from backstay.job_spec import JobSpec
from backstay.master.config import MasterConfig
from backstay.master.exporting import JobExport
from backstay.master.hosted_launcher import ExitsSeen, HostedLauncher, LaunchHandler
from backstay.master.job import Job, open_job
from backstay.master.journal import Journal
from backstay.master.lag_report import LagReport
from backstay.master.leadership import Leadership
from backstay.master.prometheus import serve_metrics
from backstay.master.saving import Saving, incarnation_of, restored_job
from backstay.master.service import JobService
from backstay.master.source_poll import SourcePoll
from backstay.master.status import job_status
from backstay.master.upkeep import RowUpkeep
from backstay.tasks import end_tasks, until_answered

__all__ = ["FINAL_ERRORS", "EndRecord", "MasterHost", "lengthen_leases"]

SERVICE_NAME = "backstay.v1.JobService"
NOT_OPEN = NotJobMaster("this process is not the job master, or not yet; ask again")
STORE_DEADLINE_MS = 2000
CONTROL_GRACE_S = 1.0
FAREWELL_S = 2.0
# Between two tries; doubled each time, up to the last.
RETRY = Backoff(first_s=0.1, longest_s=1.0)
# Between two looks at leases that may have run out, at most, and at how long they last.
LOOK_S = 0.25
LAST_WRITE_S = 10.0
LEASE_TTL_WRITE_S = 4.0

# Another process would fare alike.
FINAL_ERRORS = (ConfigError, StoreAuthError, JobRefused, DataError, InvalidRequest)

ResultT = TypeVar("ResultT")

log = logging.getLogger(__name__)


class EndRecord(Protocol):
    """Where it is recorded, beside the coordination store, that the job is over."""

    async def read(self) -> RunState | None:
        """Return how the job has ended; None: it goes on. Asked when this process leads."""

    async def write(
        self, end: RunState, reason: str, status: job_pb2.JobStatus | None, exits: ExitsSeen
    ) -> None:
        """Record that it is over, and how it went. Called while this process leads."""


@dataclass(frozen=True)
class _Served:
    """The open job, and what answers calls for it."""

    job: Job
    service: JobService
    launches: LaunchHandler


class MasterHost:
    """One process's time as the job master."""

    def __init__(
        self,
        config: MasterConfig,
        spec: JobSpec,
        *,
        instance: int | None = None,
        end_record: EndRecord | None = None,
        exits: ExitsSeen | None = None,
    ) -> None:
        """Bind the address; call it while the event loop runs.

        Args:
            config: Settings of this process.
            spec: The job.
            instance: Of this process; default: drawn at random.
            end_record: Read before the job is opened, and written before the leadership is given
                back; default: the records of the job are enough.
            exits: Where the exits of workers are counted; default: its own.

        Raises:
            ListenError: The address cannot be listened on.
            ConfigError: A certificate file cannot be read or used.
        """
        self._config = config
        self._spec = spec
        self._control = ControlServer(config)
        port = split_address("control address", self._control.address)[1]
        self._own = MasterRecord(
            address=f"{config.host}:{port}",
            instance=instance or secrets.randbelow(2**63 - 1) + 1,
            host=socket.gethostname(),
            pid=os.getpid(),
        )
        self._keys = JobKeys(spec.name)
        self._store: CoordinationStore = RemoteStore(
            config.endpoints, config.client, deadline_ms=STORE_DEADLINE_MS
        )
        self._directory = Directory(config.endpoints, config.client)
        self._journal = Journal(self._store, self._keys, self._own.instance)
        self._leadership = Leadership(
            self._store, self._keys, self._own, lease_ttl_ms=config.lease_ttl_ms
        )
        # What is served here, once the job is open.
        self._served: _Served | None = None
        self._forget = False
        self._end_record = end_record
        self.exits = exits or ExitsSeen()
        self._stop = asyncio.Event()
        self._clock = asyncio.get_running_loop().time

    def stop(self) -> None:
        """End this process in good order; the job stays as it is, for the next job master."""
        self._stop.set()

    @property
    def job(self) -> Job | None:
        """The job that is served here; None: it is not open yet."""
        return None if self._served is None else self._served.job

    def note_store_away_for_all(self, is_away: bool) -> None:
        """Take note that no process reaches the store now, or that one may."""
        if self._served is not None:
            self._served.launches.is_store_away_for_all = is_away

    def status(self) -> job_pb2.JobStatus | None:
        """Return how the job goes, or went; None: it is not open here yet."""
        job = self.job
        return None if job is None else job_status(job, self._own, time.time_ns() // 1_000_000)

    async def run(self) -> RunState:
        """Serve the job until it is over, or until ``stop``.

        Returns:
            The state of the job: ``running`` if ``stop`` was called before it was over.

        Raises:
            NotJobMaster: Another process has become the job master.
            JobRefused: The job cannot be opened with this spec.
            BackstayError: Its data cannot be scanned, or the store refuses this client.
        """
        await self._control.start([SERVICE_NAME], NOT_OPEN)
        living = asyncio.create_task(self._live())
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({living, stopping}, return_when=asyncio.FIRST_COMPLETED)
            return living.result() if living.done() else "running"
        finally:
            await end_tasks(living, stopping)
            await self._leave()

    def _forget_at_end(self, keep_state: bool) -> None:
        self._forget = not keep_state

    async def _live(self) -> RunState:
        token = await _until_answered(lambda: self._leadership.take(self._config.replaces))
        await self._open_journal(token)
        keeping = asyncio.create_task(self._keep_leadership(), name="the leadership")
        try:
            serving = asyncio.create_task(self._serve_once(), name="the job")
            try:
                await asyncio.wait({keeping, serving}, return_when=asyncio.FIRST_COMPLETED)
                if not serving.done():
                    # It ends by a failure only.
                    keeping.result()
                return await serving
            finally:
                await end_tasks(serving)
        finally:
            await end_tasks(keeping)

    async def _open_journal(self, token: FencingToken) -> None:
        await _until_answered(lambda: self._journal.open(token))

    async def _keep_leadership(self) -> None:
        """Write the journal and renew the lease; lead again if no other process does."""
        try:
            while True:
                writing = asyncio.create_task(self._journal.run())
                renewing = asyncio.create_task(self._leadership.keep())
                try:
                    await asyncio.wait({writing, renewing}, return_when=asyncio.FIRST_COMPLETED)
                    for task in (writing, renewing):
                        if task.done():
                            task.result()
                except LeaseLost as error:
                    log.warning("the leadership was lost: %s; taking it again", error)
                finally:
                    await end_tasks(writing, renewing)
                await self._open_journal(await _until_answered(self._leadership.take_again))
        except Exception as error:
            self._journal.fail(error)
            raise

    async def _serve_once(self) -> RunState:
        """Serve the job, unless it is over by the end record; have that say how it ended."""
        record = self._end_record
        if record is not None and (found := await record.read()) is not None:
            return found
        try:
            state = await self._serve()
        except FINAL_ERRORS as error:
            if record is None:
                raise
            log.error("%s", error)
            await record.write("failed", str(error), self.status(), self.exits)
            return "failed"
        if record is not None:
            status = self.status()
            reason = "" if status is None else status.reason
            await record.write(state, reason, status, self.exits)
        # Comes last: without its records the next job master would begin the job anew.
        if self._forget:
            await self._remove_records()
        return state

    async def _serve(self) -> RunState:
        """Open the job and serve it until it is over."""
        checkpoints = Checkpoints(self._directory)
        training = self._spec.training
        source = open_source(training) if training and self._spec.is_stream else None
        job = await self._open_job(checkpoints)
        job.stage_state()
        saving = Saving(job, self._spec.name, checkpoints, servers_end=self._config.servers_end)
        upkeep = RowUpkeep(job, self._spec.name, self._directory, self._config.client)
        export = self._export_of(job)
        await _until_answered(saving.look)
        job.advance()
        # This comes before the first worker hears how long leases last.
        await lengthen_leases(job)
        await _until_answered(lambda: self._journal.durable(LAST_WRITE_S))
        served = self._open_service(job, saving)
        await self._control.set_serving()
        log.info(
            "job master of %r at %s (start %d)",
            self._spec.name,
            self._own.address,
            job.state.starts,
        )
        works = {
            "the schedule": self._advance(job),
            "the leases": self._expire(job),
            "the time of leases": _keep_lease_ttl(job),
            "checkpoints": saving.save_when_due(),
            "restores": saving.watch_restores(),
            "the upkeep of rows": upkeep.run(),
        }
        if export is not None:
            works["the export"] = export.run()
        report: LagReport | None = None
        if source is not None:
            report = LagReport(job, source)
            works |= {"the training data": SourcePoll(job, source).run(), "the lag": report.run()}
        background = [asyncio.create_task(work, name=name) for name, work in works.items()]
        ending = asyncio.create_task(saving.end_schedule(), name="the end of the schedule")
        metrics = asyncio.create_task(serve_metrics(job, served.service.status), name="metrics")
        over = asyncio.create_task(self._over(job, saving, export))
        try:
            async with HostedLauncher(
                self._spec, self._config.endpoints, served.launches, self._config.owner
            ) as launcher:
                watched = {over, ending, metrics, *background}
                while not over.done():
                    done, watched = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        task.result()
                await launcher.let_leave()
                if report is not None:
                    await report.last()
                return over.result()
        finally:
            await end_tasks(over, ending, metrics, *background)

    def _open_service(self, job: Job, saving: Saving) -> _Served:
        """Answer the calls of workers, commands and launchers from now on."""
        launches = LaunchHandler(job, self.exits)
        service = JobService(
            self._own,
            job,
            launches,
            on_stop=self._forget_at_end,
            try_save_now=saving.try_now,
        )
        self._served = _Served(job, service, launches)
        job_pb2_grpc.add_JobServiceServicer_to_server(service, self._control.services)
        return self._served

    async def _open_job(self, checkpoints: Checkpoints) -> Job:
        """Return the job as its records say, or a new one."""
        opened = await open_job(
            self._store,
            self._keys,
            self._journal,
            self._spec,
            uid=secrets.token_hex(8),
            now_ms=time.time_ns() // 1_000_000,
            fresh=self._config.fresh,
            clock=self._clock,
            incarnation=lambda: incarnation_of(checkpoints),
            restored=lambda: restored_job(
                checkpoints, self._spec, servers_end=self._config.servers_end
            ),
            run=self._config.run,
            owner=self._config.owner,
        )
        return Job(opened, self._keys, self._journal, self._clock)

    async def _advance(self, job: Job) -> None:
        """Open and end rounds as the schedule says; never returns."""
        while True:
            changed = job.changed
            for opened in job.advance():
                metrics = await asyncio.to_thread(opened.compute)
                job.evaluated(opened, metrics)
            if changed is job.changed:
                await changed.wait()

    async def _expire(self, job: Job) -> None:
        """Expire the leases that were not renewed in time: their tasks may go to others.

        Never returns.
        """
        while True:
            next_s = job.expire()
            left_s = LOOK_S if next_s is None else next_s - self._clock()
            await asyncio.sleep(min(max(left_s, 0.005), LOOK_S))

    def _export_of(self, job: Job) -> JobExport | None:
        spec = self._spec.exports
        if spec is None or self._spec.kind != "training":
            return None
        return JobExport(job, self._spec.name, spec, self._directory)

    async def _over(self, job: Job, saving: Saving, export: JobExport | None) -> RunState:
        """Wait until the job is over and its workers know; returns its state."""
        while not job.is_over:
            await job.changed.wait()
        if job.saves_still:
            if not self._forget:
                await saving.save_stopped()
            job.stopped_is_saved()
        if export is not None:
            await export.stop()
        deadline_s = self._clock() + self._config.linger_ms / 1000
        while self._clock() < deadline_s and not job.workers_know_end:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(job.changed.wait(), LOOK_S)
        await _until_answered(lambda: self._journal.durable(LAST_WRITE_S))
        return job.state.state

    async def _remove_records(self) -> None:
        """Remove the job, as the operator who stopped it asked."""
        found = await self._store.range(self._keys.root)
        kept = (self._keys.master, self._keys.journal)
        for item in found.items:
            if item.key not in kept:
                self._journal.outbox.stage_removal(item.key)
        self._journal.outbox.stage_removal(self._keys.name)
        await self._journal.durable(LAST_WRITE_S)
        assert self._leadership.token is not None
        await self._store.transaction(
            Txn((self._leadership.token.still_mine(),), (Delete(self._keys.journal),))
        )

    async def _leave(self) -> None:
        """Stop serving, write what is left, give the leadership back."""
        await self._control.set_not_serving()
        if self._served is not None:
            self._served.service.end_streams()
        await self._control.stop(CONTROL_GRACE_S)
        try:
            await asyncio.wait_for(self._leadership.leave(), FAREWELL_S)
        except (StoreUnavailable, asyncio.TimeoutError) as error:
            log.warning("the store does not answer, so the lease is left to expire: %s", error)
        await self._store.close()
        await asyncio.to_thread(self._directory.close)


async def lengthen_leases(job: Job) -> None:
    """Have leases last as long as the number of workers asks for, once that is recorded.

    If the store does not answer, they last as long as before; call again.
    """
    ttl_ms = job.plan_lease_ttl()
    if ttl_ms is None:
        return
    try:
        await job.journal.durable(LEASE_TTL_WRITE_S)
    except StoreUnavailable:
        return
    job.lengthen_leases(ttl_ms)


async def _keep_lease_ttl(job: Job) -> None:
    """Look after the time of leases for as long as the job is served; never returns."""
    while True:
        await asyncio.sleep(LOOK_S)
        await lengthen_leases(job)


async def _until_answered(ask: Callable[[], Awaitable[ResultT]]) -> ResultT:
    """Ask the store, or the cluster, until it answers; say each new reason why it does not.

    It has no limit. A job master that gave up would only have to be started again, and the next one
    needs the same store. The command that started this process ends it.
    """
    return await until_answered(
        ask,
        RETRY,
        (StoreUnavailable, ServerUnavailable),
        lambda error: log.warning("waiting: %s", error),
    )
