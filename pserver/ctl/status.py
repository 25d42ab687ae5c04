"""``pserverctl status``: how the cluster does, and its nodes."""

from __future__ import annotations

import sys
import time
from typing import Any

import click
from rich.console import Console
from rich.markup import escape

from backstay.errors import ServerUnavailable
from backstay.exit_codes import ExitCode
from backstay.exits import print_json
from backstay.pserver.client.inspection import ClusterInspection
from backstay.pserver.ctl.asking import (
    WAIT_PAUSE_S,
    ClusterOptions,
    ask,
    examples,
    json_option,
    wait_option,
)
from backstay.pserver.ctl.showing import grid, print_whole, size_text

__all__ = ["loss_text", "status"]

EXAMPLES = examples(
    "pserverctl --endpoint 127.0.0.1:7000 status",
    "BACKSTAY_ENDPOINT=ps-0:7000,ps-1:7000 pserverctl status --json",
    "pserverctl --endpoint 127.0.0.1:7000 status --wait 60",
)


@click.command(epilog=EXAMPLES)
@json_option()
@wait_option("the cluster is healthy")
@click.pass_obj
def status(options: ClusterOptions, as_json: bool, wait_s: int) -> None:
    """Show the health of the cluster, its nodes with their roles, and their figures.

    The exit code is 1 if the cluster is not healthy; the reason is in the output.
    """
    report = ask(options, lambda inspection: _status_within(inspection, wait_s), as_json=as_json)
    if as_json:
        print_json(report)
    else:
        _show(report)
    sys.exit(0 if report["healthy"] else ExitCode.FAILED)


def _status_within(inspection: ClusterInspection, wait_s: int) -> dict[str, Any]:
    """Return the status as soon as the cluster is healthy, or as it is when the time is over."""
    ends_s = time.monotonic() + wait_s
    while True:
        last_try = time.monotonic() >= ends_s
        try:
            report = inspection.status()
            if report["healthy"] or last_try:
                return report
        except ServerUnavailable:
            if last_try:
                raise
        time.sleep(min(WAIT_PAUSE_S, max(0.0, ends_s - time.monotonic())))


def _show(report: dict[str, Any]) -> None:
    console = Console()
    colour = "green" if report["healthy"] else "red"
    state = "healthy" if report["healthy"] else "not healthy"
    console.print(
        f"cluster [bold]{escape(report['cluster'])}[/bold]: [{colour}]{state}[/{colour}], "
        f"{len(report['nodes'])} nodes, {report['slot_count']} slots, "
        f"{report['replicas']} copies, routing version {report['routing_version']}, "
        f"highest term {report['term_max']}, "
        f"controller {escape(report['controller'] or 'none')}",
        soft_wrap=True,
    )
    store = {True: "reachable", False: "[red]not reachable[/red]", None: "not known"}
    console.print(
        f"copies: {report['slots_short_of_copies']} slots have too few, "
        f"{report['slots_catching_up']} catching up, "
        f"{report['slots_without_master']} without a master; "
        f"store: {store[report['store_reachable']]}; "
        f"last failover: {escape(_failover_text(report['last_failover']))}",
        soft_wrap=True,
    )
    click.echo(f"plan: {_plan_text(report['plan'])}; checkpoint: {_checkpoint_text(report)}")
    if report["checkpoint_trouble"] is not None:
        click.echo(f"warning: no checkpoint could be written: {report['checkpoint_trouble']}")
    if report["loss"] is not None:
        click.echo(f"loss: {loss_text(report['loss'])}")
    if report["reason"]:
        # The text comes from the network, so it is not read as markup.
        click.echo(f"{report['cluster_status']}: {report['reason']}")
    _show_nodes(console, report["nodes"])


def _show_nodes(console: Console, nodes: list[dict[str, Any]]) -> None:
    table = grid(
        *("node", "status", "control", "data", "master", "in sync", "catching up"),
        *("tables", "rows", "memory", "up"),
    )
    for node in nodes:
        colour = "green" if node["status"] == "serving" else "red"
        known = node["stats"] is not None
        table.add_row(
            escape(node["node_id"]),
            f"[{colour}]{node['status']}[/{colour}]",
            escape(node["control_address"]),
            escape(node["data_address"]),
            str(node["master_slots"]),
            str(node["in_sync_slots"]),
            str(node["catching_up_slots"]),
            str(node["tables"]) if known else "-",
            f"{node['rows']:,}" if known else "-",
            size_text(node["bytes"]) if known else "-",
            f"{node['uptime_ms'] / 1000:,.0f} s" if known else "-",
        )
    print_whole(console, table)
    for node in nodes:
        if node["error"] is not None:
            click.echo(f"{node['node_id']}: {node['error']}")
        elif node["control"] is not None and node["control"]["store_trouble"]:
            click.echo(f"{node['node_id']}: {node['control']['store_trouble']}")


def _plan_text(plan: dict[str, Any] | None) -> str:
    if plan is None:
        return "none"
    text = f"{plan['kind']} {plan['state'].replace('_', ' ')}"
    if plan["state"] in ("waiting_for_nodes", "moving"):
        text += (
            f", {plan['moves_total'] - plan['moves_left']} of {plan['moves_total']} copies moved"
        )
    return text


def loss_text(loss: dict[str, Any]) -> str:
    """Return what was lost, and from when the cluster goes on."""
    slots = "1 slot" if loss["slots"] == 1 else f"{loss['slots']} slots"
    text = f"{slots} lost all copies (routing {loss['routing_version']}); "
    if loss["state"] == "waits":
        return text + "they wait for a decision"
    if loss["state"] == "accepted":
        return text + f"accepted {loss['time']}, they began anew, empty"
    goes = "all slots go on" if loss["state"] == "restored" else "all slots go back"
    since = f" of {loss['created']}" if loss["created"] else ""
    word = "from" if loss["state"] == "restored" else "to"
    return text + f"{goes} {word} {loss['checkpoint']}{since}"


def _checkpoint_text(report: dict[str, Any]) -> str:
    newest, saving = report["checkpoint"], report["saving"]
    text = f"{newest['id']} of {newest['created']}" if newest is not None else "none yet"
    return text + (f"; {saving} is being written" if saving is not None else "")


def _failover_text(failover: dict[str, Any] | None) -> str:
    if failover is None:
        return "none"
    return (
        f"{failover['node_id']}, in {failover['duration_ms']:g} ms "
        f"(routing {failover['routing_version']})"
    )
