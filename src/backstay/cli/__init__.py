"""The ``backstay`` command: the tools that need more than one part of the package.

A command is a module of this package with a ``click`` command in it, and a line below. Imports
any package but ``backstay.kubernetes``, and nothing imports it.
"""

from __future__ import annotations

import click

from backstay._version import __version__
from backstay.cli.export import export
from backstay.cli.jobs import jobs
from backstay.cli.run import evaluate, predict, train
from backstay.cli.zoo import zoo
from backstay.command_line import complete, share
from backstay.exit_codes import ExitCode
from backstay.master.serve_cli import main as master
from backstay.pserver.ctl.asking import shared_options
from backstay.pserver.ctl.completion import completion_command
from backstay.pserver.local_cli import local

__all__ = ["main"]


@click.group()
@click.version_option(__version__, prog_name="backstay")
def main() -> None:
    """Train, evaluate and predict with workers that come and go; clusters on this machine."""


# Started by `train` and its like; by hand only where those cannot run.
master.hidden = True
completion = completion_command("backstay", (ExitCode.OK, ExitCode.WRONG_SETTING))
for command in (train, evaluate, predict, jobs, export, zoo, local, master, completion):
    main.add_command(command)
share(jobs, shared_options(), adds=True)
share(main, shared_options(), adds=False)
complete(main)
