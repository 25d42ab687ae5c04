"""What servers of a job's own have begun with must be for this job."""

from __future__ import annotations

from typing import Any

import pytest

from backstay.checkpoint.remote import CheckpointInfo
from backstay.cluster.checkpoints import Restored
from backstay.errors import JobRefused
from backstay.job_spec import JobSpec
from backstay.master.saving import check_own

INFO = CheckpointInfo(
    id="ckpt-000007-3fa9c1",
    kind="full",
    base="",
    created="2026-11-23T00:00:00Z",
    cluster="c",
    slot_count=8,
    rows=1,
    bytes=1,
    files=1,
    tables=("t",),
    tags={},
)
RESTORED = Restored(INFO, {}, 1)


def job(**more: Any) -> JobSpec:
    document = {"name": "census", "model": "/m.py", "checkpoint": {"url": "/checkpoints"}, **more}
    return JobSpec.from_mapping(document)


def test_a_training_takes_nothing_or_its_own_checkpoint() -> None:
    spec = job(training="/a.csv")
    check_own(spec, None, None)
    check_own(spec, RESTORED, {"jobs": {"census": {}, "other": {}}})
    # Saved without any job: by an operator.
    check_own(spec, RESTORED, None)


def test_a_training_refuses_the_checkpoint_of_another_job() -> None:
    with pytest.raises(JobRefused, match=r"ckpt-000007-3fa9c1, is of job other, not of census"):
        check_own(job(training="/a.csv"), RESTORED, {"jobs": {"other": {}}})


def test_an_evaluation_needs_a_checkpoint_of_any_job() -> None:
    spec = job(validation="/a.csv", model_from="other")
    check_own(spec, RESTORED, {"jobs": {"other": {}}})
    with pytest.raises(JobRefused, match=r"no checkpoint of a trained model in /checkpoints"):
        check_own(spec, None, None)
