"""Checkpoints of a run: asked for while faults strike, judged when all has come to rest.

A save that meets a fault may fail, and then counts for nothing; once the fault is over another
one must succeed. Whatever has a manifest at the end must be whole.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from click.testing import CliRunner
from numpy.typing import NDArray

from backstay import rpc
from backstay.checkpoint import remote
from backstay.checkpoint.storage import CheckpointStorage
from backstay.checkpoint.verification import verify
from backstay.config import SecurityConfig
from backstay.errors import BackstayError
from backstay.pserver.ctl.cli import main as pserverctl
from backstay.pserver.local_cluster import LocalCluster
from backstay.trainer import Client
from tests.chaos.cluster import ChaosCluster, NotYet
from tests.chaos.faults import Arena, Fault
from tests.chaos.trainer import TABLE
from tests.chaos.verdict import SavedTable

__all__ = ["Checkpoints", "SaveDuring"]

# A checkpoint of the counter table then takes about two seconds.
BYTES_PER_S = 20_000
SAVE_LIMIT_S = 30.0
AGAIN_LIMIT_S = 90.0
PAUSE_S = 0.1


@dataclass(frozen=True)
class Saved:
    """A checkpoint whose caller was told that it is whole; times as in histories."""

    id: str
    begun_ns: int
    ended_ns: int


class Checkpoints:
    """The folder of a run's checkpoints, and what was asked for."""

    def __init__(self, cluster: ChaosCluster) -> None:
        """Prepare; ``slow_down`` once the cluster runs."""
        self._cluster = cluster
        self.saved: list[Saved] = []
        self.failed: list[str] = []

    def slow_down(self) -> None:
        """Let saves take long enough for a fault to meet them.

        Raises:
            RuntimeError: The setting was refused.
        """
        change = f"checkpoint_bytes_per_s={BYTES_PER_S}"
        command = ["--endpoint", ",".join(self._cluster.endpoints), "config", "set", change]
        done = CliRunner().invoke(pserverctl, command)
        if done.exit_code != 0:
            raise RuntimeError(done.output)

    def save(self, number: int) -> bool:
        """Ask one node for a checkpoint; return whether it was written."""
        address, begun_ns = self._cluster.endpoints[number], time.monotonic_ns()
        try:
            with rpc.open_channel(address, SecurityConfig()) as channel, rpc.mapped_errors(address):
                made = remote.save(channel, timeout_s=SAVE_LIMIT_S)
        except BackstayError as error:
            self.failed.append(f"ps-{number}: {error}")
            return False
        self.saved.append(Saved(made.id, begun_ns, time.monotonic_ns()))
        return True

    def save_again(self, number: int) -> None:
        """Ask until a checkpoint is written: no fault is left that could hinder it.

        Raises:
            NotYet: None is.
        """
        deadline_s = time.monotonic() + AGAIN_LIMIT_S
        while not self.save(number):
            if time.monotonic() > deadline_s:
                raise NotYet(f"no checkpoint after {AGAIN_LIMIT_S:g} s: {self.failed[-1]}")
            time.sleep(PAUSE_S)

    def complaints(self) -> list[str]:
        """Return what is wrong with finished checkpoints, unknown ones included."""
        storage = CheckpointStorage(self._cluster.checkpoint_folder)
        wrong = [text for each in storage.ids() for text in verify(storage, each).complaints]
        if self.saved and self.saved[-1].id not in storage.ids():
            wrong.append(f"{self.saved[-1].id} was written, and is gone")
        return wrong

    def restored(self, keys: int, folder: Path) -> SavedTable | None:
        """Restore the last one that somebody was told of into a cluster of its own."""
        if not self.saved:
            return None
        last = self.saved[-1]
        settings = {
            "cluster": "restored",
            "slot_count": self._cluster.plan.slots,
            "checkpoint_url": str(self._cluster.checkpoint_folder),
            "restore": last.id,
        }
        with (
            LocalCluster(1, directory=folder / "restored", settings=settings) as cluster,
            Client(cluster.endpoints) as client,
        ):
            rows: NDArray[np.float32] = client.pull(TABLE, np.arange(keys, dtype=np.uint64))
        return SavedTable(last.id, last.begun_ns, last.ended_ns, rows)


class SaveDuring(Fault):
    """Another fault, in the midst of a checkpoint that any node was asked for."""

    kind = "checkpoint"

    def __init__(self, arena: Arena, make: Callable[[Arena], Fault]) -> None:
        super().__init__(arena)
        self.other = make(arena)
        self.kind = f"checkpoint+{self.other.kind}"
        self.kills = self.other.kills
        self.asked = arena.draw.randrange(len(arena.cluster.nodes))
        self.gap_s = arena.draw.uniform(0.0, 2.0)

    def strike(self, arena: Arena) -> None:
        self._saving = threading.Thread(target=arena.checkpoints.save, args=(self.asked,))
        self._saving.start()
        time.sleep(self.gap_s)
        self.other.strike(arena)
        self.hold_s, self.struck_ns = self.other.hold_s, self.other.struck_ns
        self.what = f"a save by ps-{self.asked}; after {self.gap_s:.2f} s {self.other.what}"

    def undo(self, arena: Arena) -> None:
        self.other.undo(arena)
        self._saving.join()
        arena.checkpoints.save_again(self.asked)
