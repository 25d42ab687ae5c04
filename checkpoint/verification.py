"""Is a checkpoint whole? Every file that it needs is read to its end and compared.

Imports the storage, the part reader and ``backstay.errors``; changes nothing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from backstay.checkpoint.chain import CHAIN_LENGTH_MAX, check_chain
from backstay.checkpoint.manifest import MANIFEST_FILE, Manifest
from backstay.checkpoint.parts import Verdict, check_part
from backstay.checkpoint.storage import CheckpointStorage
from backstay.errors import CheckpointDamaged, CheckpointNotFound

__all__ = ["FileReport", "Progress", "Verdict", "Verification", "verify"]

# Called with the bytes read so far and the bytes of all files together.
Progress: TypeAlias = Callable[[int, int], None]


@dataclass(frozen=True)
class FileReport:
    """What is to be said of one file.

    Attributes:
        checkpoint: The id of the checkpoint whose file it is.
        file: Its name.
        bytes: The length that it should have.
        verdict: "ok", or what is wrong.
        detail: More about what is wrong; empty if nothing is.
    """

    checkpoint: str
    file: str
    bytes: int
    verdict: Verdict
    detail: str = ""


@dataclass(frozen=True)
class Verification:
    """What is to be said of a checkpoint and all that it builds on.

    Attributes:
        id: The checkpoint's.
        chain: The ids of what its state is made of, oldest first; as far as it could be followed.
        files: The parts of all of them, and manifests that are damaged or missing.
        problems: What is wrong between files that are right by themselves.
    """

    id: str
    chain: tuple[str, ...]
    files: tuple[FileReport, ...]
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether it can be restored."""
        return not self.problems and all(file.verdict == "ok" for file in self.files)

    @property
    def complaints(self) -> tuple[str, ...]:
        """Everything that is wrong, a sentence for each; empty if it can be restored."""
        files = (
            f"{file.checkpoint}/{file.file}: {file.verdict}"
            + (f" ({file.detail})" if file.detail else "")
            for file in self.files
            if file.verdict != "ok"
        )
        return (*files, *self.problems)


def verify(
    storage: CheckpointStorage,
    checkpoint_id: str,
    *,
    scratch: Path | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Read every file of a checkpoint and of all that it builds on.

    Compared are length and checksum; then slots, positions and counts with the manifest, and
    each key with the slot that it stands under.

    Args:
        storage: Where it is.
        checkpoint_id: Which one.
        scratch: A folder for the copy of one part at a time, if the storage is not local.
            Default: the system's temporary folder.
        progress: Called after each file.

    Raises:
        CheckpointNotFound: There is no such checkpoint.
        CheckpointUnavailable: The storage cannot be read.
    """
    newest_first, files, problems = _follow(storage, checkpoint_id)
    chain = newest_first[::-1]
    total, done = sum(manifest.total_bytes for manifest in chain), 0
    for manifest in chain:
        for index, part in enumerate(manifest.parts):
            with tempfile.TemporaryDirectory(dir=scratch, prefix="backstay-verify-") as folder:
                files.append(_report(storage, manifest, index, Path(folder)))
            done += part.bytes
            if progress is not None:
                progress(done, total)
    return Verification(
        checkpoint_id, tuple(each.id for each in chain), tuple(files), tuple(problems)
    )


def _follow(
    storage: CheckpointStorage, checkpoint_id: str
) -> tuple[list[Manifest], list[FileReport], list[str]]:
    """Return the manifests that could be read, newest first, and what is wrong with others."""
    found: list[Manifest] = []
    wanted: str | None = checkpoint_id
    while wanted is not None and len(found) < CHAIN_LENGTH_MAX:
        try:
            found.append(storage.read_manifest(wanted))
        except CheckpointNotFound as error:
            if not found:
                raise
            return found, [FileReport(wanted, MANIFEST_FILE, 0, "missing", str(error))], []
        except CheckpointDamaged as error:
            return found, [FileReport(wanted, MANIFEST_FILE, 0, "unreadable", str(error))], []
        wanted = found[-1].base
    try:
        check_chain(found[::-1])
    except CheckpointDamaged as error:
        return found, [], [str(error)]
    return found, [], []


def _report(storage: CheckpointStorage, manifest: Manifest, index: int, folder: Path) -> FileReport:
    part, found = manifest.parts[index], check_part(storage, manifest, index, folder)
    return FileReport(manifest.id, part.file, part.bytes, found.verdict, found.detail)
