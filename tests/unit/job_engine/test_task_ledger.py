"""The ledger of a round, case by case; tests/property/test_task_ledger.py tries all the others."""

import numpy as np
import pytest

from backstay.errors import ConfigError, InvalidRequest
from backstay.job_engine.ledger import NOBODY, TaskLedger
from backstay.job_engine.task_store import TaskBits
from backstay.job_engine.values import (
    DeadLetter,
    Failure,
    Grant,
    LeasedTask,
    LedgerLimits,
    WorkerRecord,
)
from backstay.schedule.rounds import RoundId, RoundKind
from tests.ledger_changes import take_changes

ROUND = RoundId(RoundKind.TRAINING, 1)
LIMITS = LedgerLimits(lease_ttl_s=2.0, max_retries=1, max_without_progress=4, straggler_min_s=30.0)
WRONG = Failure("bad label", "w-0", (4,))


def ledger(size: int, limits: LedgerLimits = LIMITS) -> TaskLedger:
    return TaskLedger(ROUND, size, None, limits, keeps_streams=True)


def given(to: TaskLedger, worker: str, now_s: float = 0.0) -> Grant:
    grant = to.assign(worker, now_s)
    assert grant is not None
    return grant


def test_the_next_attempt_begins_where_the_last_one_was_acknowledged() -> None:
    book = ledger(1)
    first = given(book, "w-0")
    book.renew("w-0", [LeasedTask(0, first.attempt, 3)], 1.0)
    book.drop_worker("w-0")
    assert given(book, "w-1", 1.5).first_batch == 3


def test_a_give_back_counts_what_was_acknowledged() -> None:
    book = ledger(1)
    first = given(book, "w-0")
    assert book.give_back("w-0", 0, first.attempt, 2)
    second = given(book, "w-1")
    assert second.first_batch == 2
    assert book.complete("w-1", 0, second.attempt, 1.0, batches=10)
    assert book.batches == 10


def test_a_failing_task_is_dead_lettered_and_the_rest_goes_on() -> None:
    book = ledger(2)
    for expected in ("retry", "dead_lettered"):
        grant = given(book, "w-0")
        while grant.task != 0:
            assert book.complete("w-0", grant.task, grant.attempt, 0.0)
            grant = given(book, "w-0")
        assert book.fail("w-0", 0, grant.attempt, WRONG, acknowledged=1) == expected
    assert book.is_over
    assert book.dead_letters == {0: DeadLetter(0, 2, WRONG, 1)}
    assert book.retry_dead_letters([0, 1]) == [0]
    assert given(book, "w-1").first_batch == 1
    assert take_changes(book).dead_letters == {0: None}


def test_a_failed_task_is_tried_after_the_others() -> None:
    book = ledger(3)
    book.fail("w-0", 0, given(book, "w-0").attempt, WRONG)
    assert [given(book, "w-0").task for _ in range(3)] == [1, 2, 0]


def growing(size: int) -> TaskLedger:
    return TaskLedger(
        ROUND,
        size,
        None,
        LIMITS,
        sizes=np.full(size, 2, np.uint32),
        keeps_streams=True,
        is_sealed=False,
    )


def test_a_round_that_grows_is_over_when_it_is_sealed_and_all_is_done() -> None:
    book = growing(0)
    assert (book.counts.total, book.is_over) == (0, False)
    assert book.assign("w-0", 0.0) is None
    book.grow(2, np.array([2, 3], np.uint32))
    for _ in range(2):
        grant = given(book, "w-0")
        assert book.complete("w-0", grant.task, grant.attempt, 0.0, batches=2 + grant.task)
    assert (book.batches, book.is_over) == (5, False)
    book.grow(3, np.array([2], np.uint32))
    assert book.counts.todo == 1
    book.seal()
    assert (book.batches, book.is_over) == (5, False)
    grant = given(book, "w-0")
    assert book.complete("w-0", grant.task, grant.attempt, 0.0, batches=1)
    assert (book.batches, book.is_over) == (6, True)
    # The third one had another number of batches than its records give.
    assert take_changes(book).done == {0: "07 2:1"}


