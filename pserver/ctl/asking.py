"""What every command of ``pserverctl`` shares: which cluster is asked, exit codes, examples.

It imports ``backstay.pserver.client.inspection`` and ``backstay.exits``; it knows no command.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click

from backstay import exits
from backstay.config import (
    ENDPOINT_VARIABLES,
    ClientConfig,
    find_endpoints,
    required_endpoints,
)
from backstay.exit_codes import CONTROL_CODES, ExitCode
from backstay.exits import exit_on_error
from backstay.pserver.client.inspection import ClusterInspection

__all__ = [
    "WAIT_PAUSE_S",
    "ClusterOptions",
    "ask",
    "chosen_endpoints",
    "config_option",
    "endpoint_option",
    "examples",
    "json_option",
    "named_endpoints",
    "open_inspection",
    "shared_options",
    "wait_option",
]

WAIT_MAX_S = 86_400
# Between two looks of a command that waits.
WAIT_PAUSE_S = 0.5

AnswerT = TypeVar("AnswerT")
CommandT = TypeVar("CommandT", bound=Callable[..., Any])


class ClusterOptions(NamedTuple):
    """What the group's own options say; each command gets it by ``click.pass_obj``.

    Attributes:
        endpoint: ``--endpoint``; None if it was not given.
        config_file: ``--config``; None if it was not given.
    """

    endpoint: str | None = None
    config_file: Path | None = None


def endpoint_option() -> Callable[[CommandT], CommandT]:
    """Return a decorator that adds ``--endpoint``."""
    return click.option(
        "--endpoint",
        metavar="HOST:PORT[,...]",
        help="Control address of any node, or several to try in turn. "
        f"[{', '.join(ENDPOINT_VARIABLES)}]",
    )


def config_option() -> Callable[[CommandT], CommandT]:
    """Return a decorator that adds ``--config``, as the argument ``config_file``."""
    return click.option(
        "--config",
        "config_file",
        type=click.Path(dir_okay=False, path_type=Path),
        help="TOML file with token, certificates and deadlines, section [client]. "
        "[BACKSTAY_CONFIG]",
    )


def shared_options() -> dict[str, click.Option]:
    """Return the options that may stand before a subcommand or after it, by parameter."""

    @json_option()
    @config_option()
    @endpoint_option()
    def none() -> None: ...

    made = click.command()(none).params
    return {str(one.name): one for one in made if isinstance(one, click.Option)}


def json_option(text: str = "Print one JSON object.") -> Callable[[CommandT], CommandT]:
    """Return a decorator that adds ``--json``, as the argument ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help=text)


def examples(*lines: str) -> str:
    """Return the end of a command's help, with the exit codes of ``pserverctl``."""
    return exits.examples(CONTROL_CODES, *lines)


def named_endpoints(options: ClusterOptions) -> tuple[str, ...] | None:
    """Return the endpoints that the options or the environment name; None: neither does."""
    found = find_endpoints(os.environ, options.endpoint)
    return None if found is None else found.endpoints


def chosen_endpoints(options: ClusterOptions) -> tuple[str, ...]:
    """Return the endpoints that the options or the environment name.

    Raises:
        ConfigError: None is named.
    """
    return required_endpoints(os.environ, options.endpoint)


def open_inspection(
    options: ClusterOptions, *, time_limit_ms: int | None = None
) -> ClusterInspection:
    """Return the questions to the cluster that the options or the environment name.

    Args:
        options: The options of the command group.
        time_limit_ms: Most that a call may take; by default as ``connect_timeout_ms`` says.

    Raises:
        ConfigError: None is named, or a setting is wrong.
    """
    chosen = chosen_endpoints(options)
    config = ClientConfig.load(file=options.config_file)
    if time_limit_ms is not None:
        shorter_ms = min(config.connect_timeout_ms, time_limit_ms)
        config = replace(config, connect_timeout_ms=shorter_ms)
    return ClusterInspection(chosen, config)


def wait_option(what: str) -> Callable[[CommandT], CommandT]:
    """Return the option ``--wait``, which the command gets as ``wait_s``."""
    return click.option(
        "--wait",
        "wait_s",
        type=click.IntRange(0, WAIT_MAX_S),
        default=0,
        metavar="SECONDS",
        help=f"Wait until {what}, for so many seconds at most.",
    )


def ask(
    options: ClusterOptions, question: Callable[[ClusterInspection], AnswerT], *, as_json: bool
) -> AnswerT:
    """Return the answer to a question, or end the process with the code for the failure."""
    with exit_on_error(ExitCode.NO_ANSWER, as_json=as_json), open_inspection(options) as inspection:
        return question(inspection)
