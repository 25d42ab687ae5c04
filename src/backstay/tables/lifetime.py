"""When rows of a sparse table come and go: admission, expiry, capacity and the score of a row.

Frozen dataclasses with the checks of the servers (crates/backstay-core/src/spec/lifetime.rs).
Imports its siblings in ``backstay.tables`` and ``backstay.errors``; never does I/O.
docs/internals/lifetimes.md says how the servers do it.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from backstay.errors import ConfigError
from backstay.tables.checks import (
    MAX_NUMBER,
    MIN_EPSILON,
    check_choice,
    check_integer,
    check_number,
)
from backstay.tables.user import AdmissionFunction, ScoreFunction

Evict: TypeAlias = Literal["least_recent", "least_frequent", "lowest_score"]
Unadmitted: TypeAlias = Literal["initial", "zeros"]

_MAX_SECONDS = 2**31 - 1
_MIN_RATE = 1e-9
# Words of a row in a counting Bloom filter.
_FILTER_ELEMENTS = 64


@dataclass(frozen=True)
class Always:
    """Every key that is pushed gets a row."""


@dataclass(frozen=True)
class AdmitAfter:
    """A key gets a row with the push that names it for the ``occurrences``-th time.

    Equal keys of one batch count once. Passes and jobs count on where the ones before ended.

    Attributes:
        occurrences: 2 to 65,535; with a filter 2 to 100.
        filter_bytes: Memory of a counting Bloom filter in the whole cluster, 65,536 to 2^40; each
            copy of a slot has its share. Some keys are admitted early, none late. None: an exact
            counter for each key, of about 30 bytes.
    """

    occurrences: int
    filter_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.filter_bytes is not None:
            check_integer(self, "filter_bytes", 65_536, 1 << 40)
        check_integer(self, "occurrences", 2, 65_535 if self.filter_bytes is None else 100)


@dataclass(frozen=True)
class AdmitWithProbability:
    """A key without a row gets one with this probability, at each push that names it.

    A hash of key, push and the table's seed decides, so that replicas and retries agree.

    Attributes:
        probability: 1e-9 to below 1.
    """

    probability: float

    def __post_init__(self) -> None:
        check_number(self, "probability", _MIN_RATE, math.nextafter(1.0, 0.0))


@dataclass(frozen=True)
class AdmitByScore:
    """A key gets a row with the push that brings it to this score (:class:`Score`).

    Attributes:
        at_least: Above 0.
    """

    at_least: float

    def __post_init__(self) -> None:
        check_number(self, "at_least", MIN_EPSILON, MAX_NUMBER)


Admission: TypeAlias = Always | AdmitAfter | AdmitWithProbability | AdmitByScore | AdmissionFunction
# What a score is of without a function.
_OF_SHOW_AND_CLICK = ("show", "click")


@dataclass(frozen=True)
class Expiry:
    """Which rows an expiry removes: those for which any of these holds.

    Attributes:
        unseen_seconds: No push has named the row for longer than that.
        score_below: Its score (:class:`Score`) is below.
        norm_below: The L2 norm of its weights is below.
        every_seconds: The servers expire rows in each period of so many seconds, counted from
            1970. None: only when they are asked to.
    """

    unseen_seconds: int | None = None
    score_below: float | None = None
    norm_below: float | None = None
    every_seconds: int | None = None

    def __post_init__(self) -> None:
        if self.unseen_seconds is None and self.score_below is None and self.norm_below is None:
            raise ConfigError(
                "Expiry is without a threshold; allowed: one of unseen_seconds, score_below and "
                "norm_below at least"
            )
        for name in ("unseen_seconds", "every_seconds"):
            if getattr(self, name) is not None:
                check_integer(self, name, 1, _MAX_SECONDS)
        for name in ("score_below", "norm_below"):
            if getattr(self, name) is not None:
                check_number(self, name, MIN_EPSILON, MAX_NUMBER)


@dataclass(frozen=True)
class Capacity:
    """How many rows a table may have, and which go first.

    Slots have equal shares. A push that brings a slot above its share removes rows of it until
    1/16 of the share is free. A table with a capacity refuses no row for want of room.

    Attributes:
        rows: In the whole cluster, each row once: at least 16 for each slot, at most 2^40.
        bytes: The same by the memory of rows; one of the two.
        evict: What goes first: rows that no push has named for the longest time, that the fewest
            pushes have named, or of the lowest score. Of equal rows those of the lowest key.
    """

    rows: int | None = None
    bytes: int | None = None
    evict: Evict = "least_recent"

    def __post_init__(self) -> None:
        if (self.rows is None) == (self.bytes is None):
            raise ConfigError(
                f"Capacity.rows is {self.rows!r} and Capacity.bytes is {self.bytes!r}; allowed: "
                "one of the two"
            )
        if self.rows is not None:
            check_integer(self, "rows", 16, 1 << 40)
        else:
            check_integer(self, "bytes", 1024, 1 << 50)
        check_choice(self, "evict", get_args(Evict))


@dataclass(frozen=True)
class Score:
    """``nonclick_coefficient * (show - click) + click_coefficient * click``, and how it fades.

    A push that tells of no shows counts one show and no click for each key.

    Source: the score of Paddle's CtrCommonAccessor.

    Attributes:
        nonclick_coefficient: 0 or more; 0.1 if not told. None with a function.
        click_coefficient: 0 or more; 1 if not told. None with a function.
        decay: What a decay multiplies shows and clicks by, 1e-9 to 1.
        decay_every_seconds: The servers decay in each period of so many seconds, counted from
            1970. None: only when they are asked to.
        function: Your own score, in the place of the coefficients.
    """

    nonclick_coefficient: float | None = None
    click_coefficient: float | None = None
    decay: float = 1.0
    decay_every_seconds: int | None = None
    function: ScoreFunction | None = None

    def __post_init__(self) -> None:
        if self.function is None:
            self._fill_coefficients()
        else:
            self._check_function()
        check_number(self, "decay", _MIN_RATE, 1.0)
        if self.decay < 1.0 and struct.unpack("f", struct.pack("f", self.decay))[0] >= 1.0:
            raise ConfigError(
                f"Score.decay is {self.decay!r}; allowed: 1, or less than 0.99999998, for float32 "
                "rounds this to 1"
            )
        if self.decay < 1.0 and not set(self.inputs) & set(_OF_SHOW_AND_CLICK):
            raise ConfigError(
                f"Score.decay is {self.decay!r}; allowed: 1 with a function that uses neither show "
                "nor click, for nothing would fade"
            )
        if self.decay_every_seconds is None:
            return
        check_integer(self, "decay_every_seconds", 1, _MAX_SECONDS)
        if self.decay >= 1.0:
            raise ConfigError(
                f"Score.decay_every_seconds is {self.decay_every_seconds}; allowed: None with "
                "decay 1, for nothing would fade"
            )

    def _fill_coefficients(self) -> None:
        for name, default in COEFFICIENTS.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
            check_number(self, name, 0.0, MAX_NUMBER)

    def _check_function(self) -> None:
        function: object = self.function
        if not isinstance(function, ScoreFunction):
            raise ConfigError(f"Score.function is {function!r}; allowed: a ScoreFunction or None")
        if any(getattr(self, name) is not None for name in COEFFICIENTS):
            raise ConfigError(
                "Score has a function and coefficients; allowed: one of the two, for the function "
                "is the whole score"
            )
        _check_statistics("Score.function", function)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The statistics that the score depends on."""
        return _OF_SHOW_AND_CLICK if self.function is None else self.function.statistics


