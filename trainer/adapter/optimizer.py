"""An optimizer of a framework whose updates run on the pservers: what all of them share.

It computes no update itself: its settings become tables, gradients are sent, and what the servers
make of them is loaded, by a ``PushCycle``. May import the session, the tables and the parts of an
adapter; no framework.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn

import numpy as np
from numpy.typing import NDArray

from backstay import tables
from backstay.errors import ConfigError
from backstay.trainer.adapter.dense import DenseParameter, Placed, dense_groups
from backstay.trainer.adapter.framework import Optimizer, Tensor, Tensors
from backstay.trainer.adapter.push_cycle import PushCycle
from backstay.trainer.adapter.server_rows import ServerRows
from backstay.trainer.adapter.session import connection, dense_prefix, numbered
from backstay.trainer.arrays import clicks_of_examples
from backstay.trainer.client import Client

__all__ = ["ServerOptimizer", "Trained"]

STEPS_IN_FLIGHT_MAX = 16
# The mark on a framework's optimizer that has been wrapped: a second wrapper would push twice.
WRAPPED = "_backstay_wrapped"


@dataclass(frozen=True)
class Trained:
    """A parameter that an optimizer trains.

    Attributes:
        tensor: The parameter; of an embedding with rows on servers its handle.
        optimizer: What the parameter's table runs.
        rate: Which of the optimizer's learning rates it follows.
        name: Its own among the parameters, the same in every trainer; in a framework that gives
            parameters none: by its place in the optimizer.
    """

    tensor: Tensor
    optimizer: tables.Optimizer
    rate: int = 0
    name: str = ""


class ServerOptimizer(ABC):
    """Keeps the parameters of a framework's optimizer on the pservers.

    Wrap the optimizer after the model is made. Dense parameters that share settings are laid end
    to end in one table, so that a model of many small tensors costs one round trip; the values of
    the trainer that comes first win. Embeddings of the adapter are found among the parameters by
    their handles, and their tables are made here.

    ``step()`` sends the gradients of the dense parameters and of every embedding looked up since
    the last step, and loads fresh dense values. It takes the gradients with it: a second
    ``step()`` without a backward pass in between does nothing.

    ``steps_in_flight`` decides how it waits:

    - 0: until the servers have applied the push, then pulls. With one trainer, this gives the
      numbers of the framework alone.
    - n > 0: asynchronous. ``step()`` returns while the pushes of up to n steps are under way, and
      loads the dense values that were asked for at the step before, so that the network and the
      computation overlap; the parameters are then one step behind. A failed push is reported by
      a later ``step()``, or by ``synchronize()``.

    Attributes:
        tensors: Those of the framework.
        parameters_have_names: Whether the framework gives parameters names.
    """

    tensors: ClassVar[Tensors]
    parameters_have_names: ClassVar[bool] = True

    def _wrap(
        self,
        optimizer: Optimizer,
        client: Client | None,
        steps_in_flight: int,
        name: str | None = None,
    ) -> None:
        """Translate the settings and make the tables; every refusal comes before the first one.

        Args:
            optimizer: The framework's.
            client: Default: that of the open session.
            steps_in_flight: 0 to 16.
            name: Of parameters that have none; default: ``optimizer_0``, ``optimizer_1``, ...

        Raises:
            ConfigError: A setting that the servers do not have, no connection, an optimizer or an
                embedding that is wrapped already, or an embedding of another client.
            TableConflict: Another trainer made a table with other settings.
        """
        connected, _ = connection(client)
        if hasattr(optimizer, WRAPPED):
            raise ConfigError(
                "this optimizer is wrapped in a DistributedOptimizer already: use that one, or "
                "make a new optimizer"
            )
        if not 0 <= steps_in_flight <= STEPS_IN_FLIGHT_MAX:
            raise ConfigError(
                f"steps_in_flight is {steps_in_flight}; it must be 0 to {STEPS_IN_FLIGHT_MAX}"
            )
        trained = self._trained(optimizer)
        rows = [one for one in trained if hasattr(one.tensor, "backstay_layer")]
        self._dense = [one for one in trained if not hasattr(one.tensor, "backstay_layer")]
        if not self.parameters_have_names:
            name = name or numbered(connected, "optimizer")
            self._dense = [
                replace(one, name=f"{name}.{number}") for number, one in enumerate(self._dense)
            ]
        placed = [Placed(self._parameter(one), one.optimizer, one.rate) for one in self._dense]
        layers = [(one.tensor.backstay_layer, one.rate) for one in rows]
        _refuse_embeddings([layer for layer, _ in layers], connected)
        for one in rows:
            one.tensor.backstay_layer.create_table(one.optimizer)
        groups = dense_groups(connected, placed, dense_prefix(connected))
        self._cycle = PushCycle(connected, layers, groups, steps_in_flight)
        self._optimizer = optimizer
        for wrapped in (optimizer, self):
            setattr(wrapped, WRAPPED, True)

    @abstractmethod
    def _trained(self, optimizer: Optimizer) -> list[Trained]:
        """Return the parameters of an optimizer that train, in the framework's order.

        Raises:
            ConfigError: A setting that the servers do not have.
        """

    @abstractmethod
    def _scales(self) -> Sequence[float]:
        """Return what each learning rate is now over the one in the tables."""

    @abstractmethod
    def _gradients(self) -> Callable[[], Mapping[str, NDArray[np.float32]]]:
        """Clip as the optimizer says; return what takes the dense gradients, by name.

        What it returns is called when the gradients of embeddings are on their way.
        """

    @abstractmethod
    def _forget_dense_gradients(self) -> None:
        """Forget the gradients that the framework keeps."""

    @property
    def table_names(self) -> tuple[str, ...]:
        """The tables that this optimizer pushes to, in the order in which they were made."""
        return self._cycle.table_names

    def step(self, *, clicks: Any = None) -> None:
        """Push all gradients since the last step, and load fresh dense values.

        Args:
            clicks: Of each example that was looked up since the last step, [examples] or
                [examples, 1], as a rule the labels. Embeddings whose lifetime uses a score count
                them: an example shows each of its ids once a lookup, and clicks it so often.

        Raises:
            NonFiniteGradient: A gradient is NaN or infinite, and its table refuses that.
            BackstayError: A push of this step, or with ``steps_in_flight`` of an earlier one,
                failed.
        """
        if self.begin_step(clicks=clicks):
            self.end_step()

    def begin_step(self, *, clicks: Any = None) -> bool:
        """Send all gradients since the last step; ``end_step`` belongs to it if there was one.

        For several optimizers of one model: their pushes are then under way together.

        Raises:
            BackstayError: A push was refused before it left.
            ConfigError: As of ``step``.
        """
        with self.tensors.no_gradients():
            take_dense = self._gradients()
            return self._cycle.begin_step(take_dense, self._scales(), clicks_of_examples(clicks))

    def end_step(self) -> None:
        """Wait for the pushes, as far as ``steps_in_flight`` asks for it; load dense values."""
        with self.tensors.no_gradients():
            self._cycle.end_step()

    def synchronize(self) -> None:
        """Wait for every push of this trainer, then load the dense values as they are now.

        Call it before evaluating; other trainers' pushes may still follow.
        """
        with self.tensors.no_gradients():
            self._cycle.synchronize()

    def abandon(self) -> int:
        """Forget gradients, prefetched rows and every push under way: after a failure, begin anew.

        What was sent may have been applied. ``synchronize`` then loads the dense values as they
        are.

        Returns:
            How many of the pushes had failed.
        """
        failed = self._cycle.abandon()
        self._forget_dense_gradients()
        return failed

    def state_dict(self) -> dict[str, Any]:
        """Refused: the optimizer's state is on the servers, in their checkpoints.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "DistributedOptimizer.state_dict(): the optimizer's state is on the pservers, and "
            "trainers have no checkpoints of it; write one of the whole cluster with "
            "session.client.checkpoints.save() (see docs/guide/checkpoints.md)"
        )

    def _refuse_loading(self, function: str) -> NoReturn:
        raise ConfigError(
            f"DistributedOptimizer.{function}(): the optimizer's state is on the pservers, and "
            "a trainer cannot load one there; start the servers from a checkpoint (see "
            "docs/guide/checkpoints.md)"
        )

    def _parameter(self, trained: Trained) -> DenseParameter:
        tensor = trained.tensor
        if tensor.dtype != self.tensors.float32:
            raise ConfigError(
                f"parameter {trained.name} of the optimizer, of shape {tuple(tensor.shape)}, is "
                f"{tensor.dtype}: the servers keep float32; train with {self.tensors.autocast} "
                "instead of converting the parameters"
            )
        return DenseParameter(self.tensors, tensor, trained.name)


def _refuse_embeddings(layers: Sequence[ServerRows], client: Client) -> None:
    """Refuse layers that an optimizer of this client cannot have, before any table is made.

    Raises:
        ConfigError: One has another client, or an optimizer.
    """
    for layer in layers:
        if layer.client is not client:
            raise ConfigError(
                f"the embedding {layer.table_name!r} and this optimizer have different clients; "
                "make both in one session, or pass the same client= to both"
            )
        if layer.has_optimizer:
            raise ConfigError(f"the embedding {layer.table_name!r} has an optimizer already")
