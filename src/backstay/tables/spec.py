"""A table's description as a whole, and its JSON form, which is what travels.

Imports its siblings in ``backstay.tables`` and ``backstay.errors``; never does I/O.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, TypeAlias, TypeVar, get_args

from backstay.errors import ConfigError
from backstay.tables.checks import (
    MAX_BLOCK_ELEMENTS,
    MAX_DENSE_ELEMENTS,
    MAX_DIM,
    MAX_RANK,
    MIN_EPSILON,
    check_choice,
    check_integer,
    check_number,
)
from backstay.tables.compensation import AdaptiveRevision, DelayCompensated
from backstay.tables.initializers import (
    Constant,
    Initializer,
    Normal,
    TruncatedNormal,
    Uniform,
    Xavier,
    Zeros,
)
from backstay.tables.lifetime import (
    COEFFICIENTS,
    Admission,
    AdmitAfter,
    AdmitByScore,
    AdmitWithProbability,
    Always,
    Capacity,
    Expiry,
    Lifetime,
    Score,
)
from backstay.tables.optimizers import FTRL, SGD, Adagrad, GroupFTRL, Optimizer
from backstay.tables.user import (
    AdmissionFunction,
    PullFunction,
    ScoreFunction,
    UserOptimizer,
)

_NAME = re.compile(r"[A-Za-z0-9_./-]{1,200}", re.ASCII)

Storage: TypeAlias = Literal["float32", "bfloat16", "float16"]
Compensation: TypeAlias = Literal["ignore", "scale"] | DelayCompensated | AdaptiveRevision


@dataclass(frozen=True)
class Sparse:
    """Rows of ``dim`` weights under any unsigned 64-bit key, made at their first push.

    Attributes:
        dim: Weights of one row, 1 to 65,536.
    """

    dim: int

    def __post_init__(self) -> None:
        check_integer(self, "dim", 1, MAX_DIM)


@dataclass(frozen=True)
class Dense:
    """One tensor, cut in row-major order into blocks that are spread over the servers.

    Attributes:
        shape: The tensor's shape: 1 to 16 dimensions, none 0, at most 2^40 elements together.
        block_elements: Weights of one block, 1 to 1,048,576; the last block is padded to it.
    """

    shape: tuple[int, ...]
    block_elements: int = 4096

    def __post_init__(self) -> None:
        sizes = self._sizes()
        if not (1 <= len(sizes) <= MAX_RANK and 1 <= math.prod(sizes) <= MAX_DENSE_ELEMENTS):
            raise ConfigError(
                f"Dense.shape is {self.shape!r}; allowed: 1 to {MAX_RANK} dimensions, none of "
                f"them 0, of at most {MAX_DENSE_ELEMENTS} elements together"
            )
        object.__setattr__(self, "shape", sizes)
        check_integer(self, "block_elements", 1, MAX_BLOCK_ELEMENTS)

    def _sizes(self) -> tuple[int, ...]:
        """Return the shape as ints, or an empty tuple where it is not a list of sizes."""
        try:
            sizes = tuple(int(size.__index__()) for size in self.shape)
        except (AttributeError, TypeError):
            return ()
        return sizes if all(size >= 1 for size in sizes) else ()


@dataclass(frozen=True)
class Refuse:
    """Refuse a push with NaN or infinity among its gradients; nothing of it is applied."""


@dataclass(frozen=True)
class Clip:
    """Take NaN as 0, and bring every gradient value into [-limit, limit]."""

    limit: float

    def __post_init__(self) -> None:
        check_number(self, "limit", MIN_EPSILON)


Kind: TypeAlias = Sparse | Dense
NonFinite: TypeAlias = Refuse | Clip

# The JSON names. The inverse direction is built from these, so a class stands here once.
_KINDS: dict[str, Callable[..., Kind]] = {"sparse": Sparse, "dense": Dense}
_INITIALIZERS: dict[str, Callable[..., Initializer]] = {
    "zeros": Zeros,
    "constant": Constant,
    "uniform": Uniform,
    "normal": Normal,
    "truncated_normal": TruncatedNormal,
    "xavier": Xavier,
}
_OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "user" if made is UserOptimizer else made.__name__.lower(): made for made in get_args(Optimizer)
}
_NON_FINITE: dict[str, Callable[..., NonFinite]] = {"refuse": Refuse, "clip": Clip}
_ADMISSIONS: dict[str, Callable[..., Admission]] = {
    "always": Always,
    "after": AdmitAfter,
    "probability": AdmitWithProbability,
    "score": AdmitByScore,
    "function": AdmissionFunction,
}
_COMPENSATIONS: dict[str, Callable[..., DelayCompensated | AdaptiveRevision]] = {
    "delay_compensated": DelayCompensated,
    "adaptive_revision": AdaptiveRevision,
}
_JSON_NAMES: dict[Callable[..., object], str] = {
    made: name
    for group in (_KINDS, _INITIALIZERS, _OPTIMIZERS, _NON_FINITE, _ADMISSIONS, _COMPENSATIONS)
    for name, made in group.items()
}


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
        name: object = self.name
        if not (isinstance(name, str) and _NAME.fullmatch(name)):
            raise ConfigError(
                f"TableSpec.name is {self.name!r}; allowed: 1 to 200 of A-Z a-z 0-9 _ . / -"
            )
        for part, allowed in (
            ("kind", get_args(Kind)),
            ("optimizer", get_args(Optimizer)),
            ("initializer", get_args(Initializer)),
            ("non_finite", get_args(NonFinite)),
            ("lifetime", (Lifetime, type(None))),
        ):
            if not isinstance(getattr(self, part), allowed):
                names = ", ".join(kind.__name__ for kind in allowed)
                raise ConfigError(
                    f"TableSpec.{part} is {getattr(self, part)!r}; allowed: one of {names}"
                )
        if not (self.pull is None or isinstance(self.pull, PullFunction)):
            raise ConfigError(f"TableSpec.pull is {self.pull!r}; allowed: a PullFunction or None")
        check_choice(self, "storage", get_args(Storage))
        self._check_compensation()
        check_integer(self, "seed", 0, 2**64 - 1)
        if self.lifetime is not None and isinstance(self.kind, Dense):
            raise ConfigError(
                "TableSpec.lifetime is set; allowed: None in a dense table, whose blocks neither "
                "come nor go"
            )

    def _check_compensation(self) -> None:
        if isinstance(self.compensation, AdaptiveRevision):
            if not isinstance(self.optimizer, Adagrad):
                raise ConfigError(
                    "TableSpec.compensation is AdaptiveRevision; allowed with the optimizer "
                    f"Adagrad only: this table has {type(self.optimizer).__name__}"
                )
        elif not isinstance(self.compensation, DelayCompensated):
            if self.compensation not in ("ignore", "scale"):
                raise ConfigError(
                    f"TableSpec.compensation is {self.compensation!r}; allowed: 'ignore', 'scale', "
                    "DelayCompensated(...) or AdaptiveRevision()"
                )
            if self.compensation == "scale" and isinstance(self.optimizer, FTRL | GroupFTRL):
                raise ConfigError(
                    "TableSpec.compensation is 'scale'; allowed with the optimizer "
                    f"{type(self.optimizer).__name__} of the table {self.name!r}: 'ignore' or "
                    "DelayCompensated(...). Its learning rate scales the whole weights, not only "
                    "a step. If BACKSTAY_COMPENSATION or the job's mode.compensation says scale, "
                    "give this layer a compensation= of its own"
                )
        elif isinstance(self.optimizer, UserOptimizer) or self.pull is not None:
            raise ConfigError(
                "TableSpec.compensation is DelayCompensated; allowed with an optimizer of your "
                "own, or a function on pull: 'ignore' or 'scale'"
            )

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
        kept = self.optimizer.state_elements(self.row_elements) + len(self.statistics)
        if not isinstance(self.compensation, str):
            kept += self.compensation.state_elements(self.row_elements)
        return kept

    @property
    def statistics(self) -> tuple[str, ...]:
        """The statistics of a row, in the order of their words; see :class:`Lifetime`."""
        return () if self.lifetime is None else self.lifetime.statistics

    @property
    def takes_counts(self) -> bool:
        """Whether a push may tell of shows and clicks."""
        return self.lifetime is not None and self.lifetime.takes_counts

    @property
    def has_score(self) -> bool:
        """Whether its rows have a score."""
        return self.lifetime is not None and self.lifetime.has_score

    def to_json(self) -> str:
        """Return the JSON form, every default filled in."""
        lifetime = {} if self.lifetime is None else {"lifetime": _plain_lifetime(self.lifetime)}
        pull = {} if self.pull is None else {"pull": self.pull.to_plain()}
        compensation = {"compensation": _plain_compensation(self.compensation)}
        if self.compensation == "ignore":
            compensation = {}
        return json.dumps(
            {
                "name": self.name,
                "kind": _to_plain(self.kind),
                "storage": self.storage,
                "initializer": _to_plain(self.initializer),
                "seed": self.seed,
                "optimizer": _to_plain(self.optimizer),
                "non_finite": "refuse"
                if isinstance(self.non_finite, Refuse)
                else _to_plain(self.non_finite),
            }
            | lifetime
            | compensation
            | pull,
            allow_nan=False,
        )

    @classmethod
    def from_json(cls, text: str) -> TableSpec:
        """Read the JSON form.

        Raises:
            ConfigError: It is not JSON, or a field is unknown, missing or out of range.
        """
        try:
            plain = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"table description is not JSON: {error}") from error
        values = dict(_object(plain, "table description"))
        for part, choices in (
            ("kind", _KINDS),
            ("initializer", _INITIALIZERS),
            ("optimizer", _OPTIMIZERS),
            ("non_finite", _NON_FINITE),
        ):
            if part in values:
                values[part] = _from_plain(values[part], choices, part)
        compensation = values.get("compensation")
        if isinstance(compensation, dict) or compensation in list(_COMPENSATIONS):
            values["compensation"] = _from_plain(compensation, _COMPENSATIONS, "compensation")
        if values.get("lifetime") is not None:
            values["lifetime"] = _lifetime_of(values["lifetime"])
        if values.get("pull") is not None:
            values["pull"] = _make(PullFunction, _object(values["pull"], "pull"), "pull")
        return _make(cls, values, "table description")


# The parts of a lifetime that are plain objects.
_OF_LIFETIME: dict[str, Callable[..., Expiry | Capacity | Score]] = {
    "expiry": Expiry,
    "capacity": Capacity,
    "score": Score,
}


def _plain_compensation(compensation: Compensation) -> Any:
    if isinstance(compensation, str):
        return compensation
    name, settings = _JSON_NAMES[type(compensation)], asdict(compensation)
    return {name: settings} if settings else name


def _plain_lifetime(lifetime: Lifetime) -> dict[str, Any]:
    always = isinstance(lifetime.admission, Always)
    plain: dict[str, Any] = {
        "admission": "always" if always else _to_plain(lifetime.admission),
        "unadmitted": lifetime.unadmitted,
    }
    for name in _OF_LIFETIME:
        part = getattr(lifetime, name)
        plain[name] = None if part is None else _plain_part(part)
    return plain


def _plain_part(part: Expiry | Capacity | Score) -> dict[str, Any]:
    settings = {f.name: getattr(part, f.name) for f in fields(part)}
    if isinstance(part, Score):
        function = settings.pop("function")
        if function is not None:
            settings = {"function": function.to_plain()} | {
                name: value for name, value in settings.items() if name not in COEFFICIENTS
            }
    return settings


def _lifetime_of(plain: object) -> Lifetime:
    values = dict(_object(plain, "lifetime"))
    if "admission" in values:
        values["admission"] = _from_plain(values["admission"], _ADMISSIONS, "lifetime.admission")
    for name, made in _OF_LIFETIME.items():
        if values.get(name) is not None:
            where = f"lifetime.{name}"
            values[name] = _make(made, _part_of(_object(values[name], where), where), where)
    return _make(Lifetime, values, "lifetime")


def _part_of(plain: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the fields of a part of a lifetime, a function read."""
    if plain.get("function") is None:
        return plain
    if any(name in plain for name in COEFFICIENTS):
        raise ConfigError(f"{where} has a function and coefficients; allowed: one of the two")
    function = _object(plain["function"], f"{where}.function")
    return {**plain, "function": _make(ScoreFunction, function, f"{where}.function")}


