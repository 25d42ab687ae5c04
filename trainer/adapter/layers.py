"""The embedding layers with rows on the pservers: what those of every framework share.

A framework's class inherits one of these beside the framework's own, gives it its ``tensors`` and a
handle, and says what the rows begin with. They hold no weights and run no optimizer: rows are
pulled when they are called, their gradients collected in the backward pass, and pushed by
``DistributedOptimizer.step``. May import the session and the tables; no framework.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from backstay import tables
from backstay.errors import ConfigError, InvalidRequest
from backstay.trainer.adapter.framework import Tensor
from backstay.trainer.adapter.lookup import Lookup, Mode
from backstay.trainer.adapter.server_rows import ServerRows
from backstay.trainer.adapter.session import connection, numbered
from backstay.trainer.client import Client

__all__ = ["Embedding", "EmbeddingBag", "EmbeddingLayer", "RowSettings", "RowsHandle"]


class RowSettings(TypedDict, total=False):
    """What the layers of every framework take as keyword arguments.

    Attributes:
        name: Of the table. Trainers share rows by this name. Default: ``embedding_0``, then
            ``embedding_1``, the same in every trainer that runs the same program.
        client: Default: that of the open session (``init``), and its job before ``name``.
        optimizer: For this table alone, in place of the framework's translated optimizer.
        seed: Of the initial values; the same in every trainer.
        storage: Of the weights on the servers: "float32", "bfloat16" or "float16".
        non_finite: What a server does with NaN and infinite gradients: refuse the push (default) or
            clip.
        lifetime: When rows come and go. Default: each id gets a row with its first push, for good.
            If it uses a score, tell ``DistributedOptimizer.step`` the clicks.
        compensation: What the servers do about stale gradients: "ignore", "scale", a
            ``DelayCompensated`` or ``AdaptiveRevision()``. Default: the client's setting
            ``compensation``.
    """

    name: str | None
    client: Client | None
    optimizer: tables.Optimizer | None
    seed: int
    storage: tables.Storage
    non_finite: tables.NonFinite | None
    lifetime: tables.Lifetime | None
    compensation: tables.Compensation | None


class RowsHandle:
    """Stands among the parameters of a model for the rows of a layer, and shows their gradient.

    A framework's class inherits it beside that of its parameters. ``grad`` is the gradient of the
    rows that backward passes have reached since the last step, one row an id, so that whatever
    clips the gradients of parameters clips these, too.
    """

    backstay_layer: ServerRows

    @property
    def grad(self) -> Tensor | None:
        """The gradient, a tensor [different ids, dim]; None if there is none."""
        return self.backstay_layer.gradient()

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        self.backstay_layer.set_gradient(gradient)


class EmbeddingLayer(ServerRows):
    """What ``Embedding`` and ``EmbeddingBag`` share: their table, and their part in the graph."""

    training: bool

    def _set_up(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        padding_idx: int | None,
        initializer: tables.Initializer,
        *,
        name: str | None = None,
        client: Client | None = None,
        optimizer: tables.Optimizer | None = None,
        seed: int = 0,
        storage: tables.Storage = "float32",
        non_finite: tables.NonFinite | None = None,
        lifetime: tables.Lifetime | None = None,
        compensation: tables.Compensation | None = None,
    ) -> None:
        """Describe the table; see ``RowSettings`` for the keyword arguments.

        Raises:
            ConfigError: No connection, or a setting out of range.
        """
        connected, session = connection(client)
        if padding_idx is not None and padding_idx < 0 and num_embeddings is not None:
            padding_idx += num_embeddings  # frameworks count from the end, too
        name = name or numbered(connected, "embedding")
        described = optimizer
        if optimizer is None and isinstance(compensation, tables.AdaptiveRevision):
            # Stands there until the layer gets its optimizer, and must go with the compensation.
            described = tables.Adagrad(0.01)
        spec = tables.TableSpec.sparse(
            name if session is None else session.table_name(name),
            embedding_dim,
            optimizer=described,
            initializer=initializer,
            seed=seed,
            storage=storage,
            non_finite=non_finite,
            lifetime=lifetime,
            compensation=compensation or connected.default_compensation,
        )
        self._set_up_rows(connected, spec, optimizer, padding_idx)
        self._warned_of_saving = False

    def _answer(self, lookup: Lookup) -> Tensor:
        tensors = self.tensors
        output = lookup.output(self._fetch(lookup))
        if not (self.training and tensors.records() and tensors.trains(self.handle)):
            return tensors.sharing(output, self.handle)
        return tensors.attach(self.handle, output, partial(self._collect, lookup))

    def _warn_of_saving(self, stacklevel: int) -> None:
        """Called by ``state_dict()`` of this layer and of every model that holds it."""
        if not self._warned_of_saving:
            self._warned_of_saving = True
            warnings.warn(
                f"state_dict() holds no row of the embedding {self.table_name!r}: its rows are on "
                "the pservers. Save them with session.client.checkpoints.save(), or pull the ids "
                f"you know: session.client.pull({self.table_name!r}, ids)",
                stacklevel=stacklevel + 1,
            )

    def __deepcopy__(self, _: Any) -> Any:
        raise ConfigError(self._why_no_copy())

    def __reduce_ex__(self, _: Any) -> Any:
        raise ConfigError(self._why_no_copy())

    def _why_no_copy(self) -> str:
        return (
            f"the embedding {self.table_name!r} cannot be copied or pickled: it is a connection "
            "to rows on the pservers. Make the model anew in the other process, with the same "
            "name=; for inference see load_for_inference (docs/guide/serve.md)"
        )


class Embedding(EmbeddingLayer):
    """Answers each id with its row."""

    def forward(self, ids: Any) -> Tensor:
        """Return the rows of ``ids``, float32 [*ids.shape, embedding_dim].

        Args:
            ids: Integers of any shape: a tensor, an array or a list. The answer is on the device of
                this layer, wherever they are.
        """
        return self._answer(self._lookup_of(self.tensors.keys(ids)))

    def prefetch(self, ids: Any) -> None:
        """Begin to fetch the rows of a coming batch; the layer uses them for equal ids.

        The rows are as of now: pushes between now and then are not in them. Eight batches wait
        at most; the oldest is forgotten beyond that.
        """
        self._fetch_ahead(self._lookup_of(self.tensors.keys(ids)))


class EmbeddingBag(EmbeddingLayer):
    """Answers each bag of ids with the sum or the mean of their rows.

    Attributes:
        mode: "sum" or "mean".
        include_last_offset: The last of the offsets is the number of ids and begins no bag.
    """

    mode: Mode
    include_last_offset = False

    def forward(self, ids: Any, offsets: Any = None) -> Tensor:
        """Return one row a bag, float32 [bags, embedding_dim].

        Args:
            ids: [bags, n], one bag a row, short bags filled with ``padding_idx``; or flat [n]
                with ``offsets``.
            offsets: Where each bag begins in the flat ids: [bags], from 0, never falling.

        Raises:
            InvalidRequest: Shapes and offsets do not fit.
        """
        return self._answer(self._lookup(ids, offsets))

    def prefetch(self, ids: Any, offsets: Any = None) -> None:
        """Begin to fetch the rows of a coming batch; see ``Embedding.prefetch``."""
        self._fetch_ahead(self._lookup(ids, offsets))

    def _lookup(self, ids: Any, offsets: Any) -> Lookup:
        keys = self.tensors.keys(ids)
        starts = None if offsets is None else self._starts(keys, self.tensors.keys(offsets))
        return self._lookup_of_bags(keys, starts, mean=self.mode == "mean")

    def _starts(self, keys: NDArray[np.int64], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        if not self.include_last_offset:
            return offsets
        if offsets.ndim != 1 or not offsets.size or offsets[-1] != keys.size:
            raise InvalidRequest(
                f"include_last_offset: the last offset must be the number of ids, {keys.size}"
            )
        return offsets[:-1]
