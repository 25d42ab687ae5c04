"""``pserverctl verify``: whether the replicas of every slot are equal."""

from __future__ import annotations

import sys

import click

from backstay.exits import print_json
from backstay.pserver.ctl.asking import EXIT_UNHEALTHY, Given, ask, examples, json_option
from backstay.pserver.inspection import ClusterInspection

__all__ = ["verify"]

EXAMPLES = examples("pserverctl --endpoint 127.0.0.1:7000 verify")


@click.command(epilog=EXAMPLES)
@json_option()
@click.pass_obj
def verify(given: Given, as_json: bool) -> None:
    """Compare the replicas of every slot by their digests; reads every row once.

    The exit code is 1 if copies differ or could not be compared.
    """
    report = ask(given, ClusterInspection.verify, as_json=as_json)
    if as_json:
        print_json(report)
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
