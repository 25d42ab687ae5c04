"""When a checkpoint is due."""

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
from backstay.pserver.checkpoints import schedule
from backstay.pserver.checkpoints.schedule import CheckpointSchedule, SinceCheckpoint, is_due
from backstay.pserver.checkpoints.writing import group_slots
from backstay.pserver.client.inspection import _checkpoint_trouble
from backstay.pserver.metrics.figures import ControlFigures
from tests.unit.memory_nodes import KEYS


@pytest.mark.parametrize(
    ("every_s", "every_pushes", "since", "due"),
    [
        (0, 0, SinceCheckpoint(1e9, 10**12), False),
        (60, 0, SinceCheckpoint(59.9, 10**12), False),
        (60, 0, SinceCheckpoint(60.0, 0), True),
        (0, 1000, SinceCheckpoint(1e9, 999), False),
        (0, 1000, SinceCheckpoint(0.0, 1000), True),
        (60, 1000, SinceCheckpoint(60.0, 1), True),
        (60, 1000, SinceCheckpoint(1.0, 1000), True),
    ],
)
def test_a_checkpoint_is_due_by_time_or_by_pushes(
    every_s: int, every_pushes: int, since: SinceCheckpoint, due: bool
) -> None:
    settings = ClusterSettings(
        checkpoint_url="/ckpt", checkpoint_every_s=every_s, checkpoint_every_pushes=every_pushes
    )
    assert is_due(settings, since) is due


def test_without_a_folder_none_is_due() -> None:
    assert not is_due(ClusterSettings(checkpoint_every_s=1), SinceCheckpoint(10.0, 0))


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

    async def scenario() -> None:
        view: Any = SimpleNamespace(snapshot=lambda: snapshot)
        saver: Any = Disk(full, full, None)
        calls: Any = None
        due = CheckpointSchedule(view, saver, calls, lambda: True, tell)
        running = asyncio.ensure_future(due.run())
        await saver.is_over.wait()
        running.cancel()

    monkeypatch.setattr(schedule, "LOOK_S", 0.001)
    monkeypatch.setattr(schedule, "is_due", lambda *_: True)
    asyncio.run(asyncio.wait_for(scenario(), 10.0))
    assert told == [str(full), str(full), ""]