def test_a_round_that_is_sealed_has_no_more_tasks() -> None:
    for book, size in ((ledger(2), 3), (growing(2), 1)):
        with pytest.raises(InvalidRequest, match=f"{size} tasks instead of 2"):
            book.grow(size, None)
    with pytest.raises(InvalidRequest, match="no order but its numbers"):
        TaskLedger(ROUND, 2, 7, LIMITS, is_sealed=False)


def test_a_failed_task_does_not_wait_for_all_that_comes_later() -> None:
    book = growing(2)
    book.fail("w-0", 0, given(book, "w-0").attempt, WRONG)
    book.grow(4, np.array([2, 2], np.uint32))
    assert [given(book, "w-0").task for _ in range(4)] == [1, 0, 2, 3]


def test_a_round_that_has_grown_goes_on_from_its_journal() -> None:
    book = growing(1)
    book.grow(10, np.full(9, 2, np.uint32))
    for _ in range(9):
        grant = given(book, "w-0")
        assert book.complete("w-0", grant.task, grant.attempt, 0.0, batches=2)
        book.closed([grant.task])
    again = TaskLedger(
        ROUND, 10, None, LIMITS, done=TaskBits.from_chunks(10, book.done.chunks()), is_sealed=False
    )
    assert given(again, "w-1").task == 9
    again.grow(11, None)
    assert given(again, "w-1").task == 10


def test_a_task_whose_worker_died_is_tried_before_the_others() -> None:
    book = ledger(3)
    given(book, "w-0")
    book.drop_worker("w-0")
    assert [given(book, "w-1").task for _ in range(3)] == [0, 1, 2]


def test_a_task_that_kills_its_workers_lets_the_others_go_first_and_is_dead_lettered() -> None:
    book = ledger(2)
    order = []
    for number in range(5):
        grant = given(book, f"w-{number}")
        order.append(grant.task)
        if grant.task == 1:
            book.complete(f"w-{number}", 1, grant.attempt, 0.0)
        else:
            book.drop_worker(f"w-{number}")
    assert order == [0, 0, 0, 1, 0]
    given(book, "w-5")
    book.drop_worker("w-5")
    assert book.is_over
    assert "5 attempts in a row ended without a result" in book.dead_letters[0].failure.error
    assert book.dead_letters[0].failures == 0


def test_a_task_that_kills_its_workers_does_not_take_those_asked_ahead_with_it() -> None:
    book = ledger(3)
    for number in range(20):
        worker = f"w-{number}"
        for task, attempt in [given(book, worker)[:2] for _ in range(3 - len(book.done))]:
            if task == 0:
                book.drop_worker(worker)
                break
            assert book.complete(worker, task, attempt, 0.0)
        if book.is_over:
            break
    assert book.dead_letters.keys() == {0}
    assert len(book.done) == 2


def test_a_task_whose_workers_hang_is_dead_lettered_when_the_last_lease_runs_out() -> None:
    book = ledger(1)
    for number in range(5):
        assert not book.is_over
        given(book, f"w-{number}", 10.0 * number)
        assert book.expire(10.0 * number + 2.0) == [0]
    assert "5 attempts in a row" in book.dead_letters[0].failure.error
    assert book.is_over
    assert take_changes(book).dead_letters.keys() == {0}


def test_a_task_that_gets_on_is_not_dead_lettered_however_often_its_worker_dies() -> None:
    book = ledger(1)
    for number in range(20):
        grant = given(book, f"w-{number}")
        book.renew(f"w-{number}", [LeasedTask(0, grant.attempt, number + 1)], 0.0)
        book.drop_worker(f"w-{number}")
    assert not book.dead_letters


