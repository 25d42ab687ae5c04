"""Whether a job that goes on has the data that it began with.

Its tasks are numbers of records, so other records under the same numbers would count twice or not
at all. Of each local file the size and a digest of its beginning, middle and end are kept in
``data.json`` of the job's log folder: enough to notice a file that was written anew or appended to.
Data behind URLs, tables and readers of the user's own are not marked. Imports the readers' files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from backstay.data.files import DataFile
from backstay.data.opening import files_of
from backstay.errors import DataChanged, JobError
from backstay.job_spec import DataSpec, JobSpec
from backstay.listing import listed

__all__ = ["FILE_NAME", "Marks", "check_unchanged", "marks_of", "write_marks"]

FILE_NAME = "data.json"
BLOCK_BYTES = 64 * 1024
# With more files, only the sizes are compared.
DIGESTED_FILES_MAX = 10_000

# For training and validation, for each file: "size" or "size digest".
Marks = Mapping[str, Mapping[str, str]]


def marks_of(spec: JobSpec) -> Marks:
    """Return the marks of a job's data.

    Raises:
        DataUnavailable: A file cannot be read.
    """
    return {name: _marks(data) for name, data in spec.data.items() if not spec.grows(name)}


def check_unchanged(folder: Path, job: str, now: Marks) -> None:
    """Refuse data that is not what a job began with, if that is known.

    Args:
        folder: The job's log folder.
        job: Its name.
        now: The marks of its data as it is now.

    Raises:
        DataChanged: It is not; the message names the files.
        JobError: What is written there is damaged.
    """
    path = folder / FILE_NAME
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        changes = [
            change
            for name, marks in now.items()
            for change in _changes(dict(before.get(name, marks)), marks)
        ]
    except FileNotFoundError:
        return
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise JobError(
            f"{path}, which tells the data that job {job!r} began with, cannot be read: {error}; "
            "remove it if the data is the same"
        ) from error
    if changes:
        raise DataChanged(
            f"job {job!r} cannot go on, its data has changed since it began: "
            f"{listed(changes)}. Put the files back as they were, or train "
            "under another name, or forget with --fresh what the job has done"
        )


def write_marks(folder: Path, now: Marks) -> None:
    """Keep the marks of the data that a job begins with.

    Raises:
        JobError: The folder cannot be written to.
    """
    part = folder / f"{FILE_NAME}.part"
    try:
        part.write_text(json.dumps(now), encoding="utf-8")
        part.replace(folder / FILE_NAME)
    except OSError as error:
        raise JobError(f"log_dir: cannot write to {folder}: {error.strerror}") from error


def _marks(data: DataSpec) -> dict[str, str]:
    files = files_of(data)
    if files is None:
        return {}
    return {
        file.name: _mark(file, is_digested=number < DIGESTED_FILES_MAX)
        for number, file in enumerate(files.files())
        if file.system is None
    }


def _mark(file: DataFile, *, is_digested: bool) -> str:
    size = file.size()
    if not is_digested:
        return str(size)
    digest = hashlib.blake2b(digest_size=16)
    with file.open() as opened:
        for offset in (0, size // 2, max(0, size - BLOCK_BYTES)):
            digest.update(opened.read_at(offset, BLOCK_BYTES))
    return f"{size} {digest.hexdigest()}"


def _changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    changes = [f"{name} is gone" for name in before if name not in now]
    changes += [f"{name} is new" for name in now if name not in before]
    for name in before:
        if name in now and before[name] != now[name]:
            had, has = before[name].split()[0], now[name].split()[0]
            how = "has other content" if had == has else f"had {had} bytes and has {has}"
            changes.append(f"{name} {how}")
    return changes
