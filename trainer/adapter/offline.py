"""A session without servers: tables are those of a checkpoint or an export, and only read.

A program that is made in it as it is made for training finds its tables, and its dense parameters
get their trained values: so a trained model is made by what made it for training. May import
``backstay.checkpoint`` and the client's values; knows no framework.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import numpy as np
from numpy.typing import NDArray

from backstay.checkpoint.export_reader import pulled
from backstay.checkpoint.trained import TrainedTables, check_has
from backstay.errors import ConfigError, UnknownTable
from backstay.listing import listed
from backstay.tables import Compensation, TableSpec
from backstay.trainer.adapter.session import Session, TrainerEnvironment, open_session
from backstay.trainer.arrays import Keys, as_keys
from backstay.trainer.client import Client
from backstay.trainer.pending import Pending
from backstay.trainer.table import Table

__all__ = ["OfflineClient", "job_of", "offline", "warn_untrained"]


@dataclass(frozen=True)
class _Keys:
    """A batch of keys; see ``backstay.trainer.table.KeyBatch``."""

    keys: Keys

    @property
    def shape(self) -> tuple[int, ...]:
        return self.keys.shape


class OfflineClient:
    """Reads trained tables; has the methods of :class:`backstay.trainer.Client` that adapters use.

    Args:
        tables: Where from.
    """

    def __init__(self, tables: TrainedTables) -> None:
        self._tables = tables

    @property
    def default_compensation(self) -> Compensation:
        """See ``Client.default_compensation``; nothing is pushed."""
        return "ignore"

    def create_table(self, spec: TableSpec) -> Table:
        """Return the trained table of this name.

        Raises:
            InvalidRequest: There is none, or it is of another kind or size.
        """
        return Table.of(check_has(self._tables, spec))

    def table(self, name: str) -> Table:
        """Return a trained table.

        Raises:
            UnknownTable: There is none of that name.
        """
        for spec in self.tables():
            if spec.name == name:
                return Table.of(spec)
        raise UnknownTable(f"{self._tables.where} has no table {name!r}")

    def tables(self) -> list[TableSpec]:
        """Return the descriptions of all."""
        return [*self._tables.sparse, *self._tables.dense_tables]

    def prepare(self, keys: Any) -> _Keys:
        """Keep keys for a later call."""
        return _Keys(as_keys(keys))

    def pull(self, table: Table | str, keys: Any) -> NDArray[np.float32]:
        """Return what a pull of keys would give; a key without a row has its initial value."""
        wanted = keys.keys if isinstance(keys, _Keys) else as_keys(keys)
        name = table if isinstance(table, str) else table.name
        return self._tables.table(name).lookup(wanted, unknown="initial")

    def pull_async(self, table: Table | str, keys: Any) -> Pending[NDArray[np.float32]]:
        """Return rows, at once."""
        rows = self.pull(table, keys)
        return Pending(lambda: True, lambda: rows)

    def init_dense(self, table: Table | str, values: Any) -> None:
        """Do nothing: the table has its values."""

    def pull_dense(self, table: Table | str) -> NDArray[np.float32]:
        """Return what a pull of a dense table would give."""
        name = table if isinstance(table, str) else table.name
        values = self._tables.dense(name)
        (spec,) = (one for one in self._tables.dense_tables if one.name == name)
        return pulled(spec, values)

    def pull_dense_async(self, table: Table | str) -> Pending[NDArray[np.float32]]:
        """Return a dense table, at once."""
        values = self.pull_dense(table)
        return Pending(lambda: True, lambda: values)

    def push_async(self, *_: Any, **__: Any) -> NoReturn:
        """Refused.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(f"{self._tables.where} is only read: a model cannot be trained on it")

    push = push_dense = push_dense_async = assign = push_async

    def flush(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


@contextmanager
def offline(tables: TrainedTables, job: str) -> Iterator[Session]:
    """Have a session on trained tables, in which layers and optimizers are made.

    Args:
        tables: Where from.
        job: What comes before the names of the tables; may be empty.

    Raises:
        ConfigError: A session is open already.
    """
    environment = TrainerEnvironment(("offline:1",))
    session = open_session(Session(cast(Client, OfflineClient(tables)), environment, job))
    try:
        yield session
    finally:
        session.close()


def job_of(tables: TrainedTables) -> str:
    """Return the job whose tables these are.

    Raises:
        ConfigError: They are of several.
    """
    jobs = {_job_of_name(spec.name) for spec in (*tables.sparse, *tables.dense_tables)}
    if len(jobs) > 1:
        raise ConfigError(
            f"{tables.where} has the tables of several jobs; pass job= one of "
            f"{', '.join(repr(name) for name in sorted(jobs))}"
        )
    return next(iter(jobs), "")


def _job_of_name(table: str) -> str:
    job, slash, _ = table.partition("/")
    return job if slash else ""


def warn_untrained(names: Sequence[str], saved_file: str) -> None:
    """Warn the caller of ``load_for_inference`` of state that was not trained or saved.

    Args:
        names: Of the state, as in ``state_dict()``.
        saved_file: What the end of training saves such state in.
    """
    warnings.warn(
        f"{listed(names)}: on no server, and there is no {saved_file} "
        "in the job's output; they are as the model file makes them",
        stacklevel=5,
    )
