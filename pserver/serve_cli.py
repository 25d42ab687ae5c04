"""``pserver serve``: starts one node.

Exit codes: 0 stopped as told; 1 failed while running, or requests were cut off when stopping;
2 a setting is wrong; 3 an address cannot be listened on.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from pathlib import Path

import click

from backstay._native import log_to_stderr
from backstay._version import __version__
from backstay.config import ServerConfig
from backstay.errors import ConfigError, ListenError
from backstay.pserver.node import Node
from backstay.pserver.options import config_options
from backstay.pserver.supervision import Ready, Supervisor

__all__ = ["main"]

EXIT_FAILED = 1
EXIT_WRONG_SETTING = 2
EXIT_CANNOT_LISTEN = 3

LOG_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"

EXAMPLES = """
\b
Examples:
  A cluster of one, on this machine:
    pserver serve
\b
  One of three nodes; all get the same list:
    pserver serve --node-id ps-0 --cluster demo \\
        --listen-control 127.0.0.1:7000 --listen-data 127.0.0.1:7100 \\
        --peers ps-0=127.0.0.1:7000,ps-1=127.0.0.1:7001,ps-2=127.0.0.1:7002
\b
  Settings from a file, section [server]; the token from the environment:
    BACKSTAY_TOKEN=... pserver serve --config /etc/backstay.toml
\b
Exit codes: 0 stopped as told; 1 failed, or requests were cut off when stopping;
2 a setting is wrong; 3 an address cannot be listened on.
"""


@click.group()
@click.version_option(__version__, prog_name="pserver")
def main() -> None:
    """Run a parameter server."""


@main.command(epilog=EXAMPLES, context_settings={"max_content_width": 100})
@click.option(
    "--config",
    "config_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="TOML file with the settings, section [server]. [BACKSTAY_CONFIG]",
)
@click.option("--show-config", is_flag=True, help="Print each setting and its source, and exit.")
@click.option("--supervisor-fd", type=int, hidden=True)
@config_options(ServerConfig)
def serve(
    config_file: Path | None,
    show_config: bool,
    supervisor_fd: int | None,
    **given: object,
) -> None:
    """Start one node and serve until SIGTERM or Ctrl-C.

    A setting comes from its option, else from the file, else from the environment variable in
    brackets, else it has its default. The token has no option, because others could read it in
    the list of processes: give it as BACKSTAY_TOKEN or in the file.
    """
    try:
        loaded = ServerConfig.load_with_sources(file=config_file, explicit=given)
        if show_config:
            click.echo(loaded.describe())
            return
        clean = asyncio.run(_run(loaded.config, supervisor_fd))
    except ListenError as error:
        _fail(error, EXIT_CANNOT_LISTEN)
    except ConfigError as error:
        _fail(error, EXIT_WRONG_SETTING)
    sys.exit(0 if clean else EXIT_FAILED)


async def _run(config: ServerConfig, supervisor_fd: int | None) -> bool:
    logging.basicConfig(level=config.log_level.upper(), format=LOG_FORMAT, stream=sys.stderr)
    log_to_stderr(config.log_level)
    node = Node(config)
    loop = asyncio.get_running_loop()

    def stop() -> None:
        # A second signal ends the process at once.
        loop.remove_signal_handler(signal.SIGTERM)
        loop.remove_signal_handler(signal.SIGINT)
        node.stop()

    loop.add_signal_handler(signal.SIGTERM, stop)
    loop.add_signal_handler(signal.SIGINT, stop)
    if supervisor_fd is None:
        return await node.run(on_ready=_ignore)
    supervisor = Supervisor(supervisor_fd)
    supervisor.on_close(node.stop)
    try:
        return await node.run(on_ready=supervisor.say_ready)
    finally:
        supervisor.close()


def _ignore(_ready: Ready) -> None:
    """Nobody waits for the news; the log has it."""


def _fail(error: ConfigError, exit_code: int) -> None:
    click.echo(f"Error: {error}", err=True)
    sys.exit(exit_code)


if __name__ == "__main__":
    main()
