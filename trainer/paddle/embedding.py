"""Embedding layers whose rows live on the pservers.

May import paddle, this package and the framework-neutral parts of ``backstay.trainer``. They hold
no weight matrix and run no optimizer: rows are pulled in ``forward``, their gradients collected in
the backward pass, and pushed by ``DistributedOptimizer.step``.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any, Literal

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle.base.framework import EagerParamBase

from backstay import tables
from backstay.errors import ConfigError
from backstay.trainer.adapter.lookup import Lookup
from backstay.trainer.adapter.server_rows import ServerRows, described_optimizer
from backstay.trainer.adapter.session import connection
from backstay.trainer.client import Client
from backstay.trainer.paddle.lookup import as_gradient, as_keys, as_tensor, attach_gradient
from backstay.trainer.paddle.translate import initializer_of

__all__ = ["Embedding", "EmbeddingBag"]


class RowsHandle(EagerParamBase):  # type: ignore[misc]
    """Stands among the parameters of a model for the rows of a layer, and shows their gradient.

    ``grad`` is the gradient of the rows that backward passes have reached since the last step, one
    row an id, so that whatever clips the gradients of parameters clips these, too.
    """

    backstay_layer: ServerRows

    @property
    def grad(self) -> Any:
        """The gradient, paddle.Tensor [different ids, dim]; None if there is none."""
        return self.backstay_layer.gradient()

    @grad.setter
    def grad(self, gradient: Any) -> None:
        self.backstay_layer.set_gradient(gradient)

    # What paddle.nn.utils.clip_grad_norm_ changes in place.
    grad_ = grad

    def clear_gradient(self, set_to_zero: bool = True) -> None:
        """Forget the gradient."""
        del set_to_zero
        self.backstay_layer.discard_gradients()

    clear_grad = clear_gradient


class _ServerLayer(ServerRows, paddle.nn.Layer):  # type: ignore[misc]
    """What both layers share: the settings of the table, and the part in Paddle's graph."""

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        padding_idx: int | None,
        *,
        weight_attr: Any,
        name: str | None,
        client: Client | None,
        optimizer: tables.Optimizer | None,
        seed: int,
        storage: tables.Storage,
        non_finite: tables.NonFinite | None,
        lifetime: tables.Lifetime | None,
        compensation: tables.Compensation | None,
    ) -> None:
        super().__init__()
        if weight_attr is False:
            raise ConfigError("weight_attr=False: an embedding without weights does nothing")
        connected, session = connection(client)
        if padding_idx is not None and padding_idx < 0 and num_embeddings is not None:
            padding_idx += num_embeddings  # Paddle counts from the end, too
        attributes = paddle.ParamAttr._to_attr(weight_attr)
        if attributes.regularizer is not None:
            raise ConfigError("weight_attr has a regularizer: the servers decay rows by AdamW only")
        table_name = name or attributes.name or self.full_name()
        spec = tables.TableSpec.sparse(
            table_name if session is None else session.table_name(table_name),
            embedding_dim,
            optimizer=described_optimizer(optimizer, compensation),
            initializer=initializer_of(weight_attr, num_embeddings, embedding_dim),
            seed=seed,
            storage=storage,
            non_finite=non_finite,
            lifetime=lifetime,
            compensation=compensation or connected.default_compensation,
        )
        self._set_up(connected, spec, optimizer, padding_idx)
        # Stands among the model's parameters for the rows on the servers: this is how the
        # optimizer that is given model.parameters() finds this layer.
        self.handle = self.create_parameter(
            [1], default_initializer=paddle.nn.initializer.Constant(0.0)
        )
        self.handle.__class__ = RowsHandle
        self.handle.stop_gradient = not attributes.trainable
        self.handle.need_clip = attributes.need_clip
        self.handle.optimize_attr["learning_rate"] = attributes.learning_rate
        self.handle.backstay_layer = self
        self._warned_of_saving = False
        self.register_state_dict_hook(self._warn_of_saving)

    def _warn_of_saving(self, _: Any) -> None:
        """Called by ``state_dict()`` of this layer and of every model that holds it."""
        if not self._warned_of_saving:
            self._warned_of_saving = True
            warnings.warn(self._saving_warning(), stacklevel=3)

    def _to_tensor(self, gradient: NDArray[np.float32]) -> paddle.Tensor:
        return as_tensor(gradient)

    def _to_array(self, gradient: paddle.Tensor) -> NDArray[np.float32]:
        return as_gradient(gradient)

    def _answer(self, lookup: Lookup) -> paddle.Tensor:
        output = lookup.output(self._fetch(lookup))
        if not (self.training and paddle.is_grad_enabled() and not self.handle.stop_gradient):
            return as_tensor(output)
        return attach_gradient(output, partial(self._collect, lookup))


