"""Finished and unfinished checkpoints at one place: a folder, or any URL that fsspec knows.

A checkpoint exists when its manifest does: it is written last and removed first. All methods
wait for the disk or the network; callers with an event loop use threads. Imports the manifest,
``checkpoint.roots`` and ``backstay.errors``.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from backstay.checkpoint.documents import DOCUMENT_BYTES_MAX
from backstay.checkpoint.manifest import (
    MANIFEST_FILE,
    Manifest,
    check_part_name,
    is_id,
    number_of,
)
from backstay.checkpoint.roots import LocalRoot, open_root, read_document
from backstay.errors import CheckpointDamaged, CheckpointNotFound, InvalidRequest

__all__ = ["CHAIN_LENGTH_MAX", "CheckpointStorage", "check_chain"]

# Checkpoints that one restore reads; a full one is due long before.
CHAIN_LENGTH_MAX = 1_000


class CheckpointStorage:
    """The checkpoints at one place.

    Args:
        url: A path, ``file://...``, ``s3://bucket/folder``, or what else fsspec knows.
        options: For fsspec's file system, such as ``endpoint_url`` of S3; credentials are best
            left to the environment, where the protocol's own package looks for them.

    Raises:
        ConfigError: There is no such protocol, or its package is not installed.
    """

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

    def ids(self) -> list[str]:
        """Return the ids of the finished checkpoints, oldest first.

        Raises:
            CheckpointUnavailable: The storage cannot be read; so does every method here.
        """
        return [each for each in self._folders() if self._root.has(each, MANIFEST_FILE)]

    def unfinished(self) -> list[str]:
        """Return the ids of unfinished checkpoints (without a manifest), oldest first."""
        return [each for each in self._folders() if not self._root.has(each, MANIFEST_FILE)]

    def read_manifest(self, checkpoint_id: str) -> Manifest:
        """Return a checkpoint's manifest.

        Raises:
            CheckpointNotFound: There is no such checkpoint, or it was never finished.
            CheckpointDamaged: The manifest is damaged, or another checkpoint's.
            InvalidRequest: That is no id.
        """
        _check_id(checkpoint_id)
        where = f"{checkpoint_id}/{MANIFEST_FILE}"
        try:
            text = read_document(self._root, checkpoint_id, MANIFEST_FILE)
        except FileNotFoundError as error:
            raise CheckpointNotFound(
                f"{self.url} has no finished checkpoint {checkpoint_id}"
            ) from error
        manifest = Manifest.from_json(text, where)
        if manifest.id != checkpoint_id:
            raise CheckpointDamaged(f"{where}: it is the manifest of {manifest.id}")
        return manifest

    def create(self, checkpoint_id: str) -> None:
        """Begin a checkpoint: make its folder. A second call changes nothing.

        Raises:
            InvalidRequest: That is no id, or the checkpoint is finished already.
        """
        _check_id(checkpoint_id)
        if self._root.has(checkpoint_id, MANIFEST_FILE):
            raise InvalidRequest(f"{self.url}: checkpoint {checkpoint_id} is finished already")
        self._root.make_folder(checkpoint_id)

    def write_manifest(self, manifest: Manifest) -> None:
        """Finish a checkpoint whose parts are all there. A second call changes nothing.

        Raises:
            CheckpointDamaged: A part is missing or has another length; nothing is written.
            InvalidRequest: The checkpoint is finished already, and otherwise.
        """
        if self._root.has(manifest.id, MANIFEST_FILE):
            if self.read_manifest(manifest.id) == manifest:
                return
            raise InvalidRequest(f"{self.url}: checkpoint {manifest.id} is finished already")
        for part in manifest.parts:
            size = self.size_of(manifest.id, part.file)
            if size != part.bytes:
                raise CheckpointDamaged(
                    f"{manifest.id}/{part.file}: {size} bytes, the manifest says {part.bytes}"
                )
        content = manifest.to_json().encode()
        if len(content) > DOCUMENT_BYTES_MAX:
            raise InvalidRequest(
                f"a manifest of {len(content)} bytes; at most {DOCUMENT_BYTES_MAX}"
            )
        self._root.write(manifest.id, MANIFEST_FILE, content)

    def publish(self, checkpoint_id: str, local_file: Path, name: str) -> None:
        """Copy a finished part there; not needed where :attr:`is_local`.

        Raises:
            CheckpointDamaged: It arrived with another length.
        """
        _check_names(checkpoint_id, name)
        self._root.put(Path(local_file), checkpoint_id, name)
        expected = Path(local_file).stat().st_size
        size = self.size_of(checkpoint_id, name)
        if size != expected:
            raise CheckpointDamaged(
                f"{checkpoint_id}/{name}: {size} bytes arrived at {self.url} of {expected}"
            )

    def fetch(self, checkpoint_id: str, name: str, into_dir: Path) -> Path:
        """Return a part as a file of this machine: itself where :attr:`is_local`, else a copy.

        Raises:
            CheckpointDamaged: It is missing.
        """
        _check_names(checkpoint_id, name)
        try:
            return self._root.get(checkpoint_id, name, Path(into_dir))
        except FileNotFoundError as error:
            raise self._missing(checkpoint_id, name) from error

    def part_path(self, checkpoint_id: str, name: str) -> Path:
        """Return where a node writes a part in place.

        Raises:
            InvalidRequest: The storage is not local.
        """
        _check_names(checkpoint_id, name)
        if not isinstance(self._root, LocalRoot):
            raise InvalidRequest(f"{self.url} is not a folder of this machine")
        return self._root.path_of(checkpoint_id, name)

    def size_of(self, checkpoint_id: str, name: str) -> int:
        """Return the length of a part.

        Raises:
            CheckpointDamaged: It is missing.
        """
        _check_names(checkpoint_id, name)
        try:
            return self._root.size(checkpoint_id, name)
        except FileNotFoundError as error:
            raise self._missing(checkpoint_id, name) from error

    def delete(self, checkpoint_id: str) -> None:
        """Delete a checkpoint, finished or not; one that is not there is deleted already.

        The manifest goes first, so that one that is deleted by half does not exist.
        """
        _check_id(checkpoint_id)
        self._root.remove(checkpoint_id, MANIFEST_FILE)
        self._root.remove_folder(checkpoint_id)

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

    def _folders(self) -> list[str]:
        found = [each for each in self._root.folders() if is_id(each)]
        return sorted(found, key=lambda each: (number_of(each), each))

    def _missing(self, checkpoint_id: str, name: str) -> CheckpointDamaged:
        return CheckpointDamaged(f"{checkpoint_id}/{name}: missing at {self.url}")


def check_chain(chain: list[Manifest]) -> None:
    """Refuse manifests that do not build on each other, oldest first.

    Raises:
        CheckpointDamaged: The message names the one that does not fit.
    """
    if chain[0].base is not None:
        raise CheckpointDamaged(f"{chain[0].id} is not full, and nothing is before it")
    for older, newer in itertools.pairwise(chain):
        where = f"{newer.id}, which builds on {older.id},"
        if newer.base != older.id:
            raise CheckpointDamaged(f"{newer.id} does not build on {older.id}")
        if newer.slot_count != older.slot_count:
            raise CheckpointDamaged(f"{where} has {newer.slot_count} slots, not {older.slot_count}")
        if newer.cluster_uid != older.cluster_uid:
            raise CheckpointDamaged(f"{where} is of another cluster")
        known = {spec.name: spec for spec in older.tables}
        for spec in newer.tables:
            if known.get(spec.name, spec) != spec:
                raise CheckpointDamaged(f"{where} has other settings of table {spec.name!r}")
        added = ~newer.slots.whole
        same = newer.slots.epoch == older.slots.epoch
        grown = newer.slots.position >= older.slots.position
        if not (same & grown)[added].all():
            slot = int(np.flatnonzero(added & ~(same & grown))[0])
            raise CheckpointDamaged(f"{where} has changes of another epoch of slot {slot}")


def _check_id(checkpoint_id: str) -> None:
    number_of(checkpoint_id)


def _check_names(checkpoint_id: str, name: str) -> None:
    _check_id(checkpoint_id)
    check_part_name(name)
