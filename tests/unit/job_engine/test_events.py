"""What the engine answers workers and launchers, without a service or a store."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from backstay.errors import JobRefused
from backstay.job_engine.events.workers import HANGS_AFTER_MIN_S, HANGS_AFTER_TTLS
from backstay.job_engine.known_workers import FORGET_S
from backstay.job_engine.launch import ExitReason, LauncherReport, WorkerExit
from backstay.job_engine.opening import StateIncarnation
from tests.unit.job_engine.test_rows import LOST, NOON, RESTORED, SPEC, job


def test_a_repeated_request_gets_the_same_task_and_another_one_another() -> None:
    one = job()
    one.join("w1", 5, "here", 1)
    first = one.give("w1", 1, None)
    assert first is not None
    assert one.give("w1", 1, None) == first
    second = one.give("w1", 2, None)
    assert second is not None
    assert second.lease.task != first.lease.task


def test_a_task_is_given_only_if_it_can_be_recorded_and_to_the_same_rows() -> None:
    one = job()
    one.join("w1", 5, "here", 1)
    assert one.give("w1", 1, None, can_record=False) is None
    assert one.give("w1", 2, StateIncarnation(9, 9)) is None
    given = one.give("w1", 3, StateIncarnation(0, 0))
    assert given is not None
    # What was given before it went back with a restore is no answer any more.
    one.follow(RESTORED, None, NOON)
    one.advance()
    assert one.give("w1", 3, None) not in (None, given)


def test_a_worker_that_was_dropped_while_it_waited_gets_no_task() -> None:
    one = job()
    one.join("w1", 5, "here", 1)
    one.drop_worker("w1", "its process has ended")
    assert one.give("w1", 1, None) is None
    assert next(iter(one.rounds.values())).ledger.counts.doing == 0


def test_a_wish_has_a_new_version_only_if_it_is_another_one() -> None:
    one = job()
    first = one.wish()
    assert one.wish() == first
    one.report(LauncherReport((), (WorkerExit(first.workers[0], ExitReason.NODE_LOST),)))
    second = one.wish()
    assert second.version > first.version
    assert second.workers != first.workers


@pytest.mark.parametrize("ttl_ms", [1_000, 10_000, 60_000])
def test_a_worker_that_runs_and_is_silent_is_replaced_however_long_leases_last(
    ttl_ms: int,
) -> None:
    clock = [100.0]
    one = job(lambda: clock[0], replace(SPEC, task_lease_ttl_ms=ttl_ms))
    first = one.wish().workers[0]
    one.join(first, 5, "here", 1)
    # Nobody has launched it, so nobody would replace it.
    one.join("other", 6, "here", 2)
    limit_s = max(HANGS_AFTER_MIN_S, HANGS_AFTER_TTLS * ttl_ms / 1000)
    while clock[0] < 100.0 + limit_s:
        one.expire()
        one.report(LauncherReport((first,)))
        assert first in one.wish().workers
        clock[0] += 1.0
    one.expire()
    one.report(LauncherReport((first,)))
    assert first not in one.wish().workers
    assert one.known.get(first) is None
    clock[0] = 101.0 + max(limit_s, FORGET_S)
    one.expire()
    assert one.known.get("other") is None


def test_an_end_that_is_told_again_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    one = job()
    end = WorkerExit(one.wish().workers[0], ExitReason.NODE_LOST)
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            # So it is while the journal cannot be written.
            one.report(LauncherReport((), (end,)))
    assert caplog.text.count(end.how) == 1


def test_a_job_that_is_over_takes_no_worker_and_no_other_number_of_them() -> None:
    one = job()
    one.rows_are(LOST, NOON)
    assert one.ended is not None
    for event in (
        lambda: one.join("w1", 5, "here", 1),
        lambda: one.scale(1),
        lambda: one.retry_dead_letters([]),
    ):
        with pytest.raises(JobRefused, match="failed"):
            event()


def test_a_job_that_waits_for_its_last_checkpoint_is_unsaved_when_it_is_stopped() -> None:
    one = job()
    one.wait_unsaved("the disk is full")
    one.stop("enough")
    assert one.ended is not None
    assert one.ended[0] == "unsaved"
    assert "the disk is full" in one.ended[1]
