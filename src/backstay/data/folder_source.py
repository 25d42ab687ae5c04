"""Closed folders as data without an end: a source for the job master, a reader for workers.

A part of the source is a file, named as a shard of its reader. A thread counts the records of a
folder once it is closed, because that may read all of it. The job's positions name the folders that
are over. Files that come into such a folder are late: they are reported, and left out.

Imports the readers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from backstay.data.base import BadRecords, Metadata, NoHeader, Reader, Shard
from backstay.data.batch import Column, Record
from backstay.data.closed_folders import ClosedFolders, around
from backstay.data.files import DataFile, FileSet
from backstay.data.source import SourceLook
from backstay.errors import BackstayError, DataError, DataUnavailable, InvalidRequest
from backstay.listing import listed

__all__ = ["FolderReader", "FolderSource", "NamedFiles"]

# What a look waits for a count that has begun.
COUNT_WAIT_S = 0.5
# Folders that are over, the newest ones, which are looked into for late files.
LATE_FOLDERS_MAX = 8
# Folders that a job which begins with the next one knows to be over: as many stay known later on.
START_FOLDERS_MAX = 512
# A reader keeps an index of each file that it has read, so there is a new one after so many.
FILES_READ_MAX = 1000
# Stands among the folders that are over, before all others, so that there is always one.
FIRST_FOLDER = "/"

log = logging.getLogger(__name__)

MakeReader = Callable[[FileSet], Reader]


class NamedFiles(FileSet):
    """Files that are known by name."""

    def __init__(self, of: ClosedFolders, names: Sequence[str]) -> None:
        self._of = of
        self._names = tuple(names)

    def files(self) -> list[DataFile]:
        """Return these files."""
        return [self.file(name) for name in self._names]

    def file(self, name: str) -> DataFile:
        """See ``FileSet``."""
        return self._of.file(name)


class FolderSource:
    """Closed folders, for the job master; a ``Source``.

    Args:
        folders: Finds them.
        make_reader: Returns the reader of some files.
    """

    def __init__(self, folders: ClosedFolders, make_reader: MakeReader) -> None:
        self._folders = folders
        self._make_reader = make_reader
        # It looks at options.
        make_reader(folders)
        self._counter = _Counter(folders, make_reader)
        self._listed_s = 0.0
        # As they were found last: closed folders that are not over, in their order, with files.
        self._files: dict[str, tuple[str, ...]] = {}
        self._has_more = False
        # Why no folder was ever closed; empty: one was.
        self._none_closed = ""
        # Of folders that are over: the files that they had, and late ones, which were told.
        self._had: dict[str, frozenset[str]] = {}
        self._late: dict[str, str] = {}
        # When folders were closed; read by another thread.
        self._closed_s: dict[str, float] = {}

    def start(self) -> dict[str, int]:
        """See ``Source``: nothing is over, or with ``start: latest`` all that is closed now."""
        names = self._folders.names() if self._folders.options.start == "latest" else []
        kept, newest = names[-START_FOLDERS_MAX:], set(names[-LATE_FOLDERS_MAX:])
        # What sorts before all that are kept is old.
        found = {FIRST_FOLDER: 0} if len(kept) == len(names) else {}
        for name in kept:
            files = self._folders.files_in(name) if name in newest else ()
            found[f"{name}/"] = len(files)
        return found

    def look(self, positions: Mapping[str, int]) -> SourceLook:
        """See ``Source``; looks at the storage once in ``look_s``, and on when all are over."""
        over = {part[:-1]: count for part, count in positions.items() if part.endswith("/")}
        # It found as many as it looks at, and these are over: the next ones wait for nothing.
        had_some = bool(self._files)
        for name in [name for name in self._files if name in over]:
            self._had[name] = frozenset(self._files.pop(name))
        goes_on = self._has_more and had_some and not self._files
        now_s = time.monotonic()
        if not self._listed_s or goes_on or now_s - self._listed_s >= self._folders.options.look_s:
            self._list(over)
            self._listed_s = now_s
        self._forget(over)
        # As long as nothing was taken, an option may be wrong; later on it is the file.
        counts, trouble = self._counter.counts(
            self._files, is_first=positions.keys() <= {FIRST_FOLDER}
        )
        folders: dict[str, tuple[str, ...]] = {}
        for name, files in self._files.items():
            if any(file not in counts for file in files):
                # Folders are taken in their order.
                break
            folders[name] = files
        ends = {file: (0, counts[file]) for files in folders.values() for file in files}
        waiting = len(self._files) - len(folders) + self._has_more
        there = {file for files in self._files.values() for file in files}
        gone = [part for part in positions if not part.endswith("/") and part not in there]
        if gone:
            trouble = f"{listed(sorted(gone))}: taken in part, and not in a closed folder any more"
        troubles = filter(None, [trouble, self._none_closed, *self._late.values()])
        return SourceLook(ends, folders, waiting, "; ".join(troubles))

    def _list(self, over: Mapping[str, int]) -> None:
        """Look at the storage: which folders are closed, and what is in them."""
        closed, self._has_more = self._folders.closed(over, self._files)
        has_any = closed or self._has_more or any(over)
        self._none_closed = "" if has_any else self._folders.none_closed()
        before = self._files
        self._files = {one.name: self._folders.files_in(one.name) for one in closed}
        now_s = time.time()
        for name, closed_s in closed:
            self._closed_s.setdefault(name, closed_s or now_s)
            files = set(self._files[name])
            if more := sorted(files - set(before.get(name, files))):
                log.warning("%s: %s came after it was closed, and is taken", name, listed(more))
        newest = sorted(name for name in over if name)[-LATE_FOLDERS_MAX:]
        self._late = {name: text for name in newest if (text := self._late_files(name, over[name]))}

    def _late_files(self, folder: str, count: int) -> str:
        """Return what to say of a folder that is over, given how many files it had."""
        files = self._folders.files_in(folder)
        had = self._had.get(folder)
        late = len(files) - count if had is None else len(set(files) - had)
        if late <= 0:
            return ""
        named = f" ({listed(sorted(set(files) - had))})" if had is not None else ""
        text = f"{folder}: {late} files came after it was taken, and are left out{named}"
        if text != self._late.get(folder):
            log.warning("%s", text)
        return text

    def _forget(self, over: Mapping[str, int]) -> None:
        """Keep what is known of old folders for the newest ones only."""
        for known in (self._had, self._closed_s):
            gone = [name for name in known if name not in over and name not in self._files]
            for name in gone:
                del known[name]
        for name in sorted(self._had)[:-LATE_FOLDERS_MAX]:
            del self._had[name]

    def oldest_s(self, offsets: Mapping[str, int]) -> float | None:
        """See ``Source``: when the folder of the oldest records was closed."""
        closed_s, names = dict(self._closed_s), set(self._files)
        for part in offsets:
            names.update(filter(closed_s.__contains__, around(part)))
        return min((closed_s[name] for name in names if name in closed_s), default=None)

    def commit(self, offsets: Mapping[str, int]) -> None:
        """See ``Source``: folders have no place for that."""
        del offsets

    def close(self) -> None:
        """Have a count end with the file that is read."""
        self._counter.stop()


class _Counter:
    """Counts the records of folders, one folder after the other, in a thread of its own."""

    def __init__(self, folders: ClosedFolders, make_reader: MakeReader) -> None:
        self._folders = folders
        self._make_reader = make_reader
        self._counts: dict[str, int] = {}
        self._error: BackstayError | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def counts(
        self, wanted: Mapping[str, Sequence[str]], *, is_first: bool
    ) -> tuple[dict[str, int], str]:
        """Return what is known of files of folders; those that are not are counted meanwhile.

        Args:
            wanted: Folders with their files.
            is_first: Whether no file was taken yet.

        Returns:
            The records of files, and why one of the others could not be counted; it is tried again.

        Raises:
            ConfigError: An option does not fit the first ones.
        """
        self._ended(0)
        if self._thread is None:
            self._counts = {
                file: self._counts[file]
                for files in wanted.values()
                for file in files
                if file in self._counts
            }
            missing = [file for files in wanted.values() for file in files]
            missing = [file for file in missing if file not in self._counts]
            if missing:
                # So that a process that ends does not wait for it.
                self._thread = threading.Thread(target=self._count, args=(missing,), daemon=True)
                self._thread.start()
                self._ended(COUNT_WAIT_S)
        is_first = is_first and not self._counts
        if is_first and self._error is not None and not isinstance(self._error, DataError):
            raise self._error
        return dict(self._counts), str(self._error or "")

    def _ended(self, wait_s: float) -> None:
        if self._thread is not None:
            self._thread.join(wait_s)
            if not self._thread.is_alive():
                self._thread = None

    def _count(self, files: Sequence[str]) -> None:
        try:
            for file in files:
                if self._stop.is_set():
                    return
                self._counts[file] = self._count_of(file)
            self._error = None
        except BackstayError as error:
            self._error = error

    def _count_of(self, file: str) -> int:
        reader = self._make_reader(NamedFiles(self._folders, [file]))
        try:
            return sum(shard.records for shard in reader.shards())
        except NoHeader:
            # Whoever writes folders in parts may have nothing for one of them.
            return 0

    def stop(self) -> None:
        """End with the file that is read."""
        self._stop.set()


class FolderReader:
    """Records of files of closed folders, for workers. From any thread.

    A shard is named as a take: the file, @ and the record it begins with.

    Args:
        folders: Finds them.
        make_reader: Returns the reader of some files.
    """

    def __init__(self, folders: ClosedFolders, make_reader: MakeReader) -> None:
        self._folders = folders
        self._make_reader = make_reader
        # Of any files: it looks at options only.
        self._any = make_reader(folders)
        # Of the first file that is read, so that its columns need no look at folders.
        self._reader: Reader | None = None
        self._read: set[str] = set()
        self._lock = threading.Lock()

    @property
    def metadata(self) -> Metadata:
        """See ``Reader``; opens a file of a closed folder."""
        return (self._reader or self._any).metadata

    def shards(self) -> Iterator[Shard]:
        """See ``Reader``: the files of the first closed folder that has any, if there is one."""
        try:
            found = list(self._any.shards())
        except DataUnavailable:
            if any(map(self._folders.files_in, self._folders.names())):
                raise
            found = []
        yield from (Shard(f"{one.name}@0", one.records) for one in found)

    def read(self, shard: str, start: int, count: int, bad: BadRecords) -> Iterator[Record]:
        """See ``Reader``."""
        file, first = _file_of(shard)
        return self._reader_of(file).read(file, first + start, count, bad)

    def read_columns(
        self, shard: str, start: int, count: int, bad: BadRecords | None = None
    ) -> Mapping[str, Column] | None:
        """See ``Reader``."""
        file, first = _file_of(shard)
        return self._reader_of(file).read_columns(file, first + start, count, bad)

    def _reader_of(self, file: str) -> Reader:
        with self._lock:
            is_new = file not in self._read
            if self._reader is None or (is_new and len(self._read) >= FILES_READ_MAX):
                self._reader = self._make_reader(NamedFiles(self._folders, [file]))
                self._read = set()
            self._read.add(file)
            return self._reader


def _file_of(shard: str) -> tuple[str, int]:
    file, sign, first = shard.rpartition("@")
    if not (file and sign and first.isdecimal()):
        raise InvalidRequest(f"shard {shard!r}: expected FILE@RECORD")
    return file, int(first)
