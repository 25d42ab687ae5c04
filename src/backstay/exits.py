"""How the programs of backstay end: exit codes, errors as sentences or JSON, ends of help texts.

Imports ``backstay.errors`` and ``backstay.exit_codes``, and knows no program.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import click

from backstay.errors import BackstayError, ConfigError
from backstay.exit_codes import ExitCode

__all__ = ["examples", "exit_on_error", "print_json"]


@contextmanager
def exit_on_error(
    code: ExitCode,
    *,
    as_json: bool = False,
    others: Mapping[type[BackstayError], ExitCode] | None = None,
) -> Iterator[None]:
    """End the process if the block raises an error of ours: a sentence, and the exit code.

    Args:
        code: Of all errors but a wrong setting, which has its own.
        as_json: Print the error as a JSON object, too.
        others: Errors with codes of their own; the first that fits counts.
    """
    try:
        yield
    except BackstayError as error:
        _say(error, as_json=as_json)
        own = {**(others or {}), ConfigError: ExitCode.WRONG_SETTING}
        sys.exit(next((own[kind] for kind in own if isinstance(error, kind)), code))


def _say(error: BackstayError, *, as_json: bool) -> None:
    if as_json:
        print_json({"error": str(error)})
    click.echo(f"Error: {error}", err=True)


def examples(codes: Iterable[ExitCode], *lines: str) -> str:
    """Return the end of a command's help: its examples, each line as it is, and the exit codes."""
    shown = (f"  {line}" for line in lines)
    ends = (f"  {int(code):<3}  {code.meaning}" for code in codes)
    return "\n".join(["\b", "Examples:", *shown, "", "\b", "Exit codes:", *ends])


def print_json(document: object) -> None:
    """Print an object as JSON for programs that people read along with."""
    click.echo(json.dumps(document, indent=2))
