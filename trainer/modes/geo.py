"""Geo mode: a worker steps on copies of its own, and what changed is sent every so many steps.

Between two exchanges a row is pulled once; updates stay here and the program sees them. Only SGD
can do that without a change of meaning: the sum of the gradients of several steps, pushed once, is
what the steps did (local SGD, as in Paddle's GeoStrategy; Stich, "Local SGD Converges Fast and
Communicates Little", section 2). May import the client and numpy; reads no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from backstay import tables
from backstay.errors import ConfigError
from backstay.tables import TableSpec
from backstay.trainer.arrays import ArrayLike, Keys, Rows, as_rows, output, sum_by_key
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

__all__ = ["GeoClient", "LocalRows"]


@dataclass
class LocalRows:
    """The rows of one table that this worker has touched since the last exchange.

    Attributes:
        dim: Elements of a row.
        rate: The learning rate of the table's SGD.
        keys: uint64 [n], rising.
        base: float32 [n, dim], as pulled.
        sums: float32 [n, dim], gradients since, each times its scale.
        changed: bool [n], whether there were any.
        counts: float32 [n, 2], shows and clicks since.
        counted: Whether any were told.
    """

    dim: int
    rate: float
    keys: Keys = field(default_factory=lambda: np.empty(0, np.uint64))
    base: Rows = field(init=False)
    sums: Rows = field(init=False)
    changed: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))
    counts: Rows = field(default_factory=lambda: np.empty((0, 2), np.float32))
    counted: bool = False

    def __post_init__(self) -> None:
        """Begin empty."""
        self.base = np.empty((0, self.dim), np.float32)
        self.sums = np.empty((0, self.dim), np.float32)

    def missing(self, keys: Keys) -> Keys:
        """Return those of the keys whose rows are not here, each once."""
        wanted = np.unique(keys)
        at = np.minimum(np.searchsorted(self.keys, wanted), max(len(self.keys) - 1, 0))
        return wanted if not len(self.keys) else wanted[self.keys[at] != wanted]

    def add(self, keys: Keys, rows: Rows) -> None:
        """Take rows [n, dim] that were pulled; none of the keys is here yet."""
        order = np.argsort(np.concatenate([self.keys, keys]), kind="stable")
        zeros = np.zeros((len(keys), self.dim), np.float32)
        self.base = np.concatenate([self.base, rows])[order]
        self.sums = np.concatenate([self.sums, zeros])[order]
        self.changed = np.concatenate([self.changed, np.zeros(len(keys), np.bool_)])[order]
        self.counts = np.concatenate([self.counts, np.zeros((len(keys), 2), np.float32)])[order]
        self.keys = np.concatenate([self.keys, keys])[order]

    def rows(self, keys: Keys) -> Rows:
        """Return rows [n, dim] as this worker's own steps have left them; all must be here."""
        at = np.searchsorted(self.keys, keys)
        return self.base[at] - np.float32(self.rate) * self.sums[at]

    def step(self, keys: Keys, gradients: Rows, scale: float) -> None:
        """Apply gradients [n, dim]; those of equal keys are summed; all must be here."""
        different, sums = sum_by_key(keys, gradients)
        at = np.searchsorted(self.keys, different)
        self.sums[at] += np.float32(scale) * sums
        self.changed[at] = True

    def count(self, keys: Keys, counts: Rows) -> None:
        """Add shows and clicks [n, 2] to those of the keys, all of which must be here."""
        np.add.at(self.counts, np.searchsorted(self.keys, keys), counts)
        self.counted = True


@dataclass
class _LocalTensor:
    """A dense tensor since the last exchange."""

    rate: float
    base: Rows
    total: Rows
    changed: bool = False


