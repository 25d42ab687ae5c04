"""Models of Paddle and PyTorch that go on with the training of their job."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from backstay.errors import CheckpointNotFound
from backstay.job_spec import DataSpec, JobSpec, ModeSpec
from backstay.pserver.local_cluster import LocalCluster
from tests.integration.exporting import settled, start_export
from tests.integration.followed_training import ADS, USERS, train
from tests.integration.tiny_jobs import write_model

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")


@pytest.fixture(params=["torch", pytest.param("paddle", marks=pytest.mark.slow)])
def framework(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(request.param)
    return str(request.param)


def test_a_model_that_is_followed_predicts_as_the_servers_do(
    tmp_path: Path, framework: str
) -> None:
    spec = JobSpec(
        name="clicks",
        model=str(write_model(tmp_path, framework)),
        training=DataSpec(paths=("unread.csv",)),
        mode=ModeSpec(kind="sync"),
    )
    library = import_module(framework)
    inference = import_module(f"backstay.trainer.{framework}.inference")
    tensor = library.from_numpy if framework == "torch" else library.to_tensor
    with LocalCluster(settings={"slot_count": 8}) as cluster:
        expected = train(cluster, spec, framework)
        start_export(cluster, tmp_path / "served", tables=["clicks/*"])
        model = inference.load_for_inference(spec.model, tmp_path / "served", follow=True)
        with model.follower:
            for _ in range(3):
                settled(model.follower)
                answer = model(tensor(USERS), tensor(ADS)).detach().numpy()
                np.testing.assert_allclose(answer, expected, rtol=1e-6, atol=1e-7)
                before = expected
                expected = train(cluster, spec, framework)
                # Rows and dense parameters have moved, so a frozen model would be far off.
                assert np.abs(expected - before).max() > 1e-3


def test_what_is_no_export_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    inference = import_module("backstay.trainer.torch.inference")
    monkeypatch.setattr("backstay.serving.follower.WAIT_S", 0.1)
    with pytest.raises(CheckpointNotFound, match="no base to begin with"):
        inference.load_for_inference(
            str(write_model(tmp_path, "torch")), tmp_path / "nothing", follow=True
        )
