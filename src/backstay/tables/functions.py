"""User functions: Python functions over arrays that the servers run for each row.

A function is called once, with symbols in the place of arrays; NumPy's operations on them are
written down as an expression. No code of it is sent. The same function runs on NumPy arrays, which
is how to test it. What cannot be written down is refused, with file and line.

Imports its siblings in ``backstay.tables``, ``backstay.errors`` and NumPy; never does I/O.
docs/guide/user-functions.md has examples, docs/reference/tables.md the rules.
"""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, NoReturn

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from backstay._native import FunctionBuilder
from backstay.errors import ConfigError
from backstay.tables.user import StateDefault

__all__ = ["Traced", "trace"]

_UFUNCS: dict[Any, str] = {
    np.add: "add",
    np.subtract: "sub",
    np.multiply: "mul",
    np.divide: "div",
    np.power: "pow",
    np.float_power: "pow",
    np.maximum: "maximum",
    np.minimum: "minimum",
    np.negative: "neg",
    np.absolute: "abs",
    np.fabs: "abs",
    np.sign: "sign",
    np.sqrt: "sqrt",
    np.exp: "exp",
    np.log: "log",
    np.logical_and: "and",
    np.bitwise_and: "and",
    np.logical_or: "or",
    np.bitwise_or: "or",
    np.logical_not: "not",
    np.invert: "not",
    np.less: "less",
    np.less_equal: "less_equal",
    np.greater: "greater",
    np.greater_equal: "greater_equal",
    np.equal: "equal",
    np.not_equal: "not_equal",
}
_REDUCTIONS: dict[Any, str] = {
    np.sum: "sum",
    np.mean: "mean",
    np.max: "max",
    np.min: "min",
    np.amax: "max",
    np.amin: "min",
}
_ALLOWED = (
    "allowed: + - * / **, comparisons, & | ~, and NumPy's abs, sign, sqrt, square, exp, log, "
    "power, maximum, minimum, clip, where, sum, mean, max, min, zeros_like, ones_like, full_like"
)
_HERE = __file__


@dataclass(frozen=True)
class Traced:
    """A function as data.

    Attributes:
        name: The function's.
        settings: Its keyword-only parameters and their values; without the learning rate.
        learning_rate: The default of ``learning_rate``, if it has one.
        states: The parameters that are states.
        expression: What it computes, as JSON.
    """

    name: str
    settings: dict[str, float]
    learning_rate: float | None
    states: dict[str, StateDefault]
    expression: str


def trace(function: Callable[..., Any], path: str, *, settings: Mapping[str, float]) -> Traced:
    """Call a function once with symbols and return what it computes.

    Args:
        function: Its positional parameters are inputs, or states if they have such a default; its
            keyword-only ones are settings with numbers as defaults. An optimizer returns the
            weights and behind them the new values of the states.
        path: Where it stands in a table's description; the core knows what it is given there.
        settings: Values of settings other than their defaults.

    Raises:
        ConfigError: It does what cannot be an expression; the message names file and line.
    """
    user = _Function(function)
    of_optimizer = path == "optimizer.user"
    inputs = [name for name in FunctionBuilder.inputs(path) if name != "learning_rate"]
    states, defaults = _parameters(user, inputs, with_states=of_optimizer)
    learning_rate = defaults.pop("learning_rate", None) if of_optimizer else None
    for name, value in settings.items():
        if name not in defaults:
            user.refuse(f"it has no setting {name!r}; it has {', '.join(defaults) or 'none'}")
        defaults[name] = value
    missing = [name for name, value in defaults.items() if value is None]
    if missing:
        user.refuse(f"the setting {missing[0]!r} has neither a value nor a default")
    per = [(name, state.per) for name, state in states.items()]
    expression = _Tracer(user, FunctionBuilder(path, sorted(defaults), per)).run(set(defaults))
    values = {name: float(value) for name, value in defaults.items() if value is not None}
    return Traced(user.name, values, learning_rate, states, expression)


class _Function:
    """A user's function, its parameters, and where it stands."""

    def __init__(self, function: Callable[..., Any]) -> None:
        code = getattr(function, "__code__", None)
        if code is None:
            raise ConfigError(f"{function!r} is no Python function written with def or lambda")
        self.call = function
        self.parameters = inspect.signature(function).parameters
        self.name = function.__name__ if function.__name__.isidentifier() else "function"
        self.file = code.co_filename
        self.first_line = code.co_firstlineno

    def refuse(self, message: str, line: int | None = None) -> NoReturn:
        """Raise with the place: a line, or the function's first one."""
        where = f"{Path(self.file).name}, line {line or self.first_line}"
        raise ConfigError(f"user function {self.name}, {where}: {message}") from None


