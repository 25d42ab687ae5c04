"""The master of one job as a process: takes the leadership, opens the job, serves it to its end.

Life: listen (calls are answered "not the master yet"), wait for the leadership, open the job from
its records, serve. If the key is lost and no other process took it, it is created anew and nothing
else changes; if another process has it, this one ends with ``NotJobMaster``. At the end workers are
told, then the leadership is given back. The shell: decisions are made by the modules it assembles.
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
from typing import TypeVar

from backstay._proto.v1 import job_pb2_grpc
from backstay.addresses import split_address
from backstay.cluster.checkpoints import Checkpoints
from backstay.cluster.directory import Directory
from backstay.consensus.job_records import MasterRecord, RunState
from backstay.consensus.keys import JobKeys
from backstay.consensus.remote_store import RemoteStore
from backstay.consensus.store import CoordinationStore, Delete, Txn
from backstay.consensus.store_follow import FencingToken
from backstay.control_server import ControlServer
from backstay.errors import LeaseLost, ServerUnavailable, StoreUnavailable
from backstay.job_spec import JobSpec
from backstay.master.config import MasterConfig
from backstay.master.job import Job
from backstay.master.journal import Journal
from backstay.master.launch_handler import LaunchHandler
from backstay.master.leadership import Leadership
from backstay.master.lease_time import keep_lease_time, lengthen_leases
from backstay.master.opening import open_job
from backstay.master.saving import Saving, incarnation_of, restored_job
from backstay.master.service import JobService
from backstay.tasks import end_tasks

__all__ = ["MasterHost"]

SERVICE_NAME = "backstay.v1.JobService"
STORE_DEADLINE_MS = 2000
CONTROL_GRACE_S = 1.0
FAREWELL_S = 2.0
# Between two tries; doubled each time, up to the last.
RETRY_PAUSE_FIRST_S = 0.1
RETRY_PAUSE_MAX_S = 1.0
# Between two looks at leases that may have run out, at most.
LOOK_S = 0.25
LAST_WRITE_S = 10.0

ResultT = TypeVar("ResultT")

log = logging.getLogger(__name__)


class MasterHost:
    """One process's time as the master of a job."""

    def __init__(self, config: MasterConfig, spec: JobSpec, *, instance: int | None = None) -> None:
        """Bind the address; call it while the event loop runs.

        Args:
            config: Settings of this process.
            spec: The job.
            instance: Of this process; default: drawn at random.

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
        self._service = JobService(self._own)
        self._service.on_stop = self._forget_at_end
        self._forget = False
        self._stop = asyncio.Event()
        self._clock = asyncio.get_running_loop().time

    def stop(self) -> None:
        """End this process in good order; the job stays as it is, for the next master."""
        self._stop.set()

    async def run(self) -> RunState:
        """Serve the job until it is over, or until ``stop``.

        Returns:
            The state of the job: ``running`` if ``stop`` was called before it was over.

        Raises:
            NotJobMaster: Another process has become the master.
            JobRefused: The job cannot be opened with this spec.
            BackstayError: Its data cannot be scanned, or the store refuses this client.
        """
        self._add_service()
        await self._control.start([SERVICE_NAME])
        living = asyncio.create_task(self._live())
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({living, stopping}, return_when=asyncio.FIRST_COMPLETED)
            return living.result() if living.done() else "running"
        finally:
            await end_tasks(living, stopping)
            await self._leave()

    def _add_service(self) -> None:
        job_pb2_grpc.add_JobServiceServicer_to_server(self._service, self._control.server)

    def _forget_at_end(self, keep_state: bool) -> None:
        self._forget = not keep_state

    async def _live(self) -> RunState:
        token = await _until_answered(lambda: self._leadership.take(self._config.replaces))
        await self._open_journal(token)
        keeping = asyncio.create_task(self._keep_leadership(), name="the leadership")
        try:
            serving = asyncio.create_task(self._serve(), name="the job")
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

    async def _serve(self) -> RunState:
        """Open the job and serve it until it is over."""
        checkpoints = Checkpoints(self._directory)
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
            restored=lambda: restored_job(checkpoints, self._spec.name),
        )
        job = Job(opened, self._keys, self._journal, self._clock)
        job.stage_state()
        saving = Saving(job, self._spec.name, checkpoints, servers_end=self._config.servers_end)
        self._service.try_save_now = saving.try_now
        await _until_answered(saving.look)
        job.advance()
        # This comes before the first worker hears how long leases last.
        await lengthen_leases(job)
        await _until_answered(lambda: self._journal.durable(LAST_WRITE_S))
        self._service.launch_handler = LaunchHandler(job)
        self._service.job = job
        await self._control.set_serving()
        log.info(
            "master of job %r at %s (start %d)",
            self._spec.name,
            self._own.address,
            job.state.starts,
        )
        background = [
            asyncio.create_task(self._advance(job), name="the schedule"),
            asyncio.create_task(self._expire(job), name="the leases"),
            asyncio.create_task(keep_lease_time(job), name="the time of leases"),
            asyncio.create_task(saving.save_when_due(), name="checkpoints"),
            asyncio.create_task(saving.look_on(), name="restores"),
        ]
        ending = asyncio.create_task(saving.end_schedule(), name="the end of the schedule")
        over = asyncio.create_task(self._over(job, saving))
        try:
            watched = {over, ending, *background}
            while not over.done():
                done, watched = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            return over.result()
        finally:
            await end_tasks(over, ending, *background)

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
        """Take back what was not renewed in time; never returns."""
        while True:
            now_s = self._clock()
            next_s = job.rounds.next_expiry()
            pause_s = LOOK_S if next_s is None else min(max(next_s - now_s, 0.005), LOOK_S)
            await asyncio.sleep(pause_s)
            job.expire()
            job.known.forget_silent(self._clock())

    async def _over(self, job: Job, saving: Saving) -> RunState:
        """Wait until the job is over and its workers know; returns its state."""
        while not job.is_over:
            await job.changed.wait()
        if job.saves_still:
            if not self._forget:
                await saving.save_stopped()
            job.saves_still = False
            job.notify()
        deadline_s = self._clock() + self._config.linger_ms / 1000
        ttl_s = job.task_lease_ttl_ms / 1000
        while self._clock() < deadline_s and _is_waited_for(job, ttl_s):
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(job.changed.wait(), LOOK_S)
        await _until_answered(lambda: self._journal.durable(LAST_WRITE_S))
        if self._forget:
            await self._remove_records()
        return job.state.state

    async def _remove_records(self) -> None:
        """Remove the job, as the operator who stopped it asked."""
        found = await self._store.range(self._keys.root)
        kept = (self._keys.master, self._keys.journal)
        for item in found.items:
            if item.key not in kept:
                self._journal.stage_removal(item.key)
        self._journal.stage_removal(self._keys.name)
        await self._journal.durable(LAST_WRITE_S)
        assert self._leadership.token is not None
        await self._store.transaction(
            Txn((self._leadership.token.still_mine(),), (Delete(self._keys.journal),))
        )

    async def _leave(self) -> None:
        """Stop serving, write what is left, give the leadership back."""
        await self._control.set_not_serving()
        await self._control.stop(CONTROL_GRACE_S)
        try:
            await asyncio.wait_for(self._leadership.leave(), FAREWELL_S)
        except (StoreUnavailable, asyncio.TimeoutError) as error:
            log.warning("left without a word, the lease ends by itself: %s", error)
        await self._store.close()
        await asyncio.to_thread(self._directory.close)


def _is_waited_for(job: Job, ttl_s: float) -> bool:
    """Whether a living worker has yet to hear of the end, or to close streams."""
    alive = [one for one in job.known if job.now() - one.heard_s < ttl_s]
    has_streams = any(opened.ledger.open_streams for opened in job.rounds.values())
    return any(has_streams or not one.knows_end for one in alive)


async def _until_answered(ask: Callable[[], Awaitable[ResultT]]) -> ResultT:
    """Ask the store, or the cluster, until it answers; say each new reason why it does not.

    For ever: a master that gives up only has to be started again, for the job waits for the same
    store whoever is its master. Whoever started this process ends it.
    """
    said, pause_s = "", RETRY_PAUSE_FIRST_S
    while True:
        try:
            return await ask()
        except (StoreUnavailable, ServerUnavailable) as error:
            if str(error) != said:
                said = str(error)
                log.warning("waiting: %s", said)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RETRY_PAUSE_MAX_S)
