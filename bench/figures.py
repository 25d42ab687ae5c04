"""The figures of the benchmark: ratios, medians, targets and how they are shown.

Values in, values out: nothing here starts a process, reads a clock or prints. It imports the
standard library only.

A lone time says little about a program on a shared or virtual machine, so every verdict is a
ratio of two contestants measured in the same round, and its value is the median over the rounds.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = [
    "TARGETS",
    "Spread",
    "Target",
    "bench_line",
    "format_table",
    "interleave",
    "ratio",
    "spread",
    "verdict",
]

Verdict = Literal["met", "missed", "not measured"]


@dataclass(frozen=True)
class Spread:
    """The median of one figure over the rounds, with its extremes."""

    median: float
    low: float
    high: float
    rounds: int


@dataclass(frozen=True)
class Target:
    """What a figure must reach.

    Attributes:
        name: The figure's name in the JSON line.
        what: What it compares, for the table.
        bound: The least (or, with ``at_most``, the greatest) median that meets the target.
        at_most: Whether smaller is better.
    """

    name: str
    what: str
    bound: float
    at_most: bool = False

    def bound_text(self) -> str:
        return f"{'<=' if self.at_most else '>='} {self.bound:g}"


TARGETS: tuple[Target, ...] = (
    Target("sparse_53248_over_ceiling", "53,248 keys a step over the bare ceiling", 0.7),
    Target(
        "sparse_53248_overlapped_over_ceiling",
        "the same, next pull overlapped, over the sequential ceiling",
        1.0,
    ),
    Target("sparse_53248_over_paddle", "53,248 keys a step over Paddle 2.6.2", 4.0),
    Target("sparse_53248_over_tensorflow", "53,248 keys a step over TensorFlow", 1.8),
    Target("sparse_53248_two_copies_over_ceiling", "two copies, 53,248 keys a step, over it", 0.4),
    Target("sparse_53248_two_copies_over_paddle", "two copies over Paddle's one copy", 1.0),
    Target("sparse_53248_two_copies_over_tensorflow", "two copies over TensorFlow's one", 1.0),
    Target("recovery_over_normal", "trainer's rate while 1 GB is copied, over normal", 0.7),
    Target("checkpoint_over_disk", "full checkpoint of 4 GB over plain writing", 0.6),
    Target(
        "checkpoint_p99_over_normal", "push p99 during a checkpoint over without", 2.0, at_most=True
    ),
    Target(
        "checkpoint_changed_over_full",
        "incremental after 5% of the rows, bytes over full",
        0.08,
        at_most=True,
    ),
    Target(
        "checkpoint_memory_over_state", "memory of a checkpoint over the state", 0.05, at_most=True
    ),
    Target("restore_over_disk", "restore of 4 GB over plain reading", 0.5),
    Target("resize_over_normal", "trainer's rate while 2 servers become 3 and 2, over normal", 0.7),
    Target("resize_longest_push_s", "seconds of the longest push meanwhile", 0.5, at_most=True),
    Target("resize_moved_over_minimum", "bytes moved over the fewest that must", 1.1, at_most=True),
    Target(
        "controller_s",
        "seconds from the loss of one of 1,000 nodes (65,536 slots) to the new table",
        1.0,
        at_most=True,
    ),
    Target(
        "tasks_busy",
        "share of a core for the ledger of 1 M tasks of 10 s, 10,000 workers",
        0.25,
        at_most=True,
    ),
    Target("sparse_3328_over_ceiling", "3,328 keys a step over the bare ceiling", 0.5),
    Target("sparse_3328_over_paddle", "3,328 keys a step over Paddle 2.6.2", 10.0),
    Target("zipf_over_paddle", "53,248 Zipf(1.2) keys a step over Paddle 2.6.2", 4.0),
    Target("lifetime_over_none", "keys/s with last seen, shows and clicks over none", 0.85),
    Target("admission_over_none", "admission after 2, half of the keys new, over none", 0.7),
    Target("filter_over_none", "the same by a filter, over none", 0.7),
    Target("lifetime_over_paddle", "shows and clicks over Paddle's CtrCommonAccessor", 4.0),
    Target("dense_pull_over_copy", "dense pull of 64 MB over a loopback copy", 0.6),
    Target("dense_push_over_copy", "dense push of 64 MB over a loopback copy", 0.6),
    Target(
        "memory_over_payload",
        "resident memory over payload, rows of 16 with Adagrad",
        1.3,
        at_most=True,
    ),
    Target("train_1_over_plain", "DeepFM job with one worker over one plain process", 0.9),
    Target("train_2_over_1", "the job with two workers over one", 1.0),
    Target("train_tasks_1000_over_20000", "the job with tasks of 1,000 records over 20,000", 0.97),
    Target("trainers_4_over_1", "four trainers over one, one server, keys/s in all", 1.0),
    Target("servers_2_over_1", "two servers over one, one trainer, keys/s", 1.0),
)


def spread(values: Sequence[float]) -> Spread:
    """Return median, least and greatest of ``values``.

    Raises:
        ValueError: There are none.
    """
    if not values:
        raise ValueError("no values: a figure needs at least one round")
    return Spread(statistics.median(values), min(values), max(values), len(values))


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """Return the spread of the ratios of two contestants, round by round.

    The ratio is taken within a round, where both met the same machine, and only then the median:
    the ratio of two medians would mix rounds.

    Raises:
        ValueError: The rounds do not pair up, or there are none.
    """
    if len(numerators) != len(denominators):
        raise ValueError(
            f"{len(numerators)} rounds against {len(denominators)}: ratios need pairs of one round"
        )
    return spread([above / below for above, below in zip(numerators, denominators, strict=True)])


def verdict(target: Target, value: Spread | None) -> Verdict:
    """Say whether the median meets the target; None is a figure that was not measured."""
    if value is None:
        return "not measured"
    met = value.median <= target.bound if target.at_most else value.median >= target.bound
    return "met" if met else "missed"


def interleave(contestants: Sequence[str], rounds: int) -> list[list[str]]:
    """Return who runs in which round, in which order.

    Each round holds every contestant once; the order is rotated from round to round, so that no
    contestant always follows the same one (and its warm caches, or its throttled clock).
    """
    count = len(contestants)
    return [
        [contestants[(place + turn) % count] for place in range(count)] for turn in range(rounds)
    ]


def format_table(figures: Mapping[str, Spread], targets: Iterable[Target] = TARGETS) -> str:
    """Return the targets with their medians, spreads and verdicts as a Markdown table."""
    rows = [("what", "figure", "at least / at most", "median", "spread", "rounds", "verdict")]
    for target in targets:
        value = figures.get(target.name)
        measured = (
            ("-", "-", "-")
            if value is None
            else (f"{value.median:.2f}", f"{value.low:.2f} to {value.high:.2f}", str(value.rounds))
        )
        rows.append(
            (
                target.what,
                f"`{target.name}`",
                target.bound_text(),
                *measured,
                verdict(target, value),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    rule = "| " + " | ".join("-" * width for width in widths) + " |"
    return "\n".join([lines[0], rule, *lines[1:]])


def bench_line(figures: Mapping[str, Spread]) -> str:
    """Return the last line of a run: ``BENCH`` and the medians by name, as JSON."""
    medians = {name: float(f"{value.median:.5g}") for name, value in figures.items()}
    return "BENCH " + json.dumps(medians)
