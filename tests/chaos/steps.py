"""Steps of a job over a topic, and of its export, as they are seen from outside.

Each is waited for: a record in etcd, a file of a broker, of a worker or of the sink. Who is killed
then is in the middle of it, or has just done it.
"""

from __future__ import annotations

import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from backstay.checkpoint.manifest import MANIFEST_FILE, kind_of
from tests.chaos.cluster import NotYet
from tests.chaos.processes import environment

__all__ = ["PHASES", "at_element", "at_file", "at_open", "at_record"]

STEP_LIMIT_S = 60.0
LOOK_PAUSE_S = 0.0005
# Of an element: its folder is there, a part is, its manifest is.
PHASES = ("begun", "part", "finished")


def at_record(endpoint: str, prefix: str, until: Callable[[], bool]) -> bool:
    """Wait until etcd tells of a new record below a key; False: something else came first.

    Raises:
        NotYet: Neither came.
    """
    command = ["etcdctl", f"--endpoints={endpoint}", "watch", "--prefix", prefix]
    with _lines([*command, "--write-out=simple"]) as lines:
        return _look(prefix, lambda: "PUT" in _newest(lines), until)


def at_file(what: str, found: Callable[[], int], until: Callable[[], bool]) -> bool:
    """Wait until a number that files have grows. As ``at_record``."""
    before = found()
    return _look(what, lambda: found() > before, until)


def at_element(folder: Path, kind: str, phase: str, until: Callable[[], bool]) -> bool:
    """Wait until a new element of a kind is in a phase. As ``at_record``."""
    known = _elements(folder, kind)

    def reached() -> bool:
        for name in _elements(folder, kind) - known:
            try:
                there = os.listdir(folder / name)
            except OSError:
                continue
            whole = MANIFEST_FILE in there
            if phase == "begun" or (phase == "finished" and whole):
                return True
            if phase == "part" and (whole or there):
                return True
        return False

    return _look(f"a new {kind} that is {phase}", reached, until)


def at_open(pid: int, words: str, limit_s: float) -> bool:
    """Wait until a process has a file open whose path has some words; False: not in that time."""
    deadline_s, folder = time.monotonic() + limit_s, Path(f"/proc/{pid}/fd")
    while time.monotonic() < deadline_s:
        try:
            if any(words in os.readlink(one) for one in folder.iterdir()):
                return True
        except OSError:
            # It was closed meanwhile.
            continue
    return False


def _look(what: str, reached: Callable[[], bool], until: Callable[[], bool]) -> bool:
    deadline_s = time.monotonic() + STEP_LIMIT_S
    while not reached():
        if until():
            return False
        if time.monotonic() > deadline_s:
            raise NotYet(f"after {STEP_LIMIT_S:g} s: no {what}")
        time.sleep(LOOK_PAUSE_S)
    return True


def _elements(folder: Path, kind: str) -> set[str]:
    try:
        return {name for name in os.listdir(folder) if kind_of(name) == kind}
    except OSError:
        return set()


@contextmanager
def _lines(command: list[str]) -> Iterator[queue.Queue[str]]:
    """Run a command; what is given gets its lines."""
    lines: queue.Queue[str] = queue.Queue()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment() | {"ETCDCTL_API": "3"},
    )
    assert process.stdout is not None

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield lines
    finally:
        process.kill()
        process.wait()
        reader.join()
        process.stdout.close()


def _newest(lines: queue.Queue[str]) -> str:
    try:
        return lines.get_nowait()
    except queue.Empty:
        return ""
