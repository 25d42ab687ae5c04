"""What the fault suite's follower finds of rows that go back."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.chaos.follower import Floor

STARTED = "the export was started"


def see(floor: Floor, rows: list[float], chain: str = "base-1", reason: str = STARTED) -> None:
    floor.see(np.array(rows, np.float32), "inc-7", chain, reason)


def test_a_row_that_goes_back_is_told_also_by_the_next_process(tmp_path: Path) -> None:
    floor = Floor(tmp_path, 2)
    see(floor, [3, 4])
    see(floor, [3, 5])
    assert not (tmp_path / "wrong").exists()
    see(Floor(tmp_path, 2), [4, 4], chain="base-2")
    assert (tmp_path / "wrong").read_text() == "inc-7: rows [1] were [5.0], are [4.0]\n"


def test_rows_that_were_restored_may_go_back_once(tmp_path: Path) -> None:
    floor = Floor(tmp_path, 2)
    see(floor, [3, 4])
    restored = "rows were restored or lost: generation 2, before 1"
    see(floor, [2, 2], chain="base-2", reason=restored)
    assert not (tmp_path / "wrong").exists()
    see(floor, [2, 1], chain="base-2", reason=restored)
    assert (tmp_path / "wrong").exists()
