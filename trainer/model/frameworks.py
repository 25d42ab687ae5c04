"""What the worker asks of a framework, whichever it is.

``trainer/paddle/training.py`` and ``trainer/torch/training.py`` answer. Imports no framework
unless it is asked for by name, and nothing of the job master's.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from backstay.errors import ConfigError, NonFiniteLoss
from backstay.job.model_definition import ModelDefinition
from backstay.job_spec import JobSpec
from backstay.trainer.client import Client

__all__ = [
    "Adapter",
    "Arguments",
    "Program",
    "adapter",
    "arguments_of",
    "checked_loss",
    "plain_array",
    "predictions_of",
    "split_feed",
]


class Program(Protocol):
    """A user's model with its loss and optimizer, ready to be trained.

    Made by ``Adapter.build``; used by one thread, but for ``prefetch``.
    """

    @property
    def model(self) -> Any:
        """The user's model."""

    def tables(self) -> tuple[str, ...]:
        """The names of the tables that steps push to, in the order in which they were made."""

    def train_batch(self, features: Any, labels: Any) -> tuple[float, NDArray[Any] | None]:
        """Run forward, loss, backward and the optimizer's step.

        Args:
            features: As the user's ``feed`` returns them.
            labels: Likewise.

        Returns:
            The loss, and what the model answered if that is one tensor.

        Raises:
            NonFiniteLoss: The loss is NaN or infinite; nothing was pushed.
            BackstayError: A push failed.
        """

    def predict(self, features: Any) -> NDArray[Any]:
        """Return what the model answers in evaluation mode, without gradients.

        Raises:
            ConfigError: The model answers something else than one tensor.
        """

    def prefetch(self, features: Any) -> None:
        """Begin to fetch the rows of a coming batch, where it is known which ids it looks up."""

    def synchronize(self) -> None:
        """Wait for this program's pushes, then load the dense values as they are now."""

    def abandon(self) -> None:
        """Forget gradients and pushes of a batch that failed; the next one begins anew."""

    def set_learning_rate(self, rate: float | Mapping[str, float]) -> None:
        """Set the learning rate from the next step on: of all optimizers, or some by name.

        Raises:
            ConfigError: There is no optimizer of a name, or it has a scheduler of its own.
        """

    def pass_begins(self, pass_number: int) -> None:
        """Set a scheduler of the optimizer, if it has one, to this pass (from 1)."""

    def save(self, folder: Path) -> list[Path]:
        """Write the model's own parameters to a folder, in the framework's own format."""


class Adapter(Protocol):
    """The module ``backstay.trainer.<framework>.training``."""

    def build(self, definition: ModelDefinition, client: Client | None, spec: JobSpec) -> Program:
        """Make the model and its optimizer, on the servers or in this process.

        Args:
            definition: The user's.
            client: Of the session that is open. None: all is in this process, unless the model
                has layers of the adapter; these open a session by the factory that is set.
            spec: Of the job.

        Raises:
            ConfigError: The model file's functions return something else than they should, or
                the servers do not have what they ask for.
        """


class Arguments:
    """Features as the arguments of the model.

    Attributes:
        positional: In order.
        named: By name.
    """

    def __init__(self, positional: Sequence[Any], named: Mapping[str, Any]) -> None:
        self.positional = tuple(positional)
        self.named = dict(named)

    def arrays(self) -> dict[str, Any]:
        """Return all of them under names: positions are "0", "1", ..."""
        return {**{str(n): value for n, value in enumerate(self.positional)}, **self.named}


def arguments_of(features: Any) -> Arguments:
    """Return the model's arguments: a dict gives names, a tuple or list positions, else one."""
    if isinstance(features, Mapping):
        return Arguments((), features)
    if isinstance(features, tuple | list):
        return Arguments(features, {})
    return Arguments((features,), {})


def adapter(framework: str) -> Adapter:
    """Import an adapter, and with it the framework.

    Args:
        framework: ``paddle`` or ``torch``.

    Raises:
        ConfigError: The framework is not installed.
    """
    try:
        module = importlib.import_module(f"backstay.trainer.{framework}.training")
    except ModuleNotFoundError as error:
        if error.name != framework:
            raise
        package = "paddlepaddle" if framework == "paddle" else framework
        raise ConfigError(f"the model needs {framework}: pip install {package}") from error
    return cast(Adapter, module)


def predictions_of(program: Program, features: Any, records: int) -> NDArray[Any]:
    """Return what the model answers for a batch, [records] or [records, ...].

    Raises:
        ConfigError: It answers something else.
    """
    predictions = program.predict(features)
    if predictions.shape[:1] != (records,):
        raise ConfigError(
            f"the model answers {list(predictions.shape)} for {records} records: the first "
            "dimension must be the record"
        )
    return predictions


def split_feed(fed: Any, mode: str) -> tuple[Any, Any]:
    """Return (features, labels) of what ``feed`` returned; labels are None for predictions.

    Raises:
        ConfigError: It is not a pair in a mode that needs labels.
    """
    if mode == "prediction":
        return fed, None
    if not isinstance(fed, tuple | list) or len(fed) != 2:
        raise ConfigError(
            f"feed(records, {mode!r}, metadata) returned {_described(fed)}; it must return a pair: "
            "features, labels"
        )
    return fed[0], fed[1]


def checked_loss(value: float) -> float:
    """Return the loss.

    Raises:
        NonFiniteLoss: It is NaN or infinite.
    """
    if not math.isfinite(value):
        raise NonFiniteLoss(
            f"the loss is {value}: look for damaged numbers in the records of the batch, or for a "
            "learning rate that is too high"
        )
    return value


def plain_array(value: Any) -> Any:
    """Return an array fit for a tensor: float64 becomes float32, what frameworks compute in."""
    if isinstance(value, list):
        value = np.asarray(value)
    if isinstance(value, np.ndarray) and value.dtype == np.float64:
        return value.astype(np.float32)
    return value


def _described(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
