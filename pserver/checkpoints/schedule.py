"""Checkpoints by time and by pushes, asked for by the controller."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from backstay.consensus import ClusterView
from backstay.errors import text_of
from backstay.pserver.checkpoints.saving import Saver
from backstay.pserver.snapshots.due import Due, Every

__all__ = ["CheckpointSchedule"]

LOOK_S = 1.0

log = logging.getLogger(__name__)


class CheckpointSchedule:
    """Looks every second, as long as this node is the controller."""

    def __init__(
        self,
        view: ClusterView,
        saver: Saver,
        due: Due,
        is_controller: Callable[[], bool],
        tell_error: Callable[[str], None],
    ) -> None:
        """Prepare; call it while the event loop runs.

        Args:
            view: The cluster as this node sees it.
            saver: Writes them.
            due: Follows what came since the last one.
            is_controller: Says whether this node is it.
            tell_error: Called with why the last one could not be written; with an empty string
                when it was, or when none is wanted here.
        """
        self._view = view
        self._saver = saver
        self._due = due
        self._is_controller = is_controller
        self._tell_error = tell_error
        self._loop = asyncio.get_running_loop()
        due.forget(self._loop.time())

    async def run(self) -> None:
        """Write checkpoints when they are due; never returns."""
        last_error = ""
        while True:
            await asyncio.sleep(LOOK_S)
            settings = self._view.snapshot().settings
            every = Every(settings.checkpoint_every_s, settings.checkpoint_every_pushes)
            if not self._is_controller() or not settings.checkpoint_url or every == Every():
                self._tell_error("")
                self._due.forget(self._loop.time())
                continue
            try:
                if not await self._due.is_due(every, self._loop.time()):
                    continue
                await self._due.begin(every, self._loop.time())
                await self._saver.save("auto", tags={"by": "schedule"}, progress={}, tell=_no_one)
                last_error = ""
            except Exception as error:  # noqa: BLE001
                # Whatever a storage raises: it must not end the node, for the next controller
                # would meet the same.
                if text_of(error) != last_error:
                    last_error = text_of(error)
                    log.error("no checkpoint could be written: %s", last_error)
                # It is not tried again at once: the next one is due in its time.
                self._due.forget(self._loop.time())
            self._tell_error(last_error)
            self._due.rest(self._loop.time())


def _no_one(_done: int, _total: int, _bytes: int) -> None:
    """No process looks on."""
