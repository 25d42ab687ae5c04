"""Runs: a cluster under load, one fault after the other, then the verdict."""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from backstay.errors import BackstayError
from tests.chaos.checkpoints import Checkpoints
from tests.chaos.cluster import ChaosCluster, NotYet, Plan
from tests.chaos.deck import possible
from tests.chaos.faults import Arena, Fault
from tests.chaos.history import History, Shape
from tests.chaos.network import Loopback, Namespaces
from tests.chaos.report import Struck
from tests.chaos.sandbox import is_inside
from tests.chaos.verdict import Verdict, judge, judge_checkpoints
from tests.chaos.workload import Workload

__all__ = ["FOLDER_PREFIX", "Stage", "StageResult", "calm", "say", "strike", "under_load"]

FOLDER_PREFIX = "backstay-chaos-"
CALM_S = 1.0
ACKNOWLEDGED_LIMIT_S = 60.0
FLUSH_LIMIT_S = 150.0
TOLD_LIMIT_S = 30.0

Maker = Callable[[Arena], Fault]


@dataclass(frozen=True)
class Stage:
    """One cluster with its load, and what happens to it.

    Attributes:
        plan: The cluster.
        seed: Of everything that is drawn.
        trainers: How many.
        pause_s: A trainer's pause after each push.
        outage_s: How long the store stays away when it is killed.
        keeps_logs: Also if it passes.
    """

    plan: Plan
    seed: int
    trainers: int = 2
    pause_s: float = 0.005
    outage_s: float = 15.0
    keeps_logs: bool = False


@dataclass
class StageResult:
    """What came of it."""

    stage: Stage
    verdict: Verdict = field(default_factory=Verdict)
    struck: list[Struck] = field(default_factory=list)
    histories: list[History] = field(default_factory=list)
    # What did not come right in time, in words; empty if all did.
    stuck: str = ""
    kept: str = ""

    @property
    def passed(self) -> bool:
        """Whether nothing was lost or doubled, and nothing got stuck."""
        return self.verdict.verdict == "true" and not self.stuck

    @property
    def faults(self) -> dict[str, int]:
        """How many faults of each kind there were."""
        return dict(sorted(Counter(one.kind for one in self.struck).items()))


@contextmanager
def under_load(stage: Stage, result: StageResult) -> Iterator[Arena]:
    """Start a cluster and its trainers; at the end, let all come to rest and judge.

    What gets stuck is written into the result rather than raised, so that there is a verdict on
    what was acknowledged until then. The logs are kept if the stage did not pass.
    """
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
    network = Namespaces() if is_inside() else Loopback()
    cluster = ChaosCluster(stage.plan, network, folder)
    workload = Workload(cluster, folder, Shape(stage.seed), stage.trainers, stage.pause_s)
    checkpoints = Checkpoints(cluster)
    arena = Arena(cluster, workload, checkpoints, random.Random(stage.seed), stage.outage_s)
    try:
        cluster.start()
        checkpoints.slow_down()
        workload.start()
        try:
            yield arena
            calm(arena)
        # A process that does not start, a cluster that does not answer.
        except (NotYet, RuntimeError, TimeoutError, BackstayError) as error:
            result.stuck = f"{type(error).__name__}: {error}"
            say(f"STUCK: {result.stuck}")
        _finish(arena, result, folder)
    finally:
        workload.kill()
        cluster.stop()
        network.close()
        if result.passed and not stage.keeps_logs:
            shutil.rmtree(folder)
        else:
            result.kept = str(folder)


def calm(arena: Arena) -> None:
    """Wait until each slot has all its copies and trainers go on.

    Raises:
        NotYet: It did not come to that.
    """
    arena.struck.clear()
    arena.cluster.wait_in_sync()
    arena.workload.wait_acknowledged(time.monotonic_ns(), ACKNOWLEDGED_LIMIT_S)


def strike(arena: Arena, fault: Fault, *, hold_s: float | None = None) -> Struck:
    """Bring a fault about, hold it, end it, and wait until all is whole again.

    Raises:
        NotYet: Trainers or copies did not come back in time.
    """
    fault.strike(arena)
    at_ns = fault.struck_ns or time.monotonic_ns()
    hold_until_s = time.monotonic() + (fault.hold_s if hold_s is None else hold_s)
    time.sleep(max(0.0, hold_until_s - time.monotonic()))
    fault.undo(arena)
    undone_ns = time.monotonic_ns()
    failover_ms = arena.workload.wait_acknowledged(at_ns, ACKNOWLEDGED_LIMIT_S)
    heal_ms = arena.workload.wait_acknowledged(undone_ns, ACKNOWLEDGED_LIMIT_S)
    calm(arena)
    whole_ns = time.monotonic_ns()
    say(
        f"{fault.kind}, {fault.what}: trainers go on after {failover_ms:.0f} ms, once it is over "
        f"after {heal_ms:.0f} ms; whole after {(whole_ns - undone_ns) / 1e9:.1f} s"
    )
    return Struck(fault.kind, at_ns, undone_ns, whole_ns, failover_ms, heal_ms)


