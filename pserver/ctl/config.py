"""``pserverctl config show|get|set``: the cluster's settings that may change while it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click
import grpc
from rich.console import Console
from rich.markup import escape

from backstay._proto.v1 import settings_pb2, settings_pb2_grpc
from backstay.consensus.records.settings import ClusterSettings
from backstay.errors import ConfigError
from backstay.exits import print_json
from backstay.pserver.client.inspection import ClusterInspection
from backstay.pserver.ctl.asking import ClusterOptions, ask, examples, json_option
from backstay.pserver.ctl.showing import grid, print_whole
from backstay.settings import suggestion

__all__ = ["config"]

EXAMPLES = examples(
    "pserverctl config show",
    "pserverctl config get",
    "pserverctl config get checkpoint_url",
    "pserverctl config set checkpoint_url=s3://bucket/ads checkpoint_every_s=600",
)
SHOW_EXAMPLES = examples("pserverctl config show", "pserverctl config show --json")
GET_EXAMPLES = examples(
    "pserverctl config get",
    "pserverctl config get checkpoint_url",
    "pserverctl config get --explain",
    "pserverctl config get --json",
)
SET_EXAMPLES = examples(
    "pserverctl config set checkpoint_url=s3://bucket/ads checkpoint_every_s=600",
    "pserverctl config set checkpoint_url= checkpoint_every_s=0",
    "pserverctl config set --revision 4711 moves_at_once=8",
)


def _names(_context: click.Context, _parameter: click.Parameter, begun: str) -> list[str]:
    """Complete the name of a setting."""
    return [one.name for one in ClusterSettings().texts() if one.name.startswith(begun)]


def _assignments(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """Complete the name of a setting, as far as the value."""
    return [name + "=" for name in _names(context, parameter, begun)] if "=" not in begun else []


@click.group(epilog=EXAMPLES)
def config() -> None:
    """Show or change the settings of the whole cluster; no node is started again for it."""


@config.command("get", epilog=GET_EXAMPLES)
@json_option()
@click.option("--explain", is_flag=True, help="Say what each setting does.")
@click.argument("name", required=False, shell_complete=_names)
@click.pass_obj
def get(options: ClusterOptions, name: str | None, explain: bool, as_json: bool) -> None:
    """Show all settings, or only the value of NAME."""

    def question(inspection: ClusterInspection) -> dict[str, Any]:
        report = _read(inspection)
        del report["fixed"]
        if name is not None:
            report["settings"] = [_named(report["settings"], name)]
        return report

    report = ask(options, question, as_json=as_json)
    if as_json:
        print_json(report)
    elif name is not None and not explain:
        click.echo(report["settings"][0]["value"])
    elif explain:
        for one in report["settings"]:
            click.echo(_explained(one))
    else:
        _show(report)


@config.command("show", epilog=SHOW_EXAMPLES)
@json_option()
@click.pass_obj
def show(options: ClusterOptions, as_json: bool) -> None:
    """Show every value, fixed ones too, and where each comes from."""
    report = ask(options, _read, as_json=as_json)
    if as_json:
        print_json(report)
        return
    table = grid("setting", "value", "source")
    for one in report["fixed"] + report["settings"]:
        value = escape(str(one["value"])) or "(empty)"
        table.add_row(one["name"], value, escape(one["source"]))
    print_whole(Console(), table)
    click.echo(f"revision {report['revision']}")


@config.command("set", epilog=SET_EXAMPLES)
@json_option()
@click.option(
    "--revision",
    type=click.IntRange(min=0),
    help="Change nothing unless the settings are at this revision, as `config get` showed it.",
)
@click.argument("assignments", metavar="NAME=VALUE...", nargs=-1, shell_complete=_assignments)
@click.pass_obj
def set_(
    options: ClusterOptions, assignments: tuple[str, ...], revision: int | None, as_json: bool
) -> None:
    """Change settings in one step; nothing is changed if one of them is wrong.

    If another operator changes a setting at the same time, one of the two is refused.
    """

    def question(inspection: ClusterInspection) -> dict[str, Any]:
        values = parse_assignments(assignments)
        expected = _read(inspection)["revision"] if revision is None else revision
        report = _report(
            inspection.first_answer(
                lambda channel: settings_pb2_grpc.SettingsServiceStub(channel).SetSettings(
                    settings_pb2.SetSettingsRequest(values=values, expected_revision=expected),
                    timeout=inspection.timeout_s,
                )
            )
        )
        del report["fixed"]
        return report

    report = ask(options, question, as_json=as_json)
    if as_json:
        print_json(report)
        return
    changed = parse_assignments(assignments)
    for one in report["settings"]:
        if one["name"] in changed:
            click.echo(f"{one['name']} = {one['value']}")
    click.echo(f"settings are at revision {report['revision']}")


def parse_assignments(assignments: Sequence[str]) -> dict[str, str]:
    """Return the values by name of arguments of the form ``name=value``.

    Raises:
        ConfigError: There is none, one is not of that form, or a name is there twice.
    """
    if not assignments:
        raise ConfigError("config set: give at least one NAME=VALUE")
    values: dict[str, str] = {}
    for text in assignments:
        name, sign, value = text.partition("=")
        if not sign or not name:
            raise ConfigError(f"config set: {text!r} is not of the form NAME=VALUE")
        if name in values:
            raise ConfigError(f"config set: {name} is given twice")
        values[name] = value
    return values


def _read(inspection: ClusterInspection) -> dict[str, Any]:
    def call(channel: grpc.Channel) -> settings_pb2.GetSettingsResponse:
        return settings_pb2_grpc.SettingsServiceStub(channel).GetSettings(
            settings_pb2.GetSettingsRequest(), timeout=inspection.timeout_s
        )

    return _report(inspection.first_answer(call))


def _report(
    answer: settings_pb2.GetSettingsResponse | settings_pb2.SetSettingsResponse,
) -> dict[str, Any]:
    """Return an answer as a JSON object, numbers as numbers."""

    def typed(one: settings_pb2.Setting, text: str) -> str | int:
        return int(text) if one.is_number else text

    fixed = answer.fixed if isinstance(answer, settings_pb2.GetSettingsResponse) else ()
    return {
        "revision": answer.revision,
        "fixed": [
            {"name": one.name, "value": typed(one, one.value), "source": one.source}
            for one in fixed
        ],
        "settings": [
            {
                "name": one.name,
                "value": typed(one, one.value),
                "default": typed(one, one.default_value),
                "allowed": one.allowed or None,
                "help": one.help,
                "source": one.source,
            }
            for one in answer.settings
        ],
    }


def _named(settings: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    known = {one["name"]: one for one in settings}
    if name not in known:
        raise ConfigError(
            f"{name}: no such setting{suggestion(name, known)}; there are {', '.join(known)}"
        )
    return known[name]


def _explained(one: Mapping[str, Any]) -> str:
    allowed = f"; allowed: {one['allowed']}" if one["allowed"] else ""
    default = one["default"] if one["default"] != "" else "empty"
    return f"{one['name']} = {one['value']}\n    {one['help']} (default: {default}{allowed})"


def _show(report: Mapping[str, Any]) -> None:
    table = grid("setting", "value", "default", "allowed")
    for one in report["settings"]:
        value = escape(str(one["value"])) or "(empty)"
        is_changed = one["value"] != one["default"]
        table.add_row(
            one["name"],
            f"[bold]{value}[/bold]" if is_changed else value,
            escape(str(one["default"])) or "(empty)",
            one["allowed"] or "",
        )
    print_whole(Console(), table)
    click.echo(f"revision {report['revision']}")
