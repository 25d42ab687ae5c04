"""Finds folders that are closed one after the other, and the files in them.

The job names them with a pattern, ``/data/clicks/*/*``: a folder is data once it has a marker. Or
the job names a list, which gets a line for each folder that is whole. The names of folders sort as
they come, as dates and hours do.

Imports the readers' files.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from backstay.data.files import DataFile, Entry, FileSet, without_secret
from backstay.data.options import check_options
from backstay.errors import ConfigError, DataUnavailable

__all__ = [
    "MARKER",
    "ClosedFolder",
    "ClosedFolders",
    "FolderOptions",
    "around",
    "without_folder_options",
]

MARKER = "_SUCCESS"
LOOK_S = 10.0
# Folders that are looked into at once, in their order: closed ones, and all.
CLOSED_MAX = 16
LOOKED_INTO_MAX = 256
LIST_BYTES_MAX = 16 * 1024 * 1024
_PATTERN = re.compile(r"[*?\[]")
_OPTIONS: Mapping[str, type] = {
    "marker": str,
    "done_list": bool,
    "start": str,
    "look_s": object,
}


def without_folder_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are the reader's of the files."""
    return {name: value for name, value in options.items() if name not in _OPTIONS}


class FolderOptions(NamedTuple):
    """How folders are found.

    Attributes:
        marker: Name of the file that closes a folder.
        done_list: Whether the path is that of a list instead.
        start: Where a new job begins: ``earliest``, ``latest``, or a folder's name.
        look_s: Seconds between two looks.
    """

    marker: str = MARKER
    done_list: bool = False
    start: str = "earliest"
    look_s: float = LOOK_S

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> FolderOptions:
        """Read options.

        Raises:
            ConfigError: One is wrong.
        """
        given = {name: value for name, value in options.items() if name in _OPTIONS}
        check_options("folders", given, _OPTIONS)
        found = cls(**given)
        if found.done_list and "marker" in given:
            raise ConfigError("options.marker: is given together with done_list; give one of them")
        if not found.marker or "/" in found.marker:
            raise ConfigError(f"options.marker: is {found.marker!r}; a file's name is expected")
        if not found.start:
            raise ConfigError("options.start: is empty; allowed: earliest, latest, a folder's name")
        look_s: object = found.look_s
        is_number = isinstance(look_s, (int, float)) and not isinstance(look_s, bool)
        if not is_number or not 0.1 <= found.look_s <= 86_400:
            raise ConfigError(f"options.look_s: is {found.look_s!r}; must be 0.1 to 86400")
        return found


class ClosedFolder(NamedTuple):
    """A folder that takes no more files.

    Attributes:
        name: Its path or URL.
        closed_s: When it was closed, in Unix time; None: the storage does not tell.
    """

    name: str
    closed_s: float | None


