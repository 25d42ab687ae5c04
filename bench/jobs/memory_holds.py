"""Whether memory holds: three trainers push twice as many distinct keys as fit, for minutes.

Two servers have two copies of each row. First the trainers push to a tenth of the keys that fit:
that is normal. Then they draw from twice as many as fit, until the end; the second half of that is
steady. Printed are the resident memory of each server over its limit (highest, and of the steady
part), the p99 of a push over the normal one, pushes that were refused, and servers that were
killed. ``--half`` gives the second server half of the memory. The table has a capacity that is
never reached, so memory decides which rows go; with ``--plain`` it has none, and pushes with new
rows are refused.

Usage: ``python -m bench.jobs.memory_holds --minutes 10 [--half] [--plain]``. It reads /proc.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np

from backstay.config import ClientConfig
from backstay.errors import MemoryLimitReached, OutcomeUnknown
from backstay.pserver.client.inspection import ClusterInspection
from backstay.pserver.local_cluster import LocalCluster
from backstay.tables import Adagrad, Capacity, Lifetime, TableSpec
from backstay.trainer import Client
from bench.jobs.local import print_result, result_of, running_job
from bench.jobs.memory import DIM, SPREAD_MULTIPLIER, memory_bytes
from bench.jobs.pushes import ROW_BYTES

TRAINERS = 3
SERVERS = 2
SAMPLE_PAUSE_S = 0.2
# Of the normal part: its rows are new at first.
WARM_UP_S = 5.0
# What a row takes beside its payload: its place in the index, and room in its slab.
ROW_FACTOR = 1.2
# What a process takes without rows, about.
PROCESS_BYTES = 110 << 20
PULL_EVERY = 10


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--normal-s", type=float, default=30.0)
    parser.add_argument("--limit-mib", type=int, default=1024)
    parser.add_argument("--half", action="store_true", help="the second server has half of it")
    parser.add_argument("--plain", action="store_true", help="a table without a capacity")
    parser.add_argument("--keys-per-push", type=int, default=8192)
    parser.add_argument("--trainer", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--endpoint", help=argparse.SUPPRESS)
    parser.add_argument("--keys", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def table_spec(is_plain: bool) -> TableSpec:
    lifetime = None if is_plain else Lifetime(capacity=Capacity(rows=10**12))
    return TableSpec.sparse(
        "embedding", DIM, optimizer=Adagrad(learning_rate=0.1), lifetime=lifetime
    )


def percentile_s(times: list[float], share: float) -> float:
    return float(np.quantile(times, share)) if times else 0.0


def train(arguments: argparse.Namespace) -> None:
    """Push until the time is over, and print the times: normal, on the way, steady."""
    generator = np.random.default_rng(arguments.trainer)
    gradients = np.full((arguments.keys_per_push, DIM), 1e-3, np.float32)
    times: dict[str, list[float]] = {"normal": [], "on_the_way": [], "steady": []}
    refused = 0
    began = time.monotonic()
    over_s = arguments.normal_s + 60 * arguments.minutes
    with Client(arguments.endpoint, config=ClientConfig(deadline_ms=120_000)) as client:
        table = client.create_table(table_spec(arguments.plain))
        number = 0
        while (age_s := time.monotonic() - began) < over_s:
            is_normal = age_s < arguments.normal_s
            drawn_from = arguments.keys // 20 if is_normal else arguments.keys
            keys = generator.integers(0, drawn_from, arguments.keys_per_push, dtype=np.uint64)
            keys *= SPREAD_MULTIPLIER
            if number % PULL_EVERY == 0:
                client.pull(table, keys)
            number += 1
            before = time.monotonic()
            try:
                client.push(table, keys, gradients)
            except (MemoryLimitReached, OutcomeUnknown):
                # One server may have its part and the other one refuse.
                refused += 1
            took = time.monotonic() - before
            if is_normal:
                if age_s > WARM_UP_S:
                    times["normal"].append(took)
            elif age_s < arguments.normal_s + 30 * arguments.minutes:
                times["on_the_way"].append(took)
            else:
                times["steady"].append(took)
    print(json.dumps({"refused": refused, "times": times}))
    sys.stdout.flush()


class Sample(NamedTuple):
    """The resident bytes of the servers at a moment; None for one that is gone."""

    at_s: float
    resident: list[int | None]


def sample(cluster: LocalCluster, began: float) -> Sample:
    resident: list[int | None] = []
    for server in cluster.servers:
        try:
            resident.append(memory_bytes(server.pid)["VmRSS"])
        except (OSError, KeyError):
            resident.append(None)
    return Sample(time.monotonic() - began, resident)


def figures_of(samples: list[Sample], limits: list[int], steady_from_s: float) -> dict[str, float]:
    """Resident memory over the limit, server by server."""
    figures: dict[str, float] = {}
    for index, limit in enumerate(limits):
        seen = [(one.at_s, one.resident[index]) for one in samples]
        alive = [(at, size / limit) for at, size in seen if size is not None]
        steady = [share for at, share in alive if at >= steady_from_s]
        figures[f"ps-{index}_highest_over_limit"] = max(share for _, share in alive)
        if steady:
            figures[f"ps-{index}_steady_over_limit"] = statistics.median(steady)
            figures[f"ps-{index}_steady_lowest_over_limit"] = min(steady)
            figures[f"ps-{index}_steady_highest_over_limit"] = max(steady)
    return figures


def trained(parts: list[dict[str, Any]]) -> dict[str, float]:
    """Times of all trainers together."""
    times = {
        name: [took for part in parts for took in part["times"][name]]
        for name in ("normal", "on_the_way", "steady")
    }
    p99 = {name: percentile_s(took, 0.99) for name, took in times.items()}
    figures: dict[str, float] = {f"push_p99_ms_{name}": 1e3 * took for name, took in p99.items()}
    figures |= {f"pushes_{name}": len(took) for name, took in times.items()}
    figures["refused"] = sum(part["refused"] for part in parts)
    if p99["normal"] > 0:
        figures["push_p99_over_normal"] = p99["steady"] / p99["normal"]
        figures["push_p99_over_normal_on_the_way"] = p99["on_the_way"] / p99["normal"]
    return figures


def memory_parts(cluster: LocalCluster) -> dict[str, Any]:
    """What each server says of its memory at the end, and of rows that went."""
    with ClusterInspection(",".join(cluster.endpoints), cluster.client_config()) as asked:
        nodes = asked.status()["nodes"]
    return {
        node["node_id"]: {**node["stats"]["memory"], "evicted": node["stats"]["rows_evicted"]}
        for node in nodes
        if node["stats"] is not None
    }


def main() -> None:
    arguments = parse_arguments()
    if arguments.trainer is not None:
        train(arguments)
        return
    limits = [arguments.limit_mib << 20] * SERVERS
    if arguments.half:
        limits[1] //= 2
    fit = int((min(limits) - PROCESS_BYTES) / (ROW_FACTOR * ROW_BYTES))
    given = [f"--{name}={getattr(arguments, name.replace('-', '_'))}" for name in
             ("minutes", "normal-s", "keys-per-push")]  # fmt: skip
    given += ["--plain"] if arguments.plain else []
    settings_of = {index: {"memory_limit_bytes": one} for index, one in enumerate(limits)}
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(SERVERS, settings_of=settings_of))
        began = time.monotonic()
        trainers = [
            stack.enter_context(
                running_job(
                    "memory_holds", f"--trainer={number}", f"--endpoint={cluster.endpoints[0]}",
                    f"--keys={2 * fit}", *given,
                )
            )
            for number in range(TRAINERS)
        ]  # fmt: skip
        samples: list[Sample] = []
        # What trainers print at their end does not fit into a pipe: they wait to be read then.
        over_s = arguments.normal_s + 60 * arguments.minutes
        while time.monotonic() - began < over_s and all(one.poll() is None for one in trainers):
            samples.append(sample(cluster, began))
            time.sleep(SAMPLE_PAUSE_S)
        killed = sum(not server.is_running for server in cluster.servers)
        parts = [result_of(one) for one in trainers]
        steady_from_s = arguments.normal_s + 30 * arguments.minutes
        figures = figures_of(samples, limits, steady_from_s) | trained(parts)
        figures |= {"killed": killed, "keys": 2 * fit, "fit": fit}
        told = memory_parts(cluster) if not killed else {}
    print_result(figures | {"memory": told})


if __name__ == "__main__":
    main()
