"""When rows of a sparse table come and go: admission, expiry, capacity and the score of a row.

The rules are those of crates/backstay-core/src/spec. Imports its siblings in ``backstay.tables``
only; never does I/O. docs/internals/lifetimes.md says how the servers do it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from backstay.tables.part import Part
from backstay.tables.user import AdmissionFunction, ScoreFunction

Evict: TypeAlias = Literal["least_recent", "least_frequent", "lowest_score"]
Unadmitted: TypeAlias = Literal["initial", "zeros"]


@dataclass(frozen=True)
class Always(Part, at="lifetime.admission", name="always", word=True):
    """Every key that is pushed gets a row."""


@dataclass(frozen=True)
class AdmitAfter(Part, at="lifetime.admission", name="after"):
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


@dataclass(frozen=True)
class AdmitWithProbability(Part, at="lifetime.admission", name="probability"):
    """A key without a row gets one with this probability, at each push that names it.

    A hash of key, push and the table's seed decides, so that replicas and retries agree.

    Attributes:
        probability: 1e-9 to below 1.
    """

    probability: float


@dataclass(frozen=True)
class AdmitByScore(Part, at="lifetime.admission", name="score"):
    """A key gets a row with the push that brings it to this score (:class:`Score`).

    Attributes:
        at_least: Above 0.
    """

    at_least: float


Admission: TypeAlias = Always | AdmitAfter | AdmitWithProbability | AdmitByScore | AdmissionFunction


@dataclass(frozen=True)
class Expiry(Part, at="lifetime.expiry"):
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


@dataclass(frozen=True)
class Capacity(Part, at="lifetime.capacity"):
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


@dataclass(frozen=True)
class Score(Part, at="lifetime.score"):
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

    def complete(self, filled: Mapping[str, Any]) -> None:
        """Take over the coefficients, which there are without a function."""
        for name in {"nonclick_coefficient", "click_coefficient"} & filled.keys():
            object.__setattr__(self, name, filled[name])

    def settings_in_json(self) -> dict[str, Any]:
        """Return the settings as JSON has them: the coefficients or a function."""
        absent = {
            name
            for name in ("nonclick_coefficient", "click_coefficient", "function")
            if getattr(self, name) is None
        }
        settings = super().settings_in_json()
        return {name: value for name, value in settings.items() if name not in absent}


@dataclass(frozen=True)
class Lifetime(Part, at="lifetime"):
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
        """Check the policy. A function is a score with its other settings."""
        if isinstance(self.score, ScoreFunction):
            object.__setattr__(self, "score", Score(function=self.score))
        super().__post_init__()

    def complete(self, filled: Mapping[str, Any]) -> None:
        """Take over the score, which there is if something uses one."""
        if self.score is None and filled["score"] is not None:
            object.__setattr__(self, "score", Score())
