"""Pull and push of one dense parameter of 64 MB, in blocks: GB/s (10^9 bytes) each way.

A push carries a whole gradient and ends when the server has applied it (SGD). Servers are
processes of their own; the trainer is this one.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

from backstay.pserver.local_cluster import LocalCluster
from backstay.tables import SGD, TableSpec
from backstay.trainer import Client
from bench.jobs.local import print_result

COLUMNS = 1024
LEARNING_RATE = 0.1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--bytes", type=int, default=64 << 20)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--servers", type=int, default=1)
    return parser.parse_args()


def median_seconds(transfer: Callable[[], object], repeats: int, warmup: int) -> float:
    seconds = []
    for number in range(warmup + repeats):
        begun = time.perf_counter()
        transfer()
        if number >= warmup:
            seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


def main() -> None:
    arguments = parse_arguments()
    shape = (arguments.bytes // 4 // COLUMNS, COLUMNS)
    values = np.zeros(shape, np.float32)
    gradient = np.ones(shape, np.float32)
    with (
        LocalCluster(servers=arguments.servers, settings={"replicas": 1}) as cluster,
        Client(cluster.endpoints[0]) as client,
    ):
        table = client.create_table(
            TableSpec.dense("weights", shape, optimizer=SGD(learning_rate=LEARNING_RATE))
        )
        client.init_dense(table, values)
        repeats, warmup = arguments.repeats, arguments.warmup
        pull = median_seconds(lambda: client.pull_dense(table), repeats, warmup)
        push = median_seconds(lambda: client.push_dense(table, gradient), repeats, warmup)
        values = client.pull_dense(table)
    expected = -LEARNING_RATE * (repeats + warmup)
    if not np.allclose(values, expected, rtol=1e-4):
        raise SystemExit(f"wrong weights after the pushes: {values.mean()}, expected {expected}")
    gigabytes = values.nbytes / 1e9
    print_result({"pull_gb_per_s": gigabytes / pull, "push_gb_per_s": gigabytes / push})


if __name__ == "__main__":
    main()
