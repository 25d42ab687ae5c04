"""From two looks at a cluster's counters to rates: ``pserverctl top``. Pure.

The nodes count since they were started, and say how long ago that was. The time between two looks
comes from that, not from the caller's clock. A node that was started again counts from
zero, so it has no rates until the next look.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["NodeSample", "Sample", "TableUsage", "quantile_ms", "rates_between"]

# Name of the rate, and the counter that it is made of.
RATES: Mapping[str, str] = {
    "pushes_per_s": "pushes_applied",
    "pulls_per_s": "pulls",
    "keys_pushed_per_s": "keys_pushed",
    "keys_pulled_per_s": "keys_pulled",
    "bytes_in_per_s": "bytes_received",
    "bytes_out_per_s": "bytes_sent",
    "peer_bytes_in_per_s": "peer_bytes_received",
    "peer_bytes_out_per_s": "peer_bytes_sent",
    "refused_per_s": "requests_refused",
}
FIRST_BOUND_MICROS = 16


@dataclass(frozen=True)
class TableUsage:
    """What a node holds of a table."""

    rows: int
    bytes: int


@dataclass(frozen=True)
class NodeSample:
    """What a node said of itself.

    Attributes:
        instance: The process; another one counts from zero.
        uptime_ms: Its age when it answered.
        stats: The data plane's figures.
        tables: What it holds, by table.
    """

    instance: int
    uptime_ms: int
    stats: Mapping[str, Any]
    tables: Mapping[str, TableUsage]


@dataclass(frozen=True)
class Sample:
    """One look at all nodes.

    Attributes:
        nodes: By id, in the order of the cluster; None for one that did not answer.
        errors: Why not, by id.
    """

    nodes: Mapping[str, NodeSample | None]
    errors: Mapping[str, str] = field(default_factory=dict)


def rates_between(before: Sample, after: Sample) -> dict[str, Any]:
    """Return what happened between two looks, as a JSON object.

    It has ``nodes``, ``total`` over those whose rates are known, and ``tables``. Figures that are
    not known are None: all of a ``silent`` node's, and the rates of one that is ``new`` or was
    ``restarted``.
    """
    nodes = [
        _node_rates(node_id, before.nodes.get(node_id), sample, after.errors.get(node_id))
        for node_id, sample in after.nodes.items()
    ]
    known = [node for node in nodes if node["state"] == "ok"]
    answered = [node for node in nodes if node["state"] != "silent"]
    total: dict[str, Any] = {
        name: sum(node[name] for node in known) if known else None for name in RATES
    }
    for name in ("rows", "memory_bytes", "connections"):
        total[name] = sum(node[name] for node in answered) if answered else None
    return {"nodes": nodes, "total": total, "tables": _table_rates(before, after)}


def quantile_ms(buckets: Sequence[int], share: float) -> float | None:
    """Return the time that so great a share of all took at most, in milliseconds.

    Bucket n counts what took less than 2^n * 16 microseconds and no less than half of that, so
    this is right to within a factor of two. What is in the last bucket, which has no end, counts
    as of its beginning.

    Args:
        buckets: How many are in each; not cumulative.
        share: From 0 to 1.
    """
    total = sum(buckets)
    if total == 0:
        return None
    wanted, below = share * total, 0
    for number, count in enumerate(buckets):
        low = FIRST_BOUND_MICROS * 2 ** (number - 1) if number else 0
        if count and below + count >= wanted:
            high = low if number == len(buckets) - 1 else FIRST_BOUND_MICROS * 2**number
            return round((low + (high - low) * (wanted - below) / count) / 1000, 3)
        below += count
    raise AssertionError("the counts add up to their sum")


def _interval_s(before: NodeSample | None, after: NodeSample | None) -> float | None:
    """Return the time between two answers of one process; None if there is no such time."""
    if before is None or after is None or before.instance != after.instance:
        return None
    passed_ms = after.uptime_ms - before.uptime_ms
    return passed_ms / 1000 if passed_ms > 0 else None


def _node_rates(
    node_id: str, before: NodeSample | None, after: NodeSample | None, error: str | None
) -> dict[str, Any]:
    unknown = dict.fromkeys((*RATES, "push_p50_ms", "push_p99_ms", "staleness", "interval_s"))
    gauges = dict.fromkeys(("rows", "memory_bytes", "connections", "pending_pushes"))
    report: dict[str, Any] = {"node_id": node_id, "state": "silent", "error": error}
    if after is None:
        return {**report, **unknown, **gauges}
    report |= {
        "rows": sum(table.rows for table in after.tables.values()),
        "memory_bytes": sum(after.stats["memory"].values()),
        "connections": after.stats["connections_open"],
        "pending_pushes": after.stats["replication"]["pending"],
    }
    interval_s = _interval_s(before, after)
    if before is None or interval_s is None:
        return {**report, "state": "new" if before is None else "restarted", **unknown}
    then, now = before.stats, after.stats
    commits = [
        new - old
        for old, new in zip(
            then["replication"]["commit"]["buckets"],
            now["replication"]["commit"]["buckets"],
            strict=True,
        )
    ]
    rates = {name: (now[key] - then[key]) / interval_s for name, key in RATES.items()}
    return {
        **report,
        "state": "ok",
        "interval_s": interval_s,
        **{name: round(rate, 3) for name, rate in rates.items()},
        "push_p50_ms": quantile_ms(commits, 0.5),
        "push_p99_ms": quantile_ms(commits, 0.99),
        "staleness": _mean_staleness(then, now),
    }


def _mean_staleness(then: Mapping[str, Any], now: Mapping[str, Any]) -> float | None:
    """Return how stale pushes were on the mean; None: none was measured."""
    slots: int = now["stale_slots"] - then["stale_slots"]
    if not slots:
        return None
    total: int = now["staleness_sum"] - then["staleness_sum"]
    return round(total / slots, 3)


def _table_rates(before: Sample, after: Sample) -> list[dict[str, Any]]:
    """Return each table's rows and memory over the nodes that answered, and how they change.

    A node counts for the change only if it is the same process in both looks.
    """
    tables: dict[str, dict[str, Any]] = {}
    for node_id, sample in after.nodes.items():
        if sample is None:
            continue
        earlier = before.nodes.get(node_id)
        interval_s = _interval_s(earlier, sample)
        for name, usage in sample.tables.items():
            entry = tables.setdefault(
                name,
                {"name": name, "rows": 0, "bytes": 0, "rows_per_s": None, "bytes_per_s": None},
            )
            entry["rows"] += usage.rows
            entry["bytes"] += usage.bytes
            if earlier is None or interval_s is None:
                continue
            was = earlier.tables.get(name, TableUsage(0, 0))
            for rate, change in (
                ("rows_per_s", usage.rows - was.rows),
                ("bytes_per_s", usage.bytes - was.bytes),
            ):
                entry[rate] = round((entry[rate] or 0.0) + change / interval_s, 3)
    return [tables[name] for name in sorted(tables)]
