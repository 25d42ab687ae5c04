"""Each command in the documentation is one that exists, with its options; nothing is run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest
import yaml

from backstay.cli import main as backstay
from backstay.command_line import commands_below
from backstay.job_spec import JobSpec
from backstay.master.job_file import load_job, parse_value
from backstay.pserver.ctl.cli import main as pserverctl
from backstay.pserver.serve_cli import main as pserver

pytestmark = pytest.mark.gates

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS: dict[str, click.Command] = {
    "backstay": backstay,
    "pserver": pserver,
    "pserverctl": pserverctl,
}
PATTERNS = ("*.md", "docs/**/*.md", "examples/**/*.md", "deploy/**/*.md")
# It tells of options that are gone.
PAGES = [
    path
    for pattern in PATTERNS
    for path in sorted(ROOT.glob(pattern))
    if path.name != "CHANGELOG.md"
]
KUBERNETES_PAGES = [
    ROOT / "docs" / "guide" / name for name in ("kubernetes.md", "kubernetes-jobs.md")
]
# What a job must have, whatever a page is about.
JOB = {"name": "x", "model": "model.py", "training.paths": ["a.csv"]}
IMAGE = {"kubernetes.image": "image:1"}
SETTING = re.compile(r"\w+=")
# Other lines may be anything, also half of a string.
OURS = re.compile(r"(?:^|[\s/(])(?:backstay|pserver|pserverctl)(?=[\s)]|$)")
SEPARATORS = set("();<>|&")


class Command(NamedTuple):
    """One of our commands as a page shows it."""

    words: list[str]
    is_whole: bool
    """Whether it can be typed as it is, and is not a mention such as `backstay train`."""


def commands_in(shell: str, *, is_whole: bool = True) -> Iterator[Command]:
    """Yield our commands in some lines of shell, also those that others run."""
    for line in re.sub(r"\\\n", " ", shell).splitlines():
        if not OURS.search(line):
            continue
        line = re.sub(r"^\s*\$ ", "", line)
        for inner in re.findall(r"\$\(([^()]*)\)", line):
            yield from commands_in(inner, is_whole=is_whole)
        for words in _simple_commands(re.sub(r"\$\([^()]*\)", "X", line)):
            for number, word in enumerate(words):
                before = [one for one in words[:number] if not SETTING.match(one)]
                if word.rpartition("/")[2] in PROGRAMS and (not before or before[-1] == "--"):
                    ours = [one for one in words[number + 1 :] if one != "..."]
                    yield Command([word.rpartition("/")[2], *ours], is_whole)
                    break


def _simple_commands(line: str) -> Iterator[list[str]]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if set(word) <= SEPARATORS:
            yield words
            words = []
        else:
            words.append(word)


def commands_of(page: str) -> Iterator[Command]:
    """Yield our commands of a page: in blocks, and in the text."""
    for kind, block in re.findall(
        r"^ *```(sh|console)\n(.*?)^ *```", page, re.DOTALL | re.MULTILINE
    ):
        lines = block.splitlines(keepends=True)
        typed = lines if kind == "sh" else [one for one in lines if one.lstrip().startswith("$ ")]
        yield from commands_in("".join(typed))
    text = re.sub(r"^ *```.*?^ *```", "", page, flags=re.DOTALL | re.MULTILINE)
    last = ""
    for words in re.findall(r"`([^`]+)`", text.replace("\\|", "|")):
        mention = re.sub(r"[\[\]]", "", words).replace("\n", " ")
        # Tables of `backstay jobs` repeat the beginning as three dots.
        if mention.startswith("... ") and last.startswith("backstay jobs "):
            mention = mention.replace("...", "backstay jobs", 1)
        if mention.split()[:1] and mention.split()[0] in (*PROGRAMS, "kubectl"):
            last = mention
            yield from commands_in(mention, is_whole=False)


def check(command: Command) -> None:
    """Parse a command's words with its own parser, and let nothing run.

    Raises:
        click.UsageError: It is not a command, or has no such option or argument.
    """
    program, *rest = command.words
    found = PROGRAMS[program]
    context = click.Context(found, info_name=program)
    while True:
        given, rest, _ = found.make_parser(context).parse_args(rest)
        _check_values(found, context, given, command)
        if not isinstance(found, click.Group):
            break
        if not rest:
            return
        _, below, rest = found.resolve_command(context, rest)
        assert below is not None
        found, context = below, click.Context(below, info_name=below.name, parent=context)
    if rest:
        raise click.UsageError(f"{rest}: too many arguments", context)


def _check_values(
    found: click.Command, context: click.Context, given: dict[str, Any], command: Command
) -> None:
    if not command.is_whole:
        return
    for parameter in found.params:
        value = given.get(str(parameter.name))
        if value is None or parameter.value_is_missing(value):
            if parameter.required:
                raise click.MissingParameter(ctx=context, param=parameter)
        elif not isinstance(parameter.type, click.Path | click.File):
            parameter.type_cast_value(context, value)
    for text in given.get("others", ()):
        field, _, value = text.partition("=")
        load_job(None, {**JOB, **IMAGE, field: parse_value(value)}, folder=ROOT)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_page_exists(page: Path) -> None:
    for command in commands_of(page.read_text(encoding="utf-8")):
        try:
            check(command)
        except (click.ClickException, ValueError) as error:
            pytest.fail(f"{' '.join(command.words)}: {error}")


@pytest.mark.parametrize(
    "command",
    [one for program in PROGRAMS.values() for one in commands_below(program) if one.epilog],
    ids=lambda command: str(command.name),
)
def test_every_example_of_a_help_text_exists(command: click.Command) -> None:
    assert command.epilog is not None
    shown = command.epilog.partition("Examples:")[2].partition("Exit codes:")[0]
    found = list(commands_in(shown.replace("\b", "")))
    assert found
    for one in found:
        check(one)


@pytest.mark.parametrize("page", KUBERNETES_PAGES, ids=lambda page: page.name)
def test_the_pages_on_kubernetes_have_commands_and_name_files_that_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(list(commands_of(text))) > 3
    for name in re.findall(r"(?<![\w/.-])deploy/[\w./@-]*\w", text):
        assert (ROOT / name).exists(), name
    for kind, name in re.findall(r"(--target|--build-arg) (\w+)", text):
        assert re.search(
            rf"^ARG {name}\b" if kind == "--build-arg" else rf"^FROM .* AS {name}$",
            (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8"),
            re.MULTILINE,
        ), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_target_of_make_exists(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    text = page.read_text(encoding="utf-8")
    told = re.findall(r"(?:^|`)(?:[A-Z_]+=\S+ )*make ([a-z-]+)", text, re.MULTILINE)
    assert set(told) <= targets


def job_parts(page: Path) -> list[dict[str, Any]]:
    """The blocks of YAML on a page that are a job file, or a part of one."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```yaml[^\n]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    found = [one for block in blocks for one in yaml.safe_load_all(block)]
    return [one for one in found if one.keys() <= set(JobSpec.__dataclass_fields__)]


