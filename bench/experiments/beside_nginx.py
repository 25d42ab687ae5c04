"""Experiment 2: a training job of low priority beside NGINX, which follows its own load.

NGINX has the higher priority, so Kubernetes takes workers away when NGINX needs their room. The job
asks for more workers than there is room for, so one waits for each place that NGINX gives back.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

from kubernetes.client import V1Pod

from bench.experiments.job import TrainingJob, component
from bench.experiments.job_files import JobShape
from bench.experiments.nginx import NAME, Load, Nginx
from bench.experiments.outcome import Figure, Outcome, gave_way_and_came_back, share_in_use
from bench.experiments.place import Place
from bench.experiments.plan import PARTS, LoadCurve, Shares
from bench.experiments.plot import Line
from bench.experiments.sampling import PodSampler
from bench.experiments.waiting import Failed, wait_until

__all__ = ["NginxSizes", "beside_nginx"]

LEAST, MOST = 1, 5
PER_REPLICA = 4.0
READY_LIMIT_S = 60.0
STARTED_LIMIT_S = 300.0
POLL_PAUSE_S = 0.5
TRAINING = "training"


class NginxSizes(NamedTuple):
    """How long it takes; the job is longer, and is stopped."""

    run_s: float = 600.0
    period_s: float = 200.0


def beside_nginx(place: Place, folder: Path, sizes: NginxSizes, seed: int) -> Outcome:
    """Measure over the whole run, from the time when the job's first Pods all run.

    Raises:
        Failed: NGINX or the job does not start.
    """
    shares = place.shares
    can_give = PARTS * shares.part_m / 1000
    with place.room() as room:
        nginx = Nginx(room.namespace, cpu=shares.large, priority="serving")
        address = nginx.start(LEAST)
        wait_until("NGINX", lambda: nginx.ready() == LEAST, READY_LIMIT_S)
        job = TrainingJob(place, room, folder, _shape(shares, seed))
        try:
            job.submit()
            fits = _workers_that_fit(shares)
            place.tell(f"2: NGINX serves; the job begins, {fits} workers fit beside it")
            wait_until(
                f"{fits} workers",
                lambda: sum(one.status.phase == "Running" for one in job.pods("worker")) >= fits,
                STARTED_LIMIT_S,
            )
            curve = LoadCurve(0.8 * PER_REPLICA, 0.95 * MOST * PER_REPLICA, sizes.period_s)
            load = Load(
                nginx,
                address,
                curve,
                per_replica=PER_REPLICA,
                least=LEAST,
                most=MOST,
                tell=place.tell,
            )
            with PodSampler(room.namespace.name, _group) as sampler, load:
                _watch(job, sizes.run_s)
            return _outcome(sampler, load, can_give, job)
        finally:
            job.close()


def _shape(shares: Shares, seed: int) -> JobShape:
    return JobShape(
        name="beside",
        # One more than fit without NGINX.
        workers=PARTS // 2,
        workers_max=PARTS // 2,
        passes=1000,
        pause_s=0.5,
        records_per_task=128,
        seed=seed,
        requests={
            "master": {"cpu": shares.small},
            "pserver": {"cpu": shares.small},
            "worker": {"cpu": shares.large},
        },
        # Only workers give way: the servers have the rows.
        priorities={"master": "steady", "pserver": "steady", "worker": TRAINING},
    )


def _workers_that_fit(shares: Shares) -> int:
    """Return how many workers there is room for beside the least NGINX; one may fit nowhere."""
    left = PARTS - 2 * LEAST - 1 - shares.pservers
    return left // 2 - 1


def _watch(job: TrainingJob, run_s: float) -> None:
    deadline_s = time.monotonic() + run_s
    while time.monotonic() < deadline_s:
        published = job.status()
        if published is not None and published.over:
            raise Failed(f"the job is {published.over} before the end: {published.reason}")
        time.sleep(POLL_PAUSE_S)


def _group(pod: V1Pod) -> str:
    if (pod.metadata.labels or {}).get("app") == NAME:
        return NAME
    role = component(pod)
    return "workers" if role == "worker" else TRAINING if role else ""


def _outcome(sampler: PodSampler, load: Load, can_give: float, job: TrainingJob) -> Outcome:
    both = sampler.series(NAME, "workers", TRAINING)
    workers = [used for _, used in sampler.series("workers")]
    published = job.status()
    status = None if published is None else published.status
    figures = {
        "cpu_in_use": share_in_use(both, can_give),
        "nginx_failed": float(load.failed),
        "gave_way_and_came_back": float(gave_way_and_came_back(workers)),
    }
    details = {
        "can_give_cpus": can_give,
        "requests": load.sent,
        "failures": load.failures,
        "nginx_wanted": load.wanted,
        "worker_ends": {} if published is None else dict(published.counts),
        "examples": 0 if status is None else int(status.examples),
        "workers_cpus_least_and_most": (min(workers), max(workers)),
    }
    lines = (
        Line("NGINX", sampler.series(NAME), steps=True),
        Line("training", sampler.series("workers", TRAINING), steps=True),
        Line("both", both, steps=True),
        Line("can be given", tuple((at_s, can_give) for at_s, _ in both), dashed=True),
    )
    plot = Figure("beside-nginx", "Training beside NGINX", "seconds", "CPUs of running Pods", lines)
    return Outcome(figures, details, (plot,))
