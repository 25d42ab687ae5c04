"""What the demo measures at the servers: memory, rows that came and went, the delay of a push.

May import backstay's local cluster and client. Asks nothing of the job.
"""

from __future__ import annotations

import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPException
from types import TracebackType
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray
from prometheus_client.parser import text_string_to_metric_families

from backstay.errors import BackstayError
from backstay.pserver.local_cluster import LocalCluster
from backstay.tables import SGD, TableSpec, Zeros
from backstay.trainer import Client

__all__ = ["Memory", "Probe", "RowsGone", "delays"]

MIB = 1 << 20
PAUSE_S = 0.1
ASK_S = 5.0
# The names of tables that count records begin so: see docs/glossary.md, job.
AUDIT = "__"


@dataclass(frozen=True)
class Memory:
    """The servers at one moment.

    Attributes:
        resident_mib: Of their processes.
        audit_mib: Of this, the counters of records, which an audit needs and nothing else has.
        rows: Of the model's table; each copy counts.
        row_mib: What they take.
    """

    resident_mib: float
    audit_mib: float
    rows: int
    row_mib: float

    @classmethod
    def of(cls, cluster: LocalCluster, table: str) -> Memory:
        """Ask the servers that answer."""
        resident, size, rows = 0.0, {table: 0.0, AUDIT: 0.0}, 0
        for server in list(cluster.servers):
            try:
                resident += psutil.Process(server.pid).memory_info().rss
            except psutil.NoSuchProcess:
                continue
            figures = _scraped(server.metrics_address)
            rows += int(figures.get(("backstay_table_rows", table), 0))
            for (metric, name), value in figures.items():
                kind = AUDIT if AUDIT in name else name
                if metric == "backstay_table_bytes" and kind in size:
                    size[kind] += value
        return cls(resident / MIB, size[AUDIT] / MIB, rows, size[table] / MIB)


class RowsGone:
    """Counts what the servers counted, whichever of them dies.

    A counter ends with its process: ask before one is killed.
    """

    COUNTERS = ("backstay_rows_expired_total", "backstay_keys_not_admitted_total")

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._seen: defaultdict[str, dict[int, float]] = defaultdict(dict)

    def look(self) -> None:
        """Ask all servers that answer."""
        for server in list(self._cluster.servers):
            figures = _scraped(server.metrics_address)
            for name in self.COUNTERS:
                if (name, "") in figures:
                    self._seen[name][server.pid] = figures[name, ""]

    @property
    def expired(self) -> int:
        """Rows that expiry removed."""
        return int(sum(self._seen[self.COUNTERS[0]].values()))

    @property
    def not_admitted(self) -> int:
        """Keys of pushes that got no row."""
        return int(sum(self._seen[self.COUNTERS[1]].values()))


def _scraped(address: str) -> dict[tuple[str, str], float]:
    """Return a server's metrics by name and table; nothing if it does not answer."""
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=ASK_S) as answer:
            text = answer.read().decode()
    except (OSError, HTTPException):
        return {}
    return {
        (sample.name, sample.labels.get("table", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


class Probe:
    """Pushes 1, 2, 3 ... to a row of its own, and keeps when each was acknowledged.

    A context manager, inside that of the cluster.
    """

    def __init__(self, endpoints: Sequence[str], table: str) -> None:
        """Make the table."""
        self.told: list[tuple[int, float]] = []
        self.trouble = ""
        self._client = Client(endpoints)
        spec = TableSpec.sparse(table, dim=1, optimizer=SGD(1.0), initializer=Zeros())
        self._table = self._client.create_table(spec)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="probe", daemon=True)

    def _run(self) -> None:
        key, one = np.zeros(1, np.uint64), np.full((1, 1), -1.0, np.float32)
        try:
            while not self._stop.wait(PAUSE_S):
                self._client.push(self._table, key, one)
                self.told.append((len(self.told) + 1, time.monotonic()))
        except BackstayError as error:
            self.trouble = str(error)

    def stop(self) -> None:
        """Push no more."""
        self._stop.set()
        self._thread.join()

    def __enter__(self) -> Probe:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
        self._client.close()


def delays(
    told: Sequence[tuple[int, float]], seen: Sequence[tuple[int, float]]
) -> NDArray[np.float64]:
    """Return the seconds from acknowledgement to lookup of each push that was seen.

    Args:
        told: Values of the probe, each with when it was acknowledged.
        seen: Values, each with when a lookup had it first; one stands for those before it, too.
    """
    first = seen[0][0] if seen else 0
    values, times = [value for value, _ in seen], [at for _, at in seen]
    waited: list[Any] = []
    for value, acknowledged in told:
        place = int(np.searchsorted(values, value))
        # What was there before the first look was not waited for.
        if value >= first and place < len(values):
            waited.append(max(times[place] - acknowledged, 0.0))
    return np.array(waited, np.float64)
