"""``Follower``: keeps the rows of a running export in memory, and up to date.

A thread looks for new elements, and makes the next version of the tables beside the served one, so
lookups need no lock. It names files that are damaged or missing, and uses nothing of their element.
"""

from __future__ import annotations

import json
import logging
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backstay._native import ServedTables
from backstay.checkpoint.chain import Followed, Step, after_delta, after_full, begins_anew
from backstay.checkpoint.manifest import NO_PART, Manifest, kind_of, number_of
from backstay.checkpoint.storage import ExportFolder
from backstay.errors import BackstayError, CheckpointNotFound, ConfigError, text_of
from backstay.serving.tables import FollowedTable, Version, dense_values
from backstay.tables import Dense, Sparse, TableSpec

__all__ = ["Follower", "FollowerStatus"]

POLL_S = 0.2
# The longest pause between two tries of an element that is damaged or out of reach.
RETRY_S_MAX = 5.0
WAIT_S = 30.0
# ``close`` waits so long for what is under way: a storage may hang.
CLOSE_S = 5.0
NO_BASE = (
    "no running export (`exports` of a job, `pserverctl export start`) has written one; a model of "
    "`backstay export` is loaded without follow=True"
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FollowerStatus:
    """How old the served rows are, and what is wrong.

    Attributes:
        element: The newest element that it has.
        age_s: Lookups see every push that was acknowledged so long ago, if the clocks of servers
            and this machine agree.
        chain: The base that its chain began with.
        reason: Why that chain began.
        version: Grows with every change of what is served.
        rows: Rows of all tables, dense ones' blocks among them.
        bytes: Memory that they take.
        trouble: What is damaged, missing or out of reach; empty if nothing is.
    """

    element: str
    age_s: float
    chain: str
    reason: str
    version: int
    rows: int
    bytes: int
    trouble: str


class Follower:
    """The newest rows of a running export. For any thread; a context manager.

    It has the methods of ``backstay.checkpoint.trained.TrainedTables``, so that a model can be made
    of it.
    """

    model = None

    def __init__(
        self,
        url: str | Path,
        *,
        options: Mapping[str, Any] | None = None,
        poll_s: float = POLL_S,
        wait_s: float | None = None,
    ) -> None:
        """Open an export, and load its newest base and the increments after it.

        Args:
            url: The folder or URL that ``pserverctl export start`` names.
            options: For fsspec's file system.
            poll_s: Seconds from one look for new elements to the next.
            wait_s: How long to wait for a base, and then for the increments that are there; later
                ones are taken while it serves. Default: 30 s.

        Raises:
            ConfigError: There is no such protocol, or a number is out of range.
            CheckpointNotFound: There is no whole base after ``wait_s``; the message says why.
        """
        wait_s = WAIT_S if wait_s is None else wait_s
        if not poll_s > 0 or not wait_s >= 0:
            raise ConfigError(
                f"poll_s is {poll_s:g}, wait_s is {wait_s:g}: poll_s must be above 0, wait_s at "
                "least 0"
            )
        self._folder = ExportFolder(url, options)
        self._poll_s = poll_s
        self._scratch = tempfile.TemporaryDirectory(
            prefix="backstay-follower-", ignore_cleanup_errors=True
        )
        # Replaced as a whole: a reader has the old version or the new one.
        self._version: Version | None = None
        # Whether all that was there, when there was a base first, was looked at.
        self._has_looked = False
        self._trouble = NO_BASE
        # Elements that were looked at and are not taken, as long as the chain is this one.
        self._passed: set[str] = set()
        # Elements that were no use, each with when to try it again.
        self._tried: dict[str, tuple[float, float]] = {}
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="backstay-follower", daemon=True)
        self._thread.start()
        with self._changed:
            if self._changed.wait_for(lambda: self._number() > 0, wait_s):
                self._changed.wait_for(lambda: self._has_looked, wait_s)
                return
        self.close()
        raise CheckpointNotFound(
            f"{self.where} has no base to begin with after {wait_s:g} s: {self._trouble}"
        )

    @property
    def where(self) -> str:
        """The folder or URL, for messages."""
        return self._folder.url

    @property
    def sparse(self) -> tuple[TableSpec, ...]:
        """Descriptions of the sparse tables."""
        return tuple(one for one in self._newest().state.specs if isinstance(one.kind, Sparse))

    @property
    def dense_tables(self) -> tuple[TableSpec, ...]:
        """Descriptions of the dense tables."""
        return tuple(one for one in self._newest().state.specs if isinstance(one.kind, Dense))

    @property
    def status(self) -> FollowerStatus:
        """How old the served rows are, and what is wrong."""
        version = self._newest()
        newest = version.state.newest
        return FollowerStatus(
            element=newest.id,
            age_s=time.time() - float(version.state.as_of.min()),
            chain=newest.chain,
            reason=newest.reason,
            version=version.number,
            rows=sum(version.tables.row_count(spec.name) for spec in version.state.specs),
            bytes=version.tables.allocated_bytes,
            trouble=self._trouble,
        )

    @property
    def version(self) -> int:
        """The number of the served version; it grows with every change."""
        return self._newest().number

    @property
    def positions(self) -> NDArray[np.uint64]:
        """The position of each served slot: transactions that it has applied."""
        return self._newest().state.position.copy()

    def table(self, name: str) -> FollowedTable:
        """Return a sparse table; it stays, and always has the newest rows.

        Raises:
            InvalidRequest: There is none of that name.
        """
        return FollowedTable(self._newest().spec(name, Sparse), self._newest)

    def dense(self, name: str) -> NDArray[np.float32]:
        """Return a dense table as it is now.

        Raises:
            InvalidRequest: There is none of that name.
        """
        return dense_values(self._newest(), name)

    def wait_for_version(self, number: int, *, timeout_s: float) -> int:
        """Wait until a version of that number or above is served; return its number.

        Raises:
            TimeoutError: It took longer.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._number() >= number, timeout_s):
                raise TimeoutError(f"no version {number} after {timeout_s:g} s: {self._trouble}")
        return self._number()

    def close(self) -> None:
        """Stop following. Lookups go on, with the rows as they are."""
        self._stop.set()
        self._thread.join(CLOSE_S)
        self._scratch.cleanup()

    def __enter__(self) -> Follower:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _number(self) -> int:
        return 0 if self._version is None else self._version.number

    def _newest(self) -> Version:
        version = self._version
        assert version is not None, "the constructor waits for it"
        return version

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                trouble = self._look()
            except Exception as error:  # noqa: BLE001
                # Whatever a storage raises: what is served stays, and it is tried again.
                trouble = text_of(error)
            if trouble and trouble != self._trouble:
                log.warning("%s: %s", self.where, trouble)
            elif self._trouble not in (trouble, NO_BASE):
                log.info("%s: all is well again", self.where)
            self._trouble = trouble
            if self._version is not None and not self._has_looked:
                with self._changed:
                    self._has_looked = True
                    self._changed.notify_all()
            self._stop.wait(self._poll_s)

    def _look(self) -> str:
        """Take new elements; return what is wrong, or an empty text."""
        names = self._folder.names()
        self._tried = {name: at for name, at in self._tried.items() if name in names}
        self._passed &= set(names)
        # A base that is damaged does not keep the increments of now from being taken.
        no_chain = self._take_chain(names)
        wrong = self._take_deltas(names)
        if not wrong and self._is_cut_off(names):
            wrong = "the elements that it followed are gone, and no new base has come"
        if wrong and self._take_full(names):
            # It has what was missing.
            wrong = self._take_deltas(names)
        return no_chain or wrong

    def _take_chain(self, names: list[str]) -> str:
        """Begin anew with the newest base that begins a chain, if there is one."""
        state = self._state
        wrong = "" if state else NO_BASE
        # Where a folder was emptied, numbers begin anew.
        known = 0 if state is None or self._is_cut_off(names) else number_of(state.chain)
        for name in reversed([name for name in names if kind_of(name) == "full"]):
            if number_of(name) <= known:
                break
            if name in self._passed:
                continue
            base, said = self._read(name)
            wrong = said or wrong
            if base is None:
                continue
            if not begins_anew(self._state, base):
                self._passed.add(name)
                continue
            said = self._take(after_full(None, base), base)
            if not said:
                self._passed.clear()
                return ""
            wrong = said
        return wrong

    def _is_cut_off(self, names: list[str]) -> bool:
        """Whether the element that it has taken last is gone: the newest one always stays."""
        state = self._state
        return state is not None and state.newest.id not in names

    def _take_deltas(self, names: list[str]) -> str:
        wrong = ""
        for name in names:
            state = self._state
            if state is None:
                break
            if kind_of(name) != "delta" or number_of(name) <= state.number:
                continue
            if name in self._passed:
                continue
            delta, said = self._read(name)
            if delta is not None and delta.chain != state.chain:
                self._passed.add(name)
            elif delta is not None:
                step = after_delta(state, delta)
                said = step.missing or self._take(step, delta)
            wrong = wrong or said
            if self._stop.is_set():
                break
        return wrong

    def _take_full(self, names: list[str]) -> bool:
        """Take what is newer in a base of the chain that is followed; whether there was one."""
        for name in reversed(names):
            state = self._state
            if state is None or number_of(name) <= state.number:
                break
            if kind_of(name) != "full":
                continue
            base, _ = self._read(name)
            if base is not None and base.chain == state.chain:
                return not self._take(after_full(state, base), base)
        return False

    @property
    def _state(self) -> Followed | None:
        version = self._version
        return None if version is None else version.state

    def _read(self, name: str) -> tuple[Manifest | None, str]:
        """Return an element if it is whole, and what is wrong with it."""
        due_s, _ = self._tried.get(name, (0.0, 0.0))
        if time.monotonic() < due_s:
            return None, self._trouble
        try:
            return self._folder.read(name), ""
        except BackstayError as error:
            self._try_later(name)
            return None, text_of(error)

    def _try_later(self, name: str) -> None:
        _, pause_s = self._tried.get(name, (0.0, self._poll_s))
        pause_s = min(2 * pause_s, RETRY_S_MAX)
        self._tried[name] = time.monotonic() + pause_s, pause_s

    def _take(self, step: Step, snapshot: Manifest) -> str:
        """Make the next version of an element and serve it; return what is wrong with it."""
        version = self._version
        if version is not None and version.state.chain == snapshot.chain:
            tables = version.tables
        else:
            specs = [(spec.name, spec.row_elements) for spec in snapshot.tables]
            tables = ServedTables(snapshot.slot_count, specs)
        try:
            tables = self._with(tables, snapshot, step.slots)
        except BackstayError as error:
            self._try_later(snapshot.id)
            return f"{snapshot.id} is not used: {error}"
        self._tried.pop(snapshot.id, None)
        with self._changed:
            self._version = Version(self._number() + 1, step.state, tables)
            self._changed.notify_all()
        return ""

    def _with(
        self, tables: ServedTables, snapshot: Manifest, slots: NDArray[np.int64]
    ) -> ServedTables:
        """Return tables with some slots of an element.

        Raises:
            CheckpointDamaged: A part is not what the manifest says.
            CheckpointUnavailable: A part cannot be read.
        """
        entries = snapshot.slots
        wanted: dict[int, list[int]] = {}
        for slot in slots.tolist():
            wanted.setdefault(int(entries.part[slot]), []).append(slot)
        empty = [slot for slot in wanted.pop(NO_PART, []) if entries.whole[slot]]
        tables = tables.with_parts("[]", empty)
        for index, some in sorted(wanted.items()):
            part = snapshot.parts[index]
            path = self._folder.fetch_part(snapshot, index, Path(self._scratch.name))
            asked = {
                "path": str(path),
                "bytes": part.bytes,
                "sha256": part.sha256,
                "element": snapshot.id,
                "slots": [
                    {
                        "slot": slot,
                        "position": int(entries.position[slot]),
                        "whole": bool(entries.whole[slot]),
                    }
                    for slot in some
                ],
            }
            try:
                tables = tables.with_parts(json.dumps([asked]), [])
            finally:
                if not self._folder.is_local:
                    path.unlink(missing_ok=True)
        return tables
