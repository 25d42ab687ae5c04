"""Carries what the data plane reports to the controller: ``reports/<instance>``.

A thread waits for the native side; what it says becomes a record, written when it changes. A
backup whose port refused connections is looked at again from here, since a refusal alone, by an
address that may be old, is not evidence enough.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from backstay._native import DataServer
from backstay.consensus.records import CaughtUp, NodeReport
from backstay.consensus.records.keys import Keys
from backstay.consensus.store import CoordinationStore, Get, Put, Txn, mod_revision_is
from backstay.errors import LeaseLost, StoreUnavailable
from backstay.pserver.metrics.figures import ControlFigures

__all__ = ["NativeReport", "Reporter"]

WAIT_MS = 200
RETRY_PAUSE_S = 0.1
# After a report, copies that catch up are collected for the next one.
COPIES_PAUSE_S = 0.05

log = logging.getLogger(__name__)


class NativeReport(NamedTuple):
    """What the data plane says.

    Attributes:
        report: The part that is for the controller.
        refused: Processes whose data port refused a connection.
    """

    report: NodeReport
    refused: tuple[int, ...]

    @classmethod
    def from_json(cls, instance: int, text: str) -> NativeReport:
        """Read the native side's words."""
        said = json.loads(text)
        return cls(
            NodeReport(
                instance=instance,
                routing_version=said["routing_version"],
                silent=tuple(sorted(said["silent"])),
                full=tuple(sorted(said["full"])),
                caught_up=tuple(sorted(CaughtUp(*entry) for entry in said["caught_up"])),
                loaded=tuple(sorted((slot, epoch) for slot, epoch in said["loaded"])),
            ),
            tuple(said["refused"]),
        )


class Reporter:
    """Waits for reports in a thread and writes them in the event loop."""

    def __init__(
        self,
        store: CoordinationStore,
        keys: Keys,
        instance: int,
        server: DataServer,
        suspect: Callable[[int, str], Awaitable[bool]],
        figures: ControlFigures,
    ) -> None:
        """Prepare; call it while the event loop runs."""
        self._store = store
        self._keys = keys
        self._instance = instance
        self._server = server
        self._suspect = suspect
        self._figures = figures
        self._loop = asyncio.get_running_loop()
        self._latest: NativeReport | None = None
        self._news = asyncio.Event()
        self._stopping = threading.Event()
        self._load_trouble = ""
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to listen to the data plane."""
        # A daemon: a native call that hangs must not keep the process alive.
        self._thread = threading.Thread(target=self._listen, name="reports", daemon=True)
        self._thread.start()

    def set_load_trouble(self, reason: str) -> None:
        """Report why slots cannot be loaded from a checkpoint; empty when they can."""
        if reason != self._load_trouble:
            self._load_trouble = reason
            self._news.set()

    async def stop(self) -> None:
        """Stop listening."""
        self._stopping.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, 2 * WAIT_MS / 1000)

    async def run(self, lease: int) -> None:
        """Write each report under this lease; never returns.

        Raises:
            LeaseLost: It is over.
        """
        # None: what the store has is not known, because an answer did not come.
        written: NodeReport | None = NodeReport(self._instance, 0)
        key, revision = self._keys.report(self._instance), 0
        if self._latest is not None:
            self._news.set()
        suspected: set[asyncio.Future[bool]] = set()
        heard: NativeReport | None = None
        calm_until_s = 0.0
        while True:
            await self._news.wait()
            self._news.clear()
            said = self._latest
            if said is None:
                continue
            for instance in said.refused if said is not heard else ():
                task = asyncio.ensure_future(
                    self._suspect(instance, "its ports refuse connections, says its master")
                )
                suspected.add(task)
                task.add_done_callback(suspected.discard)
            heard = said
            report = replace(said.report, load_trouble=self._load_trouble)
            if not report.is_news_after(written):
                continue
            left_s = calm_until_s - self._loop.time()
            if left_s > 0 and written is not None and report.adds_copies_only(written):
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._news.wait(), left_s)
                self._news.set()
                continue
            calm_until_s = self._loop.time() + COPIES_PAUSE_S
            # Only over what is known to be there: a write that was given up unseen may still come
            # to the store, and must not replace a newer one.
            txn = Txn(
                (mod_revision_is(key, revision),),
                (Put(key, report.to_json(), lease),),
                (Get(key),),
            )
            try:
                result = await self._store.transaction(txn)
                if result.succeeded:
                    written, revision = report, result.revision
                else:
                    held = result.results[0]
                    written, revision = None, 0 if held is None else held.mod_revision
                    self._news.set()
            except StoreUnavailable as error:
                log.warning("a report could not be written: %s", error)
                written = None
                await asyncio.sleep(RETRY_PAUSE_S)
                self._news.set()
            except LeaseLost:
                self._news.set()
                raise

    def _listen(self) -> None:
        known = 0
        while not self._stopping.is_set():
            number, text = self._server.wait_report(known, WAIT_MS)
            if number > known:
                known = number
                said = NativeReport.from_json(self._instance, text)
                self._loop.call_soon_threadsafe(self._take, said)

    def _take(self, said: NativeReport) -> None:
        self._latest = said
        self._figures.report_sizes = {
            "silent": len(said.report.silent),
            "full": len(said.report.full),
            "caught_up": len(said.report.caught_up),
            "refused": len(said.refused),
        }
        self._news.set()
