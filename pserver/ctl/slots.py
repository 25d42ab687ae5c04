"""``pserverctl slots``: who holds which slot."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.style import Style
from rich.text import Text

from backstay.consensus import RoutingTable
from backstay.consensus.records import NO_MASTER
from backstay.exit_codes import ExitCode
from backstay.exits import print_json
from backstay.pserver.client.inspection import (
    ClusterInspection,
    roles_of_nodes,
    slots_short_of_copies,
)
from backstay.pserver.ctl.asking import (
    WAIT_PAUSE_S,
    ClusterOptions,
    ask,
    examples,
    json_option,
    wait_option,
)
from backstay.pserver.ctl.showing import grid, print_whole
from backstay.pserver.ctl.slot_map import labels, slot_map

__all__ = ["slots", "slots_report"]

EXAMPLES = examples(
    "pserverctl --endpoint 127.0.0.1:7000 slots",
    "pserverctl slots --slot 17",
    "pserverctl slots --json | jq '.slots[] | select(.master == null)'",
    "pserverctl slots --wait 60",
    "pserverctl slots accept-loss",
)
# The controller decides within milliseconds; one that is elected meanwhile takes longer.
ACCEPT_LIMIT_S = 10.0
LOOK_S = 0.1
LEGEND = (
    "a cell: the letters of the node that is master of {what}; "
    "+ a copy is catching up, - copies are missing, ! no master"
)
COLOURS = (
    *("green", "bright_blue", "yellow", "magenta", "cyan", "bright_green", "bright_magenta"),
    *("bright_cyan", "bright_yellow", "white"),
)


@click.group(invoke_without_command=True, epilog=EXAMPLES)
@json_option("Print one JSON object, on one line.")
@click.option(
    "--slot", type=click.IntRange(min=0), help="Only this slot: its term, epoch and replicas."
)
@wait_option("every slot has its copies in sync")
@click.pass_context
def slots(context: click.Context, slot: int | None, wait_s: int, as_json: bool) -> None:
    """Show which node has which slots, with a map of all slots.

    The exit code is 1 if a slot has no master or fewer copies in sync than wanted.
    """
    if context.invoked_subcommand is not None:
        return
    options: ClusterOptions = context.obj
    if slot is not None:
        report = ask(options, lambda inspection: inspection.slot(slot), as_json=as_json)
        if as_json:
            print_json(report)
        else:
            _show_one(report)
        is_whole = report["master"] is not None and not report["copies_missing"]
        sys.exit(0 if is_whole else ExitCode.FAILED)
    routing = ask(options, lambda inspection: _routing_within(inspection, wait_s), as_json=as_json)
    report = slots_report(routing)
    if as_json:
        # With 65,536 slots, a line for each field would be a million lines.
        click.echo(json.dumps(report))
    else:
        _show(Console(), routing, report)
    if wait_s and report["slots_short_of_copies"]:
        click.echo(_waited_in_vain(routing, wait_s), err=True)
    sys.exit(ExitCode.FAILED if report["slots_short_of_copies"] else 0)


@slots.command(
    "accept-loss",
    epilog=examples("pserverctl slots accept-loss", "pserverctl slots accept-loss --yes --json"),
)
@json_option()
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.pass_obj
def accept_loss(options: ClusterOptions, yes: bool, as_json: bool) -> None:
    """Let slots that lost all their copies begin anew, empty.

    The cluster then serves them again, but their rows are lost for good. If there is a
    checkpoint, restore it instead (pserverctl checkpoint restore).
    """
    routing = ask(options, ClusterInspection.routing, as_json=as_json)
    lost = len(routing.lost)
    if lost and not yes:
        click.confirm(
            f"Give up for good what {lost} of {routing.slot_count} slots held? (--yes: do not ask)",
            abort=True,
            err=True,
        )
    report = {"accepted": 0, "slots_lost": 0, "routing_version": routing.version}
    if lost:
        report = ask(
            options, lambda inspection: _accept(inspection, routing.version), as_json=as_json
        )
    if as_json:
        print_json(report)
    elif not lost:
        click.echo("no slot waits for a decision")
    elif report["slots_lost"]:
        click.echo(f"{report['slots_lost']} slots still wait: pserverctl status says what for")
    else:
        click.echo(
            f"{report['accepted']} slots begin anew, empty; the copies on other nodes are being "
            "made: pserverctl status"
        )
    sys.exit(ExitCode.FAILED if report["slots_lost"] else 0)


def _routing_within(inspection: ClusterInspection, wait_s: int) -> RoutingTable:
    """Return the routing as soon as every slot has its copies, or as it is when the time is over.

    A node that does not answer, or knows no routing, is not waited for: before a node stops it
    asks itself this way, and then it has nothing that the cluster could lose.
    """
    ends_s = time.monotonic() + wait_s
    while True:
        routing = inspection.routing()
        left_s = ends_s - time.monotonic()
        if left_s <= 0 or not slots_short_of_copies(routing):
            return routing
        time.sleep(min(WAIT_PAUSE_S, left_s))


def _waited_in_vain(routing: RoutingTable, wait_s: int) -> str:
    """Return why a wait was in vain, for people."""
    serving = sum(node.status == "serving" for node in routing.nodes)
    return (
        f"after {wait_s} s {slots_short_of_copies(routing)} slots still have too few copies: "
        f"{serving} nodes serve, {routing.replicas} copies are wanted"
    )


def _accept(inspection: ClusterInspection, version: int) -> dict[str, int]:
    """Accept the loss and wait a little while for the controller to carry it out."""
    accepted = inspection.accept_loss(version)
    deadline_s = time.monotonic() + ACCEPT_LIMIT_S
    while True:
        routing = inspection.routing()
        if not routing.lost or time.monotonic() > deadline_s:
            return {
                "accepted": accepted,
                "slots_lost": len(routing.lost),
                "routing_version": routing.version,
            }
        time.sleep(LOOK_S)


def slots_report(routing: RoutingTable) -> dict[str, Any]:
    """Return who holds what as a JSON object."""
    ids = [node.node_id for node in routing.nodes]
    roles = roles_of_nodes(routing)
    terms = routing.term_of_slot.tolist()
    return {
        "routing_version": routing.version,
        "slot_count": routing.slot_count,
        "replicas": routing.replicas,
        "slots_without_master": int((routing.master_of_slot == NO_MASTER).sum()),
        "slots_lost": len(routing.lost),
        "slots_short_of_copies": slots_short_of_copies(routing),
        "slots_catching_up": sum(role["catching_up"] for role in roles.values()),
        "nodes": [
            {
                "node_id": node.node_id,
                "status": node.status,
                "master_slots": roles[node.node_id]["master"],
                "in_sync_slots": roles[node.node_id]["in_sync"],
                "catching_up_slots": roles[node.node_id]["catching_up"],
            }
            for node in routing.nodes
        ],
        "slots": [
            {
                "slot": slot,
                "term": terms[slot],
                "master": None if replicas.master == NO_MASTER else ids[replicas.master],
                "in_sync": [ids[index] for index in replicas.in_sync],
                "catching_up": [ids[index] for index in replicas.catching_up],
            }
            for slot, replicas in enumerate(routing.replicas_of_slot)
        ],
    }


def _show(console: Console, routing: RoutingTable, report: dict[str, Any]) -> None:
    click.echo(
        f"{report['slot_count']} slots, {report['replicas']} copies, "
        f"routing version {report['routing_version']}: "
        f"{report['slots_short_of_copies']} have too few copies, "
        f"{report['slots_catching_up']} copies catch up, "
        f"{report['slots_without_master']} have no master"
    )
    names = labels(len(routing.nodes))
    table = grid("map", "node", "status", "master", "in sync", "catching up")
    for index, node in enumerate(report["nodes"]):
        table.add_row(
            Text(names[index], style=_style(index)),
            escape(node["node_id"]),
            node["status"],
            *(str(node[f"{role}_slots"]) for role in ("master", "in_sync", "catching_up")),
        )
    print_whole(console, table)
    _show_map(console, routing, names)


def _show_map(console: Console, routing: RoutingTable, names: list[str]) -> None:
    digits = len(str(routing.slot_count - 1))
    drawn = slot_map(routing, console.width - digits - 2)
    for line in drawn.lines:
        text = Text(f"{line[0].first_slot:>{digits}}  ")
        for cell in line:
            text.append(cell.text(names), style=_style(cell.master, cell.state))
        console.print(text, soft_wrap=True)
    each = drawn.slots_per_cell
    click.echo(LEGEND.format(what="the slot" if each == 1 else f"most of its {each} slots"))


def _style(master: int, state: str = "fine") -> Style:
    """Return the colours of a cell: the node's behind it, and red if it cannot be used."""
    if master == NO_MASTER or state == "no_master":
        return Style(color="bright_white", bgcolor="red", bold=True)
    return Style(color="black", bgcolor=COLOURS[master % len(COLOURS)], bold=state != "fine")


def _show_one(report: dict[str, Any]) -> None:
    click.echo(
        f"slot {report['slot']}: term {report['term']}, epoch {report['epoch']} "
        f"at routing version {report['routing_version']}"
    )
    click.echo(f"master: {report['master'] or 'none'}")
    for role, title in (("in_sync", "in sync"), ("catching_up", "catching up")):
        click.echo(f"{title}: {', '.join(report[role]) or 'none'}")
    if report["copies_missing"]:
        click.echo(f"copies missing: {report['copies_missing']}")
