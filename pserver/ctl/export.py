"""``pserverctl export``: exports that go on, started, stopped and looked at."""

from __future__ import annotations

import time
from dataclasses import asdict

import click
from rich.console import Console
from rich.markup import escape

from backstay.checkpoint import remote_exports
from backstay.checkpoint.remote_exports import ExportTopic, RunningExport
from backstay.consensus.records.exports import EVERY_PUSHES_MAX
from backstay.errors import DeadlineExceeded
from backstay.exit_codes import ExitCode
from backstay.exits import print_json
from backstay.pserver.client.inspection import ClusterInspection
from backstay.pserver.ctl.asking import ClusterOptions, ask, examples, json_option
from backstay.pserver.ctl.completion import suggestions
from backstay.pserver.ctl.showing import grid, print_whole, size_text

__all__ = ["export"]

LOOK_S = 0.2
STOP_WAIT_S = 60


def _complete_name(context: click.Context, _parameter: click.Parameter, begun: str) -> list[str]:
    return suggestions(
        context, lambda inspection: [one.name for one in _exports(inspection)], begun
    )


@click.group(
    epilog=examples(
        "pserverctl export start clicks /shared/serve/clicks --every 1 --table 'clicks/*'",
        "pserverctl export status",
        "pserverctl export stop clicks",
    )
)
def export() -> None:
    """Export rows again and again, for a model that is served while it is trained."""


@export.command(
    epilog=examples(
        "pserverctl export start clicks /shared/serve/clicks",
        "pserverctl export start ads s3://bucket/ads --every 5 --table job/ads --statistics",
        "pserverctl export start clicks /shared/serve/clicks --topic clicks --brokers kafka-0:9092",
    )
)
@json_option()
@click.argument("name")
@click.argument("url")
@click.option(
    "--every",
    "every_s",
    type=float,
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="From one increment to the next.",
)
@click.option(
    "--every-pushes",
    type=click.IntRange(0, EVERY_PUSHES_MAX),
    default=0,
    metavar="N",
    help="Earlier, when a server has applied so many pushes since the last increment.",
)
@click.option(
    "--table",
    "tables",
    multiple=True,
    default=("*",),
    show_default=True,
    metavar="PATTERN",
    help="Tables to export; * and ? stand for any characters. May be repeated.",
)
@click.option("--statistics", is_flag=True, help="Also write the statistics of rows.")
@click.option(
    "--score-at-least",
    type=float,
    metavar="SCORE",
    help="Leave out rows of a lower score, in tables whose lifetime uses one.",
)
@click.option("--topic", metavar="NAME", help="Also to this topic of Kafka; it must be compacted.")
@click.option("--brokers", metavar="HOST:PORT[,..]", help="Brokers of the topic.")
@click.option(
    "--kafka-setting",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    help="Setting of the client, librdkafka; everyone sees it. May be repeated.",
)
@click.option(
    "--kafka-settings-file",
    "settings_file",
    default="",
    metavar="PATH",
    help="File on each node with lines of NAME=VALUE, such as secrets.",
)
@click.pass_obj
def start(
    options: ClusterOptions,
    name: str,
    url: str,
    every_s: float,
    every_pushes: int,
    tables: tuple[str, ...],
    statistics: bool,
    score_at_least: float | None,
    topic: str | None,
    brokers: str | None,
    settings: tuple[str, ...],
    settings_file: str,
    as_json: bool,
) -> None:
    """Start an export NAME to the folder or URL that every node reaches as URL."""
    also = _topic_of(topic, brokers, settings, settings_file)
    ask(
        options,
        lambda inspection: inspection.first_answer(
            lambda channel: remote_exports.start(
                channel,
                name,
                url,
                every_s=every_s,
                every_pushes=every_pushes,
                tables=tables,
                statistics=statistics,
                score_at_least=score_at_least,
                topic=also,
                timeout_s=inspection.timeout_s,
            )
        ),
        as_json=as_json,
    )
    if as_json:
        print_json({"name": name, "url": url})
    else:
        click.echo(f"{name} is exported to {url}; pserverctl export status tells how it goes")