def run_each(stage: Stage, makers: Sequence[Maker]) -> StageResult:
    """Let given faults strike, one after the other."""
    result = StageResult(stage)
    with under_load(stage, result) as arena:
        for make in makers:
            time.sleep(CALM_S)
            result.struck.append(strike(arena, make(arena)))
    return result


def run_restart(stage: Stage, *, clean: bool) -> StageResult:
    """Stop or kill all nodes at once and start them again, while trainers push.

    Rows live in memory, so they are gone. What must hold: every trainer is told, none goes on
    as if nothing had been, no client is served before the loss is accepted, and then the cluster
    works for clients that begin anew. The verdict is on these.
    """
    result = StageResult(stage)
    with under_load(stage, result) as arena:
        cluster, workload = arena.cluster, arena.workload
        generation = cluster.routing().generation
        for node in cluster.nodes:
            if clean:
                node.terminate()
            else:
                node.kill()
        say("every node is " + ("told to stop" if clean else "killed"))
        for node in cluster.nodes:
            if clean:
                node.wait()
        for node in cluster.nodes:
            node.start()
        for node in cluster.nodes:
            node.wait_ready()
        cluster.accept_loss()
        cluster.wait_in_sync()
        if cluster.routing().generation <= generation:
            raise NotYet("rows are gone, but the generation is as before")
        told = workload.wait_told(TOLD_LIMIT_S)
        say(f"{told} trainers were told that their rows are gone; others begin")
        workload.begin_anew()
    return result


def run_stage(stage: Stage, seconds: float, makers: Sequence[Maker] | None = None) -> StageResult:
    """Let faults strike for some time, every kind once before any comes again."""
    result = StageResult(stage)
    say(f"{stage.plan.store}, {stage.plan.nodes} nodes, {stage.plan.replicas} copies")
    with under_load(stage, result) as arena:
        deadline_s = time.monotonic() + seconds
        bag: list[Maker] = []
        while time.monotonic() < deadline_s:
            time.sleep(CALM_S)
            if not bag:
                bag = list(makers or possible(arena))
                arena.draw.shuffle(bag)
            result.struck.append(strike(arena, bag.pop()(arena)))
    return result


def say(text: str) -> None:
    """Tell how the run goes, on standard error: standard output is for the result."""
    sys.stderr.write(f"{time.monotonic() - _BEGUN_S:7.1f} s  {text}\n")
    sys.stderr.flush()


_BEGUN_S = time.monotonic()


def _finish(arena: Arena, result: StageResult, folder: Path) -> None:
    """End the load and judge."""
    cluster, workload = arena.cluster, arena.workload
    if result.stuck:
        _mend(arena)
    codes = workload.stop(FLUSH_LIMIT_S)
    if any(codes):
        tails = "; ".join(trainer.log_tail(500) for trainer in workload.trainers)
        result.stuck = result.stuck or f"trainers ended with {codes}: {tails}"
    table = copies = None
    try:
        cluster.wait_in_sync()
        table = workload.final_table()
        copies = cluster.copies()
    except (NotYet, BackstayError) as error:
        result.stuck = result.stuck or str(error)
    result.histories = workload.histories()
    lost = [str(history.stream) for history in result.histories if history.state_lost]
    if lost:
        result.stuck = result.stuck or f"streams {', '.join(lost)} were told that rows are lost"
    result.verdict = judge(
        result.histories, table, workload.slot_of_key(), copies, cluster.plan.replicas
    )
    _judge_checkpoints(arena, result, folder)
    say(f"verdict {result.verdict.verdict}, {result.verdict.acknowledged} pushes acknowledged")
    for why in result.verdict.why:
        say(f"  {why}")


def _judge_checkpoints(arena: Arena, result: StageResult, folder: Path) -> None:
    """Judge what was saved, if anything was."""
    checkpoints = arena.checkpoints
    restored = None
    try:
        restored = checkpoints.restored(arena.workload.shape.universe, folder)
    except BackstayError as error:
        result.stuck = result.stuck or f"the last checkpoint cannot be restored: {error}"
    judge_checkpoints(result.verdict, result.histories, checkpoints.complaints(), restored)
    result.verdict.checkpoints = len(checkpoints.saved)
    if checkpoints.saved or checkpoints.failed:
        say(f"{len(checkpoints.saved)} checkpoints, {len(checkpoints.failed)} failed attempts")


def _mend(arena: Arena) -> None:
    """End every fault that a stuck stage has left."""
    cluster, workload = arena.cluster, arena.workload
    for host in [*cluster.hosts, *workload.hosts]:
        cluster.network.heal(host)
    cluster.cut_off.clear()
    members = cluster.etcd.members if cluster.etcd is not None else []
    for process in [*members, *cluster.nodes, *workload.trainers]:
        if process.is_running and process.paused:
            process.resume()
    for process in [*members, *cluster.nodes]:
        if not process.is_running:
            process.start()
