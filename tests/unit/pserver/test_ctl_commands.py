"""``pserverctl`` without a cluster: help, exit codes, completion, what is printed of a report."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import time
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from backstay.config import ENDPOINT_VARIABLES
from backstay.exit_codes import CONTROL_CODES
from backstay.pserver.ctl.cli import main
from backstay.pserver.ctl.completion import complete_node_id

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "cli.md"


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*ENDPOINT_VARIABLES, "BACKSTAY_CONFIG"):
        monkeypatch.delenv(name, raising=False)


def leaves(command: click.Command, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every command with the words that lead to it, groups included."""
    below = command.commands if isinstance(command, click.Group) else {}
    return [path, *(found for name, one in below.items() for found in leaves(one, (*path, name)))]


COMMANDS = leaves(main)


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_help_has_examples_of_that_command_and_the_exit_codes(path: tuple[str, ...]) -> None:
    done = CliRunner().invoke(main, [*path, "--help"])
    assert done.exit_code == 0
    shown = done.output.partition("Examples:")[2].partition("Exit codes:")
    assert " ".join(("pserverctl", *path)) in re.sub(r" --endpoint \S+", "", shown[0])
    for code in CONTROL_CODES:
        assert f"{code}    {code.meaning}" in shown[2]


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_command_that_asks_has_json_and_its_place_on_the_page(path: tuple[str, ...]) -> None:
    command: click.Command = main
    for name in path:
        assert isinstance(command, click.Group)
        command = command.commands[name]
    if path:
        assert f"### pserverctl {path[0]}\n" in PAGE.read_text(encoding="utf-8")
    if not isinstance(command, click.Group) and path != ("completion",):
        assert "--json" in {name for one in command.params for name in one.opts}


@pytest.mark.parametrize(
    "arguments", ["status", "top", "slots", "slots --slot 1", "config get", "config set a=1"]
)
def test_without_an_endpoint_or_an_answer_a_sentence_says_so(arguments: str) -> None:
    words = arguments.split()
    done = CliRunner().invoke(main, words)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("Error: endpoint: give --endpoint HOST:PORT or set BACKSTAY_")
    done = CliRunner().invoke(main, ["--endpoint", "127.0.0.1:1", *words, "--json"])
    assert done.exit_code == 3
    assert '"error": "no pserver answers at 127.0.0.1:1 (connection refused)' in done.stdout
    assert done.stderr.startswith("Error: no pserver answers at 127.0.0.1:1")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_for_a_shell(shell: str) -> None:
    done = CliRunner().invoke(main, ["completion", shell])
    assert done.exit_code == 0
    assert f"_PSERVERCTL_COMPLETE={shell}_complete" in done.stdout
    program = shutil.which(shell)
    if program is not None:
        # The shell itself says whether it is one.
        checked = subprocess.run(
            [program, "-n"], input=done.stdout, capture_output=True, text=True, check=False
        )
        assert checked.returncode == 0, checked.stderr


def test_a_shell_that_is_not_known_is_a_wrong_argument() -> None:
    done = CliRunner().invoke(main, ["completion", "tcsh"])
    assert done.exit_code == 2
    assert "'bash', 'zsh', 'fish'" in done.stderr


def completed(words: list[str], begun: str) -> list[str]:
    complete = ShellComplete(main, {}, "pserverctl", "_PSERVERCTL_COMPLETE")
    return [item.value for item in complete.get_completions(words, begun)]


def test_commands_options_and_names_of_settings_are_completed() -> None:
    assert completed([], "s") == ["slots", "status"]
    assert completed(["slots"], "--s") == ["--slot"]
    assert completed(["config"], "") == ["get", "set", "show"]
    assert completed(["config", "get"], "on_") == ["on_slot_loss"]
    assert completed(["config", "set", "moves_at_once=8"], "checkpoint_u") == ["checkpoint_url="]
    assert completed(["config", "set"], "moves_at_once=") == []


def node_ids(*words: str) -> list[str]:
    """What is suggested for a node's id by a command that takes one."""
    root = click.Group("pserverctl", params=main.params)
    argument = click.Argument(["node"], shell_complete=complete_node_id)
    root.add_command(click.Command("drain", params=[argument]))
    complete = ShellComplete(root, {}, "pserverctl", "_PSERVERCTL_COMPLETE")
    return [item.value for item in complete.get_completions([*words, "drain"], "ps")]


def test_without_a_cluster_no_id_is_suggested_and_nothing_is_said(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert node_ids() == []
    assert node_ids("--endpoint", "127.0.0.1:1") == []
    assert node_ids("--endpoint", "nonsense") == []
    monkeypatch.setenv("BACKSTAY_CONFIG", "/nowhere.toml")
    assert node_ids("--endpoint", "127.0.0.1:1") == []
    assert capfd.readouterr() == ("", "")


def test_a_node_that_hangs_holds_up_the_shell_for_a_second_only() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        began = time.monotonic()
        assert node_ids("--endpoint", f"127.0.0.1:{silent.getsockname()[1]}") == []
        assert time.monotonic() - began < 20  # a busy machine; without the limit it never ends
