"""The embedding job with backstay: prepare, pull, combine, push; keys/s of one trainer.

Without ``--endpoint`` it starts its own servers and then itself as the trainer, so that servers
and trainer are processes of their own. ``--overlapped`` keeps the next batch's pull and the last
batch's push in flight while this batch computes, as a real trainer does.

With ``--lifetime`` the table's rows come and go by a policy. ``statistics`` keeps when a row was
last seen, its shows and clicks, which each push tells. ``admission`` gives a key a row with its
second occurrence; ``filter`` does so by a counting Bloom filter. ``--new-share`` makes so many of a
step's keys ones that no step had before.

With ``--hold`` the trainer says ``READY`` when warm and waits for a line on its standard input:
so several trainers start together (see scaling.py).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from backstay.pserver.local_cluster import LocalCluster
from backstay.tables import AdmitAfter, Expiry, Lifetime
from backstay.trainer import Client
from bench.jobs.local import (
    BATCHES,
    GRADIENT_SCALE,
    draw_batches,
    embedding,
    print_result,
    result_of,
    running_job,
    step_figures,
)

LIFETIMES = {
    "none": None,
    # What Paddle's CtrCommonAccessor keeps of a row. Nothing expires while the job runs.
    "statistics": Lifetime(expiry=Expiry(unseen_seconds=3600, score_below=0.01)),
    "admission": Lifetime(AdmitAfter(2)),
    "filter": Lifetime(AdmitAfter(2, filter_bytes=256 << 20)),
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--keys-per-step", type=int, default=53_248)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--zipf", type=float, default=0.0, help="Zipf exponent; 0 is uniform")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--warmup", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=0.0, help="run this long, not --steps")
    parser.add_argument("--overlapped", action="store_true")
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--copies", type=int, default=1, help="of every slot")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lifetime", choices=LIFETIMES, default="none")
    parser.add_argument("--new-share", type=float, default=0.0, help="0 to 1, of a step's keys")
    parser.add_argument("--endpoint", default="", help="train against these servers")
    parser.add_argument("--hold", action="store_true")
    return parser.parse_args()


class Trainer:
    """One trainer of the job, on one client."""

    def __init__(self, client: Client, arguments: argparse.Namespace) -> None:
        self.client = client
        lifetime = LIFETIMES[arguments.lifetime]
        self.table = client.create_table(replace(embedding(arguments.dim), lifetime=lifetime))
        self.batches = draw_batches(
            arguments.keys_per_step, arguments.keys, arguments.zipf, arguments.seed
        )
        # Told with each push, where the table keeps them: a click for each fourth show.
        self.shows: NDArray[np.float32] | None = None
        self.clicks: NDArray[np.float32] | None = None
        if arguments.lifetime == "statistics":
            self.shows = np.ones(arguments.keys_per_step, np.float32)
            self.clicks = (np.arange(arguments.keys_per_step) % 4 == 0).astype(np.float32)
        self.new_keys = int(arguments.new_share * arguments.keys_per_step)
        self.first_new_key = arguments.keys
        # Seconds of prepare, pull, combine and push of each sequential step.
        self.phases: list[tuple[float, float, float, float]] = []
        shape = (arguments.keys_per_step, arguments.dim)
        # Buffers used again and again: a fresh 3 MB array costs a page fault for every 4 KiB.
        self.rows = [np.empty(shape, np.float32) for _ in range(2)]

    def keys_of(self, number: int) -> NDArray[np.int64]:
        """Return the keys of a step: a batch that was drawn, with new keys in it if asked for."""
        keys = self.batches[number % BATCHES]
        if self.new_keys:
            keys = keys.copy()
            keys[: self.new_keys] = self.first_new_key + np.arange(self.new_keys)
            self.first_new_key += self.new_keys
        return keys

    def combine(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Turn pulled rows into gradients, in place."""
        np.subtract(rows, np.float32(1.0), out=rows)
        np.multiply(rows, np.float32(GRADIENT_SCALE), out=rows)
        return rows

    def loss(self) -> float:
        """The mean square of (row - 1) over the first batch: it falls if pushes take effect."""
        rows = self.client.pull(self.table, self.batches[0])
        return float(np.mean(np.square(rows - 1.0)))

    def run(self, go_on: Callable[[int], bool]) -> list[float]:
        """Step by step while ``go_on(steps done)``; return the seconds of each step."""
        seconds: list[float] = []
        self.phases.clear()
        while go_on(len(seconds)):
            keys = self.keys_of(len(seconds))
            begun = time.perf_counter()
            batch = self.client.prepare(keys)
            prepared = time.perf_counter()
            rows = self.client.pull(self.table, batch, out=self.rows[0])
            pulled = time.perf_counter()
            gradients = self.combine(rows)
            combined = time.perf_counter()
            self.client.push(self.table, batch, gradients, shows=self.shows, clicks=self.clicks)
            done = time.perf_counter()
            seconds.append(done - begun)
            self.phases.append(
                (prepared - begun, pulled - prepared, combined - pulled, done - combined)
            )
        return seconds

    def phase_figures(self) -> dict[str, float]:
        """Median milliseconds of each phase of a step; empty for overlapped steps."""
        names = ("prepare_ms", "pull_ms", "combine_ms", "push_ms")
        if not self.phases:
            return {}
        columns = zip(*self.phases, strict=True)
        medians = (statistics.median(column) * 1e3 for column in columns)
        return dict(zip(names, medians, strict=True))

    def run_overlapped(self, go_on: Callable[[int], bool]) -> list[float]:
        """The same with one pull ahead and one push behind; all pushes are done on return.

        The next batch's pull leaves before this batch's rows are looked at, so the servers work
        while this process spreads, combines and merges. Rows are one push older than in run().
        """
        seconds: list[float] = []
        client, table = self.client, self.table
        batch = client.prepare(self.keys_of(0))
        pull = client.pull_async(table, batch, out=self.rows[0])
        push = None
        begun = time.perf_counter()
        while go_on(len(seconds)):
            following = len(seconds) + 1
            next_batch = client.prepare(self.keys_of(following))
            next_pull = client.pull_async(table, next_batch, out=self.rows[following % 2])
            gradients = self.combine(pull.result())
            if push is not None:
                push.result()
            push = client.push_async(table, batch, gradients, shows=self.shows, clicks=self.clicks)
            batch, pull = next_batch, next_pull
            now = time.perf_counter()
            seconds.append(now - begun)
            begun = now
        pull.result()
        client.flush()
        seconds[-1] += time.perf_counter() - begun
        return seconds


