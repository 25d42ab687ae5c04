"""What earlier runs of a job have left: a command that still runs it, records, progress.

Two commands that run one job would share its logs and checkpoints, and each would start the workers
that the other one's job master wants. The lock in the log folder refuses a second command on the
same machine. The job master's record refuses one on another machine.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from backstay.errors import (
    ConfigError,
    JobRefused,
    ProtocolError,
    Stopping,
    StoreUnavailable,
    TransportError,
)
from backstay.master.job_client import find_job, forget_job
from backstay.runner.servers import JobServers

__all__ = ["forget", "goes_on", "sole_run"]

LOCK_NAME = "lock"
# A job master that was killed is gone when its lease is over.
LEADERSHIP_LIMIT_S = 8.0
LOOK_PAUSE_S = 0.25

log = logging.getLogger(__name__)


@contextmanager
def sole_run(folder: Path, job: str) -> Iterator[None]:
    """Be the only process of this machine that runs a job with this log folder.

    Raises:
        JobRefused: Another one does.
        ConfigError: The folder cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK_NAME).open("a+", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"log_dir: cannot write to {folder}: {error.strerror}") from error
    # The kernel lets go of the lock however this process ends.
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise JobRefused(
                f"job {job!r} is already run by {file.read().strip() or 'another process'}, with "
                f"the same log_dir, {folder}: end that one (Ctrl-C, or `backstay jobs stop {job}`),"
                " or give this one another --name"
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def goes_on(servers: JobServers, job: str, stopped: Callable[[float], bool]) -> bool:
    """Return whether an earlier run of a job counts; wait until no command runs it.

    Args:
        servers: Of the job.
        job: Its name.
        stopped: Waits for so many seconds; returns whether this command is to stop.

    Raises:
        JobRefused: Another process is its job master.
        BackstayError: The servers do not answer, and this command is to stop.
    """
    if servers.are_own:
        return servers.began_with is not None

    def look() -> bool:
        entry = find_job(servers.endpoints, job, config=servers.config)
        if entry is not None and entry.master_address:
            raise JobRefused(
                f"job {job!r} is running already: its job master is at {entry.master_address}. End "
                f"one (`backstay jobs stop {job}`), or give this one another --name"
            )
        return entry is not None

    return _once_free(look, stopped)


def forget(servers: JobServers, job: str, stopped: Callable[[float], bool]) -> None:
    """Remove the records of a job, once no command runs it.

    Raises:
        JobRefused: Another process is its job master.
        BackstayError: The servers do not answer, and this command is to stop.
    """
    _once_free(lambda: forget_job(servers.endpoints, job, config=servers.config), stopped)


def _once_free(call: Callable[[], bool], stopped: Callable[[float], bool]) -> bool:
    """Make a call until the servers answer it and no job master is in the way any more."""
    deadline_s, said = time.monotonic() + LEADERSHIP_LIMIT_S, ""
    while True:
        try:
            return call()
        except JobRefused:
            if time.monotonic() > deadline_s or stopped(LOOK_PAUSE_S):
                raise
        except ProtocolError:
            # Servers of another release do not change by waiting.
            raise
        except (TransportError, StoreUnavailable, Stopping) as error:
            # They were reached: they are waited for, as the job master would wait for them.
            if str(error) != said:
                said = str(error)
                log.warning("waiting: %s", said)
            if stopped(LOOK_PAUSE_S):
                raise
            # The lease of a job master that died runs on only while the store is there.
            deadline_s = time.monotonic() + LEADERSHIP_LIMIT_S
