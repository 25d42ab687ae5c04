"""``pserverctl resize``, ``drain``, ``rebalance`` and ``plan``: changing the nodes of a cluster."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any, NamedTuple, TypeAlias

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from backstay._proto.v1 import resize_pb2
from backstay.config import ClientConfig
from backstay.consensus.records.plans import ResizePlan
from backstay.errors import DeadlineExceeded, ResizeRefused
from backstay.exit_codes import ExitCode
from backstay.exits import exit_on_error, print_json
from backstay.pserver.ctl.asking import ClusterOptions, chosen_endpoints, examples, json_option
from backstay.pserver.ctl.completion import complete_node_id
from backstay.pserver.ctl.showing import size_text
from backstay.pserver.resizing import ClusterResizing

__all__ = ["COMMANDS"]

Decorated: TypeAlias = Callable[..., Any]


class _Waiting(NamedTuple):
    """How the end of a plan is waited for."""

    as_json: bool
    no_wait: bool
    timeout_s: float | None


def _waiting_options(command: Decorated) -> Decorated:
    for option in (
        json_option("Print one JSON object at the end."),
        click.option("--no-wait", is_flag=True, help="Return as soon as it is planned."),
        click.option(
            "--timeout",
            "timeout_s",
            type=click.FloatRange(min=0, min_open=True),
            help="Stop waiting after this many seconds; the plan goes on. Default: no limit.",
        ),
        click.option("--pause", is_flag=True, help="Let trainers wait while copies move."),
    ):
        command = option(command)
    return command


@click.command(
    epilog=examples(
        "pserverctl --endpoint 127.0.0.1:7000 resize 5",
        "pserverctl resize 3 --no-wait",
        "pserverctl resize 4 --pause --timeout 600 --json",
    )
)
@click.argument("nodes", type=click.IntRange(min=1))
@click.option(
    "--stop/--no-stop",
    default=True,
    show_default=True,
    help="Whether leaving processes end when they are empty.",
)
@click.option(
    "--node-timeout",
    "wait_s",
    type=click.IntRange(1, 86_400),
    default=600,
    show_default=True,
    help="How many seconds the plan waits for missing nodes.",
)
@_waiting_options
@click.pass_obj
def resize(
    options: ClusterOptions,
    nodes: int,
    stop: bool,
    wait_s: int,
    pause: bool,
    as_json: bool,
    no_wait: bool,
    timeout_s: float | None,
) -> None:
    """Spread the rows over NODES nodes, while trainers go on.

    The plan waits for missing nodes: start them (`backstay local` starts processes by itself).
    The copies of surplus nodes move to the others, and their processes end.
    """
    _plan(
        options,
        lambda asked: asked.resize(nodes, stop=stop, pause=pause, wait_s=wait_s),
        waiting=_Waiting(as_json, no_wait, timeout_s),
    )


@click.command(epilog=examples("pserverctl drain ps-2", "pserverctl drain ps-2 --stop --json"))
@click.argument("node", shell_complete=complete_node_id)
@click.option(
    "--stop/--no-stop",
    default=False,
    show_default=True,
    help="Whether its process ends when it is empty.",
)
@_waiting_options
@click.pass_obj
def drain(
    options: ClusterOptions,
    node: str,
    stop: bool,
    pause: bool,
    as_json: bool,
    no_wait: bool,
    timeout_s: float | None,
) -> None:
    """Move everything off NODE; it stays empty until another plan says otherwise."""
    _plan(
        options,
        lambda asked: asked.drain(node, stop=stop, pause=pause),
        waiting=_Waiting(as_json, no_wait, timeout_s),
    )


@click.command(epilog=examples("pserverctl rebalance", "pserverctl rebalance --no-wait"))
@_waiting_options
@click.pass_obj
def rebalance(
    options: ClusterOptions, pause: bool, as_json: bool, no_wait: bool, timeout_s: float | None
) -> None:
    """Spread copies and masters over all nodes, drained ones included."""
    _plan(
        options,
        lambda asked: asked.rebalance(pause=pause),
        waiting=_Waiting(as_json, no_wait, timeout_s),
    )


@click.command(
    epilog=examples("pserverctl plan", "pserverctl plan --json", "pserverctl plan --cancel")
)
@json_option()
@click.option("--cancel", is_flag=True, help="End the plan that is under way.")
@click.pass_obj
def plan(options: ClusterOptions, as_json: bool, cancel: bool) -> None:
    """Show the last plan with its progress, and the newest repairs; or cancel the plan.

    The cluster makes repairs by itself when a node is lost: every slot gets its copies back.
    """

    def ask(asked: ClusterResizing) -> tuple[ResizePlan | None, list[resize_pb2.Repair]]:
        return (asked.cancel(), []) if cancel else asked.plan_and_repairs()

    found, repairs = _asked(options, ask, as_json=as_json)
    if as_json:
        report: dict[str, Any] = {"plan": None if found is None else _to_object(found)}
        if not cancel:
            report["repairs"] = [_repair_object(one) for one in repairs]
        print_json(report)
        return
    click.echo("nothing was ever planned" if found is None else _text(found))
    for one in repairs:
        click.echo(_repair_text(one))


COMMANDS: tuple[click.Command, ...] = (resize, drain, rebalance, plan)


def _plan(
    options: ClusterOptions,
    request: Callable[[ClusterResizing], ResizePlan],
    *,
    waiting: _Waiting,
) -> None:
    """Make a request and wait for its end; ends the process with the code for what came of it."""

    def ask(asked: ClusterResizing) -> ResizePlan:
        planned = request(asked)
        if waiting.no_wait:
            return planned
        with _Bar(shown=not waiting.as_json) as bar:
            try:
                return asked.wait(planned, timeout_s=waiting.timeout_s, progress=bar.show)
            except (ResizeRefused, DeadlineExceeded) as error:
                raise _NotDone(bar.newest or planned, str(error)) from error
            except KeyboardInterrupt:
                click.echo("it goes on: pserverctl plan shows it, plan --cancel ends it", err=True)
                raise

    try:
        found = _asked(options, ask, as_json=waiting.as_json)
    except _NotDone as failed:
        if waiting.as_json:
            print_json({"plan": _to_object(failed.plan), "error": str(failed)})
        click.echo(f"Error: {failed}", err=True)
        sys.exit(ExitCode.FAILED)
    if waiting.as_json:
        print_json({"plan": _to_object(found)})
    else:
        click.echo(_text(found))


class _NotDone(Exception):
    """A plan that was made has not come to its end."""

    def __init__(self, plan: ResizePlan, why: str) -> None:
        super().__init__(why)
        self.plan = plan


class _Bar:
    """A bar that fills while copies move; on a terminal only."""

    def __init__(self, *, shown: bool) -> None:
        self.newest: ResizePlan | None = None
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not shown or not console.is_terminal,
            transient=True,
        )
        self._task = self._progress.add_task("planned", total=None)

    def show(self, plan: ResizePlan) -> None:
        """Show how far a plan is."""
        self.newest = plan
        text = plan.reason if plan.state == "waiting_for_nodes" else f"{plan.kind}: copies moved"
        self._progress.update(
            self._task,
            description=text,
            total=plan.moves_total or None,
            completed=plan.moves_total - plan.moves_left,
        )

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._progress.stop()


def _asked(
    options: ClusterOptions, question: Callable[[ClusterResizing], Any], *, as_json: bool
) -> Any:
    """Return the answer to a question, or end the process with the code for the failure."""
    with (
        exit_on_error(ExitCode.NO_ANSWER, as_json=as_json),
        ClusterResizing(
            chosen_endpoints(options), ClientConfig.load(file=options.config_file)
        ) as asked,
    ):
        return question(asked)


def _text(plan: ResizePlan) -> str:
    parts = [f"{plan.kind} to {plan.nodes} nodes: {plan.state.replace('_', ' ')}"]
    if plan.leaving:
        parts.append(f"leaving: {', '.join(one.node_id for one in plan.leaving)}")
    if plan.reason:
        parts.append(plan.reason)
    return "; ".join(parts)


def _repair_text(repair: resize_pb2.Repair) -> str:
    begun = datetime.fromtimestamp(repair.begun).strftime("%Y-%m-%d %H:%M:%S")
    parts = [f"repair {repair.id} of {begun}"]
    if repair.state == "done":
        parts[0] += f": done after {repair.ended - repair.begun:.1f} s"
    else:
        parts[0] += ": copying"
    parts += [one.reason for one in repair.lost]
    if repair.copies_total:
        done = repair.copies_total - repair.copies_left
        parts.append(f"{done} of {repair.copies_total} copies in sync again")
    if repair.bytes_total:
        parts[-1] += f" ({size_text(repair.bytes_total)})"
    if repair.slots_lost:
        parts.append(f"{repair.slots_lost} slots had no other copy")
    by = repair.begun_by
    if repair.ended_by not in ("", by):
        by += f", then {repair.ended_by}"
    return "; ".join([*parts, f"by {by}"])


def _repair_object(repair: resize_pb2.Repair) -> dict[str, Any]:
    return {
        "id": repair.id,
        "state": repair.state,
        "lost": [{"node_id": one.node_id, "reason": one.reason} for one in repair.lost],
        "slots_lost": repair.slots_lost,
        "copies_total": repair.copies_total,
        "copies_left": repair.copies_left,
        "bytes_total": repair.bytes_total or None,
        "bytes_left": repair.bytes_left if repair.bytes_total else None,
        "begun": repair.begun,
        "ended": repair.ended or None,
        "begun_by": repair.begun_by,
        "ended_by": repair.ended_by or None,
    }


def _to_object(plan: ResizePlan) -> dict[str, Any]:
    return {
        "plan_id": plan.plan_id,
        "kind": plan.kind,
        "nodes": plan.nodes,
        "leaving": [one.node_id for one in plan.leaving],
        "stop": plan.stop,
        "pause": plan.pause,
        "wait_s": plan.wait_s,
        "state": plan.state,
        "reason": plan.reason,
        "moves_total": plan.moves_total,
        "moves_left": plan.moves_left,
        "started": plan.started,
    }
