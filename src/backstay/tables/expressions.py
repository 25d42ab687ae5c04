"""Expressions: what a user function computes for a row, as data, and the rules for it.

``functions`` traces Python functions into expressions, and the servers run them. The rules are
those of crates/backstay-core/src/expression/check.rs; the servers check again. Imports
``backstay.tables.checks`` and ``backstay.errors`` only; never runs anything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeAlias

from backstay.errors import ConfigError
from backstay.tables.checks import MAX_NUMBER

MAX_NODES = 256
MAX_DEPTH = 128
MAX_EXPRESSION_BYTES = 16_384

UNARY = ("neg", "abs", "sign", "sqrt", "exp", "log", "not")
ARITHMETIC = ("add", "sub", "mul", "div", "pow", "maximum", "minimum")
COMPARISONS = ("less", "less_equal", "greater", "greater_equal", "equal", "not_equal")
JOINS = ("and", "or")
REDUCTIONS = ("sum", "mean", "max", "min")
# Operation -> how many nodes it takes.
ARITY = {
    **dict.fromkeys((*UNARY, *REDUCTIONS), 1),
    **dict.fromkeys((*ARITHMETIC, *COMPARISONS, *JOINS), 2),
    "where": 3,
}
_MASK_ARITHMETIC = ("add", "sub", "mul")

Node: TypeAlias = tuple[str, str | float | tuple[int, ...]]


class Shape(IntEnum):
    """What a value is; in an operation of two shapes the later one wins."""

    BATCH = 0  # float64, the same for all rows of a push
    NUMBER = 1  # float64 of each row
    SCALAR = 2  # float32 of each row
    VECTOR = 3  # float32 of each element of each row


@dataclass(frozen=True)
class ValueType:
    """A value's shape, and whether it is true or false instead of a number."""

    shape: Shape
    mask: bool = False

    def __str__(self) -> str:
        what = "mask" if self.mask else "number"
        return f"a {what} for " + (
            "each element of the row" if self.shape == Shape.VECTOR else "the row"
        )


@dataclass(frozen=True)
class Signature:
    """What an expression is given and must return, by name."""

    inputs: Mapping[str, Shape]
    settings: Sequence[str]
    results: Mapping[str, ValueType]


@dataclass(frozen=True)
class Expression:
    """Nodes, each of an operation and what it takes, and which of them are the results."""

    nodes: tuple[Node, ...]
    results: tuple[int, ...]

    def to_plain(self) -> dict[str, Any]:
        """Return the JSON form."""
        nodes = [
            {name: list(taken) if isinstance(taken, tuple) and len(taken) > 1 else _single(taken)}
            for name, taken in self.nodes
        ]
        return {"nodes": nodes, "results": list(self.results)}

    @classmethod
    def from_plain(cls, plain: object) -> Expression:
        """Read the JSON form.

        Raises:
            ConfigError: It is no such form. The rules are checked by :meth:`check`.
        """
        if not (isinstance(plain, Mapping) and plain.keys() == {"nodes", "results"}):
            raise ConfigError("expression: expected an object with nodes and results")
        nodes, results = plain["nodes"], plain["results"]
        if not (isinstance(nodes, list) and isinstance(results, list)):
            raise ConfigError("expression: nodes and results must be lists")
        if not all(_is_id(result) for result in results):
            raise ConfigError(f"expression: results are {results!r}; allowed: numbers of nodes")
        return cls(
            tuple(_read_node(at, node) for at, node in enumerate(nodes)), tuple(map(int, results))
        )

    def inputs(self) -> frozenset[str]:
        """Return the names of the inputs that a result depends on."""
        needed, found = set(self.results), set()
        for at in range(len(self.nodes) - 1, -1, -1):
            name, taken = self.nodes[at]
            if at not in needed:
                continue
            if isinstance(taken, tuple):
                needed.update(taken)
            elif name == "input":
                found.add(str(taken))
        return frozenset(found)

    def check(self, signature: Signature) -> None:
        """Check every rule.

        Raises:
            ConfigError: A node or a result breaks one.
        """
        builder = ExpressionBuilder(signature)
        for name, taken in self.nodes:
            builder.append(name, taken)
        builder.finish(self.results)


