"""What servers need: processor time for each key of a step, and memory for each row.

A step pulls rows and pushes their gradients, with Adagrad, as an embedding of a model does. The
processor time is that of all server processes, divided by the keys of the steps. The servers' own
work is in it (leases, reports, records), a trainer on the same machine is not. Memory is the growth
of the resident set over the rows. Keys of a step are distinct, as after the client has summed
gradients by key.

Prints a table, and the figures as JSON. Reads /proc: Linux only.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from backstay.pserver.local_cluster import LocalCluster
from backstay.tables import Adagrad, TableSpec
from backstay.trainer import Client, Table
from bench.jobs.local import BATCHES, print_result
from bench.jobs.memory import memory_bytes, spread_keys

FILL_KEYS = 100_000
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
WARM_UP_STEPS = 2 * BATCHES


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--dims", type=int, nargs="+", default=[8, 16, 64])
    parser.add_argument("--copies", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--keys-per-step", type=int, nargs="+", default=[3_328, 53_248])
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    return parser.parse_args()


def processor_s(pids: Sequence[int]) -> float:
    """The processor time of some processes until now."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split() for pid in pids]
    return sum(int(one[11]) + int(one[12]) for one in fields) / TICKS_PER_S


def grown_bytes(client: Client, table: Table, pids: Sequence[int], rows: int) -> int:
    """Fill a table; return by how much the largest server grew."""
    before = [memory_bytes(pid)["VmRSS"] for pid in pids]
    for first in range(0, rows, FILL_KEYS):
        keys = spread_keys(first, min(first + FILL_KEYS, rows))
        client.push(table, keys, np.ones((len(keys), table.dim), np.float32))
    return max(memory_bytes(pid)["VmRSS"] - was for pid, was in zip(pids, before, strict=True))


def rates(
    client: Client, table: Table, pids: Sequence[int], keys_per_step: int, rows: int, seconds: float
) -> dict[str, float]:
    """Take steps; return the servers' processor time for a key, and how many keys a second."""
    generator = np.random.default_rng(keys_per_step)
    every = spread_keys(0, rows)
    batches = [every[generator.choice(rows, keys_per_step, False)] for _ in range(BATCHES)]
    gradients = np.full((keys_per_step, table.dim), 1e-3, np.float32)

    def steps(go_on: Callable[[int], bool]) -> int:
        done = 0
        while go_on(done):
            batch = client.prepare(batches[done % BATCHES])
            client.pull(table, batch)
            client.push(table, batch, gradients)
            done += 1
        return done * keys_per_step

    steps(lambda done: done < WARM_UP_STEPS)
    begun_s, used_s = time.perf_counter(), processor_s(pids)
    keys = steps(lambda _: time.perf_counter() - begun_s < seconds)
    return {
        "server_us_per_key": (processor_s(pids) - used_s) / keys * 1e6,
        "keys_per_s": keys / (time.perf_counter() - begun_s),
    }


def measure(dim: int, copies: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Start as many servers as copies, and measure steps of each size."""
    rows = arguments.rows
    spec = TableSpec.sparse("embedding", dim, optimizer=Adagrad(learning_rate=0.01))
    with (
        LocalCluster(servers=copies, settings={"replicas": copies}) as cluster,
        Client(cluster.endpoints[0]) as client,
    ):
        table = client.create_table(spec)
        row_bytes = grown_bytes(client, table, cluster.pids, rows) / rows
        # Weights and Adagrad's state, float32, and the key.
        memory = {"bytes_per_row": row_bytes, "over_payload": row_bytes / (2 * 4 * dim + 8)}
        return [
            {"dim": dim, "copies": copies, "keys_per_step": keys_per_step, **memory}
            | rates(client, table, cluster.pids, keys_per_step, rows, arguments.seconds)
            for keys_per_step in arguments.keys_per_step
        ]


def main() -> None:
    arguments = parse_arguments()
    found = [
        one
        for dim in arguments.dims
        for copies in arguments.copies
        for one in measure(dim, copies, arguments)
    ]
    print("dim  copies  keys a step  server us/key  bytes/row  over payload  keys/s")
    for one in found:
        print(
            f"{one['dim']:3d}  {one['copies']:6d}  {one['keys_per_step']:11,d}  "
            f"{one['server_us_per_key']:13.3f}  {one['bytes_per_row']:9.0f}  "
            f"{one['over_payload']:12.2f}  {one['keys_per_s']:,.0f}"
        )
    print_result({"sizing": found})


if __name__ == "__main__":
    main()