def test_a_lease_that_ran_out_is_had_back_unless_another_worker_has_the_task() -> None:
    book = ledger(1)
    grant = given(book, "w-0")
    leased = LeasedTask(0, grant.attempt, 0)
    assert book.next_expiry() == 2.0
    assert book.expire(1.9) == []
    assert book.expire(2.0) == [0]
    assert book.counts.todo == 1
    assert book.renew("w-0", [leased], 2.5) == []
    assert book.counts.doing == 1
    assert book.expire(4.5) == [0]
    assert given(book, "w-1", 4.6).task == 0
    assert book.renew("w-0", [leased], 4.7) == [leased]
    assert book.complete("w-0", 0, grant.attempt, 4.8) is False


def test_renewals_keep_a_lease() -> None:
    book = ledger(1)
    grant = given(book, "w-0")
    renewals_s = [tenth / 10 for tenth in range(0, 100, 15)]
    assert len(renewals_s) == 7
    for now_s in renewals_s:
        assert book.expire(now_s) == []
        assert book.renew("w-0", [LeasedTask(0, grant.attempt, 0)], now_s) == []
    # Without another one it lasts as long as the first did.
    assert book.expire(10.9) == []
    assert book.expire(11.0) == [0]


def test_a_slow_task_is_given_to_a_second_worker_and_the_first_to_finish_wins() -> None:
    book = ledger(4)
    slow = given(book, "w-0")
    for number in range(1, 4):
        done = given(book, "w-1", number)
        assert book.complete("w-1", done.task, done.attempt, number + 1.0)
    # Nothing is left to do, and others took 1 s: 3 s are slow. No worker has the speculative
    # attempt of itself.
    assert book.assign("w-1", 2.9) is None
    assert book.assign("w-0", 4.0) is None
    speculative = given(book, "w-1", 4.0)
    assert speculative == Grant(0, slow.attempt + 4, 0, True)
    assert book.assign("w-2", 9.0) is None
    assert book.complete("w-1", 0, speculative.attempt, 5.0)
    assert book.renew("w-0", [LeasedTask(0, slow.attempt, 1)], 5.0) == [
        LeasedTask(0, slow.attempt, 1)
    ]
    assert not book.complete("w-0", 0, slow.attempt, 5.0)
    assert book.is_over


def test_while_tasks_wait_only_what_is_very_slow_is_given_twice() -> None:
    book = ledger(9, LedgerLimits(lease_ttl_s=100.0, straggler_min_s=30.0, straggler_factor=3.0))
    given(book, "w-0")
    done = given(book, "w-1")
    book.complete("w-1", done.task, done.attempt, 12.0)
    assert not given(book, "w-1", 35.9).speculative
    assert given(book, "w-1", 36.0).speculative


def test_while_another_round_has_tasks_only_what_is_very_slow_is_given_twice() -> None:
    book = ledger(2, LedgerLimits(lease_ttl_s=100.0, straggler_min_s=30.0, straggler_factor=3.0))
    given(book, "w-0")
    done = given(book, "w-1")
    book.complete("w-1", done.task, done.attempt, 2.0)
    assert book.assign("w-1", 29.9, is_idle=False) is None
    # An evaluation that hangs does not wait until the pass is over.
    grant = book.assign("w-1", 30.0, is_idle=False)
    assert grant is not None
    assert grant.speculative


def test_a_speculative_attempt_that_is_left_alone_may_be_speculated_on_again() -> None:
    book = ledger(1, LedgerLimits(lease_ttl_s=100.0, straggler_min_s=10.0))
    first = given(book, "w-0")
    assert given(book, "w-1", 10.0).speculative
    book.drop_worker("w-1")
    assert book.counts.doing == 1
    assert given(book, "w-2", 11.0).speculative
    assert book.fail("w-0", 0, first.attempt, WRONG) == "retry"
    assert book.counts.doing == 1


def test_dead_lettering_a_task_ends_what_is_left_of_its_leases() -> None:
    book = ledger(1, LedgerLimits(lease_ttl_s=5.0, straggler_min_s=1.0, max_retries=0))
    first = given(book, "w-0")
    speculative = given(book, "w-1", 4.0)
    assert book.expire(5.0) == []
    assert book.counts.doing == 1
    assert book.fail("w-1", 0, speculative.attempt, WRONG) == "dead_lettered"
    assert book.renew("w-0", [LeasedTask(0, first.attempt, 0)], 6.0)
    assert not book.complete("w-0", 0, first.attempt, 6.0)
    assert book.counts == (0, 0, 0, 1)


