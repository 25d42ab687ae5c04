"""``backstay local``: a cluster on this machine, and a command run against it.

It ends with the command's exit code, 128 + n if signal n ended it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import click
from rich.console import Console

from backstay._version import __version__
from backstay.errors import ServerEndedError
from backstay.exit_codes import LOCAL_CODES, SIGNAL_BASE, ExitCode
from backstay.exits import examples, exit_on_error
from backstay.profiles import PROFILES
from backstay.pserver.local_cluster import SERVERS_MAX, LocalCluster

__all__ = ["main"]

EPILOG = examples(
    LOCAL_CODES,
    "backstay local -n 3 -- python train.py",
    "backstay local -n 2 --log-dir ./logs    # two servers, until Ctrl-C",
)


@click.group()
@click.version_option(__version__, prog_name="backstay")
def main() -> None:
    """Tools for clusters of parameter servers."""


@main.command(
    epilog=EPILOG,
    # What follows the first argument belongs to the command, options included.
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option(
    "-n",
    "--servers",
    type=click.IntRange(1, SERVERS_MAX),
    default=3,
    show_default=True,
    help="How many servers.",
)
@click.option("--slot-count", type=int, default=None, help="Slots of the cluster; a power of two.")
@click.option(
    "--replicas",
    type=int,
    default=None,
    help="Copies of each slot. Default: what --profile says, else 2, or 1 with one server.",
)
@click.option(
    "--profile",
    type=click.Choice(list(PROFILES)),
    default=None,
    help="How long jobs run: no copies and no checkpoints (test), checkpoints (short), or copies "
    "and checkpoints (long). Checkpoints are in --log-dir, unless BACKSTAY_CHECKPOINT_URL is set. "
    "[BACKSTAY_PROFILE]",
)
@click.option(
    "--log-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=None,
    help="Keep settings and logs of the servers here. Default: a temporary folder.",
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def local(
    servers: int,
    slot_count: int | None,
    replicas: int | None,
    profile: str | None,
    log_dir: Path | None,
    command: tuple[str, ...],
) -> None:
    """Start servers on free loopback ports, run COMMAND against them, and stop them.

    COMMAND finds the servers in PADDLE_PSERVERS_IP_PORT_LIST and BACKSTAY_ENDPOINT, and its exit
    code is that of this command. Without it, print the addresses and run until Ctrl-C.
    """
    given = {"slot_count": slot_count, "replicas": replicas, "profile": profile}
    settings = {name: value for name, value in given.items() if value is not None}
    exit_code: int = ExitCode.OK
    with exit_on_error(ExitCode.FAILED), suppress(_Stopped):
        cluster = LocalCluster(servers, directory=log_dir, settings=settings)
        with _stop_signals() as stops, cluster, cluster.following_plans():
            exit_code = _run(cluster, command, stops) if command else _wait(cluster)
            _warn_if_dead(cluster)
    sys.exit(exit_code)


class _Stopped(BaseException):
    """A signal told this process to stop; not an Exception, so that nothing swallows it."""


class _Stops:
    """What a stop signal does: ends this process, or goes to the command once it runs."""

    def __init__(self) -> None:
        self.command: subprocess.Popen[bytes] | None = None

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.command is None:
            raise _Stopped
        # Ctrl-C has reached the command through the terminal already.
        if number != signal.SIGINT:
            self.command.send_signal(number)


@contextmanager
def _stop_signals() -> Iterator[_Stops]:
    stops = _Stops()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, stops.on_signal) for number in numbers]
    try:
        yield stops
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _run(cluster: LocalCluster, command: Sequence[str], stops: _Stops) -> int:
    """Run the command and return the exit code that stands for its end."""
    try:
        process = subprocess.Popen(command, env={**os.environ, **cluster.environment()})
    except OSError as error:
        click.echo(f"Error: cannot run {command[0]!r}: {error.strerror}", err=True)
        return ExitCode.NO_SUCH_COMMAND
    stops.command = process
    code = process.wait()
    stops.command = None
    return SIGNAL_BASE - code if code < 0 else code


def _wait(cluster: LocalCluster) -> int:
    """Print the addresses and wait for a signal, which ends this by an exception."""
    console = Console()
    for server in cluster.servers:
        console.print(
            f"[bold]{server.node_id}[/bold]  control {server.control_address}  "
            f"data {server.data_address}  "
            f"metrics http://{server.metrics_address}/metrics  pid {server.pid}",
            soft_wrap=True,
        )
    for name, value in cluster.environment().items():
        console.print(f"export {name}={value}", highlight=False, soft_wrap=True)
    console.print("Ctrl-C stops the servers.")
    while True:
        signal.pause()


def _warn_if_dead(cluster: LocalCluster) -> None:
    """Say if a server ended while the command ran: the command's failure may come from there."""
    try:
        cluster.check()
    except ServerEndedError as error:
        click.echo(f"Warning: {error}", err=True)


if __name__ == "__main__":
    main()
