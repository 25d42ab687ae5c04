"""A node comes back over a slow link: ``python -m tests.chaos.slow_link``, inside a sandbox.

Three servers share one link for their rows. A slot takes longer on it than a push may take, and
trainers go on pushing while a killed node gets its copies again. The last line of the output is
``SLOW_LINK {json}``. Slots of 1 GB over 100 Mbit/s take about ten minutes and 10 GB of memory:
``python -m tests.chaos.slow_link --slots 4 --rows 16000000 --rate-mbit 100``.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import numpy as np

from backstay.errors import BackstayError
from backstay.pserver.local_cluster import LocalCluster
from backstay.tables import SGD, TableSpec, Zeros
from backstay.trainer import Client

SERVERS, DIM, BATCH = 3, 64, 50_000
ROW_BYTES = 8 + 4 * DIM
PREPARE_TIMEOUT_MS = 1000
# The link carries pushes as well, and this machine may have other work.
PATIENCE = 3.0
SLACK_S = 20.0


def _tc(*arguments: str) -> None:
    subprocess.run(["tc", *arguments], check=True, capture_output=True, timeout=20)


def _slow_down(fast_ports: Sequence[int], rate_mbit: int) -> None:
    """Let everything on the loopback share one link, but what goes to or from some ports."""
    root = ["dev", "lo", "parent", "1:"]
    rate = f"{rate_mbit}mbit"
    _tc("qdisc", "add", "dev", "lo", "root", "handle", "1:", "htb", "default", "10")
    _tc("class", "add", *root, "classid", "1:1", "htb", "rate", "10gbit")
    _tc("class", "add", *root, "classid", "1:10", "htb", "rate", rate, "burst", "300k")
    _tc("qdisc", "add", "dev", "lo", "parent", "1:10", "bfifo", "limit", "1mb")
    for port in fast_ports:
        for side in ("dport", "sport"):
            match = ["match", "ip", side, str(port), "0xffff"]
            _tc("filter", "add", *root, "protocol", "ip", "u32", *match, "flowid", "1:1")


def _poor_slots(client: Client) -> int:
    return sum(not held.in_sync for held in client.cluster().routing.replicas_of_slot)


def _wait_until_full(client: Client, limit_s: float, version: int = 0) -> float:
    """Wait until a routing table newer than a version has two copies of every slot."""
    began = time.monotonic()
    while time.monotonic() - began < limit_s:
        if not _poor_slots(client) and client.cluster().routing.version > version:
            break
        time.sleep(0.1)
    return time.monotonic() - began


class _Pusher(threading.Thread):
    """Pushes small batches until it is told to stop."""

    def __init__(self, client: Client, table: object, rows: int) -> None:
        super().__init__()
        self.stopping = threading.Event()
        self.pushes = 0
        self.began = threading.Event()
        self.slowest_s = 0.0
        self.errors: list[str] = []
        self._client, self._table, self._rows = client, table, rows

    def run(self) -> None:
        random = np.random.default_rng(1)
        values = np.full((256, DIM), -1.0, np.float32)
        while not self.stopping.wait(0.02):
            began = time.monotonic()
            try:
                keys = random.integers(0, self._rows, 256, dtype=np.uint64)
                self._client.push(self._table, keys, values)  # type: ignore[arg-type]
                self.pushes += 1
                self.began.set()
            except BackstayError as error:
                self.errors.append(str(error))
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--rows", type=int, default=600_000, help=f"of {ROW_BYTES} bytes each")
    parser.add_argument("--rate-mbit", type=int, default=200, help="of the link")
    return parser.parse_args()


def main() -> int:
    """Run it; the exit code is 0 if nothing was called silent and all copies came back."""
    options = _arguments()
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True, timeout=20)
    settings = {
        "slot_count": options.slots,
        "replicas": 2,
        "prepare_timeout_ms": PREPARE_TIMEOUT_MS,
    }
    with LocalCluster(SERVERS, settings=settings) as cluster, Client(cluster.endpoints) as client:
        table = client.create_table(
            TableSpec.sparse("rows", DIM, optimizer=SGD(1.0), initializer=Zeros())
        )
        for start in range(0, options.rows, BATCH):
            keys = np.arange(start, start + BATCH, dtype=np.uint64)
            client.push(table, keys, np.full((BATCH, DIM), -1.0, np.float32))
        _wait_until_full(client, SLACK_S)
        settings_text = "".join(one.config_path.read_text() for one in cluster.servers)
        ports = {int(end.rpartition(":")[2]) for end in cluster.endpoints}
        ports |= {int(port) for port in re.findall(r":(\d{4,5})\b", settings_text)}
        _slow_down(sorted(ports), options.rate_mbit)
        copies = sum(
            SERVERS - 1 in (held.master, *held.in_sync)
            for held in client.cluster().routing.replicas_of_slot
        )
        slot_s = options.rows * ROW_BYTES / options.slots * 8 / (options.rate_mbit * 1e6)
        pusher = _Pusher(client, table, options.rows)
        pusher.start()
        assert pusher.began.wait(SLACK_S)
        routing = client.cluster().routing
        before, version, killed_at = routing.generation, routing.version, time.monotonic()
        cluster.kill(SERVERS - 1)
        cluster.restart(SERVERS - 1)
        needed_s = PATIENCE * copies * slot_s + SLACK_S
        _wait_until_full(client, needed_s, version)
        healed_s = time.monotonic() - killed_at
        poor, after = _poor_slots(client), client.cluster().routing.generation
        pusher.stopping.set()
        pusher.join()
        logs = "".join(one.log_path.read_text(errors="replace") for one in cluster.servers)
    silent = [line for line in logs.splitlines() if "gets no answer from it" in line]
    result = {
        "slot_s": round(slot_s, 2),
        "copies": copies,
        "healed_s": round(healed_s, 1),
        "limit_s": round(needed_s, 1),
        "slots_with_one_copy": poor,
        "called_silent": silent[:5],
        "pushes": pusher.pushes,
        "slowest_push_s": round(pusher.slowest_s, 2),
        "errors": pusher.errors[:3],
        "lost": after - before,
    }
    sys.stdout.write(f"SLOW_LINK {json.dumps(result)}\n")
    well = not poor and not silent and not pusher.errors and after == before
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
