"""Expiry and decay of a table's rows, slot by slot at their masters.

A trainer calls them through its client; an operator or a job master by :class:`Upkeep`, which
connects for that. Imports the native module and its siblings; no row passes here.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Protocol

from backstay._native import DataClient, table_id
from backstay.cluster.directory import Directory
from backstay.cluster.watch import ClusterWatch, made_data_plane
from backstay.config import ClientConfig
from backstay.errors import ConfigError, InvalidRequest
from backstay.tables import Score, TableSpec

__all__ = [
    "EndedPass",
    "Expired",
    "RowKeeper",
    "Thresholds",
    "Upkeep",
    "check_period",
    "decay_now",
    "end_pass",
    "expire_now",
    "keeps_rows_of",
    "unseen_seconds",
]

# A table of any size is done by then; a server that does not answer for so long is to be seen to.
LIMIT_MS = 600_000
PERIOD_MAX = 2**48 - 1
UNSEEN_SECONDS_MAX = 2**31 - 1


@dataclass(frozen=True)
class Thresholds:
    """What an expiry goes by; all None: by the table's own expiry.

    Attributes:
        unseen_seconds: No push has named the row for more than so many seconds.
        score_below: Its score is lower.
        norm_below: The L2 norm of its weights is lower.
    """

    unseen_seconds: int | None = None
    score_below: float | None = None
    norm_below: float | None = None

    @property
    def is_given(self) -> bool:
        """Whether there is one."""
        return self != Thresholds()


@dataclass(frozen=True)
class Expired:
    """What an expiry removed, or would remove; each row counts once, for the first reason.

    Attributes:
        unseen: Rows that no push has named for too long.
        score: Rows whose score is too low.
        norm: Rows whose weights have too low a norm.
        counters: Counters of keys without a row that are too old.
        slots: How many slots have told what they removed. Fewer than there are: the answer of some
            was lost with its server, and the counts lack what it had removed.
    """

    unseen: int
    score: int
    norm: int
    counters: int
    slots: int

    @classmethod
    def from_json(cls, text: str) -> Expired:
        """Return what the data plane says."""
        told = json.loads(text)
        return cls(**{name: told[name] for name in cls.__dataclass_fields__})

    @property
    def rows(self) -> int:
        """Rows of all reasons."""
        return self.unseen + self.score + self.norm


def expire_now(
    native: DataClient, spec: TableSpec, thresholds: Thresholds, *, dry_run: bool = False
) -> Expired:
    """Expire rows of a table; see ``Client.expire``."""
    lifetime = spec.lifetime
    if lifetime is None:
        raise InvalidRequest(f"table {spec.name} has no lifetime: its rows do not expire")
    if lifetime.expiry is None and not thresholds.is_given:
        raise InvalidRequest(
            f"table {spec.name} has no expiry in its lifetime: give unseen_seconds, score_below or "
            "norm_below"
        )
    seconds = thresholds.unseen_seconds
    is_whole = isinstance(seconds, int) and not isinstance(seconds, bool)
    if not (seconds is None or (is_whole and 1 <= seconds <= UNSEEN_SECONDS_MAX)):
        raise ConfigError(
            f"unseen_seconds is {seconds!r}; allowed: an integer from 1 to {UNSEEN_SECONDS_MAX}"
        )
    for name, has, needs in (
        ("unseen_seconds", "last_seen" in spec.statistics, "last_seen"),
        ("score_below", spec.has_score, "score"),
    ):
        if getattr(thresholds, name) is not None and not has:
            raise InvalidRequest(
                f"table {spec.name} cannot expire by {name}: its lifetime keeps no {needs} of a row"
            )
    return Expired.from_json(
        native.expire(
            table_id(spec.name),
            deadline_ms=LIMIT_MS,
            dry_run=dry_run,
            unseen_seconds=thresholds.unseen_seconds,
            score_below=thresholds.score_below,
            norm_below=thresholds.norm_below,
        )
    )


def decay_now(native: DataClient, spec: TableSpec, period: int, rate: float | None = None) -> int:
    """Decay shows and clicks of a table; see ``Client.decay``."""
    if not spec.takes_counts:
        raise InvalidRequest(f"table {spec.name} keeps no shows and clicks: there is none to decay")
    if rate is not None and not 0.0 < rate < 1.0:
        raise InvalidRequest(f"rate is {rate!r}: a number above 0 and below 1")
    return native.decay(table_id(spec.name), period=period, deadline_ms=LIMIT_MS, rate=rate)


def check_period(period: int) -> int:
    """Return the number of a period.

    Raises:
        InvalidRequest: It is out of range.
    """
    if not 0 <= period <= PERIOD_MAX:
        raise InvalidRequest(f"period is {period}: 0 to {PERIOD_MAX}")
    return period


class Upkeep:
    """A connection to a cluster's masters for expiry and decay. A context manager.

    It keeps up with the routing while it is open, so a call goes on at new masters.
    """

    def __init__(self, endpoints: str | Sequence[str], config: ClientConfig) -> None:
        """Connect.

        Raises:
            ServerUnavailable: No server answers within the deadline.
            ConfigError: A setting is wrong.
        """
        self._config = config
        self._directory = Directory(endpoints, config)
        try:
            info = self._directory.first_contact()
            self._native = made_data_plane(config, info)
            self._watch = ClusterWatch(self._native, self._directory, info)
            self._watch.start()
        except BaseException:
            self._directory.close()
            raise

    def __enter__(self) -> Upkeep:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect."""
        try:
            self._native.close(self._config.deadline_ms)
        finally:
            self._watch.close()
            self._directory.close()

    def table(self, name: str) -> TableSpec:
        """Return a table's description.

        Raises:
            UnknownTable: There is none.
        """
        return self._directory.table(name)

    def tables(self) -> list[TableSpec]:
        """Return the descriptions of all tables."""
        return self._directory.tables()

    def expire(
        self,
        table: str,
        *,
        dry_run: bool = False,
        unseen_seconds: int | None = None,
        score_below: float | None = None,
        norm_below: float | None = None,
    ) -> Expired:
        """Expire rows of a table; see ``Client.expire``."""
        thresholds = Thresholds(unseen_seconds, score_below, norm_below)
        spec = self._directory.table(table)
        self._watch.wait_until_running()
        return expire_now(self._native, spec, thresholds, dry_run=dry_run)

    def decay(self, table: str, *, period: int, rate: float | None = None) -> int:
        """Decay shows and clicks of a table; see ``Client.decay``."""
        spec = self._directory.table(table)
        self._watch.wait_until_running()
        return decay_now(self._native, spec, check_period(period), rate)


