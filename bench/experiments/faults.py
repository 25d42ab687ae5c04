"""Experiment 4: something of the job is killed, or a node drained, every ten seconds.

The same job without faults comes first: its time and its AUC are what the other is held against.
The etcd is not killed: it stands for one that is operated as a service. Two copies of each row bear
the loss of one server at a time, so a server is killed only while all of them are ready; else a
worker is.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from kubernetes.client import ApiException
from urllib3.exceptions import HTTPError

from backstay.kubernetes.published_status import PublishedStatus
from bench.experiments.job import TrainingJob
from bench.experiments.job_files import JobShape
from bench.experiments.outcome import Figure, Outcome, auc_curve, longest_pause
from bench.experiments.place import Place
from bench.experiments.plan import Fault, faults_of
from bench.experiments.plot import Line
from bench.experiments.waiting import Failed
from tests.kubernetes.cluster import ClusterError
from tests.kubernetes.job_parts import ETCD
from tests.kubernetes.namespace import is_ready

__all__ = ["FaultSizes", "with_faults"]

WORKERS = 4
PSERVERS = 2
LIMIT_S = 2400.0
JOIN_LIMIT_S = 180.0
SPARED = f"app!={ETCD}"
ROLES = {"worker": "worker", "pserver": "pserver", "master": "job-master"}


class FaultSizes(NamedTuple):
    """How long the job is, and how often something happens."""

    passes: int = 5
    pause_s: float = 0.9
    every_s: float = 10.0
    for_s: float = 600.0


@dataclass(frozen=True)
class Run:
    """How one run of the job went."""

    took_s: float
    auc: float
    counted_once: bool
    examples: tuple[tuple[float, float], ...]
    faults: tuple[tuple[float, str, str], ...]
    went_back: int


def with_faults(place: Place, folder: Path, sizes: FaultSizes, seed: int) -> Outcome:
    """Train without faults, then with them.

    Raises:
        Failed: A job did not end well.
    """
    calm = _train(place, folder / "calm", sizes, seed, hurt=False)
    place.tell(f"4: without faults: {calm.took_s:.0f} s, AUC {calm.auc:.4f}")
    hurt = _train(place, folder / "hurt", sizes, seed, hurt=True)
    place.tell(f"4: {len(hurt.faults)} faults: {hurt.took_s:.0f} s, AUC {hurt.auc:.4f}")
    lines = (
        Line("without faults", calm.examples, dashed=True),
        Line("with faults", hurt.examples),
    )
    return Outcome(
        {
            "counted_once": float(calm.counted_once and hurt.counted_once),
            "auc_difference": abs(hurt.auc - calm.auc),
            "time_over_calm": hurt.took_s / calm.took_s,
        },
        {
            "calm_s": calm.took_s,
            "with_faults_s": hurt.took_s,
            "auc": {"calm": calm.auc, "with_faults": hurt.auc},
            "faults": hurt.faults,
            "longest_pause_after_s": _pauses(hurt),
            "longest_pause_calm_s": longest_pause(calm.examples),
            "went_back_to_a_checkpoint": hurt.went_back,
        },
        (
            Figure(
                "faults", "Examples, with a fault every ten seconds", "seconds", "examples", lines
            ),
        ),
    )


class _Faults:
    """Does what the plan says, from a thread, while its ``with`` block runs."""

    def __init__(
        self, place: Place, job: TrainingJob, sizes: FaultSizes, seed: int, begun_s: float
    ) -> None:
        self.done: list[tuple[float, str, str]] = []
        self._begun_s = begun_s
        self._place = place
        self._job = job
        self._plan = faults_of(seed, every_s=sizes.every_s, for_s=sizes.for_s)
        self._drawn = random.Random(seed)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="faults", daemon=True)

    def __enter__(self) -> _Faults:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        # After an error the cluster goes down, whatever is drained.
        self._thread.join(JOIN_LIMIT_S if error is None else 0)

    def _run(self) -> None:
        for at_s, fault in self._plan:
            left_s = self._begun_s + at_s - time.monotonic()
            # A drain can take longer than until the next fault, which then comes at once.
            if self._ended.wait(max(left_s, 0)):
                return
            now_s = time.monotonic() - self._begun_s
            try:
                hit = self._hit(fault)
            except (ApiException, HTTPError, OSError, ClusterError) as error:
                hit = f"not done: {error}"[:200]
            self.done.append((round(now_s, 1), fault, hit))
            self._place.tell(f"4: {now_s:.0f} s: {fault}: {hit}")

    def _hit(self, fault: Fault) -> str:
        """Return what was hit."""
        if fault == "drain":
            return self._drain(self._drawn.choice(sorted(self._place.nodes())))
        if fault == "pserver" and sum(map(is_ready, self._job.pods("pserver"))) < PSERVERS:
            fault = "worker"
        there = [one.metadata.name for one in self._job.pods(ROLES[fault])]
        if not there:
            return "nothing is there"
        name = str(self._drawn.choice(there))
        self._job.delete(name)
        return name

    def _drain(self, node: str) -> str:
        try:
            self._place.cluster.drain(node, pods=SPARED)
        finally:
            self._place.cluster.uncordon(node)
        return node


def _train(place: Place, folder: Path, sizes: FaultSizes, seed: int, *, hurt: bool) -> Run:
    shape = JobShape(
        name="faults",
        workers=WORKERS,
        workers_max=WORKERS,
        passes=sizes.passes,
        pause_s=sizes.pause_s,
        # Two batches: a kill undoes little.
        records_per_task=128,
        # Its end is evaluated, and each pass saved.
        saves=True,
        seed=seed,
    )
    examples: list[tuple[float, float]] = []
    with place.room() as room:
        job = TrainingJob(place, room, folder, shape)
        try:
            begun_s = time.monotonic()
            job.submit()
            faults = _Faults(place, job, sizes, seed, begun_s)

            def look(published: PublishedStatus) -> None:
                if published.status is not None:
                    count = float(published.status.examples)
                    examples.append((round(time.monotonic() - begun_s, 2), count))

            if hurt:
                with faults:
                    ended = job.wait_for_end(LIMIT_S, look)
            else:
                ended = job.wait_for_end(LIMIT_S, look)
            took_s = time.monotonic() - begun_s
        finally:
            job.close()
    return _run_of(ended, took_s, examples, faults)


def _run_of(
    ended: PublishedStatus, took_s: float, examples: list[tuple[float, float]], faults: _Faults
) -> Run:
    status = ended.status
    curve = auc_curve([] if status is None else list(status.evaluations))
    if not curve:
        raise Failed("the job has told no AUC")
    assert status is not None
    counted = ended.audit is not None and ended.audit.get("records_counted_once") is True
    return Run(
        took_s, curve[-1][1], counted, tuple(examples), tuple(faults.done), int(status.went_back)
    )


def _pauses(run: Run) -> dict[str, list[float]]:
    """Return how long no examples were counted after each fault, until the next, by its kind."""
    found: dict[str, list[float]] = {}
    times = [at_s for at_s, _, _ in run.faults]
    for (at_s, fault, _), until_s in zip(run.faults, [*times[1:], run.took_s], strict=False):
        between = [one for one in run.examples if at_s <= one[0] < until_s]
        found.setdefault(fault, []).append(round(longest_pause(between), 1))
    return found
