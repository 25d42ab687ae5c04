"""Every setting is an option, every option explains itself, and every figure is explained."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click
import pytest

from backstay import _native
from backstay.config import ServerConfig
from backstay.pserver import local_cli, serve_cli
from backstay.pserver.ctl import cli as ctl_cli

pytestmark = pytest.mark.gates

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference"
COMMANDS_PAGE = (REFERENCE / "cli.md").read_text(encoding="utf-8")


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
