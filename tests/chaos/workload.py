"""The trainers of a run: started, killed, replaced, and watched through their histories."""

from __future__ import annotations

import sys
import time
from bisect import bisect_right
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from backstay._native import slots_of
from backstay.config import ClientConfig
from backstay.trainer import Client
from tests.chaos.cluster import ChaosCluster, NotYet
from tests.chaos.history import History, Shape, parse
from tests.chaos.processes import Process
from tests.chaos.trainer import TABLE, TrainerSettings

__all__ = ["Workload"]

POLL_PAUSE_S = 0.005
START_LIMIT_S = 60.0
LAST_READ_LIMIT_MS = 60_000


class Workload:
    """The trainer processes over a whole run."""

    def __init__(
        self, cluster: ChaosCluster, folder: Path, shape: Shape, trainers: int, pause_s: float
    ) -> None:
        """Make the hosts; ``start`` starts the trainers."""
        self._cluster = cluster
        self._folder = folder
        self.shape = shape
        self._pause_s = pause_s
        self.hosts = [cluster.network.add_host(f"trainer-{n}") for n in range(trainers)]
        self._streams = 0
        self._paths: list[Path] = []
        self._tails: dict[int, _Tail] = {}
        self.trainers: list[Process] = [self._new(n) for n in range(trainers)]
        self._stream_of = list(range(trainers))

    def _new(self, place: int) -> Process:
        stream = self._streams
        self._streams += 1
        path = self._folder / f"stream-{stream}.history"
        told = TrainerSettings(
            endpoints=tuple(self._cluster.endpoints),
            path=str(path),
            stream=stream,
            shape=self.shape,
            pause_s=self._pause_s,
        )
        self._paths.append(path)
        self._tails[stream] = _Tail(path)
        return Process(
            self.hosts[place],
            [sys.executable, "-m", "tests.chaos.trainer", told.to_json()],
            self._folder / f"stream-{stream}.log",
        )

    def start(self) -> None:
        """Start all trainers and wait until each has a push acknowledged."""
        for trainer in self.trainers:
            trainer.start()
        self.wait_acknowledged(0, START_LIMIT_S)

    def replace(self, place: int) -> None:
        """Kill one trainer and start another one in its place."""
        self.trainers[place].kill()
        self._put_new(place)
        self.trainers[place].start()

    def _put_new(self, place: int) -> None:
        self.trainers[place] = self._new(place)
        self._stream_of[place] = self._streams - 1

    def wait_told(self, limit_s: float) -> int:
        """Wait until every trainer has ended because its rows are gone; return how many.

        Raises:
            NotYet: One goes on.
        """
        deadline_s = time.monotonic() + limit_s
        for trainer in self.trainers:
            while trainer.is_running:
                if time.monotonic() > deadline_s:
                    raise NotYet(f"{trainer.host.name} goes on although its rows are gone")
                time.sleep(POLL_PAUSE_S)
        told = [history for history in self.histories() if history.state_lost]
        if len(told) != len(self.trainers):
            raise NotYet(f"{len(told)} of {len(self.trainers)} trainers were told of the loss")
        return len(told)

    def begin_anew(self) -> None:
        """Put new trainers in every place; what the old ones pushed is no longer expected."""
        self._paths.clear()
        for place in range(len(self.trainers)):
            self._put_new(place)
        self.start()

    def wait_acknowledged(self, since_ns: int, limit_s: float) -> float:
        """Wait until each trainer has had a push acknowledged that it began after a time.

        Returns:
            From that time to the last one's acknowledgement, in milliseconds.

        Raises:
            NotYet: It took longer than the limit.
        """
        deadline_s = time.monotonic() + limit_s
        last_ns = since_ns
        for place, trainer in enumerate(self.trainers):
            tail = self._tails[self._stream_of[place]]
            while (first := tail.first_acknowledged_since(since_ns)) is None:
                if not trainer.is_running and not tail.first_acknowledged_since(since_ns):
                    raise NotYet(f"{trainer.host.name} has ended: {trainer.log_tail()}")
                if time.monotonic() > deadline_s:
                    raise NotYet(
                        f"{trainer.host.name} had nothing acknowledged for {limit_s:g} s: "
                        f"{trainer.log_tail()}"
                    )
                time.sleep(POLL_PAUSE_S)
            last_ns = max(last_ns, first)
        return (last_ns - since_ns) / 1e6

    def stop(self, limit_s: float) -> list[int]:
        """Let every trainer flush what it has sent and end; return their exit codes."""
        for trainer in self.trainers:
            if trainer.is_running:
                trainer.close_input()
        return [trainer.wait(limit_s) for trainer in self.trainers]

    def kill(self) -> None:
        """End all trainers at once."""
        for trainer in self.trainers:
            if trainer.is_running:
                trainer.kill()

    def histories(self) -> list[History]:
        """Return what all trainers wrote, the killed ones too."""
        texts = [path.read_text(encoding="utf-8") for path in self._paths if path.exists()]
        return [history for text in texts if (history := parse(text)) is not None]

    def final_table(self) -> NDArray[np.float32]:
        """Read the row of every key."""
        config = ClientConfig(deadline_ms=LAST_READ_LIMIT_MS)
        with Client(self._cluster.endpoints, config=config) as client:
            return client.pull(TABLE, np.arange(self.shape.universe, dtype=np.uint64))

    def slot_of_key(self) -> NDArray[np.uint32]:
        """Return the slot of every key."""
        keys = np.arange(self.shape.universe, dtype=np.uint64)
        return slots_of(keys, self._cluster.plan.slots)


class _Tail:
    """Reads a history while it grows, for the times of acknowledgements only."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._begun: dict[int, int] = {}
        # Of each acknowledgement, in their order: when it came, when its push had begun.
        self._ended: list[int] = []
        self._began: list[int] = []

    def first_acknowledged_since(self, since_ns: int) -> int | None:
        """Return when the first push begun after a time was acknowledged, if one was."""
        self._read()
        for index in range(bisect_right(self._ended, since_ns), len(self._ended)):
            if self._began[index] > since_ns:
                return self._ended[index]
        return None

    def _read(self) -> None:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.decode().splitlines():
            kind, number, at_ns = ([*line.split(" ", 3), "", ""])[:3]
            if kind == "b":
                self._begun[int(number)] = int(at_ns)
            elif kind in "anu":
                begun_ns = self._begun.pop(int(number))
                if kind == "a":
                    self._ended.append(int(at_ns))
                    self._began.append(begun_ns)
