"""Checkpoints that are written before the jobs have gone on since a restore."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backstay.checkpoint.storage import CheckpointStorage
from backstay.consensus.records.checkpoints import RestorePlan
from backstay.consensus.records.jobs import JobNameRecord, JobSpecRecord, JobStateRecord
from backstay.consensus.records.keys import JobKeys
from backstay.consensus.records.packing import pack
from backstay.consensus.records.settings import ClusterSettings
from backstay.consensus.store import Put, Txn
from backstay.job_engine.progress import kept_job
from backstay.pserver.checkpoints.jobs import JOBS_PROGRESS, with_restored
from backstay.pserver.checkpoints.restoring import unused_restore
from tests.memory_store import MemoryBackend
from tests.unit.checkpoint_files import FULL, SECOND, THIRD, full_content, make_checkpoint
from tests.unit.controller_cluster import cluster, table
from tests.unit.memory_nodes import KEYS, run
from tests.unit.pserver.test_checkpoint_lock import Writer, two_writers

JOB = JobKeys("counting")
VERSION = 12


def state(steps: int, *, restore_version: int = 0, generation: int = 1) -> JobStateRecord:
    return JobStateRecord(
        "running",
        figures={"steps": steps},
        restore_version=restore_version,
        generation=generation,
    )


def entry(state: JobStateRecord, uid: str = "ab12") -> dict[str, Any]:
    spec = JobSpecRecord(uid, 1, "{}").to_json()
    return {"spec": spec, "state": state.to_json(), "done": {}, "dead_letters": {}, "damaged": {}}


def progress(
    job: JobStateRecord | None = None,
    *,
    restore_version: int = 0,
    generation: int = 1,
    uid: str = "ab12",
) -> dict[str, Any]:
    return {
        JOBS_PROGRESS: {
            "restore_version": restore_version,
            "generation": generation,
            "jobs": {} if job is None else {"counting": entry(job, uid)},
        }
    }


async def power_cut(writer: Writer, storage: CheckpointStorage, *, generation: int = 1) -> None:
    """All slots came back from ``FULL``; the job, which was at step 99, was not started since."""
    routing = table(cluster())
    plan = RestorePlan(
        storage.url, FULL, state="done", version=VERSION, generation=generation, lost=4
    )
    before = state(99, generation=routing.generation)
    spec = JobSpecRecord("ab12", 1, "{}")
    puts = (
        Put(KEYS.settings, ClusterSettings(checkpoint_url=storage.url).to_json()),
        Put(KEYS.routing, pack(routing.to_json())),
        Put(KEYS.restore, plan.to_json()),
        Put(JOB.name, JobNameRecord("ab12").to_json()),
        Put(JOB.spec, spec.to_json()),
        Put(JOB.state, before.to_json()),
    )
    await writer.store.transaction(Txn((), puts, ()))
    await writer.watch.read_all()


def test_the_checkpoint_that_was_restored_stays_for_who_comes_later(tmp_path: Path) -> None:
    storage = CheckpointStorage(tmp_path / "root")
    for each in (FULL, SECOND, THIRD):
        make_checkpoint(storage, tmp_path, each, full_content())

    async def scenario(backend: MemoryBackend) -> None:
        writer, _, _ = await two_writers(backend)
        await power_cut(writer, storage)
        await writer.saver._thin_out(storage, ClusterSettings(checkpoint_keep_last=1))
        assert storage.ids() == [FULL, THIRD]
        # The node that asks for it may remove it.
        await writer.saver.delete(storage, FULL)

    run(scenario)


@pytest.mark.parametrize("lost_since", [False, True])
def test_a_job_that_was_not_started_since_is_as_far_as_the_model(
    tmp_path: Path, lost_since: bool
) -> None:
    storage = CheckpointStorage(tmp_path / "root")
    made = make_checkpoint(storage, tmp_path, FULL, full_content())
    storage.delete(FULL)
    storage.create(FULL)
    generation = table(cluster()).generation
    kept = progress(state(40, generation=generation), generation=generation)
    for part in made.parts:
        (tmp_path / "root" / FULL / part.file).write_bytes(b"x" * part.bytes)
    storage.write_manifest(replace(made, progress=kept))

    async def scenario(backend: MemoryBackend) -> None:
        writer, _, _ = await two_writers(backend)
        await power_cut(writer, storage, generation=generation - lost_since)
        saved = kept_job((await writer.records.jobs())[JOBS_PROGRESS], "counting")
        assert saved is not None
        assert saved.is_current != lost_since
        assert saved.state.figures["steps"] == (99 if lost_since else 40)

    run(scenario)


def test_what_nobody_knows_stays_unknown_and_who_goes_on_is_left_alone() -> None:
    now: dict[str, Any] = {"restore_version": VERSION, "generation": 2}
    goes_on = progress(state(7, **now), **now)
    assert with_restored(goes_on, progress(state(5))) == goes_on
    behind = progress(state(99), **now)
    # It was begun after the checkpoint, or anew under its name.
    for there in ({}, progress(), progress(state(5), uid="cd34")):
        assert with_restored(behind, there)[JOBS_PROGRESS]["jobs"] == {}
    # It had not followed the restore before either.
    assert with_restored(behind, progress(state(5), restore_version=3)) == behind


def test_a_checkpoint_that_is_named_for_a_cluster_that_exists_is_told_of() -> None:
    used = RestorePlan("/ckpt", "ckpt-000003-full")
    assert unused_restore("no", None) == unused_restore("latest", None) == ""
    assert unused_restore(used.checkpoint, used) == ""
    for plan in (None, RestorePlan("/ckpt", "ckpt-000004-full")):
        told = unused_restore(used.checkpoint, plan)
        assert "nothing is restored from ckpt-000003-full" in told
        assert "pserverctl checkpoint restore ckpt-000003-full" in told
