"""Resident memory of a server over the payload it holds: rows of 16 float32 with Adagrad state.

Payload of a row is its weights (64 bytes), its state (64) and its key (8). Measured is the growth
of the server process's resident set from before the first row to after the last, and its highest
value on the way, which includes the moments when maps grow.

Keys are spread over all 64 bits, and every row is pushed to, so that its state is really written.
Reads /proc: Linux only.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from backstay.pserver.local_cluster import LocalCluster
from backstay.tables import Adagrad, TableSpec
from backstay.trainer import Client
from bench.jobs.local import print_result

DIM = 16
WEIGHT_BYTES = 4
KEY_BYTES = 8
# An odd multiplier is a bijection of the 64-bit numbers: distinct keys without keeping a list.
SPREAD_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--rows-per-push", type=int, default=100_000)
    return parser.parse_args()


def memory_bytes(pid: int) -> dict[str, int]:
    """Resident set now (``VmRSS``) and at its highest (``VmHWM``) of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return {name: int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM")}


def spread_keys(first: int, last: int) -> NDArray[np.uint64]:
    return np.arange(first, last, dtype=np.uint64) * SPREAD_MULTIPLIER


def main() -> None:
    arguments = parse_arguments()
    spec = TableSpec.sparse("embedding", DIM, optimizer=Adagrad(learning_rate=0.1))
    payload = arguments.rows * (2 * DIM * WEIGHT_BYTES + KEY_BYTES)
    with LocalCluster(servers=1) as cluster, Client(cluster.endpoints[0]) as client:
        table = client.create_table(spec)
        (server,) = cluster.pids
        before = memory_bytes(server)
        begun = time.perf_counter()
        for first in range(0, arguments.rows, arguments.rows_per_push):
            keys = spread_keys(first, min(first + arguments.rows_per_push, arguments.rows))
            client.push(table, keys, np.ones((len(keys), DIM), np.float32))
        seconds = time.perf_counter() - begun
        after = memory_bytes(server)
    grown, peak = after["VmRSS"] - before["VmRSS"], after["VmHWM"] - before["VmRSS"]
    print_result(
        {
            "over_payload": grown / payload,
            "peak_over_payload": peak / payload,
            "bytes_per_row": grown / arguments.rows,
            "rows_per_s": arguments.rows / seconds,
        }
    )


if __name__ == "__main__":
    main()
