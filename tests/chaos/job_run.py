"""Runs of the suite's jobs: one after the other on one cluster, faults from a seeded deck.

Each job takes some faults and is then let run to its end; the next one goes on with the deck.
"""

from __future__ import annotations

import itertools
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from backstay.errors import BackstayError
from tests.chaos.cluster import ChaosCluster, NotYet, Plan
from tests.chaos.job_faults import JOB_FAULTS, JobArena, JobFault, JobOver
from tests.chaos.jobs import END_LIMIT_S, ChaosJob, JobShape, JobVerdict, judge_job
from tests.chaos.network import Loopback, Namespaces
from tests.chaos.run import FOLDER_PREFIX, say
from tests.chaos.sandbox import is_inside

__all__ = ["JobStage", "JobWorld", "JobsResult", "run_jobs"]

# A job that begins with less time left would see no fault.
LAST_JOB_S = 15.0


@dataclass(frozen=True)
class JobStage:
    """One cluster, its jobs, and what happens to them.

    Attributes:
        plan: The cluster.
        seed: Of everything that is drawn.
        kinds: The faults, once each in this order; empty: a shuffled deck of all, again and again.
        keeps_logs: Also if it passes.
    """

    plan: Plan
    seed: int
    kinds: Sequence[str] = ()
    keeps_logs: bool = False


@dataclass
class JobsResult:
    """What came of it."""

    stage: JobStage
    jobs: list[JobVerdict] = field(default_factory=list)
    struck: list[str] = field(default_factory=list)
    stuck: str = ""
    kept: str = ""

    @property
    def passed(self) -> bool:
        """Whether every job counted each record once, and nothing got stuck."""
        return bool(self.jobs) and not self.stuck and not any(one.faults for one in self.jobs)

    def figures(self) -> dict[str, object]:
        """Return what the last line tells."""
        return {
            "seed": self.stage.seed,
            "jobs": len(self.jobs),
            "faults": dict(sorted(Counter(self.struck).items())),
            "records_counted": sum(one.records * one.passes for one in self.jobs),
            "completions_first": sum(one.first_told for one in self.jobs),
            "completions_late": sum(one.not_first for one in self.jobs),
            "master_starts": sum(one.master_starts for one in self.jobs),
            "restores": sum(one.restores for one in self.jobs),
            "wrong": {one.job: one.faults for one in self.jobs if one.faults},
            "stuck": self.stuck,
            "kept": self.kept,
            "verdict": "true" if self.passed else "false",
        }


class JobWorld:
    """What all jobs of a run share, and how one of them runs there."""

    faults: Mapping[str, type[JobFault]] = JOB_FAULTS
    faults_of_a_job = 5
    is_right = "each record counts once"

    def __init__(self, stage: JobStage, folder: Path) -> None:
        self.stage = stage
        self.folder = folder
        self.network = Namespaces() if is_inside() else Loopback()
        self.cluster = ChaosCluster(stage.plan, self.network, folder)
        self.draw = random.Random(stage.seed)

    def start(self) -> None:
        self.cluster.start()

    def stop(self) -> None:
        self.cluster.stop()
        self.network.close()

    def deck(self) -> list[str]:
        """Return the kinds of faults that are drawn, each as often as before any comes again."""
        has_etcd = self.stage.plan.store == "etcd"
        return [name for name, kind in JOB_FAULTS.items() if has_etcd or not kind.needs_etcd]

    def run_job(self, number: int, strike_all: Callable[[JobArena], None]) -> JobVerdict:
        """Run one job to its end, while faults strike it, and judge it."""
        shape = JobShape(f"job-{number}", number)
        job = ChaosJob(self.cluster, self.folder / shape.name, shape)
        try:
            job.start()
            job.wait_going_on()
            strike_all(JobArena(self.cluster, job, self.draw))
            job.slow(False)
            job.wait(END_LIMIT_S)
            return judge_job(job)
        finally:
            job.close()

    def fits(self, kind: type[JobFault]) -> bool:
        """Whether a fault can strike here."""
        return True


def run_jobs(
    stage: JobStage, seconds: float, kind_of_world: Callable[[Path], JobWorld] | None = None
) -> JobsResult:
    """Run jobs for about so long, or, with chosen faults, until all have struck."""
    result = JobsResult(stage)
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
    world = kind_of_world(folder) if kind_of_world else JobWorld(stage, folder)
    try:
        world.start()
        _run_deck(world, time.monotonic() + seconds, result)
    except (NotYet, RuntimeError, TimeoutError, BackstayError) as error:
        result.stuck = f"{type(error).__name__}: {error}"
        say(f"STUCK: {result.stuck}")
    finally:
        world.stop()
        if result.passed and not stage.keeps_logs:
            shutil.rmtree(folder)
        else:
            result.kept = str(folder)
    return result


def _run_deck(world: JobWorld, until_s: float, result: JobsResult) -> None:
    """Run one job after the other until the time or the chosen faults are over."""
    chosen = world.stage.kinds
    deck = iter(chosen) if chosen else _shuffled(world)
    limit_s = float("inf") if chosen else until_s
    for number in itertools.count():
        kinds = list(itertools.islice(deck, world.faults_of_a_job))
        is_late = number > 0 and time.monotonic() > limit_s - LAST_JOB_S
        if not kinds or is_late:
            return

        def strike_all(arena: JobArena, kinds: Sequence[str] = kinds) -> None:
            for kind in kinds:
                if arena.job.is_over or time.monotonic() > limit_s:
                    return
                if not world.fits(world.faults[kind]):
                    continue
                try:
                    _strike(arena, world.faults[kind](arena))
                except JobOver as over:
                    say(f"{kind}: {over}")
                    return
                result.struck.append(kind)

        verdict = world.run_job(number, strike_all)
        result.jobs.append(verdict)
        say(f"{verdict.job}: {'; '.join(verdict.faults) or world.is_right}")
        if not result.passed:
            return


def _strike(arena: JobArena, fault: JobFault) -> None:
    """Bring a fault about, hold it, end it, and wait until the job goes on.

    Raises:
        NotYet: It does not.
        JobOver: It ended before the fault had struck.
    """
    # Somewhere in a task, not just after one.
    time.sleep(arena.draw.uniform(0.0, 0.3))
    fault.strike(arena)
    begun_s = time.monotonic()
    time.sleep(fault.hold_s)
    fault.undo(arena)
    arena.job.wait_going_on()
    say(f"{fault.kind}, {fault.what}: the job goes on {time.monotonic() - begun_s:.1f} s later")


def _shuffled(world: JobWorld) -> Iterator[str]:
    """Yield all kinds in a random order, before any comes again."""
    kinds = world.deck()
    while True:
        world.draw.shuffle(kinds)
        yield from kinds
