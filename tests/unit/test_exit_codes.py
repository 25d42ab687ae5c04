"""Each exit code has one meaning, and the page and the help of each program name its codes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from backstay.cli import main as backstay
from backstay.errors import BackstayError, ConfigError, ListenError, StoreAuthError
from backstay.exit_codes import (
    CONTROL_CODES,
    JOB_CODES,
    JOBS_CODES,
    LOCAL_CODES,
    MASTER_CODES,
    SERVE_CODES,
    ZOO_CODES,
    ExitCode,
)
from backstay.exits import exit_on_error
from backstay.pserver.serve_cli import main as pserver

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "cli.md"
# What scripts of users compare with; a code is never given to another meaning.
NUMBERS = {
    "OK": 0,
    "FAILED": 1,
    "WRONG_SETTING": 2,
    "NO_ANSWER": 3,
    "NEVER_REACHED": 4,
    "UNSAVED": 5,
    "DEAD_LETTERS": 6,
    "CANNOT_LISTEN": 7,
    "REPLACED": 8,
    "JOB_FAILED": 9,
    "PARENT_GONE": 70,
    "AGAIN": 75,
    "NO_SUCH_COMMAND": 127,
    "STOPPED": 130,
}


def test_each_number_has_one_meaning_and_stays() -> None:
    assert {code.name: int(code) for code in ExitCode} == NUMBERS
    assert len({code.meaning for code in ExitCode}) == len(ExitCode) == len(set(NUMBERS.values()))
    assert [str(code) for code in ExitCode] == [str(number) for number in NUMBERS.values()]


@pytest.mark.parametrize(
    ("heading", "codes"),
    [
        ("pserver serve", SERVE_CODES),
        ("pserverctl", CONTROL_CODES),
        ("backstay train, evaluate, predict", JOB_CODES),
        ("backstay jobs", JOBS_CODES),
        ("backstay zoo", ZOO_CODES),
        ("backstay master", MASTER_CODES),
        ("backstay local", LOCAL_CODES),
    ],
)
def test_the_page_names_the_codes_of_a_program(heading: str, codes: Sequence[ExitCode]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    section = re.split(r"\n##+ ", text.partition(f"\n## {heading}\n")[2])[0]
    paragraph = section.partition("Exit codes: ")[2].partition("\n\n")[0]
    outside = re.sub(r"\([^)]*\)", "", paragraph)
    assert [int(number) for number in re.findall(r"\d+", outside)] == [int(code) for code in codes]


@pytest.mark.parametrize(
    ("program", "name", "codes"),
    [
        (pserver, "serve", SERVE_CODES),
        (backstay, "master", MASTER_CODES),
        (backstay, "local", LOCAL_CODES),
    ],
)
def test_help_has_the_codes(program: click.Group, name: str, codes: Sequence[ExitCode]) -> None:
    done = CliRunner().invoke(program, [name, "--help"])
    told = done.output.partition("Exit codes:")[2]
    assert [int(one) for one in re.findall(r"^ +(\d+) ", told, re.MULTILINE)] == [*map(int, codes)]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), ExitCode.WRONG_SETTING),
        (StoreAuthError("x"), ExitCode.WRONG_SETTING),
        (ListenError("x"), ExitCode.CANNOT_LISTEN),
        (BackstayError("x"), ExitCode.FAILED),
    ],
)
def test_an_error_ends_a_program_with_its_code(
    error: BackstayError, code: ExitCode, capsys: pytest.CaptureFixture[str]
) -> None:
    others: dict[type[BackstayError], ExitCode] = {
        ListenError: ExitCode.CANNOT_LISTEN,
        StoreAuthError: ExitCode.WRONG_SETTING,
    }
    with pytest.raises(SystemExit) as ended, exit_on_error(ExitCode.FAILED, others=others):
        raise error
    assert ended.value.code == code
    assert capsys.readouterr().err == "Error: x\n"
