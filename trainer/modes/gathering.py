"""Sync mode, the arithmetic: cut a batch for the workers of a step, put gradients together.

Every step is one batch of ``batch_size`` records, with any number of workers. Each worker computes
the mean gradient of its piece. The weighted sum of these is the mean gradient of the batch. It is
pushed once, so that the optimizer runs once, with the numbers that one machine would get (to
rounding). May import the client and numpy; sends nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backstay.errors import InvalidRequest
from backstay.tables import TableSpec
from backstay.trainer.arrays import ArrayLike, Rows, as_rows
from backstay.trainer.client import Client
from backstay.trainer.modes.forwarding import (
    ForwardingClient,
    PreparedKeys,
    check_compensation,
    counts_of,
    finished,
)
from backstay.trainer.pending import Pending
from backstay.trainer.table import Table

__all__ = ["GatheringClient", "Gradient", "Piece", "cut", "predictions_together", "put_together"]


@dataclass(frozen=True)
class Piece:
    """A part of a batch.

    Attributes:
        first: Its first record in the batch.
        count: How many records; at least one.
    """

    first: int
    count: int


@dataclass(frozen=True)
class Gradient:
    """What one table would have been pushed.

    Attributes:
        table: Its name.
        keys: uint64 [n]; None: it is dense.
        values: float32: [n, dim]; or a dense tensor's, or a part of it, flat.
        scale: Of the learning rate.
        offset: Of a part of a dense tensor: where it begins.
        elements: Of the whole dense tensor; 0: the values are all of it.
        counts: float32 [n, 2], the shows and clicks of the keys; None: not told.
    """

    table: str
    keys: np.ndarray | None
    values: Rows
    scale: float
    offset: int = 0
    elements: int = 0
    counts: Rows | None = None


def cut(records: int, workers: int) -> list[Piece]:
    """Cut a batch as evenly as possible; at most one piece for each worker, none empty."""
    pieces = min(records, workers)
    ends = [records * (number + 1) // pieces for number in range(pieces)]
    return [Piece(a, b - a) for a, b in zip([0, *ends], ends, strict=False)]


def put_together(parts: Sequence[tuple[int, Sequence[Gradient]]]) -> list[Gradient]:
    """Return the gradient of the whole batch, table by table.

    Args:
        parts: For each piece the number of its records and its gradients; the first one's scales
            count.

    Raises:
        InvalidRequest: Pieces disagree about a dense tensor.
    """
    records = sum(count for count, _ in parts)
    by_table: dict[str, list[tuple[np.float32, Gradient]]] = {}
    for count, gradients in parts:
        for gradient in gradients:
            weighted = (np.float32(count / records), gradient)
            by_table.setdefault(gradient.table, []).append(weighted)
    return [_sum(members) for members in by_table.values()]


def predictions_together(
    parts: Sequence[tuple[Piece, NDArray[Any] | None]],
) -> NDArray[Any] | None:
    """Return what the model answered for the whole batch; None: not all pieces tell it.

    Args:
        parts: Each piece, and what the model answered for its records.
    """
    ordered = sorted(parts, key=lambda part: part[0].first)
    answers = [
        answer.reshape(piece.count, -1)
        for piece, answer in ordered
        if answer is not None and answer.shape[:1] == (piece.count,)
    ]
    if len(answers) < len(ordered) or len({answer.shape[1] for answer in answers}) > 1:
        return None
    return np.concatenate(answers)


def _sum(members: Sequence[tuple[np.float32, Gradient]]) -> Gradient:
    first = members[0][1]
    if first.keys is not None:
        keys = np.concatenate(
            [gradient.keys for _, gradient in members if gradient.keys is not None]
        )
        values = np.concatenate([weight * gradient.values for weight, gradient in members])
        # Not weighted: they count examples.
        told = [gradient.counts for _, gradient in members if gradient.counts is not None]
        counts = np.concatenate(told) if len(told) == len(members) else None
        return Gradient(first.table, keys, values, first.scale, counts=counts)
    sizes = {gradient.elements or gradient.values.size for _, gradient in members}
    if len(sizes) != 1:
        raise InvalidRequest(
            f"the workers of a step have tensors of different sizes for {first.table!r}: they do "
            "not run the same model"
        )
    total = np.zeros(sizes.pop(), np.float32)
    for weight, gradient in members:
        flat = gradient.values.reshape(-1)
        total[gradient.offset : gradient.offset + flat.size] += weight * flat
    return Gradient(first.table, None, total, first.scale)


class GatheringClient(ForwardingClient):
    """Keeps the pushes of a step, which the leader puts together with the pushes of others."""

    def __init__(self, client: Client) -> None:
        """Stand before a client."""
        super().__init__(client)
        self._gathered: list[Gradient] = []

    def create_table(self, spec: TableSpec, *, update_settings: bool | None = None) -> Table:
        """Create a table; see ``Client.create_table``.

        Raises:
            ConfigError: It compensates the delay of gradients.
        """
        check_compensation(spec, "sync")
        return super().create_table(spec, update_settings=update_settings)

    def push_async(
        self,
        table: Table | str,
        keys: ArrayLike | PreparedKeys,
        gradients: ArrayLike,
        *,
        learning_rate_scale: float = 1.0,
        shows: ArrayLike | None = None,
        clicks: ArrayLike | None = None,
    ) -> Pending[None]:
        """Keep it."""
        table, batch = self.table_of(table), self.prepared(keys)
        values = as_rows(gradients, (*batch.shape, table.dim), "gradients")
        # Copied: the caller may change it once this returns.
        rows = values.reshape(-1, table.dim).copy()
        flat = batch.keys.reshape(-1).copy()
        counts = counts_of(shows, clicks, batch.shape)
        self._gathered.append(Gradient(table.name, flat, rows, learning_rate_scale, counts=counts))
        return finished()

    def push_dense_async(
        self, table: Table | str, gradient: ArrayLike, *, learning_rate_scale: float = 1.0
    ) -> Pending[None]:
        """Keep it."""
        table = self.table_of(table)
        values = as_rows(gradient, table.dense().shape, "gradient").copy()
        self._gathered.append(Gradient(table.name, None, values, learning_rate_scale))
        return finished()

    def take(self) -> list[Gradient]:
        """Hand over what was kept since the last call."""
        gathered, self._gathered = self._gathered, []
        return gathered

    def push_all(self, gradients: Sequence[Gradient]) -> None:
        """Push gradients for real, one push a table; wait with the stream or ``flush``."""
        for gradient in gradients:
            scale = gradient.scale
            if gradient.keys is None:
                shape = self.table(gradient.table).dense().shape
                values = gradient.values.reshape(shape)
                self.behind.push_dense_async(gradient.table, values, learning_rate_scale=scale)
            else:
                shows, clicks = (None, None) if gradient.counts is None else gradient.counts.T
                self.behind.push_async(
                    gradient.table,
                    gradient.keys,
                    gradient.values,
                    learning_rate_scale=scale,
                    shows=shows,
                    clicks=clicks,
                )
