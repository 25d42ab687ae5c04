"""What may happen to the export of a job over a topic, and to its follower."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

import numpy as np

from backstay.checkpoint.manifest import MANIFEST_FILE, Manifest, kind_of, number_of
from backstay.checkpoint.storage import ExportFolder
from backstay.errors import BackstayError
from backstay.tables import SGD, TableSpec, Zeros
from backstay.trainer import Client
from tests.chaos.cluster import NotYet
from tests.chaos.job_faults import JobArena
from tests.chaos.sinks import FolderSink
from tests.chaos.steps import at_open
from tests.chaos.stream_faults import TOLD_LIMIT_S, StreamArena, StreamFault

__all__ = ["EXPORT_FAULTS"]

# What the servers may take more of while nothing is exported; pushes are many times that.
GROWTH_MAX = 48 << 20
KEYS, DIM = 2000, 64
# Until a follower reads what is there.
OPEN_LIMIT_S = 5.0


class SinkAway(StreamFault):
    """The sink cannot be written: training goes on, memory stays, the increment comes later."""

    kind = "sink_away"

    def __init__(self, arena: JobArena) -> None:
        super().__init__(arena)
        assert isinstance(arena, StreamArena)
        self.hold_s = 0.0
        self._outage_s = arena.outage_s

    def begin(self, arena: StreamArena) -> None:
        """Let it be so."""
        arena.sink.away(arena.shape.name)

    def end(self, arena: StreamArena) -> None:
        """Let it be as before."""
        arena.sink.back(arena.shape.name)

    def strike_stream(self, arena: StreamArena) -> None:
        load = Load(arena)
        load.start()
        try:
            load.wait_pushes(20)
            arena.parts.follower.wait_fresh()
            before, pushed = arena.resident(), load.pushes
            self.begin(arena)
            begun_s = time.monotonic()
            arena.wait_for("a word about the sink", lambda: arena.trouble() or None)
            arena.job.wait_going_on()
            time.sleep(max(0.0, begun_s + self._outage_s - time.monotonic()))
            grown, count = arena.resident() - before, load.pushes - pushed
        finally:
            load.stop()
        self.what = (
            f"for {time.monotonic() - begun_s:.0f} s: {count * load.bytes >> 20} MiB pushed, "
            f"servers grew by {grown / (1 << 20):.1f} MiB"
        )
        if grown > GROWTH_MAX:
            arena.parts.wrong.append(f"{self.kind}, {self.what}")

    def undo_stream(self, arena: StreamArena) -> None:
        self.end(arena)


class SinkFull(SinkAway):
    """The sink has no byte left."""

    kind = "sink_full"
    needs_folder = True
    needs_room = True

    def begin(self, arena: StreamArena) -> None:
        assert isinstance(arena.sink, FolderSink)
        arena.sink.fill()

    def end(self, arena: StreamArena) -> None:
        assert isinstance(arena.sink, FolderSink)
        arena.sink.drain()


class Load:
    """Pushes of many bytes to a table of the job, by a client of the run's own."""

    bytes = KEYS * DIM * 4

    def __init__(self, arena: StreamArena) -> None:
        """Prepare; ``start`` starts it."""
        self._endpoints = arena.cluster.endpoints
        self._table = f"{arena.shape.name}/load"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.pushes = 0
        self._failed = ""

    def start(self) -> None:
        """Start it."""
        self._thread.start()

    def stop(self) -> None:
        """End it."""
        self._stop.set()
        self._thread.join()

    def wait_pushes(self, count: int) -> None:
        """Wait for so many.

        Raises:
            NotYet: They do not come.
        """
        deadline_s = time.monotonic() + TOLD_LIMIT_S
        while self.pushes < count:
            if time.monotonic() > deadline_s or self._failed:
                raise NotYet(f"{self.pushes} pushes; {self._failed}")
            time.sleep(0.02)

    def _run(self) -> None:
        keys = np.arange(KEYS, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        ones = np.full((KEYS, DIM), -1.0, np.float32)
        try:
            with Client(self._endpoints) as client:
                spec = TableSpec.sparse(
                    self._table, dim=DIM, optimizer=SGD(1.0), initializer=Zeros()
                )
                client.create_table(spec)
                while not self._stop.wait(0.03):
                    client.push(self._table, keys, ones)
                    self.pushes += 1
        except BackstayError as error:
            self._failed = str(error)


class KillFollower(StreamFault):
    """SIGKILL of the follower while it reads the part of an increment, again and again."""

    kind = "follower_sigkill"
    needs_folder = True
    times = 3

    def strike_stream(self, arena: StreamArena) -> None:
        follower = arena.parts.follower
        # So that there is something to read.
        load = Load(arena)
        load.start()
        try:
            load.wait_pushes(1)
            in_the_middle = 0
            for _ in range(self.times):
                follower.wait_until("the follower does not start", bool)
                in_the_middle += at_open(follower.pid, f"{arena.served}/inc-", OPEN_LIMIT_S)
                follower.kill()
                follower.start()
        finally:
            load.stop()
        self.what = f"{self.times} times, {in_the_middle} of them while it read"


class PauseFollower(StreamFault):
    """SIGSTOP of the follower until elements that it needs may be gone."""

    kind = "follower_sigstop"

    def __init__(self, arena: JobArena) -> None:
        super().__init__(arena)
        assert isinstance(arena, StreamArena)
        self.hold_s = arena.outage_s
        self.what = f"for {self.hold_s:.1f} s"

    def strike_stream(self, arena: StreamArena) -> None:
        arena.parts.follower.pause()

    def undo_stream(self, arena: StreamArena) -> None:
        arena.parts.follower.resume()


class Damage(StreamFault):
    """A byte of an increment flips before the follower reads it: named, and not used."""

    kind = "part_damaged"
    needs_folder = True

    def file_of(self, element: Manifest) -> str:
        """Return what is damaged."""
        return element.parts[0].file

    def strike_stream(self, arena: StreamArena) -> None:
        follower = arena.parts.follower
        follower.wait_fresh()
        follower.pause()
        chosen = arena.wait_for("an increment with rows", lambda: _newer(arena))
        self._path = arena.served / chosen.id / self.file_of(chosen)
        self._content = self._path.read_bytes()
        place = arena.draw.randrange(len(self._content))
        damaged = bytearray(self._content)
        damaged[place] ^= 1 << arena.draw.randrange(8)
        # In place: parts of a file that is there are another file after a rename.
        beside = self._path.with_name("damaged")
        beside.write_bytes(damaged)
        beside.replace(self._path)
        follower.resume()
        follower.wait_until(
            f"{chosen.id} is not named",
            lambda _: chosen.id in follower.log_tail() or _base_after(arena, chosen),
            TOLD_LIMIT_S,
        )
        number = number_of(follower.status()["element"])
        if number >= chosen.number and not _base_after(arena, chosen):
            arena.parts.wrong.append(f"{self.kind}: {chosen.id} was used, it is at {number}")
        self._is_put_right = arena.draw.random() < 0.5
        self.what = f"{chosen.id}, " + ("put right" if self._is_put_right else "until a new base")

    def undo_stream(self, arena: StreamArena) -> None:
        if self._is_put_right:
            with suppress(FileNotFoundError):
                self._path.write_bytes(self._content)


class DamageManifest(Damage):
    """The same of the manifest of an increment."""

    kind = "manifest_damaged"

    def file_of(self, element: Manifest) -> str:
        return MANIFEST_FILE


def _newer(arena: StreamArena) -> Manifest | None:
    """Return the first increment with a part that the follower does not have."""
    folder = ExportFolder(arena.served)
    told = arena.parts.follower.status()
    for name in folder.names() if told else []:
        if kind_of(name) == "delta" and number_of(name) > number_of(told["element"]):
            found = folder.read(name)
            if found is not None and found.parts:
                return found
    return None


def _base_after(arena: StreamArena, element: Manifest) -> bool:
    """Whether a base has what a damaged element has: it may be taken before anybody looks."""
    folder = ExportFolder(arena.served)
    return any(
        kind_of(name) == "full" and number_of(name) > element.number and folder.is_finished(name)
        for name in folder.names()
    )


EXPORT_FAULTS: tuple[type[StreamFault], ...] = (
    *(SinkAway, SinkFull),
    *(KillFollower, PauseFollower, Damage, DamageManifest),
)
