"""The command ``pserverctl``: its own options, and every command registered.

A command is a module of this package with a ``click`` command in it, and a line below.
"""

from __future__ import annotations

from pathlib import Path

import click

from backstay._version import __version__
from backstay.command_line import complete, share
from backstay.exit_codes import CONTROL_CODES
from backstay.pserver.ctl.asking import (
    ClusterOptions,
    config_option,
    endpoint_option,
    examples,
    shared_options,
)
from backstay.pserver.ctl.checkpoint import checkpoint
from backstay.pserver.ctl.completion import completion_command
from backstay.pserver.ctl.config import config
from backstay.pserver.ctl.events import events
from backstay.pserver.ctl.export import export
from backstay.pserver.ctl.resize import COMMANDS as RESIZE_COMMANDS
from backstay.pserver.ctl.slots import slots
from backstay.pserver.ctl.status import status
from backstay.pserver.ctl.tables import tables
from backstay.pserver.ctl.top import top
from backstay.pserver.ctl.trainers import trainers
from backstay.pserver.ctl.verify import verify

__all__ = ["main"]

EXAMPLES = examples(
    "pserverctl --endpoint 127.0.0.1:7000 status",
    "pserverctl --endpoint 127.0.0.1:7000 tables --json",
    "BACKSTAY_ENDPOINT=ps-0:7000,ps-1:7000 pserverctl events",
)


@click.group(epilog=EXAMPLES)
@click.version_option(__version__, prog_name="pserverctl")
@endpoint_option()
@config_option()
@click.pass_context
def main(context: click.Context, endpoint: str | None, config_file: Path | None) -> None:
    """Ask a running cluster. Token and certificates come from the file or from BACKSTAY_*."""
    context.obj = ClusterOptions(endpoint, config_file)


for command in (
    *(status, top, slots, tables, trainers, events, verify),
    *RESIZE_COMMANDS,
    *(checkpoint, export, config, completion_command("pserverctl", CONTROL_CODES)),
):
    main.add_command(command)
share(main, shared_options(), adds=True)
complete(main)


if __name__ == "__main__":
    main()
