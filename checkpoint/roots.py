"""Where checkpoints are kept: a folder of this machine, or what an fsspec URL leads to.

Both offer the same few operations on the files of one checkpoint's folder. What goes wrong in
them comes out as ``CheckpointUnavailable`` with the URL, or as FileNotFoundError where a file
is not there, which means something else to each caller. Imports ``backstay.errors`` and the limit
of ``checkpoint.documents``; fsspec and the package of a protocol only when a URL asks for them.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote

from backstay.checkpoint.documents import DOCUMENT_BYTES_MAX
from backstay.errors import CheckpointDamaged, CheckpointUnavailable, ConfigError

__all__ = [
    "LocalRoot",
    "RemoteRoot",
    "Root",
    "open_root",
    "read_document",
    "sha256_of",
    "sync_file",
    "sync_folder",
]

ERROR_TEXT_MAX = 500
COPY_BYTES = 8 * 1024 * 1024
# The extra of this package that brings a protocol's own.
_EXTRAS: Mapping[str, str] = {"s3": "s3", "s3a": "s3"}
_OBJECT_STORES = frozenset({"abfs", "abfss", "az", "gcs", "gs", "s3", "s3a"})
_USER_INFO = re.compile(r"(?<=://)[^/@]*@")


class Root(Protocol):
    """The files of checkpoints: ``folder`` is a checkpoint's id, ``name`` a file in it."""

    url: str

    def folders(self) -> list[str]:
        """Return the names of the folders that are there; none if the root is not."""

    def has(self, folder: str, name: str) -> bool:
        """Return whether there is such a file."""

    def size(self, folder: str, name: str) -> int:
        """Return the length of a file, or raise FileNotFoundError."""

    def read(self, folder: str, name: str) -> bytes:
        """Return the content of a file, or raise FileNotFoundError."""

    def make_folder(self, folder: str) -> None:
        """Make a folder, unless it is there."""

    def write(self, folder: str, name: str, content: bytes) -> None:
        """Write a file: whole and lasting once this returns, or not there at all."""

    def put(self, source: Path, folder: str, name: str) -> None:
        """Copy a file of this machine there; whole and lasting once this returns."""

    def get(self, folder: str, name: str, into: Path) -> Path:
        """Return the path of the file on this machine, copied below ``into`` if need be."""

    def remove(self, folder: str, name: str) -> None:
        """Remove a file, if it is there."""

    def remove_folder(self, folder: str) -> None:
        """Remove a folder with all that is in it, if it is there."""


def open_root(url: str, options: Mapping[str, Any] | None = None) -> LocalRoot | RemoteRoot:
    """Return the root that a path or a URL leads to; nothing is made there yet.

    Args:
        url: A path, ``file://...`` or a URL of any protocol that fsspec knows.
        options: For fsspec's file system; not for a folder of this machine.

    Raises:
        ConfigError: There is no such protocol, or its package is not installed.
    """
    if not url:
        raise ConfigError("the place of checkpoints is empty; give a path or a URL")
    protocol, separator, rest = url.partition("://")
    if not separator:
        return LocalRoot(Path(url))
    if protocol in ("file", "local"):
        if not rest.startswith("/"):
            raise ConfigError(f"{url} is no folder of this machine; file:///path is one")
        return LocalRoot(Path(unquote(rest)))
    return RemoteRoot(url, options or {})


def read_document(root: Root, folder: str, name: str) -> bytes:
    """Return a document of a folder, unless it is longer than any of ours.

    Raises:
        CheckpointDamaged: It is.
        CheckpointUnavailable: It cannot be read.
        FileNotFoundError: It is not there.
    """
    size = root.size(folder, name)
    if size > DOCUMENT_BYTES_MAX:
        raise CheckpointDamaged(f"{folder}/{name}: {size} bytes; at most {DOCUMENT_BYTES_MAX}")
    return root.read(folder, name)


