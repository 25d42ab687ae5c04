"""Embedding modules of PyTorch whose rows live on the pservers.

May import torch, this package and ``trainer.adapter``; see ``adapter.layers`` for what they do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from backstay import tables
from backstay.errors import InvalidRequest
from backstay.trainer.adapter import layers
from backstay.trainer.adapter.layers import RowSettings
from backstay.trainer.adapter.lookup import Lookup, Mode, checked_mode
from backstay.trainer.torch.tensors import TENSORS

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["DEFAULT_INITIALIZER", "Embedding", "EmbeddingBag"]

# That of torch.nn.Embedding.
DEFAULT_INITIALIZER = tables.Normal(0.0, 1.0)


class RowsHandle(layers.RowsHandle, torch.nn.Parameter):  # type: ignore[misc]
    """See ``backstay.trainer.adapter.layers.RowsHandle``."""


class _ServerModule(layers.EmbeddingLayer, torch.nn.Module):  # type: ignore[misc]
    """What both modules share."""

    tensors = TENSORS

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        sparse: bool = True,
        initializer: tables.Initializer | None = None,
        **settings: Unpack[RowSettings],
    ) -> None:
        super().__init__()
        initializer = DEFAULT_INITIALIZER if initializer is None else initializer
        self._set_up(num_embeddings, embedding_dim, padding_idx, initializer, **settings)
        self.handle = RowsHandle(torch.zeros(1))
        self.handle.backstay_layer = self
        self.register_state_dict_pre_hook(_warn_of_saving)


class Embedding(layers.Embedding, _ServerModule):
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
        settings: ``name``, ``client``, ``optimizer``, ``seed``, ``storage``, ``non_finite``,
            ``lifetime`` and ``compensation``: see ``backstay.trainer.adapter.layers.RowSettings``.

    Raises:
        ConfigError: No connection, or a setting out of range.
    """

    forward = torch.compiler.disable(layers.Embedding.forward)


class EmbeddingBag(layers.EmbeddingBag, _ServerModule):
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
        mode: Mode = "mean",
        include_last_offset: bool = False,
        sparse: bool = True,
        initializer: tables.Initializer | None = None,
        **settings: Unpack[RowSettings],
    ) -> None:
        checked_mode(mode)
        super().__init__(
            num_embeddings, embedding_dim, padding_idx, initializer=initializer, **settings
        )
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
        if per_sample_weights is None:
            return super().forward(ids, offsets)
        lookup = self._lookup(ids, offsets)
        return self._weighted(lookup, self.tensors.keys(ids), per_sample_weights)

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


def _warn_of_saving(module: layers.EmbeddingLayer, _prefix: str, _keep_vars: bool) -> None:
    module._warn_of_saving(4)
