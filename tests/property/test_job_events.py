"""Events of a job: whatever happens, all of it is told, at a bounded rate."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from backstay.kubernetes import job_events
from backstay.kubernetes.job_events import (
    REWRITE_S,
    SERIES_AT_ONCE,
    SERIES_PAUSE_S,
    EventLog,
    EventSeries,
)

# Seconds until it is noted, reason, and which message of it.
NOTES = st.lists(
    st.tuples(st.floats(0, 30), st.sampled_from("AB"), st.integers(0, 40)), max_size=300
)


class Api:
    """Writes what is due, and keeps it as the API would."""

    def __init__(self) -> None:
        self.log = EventLog("0f8fa", "1")
        self.found: dict[str, EventSeries] = {}
        self.writes: dict[str, list[float]] = {}
        self.made: Counter[str] = Counter()

    def write(self, now_s: float) -> None:
        while (series := self.log.due(now_s)) is not None:
            self.put(series, now_s)

    def put(self, series: EventSeries, now_s: float) -> None:
        assert series.is_made == (series.name in self.found)
        self.made[series.reason] += not series.is_made
        self.found[series.name] = series
        self.writes.setdefault(series.name, []).append(now_s)
        self.log.written(series, now_s)


@given(NOTES)
def test_each_thing_is_counted_once_and_the_writes_are_bounded_by_the_time(
    notes: list[tuple[float, str, int]],
) -> None:
    api, now_s = Api(), 0.0
    noted: Counter[str] = Counter()
    for pause_s, reason, number in notes:
        now_s += pause_s
        noted[reason] += 1
        api.log.note(reason, f"{number}", is_warning=True, unix_s=1e9 + now_s, now_s=now_s)
        api.write(now_s)
    for reason in noted:
        assert api.made[reason] <= SERIES_AT_ONCE + now_s / SERIES_PAUSE_S
    for times in api.writes.values():
        assert all(after - before >= REWRITE_S - 1e-6 for before, after in pairwise(times))
    api.write(now_s + REWRITE_S)
    told: Counter[str] = Counter()
    for series in api.found.values():
        told[series.reason] += series.count
    assert told == noted
    assert api.log.rest() == []


@given(NOTES)
def test_the_same_thing_has_one_event(notes: list[tuple[float, str, int]]) -> None:
    api, now_s = Api(), 0.0
    for pause_s, reason, _ in notes:
        now_s += pause_s
        api.log.note(reason, "always this", is_warning=False, unix_s=now_s, now_s=now_s)
        api.write(now_s)
    assert set(api.made.values()) <= {1}


def test_the_log_does_not_grow_without_a_limit() -> None:
    log = EventLog("0f8fa", "1")
    for number in range(1000):
        now_s = number * SERIES_PAUSE_S
        log.note("A", f"{number}", is_warning=False, unix_s=now_s, now_s=now_s)
    assert len(log.rest()) == job_events.SERIES_MAX
    assert len(log._series) == job_events.SERIES_MAX