@export.command(
    epilog=examples("pserverctl export stop clicks", "pserverctl export stop clicks --now")
)
@json_option()
@click.argument("name", shell_complete=_complete_name)
@click.option("--now", is_flag=True, help="Without a last increment, as if the folder is away.")
@click.pass_obj
def stop(options: ClusterOptions, name: str, now: bool, as_json: bool) -> None:
    """Write one more increment, with every push acknowledged so far, and end the export NAME."""

    def question(inspection: ClusterInspection) -> None:
        inspection.first_answer(
            lambda channel: remote_exports.stop(
                channel, name, now=now, timeout_s=inspection.timeout_s
            )
        )
        end_s = time.monotonic() + STOP_WAIT_S
        while found := [one for one in _exports(inspection) if one.name == name]:
            if time.monotonic() > end_s:
                raise DeadlineExceeded(
                    f"the export {name} has not ended after {STOP_WAIT_S} s"
                    + (f": {trouble}" if (trouble := _trouble_of(found[0])) else "")
                    + "; it ends when its last increment is written, or with --now"
                )
            time.sleep(LOOK_S)

    ask(options, question, as_json=as_json)
    if as_json:
        print_json({"name": name})
    else:
        click.echo(f"{name} is exported no more")


@export.command(epilog=examples("pserverctl export status", "pserverctl export status --json"))
@json_option()
@click.pass_obj
def status(options: ClusterOptions, as_json: bool) -> None:
    """Show the exports that go on: how old the newest increment is, and what is wrong."""
    found = ask(options, _exports, as_json=as_json)
    if as_json:
        print_json({"exports": [asdict(one) for one in found]})
    elif not found:
        click.echo("no export goes on")
    else:
        _show(found)
    if any(map(_trouble_of, found)):
        raise SystemExit(ExitCode.FAILED)


def _exports(inspection: ClusterInspection) -> tuple[RunningExport, ...]:
    return inspection.first_answer(
        lambda channel: remote_exports.list_exports(channel, timeout_s=inspection.timeout_s)
    )


def _trouble_of(one: RunningExport) -> str:
    return one.trouble or one.topic_trouble


def _show(exports: tuple[RunningExport, ...]) -> None:
    table = grid("export", "every", "to", "tables", "newest", "age", "rows", "size", "left out")
    for one in exports:
        table.add_row(
            escape(one.name),
            f"{one.every_s:g} s" + (f", {one.every_pushes:,} pushes" if one.every_pushes else ""),
            escape(one.url),
            str(len(one.tables)),
            one.element or "none yet",
            f"{one.age_s:.1f} s" if one.element else "-",
            f"{one.rows:,}",
            size_text(one.bytes),
            f"{one.left_out} slots" if one.left_out else "-",
        )
    print_whole(Console(), table)
    for one in exports:
        if one.chain:
            click.echo(f"{one.name}: since {one.chain}: {one.reason}")
        if one.stopping:
            click.echo(f"{one.name}: ends with its next increment")
        if one.topic is not None:
            at = "has no rows yet"
            if one.topic_element:
                at = f"has {one.topic_element}, {one.topic_behind_s:.1f} s behind"
            click.echo(f"{one.name}: the topic {one.topic.name} {at}")
        for trouble in (one.trouble, one.topic_trouble):
            if trouble:
                click.echo(f"{one.name}: {trouble}", err=True)


def _topic_of(
    topic: str | None, brokers: str | None, settings: tuple[str, ...], settings_file: str
) -> ExportTopic | None:
    """Return the topic that options name.

    Raises:
        UsageError: They do not go together.
    """
    if topic is None:
        if brokers or settings or settings_file:
            raise click.UsageError("--brokers and --kafka-... are for --topic NAME")
        return None
    if not brokers:
        raise click.UsageError("--topic needs --brokers HOST:PORT[,..]")
    pairs = {}
    for one in settings:
        name, sign, value = one.partition("=")
        if not (name and sign):
            raise click.UsageError(f"--kafka-setting {one!r}: expected NAME=VALUE")
        pairs[name] = value
    return ExportTopic(tuple(brokers.split(",")), topic, pairs, settings_file)
