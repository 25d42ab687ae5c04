"""Paddle's models and optimizers, as ``trainer.adapter`` and ``trainer.model`` use them.

May import paddle, this package and ``trainer.adapter``; see ``adapter.framework`` for the contract.
"""

from __future__ import annotations

import io
import signal
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import paddle

from backstay.errors import ConfigError
from backstay.trainer.adapter.framework import Framework, PlainEmbedding
from backstay.trainer.paddle.layers import Embedding
from backstay.trainer.paddle.optimizer import DistributedOptimizer
from backstay.trainer.paddle.tensors import TENSORS
from backstay.trainer.paddle.translate import initializer_of

__all__ = ["FRAMEWORK"]


class _Paddle(Framework):
    """See :class:`backstay.trainer.adapter.framework.Framework`."""

    name = "paddle"
    tensors = TENSORS
    module_class = paddle.nn.Layer
    module = "a paddle.nn.Layer"
    optimizer_class = paddle.optimizer.Optimizer
    optimizers = "paddle.optimizer"
    distributed_optimizer = DistributedOptimizer
    saved_file = "model.pdparams"
    no_clip_gradients = (
        "Paddle's optimizers clip themselves; pass grad_clip=paddle.nn.ClipGradByGlobalNorm(...) "
        "to the optimizer"
    )

    def begin(self, seed: int) -> None:
        _keep_own_signal_handlers()
        paddle.seed(seed)

    def fresh_names(self) -> AbstractContextManager[Any]:
        guard: AbstractContextManager[Any] = paddle.utils.unique_name.guard()
        return guard

    def modules(self, model: paddle.nn.Layer) -> Iterable[tuple[str, paddle.nn.Layer]]:
        layers: Iterable[tuple[str, paddle.nn.Layer]] = model.named_sublayers(include_self=True)
        return layers

    def children(self, module: paddle.nn.Layer) -> Mapping[str, paddle.nn.Layer]:
        children: Mapping[str, paddle.nn.Layer] = module._sub_layers
        return children

    def plain_embedding(self, module: paddle.nn.Layer) -> PlainEmbedding | None:
        if not isinstance(module, paddle.nn.Embedding):
            return None
        padding = module._padding_idx
        if padding is not None and padding < 0:
            padding += module._num_embeddings
        sizes = (module._num_embeddings, module._embedding_dim)
        return PlainEmbedding(
            weight=module.weight,
            padding_idx=padding,
            sparse=module._sparse,
            obstacle=_obstacle(module),
            initializer=partial(initializer_of, module._weight_attr, *sizes),
            source="as its weight_attr says",
            otherwise="pass the initializer in weight_attr, or use "
            "backstay.trainer.paddle.Embedding",
            twin=partial(_twin, module, *sizes, padding),
        )

    def save(self, tensors: Mapping[str, paddle.Tensor], path: Path) -> None:
        paddle.save(dict(tensors), str(path))

    def read(self, content: bytes) -> Mapping[str, paddle.Tensor]:
        saved: Mapping[str, paddle.Tensor] = paddle.load(io.BytesIO(content))
        return saved

    def parameters_of(self, optimizer: paddle.optimizer.Optimizer) -> Sequence[paddle.Tensor]:
        given = optimizer._parameter_list or []
        if given and isinstance(given[0], dict):
            return [parameter for group in given for parameter in group["params"]]
        return list(given)

    def forget_gradients(self, optimizer: paddle.optimizer.Optimizer) -> None:
        optimizer.clear_grad()

    def set_rate(self, optimizer: paddle.optimizer.Optimizer, rate: float) -> None:
        if _scheduler_of(optimizer) is not None:
            raise ConfigError(
                "the optimizer has a scheduler of Paddle's and the callbacks have a "
                "LearningRateScheduler: leave one of them out"
            )
        optimizer.set_lr(rate)

    def begin_pass(self, optimizers: Sequence[paddle.optimizer.Optimizer], number: int) -> None:
        schedulers = filter(None, map(_scheduler_of, optimizers))
        # Two optimizers may share one.
        for scheduler in {id(scheduler): scheduler for scheduler in schedulers}.values():
            scheduler.step(number - 1)

    def prepare_clipping(
        self, model: paddle.nn.Layer, optimizers: Sequence[paddle.optimizer.Optimizer]
    ) -> None:
        by_value = paddle.nn.ClipGradByValue
        if any(isinstance(optimizer._grad_clip, by_value) for optimizer in optimizers):
            for layer in model.sublayers(include_self=True):
                if isinstance(layer, paddle.nn.Embedding):
                    layer._sparse = False  # Paddle clips no sparse gradients by value


FRAMEWORK = _Paddle()


def _keep_own_signal_handlers() -> None:
    """Undo what importing Paddle did: its handlers end the process, and no task is given back."""
    if threading.current_thread() is not threading.main_thread():
        return
    own = signal.getsignal(signal.SIGTERM)
    paddle.disable_signal_handler()
    if own is not None:
        signal.signal(signal.SIGTERM, own)


def _obstacle(layer: Any) -> str | None:
    if type(layer) is not paddle.nn.Embedding:
        return f"{type(layer).__name__} may do more than its base class; use backstay's layer"
    if getattr(layer, "_max_norm", None) is not None:
        return "the servers do not know max_norm; leave it out"
    if getattr(layer, "_scale_grad_by_freq", False):
        return "the servers do not know scale_grad_by_freq; leave it out"
    if layer._forward_post_hooks or layer._forward_pre_hooks:
        return "it has forward hooks; set them on backstay's layer"
    return None


def _twin(
    layer: Any, num_embeddings: int, dim: int, padding_idx: int | None, **settings: Any
) -> Embedding:
    swapped = Embedding(
        num_embeddings, dim, padding_idx, weight_attr=layer._weight_attr, **settings
    )
    if not layer.training:
        swapped.eval()
    return swapped


def _scheduler_of(
    optimizer: paddle.optimizer.Optimizer,
) -> paddle.optimizer.lr.LRScheduler | None:
    rate = optimizer._learning_rate
    return rate if isinstance(rate, paddle.optimizer.lr.LRScheduler) else None