class ClosedFolders(FileSet):
    """Finds closed folders.

    Args:
        paths: One pattern of folders, or with ``done_list`` one list.
        storage: Options of fsspec's file system.
        options: How folders are found.

    Raises:
        ConfigError: The path is no pattern.
    """

    def __init__(
        self, paths: Sequence[str], storage: Mapping[str, Any], options: FolderOptions
    ) -> None:
        super().__init__(paths, storage)
        self.options = options
        self._looked_to = ""
        if len(paths) != 1:
            raise ConfigError(
                f"paths: {len(paths)} are given; with period name one pattern of folders, or one "
                "done_list"
            )
        path = without_secret(paths[0].rstrip("/"))
        self._path = path
        if options.done_list:
            self._list = path
            self._levels: list[str] = []
            self.root = path.rpartition("/")[0]
            return
        host, sign, rest = path.rpartition("://")
        parts = rest.split("/")
        first = next((n for n, part in enumerate(parts) if _PATTERN.search(part)), len(parts))
        self.root, self._levels = host + sign + "/".join(parts[:first]), parts[first:]
        if not self._levels or "**" in self._levels or not self.root.strip("/"):
            raise ConfigError(
                f"paths: {path}: with period, name the folders with a pattern below a folder, such "
                "as /data/clicks/*/* for a folder for each day with one for each hour in it"
            )

    def closed(
        self, over: Collection[str], known: Collection[str] = ()
    ) -> tuple[list[ClosedFolder], bool]:
        """Return closed folders that are not over, as many as are looked at now.

        Of many folders some are looked into, and others the next time.

        Args:
            over: Names of folders that are over. One that sorts before all of them is an old one.
            known: Those that were returned before; they are among these again.

        Returns:
            These folders in their order, and whether there may be more.

        Raises:
            DataUnavailable: The storage does not answer, or there is no such list.
            ConfigError: A line of the list is wrong.
        """
        floor = min(over, default="")
        if self.options.start not in ("earliest", "latest"):
            floor = max(floor, self._start_name())
        if self.options.done_list:
            listed = [one for one in self._listed() if one.name not in over and one.name >= floor]
            return listed[:CLOSED_MAX], len(listed) > CLOSED_MAX
        names = list(self._matching(floor, over))
        found = self._closed_of(name for name in names if name in known)
        # Behind the folder that was looked into last.
        others = sorted((name <= self._looked_to, name) for name in names if name not in known)
        for number, (_, name) in enumerate(others):
            if number >= LOOKED_INTO_MAX or len(found) >= CLOSED_MAX:
                return sorted(found), True
            found += self._closed_of([name])
            self._looked_to = name
        self._looked_to = ""
        return sorted(found), False

    def _closed_of(self, names: Iterable[str]) -> list[ClosedFolder]:
        """Return those of some folders that are closed."""
        markers = ((name, self._marker_in(name)) for name in names)
        return [ClosedFolder(name, one.changed_s) for name, one in markers if one is not None]

    def names(self) -> list[str]:
        """Return the names of all folders that are closed now, in their order.

        Raises:
            As ``closed`` does.
        """
        return list(self._names())

    def none_closed(self) -> str:
        """Return why there is no closed folder, for people.

        Raises:
            As ``closed`` does.
        """
        start = self.options.start
        floor = "" if start in ("earliest", "latest") else self._start_name()
        from_start = f" from {floor} on" if floor else ""
        if self.options.done_list:
            return f"{self._path} names no folder{from_start} yet"
        first = next(self._matching(floor, ()), None)
        if first is None:
            return f"no folder matches {self._path}{from_start} yet"
        return (
            f"no folder of {self._path}{from_start} has a file {self.options.marker} yet; the "
            f"first one is {first}"
        )

    def _names(self) -> Iterator[str]:
        if self.options.done_list:
            yield from (one.name for one in self._listed())
            return
        for name in self._matching("", ()):
            if self._marker_in(name) is not None:
                yield name

    def _marker_in(self, folder: str) -> Entry | None:
        """Return the file that closes a folder; None: it is open."""
        found = (one for one in self.entries(folder) if one.name == self.options.marker)
        return next((one for one in found if not one.is_folder), None)

    def files_in(self, folder: str) -> tuple[str, ...]:
        """Return the files of a folder, sorted.

        Raises:
            DataUnavailable: It cannot be looked at.
        """
        found = self.names_below(folder)
        return tuple(name for name in found if name.rpartition("/")[2] != self.options.marker)

    def files(self) -> list[DataFile]:
        """Return the files of the first closed folder that has any: all look alike.

        Raises:
            DataUnavailable: No folder is closed yet, or the storage does not answer.
        """
        for name in self._names():
            if found := self.files_in(name):
                return [self.file(file) for file in found]
        raise DataUnavailable(f"{self.root}: no folder with a file in it is closed yet")

    def _start_name(self) -> str:
        """Return the folder that ``options.start`` names."""
        start = self.options.start.strip("/")
        is_whole = "://" in start or self.options.start.startswith("/")
        return self.options.start.rstrip("/") if is_whole else f"{self.root}/{start}"

    def _matching(self, floor: str, over: Collection[str]) -> Iterator[str]:
        """Yield the folders of the pattern that are neither old nor over, in their order."""
        yield from self._below(self.root, self._levels, floor, over)

    def _below(
        self, folder: str, levels: Sequence[str], floor: str, over: Collection[str]
    ) -> Iterator[str]:
        level, rest = levels[0], levels[1:]
        names = [
            f"{folder}/{entry.name}"
            for entry in self.entries(folder)
            if entry.is_folder and _fits(entry.name, level)
        ]
        # With the slash, as the folders below them sort.
        for name in sorted(names, key=lambda name: f"{name}/" if rest else name):
            if rest:
                if f"{name}/" > floor or floor.startswith(f"{name}/"):
                    yield from self._below(name, rest, floor, over)
            elif name >= floor and name not in over:
                yield name

    def _listed(self) -> list[ClosedFolder]:
        """Return the folders of the list, sorted."""
        file = self.file(self._list)
        with file.open() as opened:
            content = opened.read_at(0, LIST_BYTES_MAX + 1)
        if len(content) > LIST_BYTES_MAX:
            raise ConfigError(f"{file.name}: the list has more than {LIST_BYTES_MAX} bytes")
        # A line without its end is still being written.
        lines = content[: content.rfind(b"\n") + 1].decode("utf-8", "replace").splitlines()
        names: set[str] = set()
        for line in lines:
            name = line.partition("\t")[0].strip().rstrip("/")
            if not name or name.startswith("#"):
                continue
            is_whole = "://" in name or name.startswith("/")
            names.add(name if is_whole else f"{self.root}/{name}")
        for name in names:
            if outer := next(filter(names.__contains__, around(name)), ""):
                raise ConfigError(
                    f"{file.name}: {name} lies in {outer}, which is in the list, too: its records "
                    "would count twice"
                )
        return [ClosedFolder(name, None) for name in sorted(names)]


def around(folder: str) -> Iterator[str]:
    """Yield the folders that a file or folder lies in, the innermost first."""
    while "/" in folder:
        folder = folder.rpartition("/")[0]
        yield folder


def _fits(name: str, pattern: str) -> bool:
    """Whether a folder's name is of a pattern; hidden ones are only of one that begins alike."""
    hidden = name[:1] in "._" and name[:1] != pattern[:1]
    return not hidden and fnmatch.fnmatchcase(name, pattern)
