"""Folders that are closed one after the other, here and behind URLs: found, counted, read once."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from backstay.data import BadRecords, closed_folders
from backstay.data.folder_source import FILES_READ_MAX, FolderReader, FolderSource
from backstay.data.opening import open_reader, open_source
from backstay.data.source import SourceLook
from backstay.errors import ConfigError, DataChanged, DataUnavailable
from backstay.job_spec import DataSpec
from backstay.schedule.folders import next_folder_takes
from backstay.schedule.takes import FOLDERS_KEPT, Take, advance
from backstay.schedule.taking import PartEnds, Room
from backstay.schedule.task_table import TaskTable
from tests.s3 import s3_server
from tests.waiting import wait_until

_numbers = itertools.count()
MUCH = 1 << 40


class Storage:
    """Where folders are: a path or a URL, and how fsspec gets there."""

    def __init__(self, root: str, options: Mapping[str, Any], prefix: str = "") -> None:
        self.root = root
        self.options = dict(options)
        self.system = fsspec.url_to_fs(root, **options)[0]
        self._prefix = prefix

    def write(self, name: str, content: bytes = b"") -> None:
        path = self.system._strip_protocol(f"{self.root}/{name}")
        self.system.makedirs(path.rpartition("/")[0], exist_ok=True)
        self.system.pipe_file(path, content)

    def remove(self, name: str) -> None:
        self.system.rm(self.system._strip_protocol(f"{self.root}/{name}"), recursive=True)

    def folder(self, name: str, *, marker: str = "_SUCCESS", **files: int) -> None:
        """Write a folder with files of so many records, and close it."""
        for file, count in files.items():
            text = "n\n" + "".join(f"{name}/{file}-{number}\n" for number in range(count))
            self.write(f"{name}/{file}.csv", text.encode())
        self.write(f"{name}/{marker}")

    def data(self, pattern: str = "*/*", **options: Any) -> DataSpec:
        storage = {"storage": self.options} if self.options else {}
        paths = (f"{self.root}/{pattern}",)
        return DataSpec(kind="csv", paths=paths, options={"look_s": 0.1, **storage, **options})


@pytest.fixture(params=["local", "memory", pytest.param("s3", marks=pytest.mark.slow)])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    if request.param == "local":
        yield Storage(str(tmp_path / "clicks"), {})
    elif request.param == "memory":
        yield Storage(f"memory://bucket{next(_numbers)}/clicks", {})
    else:
        with s3_server(tmp_path) as options:
            found = Storage("s3://bucket/clicks", options)
            found.system.mkdir("bucket")
            yield found


class Job:
    """What a job does with a source: it takes all, and knows what is over."""

    def __init__(self, data: DataSpec) -> None:
        source, reader = open_source(data), open_reader(data, grows=True)
        assert isinstance(source, FolderSource)
        assert isinstance(reader, FolderReader)
        self.source, self.reader = source, reader
        self.positions = self.source.start()

    def look(self) -> SourceLook:
        """Look once more at the storage, until all that is closed is counted."""
        found: list[SourceLook] = []

        def is_counted() -> bool:
            found[:] = [self.source.look(self.positions)]
            return not found[0].waiting_folders

        # As if ``look_s`` had passed.
        self.source._listed_s = 0.0
        wait_until(is_counted)
        return found[0]

    def take(self) -> list[str]:
        """Take all that is there; returns the records."""
        look = self.look()
        assert look.folders is not None
        ends = {part: PartEnds(*one) for part, one in look.ends.items() if one is not None}
        room, table = Room(MUCH, None, MUCH), TaskTable((), (), 10)
        takes = next_folder_takes(
            look.folders, ends, self.positions, room, table, folders_left=None
        )
        self.positions = advance(self.positions, [(t.name, t.records) for t in takes]).positions
        return [record for take in takes for record in self.records(take)]

    def records(self, take: Take) -> list[str]:
        found = self.reader.read(take.name, 0, take.records, BadRecords(0)) if take.records else ()
        return [record["n"] for record in found]


def names(folder: str, **files: int) -> list[str]:
    return [f"{folder}/{file}-{number}" for file, count in files.items() for number in range(count)]


def test_a_folder_is_taken_once_it_is_closed_and_only_once(storage: Storage) -> None:
    job = Job(storage.data())
    assert job.take() == []
    storage.folder("26/08", a=3, b=2)
    storage.write("26/09/a.csv", b"n\nearly\n")
    storage.write("26/_temporary/a.csv", b"n\nhidden\n")
    storage.write("notes.txt", b"no folder")
    assert job.take() == names("26/08", a=3, b=2)
    assert job.take() == []
    storage.folder("26/09", a=4)
    storage.folder("27/00", a=1, b=0)
    assert job.take() == [*names("26/09", a=4), *names("27/00", a=1)]
    assert [part for part in job.positions if part != "/"] == [
        f"{storage.root}/{name}/" for name in ("26/08", "26/09", "27/00")
    ]
    # One that was open when later ones were closed.
    storage.folder("26/07", a=2)
    assert job.take() == names("26/07", a=2)
    job.source.close()


def test_another_job_master_goes_on_from_the_positions(storage: Storage) -> None:
    storage.folder("26/08", a=3)
    storage.folder("26/09", a=3)
    job = Job(storage.data())
    file = f"{storage.root}/26/08/a.csv"
    job.positions = advance(job.positions, [(f"{file}@0", 2)]).positions
    again = Job(storage.data())
    again.positions = job.positions
    assert again.look().ends[file] == (0, 3)
    assert again.take() == [*names("26/08", a=3)[2:], *names("26/09", a=3)]


def test_files_that_come_late_are_told_and_left_out(
    storage: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    storage.folder("26/08", a=3)
    job = Job(storage.data())
    assert len(job.take()) == 3
    assert job.look().trouble == ""
    storage.write("26/08/late.csv", b"n\nlate\n")
    file = f"{storage.root}/26/08/late.csv"
    told = f"{storage.root}/26/08: 1 files came after it was taken, and are left out"
    assert job.look().trouble == f"{told} ({file})"
    assert job.take() == []
    assert [one.getMessage() for one in caplog.records] == [f"{told} ({file})"], "it is told once"
    # Another job master knows how many there were.
    again = Job(storage.data())
    again.positions = job.positions
    assert again.look().trouble == told
    storage.remove("26/08/late.csv")
    assert again.look().trouble == ""


def test_a_file_that_comes_before_its_folder_is_taken_is_taken_and_told(
    storage: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    storage.folder("26/08", a=3)
    job = Job(storage.data())
    job.look()
    storage.folder("26/08", b=2)
    assert job.take() == names("26/08", a=3, b=2)
    assert "26/08/b.csv came after it was closed, and is taken" in caplog.text


def test_it_is_told_why_no_folder_is_closed(storage: Storage) -> None:
    job = Job(storage.data())
    pattern = f"{storage.root}/*/*"
    assert job.look().trouble == f"no folder matches {pattern} yet"
    storage.write("26/08/a.csv", b"n\n1\n")
    assert job.look().trouble == (
        f"no folder of {pattern} has a file _SUCCESS yet; the first one is {storage.root}/26/08"
    )
    later = Job(storage.data(start="27"))
    assert later.look().trouble == f"no folder matches {pattern} from {storage.root}/27 on yet"
    storage.write("done.txt", b"# folder\n")
    listed = Job(storage.data("done.txt", done_list=True))
    assert listed.look().trouble == f"{storage.root}/done.txt names no folder yet"
    storage.folder("26/08", a=1)
    assert job.take() == ["26/08/a-0"]
    assert job.look().trouble == ""
    assert Job(storage.data(start="latest")).look().trouble == ""


def test_files_that_were_taken_in_part_and_are_gone_are_told(storage: Storage) -> None:
    storage.folder("26/08", a=3, b=1)
    job = Job(storage.data())
    file = f"{storage.root}/26/08/a.csv"
    job.positions = advance(job.positions, [(f"{file}@0", 2)]).positions
    storage.remove("26/08/a.csv")
    assert job.look().trouble == f"{file}: taken in part, and not in a closed folder any more"


@pytest.mark.parametrize("start", ["latest", "26/09", "earliest"])
def test_a_job_begins_where_it_says(storage: Storage, start: str) -> None:
    for hour in ("08", "09", "10"):
        storage.folder(f"26/{hour}", a=1)
    job = Job(storage.data(start=start))
    first = {"latest": 3, "26/09": 1, "earliest": 0}[start]
    assert job.take() == [f"26/{hour}/a-0" for hour in ("08", "09", "10")][first:]
    storage.folder("26/11", a=1)
    assert job.take() == ["26/11/a-0"]
    assert job.look().trouble == ""


def test_a_marker_may_have_another_name(storage: Storage) -> None:
    job = Job(storage.data("*", marker="to.hadoop.done"))
    storage.folder("08", a=1)
    assert job.take() == []
    storage.folder("08", marker="to.hadoop.done", a=1)
    assert job.take() == ["08/a-0"]


def test_a_list_may_say_which_folders_are_closed(storage: Storage) -> None:
    storage.folder("26/08", a=2)
    storage.folder("26/09", a=1)
    storage.write("done.txt", b"# folder\n26/08\t1764115200\n26/0")
    job = Job(storage.data("done.txt", done_list=True))
    assert job.take() == names("26/08", a=2), "a line that is still being written is none"
    whole = f"{storage.root}/26/09"
    storage.write("done.txt", f"# folder\n26/08\t1764115200\n{whole}/\n".encode())
    assert job.take() == names("26/09", a=1)
    storage.write("done.txt", b"26/08\n26\n")
    with pytest.raises(ConfigError, match=r"26/08 lies in .*26, which is in the list, too"):
        job.look()
    storage.remove("done.txt")
    with pytest.raises(DataUnavailable, match=r"done\.txt"):
        job.look()


def test_what_waits_is_as_old_as_its_folder_is_closed(storage: Storage) -> None:
    begun_s = time.time()
    storage.folder("26/08", a=2)
    job = Job(storage.data())
    assert job.source.oldest_s({}) is None
    job.look()
    # Some storages tell whole seconds.
    oldest_s = job.source.oldest_s({})
    assert oldest_s is not None
    assert begun_s - 2 <= oldest_s <= time.time() + 2
    job.take()
    job.look()
    assert job.source.oldest_s({}) is None, "nothing waits"
    assert job.source.oldest_s({f"{storage.root}/26/08/a.csv": 1}) == oldest_s


def test_a_file_that_cannot_be_counted_holds_up_its_folder_and_is_told(tmp_path: Path) -> None:
    for hour, content in (("08", None), ("09", b"no parquet"), ("10", None)):
        folder = tmp_path / hour
        folder.mkdir()
        pq.write_table(pa.table({"n": [hour]}), folder / "a.parquet")
        if content is not None:
            (folder / "b.parquet").write_bytes(content)
        (folder / "_SUCCESS").touch()
    data = DataSpec(kind="parquet", paths=(f"{tmp_path}/*",), options={"look_s": 0.1})
    source = open_source(data)

    def told() -> SourceLook | None:
        look = source.look(source.start())
        return look if look.trouble else None

    look = wait_until(told)
    assert look.folders is not None
    assert list(look.folders) == [f"{tmp_path}/08"]
    assert "09/b.parquet" in look.trouble
    assert look.waiting_folders == 2
    pq.write_table(pa.table({"n": [1, 2]}), tmp_path / "09" / "b.parquet")
    wait_until(lambda: not source.look(source.start()).waiting_folders)
    source.close()


def test_a_file_with_a_wrong_header_does_not_end_a_job_that_goes_on(tmp_path: Path) -> None:
    data = Storage(str(tmp_path), {})
    data.write("26/08/a.csv", b"n,n\n1,2\n")
    data.folder("26/08")
    first = open_source(data.data())
    with pytest.raises(ConfigError, match="more than once in its header"):
        first.look(first.start())
    data.folder("26/07", a=1)
    source = open_source(data.data())
    found: list[SourceLook] = []

    def told() -> bool:
        found[:] = [source.look(source.start())]
        return "more than once" in found[0].trouble

    wait_until(told)
    assert (list(found[0].folders or ()), found[0].waiting_folders) == ([f"{tmp_path}/26/07"], 1)


def test_a_part_without_anything_in_it_holds_up_nothing(storage: Storage) -> None:
    storage.write("26/08/b.csv")
    storage.folder("26/08", a=1)
    storage.write("26/09/a.csv")
    storage.folder("26/09")
    storage.folder("26/10", a=1)
    job = Job(storage.data())
    assert job.take() == ["26/08/a-0", "26/10/a-0"]
    assert job.look().trouble == ""


def test_a_link_that_leads_nowhere_hides_nothing(tmp_path: Path) -> None:
    data = Storage(str(tmp_path), {})
    data.folder("26/08", a=1)
    for place in ("gone", "26/gone", "26/08/gone"):
        (tmp_path / place).symlink_to(tmp_path / "nothing")
    assert Job(data.data()).take() == ["26/08/a-0"]


def test_many_folders_are_looked_at_some_at_a_time(tmp_path: Path) -> None:
    data = Storage(str(tmp_path), {})
    for number in range(40):
        data.folder(f"{number:04}", a=1)
    # Where there are more, the next look does not wait.
    job = Job(data.data("*", look_s=3600.0))
    found: list[str] = []
    while len(found) < 40:
        look = job.source.look(job.positions)
        assert look.folders is not None
        assert len(look.folders) <= 16
        for folder, files in look.folders.items():
            found.append(folder.rpartition("/")[2])
            job.positions = advance(job.positions, [(f"{folder}/@{len(files)}", 0)]).positions
    assert found == [f"{number:04}" for number in range(40)]


def test_folders_that_stay_open_do_not_hide_those_behind_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(closed_folders, "LOOKED_INTO_MAX", 4)
    data = Storage(str(tmp_path), {})
    for number in range(30):
        data.write(f"{number:04}/a.csv", b"n\nopen\n")
    for number in (7, 29):
        data.folder(f"{number:04}", a=1)
    job = Job(data.data("*"))
    found: list[str] = []
    for number in range(30):
        # One look after another, and some of them find nothing.
        job.source._listed_s = 0.0
        look = job.source.look(job.positions)
        assert look.folders is not None
        found += [name for name in look.folders if name not in found]
        if number == 20:
            data.folder("0003", a=1)
    assert [name.rpartition("/")[2] for name in found] == ["0007", "0029", "0003"]
    assert list(job.source.look(job.positions).folders or ()) == sorted(found)


def test_a_folder_that_sorts_before_all_that_are_known_is_an_old_one(tmp_path: Path) -> None:
    data = Storage(str(tmp_path), {})
    job = Job(data.data("*"))
    over = [(f"{tmp_path}/5{number:04}/@1", 0) for number in range(FOLDERS_KEPT)]
    job.positions = advance(job.positions, over).positions
    data.folder("49999", a=1)
    data.folder("60000", a=1)
    assert job.take() == ["60000/a-0"]


def test_a_job_that_begins_behind_many_folders_knows_the_newest(tmp_path: Path) -> None:
    data = Storage(str(tmp_path), {})
    for number in range(FOLDERS_KEPT + 10):
        data.folder(f"5{number:04}", a=1)
    job = Job(data.data("*", start="latest"))
    assert len(job.positions) == FOLDERS_KEPT, "they are in one record of the job"
    data.folder("49999", a=1)
    data.folder("60000", a=1)
    assert job.take() == ["60000/a-0"]
    assert len(job.positions) == FOLDERS_KEPT


def test_the_reader_does_not_keep_all_files_that_it_has_read(tmp_path: Path) -> None:
    data = Storage(str(tmp_path), {})
    data.folder("08", a=2)
    job = Job(data.data("*"))
    assert len(list(job.reader.read(f"{tmp_path}/08/a.csv@0", 0, 1, BadRecords(0)))) == 1
    first = job.reader._reader
    for number in range(FILES_READ_MAX - 1):
        with pytest.raises(DataUnavailable):
            list(job.reader.read(f"{tmp_path}/{number}@0", 0, 1, BadRecords(0)))
    assert job.reader._reader is first
    data.folder("09", a=2)
    read = job.reader.read(f"{tmp_path}/09/a.csv@1", 0, 1, BadRecords(0))
    assert job.reader._reader is not first
    assert [one["n"] for one in read] == ["09/a-1"]
    with pytest.raises(DataChanged):
        list(job.reader.read(f"{tmp_path}/08/a.csv@1", 0, 2, BadRecords(0)))


@pytest.mark.parametrize(
    ("paths", "options", "says"),
    [
        (("/data/clicks",), {}, "name the folders with a pattern"),
        (("/data/**",), {}, "name the folders with a pattern"),
        (("/*",), {}, "name the folders with a pattern"),
        (("/a/*", "/b/*"), {}, "2 are given; with period name one pattern"),
        (("/a/*",), {"marker": "a/b"}, "options.marker: is 'a/b'"),
        (("/a/*",), {"marker": "x", "done_list": True}, "give one of them"),
        (("/a/*",), {"look_s": 0}, "options.look_s: is 0"),
        (("/a/*",), {"start": ""}, "options.start: is empty"),
        (("/a/*",), {"done_list": "yes"}, "options.done_list: is 'yes'; true or false is expected"),
        (("/a/*",), {"markers": "x"}, "no option 'markers'"),
    ],
)
def test_what_cannot_be_is_refused(
    paths: tuple[str, ...], options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        open_reader(DataSpec(kind="csv", paths=paths, options=options), grows=True)
