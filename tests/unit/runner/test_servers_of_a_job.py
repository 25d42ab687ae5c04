"""What servers of a job's own begin with and leave: the newest checkpoint, or a word about it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backstay._proto.v1 import job_pb2
from backstay.checkpoint.storage import CheckpointStorage
from backstay.checkpoint.trained import find_checkpoint
from backstay.config import ClientConfig
from backstay.errors import CheckpointDamaged, ConfigError, JobError
from backstay.job_spec import CheckpointSpec, DataSpec, JobSpec, ServersSpec
from backstay.runner import servers
from backstay.runner.last_status import StatusFile
from backstay.runner.outcome import what_is_not_kept
from tests.unit.checkpoint_files import FULL, SECOND, full_content, make_checkpoint


@pytest.fixture
def storage(tmp_path: Path) -> CheckpointStorage:
    """The checkpoints of job "tiny", of which the newest is ``SECOND``, as its status says."""
    log_dir = tmp_path / "tiny"
    storage = CheckpointStorage(log_dir / "checkpoints")
    for one in (FULL, SECOND):
        make_checkpoint(storage, tmp_path, one, full_content())
    (log_dir / "job.json").write_text(job(tmp_path).to_json())
    status = job_pb2.JobStatus(job="tiny", checkpoint=SECOND, checkpoint_url=storage.url)
    StatusFile(log_dir, [], are_own=True).ended(status, [], state="done", reason="")
    return storage


def job(tmp_path: Path, use: str = "training") -> JobSpec:
    data: Any = {"training" if use == "training" else "validation": DataSpec(paths=("a.csv",))}
    own: dict[str, Any] = {"servers": ServersSpec(local=1), "log_dir": str(tmp_path / "tiny")}
    if use != "training":
        # As ``load_job`` has it.
        checkpoints = CheckpointSpec(url=str(tmp_path / "tiny" / "checkpoints"))
        own |= {"log_dir": str(tmp_path / f"tiny-{use}"), "checkpoint": checkpoints}
    return JobSpec(name="tiny", model="m.py", **own, **data)


def begun_with(monkeypatch: pytest.MonkeyPatch, spec: JobSpec, *, fresh: bool = False) -> str:
    """What the servers are told to begin with; none is started."""
    told: list[Mapping[str, Any]] = []

    class Started(Exception):
        pass

    def cluster(count: int, *, settings: Mapping[str, Any], **_: Any) -> Any:
        told.append(settings)
        raise Started

    monkeypatch.setattr(servers, "LocalCluster", cluster)
    with (
        pytest.raises(Started),
        servers.job_servers(spec, ClientConfig(), stopped=lambda _: False, fresh=fresh),
    ):
        pass
    return str(told[0]["restore"])


def test_they_begin_with_the_newest(
    tmp_path: Path, storage: CheckpointStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert begun_with(monkeypatch, job(tmp_path)) == SECOND
    assert begun_with(monkeypatch, job(tmp_path), fresh=True) == "no"


def test_a_job_begun_anew_does_not_go_on_from_what_it_forgot(
    tmp_path: Path,
    storage: CheckpointStorage,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # The last status names a checkpoint in a folder that the servers were told of.
    storage.delete(SECOND)
    elsewhere = CheckpointStorage(tmp_path / "elsewhere")
    make_checkpoint(elsewhere, tmp_path, SECOND, full_content())
    status = job_pb2.JobStatus(job="tiny", checkpoint=SECOND, checkpoint_url=elsewhere.url)
    StatusFile(tmp_path / "tiny", [], are_own=True).ended(status, [], state="done", reason="")
    assert begun_with(monkeypatch, job(tmp_path)) == SECOND
    assert begun_with(monkeypatch, job(tmp_path), fresh=True) == "no"
    # It has not begun yet: a hook before it may have failed.
    assert begun_with(monkeypatch, job(tmp_path)) == SECOND
    servers.forget_checkpoints(job(tmp_path))
    # That run was killed before its first checkpoint.
    assert begun_with(monkeypatch, job(tmp_path)) == "no"
    assert f"begun anew after {FULL} and has written no checkpoint since" in caplog.text
    # To evaluate needs a model, and there is no other.
    assert begun_with(monkeypatch, job(tmp_path, "evaluation")) == FULL
    make_checkpoint(storage, tmp_path, SECOND, full_content())
    assert begun_with(monkeypatch, job(tmp_path)) == SECOND


def test_a_mark_that_cannot_be_read_is_not_taken_for_none(
    tmp_path: Path, storage: CheckpointStorage
) -> None:
    (tmp_path / "tiny" / servers.FRESH_MARK).mkdir()
    with (
        pytest.raises(ConfigError, match=r"log_dir: cannot read .*fresh-after: Is a directory"),
        servers.job_servers(job(tmp_path), ClientConfig(), stopped=lambda _: False),
    ):
        pass


def test_an_older_checkpoint_than_the_one_that_was_removed_is_forgotten_as_well(
    tmp_path: Path, storage: CheckpointStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers.forget_checkpoints(job(tmp_path))
    storage.delete(SECOND)
    assert begun_with(monkeypatch, job(tmp_path)) == "no"


def test_a_damaged_newest_is_named_and_no_older_one_is_taken_for_it(
    tmp_path: Path, storage: CheckpointStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny" / "checkpoints" / SECOND / "manifest.json").write_text("{")
    for use in ("training", "evaluation"):
        with pytest.raises(JobError, match=f"newest checkpoint in .*, {SECOND}, is damaged"):
            begun_with(monkeypatch, job(tmp_path, use))
    assert begun_with(monkeypatch, job(tmp_path), fresh=True) == "no"


def test_a_folder_with_the_checkpoints_of_another_job_is_refused(
    tmp_path: Path, storage: CheckpointStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    for owners, is_refused in ((["tiny"], False), (["other", "tiny"], False), (["other"], True)):
        storage.delete(SECOND)
        make_checkpoint(storage, tmp_path, SECOND, full_content(), jobs=owners)
        for fresh in (False, True):
            if is_refused:
                with pytest.raises(ConfigError, match=f"{SECOND}, is of job other, not of tiny"):
                    begun_with(monkeypatch, job(tmp_path), fresh=fresh)
            else:
                assert begun_with(monkeypatch, job(tmp_path), fresh=fresh) != FULL
        # Others may work with the model.
        assert begun_with(monkeypatch, job(tmp_path, "evaluation")) == SECOND


def test_checkpoints_that_are_gone_are_missed(
    tmp_path: Path,
    storage: CheckpointStorage,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    storage.delete(SECOND)
    with caplog.at_level(logging.WARNING):
        assert begun_with(monkeypatch, job(tmp_path)) == FULL
    assert f"{SECOND}, is gone from {storage.url}: {FULL} is the newest there" in caplog.text
    storage.delete(FULL)
    with pytest.raises(JobError, match=f"{SECOND}, was written to .*, and is not there any more"):
        begun_with(monkeypatch, job(tmp_path))
    assert begun_with(monkeypatch, job(tmp_path), fresh=True) == "no"


def test_an_evaluation_that_begins_anew_has_its_model(
    tmp_path: Path, storage: CheckpointStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluation = job(tmp_path, "evaluation")
    assert begun_with(monkeypatch, evaluation, fresh=True) == SECOND


def test_a_job_whose_model_goes_with_its_servers_says_so(tmp_path: Path) -> None:
    keeps = job(tmp_path)
    keeps_none = replace(keeps, checkpoint=CheckpointSpec(every="none"))
    assert "no model will be kept" in what_is_not_kept(keeps_none, are_own=True)
    with_output = replace(keeps_none, output="out")
    assert "no embedding on the servers will be kept" in what_is_not_kept(with_output, are_own=True)
    assert not what_is_not_kept(keeps, are_own=True)
    assert not what_is_not_kept(keeps_none, are_own=False)
    assert not what_is_not_kept(job(tmp_path, "evaluation"), are_own=True)


def test_what_is_served_is_no_older_one_in_the_place_of_a_damaged_one(
    tmp_path: Path, storage: CheckpointStorage
) -> None:
    assert find_checkpoint(storage.url)[1] == SECOND
    (tmp_path / "tiny" / "checkpoints" / SECOND / "manifest.json").write_text("{")
    with pytest.raises(CheckpointDamaged, match=f"newest checkpoint of .*, {SECOND}, is damaged"):
        find_checkpoint(storage.url)
    assert find_checkpoint(storage.url, FULL)[1] == FULL
    assert find_checkpoint(f"{storage.url}/{FULL}")[1] == FULL
