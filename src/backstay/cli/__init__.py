"""The ``backstay`` command: the tools that need more than one part of the package.

A command is a module of this package with a ``click`` command in it, and a line below. May import
every package; nothing imports it.
"""

from __future__ import annotations

import click

from backstay._version import __version__
from backstay.cli.jobs import jobs
from backstay.cli.run import evaluate, predict, train
from backstay.pserver.local_cli import local

__all__ = ["main"]


@click.group()
@click.version_option(__version__, prog_name="backstay")
def main() -> None:
    """Train, evaluate and predict with workers that come and go; clusters on this machine."""


for command in (train, evaluate, predict, jobs, local):
    main.add_command(command)