@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs" / "guide").glob("*.md")), ids=lambda page: page.name
)
def test_every_job_file_of_the_guide_loads(page: Path, tmp_path: Path) -> None:
    for part in job_parts(page):
        whole = {"name": "x", "model": "model.py", "training": "a.csv", **part}
        path = tmp_path / "job.yaml"
        path.write_text(yaml.safe_dump(whole), encoding="utf-8")
        load_job(path, {}, folder=tmp_path)


def test_the_page_on_jobs_has_job_files() -> None:
    assert len(job_parts(KUBERNETES_PAGES[1])) == 5


@pytest.mark.parametrize(
    "line",
    [
        "backstay trian job.yaml",
        "backstay train job.yaml --on kubernetes --namespce team",
        "backstay train job.yaml --on kubernets",
        "backstay train job.yaml other.yaml",
        "backstay train job.yaml --set workers.most=8",
        "backstay jobs --on kubernetes scale census",
        "backstay jobs scale census many",
        "kubectl -n backstay exec pserver-0 -- pserverctl resise 3",
        "cd x && BACKSTAY_TOKEN=a pserver serve --no-such-option 1",
        'eval "$(pserverctl completion tcsh)"',
    ],
)
def test_a_command_that_does_not_exist_is_found(line: str) -> None:
    (command,) = commands_in(line)
    with pytest.raises((click.UsageError, ValueError)):
        check(command)


def test_a_mention_is_found_too() -> None:
    (whole, mention) = commands_of("```sh\nbackstay jobs list\n```\n`backstay jobs list`")
    assert (whole.is_whole, mention.is_whole) == (True, False)
    for wrong in ("`backstay trian`", "`backstay jobs list` `... shwo x`", "`backstay zoo --jsn`"):
        *_, found = commands_of(wrong)
        with pytest.raises(click.UsageError):
            check(found)