def test_a_worker_gets_no_more_leases_than_it_may_have() -> None:
    book = ledger(5, LedgerLimits(leases_per_worker_max=2))
    given(book, "w-0")
    given(book, "w-0")
    assert book.assign("w-0", 0.0) is None
    assert book.assign("w-1", 0.0) is not None


def test_complete_told_again_is_answered_in_the_same_way() -> None:
    book = ledger(2)
    grant = given(book, "w-0")
    for _ in range(2):
        assert book.complete("w-0", grant.task, grant.attempt, 1.0, batches=4)
    assert book.batches == 4
    assert book.counts.done == 1
    # The worker closes its stream before the answer comes.
    book.closed([grant.task])
    assert book.complete("w-0", grant.task, grant.attempt, 1.0, batches=4)


def test_what_was_never_given_is_refused() -> None:
    book = ledger(2)
    attempt = given(book, "w-0").attempt
    with pytest.raises(InvalidRequest, match=r"training-1: .* task 2 of 2"):
        book.complete("w-0", 2, attempt, 0.0)
    with pytest.raises(InvalidRequest, match="was never given"):
        book.fail("w-0", 0, attempt + 1, WRONG)
    assert book.counts == (1, 1, 0, 0)


def test_streams_of_a_lost_worker_are_told_to_others_until_they_are_closed() -> None:
    book = ledger(3)
    for _ in range(3):
        grant = given(book, "w-0")
        book.complete("w-0", grant.task, grant.attempt, 0.0)
    book.closed([1])
    assert book.streams_to_close("w-1") == []
    book.drop_worker("w-0")
    assert book.streams_to_close("w-1", most=1) == [0]
    assert book.streams_to_close("w-2", most=5) == [2]
    assert book.streams_to_close("w-1") == [0]
    book.closed([0])
    assert book.streams_to_close("w-1") == []
    assert book.open_streams == 1
    assert take_changes(book).workers.keys() == {"w-0", "w-1", "w-2", NOBODY}


def test_a_round_cut_short_gives_nothing_out_and_has_its_streams_closed() -> None:
    book = ledger(4)
    leased, back, done = (given(book, f"w-{number}") for number in range(3))
    book.give_back("w-1", back.task, back.attempt, 1)
    book.complete("w-2", done.task, done.attempt, 0.0)
    book.cut_short()
    assert book.is_over
    assert book.assign("w-0", 0.0) is None
    assert book.renew("w-0", [LeasedTask(leased.task, leased.attempt, 0)], 0.0)
    assert not book.complete("w-0", leased.task, leased.attempt, 0.0)
    assert book.streams_to_close("w-9") == [leased.task, back.task]
    assert book.counts == (3, 0, 1, 0)


def test_a_task_whose_stream_somebody_is_to_close_is_done_though_its_bit_was_not_written() -> None:
    # The record of w-0 went out in an earlier transaction than the bitmap; then the job master
    # died.
    book = ledger(2)
    book.adopt_worker("w-1", WorkerRecord(leased=(LeasedTask(1, 8, 0),)), 0.0)
    book.adopt_worker("w-0", WorkerRecord(to_close=((1, 7),)), 0.0)
    assert book.counts == (1, 0, 1, 0)
    assert take_changes(book).done == {0: "02"}
    assert book.complete("w-0", 1, 7, 0.0), "it is told again what it was not told before"
    assert not book.complete("w-1", 1, 8, 0.0)
    assert given(book, "w-2").task == 0
    # A round that was cut short closes streams of tasks that were never done.
    cut = ledger(1)
    cut.adopt_worker(NOBODY, WorkerRecord(to_close=((0, 0),)), 0.0)
    assert cut.counts == (1, 0, 0, 0)


