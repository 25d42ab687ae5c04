"""Experiment 3: workers between 4 and 8 at random, against 4 and 8 throughout: the AUC over steps.

The same Wide & Deep job three times for each seed; only the number of workers differs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from backstay.kubernetes.published_status import PublishedStatus
from bench.experiments.job import TrainingJob
from bench.experiments.job_files import RECORDS, JobShape
from bench.experiments.outcome import Figure, Outcome, auc_curve, spread_of_ends
from bench.experiments.place import Place
from bench.experiments.plan import worker_counts
from bench.experiments.plot import Line
from bench.experiments.waiting import Failed

__all__ = ["CountSizes", "changing_workers"]

LEAST, MOST = 4, 8
BATCH = 64
LIMIT_S = 900.0
# Changes are drawn for longer than any run takes.
CHANGES_FOR_S = LIMIT_S
CONTESTANTS = {"4 workers": 4, "8 workers": 8, "4 to 8 at random": 0}


class CountSizes(NamedTuple):
    """How much is trained, and how often the number changes."""

    seeds: int = 3
    passes: int = 3
    evaluations: int = 12
    """In all passes."""
    every_s: float = 10.0
    pause_s: float = 0.5

    @property
    def every_steps(self) -> int:
        """Batches between two evaluations."""
        return self.passes * (RECORDS // BATCH) // self.evaluations


def changing_workers(place: Place, folder: Path, sizes: CountSizes, seed: int) -> Outcome:
    """Train with each seed in each way.

    Raises:
        Failed: A job did not end well, or its number of workers never changed.
    """
    spreads: list[float] = []
    changes: dict[str, int] = {}
    ends: dict[str, float] = {}
    lines: list[Line] = []
    for run in range(seed, seed + sizes.seeds):
        curves = {}
        for name, workers in CONTESTANTS.items():
            curve, changed = _train(place, folder / f"{run}-{workers}", sizes, run, workers)
            curves[name] = curve
            label = f"{name}, seed {run}"
            ends[label], changes[label] = curve[-1][1], changed
            lines.append(Line(label, curve, dashed=not workers))
            place.tell(f"3: {label}: AUC {curve[-1][1]:.4f}, {changed} changes")
        spreads.append(spread_of_ends(curves))
    plot = Figure(
        "worker-counts", "Wide & Deep on census: AUC over steps", "steps", "AUC", tuple(lines), None
    )
    return Outcome(
        {"auc_spread": max(spreads)},
        {"spread_of_each_seed": spreads, "auc": ends, "changes": changes},
        (plot,),
    )


def _train(
    place: Place, folder: Path, sizes: CountSizes, seed: int, workers: int
) -> tuple[tuple[tuple[float, float], ...], int]:
    """Return AUC by steps, and how often the number of workers changed; 0 workers: at random."""
    shape = JobShape(
        name="counts",
        workers=workers or LEAST,
        workers_min=LEAST,
        workers_max=MOST,
        passes=sizes.passes,
        batch_size=BATCH,
        records_per_task=4 * BATCH,
        pause_s=sizes.pause_s,
        evaluation_every_steps=sizes.every_steps,
        seed=seed,
    )
    plan = [] if workers else _plan(sizes, seed)
    with place.room() as room:
        job = TrainingJob(place, room, folder, shape)
        try:
            job.submit()
            begun_s: list[float] = []
            changed = 0

            def look(published: PublishedStatus) -> None:
                nonlocal changed
                status = published.status
                if published.over or status is None or not status.workers:
                    return
                if not begun_s:
                    begun_s.append(time.monotonic())
                if plan and plan[0][0] <= time.monotonic() - begun_s[0]:
                    changed += job.scale(plan.pop(0)[1])

            ended = job.wait_for_end(LIMIT_S, look)
        finally:
            job.close()
    if not workers and not changed:
        raise Failed("the number of workers never changed: the job is too short for every_s")
    assert ended.status is not None
    return auc_curve(list(ended.status.evaluations)), changed


def _plan(sizes: CountSizes, seed: int) -> list[tuple[float, int]]:
    drawn: Sequence[tuple[float, int]] = worker_counts(
        seed, least=LEAST, most=MOST, every_s=sizes.every_s, for_s=CHANGES_FOR_S
    )
    return list(drawn)