def _parameters(
    function: _Function, inputs: Sequence[str], *, with_states: bool
) -> tuple[dict[str, StateDefault], dict[str, Any]]:
    """Return the states, and the settings with their defaults (None without one)."""
    states: dict[str, StateDefault] = {}
    settings: dict[str, Any] = {}
    for name, one in function.parameters.items():
        default = None if one.default is one.empty else one.default
        if one.kind is one.KEYWORD_ONLY:
            number = isinstance(default, (int, float)) and not isinstance(default, bool)
            if default is not None and not number:
                function.refuse(f"the default of the setting {name!r} is no number")
            settings[name] = default
        elif one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            function.refuse(f"it takes *{name}; name each parameter")
        elif isinstance(default, StateDefault) and with_states and name not in inputs:
            states[name] = default
        elif name not in inputs:
            hint = "; a state has the default per_element() or per_row()" if with_states else ""
            function.refuse(f"no input {name!r}; there are {', '.join(inputs)}{hint}")
    return states, settings


class _Tracer:
    """One call of one function with symbols."""

    def __init__(self, function: _Function, builder: FunctionBuilder) -> None:
        self.function = function
        self.builder = builder

    def run(self, settings: Set[str]) -> str:
        """Call the function and return its expression, as JSON."""
        symbols: dict[str, Any] = {}
        for name in self.function.parameters:
            make = self.builder.setting if name in settings else self.builder.input
            symbols[name] = self.symbol(make, name)
        positional = [
            symbols.pop(name)
            for name, one in self.function.parameters.items()
            if one.kind is not one.KEYWORD_ONLY
        ]
        try:
            returned = self.function.call(*positional, **symbols)
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001  # whatever the user's function raises
            lines = [
                line.lineno
                for line in traceback.extract_tb(error.__traceback__)
                if line.filename == self.function.file
            ]
            message = f"{type(error).__name__}: {error}"
            self.function.refuse(message, lines[-1] if lines else None)
        values = returned if isinstance(returned, tuple) else (returned,)
        nodes = [self.node_of(value) for value in values]
        try:
            return self.builder.finish(nodes)
        except ConfigError as error:
            self.function.refuse(str(error))

    def symbol(self, make: Callable[..., int], *arguments: Any) -> Symbol:
        """Return the value of a node that the builder makes, unless its rules forbid it."""
        try:
            return Symbol(self, make(*arguments))
        except ConfigError as error:
            self.refuse(str(error))

    def apply(self, operation: str, values: Sequence[object]) -> Symbol:
        """Return the value of an operation."""
        nodes = [self.node_of(value) for value in values]
        return self.symbol(self.builder.operation, operation, nodes)

    def constant(self, value: float) -> Symbol:
        """Return a number as a value."""
        return self.symbol(self.builder.constant, value)

    def node_of(self, value: object) -> int:
        """Return the node of a symbol or a number."""
        if isinstance(value, Symbol):
            if value.tracer is not self:
                self.refuse("a value of another call of a user function")
            return value.node
        if isinstance(value, (bool, np.bool_)) or not (
            isinstance(value, (int, float, np.number)) or (_is_number(value))
        ):
            self.refuse(f"a {type(value).__name__} where a number or an input is needed")
        return self.constant(float(value)).node  # type: ignore[arg-type]  # a number

    def refuse(self, message: str) -> NoReturn:
        """Raise with the line that is running."""
        self.function.refuse(message, self._running_line())

    def _running_line(self) -> int | None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename == self.function.file and frame.f_code.co_filename != _HERE:
                return frame.f_lineno
            frame = frame.f_back
        return None


def _is_number(value: object) -> bool:
    return isinstance(value, np.ndarray) and value.ndim == 0 and value.dtype.kind in "iuf"


