"""A client with something in between: what every mode passes on unchanged.

May import the client and its tables. Sends nothing of its own accord.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from backstay.errors import ConfigError
from backstay.tables import Compensation, TableSpec
from backstay.trainer.arrays import ArrayLike, Keys, Rows, as_counts, as_keys
from backstay.trainer.client import Client
from backstay.trainer.pending import Pending
from backstay.trainer.table import KeyBatch, Table
from backstay.trainer.task_stream import TaskStream

__all__ = ["ForwardingClient", "PreparedKeys", "check_compensation", "counts_of", "finished"]


class PreparedKeys:
    """A batch of keys made ready once, that can still be read.

    Attributes:
        shape: The shape of the keys, which results take over.
        keys: uint64, of that shape.
        batch: For the client behind.
    """

    def __init__(self, client: Client, keys: ArrayLike) -> None:
        """Prepare them.

        Raises:
            InvalidRequest: No keys, or not integers.
        """
        self.keys: Keys = as_keys(keys)
        self.shape = self.keys.shape
        self.batch: KeyBatch = client.prepare(self.keys)

    @property
    def size(self) -> int:
        """Number of keys, duplicates included."""
        return self.keys.size

    @property
    def unique_count(self) -> int:
        """Number of different keys."""
        return self.batch.unique_count


class ForwardingClient:
    """Passes everything on to a client; a mode overrides what it does otherwise.

    It has the methods of :class:`backstay.trainer.Client` that adapters and models use, with the
    same meaning; a session is opened on it in the client's place.
    """

    def __init__(self, client: Client) -> None:
        """Stand before a client, which stays its owner's."""
        self.behind = client

    @property
    def default_compensation(self) -> Compensation:
        """See ``Client.default_compensation``: what a mode sends is not stale, or no gradient."""
        return "ignore"

    def create_table(self, spec: TableSpec, *, update_settings: bool | None = None) -> Table:
        """See ``Client.create_table``."""
        return self.behind.create_table(spec, update_settings=update_settings)

    def table(self, name: str) -> Table:
        """See ``Client.table``."""
        return self.behind.table(name)

    def tables(self) -> list[TableSpec]:
        """See ``Client.tables``."""
        return self.behind.tables()

    def prepare(self, keys: ArrayLike) -> PreparedKeys:
        """See ``Client.prepare``."""
        return PreparedKeys(self.behind, keys)

    def pull(
        self, table: Table | str, keys: ArrayLike | PreparedKeys, *, out: Rows | None = None
    ) -> Rows:
        """See ``Client.pull``."""
        return self.behind.pull(table, self.prepared(keys).batch, out=out)

    def pull_async(
        self, table: Table | str, keys: ArrayLike | PreparedKeys, *, out: Rows | None = None
    ) -> Pending[Rows]:
        """See ``Client.pull_async``."""
        return self.behind.pull_async(table, self.prepared(keys).batch, out=out)

    def push(self, table: Table | str, keys: Any, gradients: ArrayLike, **more: Any) -> None:
        """See ``Client.push``."""
        self.push_async(table, keys, gradients, **more).result()

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
        """See ``Client.push_async``."""
        return self.behind.push_async(
            table,
            self.prepared(keys).batch,
            gradients,
            learning_rate_scale=learning_rate_scale,
            shows=shows,
            clicks=clicks,
        )

    def init_dense(self, table: Table | str, values: ArrayLike) -> None:
        """See ``Client.init_dense``."""
        self.behind.init_dense(table, values)

    def pull_dense(self, table: Table | str, *, out: Rows | None = None) -> Rows:
        """See ``Client.pull_dense``."""
        return self.pull_dense_async(table, out=out).result()

    def pull_dense_async(self, table: Table | str, *, out: Rows | None = None) -> Pending[Rows]:
        """See ``Client.pull_dense_async``."""
        return self.behind.pull_dense_async(table, out=out)

    def push_dense(
        self, table: Table | str, gradient: ArrayLike, *, learning_rate_scale: float = 1.0
    ) -> None:
        """See ``Client.push_dense``."""
        self.push_dense_async(table, gradient, learning_rate_scale=learning_rate_scale).result()

    def push_dense_async(
        self, table: Table | str, gradient: ArrayLike, *, learning_rate_scale: float = 1.0
    ) -> Pending[None]:
        """See ``Client.push_dense_async``."""
        return self.behind.push_dense_async(
            table, gradient, learning_rate_scale=learning_rate_scale
        )

    def task_stream(self, *name: Any, **more: Any) -> TaskStream:
        """See ``Client.task_stream``."""
        return self.behind.task_stream(*name, **more)

    def close_task_stream(self, job: int, pass_number: int, task: int) -> None:
        """See ``Client.close_task_stream``."""
        self.behind.close_task_stream(job, pass_number, task)

    def flush(self) -> None:
        """See ``Client.flush``."""
        self.behind.flush()

    def close(self) -> None:
        """See ``Client.close``."""
        self.behind.close()

    def prepared(self, keys: ArrayLike | PreparedKeys) -> PreparedKeys:
        """Return keys made ready, if they are not yet."""
        return keys if isinstance(keys, PreparedKeys) else self.prepare(keys)

    def table_of(self, table: Table | str) -> Table:
        """Return the table itself."""
        return self.table(table) if isinstance(table, str) else table


def check_compensation(spec: TableSpec, mode: str) -> None:
    """Refuse a table whose pushes must tell from where their gradients come.

    Raises:
        ConfigError: A push of this mode is no gradient of rows that its client has just pulled.
    """
    if not isinstance(spec.compensation, str):
        kind = type(spec.compensation).__name__
        raise ConfigError(
            f"mode {mode}: the table {spec.name!r} has compensation={kind}, "
            "which is for modes async and bounded: a push of this mode has the gradients of other "
            "workers or steps, too. Choose one of these modes, or leave compensation out"
        )


def finished(value: NDArray[np.float32] | None = None) -> Pending[Any]:
    """Return a call that is over, with its result."""
    return Pending(lambda: True, lambda: value)


def counts_of(
    shows: ArrayLike | None, clicks: ArrayLike | None, shape: tuple[int, ...]
) -> Rows | None:
    """Return the shows and clicks of a push as an array of their own, [n, 2]; None: not told.

    Raises:
        InvalidRequest: They do not fit.
    """
    if shows is None and clicks is None:
        return None
    told = (
        np.full(shape, default, np.float32) if given is None else as_counts(given, shape, what)
        for given, default, what in ((shows, 1, "shows"), (clicks, 0, "clicks"))
    )
    return np.stack([one.reshape(-1) for one in told], axis=1)