def test_no_attempt_whose_stream_is_to_be_closed_is_given_again() -> None:
    book = ledger(2)
    book.adopt_worker("w-0", WorkerRecord(to_close=((0, 7),)), 0.0)
    assert given(book, "w-1").attempt == 8


def test_a_new_master_knows_what_was_done_and_held() -> None:
    book = ledger(3)
    done, leased = given(book, "w-0"), given(book, "w-1")
    book.complete("w-0", done.task, done.attempt, 0.0)
    changes = take_changes(book)
    assert changes.done == {0: "01"}
    assert not take_changes(book)

    after = TaskLedger(
        ROUND,
        3,
        None,
        LIMITS,
        first_attempt=2_000,
        done=TaskBits.from_chunks(3, changes.done),
        keeps_streams=True,
    )
    for worker, record in changes.workers.items():
        after.adopt_worker(worker, WorkerRecord.from_json(record.to_json()), 50.0)
    assert after.open_streams == 1
    assert given(after, "w-2", 50.0) == Grant(2, 2_000, 0, False)
    assert after.renew("w-1", [LeasedTask(leased.task, leased.attempt, 0)], 51.0) == []
    assert after.complete("w-1", leased.task, leased.attempt, 52.0)
    # The answer to the first one's call had been lost.
    assert after.complete("w-0", done.task, done.attempt, 52.0)


def test_a_journal_of_other_data_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="4 tasks in the journal, 3 in the data"):
        TaskLedger(ROUND, 3, None, LIMITS, done=TaskBits(4))
    with pytest.raises(InvalidRequest, match="dead-lettered task 3 of 3"):
        TaskLedger(ROUND, 3, None, LIMITS, dead_letters=[DeadLetter(3, 1, WRONG, 0)])
    with pytest.raises(InvalidRequest, match="task 9 of 3"):
        ledger(3).adopt("w-0", LeasedTask(9, 1, 0), 0.0)
    with pytest.raises(InvalidRequest, match="stream of task 9 of 3"):
        ledger(3).adopt_worker("w-0", WorkerRecord((), ((9, 1),)), 0.0)


def test_what_is_long_is_cut() -> None:
    failure = Failure("x" * 9999, "w-0", tuple(range(999)))
    assert (len(failure.error), len(failure.records)) == (4096, 100)


def test_records_come_back_from_their_texts() -> None:
    dead_letter = DeadLetter(3, 2, WRONG, 7)
    assert DeadLetter.from_json(dead_letter.to_json()) == dead_letter
    record = WorkerRecord((LeasedTask(1, 2, 3),), ((4, 5),))
    assert WorkerRecord.from_json(record.to_json()) == record
    assert not WorkerRecord()
    for text in ('{"leased":[[1,2]],"to_close":[]}', '{"leased":[],"to_close":[["a",1]]}', "[]"):
        with pytest.raises(InvalidRequest, match="worker's leases"):
            WorkerRecord.from_json(text)


@pytest.mark.parametrize(
    "limits", [{"lease_ttl_s": 0}, {"straggler_factor": 0.5}, {"max_without_progress": 0}]
)
def test_limits_are_checked(limits: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(limits))):
        LedgerLimits(**limits)  # type: ignore[arg-type]


def test_a_withdrawn_lease_is_not_renewed_and_its_task_goes_to_another_worker() -> None:
    book = ledger(1)
    grant = book.assign("w1", 0.0)
    assert grant is not None
    (lease,) = book.leases
    assert book.withdraw(lease, "w1 ended no step for 20 s")
    assert not book.withdraw(lease, "it hangs still")
    leased = LeasedTask(grant.task, grant.attempt, 0)
    assert book.renew("w1", [leased], 1.0) == [leased]
    assert book.why_revoked("w1", *leased[:2]) == "w1 ended no step for 20 s"
    assert book.expire(2.0) == [grant.task]
    other = book.assign("w2", 2.0)
    assert other is not None
    assert not book.withdraw(lease, "it is over"), "another worker has the task"
    assert book.why_revoked("w1", *leased[:2]) == f"w2 has the task now (attempt {other.attempt})"
