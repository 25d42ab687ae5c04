"""``pserverctl trainers``: the trainers that are alive, and when they pushed last."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import click
from rich.console import Console
from rich.markup import escape

from backstay.exits import print_json
from backstay.pserver.client.inspection import ClusterInspection
from backstay.pserver.ctl.asking import ClusterOptions, ask, examples, json_option
from backstay.pserver.ctl.showing import grid, print_whole

__all__ = ["trainers"]

EXAMPLES = examples("pserverctl --endpoint 127.0.0.1:7000 trainers", "pserverctl trainers --json")


@click.command(epilog=EXAMPLES)
@json_option()
@click.pass_obj
def trainers(options: ClusterOptions, as_json: bool) -> None:
    """Show the trainers that are alive: workers of jobs, and loops of one's own.

    One that was killed is shown until its time to live is over.
    """
    report = ask(options, ClusterInspection.trainers, as_json=as_json)
    if as_json:
        print_json(report)
    elif report["trainers"]:
        _show(report["trainers"])
    else:
        click.echo("no trainers")


def _show(listed: list[dict[str, Any]]) -> None:
    shown = grid("trainer", "address", "pid", "job", "worker", "up since", "last push", "pushes")
    for one in listed:
        since = datetime.fromtimestamp(one["start_time"]).strftime("%Y-%m-%d %H:%M:%S")
        age_s = one["last_push_age_s"]
        shown.add_row(
            escape(one["id"]),
            escape(one["address"]),
            str(one["pid"]),
            escape(one["job"] or "-"),
            escape(one["worker"] or "-"),
            since,
            "none yet" if age_s is None else f"{age_s:.0f} s ago",
            f"{one['pushes']:,}",
        )
    print_whole(Console(), shown)
