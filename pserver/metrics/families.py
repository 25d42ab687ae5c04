"""A node's metrics, made at each scrape from what its parts say of themselves.

Everything here is a value already counted elsewhere: by the data plane (``stats_json``), by the
control plane (``ControlFigures``), or in the records. Names and units follow Prometheus' rules.
The text of each is its row of docs/reference/metrics.md.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from backstay._version import __version__
from backstay.consensus import ClusterSnapshot, NodeRecord
from backstay.consensus.clock import clock_s
from backstay.consensus.records import CLUSTER_STATUSES, NO_MASTER
from backstay.metrics_endpoint import doubling_buckets
from backstay.pserver.client.inspection import roles_of_nodes
from backstay.pserver.metrics.export_figures import ExportFigures
from backstay.pserver.metrics.figures import FAILOVER_BOUNDS_S, ControlFigures, Durations

__all__ = ["NodeCollector", "NodeSources", "bucket_bounds_s", "groups"]

STATUSES = ("starting", "serving", "stopping")
NO_ROLES = {"master": 0, "in_sync": 0, "catching_up": 0}


@dataclass(frozen=True)
class NodeSources:
    """Where a node's figures come from; each may be called from any thread.

    Attributes:
        cluster: The cluster's name.
        memory_limit_bytes: 0 for no limit.
        own: Who the node is at present.
        snapshot: The records as the node sees them.
        stats: The data plane's figures, as JSON.
        tables: The tables with rows and bytes, as JSON.
        figures: The control plane's figures.
    """

    cluster: str
    memory_limit_bytes: int
    own: Callable[[], NodeRecord]
    snapshot: Callable[[], ClusterSnapshot]
    stats: Callable[[], str]
    tables: Callable[[], str]
    figures: ControlFigures


class NodeCollector(Collector):
    """Makes the metrics of one node."""

    def __init__(self, sources: NodeSources) -> None:
        self._sources = sources

    def collect(self) -> Iterable[Metric]:
        """Return every metric as it is now."""
        return itertools.chain.from_iterable(groups(self._sources).values())


def groups(sources: NodeSources) -> dict[str, list[Metric]]:
    """Return every metric as it is now, by the table of docs/reference/metrics.md that has it."""
    stats = json.loads(sources.stats())
    tables = json.loads(sources.tables())
    made: dict[str, Iterator[Metric]] = {
        "node": _identity(sources),
        "cluster": _cluster(sources.snapshot(), sources.own()),
        "control": _control(sources.figures, sources.snapshot()),
        "exports": _exports(sources.figures.exports.all(), time.time()),
        "requests": _requests(stats),
        "replication": _replication(stats),
        "slots": _slots(stats["slots"]),
        "staleness": _staleness(tables),
        "connections": _connections(stats),
        "memory": _memory(stats, sources.memory_limit_bytes, tables),
    }
    return {name: list(metrics) for name, metrics in made.items()}


def bucket_bounds_s(count: int) -> list[float]:
    """Return the upper bounds of a native histogram's buckets but the last, in seconds."""
    return [16 * 2**number / 1_000_000 for number in range(count - 1)]


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily("backstay_" + name, text, value=value)


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily("backstay_" + name, text, value=value)


