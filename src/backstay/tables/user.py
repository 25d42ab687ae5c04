"""The places of a table's description in which a user function can stand.

Imports its siblings in ``backstay.tables``; NumPy only when a Python function is traced. Never does
I/O. docs/guide/user-functions.md has examples.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from backstay.errors import ConfigError
from backstay.tables.optimizers import Optimizer
from backstay.tables.part import Part, check_settings, of_core

__all__ = [
    "AdmissionFunction",
    "PullFunction",
    "ScoreFunction",
    "State",
    "StateDefault",
    "UserOptimizer",
    "per_element",
    "per_row",
]

_Made = TypeVar("_Made", bound="_RowFunction")


@dataclass(frozen=True)
class StateDefault:
    """The default of a parameter that is a row's state; see :func:`per_element`."""

    per: Literal["element", "row"]
    initial: float


def per_element(initial: float = 0.0) -> Any:
    """Return the default that makes a parameter a state with one value for each weight.

    Args:
        initial: Its value in a new row.
    """
    return StateDefault("element", initial)


def per_row(initial: float = 0.0) -> Any:
    """Return the default that makes a parameter a state with one value for the whole row."""
    return StateDefault("row", initial)


@dataclass(frozen=True)
class State:
    """A part of a row's state.

    Attributes:
        name: The function's parameter.
        per: "element": one value for each weight; "row": one value.
        initial: The value in a new row.
    """

    name: str
    per: Literal["element", "row"] = "element"
    initial: float = 0.0

    def __post_init__(self) -> None:
        """Check the settings, each alone."""
        check_settings(self, "")


class _Function(Part):
    """What all user functions have."""

    settings: Mapping[str, float]
    expression: str

    def settings_in_json(self) -> dict[str, Any]:
        """Return the settings as JSON has them."""
        settings = super().settings_in_json()
        try:
            # As the last one: it is long.
            return settings | {"expression": json.loads(settings.pop("expression"))}
        except ValueError as error:
            name = type(self).__name__
            raise ConfigError(f"{name}.expression is no JSON: {error}; allowed: .of()") from error

    def complete(self, filled: Mapping[str, Any]) -> None:
        """Take over the expression: equal ones are equal texts."""
        object.__setattr__(self, "expression", json.dumps(filled["expression"]))

    @classmethod
    def of_json(cls, settings: Mapping[str, Any]) -> Any:
        """Return the function with settings that the core gives; it has checked them."""
        return of_core(cls, {**settings, "expression": json.dumps(settings["expression"])})


@dataclass(frozen=True)
class UserOptimizer(_Function, Optimizer, at="optimizer", name="user"):
    """An optimizer of your own: a Python function from a row to the row after a push.

    Make it with :meth:`of`. The function belongs to the table for good; learning rate and settings
    may change, as of any optimizer.

    Attributes:
        name: The function's name.
        expression: What it computes, as JSON.
        learning_rate: Step size, times the ``learning_rate_scale`` of each push.
        settings: The function's settings by name, at most 8.
        states: The parts of a row's state in the function's order, at most 8.
    """

    name: str
    expression: str
    learning_rate: float = 0.01
    settings: Mapping[str, float] = field(default_factory=dict, hash=False)
    states: tuple[State, ...] = ()

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        *,
        learning_rate: float | None = None,
        **settings: float,
    ) -> UserOptimizer:
        """Make an optimizer of a Python function.

        Args:
            function: Takes any of ``weights`` and ``gradient``, float32 [dim] each; its states,
                parameters with the default ``per_element()`` ([dim]) or ``per_row()`` (one number);
                and as keyword-only parameters its settings, numbers with a default, and
                ``learning_rate``. It returns the new weights, then the new states in the order of
                the parameters. It is called once, with symbols in the place of arrays.
            learning_rate: In the place of the parameter's default (0.01 without one).
            settings: Values in the place of the parameters' defaults.

        Raises:
            ConfigError: The function does what cannot run on the servers; the message names file
                and line.
        """
        from backstay.tables.functions import trace

        traced = trace(function, "optimizer.user", settings=settings)
        if learning_rate is None:
            learning_rate = 0.01 if traced.learning_rate is None else traced.learning_rate
        states = tuple(State(name, one.per, one.initial) for name, one in traced.states.items())
        return cls(traced.name, traced.expression, learning_rate, traced.settings, states)

    def settings_in_json(self) -> dict[str, Any]:
        """Return the settings as JSON has them."""
        return super().settings_in_json() | {"states": [vars(state) for state in self.states]}

    @classmethod
    def of_json(cls, settings: Mapping[str, Any]) -> Any:
        """Return the optimizer with settings that the core gives; it has checked them."""
        states = tuple(State(**state) for state in settings["states"])
        return super().of_json({**settings, "states": states})


@dataclass(frozen=True)
class _RowFunction(_Function):
    """A user function that only reads a row. Make it with :meth:`of`.

    Attributes:
        name: The function's name.
        expression: What it computes, as JSON.
        settings: The function's settings by name, at most 8.
    """

    name: str
    expression: str
    settings: Mapping[str, float] = field(default_factory=dict, hash=False)

    @classmethod
    def of(cls: type[_Made], function: Callable[..., Any], **settings: float) -> _Made:
        """Make it of a Python function.

        Args:
            function: Takes any of the inputs, and its settings as keyword-only parameters with
                numbers as defaults. It is called once, with symbols in the place of arrays.
            settings: Values in the place of the parameters' defaults.

        Raises:
            ConfigError: The function does what cannot run on the servers; the message names file
                and line.
        """
        from backstay.tables.functions import trace

        traced = trace(function, cls.path(), settings=settings)
        return cls(traced.name, traced.expression, traced.settings)


@dataclass(frozen=True)
class PullFunction(_RowFunction, at="pull"):
    """What a pull returns: from ``weights``, float32 [dim], to as many numbers."""


@dataclass(frozen=True)
class ScoreFunction(_RowFunction, at="lifetime.score.function"):
    """How much a row is worth: from its statistics to one number, float64.

    Inputs: ``time`` and ``last_seen`` in seconds, ``frequency``, ``show`` and ``click``. A row
    keeps those that are used. A NaN is lower than any number.
    """


@dataclass(frozen=True)
class AdmissionFunction(_RowFunction, at="lifetime.admission", name="function"):
    """Whether a key gets a row: from its statistics so far to a mask, such as ``show > 3``.

    Inputs as of :class:`ScoreFunction`, each with the push that is looked at; but ``last_seen`` is
    the push before it, 0 if there was none.
    """
