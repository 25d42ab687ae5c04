"""Embedding layers of Paddle whose rows live on the pservers.

May import paddle, this package and ``trainer.adapter``; see ``adapter.layers`` for what they do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import paddle
from paddle.base.framework import EagerParamBase

from backstay.errors import ConfigError
from backstay.trainer.adapter import layers
from backstay.trainer.adapter.layers import RowSettings
from backstay.trainer.adapter.lookup import Mode, checked_mode
from backstay.trainer.paddle.tensors import TENSORS
from backstay.trainer.paddle.translate import initializer_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Embedding", "EmbeddingBag", "RowsHandle"]


class RowsHandle(layers.RowsHandle, EagerParamBase):  # type: ignore[misc]
    """See ``backstay.trainer.adapter.layers.RowsHandle``."""

    # What paddle.nn.utils.clip_grad_norm_ changes in place.
    grad_ = layers.RowsHandle.grad

    def clear_gradient(self, set_to_zero: bool = True) -> None:
        """Forget the gradient."""
        del set_to_zero
        self.backstay_layer.discard_gradients()

    clear_grad = clear_gradient


class _ServerLayer(layers.EmbeddingLayer, paddle.nn.Layer):  # type: ignore[misc]
    """What both layers share."""

    tensors = TENSORS

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        sparse: bool = True,
        weight_attr: Any = None,
        **settings: Unpack[RowSettings],
    ) -> None:
        super().__init__()
        if weight_attr is False:
            raise ConfigError("weight_attr=False: an embedding without weights does nothing")
        attributes = paddle.ParamAttr._to_attr(weight_attr)
        if attributes.regularizer is not None:
            raise ConfigError("weight_attr has a regularizer: the servers decay rows by AdamW only")
        settings["name"] = settings.get("name") or attributes.name or self.full_name()
        initializer = initializer_of(weight_attr, num_embeddings, embedding_dim)
        self._set_up(num_embeddings, embedding_dim, padding_idx, initializer, **settings)
        self.handle = self.create_parameter(
            [1], default_initializer=paddle.nn.initializer.Constant(0.0)
        )
        self.handle.__class__ = RowsHandle
        self.handle.stop_gradient = not attributes.trainable
        self.handle.need_clip = attributes.need_clip
        self.handle.optimize_attr["learning_rate"] = attributes.learning_rate
        self.handle.backstay_layer = self
        self.register_state_dict_hook(lambda _: self._warn_of_saving(3))


class Embedding(layers.Embedding, _ServerLayer):
    """``paddle.nn.Embedding`` with its rows on the pservers and any 64-bit ids.

    A row comes into being with its first push. Until then a lookup answers with its initial value,
    which the initializer computes from table, id and seed, the same on every server; looking ids up
    takes no memory there. Rows change when ``DistributedOptimizer.step`` pushes
    the gradients of the lookups since the step before. Lookups under ``paddle.no_grad()`` and of
    a layer in ``eval()`` mode are never pushed.

    Args:
        num_embeddings: Only the default initializer and a negative ``padding_idx`` use it: ids
            may be any 64-bit integers. None: unknown.
        embedding_dim: Elements of a row.
        padding_idx: The id that means "nothing here": answered with zeros, never fetched or
            pushed. A negative one counts from ``num_embeddings``, if that is given.
        sparse: Accepted and ignored: gradients are always sparse.
        weight_attr: Initializer, learning rate and ``trainable`` are honoured. Initializers:
            Constant, Uniform, Normal, TruncatedNormal, XavierUniform, XavierNormal.
        settings: ``name`` (default: as Paddle numbers its layers), ``client``, ``optimizer``,
            ``seed``, ``storage``, ``non_finite``, ``lifetime`` and ``compensation``: see
            ``backstay.trainer.adapter.layers.RowSettings``.

    Raises:
        ConfigError: No connection, or an initializer that the servers do not have.
    """


class EmbeddingBag(layers.EmbeddingBag, _ServerLayer):
    """Sums or averages the rows of each bag of ids, in one lookup.

    Args:
        mode: "sum" or "mean". Padding does not count; an empty bag gives zeros.

    The other arguments are those of ``Embedding``.
    """

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        mode: Mode = "mean",
        sparse: bool = True,
        weight_attr: Any = None,
        **settings: Unpack[RowSettings],
    ) -> None:
        checked_mode(mode)
        super().__init__(
            num_embeddings, embedding_dim, padding_idx, weight_attr=weight_attr, **settings
        )
        self.mode = mode
