"""The places of a table's description in which a user function can stand.

Imports its siblings in ``backstay.tables``; NumPy only when a Python function is traced. Never does
I/O. docs/guide/user-functions.md has examples.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal, TypeVar

from backstay.errors import ConfigError
from backstay.tables.checks import check_choice, check_number, number_in
from backstay.tables.expressions import Expression, Shape, Signature, ValueType

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

MAX_SETTINGS = 8
MAX_STATES = 8
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}", re.ASCII)
_OPTIMIZER_INPUTS = {"weights": Shape.VECTOR, "gradient": Shape.VECTOR}
_KEPT_NAMES = ("learning_rate", "time", "last_seen", "frequency", "show", "click")
_STATISTICS = {
    "time": Shape.BATCH,
    **dict.fromkeys(("last_seen", "frequency", "show", "click"), Shape.NUMBER),
}
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
        check_choice(self, "per", ("element", "row"))
        check_number(self, "initial")


@dataclass(frozen=True)
class UserOptimizer:
    """An optimizer of your own: a Python function from a row to the row after a push.

    Make it with :meth:`of`. The function belongs to the table for good; learning rate and settings
    may change, as of any optimizer.

    Attributes:
        name: The function's name.
        expression: What it computes.
        learning_rate: Step size, times the ``learning_rate_scale`` of each push.
        settings: The function's settings by name, at most 8.
        states: The parts of a row's state in the function's order, at most 8.
    """

    name: str
    expression: Expression
    learning_rate: float = 0.01
    settings: Mapping[str, float] = field(default_factory=dict, hash=False)
    states: tuple[State, ...] = ()

    def __post_init__(self) -> None:
        _check_function(self, taken=(*_OPTIMIZER_INPUTS, *_KEPT_NAMES))
        check_number(self, "learning_rate", 0.0)
        states = tuple(_state(state) for state in _sequence(self.states))
        object.__setattr__(self, "states", states)
        names = [state.name for state in states]
        taken = (*_OPTIMIZER_INPUTS, *_KEPT_NAMES, *self.settings)
        _check_names(self.name, "state", names, MAX_STATES, taken)
        shapes = {"element": Shape.VECTOR, "row": Shape.SCALAR}
        of_states = {state.name: shapes[state.per] for state in states}
        inputs = {**_OPTIMIZER_INPUTS, "learning_rate": Shape.BATCH, **of_states}
        results = {"weights": Shape.VECTOR, **of_states}
        _check_expression(
            self,
            Signature(
                inputs,
                tuple(self.settings),
                {name: ValueType(shape) for name, shape in results.items()},
            ),
        )

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

        traced = trace(
            function,
            _OPTIMIZER_INPUTS,
            ("weights", ValueType(Shape.VECTOR)),
            settings=settings,
            with_states=True,
        )
        if learning_rate is None:
            learning_rate = 0.01 if traced.learning_rate is None else traced.learning_rate
        states = tuple(State(name, one.per, one.initial) for name, one in traced.states.items())
        return cls(traced.name, traced.expression, learning_rate, traced.settings, states)

    def state_elements(self, row_elements: int) -> int:
        """Return the words of state of a row of so many weights, as the core does."""
        return sum(row_elements if state.per == "element" else 1 for state in self.states)

    def to_plain(self) -> dict[str, Any]:
        """Return the JSON form."""
        states = [
            {"name": state.name, "per": state.per, "initial": state.initial}
            for state in self.states
        ]
        return {
            "name": self.name,
            "learning_rate": self.learning_rate,
            "settings": dict(sorted(self.settings.items())),
            "states": states,
            "expression": self.expression.to_plain(),
        }


@dataclass(frozen=True)
class _RowFunction:
    """A user function that only reads a row. Make it with :meth:`of`.

    Attributes:
        name: The function's name.
        expression: What it computes.
        settings: The function's settings by name, at most 8.
    """

    INPUTS: ClassVar[Mapping[str, Shape]]
    RESULT: ClassVar[tuple[str, ValueType]]

    name: str
    expression: Expression
    settings: Mapping[str, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        _check_function(self, taken=tuple(self.INPUTS))
        _check_expression(self, Signature(self.INPUTS, tuple(self.settings), dict([self.RESULT])))

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

        traced = trace(function, cls.INPUTS, cls.RESULT, settings=settings)
        return cls(traced.name, traced.expression, traced.settings)

    def to_plain(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "name": self.name,
            "settings": dict(sorted(self.settings.items())),
            "expression": self.expression.to_plain(),
        }


@dataclass(frozen=True)
class PullFunction(_RowFunction):
    """What a pull returns: from ``weights``, float32 [dim], to as many numbers."""

    INPUTS: ClassVar[Mapping[str, Shape]] = {"weights": Shape.VECTOR}
    RESULT: ClassVar[tuple[str, ValueType]] = ("weights", ValueType(Shape.VECTOR))


@dataclass(frozen=True)
class _StatisticsFunction(_RowFunction):
    INPUTS: ClassVar[Mapping[str, Shape]] = _STATISTICS

    @cached_property
    def statistics(self) -> tuple[str, ...]:
        """The statistics that the result depends on, in the order of a row's words."""
        used = self.expression.inputs()
        return tuple(name for name in _STATISTICS if name != "time" and name in used)


