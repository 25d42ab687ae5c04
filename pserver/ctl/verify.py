"""``pserverctl verify``: whether the replicas of every slot are equal."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from backstay.exit_codes import ExitCode
from backstay.exits import print_json
from backstay.pserver.client.inspection import ClusterInspection
from backstay.pserver.ctl.asking import ClusterOptions, ask, examples, json_option

__all__ = ["verify"]

# More of them say nothing new; --json has all.
RANGES_SHOWN_MAX = 8

EXAMPLES = examples("pserverctl --endpoint 127.0.0.1:7000 verify")


@click.command(epilog=EXAMPLES)
@json_option()
@click.pass_obj
def verify(options: ClusterOptions, as_json: bool) -> None:
    """Compare the replicas of every slot by their digests; reads every row once.

    The exit code is 1 if copies differ or could not be compared.
    """
    report = ask(options, ClusterInspection.verify, as_json=as_json)
    if as_json:
        print_json(report)
    else:
        click.echo(f"{report['equal']} slots have equal copies, {report['single']} only one copy")
        for line in _lines(report):
            click.echo(line)
    sys.exit(0 if report["good"] else ExitCode.FAILED)


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is not as it should be, and what to do about it."""
    if report["different"]:
        yield f"{_slots(report['different'])}: copies DIFFER"
        yield "  restore these slots from a checkpoint (pserverctl checkpoint restore --slots)"
    if report["silent_nodes"]:
        yield f"no answer from {', '.join(report['silent_nodes'])}: their copies are not compared"
    if report["undecided"]:
        yield f"{_slots(report['undecided'])}: not compared"
        if not report["silent_nodes"]:
            yield (
                "  pushes came between the looks at their copies, which were never met at the same "
                "position; run it again when fewer pushes come"
            )


def _slots(slots: Sequence[int]) -> str:
    """Return so many slots as ranges, the first ones of many."""
    ranges: list[list[int]] = []
    for slot in slots:
        if ranges and ranges[-1][1] == slot - 1:
            ranges[-1][1] = slot
        else:
            ranges.append([slot, slot])
    shown = [f"{a}-{b}" if a != b else str(a) for a, b in ranges[:RANGES_SHOWN_MAX]]
    more = ", ..." if len(ranges) > RANGES_SHOWN_MAX else ""
    return f"{len(slots)} slots ({', '.join(shown)}{more})"