def _gauges(name: str, text: str, label: str, values: Mapping[str, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily("backstay_" + name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _counters(name: str, text: str, label: str, values: Mapping[str, float]) -> CounterMetricFamily:
    family = CounterMetricFamily("backstay_" + name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _histogram(
    name: str, text: str, bounds_s: Sequence[float], counts: Sequence[int], sum_s: float
) -> HistogramMetricFamily:
    """Return a histogram; ``counts`` are by bucket, with one more for what is above the bounds."""
    names = [*(repr(bound) for bound in bounds_s), "+Inf"]
    buckets = list(zip(names, itertools.accumulate(counts), strict=True))
    return HistogramMetricFamily("backstay_" + name, text, buckets=buckets, sum_value=sum_s)


def _native_histogram(name: str, text: str, native: Mapping[str, Any]) -> HistogramMetricFamily:
    counts = native["buckets"]
    return _histogram(name, text, bucket_bounds_s(len(counts)), counts, native["sum_micros"] / 1e6)


def _failover_histogram(durations: Durations) -> HistogramMetricFamily:
    return _histogram(
        "failover_seconds",
        "At the controller: from noticing a node's loss to the new routing table.",
        FAILOVER_BOUNDS_S,
        durations.counts,
        durations.sum_s,
    )


def _identity(sources: NodeSources) -> Iterator[Metric]:
    own = sources.own()
    yield InfoMetricFamily(
        "backstay_node",
        "Which node this is; always 1.",
        value={"cluster": sources.cluster, "node_id": own.node_id, "version": __version__},
    )
    yield _gauges(
        "node_status",
        "1 for the present status of the node: starting, serving or stopping.",
        "status",
        {status: float(own.status == status) for status in STATUSES},
    )


def _cluster(snapshot: ClusterSnapshot, own: NodeRecord) -> Iterator[Metric]:
    """What the records say, as this node sees them."""
    health = snapshot.health.cluster_status
    yield _gauges(
        "cluster_status",
        "1 for the status that this node sees: OK, UNHEALTHY, or UNKNOWN (the store is away).",
        "status",
        {status: float(health == status) for status in CLUSTER_STATUSES},
    )
    yield _gauge("cluster_nodes", "Nodes with a live lease.", len(snapshot.members))
    routing = snapshot.routing
    roles, orphans, lost, restoring = NO_ROLES, 0, 0, 0
    if routing is not None:
        orphans = int((routing.master_of_slot == NO_MASTER).sum())
        lost, restoring = len(routing.lost), len(routing.restoring.slots)
        if any(node.instance == own.instance for node in routing.nodes):
            roles = roles_of_nodes(routing)[own.node_id]
    yield _gauges("slots", "Slots of this node by role in the routing table.", "role", roles)
    yield _gauge("cluster_slots_without_master", "Slots that no node serves.", orphans)
    yield _gauge(
        "cluster_slots_lost",
        "Slots that lost all copies and wait for a decision.",
        lost,
    )
    yield _gauge(
        "cluster_slots_restoring",
        "Slots that wait to be loaded from a checkpoint.",
        restoring,
    )
    yield _gauge(
        "routing_generation",
        "Grows when slots lost all their copies, and when a checkpoint is restored.",
        routing.generation if routing is not None else 0,
    )


def _control(figures: ControlFigures, snapshot: ClusterSnapshot) -> Iterator[Metric]:
    yield _gauge("controller", "1 while this node is the controller.", figures.is_controller)
    yield _gauge(
        "store_reachable", "1 while the coordination store answers this node.", not snapshot.trouble
    )
    yield _gauge(
        "lease_remaining_seconds",
        "How long the node's lease surely lives. 0: the cluster may have replaced the node.",
        max(0.0, figures.lease_until_s - clock_s()),
    )
    yield _gauge("trainers", "Trainers whose records this node keeps.", figures.trainers)
    yield _gauges(
        "report_entries",
        "Reports of the data plane: silent backups, nodes without room (full), copies that have "
        "caught up, backups whose port refuses connections.",
        "kind",
        figures.report_sizes,
    )
    yield _counters(
        "in_sync_changes_total",
        "Replicas that joined or left the in-sync sets of this master.",
        "change",
        {"added": figures.in_sync.added, "removed": figures.in_sync.removed},
    )
    yield _failover_histogram(figures.failovers)
    written = figures.checkpoints
    yield _counters(
        "checkpoints_total",
        "Checkpoints that this node was asked for, by outcome.",
        "outcome",
        {"written": written.written, "failed": written.failed},
    )
    yield _gauge("checkpoint_seconds", "Duration of the last whole checkpoint.", written.last_s)
    yield _gauge("checkpoint_bytes", "Size of the last whole checkpoint.", written.last_bytes)


def _exports(exports: Mapping[str, ExportFigures], now: float) -> Iterator[Metric]:
    """Of the exports that this node writes as the controller."""
    begun = {name: one for name, one in exports.items() if one.begun}
    yield _gauges(
        "export_age_seconds",
        "Since the newest whole element of a running export was begun, at the controller.",
        "export",
        {name: max(now - one.begun, 0.0) for name, one in begun.items()},
    )
    yield _gauges(
        "export_element",
        "Number of that element.",
        "export",
        {name: one.number for name, one in begun.items()},
    )
    elements = CounterMetricFamily(
        "backstay_export_elements_total",
        "Elements of running exports: whole bases and increments, and tries that failed.",
        labels=["export", "outcome"],
    )
    for name, one in exports.items():
        for outcome, count in {**one.written, "failed": one.failed}.items():
            elements.add_metric([name, outcome], count)
    yield elements
    yield _counters(
        "export_rows_total",
        "Rows written to elements.",
        "export",
        {name: one.rows for name, one in exports.items()},
    )
    yield _counters(
        "export_bytes_total",
        "Bytes of their parts.",
        "export",
        {name: one.bytes for name, one in exports.items()},
    )
    yield from _export_topics(exports, now)


def _export_topics(exports: Mapping[str, ExportFigures], now: float) -> Iterator[Metric]:
    topics = {name: one.topic for name, one in exports.items() if one.topic is not None}
    yield _gauges(
        "export_topic_age_seconds",
        "Since the element whose rows the topic of an export has was begun.",
        "export",
        {name: max(now - one.begun, 0.0) for name, one in topics.items() if one.begun},
    )
    yield _gauges(
        "export_topic_behind_seconds",
        "How much later the newest element was begun than the topic's.",
        "export",
        {name: exports[name].topic_behind_s for name, one in topics.items() if one.begun},
    )
    yield _counters(
        "export_topic_rows_total",
        "Rows written to the topic of an export.",
        "export",
        {name: one.rows for name, one in topics.items()},
    )
    yield _counters(
        "export_topic_rows_gone_total",
        "Messages that tell the topic of an export that a key has no row any more.",
        "export",
        {name: one.gone for name, one in topics.items()},
    )
    transactions = CounterMetricFamily(
        "backstay_export_topic_transactions_total",
        "Transactions that took the topic of an export to a later element, and tries that failed.",
        labels=["export", "outcome"],
    )
    for name, topic in topics.items():
        transactions.add_metric([name, "written"], topic.transactions)
        transactions.add_metric([name, "failed"], topic.failed)
    yield transactions


def _requests(stats: Mapping[str, Any]) -> Iterator[Metric]:
    yield _counters(
        "transactions_total",
        "Pushes as master, by outcome: committed, rolled back, or repeated (applied before and "
        "sent again).",
        "outcome",
        {
            "committed": stats["pushes_applied"],
            "rolled_back": stats["replication"]["rolled_back"],
            "repeated": stats["pushes_repeated"],
        },
    )
    yield _counters(
        "requests_refused_total",
        "Refused requests, by code. During a failover not_master and not_ready are normal.",
        "code",
        stats["requests_refused_by_code"],
    )
    for name, text in (
        ("pulls", "Pulls answered."),
        ("keys_pulled", "Keys of the pulls answered."),
        ("keys_pushed", "Keys of the pushes answered."),
        ("rows_deleted", "Rows that deletes removed. Delete requests count as pushes."),
        ("rows_expired", "Rows that expiry removed, as master."),
        (
            "rows_evicted",
            "Rows removed because their table was at its capacity or memory was short, as master.",
        ),
        ("keys_not_admitted", "Keys of pushes that got no row by their admission, as master."),
    ):
        yield _counter(f"{name}_total", text, stats[name])


def _connections(stats: Mapping[str, Any]) -> Iterator[Metric]:
    yield _gauge("connections", "Open connections to the data plane.", stats["connections_open"])
    for name, text in (
        ("connections_accepted", "Connections to the data plane taken, refused ones included."),
        ("connections_refused", "Connections refused by max_connections."),
        (
            "frames_broken",
            "Connections closed for a bad handshake (token, cluster, version) or frame, or by "
            "stall_timeout_ms.",
        ),
    ):
        yield _counter(f"{name}_total", text, stats[name])
    for way in ("received", "sent"):
        yield _counters(
            f"data_{way}_bytes_total",
            f"Bytes {way} on the data plane, by the kind of peer: client or server.",
            "peer",
            {"client": stats[f"bytes_{way}"], "server": stats[f"peer_bytes_{way}"]},
        )


def _replication(stats: Mapping[str, Any]) -> Iterator[Metric]:
    replication = stats["replication"]
    yield _gauge(
        "routing_version",
        "The version of the routing table that the data plane follows.",
        stats["routing_version"],
    )
    yield _gauge(
        "pending_pushes", "Pushes that wait for backups, as master.", replication["pending"]
    )
    for name, figure, text in (
        ("prepared", "prepared", "Pushes sent to backups, as master."),
        ("staged_for_masters", "staged_for_others", "Pushes staged, as backup."),
        (
            "stage_refusals",
            "refused_to_others",
            "Masters' requests refused, as backup: an older term, a gap, or no room.",
        ),
        ("promotions", "promotions", "Routing tables that made this node master of more slots."),
        (
            "unfit_promotions",
            "unfit_promotions",
            "Slots of which this node became master without being in sync. Must stay 0.",
        ),
        ("slots_copied", "slots_copied", "Copies of slots sent."),
        ("slots_installed", "slots_installed", "Copies of slots received."),
    ):
        yield _counter(f"{name}_total", text, replication[figure])
    for name, text in (
        ("commit", "From a push's arrival until all backups staged it and it was applied."),
        ("rollback", "From a push's arrival until it was rolled back."),
        ("stage", "Staging a push, as backup."),
        (
            "promotion",
            "From the routing table that makes this node master of more slots until it serves "
            "them all. Overlapping ones count as one.",
        ),
    ):
        yield _native_histogram(f"{name}_seconds", text, replication[name])


def _slots(slots: Mapping[str, int]) -> Iterator[Metric]:
    roles = ("master", "waiting", "backup", "copied", "outside")
    yield _gauges(
        "slot_roles",
        "Slots by role in the data plane. Waiting: master, not serving yet; copied: a copy is on "
        "its way here.",
        "role",
        {role: slots[role] for role in roles},
    )
    yield _gauge(
        "staged_pushes",
        "Pushes staged and not applied, as backup.",
        slots["staged"],
    )


def _memory(
    stats: Mapping[str, Any], limit_bytes: int, tables: Sequence[Mapping[str, Any]]
) -> Iterator[Metric]:
    parts: Mapping[str, int] = stats["memory"]
    yield _gauge("memory_bytes", "Memory that counts against the limit.", sum(parts.values()))
    yield _gauges(
        "memory_part_bytes",
        "Parts of that memory: rows; counters of keys without a row, filters included; streams; "
        "transactions under way; copies of slots on their way, with old rows kept for them; "
        "buffers of connections; process: what it has resident besides.",
        "part",
        parts,
    )
    yield _gauge(
        "memory_limit_bytes",
        "memory_limit_bytes, or what the node chose. 0: no limit.",
        limit_bytes,
    )
    rows = {table["spec"]["name"]: table["rows"] for table in tables}
    yield _gauges(
        "table_rows", "Rows held here in any role. Each copy counts on its node.", "table", rows
    )
    size = {table["spec"]["name"]: table["bytes"] for table in tables}
    yield _gauges("table_bytes", "Memory of those rows.", "table", size)
    counters = {table["spec"]["name"]: table["counters"] for table in tables}
    yield _gauges(
        "table_counters", "Admission counters held here, of keys without a row.", "table", counters
    )
    size = {table["spec"]["name"]: table["counter_bytes"] for table in tables}
    yield _gauges("table_counter_bytes", "Memory of those counters.", "table", size)


def _staleness(tables: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    """How stale pushes were that told from where their gradients come."""
    family = HistogramMetricFamily(
        "backstay_push_staleness",
        "Updates that a slot applied between the pull and the push of a gradient, as master. One "
        "observation for each slot of a push that measures it.",
        labels=["table"],
    )
    unknown = {}
    for table in tables:
        told, name = table["staleness"], table["spec"]["name"]
        family.add_metric([name], doubling_buckets(told["buckets"]), told["sum"])
        unknown[name] = told["unknown"]
    yield family
    yield _counters(
        "push_staleness_unknown_total",
        "Slots of such pushes with unknown staleness, such as after a restore.",
        "table",
        unknown,
    )
