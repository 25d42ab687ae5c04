"""A trainer that counts: a program that pushes to the counter table and writes a history.

``python -m tests.chaos.trainer JSON``. SGD with rate 1 and gradient -1 adds 1 to each key of a
push. It ends when standard input closes, after what it has sent is acknowledged.

Some pushes also go to a crowded table, whose rows come and go all the time. Which ones there are
depends on the order of all trainers' pushes, so only its copies are compared.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from backstay.config import ClientConfig
from backstay.errors import (
    BackstayError,
    DeadlineExceeded,
    RequestRefused,
    ServerUnavailable,
    StateLost,
)
from backstay.tables import SGD, AdmitAfter, Capacity, Expiry, Lifetime, TableSpec, Zeros
from backstay.trainer import Client
from backstay.trainer.pending import Pending
from tests.chaos.history import Keys, Shape, Writer, keys_of

__all__ = ["DIM", "TABLE", "TrainerSettings", "main"]

TABLE = "count"
DIM = 4
READ_EVERY = 10
CROWD_EVERY = 5
# The fewest rows of a slot that a capacity may give.
CROWD_SHARE = 16


@dataclass(frozen=True)
class TrainerSettings:
    """What one trainer process is told.

    Attributes:
        endpoints: Control addresses of nodes.
        path: Its history.
        stream: Its number, unique in the run.
        shape: What keys are drawn from.
        window: Pushes under way at most.
        pause_s: Pause after each push, so that two cores suffice for all.
        deadline_ms: Time a push may take, all its retries included.
    """

    endpoints: tuple[str, ...]
    path: str
    stream: int
    shape: Shape
    window: int = 4
    pause_s: float = 0.005
    deadline_ms: int = 120_000

    def to_json(self) -> str:
        """Return it as the program's argument."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> TrainerSettings:
        """Return what ``to_json`` gave."""
        fields = json.loads(text)
        fields["shape"] = Shape(**fields["shape"])
        fields["endpoints"] = tuple(fields["endpoints"])
        return cls(**fields)


def table_spec() -> TableSpec:
    """Return the counter table."""
    return TableSpec.sparse(TABLE, DIM, optimizer=SGD(1.0), initializer=Zeros())


def crowded_spec(slots: int) -> TableSpec:
    """Return the crowded table: admission, expiry by the servers, and a capacity."""
    lifetime = Lifetime(
        AdmitAfter(2),
        expiry=Expiry(unseen_seconds=20, every_seconds=5),
        capacity=Capacity(rows=CROWD_SHARE * slots, evict="least_frequent"),
    )
    return TableSpec.sparse("crowd", DIM, optimizer=SGD(1.0), lifetime=lifetime)


class Counter:
    """Pushes, and keeps account."""

    def __init__(self, client: Client, writer: Writer, told: TrainerSettings) -> None:
        self._client = client
        self._table = client.create_table(table_spec())
        slots = client.cluster().routing.slot_count
        self._crowd = client.create_table(crowded_spec(slots))
        self._crowding: deque[Pending[None]] = deque()
        self._writer = writer
        self._told = told
        self._sequence = 0
        self._under_way: deque[tuple[int, Keys, Pending[None]]] = deque()
        self._acknowledged = np.zeros(told.shape.universe, dtype=np.int64)
        self._gradients = np.full((told.shape.universe, DIM), -1.0, dtype=np.float32)

    def push(self) -> None:
        """Send the next push; wait for the oldest one if too many are under way."""
        sequence, self._sequence = self._sequence, self._sequence + 1
        keys = keys_of(self._told.shape, self._told.stream, sequence)
        self._writer.begun(sequence, keys)
        pending = self._client.push_async(self._table, keys, self._gradients[: len(keys)])
        self._under_way.append((sequence, keys, pending))
        if sequence % CROWD_EVERY == 0:
            self._push_to_crowd(keys)
        if len(self._under_way) >= self._told.window:
            self.flush()
        if sequence % READ_EVERY == READ_EVERY - 1:
            self.read(keys)

    def _push_to_crowd(self, keys: Keys) -> None:
        gradients = self._gradients[: len(keys)]
        self._crowding.append(self._client.push_async(self._crowd, keys, gradients))
        if len(self._crowding) >= self._told.window:
            self._flush_crowd()

    def _flush_crowd(self) -> None:
        try:
            self._crowding.popleft().result()
        except StateLost:
            raise
        except BackstayError:
            pass  # No account is kept of what this table should have.

    def flush(self) -> None:
        """Wait for the oldest push and write its outcome down."""
        sequence, keys, pending = self._under_way.popleft()
        try:
            pending.result()
        except StateLost:
            raise
        except (ServerUnavailable, RequestRefused) as error:
            # Their contract: nothing of it was applied.
            self._writer.ended(sequence, "not_applied", f"{type(error).__name__}: {error}")
        except BackstayError as error:
            self._writer.ended(sequence, "unknown", f"{type(error).__name__}: {error}")
        else:
            self._writer.ended(sequence, "acknowledged")
            self._acknowledged[keys] += 1

    def read(self, keys: Keys) -> None:
        """Pull and compare with what this trainer has been told is applied."""
        keys = np.unique(np.concatenate([keys, np.arange(self._told.shape.hot, dtype=np.uint64)]))
        least = self._acknowledged[keys].copy()
        try:
            rows = self._client.pull(self._table, keys)
        except (ServerUnavailable, DeadlineExceeded):
            return
        low = np.flatnonzero(rows.min(axis=1) < least)
        if len(low):
            at = int(low[0])
            self._writer.stale(int(keys[at]), float(rows[at].min()), int(least[at]))
        else:
            self._writer.read(len(keys))

    def flush_all(self) -> None:
        """Wait for every push."""
        while self._under_way:
            self.flush()
        while self._crowding:
            self._flush_crowd()


def main(arguments: Sequence[str]) -> int:
    """Run until standard input closes."""
    told = TrainerSettings.from_json(arguments[0])
    stop = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        stop.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    writer = Writer(Path(told.path), told.stream, told.shape)
    config = ClientConfig(deadline_ms=told.deadline_ms)
    with Client(told.endpoints, config=config) as client:
        counter = Counter(client, writer, told)
        try:
            while not stop.wait(told.pause_s):
                counter.push()
            counter.flush_all()
        except StateLost as error:
            writer.state_lost(str(error))
    writer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
