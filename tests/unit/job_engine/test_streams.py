"""A job over data without an end: what a period takes, its end, its records, and the way back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from backstay.consensus.records.jobs import JobStateRecord
from backstay.errors import InvalidRequest
from backstay.job_engine.values import Failure
from backstay.job_spec import DataSpec, JobSpec
from backstay.pserver.checkpoints.jobs import JOBS_PROGRESS, with_taken
from backstay.schedule.rounds import RoundId
from backstay.schedule.takes import PERIODS_KEPT
from backstay.schedule.taking import PartEnds
from tests.unit.job_engine.stream_jobs import KEYS, StreamJob, stream_spec


def recorded(one: StreamJob) -> JobStateRecord:
    return JobStateRecord.from_json(one.store[KEYS.state])


def taken(one: StreamJob) -> dict[str, str]:
    return {key: text for key, text in one.store.items() if key.startswith(KEYS.all_takes)}


def test_tasks_come_with_their_records_and_a_period_has_as_many_as_the_job_says() -> None:
    one = StreamJob()
    one.look()
    assert one.give() is None
    one.come(9)
    assert one.do() == [("t/0@0", 0, 4), ("t/0@0", 4, 4)]
    assert one.job.schedule.passes_over == 0, "it is not sealed"
    # The record that is left waits for others; four make the period full.
    one.come(8)
    assert one.do() == [("t/0@8", 0, 4)]
    assert one.job.schedule.passes_over == 1
    one.look()
    assert one.do() == [("t/0@12", 0, 4)]
    assert recorded(one).stream is not None
    assert recorded(one).figures["examples"] == 16


def test_nothing_is_given_out_before_it_is_recorded() -> None:
    one = StreamJob()
    one.look()
    one.ends["t/0"] = PartEnds(0, 8)
    planned = one.job.plan_take(one.ends, 100.0)
    assert planned is not None
    assert one.give() is None
    # Asked again meanwhile, it is the same.
    assert one.job.plan_take({"t/0": PartEnds(0, 100)}, 100.0) is planned
    one.open()
    one.job.advance()
    given = one.give()
    assert given is not None, "another job master finds what was recorded"
    assert len(given.round.table) == 2


def test_an_empty_period_is_not_sealed_and_its_time_begins_with_its_first_record() -> None:
    one = StreamJob(stream_spec(period={"seconds": 60.0, "linger_s": 5.0}))
    one.look()
    one.look(1000.0)
    one.come(4)
    assert len(one.do()) == 1
    one.look(59.0)
    assert one.job.schedule.passes_over == 0
    one.open()
    one.look(1.5)
    assert one.job.schedule.passes_over == 1, "a new job master does not begin the time anew"
    one.look(1000.0)
    assert one.job.schedule.passes_over == 1


def test_a_period_with_a_dead_letter_ends_and_its_task_can_be_tried_again_later() -> None:
    one = StreamJob(stream_spec(max_task_retries=0))
    one.look()
    one.come(16)
    given = one.give()
    assert given is not None
    one.job.fail("w1", given.round.id, given.lease, Failure("wrong", "w1"))
    assert len(one.do()) == 2
    assert one.job.schedule.dead_letters == {RoundId.parse("training-1"): 1}
    one.look()
    one.open()
    one.job.advance()
    assert one.job.retry_dead_letters([]) == 1
    assert one.do() == [("t/0@0", 0, 4), ("t/0@12", 0, 4)]
    assert one.job.figures["examples"] == 16
    assert one.job.schedule.passes_over == 1, "the period is over once"
    one.come(8)
    one.do()
    assert one.job.schedule.passes_over == 2


def test_what_the_source_dropped_is_counted_and_said() -> None:
    one = StreamJob()
    one.look()
    one.come(4)
    one.do()
    one.ends["t/0"] = PartEnds(7, 7)
    one.look()
    assert one.job.stream.lag is not None
    assert (one.job.stream.lag.dropped, one.job.stream.dropped) == (3, 0)
    one.come(8)
    assert one.do() == [("t/0@7", 0, 4), ("t/0@7", 4, 4)]
    assert one.job.stream.dropped == 0
    assert recorded(one).figures["dropped_records"] == 3
    one.open()
    assert one.job.figures["dropped_records"] == 3


def test_a_source_that_does_not_answer_is_trouble_and_its_tasks_wait() -> None:
    one = StreamJob()
    one.look()
    one.come(8)
    one.job.note_source("no broker answers")
    assert one.job.trouble["source"] == "no broker answers"
    assert one.give() is None
    one.job.note_source("")
    assert one.give() is not None


@pytest.mark.parametrize(
    ("ends", "trouble"),
    [
        ({"t/0": PartEnds(0, 3)}, "t/0 ends at offset 3, and all below 8 was taken"),
        ({"t/1": PartEnds(0, 0)}, "t/0: no such partition any more"),
        ({"t/0": None}, "t/0: no broker leads it now"),
    ],
)
def test_a_partition_that_is_not_as_it_was_is_trouble(
    ends: dict[str, PartEnds | None], trouble: str
) -> None:
    one = StreamJob()
    one.look()
    one.come(8)
    one.do()
    one.ends = ends
    one.look()
    assert trouble in one.job.trouble["stream"]
    assert one.give() is None
    one.ends = {"t/0": PartEnds(0, 12)}
    one.look()
    assert one.job.trouble["stream"] == ""
    assert one.do() == [("t/0@8", 0, 4)]


def test_damaged_records_count_for_each_period_and_in_all_of_them_once() -> None:
    one = StreamJob(stream_spec(max_bad_records=2))
    one.look()
    one.come(24)
    for number in range(1, 3):
        given = one.give()
        assert given is not None
        assert given.round.id.number == number
        one.done(given, damaged=2)
        assert one.job.ended is None
        one.do(2)
        one.look()
    assert one.job.figures["bad_records"] == 4
    one.open()
    one.look()
    assert one.job.figures["bad_records"] == 4
    one.come(4)
    given = one.give()
    assert given is not None
    one.done(given, damaged=3)
    assert one.job.ended is not None
    assert "3 damaged records in period 3; max_bad_records allows 2 in a period" in one.job.ended[1]


def test_old_periods_are_forgotten_unless_an_audit_asks_for_them() -> None:
    for audit in (False, True):
        one = StreamJob(stream_spec(audit=audit, max_bad_records=9))
        one.look()
        for _ in range(PERIODS_KEPT + 3):
            one.come(12)
            given = one.give()
            assert given is not None
            one.done(given, damaged=1)
            one.do()
        assert one.job.schedule.passes_over == PERIODS_KEPT + 3
        numbers = sorted(int(key.split("/")[-2].split("-")[1]) for key in taken(one))
        damaged = [key for key in one.store if key.startswith(KEYS.all_damaged)]
        first = 1 if audit else 4
        assert numbers == list(range(first, PERIODS_KEPT + 4))
        assert len(damaged) == len(numbers)
        assert one.job.figures["bad_records"] == PERIODS_KEPT + 3


def test_max_steps_ends_the_training_and_the_end_of_training_is_run() -> None:
    one = StreamJob(stream_spec(max_steps=2))
    one.look()
    one.come(20)
    kinds = []
    while (given := one.give()) is not None:
        kinds.append(given.round.id.kind.value)
        one.done(given)
    assert kinds == ["training", "training", "train_end"]
    assert one.job.ended == ("done", "max_steps: 2 steps are done")


def test_a_stopped_job_goes_on_with_what_it_had_taken() -> None:
    one = StreamJob()
    one.look()
    one.come(10)
    one.do(1)
    one.job.stop("enough")
    one.journal.write()
    one.open()
    one.look()
    assert one.do() == [("t/0@0", 4, 4)]


def end_of(one: StreamJob) -> tuple[str, str] | None:
    return one.job.ended


def test_a_job_that_is_to_stop_when_all_is_done_takes_nothing_more() -> None:
    one = StreamJob()
    one.look()
    one.come(9)
    assert one.do(1) == [("t/0@0", 0, 4)]
    given = one.give()
    assert given is not None
    assert one.job.stop_taking("night") == 4
    one.come(30)
    assert one.give() is None
    assert end_of(one) is None
    one.done(given)
    assert end_of(one) == ("stopped", "night")
    # The same command goes on, in the same period.
    one.open()
    one.look(5.0)
    assert recorded(one).stream is not None
    assert one.do() == [("t/0@8", 0, 4)]
    assert end_of(one) is None


def test_a_job_that_is_to_stop_does_so_under_another_job_master_too() -> None:
    one = StreamJob()
    one.look()
    one.come(8)
    one.job.stop_taking("night")
    one.journal.write()
    one.open()
    one.come(30)
    assert one.do() == [("t/0@0", 0, 4), ("t/0@0", 4, 4)]
    assert end_of(one) == ("stopped", "night")


def test_a_job_that_is_to_stop_and_has_nothing_to_do_stops_at_once() -> None:
    one = StreamJob()
    one.look()
    assert one.job.stop_taking("night") == 0
    one.job.advance()
    assert end_of(one) == ("stopped", "night")


def test_what_was_recorded_and_not_given_out_is_done_before_a_job_stops() -> None:
    one = StreamJob()
    one.look()
    one.ends["t/0"] = PartEnds(0, 8)
    planned = one.job.plan_take(one.ends, 100.0)
    assert planned is not None
    one.job.stop_taking("night")
    one.job.advance()
    assert end_of(one) is None
    one.job.take(planned)
    assert len(one.do()) == 2
    assert end_of(one) == ("stopped", "night")


def test_an_evaluation_that_has_begun_comes_before_the_stop() -> None:
    one = StreamJob(stream_spec(validation=DataSpec(paths=("held.csv",))))
    one.look()
    one.come(12)
    one.do(3)
    assert [str(round_id) for round_id in one.job.schedule.open_rounds] == ["evaluation-1"]
    one.job.stop_taking("night")
    one.job.advance()
    assert end_of(one) is None
    given = one.give()
    assert given is not None
    one.done(given)
    (due,) = one.job.advance()
    one.job.evaluated(due, {})
    one.job.advance()
    assert end_of(one) == ("stopped", "night")


def test_a_restore_does_not_change_whether_a_job_is_to_stop() -> None:
    one = StreamJob()
    one.look()
    one.come(8)
    kept = one.kept()
    one.job.stop_taking("night")
    one.journal.write()
    later = one.kept()
    one.restore(kept)
    one.look()
    assert len(one.do()) == 2
    assert end_of(one) == ("stopped", "night")
    one.open()
    one.restore(later)
    one.look()
    assert one.do(1) == [("t/0@0", 0, 4)]
    assert end_of(one) is None


def test_all_below_the_first_record_that_is_not_done_is_done() -> None:
    one = StreamJob()
    one.look()
    one.ends |= {"t/1": PartEnds(3, 7)}
    one.come(9)
    assert one.job.done_to() == {"t/0": 0, "t/1": 3}
    first, second = one.give(), one.give()
    assert first is not None
    assert second is not None
    one.done(second)
    assert one.job.done_to() == {"t/0": 0, "t/1": 3}, "one before it is not done"
    one.done(first)
    assert one.job.done_to() == {"t/0": 8, "t/1": 3}
    assert one.job.behind() == {"t/1": 3, "t/0": 8}
    one.do()
    assert one.job.done_to() == {"t/0": 8, "t/1": 7}
    assert one.job.behind() == {"t/0": 8}
    one.open()
    assert one.job.done_to() == {"t/0": 8, "t/1": 7}


def test_a_dead_letter_holds_nothing_up() -> None:
    one = StreamJob(stream_spec(max_task_retries=0))
    one.look()
    one.come(8)
    given = one.give()
    assert given is not None
    one.job.fail("w1", given.round.id, given.lease, Failure("wrong", "w1"))
    assert one.job.done_to() == {"t/0": 4}


def test_after_a_restore_that_is_what_the_checkpoint_had_done() -> None:
    one = StreamJob()
    one.look()
    one.come(30)
    one.do(1)
    before = one.kept()
    one.do()
    one.look()
    one.do(2)
    one.restore(with_taken(before, one.kept()))
    # Of the second period the job knows what it took.
    assert one.job.done_to() == {"t/0": 4}
    one.look()
    one.do(2)
    assert one.job.done_to() == {"t/0": 12}


# Folders.


def test_a_period_may_be_a_folder() -> None:
    one = StreamJob(stream_spec(period={"folders": 1}))
    one.close_folder("d/1", a=5, b=4)
    one.close_folder("d/2", a=1)
    one.look()
    assert one.do() == [("d/1/a@0", 0, 4), ("d/1/a@0", 4, 1), ("d/1/b@0", 0, 4)]
    assert one.job.schedule.passes_over == 1
    state = recorded(one).stream
    assert state is not None
    assert state.positions == {"/": 0, "d/1/": 2}
    one.look()
    assert one.do() == [("d/2/a@0", 0, 1)]
    assert one.job.schedule.passes_over == 2
    one.look()
    assert one.do() == []


def test_folders_are_behind_until_their_last_record_is_done() -> None:
    one = StreamJob(stream_spec(period={"folders": 9}))
    one.close_folder("d/1", a=5)
    one.look()
    assert one.job.stream.positions == {"/": 0, "d/1/": 1}
    one.look()
    assert one.job.behind() == {"d/1/a": 0}
    assert one.job.stream.lag is not None
    assert one.job.stream.lag.records == 5
    one.do(1)
    assert one.job.behind() == {"d/1/a": 4}
    one.do()
    assert one.job.behind() == {}


def test_rows_are_seen_to_at_the_end_of_a_period_before_the_next_one_begins() -> None:
    one = StreamJob()
    one.job.keep_rows(lambda: 5000.0)
    one.look()
    one.come(24)
    one.do()
    assert one.job.schedule.passes_over == 1
    due = one.job.upkeeps.due
    assert due is not None
    assert due.pass_number == 1
    one.look()
    assert one.give() is None
    one.job.note_upkeep(due, expired=2, changed=True)
    one.look()
    assert one.do() == [("t/0@12", 0, 4), ("t/0@12", 4, 4), ("t/0@12", 8, 4)]


def test_whether_a_job_has_periods_cannot_change_and_their_length_can() -> None:
    spec = stream_spec()
    assert spec.fixed_differences(stream_spec(period={"seconds": 5.0})) == ()
    bounded = type(spec)(name="job", model="model.py", training=spec.training, records_per_task=4)
    assert "period" in spec.fixed_differences(bounded)


def test_the_way_to_the_data_may_change_and_the_data_may_not() -> None:
    """Brokers move, and a job that never ends must go on."""

    def with_options(**options: Any) -> JobSpec:
        training = DataSpec(kind="kafka", paths=("t",), options=options)
        return replace(stream_spec(), training=training)

    spec = with_options(brokers=["a:1"], values="json")
    moved = with_options(brokers=["b:1"], values="json", settings_file="c", group="g", timeout_s=9)
    assert moved.fixed_differences(spec) == ()
    for options in ({"values": "csv"}, {"values": "json", "start": "latest"}):
        other = with_options(brokers=["a:1"], **options)
        assert other.fixed_differences(spec) == ("training",)
    other = replace(spec, training=DataSpec(kind="kafka", paths=("u",)))
    assert other.fixed_differences(spec) == ("training",)
    # Of data with an end, nothing may change.
    ended = replace(spec, period=None)
    moved = replace(with_options(brokers=["b:1"], values="json"), period=None)
    assert moved.fixed_differences(ended) == ("training",)


# Restores.


def test_what_was_taken_while_a_checkpoint_was_written_is_the_same_task_after_a_restore() -> None:
    one = StreamJob()
    one.look()
    one.come(5)
    before = one.kept()
    # A short task, because the record had waited; then the rest of the period, and another one.
    one.look(5.0)
    one.come(12)
    one.look()
    first = one.do()
    one.look()
    one.look(5.0)
    second = one.do()
    assert one.job.schedule.passes_over == 1
    one.restore(with_taken(before, one.kept()))
    one.ends["t/0"] = PartEnds(0, 100)
    one.look()
    again = one.do()
    assert again[: len(first) + len(second)] == [*first, *second]


def test_a_checkpoint_over_too_many_periods_says_that_it_is_inexact() -> None:
    one = StreamJob()
    one.look()
    before = one.kept()
    for number in range(PERIODS_KEPT + 1):
        one.come(12)
        one.do()
        inexact = one_state(with_taken(before, one.kept())).inexact
        assert bool(inexact) == (number >= PERIODS_KEPT), (number, inexact)
    assert "make periods longer" in inexact


def one_state(kept: dict[str, Any]) -> JobStateRecord:
    return JobStateRecord.from_json(kept[JOBS_PROGRESS]["jobs"][KEYS.job]["state"])


def test_a_job_that_goes_back_to_before_its_beginning_begins_where_it_began() -> None:
    one = StreamJob()
    one.ends["t/0"] = PartEnds(3, 3)
    one.look()
    one.come(12)
    one.do()
    one.ends["t/0"] = PartEnds(3, 40)
    one.restore(None)
    one.look()
    assert one.do()[0] == ("t/0@3", 0, 4)


def test_takes_that_cannot_be_read_are_refused() -> None:
    one = StreamJob()
    one.look()
    one.come(8)
    (key,) = taken(one)
    one.store[KEYS.takes("training-1", 1)] = one.store.pop(key)
    with pytest.raises(InvalidRequest, match="takes of training-1: records are missing"):
        one.open()
    one.store[f"{KEYS.all_takes}evaluation-1/000000"] = one.store.pop(KEYS.takes("training-1", 1))
    with pytest.raises(InvalidRequest, match="names no part of a period"):
        one.open()