# What they are if they are not told.
COEFFICIENTS = {"nonclick_coefficient": 0.1, "click_coefficient": 1.0}


def _check_statistics(where: str, function: ScoreFunction | AdmissionFunction) -> None:
    if not function.statistics:
        raise ConfigError(
            f"{where} is {function.name}; allowed: one whose result depends on last_seen, "
            "frequency, show or click"
        )


@dataclass(frozen=True)
class Lifetime:
    """When the rows of a sparse table come and go.

    A row keeps the statistics that the policy uses, 4 bytes each, behind its optimizer's state:
    when it was seen last, its frequency, its shows and clicks.

    Attributes:
        admission: Which keys get a row by a push. Assigned weights always make one.
        unadmitted: What a pull gives of a key without a row: its initial value, or zeros (only with
            an admission).
        expiry: Which rows an expiry removes. None: rows do not expire by themselves.
        capacity: How many rows there may be. None: no limit.
        score: The score of a row, or your own function of its statistics, which is kept as
            ``Score(function=...)``; its defaults if something uses a score and this is None.

    Raises:
        ConfigError: The policy contradicts itself; the message names the field and what is allowed.
    """

    admission: Admission = field(default_factory=Always)
    unadmitted: Unadmitted = "initial"
    expiry: Expiry | None = None
    capacity: Capacity | None = None
    score: Score | ScoreFunction | None = None

    def __post_init__(self) -> None:
        if isinstance(self.score, ScoreFunction):
            object.__setattr__(self, "score", Score(function=self.score))
        self._check_types()
        if (self.admission, self.expiry, self.capacity, self.score) == (Always(), None, None, None):
            raise ConfigError(
                "Lifetime is without any setting; allowed: one of admission, expiry and capacity "
                "at least, or no lifetime at all"
            )
        if isinstance(self.admission, Always) and self.unadmitted == "zeros":
            raise ConfigError(
                "Lifetime.unadmitted is 'zeros'; allowed: 'initial' with admission Always(), where "
                "every key that is pushed has a row"
            )
        if isinstance(self.admission, AdmissionFunction):
            _check_statistics("Lifetime.admission", self.admission)
        if self.score is None and self.has_score:
            object.__setattr__(self, "score", Score())
        if self.score is not None and not self.has_score:
            raise ConfigError(
                f"Lifetime.score is {self.score!r}; allowed: None, where nothing uses a score: set "
                "expiry.score_below, AdmitByScore or evict='lowest_score'"
            )
        below = None if self.expiry is None else self.expiry.score_below
        if isinstance(self.admission, AdmitByScore) and (below or 0.0) > self.admission.at_least:
            raise ConfigError(
                f"Lifetime.expiry.score_below is {below!r}; allowed: at most "
                f"admission.at_least ({self.admission.at_least!r}), or a row would expire as it is "
                "admitted"
            )

    def _check_types(self) -> None:
        check_choice(self, "unadmitted", get_args(Unadmitted))
        for name, allowed in (
            ("admission", get_args(Admission)),
            ("expiry", (Expiry, type(None))),
            ("capacity", (Capacity, type(None))),
            ("score", (Score, ScoreFunction, type(None))),
        ):
            if not isinstance(getattr(self, name), allowed):
                names = ", ".join(kind.__name__ for kind in allowed)
                raise ConfigError(
                    f"Lifetime.{name} is {getattr(self, name)!r}; allowed: one of {names}"
                )

    @property
    def has_score(self) -> bool:
        """Whether something uses a score."""
        expires = self.expiry is not None and self.expiry.score_below is not None
        return expires or isinstance(self.admission, AdmitByScore) or self._evicts("lowest_score")

    @property
    def takes_counts(self) -> bool:
        """Whether a push may tell of shows and clicks: rows or counters keep one of them."""
        counted = (*self.statistics, *(self._counters or ()))
        return any(name in counted for name in _OF_SHOW_AND_CLICK)

    def _evicts(self, by: Evict) -> bool:
        return self.capacity is not None and self.capacity.evict == by

    @property
    def statistics(self) -> tuple[str, ...]:
        """The statistics of a row, in the order of their words behind the optimizer's state.

        ``last_seen`` (seconds) and ``frequency`` are the bits of a uint32, the others float32.
        """
        unseen = self.expiry is not None and self.expiry.unseen_seconds is not None
        kept = {
            "last_seen": unseen or self._evicts("least_recent"),
            "frequency": self._evicts("least_frequent"),
            "show": False,
            "click": False,
        }
        scored = self.score.inputs if self.has_score and isinstance(self.score, Score) else ()
        return tuple(name for name, keeps in kept.items() if keeps or name in scored)

    @property
    def _counters(self) -> tuple[str, ...] | None:
        """What is counted of a key without a row for a score or a function; None: nothing is."""
        if isinstance(self.admission, AdmissionFunction):
            used = self.admission.statistics
        elif isinstance(self.admission, AdmitByScore) and isinstance(self.score, Score):
            used = self.score.inputs
        else:
            return None
        # When it was counted last stands behind these; a row has one word at least.
        return tuple(name for name in used if name != "last_seen") or ("frequency",)

    @property
    def companion_shape(self) -> tuple[int, int] | None:
        """Weights and state of a row of what counts keys without a row; None: nothing does.

        It is a table of its own in checkpoints, named ``<table>@admission``.
        """
        if self._counters is not None:
            return len(self._counters), 1
        if isinstance(self.admission, AdmitAfter):
            return (1 if self.admission.filter_bytes is None else _FILTER_ELEMENTS), 1
        return None
