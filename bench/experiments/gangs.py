"""Experiment 1: two jobs, each with 13 of the cluster's 24 parts: as gangs, and elastic.

As gangs the second begins when the first has left the cluster: together they have no room. Elastic,
the second comes soon after the first and takes what is free, then the rest.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

from kubernetes.client import V1Pod

from bench.experiments.job import TrainingJob
from bench.experiments.job_files import JobShape
from bench.experiments.outcome import Figure, Outcome
from bench.experiments.place import Place
from bench.experiments.plan import Shares
from bench.experiments.plot import Line
from bench.experiments.sampling import PodSampler
from bench.experiments.waiting import LOOK_PAUSE_S, Failed

__all__ = ["GangSizes", "two_jobs"]

# Of the seed: the second job came 30 s after the first, which took 395 s.
DELAY = 30 / 395
LIMIT_S = 900.0
GONE_LIMIT_S = 120.0
FIRST_BATCH_LIMIT_S = 300.0
NAMES = ("first", "second")


class GangSizes(NamedTuple):
    """How long the jobs are."""

    passes: int = 6
    pause_s: float = 0.5


def two_jobs(place: Place, folder: Path, sizes: GangSizes, seed: int) -> Outcome:
    """Measure both ways.

    Raises:
        Failed: A job did not end well.
    """
    place.tell("1: one after the other, as gangs")
    gangs_s, alone_s, gang_lines = _gangs(place, folder / "gangs", sizes, seed)
    delay_s = DELAY * alone_s
    place.tell(f"1: gangs took {gangs_s:.0f} s; elastic, the second {delay_s:.0f} s later")
    elastic_s, wait_s, lines, details = _elastic(place, folder / "elastic", sizes, seed, delay_s)
    place.tell(f"1: elastic took {elastic_s:.0f} s; the second job waited {wait_s:.1f} s")
    x, y = "seconds", "CPUs of running Pods"
    return Outcome(
        {"elastic_over_gangs": elastic_s / gangs_s, "second_job_wait_s": wait_s},
        {
            "gangs_s": gangs_s,
            "elastic_s": elastic_s,
            "first_job_alone_s": alone_s,
            "second_job_after_s": delay_s,
            **details,
        },
        (
            Figure("gangs", "Two jobs, one after the other as gangs", x, y, gang_lines),
            Figure("elastic", "Two jobs, elastic", x, y, lines),
        ),
    )


def shape(name: str, shares: Shares, sizes: GangSizes, seed: int) -> JobShape:
    """Return a job that asks for 13 parts."""
    return JobShape(
        name=name,
        workers=shares.workers,
        workers_max=shares.workers,
        passes=sizes.passes,
        pause_s=sizes.pause_s,
        # Two batches: the end of a pass keeps nobody waiting for long.
        records_per_task=128,
        seed=seed,
        requests={
            "master": {"cpu": shares.small},
            "pserver": {"cpu": shares.small},
            "worker": {"cpu": shares.large},
        },
    )


def _gangs(
    place: Place, folder: Path, sizes: GangSizes, seed: int
) -> tuple[float, float, tuple[Line, ...]]:
    """Return the seconds of both, those of the first, and who had how much CPU."""
    with place.room() as room, PodSampler(room.namespace.name, _job_of) as sampler:
        begun_s = time.monotonic()
        alone_s = 0.0
        for name in NAMES:
            job = TrainingJob(place, room, folder, shape(name, place.shares, sizes, seed))
            try:
                job.submit()
                job.wait_for_end(LIMIT_S)
                alone_s = alone_s or time.monotonic() - begun_s
                if name != NAMES[-1]:
                    job.wait_until_gone(GONE_LIMIT_S)
            finally:
                job.close()
        return time.monotonic() - begun_s, alone_s, _lines(sampler)


def _elastic(
    place: Place, folder: Path, sizes: GangSizes, seed: int, delay_s: float
) -> tuple[float, float, tuple[Line, ...], dict[str, Any]]:
    """Return the seconds of both, those until the second trained, CPU, and what explains it."""
    with place.room() as room, PodSampler(room.namespace.name, _job_of) as sampler:
        first, second = (
            TrainingJob(place, room, folder, shape(name, place.shares, sizes, seed))
            for name in NAMES
        )
        try:
            begun_s = time.monotonic()
            first.submit()
            time.sleep(max(begun_s + delay_s - time.monotonic(), 0))
            second.submit()
            wait_s = _until_first_batch(second)
            timeline = second.timeline()
            first.wait_for_end(LIMIT_S)
            second.wait_for_end(LIMIT_S)
            took_s = time.monotonic() - begun_s
        finally:
            first.close()
            second.close()
        return took_s, wait_s, _lines(sampler), {"second_job_timeline_s": timeline}


def _until_first_batch(job: TrainingJob) -> float:
    """Return the seconds from the command to the first batch of a worker."""
    deadline_s = time.monotonic() + FIRST_BATCH_LIMIT_S
    while (at_s := job.first_batch_s()) is None:
        if time.monotonic() > deadline_s:
            raise Failed(
                f"no worker of {job.shape.name} trains after {FIRST_BATCH_LIMIT_S:.0f} s; "
                f"so far, in seconds: {job.timeline()}"
            )
        time.sleep(LOOK_PAUSE_S)
    return at_s - job.submitted_s


def _job_of(pod: V1Pod) -> str:
    name = str((pod.metadata.labels or {}).get("app.kubernetes.io/instance", ""))
    return name.removeprefix("backstay-")


def _lines(sampler: PodSampler) -> tuple[Line, ...]:
    both = Line("both", sampler.series(*NAMES), steps=True, dashed=True)
    return (*(Line(name, sampler.series(name), steps=True) for name in NAMES), both)
