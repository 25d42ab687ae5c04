"""A table's description as a whole, and its JSON form, which is what travels.

Imports its siblings in ``backstay.tables`` and ``backstay.errors``; never does I/O.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias

from backstay import _native
from backstay.tables.compensation import AdaptiveRevision, DelayCompensated
from backstay.tables.initializers import Initializer, Uniform, Zeros
from backstay.tables.lifetime import Lifetime
from backstay.tables.optimizers import SGD, Optimizer
from backstay.tables.part import Part, check_settings, in_json, of_core
from backstay.tables.user import PullFunction

Storage: TypeAlias = Literal["float32", "bfloat16", "float16"]
Compensation: TypeAlias = Literal["ignore", "scale"] | DelayCompensated | AdaptiveRevision


@dataclass(frozen=True)
class Sparse(Part, at="kind", name="sparse"):
    """Rows of ``dim`` weights under any unsigned 64-bit key, made at their first push.

    Attributes:
        dim: Weights of one row, 1 to 65,536.
    """

    dim: int


@dataclass(frozen=True)
class Dense(Part, at="kind", name="dense"):
    """One tensor, cut in row-major order into blocks that are spread over the servers.

    Attributes:
        shape: The tensor's shape: 1 to 16 dimensions, none 0, at most 2^40 elements together.
        block_elements: Weights of one block, 1 to 1,048,576; the last block is padded to it.
    """

    shape: tuple[int, ...]
    block_elements: int = 4096


class NonFinite(Part, at="non_finite"):
    """Base of what happens to NaN and infinity in gradients."""


@dataclass(frozen=True)
class Refuse(NonFinite, name="refuse", word=True):
    """Refuse a push with NaN or infinity among its gradients; nothing of it is applied."""


@dataclass(frozen=True)
class Clip(NonFinite, name="clip"):
    """Take NaN as 0, and bring every gradient value into [-limit, limit]."""

    limit: float


Kind: TypeAlias = Sparse | Dense


class _Facts(NamedTuple):
    """What follows from a description; see the properties of :class:`TableSpec`."""

    state_elements: int
    statistics: list[str]
    takes_counts: bool
    has_score: bool
    companion_shape: tuple[int, int] | None


@dataclass(frozen=True)
class TableSpec:
    """Everything that decides the content of a table, given the pushes.

    Attributes:
        name: Unique in the cluster; 1 to 200 of letters, digits and ``_ . / -``.
        kind: :class:`Sparse` rows or one :class:`Dense` tensor.
        optimizer: What a push does to a row, on the server.
        storage: How the servers hold weights. The 16-bit formats halve the memory of weights,
            not of optimizer state; arithmetic is float32 in any case.
        initializer: A row's weights before its first push: a function of the seed, the table's
            name and the key.
        seed: 0 to 2^64 - 1; another seed gives other initial weights.
        non_finite: What happens to NaN and infinity in gradients.
        lifetime: When rows of a sparse table come and go; None: they stay until they are deleted.
        compensation: What the servers do about gradients that are stale: nothing ("ignore"), or
            divide the learning rate of a push by its staleness in each slot ("scale"), or
            :class:`DelayCompensated`, or :class:`AdaptiveRevision` with Adagrad.
        pull: What a pull returns in the place of the weights; None: the weights.

    Raises:
        ConfigError: A field is out of range; the message names it and what is allowed.
    """

    name: str
    kind: Kind
    optimizer: Optimizer
    storage: Storage = "float32"
    initializer: Initializer = field(default_factory=Zeros)
    seed: int = 0
    non_finite: NonFinite = field(default_factory=Refuse)
    lifetime: Lifetime | None = None
    pull: PullFunction | None = None
    compensation: Compensation = "ignore"

    def __post_init__(self) -> None:
        """Check the settings, each alone and then together."""
        check_settings(self, "")
        _native.canonical_table(self.to_json())

    @classmethod
    def sparse(
        cls,
        name: str,
        dim: int,
        *,
        optimizer: Optimizer | None = None,
        initializer: Initializer | None = None,
        storage: Storage = "float32",
        seed: int = 0,
        non_finite: NonFinite | None = None,
        lifetime: Lifetime | None = None,
        pull: PullFunction | None = None,
        compensation: Compensation = "ignore",
    ) -> TableSpec:
        """Describe a table of rows by key; SGD(0.01) and Uniform(-0.05, 0.05) if not told."""
        return cls(
            name=name,
            kind=Sparse(dim),
            optimizer=SGD(0.01) if optimizer is None else optimizer,
            storage=storage,
            initializer=Uniform(-0.05, 0.05) if initializer is None else initializer,
            seed=seed,
            non_finite=Refuse() if non_finite is None else non_finite,
            lifetime=lifetime,
            pull=pull,
            compensation=compensation,
        )

    @classmethod
    def dense(
        cls,
        name: str,
        shape: Sequence[int],
        *,
        optimizer: Optimizer | None = None,
        initializer: Initializer | None = None,
        storage: Storage = "float32",
        seed: int = 0,
        non_finite: NonFinite | None = None,
        block_elements: int = 4096,
        pull: PullFunction | None = None,
        compensation: Compensation = "ignore",
    ) -> TableSpec:
        """Describe a table of one tensor; SGD(0.01) and Zeros() if not told."""
        return cls(
            name=name,
            kind=Dense(tuple(shape), block_elements),
            optimizer=SGD(0.01) if optimizer is None else optimizer,
            storage=storage,
            initializer=Zeros() if initializer is None else initializer,
            seed=seed,
            non_finite=Refuse() if non_finite is None else non_finite,
            pull=pull,
            compensation=compensation,
        )

    @property
    def row_elements(self) -> int:
        """Weights of one row: ``dim``, or ``block_elements`` of a dense table."""
        return self.kind.dim if isinstance(self.kind, Sparse) else self.kind.block_elements

    @property
    def state_elements(self) -> int:
        """Words behind the weights of a row: of the optimizer, of ``compensation``, statistics."""
        return self._facts.state_elements

    @property
    def statistics(self) -> tuple[str, ...]:
        """The statistics of a row, in the order of their words behind the optimizer's state.

        ``last_seen`` (seconds) and ``frequency`` are the bits of a uint32, the others float32.
        """
        return tuple(self._facts.statistics)

    @property
    def takes_counts(self) -> bool:
        """Whether a push may tell of shows and clicks: rows or counters keep one of them."""
        return self._facts.takes_counts

    @property
    def has_score(self) -> bool:
        """Whether its rows have a score."""
        return self._facts.has_score

    @property
    def companion_shape(self) -> tuple[int, int] | None:
        """Weights and state of a row of what counts keys without a row; None: nothing does.

        It is a table of its own in checkpoints, named ``<table>@admission``.
        """
        return self._facts.companion_shape

    @cached_property
    def _facts(self) -> _Facts:
        return _Facts(*_native.table_facts(self.to_json()))

    def to_json(self) -> str:
        """Return the JSON form, every default filled in."""
        names = ("name", "kind", "storage", "initializer", "seed", "optimizer", "non_finite")
        plain = {name: in_json(getattr(self, name)) for name in names}
        # Absent if there is none.
        for name, absent in (("lifetime", None), ("compensation", "ignore"), ("pull", None)):
            if getattr(self, name) != absent:
                plain[name] = in_json(getattr(self, name))
        return json.dumps(plain, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> TableSpec:
        """Read the JSON form.

        Raises:
            ConfigError: It is not JSON, or a field is unknown, missing or out of range.
        """
        return of_core(cls, json.loads(_native.canonical_table(text)))
