"""A job that goes on has the data that it began with, or is refused with the files that differ."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from backstay.errors import DataChanged, JobError
from backstay.job_check.data_marks import (
    BLOCK_BYTES,
    FILE_NAME,
    check_unchanged,
    marks_of,
    write_marks,
)
from backstay.job_spec import DataSpec, JobSpec

LARGE = 5 * BLOCK_BYTES


@pytest.fixture
def data(tmp_path: Path) -> Path:
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.csv").write_text("x\n1\n")
    (data / "b.csv").write_bytes(bytes(LARGE))
    return data


@pytest.fixture
def folder(tmp_path: Path, data: Path) -> Path:
    """The log folder of a job that has begun with the data."""
    folder = tmp_path / "log"
    folder.mkdir()
    write_marks(folder, marks_of(job(data)))
    return folder


def job(data: Path, validation: Path | None = None) -> JobSpec:
    more = DataSpec(paths=(str(validation),)) if validation is not None else None
    training = DataSpec(kind="csv", paths=(str(data),))
    return JobSpec(name="tiny", model="m.py", training=training, validation=more)


def changed(data: Path, folder: Path) -> str:
    """Return what the error says; empty: there is none."""
    try:
        check_unchanged(folder, "tiny", marks_of(job(data)))
    except DataChanged as error:
        return str(error)
    return ""


def test_the_same_files_are_no_change(data: Path, folder: Path) -> None:
    assert changed(data, folder) == ""
    # Copied back, under another time.
    os.utime(data / "a.csv", (1, 1))
    assert changed(data, folder) == ""


@pytest.mark.parametrize("offset", [0, LARGE // 2, LARGE - 1])
def test_other_content_of_the_same_size_is_seen(data: Path, folder: Path, offset: int) -> None:
    with (data / "b.csv").open("r+b") as file:
        file.seek(offset)
        file.write(b"1")
    text = changed(data, folder)
    assert f"{data / 'b.csv'} has other content" in text
    assert "a.csv" not in text
    for part in ("job 'tiny' cannot go on", "Put the files back", "another name", "--fresh"):
        assert part in text


def test_files_that_grew_are_new_or_gone_are_named(data: Path, folder: Path) -> None:
    (data / "a.csv").write_text("x\n1\n2\n")
    (data / "b.csv").rename(data / "c.csv")
    text = changed(data, folder)
    assert f"{data / 'a.csv'} had 4 bytes and has 6" in text
    assert f"{data / 'b.csv'} is gone" in text
    assert f"{data / 'c.csv'} is new" in text


def test_many_changes_are_counted(data: Path, folder: Path) -> None:
    for number in range(9):
        (data / f"new-{number}.csv").write_text("x\n1\n")
    assert "and 4 more." in changed(data, folder)


def test_validation_data_that_came_later_is_no_change(data: Path, folder: Path) -> None:
    marks = marks_of(job(data, validation=data / "a.csv"))
    assert set(marks) == {"training", "validation"}
    check_unchanged(folder, "tiny", marks)


def test_a_job_of_which_nothing_is_kept_goes_on(data: Path, tmp_path: Path) -> None:
    check_unchanged(tmp_path, "tiny", marks_of(job(data)))
    assert not (tmp_path / FILE_NAME).exists()


@pytest.mark.parametrize("text", ["", "[]", '{"training": 3}', '{"training": {"a": 3}}'])
def test_damaged_marks_are_named(data: Path, folder: Path, text: str) -> None:
    (folder / FILE_NAME).write_text(text)
    with pytest.raises((JobError, DataChanged), match=r"data\.json|has changed"):
        check_unchanged(folder, "tiny", marks_of(job(data)))


def test_tables_and_readers_of_the_users_own_have_no_marks(data: Path) -> None:
    spec = JobSpec(
        name="tiny",
        model="m.py",
        training=DataSpec(kind="sql", paths=("clicks",)),
        validation=DataSpec(kind="custom", paths=(str(data),)),
    )
    assert marks_of(spec) == {"training": {}, "validation": {}}
