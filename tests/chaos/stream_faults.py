"""What may happen to a job over a topic and to its brokers, and who dies in which step.

As ``job_faults``, whose faults strike such a job too.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from backstay import rpc
from backstay.checkpoint import remote_exports
from backstay.config import SecurityConfig
from backstay.errors import BackstayError
from tests.chaos import network
from tests.chaos.cluster import NotYet
from tests.chaos.job_faults import JobArena, JobFault, JobOver, send
from tests.chaos.sinks import Sink
from tests.chaos.steps import PHASES, at_element, at_file, at_record
from tests.chaos.stream_jobs import StreamParts, StreamShape, stop_job

__all__ = ["STREAM_FAULTS", "StreamArena", "StreamFault"]

CALL_S = 10.0
TOLD_LIMIT_S = 60.0


@dataclass(kw_only=True)
class StreamArena(JobArena):
    """What faults act on."""

    parts: StreamParts
    sink: Sink
    # How long what is away stays away.
    outage_s: float

    @property
    def shape(self) -> StreamShape:
        """What the job is."""
        assert isinstance(self.job.shape, StreamShape)
        return self.job.shape

    @property
    def served(self) -> Path:
        """The folder that the job exports to."""
        return Path(self.shape.sink)

    def trouble(self) -> str:
        """Return what the cluster says of the job's export; empty: all is well, or no answer."""
        for endpoint in self.cluster.endpoints:
            with (
                suppress(BackstayError),
                rpc.open_channel(endpoint, SecurityConfig()) as channel,
                rpc.mapped_errors(endpoint),
            ):
                found = remote_exports.list_exports(channel, timeout_s=CALL_S)
                return next((one.trouble for one in found if one.name == self.shape.name), "")
        return ""

    def resident(self) -> int:
        """Return the memory of all servers."""
        pids = [node.pid for node in self.cluster.nodes if node.is_running]
        return sum(psutil.Process(pid).memory_info().rss for pid in pids)


class StreamFault(JobFault):
    """One fault of a job over a topic.

    Attributes:
        needs_network: It needs namespaces.
        needs_folder: The sink must be a folder; ``needs_room``: one whose size is limited.
        needs_brokers: So many, at least.
    """

    needs_network = False
    needs_folder = False
    needs_room = False
    needs_brokers = 1

    def strike(self, arena: JobArena) -> None:
        assert isinstance(arena, StreamArena)
        self.strike_stream(arena)

    def undo(self, arena: JobArena) -> None:
        assert isinstance(arena, StreamArena)
        self.undo_stream(arena)
        # Whatever it was, what is pushed from now on is served.
        arena.parts.follower.wait_fresh()

    def strike_stream(self, arena: StreamArena) -> None:
        """Bring it about."""
        raise NotImplementedError

    def undo_stream(self, arena: StreamArena) -> None:
        """End it."""


# -- brokers ------------------------------------------------------------------------------


class KillBroker(StreamFault):
    """SIGKILL of a broker; after a while it is started again with its data."""

    kind = "broker_sigkill"

    def __init__(self, arena: JobArena) -> None:
        super().__init__(arena)
        self.hold_s = arena.draw.uniform(0.0, 4.0)

    def victim(self, arena: StreamArena) -> int:
        """Return which broker is hit."""
        return arena.draw.randrange(len(arena.parts.brokers.members))

    def strike_stream(self, arena: StreamArena) -> None:
        self._number = self.victim(arena)
        self.what = f"broker {self._number} for {self.hold_s:.1f} s"
        arena.parts.brokers.members[self._number].kill()

    def undo_stream(self, arena: StreamArena) -> None:
        arena.parts.brokers.members[self._number].start()
        arena.parts.brokers.wait_ready()


