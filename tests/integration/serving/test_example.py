"""``examples/serving``: the service predicts as the servers' rows do, and says how old they are."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from backstay.job_spec import DataSpec, JobSpec, ModeSpec
from backstay.pserver.local_cluster import LocalCluster
from tests.integration.exporting import start_export, stop_export
from tests.integration.followed_training import ADS, USERS, train
from tests.integration.tiny_jobs import write_model

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "serving"


def test_the_service_predicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("fastapi", reason="examples/serving needs FastAPI: pip install fastapi")
    from fastapi.testclient import TestClient

    monkeypatch.syspath_prepend(EXAMPLE)
    import app

    monkeypatch.delitem(sys.modules, "app")
    spec = JobSpec(
        name="clicks",
        model=str(write_model(tmp_path, "torch")),
        training=DataSpec(paths=("unread.csv",)),
        mode=ModeSpec(kind="sync"),
    )
    served = tmp_path / "served"
    with LocalCluster(settings={"slot_count": 8}) as cluster:
        expected = train(cluster, spec, "torch")
        start_export(cluster, served)
        # With the last increment, so that there is nothing to wait for.
        with TestClient(app.make_app(spec.model, str(served))) as http:
            stop_export(cluster)
            asked = {"features": {"users": USERS.tolist(), "ads": ADS.tolist()}}
            answer = http.post("/predict", json=asked).json()
            np.testing.assert_allclose(answer["predictions"], expected, rtol=1e-6, atol=1e-7)
            assert http.get("/health").json()["trouble"] == ""
            wrong = http.post("/predict", json={"features": {"users": [1]}})
            assert (wrong.status_code, "ads" in wrong.text) == (422, True)
    with TestClient(app.make_app(spec.model, str(served), max_age_s=0.0)) as http:
        assert http.get("/health").status_code == 503
