"""Each refusal of a worker's call is logged once, with its reason; a crowd floods no log."""

from __future__ import annotations

import logging

import pytest

from backstay.errors import InvalidRequest, JobRefused, TableConflict, WorkerReplaced
from backstay.job_engine.opening import StateIncarnation
from backstay.job_engine.refusals import LINES_PER_MINUTE_MAX, REMEMBERED_MAX, Refusals
from backstay.job_engine.values import Failure, LeasedTask
from tests.unit.job_engine.test_rows import job

LOGGER = "backstay.job_engine.refusals"


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger=LOGGER)
    return caplog


def of_refusals(lines: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    return [(one.levelno, one.getMessage()) for one in lines.records if one.name == LOGGER]


def test_a_refused_process_is_logged_with_the_reason(lines: pytest.LogCaptureFixture) -> None:
    one = job()
    one.join("w1", 5, "here", 1)
    for _ in range(2):
        with pytest.raises(WorkerReplaced):
            one.hear("w1", 6, "here", 2)
    with pytest.raises(InvalidRequest):
        one.join("w2", 0, "here", 1)
    one.declare_tables(["a"], worker="w1")
    with pytest.raises(TableConflict):
        one.declare_tables(["b"], worker="w1")
    one.stop("enough")
    with pytest.raises(JobRefused):
        one.join("w3", 7, "here", 1)
    replaced, nameless, tables, over = of_refusals(lines)
    assert replaced[0] == nameless[0] == tables[0] == logging.WARNING
    assert replaced[1].startswith("worker w1 is refused: another process has joined as worker 'w1'")
    assert nameless[1] == "worker w2 is refused: worker 'w2', instance 0: both must be given"
    assert tables[1].startswith("worker w1 is refused: table 0 of this worker's model is 'b'")
    assert over == (logging.INFO, "worker w3 is refused: job 'job' is stopped: enough")


def test_a_lease_that_is_over_is_logged_with_the_reason(lines: pytest.LogCaptureFixture) -> None:
    one = job()
    one.join("w1", 5, "here", 1)
    one.join("w2", 6, "here", 2)
    given = one.give("w1", 1, None)
    assert given is not None
    round_id, lease = given.round.id, given.lease
    one.drop_worker("w1", "it was lost")
    other = one.give("w2", 1, None)
    assert other is not None
    assert other.lease.task == lease.task
    for _ in range(2):
        assert one.renew("w1", [(round_id, lease)]) == [(round_id, lease)]
    one.complete("w2", round_id, other.lease, batches=1, examples=1)
    assert one.complete("w1", round_id, lease, batches=1, examples=1) == (False, False)
    assert not one.fail("w1", round_id, lease, Failure("no such column", "w1"))
    one.give_back("w1", round_id, lease, "it leaves")
    what = f"training-1 task {lease.task}, attempt {lease.attempt}"
    assert of_refusals(lines) == [
        (
            logging.INFO,
            f"worker w1 is refused: the lease of {what} is over: w2 has the task now "
            f"(attempt {other.lease.attempt})",
        ),
        *(
            (logging.INFO, f"worker w1 is refused: {event} of {what} {does_not}: the task is done")
            for event, does_not in (
                ("the completion", "does not count"),
                ("the failure", "does not count"),
                ("the return", "does not count"),
            )
        ),
    ]


def test_a_lease_that_was_never_given_is_logged(lines: pytest.LogCaptureFixture) -> None:
    one = job()
    one.join("w1", 5, "here", 1)
    given = one.give("w1", 1, None)
    assert given is not None
    unknown = LeasedTask(10_000, given.lease.attempt, 0)
    assert one.renew("w1", [(given.round.id, unknown)])
    with pytest.raises(InvalidRequest, match="was never given"):
        one.complete("w1", given.round.id, unknown, batches=1, examples=1)
    renewal, completion = of_refusals(lines)
    assert renewal[1].endswith("is over: the round has no such task")
    assert completion[0] == logging.WARNING
    assert completion[1].endswith("was never given")


def test_a_round_or_job_that_is_over_is_the_reason(lines: pytest.LogCaptureFixture) -> None:
    one = job()
    one.join("w1", 5, "here", 1)
    given = one.give("w1", 1, None)
    assert given is not None
    one.stop("enough")
    one.renew("w1", [(given.round.id, given.lease)])
    other_round = given.round.id._replace(number=9)
    assert one.complete("w1", other_round, given.lease, batches=1, examples=1) == (False, False)
    first, second = of_refusals(lines)
    assert first[1].endswith("is over: the job is stopped")
    assert second[1].endswith("does not count: the round is not open")


def test_a_worker_with_other_rows_is_logged_once_however_often_it_asks(
    lines: pytest.LogCaptureFixture,
) -> None:
    one = job()
    one.join("w1", 5, "here", 1)
    for request in range(1, 4):
        assert one.give("w1", request, StateIncarnation(9, 9)) is None
    (line,) = of_refusals(lines)
    assert line == (
        logging.INFO,
        "worker w1 is refused: it pushes to the rows of restore 9, generation 9; the progress of "
        "the job belongs to restore 0, generation 0",
    )


def test_a_crowd_does_not_flood_the_log(lines: pytest.LogCaptureFixture) -> None:
    refusals = Refusals()
    for number in range(2 * LINES_PER_MINUTE_MAX):
        refusals.log(f"w{number}", "the round is over", 0.0)
    refusals.log("w", "there are too many workers", 0.0, logging.WARNING)
    told = of_refusals(lines)
    assert len(told) == LINES_PER_MINUTE_MAX + 2, "the limit, one line that says so, one warning"
    assert "more" in told[-2][1]
    assert told[-1][0] == logging.WARNING
    refusals.log("w-next", "the round is over", 61.0)
    left_out, last = of_refusals(lines)[-2:]
    assert left_out[1] == f"{LINES_PER_MINUTE_MAX} refusals of workers were not logged"
    assert last[1] == "worker w-next is refused: the round is over"


def test_only_so_many_refusals_are_remembered(lines: pytest.LogCaptureFixture) -> None:
    refusals = Refusals()
    now_s = 0.0
    for number in range(REMEMBERED_MAX + 1):
        now_s += 60.0 / LINES_PER_MINUTE_MAX
        refusals.log(f"w{number}", "no", now_s)
    lines.clear()
    refusals.log(f"w{REMEMBERED_MAX}", "no", now_s + 60.0)
    assert of_refusals(lines) == []
    refusals.log("w0", "no", now_s + 60.0)
    assert [text for _, text in of_refusals(lines)] == ["worker w0 is refused: no"]
