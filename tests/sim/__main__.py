"""``python -m tests.sim``: run many seeds, or trace one. The last line is ``SIM {json}``."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from tests.sim.cluster import Outcome, simulate

# Seeds between two lines on stderr.
PROGRESS_EVERY = 1000
# Objects between two looks for cycles: most of a run's objects live as long as it does.
GARBAGE_THRESHOLD = 500_000

# Flags that make a seed another run.
WAYS = (
    *("jobs", "restores", "inexact", "cuts", "tasks"),
    *("deletes", "lifetimes", "stale", "crowded"),
)


def main() -> int:
    """Run the command line."""
    arguments = _arguments()
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    began = time.monotonic()
    outcomes: list[Outcome] = []
    ways = {
        "job": arguments.jobs,
        "checkpoints": arguments.restores,
        "inexact": arguments.inexact,
        "cuts": arguments.cuts,
        "tasks": arguments.tasks,
        "deletes": arguments.deletes,
        "lifetimes": arguments.lifetimes,
        "stale": arguments.stale,
        "crowded": arguments.crowded,
    }
    flags = "".join(f" --{name}" for name in WAYS if getattr(arguments, name))
    with ProcessPoolExecutor(arguments.processes, initializer=_prepare) as pool:
        alone = arguments.trace or len(seeds) == 1
        if alone:
            runs: Iterable[Outcome] = (
                simulate(seed, trace=arguments.trace, **ways) for seed in seeds
            )
        else:
            runs = pool.map(partial(simulate, **ways), seeds, chunksize=10)
        for outcome in runs:
            outcomes.append(outcome)
            if len(outcomes) % PROGRESS_EVERY == 0:
                rate = len(outcomes) / (time.monotonic() - began)
                print(
                    f"{len(outcomes)} of {len(seeds)} seeds, {rate:.1f} a second", file=sys.stderr
                )
            if outcome.failure:
                print(f"seed {outcome.seed}: {outcome.failure}")
                again = f"make sim SEEDS=1 FIRST_SEED={outcome.seed} TRACE=1"
                if flags:
                    again = f"python -m tests.sim --seeds 1 --first-seed {outcome.seed} --trace"
                print(f"    {again}{flags}", flush=True)
    counts: Counter[str] = Counter()
    for outcome in outcomes:
        counts.update(outcome.counts)
    failures = [outcome.seed for outcome in outcomes if outcome.failure]
    summary = {
        "seeds": len(outcomes),
        "pushes": sum(outcome.pushes for outcome in outcomes),
        "reads": sum(outcome.reads for outcome in outcomes),
        "faults": {
            name.removeprefix("fault_"): count
            for name, count in sorted(counts.items())
            if name.startswith("fault_")
        },
        "counts": {
            name: count for name, count in sorted(counts.items()) if not name.startswith("fault_")
        },
        "failures": failures,
        "seconds": round(time.monotonic() - began, 1),
    }
    print("SIM " + json.dumps(summary))
    return 1 if failures else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many (1000)")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--trace", action="store_true", help="tell everything that happens")
    parser.add_argument("--jobs", action="store_true", help="with a job whose masters die")
    parser.add_argument("--restores", action="store_true", help="with checkpoints and restores")
    parser.add_argument(
        "--inexact", action="store_true", help="with --jobs --restores: of some slots, too"
    )
    parser.add_argument(
        "--cuts",
        action="store_true",
        help="with --jobs --restores: checkpoints take time, and passes are cut short",
    )
    parser.add_argument("--tasks", action="store_true", help="with tasks whose master never dies")
    parser.add_argument(
        "--lifetimes", action="store_true", help="with rows that expire, and scores that decay"
    )
    parser.add_argument(
        "--stale", action="store_true", help="with tables that make up for stale gradients"
    )
    parser.add_argument(
        "--crowded", action="store_true", help="with a table that has more keys than room"
    )
    parser.add_argument("--deletes", action="store_true", help="with rows that trainers delete")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    return parser.parse_args()


def _prepare() -> None:
    gc.set_threshold(GARBAGE_THRESHOLD)
    # A job master tells of each task that comes back.
    logging.disable(logging.ERROR)


if __name__ == "__main__":
    sys.exit(main())
