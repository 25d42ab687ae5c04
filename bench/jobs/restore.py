"""How long a new cluster takes until it has read a checkpoint, beside reading its files.

One server writes a full checkpoint and ends. Then, each time with the page cache dropped first if
this user may do that: its files are read from end to end; a new server begins with it; its files
are read once more. The restore's time is counted from the start of the new server's process to the
first pull of rows of all slots that is answered, so it includes that Python starts, that the
server joins its cluster and that the trainer's client connects. `loading_gb_per_s` counts from
the moment that the new server is ready, when it has begun to load, to the end of the restore.

Usage: ``python -m bench.jobs.restore --gb 0.4``.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from backstay import rpc
from backstay.checkpoint import remote
from backstay.config import ClientConfig
from backstay.errors import BackstayError
from backstay.pserver.local_cluster import LocalCluster
from backstay.trainer import Client
from bench.jobs.checkpoint import settings
from bench.jobs.disk import drop_page_cache, read_bytes_per_s
from bench.jobs.local import print_result
from bench.jobs.memory import spread_keys
from bench.jobs.pushes import ROW_BYTES, fill, rows_of, table_spec
from bench.programs import REPOSITORY

LIMIT_S = 240.0
POLL_S = 0.02
# This many keys reach every slot.
PULLED_KEYS = 53_248


class LoadWatch:
    """Notes on a thread of its own when a restore is done."""

    def __init__(self, endpoint: str) -> None:
        self.done = 0.0
        self._endpoint = endpoint
        self._thread = threading.Thread(target=self._run, name="restore-watch")
        self._thread.start()

    def wait(self) -> float:
        """Wait for the end of the restore; returns the moment, by the monotonic clock."""
        self._thread.join()
        if not self.done:
            raise SystemExit(f"the restore was not done within {LIMIT_S:.0f} s")
        return self.done

    def _run(self) -> None:
        limit = time.monotonic() + LIMIT_S
        with rpc.open_channel(self._endpoint, ClientConfig.load()) as channel:
            while time.monotonic() < limit:
                if remote.restore_state(channel, timeout_s=10.0).state == "done":
                    self.done = time.monotonic()
                    return
                time.sleep(POLL_S)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--gb", type=float, default=4.0, help="weights, state and keys of all rows")
    parser.add_argument(
        "--folder",
        type=Path,
        default=REPOSITORY / ".bench",
        help="on the disk to measure (default: the repository's)",
    )
    parser.add_argument("--keep-cache", action="store_true", help="do not drop the page cache")
    return parser.parse_args()


def write_checkpoint(folder: str, rows: int) -> NDArray[np.float32]:
    """Have one written; returns some of its rows."""
    with (
        LocalCluster(1, settings=settings(folder)) as cluster,
        Client(cluster.endpoints) as client,
    ):
        table = client.create_table(table_spec())
        fill(client, table, rows)
        client.checkpoints.save(kind="full")
        return client.pull(table, some_keys(rows))


def some_keys(rows: int) -> NDArray[np.uint64]:
    """Keys of rows that are there, in all slots."""
    return spread_keys(0, rows)[:: max(1, rows // PULLED_KEYS)]


def first_pull(endpoints: list[str], rows: int) -> NDArray[np.float32]:
    """Ask for rows until they are there."""
    limit = time.monotonic() + LIMIT_S
    with Client(endpoints) as client:
        while True:
            try:
                return client.pull("embedding", some_keys(rows))
            except BackstayError as error:
                if not error.retry_safe or time.monotonic() > limit:
                    raise


def main() -> None:
    arguments = parse_arguments()
    rows = rows_of(arguments.gb)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="restore-", dir=arguments.folder) as folder:
        saved = write_checkpoint(folder, rows)
        files = [path for path in sorted(Path(folder).rglob("*")) if path.is_file()]
        size = sum(path.stat().st_size for path in files)
        forget = not arguments.keep_cache
        dropped = forget and drop_page_cache()
        disk = [read_bytes_per_s(files)]
        if forget:
            drop_page_cache()
        begin = time.monotonic()
        with LocalCluster(1, settings=settings(folder, restore="latest")) as cluster:
            ready = time.monotonic()
            watch = LoadWatch(cluster.endpoints[0])
            restored = first_pull(cluster.endpoints, rows)
            pulled = time.monotonic()
            loaded = watch.wait()
        if not np.array_equal(restored, saved):
            raise SystemExit("the restored rows differ from the saved rows")
        if forget:
            drop_page_cache()
        disk.append(read_bytes_per_s(files))
    disk_rate = sum(disk) / len(disk)
    print_result(
        {
            "rows": rows,
            "state_gb": rows * ROW_BYTES / 1e9,
            "restore_over_disk": size / (pulled - begin) / disk_rate,
            "loading_over_disk": size / (loaded - ready) / disk_rate,
            "cache_dropped": float(dropped),
            "disk_gb_per_s": disk_rate / 1e9,
            "disk_after_over_before": disk[1] / disk[0],
            "loading_gb_per_s": size / (loaded - ready) / 1e9,
            "ready_s": ready - begin,
            "loaded_s": loaded - begin,
            "first_pull_s": pulled - begin,
        }
    )


if __name__ == "__main__":
    main()