@dataclass(frozen=True)
class ScoreFunction(_StatisticsFunction):
    """How much a row is worth: from its statistics to one number, float64.

    Inputs: ``time`` and ``last_seen`` in seconds, ``frequency``, ``show`` and ``click``. A row
    keeps those that are used. A NaN is lower than any number.
    """

    RESULT: ClassVar[tuple[str, ValueType]] = ("score", ValueType(Shape.NUMBER))


@dataclass(frozen=True)
class AdmissionFunction(_StatisticsFunction):
    """Whether a key gets a row: from its statistics so far to a mask, such as ``show > 3``.

    Inputs as of :class:`ScoreFunction`, each with the push that is looked at; but ``last_seen`` is
    the push before it, 0 if there was none.
    """

    RESULT: ClassVar[tuple[str, ValueType]] = ("admitted", ValueType(Shape.NUMBER, mask=True))


def _check_function(owner: UserOptimizer | _RowFunction, taken: Sequence[str]) -> None:
    """Check name and settings, and read an expression that is still JSON."""
    name: object = owner.name
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise ConfigError(
            f"{type(owner).__name__}.name is {owner.name!r}; allowed: a Python name of up to 64 "
            "letters, digits and _"
        )
    if not isinstance(owner.settings, Mapping):
        raise ConfigError(
            f"user function {owner.name}: settings is {owner.settings!r}; expected numbers by name"
        )
    _check_names(owner.name, "setting", list(owner.settings), MAX_SETTINGS, taken)
    settings = {
        name: number_in(f"user function {owner.name}: {name}", value)
        for name, value in owner.settings.items()
    }
    object.__setattr__(owner, "settings", settings)
    expression: object = owner.expression
    if not isinstance(expression, Expression):
        try:
            object.__setattr__(owner, "expression", Expression.from_plain(expression))
        except ConfigError as error:
            raise ConfigError(f"user function {owner.name}: {error}") from error


def _check_expression(owner: UserOptimizer | _RowFunction, signature: Signature) -> None:
    try:
        owner.expression.check(signature)
    except ConfigError as error:
        raise ConfigError(f"user function {owner.name}: {error}") from error


def _check_names(
    function: str, what: str, names: Sequence[object], most: int, taken: Sequence[str]
) -> None:
    if len(names) > most:
        raise ConfigError(f"user function {function}: {len(names)} {what}s; allowed: up to {most}")
    for name in names:
        if not (isinstance(name, str) and _NAME.fullmatch(name)):
            raise ConfigError(
                f"user function {function}: {name!r} is no name of a {what}; allowed: up to 64 "
                "letters, digits and _"
            )
        if name in taken or names.count(name) > 1:
            raise ConfigError(
                f"user function {function}: {name!r} names two things, or is taken; choose another "
                f"name for the {what}"
            )


def _sequence(states: object) -> Sequence[object]:
    if not isinstance(states, (list, tuple)):
        raise ConfigError(f"UserOptimizer.states is {states!r}; expected a list")
    return states


def _state(plain: object) -> State:
    if isinstance(plain, State):
        return plain
    known = ("name", "per", "initial")
    if not (isinstance(plain, Mapping) and {"name", "per"} <= plain.keys() <= set(known)):
        raise ConfigError(f"a state is {plain!r:.100}; expected an object with {', '.join(known)}")
    return State(**plain)
