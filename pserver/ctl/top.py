"""``pserverctl top``: what each node and table does now, refreshed as one looks on."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import click
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from backstay import rpc
from backstay._proto.v1 import cluster_pb2, cluster_pb2_grpc, tables_pb2, tables_pb2_grpc
from backstay.errors import BackstayError
from backstay.exit_codes import ExitCode
from backstay.exits import exit_on_error
from backstay.pserver.client.inspection import ClusterInspection
from backstay.pserver.ctl.asking import ClusterOptions, examples, json_option, open_inspection
from backstay.pserver.ctl.rates import NodeSample, Sample, TableUsage, rates_between
from backstay.pserver.ctl.showing import count_text, grid, print_whole, size_text

__all__ = ["take_sample", "top"]

# A node that hangs must not hold up the rest for much longer than a refresh.
NODE_TIME_MIN_S = 1.0

EXAMPLES = examples(
    "pserverctl --endpoint 127.0.0.1:7000 top",
    "pserverctl top --once",
    "pserverctl top --interval 5 --json | jq .total.pushes_per_s",
)


@click.command(epilog=EXAMPLES)
@json_option("Print one JSON object a look, each on one line.")
@click.option("--once", is_flag=True, help="Look twice, print the rates between, and end.")
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(0.1, 3600),
    default=1.0,
    show_default=True,
    help="Seconds between two looks.",
)
@click.pass_obj
def top(options: ClusterOptions, interval_s: float, once: bool, as_json: bool) -> None:
    """Show live rates of each node and table, until Ctrl-C.

    Pushes, pulls, keys and bytes are counted by node: "in" and "out" from and to trainers, "peers"
    from and to other nodes. A table has its rows and its memory over all copies, and their growth.
    Times are those of pushes, from arrival until all copies have them, within a factor of two.
    "stale" is the mean staleness of pushes, where trainers have it measured.
    """
    with exit_on_error(ExitCode.NO_ANSWER, as_json=as_json), open_inspection(options) as inspection:
        looks = _looks(inspection, interval_s, patient=not once)
        try:
            if once:
                report = next(looks)
                _print(report, as_json=as_json)
                silent = any(node["state"] == "silent" for node in report["nodes"])
                sys.exit(ExitCode.FAILED if silent else 0)
            _go_on(looks, as_json=as_json)
        except KeyboardInterrupt:
            # How one ends it.
            return


def _go_on(looks: Iterator[dict[str, Any]], *, as_json: bool) -> None:
    """Show one look after the other, in place where that can be."""
    console = Console()
    if as_json or not console.is_terminal:
        for report in looks:
            _print(report, as_json=as_json)
        return
    with Live(console=console, auto_refresh=False) as live:
        for report in looks:
            live.update(Group(*_tables(report), *map(Text, _notes(report))), refresh=True)


def _print(report: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(report))
        return
    console = Console()
    for table in _tables(report):
        print_whole(console, table)
    for note in _notes(report):
        click.echo(note)


def _tables(report: dict[str, Any]) -> list[Table]:
    """Return the two tables that show a look."""
    nodes = grid(
        *("node", "pushes/s", "pulls/s", "pushed\nkeys/s", "pulled\nkeys/s", "in/s", "out/s"),
        *("peers\nin/s", "peers\nout/s", "p50", "p99", "stale", "rows", "memory", "conns"),
        narrow=True,
    )
    for node in report["nodes"]:
        times = (_time_text(node[name]) for name in ("push_p50_ms", "push_p99_ms"))
        stale = "" if node["staleness"] is None else f"{node['staleness']:.1f}"
        name = escape(node["node_id"])
        nodes.add_row(name, *_rate_texts(node), *times, stale, *_held_texts(node))
    total = report["total"]
    nodes.add_row("total", *_rate_texts(total), "", "", "", *_held_texts(total), style="bold")
    tables = grid("table", "rows", "rows/s", "memory", "memory/s")
    for table in report["tables"]:
        tables.add_row(
            escape(table["name"]),
            f"{table['rows']:,}",
            _number_text(table["rows_per_s"]),
            size_text(table["bytes"]),
            _size_text(table["bytes_per_s"]),
        )
    return [nodes, tables] if report["tables"] else [nodes]


def _notes(report: dict[str, Any]) -> list[str]:
    """Return why a node has no rates, for each that has none."""
    reasons = {
        "silent": "does not answer",
        "new": "answers for the first time",
        "restarted": "was started again and counts from zero",
    }
    return [
        f"{node['node_id']}: {node['error'] or reasons[node['state']]}"
        for node in report["nodes"]
        if node["state"] in reasons
    ]


def _rate_texts(rates: Mapping[str, Any]) -> list[str]:
    counts = ("pushes_per_s", "pulls_per_s", "keys_pushed_per_s", "keys_pulled_per_s")
    sizes = ("bytes_in_per_s", "bytes_out_per_s", "peer_bytes_in_per_s", "peer_bytes_out_per_s")
    return [
        *(_number_text(rates[name]) for name in counts),
        *(_size_text(rates[name]) for name in sizes),
    ]


def _held_texts(held: Mapping[str, Any]) -> list[str]:
    connections = held["connections"]
    return [
        "-" if held["rows"] is None else f"{held['rows']:,}",
        _size_text(held["memory_bytes"]),
        "-" if connections is None else str(connections),
    ]


def _number_text(number: float | None) -> str:
    return "-" if number is None else count_text(number)


def _size_text(size_bytes: float | None) -> str:
    return "-" if size_bytes is None else size_text(size_bytes)


def _time_text(milliseconds: float | None) -> str:
    return "-" if milliseconds is None else f"{milliseconds:.3g} ms"


def take_sample(inspection: ClusterInspection, limit_s: float) -> Sample:
    """Ask every node for its counters, all at the same time.

    Args:
        inspection: The cluster.
        limit_s: How long a node may take.

    Raises:
        ServerUnavailable: None of the endpoints answers.
    """
    asked = []
    for node in inspection.routing().nodes:
        channel = inspection.channel(node.control_address)
        asked.append(
            (
                node,
                cluster_pb2_grpc.ClusterServiceStub(channel).GetNodeStats.future(
                    cluster_pb2.GetNodeStatsRequest(), timeout=limit_s
                ),
                tables_pb2_grpc.TablesServiceStub(channel).ListTables.future(
                    tables_pb2.ListTablesRequest(), timeout=limit_s
                ),
            )
        )
    nodes: dict[str, NodeSample | None] = {}
    errors: dict[str, str] = {}
    for node, stats, tables in asked:
        try:
            with rpc.mapped_errors(node.control_address):
                nodes[node.node_id] = _node_sample(stats.result(), tables.result())
        except BackstayError as error:
            nodes[node.node_id] = None
            errors[node.node_id] = str(error)
    return Sample(nodes, errors)


def _node_sample(
    stats: cluster_pb2.GetNodeStatsResponse, tables: tables_pb2.ListTablesResponse
) -> NodeSample:
    return NodeSample(
        instance=stats.node.instance,
        uptime_ms=stats.uptime_ms,
        stats=json.loads(stats.data_plane_json),
        tables={one.name: TableUsage(one.rows, one.bytes) for one in tables.tables},
    )


def _looks(
    inspection: ClusterInspection, interval_s: float, *, patient: bool
) -> Iterator[dict[str, Any]]:
    """Yield the rates between each look and the one before.

    Args:
        inspection: The cluster.
        interval_s: The time from one look to the next.
        patient: Go on when no node answers any more, after the first look: yield the reason.
    """
    limit_s = min(inspection.timeout_s, max(interval_s, NODE_TIME_MIN_S))
    before, due = take_sample(inspection, limit_s), time.monotonic()
    while True:
        due = max(due + interval_s, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))
        try:
            after = take_sample(inspection, limit_s)
        except BackstayError as error:
            if not patient or not error.retry_safe:
                raise
            after = Sample(dict.fromkeys(before.nodes), dict.fromkeys(before.nodes, str(error)))
        yield rates_between(before, after)
        before = after
