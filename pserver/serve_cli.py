"""``pserver serve``: starts one node."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import click

from backstay import lifeline
from backstay._version import __version__
from backstay.command_line import complete
from backstay.config import SecurityConfig, ServerConfig
from backstay.errors import ListenError, StoreAuthError
from backstay.exit_codes import SERVE_CODES, ExitCode
from backstay.exits import examples, exit_on_error
from backstay.lifeline import Lifeline, Ready
from backstay.logs import set_up_logging
from backstay.pserver.node import Node
from backstay.settings import ENVIRONMENT_PREFIX

__all__ = ["main"]

# On top of the two graces of a stop, once the parent is gone.
KILL_WAIT_S = 5.0

EPILOG = examples(
    SERVE_CODES,
    "pserver serve    # a cluster of one, on this machine",
    "",
    "# One of three nodes, which keep the cluster's records themselves:",
    "pserver serve --node-id ps-0 --cluster demo --initial-nodes 3 \\",
    "    --listen-control 127.0.0.1:7000 --listen-data 127.0.0.1:7100 \\",
    "    --store-members ps-0=127.0.0.1:7200,ps-1=127.0.0.1:7201,ps-2=127.0.0.1:7202",
    "",
    "# One of two nodes that keep them in etcd:",
    "pserver serve --node-id ps-0 --cluster demo --initial-nodes 2 \\",
    "    --store etcd --store-endpoints 127.0.0.1:2379",
    "",
    "# Settings from a file, section [server]; the token from the environment:",
    "BACKSTAY_TOKEN=... pserver serve --config /etc/backstay.toml",
)

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


@click.group()
@click.version_option(__version__, prog_name="pserver")
def main() -> None:
    """Run a parameter server."""


@main.command(epilog=EPILOG, context_settings={"max_content_width": 100})
@click.option(
    "--config",
    "config_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="TOML file with the settings, section [server]. [BACKSTAY_CONFIG]",
)
@click.option("--show-config", is_flag=True, help="Print each setting and its source, and exit.")
@config_options(ServerConfig)
def serve(
    config_file: Path | None,
    show_config: bool,
    **given: object,
) -> None:
    """Start one node and serve until SIGTERM or Ctrl-C.

    A setting comes from its option, else from the file, else from the environment variable in
    brackets, else it has its default. The token has no option, because others could read it in
    the list of processes: give it as BACKSTAY_TOKEN or in the file.
    """
    # First, because its variable is no setting.
    parent = lifeline.attach()
    others = {ListenError: ExitCode.CANNOT_LISTEN, StoreAuthError: ExitCode.WRONG_SETTING}
    with exit_on_error(ExitCode.FAILED, others=others):
        loaded = ServerConfig.load_with_sources(file=config_file, explicit=given)
        if show_config:
            click.echo(loaded.describe())
            return
        clean = asyncio.run(_run(loaded.config, parent))
    # Requests may have been cut off.
    sys.exit(ExitCode.OK if clean else ExitCode.FAILED)


async def _run(config: ServerConfig, parent: Lifeline | None) -> bool:
    set_up_logging(
        config.log_level,
        config.log_format,
        config.node_id,
        trace_pushes=config.trace_pushes,
    )
    node = Node(config)
    loop = asyncio.get_running_loop()

    def stop() -> None:
        # A second signal ends the process at once.
        loop.remove_signal_handler(signal.SIGTERM)
        loop.remove_signal_handler(signal.SIGINT)
        node.stop()

    loop.add_signal_handler(signal.SIGTERM, stop)
    loop.add_signal_handler(signal.SIGINT, stop)
    if parent is None:
        return await node.run(on_ready=_ignore)
    # A stop takes one grace for handing over and one for the requests under way.
    grace_s = 2 * config.stop_grace_ms / 1000 + KILL_WAIT_S
    parent.stop_by(lambda: loop.call_soon_threadsafe(node.stop), grace_s=grace_s)
    return await node.run(on_ready=parent.say_ready)


def _ignore(_ready: Ready) -> None:
    """No parent waits for the news; the log has it."""


complete(main)

if __name__ == "__main__":
    main()
