"""Writes each export when its time or its pushes have come, while this node is the controller."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from backstay.consensus import ClusterView
from backstay.consensus.records.exports import ExportRecord
from backstay.errors import BackstayError, text_of
from backstay.pserver.exports.exporter import Exporter
from backstay.pserver.exports.records import ExportRecords
from backstay.pserver.exports.topic.publisher import TopicPublisher
from backstay.pserver.metrics.export_figures import ExportCounter, ExportsFigures
from backstay.pserver.snapshots.due import Due, Every
from backstay.tasks import end_tasks

__all__ = ["ExportSchedule"]

# Between two looks whether this node is the controller.
LOOK_S = 0.2
# The least pause after an element that could not be written.
FAILED_PAUSE_S = 0.5
# Between two texts of errors in the store: they may differ each time.
TELL_S = 10.0
NO_TABLES = "no table matches its patterns yet, or earlier exports have all that do"

log = logging.getLogger(__name__)


class ExportSchedule:
    """One task for each export."""

    def __init__(
        self,
        view: ClusterView,
        records: ExportRecords,
        open_exporter: Callable[[ExportRecord, ExportCounter], Exporter],
        open_publisher: Callable[[ExportRecord, ExportCounter], TopicPublisher],
        open_due: Callable[[], Due],
        is_controller: Callable[[], bool],
        figures: ExportsFigures,
    ) -> None:
        """Prepare.

        Args:
            view: The cluster as this node sees it.
            records: The records of exports.
            open_exporter: Returns what writes an export.
            open_publisher: Returns what writes the topic of one that has a topic.
            open_due: Returns what follows when an increment is due.
            is_controller: Says whether this node is it.
            figures: Of the exports that this node writes.
        """
        self._view = view
        self._records = records
        self._open = open_exporter
        self._open_publisher = open_publisher
        self._open_due = open_due
        self._figures = figures
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
        counter = self._figures.begin(record.name)
        exporter = self._open(record, counter)
        publisher = None if record.spec.topic is None else self._open_publisher(record, counter)
        try:
            await self._write_on(exporter, publisher, record, counter)
        finally:
            if publisher is not None:
                await publisher.close()
            await exporter.close()
            self._figures.end(record.name)

    async def _write_on(
        self,
        exporter: Exporter,
        publisher: TopicPublisher | None,
        record: ExportRecord,
        counter: ExportCounter,
    ) -> None:
        loop, due = asyncio.get_running_loop(), self._open_due()
        every = Every(record.spec.every_s, record.spec.every_pushes, by_busiest=True)
        told_s, told = -TELL_S, record.trouble
        while (now := self._now(record)) is not None:
            await due.begin(every, loop.time())
            pause_s = 0.0
            try:
                element = await exporter.write()
                trouble = NO_TABLES if element is None else ""
                # Pushes to a slot that is left out are in the next increment only.
                is_last = now.stopping and not (element and element.left_out)
            except Exception as error:  # noqa: BLE001
                # Whatever a storage raises: it must not end the node.
                element = None
                counter.failed()
                trouble, is_last = text_of(error), False
                pause_s = FAILED_PAUSE_S
            if publisher is not None and element is not None:
                publisher.look()
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
                if publisher is not None and element is not None:
                    await self._until_published(publisher, element.number, record)
                await self._note(self._records.end(record))
            await self._until_due(due, every, now, loop.time() + pause_s)

    async def _until_published(
        self, publisher: TopicPublisher, number: int, record: ExportRecord
    ) -> None:
        """Wait until the topic has the last element, too, or the export is ended without it."""
        while self._now(record) is not None and not publisher.has(number):
            revision = self._view.snapshot().revision
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._view.newer_than(revision), LOOK_S)

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

    async def _until_due(
        self, due: Due, every: Every, known: ExportRecord, not_before_s: float
    ) -> None:
        """Wait until the next increment is due, or the export is to end or is gone."""
        loop = asyncio.get_running_loop()
        while not await due.is_due(every, loop.time()) or loop.time() < not_before_s:
            now = self._now(known)
            if now is None or now.stopping != known.stopping:
                return
            pause_s = max(due.next_look_s(every, loop.time()), not_before_s - loop.time())
            revision = self._view.snapshot().revision
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._view.newer_than(revision), pause_s)
