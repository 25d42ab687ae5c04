"""One process at a time runs a job with a log folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from backstay.cli.earlier_runs import sole_run
from backstay.errors import ConfigError, JobRefused


def test_a_second_run_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    folder = tmp_path / "backstay-jobs" / "tiny"
    for _ in range(2):
        with sole_run(folder, "tiny"):
            for _ in range(2):
                with (
                    pytest.raises(JobRefused, match=rf"by process {os.getpid()} on .*--name"),
                    sole_run(folder, "tiny"),
                ):
                    pass
            with sole_run(tmp_path / "other", "tiny"):
                pass


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="log_dir: cannot write to "), sole_run(folder, "a"):
            pass