def train(arguments: argparse.Namespace) -> None:
    with Client(arguments.endpoint) as client:
        trainer = Trainer(client, arguments)
        run = trainer.run_overlapped if arguments.overlapped else trainer.run
        first_loss = trainer.loss()
        run(lambda done: done < arguments.warmup)
        if arguments.hold:
            print("READY", flush=True)
            sys.stdin.readline()
        begun = time.perf_counter()
        if arguments.seconds:
            seconds = run(lambda _: time.perf_counter() < begun + arguments.seconds)
        else:
            seconds = run(lambda done: done < arguments.steps)
        total = time.perf_counter() - begun
        last_loss = trainer.loss()
    if not last_loss < first_loss:
        raise SystemExit(f"no work was done: loss {first_loss} before, {last_loss} after")
    figures = step_figures(arguments.keys_per_step, seconds, total)
    print_result({**figures, **trainer.phase_figures()})


def main() -> None:
    arguments = parse_arguments()
    if arguments.endpoint:
        train(arguments)
        return
    with (
        LocalCluster(servers=arguments.servers, settings={"replicas": arguments.copies}) as cluster,
        running_job("sparse_step", *sys.argv[1:], "--endpoint", cluster.endpoints[0]) as trainer,
    ):
        print_result(result_of(trainer))


if __name__ == "__main__":
    main()
