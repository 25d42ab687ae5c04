"""``pserverctl tables``: the tables, with rows and memory over all nodes."""

from __future__ import annotations

import sys
from typing import Any

import click
from rich.console import Console
from rich.markup import escape

from backstay.exits import print_json
from backstay.pserver.ctl.asking import EXIT_UNHEALTHY, Given, ask, examples, json_option
from backstay.pserver.ctl.showing import grid, print_whole, size_text
from backstay.pserver.inspection import ClusterInspection

__all__ = ["tables"]

EXAMPLES = examples("pserverctl --endpoint 127.0.0.1:7000 tables --json")


@click.command(epilog=EXAMPLES)
@json_option()
@click.pass_obj
def tables(given: Given, as_json: bool) -> None:
    """Show the tables, with rows and memory over all nodes; each copy of a row counts.

    The exit code is 1 if a node does not answer, so that its rows are missing in the sums.
    """
    report = ask(given, ClusterInspection.tables, as_json=as_json)
    if as_json:
        print_json(report)
    else:
        _show(report)
    sys.exit(EXIT_UNHEALTHY if report["silent_nodes"] else 0)


def _show(report: dict[str, Any]) -> None:
    console = Console()
    if report["tables"]:
        _show_tables(console, report["tables"])
    else:
        click.echo("no tables yet")
    if report["silent_nodes"]:
        silent = escape(", ".join(report["silent_nodes"]))
        console.print(
            f"[red]rows of nodes that do not answer are missing: {silent}[/red]", soft_wrap=True
        )


def _show_tables(console: Console, reported: list[dict[str, Any]]) -> None:
    shown = grid("table", "kind", "storage", "optimizer", "rows", "memory")
    for table in reported:
        spec = table["spec"]
        kind, shape = next(iter(spec["kind"].items()))
        size = shape.get("dim") or "x".join(map(str, shape.get("shape", [])))
        shown.add_row(
            escape(table["name"]),
            f"{kind} {size}",
            spec["storage"],
            next(iter(spec["optimizer"])),
            f"{table['rows']:,}",
            size_text(table["bytes"]),
        )
    print_whole(console, shown)
