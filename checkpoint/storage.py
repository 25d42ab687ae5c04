"""Finished and unfinished snapshots at one place: a folder, or any URL that fsspec knows.

A snapshot exists when its manifest does: it is written last and removed first. All methods wait
for the disk or the network; callers with an event loop use threads. A part that the manifest names
and the storage does not have is damage: ``CheckpointDamaged``. Imports the manifest,
``checkpoint.chain``, ``checkpoint.roots`` and ``backstay.errors``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from backstay.checkpoint.chain import CHAIN_LENGTH_MAX, check_chain
from backstay.checkpoint.documents import DOCUMENT_BYTES_MAX
from backstay.checkpoint.manifest import (
    MANIFEST_FILE,
    Manifest,
    Series,
    check_part_name,
    is_id,
    number_of,
)
from backstay.checkpoint.roots import LocalRoot, open_root, read_document
from backstay.errors import CheckpointDamaged, CheckpointNotFound, InvalidRequest

__all__ = ["CheckpointStorage", "ExportFolder", "SnapshotFolder"]


class SnapshotFolder:
    """The snapshots of one series at one place; others there are left alone.

    Args:
        url: A path, ``file://...``, ``s3://bucket/folder``, or what else fsspec knows.
        options: For fsspec's file system, such as ``endpoint_url`` of S3; credentials are best
            left to the environment, where the protocol's own package looks for them.

    Raises:
        ConfigError: There is no such protocol, or its package is not installed.
    """

    series: ClassVar[Series]

    def __init__(self, url: str | Path, options: Mapping[str, Any] | None = None) -> None:
        self._root = open_root(str(url), options)

    @property
    def url(self) -> str:
        """Where it is, without credentials."""
        return self._root.url

    @property
    def is_local(self) -> bool:
        """Whether it is a folder of this machine, where parts are written in place."""
        return isinstance(self._root, LocalRoot)

    def names(self) -> list[str]:
        """Return the ids of all snapshots, finished or not, in their order.

        Raises:
            CheckpointUnavailable: The storage cannot be read; so does every method here.
        """
        there = [each for each in self._root.folders() if is_id(each, self.series)]
        return sorted(there, key=lambda each: (number_of(each), each))

    def is_finished(self, snapshot: str) -> bool:
        """Return whether a snapshot has its manifest."""
        return self._root.has(snapshot, MANIFEST_FILE)

    def ids(self) -> list[str]:
        """Return the ids of the finished snapshots, oldest first."""
        return [each for each in self.names() if self.is_finished(each)]

    def unfinished(self) -> list[str]:
        """Return the ids of unfinished snapshots (without a manifest), oldest first."""
        return [each for each in self.names() if not self.is_finished(each)]

    def read(self, snapshot: str) -> Manifest | None:
        """Return a snapshot's manifest; None if the snapshot is not there, or not finished.

        Raises:
            CheckpointDamaged: The manifest is damaged, or another snapshot's.
            InvalidRequest: That is no id.
        """
        self._check_id(snapshot)
        where = f"{snapshot}/{MANIFEST_FILE}"
        try:
            text = read_document(self._root, snapshot, MANIFEST_FILE)
        except FileNotFoundError:
            return None
        manifest = Manifest.from_json(text, where)
        if manifest.id != snapshot:
            raise CheckpointDamaged(f"{where}: it is the manifest of {manifest.id}")
        return manifest

    def read_manifest(self, snapshot: str) -> Manifest:
        """Return a snapshot's manifest.

        Raises:
            CheckpointNotFound: There is no such snapshot, or it was never finished.
            CheckpointDamaged: The manifest is damaged, or another snapshot's.
            InvalidRequest: That is no id.
        """
        manifest = self.read(snapshot)
        if manifest is None:
            raise CheckpointNotFound(f"{self.url} has no finished checkpoint {snapshot}")
        return manifest

    def newest(self) -> Manifest | None:
        """Return the finished snapshot with the highest number; None: there is none.

        Raises:
            CheckpointDamaged: Its manifest is damaged.
        """
        return next((each for name in reversed(self.names()) if (each := self.read(name))), None)

    def create(self, snapshot: str) -> None:
        """Begin a snapshot: make its folder. A second call changes nothing.

        Raises:
            InvalidRequest: That is no id, or the snapshot is finished already.
        """
        self._check_id(snapshot)
        if self.is_finished(snapshot):
            raise InvalidRequest(f"{self.url}: checkpoint {snapshot} is finished already")
        self._root.make_folder(snapshot)

    def write_manifest(self, manifest: Manifest) -> None:
        """Finish a snapshot whose parts are all there. A second call changes nothing.

        Raises:
            CheckpointDamaged: A part is missing or has another length; nothing is written.
            InvalidRequest: The snapshot is finished already, and otherwise.
        """
        if (there := self.read(manifest.id)) is not None:
            if there == manifest:
                return
            raise InvalidRequest(f"{self.url}: checkpoint {manifest.id} is finished already")
        for index in range(len(manifest.parts)):
            self._check_size(manifest, index)
        content = manifest.to_json().encode()
        if len(content) > DOCUMENT_BYTES_MAX:
            raise InvalidRequest(
                f"a manifest of {len(content)} bytes; at most {DOCUMENT_BYTES_MAX}"
            )
        self._root.write(manifest.id, MANIFEST_FILE, content)

    def publish(self, snapshot: str, local_file: Path, name: str) -> None:
        """Copy a finished part there; not needed where :attr:`is_local`.

        Raises:
            CheckpointDamaged: It arrived with another length.
        """
        self._check_names(snapshot, name)
        self._root.put(Path(local_file), snapshot, name)
        expected = Path(local_file).stat().st_size
        size = self.size_of(snapshot, name)
        if size != expected:
            raise CheckpointDamaged(
                f"{snapshot}/{name}: {size} bytes arrived at {self.url} of {expected}"
            )

    def fetch(self, snapshot: str, name: str, into_dir: Path) -> Path:
        """Return a part as a file of this machine: itself where :attr:`is_local`, else a copy.

        Raises:
            CheckpointDamaged: It is missing.
        """
        self._check_names(snapshot, name)
        try:
            return self._root.get(snapshot, name, Path(into_dir))
        except FileNotFoundError as error:
            raise self._missing(snapshot, name) from error

    def fetch_part(self, manifest: Manifest, index: int, into_dir: Path) -> Path:
        """Return a part of a snapshot as ``fetch`` does, if it has the length of the manifest.

        Raises:
            CheckpointDamaged: It is missing, or has another length.
        """
        # The check comes before the copy: a file that is far too long would fill the disk.
        self._check_size(manifest, index)
        return self.fetch(manifest.id, manifest.parts[index].file, into_dir)

    def part_path(self, snapshot: str, name: str) -> Path:
        """Return where a node writes a part in place.

        Raises:
            InvalidRequest: The storage is not local.
        """
        self._check_names(snapshot, name)
        if not isinstance(self._root, LocalRoot):
            raise InvalidRequest(f"{self.url} is not a folder of this machine")
        return self._root.path_of(snapshot, name)

    def size_of(self, snapshot: str, name: str) -> int:
        """Return the length of a part.

        Raises:
            CheckpointDamaged: It is missing.
        """
        self._check_names(snapshot, name)
        try:
            return self._root.size(snapshot, name)
        except FileNotFoundError as error:
            raise self._missing(snapshot, name) from error

    def delete(self, snapshot: str) -> None:
        """Delete a snapshot, finished or not; one that is not there is deleted already.

        The manifest goes first, so that one that is deleted by half does not exist.
        """
        self._check_id(snapshot)
        self._root.remove(snapshot, MANIFEST_FILE)
        self._root.remove_folder(snapshot)

    def _check_size(self, manifest: Manifest, index: int) -> None:
        part = manifest.parts[index]
        size = self.size_of(manifest.id, part.file)
        if size != part.bytes:
            raise CheckpointDamaged(
                f"{manifest.id}/{part.file}: {size} bytes, the manifest says {part.bytes}"
            )

    def _missing(self, snapshot: str, name: str) -> CheckpointDamaged:
        return CheckpointDamaged(f"{snapshot}/{name}: missing at {self.url}")

    def _check_id(self, snapshot: str) -> None:
        if not is_id(snapshot, self.series):
            raise InvalidRequest(f"{snapshot!r} is no {self.series} id")

    def _check_names(self, snapshot: str, name: str) -> None:
        self._check_id(snapshot)
        check_part_name(name)


class CheckpointStorage(SnapshotFolder):
    """The checkpoints at one place; see ``SnapshotFolder``."""

    series = "checkpoint"

    def chain(self, checkpoint_id: str) -> list[Manifest]:
        """Return the manifests that make up the state: from the full checkpoint to this one.

        Raises:
            CheckpointNotFound: There is no such checkpoint.
            CheckpointDamaged: One that it builds on is missing, damaged, or does not fit.
        """
        newest_first = [self.read_manifest(checkpoint_id)]
        while (base := newest_first[-1].base) is not None:
            # Each base has a lower number than what builds on it: this ends without a cycle.
            if len(newest_first) >= CHAIN_LENGTH_MAX:
                raise CheckpointDamaged(
                    f"{checkpoint_id} builds on more than {CHAIN_LENGTH_MAX} checkpoints"
                )
            try:
                newest_first.append(self.read_manifest(base))
            except CheckpointNotFound as error:
                raise CheckpointDamaged(
                    f"{newest_first[-1].id} builds on {base}, which is missing at {self.url}"
                ) from error
        chain = newest_first[::-1]
        check_chain(chain)
        return chain


class ExportFolder(SnapshotFolder):
    """The snapshots of a running export at one place; see ``SnapshotFolder``."""

    series = "export"
