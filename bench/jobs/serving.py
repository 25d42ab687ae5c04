"""How long until a follower sees a push, and how fast it looks rows up.

Two servers export every second to a folder, a follower in a process of its own takes it up, and
trainers push as in the other jobs. Another client pushes to a key of its own every 20 ms; for each
push the time counts from its acknowledgement until a lookup in the follower has it (lookups come
every millisecond). Then, with nothing else going on, the follower's table is looked up in batches
by one thread: rows a second.

Usage: ``python -m bench.jobs.serving [--seconds 30] [--trainers 1] [--keys 1000000]``
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from backstay import rpc
from backstay.checkpoint import remote_exports
from backstay.config import SecurityConfig
from backstay.job_spec import ExportsSpec
from backstay.pserver.local_cluster import LocalCluster
from backstay.serving import Follower
from backstay.tables import SGD, TableSpec, Zeros
from backstay.trainer import Client
from bench.jobs.local import print_result, result_of, running_job

PROBE = "probe"
PROBE_PAUSE_S = 0.02
LOOK_PAUSE_S = 0.001
WARM_UP_S = 5.0
LOOKUP_BATCH = 8192
LOOKUP_S = 5.0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=1.0)
    parser.add_argument("--trainers", type=int, default=1, help="that push besides; 0: none")
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--keys-per-step", type=int, default=53_248)
    parser.add_argument("--copies", type=int, default=2)
    parser.add_argument("--follow", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def follow(folder: str) -> None:
    """Print when each value of the probe was seen first, until a line comes; then look rows up."""
    with Follower(folder, wait_s=60.0) as follower:
        print("READY", flush=True)
        stop = threading.Event()

        def stop_at_a_line() -> None:
            sys.stdin.readline()
            stop.set()

        threading.Thread(target=stop_at_a_line, daemon=True).start()
        probe, key = follower.table(PROBE), np.zeros(1, np.uint64)
        seen, newest, ages = [], 0, []
        while not stop.is_set():
            value = int(probe.lookup(key)[0, 0])
            if value > newest:
                seen.append((value, time.monotonic()))
                ages.append(follower.status.age_s)
                newest = value
            time.sleep(LOOK_PAUSE_S)
        figures = {"seen": seen, "age_max_s": max(ages, default=0.0)}
        print_result({**figures, **lookups(follower)})


def lookups(follower: Follower) -> dict[str, float]:
    """Return how many rows one thread looks up in a second, in the largest table."""
    table = max((follower.table(one.name) for one in follower.sparse), key=len)
    keys, _ = table.to_numpy()
    generator = np.random.default_rng(0)
    batches = [generator.choice(keys, LOOKUP_BATCH) for _ in range(16)]
    rows, begun = 0, time.monotonic()
    while (took_s := time.monotonic() - begun) < LOOKUP_S:
        for batch in batches:
            table.lookup(batch)
            rows += len(batch)
    return {
        "rows": len(keys),
        "dim": table.dim,
        "lookups_per_s": rows / took_s,
        "bytes_over_payload": follower.status.bytes / (len(keys) * (8 + 4 * table.dim)),
    }


def pushed(client: Client, seconds: float) -> list[tuple[int, float]]:
    """Push 1, 2, 3 ... to the probe; return each with when it was acknowledged."""
    told: list[tuple[int, float]] = []
    end_s = time.monotonic() + seconds
    key, one = np.zeros(1, np.uint64), np.full((1, 1), -1.0, np.float32)
    while time.monotonic() < end_s:
        client.push(PROBE, key, one)
        told.append((len(told) + 1, time.monotonic()))
        time.sleep(PROBE_PAUSE_S)
    return told


def delays(told: list[tuple[int, float]], seen: list[tuple[int, float]]) -> np.ndarray[Any, Any]:
    """Return the seconds from acknowledgement to lookup of each push that was seen."""
    values = np.array([value for value, _ in seen])
    times = np.array([at for _, at in seen])
    found = []
    for value, acknowledged in told:
        place = int(np.searchsorted(values, value))
        if place < len(values):
            found.append(max(times[place] - acknowledged, 0.0))
    return np.array(found)


def start_export(endpoint: str, folder: Path, every_s: float) -> None:
    with rpc.open_channel(endpoint, SecurityConfig()) as channel, rpc.mapped_errors(endpoint):
        spec = ExportsSpec(url=str(folder), every_s=every_s, tables=("*",))
        remote_exports.start(channel, "bench", spec, timeout_s=10.0)


def main() -> None:
    arguments = parse_arguments()
    if arguments.follow:
        follow(arguments.follow)
        return
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="backstay-bench-")))
        settings = {"replicas": arguments.copies}
        cluster = stack.enter_context(LocalCluster(2, settings=settings))
        client = stack.enter_context(Client(cluster.endpoints))
        client.create_table(TableSpec.sparse(PROBE, dim=1, optimizer=SGD(1.0), initializer=Zeros()))
        client.push(PROBE, np.arange(1, 100), np.ones((99, 1), np.float32))
        load_s = 2 * WARM_UP_S + arguments.seconds
        job = [
            *("--seconds", str(load_s), "--keys", str(arguments.keys)),
            *("--keys-per-step", str(arguments.keys_per_step)),
            *("--endpoint", ",".join(cluster.endpoints)),
        ]
        trainers = [
            stack.enter_context(running_job("sparse_step", *job, "--seed", str(number)))
            for number in range(arguments.trainers)
        ]
        time.sleep(WARM_UP_S)
        start_export(cluster.endpoints[0], folder, arguments.every)
        follower = stack.enter_context(running_job("serving", "--follow", str(folder)))
        assert follower.stdout is not None
        assert follower.stdin is not None
        follower.stdout.readline()
        told = pushed(client, arguments.seconds)
        steps = [result_of(trainer)["mean_keys_per_s"] for trainer in trainers]
        # What was pushed last is seen, too.
        time.sleep(3 * arguments.every)
        seen = result_of_follower(follower)
        waited = delays(told, seen.pop("seen"))
        print_result(
            {
                "delay_p50_s": float(np.quantile(waited, 0.5)),
                "delay_p99_s": float(np.quantile(waited, 0.99)),
                "pushes": len(told),
                "seen": len(waited),
                "keys_per_s": sum(steps),
                **seen,
            }
        )


def result_of_follower(follower: Any) -> dict[str, Any]:
    """Tell the follower to end, and return what it says."""
    output, _ = follower.communicate("end\n")
    lines = [line for line in output.splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError(f"the follower ended with {follower.returncode}: {output!r}")
    result: dict[str, Any] = json.loads(lines[-1])
    return result


if __name__ == "__main__":
    main()
