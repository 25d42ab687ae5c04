"""What a period takes next, and when it is sealed: from what partitions hold, and from the time."""

from __future__ import annotations

import pytest

from backstay.errors import InvalidRequest
from backstay.job_spec import PeriodSpec
from backstay.schedule.takes import Advanced, Take, advance, part_and_offset, with_takes
from backstay.schedule.taking import (
    PERIOD_TASKS_MAX,
    Lag,
    PartEnds,
    Room,
    Waiting,
    is_sealed,
    lag_of,
    next_takes,
    trouble_of,
)
from backstay.schedule.task_table import TaskRecords, TaskTable

MUCH = 1 << 40
NO_LIMIT = Room(MUCH, None, MUCH)


def takes_of(
    ends: dict[str, PartEnds],
    positions: dict[str, int] | None = None,
    room: Room = NO_LIMIT,
    waiting: dict[str, Waiting] | None = None,
    now_s: float = 100.0,
    per_task: int = 10,
) -> tuple[list[Take], dict[str, Waiting]]:
    return next_takes(
        ends,
        positions or {},
        waiting or {},
        now_s,
        room,
        records_per_task=per_task,
        linger_s=5.0,
    )


def test_whole_tasks_are_taken_and_the_rest_waits() -> None:
    ends = {"a": PartEnds(0, 25), "b": PartEnds(0, 9), "c": PartEnds(0, 20)}
    takes, waiting = takes_of(ends)
    assert takes == [Take("a", 0, 20), Take("c", 0, 20)]
    assert waiting == {"a": Waiting(20, 100.0), "b": Waiting(0, 100.0)}


def test_what_has_waited_becomes_a_short_task() -> None:
    ends = {"a": PartEnds(0, 25), "b": PartEnds(0, 9)}
    waiting = {"a": Waiting(20, 95.0), "b": Waiting(0, 95.5)}
    takes, left = takes_of(ends, {"a": 20}, waiting=waiting)
    assert takes == [Take("a", 20, 5)]
    assert left == {"b": Waiting(0, 95.5)}


def test_records_that_came_with_others_begin_to_wait_anew() -> None:
    waiting = {"a": Waiting(0, 50.0)}
    takes, left = takes_of({"a": PartEnds(0, 12)}, waiting=waiting)
    assert takes == [Take("a", 0, 10)]
    assert left == {"a": Waiting(10, 100.0)}


@pytest.mark.parametrize(
    ("ahead", "counts"),
    [
        (9, {}),
        (10, {"a": 10}),
        (39, {"a": 10, "b": 10, "c": 10}),
        (60, {"a": 40, "b": 10, "c": 10}),
    ],
)
def test_partitions_share_the_room(ahead: int, counts: dict[str, int]) -> None:
    ends = {"a": PartEnds(0, 90), "b": PartEnds(0, 10), "c": PartEnds(0, 10)}
    takes, _ = takes_of(ends, room=Room(ahead, None, MUCH))
    assert {take.part: take.records for take in takes} == counts


def test_the_last_task_of_a_period_is_as_short_as_it_must_be_and_need_not_wait() -> None:
    ends = {"a": PartEnds(0, 90), "b": PartEnds(0, 10)}
    assert takes_of(ends, room=Room(MUCH, 34, MUCH))[0] == [Take("a", 0, 24), Take("b", 0, 10)]
    # There are not so many yet: these wait, and become a task of their own after a while.
    ends = {"a": PartEnds(0, 3)}
    assert takes_of(ends, room=Room(MUCH, 4, MUCH)) == ([], {"a": Waiting(0, 100.0)})
    waiting = {"a": Waiting(0, 95.0)}
    assert takes_of(ends, room=Room(MUCH, 4, MUCH), waiting=waiting)[0] == [Take("a", 0, 3)]


def test_a_short_task_needs_room_too() -> None:
    waiting = {"a": Waiting(0, 0.0)}
    assert takes_of({"a": PartEnds(0, 3)}, room=Room(2, None, MUCH), waiting=waiting)[0] == []
    assert takes_of({"a": PartEnds(0, 3)}, room=Room(9, None, 0), waiting=waiting)[0] == []


