"""``pserverctl export``: exports that go on, started, stopped and looked at."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import click
from rich.console import Console
from rich.markup import escape

from backstay.checkpoint import remote_exports
from backstay.checkpoint.remote_exports import RunningExport
from backstay.errors import ConfigError, DeadlineExceeded
from backstay.exit_codes import ExitCode
from backstay.exits import exit_on_error, print_json
from backstay.job_spec import ExportsSpec, ExportTopicSpec
from backstay.pserver.client.inspection import ClusterInspection
from backstay.pserver.ctl.asking import ClusterOptions, ask, examples, json_option
from backstay.pserver.ctl.completion import suggestions
from backstay.pserver.ctl.showing import grid, print_whole, size_text

__all__ = ["export"]

LOOK_S = 0.2
STOP_WAIT_S = 60
TABLES_HELP = "Tables to export; * and ? stand for any characters. May be repeated."
_FLAGS = {"every_s": "--every", "tables": "--table"}


def _complete_name(context: click.Context, _parameter: click.Parameter, begun: str) -> list[str]:
    return suggestions(
        context, lambda inspection: [one.name for one in _exports(inspection)], begun
    )


def _spec_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add an option for each field of the spec that is a plain value."""
    for item in reversed(fields(ExportsSpec)):
        if item.name in ("url", "topic"):
            continue
        flag = _FLAGS.get(item.name, "--" + item.name.replace("_", "-"))
        low, high = item.metadata["minimum"], item.metadata["maximum"]
        more: dict[str, Any] = {"default": item.default, "help": item.metadata["doc"]}
        if item.name == "tables":
            more = {"default": ("*",), "multiple": True, "metavar": "PATTERN", "help": TABLES_HELP}
        elif isinstance(item.default, bool):
            more["is_flag"] = True
        elif isinstance(item.default, int):
            more["type"] = click.IntRange(low, high)
        else:
            more["type"] = click.FloatRange(low, high)
        command = click.option(flag, item.name, **more)(command)
    return command


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
@_spec_options
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
    /,
    name: str,
    url: str,
    *,
    topic: str | None,
    brokers: str | None,
    settings: tuple[str, ...],
    settings_file: str,
    as_json: bool,
    **chosen: Any,
) -> None:
    """Start an export NAME to the folder or URL that every node reaches as URL."""
    also = _topic_of(topic, brokers, settings, settings_file)
    with exit_on_error(ExitCode.NO_ANSWER, as_json=as_json):
        spec = ExportsSpec(url=url, topic=also, **chosen)
    ask(
        options,
        lambda inspection: inspection.first_answer(
            lambda channel: remote_exports.start(
                channel, name, spec, timeout_s=inspection.timeout_s
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
        print_json({"exports": [one.to_mapping() for one in found]})
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
            f"{one.spec.every_s:g} s"
            + (f", {one.spec.every_pushes:,} pushes" if one.spec.every_pushes else ""),
            escape(one.spec.url),
            str(len(one.spec.tables)),
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
        if one.spec.topic is not None:
            at = "has no rows yet"
            if one.topic_element:
                at = f"has {one.topic_element}, {one.topic_behind_s:.1f} s behind"
            click.echo(f"{one.name}: the topic {one.spec.topic.name} {at}")
        for trouble in (one.trouble, one.topic_trouble):
            if trouble:
                click.echo(f"{one.name}: {trouble}", err=True)


def _topic_of(
    topic: str | None, brokers: str | None, settings: tuple[str, ...], settings_file: str
) -> ExportTopicSpec | None:
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
    try:
        return ExportTopicSpec(
            name=topic,
            brokers=tuple(brokers.split(",")),
            settings=pairs,
            settings_file=settings_file,
        )
    except ConfigError as error:
        raise click.UsageError(f"--topic: {error}") from error
