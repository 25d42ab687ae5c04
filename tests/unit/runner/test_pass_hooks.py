"""Commands at the end of each pass: when they run, and what they are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backstay._proto.v1 import job_pb2
from backstay.errors import ConfigError
from backstay.job_spec import CheckpointSpec, DataSpec, HooksSpec, JobSpec
from backstay.kubernetes.manifest import objects_of, schedule_of
from backstay.runner.pass_hooks import PassHooks


class Passes:
    def __init__(self, folder: Path, *commands: str, is_new: bool = True, **fields: Any) -> None:
        self.told = folder / "told"
        echo = 'echo "$BACKSTAY_JOB $BACKSTAY_JOB_PASS $BACKSTAY_JOB_CHECKPOINT" >> ' + str(
            self.told
        )
        spec = JobSpec(
            name="clicks",
            model="model.py",
            training=DataSpec(paths=("data.csv",)),
            hooks=HooksSpec(each_pass=(echo, *commands), timeout_s=60),
            **fields,
        )
        self.said: list[str] = []
        self.hooks = PassHooks(spec, {}, self.said.append, is_new=is_new)

    def look(self, over: int, saved: int = 0, checkpoint: str = "") -> None:
        status = job_pb2.JobStatus(passes_over=over, passes_saved=saved, checkpoint=checkpoint)
        self.hooks.look(status)
        self.hooks._wait()

    @property
    def lines(self) -> list[str]:
        return self.told.read_text().splitlines() if self.told.exists() else []


def test_they_run_once_a_pass_with_the_checkpoint_of_its_end(tmp_path: Path) -> None:
    one = Passes(tmp_path)
    for _ in range(2):
        one.look(0)
        one.look(1)
        assert one.lines == [], "its checkpoint is being written"
    for _ in range(2):
        one.look(1, 1, "ckpt-1")
    assert one.lines == ["clicks 1 ckpt-1"]
    one.look(2, 1, "ckpt-1")
    one.look(2, 2, "ckpt-2")
    assert one.lines[1:] == ["clicks 2 ckpt-2"]
    assert one.said == []


def test_a_checkpoint_that_is_not_written_holds_them_up_for_a_pass_only(tmp_path: Path) -> None:
    one = Passes(tmp_path)
    one.look(1)
    one.look(2)
    assert one.lines == ["clicks 1 "]


def test_without_checkpoints_they_run_at_once_and_for_the_newest_pass(tmp_path: Path) -> None:
    one = Passes(tmp_path, checkpoint=CheckpointSpec(every="none"))
    one.look(3)
    assert one.lines == ["clicks 3 "]
    one.hooks.end(job_pb2.JobStatus(passes_over=4))
    assert one.lines[1:] == ["clicks 4 "], "the last pass is over with the job"


def test_a_job_that_goes_on_had_its_old_ones_and_one_that_went_back_has_them_again(
    tmp_path: Path,
) -> None:
    one = Passes(tmp_path, is_new=False, checkpoint=CheckpointSpec(every="none"))
    one.look(5)
    assert one.lines == []
    one.look(6)
    one.look(4)
    one.look(5)
    assert one.lines == ["clicks 6 ", "clicks 5 "]


def test_one_that_fails_is_said(tmp_path: Path) -> None:
    one = Passes(tmp_path, "exit 3", checkpoint=CheckpointSpec(every="none"))
    one.look(1)
    assert one.said == ["pass 1: the hook 'exit 3' failed with exit code 3; the job goes on"]


def test_one_that_runs_is_ended_with_the_command(tmp_path: Path) -> None:
    one = Passes(tmp_path, "sleep 1000", checkpoint=CheckpointSpec(every="none"))
    one.hooks.look(job_pb2.JobStatus(passes_over=1))
    one.hooks.stop()
    assert one.said == ["pass 1: the hook 'sleep 1000' was stopped; the job goes on"]


@pytest.mark.parametrize("make", [objects_of, schedule_of])
def test_on_kubernetes_they_are_refused(make: Any) -> None:
    spec = JobSpec(
        name="clicks",
        model="model.py",
        training=DataSpec(paths=("data.csv",)),
        hooks=HooksSpec(each_pass=("true",)),
    )
    with pytest.raises(ConfigError, match=r"hooks\.each_pass: no command runs beside a job"):
        make(spec)
