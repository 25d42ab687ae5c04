"""The benchmark's command line: ``python -m bench`` from the repository root.

Runs the contestants of each group in turn, round after round, and prints the targets with their
measured ratios, then the figures as ``BENCH {json}`` on the last line. Progress goes to standard
error. Exit code 0 says that everything asked for could be measured, not that targets are met.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from bench.figures import TARGETS, Spread, bench_line, format_table, interleave, ratio, spread
from bench.groups import GROUPS, Group, Sizes
from bench.programs import (
    REPOSITORY,
    ProgramFailed,
    Unavailable,
    Workshop,
    describe_machine,
    run_program,
)

PEERS = ("paddle", "tensorflow")
# What a contestant printed, one entry a round.
Results = Mapping[str, Sequence[Mapping[str, float]]]


def parse_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Measure backstay beside the bare ceiling of this machine and its peers.",
        epilog="example: python -m bench --only sparse_53248 --no-peers --rounds 3",
        allow_abbrev=False,
    )
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS), metavar="GROUP")
    parser.add_argument("--rounds", type=int, default=5, help="of each group (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="one tiny round: only a smoke test")
    parser.add_argument("--no-peers", action="store_true", help="neither Paddle nor TensorFlow")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured there")
    arguments = parser.parse_args(words)
    if arguments.rounds < 1:
        parser.error("--rounds must be at least 1")
    return arguments


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def commands_of(
    group: Group, workshop: Workshop, sizes: Sizes, peers: bool
) -> tuple[dict[str, list[str]], list[str]]:
    """Return how to start each contestant that can be had, and why the others cannot."""
    commands: dict[str, list[str]] = {}
    missing: list[str] = []
    for name, command in group.contestants.items():
        if name in PEERS and not peers:
            continue
        try:
            commands[name] = command(workshop, sizes)
        except Unavailable as reason:
            missing.append(f"{name} is left out: {reason}")
    return commands, missing


def run_group(
    name: str, commands: Mapping[str, list[str]], rounds: int
) -> tuple[Results, list[str]]:
    """Run the contestants in turn; one that fails is left out from then on, and named."""
    results: dict[str, list[Mapping[str, float]]] = {contestant: [] for contestant in commands}
    failures: list[str] = []
    for number, order in enumerate(interleave(list(commands), rounds), start=1):
        for contestant in order:
            if contestant not in results:
                continue
            begun = time.monotonic()
            try:
                figures = run_program(commands[contestant])
            except ProgramFailed as failure:
                failures.append(f"{name}: {contestant} is left out: {failure}")
                note(failures[-1])
                del results[contestant]
                continue
            results[contestant].append(figures)
            shown = "  ".join(f"{key} {value:.4g}" for key, value in figures.items())
            took = time.monotonic() - begun
            note(f"{name} {number}/{rounds}  {contestant:<20} {shown}  ({took:.0f} s)")
    return results, failures


def figures_of(
    name: str, group: Group, results: Results
) -> tuple[dict[str, Spread], dict[str, Spread]]:
    """Return the ratios and the raw figures that the results of a group allow."""

    def column(contestant: str, key: str) -> list[float]:
        return [figures[key] for figures in results[contestant]]

    ratios: dict[str, Spread] = {}
    for wanted in group.ratios:
        if wanted.above in results and not wanted.below:
            ratios[wanted.name] = spread(column(wanted.above, wanted.field))
        elif wanted.above in results and wanted.below in results:
            ratios[wanted.name] = ratio(
                column(wanted.above, wanted.field), column(wanted.below, wanted.field)
            )
    raw = {
        f"{name}_{contestant}_{key.removeprefix('mean_')}": spread(column(contestant, key))
        for contestant, key in group.raw
        if contestant in results
    }
    return ratios, raw


def main(words: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(words)
    sizes = Sizes.quick() if arguments.quick else Sizes()
    workshop = Workshop(REPOSITORY / ".bench")
    machine = describe_machine()
    note(f"on {machine}")
    figures: dict[str, Spread] = {}
    raw_figures: dict[str, Spread] = {}
    everything: dict[str, Results] = {}
    problems: list[str] = []
    for name in arguments.only:
        group = GROUPS[name]
        commands, missing = commands_of(group, workshop, sizes, not arguments.no_peers)
        for reason in missing:
            note(f"{name}: {reason}")
        rounds = 1 if arguments.quick else min(arguments.rounds, group.most_rounds or sys.maxsize)
        results, failures = run_group(name, commands, rounds)
        ratios, raw = figures_of(name, group, results)
        figures |= ratios
        raw_figures |= raw
        everything[name] = results
        problems += missing + failures
    report(arguments, machine, figures, raw_figures, problems)
    if arguments.json is not None:
        document = {
            "machine": machine,
            "quick": arguments.quick,
            "figures": {name: asdict(value) for name, value in (figures | raw_figures).items()},
            "rounds": everything,
            "problems": problems,
        }
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")
    print(bench_line(figures | raw_figures))
    return 1 if problems else 0


def report(
    arguments: argparse.Namespace,
    machine: str,
    figures: Mapping[str, Spread],
    raw_figures: Mapping[str, Spread],
    problems: Sequence[str],
) -> None:
    """Print the tables and what could not be measured."""
    wanted = {wanted.name for name in arguments.only for wanted in GROUPS[name].ratios}
    print(f"\nMachine: {machine}")
    if arguments.quick:
        print("A quick run: the programs work; its figures and verdicts mean nothing.")
    print(f"\n{format_table(figures, [t for t in TARGETS if t.name in wanted])}\n")
    for name, value in raw_figures.items():
        print(f"{name:<52} {value.median:>12,.4g}   ({value.low:,.4g} to {value.high:,.4g})")
    for problem in problems:
        print(f"\nNot measured: {problem}")
    print()
