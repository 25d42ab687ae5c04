"""Settings of the table that change under pushes; each node hears of them in its own time.

The rate of a push stays so near to 1 that rounded rows still count pushes, and differs in bits
that digests see: a replica that applies one push under another rate than the others is found.
"""

from __future__ import annotations

import json
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from tests.sim.events import MS, Micros

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster
    from tests.sim.pserver import Pserver

__all__ = ["TableSettings"]

HEARD_WITHIN = 400 * MS


class TableSettings:
    """Changes settings some times in every second run."""

    def __init__(self, cluster: Cluster, seed: int, end: Micros) -> None:
        self._cluster = cluster
        # Of its own: what else happens in a run stays as it was.
        self._random = Random(f"settings {seed}")
        self._revision = 0
        self._heard: dict[int, int] = {}
        if self._random.random() < 0.5:
            for _ in range(self._random.randrange(1, 8)):
                cluster.queue.at(self._random.randrange(end), self._change)

    def tell(self, process: Pserver) -> None:
        """Have a process hear of the newest settings, soon or late."""
        if self._revision:
            told = partial(self._hear, process, self._revision)
            delay = self._random.randrange(1, HEARD_WITHIN)
            self._cluster.queue.after(delay, partial(process.handle, told))

    def _change(self) -> None:
        self._revision += 1
        queue = self._cluster.queue
        queue.counts["settings_changed"] += 1
        queue.log("settings", lambda: f"revision {self._revision}")
        for process in list(self._cluster.processes.values()):
            self.tell(process)

    def _hear(self, process: Pserver, revision: int) -> None:
        if revision > self._heard.get(process.instance, 0):
            self._heard[process.instance] = revision
            table = json.loads(self._cluster.table_json)
            table["optimizer"]["sgd"]["learning_rate"] = 1.0 + revision / 2**20
            process.native.change_settings(json.dumps(table))
