"""``pserverctl``: asks a running cluster how it is and what it holds.

Exit codes: 0 all is well; 1 the cluster answers, but is not healthy; 2 wrong arguments or
settings; 3 no node answers, or the call was refused.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from backstay._version import __version__
from backstay.config import ENDPOINT_VARIABLE, ClientConfig
from backstay.errors import BackstayError, ConfigError
from backstay.pserver.inspection import ClusterInspection

__all__ = ["main"]

EXIT_UNHEALTHY = 1
EXIT_WRONG_ARGUMENTS = 2
EXIT_NO_ANSWER = 3
WIDTH_MAX = 10_000

ENDPOINT_VARIABLES = (ENDPOINT_VARIABLE, "PADDLE_PSERVERS_IP_PORT_LIST")

EXAMPLES = """
\b
Examples:
  pserverctl --endpoint 127.0.0.1:7000 status
  pserverctl --endpoint 127.0.0.1:7000 tables --json
  pserverctl --endpoint 127.0.0.1:7000 events --newest 5
  BACKSTAY_ENDPOINT=ps-0:7000,ps-1:7000 pserverctl status
\b
Exit codes: 0 all is well; 1 the cluster answers, but is not healthy; 2 wrong arguments
or settings; 3 no node answers, or the call was refused.
"""


@click.group(epilog=EXAMPLES)
@click.version_option(__version__, prog_name="pserverctl")
@click.option(
    "--endpoint",
    metavar="HOST:PORT[,...]",
    help="Control address of any node, or several to try in turn. "
    f"[{', '.join(ENDPOINT_VARIABLES)}]",
)
@click.option(
    "--config",
    "config_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="TOML file with the settings, section [client]. [BACKSTAY_CONFIG]",
)
@click.pass_context
def main(context: click.Context, endpoint: str | None, config_file: Path | None) -> None:
    """Ask a running cluster. Token and certificates come from the file or from BACKSTAY_*."""
    context.obj = (endpoint, config_file)


@main.command(epilog=EXAMPLES)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def status(given: tuple[str | None, Path | None], as_json: bool) -> None:
    """Show how the cluster does, its nodes with their roles, and their figures."""
    report = _ask(given, ClusterInspection.status, as_json=as_json)
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        _show_status(report)
    sys.exit(0 if report["healthy"] else EXIT_UNHEALTHY)


@main.command(epilog=EXAMPLES)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def tables(given: tuple[str | None, Path | None], as_json: bool) -> None:
    """Show the tables, with rows and memory over all nodes."""
    report = _ask(given, ClusterInspection.tables, as_json=as_json)
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        _show_tables(report)
    sys.exit(EXIT_UNHEALTHY if report["silent_nodes"] else 0)


@main.command(epilog=EXAMPLES)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--newest", type=click.IntRange(1, 1000), default=20, show_default=True, help="At most so many."
)
@click.pass_obj
def events(given: tuple[str | None, Path | None], newest: int, as_json: bool) -> None:
    """Show what the controllers decided and why, the newest last."""
    report = _ask(given, lambda inspection: inspection.events(newest), as_json=as_json)
    if as_json:
        click.echo(json.dumps(report, indent=2))
        return
    for event in report["events"]:
        click.echo(f"routing {event['routing_version']}  {event['kind']}: {event['reason']}")


@main.command(epilog=EXAMPLES)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def verify(given: tuple[str | None, Path | None], as_json: bool) -> None:
    """Compare the replicas of every slot by their digests; reads every row once."""
    report = _ask(given, ClusterInspection.verify, as_json=as_json)
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        click.echo(f"{report['equal']} slots have equal copies, {report['single']} only one copy")
        for name, meaning in (
            ("different", "copies differ"),
            ("undecided", "copies could not be compared at one position"),
            ("silent_nodes", "no answer"),
        ):
            if report[name]:
                click.echo(f"{meaning}: {', '.join(map(str, report[name]))}")
    sys.exit(0 if report["good"] else EXIT_UNHEALTHY)


def _ask(
    given: tuple[str | None, Path | None],
    question: Callable[[ClusterInspection], dict[str, Any]],
    *,
    as_json: bool,
) -> dict[str, Any]:
    """Return the answer to a question, or end the process with the code for the failure."""
    endpoint, config_file = given
    candidates = [endpoint, *(os.environ.get(name) for name in ENDPOINT_VARIABLES)]
    chosen = next((text for text in candidates if text), None)
    try:
        if chosen is None:
            raise ConfigError(
                f"endpoint: give --endpoint HOST:PORT or set {' or '.join(ENDPOINT_VARIABLES)}"
            )
        config = ClientConfig.load(file=config_file)
        with ClusterInspection(chosen, config) as inspection:
            return question(inspection)
    except ConfigError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(EXIT_WRONG_ARGUMENTS)
    except BackstayError as error:
        if as_json:
            click.echo(json.dumps({"error": str(error)}, indent=2))
        click.echo(f"Error: {error}", err=True)
        sys.exit(EXIT_NO_ANSWER)


def _show_status(report: dict[str, Any]) -> None:
    console = Console()
    colour = "green" if report["healthy"] else "red"
    state = "healthy" if report["healthy"] else "not healthy"
    console.print(
        f"cluster [bold]{report['cluster']}[/bold]: [{colour}]{state}[/{colour}], "
        f"{len(report['nodes'])} nodes, {report['slot_count']} slots, "
        f"{report['replicas']} copies, routing version {report['routing_version']}, "
        f"highest term {report['term_max']}, "
        f"controller {report['controller'] or 'none'}",
        soft_wrap=True,
    )
    store = {True: "reachable", False: "[red]not reachable[/red]", None: "not known"}
    console.print(
        f"copies: {report['slots_short_of_copies']} slots have too few, "
        f"{report['slots_catching_up']} catching up, "
        f"{report['slots_without_master']} without a master; "
        f"store: {store[report['store_reachable']]}; "
        f"last failover: {_failover_text(report['last_failover'])}",
        soft_wrap=True,
    )
    if report["reason"]:
        # Not as markup: the text comes from the network.
        click.echo(f"{report['cluster_status']}: {report['reason']}")
    grid = Table(box=box.SIMPLE)
    for title in (
        *("node", "status", "control", "data", "master", "in sync", "catching up"),
        *("tables", "rows", "memory", "up"),
    ):
        grid.add_column(title, no_wrap=True)
    for node in report["nodes"]:
        colour = "green" if node["status"] == "serving" else "red"
        known = node["stats"] is not None
        grid.add_row(
            node["node_id"],
            f"[{colour}]{node['status']}[/{colour}]",
            node["control_address"],
            node["data_address"],
            str(node["master_slots"]),
            str(node["in_sync_slots"]),
            str(node["catching_up_slots"]),
            str(node["tables"]) if known else "-",
            f"{node['rows']:,}" if known else "-",
            _size(node["bytes"]) if known else "-",
            f"{node['uptime_ms'] / 1000:,.0f} s" if known else "-",
        )
    _print_whole(console, grid)
    for node in report["nodes"]:
        if node["error"] is not None:
            click.echo(f"{node['node_id']}: {node['error']}")
        elif node["control"] is not None and node["control"]["store_trouble"]:
            click.echo(f"{node['node_id']}: {node['control']['store_trouble']}")


def _failover_text(failover: dict[str, Any] | None) -> str:
    if failover is None:
        return "none"
    return (
        f"{failover['node_id']}, in {failover['duration_ms']:g} ms "
        f"(routing {failover['routing_version']})"
    )


def _show_tables(report: dict[str, Any]) -> None:
    console = Console()
    if not report["tables"]:
        click.echo("no tables yet")
        _show_silent(report, console)
        return
    grid = Table(box=box.SIMPLE)
    for title in ("table", "kind", "storage", "optimizer", "rows", "memory"):
        grid.add_column(title, no_wrap=True)
    for table in report["tables"]:
        spec = table["spec"]
        kind, shape = next(iter(spec["kind"].items()))
        size = shape.get("dim") or "x".join(map(str, shape.get("shape", [])))
        grid.add_row(
            table["name"],
            f"{kind} {size}",
            spec["storage"],
            next(iter(spec["optimizer"])),
            f"{table['rows']:,}",
            _size(table["bytes"]),
        )
    _print_whole(console, grid)
    _show_silent(report, console)


def _show_silent(report: dict[str, Any], console: Console) -> None:
    if report["silent_nodes"]:
        silent = ", ".join(report["silent_nodes"])
        console.print(
            f"[red]rows of nodes that do not answer are missing: {silent}[/red]", soft_wrap=True
        )


def _print_whole(console: Console, grid: Table) -> None:
    """Print a table as wide as it is: an address in two halves cannot be copied."""
    unlimited = console.options.update(width=WIDTH_MAX)
    console.width = max(console.width, console.measure(grid, options=unlimited).maximum)
    console.print(grid)


def _size(size_bytes: int) -> str:
    """Return a number of bytes for people."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


if __name__ == "__main__":
    main()