class GeoClient(ForwardingClient):
    """Keeps a worker's steps to itself until :meth:`exchange`.

    Pulls answer with what this worker's steps have made of the values that it pulled first.
    """

    def __init__(self, client: Client) -> None:
        """Stand before a client."""
        super().__init__(client)
        self._rows: dict[str, LocalRows] = {}
        self._tensors: dict[str, _LocalTensor] = {}

    def create_table(self, spec: TableSpec, *, update_settings: bool | None = None) -> Table:
        """Create a table, which must have SGD.

        Raises:
            ConfigError: It has another optimizer, or compensates the delay of gradients.
        """
        check_compensation(spec, "geo")
        table = super().create_table(spec, update_settings=update_settings)
        _rate_of(table)
        return table

    def pull(
        self, table: Table | str, keys: ArrayLike | PreparedKeys, *, out: Rows | None = None
    ) -> Rows:
        """Return rows, this worker's own steps included; see ``Client.pull``."""
        table, batch = self.table_of(table), self.prepared(keys)
        rows = output(out, (*batch.shape, table.dim))
        flat = batch.keys.reshape(-1)
        rows.reshape(-1, table.dim)[:] = self._with_rows(table, flat).rows(flat)
        return rows

    def pull_async(
        self, table: Table | str, keys: ArrayLike | PreparedKeys, *, out: Rows | None = None
    ) -> Pending[Rows]:
        """The same; fetched when the result is asked for, so that no own step is missed."""
        return Pending(lambda: True, lambda: self.pull(table, keys, out=out))

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
        """Step on the copies; nothing is sent."""
        table, batch = self.table_of(table), self.prepared(keys)
        values = as_rows(gradients, (*batch.shape, table.dim), "gradients")
        flat = batch.keys.reshape(-1)
        local = self._with_rows(table, flat)
        counts = counts_of(shows, clicks, batch.shape)
        local.step(flat, values.reshape(-1, table.dim), learning_rate_scale)
        if counts is not None:
            local.count(flat, counts)
        return finished()

    def pull_dense_async(self, table: Table | str, *, out: Rows | None = None) -> Pending[Rows]:
        """Return a tensor, this worker's own steps included."""
        table = self.table_of(table)
        tensor = self._tensor(table)
        values = output(out, tensor.base.shape)
        np.subtract(tensor.base, np.float32(tensor.rate) * tensor.total, out=values)
        return finished(values)

    def push_dense_async(
        self, table: Table | str, gradient: ArrayLike, *, learning_rate_scale: float = 1.0
    ) -> Pending[None]:
        """Step on the copy; nothing is sent."""
        tensor = self._tensor(self.table_of(table))
        values = as_rows(gradient, tensor.base.shape, "gradient")
        tensor.total += np.float32(learning_rate_scale) * values
        tensor.changed = True
        return finished()

    def exchange(self) -> None:
        """Push what changed, one push for each table, and forget the copies.

        The rows and tensors that are pulled next are fresh. Wait for the pushes with the task's
        stream or ``flush``.

        Raises:
            BackstayError: A push could not be sent; see ``Client.push_async``.
        """
        rows, self._rows = self._rows, {}
        tensors, self._tensors = self._tensors, {}
        for name, local in rows.items():
            if local.changed.any():
                keys, sums = local.keys[local.changed], local.sums[local.changed]
                shows, clicks = local.counts[local.changed].T if local.counted else (None, None)
                self.behind.push_async(name, keys, sums, shows=shows, clicks=clicks)
        for name, tensor in tensors.items():
            if tensor.changed:
                self.behind.push_dense_async(name, tensor.total)

    def forget(self) -> None:
        """Forget the copies and the steps on them: they will be done again."""
        self._rows.clear()
        self._tensors.clear()

    def _with_rows(self, table: Table, keys: Keys) -> LocalRows:
        local = self._rows.get(table.name)
        if local is None:
            local = self._rows[table.name] = LocalRows(table.dim, _rate_of(table))
        missing = local.missing(keys)
        if missing.size:
            local.add(missing, self.behind.pull(table, missing))
        return local

    def _tensor(self, table: Table) -> _LocalTensor:
        tensor = self._tensors.get(table.name)
        if tensor is None:
            base = self.behind.pull_dense(table)
            tensor = _LocalTensor(_rate_of(table), base, np.zeros_like(base))
            self._tensors[table.name] = tensor
        return tensor


def _rate_of(table: Table) -> float:
    optimizer = table.spec.optimizer
    if not isinstance(optimizer, tables.SGD):
        raise ConfigError(
            f"mode geo: the table {table.name!r} has {type(optimizer).__name__}, but steps can be "
            "summed up for SGD only: use SGD without momentum, or another mode"
        )
    return float(optimizer.learning_rate)
