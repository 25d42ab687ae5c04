"""The controller's decision in a large cluster: one node of a thousand is lost.

Times what stands between the news and the new routing table in the store: reading the old table
from its text, deciding, and writing the new one as text. Nothing is sent; no server runs.

Usage: ``python -m bench.jobs.controller``.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

from backstay.consensus.records import ClusterConfig, MemberRecord, RoutingTable
from backstay.consensus.records.packing import pack, unpack
from backstay.pserver.controller import ClusterRecords, decide
from bench.jobs.local import print_result


def member(number: int) -> MemberRecord:
    """Return the record of a node that serves."""
    return MemberRecord(
        node_id=f"ps-{number:04}",
        instance=2**62 + number,
        incarnation=1,
        status="serving",
        start_time=0.0,
        sync=True,
        data_address=f"h{number}:1",
        control_address=f"h{number}:2",
        host=f"h{number}",
        lease=number + 1,
        version="0",
    )


def measure(nodes: int, slots: int, replicas: int) -> dict[str, float]:
    """Lose one node and return the figures."""
    members = {one.node_id: one for one in map(member, range(nodes))}
    records = ClusterRecords(ClusterConfig("scale", slots, replicas, nodes, "0"), members)
    started = time.perf_counter()
    first = decide(records).routing
    first_s = time.perf_counter() - started
    assert first is not None
    stored = pack(first.to_json())
    lost = f"ps-{nodes // 2:04}"
    left = {name: one for name, one in members.items() if name != lost}
    cpu = time.process_time()
    marks = [time.perf_counter()]
    routing = RoutingTable.from_json(unpack(stored))
    marks.append(time.perf_counter())
    decision = decide(replace(records, members=left, routing=routing))
    marks.append(time.perf_counter())
    assert decision.routing is not None
    text = pack(decision.routing.to_json())
    marks.append(time.perf_counter())
    cpu = time.process_time() - cpu
    masters = [n for name, n in decision.routing.slots_per_node().items() if name != lost]
    return {
        "nodes": nodes,
        "slots": slots,
        "replicas": replicas,
        "first_routing_ms": round(first_s * 1000, 1),
        "read_ms": round((marks[1] - marks[0]) * 1000, 1),
        "decide_ms": round((marks[2] - marks[1]) * 1000, 1),
        "write_ms": round((marks[3] - marks[2]) * 1000, 1),
        "total_s": marks[3] - marks[0],
        "total_cpu_ms": round(cpu * 1000, 1),
        "record_bytes": len(text),
        "events": len(decision.events),
        "masters_min": min(masters),
        "masters_max": max(masters),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--slots", type=int, default=65536)
    parser.add_argument("--replicas", type=int, default=3)
    given = parser.parse_args()
    print_result(measure(given.nodes, given.slots, given.replicas))


if __name__ == "__main__":
    main()