class Embedding(_ServerLayer):
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
        name: Of the table. Trainers share rows by this name. Default: as Paddle numbers its
            layers (``embedding_0``), the same in every trainer that runs the same program.
        client: Default: that of the open session (``init``), and its job before ``name``.
        optimizer: For this table alone, in place of the translated Paddle optimizer.
        seed: Of the initial values; the same in every trainer.
        storage: Of the weights on the servers: "float32", "bfloat16" or "float16".
        non_finite: What a server does with NaN and infinite gradients: refuse the push
            (default) or clip.
        lifetime: When rows come and go. Default: each id gets a row with its first push, for
            good. If it uses a score, tell ``DistributedOptimizer.step`` the clicks.
        compensation: What the servers do about stale gradients: "ignore", "scale", a
            ``DelayCompensated`` or ``AdaptiveRevision()``. Default: the client's setting
            ``compensation``.

    Raises:
        ConfigError: No connection, or an initializer that the servers do not have.
    """

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        sparse: bool = True,
        weight_attr: Any = None,
        name: str | None = None,
        client: Client | None = None,
        optimizer: tables.Optimizer | None = None,
        seed: int = 0,
        storage: tables.Storage = "float32",
        non_finite: tables.NonFinite | None = None,
        lifetime: tables.Lifetime | None = None,
        compensation: tables.Compensation | None = None,
    ) -> None:
        super().__init__(
            num_embeddings, embedding_dim, padding_idx,
            weight_attr=weight_attr, name=name, client=client, optimizer=optimizer,
            seed=seed, storage=storage, non_finite=non_finite, lifetime=lifetime,
            compensation=compensation,
        )  # fmt: skip

    def forward(self, ids: Any) -> paddle.Tensor:
        """Return the rows of ``ids``, float32 [*ids.shape, embedding_dim].

        Args:
            ids: Integers of any shape: a tensor, an array or a list.
        """
        return self._answer(self._lookup(ids))

    def prefetch(self, ids: Any) -> None:
        """Begin to fetch the rows of a coming batch; ``forward`` with equal ids uses them.

        The rows are as of now: pushes between now and then are not in them. Eight batches wait
        at most; the oldest is forgotten beyond that.
        """
        self._fetch_ahead(self._lookup(ids))

    def _lookup(self, ids: Any) -> Lookup:
        return self._lookup_of(as_keys(ids))


class EmbeddingBag(_ServerLayer):
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
        mode: Literal["sum", "mean"] = "mean",
        sparse: bool = True,
        weight_attr: Any = None,
        name: str | None = None,
        client: Client | None = None,
        optimizer: tables.Optimizer | None = None,
        seed: int = 0,
        storage: tables.Storage = "float32",
        non_finite: tables.NonFinite | None = None,
        lifetime: tables.Lifetime | None = None,
        compensation: tables.Compensation | None = None,
    ) -> None:
        if mode not in ("sum", "mean"):
            raise ConfigError(f"mode is {mode!r}; it must be 'sum' or 'mean'")
        super().__init__(
            num_embeddings, embedding_dim, padding_idx,
            weight_attr=weight_attr, name=name, client=client, optimizer=optimizer,
            seed=seed, storage=storage, non_finite=non_finite, lifetime=lifetime,
            compensation=compensation,
        )  # fmt: skip
        self.mode = mode

    def forward(self, ids: Any, offsets: Any = None) -> paddle.Tensor:
        """Return one row a bag, float32 [bags, embedding_dim].

        Args:
            ids: [bags, n], one bag a row, short bags filled with ``padding_idx``; or flat [n]
                with ``offsets``.
            offsets: Where each bag begins in the flat ids: [bags], from 0, never falling.

        Raises:
            InvalidRequest: Shape and offsets do not fit.
        """
        return self._answer(self._lookup(ids, offsets))

    def prefetch(self, ids: Any, offsets: Any = None) -> None:
        """Begin to fetch the rows of a coming batch; see ``Embedding.prefetch``."""
        self._fetch_ahead(self._lookup(ids, offsets))

    def _lookup(self, ids: Any, offsets: Any) -> Lookup:
        starts = None if offsets is None else as_keys(offsets)
        return self._lookup_of_bags(as_keys(ids), starts, mean=self.mode == "mean")
