"""When a checkpoint is due."""

from __future__ import annotations

import numpy as np
import pytest

from backstay.consensus.settings_record import ClusterSettings
from backstay.pserver.checkpoints.schedule import Since, is_due
from backstay.pserver.checkpoints.writing import group_slots


@pytest.mark.parametrize(
    ("every_s", "every_pushes", "since", "due"),
    [
        (0, 0, Since(1e9, 10**12), False),
        (60, 0, Since(59.9, 10**12), False),
        (60, 0, Since(60.0, 0), True),
        (0, 1000, Since(1e9, 999), False),
        (0, 1000, Since(0.0, 1000), True),
        (60, 1000, Since(60.0, 1), True),
        (60, 1000, Since(1.0, 1000), True),
    ],
)
def test_a_checkpoint_is_due_by_time_or_by_pushes(
    every_s: int, every_pushes: int, since: Since, due: bool
) -> None:
    settings = ClusterSettings(
        checkpoint_url="/ckpt", checkpoint_every_s=every_s, checkpoint_every_pushes=every_pushes
    )
    assert is_due(settings, since) is due


def test_without_a_folder_none_is_due() -> None:
    assert not is_due(ClusterSettings(checkpoint_every_s=1), Since(10.0, 0))


def test_slots_are_grouped_in_their_order_up_to_a_limit() -> None:
    sizes = np.array([5, 5, 5, 100, 0, 5], dtype=np.uint64)
    assert group_slots([0, 1, 2, 3, 4, 5], sizes, 10, 9) == [[0, 1], [2], [3], [4, 5]]
    assert group_slots([0, 1, 2, 3, 4, 5], sizes, 10, 2) == [[0, 1], [2]]
    assert group_slots([], sizes, 10, 2) == []
