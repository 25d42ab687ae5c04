"""Events of a job: what they say, and when they are written."""

from __future__ import annotations

from typing import Any

import kubernetes_validate

from backstay.job_engine.launch import ExitReason, WorkerExit
from backstay.kubernetes.job_events import (
    MESSAGE_MAX,
    RETRY,
    REWRITE_S,
    SERIES_AT_ONCE,
    EventLog,
    EventSeries,
    event_body,
    event_change,
    of_exit,
)
from backstay.kubernetes.objects import Owner

OWNER = Owner("backstay-census", "0f8fad5b-d9cb-469f-a165-70867728950e")
WHEN = 1_767_225_600.0


def note(log: EventLog, message: str, now_s: float = 0.0, **more: Any) -> None:
    log.note("Scaled", message, is_warning=False, unix_s=WHEN + now_s, now_s=now_s, **more)


def write(log: EventLog, now_s: float = 0.0) -> list[EventSeries]:
    found = []
    while (series := log.due(now_s)) is not None:
        found.append(series)
        log.written(series, now_s)
    return found


def test_an_event_is_one_that_kubernetes_takes_and_is_about_the_owner() -> None:
    log = EventLog("0f8fa", "1")
    note(log, "3 workers wanted, 4 before")
    note(log, "3 workers wanted, 4 before", 5.0)
    (series,) = write(log, 5.0)
    body = event_body(series, OWNER, "team")
    kubernetes_validate.validate(body, kubernetes_validate.latest_version(), strict=True)
    assert body["involvedObject"] == {**OWNER.reference(), "namespace": "team"}
    assert body["metadata"]["name"].startswith("backstay-census.")
    assert (body["reason"], body["type"], body["count"]) == ("Scaled", "Normal", 2)
    assert (body["firstTimestamp"], body["lastTimestamp"]) == (
        "2026-01-01T00:00:00Z",
        "2026-01-01T00:00:05Z",
    )


def test_why_a_worker_ended_is_told_with_its_last_words() -> None:
    words = "x" * MESSAGE_MAX + "\nValueError: no such column"
    reason, text, is_warning = of_exit(WorkerExit("w-3", ExitReason.FAILED, 1, words), "failed")
    assert (reason, is_warning) == ("WorkerFailed", True)
    assert text.startswith("worker w-3 failed: xxx")
    assert text.endswith("ValueError: no such column")
    assert len(text) < MESSAGE_MAX
    told = {of_exit(WorkerExit("w-3", one), "ended")[0] for one in ExitReason}
    assert len(told) == len(ExitReason)
    assert of_exit(WorkerExit("w-3", ExitReason.FINISHED), "ended")[1:] == (
        "worker w-3 ended",
        False,
    )


def test_a_storm_takes_a_few_events_that_are_changed_now_and_then() -> None:
    log = EventLog("0f8fa", "1")
    for number in range(500):
        note(log, f"w-{number}", number / 100)
        write(log, number / 100)
    written = write(log, 5.0 + REWRITE_S)
    assert [(one.count, one.message) for one in written] == [(496, "w-499")]
    assert written[0].is_made
    assert event_change(written[0])["count"] == 496
    assert len(log._series) == SERIES_AT_ONCE


def test_what_is_noted_during_a_write_is_written_later() -> None:
    log = EventLog("0f8fa", "1")
    note(log, "a")
    series = log.due(0.0)
    assert series is not None
    note(log, "a")
    log.written(series, 0.0)
    assert log.due(REWRITE_S - 0.1) is None
    (later,) = write(log, REWRITE_S)
    assert (later.count, later.is_made) == (2, True)


def test_a_write_that_fails_is_repeated_later_and_later() -> None:
    log, now_s, pauses = EventLog("0f8fa", "1"), 0.0, []
    note(log, "a")
    for _ in range(12):
        assert log.due(now_s) is not None
        log.failed(now_s)
        before_s = now_s
        while log.due(now_s) is None:
            now_s += RETRY.first_s / 2
        pauses.append(now_s - before_s)
    assert pauses[:3] == [1.0, 2.0, 4.0]
    assert pauses[-1] == RETRY.longest_s
    assert [one.count for one in write(log, now_s)] == [1]


def test_the_next_job_master_tells_an_end_again_under_the_same_name_and_others_anew() -> None:
    names = []
    for uid, run in (("0f8fa", "1"), ("0f8fa", "2"), ("77abc", "2")):
        log = EventLog(uid, run)
        # What is known of its last words is another thing each time.
        note(log, f"worker w-3 failed: {run}", once="w-3")
        note(log, "3 workers wanted")
        names.append([one.name for one in write(log)])
    assert names[0][0] == names[1][0]
    assert names[0][1] != names[1][1]
    # A job of the same name that was made anew.
    assert names[2][0] != names[0][0]


def test_ends_of_two_workers_and_two_ends_of_one_are_told_apart() -> None:
    log = EventLog("0f8fa", "1")
    for once in ("w-3", "w-4"):
        note(log, "failed", once=once)
    log.note("Lost", "failed", is_warning=True, unix_s=WHEN, now_s=0.0, once="w-3")
    assert [one.count for one in write(log)] == [1, 1, 1]


def test_an_event_that_two_writers_have_written_is_written() -> None:
    log = EventLog("0f8fa", "1")
    note(log, "3 workers wanted, 4 before")
    series = log.due(0.0)
    # At the end the rest is written while the last call may be under way.
    assert series is not None
    assert log.rest() == [series]
    log.written(series, 0.0)
    log.written(series, 0.0)
    assert log.rest() == []
    note(log, "3 workers wanted, 4 before", 20.0)
    (again,) = write(log, 20.0)
    assert again.count == 2
