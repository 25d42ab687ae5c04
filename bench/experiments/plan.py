"""What an experiment will do, decided before it begins: shares of CPU, load, faults, counts.

Values in, values out: nothing here reads a clock, starts anything or draws without a seed. Imports
the standard library only.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Literal

__all__ = [
    "FAULTS",
    "Fault",
    "LoadCurve",
    "Shares",
    "faults_of",
    "replicas_for",
    "shares_of",
    "worker_counts",
]

Fault = Literal["worker", "pserver", "master", "drain"]
# How often each is drawn, beside the others.
FAULTS: dict[Fault, int] = {"worker": 4, "pserver": 3, "master": 2, "drain": 1}
# The seed's cluster has 24 CPUs, and a job asks for 13 of them.
PARTS = 24


@dataclass(frozen=True)
class Shares:
    """The cluster's CPU in 24 equal parts, and what each Pod asks for.

    A job is a job master and two pservers of one part each, and five workers of two parts each: 13
    parts.
    """

    part_m: int
    """Thousandths of a CPU."""
    pservers: int = 2
    workers: int = 5

    @property
    def small(self) -> str:
        """What a job master or a pserver asks for, as Kubernetes writes it."""
        return f"{self.part_m}m"

    @property
    def large(self) -> str:
        """What a worker, or an NGINX, asks for."""
        return f"{2 * self.part_m}m"

    @property
    def job_parts(self) -> int:
        """What a whole job asks for."""
        return 1 + self.pservers + 2 * self.workers


def shares_of(nodes_m: list[int]) -> Shares:
    """Divide the CPU of nodes of equal size, so that each node has the same whole parts.

    Args:
        nodes_m: What each node can give, in thousandths of a CPU.

    Raises:
        ValueError: There are no nodes, or 24 is no multiple of their number.
    """
    if not nodes_m or PARTS % len(nodes_m):
        raise ValueError(f"{len(nodes_m)} nodes cannot share {PARTS} parts")
    return Shares(min(nodes_m) * len(nodes_m) // PARTS)


@dataclass(frozen=True)
class LoadCurve:
    """Requests a second over time: a hill for each period, from the least to the most."""

    least: float
    most: float
    period_s: float

    def rate(self, at_s: float) -> float:
        """Return the requests a second at this time."""
        height = (1 - math.cos(2 * math.pi * at_s / self.period_s)) / 2
        return self.least + (self.most - self.least) * height


def replicas_for(rate: float, *, per_replica: float, now: int, least: int, most: int) -> int:
    """Return how many NGINX there should be, by the rule of Kubernetes' own autoscaler.

    Within a tenth of what fits the number stays, so it does not go up and down at a border.
    """
    used = rate / (per_replica * now) if now else math.inf
    if abs(used - 1) <= 0.1:
        return now
    return min(max(math.ceil(rate / per_replica), least), most)


def faults_of(seed: int, *, every_s: float, for_s: float) -> list[tuple[float, Fault]]:
    """Return when something is killed, and what, the first time after ``every_s``."""
    drawn = random.Random(seed)
    kinds, weights = list(FAULTS), list(FAULTS.values())
    count = int(for_s / every_s)
    return [((number + 1) * every_s, drawn.choices(kinds, weights)[0]) for number in range(count)]


def worker_counts(
    seed: int, *, least: int, most: int, every_s: float, for_s: float
) -> list[tuple[float, int]]:
    """Return when there shall be how many workers; each number differs from the one before."""
    drawn = random.Random(seed)
    counts = [drawn.randint(least, most)]
    while len(counts) < int(for_s / every_s):
        counts.append(drawn.choice([n for n in range(least, most + 1) if n != counts[-1]]))
    return [(number * every_s, count) for number, count in enumerate(counts)]
