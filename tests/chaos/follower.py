"""A follower as a process of its own: it serves, watches its own rows, and compares them.

It looks counted rows up all the time: none may go back, not even in the process that is started
after this one was killed, unless rows were restored. ``STATE`` is a folder for what it tells:

- ``status``: JSON, replaced all the time;
- ``wrong``: a line for each row that went back;
- ``floor``, ``chain``: what rows were seen so far, and of which chain.

A line ``ENDPOINTS PATH`` on its standard input has it compare all of its rows with those of the
servers and write the outcome there. It ends when its standard input does.

Usage: ``python -m tests.chaos.follower URL STATE TABLE COUNT``
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backstay.serving import Follower
from backstay.trainer import Client
from tests.integration.exporting import same_rows

POLL_S = 0.02
LOOK_PAUSE_S = 0.002
TELL_S = 0.05
WAIT_S = 90.0


class Floor:
    """What was seen of some rows, and that they do not go back."""

    def __init__(self, state: Path, count: int) -> None:
        """Go on with what the process before this one has seen."""
        self._state = state
        floor = state / "floor"
        if not floor.exists():
            floor.write_bytes(bytes(4 * count))
        # In a file, so that it is known to the process that comes after this one.
        self._rows = np.memmap(floor, np.float32, "r+", shape=(count,))

    def see(self, rows: NDArray[np.float32], element: str, chain: str, reason: str) -> None:
        """Take what a version has; what went back is written down."""
        known = self._state / "chain"
        if not known.exists() or known.read_text() != chain:
            if "restored or lost" in reason:
                self._rows[:] = 0
            known.write_text(chain)
        back = np.flatnonzero(rows < self._rows)[:4]
        if len(back):
            with (self._state / "wrong").open("a") as file:
                was, are = self._rows[back].tolist(), rows[back].tolist()
                file.write(f"{element}: rows {back.tolist()} were {was}, are {are}\n")
        self._rows[:] = rows


class Watch:
    """Looks up rows of what a follower serves."""

    def __init__(self, follower: Follower, floor: Floor, table: str, count: int) -> None:
        self._follower = follower
        self._floor = floor
        self._table = table
        self._keys = np.arange(count, dtype=np.uint64)
        self.looked = 0

    def look(self) -> None:
        """Look once; all of one version."""
        version = self._follower._newest()
        rows, _ = version.tables.lookup(self._table, self._keys)
        newest = version.state.newest
        self._floor.see(rows[:, 0], newest.id, newest.chain, newest.reason)
        self.looked += 1


def _tell(follower: Follower, watch: Watch, state: Path) -> None:
    told: dict[str, Any] = {**asdict(follower.status), "pid": os.getpid(), "looked": watch.looked}
    _replace(state / "status", told)


def _replace(path: Path, content: object) -> None:
    beside = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
    beside.write_text(json.dumps(content))
    beside.replace(path)


def _compare(follower: Follower, endpoints: list[str], state: Path) -> dict[str, Any]:
    try:
        with Client(endpoints) as client:
            slots = same_rows(client, follower, state, is_over=True)
        return {"slots": slots, "wrong": ""}
    except Exception as error:  # noqa: BLE001 (told to the run, which judges)
        return {"slots": 0, "wrong": f"{type(error).__name__}: {error}"[:2000]}


def _obey(follower: Follower, state: Path, stop: threading.Event) -> None:
    for line in sys.stdin:
        endpoints, path = line.split()
        _replace(Path(path), _compare(follower, endpoints.split(","), state))
    stop.set()


def main(url: str, folder: str, table: str, count: str) -> None:
    """Follow until the standard input ends."""
    logging.basicConfig(level=logging.INFO)
    state, stop = Path(folder), threading.Event()
    with Follower(url, poll_s=POLL_S, wait_s=WAIT_S) as follower:
        watch = Watch(follower, Floor(state, int(count)), table, int(count))
        threading.Thread(target=_obey, args=(follower, state, stop), daemon=True).start()
        told_s = 0.0
        while not stop.wait(LOOK_PAUSE_S):
            watch.look()
            if time.monotonic() - told_s > TELL_S:
                _tell(follower, watch, state)
                told_s = time.monotonic()


if __name__ == "__main__":
    main(*sys.argv[1:])
