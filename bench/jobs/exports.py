"""What a running export costs the trainers that push: the 99th percentile of a push, and the rate.

Two servers hold a table of rows of 16 float32 with Adagrad state, two copies of each. A trainer
pushes without a pause. First there is no export, then one to a folder every second, then none
again: so the two normal parts show how far the machine itself drifts. The export's first base has
figures of its own. Nothing follows the export here; a follower would take processor time that is
not the servers'.

Usage: ``python -m bench.jobs.exports [--seconds 30] [--gb 0.4]``
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import grpc

from backstay import rpc
from backstay.checkpoint import remote_exports
from backstay.checkpoint.storage import ExportFolder
from backstay.config import SecurityConfig
from backstay.job_spec import ExportsSpec
from backstay.pserver.local_cluster import LocalCluster
from backstay.trainer import Client
from bench.jobs.local import print_result
from bench.jobs.pushes import fill, pushing, rows_of, table_spec
from bench.programs import REPOSITORY

P99 = 0.99
NAME = "bench"
CALL_S = 10.0
LOOK_S = 0.05
WARM_UP_S = 3.0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--seconds", type=float, default=30.0, help="length of each part")
    parser.add_argument("--gb", type=float, default=0.4, help="weights, state and keys of all rows")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two increments")
    parser.add_argument("--keys-per-push", type=int, default=3_328)
    parser.add_argument("--copies", type=int, default=2)
    parser.add_argument(
        "--folder",
        type=Path,
        default=REPOSITORY / ".bench",
        help="on the disk to export to (default: the repository's)",
    )
    return parser.parse_args()


class Export:
    """The export of a cluster, as an administrator starts and stops it."""

    def __init__(self, endpoint: str, url: str, every_s: float) -> None:
        self._endpoint = endpoint
        self._url = url
        self._every_s = every_s

    def start(self) -> None:
        """Start it, and wait for its first base."""
        with rpc.open_channel(self._endpoint, SecurityConfig()) as channel:
            spec = ExportsSpec(url=self._url, every_s=self._every_s, tables=("*",))
            remote_exports.start(channel, NAME, spec, timeout_s=CALL_S)
            while not any(one.element for one in self._listed(channel)):
                time.sleep(LOOK_S)

    def stop(self) -> None:
        """Stop it, and wait for its last increment."""
        with rpc.open_channel(self._endpoint, SecurityConfig()) as channel:
            remote_exports.stop(channel, NAME, timeout_s=CALL_S)
            while self._listed(channel):
                time.sleep(LOOK_S)

    def _listed(self, channel: grpc.Channel) -> tuple[remote_exports.RunningExport, ...]:
        with rpc.mapped_errors(self._endpoint):
            return remote_exports.list_exports(channel, timeout_s=CALL_S)


def main() -> None:
    arguments = parse_arguments()
    rows = rows_of(arguments.gb)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="export-", dir=arguments.folder) as name,
        LocalCluster(2, settings={"replicas": arguments.copies}) as cluster,
        Client(cluster.endpoints) as client,
    ):
        fill(client, client.create_table(table_spec()), rows)
        export = Export(cluster.endpoints[0], f"{name}/export", arguments.every)
        with pushing(cluster.endpoints, rows, arguments.keys_per_push) as times:
            time.sleep(WARM_UP_S)
            begun = time.monotonic()
            time.sleep(arguments.seconds)
            started = time.monotonic()
            export.start()
            based = time.monotonic()
            time.sleep(arguments.seconds)
            stopping = time.monotonic()
            export.stop()
            stopped = time.monotonic()
            time.sleep(arguments.seconds)
            ended = time.monotonic()
        elements = [one for one in ExportFolder(f"{name}/export").names() if "inc" in one]
    parts = {"before": (begun, started), "base": (started, based), "export": (based, stopping)}
    parts["after"] = (stopped, ended)
    p99 = {part: times.percentile_s(P99, *span) for part, span in parts.items()}
    normal = (p99["before"] + p99["after"]) / 2
    rate = {part: times.per_s(*span) for part, span in parts.items()}
    print_result(
        {
            "rows": rows,
            "increments": len(elements),
            "p99_over_normal": p99["export"] / normal,
            "base_p99_over_normal": p99["base"] / normal,
            "pushes_over_normal": 2 * rate["export"] / (rate["before"] + rate["after"]),
            "base_s": based - started,
            **{f"{part}_p99_ms": value * 1e3 for part, value in p99.items()},
            **{f"{part}_longest_ms": times.longest_s(*span) * 1e3 for part, span in parts.items()},
            **{f"{part}_keys_per_s": one * arguments.keys_per_push for part, one in rate.items()},
        }
    )


if __name__ == "__main__":
    main()
