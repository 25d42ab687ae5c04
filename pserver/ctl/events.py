"""``pserverctl events``: what the controllers decided, and why."""

from __future__ import annotations

import click

from backstay.exits import print_json
from backstay.pserver.ctl.asking import ClusterOptions, ask, examples, json_option

__all__ = ["events"]

EXAMPLES = examples("pserverctl --endpoint 127.0.0.1:7000 events --newest 5")


@click.command(epilog=EXAMPLES)
@json_option()
@click.option(
    "--newest", type=click.IntRange(1, 1000), default=20, show_default=True, help="At most so many."
)
@click.pass_obj
def events(options: ClusterOptions, newest: int, as_json: bool) -> None:
    """Show what the controllers decided and why, the newest last."""
    report = ask(options, lambda inspection: inspection.events(newest), as_json=as_json)
    if as_json:
        print_json(report)
        return
    for event in report["events"]:
        click.echo(f"routing {event['routing_version']}  {event['kind']}: {event['reason']}")
