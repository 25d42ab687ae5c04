"""What a follower tells of a folder that cannot be read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from backstay.checkpoint.storage import ExportFolder
from backstay.serving import Follower
from tests.waiting import wait_until

STORED = Path(__file__).parents[2] / "vectors" / "snapshots" / "export"


def test_an_error_without_a_text_is_told_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(STORED, tmp_path / "export")
    with Follower(tmp_path / "export", poll_s=0.01) as follower:
        assert follower.status.trouble == ""

        def broken(_folder: ExportFolder) -> list[str]:
            raise OSError

        monkeypatch.setattr(ExportFolder, "names", broken)
        wait_until(lambda: follower.status.trouble == "OSError", lambda: follower.status)
        monkeypatch.undo()
        wait_until(lambda: follower.status.trouble == "", lambda: follower.status)
