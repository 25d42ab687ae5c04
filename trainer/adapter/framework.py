"""What a framework brings to its adapter: functions on its tensors, models and optimizers.

``trainer/paddle`` and ``trainer/torch`` implement these classes; the rest of an adapter is here and
in ``trainer/model``, once. Functions that are not abstract do what most frameworks do. Imports
numpy and the table descriptions; no framework and no client.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from backstay import tables
from backstay.trainer.adapter.lookup import keys_of

__all__ = ["Framework", "Module", "Optimizer", "PlainEmbedding", "Tensor", "Tensors"]

Tensor: TypeAlias = Any
Module: TypeAlias = Any
Optimizer: TypeAlias = Any


class Tensors(ABC):
    """Moves numbers between the tensors of a framework and arrays.

    Attributes:
        kind: The class of its tensors.
        float32: The type of the numbers that servers keep.
        autocast: What trains in another type, in words for errors: "torch.autocast".
    """

    kind: type
    float32: Any
    autocast: str

    @abstractmethod
    def of_any(self, array: NDArray[Any]) -> Tensor:
        """Return a user's array as a tensor."""

    @abstractmethod
    def sharing(self, array: NDArray[np.float32], beside: Any) -> Tensor:
        """Return a contiguous array as a tensor; in main memory they share their numbers.

        Args:
            array: Nobody else's.
            beside: A tensor on whose device the answer is; anything else: in main memory.
        """

    @abstractmethod
    def view(self, tensor: Tensor) -> NDArray[Any]:
        """Return the numbers of a tensor, which may share memory with it."""

    @abstractmethod
    def copy(self, tensor: Tensor) -> NDArray[Any]:
        """Return the numbers of a tensor in a contiguous array of its own; sparse ones in full."""

    @abstractmethod
    def assign(self, tensor: Tensor, values: NDArray[Any]) -> None:
        """Replace the numbers of a tensor by as many others, which are copied."""

    @abstractmethod
    def attach(
        self,
        handle: Tensor,
        rows: NDArray[np.float32],
        collect: Callable[[NDArray[np.float32]], None],
    ) -> Tensor:
        """Return rows as a tensor that the gradient is computed of.

        Each backward pass calls ``collect`` with the gradient. Nothing is remembered of a lookup
        that no backward pass reaches, and ``handle`` gets no gradient.

        Args:
            handle: Stands among the parameters of the model for all rows of the layer.
            rows: As ``sharing`` takes them.
            collect: Takes an array of its own.
        """

    @abstractmethod
    def trains(self, parameter: Tensor) -> bool:
        """Return whether a parameter takes gradients."""

    @abstractmethod
    def records(self) -> bool:
        """Return whether what is computed now can be differentiated."""

    @abstractmethod
    def no_gradients(self) -> AbstractContextManager[Any]:
        """Return what keeps what is computed in it from being differentiated."""

    def number(self, tensor: Tensor) -> float:
        """Return the only number of a tensor."""
        return float(tensor.detach())

    def keys(self, ids: Any) -> NDArray[np.int64]:
        """Return a tensor, array or list of ids as int64, copied; unsigned ids keep their bits.

        The copy is what a later comparison with prefetched ids, or a push, goes by, whatever the
        caller does with the array meanwhile.

        Raises:
            InvalidRequest: The ids are not integers.
        """
        return keys_of(self.copy(ids) if isinstance(ids, self.kind) else np.array(ids))

    def gradient(self, tensor: Tensor) -> NDArray[np.float32]:
        """Return a gradient as a contiguous float32 array of its own.

        Copied, because the framework may add the gradient of the next backward pass to the same
        memory, and the user may change a tensor that is the gradient of something else, too.
        """
        return np.asarray(self.copy(tensor), np.float32)


@dataclass(frozen=True)
class PlainEmbedding:
    """An embedding layer of the framework's own, as ``swap_embeddings`` sees it.

    Attributes:
        weight: Its parameter, [rows, dim].
        padding_idx: Counted from 0; None: it has none.
        sparse: It asks for sparse gradients.
        obstacle: Why the servers cannot do what it does, and what to do; None: they can.
        initializer: What its weights are drawn from; raises ConfigError if servers have none like
            it. None: the user has said what the rows begin with, whatever the weights are.
        source: Where that is said, in words.
        otherwise: What the user should do about weights that are not drawn from it.
        twin: Makes the layer with rows on servers, given ``name``, ``client``, ``seed`` and
            ``storage``.
    """

    weight: Tensor
    padding_idx: int | None
    sparse: bool
    obstacle: str | None
    initializer: Callable[[], tables.Initializer] | None
    source: str
    otherwise: str
    twin: Callable[..., Module]


