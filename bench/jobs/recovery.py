"""What it costs trainers that a lost replica is copied anew.

Two servers with two copies of everything and one trainer. One server is killed and started
again, empty; the other one, now the master of all slots, copies everything to it while the
trainer goes on. Rates: before the kill, and from the new server's first copy until all slots
have two copies again.
"""

from __future__ import annotations

import argparse
import threading
import time

import numpy as np

from backstay.consensus.records import RoutingTable
from backstay.pserver.local_cluster import LocalCluster
from backstay.trainer import Client
from bench.jobs.local import BATCHES, GRADIENT_SCALE, draw_batches, embedding, print_result

FILL_KEYS = 262_144
LIMIT_S = 240.0
# Seldom: each look costs the trainer, in the same process, some milliseconds.
POLL_S = 0.5


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--rows", type=int, default=16_000_000)
    parser.add_argument("--keys-per-step", type=int, default=53_248)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=8.0, help="length of the normal part")
    return parser.parse_args()


class Trainer:
    """Pulls and pushes on a thread of its own, and notes when each step ended."""

    def __init__(self, client: Client, arguments: argparse.Namespace) -> None:
        self.client = client
        self.table = client.create_table(embedding(arguments.dim))
        self.batches = draw_batches(arguments.keys_per_step, arguments.rows, 0.0, seed=0)
        self.ended: list[float] = []
        self.failure: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trainer")

    def fill(self, rows: int, dim: int) -> None:
        """Create every row."""
        gradients = np.zeros((FILL_KEYS, dim), np.float32)
        for first in range(0, rows, FILL_KEYS):
            keys = np.arange(first, min(first + FILL_KEYS, rows), dtype=np.uint64)
            self.client.push(self.table, keys, gradients[: len(keys)])

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        if self.failure is not None:
            raise self.failure

    def steps_per_s(self, begin: float, end: float) -> float:
        """The rate of steps that ended between two moments."""
        return sum(begin <= at < end for at in self.ended) / (end - begin)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                batch = self.client.prepare(self.batches[len(self.ended) % BATCHES])
                rows = self.client.pull(self.table, batch)
                self.client.push(self.table, batch, (rows - 1.0) * np.float32(GRADIENT_SCALE))
                self.ended.append(time.monotonic())
        except Exception as error:  # noqa: BLE001 (stop raises it in the thread that waits)
            self.failure = error


def copies_in_sync(routing: RoutingTable) -> int:
    """Backups in sync, over all slots."""
    return sum(len(held.in_sync) for held in routing.replicas_of_slot)


def wait_for(client: Client, wanted: int, what: str) -> float:
    """Wait until at least so many backups are in sync; returns the moment."""
    limit = time.monotonic() + LIMIT_S
    while copies_in_sync(client.cluster().routing) < wanted:
        if time.monotonic() > limit:
            raise SystemExit(f"{what}: not within {LIMIT_S:.0f} s")
        time.sleep(POLL_S)
    return time.monotonic()


def main() -> None:
    arguments = parse_arguments()
    with LocalCluster(servers=2, settings={"replicas": 2}) as cluster:
        client = Client(cluster.endpoints)
        slots = client.cluster().routing.slot_count
        trainer = Trainer(client, arguments)
        trainer.fill(arguments.rows, arguments.dim)
        trainer.start()
        begin = time.monotonic() + 1.0
        time.sleep(1.0 + arguments.seconds)
        normal = trainer.steps_per_s(begin, time.monotonic())
        # The first server keeps the cluster's records, so another one is taken.
        cluster.kill(1)
        time.sleep(2.0)
        alone = trainer.steps_per_s(time.monotonic() - 1.0, time.monotonic())
        cluster.restart(1)
        copying = wait_for(client, 1, "the first copy")
        done = wait_for(client, slots, "all copies")
        during = trainer.steps_per_s(copying, done)
        trainer.stop()
        client.close()
    print_result(
        {
            "rows": arguments.rows,
            "payload_gb": arguments.rows * (arguments.dim * 4 + 8) / 1e9,
            "normal_steps_per_s": normal,
            "alone_steps_per_s": alone,
            "copying_steps_per_s": during,
            "copying_s": done - copying,
            "copying_over_normal": during / normal,
        }
    )


if __name__ == "__main__":
    main()
