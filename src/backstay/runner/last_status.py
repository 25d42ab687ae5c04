"""What is known of a job without its servers: the last status, in a file of its log folder.

Servers of a job's own end with its command, and with them the job's records. The command writes
``status.json`` while it runs and when it ends; ``backstay jobs show`` and ``logs`` read it.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from google.protobuf.json_format import MessageToDict, ParseDict, ParseError

from backstay._proto.v1 import job_pb2
from backstay.checkpoint.catalogue import Entry, catalogue
from backstay.checkpoint.manifest import number_of
from backstay.checkpoint.storage import CheckpointStorage
from backstay.errors import JobError

__all__ = [
    "FILE_NAME",
    "LastStatus",
    "NewestCheckpoint",
    "StatusFile",
    "checkpoint_folder",
    "default_folder",
]

FILE_NAME = "status.json"
WRITE_PAUSE_S = 1.0

log = logging.getLogger(__name__)


def default_folder(job: str) -> Path:
    """Return where a job that was run by a job file of the current folder has its logs."""
    return Path("backstay-jobs") / job


class NewestCheckpoint(NamedTuple):
    """The newest checkpoint of a job, and the folder or URL that it is in."""

    checkpoint: str
    url: str


def checkpoint_folder(log_dir: Path, url: str) -> str:
    """Return where the newest checkpoint of a job is.

    The servers may have been told of another folder while the job ran, because its own was full.

    Args:
        log_dir: The job's log folder.
        url: The folder that the job names.

    Raises:
        JobError: The newest one is gone, and so are all others.
    """
    try:
        last = LastStatus.read(log_dir).status
    except JobError:
        return url
    if not last.checkpoint_url:
        return url
    here = _catalogue(url)
    if any(one.id == last.checkpoint for one in here):
        return url
    is_elsewhere = last.checkpoint_url != url
    if not (_catalogue(last.checkpoint_url) if is_elsewhere else here):
        nowhere = f"neither there nor in {url}" if is_elsewhere else "not there any more"
        raise JobError(
            f"the newest checkpoint of the job, {last.checkpoint}, was written to "
            f"{last.checkpoint_url}, and is {nowhere}: bring it back, or name its "
            "folder as checkpoint.url; `backstay train --fresh` begins without it"
        )
    if not is_elsewhere and number_of(here[-1].id) < number_of(last.checkpoint):
        log.warning(
            "the newest checkpoint of the job, %s, is gone from %s: %s is the newest there",
            last.checkpoint,
            url,
            here[-1].id,
        )
    return last.checkpoint_url


def _catalogue(url: str) -> list[Entry]:
    if "://" not in url and not Path(url).is_dir():
        return []
    return catalogue(CheckpointStorage(url))


@dataclass(frozen=True)
class LastStatus:
    """The last that was heard of a job.

    Attributes:
        written_ms: Unix time.
        endpoints: Its servers then.
        are_own: Whether these have ended with the command.
        is_over: Whether the command has ended in good order; else it was killed, or runs.
        status: As the job master told it.
        dead_letters: Its tasks that failed for good.
    """

    written_ms: int
    endpoints: tuple[str, ...]
    are_own: bool
    is_over: bool
    status: job_pb2.JobStatus
    dead_letters: tuple[job_pb2.DeadLetter, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> LastStatus:
        """Return what a job's log folder tells.

        Raises:
            JobError: There is no such file, or it is damaged.
        """
        path = folder / FILE_NAME
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            return cls(
                document["written_ms"],
                tuple(document["endpoints"]),
                document["are_own"],
                document["is_over"],
                ParseDict(document["status"], job_pb2.JobStatus()),
                tuple(ParseDict(one, job_pb2.DeadLetter()) for one in document["dead_letters"]),
            )
        except OSError as error:
            raise JobError(
                f"no job has left its status in {folder.absolute()} ({error.strerror}); give the "
                "log_dir that its `backstay train` named"
            ) from error
        except (ValueError, KeyError, TypeError, ParseError) as error:
            raise JobError(f"{path}: is damaged: {error}") from error

    def to_mapping(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "written_ms": self.written_ms,
            "endpoints": list(self.endpoints),
            "are_own": self.are_own,
            "is_over": self.is_over,
            "status": MessageToDict(self.status, preserving_proto_field_name=True),
            "dead_letters": [
                MessageToDict(one, preserving_proto_field_name=True) for one in self.dead_letters
            ],
        }

    def origin(self, folder: Path) -> str:
        """Return, for people, how old this is and who knows more."""
        then = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.written_ms / 1000))
        text = f"as of {then}, by {folder / FILE_NAME}"
        if self.are_own and self.is_over:
            return f"{text}; its command and its own servers have ended"
        end = "" if self.is_over else " (its command runs, or was killed)"
        return f"{text}{end}; its servers: --endpoint {','.join(self.endpoints)}"


def status_before(folder: Path) -> job_pb2.JobStatus:
    """Return the last status that a job has left in its log folder; empty if there is none."""
    try:
        return LastStatus.read(folder).status
    except JobError:
        return job_pb2.JobStatus()


class StatusFile:
    """Writes the status of a job, now and then and at its end.

    Args:
        folder: The job's log folder.
        endpoints: Of its servers.
        are_own: Whether these end with this process.
    """

    def __init__(self, folder: Path, endpoints: Sequence[str], *, are_own: bool) -> None:
        self._path = folder / FILE_NAME
        self._endpoints = tuple(endpoints)
        self._are_own = are_own
        self._next_s = 0.0
        self._failed = False

    def seen(self, status: job_pb2.JobStatus) -> None:
        """Write it, unless that was done a moment ago."""
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + WRITE_PAUSE_S
            self._write(status, (), is_over=False)

    def ended(
        self,
        status: job_pb2.JobStatus | None,
        dead_letters: Sequence[job_pb2.DeadLetter],
        *,
        state: str,
        reason: str,
    ) -> None:
        """Write the last one: how the command ended, whatever the job master told."""
        last = job_pb2.JobStatus()
        if status is None:
            return
        last.CopyFrom(status)
        last.state, last.reason, last.master_instance = state, reason, 0
        self._write(last, dead_letters, is_over=True)

    def _write(
        self,
        status: job_pb2.JobStatus,
        dead_letters: Sequence[job_pb2.DeadLetter],
        *,
        is_over: bool,
    ) -> None:
        now_ms = int(time.time() * 1000)
        last = LastStatus(
            now_ms, self._endpoints, self._are_own, is_over, status, tuple(dead_letters)
        )
        part = self._path.with_suffix(".part")
        try:
            part.write_text(json.dumps(last.to_mapping()), encoding="utf-8")
            part.replace(self._path)
        except OSError as error:
            # The job goes on; a full disk is told by what needs it.
            if not self._failed:
                log.warning("%s cannot be written: %s", self._path, error)
            self._failed = True
