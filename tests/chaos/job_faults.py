"""What may happen to a job: faults of its workers, its job master, its command and its servers.

Measures are drawn from the run's seed when a fault is made; victims are the processes that have the
role when it strikes. A fault is over when ``undo`` returns; whether the job goes on is looked at
then.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

import grpc
import psutil

from backstay import rpc
from backstay._proto.v1 import job_pb2
from backstay.checkpoint import remote
from backstay.config import SecurityConfig
from backstay.errors import ServerUnavailable
from tests.chaos.cluster import ChaosCluster, NotYet
from tests.chaos.jobs import LEASE_TTL_MS, ChaosJob, stop_politely

__all__ = ["JOB_FAULTS", "JobArena", "JobFault", "JobOver", "send"]

T = TypeVar("T")
LEASE_TTL_S = LEASE_TTL_MS / 1000
RESTORE_LIMIT_S = 30.0
THERE_LIMIT_S = 60.0


class JobOver(Exception):
    """The job came to its end before a fault had struck: there is nothing left to strike at."""


@dataclass
class JobArena:
    """What faults act on."""

    cluster: ChaosCluster
    job: ChaosJob
    draw: random.Random
    # Nodes that a fault has hit and that are not whole again.
    struck: set[int] = field(default_factory=set)

    def worker(self) -> psutil.Process:
        """Return a worker that runs.

        Raises:
            NotYet: None comes.
            JobOver: None will.
        """
        return self.draw.choice(self.wait_for("a worker", lambda: self.job.workers() or None))

    def master(self) -> psutil.Process:
        """Return the job master.

        Raises:
            NotYet: None comes.
            JobOver: None will.
        """
        return self.wait_for("a job master", self.job.master)

    def status(self) -> job_pb2.JobStatus:
        """Return what the job master says, once one does. Raises as ``master``."""

        def ask() -> job_pb2.JobStatus | None:
            with suppress(NotYet):
                return self.job.status()
            return None

        return self.wait_for("a job master that answers", ask)

    def node(self) -> int:
        """Return a node that runs."""
        running = [n for n, node in enumerate(self.cluster.nodes) if node.is_running]
        return self.draw.choice(running)

    def wait_for(self, what: str, look: Callable[[], T | None]) -> T:
        """Return what a look finds, once that is something. Raises as ``master``."""
        deadline_s = time.monotonic() + THERE_LIMIT_S
        while (found := look()) is None:
            if self.job.is_over:
                raise JobOver(f"the job was over before there was {what}")
            if time.monotonic() > deadline_s:
                raise NotYet(f"after {THERE_LIMIT_S:g} s there is not {what}")
            time.sleep(0.05)
        return found


class JobFault:
    """One fault.

    Attributes:
        kind: The name it is counted under.
        hold_s: How long it lasts.
        what: Whom it hit, once it has struck.
    """

    kind = ""
    needs_etcd = False

    def __init__(self, arena: JobArena) -> None:
        """Draw the measures."""
        self.hold_s = arena.draw.uniform(0.0, 0.6)
        self.what = ""

    def strike(self, arena: JobArena) -> None:
        """Bring it about."""
        raise NotImplementedError

    def undo(self, arena: JobArena) -> None:
        """End it."""


def send(process: psutil.Process, number: int) -> None:
    """Send a signal to a process that may have ended meanwhile."""
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return


class KillWorker(JobFault):
    """SIGKILL of a worker; the job master has another one started."""

    kind = "worker_sigkill"

    def strike(self, arena: JobArena) -> None:
        worker = arena.worker()
        self.what = f"process {worker.pid}"
        send(worker, signal.SIGKILL)


class KillWorkers(JobFault):
    """SIGKILL of all workers at once."""

    kind = "workers_sigkill"

    def strike(self, arena: JobArena) -> None:
        arena.worker()
        workers = arena.job.workers()
        self.what = f"{len(workers)} workers"
        for worker in workers:
            send(worker, signal.SIGKILL)


class PauseWorker(JobFault):
    """SIGSTOP for longer than a lease lasts: others do its task, and it comes late."""

    kind = "worker_sigstop"

    def __init__(self, arena: JobArena) -> None:
        super().__init__(arena)
        self.hold_s = arena.draw.uniform(1.5, 3.5) * LEASE_TTL_S

    def strike(self, arena: JobArena) -> None:
        self._worker = arena.worker()
        self.what = f"process {self._worker.pid} for {self.hold_s:.1f} s"
        send(self._worker, signal.SIGSTOP)

    def undo(self, arena: JobArena) -> None:
        send(self._worker, signal.SIGCONT)


class BlinkWorker(PauseWorker):
    """SIGSTOP for less than a lease lasts, again and again."""

    kind = "worker_blinks"

    def __init__(self, arena: JobArena) -> None:
        super().__init__(arena)
        self.hold_s = 0.0
        self._pauses_s = [arena.draw.uniform(0.2, 0.9) * LEASE_TTL_S for _ in range(3)]

    def strike(self, arena: JobArena) -> None:
        for pause_s in self._pauses_s:
            super().strike(arena)
            time.sleep(pause_s)
            send(self._worker, signal.SIGCONT)


class KillMaster(JobFault):
    """SIGKILL of the job master; the command starts another one."""

    kind = "master_sigkill"

    def strike(self, arena: JobArena) -> None:
        master = arena.master()
        self.what = f"process {master.pid}"
        send(master, signal.SIGKILL)


class KillMasters(KillMaster):
    """SIGKILL of the job master, and of the next one as soon as it is there."""

    kind = "masters_sigkill"

    def __init__(self, arena: JobArena) -> None:
        super().__init__(arena)
        self._gap_s = arena.draw.uniform(0.0, 1.5)

    def strike(self, arena: JobArena) -> None:
        super().strike(arena)
        time.sleep(self._gap_s)
        # The first one was struck all the same.
        with suppress(JobOver):
            super().strike(arena)


class PauseMaster(PauseWorker):
    """SIGSTOP of the job master for longer than its lease and all leases last."""

    kind = "master_sigstop"

    def __init__(self, arena: JobArena) -> None:
        super().__init__(arena)
        self.hold_s = arena.draw.uniform(0.5, 5.0)

    def strike(self, arena: JobArena) -> None:
        self._worker = arena.master()
        self.what = f"process {self._worker.pid} for {self.hold_s:.1f} s"
        send(self._worker, signal.SIGSTOP)


class KillMasterAndWorker(JobFault):
    """SIGKILL of the job master and a worker at once."""

    kind = "master_and_worker_sigkill"

    def strike(self, arena: JobArena) -> None:
        master, worker = arena.master(), arena.worker()
        self.what = f"processes {master.pid} and {worker.pid}"
        send(master, signal.SIGKILL)
        send(worker, signal.SIGKILL)


class KillServer(JobFault):
    """SIGKILL of a pserver; it is started again, empty."""

    kind = "server_sigkill"

    def strike(self, arena: JobArena) -> None:
        self._number = arena.node()
        self.what = f"ps-{self._number}"
        arena.cluster.nodes[self._number].kill()

    def undo(self, arena: JobArena) -> None:
        node = arena.cluster.nodes[self._number]
        node.start()
        node.wait_ready()
        arena.cluster.wait_in_sync()


class KillServerAndWorker(KillServer):
    """SIGKILL of a pserver and a worker at once."""

    kind = "server_and_worker_sigkill"

    def strike(self, arena: JobArena) -> None:
        worker = arena.worker()
        super().strike(arena)
        send(worker, signal.SIGKILL)
        self.what += f" and process {worker.pid}"


class PauseServer(KillServer):
    """SIGSTOP of a pserver: others take its slots, then it comes back."""

    kind = "server_sigstop"

    def __init__(self, arena: JobArena) -> None:
        super().__init__(arena)
        self.hold_s = arena.draw.uniform(0.5, 5.0)

    def strike(self, arena: JobArena) -> None:
        self._number = arena.node()
        self.what = f"ps-{self._number} for {self.hold_s:.1f} s"
        arena.cluster.nodes[self._number].pause()

    def undo(self, arena: JobArena) -> None:
        arena.cluster.nodes[self._number].resume()
        arena.cluster.wait_in_sync()


class Scale(JobFault):
    """More workers, or fewer: workers that go give back what they have."""

    kind = "scale"

    def strike(self, arena: JobArena) -> None:
        status = arena.status()
        choices = [n for n in (1, 2, 3) if n != status.workers_desired]
        wanted = arena.draw.choice(choices)
        self.what = f"from {status.workers_desired} to {wanted} workers"

        def scale() -> int | None:
            # Said twice, it is as if it were said once.
            try:
                arena.job.client.scale(wanted)
            except ServerUnavailable:
                return None
            return wanted

        arena.wait_for("a job master that takes it", scale)


class StopAndResume(JobFault):
    """Ctrl-C, and the same command again."""

    kind = "stop_and_resume"

    def strike(self, arena: JobArena) -> None:
        self.what = "the command"
        stop_politely(arena.job)

    def undo(self, arena: JobArena) -> None:
        arena.job.start()


class KillCommand(StopAndResume):
    """SIGKILL of the command, with which all its processes end; and the same command again."""

    kind = "command_sigkill"

    def strike(self, arena: JobArena) -> None:
        self.what = "the command"
        arena.job.kill()


class StoreAway(JobFault):
    """The coordination store is killed and stays away for a while; leases are renewed meanwhile."""

    kind = "store_down"
    needs_etcd = True

    def __init__(self, arena: JobArena) -> None:
        super().__init__(arena)
        self.hold_s = arena.draw.uniform(1.0, 5.0)
        self.what = f"for {self.hold_s:.1f} s"

    def strike(self, arena: JobArena) -> None:
        assert arena.cluster.etcd is not None
        for member in arena.cluster.etcd.members:
            member.kill()

    def undo(self, arena: JobArena) -> None:
        assert arena.cluster.etcd is not None
        arena.cluster.etcd.start()


class StoreAndMaster(StoreAway):
    """The store goes, and the job master dies before it is back."""

    kind = "store_down_and_master_sigkill"

    def strike(self, arena: JobArena) -> None:
        super().strike(arena)
        time.sleep(self.hold_s / 2)
        # The store has to come back.
        with suppress(JobOver):
            send(arena.master(), signal.SIGKILL)


class Restore(JobFault):
    """The cluster is restored from a checkpoint while the job runs: model and progress go back."""

    kind = "restore"

    def strike(self, arena: JobArena) -> None:
        self._starts = arena.status().master_starts
        self._restore(arena)

    def _restore(self, arena: JobArena) -> None:
        endpoint = arena.draw.choice(arena.cluster.endpoints)
        with rpc.open_channel(endpoint, SecurityConfig()) as channel, rpc.mapped_errors(endpoint):
            chosen = self._choose(arena, channel)
            self.what = f"{chosen.id} {dict(chosen.tags)}"
            arena.job.restores += 1
            remote.restore(channel, chosen.id, timeout_s=RESTORE_LIMIT_S)
        self._strike_too(arena)

    def undo(self, arena: JobArena) -> None:
        arena.cluster.wait_in_sync()
        # What is saved before the job has followed is of no use to it.
        arena.job.wait_until(lambda: self._problem(arena))

    def _choose(self, arena: JobArena, channel: grpc.Channel) -> remote.CheckpointInfo:
        """Return one of the last two of this job; made by hand if there is none yet."""
        found = remote.list_checkpoints(channel, timeout_s=RESTORE_LIMIT_S).checkpoints
        mine = [one for one in found if one.tags.get("job") == arena.job.shape.name]
        if mine and arena.draw.random() < 0.7:
            return arena.draw.choice(mine[-2:])
        tags = {"job": arena.job.shape.name, "by": "hand"}
        return remote.save(channel, tags=tags, timeout_s=RESTORE_LIMIT_S)

    def _problem(self, arena: JobArena) -> str:
        starts = arena.job.status().master_starts
        return "" if starts > self._starts else "the job has not followed the restore"

    def _strike_too(self, arena: JobArena) -> None:
        """Nothing else."""


class RestoreAndMaster(Restore):
    """A restore, and the job master dies before or while it takes the job back."""

    kind = "restore_and_master_sigkill"

    def _strike_too(self, arena: JobArena) -> None:
        time.sleep(arena.draw.uniform(0.0, 1.5))
        # A restore was struck all the same.
        with suppress(JobOver):
            send(arena.master(), signal.SIGKILL)


class RestoreAndBlink(Restore):
    """A restore while a worker stands still for a moment, too short for its lease to run out."""

    kind = "restore_and_worker_blinks"

    def strike(self, arena: JobArena) -> None:
        # Asked before anybody stands still: that may take longer than a lease lasts.
        self._starts = arena.status().master_starts
        worker = arena.worker()
        send(worker, signal.SIGSTOP)
        try:
            self._restore(arena)
            time.sleep(arena.draw.uniform(0.0, 0.5))
        finally:
            send(worker, signal.SIGCONT)


# By the name that they are counted under.
JOB_FAULTS: dict[str, type[JobFault]] = {
    kind.kind: kind
    for kind in (
        *(KillWorker, KillWorkers, PauseWorker, BlinkWorker),
        *(KillMaster, KillMasters, PauseMaster, KillMasterAndWorker),
        *(KillServer, KillServerAndWorker, PauseServer),
        *(Scale, StopAndResume, KillCommand, StoreAway, StoreAndMaster),
        *(Restore, RestoreAndMaster, RestoreAndBlink),
    )
}
