"""Checkpoints by time and by pushes: what is told when one cannot be written."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from backstay.consensus import ClusterMirror
from backstay.consensus.records.settings import ClusterSettings
from backstay.errors import CheckpointUnavailable
from backstay.pserver.checkpoints import schedule as schedule_module
from backstay.pserver.checkpoints.schedule import CheckpointSchedule
from backstay.pserver.client.inspection import _checkpoint_trouble
from backstay.pserver.metrics.figures import ControlFigures
from backstay.pserver.snapshots.due import Due
from backstay.pserver.snapshots.writing import group_slots
from tests.unit.memory_nodes import KEYS


def test_slots_are_grouped_in_their_order_up_to_a_limit() -> None:
    sizes = np.array([5, 5, 5, 100, 0, 5], dtype=np.uint64)
    assert group_slots([0, 1, 2, 3, 4, 5], sizes, 10, 9) == [[0, 1], [2], [3], [4, 5]]
    assert group_slots([0, 1, 2, 3, 4, 5], sizes, 10, 2) == [[0, 1], [2]]
    assert group_slots([], sizes, 10, 2) == []


class Disk:
    """Writes checkpoints, or does not: one outcome after the other, and then it stands still."""

    def __init__(self, *outcomes: Exception | None) -> None:
        self.outcomes = list(outcomes)
        self.is_over = asyncio.Event()

    async def save(self, *_: object, **__: object) -> None:
        if not self.outcomes:
            self.is_over.set()
            await asyncio.Event().wait()
        if (error := self.outcomes.pop(0)) is not None:
            raise error


def test_what_was_due_and_is_not_written_is_told_until_one_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    full = CheckpointUnavailable("/ckpt: No space left on device")
    # An error without a text is no "all is well".
    mute = CheckpointUnavailable()
    figures = ControlFigures()
    snapshot = replace(
        ClusterMirror(KEYS).snapshot(),
        settings=ClusterSettings(checkpoint_url="/ckpt", checkpoint_every_s=1),
    )
    told: list[str] = []

    def tell(why: str) -> None:
        told.append(why)
        figures.scheduled_checkpoints_fail(why)
        node = {"control": figures.to_object(snapshot, 0.0)}
        assert _checkpoint_trouble([{"control": None}, node]) == (why or None)

    class AlwaysDue(Due):
        async def is_due(self, *_: object) -> bool:
            return True

    async def scenario() -> None:
        pushes: Any = None
        always = AlwaysDue(pushes)
        view: Any = SimpleNamespace(snapshot=lambda: snapshot)
        saver: Any = Disk(full, full, mute, None)
        schedule = CheckpointSchedule(view, saver, always, lambda: True, tell)
        running = asyncio.ensure_future(schedule.run())
        await saver.is_over.wait()
        running.cancel()

    monkeypatch.setattr(schedule_module, "LOOK_S", 0.001)
    asyncio.run(asyncio.wait_for(scenario(), 10.0))
    assert told == [str(full), str(full), "CheckpointUnavailable", ""]