class Framework(ABC):
    """A framework's models and optimizers.

    Attributes:
        name: Of the package that is imported, and in an export.
        tensors: Its tensors.
        module_class: The base class of its models and layers.
        module: The same, in words for errors: "a torch.nn.Module".
        optimizer_class: The base class of its optimizers.
        optimizers: Where these are, in words for errors: "torch.optim".
        distributed_optimizer: The class that runs one of them on the servers.
        saved_file: What the end of training saves in a job's ``output``.
        no_clip_gradients: Why a model file may have no ``clip_gradients``; None: it may.
    """

    name: str
    tensors: Tensors
    module_class: type
    module: str
    optimizer_class: type
    optimizers: str
    distributed_optimizer: type
    saved_file: str
    no_clip_gradients: str | None = None

    # Models

    @abstractmethod
    def begin(self, seed: int) -> None:
        """Prepare the process for a job's model, and seed what the framework draws."""

    def fresh_names(self) -> AbstractContextManager[Any]:
        """Number layers and parameters in this block as a new process does."""
        return nullcontext()

    @abstractmethod
    def modules(self, model: Module) -> Iterable[tuple[str, Module]]:
        """Return a model and all in it, each once with its path; the path of the model is ""."""

    @abstractmethod
    def children(self, module: Module) -> Mapping[str, Module]:
        """Return the modules right below a module, by the names of its attributes."""

    @abstractmethod
    def plain_embedding(self, module: Module) -> PlainEmbedding | None:
        """Describe an embedding layer of the framework's own; None if it is not one."""

    def own_parameters(self, module: Module) -> Iterable[Tensor]:
        """Return the parameters of a module, without those of the modules below."""
        parameters: Mapping[str, Tensor] = module._parameters
        return parameters.values()

    def parameters(self, model: Module) -> Mapping[str, Tensor]:
        """Return the parameters of a model, each once, by path."""
        return dict(model.named_parameters())

    def buffers(self, model: Module) -> Mapping[str, Tensor]:
        """Return what a model holds beside parameters, by path."""
        return dict(model.named_buffers())

    def state(self, model: Module) -> Mapping[str, Tensor]:
        """Return the tensors that make up the state of a model, by path."""
        state: Mapping[str, Tensor] = model.state_dict()
        return state

    @abstractmethod
    def save(self, tensors: Mapping[str, Tensor], path: Path) -> None:
        """Write tensors to a file in the framework's format."""

    @abstractmethod
    def read(self, content: bytes) -> Mapping[str, Tensor | NDArray[Any]]:
        """Return what such a file has."""

    def before_call(
        self, module: Module, call: Callable[[Sequence[Any]], None]
    ) -> Callable[[], None]:
        """Have ``call(inputs)`` called whenever a module is; what this returns ends that."""
        hook = module.register_forward_pre_hook(lambda _, inputs: call(inputs))
        remove: Callable[[], None] = hook.remove
        return remove

    def set_evaluation(self, model: Module) -> None:
        """Have a model answer in evaluation mode from now on."""
        model.eval()

    def call(
        self, model: Module, positional: Sequence[Any], named: Mapping[str, Any], *, training: bool
    ) -> Any:
        """Return what a model answers in training or in evaluation mode."""
        if training:
            model.train()
        else:
            model.eval()
        return model(*positional, **named)

    def differentiate(
        self, compute: Callable[[], tuple[Tensor, Any]], accept: Callable[[Tensor], float]
    ) -> tuple[float, Any]:
        """Compute a loss, and have gradients ready for the optimizers' step.

        Args:
            compute: Returns the loss, and something else.
            accept: Returns the loss as a number. If it raises, nothing is differentiated.

        Returns:
            What ``accept`` returned, and the something else.
        """
        loss, other = compute()
        value = accept(loss)
        loss.backward()
        return value, other

    # Optimizers

    @abstractmethod
    def parameters_of(self, optimizer: Optimizer) -> Sequence[Tensor]:
        """Return the parameters that an optimizer was given."""

    def step(self, optimizer: Optimizer) -> None:
        """Update an optimizer's parameters in this process."""
        optimizer.step()

    @abstractmethod
    def forget_gradients(self, optimizer: Optimizer) -> None:
        """Forget the gradients of an optimizer's parameters."""

    @abstractmethod
    def set_rate(self, optimizer: Optimizer, rate: float) -> None:
        """Set an optimizer's learning rate.

        Raises:
            ConfigError: It has a scheduler of its own.
        """

    def begin_pass(self, optimizers: Sequence[Optimizer], number: int) -> None:
        """Set schedulers that optimizers carry to a pass (from 1): also in a late worker."""
        return

    def clip(self, clip_gradients: Callable[[Any], Any], parameters: Sequence[Tensor]) -> None:
        """Call the user's function with parameters whose gradients it can clip."""
        clip_gradients(parameters)

    def prepare_clipping(self, model: Module, optimizers: Sequence[Optimizer]) -> None:
        """Have gradients of a model in one process be such that its optimizers clip them."""
        return
