"""What embedding layers of every framework share: a table, lookups ahead, waiting gradients.

May import the client and the table descriptions; no framework. It decides nothing about gradients:
an adapter hands them over, and ``PushCycle`` takes them.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from backstay import tables
from backstay.errors import ConfigError, InvalidRequest, UnknownTable
from backstay.trainer.adapter.framework import Tensor, Tensors
from backstay.trainer.adapter.lookup import Bags, Lookup, bag_of_each_key
from backstay.trainer.arrays import Keys, sum_by_key
from backstay.trainer.client import Client
from backstay.trainer.pending import Pending
from backstay.trainer.table import KeyBatch, Table

__all__ = ["RowGradients", "ServerRows"]

# Batches that may be fetched ahead; the oldest is forgotten beyond that.
PREFETCHED_BATCHES_MAX = 8
# Backward passes whose gradients may wait for one step().
COLLECTED_GRADIENTS_MAX = 1024

_LOG = logging.getLogger(__name__)


class RowGradients(NamedTuple):
    """What one step pushes to a table; see ``Client.push``.

    Attributes:
        table: Which.
        keys: Of any shape.
        gradients: float32 [*shape of keys, dim].
        shows: float32, of the shape of the keys; None: not told.
        clicks: Likewise.
    """

    table: Table
    keys: KeyBatch | NDArray[Any]
    gradients: NDArray[np.float32]
    shows: NDArray[np.float32] | None = None
    clicks: NDArray[np.float32] | None = None


class ServerRows:
    """Rows on the pservers, as the base of a framework's layer: arrays in, arrays out.

    A layer inherits it beside its framework's class and calls ``_set_up_rows`` when that is ready.

    Attributes:
        tensors: Those of the framework.
        handle: Stands among the parameters of the model for the rows: by this the optimizer that is
            given the model's parameters finds the layer.
        padding_idx: The id that is answered with zeros and never travels.
    """

    tensors: ClassVar[Tensors]
    handle: Tensor
    padding_idx: int | None

    def _set_up_rows(
        self,
        client: Client,
        spec: tables.TableSpec,
        own_optimizer: tables.Optimizer | None,
        padding_idx: int | None,
    ) -> None:
        """Begin with no rows asked for.

        Args:
            client: Connected.
            spec: Of a sparse table. Its optimizer counts only if it is the layer's own; else the
                table is made when ``DistributedOptimizer`` brings one.
            own_optimizer: For this table, whatever the optimizer of the model is.
            padding_idx: The id that is answered with zeros and never travels.
        """
        self.padding_idx = padding_idx
        self._client = client
        self._own_optimizer = own_optimizer
        self._spec = spec
        assert isinstance(spec.kind, tables.Sparse)
        self._dim = spec.kind.dim
        self._table: Table | None = None
        self._owned = False
        self._prefetched: deque[tuple[Lookup, Pending[NDArray[np.float32]]]] = deque()
        self._collected: list[tuple[Lookup, NDArray[np.float32]]] = []
        self._merged: tuple[Keys, Any] | None = None
        # The lookups that are in it.
        self._merged_lookups: list[Lookup] = []
        self._warned_of_counts = False

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

    def take_gradients(self, clicks: NDArray[np.float32] | None = None) -> RowGradients | None:
        """Hand over what backward passes have collected since the last call; None: nothing.

        Several lookups become one push, as they are one update in a framework's own layer.

        Args:
            clicks: Of each example that was looked up, float32 [examples]; each example shows each
                of its keys once a lookup. None: not told. A table that keeps no shows and clicks
                does without.

        Raises:
            InvalidRequest: A lookup has another number of examples.
        """
        if self._merged is not None:
            self.gradient()  # what came since then belongs to it
            (keys, merged), self._merged = self._merged, None
            lookups, self._merged_lookups = self._merged_lookups, []
            counts = self._counts(lookups, clicks)
            if counts is not None:
                _, counts = sum_by_key(_keys_of(lookups), counts)
            return self._row_gradients(keys, self.tensors.gradient(merged), counts)
        pairs = self._take_collected()
        if not pairs:
            return None
        counts = self._counts([lookup for lookup, _ in pairs], clicks)
        if len(pairs) == 1:
            lookup, gradient = pairs[0]
            batch = lookup.keys if lookup.batch is None else lookup.batch
            return self._row_gradients(batch, gradient, counts)
        return self._row_gradients(*self._end_to_end(pairs), counts)

    def gradient(self) -> Any | None:
        """Return the gradient of the rows that backward passes have reached since the last step.

        One row for each different id, as a tensor of the framework; None if there is none. It is
        the same tensor until the next step, which pushes what is in it then: so clipping it works.
        """
        pairs = self._take_collected()
        if pairs:
            keys, gradients = self._end_to_end(pairs)
            if self._merged is not None:
                keys = np.concatenate([self._merged[0], keys])
                gradients = np.concatenate([self.tensors.gradient(self._merged[1]), gradients])
            keys, gradients = sum_by_key(keys, gradients)
            self._merged_lookups += [lookup for lookup, _ in pairs]
            self._merged = keys, self.tensors.sharing(gradients, self.handle)
        return None if self._merged is None else self._merged[1]

    def set_gradient(self, gradient: Any | None) -> None:
        """Put a tensor in the place of what ``gradient`` returned; None: forget it.

        Raises:
            InvalidRequest: It has another shape than that.
        """
        if gradient is None:
            self.discard_gradients()
            return
        before = self.gradient()
        expected = None if before is None else tuple(before.shape)
        if self._merged is None or tuple(gradient.shape) != expected:
            raise InvalidRequest(
                f"the gradient of the embedding {self.table_name!r} has the shape {expected} in "
                f"this step, not {tuple(gradient.shape)}"
            )
        self._merged = self._merged[0], gradient

    def discard_gradients(self) -> None:
        """Forget what backward passes have collected."""
        self._collected.clear()
        self._merged = None
        self._merged_lookups = []

    def discard_prefetched(self) -> None:
        """Forget rows that were asked for ahead: they may be older than what comes next."""
        self._prefetched.clear()

    def extra_repr(self) -> str:
        """What ``print(model)`` shows of this layer."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"table={self.table_name!r}, dim={self._dim}{padding}"

    def _lookup_of(self, keys: NDArray[np.int64]) -> Lookup:
        """Return the lookup of ids of any shape; ``keys`` are the layer's own from now on."""
        if self.padding_idx is not None:
            present = keys != self.padding_idx
            if not present.all():
                flat = keys[present]
                return Lookup(flat, self._prepare(flat), present)
        return Lookup(keys, self._prepare(keys))

    def _lookup_of_bags(
        self, keys: NDArray[np.int64], starts: NDArray[np.int64] | None, *, mean: bool
    ) -> Lookup:
        """Return the lookup of bags; see ``bag_of_each_key`` for the arguments."""
        bag_of_key, bags = bag_of_each_key(keys, starts)
        keys = keys.reshape(-1)
        if self.padding_idx is not None:
            present = keys != self.padding_idx
            keys, bag_of_key = keys[present], bag_of_key[present]
        counts = np.bincount(bag_of_key, minlength=bags)
        return Lookup(keys, self._prepare(keys), bags=Bags(counts, mean))

    def _collect(self, lookup: Lookup, gradient: NDArray[np.float32]) -> None:
        """Keep the gradient of a lookup's answer until the next step."""
        if len(self._collected) >= COLLECTED_GRADIENTS_MAX:
            raise InvalidRequest(
                f"{COLLECTED_GRADIENTS_MAX} backward passes through {self.table_name!r} "
                "without step() or clearing the gradients"
            )
        if lookup.batch is not None:
            self._collected.append((lookup, lookup.row_gradients(gradient)))

    def _fetch(self, lookup: Lookup) -> NDArray[np.float32]:
        """Return the rows [*keys.shape, dim], prefetched or pulled now."""
        if lookup.batch is None:
            return np.zeros((*lookup.keys.shape, self._dim), np.float32)
        for index, (ahead, pending) in enumerate(self._prefetched):
            if ahead.keys.shape == lookup.keys.shape and np.array_equal(ahead.keys, lookup.keys):
                del self._prefetched[index]
                return pending.result()
        return self._client.pull(self._ready_table(), lookup.batch)

    def _fetch_ahead(self, lookup: Lookup) -> None:
        """Ask for rows that a coming ``_fetch`` will want."""
        if lookup.batch is None:
            return
        if len(self._prefetched) >= PREFETCHED_BATCHES_MAX:
            self._prefetched.popleft()
        pending = self._client.pull_async(self._ready_table(), lookup.batch)
        self._prefetched.append((lookup, pending))

    def _take_collected(self) -> list[tuple[Lookup, NDArray[np.float32]]]:
        """Hand over each lookup that backward passes have reached, once, with its gradient."""
        collected, self._collected = self._collected, []
        by_lookup: dict[int, tuple[Lookup, NDArray[np.float32]]] = {}
        for lookup, gradient in collected:
            if id(lookup) in by_lookup:  # one graph, run backward more than once
                gradient = by_lookup[id(lookup)][1] + gradient
            by_lookup[id(lookup)] = (lookup, gradient)
        return list(by_lookup.values())

    def _end_to_end(
        self, pairs: list[tuple[Lookup, NDArray[np.float32]]]
    ) -> tuple[Keys, NDArray[np.float32]]:
        """Return the keys of lookups, uint64 [n], and the gradient of each, [n, dim]."""
        gradients = np.concatenate([gradient.reshape(-1, self._dim) for _, gradient in pairs])
        return _keys_of([lookup for lookup, _ in pairs]), gradients

    def _row_gradients(
        self,
        keys: KeyBatch | NDArray[Any],
        gradients: NDArray[np.float32],
        counts: NDArray[np.float32] | None,
    ) -> RowGradients:
        """Return what is pushed, given the shows and clicks of the keys, [keys, 2]."""
        table = self._ready_table()
        if counts is None:
            return RowGradients(table, keys, gradients)
        shows, clicks = counts.T.reshape(2, *keys.shape)
        return RowGradients(table, keys, gradients, shows, clicks)

    def _counts(
        self, lookups: Sequence[Lookup], clicks: NDArray[np.float32] | None
    ) -> NDArray[np.float32] | None:
        """Return the shows and clicks of the keys of lookups, float32 [keys, 2]; None: not told."""
        if not self._ready_table().spec.takes_counts:
            return None
        if clicks is None:
            if not self._warned_of_counts:
                self._warned_of_counts = True
                _LOG.warning(
                    "the table %r keeps shows and clicks, but none are told, so each push counts "
                    "as one show of each key: give step(clicks=...), or the model file a function "
                    "clicks(labels)",
                    self.table_name,
                )
            return None
        try:
            return np.concatenate([lookup.shows_and_clicks(clicks) for lookup in lookups])
        except InvalidRequest as error:
            raise InvalidRequest(f"the embedding {self.table_name!r}: {error}") from None

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


def _keys_of(lookups: Sequence[Lookup]) -> Keys:
    """Return the keys of lookups end to end, uint64 [n]."""
    keys = np.concatenate([lookup.keys.reshape(-1) for lookup in lookups])
    return keys.view(np.uint64)
