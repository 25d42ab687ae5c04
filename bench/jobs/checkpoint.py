"""What a checkpoint costs: time beside the disk's own, trainers' pushes, memory, and bytes.

One server on a table of rows of 16 float32 with Adagrad state. In this order: as many bytes
written in a row to the same folder; a full checkpoint while nothing else happens; the disk again;
an incremental one after a push to every 20th row; a full one while a trainer pushes without a
pause. A checkpoint's time is that of the call, from its begin to the manifest on the disk. Its
memory is the highest resident set of the server over that before it; the page cache is no part of
that. Reads /proc: Linux only.

Usage: ``python -m bench.jobs.checkpoint --gb 0.4``.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from backstay.checkpoint.remote import SaveKind
from backstay.pserver.local_cluster import LocalCluster
from backstay.trainer import Client, Table
from bench.jobs.disk import write_bytes_per_s
from bench.jobs.local import print_result
from bench.jobs.memory import DIM, memory_bytes, spread_keys
from bench.jobs.pushes import FILL_KEYS, ROW_BYTES, fill, pushing, rows_of, table_spec
from bench.programs import REPOSITORY

SLOTS = 1024
# 5% of the rows.
TOUCHED_EVERY = 20
P99 = 0.99


class Saved(NamedTuple):
    """A checkpoint: when it was begun and whole, its bytes, and the memory that it took."""

    begin: float
    end: float
    bytes: int
    memory: int

    @property
    def seconds(self) -> float:
        return self.end - self.begin


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--gb", type=float, default=4.0, help="weights, state and keys of all rows")
    parser.add_argument("--keys-per-push", type=int, default=3_328)
    parser.add_argument("--seconds", type=float, default=10.0, help="length of the normal part")
    parser.add_argument(
        "--folder",
        type=Path,
        default=REPOSITORY / ".bench",
        help="on the disk to measure (default: the repository's)",
    )
    return parser.parse_args()


def settings(folder: str, **more: object) -> dict[str, object]:
    return {"slot_count": SLOTS, "replicas": 1, "checkpoint_url": folder, **more}


def save(client: Client, kind: SaveKind, server: int) -> Saved:
    """Have a checkpoint written by the server with this process id."""
    # Sets the highest resident set to the present one.
    Path(f"/proc/{server}/clear_refs").write_text("5\n")
    before = memory_bytes(server)["VmRSS"]
    begin = time.monotonic()
    info = client.checkpoints.save(kind=kind)
    end = time.monotonic()
    return Saved(begin, end, info.bytes, memory_bytes(server)["VmHWM"] - before)


def touch(client: Client, table: Table, rows: int) -> None:
    """Push to 5% of the rows, evenly spread over the slots."""
    gradients = np.ones((FILL_KEYS, DIM), np.float32)
    step = FILL_KEYS * TOUCHED_EVERY
    for first in range(0, rows, step):
        keys = spread_keys(first, min(first + step, rows))[::TOUCHED_EVERY]
        client.push(table, keys, gradients[: len(keys)])


def main() -> None:
    arguments = parse_arguments()
    rows = rows_of(arguments.gb)
    state = rows * ROW_BYTES
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="checkpoint-", dir=arguments.folder) as name,
        LocalCluster(1, settings=settings(f"{name}/checkpoints")) as cluster,
        Client(cluster.endpoints) as client,
    ):
        (server,) = cluster.pids
        table = client.create_table(table_spec())
        fill(client, table, rows)
        disk = [write_bytes_per_s(Path(name), state)]
        full = save(client, "full", server)
        disk.append(write_bytes_per_s(Path(name), state))
        touch(client, table, rows)
        changed = save(client, "incremental", server)
        with pushing(cluster.endpoints, rows, arguments.keys_per_push) as times:
            begin = time.monotonic() + 1.0
            time.sleep(1.0 + arguments.seconds)
            loaded = save(client, "full", server)
        normal = (begin, loaded.begin)
        meanwhile = (loaded.begin, loaded.end)
    disk_rate = sum(disk) / len(disk)
    normal_p99 = times.percentile_s(P99, *normal)
    loaded_p99 = times.percentile_s(P99, *meanwhile)
    print_result(
        {
            "rows": rows,
            "state_gb": state / 1e9,
            "save_over_disk": full.bytes / full.seconds / disk_rate,
            "p99_over_normal": loaded_p99 / normal_p99,
            "changed_over_full": changed.bytes / full.bytes,
            "memory_over_state": max(full.memory, loaded.memory) / state,
            "disk_gb_per_s": disk_rate / 1e9,
            "disk_after_over_before": disk[1] / disk[0],
            "save_gb_per_s": full.bytes / full.seconds / 1e9,
            "save_s": full.seconds,
            "changed_s": changed.seconds,
            "loaded_save_s": loaded.seconds,
            "full_over_state": full.bytes / state,
            "normal_p99_ms": normal_p99 * 1e3,
            "loaded_p99_ms": loaded_p99 * 1e3,
            "normal_longest_ms": times.longest_s(*normal) * 1e3,
            "loaded_longest_ms": times.longest_s(*meanwhile) * 1e3,
            "pushes_over_normal": times.per_s(*meanwhile) / times.per_s(*normal),
            "memory_mb": full.memory / 1e6,
            "changed_memory_mb": changed.memory / 1e6,
            "loaded_memory_mb": loaded.memory / 1e6,
        }
    )


if __name__ == "__main__":
    main()