class PauseBroker(KillBroker):
    """SIGSTOP of a broker: it takes connections, and answers nothing."""

    kind = "broker_sigstop"

    def __init__(self, arena: JobArena) -> None:
        super().__init__(arena)
        assert isinstance(arena, StreamArena)
        self.hold_s = arena.outage_s

    def strike_stream(self, arena: StreamArena) -> None:
        self._number = self.victim(arena)
        self.what = f"broker {self._number} for {self.hold_s:.1f} s"
        arena.parts.brokers.members[self._number].pause()
        if len(arena.parts.brokers.members) == 1:
            _told(arena, "training data are not there")

    def undo_stream(self, arena: StreamArena) -> None:
        arena.parts.brokers.members[self._number].resume()
        arena.parts.brokers.wait_ready()


class KillLeader(KillBroker):
    """SIGKILL of the broker that leads a partition: another one leads it then."""

    kind = "leader_sigkill"
    needs_brokers = 3

    def victim(self, arena: StreamArena) -> int:
        return arena.parts.brokers.leader(arena.shape.topic, 0)

    def strike_stream(self, arena: StreamArena) -> None:
        super().strike_stream(arena)
        deadline_s = time.monotonic() + TOLD_LIMIT_S
        while (leader := self.victim(arena)) in (self._number, -1):
            if time.monotonic() > deadline_s:
                raise NotYet("no other broker leads the partition")
            time.sleep(0.05)
        self.what += f", then broker {leader} leads"
        # While the broker is away: all is done by the others.
        arena.job.wait_going_on()


class CutBroker(StreamFault):
    """Nothing comes through to a broker and from it: what is connected waits for answers."""

    kind = "broker_cut"
    needs_network = True

    def __init__(self, arena: JobArena) -> None:
        super().__init__(arena)
        assert isinstance(arena, StreamArena)
        self.hold_s = arena.draw.uniform(0.5, 1.0) * arena.outage_s

    def rules(self, arena: StreamArena) -> tuple[list[str], list[str]]:
        """Return what is done to what comes in and goes out."""
        del arena
        return ["drop"], ["drop"]

    def strike_stream(self, arena: StreamArena) -> None:
        hosts = arena.parts.brokers.hosts
        self._host = hosts[arena.draw.randrange(len(hosts))]
        self.what = f"{self._host.name} for {self.hold_s:.1f} s"
        arena.cluster.network.apply(self._host, *self.rules(arena))

    def undo_stream(self, arena: StreamArena) -> None:
        arena.cluster.network.heal(self._host)
        arena.parts.brokers.wait_ready()


class ResetBroker(CutBroker):
    """Connections to a broker are cut again and again, in the middle of messages."""

    kind = "broker_reset"

    def rules(self, arena: StreamArena) -> tuple[list[str], list[str]]:
        rules = network.reset_some(arena.draw.choice([50, 200, 999]), longer_than=100)
        return rules, rules


# -- who dies in which step ---------------------------------------------------------------

Wait = Callable[[StreamArena, Callable[[], bool]], bool]


def _record(below: str) -> Wait:
    def wait(arena: StreamArena, until: Callable[[], bool]) -> bool:
        assert arena.cluster.etcd is not None
        prefix = f"/chaos/jobs/{arena.shape.name}/{below}"
        return at_record(arena.cluster.etcd.endpoints[0], prefix, until)

    return wait


def _commit(arena: StreamArena, until: Callable[[], bool]) -> bool:
    """Wait until the broker has written offsets of the group down; nobody may know that yet."""

    def written() -> int:
        files = [log for data in arena.parts.brokers.data for log in data.glob(OFFSETS)]
        return sum(file.stat().st_size for file in files)

    return at_file("commit of offsets", written, until)


def _batch(arena: StreamArena, until: Callable[[], bool]) -> bool:
    """Wait for a task that is done: then each worker is in the midst of one, or begins one."""
    done = at_file("task that is done", arena.job.completions, until)
    time.sleep(arena.draw.uniform(0.0, 0.15))
    return done


def _element(kind: str) -> Wait:
    def wait(arena: StreamArena, until: Callable[[], bool]) -> bool:
        return at_element(arena.served, kind, arena.draw.choice(PHASES), until)

    return wait


