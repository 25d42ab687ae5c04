"""Paddle and PyTorch in the same words, for the tests that hold of every framework's adapter.

``EACH`` runs a test for each framework whenever it is run; ``EACH_IN_SLOW`` for the first one, and
for the others with the slow tests: where both run the same code of ``trainer/adapter``.
"""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest

__all__ = ["EACH", "EACH_IN_SLOW", "Kit", "kit_of"]

NAMES = ("torch", "paddle")


def _params(*marks_of_others: pytest.MarkDecorator) -> pytest.MarkDecorator:
    first, *others = NAMES
    mark = pytest.mark
    return pytest.mark.parametrize(
        "kit",
        [
            pytest.param(first, marks=getattr(mark, first)),
            *(pytest.param(one, marks=[getattr(mark, one), *marks_of_others]) for one in others),
        ],
        indirect=True,
    )


EACH = _params()
EACH_IN_SLOW = _params(pytest.mark.slow)


class Kit:
    """A framework, its adapter, and the few calls that the frameworks name differently.

    Attributes:
        name: Of the framework.
        library: The framework.
        adapter: ``backstay.trainer.<name>``.
        module: Its base class of layers.
    """

    name: str
    module: Any

    def __init__(self) -> None:
        self.library: Any = importlib.import_module(self.name)
        self.adapter: Any = importlib.import_module(f"backstay.trainer.{self.name}")
        self.nn: Any = self.library.nn

    def tensor(self, values: Any) -> Any:
        """Return integers as int64 and everything else as float32."""
        array = np.asarray(values)
        return self._tensor(array.astype(np.int64 if array.dtype.kind in "iu" else np.float32))

    def _tensor(self, array: Any) -> Any:
        raise NotImplementedError

    def numbers(self, tensor: Any) -> Any:
        return tensor.detach().numpy().copy()

    def no_grad(self) -> AbstractContextManager[Any]:
        block: AbstractContextManager[Any] = self.library.no_grad()
        return block

    def sgd(self, *modules: Any, rate: Any = 0.5, **settings: Any) -> Any:
        """Return SGD of all parameters of modules; with ``momentum`` the one that has it."""
        parameters = [parameter for module in modules for parameter in module.parameters()]
        return self.sgd_of(parameters, rate, **settings)

    def sgd_of(self, parameters: Any, rate: Any, **settings: Any) -> Any:
        raise NotImplementedError

    def trains(self, tensor: Any) -> bool:
        raise NotImplementedError

    def freeze(self, module: Any) -> None:
        raise NotImplementedError

    def clear(self, optimizer: Any) -> None:
        raise NotImplementedError

    def scale_in_place(self, tensor: Any, factor: float) -> None:
        raise NotImplementedError

    def set_weight(self, parameter: Any, values: Any) -> None:
        raise NotImplementedError

    def sums_of(self, module: Any, ids: Any) -> Any:
        """Return [bags, dim] of a plain embedding of the framework."""
        return module(ids).sum(1)


class Torch(Kit):
    name = "torch"

    def __init__(self) -> None:
        super().__init__()
        self.module = self.nn.Module

    def _tensor(self, array: Any) -> Any:
        return self.library.from_numpy(array)

    def sgd_of(self, parameters: Any, rate: Any, **settings: Any) -> Any:
        return self.library.optim.SGD(parameters, rate, **settings)

    def trains(self, tensor: Any) -> bool:
        return bool(tensor.requires_grad)

    def freeze(self, module: Any) -> None:
        module.requires_grad_(False)

    def clear(self, optimizer: Any) -> None:
        optimizer.zero_grad()

    def scale_in_place(self, tensor: Any, factor: float) -> None:
        tensor.mul_(factor)

    def set_weight(self, parameter: Any, values: Any) -> None:
        parameter.data = self.tensor(values)


class Paddle(Kit):
    name = "paddle"

    def __init__(self) -> None:
        super().__init__()
        self.module = self.nn.Layer

    def _tensor(self, array: Any) -> Any:
        return self.library.to_tensor(array)

    def sgd_of(self, parameters: Any, rate: Any, **settings: Any) -> Any:
        of = self.library.optimizer
        if "momentum" in settings:
            return of.Momentum(rate, parameters=parameters, **settings)
        return of.SGD(rate, parameters=parameters, **settings)

    def trains(self, tensor: Any) -> bool:
        return not tensor.stop_gradient

    def freeze(self, module: Any) -> None:
        for parameter in module.parameters():
            parameter.stop_gradient = True

    def clear(self, optimizer: Any) -> None:
        optimizer.clear_grad()

    def scale_in_place(self, tensor: Any, factor: float) -> None:
        tensor.scale_(factor)

    def set_weight(self, parameter: Any, values: Any) -> None:
        parameter.set_value(self.tensor(values))


KITS: dict[str, type[Kit]] = {kind.name: kind for kind in (Torch, Paddle)}


def kit_of(name: str) -> Kit:
    """Return the kit of a framework; skip the test if that is not installed."""
    pytest.importorskip(name)
    return KITS[name]()
