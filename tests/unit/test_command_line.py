"""All programs: ``-h``, shared options on both sides of a subcommand, values that are none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result

from backstay.cli import main as backstay
from backstay.config import ENDPOINT_VARIABLES
from backstay.pserver.ctl.cli import main as pserverctl
from backstay.pserver.serve_cli import main as pserver

PROGRAMS = {"backstay": backstay, "pserverctl": pserverctl, "pserver": pserver}
# No process listens there.
NOBODY = "127.0.0.1:1"


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (*ENDPOINT_VARIABLES, "BACKSTAY_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("BACKSTAY_DEADLINE_MS", "100")
    monkeypatch.chdir(tmp_path)


def below(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    yield path
    for name, one in command.commands.items() if isinstance(command, click.Group) else ():
        yield from below(one, (*path, name))


EVERY = [path for name, program in PROGRAMS.items() for path in below(program, (name,))]


def command_of(path: tuple[str, ...]) -> click.Command:
    command: click.Command = PROGRAMS[path[0]]
    for name in path[1:]:
        assert isinstance(command, click.Group)
        command = command.commands[name]
    return command


def valued(path: tuple[str, ...]) -> list[str]:
    """The options of a command that take a string."""
    return [
        one.opts[-1]
        for one in command_of(path).params
        if isinstance(one, click.Option) and not one.is_flag and one.type.name in ("text", "path")
    ]


def run(path: tuple[str, ...], *words: str) -> Result:
    return CliRunner().invoke(PROGRAMS[path[0]], [*path[1:], *words])


@pytest.mark.parametrize("path", EVERY, ids=" ".join)
def test_every_command_has_both_names_of_help(path: tuple[str, ...]) -> None:
    short, long = run(path, "-h"), run(path, "--help")
    assert short.exit_code == long.exit_code == 0, short.output
    assert short.output == long.output


@pytest.mark.parametrize(
    ("path", "option"),
    [(path, option) for path in EVERY for option in valued(path)],
    ids=lambda one: one if isinstance(one, str) else " ".join(one),
)
def test_the_next_option_and_nothing_are_no_values(path: tuple[str, ...], option: str) -> None:
    for words, why in (
        ((option, "--json"), "'--json' is the next option, not a value"),
        ((option, ""), "it is empty: is a variable not set?"),
    ):
        done = run(path, *words)
        assert done.exit_code == 2
        assert f"Invalid value for '{option}'" in done.output.replace("' / '-n", ""), done.output
        assert why in " ".join(done.output.split())


def test_the_next_command_is_no_value() -> None:
    done = run(("pserverctl",), "--endpoint", "status")
    assert done.exit_code == 2
    assert "'status' is the next command, not a value" in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("pserverctl", ("status",)),
        ("pserverctl", ("checkpoint", "list")),
        ("backstay", ("jobs", "list")),
        ("backstay", ("jobs", "show", "census")),
    ],
)
def test_shared_options_may_stand_anywhere(program: str, words: tuple[str, ...]) -> None:
    shared = ("--endpoint", NOBODY, "--json")
    for place in range(len(words) + 1):
        done = run((program,), *words[:place], *shared, *words[place:])
        assert done.exit_code == 3, done.output
        assert NOBODY in json.loads(done.stdout)["error"]


def test_of_two_the_last_one_wins() -> None:
    for program, words in (("pserverctl", ("status",)), ("backstay", ("jobs", "list"))):
        last = run((program,), "--endpoint", "first:1", *words, "--endpoint", NOBODY)
        assert NOBODY in last.stderr
        assert "first:1" not in last.stderr


def test_a_job_takes_what_stands_before_its_command(tmp_path: Path) -> None:
    words = ("train", "--name", "n", "--model", "none.py", "--training", "none.csv", "--servers")
    done = run(("backstay",), "--json", "--endpoint", NOBODY, *words, "1")
    assert done.exit_code == 2
    assert json.loads(done.stdout)["error"] == "--servers and --endpoint: give one of them"


def test_a_command_without_the_option_says_so() -> None:
    for words in (("--json", "local"), ("--endpoint", NOBODY, "local"), ("--json", "completion")):
        done = run(("backstay",), *words, *(("bash",) if "completion" in words else ()))
        assert done.exit_code == 2
        assert f"has no option {words[0]}" in done.output


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_for_both_commands(shell: str) -> None:
    for program in ("backstay", "pserverctl"):
        done = run((program,), "completion", shell)
        assert done.exit_code == 0
        assert f"_{program.upper()}_COMPLETE" in done.output


def test_names_of_jobs_that_were_run_here_are_completed(tmp_path: Path) -> None:
    for name in ("census", "ctr"):
        folder = tmp_path / "backstay-jobs" / name
        folder.mkdir(parents=True)
        (folder / "status.json").write_text("{}")
    complete = ShellComplete(backstay, {}, "backstay", "_BACKSTAY_COMPLETE")
    found = complete.get_completions(["jobs", "show"], "ce")
    assert [one.value for one in found] == ["census"]
    assert "train" in [one.value for one in complete.get_completions([], "t")]