class Symbol(NDArrayOperatorsMixin):
    """The place of an array in a user function while it is traced."""

    # Before NumPy's own arrays and scalars.
    __array_priority__: ClassVar[float] = 1000.0

    def __init__(self, tracer: _Tracer, node: int) -> None:
        self.tracer = tracer
        self.node = node

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Symbol:
        """Write down an operation of NumPy."""
        if method == "reduce" and ufunc is np.add and not options.get("axis"):
            return self.tracer.apply("sum", inputs)
        if method != "__call__" or options:
            what = f"{ufunc.__name__}.{method}" if method != "__call__" else ufunc.__name__
            given = f" with {', '.join(options)}" if options else ""
            self.tracer.refuse(f"np.{what}{given} cannot run on the servers; {_ALLOWED}")
        if ufunc is np.square:
            return self.tracer.apply("mul", (inputs[0], inputs[0]))
        if ufunc is np.reciprocal:
            return self.tracer.apply("div", (1.0, inputs[0]))
        if ufunc is np.positive:
            return self
        name = _UFUNCS.get(ufunc)
        if name is None:
            self.tracer.refuse(f"np.{ufunc.__name__} cannot run on the servers; {_ALLOWED}")
        return self.tracer.apply(name, inputs)

    def __array_function__(
        self, function: Any, types: Any, arguments: Sequence[Any], options: Mapping[str, Any]
    ) -> Symbol:
        """Write down a function of NumPy."""
        tracer = self.tracer
        name = getattr(function, "__name__", str(function))
        if options:
            tracer.refuse(f"np.{name} with {', '.join(options)} cannot run on the servers")
        if function in _REDUCTIONS and len(arguments) == 1:
            return tracer.apply(_REDUCTIONS[function], arguments)
        if function is np.where and len(arguments) == 3:
            return tracer.apply("where", arguments)
        if function is np.clip and len(arguments) == 3:
            return _clipped(tracer, *arguments)
        if function in (np.zeros_like, np.ones_like) and len(arguments) == 1:
            return tracer.constant(float(function is np.ones_like))
        if function is not np.full_like or len(arguments) != 2:
            tracer.refuse(
                f"np.{name} of {len(arguments)} values cannot run on the servers; {_ALLOWED}"
            )
        return Symbol(tracer, tracer.node_of(arguments[1]))

    def sum(self) -> Symbol:
        """Return the sum of the row's elements."""
        return self.tracer.apply("sum", (self,))

    def mean(self) -> Symbol:
        """Return the mean of the row's elements."""
        return self.tracer.apply("mean", (self,))

    def max(self) -> Symbol:
        """Return the largest of the row's elements."""
        return self.tracer.apply("max", (self,))

    def min(self) -> Symbol:
        """Return the smallest of the row's elements."""
        return self.tracer.apply("min", (self,))

    def clip(self, low: Any, high: Any) -> Symbol:
        """Return the elements brought into an interval."""
        return _clipped(self.tracer, self, low, high)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.tracer.refuse(f"a value has no .{name} on the servers; {_ALLOWED}")

    def __bool__(self) -> bool:
        self.tracer.refuse(
            "if, while, and, or, not, min() or max() on a value: the function is traced once, for "
            "all rows. Use np.where, & | ~, np.minimum or np.maximum"
        )

    def __len__(self) -> int:
        return self._refuse_one("len() of a value")

    def __iter__(self) -> Any:
        self._refuse_one("a loop over a value, or unpacking it")

    def __getitem__(self, _: Any) -> Any:
        self._refuse_one("an index")

    def __setitem__(self, _: Any, __: Any) -> None:
        self._refuse_one("an assignment to elements")

    def __contains__(self, _: Any) -> bool:
        return self._refuse_one("'in' on a value")

    def __float__(self) -> float:
        return self._refuse_one("float() or a function of math on a value; NumPy's functions work")

    def __int__(self) -> int:
        return self._refuse_one("int() of a value")

    def __index__(self) -> int:
        return self._refuse_one("a value as an index")

    def __array__(self, *_: Any, **__: Any) -> Any:
        self._refuse_one("an array made of a value")

    def _refuse_one(self, what: str) -> NoReturn:
        self.tracer.refuse(f"{what} cannot run on the servers; {_ALLOWED}")


# ``a += b`` in a function makes a new value, which the name then has.
for _name in ("add", "sub", "mul", "truediv", "pow", "and", "or"):
    setattr(Symbol, f"__i{_name}__", getattr(NDArrayOperatorsMixin, f"__{_name}__"))


def _clipped(tracer: _Tracer, value: Any, low: Any, high: Any) -> Symbol:
    raised = value if low is None else tracer.apply("maximum", (value, low))
    return raised if high is None else tracer.apply("minimum", (raised, high))