def _to_plain(part: Kind | Initializer | Optimizer | NonFinite | Admission) -> dict[str, Any]:
    if isinstance(part, (UserOptimizer, AdmissionFunction)):
        return {_JSON_NAMES[type(part)]: part.to_plain()}
    settings = {f.name: getattr(part, f.name) for f in fields(part)}
    return {_JSON_NAMES[type(part)]: settings}


_Made = TypeVar("_Made")


def _from_plain(plain: object, choices: Mapping[str, Callable[..., _Made]], where: str) -> _Made:
    """Read ``{"name": {settings}}``, or ``"name"`` of a class without settings."""
    tagged = {plain: {}} if isinstance(plain, str) else _object(plain, where)
    if len(tagged) != 1 or next(iter(tagged)) not in choices:
        raise ConfigError(f"{where} is {plain!r}; allowed: one of {', '.join(choices)}")
    name, settings = next(iter(tagged.items()))
    return _make(choices[name], _object(settings, f"{where}.{name}"), f"{where}.{name}")


def _make(made: Callable[..., _Made], settings: Mapping[str, Any], where: str) -> _Made:
    known = [f.name for f in fields(made)]  # type: ignore[arg-type]  # only dataclasses come here
    unknown = [name for name in settings if name not in known]
    if unknown:
        raise ConfigError(
            f"{where} has the unknown field {unknown[0]!r}; known: {', '.join(known) or 'none'}"
        )
    try:
        return made(**settings)
    except TypeError as error:
        raise ConfigError(f"{where}: {error}") from error


def _object(plain: object, where: str) -> Mapping[str, Any]:
    if not isinstance(plain, dict):
        raise ConfigError(f"{where} is {plain!r}; it must be a JSON object")
    return plain
