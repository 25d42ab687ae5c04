"""What a resize costs trainers, and whether it moves more than it must.

Two servers with two copies of each slot, as is usual (or one: ``--replicas 1``). They become three
and two again twice: first without pushes, to count the bytes that the servers send each other,
then while a trainer pushes without a pause. The fewest bytes are those of the rows of the third
server's share of the copies, once to it and once back; what is counted has keys, frames and the
nodes' talk in it as well. A resize's time is that of `LocalCluster.resize`: it includes the start
of the third process, and its end.

Usage: ``python -m bench.jobs.resize --gb 0.1``.
"""

from __future__ import annotations

import argparse
import time

from backstay.pserver.client.inspection import ClusterInspection
from backstay.pserver.local_cluster import LocalCluster
from backstay.trainer import Client
from bench.jobs.local import print_result
from bench.jobs.pushes import ROW_BYTES, fill, pushing, rows_of, table_spec

LIMIT_S = 240.0
# A push takes far less by itself: one that takes longer has waited for something.
WAIT_S = 0.05
SLOTS = 1024
SERVERS = 2


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--gb", type=float, default=1.0, help="weights, state and keys of all rows")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--keys-per-push", type=int, default=53_248)
    parser.add_argument("--seconds", type=float, default=8.0, help="length of the normal part")
    parser.add_argument("--copy-bytes-per-s", type=int, help="the setting (default: its own)")
    return parser.parse_args()


def received_bytes(cluster: LocalCluster) -> dict[str, int]:
    """What each node has got from its peers so far.

    Not what it has sent: the process that leaves takes that count along.
    """
    with ClusterInspection(",".join(cluster.endpoints), cluster.client_config()) as asked:
        return {
            node["node_id"]: node["stats"]["peer_bytes_received"]
            for node in asked.status()["nodes"]
        }


def fewest_bytes(state: int, slots: int, servers: int, replicas: int) -> float:
    """Bytes of rows that must move when one more server takes its share of the copies.

    Args:
        state: Bytes of all rows, of one copy.
        slots: They are of one size.
        servers: How many there are then.
        replicas: Copies of each slot.
    """
    return state / slots * (slots * replicas // servers)


def there_and_back(cluster: LocalCluster) -> tuple[list[float], int]:
    """Grow and shrink; returns begin, middle and end, and the bytes that were moved."""
    moments, moved = [time.monotonic()], 0
    for servers in (SERVERS + 1, SERVERS):
        before = received_bytes(cluster)
        cluster.resize(servers, timeout_s=LIMIT_S)
        moments.append(time.monotonic())
        after = received_bytes(cluster)
        moved += sum(got - before.get(name, 0) for name, got in after.items())
    return moments, moved


def main() -> None:
    arguments = parse_arguments()
    rows = rows_of(arguments.gb)
    settings: dict[str, object] = {"slot_count": SLOTS, "replicas": arguments.replicas}
    if arguments.copy_bytes_per_s is not None:
        settings["copy_bytes_per_s"] = arguments.copy_bytes_per_s
    with (
        LocalCluster(SERVERS, settings=settings) as cluster,
        Client(cluster.endpoints) as client,
    ):
        fill(client, client.create_table(table_spec()), rows)
        quiet, moved = there_and_back(cluster)
        with pushing(cluster.endpoints, rows, arguments.keys_per_push) as times:
            begin = time.monotonic() + 1.0
            time.sleep(1.0 + arguments.seconds)
            (grow, shrink, end), loaded_moved = there_and_back(cluster)
    fewest = 2 * fewest_bytes(rows * ROW_BYTES, SLOTS, SERVERS + 1, arguments.replicas)
    normal = times.per_s(begin, grow)
    print_result(
        {
            "rows": rows,
            "state_gb": rows * ROW_BYTES / 1e9,
            "moved_over_fewest": moved / fewest,
            "pushes_over_normal": times.per_s(grow, end) / normal,
            "longest_push_s": times.longest_s(grow, end),
            "normal_pushes_per_s": normal,
            "waiting_over_time": times.longer_s(WAIT_S, grow, end) / (end - grow),
            "grow_over_normal": times.per_s(grow, shrink) / normal,
            "shrink_over_normal": times.per_s(shrink, end) / normal,
            "normal_longest_push_s": times.longest_s(begin, grow),
            "loaded_moved_over_fewest": loaded_moved / fewest,
            "quiet_grow_s": quiet[1] - quiet[0],
            "quiet_shrink_s": quiet[2] - quiet[1],
            "grow_s": shrink - grow,
            "shrink_s": end - shrink,
        }
    )


if __name__ == "__main__":
    main()