class RowKeeper(Protocol):
    """What sees to rows: an ``Upkeep``, or a client."""

    def expire(self, table: str, *, unseen_seconds: int | None = None) -> Expired:
        """See ``Client.expire``."""

    def decay(self, table: str, *, period: int) -> int:
        """See ``Client.decay``."""


class EndedPass(NamedTuple):
    """What the end of a pass did to the rows of a job.

    Attributes:
        expired: Rows that went.
        changed: Whether rows went, or shows and clicks were decayed.
        lacks: What was asked for and no table could do; empty: nothing.
        not_decayed: Tables of which no slot decayed: all had done this period, or a later one.
    """

    expired: int
    changed: bool
    lacks: str = ""
    not_decayed: tuple[str, ...] = ()

    def trouble(self, pass_number: int, *, is_first_try: bool) -> str:
        """Return what is wrong, for people; empty: nothing.

        Args:
            pass_number: Which pass has ended.
            is_first_try: Whether nobody had begun with its end before.
        """
        late = ""
        if self.not_decayed and is_first_try:
            late = (
                f"the decay after pass {pass_number} did nothing in {', '.join(self.not_decayed)}: "
                "their slots had done a later period. Periods are Unix time in milliseconds: let "
                "programs that decay use no later one, and keep the clocks of all machines right"
            )
        return "; ".join(filter(None, [self.lacks, late]))


def keeps_rows_of(job: str, specs: Iterable[TableSpec]) -> list[TableSpec]:
    """Return the tables of a job that have a lifetime."""
    prefix = f"{job}/" if job else ""
    return [spec for spec in specs if spec.lifetime is not None and spec.name.startswith(prefix)]


def unseen_seconds(since_s: int | None, now_s: float) -> int | None:
    """Return how long ago a moment was, in whole seconds; None stays None.

    Rounded up, and two seconds more: servers count whole seconds of clocks of their own.
    """
    return None if since_s is None else max(1, math.ceil(now_s - since_s) + 2)


def end_pass(
    keeper: RowKeeper,
    specs: Sequence[TableSpec],
    *,
    period: int,
    unseen_since_s: int | None,
    now: Callable[[], float] = time.time,
) -> EndedPass:
    """Decay and expire the rows of tables as their lifetimes say; may be called again.

    What the servers do in a period of their own is left to them. Decay comes first, as in Paddle's
    ``Shrink``: a score that is too low after it goes at once.

    Args:
        keeper: Asks the servers.
        specs: Tables with a lifetime.
        period: See ``Client.decay``.
        unseen_since_s: Also rows that no push has named since then, in Unix seconds; None: not.
        now: The time of now, in Unix seconds.
    """
    expired, decayed, looked = 0, 0, False
    not_decayed = []
    for spec in specs:
        lifetime = spec.lifetime
        assert lifetime is not None
        expiry = lifetime.expiry
        score = lifetime.score if isinstance(lifetime.score, Score) else None
        if score is not None and score.decay < 1.0 and score.decay_every_seconds is None:
            slots = keeper.decay(spec.name, period=period)
            decayed += slots
            if not slots:
                not_decayed.append(spec.name)
        if expiry is not None and expiry.every_seconds is None:
            expired += keeper.expire(spec.name).rows
        # Anew for each table: decay and expiry of those before may have taken long.
        seconds = unseen_seconds(unseen_since_s, now())
        if seconds is not None and "last_seen" in spec.statistics:
            looked = True
            expired += keeper.expire(spec.name, unseen_seconds=seconds).rows
    lacks = ""
    if unseen_since_s is not None and not looked:
        lacks = (
            "lifetime.unseen_passes: no table of the job keeps when a row was last seen; give one "
            "an expiry by unseen_seconds, or a capacity that evicts least_recent"
        )
    return EndedPass(expired, bool(expired or decayed), lacks, tuple(not_decayed))