def test_dropped_offsets_are_left_out() -> None:
    takes, _ = takes_of({"a": PartEnds(7, 17), "b": PartEnds(5, 5)}, {"a": 2, "b": 1})
    assert takes == [Take("a", 7, 10)]


def test_room_follows_from_the_job_and_what_was_taken() -> None:
    table = with_takes(TaskTable((), (), 10), [Take("a", 0, 20)])
    by_records = PeriodSpec(records=50, ahead_records=40)
    assert Room.of(by_records, table, 15) == Room(25, 30, PERIOD_TASKS_MAX - 2)
    by_time = PeriodSpec(seconds=9.0, ahead_records=10)
    assert Room.of(by_time, table, 15) == Room(0, None, PERIOD_TASKS_MAX - 2)


def test_a_period_is_sealed_when_it_is_full_or_old_and_not_while_it_is_empty() -> None:
    empty = TaskTable((), (), 10)
    table = with_takes(empty, [Take("a", 0, 20)])
    both = PeriodSpec(records=21, seconds=60.0)
    assert not is_sealed(both, empty, 0, 1e9)
    assert not is_sealed(both, table, 1000, 1059.0)
    assert is_sealed(both, table, 1000, 1060.0)
    assert is_sealed(PeriodSpec(records=20), table, 1000, 1000.0)
    # A clock that was set back, and a beginning that is not known, seal nothing.
    assert not is_sealed(both, table, 1000, 1.0)
    assert not is_sealed(both, table, 0, 1e9)
    many = with_takes(TaskTable((), (), 1), [Take("a", 0, PERIOD_TASKS_MAX)])
    assert is_sealed(PeriodSpec(seconds=60.0), many, 1000, 1000.0)


def test_lag_is_what_is_there_and_not_done() -> None:
    ends = {"a": PartEnds(5, 30), "b": PartEnds(4, 4)}
    assert lag_of(ends, {"a": 10, "b": 1}, 7) == Lag(20, 7, 3)
    assert lag_of(ends, {"a": 10, "b": 1}, 7).records == 27


def test_trouble_names_the_partitions() -> None:
    ends = {"a": PartEnds(0, 30), "b": None}
    assert trouble_of({"a": PartEnds(0, 30)}, {"a": 30}) == ""
    assert trouble_of(ends, {"a": 31, "b": 2, "c": 1}) == (
        "b: no broker leads it now; c: no such partition any more; a ends at offset 30, and all "
        "below 31 was taken: was the topic made anew? Nothing is taken there until it is longer"
    )


def test_positions_and_gaps_follow_from_takes() -> None:
    takes = [Take("a", 3, 10), Take("b", 0, 5), Take("a", 15, 1)]
    shards = [(take.name, take.records) for take in takes]
    assert advance({"a": 3}, shards) == Advanced({"a": 16, "b": 5}, 2)
    with pytest.raises(InvalidRequest, match="offset 3 of a was taken before"):
        advance({"a": 4}, shards)


@pytest.mark.parametrize("name", ["a", "@1", "a@", "a@b", "a@-1"])
def test_other_names_are_no_takes(name: str) -> None:
    with pytest.raises(InvalidRequest, match="expected a partition, @ and an offset"):
        part_and_offset(name)
    assert part_and_offset("a/0@12") == ("a/0", 12)


def test_a_table_grows_and_its_tasks_keep_their_numbers() -> None:
    first = with_takes(TaskTable((), (), 10), [Take("a", 0, 25)])
    second = with_takes(first, [Take("b", 7, 10), Take("a", 25, 1)])
    assert [second[task] for task in range(3)] == [first[task] for task in range(3)]
    assert [second[task] for task in range(3, 5)] == [
        TaskRecords("b@7", 0, 10),
        TaskRecords("a@25", 0, 1),
    ]
    assert (len(first), first.records, len(second), second.records) == (3, 25, 5, 36)
    assert second.batches(4).tolist() == [3, 3, 2, 3, 1]
    with pytest.raises(InvalidRequest, match="'a@25' is there twice"):
        with_takes(second, [Take("a", 25, 1)])
