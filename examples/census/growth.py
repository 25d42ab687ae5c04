"""Grows and shrinks the cluster in the middle of training, and tells about it.

May import backstay's local cluster. Each resize runs in a thread of its own, so that the job
is watched meanwhile; every wait of it has a limit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from backstay.consensus.records.plans import ResizePlan
from backstay.pserver.local_cluster import LocalCluster
from examples.common.launch import ProcessFailed

__all__ = ["Growth"]

WAIT_SECONDS = 60.0


class Growth:
    """Resizes of a cluster, one after the other. A context manager, inside that of the cluster.

    Attributes:
        reached: The numbers of servers that the cluster was resized to.
        moved_slots: Copies of slots that moved for it.
    """

    def __init__(self, cluster: LocalCluster, tell: Callable[[str], None]) -> None:
        """Prepare.

        Args:
            cluster: Running.
            tell: Called with lines for people, from several threads.
        """
        self.reached: list[int] = []
        self.moved_slots = 0
        self._cluster = cluster
        self._tell = tell
        self._thread: threading.Thread | None = None
        self._leaving: tuple[str, ...] = ()
        self._error: Exception | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a resize is under way."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def may_be_down(self) -> tuple[str, ...]:
        """Servers that leave: they end when they hold nothing."""
        return self._leaving

    def begin(self, servers: int) -> None:
        """Resize to so many servers; returns at once."""
        before = len(self._cluster.servers)
        self._tell(f"resize: from {before} to {servers} pservers, while training goes on")
        self._thread = threading.Thread(
            target=self._run, args=(servers,), name="resize", daemon=True
        )
        self._thread.start()

    def check(self) -> None:
        """Fail if a resize has failed.

        Raises:
            ProcessFailed: It has.
        """
        if self._error is not None:
            raise ProcessFailed(f"the resize failed: {self._error}") from self._error

    def finish(self) -> None:
        """Wait for the end of what is under way.

        Raises:
            ProcessFailed: It does not end, or it failed.
        """
        if self._thread is not None:
            self._thread.join(WAIT_SECONDS)
        if self.is_busy:
            raise ProcessFailed(f"the resize is not done after {WAIT_SECONDS:.0f} s")
        self.check()

    def __enter__(self) -> Growth:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._thread is not None:
            self._thread.join(WAIT_SECONDS)

    def _run(self, servers: int) -> None:
        begun_s = time.monotonic()
        try:
            plan = self._cluster.resize(servers, timeout_s=WAIT_SECONDS, progress=self._note)
        except Exception as error:  # noqa: BLE001
            # Whatever it is: ``check`` raises it in the main thread.
            self._error = error
            return
        self.reached.append(servers)
        self.moved_slots += plan.moves_total
        left = ", ".join(self._leaving)
        self._leaving = ()
        self._tell(
            f"{servers} pservers now, after {time.monotonic() - begun_s:.1f} s: "
            f"{plan.moves_total} copies of slots have moved"
            + (f"; {left} held nothing any more and has ended" if left else "")
        )

    def _note(self, plan: ResizePlan) -> None:
        self._leaving = tuple(one.node_id for one in plan.leaving)
