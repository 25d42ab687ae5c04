"""Embedding layers whose rows live on the pservers.

May import the client, paddle and this package. They hold no weight matrix and run no optimizer:
rows are pulled in ``forward``, their gradients collected in the backward pass, and pushed by
``DistributedOptimizer.step``.
"""

from __future__ import annotations

import warnings
from collections import deque
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import paddle
from numpy.typing import NDArray

from backstay import tables
from backstay.errors import ConfigError, InvalidRequest, UnknownTable
from backstay.trainer.client import Client
from backstay.trainer.paddle.environment import current_session
from backstay.trainer.paddle.lookup import Bags, Lookup, as_keys, as_tensor, attach_gradient
from backstay.trainer.paddle.translate import initializer_of
from backstay.trainer.pending import Pending
from backstay.trainer.table import KeyBatch, Table

__all__ = ["Embedding", "EmbeddingBag"]

# Batches that may be fetched ahead; the oldest is forgotten beyond that.
PREFETCHED_BATCHES_MAX = 8
# Backward passes whose gradients may wait for one step().
COLLECTED_GRADIENTS_MAX = 1024


class _ServerRows(paddle.nn.Layer):  # type: ignore[misc]
    """What both layers share: the table, lookups ahead, and gradients that wait for a step."""

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
    ) -> None:
        super().__init__()
        if weight_attr is False:
            raise ConfigError("weight_attr=False: an embedding without weights does nothing")
        session = current_session()
        if client is None and session is None:
            raise ConfigError(
                "no connection: call backstay.trainer.paddle.init() first, or pass client="
            )
        if padding_idx is not None and padding_idx < 0 and num_embeddings is not None:
            padding_idx += num_embeddings  # Paddle counts from the end, too
        attributes = paddle.ParamAttr._to_attr(weight_attr)
        if attributes.regularizer is not None:
            raise ConfigError("weight_attr has a regularizer: the servers decay rows by AdamW only")
        table_name = name or attributes.name or self.full_name()
        if client is None and session is not None:
            client, table_name = session.client, session.table_name(table_name)
        assert client is not None
        self.padding_idx = padding_idx
        self._client = client
        self._own_optimizer = optimizer
        # Without an optimizer of its own the layer gets one from DistributedOptimizer, and only
        # then makes the table.
        self._spec = tables.TableSpec.sparse(
            table_name,
            embedding_dim,
            optimizer=optimizer,
            initializer=initializer_of(weight_attr, num_embeddings, embedding_dim),
            seed=seed,
            storage=storage,
            non_finite=non_finite,
        )
        self._dim = embedding_dim
        self._table: Table | None = None
        self._owned = False
        self._prefetched: deque[tuple[Lookup, Pending[NDArray[np.float32]]]] = deque()
        self._collected: list[tuple[Lookup, NDArray[np.float32]]] = []
        # Stands among the model's parameters for the rows on the servers: this is how the
        # optimizer that is given model.parameters() finds this layer.
        self.handle = self.create_parameter(
            [1], default_initializer=paddle.nn.initializer.Constant(0.0)
        )
        self.handle.stop_gradient = not attributes.trainable
        self.handle.optimize_attr["learning_rate"] = attributes.learning_rate
        self.handle.backstay_layer = self
        self._warned_of_saving = False
        self.register_state_dict_hook(self._warn_of_saving)

    @property
    def table_name(self) -> str:
        """The name of this layer's table in the cluster."""
        return self._spec.name

    @property
    def client(self) -> Client:
        """The connection by which rows are pulled and pushed."""
        return self._client

    @property
    def has_optimizer(self) -> bool:
        """Whether a ``DistributedOptimizer`` pushes this layer's gradients."""
        return self._owned

    def create_table(self, optimizer: tables.Optimizer) -> None:
        """Create the table, or find it made by another trainer; the layer's own optimizer wins.

        ``DistributedOptimizer`` calls this.

        Raises:
            ConfigError: Another optimizer has this layer already.
            TableConflict: The table exists with other settings.
        """
        if self._owned:
            raise ConfigError(f"the embedding {self.table_name!r} has an optimizer already")
        spec = replace(self._spec, optimizer=self._own_optimizer or optimizer)
        self._table = self._client.create_table(spec)
        self._owned = True

    def take_gradients(
        self,
    ) -> tuple[Table, KeyBatch | NDArray[np.int64], NDArray[np.float32]] | None:
        """Hand over what backward passes have collected since the last call; None: nothing.

        Several lookups become one push, as they are one update in Paddle too.
        """
        collected, self._collected = self._collected, []
        if not collected:
            return None
        by_lookup: dict[int, tuple[Lookup, NDArray[np.float32]]] = {}
        for lookup, gradient in collected:
            if id(lookup) in by_lookup:  # one graph, run backward more than once
                gradient = by_lookup[id(lookup)][1] + gradient
            by_lookup[id(lookup)] = (lookup, gradient)
        pairs = list(by_lookup.values())
        if len(pairs) == 1:
            lookup, gradient = pairs[0]
            batch = lookup.keys if lookup.batch is None else lookup.batch
            return self._ready_table(), batch, gradient
        keys = np.concatenate([lookup.keys.reshape(-1) for lookup, _ in pairs])
        gradients = np.concatenate([gradient.reshape(-1, self._dim) for _, gradient in pairs])
        return self._ready_table(), keys, gradients

    def discard_gradients(self) -> None:
        """Forget what backward passes have collected."""
        self._collected.clear()

    def extra_repr(self) -> str:
        """What ``print(model)`` shows of this layer."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"table={self.table_name!r}, dim={self._dim}{padding}"

    def _warn_of_saving(self, _: Any) -> None:
        """Called by ``state_dict()`` of this layer and of every model that holds it."""
        if self._warned_of_saving:
            return
        self._warned_of_saving = True
        warnings.warn(
            f"state_dict() holds no row of the embedding {self.table_name!r}: its rows are on the "
            "pservers, and this version saves none. Pull the ids you know and save the arrays: "
            f"session.client.pull({self.table_name!r}, ids)",
            stacklevel=3,
        )

    def _answer(self, lookup: Lookup) -> paddle.Tensor:
        output = lookup.output(self._fetch(lookup))
        if not (self.training and paddle.is_grad_enabled() and not self.handle.stop_gradient):
            return as_tensor(output)

        def collect(gradient: NDArray[np.float32]) -> None:
            if len(self._collected) >= COLLECTED_GRADIENTS_MAX:
                raise InvalidRequest(
                    f"{COLLECTED_GRADIENTS_MAX} backward passes through {self.table_name!r} "
                    "without step() or clear_grad()"
                )
            if lookup.batch is not None:
                self._collected.append((lookup, lookup.row_gradients(gradient)))

        return attach_gradient(output, collect)

    def _fetch(self, lookup: Lookup) -> NDArray[np.float32]:
        if lookup.batch is None:
            return np.zeros((*lookup.keys.shape, self._dim), np.float32)
        for index, (ahead, pending) in enumerate(self._prefetched):
            if ahead.keys.shape == lookup.keys.shape and np.array_equal(ahead.keys, lookup.keys):
                del self._prefetched[index]
                return pending.result()
        return self._client.pull(self._ready_table(), lookup.batch)

    def _fetch_ahead(self, lookup: Lookup) -> None:
        if lookup.batch is None:
            return
        if len(self._prefetched) >= PREFETCHED_BATCHES_MAX:
            self._prefetched.popleft()
        pending = self._client.pull_async(self._ready_table(), lookup.batch)
        self._prefetched.append((lookup, pending))

    def _prepare(self, keys: NDArray[np.int64]) -> KeyBatch | None:
        return self._client.prepare(keys) if keys.size else None

    def _ready_table(self) -> Table:
        if self._table is None and self._own_optimizer is not None:
            self._table = self._client.create_table(self._spec)
        if self._table is None:
            try:
                table = self._client.table(self.table_name)
            except UnknownTable:
                raise ConfigError(
                    f"the table {self.table_name!r} does not exist yet: wrap the optimizer that "
                    "has this layer's parameters in DistributedOptimizer before the first lookup"
                ) from None
            if table.dim != self._dim:
                raise ConfigError(
                    f"the table {self.table_name!r} has rows of {table.dim} elements, this layer "
                    f"wants {self._dim}: another layer has the same name; give one of them name="
                )
            self._table = table
        return self._table


class Embedding(_ServerRows):
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
    ) -> None:
        super().__init__(
            num_embeddings, embedding_dim, padding_idx,
            weight_attr=weight_attr, name=name, client=client, optimizer=optimizer,
            seed=seed, storage=storage, non_finite=non_finite,
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
        keys = as_keys(ids)
        if self.padding_idx is not None:
            present = keys != self.padding_idx
            if not present.all():
                flat = keys[present]
                return Lookup(flat, self._prepare(flat), present)
        return Lookup(keys, self._prepare(keys))


class EmbeddingBag(_ServerRows):
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
    ) -> None:
        if mode not in ("sum", "mean"):
            raise ConfigError(f"mode is {mode!r}; it must be 'sum' or 'mean'")
        super().__init__(
            num_embeddings, embedding_dim, padding_idx,
            weight_attr=weight_attr, name=name, client=client, optimizer=optimizer,
            seed=seed, storage=storage, non_finite=non_finite,
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
        keys = as_keys(ids)
        bag_of_key, bags = _bag_of_each_key(keys, offsets)
        keys = keys.reshape(-1)
        if self.padding_idx is not None:
            present = keys != self.padding_idx
            keys, bag_of_key = keys[present], bag_of_key[present]
        counts = np.bincount(bag_of_key, minlength=bags)
        return Lookup(keys, self._prepare(keys), bags=Bags(counts, self.mode == "mean"))


def _bag_of_each_key(keys: NDArray[np.int64], offsets: Any) -> tuple[NDArray[np.int64], int]:
    if offsets is None:
        if keys.ndim != 2:
            raise InvalidRequest(f"ids of shape {keys.shape}: give [bags, n], or offsets too")
        return np.repeat(np.arange(keys.shape[0]), keys.shape[1]), keys.shape[0]
    starts = as_keys(offsets)
    if keys.ndim != 1 or starts.ndim != 1:
        raise InvalidRequest(
            f"with offsets, ids and offsets are flat; they have {keys.shape} and {starts.shape}"
        )
    ends = np.append(starts, keys.size)
    if ends[0] != 0 or (np.diff(ends) < 0).any():
        raise InvalidRequest(f"offsets must rise from 0 to at most the number of ids, {keys.size}")
    return np.repeat(np.arange(starts.size), np.diff(ends)), starts.size