class LocalRoot:
    """A folder of this machine, or one that is mounted here."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.url = str(self.path)

    def path_of(self, folder: str, name: str) -> Path:
        """Return where a file is, or would be."""
        return self.path / folder / name

    def folders(self) -> list[str]:
        """See :class:`Root`."""
        with self._mapped():
            try:
                with os.scandir(self.path) as entries:
                    return [each.name for each in entries if each.is_dir(follow_symlinks=False)]
            except FileNotFoundError:
                return []

    def has(self, folder: str, name: str) -> bool:
        """See :class:`Root`."""
        try:
            return self.size(folder, name) >= 0
        except FileNotFoundError:
            return False

    def size(self, folder: str, name: str) -> int:
        """See :class:`Root`."""
        with self._mapped(reading=True):
            found = self.path_of(folder, name).stat()
            # Opening a pipe that lies there would never return.
            if not stat.S_ISREG(found.st_mode):
                raise FileNotFoundError(f"{self.path_of(folder, name)} is not a file")
            return found.st_size

    def read(self, folder: str, name: str) -> bytes:
        """See :class:`Root`."""
        self.size(folder, name)
        with self._mapped(reading=True):
            return self.path_of(folder, name).read_bytes()

    def make_folder(self, folder: str) -> None:
        """See :class:`Root`."""
        with self._mapped():
            above = next(each for each in self.path.parents if each.is_dir())
            (self.path / folder).mkdir(parents=True, exist_ok=True)
            # The names of all that was made; a root that was there before is one of them.
            made = [self.path, *self.path.parents]
            for each in made[: made.index(above) + 1]:
                sync_folder(each)

    def write(self, folder: str, name: str, content: bytes) -> None:
        """See :class:`Root`."""
        path = self.path_of(folder, name)
        aside = path.with_name(name + ".tmp")
        with self._mapped():
            # What was renamed in the folder before must not be less lasting than this file.
            sync_folder(path.parent)
            aside.write_bytes(content)
            sync_file(aside)
            aside.replace(path)
            try:
                sync_folder(path.parent)
            except OSError:
                # The caller hears that it could not be written, so it must not be there.
                path.unlink()
                raise

    def put(self, source: Path, folder: str, name: str) -> None:
        """See :class:`Root`."""
        path = self.path_of(folder, name)
        aside = path.with_name(name + ".tmp")
        with self._mapped():
            if path.exists() and path.samefile(source):
                return
            with source.open("rb") as reader, aside.open("wb") as writer:
                shutil.copyfileobj(reader, writer, COPY_BYTES)
            sync_file(aside)
            aside.replace(path)
            sync_folder(path.parent)

    def get(self, folder: str, name: str, into: Path) -> Path:
        """See :class:`Root`; the file itself."""
        del into
        self.size(folder, name)
        return self.path_of(folder, name)

    def remove(self, folder: str, name: str) -> None:
        """See :class:`Root`."""
        with self._mapped(), suppress(FileNotFoundError):
            self.path_of(folder, name).unlink()
            sync_folder(self.path / folder)

    def remove_folder(self, folder: str) -> None:
        """See :class:`Root`."""
        with self._mapped(), suppress(FileNotFoundError):
            shutil.rmtree(self.path / folder)

    @contextmanager
    def _mapped(self, *, reading: bool = False) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if reading and isinstance(error, FileNotFoundError):
                raise
            raise CheckpointUnavailable(f"{self.url}: {error}") from error


class RemoteRoot:
    """What a URL leads to: S3, HDFS, GCS and all else that fsspec knows."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        # A password in a URL must not get into messages and logs.
        self.url = _USER_INFO.sub("", url).rstrip("/")
        self._protocol = url.partition("://")[0]
        self._secrets = _USER_INFO.findall(url)
        self._files, self._root = self._open(url, options)

    def folders(self) -> list[str]:
        """See :class:`Root`."""
        with self._mapped():
            try:
                entries = self._fresh().ls(self._root, detail=True)
            except FileNotFoundError:
                return []
            return [
                str(entry["name"]).rstrip("/").rpartition("/")[2]
                for entry in entries
                if entry["type"] == "directory"
            ]

    def has(self, folder: str, name: str) -> bool:
        """See :class:`Root`."""
        # isfile() would take a broken network for a missing file.
        try:
            return self.size(folder, name) >= 0
        except FileNotFoundError:
            return False

    def size(self, folder: str, name: str) -> int:
        """See :class:`Root`."""
        with self._mapped(reading=True):
            found = self._fresh().info(self._path(folder, name))
            if found["type"] != "file":
                raise FileNotFoundError(f"{folder}/{name} is not a file")
            return int(found["size"])

    def read(self, folder: str, name: str) -> bytes:
        """See :class:`Root`."""
        with self._mapped(reading=True):
            return bytes(self._fresh().cat_file(self._path(folder, name)))

    def make_folder(self, folder: str) -> None:
        """See :class:`Root`; object stores have no folders, only buckets, which are not made."""
        if self._protocol in _OBJECT_STORES:
            return
        with self._mapped():
            self._files.makedirs(f"{self._root}/{folder}", exist_ok=True)

    def write(self, folder: str, name: str, content: bytes) -> None:
        """See :class:`Root`."""
        with self._mapped(), self._whole(self._path(folder, name)) as path:
            self._files.pipe_file(path, content)

    def put(self, source: Path, folder: str, name: str) -> None:
        """See :class:`Root`."""
        with self._mapped(), self._whole(self._path(folder, name)) as path:
            self._files.put_file(str(source), path)

    def get(self, folder: str, name: str, into: Path) -> Path:
        """See :class:`Root`."""
        path = into / folder / name
        with self._mapped(reading=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fresh().get_file(self._path(folder, name), str(path))
        return path

    def remove(self, folder: str, name: str) -> None:
        """See :class:`Root`."""
        with self._mapped(), suppress(FileNotFoundError):
            self._files.rm_file(self._path(folder, name))

    def remove_folder(self, folder: str) -> None:
        """See :class:`Root`."""
        with self._mapped(), suppress(FileNotFoundError):
            self._fresh().rm(f"{self._root}/{folder}", recursive=True)

    def _path(self, folder: str, name: str) -> str:
        return f"{self._root}/{folder}/{name}"

    @contextmanager
    def _whole(self, path: str) -> Iterator[str]:
        """Yield where to write a file that must be there whole or not at all."""
        # An object store shows an object when all of it has arrived. Others have files that
        # grow: these are renamed when they are done.
        if self._protocol in _OBJECT_STORES:
            yield path
            return
        yield path + ".tmp"
        self._files.mv(path + ".tmp", path)

    def _fresh(self) -> Any:
        """Return the file system without what it remembers of listings: others write there too."""
        self._files.invalidate_cache()
        return self._files

    def _open(self, url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
        try:
            from fsspec.core import url_to_fs

            files, root = url_to_fs(url, **options)
        except ImportError as error:
            extra = _EXTRAS.get(self._protocol)
            install = f"pip install 'backstay[{extra}]'" if extra else str(error)
            raise ConfigError(f"{self.url} needs a package that is missing: {install}") from error
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{self.url}: {self._safe(error)}") from error
        # Some connect at once, with errors of their own, of no common class.
        except Exception as error:
            raise CheckpointUnavailable(f"{self.url}: {self._safe(error)}") from error
        return files, str(root).rstrip("/")

    def _safe(self, error: BaseException) -> str:
        """Return the beginning of an error's text without what was secret in the URL."""
        text = (str(error) or type(error).__name__).partition("\n")[0][:ERROR_TEXT_MAX]
        for secret in self._secrets:
            text = text.replace(secret, "")
        return text

    @contextmanager
    def _mapped(self, *, reading: bool = False) -> Iterator[None]:
        try:
            yield
        # Each protocol's package has errors of its own, of no common class.
        except Exception as error:
            if reading and isinstance(error, FileNotFoundError):
                raise
            raise CheckpointUnavailable(f"{self.url}: {self._safe(error)}") from error


def sync_file(path: Path) -> None:
    """Return when a file's content would survive a power cut."""
    _sync(path, os.O_RDONLY)


def sync_folder(path: Path) -> None:
    """Return when the names in a folder would survive a power cut."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file of this machine, in hex.

    Raises:
        CheckpointUnavailable: It cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(COPY_BYTES):
                digest.update(block)
    except OSError as error:
        raise CheckpointUnavailable(f"{path}: {error}") from error
    return digest.hexdigest()
