"""What the commands of all programs share: ``-h``, options on both sides of a subcommand.

A value that is empty, or that is the next option, is refused with the option's name: that is what
is left of ``--endpoint $SERVERS --json`` where the variable is empty. Imports click, and knows no
program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

__all__ = ["complete", "given_before", "share"]

HELP_NAMES = ["-h", "--help"]
META = "backstay.shared."

Callback = Callable[[click.Context, click.Parameter, Any], Any]


def complete(program: click.Group) -> None:
    """Give a whole program ``-h``, and options that refuse what cannot be meant for their value."""
    for command in commands_below(program):
        command.context_settings = {**command.context_settings, "help_option_names": HELP_NAMES}
        for option in _options(command):
            if not option.is_flag and not option.count:
                _before_callback(option, _refuse_mistaken)


def share(program: click.Group, options: Mapping[str, click.Option], *, adds: bool) -> None:
    """Let options be given before a subcommand or after it; the one that stands last wins.

    A subcommand takes such an option by its own parameter of that name, or by the object of its
    group (``click.pass_obj``), a named tuple that has a field of that name.

    Args:
        program: A group.
        options: By the name of their parameter.
        adds: Whether subcommands without such a parameter get the option; if not, they refuse it.
    """
    for command in commands_below(program):
        is_group = isinstance(command, click.Group)
        own = {option.name: option for option in _options(command)}
        for name, option in options.items():
            if name in own:
                _before_callback(own[name], _keep if is_group else _take)
            elif is_group or (adds and not option.is_flag):
                added = copy(option)
                added.expose_value = False
                added.callback = _keep
                command.params.append(added)
            else:
                _refuse_here(command, option)


def given_before(context: click.Context, name: str) -> Any:
    """Return the value of a shared option as it stands before the subcommand; None: nowhere."""
    return context.meta.get(META + name)


def commands_below(command: click.Command) -> Iterator[click.Command]:
    """Yield a command and all below it."""
    yield command
    if isinstance(command, click.Group):
        for below in command.commands.values():
            yield from commands_below(below)


def _options(command: click.Command) -> list[click.Option]:
    return [one for one in command.params if isinstance(one, click.Option)]


def _before_callback(option: click.Option, check: Callback) -> None:
    """Have a value go through ``check`` before it goes to the option's own callback."""
    own = option.callback

    def both(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
        value = check(context, parameter, value)
        return value if own is None else own(context, parameter, value)

    option.callback = both


def _is_given(context: click.Context, parameter: click.Parameter) -> bool:
    assert parameter.name is not None
    return context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE


def _refuse_mistaken(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
    if not _is_given(context, parameter):
        return value
    below = context.command.commands if isinstance(context.command, click.Group) else {}
    known = {name for one in context.command.params for name in (*one.opts, *one.secondary_opts)}
    for one in value if isinstance(value, tuple) else (value,):
        if not isinstance(one, str | Path):
            continue
        # An empty path is the current folder by now.
        text = str(one)
        if not text:
            raise click.BadParameter("it is empty: is a variable not set?", context, parameter)
        kind = "option" if text.startswith("--") or text in known else "command"
        if kind == "option" or text in below:
            raise click.BadParameter(
                f"{text!r} is the next {kind}, not a value: is a variable empty?",
                context,
                parameter,
            )
    return value


def _keep(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
    """Keep what was given, for subcommands and for the object of the group."""
    name = parameter.name
    if _is_given(context, parameter):
        context.meta[META + str(name)] = value
        if name in getattr(context.obj, "_fields", ()):
            context.obj = context.obj._replace(**{str(name): value})
    return value if _is_given(context, parameter) else given_before(context, str(name)) or value


def _take(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
    """Take what was given before the subcommand, unless it was given here."""
    before = given_before(context, str(parameter.name))
    return value if before is None or _is_given(context, parameter) else before


def _refuse_here(command: click.Command, option: click.Option) -> None:
    """Have a command refuse an option that was given before it and means nothing to it."""
    run = command.callback
    assert run is not None

    def refuse(*arguments: Any, **named: Any) -> Any:
        context = click.get_current_context()
        if given_before(context, str(option.name)) is not None:
            raise click.UsageError(f"{context.command_path} has no option {option.opts[0]}")
        return run(*arguments, **named)

    command.callback = refuse
