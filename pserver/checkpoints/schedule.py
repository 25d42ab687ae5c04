"""Checkpoints by time and by pushes, asked for by the controller."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass

from backstay.consensus import ClusterView
from backstay.consensus.records.settings import ClusterSettings
from backstay.errors import BackstayError
from backstay.pserver.checkpoints.saving import Saver
from backstay.pserver.peers import PeerCalls

__all__ = ["CheckpointSchedule", "SinceCheckpoint", "is_due"]

LOOK_S = 1.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SinceCheckpoint:
    """What has happened since the last checkpoint, or since this node became the controller.

    Attributes:
        seconds: So long ago.
        pushes: Applied by all masters; a push counts once for each master that it touched.
    """

    seconds: float
    pushes: int


def is_due(settings: ClusterSettings, since: SinceCheckpoint) -> bool:
    """Return whether a checkpoint is to be written now. Pure."""
    if not settings.checkpoint_url:
        return False
    by_time = settings.checkpoint_every_s
    by_pushes = settings.checkpoint_every_pushes
    return (0 < by_time <= since.seconds) or (0 < by_pushes <= since.pushes)


class CheckpointSchedule:
    """Looks every second, as long as this node is the controller."""

    def __init__(
        self,
        view: ClusterView,
        saver: Saver,
        calls: PeerCalls,
        is_controller: Callable[[], bool],
        tell_trouble: Callable[[str], None],
    ) -> None:
        """Prepare; call it while the event loop runs.

        Args:
            view: The cluster as this node sees it.
            saver: Writes them.
            calls: Asks the masters how many pushes they have applied.
            is_controller: Says whether this node is it.
            tell_trouble: Called with why the last one could not be written; with an empty string
                when it was, or when none is wanted here.
        """
        self._view = view
        self._saver = saver
        self._calls = calls
        self._is_controller = is_controller
        self._tell_trouble = tell_trouble
        self._loop = asyncio.get_running_loop()
        self._last_s = self._loop.time()
        self._pushes_then: dict[int, int] | None = None

    async def run(self) -> None:
        """Write checkpoints when they are due; never returns."""
        said = ""
        while True:
            await asyncio.sleep(LOOK_S)
            settings = self._view.snapshot().settings
            wants = settings.checkpoint_every_s or settings.checkpoint_every_pushes
            if not self._is_controller() or not settings.checkpoint_url or not wants:
                self._tell_trouble("")
                self._begin_anew()
                continue
            try:
                if not is_due(settings, await self._since(settings)):
                    continue
                await self._saver.save("auto", tags={"by": "schedule"}, progress={}, tell=_no_one)
                said = ""
                self._tell_trouble(said)
            except Exception as error:  # noqa: BLE001
                # Whatever a storage raises: it must not end the node, for the next controller
                # would meet the same.
                self._tell_trouble(str(error))
                if str(error) != said:
                    said = str(error)
                    log.error("no checkpoint could be written: %s", said)
                # It is not tried again at once: the next one is due in its time.
            self._begin_anew()

    def _begin_anew(self) -> None:
        self._last_s = self._loop.time()
        self._pushes_then = None

    async def _since(self, settings: ClusterSettings) -> SinceCheckpoint:
        seconds = self._loop.time() - self._last_s
        if not settings.checkpoint_every_pushes:
            return SinceCheckpoint(seconds, 0)
        now = await self._pushes()
        if self._pushes_then is None:
            self._pushes_then = now
        then = self._pushes_then
        # A node that is new, or began anew, has counted from 0.
        pushes = sum(max(count - then.get(one, 0), 0) for one, count in now.items())
        return SinceCheckpoint(seconds, pushes)

    async def _pushes(self) -> dict[int, int]:
        """Return how many pushes each process has applied; a silent process counts later."""

        async def ask(address: str) -> int | None:
            try:
                answer = await self._calls.node_stats(address)
            except BackstayError:
                return None
            return int(json.loads(answer.data_plane_json)["pushes_applied"])

        members = list(self._view.snapshot().members.values())
        counts = await asyncio.gather(*(ask(one.control_address) for one in members))
        return {
            one.instance: count
            for one, count in zip(members, counts, strict=True)
            if count is not None
        }


def _no_one(_done: int, _total: int, _bytes: int) -> None:
    """No process looks on."""
