"""How the programs of backstay end: exit codes, errors as sentences or JSON, ends of help texts.

Imports :mod:`backstay.errors` only, and knows no program.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import click

from backstay.errors import BackstayError, ConfigError

__all__ = ["EXIT_WRONG_SETTING", "examples", "exit_on_error", "print_json"]

# A setting, an argument or the job is wrong: another process would end in the same way. It is also
# what click ends with when it does not understand its arguments.
EXIT_WRONG_SETTING = 2


@contextmanager
def exit_on_error(
    code: int, *, as_json: bool, others: Mapping[type[BackstayError], int] | None = None
) -> Iterator[None]:
    """End the process if the block raises an error of ours: a sentence, and the exit code.

    Args:
        code: Of all errors but a wrong setting, which has its own.
        as_json: Print the error as a JSON object, too.
        others: Errors with codes of their own.
    """
    try:
        yield
    except ConfigError as error:
        _say(error, as_json=as_json)
        sys.exit(EXIT_WRONG_SETTING)
    except BackstayError as error:
        _say(error, as_json=as_json)
        own = (one for kind, one in (others or {}).items() if isinstance(error, kind))
        sys.exit(next(own, code))


def _say(error: BackstayError, *, as_json: bool) -> None:
    if as_json:
        print_json({"error": str(error)})
    click.echo(f"Error: {error}", err=True)


def examples(codes: Mapping[int, str], *lines: str) -> str:
    """Return the end of a command's help: its examples, each line as it is, and the exit codes."""
    width = max(len(str(code)) for code in codes)
    shown = (f"  {line}" for line in lines)
    told = (f"  {code:<{width}}  {meaning}" for code, meaning in codes.items())
    return "\n".join(["\b", "Examples:", *shown, "", "\b", "Exit codes:", *told])


def print_json(document: object) -> None:
    """Print an object as JSON for programs that people read along with."""
    click.echo(json.dumps(document, indent=2))
