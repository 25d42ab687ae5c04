"""The runs of a program that trains many times: which are done, and what was found.

With a folder the program goes on where it was when it is called again. The clock decides only when
it begins no further run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from backstay.errors import NonFiniteGradient
from bench.jobs.local import print_result

__all__ = ["Case", "Found", "Runs", "mean_of", "measured", "report"]

RUNS_FILE = "runs.jsonl"


class Case(NamedTuple):
    """What tells one run from the others of a program."""

    job: str
    rule: str
    number: int
    seed: int


class Found(NamedTuple):
    """Of one run; all but the seconds is NaN if it diverged."""

    auc: float
    logloss: float
    megabytes: float
    seconds: float


class Runs:
    """The runs of a program that are done; with a folder also those of earlier calls."""

    def __init__(self, arguments: argparse.Namespace, setting: Sequence[object]) -> None:
        """Read what is kept of earlier runs.

        Args:
            arguments: With those of ``add_arguments``.
            setting: What else a run depends on: kept runs of other settings do not count.
        """
        self._setting = json.dumps([arguments.rates, arguments.passes, *setting])
        self._limit_s = None if arguments.limit_minutes is None else arguments.limit_minutes * 60.0
        self._file: Path | None = None
        self.found: dict[Case, Found] = {}
        if arguments.out is not None:
            arguments.out.mkdir(parents=True, exist_ok=True)
            self._file = arguments.out / RUNS_FILE
            if self._file.exists():
                self._read(self._file)

    def _read(self, path: Path) -> None:
        for line in path.read_text(encoding="utf-8").splitlines():
            kept = json.loads(line)
            if kept["setting"] == self._setting:
                self.found[Case(*kept["case"])] = Found(*kept["found"])

    def do(self, cases: Iterable[Case], measure: Callable[[Case], Found]) -> bool:
        """Run those that are missing, in order, and tell on stderr how it goes.

        Returns:
            Whether all are done; False: the time was over.
        """
        missing = [case for case in cases if case not in self.found]
        begun_s = time.monotonic()
        # The last run of each data set says how long one may take.
        lasted_s: dict[str, float] = {}
        for number, case in enumerate(missing):
            now_s = time.monotonic() - begun_s
            if self._limit_s is not None and now_s + lasted_s.get(case.job, 0.0) > self._limit_s:
                left = f"{len(missing) - number} of {len(missing)} runs are left out"
                print(f"the time is over: {left}", file=sys.stderr, flush=True)
                return False
            found = self.found[case] = measure(case)
            self._keep(case, found)
            lasted_s[case.job] = found.seconds
            print(
                f"[{number + 1}/{len(missing)}, {time.monotonic() - begun_s:.0f} s] {case.job} "
                f"{case.rule} {case.number}, seed {case.seed}: AUC {found.auc:.4f}, "
                f"{found.megabytes:.1f} MB, {found.seconds:.1f} s",
                file=sys.stderr, flush=True,
            )  # fmt: skip
        return True

    def _keep(self, case: Case, found: Found) -> None:
        if self._file is not None:
            line = json.dumps({"setting": self._setting, "case": case, "found": found})
            with self._file.open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    def seeds(self, job: str, rule: str, number: int) -> dict[int, Found]:
        """Return what was found with a rule, by seed, but for what diverged."""
        of_rule = [one for one in self.found.items() if one[0][:3] == (job, rule, number)]
        return {case.seed: found for case, found in of_rule if not np.isnan(found.auc)}

    def has(self, job: str) -> bool:
        """Return whether a run of a data set is done."""
        return any(case.job == job for case in self.found)

    def points(
        self, job: str, rule: str, numbers: Iterable[int], *, of_one: str
    ) -> tuple[tuple[float, float], ...]:
        """Return a rule's mean AUC over the numbers, as powers of two.

        Args:
            job: The data set.
            rule: The rule.
            numbers: Those of the cases.
            of_one: The rule that stands for all where the number is 1: they are the same there.
        """
        points = []
        for number in sorted(numbers):
            seeds = self.seeds(job, rule if number > 1 else of_one, number)
            if seeds:
                points.append((float(np.log2(number)), mean_of(seeds.values()).auc))
        return tuple(points)

    def count(self, job: str, rule: str, number: int) -> str:
        """Return of how many seeds that is, and how many diverged; empty: none is done."""
        done = sum(case[:3] == (job, rule, number) for case in self.found)
        good = len(self.seeds(job, rule, number))
        diverged = f" ({done - good} more diverged)" if good < done else ""
        return f"{good}{diverged}" if done else ""


def measured(run: Callable[[], tuple[float, float]], megabytes: Callable[[], float]) -> Found:
    """Train and judge, and take time and bytes; a gradient that is not finite ends the run."""
    begun_s, before = time.monotonic(), megabytes()
    try:
        judged = run()
    except NonFiniteGradient:
        return Found(np.nan, np.nan, np.nan, time.monotonic() - begun_s)
    return Found(*judged, megabytes() - before, time.monotonic() - begun_s)


def report(
    out: Path | None,
    name: str,
    lines: Sequence[str],
    plots: Mapping[str, str],
    figures: Mapping[str, float],
) -> None:
    """Print a table and its figures; with a folder, write the table and the plots there.

    Args:
        out: The folder.
        name: The files': ``name.md``, and ``name-JOB.svg``.
        lines: Of the table.
        plots: By data set.
        figures: By name.
    """
    print("\n".join(lines))
    if out is not None:
        (out / f"{name}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
        for job, drawn in plots.items():
            (out / f"{name}-{job}.svg").write_text(drawn, encoding="utf-8")
    print_result(dict(figures))


def mean_of(found: Iterable[Found]) -> Found:
    """Return the means of several runs."""
    return Found(*(float(np.mean(values)) for values in zip(*found, strict=True)))
