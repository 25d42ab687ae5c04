"""The files of a data set: paths, patterns, folders and URLs to names, sizes and open files.

A shard's name is the file's path as the user wrote it (or as its pattern matched), or its URL
without a password: what leads to the same file on every worker. Everything that can go wrong with
storage comes out as ``DataUnavailable`` with that name.

Imports the errors; fsspec and a protocol's package only when a URL asks for them.
"""

from __future__ import annotations

import glob
import io
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from backstay.errors import BackstayError, ConfigError, DataChanged, DataUnavailable

__all__ = ["DataFile", "Entry", "FileSet", "KnownSizes", "OpenFile", "reading", "without_secret"]

ERROR_TEXT_MAX = 500
# Fetched ahead from a remote file; large, because each fetch costs a round trip.
REMOTE_BLOCK_BYTES = 8 * 1024 * 1024
# The extra of this package that brings a protocol's own.
_EXTRAS: Mapping[str, str] = {"s3": "s3", "s3a": "s3"}
_USER_INFO = re.compile(r"(?<=://)[^/@]*@")
_PATTERN = re.compile(r"[*?\[]")


class Entry(NamedTuple):
    """What is in a folder.

    Attributes:
        name: Its last part.
        is_folder: Whether it is a folder.
        changed_s: When it was written, in Unix time; None: the storage does not tell.
    """

    name: str
    is_folder: bool
    changed_s: float | None


@dataclass(frozen=True)
class DataFile:
    """One file: its shard name, and how to get at it (``system`` is fsspec's, None for local)."""

    name: str
    path: str
    system: Any = None

    def size(self) -> int:
        """Return its length in bytes, as it is now.

        Raises:
            DataUnavailable: It is not there, is no file, or cannot be looked at.
        """
        with reading(self.name):
            if self.system is None:
                found = os.stat(self.path)
                # Opening a pipe that lies there would wait for ever.
                if not stat.S_ISREG(found.st_mode):
                    raise FileNotFoundError("it is not a file")
                return found.st_size
            # Drop fsspec's cached listing: others write there too.
            self.system.invalidate_cache()
            return int(self.system.info(self.path)["size"])

    @contextmanager
    def open(self) -> Iterator[OpenFile]:
        """Open it for reading.

        Raises:
            DataUnavailable: It cannot be opened; so does each read.
        """
        file: BinaryIO
        with reading(self.name):
            if self.system is None:
                file = open(self.path, "rb", buffering=0)  # noqa: SIM115
            else:
                file = self.system.open(self.path, "rb", block_size=REMOTE_BLOCK_BYTES)
        with file:
            yield OpenFile(self.name, file)


class OpenFile:
    """A file that is open for reading at any place; ``raw`` is for libraries that want a file."""

    def __init__(self, name: str, raw: BinaryIO) -> None:
        self.name = name
        self.raw = _NamedFile(name, raw)

    def read_at(self, offset: int, size: int) -> bytes:
        """Return the bytes from an offset on: ``size`` of them, fewer only at the end.

        Raises:
            DataUnavailable: They cannot be read.
        """
        if self.raw.tell() != offset:
            self.raw.seek(offset)
        content = self.raw.read(size)
        while 0 < len(content) < size and (more := self.raw.read(size - len(content))):
            content += more
        return content


class _NamedFile(io.RawIOBase):
    """A file whose every error is ``DataUnavailable`` with its name."""

    def __init__(self, name: str, file: BinaryIO) -> None:
        self._name = name
        self._file = file

    def read(self, size: int = -1) -> bytes:
        with reading(self._name):
            return self._file.read(size)

    def readall(self) -> bytes:
        return self.read()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        with reading(self._name):
            return self._file.seek(offset, whence)

    def tell(self) -> int:
        with reading(self._name):
            return self._file.tell()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


