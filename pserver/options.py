"""Command-line options out of the fields of a configuration, so that each is described once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, fields
from typing import Any, TypeVar, get_type_hints

import click

from backstay.config import SecurityConfig
from backstay.settings import ENVIRONMENT_PREFIX

__all__ = ["config_options"]

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def config_options(kind: type[SecurityConfig]) -> Callable[[FunctionT], FunctionT]:
    """Return a decorator that adds an option for each field that may be shown.

    Secrets get none: the arguments of a process can be read by everyone on the machine.
    """
    hints = get_type_hints(kind)

    def decorate(function: FunctionT) -> FunctionT:
        for item in reversed(fields(kind)):
            if item.repr:
                function = _option(item, hints[item.name])(function)
        return function

    return decorate


def _option(item: Field[Any], hint: object) -> Callable[[FunctionT], FunctionT]:
    name = "--" + item.name.replace("_", "-")
    shown_default = "" if item.default in (None, (), False) else f"; default: {item.default}"
    text = f"{item.metadata['doc']} [{ENVIRONMENT_PREFIX}{item.name.upper()}{shown_default}]"
    # The default is None, "not given", so that the file and the environment can have their say.
    if hint is bool:
        return click.option(f"{name}/--no-{name[2:]}", item.name, default=None, help=text)
    if hint in (int, int | None):
        return click.option(name, item.name, type=int, default=None, metavar="N", help=text)
    return click.option(name, item.name, default=None, metavar="TEXT", help=text)
