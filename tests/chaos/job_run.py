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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from backstay.errors import BackstayError
from tests.chaos.cluster import ChaosCluster, NotYet, Plan
from tests.chaos.job_faults import JOB_FAULTS, JobArena, JobFault, JobOver
from tests.chaos.jobs import END_LIMIT_S, ChaosJob, JobShape, JobVerdict, judge_job
from tests.chaos.network import Loopback, Namespaces
from tests.chaos.run import FOLDER_PREFIX, say
from tests.chaos.sandbox import is_inside

__all__ = ["LAST_JOB_S", "JobStage", "JobsResult", "run_jobs", "strike", "take"]

FAULTS_OF_A_JOB = 5
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


def run_jobs(stage: JobStage, seconds: float) -> JobsResult:
    """Run jobs for about so long, or, with chosen faults, until all have struck."""
    result = JobsResult(stage)
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
    network = Namespaces() if is_inside() else Loopback()
    cluster = ChaosCluster(stage.plan, network, folder)
    draw = random.Random(stage.seed)
    deck = iter(stage.kinds) if stage.kinds else _deck(draw, stage.plan)
    until_s = time.monotonic() + seconds
    try:
        cluster.start()
        for number in range(1000):
            makers = take(deck, FAULTS_OF_A_JOB)
            is_late = time.monotonic() > until_s - LAST_JOB_S
            if not makers or (number and not stage.kinds and is_late):
                break
            limit_s = float("inf") if stage.kinds else until_s
            _run_job(cluster, folder, number, draw, makers, limit_s, result)
            if not result.passed:
                break
    except (NotYet, RuntimeError, TimeoutError, BackstayError) as error:
        result.stuck = f"{type(error).__name__}: {error}"
        say(f"STUCK: {result.stuck}")
    finally:
        cluster.stop()
        network.close()
        if result.passed and not stage.keeps_logs:
            shutil.rmtree(folder)
        else:
            result.kept = str(folder)
    return result


def _run_job(
    cluster: ChaosCluster,
    folder: Path,
    number: int,
    draw: random.Random,
    kinds: Sequence[str],
    until_s: float,
    result: JobsResult,
) -> None:
    """Run one job to its end, while faults strike it, and judge it."""
    job = ChaosJob(cluster, folder / f"job-{number}", JobShape(f"job-{number}", number))
    arena = JobArena(cluster, job, draw)
    try:
        job.start()
        job.wait_going_on()
        for kind in kinds:
            if job.is_over or time.monotonic() > until_s:
                break
            try:
                strike(arena, JOB_FAULTS[kind](arena))
            except JobOver as over:
                say(f"{kind}: {over}")
                break
            result.struck.append(kind)
        job.slow(False)
        job.wait(END_LIMIT_S)
        verdict = judge_job(job)
        result.jobs.append(verdict)
        say(f"{job.shape.name}: {'; '.join(verdict.faults) or 'each record counts once'}")
    finally:
        job.close()


def strike(arena: JobArena, fault: JobFault) -> None:
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


def _deck(draw: random.Random, plan: Plan) -> Iterator[str]:
    """Yield all kinds in a random order, before any comes again."""
    kinds = [
        name for name, kind in JOB_FAULTS.items() if plan.store == "etcd" or not kind.needs_etcd
    ]
    while True:
        draw.shuffle(kinds)
        yield from kinds


def take(deck: Iterator[str], count: int) -> list[str]:
    return list(itertools.islice(deck, count))