class KnownSizes:
    """The sizes that files had when they were first read; a file that has another now is refused.

    Of files that are written to while a job reads them nothing could be said.
    """

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}

    def check(self, file: DataFile) -> int:
        """Return the file's size.

        Raises:
            DataChanged: It had another one before.
            DataUnavailable: It cannot be looked at.
        """
        size = file.size()
        known = self._sizes.setdefault(file.name, size)
        if size != known:
            raise DataChanged(
                f"{file.name}: had {known} bytes when it was first read and has {size} now; files "
                "of a running job must not change. Put the old one back, or begin a new job"
            )
        return size


class FileSet:
    """The files that a list of paths names, in a stable order, each once.

    Args:
        paths: Files, folders (all files below, but for hidden ones and names that begin with
            ``_``), patterns with ``*``, ``?``, ``[..]`` and ``**``, or URLs of any of these.
        storage: Options of fsspec's file system; credentials are best left to the environment.
    """

    def __init__(self, paths: Sequence[str], storage: Mapping[str, Any] | None = None) -> None:
        self._paths = tuple(paths)
        self._storage = dict(storage or {})
        self._systems: dict[str, Any] = {}

    def files(self) -> list[DataFile]:
        """Return the files. What is not there is an error, an empty folder too.

        Raises:
            DataUnavailable: A path leads to nothing, or cannot be reached.
            ConfigError: A URL's protocol is unknown, or its package is missing.
        """
        names: dict[str, None] = {}
        for path in self._paths:
            found = self._remote_names(path) if "://" in path else _local_names(path)
            if not found:
                raise DataUnavailable(f"{without_secret(path)}: {self._why_none(path)}")
            names.update(dict.fromkeys(found))
        return [self.file(name) for name in names]

    def entries(self, folder: str) -> list[Entry]:
        """Return what is in a folder now, sorted by name; of one that is not there: nothing.

        Raises:
            DataUnavailable: It cannot be looked at.
        """
        found = self._remote_entries(folder) if "://" in folder else _local_entries(folder)
        return sorted(found)

    def _remote_entries(self, folder: str) -> list[Entry]:
        system, path = self._system(folder)
        with reading(without_secret(folder)):
            system.invalidate_cache()
            try:
                listed = system.ls(path, detail=True)
            except FileNotFoundError:
                return []
            here = path.rstrip("/")
            return [
                Entry(
                    str(one["name"]).rstrip("/").rpartition("/")[2],
                    one["type"] == "directory",
                    _changed_s(one),
                )
                for one in listed
                # Of a file, and of the mark of a folder, ``ls`` gives the path itself.
                if str(one["name"]).rstrip("/") != here
            ]

    def names_below(self, folder: str) -> list[str]:
        """Return the names of all files below a folder, but for hidden ones, sorted.

        Raises:
            DataUnavailable: It cannot be looked at.
        """
        if "://" not in folder:
            return _local_names(folder) if os.path.isdir(folder) else []
        return self._remote_names(folder)

    def file(self, name: str) -> DataFile:
        """Return the file of a shard's name; it is not opened."""
        if "://" not in name:
            return DataFile(name, name)
        system, path = self._system(name)
        return DataFile(without_secret(name), path, system)

    def _why_none(self, path: str) -> str:
        """Return why a path leads to no file."""
        if "://" in path:
            system, place = self._system(path)
            with reading(without_secret(path)):
                is_folder = not _PATTERN.search(place) and bool(system.isdir(place))
        else:
            is_folder = os.path.isdir(path)
        if is_folder:
            return "the folder is empty, or has only files whose names begin with '.' or '_'"
        return "there is no such file or folder"

    def _remote_names(self, url: str) -> list[str]:
        system, path = self._system(url)
        with reading(without_secret(url)):
            system.invalidate_cache()
            if _PATTERN.search(path):
                found = [str(each) for each in system.glob(path)]
                files = [each for each in found if system.isfile(each)]
            elif system.isfile(path):
                return [without_secret(url)]
            else:
                files = [str(each) for each in system.find(path)]
                files = [each for each in files if not _is_hidden(each, path)]
        # File systems give paths of their own form back; what stands before it is kept.
        whole = url.rstrip("/")
        prefix = whole[: len(whole) - len(path)] if whole.endswith(path) else None
        return [
            without_secret(str(system.unstrip_protocol(each)) if prefix is None else prefix + each)
            for each in sorted(files)
        ]

    def _system(self, url: str) -> tuple[Any, str]:
        """Return the file system and the path there; one file system for all names of a host."""
        host = _host(url)
        protocol = host.partition("://")[0]
        # A shard's name has no password; the path that the user wrote may have one.
        of_user = next((path for path in self._paths if _host(path) == host), url)
        try:
            from fsspec.core import url_to_fs

            if host not in self._systems:
                self._systems[host] = url_to_fs(of_user, **self._storage)[0]
            system = self._systems[host]
            return system, str(system._strip_protocol(url))
        except ImportError as error:
            extra = _EXTRAS.get(protocol)
            install = f"pip install 'backstay[{extra}]'" if extra else str(error)
            raise ConfigError(
                f"{without_secret(url)} needs a package that is missing: {install}"
            ) from error
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{without_secret(url)}: {_safe(error)}") from error
        # Some connect at once, with errors of their own, of no common class.
        except Exception as error:
            raise DataUnavailable(f"{without_secret(url)}: {_safe(error)}") from error


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Turn what storage raises into ``DataUnavailable`` with this name; ours pass.

    Raises:
        DataUnavailable: Anything but an error of this package went wrong in the body.
    """
    try:
        yield
    except BackstayError:
        raise
    # Each protocol's package has errors of its own, of no common class.
    except Exception as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else _safe(error)
        raise DataUnavailable(f"{name}: {reason}") from error


def _local_names(path: str) -> list[str]:
    with reading(path):
        if os.path.isdir(path):
            below = (str(each) for each in Path(path).rglob("*") if each.is_file())
            return sorted(each for each in below if not _is_hidden(each, path))
        # A file may have a bracket in its name.
        if os.path.exists(path):
            return [path]
        return sorted(each for each in glob.glob(path, recursive=True) if os.path.isfile(each))


def _local_entries(folder: str) -> list[Entry]:
    with reading(folder):
        try:
            with os.scandir(folder) as found:
                return [entry for one in found if (entry := _local_entry(one)) is not None]
        except (FileNotFoundError, NotADirectoryError):
            return []


def _local_entry(one: os.DirEntry[str]) -> Entry | None:
    """Return what is there; None: it went meanwhile, or is a link that leads nowhere."""
    try:
        return Entry(one.name, one.is_dir(), one.stat().st_mtime)
    except FileNotFoundError:
        return None


def _changed_s(details: Mapping[str, Any]) -> float | None:
    """Return when something was written, as far as a file system's details tell."""
    for name in ("mtime", "LastModified", "updated", "last_modified", "modified"):
        value = details.get(name)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
    return None


def _is_hidden(path: str, folder: str) -> bool:
    """Whether a part of the path below the folder is a marker or remnant, such as ``_SUCCESS``."""
    below = path[len(folder) :] if path.startswith(folder) else path
    return any(part.startswith((".", "_")) for part in below.strip("/").split("/"))


def _host(url: str) -> str:
    """Return the beginning of a URL up to its path, without a password."""
    protocol, _, rest = without_secret(url).partition("://")
    return f"{protocol}://{rest.partition('/')[0]}"


def without_secret(url: str) -> str:
    """Return a URL without user and password."""
    return _USER_INFO.sub("", url)


def _safe(error: BaseException) -> str:
    """Return the beginning of an error's text without what looks like a URL's password."""
    text = (str(error) or type(error).__name__).partition("\n")[0][:ERROR_TEXT_MAX]
    return without_secret(text)
