"""Embedding modules whose rows live on the pservers.

May import torch, this package and the framework-neutral parts of ``backstay.trainer``. They hold
no weight matrix and run no optimizer: rows are pulled in ``forward``, their gradients collected in
the backward pass, and pushed by ``DistributedOptimizer.step``.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from backstay import tables
from backstay.errors import ConfigError, InvalidRequest
from backstay.trainer.adapter.lookup import Lookup
from backstay.trainer.adapter.server_rows import ServerRows, described_optimizer
from backstay.trainer.adapter.session import connection, numbered
from backstay.trainer.client import Client
from backstay.trainer.torch.lookup import as_gradient, as_keys, as_tensor, attach_gradient

__all__ = ["DEFAULT_INITIALIZER", "Embedding", "EmbeddingBag"]

# That of torch.nn.Embedding.
DEFAULT_INITIALIZER = tables.Normal(0.0, 1.0)


class RowsHandle(torch.nn.Parameter):  # type: ignore[misc]
    """Stands among the parameters of a model for the rows of a layer, and shows their gradient.

    ``grad`` is the gradient of the rows that backward passes have reached since the last step, one
    row an id, so that whatever clips the gradients of parameters clips these, too.
    """

    backstay_layer: ServerRows

    @property
    def grad(self) -> Any:
        """The gradient, torch.Tensor [different ids, dim]; None if there is none."""
        return self.backstay_layer.gradient()

    @grad.setter
    def grad(self, gradient: Any) -> None:
        self.backstay_layer.set_gradient(gradient)


class _ServerModule(ServerRows, torch.nn.Module):  # type: ignore[misc]
    """What both modules share: the settings of the table, and the part in PyTorch's graph."""

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        padding_idx: int | None,
        *,
        initializer: tables.Initializer | None,
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
        connected, session = connection(client)
        if padding_idx is not None and padding_idx < 0 and num_embeddings is not None:
            padding_idx += num_embeddings  # PyTorch counts from the end, too
        table_name = name or numbered(connected, "embedding")
        spec = tables.TableSpec.sparse(
            table_name if session is None else session.table_name(table_name),
            embedding_dim,
            optimizer=described_optimizer(optimizer, compensation),
            initializer=DEFAULT_INITIALIZER if initializer is None else initializer,
            seed=seed,
            storage=storage,
            non_finite=non_finite,
            lifetime=lifetime,
            compensation=compensation or connected.default_compensation,
        )
        self._set_up(connected, spec, optimizer, padding_idx)
        # Stands among the model's parameters for the rows on the servers: this is how the
        # optimizer that is given model.parameters() finds this layer.
        self.handle = RowsHandle(torch.zeros(1))
        self.handle.backstay_layer = self
        self._warned_of_saving = False
        self.register_state_dict_pre_hook(_warn_of_saving)

    def _answer(self, lookup: Lookup) -> torch.Tensor:
        output = lookup.output(self._fetch(lookup))
        if not (self.training and torch.is_grad_enabled() and self.handle.requires_grad):
            return as_tensor(output, self.handle.device)
        return attach_gradient(self.handle, output, partial(self._collect, lookup))

    def _to_tensor(self, gradient: NDArray[np.float32]) -> torch.Tensor:
        return as_tensor(gradient, self.handle.device)

    def _to_array(self, gradient: torch.Tensor) -> NDArray[np.float32]:
        return as_gradient(gradient)

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


