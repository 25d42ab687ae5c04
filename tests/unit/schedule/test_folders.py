"""What a period takes of closed folders, and what follows from that."""

from __future__ import annotations

import pytest

from backstay.errors import InvalidRequest
from backstay.job_spec import PeriodSpec
from backstay.schedule.folders import next_folder_takes
from backstay.schedule.takes import FOLDERS_KEPT, Take, advance, folders_taken, with_takes
from backstay.schedule.taking import PartEnds, Room, is_sealed
from backstay.schedule.task_table import TaskTable

MUCH = 1 << 40
NO_LIMIT = Room(MUCH, None, MUCH)
FOLDERS = {"d/1": {"d/1/a": 25, "d/1/b": 7}, "d/2": {"d/2/a": 12}}
EMPTY = TaskTable((), (), 10)


def takes_of(
    folders: dict[str, dict[str, int]],
    room: Room = NO_LIMIT,
    *,
    positions: dict[str, int] | None = None,
    table: TaskTable = EMPTY,
    left: int | None = None,
) -> list[Take]:
    ends = {file: PartEnds(0, n) for files in folders.values() for file, n in files.items()}
    names = {folder: tuple(files) for folder, files in folders.items()}
    return next_folder_takes(names, ends, positions or {}, room, table, folders_left=left)


def test_folders_are_taken_in_their_order_and_each_ends_with_how_many_files_it_had() -> None:
    assert takes_of(FOLDERS) == [
        *(Take("d/1/a", 0, 25), Take("d/1/b", 0, 7), Take("d/1/", 2, 0)),
        *(Take("d/2/a", 0, 12), Take("d/2/", 1, 0)),
    ]


def test_as_long_as_there_is_room_whole_tasks_are_taken() -> None:
    assert takes_of(FOLDERS, Room(26, None, MUCH)) == [Take("d/1/a", 0, 25)]
    assert takes_of(FOLDERS, Room(24, None, MUCH)) == [Take("d/1/a", 0, 20)]
    assert takes_of(FOLDERS, Room(9, None, MUCH)) == []
    assert takes_of(FOLDERS, Room(MUCH, None, 4), positions={"d/1/a": 20}) == [
        *(Take("d/1/a", 20, 5), Take("d/1/b", 0, 7), Take("d/1/", 2, 0), Take("d/2/a", 0, 12)),
        Take("d/2/", 1, 0),
    ]
    assert takes_of(FOLDERS, Room(MUCH, None, 3))[:2] == [Take("d/1/a", 0, 25)]


def test_only_the_last_task_of_a_period_may_be_short() -> None:
    assert takes_of(FOLDERS, Room(MUCH, 28, MUCH)) == [Take("d/1/a", 0, 25), Take("d/1/b", 0, 3)]
    # What a folder needs is all that the period needs.
    assert takes_of(FOLDERS, Room(MUCH, 32, MUCH))[-1] == Take("d/1/", 2, 0)


def test_a_period_may_be_some_folders() -> None:
    takes = takes_of(FOLDERS, left=1)
    assert takes == [Take("d/1/a", 0, 25), Take("d/1/b", 0, 7), Take("d/1/", 2, 0)]
    table = with_takes(EMPTY, takes)
    assert folders_taken(table) == 1
    assert takes_of({"d/2": FOLDERS["d/2"]}, table=table, left=0) == []
    assert is_sealed(PeriodSpec(folders=1), table, 0, 0.0)
    assert not is_sealed(PeriodSpec(folders=2), table, 0, 0.0)


def test_folders_without_records_before_the_first_record_do_not_make_a_period() -> None:
    folders: dict[str, dict[str, int]] = {"d/0": {}, "d/00": {"d/00/a": 0}, **FOLDERS}
    takes = takes_of(folders, left=1)
    assert takes[:2] == [Take("d/0/", 0, 0), Take("d/00/", 1, 0)]
    assert takes[-1] == Take("d/1/", 2, 0)
    only = with_takes(EMPTY, takes[:2])
    assert (folders_taken(only), len(only)) == (0, 0)
    assert not is_sealed(PeriodSpec(folders=1), only, 0, 0.0)
    # One after it does.
    assert folders_taken(with_takes(EMPTY, [*takes, Take("d/10/", 0, 0)])) == 2


def test_a_folder_that_is_over_stands_for_its_files() -> None:
    takes = [(take.name, take.records) for take in takes_of(FOLDERS, left=1)]
    after = advance({"/": 0, "d/1/a": 0}, takes)
    assert after.positions == {"/": 0, "d/1/": 2}
    assert after.dropped == 0
    assert advance(after.positions, [("d/10/a@0", 3)]).positions["d/10/a"] == 3
    with pytest.raises(InvalidRequest, match="folder d/1/ was taken before"):
        advance(after.positions, [("d/1/@2", 0)])


def test_the_newest_folders_stay_known() -> None:
    takes = [(f"d/{number:06}/@1", 0) for number in range(FOLDERS_KEPT + 3)]
    positions = advance({"/": 0, "d/2": 5}, takes).positions
    assert len(positions) == FOLDERS_KEPT + 1
    assert positions["d/2"] == 5, "a file stays"
    assert min(part for part in positions if part.endswith("/")) == "d/000003/"
