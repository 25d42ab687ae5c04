"""The reference tells every setting, with its default and bounds, and every figure."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click
import pytest

from backstay import _native
from backstay.config import ClientConfig, SecurityConfig, ServerConfig
from backstay.consensus.records.settings import ClusterSettings
from backstay.pserver import local_cli, serve_cli
from backstay.pserver.ctl import cli as ctl_cli

pytestmark = pytest.mark.gates

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference"
PAGE = (REFERENCE / "configuration.md").read_text(encoding="utf-8")
COMMANDS_PAGE = (REFERENCE / "cli.md").read_text(encoding="utf-8")
SHARED = {item.name for item in dataclasses.fields(SecurityConfig)}


def row_of(item: dataclasses.Field[object]) -> str:
    """The line of a table that a setting must have, as its field says it."""
    default = f"`{item.default}`"
    if item.default is None or item.default == ():
        default = "not set"
    elif item.default == "":
        default = "empty"
    elif item.default is False:
        default = "false"
    low, high = item.metadata["minimum"], item.metadata["maximum"]
    allowed = "" if low is None else f"{low} or more" if high is None else f"{low} to {high}"
    return f"| `{item.name}` | {default} | {allowed} | {item.metadata['doc']} |"


@pytest.mark.parametrize("kind", [SecurityConfig, ServerConfig, ClientConfig, ClusterSettings])
def test_every_setting_has_its_row(kind: type[SecurityConfig | ClusterSettings]) -> None:
    rows = set(PAGE.splitlines())
    for item in dataclasses.fields(kind):
        assert row_of(item) in rows, f"docs/reference/configuration.md lacks: {row_of(item)}"


def test_the_page_has_no_setting_that_is_not_there() -> None:
    sections = PAGE.partition("## Server")[2].partition("## Names")[0]
    server, _, client_and_cluster = sections.partition("## Client")
    client, _, cluster = client_and_cluster.partition("## The whole cluster")
    kinds: tuple[tuple[type[SecurityConfig | ClusterSettings], str], ...] = (
        (ServerConfig, server),
        (ClientConfig, client),
        (ClusterSettings, cluster),
    )
    for kind, text in kinds:
        rows = [line.split("`")[1] for line in text.splitlines() if line.startswith("| `")]
        assert rows == [item.name for item in dataclasses.fields(kind) if item.name not in SHARED]


def test_every_setting_that_may_be_shown_has_an_option() -> None:
    # As a run makes it: click remembers the help option of the first context.
    context = click.Context(serve_cli.serve, **serve_cli.serve.context_settings)
    options = {name for parameter in serve_cli.serve.get_params(context) for name in parameter.opts}
    expected = {
        "--" + item.name.replace("_", "-") for item in dataclasses.fields(ServerConfig) if item.repr
    }
    assert expected <= options
    assert "--token" not in options


def all_commands(command: click.Command) -> list[click.Command]:
    """The command and, of a group, every command below it."""
    below = command.commands.values() if isinstance(command, click.Group) else ()
    return [command, *(found for one in below for found in all_commands(one))]


@pytest.mark.parametrize(
    "command",
    [serve_cli.serve, local_cli.local, *all_commands(ctl_cli.main)],
    ids=lambda command: str(command.name),
)
def test_every_option_explains_itself(command: click.Command) -> None:
    # The page of commands leaves the options to --help.
    for parameter in command.params:
        if isinstance(parameter, click.Option) and not parameter.hidden:
            assert parameter.help, f"{command.name} {parameter.opts[0]} has no help"


def test_every_figure_of_the_data_plane_is_explained() -> None:
    server = _native.DataServer(
        listen="127.0.0.1:0", cluster_id="docs", node_id="ps-0", instance=1, slot_count=1
    )
    try:
        for name in json.loads(server.stats_json()):
            assert f"`{name}`" in COMMANDS_PAGE, f"docs/reference/cli.md does not tell {name}"
    finally:
        server.stop(grace_ms=0)