class Embedding(_ServerModule):
    """``torch.nn.Embedding`` with its rows on the pservers and any 64-bit ids.

    A row comes into being with its first push. Until then a lookup answers with its initial value,
    which the initializer computes from table, id and seed, the same on every server; looking ids up
    takes no memory there. Rows change when ``DistributedOptimizer.step`` pushes the gradients of
    the lookups since the step before. Lookups under ``torch.no_grad()`` and of a module in
    ``eval()`` mode are never pushed.

    ``torch.compile`` leaves the lookup out: the graph breaks there, and what stands around it is
    compiled.

    Args:
        num_embeddings: Only a negative ``padding_idx`` uses it: ids may be any 64-bit integers.
            None: unknown.
        embedding_dim: Elements of a row.
        padding_idx: The id that means "nothing here": answered with zeros, never fetched or
            pushed. A negative one counts from ``num_embeddings``, if that is given.
        sparse: Accepted and ignored: gradients are always sparse.
        initializer: Of rows without a push. Default: ``Normal(0, 1)``, as in PyTorch.
        name: Of the table. Trainers share rows by this name. Default: ``embedding_0``, then
            ``embedding_1``, the same in every trainer that runs the same program.
        client: Default: that of the open session (``init``), and its job before ``name``.
        optimizer: For this table alone, in place of the translated PyTorch optimizer.
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
        ConfigError: No connection, or a setting out of range.
    """

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        sparse: bool = True,
        initializer: tables.Initializer | None = None,
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
            initializer=initializer, name=name, client=client, optimizer=optimizer,
            seed=seed, storage=storage, non_finite=non_finite, lifetime=lifetime,
            compensation=compensation,
        )  # fmt: skip

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, ids: Any) -> torch.Tensor:
        """Return the rows of ``ids``, float32 [*ids.shape, embedding_dim].

        Args:
            ids: Integers of any shape: a tensor, an array or a list. The answer is on this
                module's device, wherever they are.
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


class EmbeddingBag(_ServerModule):
    """Sums or averages the rows of each bag of ids, in one lookup: ``torch.nn.EmbeddingBag``.

    Args:
        mode: "sum" or "mean". Padding does not count; an empty bag gives zeros.
        include_last_offset: The last of the offsets is the number of ids and begins no bag.

    The other arguments are those of ``Embedding``.
    """

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        mode: Literal["sum", "mean"] = "mean",
        include_last_offset: bool = False,
        sparse: bool = True,
        initializer: tables.Initializer | None = None,
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
            initializer=initializer, name=name, client=client, optimizer=optimizer,
            seed=seed, storage=storage, non_finite=non_finite, lifetime=lifetime,
            compensation=compensation,
        )  # fmt: skip
        self.mode = mode
        self.include_last_offset = include_last_offset

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(
        self, ids: Any, offsets: Any = None, per_sample_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return one row a bag, float32 [bags, embedding_dim].

        Args:
            ids: [bags, n], one bag a row, short bags filled with ``padding_idx``; or flat [n]
                with ``offsets``.
            offsets: Where each bag begins in the flat ids: [bags], from 0, never falling.
            per_sample_weights: A factor for each id, float32, of the shape of ``ids``; with mode
                "sum" only. Gets a gradient, too.

        Raises:
            InvalidRequest: Shapes and offsets do not fit, or weights come with mode "mean".
        """
        lookup = self._lookup(ids, offsets)
        if per_sample_weights is None:
            return self._answer(lookup)
        return self._weighted(lookup, as_keys(ids), per_sample_weights)

    def prefetch(self, ids: Any, offsets: Any = None) -> None:
        """Begin to fetch the rows of a coming batch; see ``Embedding.prefetch``."""
        self._fetch_ahead(self._lookup(ids, offsets))

    def _lookup(self, ids: Any, offsets: Any) -> Lookup:
        keys = as_keys(ids)
        starts = None if offsets is None else self._starts(keys, as_keys(offsets))
        return self._lookup_of_bags(keys, starts, mean=self.mode == "mean")

    def _starts(self, keys: NDArray[np.int64], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        if not self.include_last_offset:
            return offsets
        if offsets.ndim != 1 or not offsets.size or offsets[-1] != keys.size:
            raise InvalidRequest(
                f"include_last_offset: the last offset must be the number of ids, {keys.size}"
            )
        return offsets[:-1]

    def _weighted(
        self, lookup: Lookup, ids: NDArray[np.int64], weights: torch.Tensor
    ) -> torch.Tensor:
        """Combine in PyTorch, which knows the gradients of rows and of weights."""
        if self.mode != "sum":
            raise InvalidRequest("per_sample_weights need mode='sum', as in PyTorch")
        if tuple(weights.shape) != ids.shape:
            raise InvalidRequest(
                f"per_sample_weights have the shape {tuple(weights.shape)}, the ids {ids.shape}"
            )
        assert lookup.bags is not None
        weights = weights.reshape(-1)
        if self.padding_idx is not None:
            present = torch.from_numpy((ids != self.padding_idx).reshape(-1))
            weights = weights[present.to(weights.device)]
        rows = self._answer(Lookup(lookup.keys, lookup.batch, examples=lookup.bags.counts))
        counts = torch.from_numpy(lookup.bags.counts)
        bags = torch.repeat_interleave(torch.arange(len(counts)), counts).to(rows.device)
        zeros = rows.new_zeros(len(counts), rows.shape[1])
        return zeros.index_add(0, bags, rows * weights.to(rows.device).unsqueeze(1))


def _warn_of_saving(module: _ServerModule, _prefix: str, _keep_vars: bool) -> None:
    """Called by ``state_dict()`` of this module and of every model that holds it."""
    if not module._warned_of_saving:
        module._warned_of_saving = True
        warnings.warn(module._saving_warning(), stacklevel=4)
