"""Has every export written as often as it is wanted, as long as this node is the controller."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from backstay.consensus import ClusterView
from backstay.consensus.records.exports import ExportRecord
from backstay.errors import BackstayError
from backstay.pserver.exports.exporter import Exporter
from backstay.pserver.exports.records import ExportRecords
from backstay.tasks import end_tasks

__all__ = ["ExportSchedule"]

# So often it is looked whether this node is the controller.
LOOK_S = 0.2
# At least so long after what could not be written.
FAILED_PAUSE_S = 0.5
# Texts of errors differ: in the store one more is noted so often at most.
TELL_S = 10.0
NO_TABLES = "no table matches its patterns yet, or earlier exports have all that do"

log = logging.getLogger(__name__)


class ExportSchedule:
    """One task for each export."""

    def __init__(
        self,
        view: ClusterView,
        records: ExportRecords,
        open_exporter: Callable[[ExportRecord], Exporter],
        is_controller: Callable[[], bool],
    ) -> None:
        """Prepare.

        Args:
            view: The cluster as this node sees it.
            records: The records of exports.
            open_exporter: Returns what writes an export.
            is_controller: Says whether this node is it.
        """
        self._view = view
        self._records = records
        self._open = open_exporter
        self._is_controller = is_controller

    async def run(self) -> None:
        """Write exports; never returns."""
        running: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                exports = self._view.snapshot().exports if self._is_controller() else {}
                wanted = {one.run: one for one in exports.values()}
                for run in [run for run in running if run not in wanted]:
                    await end_tasks(running.pop(run))
                for run, record in wanted.items():
                    if run not in running:
                        running[run] = asyncio.ensure_future(self._keep_on(record))
                await asyncio.sleep(LOOK_S)
        finally:
            await end_tasks(*running.values())

    async def _keep_on(self, record: ExportRecord) -> None:
        """Write one export until it is stopped, or until cancelled."""
        exporter = self._open(record)
        try:
            await self._write_on(exporter, record)
        finally:
            await exporter.close()

    async def _write_on(self, exporter: Exporter, record: ExportRecord) -> None:
        loop = asyncio.get_running_loop()
        told_s, told = -TELL_S, record.trouble
        while (now := self._now(record)) is not None:
            due_s = loop.time() + record.every_s
            try:
                element = await exporter.write()
                trouble = NO_TABLES if element is None else ""
                # Pushes to a slot that is left out are in the next increment only.
                is_last = now.stopping and not (element and element.left_out)
            except Exception as error:  # noqa: BLE001
                # Whatever a storage raises: it must not end the node.
                trouble, is_last = str(error), False
                due_s = max(due_s, loop.time() + FAILED_PAUSE_S)
            changes = bool(trouble) != bool(told)
            if changes or (trouble != told and loop.time() - told_s > TELL_S):
                log.log(
                    logging.ERROR if trouble else logging.INFO,
                    "export %s: %s",
                    record.name,
                    trouble or "it is written again",
                )
                if await self._note(self._records.tell(record, trouble)):
                    told_s, told = loop.time(), trouble
            if is_last:
                await self._note(self._records.end(record))
            await self._wait_until(due_s, now)

    async def _note(self, change: Awaitable[None]) -> bool:
        """Change the record; False if the store does not answer: it hears of it the next time."""
        try:
            await change
        except BackstayError as error:
            log.warning("the record of an export could not be changed: %s", error)
            return False
        return True

    def _now(self, record: ExportRecord) -> ExportRecord | None:
        now = self._view.snapshot().exports.get(record.name)
        return now if now is not None and now.run == record.run else None

    async def _wait_until(self, due_s: float, known: ExportRecord) -> None:
        """Wait until the next increment is due, or the export is to end or is gone."""
        loop = asyncio.get_running_loop()
        while (left_s := due_s - loop.time()) > 0:
            now = self._now(known)
            if now is None or now.stopping != known.stopping:
                return
            revision = self._view.snapshot().revision
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._view.newer_than(revision), left_s)
