"""What a run says of itself: figures from histories and faults. Pure but for ``print_line``."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.chaos.history import History

__all__ = ["Struck", "failover_figures", "print_line", "throughput"]

GRAIN_NS = 100_000_000


@dataclass(frozen=True)
class Struck:
    """One fault as it went.

    Attributes:
        kind: Its name.
        at_ns: When it had struck.
        undone_ns: When it had been undone.
        whole_ns: When every slot had all its copies again.
        failover_ms: From ``at_ns`` until every trainer had a push acknowledged that it had
            begun since.
        heal_ms: The same from ``undone_ns``.
    """

    kind: str
    at_ns: int
    undone_ns: int
    whole_ns: int
    failover_ms: float
    heal_ms: float


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Return count, median, 99th percentile (the nearest value above) and maximum."""
    return {
        "count": len(values),
        "p50": round(float(np.percentile(values, 50, method="higher")), 1),
        "p99": round(float(np.percentile(values, 99, method="higher")), 1),
        "max": round(max(values), 1),
    }


def failover_figures(struck: Sequence[Struck]) -> dict[str, dict[str, float]]:
    """Return the quantiles of the time to failover, by kind of fault."""
    by_kind: dict[str, list[float]] = {}
    for one in struck:
        by_kind.setdefault(one.kind, []).append(one.failover_ms)
    return {kind: quantiles(values) for kind, values in sorted(by_kind.items())}


def throughput(histories: Sequence[History], struck: Sequence[Struck]) -> dict[str, Any]:
    """Return pushes acknowledged per second before, during and after faults, by 100 ms.

    ``before`` is all that came before the first fault, ``during`` is from a fault to its undoing,
    ``repair`` from there until all is whole, ``after`` everything else behind the first fault.
    """
    ends = np.sort(
        np.array(
            [
                push.ended_ns
                for history in histories
                for push in history.pushes.values()
                if push.outcome == "acknowledged"
            ],
            dtype=np.int64,
        )
    )
    if not len(ends) or not struck:
        return {}
    edges = np.arange(ends[0], ends[-1] - GRAIN_NS, GRAIN_NS, dtype=np.int64)
    counts = np.searchsorted(ends, edges + GRAIN_NS) - np.searchsorted(ends, edges)
    phase = np.zeros(len(edges), dtype=np.int64)
    phase[edges >= struck[0].at_ns] = 3
    for one in struck:
        phase[(edges >= one.undone_ns) & (edges < one.whole_ns)] = 2
        phase[(edges + GRAIN_NS > one.at_ns) & (edges < one.undone_ns)] = 1
    figures: dict[str, Any] = {"grain_ms": GRAIN_NS // 1_000_000}
    for number, name in enumerate(("before", "during", "repair", "after")):
        here = counts[phase == number]
        if len(here):
            figures[name] = {
                "per_s": round(float(here.mean()) * 1e9 / GRAIN_NS, 1),
                "grains": len(here),
                "empty_grains": int((here == 0).sum()),
            }
    return figures


def print_line(name: str, fields: Mapping[str, object]) -> None:
    """Write the last line of a run: a name, then one JSON object."""
    sys.stdout.write(f"{name} {json.dumps(fields)}\n")
    sys.stdout.flush()