OFFSETS = "__consumer_offsets-*/*.log"
STEPS: dict[str, Wait] = {
    "take": _record("takes/"),
    "lease": _record("leased/"),
    "batch": _batch,
    "journal": _record("done/"),
    "period": _record("state"),
    "commit": _commit,
    "increment": _element("delta"),
    "base": _element("full"),
}
OF_EXPORT = ("increment", "base")


class KillInStep(StreamFault):
    """SIGKILL of a worker, the job master, a pserver or the controller in a certain step."""

    step = ""
    victim = ""

    def strike_stream(self, arena: StreamArena) -> None:
        victim, self._number = self._aim(arena)
        if not STEPS[self.step](arena, lambda: arena.job.is_over):
            raise JobOver(f"the job was over before there was a {self.step}")
        if self._number is not None:
            arena.cluster.nodes[self._number].kill()
        elif victim is not None:
            send(victim, signal.SIGKILL)

    def _aim(self, arena: StreamArena) -> tuple[psutil.Process | None, int | None]:
        """Choose whom to kill, a process or a node, before the step comes: then time is short."""
        if self.victim in ("worker", "master"):
            process = arena.worker() if self.victim == "worker" else arena.master()
            self.what = f"process {process.pid}"
            return process, None
        controller = arena.wait_for("a controller", lambda: _controller(arena))
        others = [n for n in range(len(arena.cluster.nodes)) if n != controller]
        number = controller if self.victim == "controller" else arena.draw.choice(others)
        self.what = f"ps-{number}"
        return None, number

    def undo_stream(self, arena: StreamArena) -> None:
        if self._number is not None:
            node = arena.cluster.nodes[self._number]
            node.start()
            node.wait_ready()
            arena.cluster.wait_in_sync()


def _controller(arena: StreamArena) -> int | None:
    with suppress(NotYet):
        return arena.cluster.controller()
    return None


def _in_step(victim: str, step: str) -> type[KillInStep]:
    members = {
        "kind": f"{victim}_at_{step}",
        "victim": victim,
        "step": step,
        "needs_etcd": True,
        "needs_folder": step in OF_EXPORT,
    }
    return type(f"Kill_{victim}_{step}", (KillInStep,), members)


class BrokerInCommit(KillBroker):
    """SIGKILL of a broker that has just written offsets of the group down."""

    kind = "broker_at_commit"

    def strike_stream(self, arena: StreamArena) -> None:
        if not _commit(arena, lambda: arena.job.is_over):
            raise JobOver("the job was over before there was a commit")
        super().strike_stream(arena)


class MasterInHungCommit(PauseBroker):
    """SIGKILL of the job master while the broker answers neither a question nor a commit."""

    kind = "master_at_hung_commit"

    def __init__(self, arena: JobArena) -> None:
        super().__init__(arena)
        self.hold_s = arena.draw.uniform(0.0, 3.0)

    def strike_stream(self, arena: StreamArena) -> None:
        super().strike_stream(arena)
        send(arena.master(), signal.SIGKILL)


class StopJob(StreamFault):
    """``backstay jobs stop``, and the same command again."""

    kind = "jobs_stop_and_resume"

    def strike_stream(self, arena: StreamArena) -> None:
        self.what = "the job"
        stop_job(arena.cluster, arena.job)

    def undo_stream(self, arena: StreamArena) -> None:
        arena.job.start()


def _told(arena: StreamArena, words: str) -> None:
    """Wait until the job's status has some words."""
    arena.job.wait_until(
        lambda: "" if words in arena.job.status().trouble else f"nobody says: {words}", TOLD_LIMIT_S
    )


VICTIMS = ("worker", "master", "server", "controller")
STREAM_FAULTS: tuple[type[StreamFault], ...] = (
    *(KillBroker, PauseBroker, KillLeader, CutBroker, ResetBroker),
    *(BrokerInCommit, MasterInHungCommit, StopJob),
    *(_in_step(victim, step) for step in STEPS for victim in VICTIMS),
)