class ExpressionBuilder:
    """An expression that grows node by node; equal nodes are one.

    Args:
        signature: What the expression is given and must return.
    """

    def __init__(self, signature: Signature) -> None:
        self._signature = signature
        self._nodes: list[Node] = []
        self._types: list[ValueType] = []
        self._depths: list[int] = []
        self._known: dict[Node, int] = {}

    def node(self, name: str, taken: str | float | tuple[int, ...]) -> int:
        """Return the number of such a node, made if there is none.

        Raises:
            ConfigError: The rules do not allow it.
        """
        known = self._known.get((name, taken))
        if known is None:
            known = self._known[name, taken] = self.append(name, taken)
        return known

    def append(self, name: str, taken: str | float | tuple[int, ...]) -> int:
        """Add a node and return its number; raises as :meth:`node`."""
        if len(self._nodes) == MAX_NODES:
            raise ConfigError(f"more than {MAX_NODES} operations, inputs, settings and constants")
        arguments = taken if isinstance(taken, tuple) else ()
        if any(argument >= len(self._nodes) for argument in arguments):
            raise ConfigError(f"{name} uses a node that does not stand before it")
        depth = max((self._depths[argument] + 1 for argument in arguments), default=0)
        if depth > MAX_DEPTH:
            raise ConfigError(f"more than {MAX_DEPTH} operations one behind the other")
        self._types.append(self._type_of(name, taken))
        self._depths.append(depth)
        self._nodes.append((name, taken))
        return len(self._nodes) - 1

    def type_of(self, node: int) -> ValueType:
        """Return what a node's value is."""
        return self._types[node]

    def finish(self, results: Sequence[int]) -> Expression:
        """Return the expression with these results.

        Raises:
            ConfigError: They are not what must be returned, or the whole is too large.
        """
        wanted = self._signature.results
        if len(results) != len(wanted):
            raise ConfigError(f"it returns {len(results)} values; expected {', '.join(wanted)}")
        for node, (name, expected) in zip(results, wanted.items(), strict=True):
            if node >= len(self._nodes):
                raise ConfigError(f"result {name} is node {node}, which does not exist")
            found = self._types[node]
            if found.mask != expected.mask or found.shape > expected.shape:
                raise ConfigError(f"the returned {name} is {found}; allowed: {expected}")
        expression = Expression(tuple(self._nodes), tuple(results))
        size = len(json.dumps(expression.to_plain(), separators=(",", ":")))
        if size > MAX_EXPRESSION_BYTES:
            raise ConfigError(f"{size} bytes of JSON; allowed: up to {MAX_EXPRESSION_BYTES}")
        return expression

    def _type_of(self, name: str, taken: str | float | tuple[int, ...]) -> ValueType:
        if isinstance(taken, tuple):
            return _operation_type(name, [self._types[argument] for argument in taken])
        if name == "constant":
            if isinstance(taken, str) or not abs(taken) <= MAX_NUMBER:
                raise ConfigError(f"the constant {taken!r}; allowed: up to 1e30 in magnitude")
            return ValueType(Shape.BATCH)
        if name == "setting":
            if taken not in self._signature.settings:
                known = ", ".join(self._signature.settings) or "none"
                raise ConfigError(f"no setting {taken!r}; there are {known}")
            return ValueType(Shape.BATCH)
        if name == "input" and isinstance(taken, str) and taken in self._signature.inputs:
            return ValueType(self._signature.inputs[taken])
        raise ConfigError(f"no {name} {taken!r}; there are {', '.join(self._signature.inputs)}")


def _operation_type(name: str, given: Sequence[ValueType]) -> ValueType:
    """Return what an operation gives for what it is given."""
    if len(given) != ARITY.get(name):
        raise ConfigError(f"no operation {name!r} of {len(given)} values")
    shape = max(value.shape for value in given)
    masks = sum(value.mask for value in given)
    if name in REDUCTIONS:
        if shape != Shape.VECTOR or (masks and name in ("max", "min")):
            raise ConfigError(
                f"{name} of {given[0]}; allowed: a number for each element of the row"
            )
        return ValueType(Shape.SCALAR)
    if name == "not" or name in JOINS:
        if masks != len(given):
            raise ConfigError(f"{name!r} of a number; allowed: masks, such as x > 0")
        return ValueType(shape, mask=True)
    if name == "where":
        if not given[0].mask:
            raise ConfigError("where on a number; allowed: a mask, such as x > 0")
        if masks > 1:
            raise ConfigError("where that chooses masks; allowed: numbers. Join masks with & and |")
        return ValueType(shape)
    if masks > (1 if name in _MASK_ARITHMETIC else 0):
        hint = ". Join masks with & and |" if masks == 2 else "; use where(mask, a, b)"
        raise ConfigError(f"{name} of a mask; allowed: numbers{hint}")
    return ValueType(shape, mask=name in COMPARISONS)


def _single(taken: str | float | tuple[int, ...]) -> str | float:
    return taken[0] if isinstance(taken, tuple) else taken


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_NODES


def _read_node(at: int, plain: object) -> Node:
    if not (isinstance(plain, Mapping) and len(plain) == 1):
        raise ConfigError(f"node {at} is {plain!r:.100}; expected an object with one operation")
    ((name, taken),) = plain.items()
    arity = ARITY.get(name)
    if name in ("input", "setting") and isinstance(taken, str):
        return name, taken
    if name == "constant" and isinstance(taken, (int, float)) and not isinstance(taken, bool):
        return name, float(taken)
    ids = taken if arity is not None and arity > 1 else [taken]
    if arity is None or name in ("input", "setting", "constant"):
        known = ", ".join(("input", "setting", "constant", *ARITY))
        raise ConfigError(f"node {at} is {plain!r:.100}; allowed: one of {known}")
    if not isinstance(ids, list) or len(ids) != arity or not all(map(_is_id, ids)):
        raise ConfigError(f"node {at}: {name} takes {arity} nodes, not {taken!r:.100}")
    return str(name), tuple(int(one) for one in ids)
