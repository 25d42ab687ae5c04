"""Which Events of Kubernetes tell how a job goes: merged, and written at a bounded rate.

What is noted becomes a series: one Event with a count. A thing that is noted again counts in its
series. Each reason has a few series at once, and one more each minute; what is more counts in the
newest series of its reason. A series is written again at most every ``REWRITE_S``. So the calls
grow with the time and with the number of reasons, not with the number of workers.
Time and the names of Events are arguments. Imports ``job_engine.launch`` and ``objects``; does no
I/O.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any

from backstay.backoff import Backoff
from backstay.job_engine.launch import ExitReason, WorkerExit
from backstay.kubernetes.objects import Owner

__all__ = ["EventLog", "EventSeries", "event_body", "event_change", "of_exit"]

COMPONENT = "backstay-job-master"
# New series of one reason: so many at once, then one in so many seconds.
SERIES_AT_ONCE = 5
SERIES_PAUSE_S = 60.0
REWRITE_S = 10.0
# The oldest is forgotten then.
SERIES_MAX = 100
# After a write that failed; doubled each time, up to the last.
RETRY = Backoff(first_s=1.0, longest_s=300.0)
MESSAGE_MAX = 1000
_HASH_LENGTH = 16
# What Kubernetes calls the reason, by why a worker ended.
_REASONS = {
    ExitReason.FINISHED: "WorkerFinished",
    ExitReason.FAILED: "WorkerFailed",
    ExitReason.PREEMPTED: "WorkerPreempted",
    ExitReason.EVICTED: "WorkerEvicted",
    ExitReason.NODE_LOST: "WorkerLost",
    ExitReason.OUT_OF_MEMORY: "WorkerOutOfMemory",
    ExitReason.CANNOT_START: "WorkerCannotStart",
    ExitReason.NO_IMAGE: "WorkerNoImage",
    ExitReason.NOT_ALLOWED: "WorkerNotAllowed",
    ExitReason.HUNG: "WorkerHung",
}


@dataclass(frozen=True)
class EventSeries:
    """One Event.

    Attributes:
        name: Of the object, after the owner's name.
        reason: As Kubernetes has it: one word.
        message: The newest, for people.
        is_warning: Whether it is no good news.
        count: How often it was noted.
        first_s, last_s: When, in Unix seconds.
        is_made: Whether the object is there.
    """

    name: str
    reason: str
    message: str
    is_warning: bool
    first_s: float
    last_s: float
    count: int = 1
    is_made: bool = False


def of_exit(end: WorkerExit, how: str) -> tuple[str, str, bool]:
    """Return reason, message and whether it is a warning, of the end of a worker.

    Args:
        end: The end.
        how: In words that follow the worker's name.
    """
    words = end.last_words.strip()[-MESSAGE_MAX // 2 :]
    text = f"worker {end.worker_id} {how}" + (f": {words}" if words else "")
    return _REASONS[end.reason], text, end.reason is not ExitReason.FINISHED


class EventLog:
    """The Events of one job, as its job master writes them."""

    def __init__(self, owner_uid: str, run: str) -> None:
        """Begin with none. The names of the Events follow from these, and from what they say.

        Args:
            owner_uid: Of the job's owner: a job that was made anew has Events of its own.
            run: Another one in each run of the job master.
        """
        self._owner_uid = owner_uid
        self._run = run
        # In the order in which they were made; and those that are to be written, with when.
        self._series: dict[str, EventSeries] = {}
        self._due: dict[str, float] = {}
        self._written_s: dict[str, float] = {}
        # Of each reason: series that it may still have, when that was counted, and the newest.
        self._left: dict[str, tuple[float, float]] = {}
        self._newest: dict[str, str] = {}
        self._retries = RETRY.begin()
        self._not_before_s = float("-inf")

    def note(
        self,
        reason: str,
        message: str,
        *,
        is_warning: bool,
        unix_s: float,
        now_s: float,
        once: str = "",
    ) -> None:
        """Take in that something happened.

        Args:
            reason: As Kubernetes has it: one word.
            message: For people.
            is_warning: Whether it is no good news.
            unix_s: When, for people.
            now_s: When, monotonic.
            once: Names the one thing that happened, which an earlier job master may have told,
                perhaps in other words: it is told once. Empty: it may happen again.
        """
        message = message[-MESSAGE_MAX:]
        what = ("", once) if once else (self._run, message)
        name = _name(self._owner_uid, reason, *what)
        if name not in self._series and not self._may_begin(reason, now_s):
            name = self._newest[reason]
        known = self._series.get(name)
        if known is None:
            known = EventSeries(name, reason, message, is_warning, unix_s, unix_s)
            self._newest[reason] = name
            self._make_room()
        else:
            known = replace(known, message=message, last_s=unix_s, count=known.count + 1)
        self._series[name] = known
        rewrite_s = self._written_s.get(name, float("-inf")) + REWRITE_S
        self._due.setdefault(name, max(now_s, rewrite_s))

    def due(self, now_s: float) -> EventSeries | None:
        """Return the Event to write now; None: none. Tell ``written`` or ``failed`` then."""
        if now_s < self._not_before_s:
            return None
        name = min(self._due, key=lambda one: self._due[one], default=None)
        return None if name is None or self._due[name] > now_s else self._series[name]

    def rest(self) -> list[EventSeries]:
        """Return what is not written yet, at the end."""
        return [self._series[name] for name in self._due]

    def written(self, series: EventSeries, now_s: float) -> None:
        """Note that an Event was made or changed as ``due`` has returned it."""
        self._retries.reset()
        known = self._series.get(series.name)
        if known is None:
            return
        self._written_s[series.name] = now_s
        self._series[series.name] = replace(known, is_made=True)
        if known.count == series.count:
            # At the end two writers may have written it.
            self._due.pop(series.name, None)
        else:
            # It was noted again meanwhile.
            self._due[series.name] = now_s + REWRITE_S

    def failed(self, now_s: float) -> None:
        """Note that a write failed; the next one waits."""
        self._not_before_s = now_s + self._retries.next_s()

    def _may_begin(self, reason: str, now_s: float) -> bool:
        """Take one of the series that a reason may have; False: there is none left."""
        left, since_s = self._left.get(reason, (float(SERIES_AT_ONCE), now_s))
        left = min(float(SERIES_AT_ONCE), left + (now_s - since_s) / SERIES_PAUSE_S)
        may = left >= 1 or self._newest.get(reason) not in self._series
        self._left[reason] = (max(0.0, left - 1) if may else left, now_s)
        return may

    def _make_room(self) -> None:
        while len(self._series) >= SERIES_MAX:
            oldest = next(iter(self._series))
            for kept in (self._series, self._due, self._written_s):
                kept.pop(oldest, None)


def event_body(series: EventSeries, owner: Owner, namespace: str) -> dict[str, Any]:
    """Return the object of an Event, which is about the owner of a job."""
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{owner.name}.{series.name}", "namespace": namespace},
        "involvedObject": {**owner.reference(), "namespace": namespace},
        "reason": series.reason,
        "type": "Warning" if series.is_warning else "Normal",
        "source": {"component": COMPONENT},
        "reportingComponent": COMPONENT,
        "firstTimestamp": _time_of(series.first_s),
        **event_change(series),
    }


def event_change(series: EventSeries) -> Mapping[str, Any]:
    """Return what changes of an Event when it is noted again."""
    return {
        "message": series.message,
        "count": series.count,
        "lastTimestamp": _time_of(series.last_s),
    }


def _name(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:_HASH_LENGTH]


def _time_of(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
