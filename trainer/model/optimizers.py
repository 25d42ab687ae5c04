"""The optimizers of a model file: one, or several with each parameter in exactly one of them.

Imports the definition and the adapter's neutral parts; no framework.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from backstay.errors import ConfigError
from backstay.job.model_definition import ModelDefinition
from backstay.listing import listed
from backstay.trainer.adapter.optimizer import ServerOptimizer

__all__ = [
    "CombinedOptimizer",
    "check_each_has_one",
    "made_optimizers",
    "rates_of",
]


class CombinedOptimizer:
    """Several optimizers of one model: their pushes are under way together."""

    def __init__(self, members: Sequence[ServerOptimizer]) -> None:
        self._members = tuple(members)
        # The parameters that had a gradient in the step that was begun last.
        self._begun: list[ServerOptimizer] = []

    @property
    def table_names(self) -> tuple[str, ...]:
        """The tables of all of them."""
        return tuple(name for member in self._members for name in member.table_names)

    def begin_step(self, *, clicks: Any = None) -> bool:
        """Send the gradients of all, with the clicks of each example."""
        self._begun = [member for member in self._members if member.begin_step(clicks=clicks)]
        return bool(self._begun)

    def end_step(self) -> None:
        """Wait for all and load their dense values."""
        for member in self._begun:
            member.end_step()

    def synchronize(self) -> None:
        """Wait for all and load their dense values as they are now."""
        for member in self._members:
            member.synchronize()

    def abandon(self) -> int:
        """Forget gradients and pushes of all; return how many pushes failed."""
        return sum(member.abandon() for member in self._members)


def made_optimizers(
    definition: ModelDefinition, parameters: Any, model: Any, kind: type, kind_name: str
) -> dict[str, Any]:
    """Return what the file's ``optimizer`` makes, by name: "" for one, "0", "1", ... for a list.

    Args:
        definition: The user's.
        parameters: Of the model.
        model: Given to a function that asks for it.
        kind: The framework's base class of optimizers.
        kind_name: Its name, for messages.

    Raises:
        ConfigError: It returned something else.
    """
    made = definition.optimizer(parameters, model)
    if isinstance(made, Mapping):
        found = {str(name): optimizer for name, optimizer in made.items()}
    elif isinstance(made, tuple | list):
        found = {str(number): optimizer for number, optimizer in enumerate(made)}
    else:
        found = {"": made}
    if not found:
        raise ConfigError(f"optimizer in {definition.path} returned none; return at least one")
    for name, optimizer in found.items():
        if not isinstance(optimizer, kind):
            place = f" at {name!r}" if name else ""
            raise ConfigError(
                f"optimizer in {definition.path} returned a {type(optimizer).__name__}{place}; it "
                f"must return one of {kind_name}, or a list or dict of them"
            )
    return found


def check_each_has_one(
    definition: ModelDefinition,
    trained: Iterable[tuple[str, Any]],
    given: Mapping[str, Iterable[Any]],
) -> None:
    """Check that each parameter of the model that trains is in one optimizer, once.

    Args:
        definition: The user's, for messages.
        trained: The model's parameters that train, by path.
        given: The parameters of each optimizer, by its name.

    Raises:
        ConfigError: One is in none or in two; the message names it.
    """
    holders: dict[int, list[str]] = {}
    for name, parameters in given.items():
        for parameter in parameters:
            holders.setdefault(id(parameter), []).append(name)
    named = [(path, holders.get(id(parameter), [])) for path, parameter in trained]
    missing = [_shown(path) for path, holding in named if not holding]
    if missing:
        raise ConfigError(
            f"optimizer in {definition.path}: no optimizer has {listed(missing)}; give each "
            "parameter to one, or freeze it (requires_grad_(False) in PyTorch, stop_gradient = "
            "True in Paddle)"
        )
    twice = [f"{_shown(path)} (in {_names(holding)})" for path, holding in named if holding[1:]]
    if twice:
        raise ConfigError(
            f"optimizer in {definition.path}: more than one optimizer has {listed(twice)}; give "
            "each parameter to one"
        )


def rates_of(optimizers: Mapping[str, Any], rate: float | Mapping[str, float]) -> dict[str, float]:
    """Return the learning rate of each optimizer that ``rate`` has one for.

    Args:
        optimizers: By name.
        rate: One for all of them, or some by name.

    Raises:
        ConfigError: A name is of none of them.
    """
    if not isinstance(rate, Mapping):
        return dict.fromkeys(optimizers, rate)
    unknown = [str(name) for name in rate if str(name) not in optimizers]
    if unknown:
        raise ConfigError(
            f"the schedule has a rate for {listed(unknown)}; the model file's optimizers are "
            f"{_names(list(optimizers))}"
        )
    return {str(name): float(value) for name, value in rate.items()}


def _shown(path: str) -> str:
    """Return a parameter's path; of an embedding on the servers, that of its layer."""
    layer, _, own = path.rpartition(".")
    return f"the rows of {layer!r}" if own == "handle" else repr(path)


def _names(names: Sequence[str]) -> str:
    return " and ".join(repr(name) for name in names)
