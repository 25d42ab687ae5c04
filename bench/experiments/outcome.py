"""What experiments found: samples -> figures, figures -> verdicts, tables and documents.

Values in, values out. Imports ``bench.figures``, which has targets and verdicts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from bench.experiments.plot import Line
from bench.figures import Spread, Target, verdict

__all__ = [
    "TARGETS",
    "Figure",
    "Outcome",
    "auc_curve",
    "document",
    "gave_way_and_came_back",
    "longest_pause",
    "share_in_use",
    "spread_of_ends",
    "table",
]


@dataclass(frozen=True)
class Figure:
    """A plot that belongs to an outcome."""

    name: str
    title: str
    x: str
    y: str
    lines: tuple[Line, ...]
    y_from: float | None = 0.0


@dataclass(frozen=True)
class Outcome:
    """What one experiment found.

    Attributes:
        figures: By name; those that are not measured are missing.
        details: Whatever explains them, for the JSON document.
        plots: Drawn into docs/.
    """

    figures: Mapping[str, float]
    details: Mapping[str, Any] = field(default_factory=dict)
    plots: tuple[Figure, ...] = ()


TARGETS: dict[int, tuple[Target, ...]] = {
    1: (
        Target(
            "elastic_over_gangs", "two jobs, elastic over one after the other", 0.73, at_most=True
        ),
        Target("second_job_wait_s", "seconds until the second job trains", 10.0, at_most=True),
    ),
    2: (
        Target("cpu_in_use", "CPU in use over what can be given, beside NGINX", 0.9),
        Target("nginx_failed", "requests of NGINX that failed", 0.0, at_most=True),
        Target("gave_way_and_came_back", "training gave way and came back (1: yes)", 1.0),
    ),
    3: (Target("auc_spread", "AUC at the end, most less least, worst seed", 0.002, at_most=True),),
    4: (
        Target("counted_once", "records counted once (1: yes)", 1.0),
        Target("auc_difference", "AUC at the end, with faults and without", 0.002, at_most=True),
        Target("time_over_calm", "time with faults over without", 1.5, at_most=True),
    ),
}


def longest_pause(samples: Sequence[tuple[float, float]]) -> float:
    """Return the longest time in which a count did not grow, between two of its changes.

    Args:
        samples: Time and count, in order of time.
    """
    longest, since_s, last = 0.0, None, None
    for at_s, count in samples:
        if last is None or count > last:
            if since_s is not None:
                longest = max(longest, at_s - since_s)
            since_s, last = at_s, count
    return longest


def share_in_use(samples: Sequence[tuple[float, float]], can_give: float) -> float:
    """Return the mean over time of what was in use, over what can be given.

    Args:
        samples: Time and use, in order of time; each holds until the next.
        can_give: In the unit of the use.

    Raises:
        ValueError: There are fewer than two samples, or no time lies between them.
    """
    spanned_s = samples[-1][0] - samples[0][0] if len(samples) > 1 else 0.0
    if spanned_s <= 0:
        raise ValueError("a mean over time needs two samples at two times")
    area = sum(use * (after_s - at_s) for (at_s, use), (after_s, _) in pairwise(samples))
    return area / spanned_s / can_give


def gave_way_and_came_back(workers: Sequence[float]) -> bool:
    """Whether the number of workers fell from a height, and reached that height again."""
    top = max(workers, default=0)
    if top == 0:
        return False
    first = workers.index(top)
    fall = next((i for i in range(first, len(workers)) if workers[i] < top), None)
    return fall is not None and top in workers[fall:]


def auc_curve(evaluations: Sequence[Any]) -> tuple[tuple[float, float], ...]:
    """Return AUC by steps, from the evaluations of a job's status, in order of steps."""
    found = {one.steps: one.metrics["auc"] for one in evaluations if "auc" in one.metrics}
    return tuple((float(steps), float(auc)) for steps, auc in sorted(found.items()))


def spread_of_ends(curves: Mapping[str, Sequence[tuple[float, float]]]) -> float:
    """Return the greatest last value of the curves, less the least."""
    ends = [curve[-1][1] for curve in curves.values()]
    return max(ends) - min(ends)


def table(outcomes: Mapping[int, Outcome], numbers: Sequence[int]) -> str:
    """Return targets, figures and verdicts of these experiments as a Markdown table."""
    rows = [("", "what", "figure", "asked", "measured", "verdict")]
    for number in numbers:
        found = outcomes[number].figures if number in outcomes else {}
        for target in TARGETS[number]:
            value = found.get(target.name)
            spread = None if value is None else Spread(value, value, value, 1)
            shown = "not measured" if value is None else f"{value:.4g}"
            rows.append(
                (
                    str(number),
                    target.what,
                    f"`{target.name}`",
                    target.bound_text(),
                    shown,
                    verdict(target, spread),
                )
            )
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "| " + " | ".join(["---"] * 6) + " |", *lines[1:]])


def document(
    outcomes: Mapping[int, Outcome],
    machine: str,
    *,
    quick: bool,
    seed: int,
    failures: Sequence[str],
) -> str:
    """Return everything measured as JSON."""
    found = {
        str(number): {"figures": dict(one.figures), "details": dict(one.details)}
        for number, one in outcomes.items()
    }
    head = {"machine": machine, "quick": quick, "seed": seed, "failures": list(failures)}
    return json.dumps({**head, "experiments": found}, indent=1) + "\n"
