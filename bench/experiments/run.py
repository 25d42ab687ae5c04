"""The command line of the experiments: ``python -m bench.experiments`` from the repository root.

Starts a Kubernetes cluster on this machine, runs what was asked for, takes everything down, and
prints the targets with what was measured. The last line is ``EXPERIMENTS {json}``. Progress goes to
standard error. Exit code 0 says that everything asked for could be measured, not that targets are
met.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from kubernetes.client import ApiException
from urllib3.exceptions import HTTPError

from bench.experiments.beside_nginx import NginxSizes, beside_nginx
from bench.experiments.faults import FaultSizes, with_faults
from bench.experiments.gangs import GangSizes, two_jobs
from bench.experiments.nginx import nginx_image
from bench.experiments.outcome import TARGETS, Outcome, document, table
from bench.experiments.place import Place, a_place, stops_as_interrupts
from bench.experiments.plot import svg
from bench.experiments.waiting import Failed
from bench.experiments.worker_counts import CountSizes, changing_workers
from bench.programs import REPOSITORY, describe_machine
from tests.kubernetes.build import CannotRun
from tests.kubernetes.cluster import ClusterError

Experiment = Callable[[Place, Path, int], Outcome]

PLOTS = REPOSITORY / "docs" / "experiments"
QUICK_PLOTS = REPOSITORY / ".bench" / "experiments"


class Sizes(NamedTuple):
    """How large each experiment is."""

    gangs: GangSizes = GangSizes()
    nginx: NginxSizes = NginxSizes()
    counts: CountSizes = CountSizes()
    faults: FaultSizes = FaultSizes()

    @classmethod
    def quick(cls) -> Sizes:
        """Return what takes a few minutes in all."""
        return cls(
            GangSizes(passes=1, pause_s=0.4),
            NginxSizes(run_s=90.0, period_s=60.0),
            CountSizes(seeds=1, passes=1, evaluations=3, every_s=6.0, pause_s=0.5),
            FaultSizes(passes=1, pause_s=0.5, every_s=10.0, for_s=40.0),
        )

    def experiments(self) -> dict[int, Experiment]:
        """Return each experiment by its number."""
        return {
            1: lambda place, folder, seed: two_jobs(place, folder, self.gangs, seed),
            2: lambda place, folder, seed: beside_nginx(place, folder, self.nginx, seed),
            3: lambda place, folder, seed: changing_workers(place, folder, self.counts, seed),
            4: lambda place, folder, seed: with_faults(place, folder, self.faults, seed),
        }


def parse_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.experiments",
        description="Run the experiments of docs/experiments.md on a Kubernetes of this machine.",
        epilog="example: python -m bench.experiments --only 1 --quick",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--only", nargs="+", type=int, choices=sorted(TARGETS), default=sorted(TARGETS), metavar="N"
    )
    parser.add_argument("--quick", action="store_true", help="minutes: only a smoke test")
    parser.add_argument("--seed", type=int, default=1, help="of everything that is drawn")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured there")
    parser.add_argument(
        "--plots", type=Path, metavar="FOLDER", help="of the SVG files (docs/experiments)"
    )
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(words)
    plots = arguments.plots or (QUICK_PLOTS if arguments.quick else PLOTS)
    begun_s = time.monotonic()

    def tell(text: str) -> None:
        print(f"{time.monotonic() - begun_s:6.0f} s  {text}", file=sys.stderr, flush=True)

    outcomes: dict[int, Outcome] = {}
    failures: list[str] = []
    sizes = Sizes.quick() if arguments.quick else Sizes()
    try:
        with stops_as_interrupts():
            run_all(sizes, arguments.only, arguments.seed, tell, outcomes, failures)
    except KeyboardInterrupt:
        failures.append("interrupted")
    except (CannotRun, ClusterError, OSError, subprocess.SubprocessError) as error:
        failures.append(str(error))
    report(arguments, outcomes, failures, plots)
    return 1 if failures else 0


def run_all(
    sizes: Sizes,
    numbers: Sequence[int],
    seed: int,
    tell: Callable[[str], None],
    outcomes: dict[int, Outcome],
    failures: list[str],
) -> None:
    """Run the experiments in turn on one cluster; one that fails is told, and the next begins."""
    experiments = sizes.experiments()
    with (
        TemporaryDirectory(prefix="experiments-") as folder,
        a_place(tell, lambda: [nginx_image()] if 2 in numbers else []) as place,
    ):
        # Pods mount folders below it as another user.
        Path(folder).chmod(0o755)
        for number in numbers:
            try:
                outcomes[number] = experiments[number](place, Path(folder, str(number)), seed)
            except (Failed, AssertionError, ApiException, HTTPError, OSError) as error:
                failures.append(f"experiment {number}: {error}")
                tell(failures[-1])


def report(
    arguments: argparse.Namespace,
    outcomes: dict[int, Outcome],
    failures: Sequence[str],
    plots: Path,
) -> None:
    """Print the table, and write plots and the JSON document."""
    machine = describe_machine()
    print(f"\nMachine: {machine}")
    if arguments.quick:
        print("A quick run: the programs work; its figures and verdicts mean nothing.")
    print(f"\n{table(outcomes, arguments.only)}\n")
    for failure in failures:
        print(f"Not measured: {failure}")
    plots.mkdir(parents=True, exist_ok=True)
    for outcome in outcomes.values():
        for one in outcome.plots:
            path = plots / f"{one.name}.svg"
            path.write_text(svg(one.title, one.x, one.y, one.lines, one.y_from), encoding="utf-8")
            print(f"plot: {path}")
    if arguments.json is not None:
        text = document(
            outcomes, machine, quick=arguments.quick, seed=arguments.seed, failures=failures
        )
        arguments.json.write_text(text, encoding="utf-8")
    figures = {name: value for one in outcomes.values() for name, value in one.figures.items()}
    print("EXPERIMENTS " + json.dumps({k: float(f"{v:.5g}") for k, v in figures.items()}))
