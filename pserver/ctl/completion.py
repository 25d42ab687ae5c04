"""``completion`` of the commands: the shell's part of completing arguments, and ours.

What stands in the cluster (ids of nodes, say) is asked for while the user waits, so the time is
short, and an error means no suggestions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import click
from click.shell_completion import get_completion_class

from backstay import exits
from backstay.command_line import given_before
from backstay.errors import BackstayError
from backstay.exit_codes import ExitCode
from backstay.pserver.client.inspection import ClusterInspection
from backstay.pserver.ctl.asking import ClusterOptions, open_inspection

__all__ = ["complete_node_id", "completion_command", "suggestions"]

TIME_LIMIT_MS = 1000
SHELLS = ("bash", "zsh", "fish")


def completion_command(program: str, exit_codes: Iterable[ExitCode]) -> click.Command:
    """Return the command ``completion`` of a program.

    Args:
        program: Its name.
        exit_codes: For its help.
    """
    folder = "~/.config/fish/completions"
    epilog = exits.examples(
        exit_codes,
        f'eval "$({program} completion bash)"    # in ~/.bashrc',
        f'eval "$({program} completion zsh)"     # in ~/.zshrc',
        f"{program} completion fish > {folder}/{program}.fish",
    )

    @click.command("completion", epilog=epilog)
    @click.argument("shell", type=click.Choice(SHELLS))
    @click.pass_context
    def completion(context: click.Context, shell: str) -> None:
        """Print the script that lets a shell complete commands, options and names.

        Names of what stands in a cluster are completed where --endpoint or the environment names
        it.
        """
        kind = get_completion_class(shell)
        if kind is None:
            raise click.UsageError(f"this version of click cannot complete in {shell}")
        root = context.find_root().command
        variable = f"_{program.upper()}_COMPLETE"
        click.echo(kind(root, {}, program, variable).source())

    return completion


def suggestions(
    context: click.Context, question: Callable[[ClusterInspection], Iterable[str]], begun: str
) -> list[str]:
    """Return the answers that begin as the user has begun; none if the cluster is not to be had.

    Args:
        context: Of the command whose argument is completed.
        question: Asks for all that could stand there.
        begun: What stands there already.
    """
    # Nothing of the group has run: its options are read as far as they go.
    options = ClusterOptions(
        given_before(context, "endpoint"), given_before(context, "config_file")
    )
    try:
        with open_inspection(options, time_limit_ms=TIME_LIMIT_MS) as inspection:
            return sorted(one for one in question(inspection) if one.startswith(begun))
    except BackstayError:
        return []


def complete_node_id(context: click.Context, _parameter: click.Parameter, begun: str) -> list[str]:
    """Complete the id of a node: ``shell_complete`` of an argument."""

    def ids(inspection: ClusterInspection) -> list[str]:
        return [node.node_id for node in inspection.routing().nodes]

    return suggestions(context, ids, begun)
