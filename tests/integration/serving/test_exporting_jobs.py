"""Jobs with ``exports:``: what is served in the end is what the job has trained."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from backstay.checkpoint.manifest import number_of
from backstay.checkpoint.reading import CheckpointReader
from backstay.checkpoint.storage import CheckpointStorage
from backstay.job_spec import DataSpec, ExportsSpec, JobSpec
from backstay.pserver.local_cluster import LocalCluster
from backstay.serving import Follower
from tests.integration.exporting import elements_in, exported
from tests.integration.job_processes import JobProcesses
from tests.integration.tiny_jobs import write_clicks, write_model


def test_a_job_exports_until_its_end_though_its_master_dies(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    served, saved = tmp_path / "served", tmp_path / "checkpoints"
    spec = JobSpec(
        name="clicks",
        model=str(write_model(tmp_path, "torch")),
        training=DataSpec(paths=(str(write_clicks(tmp_path / "train.csv", 2000)),)),
        epochs=3,
        records_per_task=500,
        audit=True,
        exports=ExportsSpec(url=str(served), every_s=0.2),
    )
    settings = {"slot_count": 16, "checkpoint_url": str(saved)}
    with (
        LocalCluster(2, settings=settings) as cluster,
        JobProcesses(cluster, spec, tmp_path) as running,
    ):
        running.start_worker("w1")
        running.until(lambda status: status.round >= 2 or status.state != "running")
        running.kill("master")
        running.start("master", "-m", "backstay.cli", "master", str(tmp_path / "job.json"))
        status = running.over()
        assert status.state == "done", status.reason
        # It ends after the last increment.
        assert running.code("master") == 0
        assert exported(cluster) == ()
    elements = elements_in(served)
    assert elements[-1].cluster == "local"
    assert [number_of(one.id) for one in elements] == sorted(number_of(one.id) for one in elements)
    with Follower(served) as follower:
        # The audit's table is no part of the model.
        names = sorted(one.name for one in (*follower.sparse, *follower.dense_tables))
        assert len(names) == 3
        assert not any("__" in name for name in names)
        storage = CheckpointStorage(str(saved))
        with CheckpointReader(storage, storage.ids()[-1]) as reader:
            for table in follower.sparse:
                rows = list(reader.rows(table.name))
                keys = np.concatenate([one.keys for one in rows])
                weights = np.concatenate([one.weights for one in rows])
                found = follower.table(table.name)
                assert len(found) == len(keys)
                assert np.array_equal(found.lookup(keys), weights)
            for table in follower.dense_tables:
                assert np.array_equal(follower.dense(table.name), reader.dense(table.name))
